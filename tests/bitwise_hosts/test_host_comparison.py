"""Rollout and trainer log-probs, compared on the training path: what is equal, when it is read, what stops the run.

slime is stood in for by a module of its name, with Megatron's real groups. The embedded host runs as it is.
"""

import logging
import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import stand_ins
import torch
from batches import Batch, batches, make_batch
from commands import ran
from hypothesis import given
from hypothesis import strategies as st
from launch import run_ranks
from test_local_loop import records, run
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lab import tallies
from mis_plugins.errors import warn_once
from mis_plugins.shared.arrays import Safetensors
from true_on_policy import hosts
from true_on_policy.__main__ import main
from true_on_policy.diff.log_prob_record import LogProbRecord
from true_on_policy.errors import ContractError, DifferenceError, HostConfigError
from true_on_policy.hosts.micro_batch import MicroBatch
from true_on_policy.hosts.watch import Comparison, Difference, described

PADDED = 24  # the length of a row under `bshd`
SLIME_LOSS = "slime.backends.megatron_utils.loss"
RAISE = {"on_difference": "raise"}


def own_loss(args: Any, batch: Any, logits: Tensor, reduce: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """What stands for slime's own policy loss."""
    return 3 * logits.square().sum(), {"pg_loss": logits.detach().sum()}


@pytest.fixture(autouse=True)
def comparison(monkeypatch: pytest.MonkeyPatch) -> Comparison:
    """A process that has compared nothing yet, under a host."""
    stand_ins.load({SLIME_LOSS: {"policy_loss_function": own_loss}}, monkeypatch)
    fresh = Comparison()
    monkeypatch.setattr(hosts, "COMPARISON", fresh)
    return fresh


def reduce(x: Tensor) -> Tensor:
    raise AssertionError("the comparison asks the host to average nothing")


reduce.__module__ = "slime.backends.megatron_utils.cp_utils"


def example(lengths: tuple[int, ...] = (5, 1, 0, 7)) -> Batch:
    """Equal log-probs of both; every third token is no token of the loss, and no engine gave it a log-prob."""
    rows = []
    for i, n in enumerate(lengths):
        log_probs = [-0.1 * (t + 1) - 0.01 * i for t in range(n)]
        mask = [int(t % 3 != 2) for t in range(n)]
        rows.append((log_probs, [x if m else 0.0 for x, m in zip(log_probs, mask, strict=True)], mask))
    return make_batch(rows)


def handed(batch: Batch, **more: Any) -> dict[str, Any]:
    """As a host hands it to its loss."""
    tokens = [torch.arange(100 * i, 100 * i + n) for i, n in enumerate(batch.total_lengths)]
    return {
        "unconcat_tokens": tokens, "total_lengths": batch.total_lengths, "loss_masks": batch.loss_masks,
        "response_lengths": batch.response_lengths, "log_probs": batch.proximal, "max_seq_lens": None,
        "rollout_log_probs": batch.behavior,
    } | more  # fmt: skip


def flipped(x: Tensor, index: int, bit: int = 1) -> Tensor:
    """The same with one bit of one value turned over."""
    integers = {2: torch.int16, 4: torch.int32}[x.element_size()]
    turned = x.clone()
    turned.view(integers)[index] ^= bit
    return turned


def flip(batch: Batch, sequence: int, token: int) -> Batch:
    behavior = [flipped(x, token) if i == sequence else x for i, x in enumerate(batch.behavior)]
    return replace(batch, behavior=behavior)


def settings(folder: Path, **bitwise: Any) -> Namespace:
    return Namespace(bitwise={"folder": str(folder)} | bitwise, qkv_format="thd")


def loss(args: Namespace, given: dict[str, Any]) -> dict[str, float]:
    """One call as the host makes it; what it logs."""
    total, metrics = hosts.policy_loss(args, given, torch.ones(4, requires_grad=True), reduce)
    assert total.item() == 12.0 and metrics["pg_loss"] == 4.0
    return {name: float(value) for name, value in metrics.items()}


def counts(metrics: dict[str, float]) -> tuple[float, float]:
    return metrics["true_on_policy_compared"], metrics["true_on_policy_different"]


def steps(args: Namespace, *given: dict[str, Any]) -> None:
    """Steps of one micro-batch each, and the beginning of one more."""
    for step, one in enumerate(given):
        hosts.report_step(args, 7, step)
        loss(args, one)
    hosts.report_step(args, 8, 0)


# ------------------------------------------------------------------------------------------------------------ equality


def test_equal_log_probs(tmp_path: Path, comparison: Comparison, caplog: pytest.LogCaptureFixture):
    """Every valid token is compared; that all is equal is said once, with what was compared."""
    args, batch = settings(tmp_path, **RAISE), example()
    with caplog.at_level(logging.INFO, "true_on_policy"):
        steps(args, handed(batch), handed(batch))
    valid = int(batch.flat_mask.sum())
    assert (comparison.totals.compared, comparison.totals.different) == (2 * valid, 0)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(
        f"rollout 7, step 0, rank 0: {valid} log-probs, all bitwise equal (the engine's log-probs"
    )
    assert not list(tmp_path.iterdir())


VALID = [(i, t) for i, mask in enumerate(example().loss_masks) for t, m in enumerate(mask.tolist()) if m]


@pytest.mark.parametrize(("sequence", "token"), VALID)
def test_one_flipped_bit_is_found_at_the_next_step(
    sequence: int, token: int, tmp_path: Path, comparison: Comparison, caplog: pytest.LogCaptureFixture
):
    args, broken = settings(tmp_path), flip(example(), sequence, token)
    hosts.report_step(args, 7, 0)
    assert counts(loss(args, handed(example()))) == (len(VALID), 0)
    assert counts(loss(args, handed(broken))) == (len(VALID), 1)
    assert comparison.totals.different == 0 and not caplog.records  # nobody has looked yet
    hosts.report_step(args, 7, 1)
    assert (comparison.totals.different, comparison.totals.ulps) == (1, {"1": 1})
    said = " ".join(record.getMessage() for record in caplog.records)
    assert f"rollout 7, step 0, rank 0: 1 of {2 * len(VALID)} log-probs differ; ulps: 1: 1" in said
    place = f"micro-batch 1, sequence {sequence}, response token {token}"
    value = broken.behavior[sequence][token]
    assert f"first in {place}: engine {value:.9g} (0x" in said and ", 1 ulp apart" in said


PAIRS = [
    (0.0, -0.0, {"0": 1}),
    (-1.0, math.nextafter(-1.0, 0.0), {}),  # the same float32
    (-1.0, -1.0 + 2**-22, {"3..4": 1}),
    (-1.0, math.nan, {"NaN": 1}),
    *((number, number, {"NaN": 1}) for number in (math.nan, -math.inf, -9999.0, 1.0)),  # neither side has a log-prob
]


@pytest.mark.parametrize(("engine", "trainer", "ulps"), PAIRS)
def test_bits_decide(engine: float, trainer: float, ulps: dict, tmp_path: Path, comparison: Comparison):
    steps(settings(tmp_path), handed(make_batch([([trainer], [engine], [1])])))
    assert (comparison.totals.compared, comparison.totals.different) == (1, len(ulps))
    assert dict(comparison.totals.ulps) == ulps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_compared_as_it_stands(dtype: torch.dtype, tmp_path: Path, comparison: Comparison):
    """As Miles hands it over in true-on-policy mode; a rank without a token has a dtype of its own."""
    half = [x.to(dtype) for x in example().proximal]
    given = handed(replace(example(), proximal=half, behavior=[flipped(half[0], 1), *half[1:]]))
    given["log_probs"] = [x if x.numel() else torch.zeros(0) for x in half]
    steps(settings(tmp_path), given)
    assert dict(comparison.totals.ulps) == {"1": 1}


def test_log_probs_of_other_dtypes_have_no_bits_in_common(tmp_path: Path):
    half = [x.to(torch.bfloat16) for x in example().behavior]
    with pytest.raises(ContractError, match="torch.bfloat16 and log_probs torch.float32.*--true-on-policy-mode"):
        loss(settings(tmp_path), handed(example(), rollout_log_probs=half))


def test_lists_that_do_not_fit(tmp_path: Path):
    short = [x[:-1] for x in example().behavior]
    with pytest.raises(ContractError, match=r"rollout_log_probs: \[4, 0, 0, 6\] tokens .* \[5, 1, 0, 7\]"):
        loss(settings(tmp_path), handed(example(), rollout_log_probs=short))


# -------------------------------------------------------------------------------------------------- ordinary days


@pytest.mark.parametrize("name", ["rollout_log_probs", "log_probs"])
@pytest.mark.parametrize("given", [None, [], [None] * 4])
def test_without_log_probs_nothing_is_compared_and_that_is_said_once(
    name: str, given: Any, tmp_path: Path, comparison: Comparison, caplog: pytest.LogCaptureFixture
):
    args = settings(tmp_path, **RAISE)
    for step in range(2):
        hosts.report_step(args, 0, step)
        assert counts(loss(args, handed(example(), **{name: given}))) == (0, 0)
    hosts.report_step(args, 0, 2)
    assert [record.getMessage()[:60] for record in caplog.records] == [
        "rollout 0, step 0, rank 0: 4 sequences without rollout_log_p"
    ]
    assert (comparison.totals.compared, comparison.totals.without) == (0, 8)
    comparison.at_exit()
    assert caplog.messages[-1].endswith("0 of 0 log-probs differ; sequences without the log-probs of one side: 8")


def test_a_sequence_without_log_probs_leaves_the_others_alone(
    tmp_path: Path, comparison: Comparison, caplog: pytest.LogCaptureFixture
):
    broken = flip(example(), 3, 4)
    args = settings(tmp_path)
    hosts.report_step(args, 0, 0)
    found = loss(args, handed(broken, rollout_log_probs=[None, *broken.behavior[1:]]))
    hosts.report_step(args, 0, 1)
    assert counts(found) == (len([one for one in VALID if one[0] != 0]), 1)
    assert comparison.totals.without == 1
    folder = tmp_path / "rollout-0-step-0-rank-0"
    tokens = Safetensors(folder / "sample.safetensors").tensor("tokens")
    assert tokens.tolist() == list(range(300, 310))
    where = LogProbRecord.load(folder / "engine.safetensors").metadata["where"]
    assert where.endswith("micro-batch 0, sequence 3, response token 4")
    comparison.at_exit()
    assert caplog.messages[-1].startswith("rank 0, the whole run: 1 of ")
    assert caplog.messages[-1].endswith("; sequences without the log-probs of one side: 1")


@pytest.mark.parametrize(("loss_type", "times"), [("custom_loss", 0), ("policy_loss", 1)])
def test_a_step_hook_beside_a_loss_that_the_host_does_not_call_says_so_once(
    loss_type: str, times: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    args = settings(tmp_path)
    args.loss_type = loss_type
    warn_once.cache_clear()
    for step in range(2):
        hosts.report_step(args, 0, step)
    assert sum("log-probs are not compared: no --loss-type custom_loss" in said for said in caplog.messages) == times


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_no_token(lengths: tuple[int, ...], tmp_path: Path, comparison: Comparison, caplog: pytest.LogCaptureFixture):
    """A run that has compared nothing at its end is warned of."""
    batch = example(lengths) if lengths else Batch([], [], [], [])
    steps(settings(tmp_path, **RAISE), handed(batch))
    assert comparison.totals.compared == 0 and not caplog.records
    comparison.at_exit()
    assert all("0 of 0 log-probs differ" in record.getMessage() for record in caplog.records)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * bool(lengths)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recompute_inside_a_backward_adds_nothing(reentrant: bool, tmp_path: Path, comparison: Comparison):
    args, calls = settings(tmp_path), []

    def called(logits: Tensor) -> Tensor:
        calls.append(torch._C._current_graph_task_id())
        return hosts.policy_loss(args, handed(flip(example(), 0, 0)), logits, reduce)[0]

    hosts.report_step(args, 0, 0)
    checkpoint(called, torch.ones(4, requires_grad=True), use_reentrant=reentrant).backward()
    hosts.report_step(args, 0, 1)
    assert calls[0] == -1 < calls[1] and comparison.totals.different == 1


# Signed zeros, infinities, NaNs of several payloads and signs, neighbours; engines agree in most tokens.
INFINITY = 0x7F800000  # its bits and those above, of NaN, are no log-prob's
BITS = (0, -(2**31), INFINITY, 0x7FC00000, 0x7FC00001, -0x400000, -0x40800000, -0x407FFFFF)


@st.composite
def odd_batches(draw: Callable) -> tuple[Batch, list[list[bool]]]:
    """Ragged sequences, some empty, masked throughout or by turns; and which side gave log-probs of each."""
    batch = draw(batches(max_length=9))
    either = st.sampled_from(BITS)
    sides: tuple[list[Tensor], list[Tensor]] = [], []
    for n in batch.response_lengths:
        engine = draw(st.lists(either, min_size=n, max_size=n))
        trainer = [draw(st.sampled_from((bits, bits, draw(either)))) for bits in engine]
        for side, bits in zip(sides, (engine, trainer), strict=True):
            side.append(torch.tensor(bits, dtype=torch.int32).view(torch.float32))
    both = st.lists(st.sampled_from((True, True, True, False)), min_size=2, max_size=2)
    there = [draw(both) for _ in batch.response_lengths]
    return replace(batch, behavior=sides[0], proximal=sides[1]), there


def lacking(log_probs: list[Tensor], there: list[list[bool]], side: int) -> list[Tensor | None]:
    return [x if sides[side] else None for x, sides in zip(log_probs, there, strict=True)]


@given(odd_batches(), st.sampled_from([1, 2, 4]), st.sampled_from([None, PADDED]))
def test_odd_batches_are_counted_token_by_token(odd: Any, cp: int, padded: int | None):
    """On all ranks of context parallelism together, and the first difference of each where it really is."""
    whole, there = odd
    expected = {
        (i, t): int(a) != int(b) or (int(a) & 0x7FFFFFFF) >= INFINITY
        for i, (x, y, mask, sides) in enumerate(
            zip(whole.behavior, whole.proximal, whole.loss_masks, there, strict=True)
        )
        for t, (a, b) in enumerate(zip(x.view(torch.int32), y.view(torch.int32), strict=True))
        if all(sides) and mask[t]
    }
    args, flags = Namespace(qkv_format="bshd" if padded else "thd"), torch.zeros(2)
    for rank in range(cp):
        local, owned = whole.shard(cp, rank, padded)
        batch = handed(whole, max_seq_lens=padded and [padded] * len(there),
                       rollout_log_probs=lacking(local.behavior, there, 0),
                       log_probs=lacking(local.proximal, there, 1))  # fmt: skip
        found = MicroBatch.compare(args, batch, (cp, rank))
        assert (found is None) == (not any(map(all, there)))
        if found is None:
            continue
        flags += found.flags
        mine = [(i, t) for i, own in enumerate(owned) for t in sorted(own) if expected.get((i, t))]
        assert found.read()[1] == len(mine)
        if mine:
            first = Difference.of(0, found)
            assert (found.numbers[first.sequence], first.position) == mine[0]
    assert flags.tolist() == [len(expected), sum(expected.values())]


# -------------------------------------------------------------------------------------------------- what is written


def test_the_first_differing_sample_is_written_for_diff(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], comparison: Comparison
):
    """Its tokens of the loss, in response order; a second one is not written."""
    args = settings(tmp_path)
    args.recompute_logprobs_via_prefill = True
    steps(args, handed(flip(example(), 3, 4)), handed(flip(example(), 0, 0)))
    folder = tmp_path / "rollout-7-step-0-rank-0"
    assert list(tmp_path.iterdir()) == [folder]
    files = [folder / f"{side}.safetensors" for side in ("engine", "trainer")]
    assert main(["diff", *map(str, files)]) == 1
    assert "first at [0, 3]" in capsys.readouterr().out  # the fourth token of the loss; tokens 2 and 5 are outside it
    engine = LogProbRecord.load(files[0])
    assert engine.tokens.tolist() == [303, 304, 306, 307, 309]
    assert engine.metadata["where"] == "rollout 7, step 0, rank 0, micro-batch 0, sequence 3, response token 4"
    assert "prefill re-score" in engine.metadata["compared"]
    saved = Safetensors(folder / "sample.safetensors")
    sample = {name: saved.tensor(name) for name in ("tokens", "positions")}
    assert sample["tokens"].tolist() == list(range(300, 310))
    assert sample["positions"].tolist() == [0, 1, 3, 4, 6]
    assert main(["diff", str(files[0]), str(files[0])]) == 0


def test_without_a_folder_samples_go_beside_the_checkpoints(tmp_path: Path):
    args = Namespace(bitwise=None, qkv_format="thd", save=str(tmp_path / "save"))
    steps(args, handed(flip(example(), 0, 0)))
    assert (tmp_path / "save" / "bitwise" / "rollout-7-step-0-rank-0" / "engine.safetensors").exists()


DESCRIBED = [
    ({}, "decode, as float32"),
    ({"recompute_logprobs_via_prefill": True}, "prefill re-score (aborted samples: decode), as float32"),
    ({"true_on_policy_mode": True, "bf16": True}, "decode, cast from float32 to bf16 by --true-on-policy-mode"),
    ({"bf16": True}, "decode, as float32"),
]


@pytest.mark.parametrize(("flags", "expected"), DESCRIBED)
def test_it_says_which_log_probs_were_compared(flags: dict, expected: str):
    assert expected in described(Namespace(**flags))


def test_a_sample_that_cannot_be_written_ends_no_training(
    tmp_path: Path, comparison: Comparison, caplog: pytest.LogCaptureFixture
):
    """Told each time, and written once it can be: its disk was full, say."""
    blocked = tmp_path / "samples"
    blocked.write_text("a file, and no folder")
    args = settings(blocked)
    hosts.report_step(args, 0, 0)
    loss(args, handed(flip(example(), 0, 0)))
    hosts.report_step(args, 0, 1)
    assert "the sample was not written: " in caplog.text and str(blocked) in caplog.text
    assert comparison.totals.different == 1
    blocked.unlink()
    loss(args, handed(flip(example(), 0, 0)))
    hosts.report_step(args, 1, 0)
    assert [path.name for path in blocked.iterdir()] == ["rollout-0-step-1-rank-0"]


# ------------------------------------------------------------------------------------------------------------ stopping


def test_raise_stops_at_the_next_step(tmp_path: Path):
    args = settings(tmp_path, **RAISE)
    hosts.report_step(args, 3, 1)
    loss(args, handed(flip(example(), 0, 0)))
    with pytest.raises(DifferenceError, match=r"rollout 3, step 1, rank 0: .* is in .*rollout-3-step-1-rank-0"):
        hosts.report_step(args, 4, 0)


def test_without_the_step_hook_a_later_micro_batch_reads(tmp_path: Path, comparison: Comparison):
    """As on FSDP: what has arrived, at the next call."""
    args = settings(tmp_path, **RAISE)
    loss(args, handed(example()))
    loss(args, handed(flip(example(), 0, 0)))
    with pytest.raises(DifferenceError, match="^rank 0: "):
        loss(args, handed(example()))
    assert comparison.totals.compared == 2 * len(VALID)


def test_without_the_step_hook_what_is_on_its_way_is_left_alone(
    tmp_path: Path, comparison: Comparison, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("mis_plugins.packing.collectives.Arrival.ready", False)
    for _ in range(3):
        loss(settings(tmp_path, **RAISE), handed(flip(example(), 0, 0)))
    assert len(comparison.pending) == 3 and comparison.totals.compared == 0


ENDS_AFTER_A_STEP = """
import sys, torch
from argparse import Namespace
from true_on_policy import hosts

def nothing(args, batch, logits, reduce):
    return logits, {}

def reduce(x):
    return x

reduce.__module__ = "slime.backends.megatron_utils.cp_utils"
args = Namespace(bitwise={"folder": sys.argv[1], "loss": "__main__.nothing", "on_difference": "raise"})
batch = {"unconcat_tokens": [torch.arange(5)], "total_lengths": [5], "response_lengths": [3],
         "loss_masks": [torch.ones(3)], "log_probs": [torch.tensor([-1.0, -2.0, 0.0])],
         "rollout_log_probs": [torch.tensor([-1.0, -2.0, -0.0])]}
hosts.report_step(args, 7, 0)
hosts.policy_loss(args, batch, torch.zeros(()), reduce)
"""


def test_the_last_step_is_read_when_the_process_exits(tmp_path: Path):
    """Told and written, not raised: the run is over."""
    done = ran("-c", ENDS_AFTER_A_STEP, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rollout 7, step 0, rank 0: 1 of 3 log-probs differ; ulps: 0: 1" in done.stderr
    assert "rank 0, the whole run: 1 of 3 log-probs differ; ulps: 0: 1\n" in done.stderr
    assert (tmp_path / "rollout-7-step-0-rank-0" / "engine.safetensors").exists()


def test_what_goes_wrong_at_exit_is_told(
    tmp_path: Path, comparison: Comparison, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    loss(settings(tmp_path), handed(flip(example(), 0, 0)))
    monkeypatch.setattr("true_on_policy.hosts.watch.write_sample", lambda *_: 1 / 0)
    comparison.at_exit()
    assert "the last step, compared at exit: division by zero" in caplog.text


# ------------------------------------------------------------------------------------------------ what stands behind


def other_loss(args: Any, batch: Any, logits: Tensor, reduce: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return logits.sum() + 8, {"pg_loss": torch.tensor(4.0), "mine": torch.tensor(5.0)}


def other_hook(args: Namespace, *given: Any) -> None:
    args.called.append(given)


def test_our_hooks_stand_before_others(tmp_path: Path):
    names = {"loss": f"{__name__}.other_loss", "step_hook": f"{__name__}.other_hook"}
    args = settings(tmp_path, **names)
    args.called = []
    assert loss(args, handed(example()))["mine"] == 5.0
    hosts.report_step(args, 3, 1, "model", "optimizer", None)
    assert args.called == [(3, 1, "model", "optimizer", None)]


REFUSED = [
    ("yes", r"bitwise: got 'yes'; expected a mapping of on_difference, folder, loss, step_hook"),
    ({"on_diference": "warn"}, r"bitwise.on_diference: unknown key; did you mean on_difference\?"),
    ({"on_difference": "stop"}, r"bitwise.on_difference: got 'stop'; choose one of warn, raise"),
    ({"folder": 3}, r"bitwise.folder: got 3; expected text"),
    ({"loss": "mis_plugins.mis.nothing"}, r"bitwise.loss: cannot load 'mis_plugins.mis.nothing' .*; give package"),
    (
        {"loss": "math.pi"},
        r"bitwise.loss: 'math.pi' is no function, or is true_on_policy's own; name another package's",
    ),
    ({"loss": "true_on_policy.hosts.policy_loss"}, r"bitwise.loss: 'true_on_policy.hosts.policy_loss' is no function"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_settings_that_cannot_work(given: Any, message: str):
    with pytest.raises(HostConfigError, match=message):
        hosts.policy_loss(Namespace(bitwise=given), {}, torch.ones(1), reduce)


# ---------------------------------------------------------------------------------------------------------------- cost


DOCUMENTED_OPERATORS = {1: 24, 2: 29}  # by context-parallel ranks: in docs/gpu.md


def no_loss(args: Any, batch: Any, logits: Tensor, reduce: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return logits, {}


def costs_of_rank(rank: int, cp: int, folder: Path) -> list[tallies.Tally]:
    """What compares, copies and keeps a micro-batch of few sequences, and one of many."""
    found, args, logits = [], settings(folder, loss=f"{__name__}.no_loss"), torch.ones(4)
    hosts.report_step(args, 0, 0)
    for n in (2, 64):
        whole = example((6,) * n)
        given = handed(whole.shard(cp, rank, None)[0] if cp > 1 else whole) | {
            "loss_masks": whole.loss_masks, "total_lengths": whole.total_lengths,
            "response_lengths": whole.response_lengths,
        }  # fmt: skip
        found.append(tallies.tally(lambda given=given: hosts.policy_loss(args, given, logits, reduce)))
    return found


@pytest.mark.parametrize("cp", DOCUMENTED_OPERATORS)
def test_operators_do_not_grow_with_sequences_and_nothing_waits(cp: int, tmp_path: Path):
    for few, many in run_ranks(cp, cp, lambda rank: costs_of_rank(rank, cp, tmp_path), tmp_path):
        assert few.operators == many.operators <= DOCUMENTED_OPERATORS[cp]
        assert few.copies == many.copies
        assert not any((tally.waits, tally.collectives) != ({}, {}) for tally in (few, many))


# --------------------------------------------------------------------------------------------------------------- ranks


def of_rank(
    rank: int, cp: int, broken: tuple[int, int] | None, folder: Path, padded: int | None = None
) -> tuple[int, int, str]:
    """What this rank compared and found, and what stopped it."""
    hosts.COMPARISON = Comparison()
    whole = example((9, 1, 0, 14)) if broken is None else flip(example((9, 1, 0, 14)), *broken)
    local, _ = whole.shard(cp, rank % cp, padded)
    stopped = ""
    args = settings(folder, **RAISE)
    args.qkv_format = "bshd" if padded else "thd"
    try:
        steps(args, handed(local, loss_masks=whole.loss_masks, total_lengths=whole.total_lengths,
                           response_lengths=whole.response_lengths,
                           max_seq_lens=padded and [padded] * 4))  # fmt: skip
    except DifferenceError as error:
        stopped = str(error)
    return hosts.COMPARISON.totals.compared, hosts.COMPARISON.totals.different, stopped


@pytest.mark.parametrize("padded", [None, PADDED])
@pytest.mark.parametrize("cp", [2, 4])
def test_each_rank_compares_its_own_tokens(cp: int, padded: int | None, tmp_path: Path):
    work = lambda rank: of_rank(rank, cp, None, tmp_path, padded)  # noqa: E731
    found = run_ranks(cp, cp, work, tmp_path)
    assert sum(compared for compared, _, _ in found) == int(example((9, 1, 0, 14)).flat_mask.sum())
    assert all((different, stopped) == (0, "") for _, different, stopped in found)


@pytest.mark.parametrize("broken", [(0, 0), (0, 7), (3, 6), (3, 13)])
def test_a_bit_on_one_rank_stops_all(broken: tuple[int, int], tmp_path: Path):
    """The rank that holds the token writes it, with its place in the whole response."""
    work = lambda rank: of_rank(rank, 2, broken, tmp_path / "samples")  # noqa: E731
    found = run_ranks(2, 2, work, tmp_path)
    assert sorted(different for _, different, _ in found) == [0, 1]
    assert all("to be bitwise equal and are not" in stopped for _, _, stopped in found)
    (folder,) = (tmp_path / "samples").iterdir()
    assert folder.name.endswith(f"rank-{[different for _, different, _ in found].index(1)}")
    records = [LogProbRecord.load(folder / f"{side}.safetensors") for side in ("engine", "trainer")]
    (differs,) = (records[0].log_probs != records[1].log_probs).nonzero().flatten().tolist()
    assert Safetensors(folder / "sample.safetensors").tensor("positions")[differs] == broken[1]
    assert records[0].tokens[differs] == 100 * broken[0] + 3 + broken[1]


def test_a_sample_that_cannot_be_written_keeps_no_rank_waiting(tmp_path: Path):
    """It is told, and all ranks stop together for what was asked: that bits differ."""
    blocked = tmp_path / "samples"
    blocked.write_text("a file, and no folder")
    found = run_ranks(2, 2, lambda rank: of_rank(rank, 2, (0, 7), blocked), tmp_path, limit_s=20)
    assert sorted(different for _, different, _ in found) == [0, 1]
    assert all("to be bitwise equal and are not" in stopped for _, _, stopped in found)


# ----------------------------------------------------------------------------------------------------- embedded host

FLAGS = (
    "--loss-type custom_loss --custom-loss-function-path true_on_policy.hosts.policy_loss "
    "--custom-megatron-before-train-step-hook-path true_on_policy.hosts.report_step"
)


def equal_log_probs(args: Namespace, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """An engine whose every bit is the trainer's."""
    rollout_data["rollout_log_probs"] = [x.clone() for x in rollout_data["log_probs"]]


def one_bit(args: Namespace, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """The same, but for one bit on rank 0 in the second rollout: in the fourth of its sequences with two tokens."""
    equal_log_probs(args, rollout_id, rollout_data)
    behavior = rollout_data["rollout_log_probs"]
    if rollout_id == 1 and torch.distributed.get_rank() == 0:
        index = [i for i, x in enumerate(behavior) if x.numel() > 1][3]
        behavior[index] = flipped(behavior[index], 1)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "bitwise.yaml"
    path.write_text(f"bitwise: {{on_difference: raise, folder: {tmp_path / 'samples'}}}\n")
    return path


def local(engine: str, config: Path, flags: str = "") -> str:
    hook = f"--rollout-data-postprocess-path {__name__}.{engine}" if engine else ""
    return f"{FLAGS} {hook} --custom-config-path {config} --advantage-estimator reinforce --reward-shift -1 {flags}"


@pytest.mark.parametrize("ranks", ["", "--context-parallel-size 2"])
def test_a_run_that_is_equal_ends_well(ranks: str, config: Path, tmp_path: Path):
    assert run(local("equal_log_probs", config, ranks), tmp_path / "run") == 0
    rows = records(tmp_path / "run")
    assert len(rows) == 3 and all(row["true_on_policy_different"] == 0 for row in rows)
    assert all(row["true_on_policy_compared"] == row["response_length"] for row in rows)  # both a sample
    assert not (tmp_path / "samples").exists()


@pytest.mark.parametrize("ranks", ["", "--context-parallel-size 2"])
def test_a_run_with_one_bit_flipped_stops_one_step_later(
    ranks: str, config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """Two steps a rollout: rollout 1 is the last that was recorded, or its second step was never taken."""
    assert run(local("one_bit", config, ranks), tmp_path / "run") == 2
    assert len(records(tmp_path / "run")) == 1
    assert "were to be bitwise equal and are not" in capfd.readouterr().err
    (folder,) = (tmp_path / "samples").iterdir()
    assert folder.name == "rollout-1-step-0-rank-0"
    assert main(["diff", str(folder / "engine.safetensors"), str(folder / "trainer.safetensors")]) == 1


def test_a_mismatched_engine_is_found_and_with_warn_the_run_goes_on(tmp_path: Path):
    """Before our corrected loss and its step hook."""
    config = tmp_path / "bitwise.yaml"
    config.write_text(
        f"bitwise: {{folder: {tmp_path / 'samples'}, loss: mis_plugins.mis.policy_loss, "
        "step_hook: mis_plugins.mis.report_step}\n"
        "mis: {weight: {upper: 2.0}, metrics: all}\n"
    )
    assert run(local("", config, "--rollout-weights int3"), tmp_path / "run") == 0
    rows = records(tmp_path / "run")
    assert all(0 < row["true_on_policy_different"] <= row["true_on_policy_compared"] for row in rows)
    assert all("mis_kl" in row for row in rows)
    engine, trainer = (
        tmp_path / "samples" / "rollout-0-step-0-rank-0" / f"{side}.safetensors" for side in ("engine", "trainer")
    )
    assert main(["diff", str(engine), str(trainer)]) == 1
