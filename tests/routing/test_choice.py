"""Gates by which a router chooses: equal to what Megatron-core's own selection picks from equal logits."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from mis_plugins.errors import ConfigError
from mis_plugins.routing.choice import compare, selection_scores


def router(score: str, pre_softmax: bool, topk: int, groups: int | None, chosen: int | None, bias: torch.Tensor | None):
    config = SimpleNamespace(
        moe_router_group_topk=chosen, moe_router_num_groups=groups, moe_router_pre_softmax=pre_softmax
    )
    return SimpleNamespace(score_function=score, expert_bias=bias, topk=topk, config=config)


@pytest.mark.parametrize(("experts", "topk", "groups", "chosen"), [(64, 6, None, None), (160, 6, 8, 3), (16, 4, 4, 1)])
@pytest.mark.parametrize("kind", ["softmax", "softmax before the selection", "sigmoid", "sigmoid with a bias"])
def test_the_routers_own_choice_differs_nowhere(
    kind: str, experts: int, topk: int, groups: int | None, chosen: int | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(2000, experts, generator=generator)
    score, pre_softmax = kind.split()[0], kind.endswith("selection")
    bias = 0.1 * torch.randn(experts, generator=generator) if kind.endswith("bias") else None
    _, used = topk_routing_with_score_function(
        logits, topk, use_pre_softmax=pre_softmax, num_groups=groups, group_topk=chosen, score_function=score,
        expert_bias=bias,
    )  # fmt: skip
    rows = used.nonzero()[:, 1].view(-1, topk)
    scores = selection_scores(router(score, pre_softmax, topk, groups, chosen, bias), logits)
    compared = compare(scores, rows, used, replays=True)
    assert not (compared.differs | compared.unequal | compared.broken).any()
    assert compared.margin.isfinite().all() and (compared.margin >= 0).all()


def test_a_score_function_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="--moe-router-score-function sqrtsoftplus: routes are compared for softmax"):
        selection_scores(router("sqrtsoftplus", False, 2, None, None, None), torch.zeros(1, 4))


def test_a_choice_that_is_balanced_over_a_batch_is_refused() -> None:
    balanced = router("softmax", False, 2, None, None, None)
    balanced.routing_type = "sinkhorn"
    with pytest.raises(
        ConfigError, match="--moe-router-load-balancing-type sinkhorn: sinkhorn chooses for a whole batch"
    ):
        selection_scores(balanced, torch.zeros(1, 4))
