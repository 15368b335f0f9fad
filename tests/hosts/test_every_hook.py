"""Every hook, with numbers, on every version of a host that we know: the modules are made from the table of needs.

A response's tokens are 0, 1, 2, ...; the trainer's log-probs are those of its weights; the engine's lie `SHIFTS` beside
them, so that each ratio is known.
"""

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import oracle
import pytest
import rollout_process
import stand_in_hosts
import torch
from stand_in_hosts import LAYOUTS, VOCABULARY, Bodies, Layout, Output

from lab.in_host import cpu_trainer
from mis_plugins import mis
from mis_plugins.errors import ConfigError
from mis_plugins.hosts import routing
from mis_plugins.hosts.needs import HOOKS, NeedError
from mis_plugins.hosts.registry import current
from mis_plugins.hosts.versions import generate
from true_on_policy import hosts as bitwise
from true_on_policy.contract.cpu import Contract
from true_on_policy.hosts.watch import Comparison

SHIFTS = [[0.5, 0.0, 1.5], [-0.5, 0.25], [0.0, 0.0, 1.0, -1.0]]  # trainer minus engine, of three samples
UPPER = 2.0
TIS = {"use_tis": True, "custom_tis_function_path": "mis_plugins.mis.compute_mis_weights_with_cp"}
FSDP = {**TIS, "custom_tis_function_path": "mis_plugins.mis.compute_mis_weights_fsdp", "train_backend": "fsdp"}
LOSS = {"loss_type": "custom_loss", "custom_loss_function_path": "mis_plugins.mis.policy_loss", "use_tis": True}
COUNTED: dict[str, Any] = {"rollout_data_postprocess_path": "mis_plugins.mis.count_samples"}
SETTINGS = {
    "eps_clip": 0.2, "eps_clip_high": 0.2, "eps_clip_c": None, "use_tis": False, "get_mismatch_metrics": False,
    "qkv_format": "thd", "advantage_estimator": "grpo", "use_rollout_logprobs": False, "skip_actor_forward_only": False,
    "use_unbiased_kl": False, "use_kl_loss": False, "use_opsm": False, "entropy_coef": 0.0, "max_tokens_per_gpu": 64,
    "observe_training_entropy": False, "calculate_per_token_loss": False, "use_dynamic_batch_size": True,
    "custom_pg_loss_reducer_function_path": None, "loss_type": "policy_loss", "custom_loss_function_path": None,
    "custom_tis_function_path": None, "rollout_data_postprocess_path": None, "custom_megatron_init_path": None,
    "custom_megatron_before_train_step_hook_path": None, "custom_reward_post_process_path": None,
    "custom_config_path": None, "train_backend": "megatron",
}  # fmt: skip
MILES = [name for name, layout in LAYOUTS.items() if layout.package == "miles"]


@pytest.fixture(params=LAYOUTS)
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bodies:
    return stand_in_hosts.load(LAYOUTS[request.param], monkeypatch)


@pytest.fixture(autouse=True)
def fresh_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bitwise, "COMPARISON", Comparison())


def arguments(layout: Layout, **settings: Any) -> Any:
    config = {"weight": {"upper": UPPER}, **settings.pop("mis", {})}
    return layout.arguments(**{**SETTINGS, **layout.more, "mis": config, **settings})


def rollout() -> dict[str, Any]:
    """Three samples whose engine's log-probs lie SHIFTS beside the trainer's under version 1."""
    log_probs = torch.linspace(-1, 1, VOCABULARY).log_softmax(0)
    samples = [
        Namespace(
            tokens=[7, *range(len(shifts))],
            response_length=len(shifts),
            rollout_log_probs=(log_probs[: len(shifts)] - torch.tensor(shifts)).tolist(),
        )
        for shifts in SHIFTS
    ]
    return stand_in_hosts.data_of(samples)


