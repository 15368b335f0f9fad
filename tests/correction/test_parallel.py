"""The same batch on 1, 2 and 4 ranks, over gloo and Megatron's own groups: masks exact, weights to rounding."""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import oracle
import pytest
import torch
import torch.distributed as dist
from batches import BOUNDS, LEVELS, Batch, host_args, make_batch, ratio_batch
from drive import Outcome, assert_matches_oracle, run, same_bytes
from launch import run_ranks, told
from megatron.core import parallel_state as mpu
from tolerances import DECISION, EPS

from lab.tallies import tally
from mis_plugins import mis

FORMATS = ("thd", "bshd")
ROW = 40  # padded length of a bshd row


@dataclass(frozen=True)
class Case:
    """One config on one batch a data-parallel rank."""

    config: dict
    batches: tuple[Batch, ...]
    qkv_format: str = "thd"
    recompute: bool = False

    @property
    def row(self) -> int | None:
        return ROW if self.qkv_format == "bshd" else None

    @property
    def scope(self) -> str | None:
        """Whose mean weight divides; None where no mean does."""
        return (self.config["weight"] or {}).get("normalize", {}).get("scope")

    def expected(self, dp_rank: int) -> oracle.Corrected:
        others = [b.samples for i, b in enumerate(self.batches) if i != dp_rank]
        shared = self.scope not in (None, "micro_batch")
        return oracle.correct(self.batches[dp_rank].samples, self.config, others if shared else ())


def random_batch(seed: int) -> Batch:
    """Long and short prompts, so that some ranks own none of a response; empty, single-token and dead sequences."""
    rng = random.Random(seed)
    rows, prompts = [], []
    for length, prompt in [(9, 3), (1, 30), (0, 5), (20, 1), (3, 20), (rng.randint(2, 12), rng.randint(1, 25)), (6, 8)]:
        behavior = [rng.uniform(-4.0, 0.0) for _ in range(length)]
        drift = [rng.choice([0.0, rng.gauss(0, 0.05), rng.gauss(0, 0.8)]) for _ in range(length)]
        mask = [int(rng.random() < 0.8) for _ in range(length)]
        proximal = [b + d for b, d in zip(behavior, drift, strict=True)]
        if length == 20 and seed % 3 == 0:
            behavior[rng.randrange(length)] = -9999.0  # stands in for a log-prob that the engine lacks
        rows.append((proximal, behavior, mask))
        prompts.append(prompt)
    rows[-1] = (*rows[-1][:2], [0] * 6)
    return replace(make_batch(rows), prompts=prompts)


def clear_batch(seed: int, config: dict) -> Batch:
    """The first batch from this seed on whose decisions all keep clear of their bounds."""
    candidates = (random_batch(seed + 1000 * i) for i in itertools.count())
    return next(b for b in candidates if oracle.margin(b.samples, config) > DECISION)


