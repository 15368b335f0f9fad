"""The loss hook with `mis.center`: a host's micro-batch, over context- and tensor-parallel ranks, against the oracle.

The embedded host scores: Megatron's cross entropy over shards of the vocabulary, sequences packed zigzag.
"""

import functools
import gc
import math
import random
import sys
import weakref
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import center_oracle
import pytest
import torch
from center_oracle import WEIGHTS, Position, largest_error
from launch import run_ranks
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from tolerances import normalized_rtol
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.nn.functional import all_reduce

import lab.host  # noqa: F401  (registers the embedded host)
from lab.host.adapter import HOST
from lab.host.train.batch import pack
from mis_plugins import mis
from mis_plugins.config.reading import from_mapping
from mis_plugins.correction.pipeline import correct
from mis_plugins.errors import ConfigError, InputError
from mis_plugins.hosts import head
from mis_plugins.loss.centering import kept_by_rules
from mis_plugins.packing.layout import whole
from mis_plugins.packing.ragged import Ranks

VOCABULARY, PROMPT, LENGTHS, TOP, TEMPERATURE = 16, 3, (5, 1, 7, 0, 4), 6, 0.8
LOWER, UPPER = 0.7, 1.4
HEAD = ("rollout_topk_token_ids", "rollout_topk_log_probs")
GATHERED_ROWS = 17  # of each of two ranks: the stream has 32, and its end is padded
OBJECTIVE = {"old": "behavior", "surrogate": "reinforce"}


class Batch:
    """Responses with the logits of the trainer and of the engine at each position; some tokens are masked.

    change: what becomes of the host's batch before it is handed over.
    """

    def __init__(self, seed: int, masked: float = 0.2, change: Callable[[dict[str, Any]], object] = len) -> None:
        self.change, draw = change, random.Random(seed)
        row = lambda scale: [draw.gauss(0, scale) for _ in range(VOCABULARY)]  # noqa: E731
        self.logits = [[row(1.2) for _ in range(n)] for n in LENGTHS]
        self.engine = [[[x + draw.gauss(0, 0.3) for x in one] for one in rows] for rows in self.logits]
        self.tokens = [[draw.randrange(VOCABULARY) for _ in rows] for rows in self.logits]
        self.mask = [[draw.random() >= masked for _ in rows] for rows in self.logits]
        self.advantages = [[draw.gauss(0, 1)] * len(rows) for rows in self.logits]

    def positions(self, sequence: int) -> list[Position]:
        found = []
        for logits, engine, token in zip(
            self.logits[sequence], self.engine[sequence], self.tokens[sequence], strict=True
        ):
            q = torch.tensor(engine, dtype=torch.float64).softmax(0).float().log().double().exp().tolist()
            head = sorted(range(VOCABULARY), key=lambda v: -q[v])[:TOP]
            found.append(Position(logits, q, token, head))
        return found

    def ratios(self) -> list[list[float]]:
        """p over q of each sampled token."""
        of = lambda one: float(torch.tensor(one.logits, dtype=torch.float64).softmax(0)[one.sampled])  # noqa: E731
        return [[of(one) / one.engine[one.sampled] for one in self.positions(i)] for i in range(len(LENGTHS))]

    def host(self) -> dict[str, Any]:
        """What a host hands to the loss, with two padded entries and a shuffled head."""
        every = [self.positions(i) for i in range(len(LENGTHS))]
        order = [5, 0, 3, 1, 4, 2]
        ids = [[[one.head[v] for v in order] + [-1, -1] for one in rows] for rows in every]
        heads = [[[one.engine[one.head[v]] for v in order] + [0.0, 0.0] for one in rows] for rows in every]
        shaped = lambda rows, dtype: torch.tensor(rows, dtype=dtype).reshape(len(rows), TOP + 2)  # noqa: E731
        sampled = [[math.log(one.engine[one.sampled]) for one in rows] for rows in every]
        made = {
            "unconcat_tokens": [torch.tensor([1] * PROMPT + row) for row in self.tokens],
            "total_lengths": [PROMPT + n for n in LENGTHS], "response_lengths": list(LENGTHS), "max_seq_lens": None,
            "loss_masks": [torch.tensor(row, dtype=torch.int32) for row in self.mask],
            "advantages": list(map(torch.tensor, self.advantages)),
            "rollout_log_probs": list(map(torch.tensor, sampled)),
            "rollout_topk_token_ids": [shaped(rows, torch.int32) for rows in ids],
            "rollout_topk_log_probs": [shaped(rows, torch.float32).log() for rows in heads],
        }  # fmt: skip
        self.change(made)
        return made

    def full_logits(self) -> Tensor:
        """Logits of every position of every sequence, [sum of totals, V], times the temperature."""
        idle = [[0.0] * VOCABULARY]
        rows = [row for one in self.logits for row in idle * (PROMPT - 1) + one + idle]
        return torch.tensor(rows) * TEMPERATURE