def trained(host: Bodies, data: dict[str, Any] | None = None, rollout_id: int = 3, **settings: Any) -> list[Any]:
    """What the losses of one step of this host's trainer give, with these settings."""
    actor = stand_in_hosts.trainer(host)()
    args = arguments(host.layout, **settings)
    if hasattr(host.layout.needs, "init"):
        actor.init(args, "actor")
    else:
        host.init(actor, args, "actor")
    actor.leak = settings.get("leak", 0.0)
    return host.layout.needs.train_actor.of(actor)(rollout_id, rollout() if data is None else data)


def expected(divided_by: float = 1.0) -> list[float]:
    """The loss of each sample by hand: advantages of 1 and a ratio of 1 leave minus the mean weight."""
    weights = [torch.tensor(shifts).exp().clamp(max=UPPER) / divided_by for shifts in SHIFTS]
    return [-float(x.mean()) for x in weights]


def losses(outcomes: list[Any]) -> list[float]:
    return [float(loss) for loss, _ in outcomes]


def test_the_hook_of_fsdp_is_refused_on_megatron(host: Bodies) -> None:
    """On Megatron the hook of FSDP would take one rank for the whole job, and scale a loss that slime divides."""
    told = (
        "compute_mis_weights_fsdp: .* runs; give --custom-tis-function-path mis_plugins.mis.compute_mis_weights_with_cp"
    )
    with pytest.raises(ConfigError, match=told):
        trained(host, **{**FSDP, "train_backend": "megatron"})


RULE = {"over": "token", "statistic": "ratio", "upper": 4.0}


@pytest.mark.parametrize(("denominator", "divisors"), [("original", (3, 2, 4)), ("kept", (2, 2, 4))])
@pytest.mark.parametrize("hook", [TIS, LOSS], ids=["the TIS hook", "the loss hook"])
def test_what_a_denominator_means_where_the_host_divides_by_its_own_sums(
    host: Bodies, hook: dict[str, Any], denominator: str, divisors: tuple[int, ...]
) -> None:
    """A rule drops the third token of the first sample; the host divides by `rollout_mask_sums` of before the rule."""
    outcomes = trained(host, mis={"reject": [RULE], "denominator": denominator}, **hook)
    sums = [torch.tensor(shifts).exp().clamp(max=UPPER).sum() for shifts in (SHIFTS[0][:2], *SHIFTS[1:])]
    first, second, third = (-float(x) / n for x, n in zip(sums, divisors, strict=True))
    assert losses(outcomes) == pytest.approx([first + second, third], rel=1e-5)
    assert all(any(name.startswith("mis_") for name in told) for _, told in outcomes)


FSDP_CONFIGS: list[dict[str, Any]] = [
    {"weight": {"level": "token", "bound": "truncate", "upper": UPPER, "normalize": {}}},
    {"weight": {"level": "sequence", "bound": "clip", "lower": 0.8, "upper": UPPER}},
    {"weight": {"level": "token", "bound": "mask", "upper": UPPER}, "reject": [RULE], "denominator": "original"},
    {"weight": {"level": "token", "bound": "truncate", "upper": UPPER}, "reject": [RULE], "denominator": "kept"},
    {"weight": None, "reject": [RULE | {"over": "max"}]},
]


def by_the_oracle(config: dict[str, Any], samples: list[oracle.Sample]) -> float:
    """Loss of a micro-batch: minus each sample's sum of kept weights, over what `denominator` names."""
    right = oracle.correct(samples, config)
    by_kept = config.get("denominator") == "kept"
    rows = [
        (sum(w for w, k in zip(weights, kept, strict=True) if k), sum(kept) if by_kept else len(kept))
        for weights, kept in zip(right.weights, right.keep, strict=True)
    ]
    return -sum(total / max(count, 1) for total, count in rows)