@cache
def make_cases(dp: int, scopes: tuple[str, ...]) -> list[Case]:
    """Level x bound x rejection x normalization, both layouts in turn, every fifth with the kept denominator."""
    rejects = [[], [{"over": "token", "lower": 0.6, "upper": 1.7}],
               [{"over": "mean", "lower": 0.8, "upper": 1.2}, {"over": "min", "lower": 0.2}],
               [{"over": "max", "upper": 4.0}, {"over": "token", "upper": 2.5}, {"over": "sum", "lower": 0.05}],
               [{"over": "token", "upper": 1.3, "down_weigh": 0.25}, {"over": "token", "lower": 0.4}],
               [{"statistic": "k3", "over": "mean", "upper": 0.3},
                {"over": "sum", "unit": "segment", "lower": 0.3},
                {"statistic": "abs_prob_diff", "over": "max", "unit": "segment", "upper": 0.6}]]  # fmt: skip
    cases = []
    points = itertools.product(LEVELS, BOUNDS, rejects)
    for i, (level, bound, reject) in enumerate(points):
        weight: dict = {"level": level, "bound": bound} | ({} if bound == "none" else {"upper": 1.4})
        over = "kept" if i % 2 and (reject or bound == "mask") else "valid"
        if i % 4:
            weight["normalize"] = {"scope": scopes[i % len(scopes)], "over": over}
        config = {"weight": weight, "reject": reject}
        if i % 5 == 0 and (reject or bound == "mask"):
            config["denominator"] = "kept"
        cases.append(Case(config, tuple(clear_batch(7 * i + d, config) for d in range(dp)), FORMATS[i % 2], i % 5 == 0))
    alone = [
        {"weight": None, "reject": [{"over": "min", "lower": 0.2}]},
        {"weight": None, "reject": [], "m2_threshold": 0.02},
        {"weight": {"level": "geometric", "bound": "truncate", "upper": 1.4}, "m2_threshold": 0.1,
         "reject": [{"over": "mean", "lower": 0.8, "upper": 1.2}], "aggregate": "kept", "denominator": "kept"},
    ]  # fmt: skip
    numbered = enumerate(alone, 9)
    cases += [Case(c, tuple(clear_batch(100 * i + d, c) for d in range(dp))) for i, c in numbered]
    if "data_parallel" in scopes:  # the last rank loses its micro-batch, and what it gets back enters the mean
        normalize = {"scope": "data_parallel", "over": "kept"}
        weight = {"level": "token", "bound": "truncate", "upper": 1.05, "normalize": normalize}
        lost: dict = {"weight": weight, "reject": [{"over": "token", "upper": 1.02}], "on_all_rejected": "keep"}
        rejected = replace(ratio_batch([[1.3, 1.2], [1.03]]), prompts=[3, 30])
        cases.append(Case(lost, (*(clear_batch(d, lost) for d in range(dp - 1)), rejected)))
    return cases


# ------------------------------------------------------------------------------------------------- on the ranks


def handed_state(cp: int, tp: int = 1) -> SimpleNamespace:
    """Miles's `parallel_state`, on groups of its own: Megatron is not set up, as its DP group may be wrong there."""
    grid = torch.arange(dist.get_world_size()).view(tp, -1, cp)

    def info(axis: int) -> SimpleNamespace:
        lines = grid.movedim(axis, -1).reshape(-1, grid.shape[axis]).tolist()
        made = [dist.new_group(line) for line in lines]
        group = next(one for one, line in zip(made, lines, strict=True) if dist.get_rank() in line)
        assert isinstance(group, dist.ProcessGroup)
        return SimpleNamespace(group=group, size=group.size(), rank=group.rank())

    return SimpleNamespace(tp=info(0), effective_dp=info(1), cp=info(2), is_ulysses_cp=False)


def host_kwargs(
    case: Case, batch: Batch, cp: int, cp_rank: int, state: SimpleNamespace | None
) -> tuple[dict, list[list[int]]]:
    local, owned = batch.shard(cp, cp_rank, case.row)
    kwargs = batch.hook_kwargs() | {"train_log_probs": local.proximal, "rollout_log_probs": local.behavior}
    full = batch.pg_loss().detach().split(batch.response_lengths)
    kwargs["pg_loss"] = torch.cat([x[i] for x, i in zip(full, owned, strict=True)]).requires_grad_()
    if state is not None:
        kwargs["parallel_state"] = state
    if state is not None or case.row:
        kwargs["max_seq_lens"] = None if case.row is None else [case.row] * len(owned)
    return kwargs, owned


def rollout_data(kwargs: dict) -> dict:
    """What the rollout-data hook sees of the same batch."""
    lists = {"log_probs": kwargs["train_log_probs"], "rollout_log_probs": kwargs["rollout_log_probs"]}
    names = ("loss_masks", "total_lengths", "response_lengths", "max_seq_lens")
    return lists | {name: kwargs[name] for name in names if name in kwargs}


