"""slime's form of top-p: behavior and trainer log-probs are both over the tokens that the engine sampled from.

slime is stood in for by a module of its name whose helper renormalizes as slime's does; lab/host_parity.py
`--hook loss` asks slime itself.
"""

import copy
import math
import random
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import loss_oracle
import oracle
import pytest
import stand_ins
import torch
from drive import spread
from loss_oracle import Response
from test_loss_hook import reducer
from tolerances import FINITE_STEP, finite_difference_atol, normalized_rtol
from torch import Tensor

from mis_plugins import mis

VOCABULARY, PROMPT, LENGTHS = 9, 2, (5, 1, 4)
KEYS = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets")
SETTINGS = {
    "eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": None, "use_tis": False, "advantage_estimator": "grpo",
    "use_rollout_logprobs": False, "use_unbiased_kl": False, "use_kl_loss": True, "kl_loss_type": "k3",
    "kl_loss_coef": 0.3, "use_opsm": False, "entropy_coef": 0.0, "calculate_per_token_loss": False,
    "custom_pg_loss_reducer_function_path": None, "qkv_format": "thd", "rollout_top_p": 0.8,
}  # fmt: skip
CONFIG = {
    "weight": {"level": "token", "bound": "truncate", "upper": 1.1},
    "reject": [{"statistic": "ratio", "over": "mean", "lower": 0.9, "upper": 1.1}],
}
Row = list[float]


def log_prob(logits: Row, token: int, kept: Sequence[int]) -> float:
    """The log-prob of a token over the kept set, of which the token is one."""
    return logits[token] - math.log(math.fsum(math.exp(logits[i]) for i in {*kept, token}))