def args(**mis_keys: Any) -> Namespace:
    return Namespace(
        use_tis=False, qkv_format="thd", advantage_estimator="grpo", use_rollout_logprobs=True, eps_clip=0.2,
        eps_clip_high=0.2, eps_clip_c=None, use_unbiased_kl=False, use_kl_loss=False, use_opsm=False, entropy_coef=0.0,
        calculate_per_token_loss=False, custom_pg_loss_reducer_function_path=None, rollout_temperature=TEMPERATURE,
        true_on_policy=False, loss_type="custom_loss", use_rollout_routing_replay=False,
        custom_loss_function_path="mis_plugins.mis.policy_loss", allgather_cp=False, host_cuts_heads=False,
        mis={"center": {"top_k": TOP}, "objective": OBJECTIVE, "metrics": "none"} | mis_keys,
    )  # fmt: skip


weight = functools.partial(center_oracle.weight, low=LOWER, high=UPPER)
weigh_of = functools.partial(center_oracle.weigh_of, low=LOWER, high=UPPER)


def total(x: Tensor) -> Tensor:
    """A reducer whose results on several ranks add up."""
    return x.sum()


total.__module__ = "lab.host.train.loss"  # tells the hook which host runs


def run(batch: Batch, settings: Namespace, cp: int = 1, tp: int = 1) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss of this rank, the gradient of its logits placed among all, and what is logged."""
    host = batch.host()
    rank = mpu.get_context_parallel_rank() if cp > 1 else 0
    layout = pack(host["unconcat_tokens"], LENGTHS, rank, cp)
    starts = torch.tensor([0, *host["total_lengths"]]).cumsum(0)[:-1]
    stream = sum(host["total_lengths"])
    place = starts[layout.sequence] + layout.positions
    real = layout.positions < torch.tensor(host["total_lengths"])[layout.sequence]
    if settings.allgather_cp:
        place = torch.arange(GATHERED_ROWS) + rank * GATHERED_ROWS
        real = place < stream
    place = place.clamp(max=stream - 1)
    width = VOCABULARY // tp
    first = width * (mpu.get_tensor_model_parallel_rank() if tp > 1 else 0)
    full = batch.full_logits()
    logits = full[place][None, :, first : first + width].clone().requires_grad_()
    for name in ("advantages", "rollout_log_probs", *HEAD * settings.host_cuts_heads):
        joined = torch.cat(host[name])[layout.response_index]
        host[name] = list(joined.split(layout.local_lengths))
    loss, logged = mis.policy_loss(settings, host, logits, total)
    loss.backward()
    assert logits.grad is not None
    gradient = torch.zeros(len(full), VOCABULARY)
    gradient[place[real], first : first + width] = logits.grad[0, real]
    return loss.detach(), gradient, logged


def wanted(batch: Batch, bound: str | None, keep: Callable[[int, int], bool] = lambda i, t: True) -> Tensor:
    """The oracle's gradient of every position's logits."""
    found = torch.zeros(sum(PROMPT + n for n in LENGTHS), VOCABULARY, dtype=torch.float64)
    end = 0
    for i, length in enumerate(LENGTHS):
        end += PROMPT + length
        for t, one in enumerate(batch.positions(i)):
            if batch.mask[i][t] and keep(i, t):
                row = end - length - 1 + t
                found[row] = -batch.advantages[i][t] * center_oracle.gradient(one, weigh_of(bound)) / TEMPERATURE
    return found


def assert_the_oracles(
    batch: Batch, bound: str | None, keep: Callable[[int, int], bool] = lambda i, t: True, **mis_keys: Any
) -> dict[str, Tensor]:
    """The gradient with this bound is the oracle's over the tokens of `keep`; returns what is logged."""
    _, gradient, logged = run(batch, args(weight=weight(bound), **mis_keys))
    assert largest_error(gradient, wanted(batch, bound, keep)) < 1e-6
    return logged


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded host alone: torch's cross entropy for Megatron's, whose groups no forked rank may inherit."""
    plain = functools.partial(torch.nn.functional.cross_entropy, reduction="none")
    monkeypatch.setattr(tensor_parallel, "vocab_parallel_cross_entropy", plain)
    monkeypatch.setattr(mpu, "get_context_parallel_rank", lambda: 0)
    monkeypatch.setattr(mpu, "get_context_parallel_world_size", lambda: 1)


@pytest.mark.parametrize("bound", [None, *WEIGHTS])
def test_the_gradient_is_the_oracles(one_process: None, bound: str | None) -> None:
    assert_the_oracles(Batch(3), bound)


def test_packed_sequences_are_not_padded(one_process: None) -> None:
    """Rows of `thd` have the sequences' own lengths, whatever else the batch says."""
    assert_the_oracles(Batch(3, change=lambda host: host.update(max_seq_lens=[64] * len(LENGTHS))), None)