def correct_on_rank(case: Case, cp: int, state: SimpleNamespace | None) -> dict:
    """The hook as the host of this case calls it; under activation recompute a second time, to the same bits."""
    rank = dist.get_rank()
    batch = case.batches[rank // cp]
    args = host_args(mis=case.config, qkv_format=case.qkv_format)
    kwargs, owned = host_kwargs(case, batch, cp, rank % cp, state)
    if case.scope == "rollout":
        mis.normalize_rollout(args, 0, rollout_data(kwargs))
    loss, masks, metrics = mis.compute_mis_weights_with_cp(args, **kwargs)
    if case.recompute:
        again, masks_again, _ = mis.compute_mis_weights_with_cp(args, **kwargs)
        assert same_bytes(loss, again) and all(map(same_bytes, masks, masks_again))
    (weights,) = torch.autograd.grad(loss.sum(), kwargs["pg_loss"])
    return {"owned": owned, "loss": loss.detach(), "weights": weights, "masks": [m.clone() for m in masks],
            "metrics": {name: value.clone() for name, value in metrics.items()}}  # fmt: skip


def whole(parts: list[dict], batch: Batch) -> Outcome:
    """Full responses again, from what the ranks of one context-parallel group own."""

    def join(values: list[torch.Tensor]) -> list[torch.Tensor]:
        full = [torch.full((n,), math.nan) for n in batch.response_lengths]
        for part, value in zip(parts, values, strict=True):
            pieces = value.float().split([len(i) for i in part["owned"]])
            for i, (indices, piece) in enumerate(zip(part["owned"], pieces, strict=True)):
                full[i][indices] = piece
        return full

    names = parts[0]["metrics"]
    assert all(part["metrics"].keys() == names.keys() for part in parts), "the key set differs between ranks"
    metrics = {name: join([part["metrics"][name] for part in parts]) for name in names}
    loss, weights = join([p["loss"] for p in parts]), join([p["weights"] for p in parts])
    return Outcome(torch.cat(loss), weights, parts[0]["masks"], metrics)


def check(cases: list[Case], results: list[list[dict]], cp: int, dp: int) -> None:
    for number, case in enumerate(cases):
        everything = [sample for batch in case.batches for sample in batch.samples]
        counted = everything if case.scope == "rollout" else None
        for d, batch in enumerate(case.batches[:dp]):
            parts = [results[d * cp + r][number] for r in range(cp)]
            for part in parts[1:]:
                assert all(map(same_bytes, part["masks"], parts[0]["masks"])), "CP ranks must hand on the same masks"
            assert_matches_oracle(whole(parts, batch), batch, case.expected(d), counted=counted)


# --------------------------------------------------------------------------------------------------------- tests


def test_context_parallel(tmp_path: Path):
    """slime's call: the groups are Megatron's. Every rank's part is what one rank computes."""
    cases = make_cases(1, ("micro_batch", "data_parallel", "rollout"))
    check(cases, run_ranks(4, 4, lambda rank: [correct_on_rank(case, 4, None) for case in cases], tmp_path), 4, 1)


@pytest.mark.parametrize("host", ["megatron's groups", "handed groups"])
def test_data_parallel_times_context_parallel(host: str, tmp_path: Path):
    """DP 2 x CP 2: a CP-replicated number is reduced over DP without CP. Handed groups are the ones used."""
    megatron = host == "megatron's groups"
    scopes = ("data_parallel", "rollout", "micro_batch") if megatron else ("data_parallel", "micro_batch")
    cases = make_cases(2, scopes)[:: 1 if megatron else 2]

    def work(rank: int) -> list[dict]:
        state = None if megatron else handed_state(2)
        return [correct_on_rank(case, 2, state) for case in cases]

    check(cases, run_ranks(4, 2, work, tmp_path, megatron=megatron), 2, 2)


def test_a_rank_without_a_single_token(tmp_path: Path):
    """Short responses after long prompts: some rank owns nothing at all and must still take part."""
    rows = [([-1.0, -0.5], [-1.2, -0.9], [1, 1]), ([-2.0], [-1.9], [1])]
    batch = make_batch(rows, prompt=30)
    owned = [sum(map(len, batch.shard(4, rank, None)[1])) for rank in range(4)]
    assert 0 in owned, "the batch must leave some rank empty"
    weight = {"level": "sequence", "bound": "clip", "upper": 1.3, "normalize": {"scope": "micro_batch"}}
    case = Case({"weight": weight, "reject": [{"over": "token", "upper": 2.0}]}, (batch,))
    check([case], run_ranks(4, 4, lambda rank: [correct_on_rank(case, 4, None)], tmp_path), 4, 1)


def test_garbage_under_the_mask_on_another_rank(tmp_path: Path):
    """A NaN that one rank owns, under the mask, changes not one bit on any."""
    config = {
        "weight": {"level": "sequence", "bound": "truncate", "upper": 1.5, "normalize": {"scope": "micro_batch"}},
        "reject": [],
    }
    clean = clear_batch(5, config)
    dirty = Batch([torch.where(m.bool(), x, math.nan) for x, m in zip(clean.proximal, clean.loss_masks, strict=True)],
                  clean.behavior, clean.loss_masks, clean.prompts)  # fmt: skip
    cases = [Case(config, (clean,)), Case(config, (dirty,))]
    for first, second in run_ranks(2, 2, lambda rank: [correct_on_rank(case, 2, None) for case in cases], tmp_path):
        assert same_bytes(first["weights"], second["weights"])
        assert all(map(same_bytes, first["masks"], second["masks"]))


def test_context_parallel_agrees_with_one_rank_to_the_last_bits(tmp_path: Path):
    """Sums over ranks are float64: what reaches float32 differs by its rounding at most."""
    case = Case({"weight": {"level": "sequence", "bound": "clip", "upper": 3.0}, "reject": []}, (random_batch(3),))
    alone = run(case.batches[0], case.config)
    results = run_ranks(2, 2, lambda rank: [correct_on_rank(case, 2, None)], tmp_path)
    outcome = whole([parts[0] for parts in results], case.batches[0])
    torch.testing.assert_close(torch.cat(outcome.weights), torch.cat(alone.weights), rtol=EPS, atol=0)


def test_only_the_loss_is_on_the_tape(tmp_path: Path):
    """mis.py pads what it gathers with zeros that require a gradient: 769 tensors saved for backward instead of 1."""
    case = Case({"weight": {"level": "sequence", "normalize": {}}, "reject": []}, (random_batch(4),))

    def work(rank: int) -> list[int]:
        kwargs, _ = host_kwargs(case, case.batches[0], 2, rank, None)
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            mis.compute_mis_weights_with_cp(host_args(mis=case.config), **kwargs)
        return [len(saved), max(x.numel() for x in saved) - kwargs["pg_loss"].numel()]

    for count, excess in run_ranks(2, 2, work, tmp_path):
        assert count <= 3 and excess <= 0, "the weights, the mask, the loss"


BUDGETS = [
    ({"weight": {"level": "token", "upper": 2.0}, "metrics": "none"}, 0),
    ({"weight": {"level": "token", "upper": 2.0}}, 1),
    ({"weight": {"level": "sequence", "upper": 2.0, "normalize": {}}}, 1),
    ({"weight": {"level": "sequence", "bound": "mask", "upper": 2.0}, "reject": [{"over": "min", "lower": 1e-4}]}, 1),
    ({"weight": {"level": "token", "bound": "mask", "upper": 2.0, "normalize": {}},
      "reject": [{"over": "token", "upper": 3.0}]}, 2),
    ({"weight": {"normalize": {"scope": "data_parallel", "over": "kept"}},
      "reject": [{"over": "token", "upper": 3.0}, {"over": "max", "upper": 9.0}]}, 3),
]  # fmt: skip


def test_collectives_do_not_grow_with_the_sequences(tmp_path: Path):
    """At most three a micro-batch, whatever N is; none for token weights without normalization and metrics."""

    def work(rank: int) -> list[list[int]]:
        counts = []
        for config, _ in BUDGETS:
            cases = [Case(config, (random_batch(1),) * 2), Case(config, (doubled(random_batch(1)),) * 2)]
            calls = [(host_args(mis=config), host_kwargs(c, c.batches[0], 2, rank % 2, None)[0]) for c in cases]
            for args, kwargs in calls:
                mis.compute_mis_weights_with_cp(args, **kwargs)  # the config digest is exchanged once, at first use
            tallies = [tally(lambda c=call: mis.compute_mis_weights_with_cp(c[0], **c[1])) for call in calls]
            counts.append([each.collectives.total() for each in tallies])
        return counts

    for counts in run_ranks(4, 2, work, tmp_path):
        for (config, budget), (few, many) in zip(BUDGETS, counts, strict=True):
            assert few == many <= budget, config


def doubled(batch: Batch) -> Batch:
    return batch.select([*range(len(batch.prompts))] * 2)


def tis_hook(args: SimpleNamespace, kwargs: dict) -> object:
    return mis.compute_mis_weights_with_cp(args, **kwargs)


def rollout_hook(args: SimpleNamespace, kwargs: dict) -> object:
    return mis.normalize_rollout(args, 0, rollout_data(kwargs))


PLAIN = {"weight": {"level": "sequence"}, "reject": []}
SEEN: dict[str, tuple[Callable[[SimpleNamespace, dict], object], list[dict], Callable[[dict], object], str]] = {
    # No rank enters a collective.
    "a wrong length list": (tis_hook, [PLAIN] * 2, lambda kwargs: kwargs["total_lengths"].pop(), "total_lengths"),
    # Another yaml on another node of a CP group, said at the first call.
    "other configs": (
        tis_hook, [PLAIN | {"metrics": size} for size in ("watch", "core")], len, "different mis configs",
    ),
    # Ratios of one sequence bounded in two ways have no mean, which is said before any is added up.
    "other configs of the rollout hook": (
        rollout_hook, [{"weight": {"upper": upper, "normalize": {"scope": "rollout"}}} for upper in (2.0, 3.0)], len,
        "different mis configs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SEEN)
def test_what_every_rank_can_see_raises_on_every_rank(what: str, tmp_path: Path):
    """No rank waits for the others."""
    hook, configs, change, message = SEEN[what]
    batch = random_batch(2)

    def work(rank: int) -> str:
        kwargs, _ = host_kwargs(Case(configs[rank], (batch,)), batch, 2, rank, None)
        change(kwargs)
        return told(lambda: hook(host_args(mis=configs[rank]), kwargs))

    assert all(message in said for said in run_ranks(2, 2, work, tmp_path, limit_s=20))


@pytest.mark.parametrize(("host", "odd"), [("megatron's groups", 0), ("handed groups", 3)])
def test_one_rank_of_the_grid_with_another_config(host: str, odd: int, tmp_path: Path):
    """TP 2 x CP 2. Each tensor-parallel rank makes a part of the gradient: by two configs it is that of no loss."""
    batch = random_batch(2)

    def work(rank: int) -> str:
        if host == "megatron's groups":
            mpu.initialize_model_parallel(tensor_model_parallel_size=2, context_parallel_size=2)
            state, cp_rank = None, mpu.get_context_parallel_rank()
        else:
            state = handed_state(2, tp=2)
            cp_rank = state.cp.rank
        config = {"weight": {"upper": 9.0 if rank == odd else 2.0}, "metrics": "none"}
        kwargs, _ = host_kwargs(Case(config, (batch,)), batch, 2, cp_rank, state)
        return told(lambda: mis.compute_mis_weights_with_cp(host_args(mis=config), **kwargs))

    answers = run_ranks(4, 2, work, tmp_path, limit_s=20, megatron=False)
    assert all("different mis configs" in message for message in answers)


def test_a_rank_local_fault_raises_before_its_first_collective(tmp_path: Path):
    """One rank holds a token too few: it says so, and does not wait for the other one."""
    batch = random_batch(2)

    def work(rank: int) -> str:
        kwargs, _ = host_kwargs(Case(PLAIN, (batch,)), batch, 2, rank, None)
        if rank == 1:
            return ""
        kwargs["rollout_log_probs"] = [kwargs["rollout_log_probs"][0][:-1], *kwargs["rollout_log_probs"][1:]]
        return told(lambda: tis_hook(host_args(mis=PLAIN), kwargs))

    assert "rollout_log_probs[0]" in run_ranks(2, 2, work, tmp_path)[0]


def test_the_oracles_layout_covers_each_token_once():
    """Zigzag written down in oracle.py, for both layouts: every response token has one owner."""
    for cp, total, response in itertools.product((1, 2, 4, 8), (2, 3, 9, 31, 40), (1, 2, 8, 30)):
        for row in (None, ROW):
            if response < total:
                owned = [oracle.zigzag(total, response, cp, rank, row) for rank in range(cp)]
                assert sorted(sum(owned, [])) == list(range(response))