@pytest.mark.parametrize("config", FSDP_CONFIGS)
@pytest.mark.parametrize(
    "hook",
    [FSDP, *(hook | {"train_backend": "torchtitan"} for hook in (TIS, LOSS))],
    ids=["FSDP", "torchtitan, TIS", "torchtitan, loss"],
)
@pytest.mark.parametrize("name", MILES)
def test_the_loss_without_megatron_is_corrected(
    name: str, hook: dict[str, Any], config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Miles's own loss divides a sample by the tokens that the returned mask keeps, where the batch has no sums."""
    host, data = stand_in_hosts.load(LAYOUTS[name], monkeypatch), rollout()
    samples = [
        oracle.Sample((row + torch.tensor(shifts)).tolist(), row.tolist(), [True] * len(shifts))
        for row, shifts in zip(data["rollout_log_probs"], SHIFTS, strict=True)
    ]
    outcomes = trained(host, data, mis=config, **hook)
    assert current(arguments(host.layout, **hook)).name == hook["train_backend"]
    right = [by_the_oracle(config, some) for some in (samples[:2], samples[2:])]
    assert losses(outcomes) == pytest.approx(right, rel=1e-5) and abs(right[0] + 2) > 1e-3
    assert all(any(name.startswith("mis_") for name in told) for _, told in outcomes)


@pytest.mark.parametrize("name", ["cur_log_probs", "current_log_probs"])
def test_log_probs_of_the_target_policy_leave_the_weight_as_it_is(host: Bodies, name: str) -> None:
    """The surrogate holds pi_theta / pi_old already: a weight of pi_theta / mu would make pi_theta^2 / (pi_old mu)."""
    data = rollout()
    lists = {key: data[key] for key in ("rollout_log_probs", "loss_masks", "total_lengths", "response_lengths")}
    train = [x + torch.tensor(s) for x, s in zip(data["rollout_log_probs"], SHIFTS, strict=True)]
    args, pg_loss = arguments(host.layout, **TIS), -torch.ones(9)
    given = {"pg_loss": pg_loss, "train_log_probs": train, **lists, name: [x + 1 for x in train]}
    found, _, _ = mis.compute_mis_weights_with_cp(args, **given)
    assert torch.allclose(-found, torch.tensor(sum(SHIFTS, [])).exp().clamp(max=UPPER))
    with pytest.raises(ConfigError, match=r"^mis\.weight\.reference: target .* pi_theta\^2 / \(pi_old mu\)"):
        mis.compute_mis_weights_with_cp(arguments(host.layout, mis={"weight": {"reference": "target"}}, **TIS), **given)


def test_a_mean_of_the_rollout_divides_the_weights(host: Bodies) -> None:
    config = {"weight": {"upper": UPPER, "normalize": {"scope": "rollout"}}}
    weights = torch.cat([torch.tensor(shifts).exp().clamp(max=UPPER) for shifts in SHIFTS])
    first, second, third = expected(float(weights.mean()))
    hook: dict[str, Any] = {"rollout_data_postprocess_path": "mis_plugins.mis.normalize_rollout"}
    assert losses(trained(host, mis=config, **TIS, **hook)) == pytest.approx([first + second, third], rel=1e-5)


def test_samples_that_do_not_train_leave_no_trace_in_the_mean(host: Bodies) -> None:
    """The second sample is masked, and the host divides by three: the metric is a mean over the other two."""
    data = rollout()
    data["loss_masks"][1].zero_()
    data["rollout_mask_sums"][1] = 0
    steps = trained(host, data, mis={"metrics": "full"}, **TIS, **COUNTED)
    logged = sum(told["mis_ratio_max_mb"] for _, told in steps) / 3
    assert float(logged) == pytest.approx((4.4817 + 2.7183) / 2, rel=1e-3)


@pytest.mark.parametrize("hook", [TIS, LOSS], ids=["the TIS hook", "the loss hook"])
def test_a_rejected_sample_leaves_the_baseline_of_its_group(host: Bodies, hook: dict[str, Any]) -> None:
    """The rule drops the first of three; the rewards of the others, 0 and -2, then lie 1 above and below their mean."""
    data = rollout() | {"rewards": [2.0, 0.0, -2.0], "sample_indices": [0, 1, 2]}
    data["advantages"] = [torch.full((len(x),), reward) for x, reward in zip(SHIFTS, data["rewards"], strict=True)]
    config = {"reject": [{"over": "mean", "upper": 1.2}], "group_baseline": "grpo"}
    group = {"n_samples_per_prompt": 3, "rewards_normalization": True, "grpo_std_normalization": False, **COUNTED}
    _, second, third = expected()
    assert losses(trained(host, data, mis=config, **hook, **group)) == pytest.approx([second, -third], rel=1e-5)


def test_a_second_pass_of_the_trainer_finds_what_depends_on_the_batch(host: Bodies) -> None:
    trained(host, mis={"resplit_every": 1}, leak=0.125, **TIS, **COUNTED)
    (told,) = host.logged
    assert [value for name, value in told.items() if name.endswith("_max")] == [0.125]


def test_a_step_is_reported_to_the_hosts_own_tracker(host: Bodies) -> None:
    hook: dict[str, Any] = {"custom_megatron_before_train_step_hook_path": "mis_plugins.mis.report_step"}
    for rollout_id in range(2):
        trained(host, rollout_id=rollout_id, mis={"metrics": "all"}, **TIS, **hook)
    (told,) = host.logged
    assert told["train/mis_step/tokens"] == 9


def test_the_comparison_wraps_the_hosts_own_loss(host: Bodies, tmp_path: Path) -> None:
    settings = {
        "custom_loss_function_path": "true_on_policy.hosts.policy_loss",
        "bitwise": {"on_difference": "warn", "folder": str(tmp_path)},
    }
    (first, told), (second, more) = trained(host, **{**LOSS, **TIS, **settings})
    assert losses([(first, told), (second, more)]) == pytest.approx([sum(expected()[:2]), expected()[2]], rel=1e-5)
    assert (float(told["true_on_policy_compared"]), float(more["true_on_policy_compared"])) == (5, 4)
    assert float(told["true_on_policy_different"]) + float(more["true_on_policy_different"]) == 6


def test_samples_and_reducers(host: Bodies) -> None:
    broken = Namespace(rollout_log_probs=[float("nan")], loss_mask=[1], response_length=1, remove_sample=False, index=0,
                       group_index=0, tokens=[7, 1], status=None)  # fmt: skip
    mis.drop_broken_samples(arguments(host.layout, **TIS), [[broken]])
    reduce = mis.kept_token_mean([4, 3], [3, 2], [torch.tensor([1, 0, 1]), torch.tensor([1, 1])])
    assert broken.remove_sample and float(reduce(torch.tensor([1.0, 9.0, 2.0, 3.0, 5.0]))) == 5.5


def test_routes_are_read_from_the_hosts_queues(host: Bodies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(routing.SWITCH, "1")
    monkeypatch.setenv(routing.STAGE, routing.FORWARD)
    rows = [torch.tensor([[0, 1]]), torch.tensor([[2, 3]])]
    router = Namespace(routing_replay=Namespace(top_indices_list=rows, forward_index=1))
    source = routing.source()
    assert source.replaying() and source.rows(router) is rows[1]


def test_the_formula_of_log_probs_is_replaced(host: Bodies, monkeypatch: pytest.MonkeyPatch) -> None:
    known = current(arguments(host.layout))
    formula = getattr(known.needs, "log_probs", None)
    if formula is None:
        with pytest.raises(cpu_trainer.ContractError, match="log-probs of vime have no agreed formula"):
            cpu_trainer.align(Contract(), arguments(host.layout))
        return
    owner, name = formula.owner()
    monkeypatch.setattr(cpu_trainer, "_align_megatron", lambda *given: None)
    before = getattr(owner, name)
    cpu_trainer.align(Contract(), arguments(host.layout, vocab_size=2))
    logits = torch.tensor([[1.0, 2.0, 5.0]])
    found = getattr(owner, name)(logits, torch.tensor([1]), None, with_entropy=False, log_prob_keep_mask=None)
    found = found[0] if "with_entropy" in formula.parameters else found
    assert getattr(owner, name) is not before and float(found) == pytest.approx(-0.31326, rel=1e-4)


# ------------------------------------------------------------------------------------------------ versions of tokens


def generated(host: Bodies, version: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A call of two tokens under one version."""
    answer = rollout_process.streamed([[-0.5, 1], [-0.25, 2]], [2], [version] * 2)
    monkeypatch.setattr(generate, "_stream", lambda url, payload, headers: answer)
    sample: Any = rollout_process.Sample()
    sample.kv_cache_namespace = "train:-:7"
    output = rollout_process.generated(arguments(host.layout, **rollout_process.ROUTER), sample)
    assert type(output) is Output
    return output.samples


@pytest.mark.parametrize("name", MILES)
@pytest.mark.usefixtures("numbering")
def test_versions_travel_from_the_engine_to_the_loss(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of version 1, trained on at version 3, and scored by version 2 in between."""
    host = stand_in_hosts.load(LAYOUTS[name], monkeypatch)
    rollout_process.alone_in_world(monkeypatch)
    settings: dict[str, Any] = {"custom_megatron_init_path": "mis_plugins.mis.carry_versions", **LOSS}
    args = arguments(host.layout, mis={"segment_wise": {}}, sglang_disable_overlap_schedule=True, **settings)
    actor = stand_in_hosts.trainer(host)()
    actor.init(args, "actor")
    early, late = (generated(host, 1, monkeypatch) for _ in range(2))
    assert early.payload["extra_key"] == ("train:-:7" if name != "August" else None)
    for version, sample in ((2, early), (3, late)):
        actor.version = version
        data = mis.convert_with_versions(args, [sample, *(generated(host, version, monkeypatch) for _ in range(2))])
        host.layout.needs.train_actor.of(actor)(version, data)
    log_probs = (2 * torch.linspace(-1, 1, VOCABULARY)).log_softmax(0)
    assert data["output_versions"][0].tolist() == [1, 1] and data["proximal_version"] == 3
    assert data["recomputed_log_probs"][0].tolist() == pytest.approx(log_probs[1:3].tolist())
    spans = [call.spans[0].version for call in late.weight_versions] if name != "August" else late.weight_versions
    assert spans == ["1"]


# ------------------------------------------------------------------------------------------------- what has moved


def test_a_need_that_no_address_answers_names_what_still_works(host: Bodies, monkeypatch: pytest.MonkeyPatch) -> None:
    need = host.layout.needs.scores
    for address in need.addresses:
        monkeypatch.delitem(sys.modules, address.module, raising=False)
    with pytest.raises(NeedError) as caught:
        trained(host, **LOSS)
    told = str(caught.value)
    assert told.startswith(f"{need.host} has moved or dropped ") and "which policy_loss needs" in told
    assert all(address.module in told for address in need.addresses) and "compute_mis_weights_with_cp" in told


def test_a_host_that_moved_its_tracking_is_not_taken_for_another(host: Bodies, monkeypatch: pytest.MonkeyPatch) -> None:
    for need in (host.layout.needs.tracking, getattr(host.layout.needs, "parallel", host.layout.needs.tracking)):
        for address in need.addresses:
            monkeypatch.delitem(sys.modules, address.module, raising=False)
    with pytest.raises(NeedError, match="has moved or dropped its tracker"):
        current(arguments(host.layout))


def test_every_hook_that_a_need_names_is_a_hook() -> None:
    for layout in LAYOUTS.values():
        for need in vars(layout.needs).values():
            assert set(need.hooks) <= {*HOOKS, "compute_mis_weights_fsdp"}
    assert all(hasattr(mis, hook) for hook in HOOKS if "." not in hook)