def test_heads_may_be_stacked_and_are_read_where_they_lie(one_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host may stack responses of one length, and leave torch's default device on one without numbers."""
    monkeypatch.setattr(sys.modules[__name__], "LENGTHS", (4, 4))
    stacked = Batch(3, change=lambda host: host.update({name: torch.stack(host[name]) for name in HEAD}))
    _, gradient, _ = run(stacked, args())
    assert largest_error(gradient, wanted(stacked, None)) < 1e-6
    head_of = head.head_of

    def under_meta(*given: Any) -> Any:
        with torch.device("meta"):
            return head_of(*given)

    monkeypatch.setattr(head, "head_of", under_meta)
    assert torch.equal(run(Batch(3), args())[1], gradient)


def test_without_a_temperature_nothing_centers(one_process: None) -> None:
    """The engine took the likeliest tokens: centering is refused, and its metrics are left out."""
    greedy, watching = args(), args(center=None, metrics="full")
    greedy.rollout_temperature = watching.rollout_temperature = 0
    with pytest.raises(ConfigError, match=r"^rollout_temperature: mis\.center .* leave mis\.center out"):
        run(Batch(3), greedy)
    assert not any(name.startswith("center_") for name in run(Batch(3), watching)[2])


@pytest.mark.parametrize("keys", [{}, {"metrics": "full"}, {"metrics": "full", "center": None}], ids=str)
def test_the_logits_of_a_step_are_freed_behind_it(
    one_process: None, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]
) -> None:
    held, hook = [], mis.policy_loss

    def as_of_a_model(settings: Namespace, host: dict[str, Any], leaf: Tensor, reduce: Callable[[Tensor], Tensor]):
        logits = leaf * 1
        held.append(weakref.ref(logits))
        return hook(settings, host, logits, reduce)

    monkeypatch.setattr(mis, "policy_loss", as_of_a_model)
    gc.disable()  # no step waits for it
    try:
        run(Batch(3), args(**keys))
        assert held[0]() is None
    finally:
        gc.enable()


def test_a_rule_over_routes_judges_beside_a_mask_bound() -> None:
    """What the bound alone drops keeps its term; what the rule drops loses it."""
    said = {"weight": weight("mask"), "reject": [{"statistic": "route", "upper": 1}], "objective": OBJECTIVE,
            "center": {"top_k": TOP}}  # fmt: skip
    proximal, behavior = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -2.0, -1.0])
    ragged = whole([3]).place(torch.ones(3, dtype=torch.bool), Ranks())
    routes = torch.tensor([0.0, 0.0, 2.0])
    correction = correct(proximal, behavior, ragged, from_mapping(said), routes=routes)
    assert correction.keep.tolist() == [True, False, False]
    assert kept_by_rules(correction).tolist() == [True, True, False]