class Sampled:
    """Sequences sampled from nuclei: a token a row, with the logits of three policies, and the engine's kept set."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.mask = [[draw.random() < 0.8 or t == 0 for t in range(n)] for n in LENGTHS]
        self.advantages = [[draw.choice([-1.0, 1.0]) * draw.uniform(0.5, 2)] * n for n in LENGTHS]
        self.target = [[[draw.gauss(0, 1) for _ in range(VOCABULARY)] for _ in range(n)] for n in LENGTHS]
        near = lambda rows: [[[x + draw.gauss(0, 0.2) for x in row] for row in one] for one in rows]  # noqa: E731
        self.old, self.engine, self.reference = near(self.target), near(self.target), near(self.target)
        self.kept = [[self._nucleus(row) for row in one] for one in self.engine]
        self.tokens = [[draw.choice(kept) for kept in one] for one in self.kept]

    def _nucleus(self, logits: Row) -> list[int]:
        order = sorted(range(VOCABULARY), key=lambda i: -logits[i])
        mass, total = 0.0, math.fsum(map(math.exp, logits))
        kept = []
        for i in order:
            if mass > SETTINGS["rollout_top_p"]:
                break
            kept.append(i)
            mass += math.exp(logits[i]) / total
        return kept

    def over_kept(self, policy: list[list[Row]]) -> list[Row]:
        rows = zip(policy, self.tokens, self.kept, strict=True)
        return [[log_prob(*given) for given in zip(*one, strict=True)] for one in rows]

    def batch(self) -> dict[str, Any]:
        lists = {"log_probs": self.old, "rollout_log_probs": self.engine, "ref_log_probs": self.reference}
        sizes = [[len(kept) for kept in one] for one in self.kept]
        return {
            "unconcat_tokens": [torch.tensor([0] * PROMPT + row) for row in self.tokens],
            "total_lengths": [PROMPT + n for n in LENGTHS], "response_lengths": list(LENGTHS),
            "loss_masks": [torch.tensor(row, dtype=torch.int32) for row in self.mask],
            "advantages": [doubles(row) for row in self.advantages], "max_seq_lens": None,
            **{name: [doubles(row) for row in self.over_kept(policy)] for name, policy in lists.items()},
            KEYS[0]: [torch.tensor(sum(one, []), dtype=torch.int32) for one in self.kept],
            KEYS[1]: [torch.tensor([sum(row[:i]) for i in range(len(row) + 1)]) for row in sizes],
        }  # fmt: skip

    def logits(self) -> Tensor:
        """[1, T, V], of which the row before a token scores it."""
        idle = [[0.0] * VOCABULARY]
        return doubles([row for one in self.target for row in idle * (PROMPT - 1) + one + idle])[None]


def doubles(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def asked(args: Namespace, batch: dict[str, Any]) -> dict[str, Any]:
    """What slime hands its helper beside the sequences: nothing unless top-p cuts."""
    names = ("top_p_token_ids", "top_p_token_offsets")
    return {} if args.rollout_top_p == 1.0 else {name: batch[key] for name, key in zip(names, KEYS, strict=True)}


def helper(
    logits: Tensor,
    *,
    unconcat_tokens: list[Tensor],
    response_lengths: list[int],
    top_p_token_ids: list[Tensor] | None = None,
    top_p_token_offsets: list[Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """slime's log-probs over each row's kept set and its token; without sets, over the whole vocabulary."""
    found, last = [], 0
    for i, (tokens, length) in enumerate(zip(unconcat_tokens, response_lengths, strict=True)):
        last += len(tokens)
        rows, chosen = logits[0, last - length - 1 : last - 1], tokens[-length:, None]
        if top_p_token_ids is not None and top_p_token_offsets is not None:
            sizes = top_p_token_offsets[i].diff()
            keep = torch.zeros_like(rows, dtype=torch.bool).scatter(1, chosen, True)
            keep[torch.repeat_interleave(sizes), top_p_token_ids[i].long()] = True
            rows = rows.masked_fill(~keep, -math.inf)
        found.append(rows.log_softmax(-1).gather(1, chosen)[:, 0])
    return torch.empty(0), {"log_probs": found, "entropy": [torch.zeros_like(x) for x in found]}


@pytest.fixture(autouse=True)
def slime(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = {"get_log_probs_and_entropy": helper, "get_rollout_top_p_logprob_kwargs": asked}
    modules = {"slime.observability.logging_utils": {}, "slime.backends.megatron_utils.loss": loss}
    stand_ins.load(modules, monkeypatch)


def ours(sampled: Sampled, **settings: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    logits, batch = sampled.logits().requires_grad_(), sampled.batch()
    args = Namespace(mis=CONFIG, **SETTINGS | settings)
    loss, metrics = mis.policy_loss(args, batch, logits, reducer(batch, "slime"))
    return loss, torch.autograd.grad(loss, logits)[0], metrics


class Expected:
    """The decoupled loss with the correction and a k3 term, every log-prob of it over the kept sets."""

    def __init__(self, sampled: Sampled, target: list[list[Row]]) -> None:
        old, engine, reference = map(sampled.over_kept, (sampled.old, sampled.engine, sampled.reference))
        self.samples = [oracle.Sample(*row) for row in zip(old, engine, sampled.mask, strict=True)]
        corrected = oracle.correct(self.samples, CONFIG)
        self.keep = corrected.keep
        factors = [[w * k for w, k in zip(*row, strict=True)] for row in zip(corrected.weights, self.keep, strict=True)]
        policies = sampled.over_kept(target), old, reference
        rows = zip(*policies, sampled.advantages, factors, sampled.mask, strict=True)
        self.responses = [Response(*row) for row in rows]

    @property
    def loss(self) -> float:
        surrogates = loss_oracle.policy_sums(self.responses, loss_oracle.Spec(), self.responses)
        kls = [
            math.fsum(SETTINGS["kl_loss_coef"] * loss_oracle.kl(x, t, "k3") for t in x.valid if keep[t])
            for x, keep in zip(self.responses, self.keep, strict=True)
        ]
        sums = zip(surrogates, kls, self.responses, strict=True)
        return math.fsum((surrogate + kl) / len(x.valid) for surrogate, kl, x in sums)

    @property
    def rounding(self) -> float:
        """The error of weights in float32."""
        return normalized_rtol(max(map(spread, self.samples))) * loss_oracle.magnitude(self.responses)


def slope(sampled: Sampled, sequence: int, t: int, token: int) -> float:
    """The derivative of the loss with respect to a logit, by a central difference."""
    ends = []
    for step in (FINITE_STEP, -FINITE_STEP):
        target = copy.deepcopy(sampled.target)
        target[sequence][t][token] += step
        ends.append(Expected(sampled, target).loss)
    return (ends[0] - ends[1]) / (2 * FINITE_STEP)


@pytest.mark.parametrize("seed", [0, 1, 3, 4, 5])  # in each the rule drops a part
def test_the_loss_is_that_of_the_distributions_sampled_from(seed: int):
    """And so is its gradient, which leaves the tokens outside a kept set alone."""
    sampled = Sampled(seed)
    loss, gradient, metrics = ours(sampled)
    expected = Expected(sampled, sampled.target)
    assert loss.item() == pytest.approx(expected.loss, abs=expected.rounding)
    atol = expected.rounding + finite_difference_atol(loss_oracle.magnitude(expected.responses))
    starts = [sum(LENGTHS[:i]) + PROMPT * (i + 1) - 1 for i in range(len(LENGTHS))]
    for i, t in ((i, t) for i, n in enumerate(LENGTHS) for t in range(n)):
        row = gradient[0, starts[i] + t]
        slopes = [slope(sampled, i, t, token) for token in range(VOCABULARY)]
        torch.testing.assert_close(row, doubles(slopes), rtol=0, atol=atol)
        assert all(row[token] == 0 for token in {*range(VOCABULARY)} - {*sampled.kept[i][t]})
    assert 0 < metrics["mis_kept_fraction"] < len(LENGTHS)


def test_log_probs_of_the_whole_vocabulary_would_be_another_loss():
    """What a host without kept sets scores: every ratio off by the mass that its row keeps."""
    sampled = Sampled(0)
    assert ours(sampled, rollout_top_p=1.0)[0].item() != pytest.approx(ours(sampled)[0].item(), rel=0.05)