def gathered_scores(given: Namespace, batch: dict[str, Any], logits: Tensor) -> tuple[list[Tensor], None]:
    """Log-probs of a host with --allgather-cp: scored from a piece of the stream, then handed on zigzag."""
    rank, cp = mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()
    starts = torch.tensor([0, *batch["total_lengths"]]).cumsum(0)[:-1]
    rows = torch.cat([start + PROMPT - 1 + torch.arange(n) for start, n in zip(starts, LENGTHS, strict=True)])
    here = torch.nonzero(rows // GATHERED_ROWS == rank)[:, 0]
    scored = logits[0, rows[here] - rank * GATHERED_ROWS].float() / given.rollout_temperature
    targets = torch.cat(batch["unconcat_tokens"])[rows[here] + 1]
    found = -tensor_parallel.vocab_parallel_cross_entropy(scored, targets)
    every = torch.zeros(len(rows)).index_copy(0, here, found) + 0 * logits.sum()
    group = mpu.get_context_parallel_group()
    assert isinstance(group, ProcessGroup)
    every = all_reduce(every, group=group)
    layout = pack(batch["unconcat_tokens"], LENGTHS, rank, cp)
    return list(every[layout.response_index].split(layout.local_lengths)), None


@pytest.mark.parametrize("layout", ["zigzag", "cut", "gathered"])
def test_ranks_add_up_to_the_oracle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Heads come whole, or cut to the rank's tokens; logits lie zigzag, or as pieces of the packed stream."""
    rule = {"statistic": "k2", "over": "mean", "upper": 0.08}
    batch, settings = Batch(5), args(weight=weight("truncate"), reject=[rule], metrics="full")
    alone = run_ranks(1, 1, lambda rank: run(batch, settings), tmp_path)[0]
    settings.host_cuts_heads, settings.allgather_cp = layout == "cut", layout == "gathered"
    if settings.allgather_cp:
        gathered = replace(HOST, scores=gathered_scores)
        monkeypatch.setattr(mis, "current", lambda *given: gathered)
    ranks = run_ranks(4, 2, lambda rank: run(batch, settings, 2, 2), tmp_path / "ranks", tensor_model_parallel_size=2)
    gradient = torch.stack([gradient for _, gradient, _ in ranks]).sum(0)
    assert largest_error(gradient, alone[1].double()) < 1e-6
    torch.testing.assert_close(sum(loss for loss, _, _ in ranks) / 2, alone[0], rtol=1e-6, atol=1e-6)
    for name in (name for name in alone[2] if name.startswith("center_")):
        among = sum(logged[name] for _, _, logged in ranks) / 2
        torch.testing.assert_close(among, alone[2][name], rtol=1e-5, atol=1e-6)


def test_a_rule_takes_the_term_along_and_a_mask_bound_does_not(one_process: None) -> None:
    batch = Batch(7)
    ratios = batch.ratios()
    kept = lambda i, t: 0.8 <= ratios[i][t] <= 1.2  # noqa: E731
    rule = {"over": "token", "lower": 0.8, "upper": 1.2}
    assert_the_oracles(batch, "mask", kept, reject=[rule])
    assert any(not kept(i, t) for i, n in enumerate(LENGTHS) for t in range(n) if batch.mask[i][t])


@pytest.mark.parametrize("bound", [None, "truncate", "mask"])
def test_m2po_takes_the_term_along(one_process: None, bound: str | None) -> None:
    """Tokens beyond M2PO's second moment lose their loss and its centering, whatever the weight's bound drops."""
    batch = Batch(7)
    squares = {
        (i, t): math.log(ratio) ** 2
        for i, row in enumerate(batch.ratios())
        for t, ratio in enumerate(row)
        if batch.mask[i][t]
    }
    smallest = sorted(squares, key=squares.__getitem__)
    half = smallest[: len(smallest) // 2]
    below = math.fsum(squares[place] for place in half) / len(half)
    above = math.fsum(squares[place] for place in smallest[: len(half) + 1]) / (len(half) + 1)
    assert_the_oracles(batch, bound, lambda i, t: (i, t) in half, m2_threshold=(below + above) / 2)


def test_a_mean_divides_all_three_alike(one_process: None) -> None:
    batch = Batch(9, masked=0.0)
    given = weight("truncate")
    assert given is not None
    _, plain, _ = run(batch, args(weight=given))
    _, divided, _ = run(batch, args(weight=given | {"normalize": {}}))
    weights = [min(ratio, UPPER) for row in batch.ratios() for ratio in row]
    torch.testing.assert_close(divided * (sum(weights) / len(weights)), plain, rtol=normalized_rtol(10.0), atol=1e-6)


def test_tokens_without_a_head_are_left_out_and_counted(one_process: None) -> None:
    batch = Batch(11, masked=0.0, change=lambda host: host["rollout_topk_log_probs"][2][3].fill_(-math.inf))
    logged = assert_the_oracles(batch, "truncate", lambda i, t: (i, t) != (2, 3), metrics="full")
    assert float(logged["center_missing"]) == 1
    assert float(logged["center_drift"]) > 0 and float(logged["center_target_mass"]) > 0


@pytest.mark.parametrize("stand_in", [math.nan, -9999.0, -1e9, math.inf])
@pytest.mark.parametrize("bound", [None, "truncate"])
def test_an_entry_of_the_head_without_a_log_prob_is_none(one_process: None, bound: str | None, stand_in: float) -> None:
    """An entry that the engine named without a log-prob counts as a padded one does."""

    def write(value: float, host: dict[str, Any]) -> None:
        host["rollout_topk_log_probs"][0][1, 2] = value
        host["rollout_topk_log_probs"][2][3] = value

    keys: dict[str, Any] = {"weight": weight(bound), "metrics": "full", "center": {"top_k": TOP}}
    (loss, gradient, logged), (_, wanted_gradient, wanted_log) = (
        run(Batch(3, change=functools.partial(write, value)), args(**keys)) for value in (stand_in, -math.inf)
    )
    assert loss.isfinite() and torch.equal(gradient, wanted_gradient)
    assert {name: float(value) for name, value in logged.items()} == {k: float(v) for k, v in wanted_log.items()}
    assert logged["center_missing"] > 0


def test_opsm_takes_the_term_along(one_process: None) -> None:
    """Sequences with negative advantages that the policy has left lose their loss and its centering."""
    batch = Batch(17)
    logs = [[math.log(ratio) for ratio in row] for row in batch.ratios()]
    masked = [[x for x, valid in zip(*pair, strict=True) if valid] for pair in zip(logs, batch.mask, strict=True)]
    left = [-sum(row) / max(len(row), 1) > 1e-9 for row in masked]
    kept = lambda i, t: not (left[i] and batch.advantages[i][t] < 0)  # noqa: E731
    assert_the_oracles(batch, "truncate", kept, opsm={"delta": 1e-9, "reference": "behavior"})
    assert not all(kept(i, t) for i, n in enumerate(LENGTHS) for t in range(n))


def test_what_rules_and_opsm_give_back_keeps_its_term(one_process: None) -> None:
    """A rule drops the sequences of ratios above 1 and OPSM all others, so that `on_all_rejected` gives back both."""
    batch = Batch(17)
    batch.advantages = [[-1.0] * n for n in LENGTHS]
    rule, opsm = {"over": "mean", "upper": 1.0}, {"delta": 0.0, "reference": "behavior"}
    keys = {"reject": [rule], "opsm": opsm}
    assert not run(batch, args(weight=None, **keys))[1].any()
    assert_the_oracles(batch, None, **keys, on_all_rejected="keep")


def test_a_rule_that_down_weighs_scales_the_term(one_process: None) -> None:
    batch = Batch(19)
    rule = {"over": "token", "upper": 1.1, "down_weigh": 0.25}
    _, gradient, _ = run(batch, args(weight=weight("truncate"), reject=[rule]))
    ratios, oracle = batch.ratios(), wanted(batch, "truncate")
    outside = wanted(batch, "truncate", lambda i, t: ratios[i][t] > 1.1)
    assert outside.any() and largest_error(gradient, oracle - 0.75 * outside) < 1e-6


def test_full_metrics_measure_the_drift_where_nothing_centers(one_process: None) -> None:
    """The numbers are those of a run that centers with the bound's weights, or with none, and the loss stays."""
    batch = Batch(23)
    centered = run(batch, args(weight=weight("truncate"), center={"top_k": TOP + 2}, metrics="full"))
    plain = run(batch, args(weight=weight("truncate"), center=None, metrics="full"))
    without = run(batch, args(weight=weight("truncate"), center=None, metrics="none"))
    assert torch.equal(plain[0], without[0]) and torch.equal(plain[1], without[1])
    assert not any(name.startswith("center_") for name in without[2])
    for name in ("drift", "target_mass", "behavior_mass", "tail_ratio", "tail_error", "missing"):
        torch.testing.assert_close(plain[2][f"center_{name}"], centered[2][f"center_{name}"])
    watched = run(batch, args(weight=None, objective=None, center=None, metrics="full"))
    unweighed = run(batch, args(weight=None, center={"top_k": TOP + 2}, metrics="full"))
    torch.testing.assert_close(watched[2]["center_drift"], unweighed[2]["center_drift"])


def numbers(one: Position, weigh: center_oracle.Weigh) -> dict[str, float]:
    """What is reported of a position, from the vocabulary's probabilities."""
    p = torch.tensor(one.logits, dtype=torch.float64).softmax(0).tolist()
    masses = [sum(side[v] for v in one.head) for side in (p, one.engine)]
    rho = (1 - masses[1]) / (1 - masses[0])
    tail = weigh(1 / rho)
    c = {v: one.engine[v] * weigh(p[v] / one.engine[v]) - rho * tail * p[v] for v in one.head}
    beyond = 0.0 if one.sampled in one.head else weigh(p[one.sampled] / one.engine[one.sampled])
    return {
        "drift": math.dist([c[v] for v in one.head], [sum(c.values()) * p[v] for v in one.head]),
        "target_mass": masses[0], "behavior_mass": masses[1], "tail_ratio": rho,
        "tail_error": beyond - (1 - masses[1]) * tail,
        "size": abs(sum(c[v] * math.log(p[v]) for v in one.head)),
    }  # fmt: skip


def test_metrics_are_those_of_the_oracle(one_process: None) -> None:
    batch = Batch(21)
    _, _, logged = run(batch, args(weight=weight("clip"), metrics="full"))
    rows = [(i, numbers(one, weigh_of("clip"))) for i in range(len(LENGTHS))
            for one, valid in zip(batch.positions(i), batch.mask[i], strict=True) if valid]  # fmt: skip
    for name in rows[0][1]:
        scale = [abs(batch.advantages[i][0]) if name == "size" else 1.0 for i, _ in rows]
        total = sum(factor * row[name] for factor, (_, row) in zip(scale, rows, strict=True))
        assert float(logged[f"center_{name}"]) == pytest.approx(total, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"center": {}}, "mis.center: needs mis.objective.old: behavior"),
        ({"center": {}, "objective": {"old": "behavior"}}, "mis.center: needs mis.objective.surrogate: reinforce"),
        ({"center": {}, "objective": OBJECTIVE, "weight": {"level": "sequence"}}, "mis.weight.level: sequence with"),
        ({"center": {"top_k": 0}, "objective": OBJECTIVE}, "mis.center.top_k: got 0"),
    ],
)
def test_other_configs_are_refused(mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_mapping(mapping)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.pop("rollout_topk_token_ids"), "rollout_topk_token_ids: none in this micro-batch"),
        (lambda x: x["rollout_topk_log_probs"].pop(), "rollout_topk_log_probs: 4 sequences, but"),
        (lambda x: x["rollout_topk_log_probs"].__setitem__(2, None), r"rollout_topk_log_probs\[2\]: None, but"),
        (lambda x: x["rollout_topk_token_ids"].__setitem__(0, torch.zeros(4, 8)), r"\[0\]: 4 positions, but"),
        (lambda x: x["rollout_topk_token_ids"].__setitem__(0, torch.zeros(5, 7)), "differs between sequences"),
    ],
)
def test_heads_that_do_not_fit_are_refused(one_process: None, change: Callable[..., Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(Batch(15, change=change), args())
