"""Rows matched by token: an engine's steps against a trainer's padded batch and its pack.

The model is a function of what stands before a token, so both sides must agree wherever it was computed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import hypothesis.strategies as st
import pytest
import torch
from commands import ProofCommand
from hypothesis import given, settings
from torch import Tensor, nn

from mis_plugins.shared.budget import RecordError
from true_on_policy.contract.cpu import Contract
from true_on_policy.diff.command import show
from true_on_policy.diff.log_prob_record import LogProbRecord
from true_on_policy.diff.module_recorder import record
from true_on_policy.diff.names import correspondence
from true_on_policy.diff.records import Entry, Key, Recording, numbered
from true_on_policy.diff.tensors import Report
from true_on_policy.diff.tokens import compare_by_token
from true_on_policy.kernels.pin import pinned
from true_on_policy.trainers.hf import HuggingFace
from true_on_policy.trainers.megatron import Megatron

WIDTH = 3
Drawn = Sequence[tuple[list[int], list[int]]]  # prompt and sampled tokens of each sequence
Sequences = Sequence[Sequence[int]]

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=4)  # few, so that sequences share their beginnings
sequences = st.lists(st.tuples(tokens, tokens), min_size=1, max_size=4)


def hidden(sequence: Sequence[int]) -> Tensor:
    """[T, WIDTH], each row a function of all tokens up to its own."""
    state, rows = torch.zeros(WIDTH), []
    for token in sequence:
        state = torch.sin(state * 1.7 + torch.tensor([token + 1.0, 2.0 * token, 0.5]))
        rows.append(state)
    return torch.stack(rows)


class Memory:
    """A recording that never was a file."""

    def __init__(self):
        self.entries: list[Entry] = []

    @property
    def recording(self) -> Recording:
        return Recording(Path("memory"), numbered(self.entries))

    def write(self, name: str, value: object, rank: int = 0) -> None:
        self.entries.append(Entry(Key(name, rank=rank), lambda: value))

    def replace(self, name: str, value: object) -> None:
        self.entries = [Entry(each.key, lambda: value) if each.key.name == name else each for each in self.entries]

    def modules(self, rows: Tensor, heads: Tensor) -> None:
        self.write("norm.output", rows)
        self.write("heads.output", heads)
        self.write("table", torch.arange(10_007.0))  # not one row a token: a prime


def engine(drawn: Drawn, chunk: int = 100) -> Memory:
    """A health check, prefill in chunks, then decode of all that run, in another order at each step."""
    memory = Memory()
    requests = {f"r{n}": [*prompt, *sampled] for n, (prompt, sampled) in enumerate(drawn)}
    engine_pass(memory, {"HEALTH_CHECK_1": [1]}, [("HEALTH_CHECK_1", 0, 1)])
    for start in range(0, 4, chunk):
        ends = {f"r{n}": len(prompt) for n, (prompt, _) in enumerate(drawn)}
        engine_pass(memory, requests, [(r, start, min(start + chunk, end)) for r, end in ends.items() if start < end])
    for step in range(4):  # the last sampled token is never fed
        starts = {f"r{n}": len(prompt) + step for n, (prompt, _) in enumerate(drawn)}
        running = [(r, start, start + 1) for r, start in starts.items() if start + 1 < len(requests[r])]
        engine_pass(memory, requests, running[step % 2 :] + running[: step % 2])
    return memory


def engine_pass(memory: Memory, requests: Mapping[str, Sequence[int]], parts: Sequence[tuple[str, int, int]]) -> None:
    """Requests end to end, each from a position to another, as SGLang's dumper records it."""
    if not parts:
        return
    memory.write("input_ids", torch.tensor([token for r, i, j in parts for token in requests[r][i:j]]))
    memory.write("seq_lens", torch.tensor([j for _, _, j in parts]))
    memory.write("positions", torch.tensor([p for _, i, j in parts for p in range(i, j)]))
    memory.write("rids", [r for r, _, _ in parts])
    rows = torch.cat([hidden(requests[r])[i:j] for r, i, j in parts])
    memory.modules(rows, rows.repeat(1, 2).reshape(-1, WIDTH))  # [tokens x heads, head size]


def padded(whole: Sequences, left: bool) -> Memory:
    """One padded batch with its mask: [B, T, width] and [B, T, heads, head size]."""
    memory, longest = Memory(), max(map(len, whole))
    at = [slice(longest - len(s), longest) if left else slice(0, len(s)) for s in whole]
    ids, present = torch.zeros(len(whole), longest).long(), torch.zeros(len(whole), longest).long()
    rows = torch.full((len(whole), longest, WIDTH), torch.nan)
    for line, (place, sequence) in enumerate(zip(at, whole, strict=True)):
        ids[line, place] = torch.tensor(sequence)
        present[line, place] = 1
        rows[line, place] = hidden(sequence)
    memory.write("input_ids", ids)
    memory.write("attention_mask", present)
    memory.modules(rows, torch.stack([rows, rows], dim=2))
    return memory


def packed(whole: Sequences, change: tuple[int, int] | None = None) -> Memory:
    """All sequences end to end, [T, 1, width]; `change` is (row, place) of one that gets another value."""
    memory = Memory()
    memory.write("input_ids", torch.tensor([[token for sequence in whole for token in sequence]]))
    memory.write("position_ids", torch.tensor([[p for sequence in whole for p in range(len(sequence))]]))
    rows = torch.cat([hidden(sequence) for sequence in whole])
    heads = torch.stack([rows, rows], dim=1)[:, None]
    if change:
        rows = rows.clone()
        rows[change] += 1
    memory.modules(rows[:, None], heads)
    return memory


def by_token(a: Memory, b: Memory) -> Report:
    left, right = a.recording, b.recording
    return compare_by_token(left, right, correspondence(left.names, right.names))


def statuses(report: Report) -> dict[str, str]:
    return {row.key.name: row.status for row in report.rows if row.key.name != "table"}


BOTH_EQUAL = {"norm.output": "equal", "heads.output": "equal"}


@given(sequences, st.integers(1, 4), st.booleans())
@settings(max_examples=40)
def test_steps_batches_and_packs_agree(drawn: Drawn, chunk: int, left: bool):
    whole = [[*prompt, *sampled] for prompt, sampled in drawn]
    computed = {tuple(sequence[:n]) for sequence in whole for n in range(1, len(sequence))}
    for trained in (padded(whole, left), packed(whole)):
        stepped = engine(drawn, chunk)
        for found in (by_token(stepped, trained), by_token(trained, stepped)):
            assert found.exit_code == 0 and statuses(found) == BOTH_EQUAL
            assert found.tokens is not None and found.tokens >= len(computed)


@given(sequences, st.data())
@settings(max_examples=40)
def test_another_value_is_found_at_its_token(drawn: Drawn, data: st.DataObject):
    whole = [[*prompt, *sampled] for prompt, sampled in drawn]
    number = data.draw(st.integers(0, len(whole) - 1))
    position, place = data.draw(st.integers(0, len(whole[number]) - 1)), data.draw(st.integers(0, WIDTH - 1))
    row = sum(map(len, whole[:number])) + position
    found = by_token(packed(whole), packed(whole, (row, place)))
    assert found.exit_code == 1 and found.first is not None and found.first.mismatch is not None
    assert found.first.mismatch.coordinate == (number, position, place)
    assert found.first.mismatch.count == 1
    # The engine never computes on the last token; an earlier one is found in its steps too.
    followed = any(s[: position + 1] == whole[number][: position + 1] and len(s) > position + 1 for s in whole)
    stepped = engine(drawn)
    wanted = 1 if followed else 0
    assert by_token(stepped, packed(whole, (row, place))).exit_code == wanted


def test_all_computations_of_a_token_are_compared():
    """Two samples of one prompt: the trainer's first row is equal, its second has other bits."""
    sampled = engine([([1, 2], [0])])
    assert by_token(sampled, packed([[1, 2], [1, 2]])).exit_code == 0
    assert by_token(sampled, packed([[1, 2], [1, 2]], (3, 0))).exit_code == 1


def test_a_token_of_one_side_alone():
    """The last token of a sequence may be; any other that is missing cannot be compared."""
    sampled = engine([([1, 2], [0, 1])])  # computes on three tokens
    for whole, code in (
        ([[1, 2, 0, 1]], 0),
        ([[1, 2, 0]], 0),
        ([[1, 2]], 0),
        ([[1, 2, 0, 1, 1]], 2),
        ([[1]], 2),
        ([[2, 2, 0, 1]], 2),
        ([[1, 2, 0, 1], [2]], 2),
    ):
        assert by_token(sampled, packed(whole)).exit_code == code, whole
    detail = by_token(sampled, packed([[1, 2, 0, 1, 1]])).rows[0].detail
    assert detail == "2 of 5 tokens, the first at position 3 of sequence 0"


@pytest.mark.parametrize(
    ("a", "b"), [([[1, 2, 0]], [[1, 2, 1]]), ([[1, 2, 0], [2, 1]], [[1, 2, 1], [2, 0]]), ([[1, 2]], [[1, 0, 1]])]
)
def test_another_last_token_that_both_sides_computed_is_missing(a: Sequences, b: Sequences):
    assert by_token(packed(a), packed(b)).exit_code == 2
    assert by_token(packed(b), packed(a)).exit_code == 2


def test_what_a_module_is_handed_is_not_compared():
    """Masks and positions of a layer are those of a layout, as the model's own."""
    sides = packed([[1, 2], [0]]), packed([[0], [1, 2]])
    for memory, mask in zip(sides, ([[1, 2], [3, 4]], [[4, 3], [2, 1]]), strict=True):
        memory.write("layers.0.inputs.attention_mask", torch.tensor(mask))
        memory.write("layers.0.attn.inputs.position_ids", torch.tensor([mask[0]]))
    assert by_token(*sides).exit_code == 0


@pytest.mark.parametrize("shape", [(12,), (6,), (12, 3), (6, 3), (2, 3, 4)])
def test_a_constant_is_left_out_whatever_its_length(shape: tuple[int, ...]):
    """A constant is no tensor of rows, though its length may be a multiple of the number of tokens."""
    sides = packed([[1, 2, 0, 1], [2, 1]]), packed([[2, 1], [1, 2, 0, 1]])
    for memory in sides:
        memory.write("rotary.output", torch.arange(float(torch.Size(shape).numel())).view(shape))
    found = by_token(*sides)
    assert (found.exit_code, found.no_rows, statuses(found)) == (0, 2, BOTH_EQUAL)
    sides[1].write("input_ids", torch.tensor([[1]]))
    sides[1].write("rotary.output", torch.ones(shape))
    assert by_token(*sides).exit_code != 0


def test_a_preempted_request_is_computed_again():
    memory, requests = Memory(), {"r": [1, 2, 0, 1]}
    for part in (("r", 0, 2), ("r", 2, 3), ("r", 0, 3), ("r", 3, 4)):
        engine_pass(memory, requests, [part])
    found = by_token(memory, packed([[1, 2, 0, 1]]))
    assert (found.exit_code, found.tokens) == (0, 7)
    assert by_token(memory, packed([[1, 2, 0, 1]], (1, 0))).exit_code == 1


IDS = ("input_ids", torch.zeros(2, 3).long())
CACHED = [  # the third token of a request, whose other two an engine has in its cache
    ("input_ids", torch.tensor([3])), ("seq_lens", torch.tensor([3])), ("positions", torch.tensor([2])), ("rids", ["r"])
]  # fmt: skip


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ([("x.output", torch.zeros(2))], "records no input_ids"),
        ([IDS, (*IDS, 1)], "of several ranks"),
        ([IDS, ("decoder.layers.0.mlp.output", torch.zeros(3, 2, WIDTH))], "pack the sequences"),
        (CACHED, "begins a sequence at position 2.*switch the engine's prefix cache off"),
    ],
)
def test_what_tells_no_tokens_is_refused(written: list, message: str):
    memory = Memory()
    for entry in written:
        memory.write(*entry)
    with pytest.raises(RecordError, match=message):
        by_token(memory, memory)


def test_a_tensor_that_some_passes_lack():
    a, b = engine([([1], [2, 0])]), engine([([1], [2, 0])])
    b.entries.remove([entry for entry in b.entries if entry.key.name == "heads.output"][-1])
    assert statuses(by_token(a, b)) == BOTH_EQUAL | {"heads.output": "not comparable"}
    b.entries = [entry for entry in b.entries if entry.key.name != "heads.output"]
    assert statuses(by_token(a, b)) == BOTH_EQUAL | {"heads.output": "missing in B"}


def test_a_tensor_with_other_rows_on_one_side_is_not_taken_for_equal():
    """An engine pads its pass to four rows: the trainer's tensor has a row for each token, the engine's has not."""
    a, b = packed([[1, 2, 0]]), packed([[1, 2, 0]])
    b.replace("norm.output", torch.full((4, WIDTH), 7.0))
    for found, side in ((by_token(a, b), "B"), (by_token(b, a), "A")):
        assert found.exit_code == 2 and statuses(found)["norm.output"] == "not comparable"
        (row,) = (row for row in found.rows if row.status == "not comparable")
        assert row.detail == f"{side} has not one row for each token"


def test_what_has_no_rows_on_both_sides_is_counted(capsys: pytest.CaptureFixture[str]):
    found = by_token(packed([[1, 2, 0]]), packed([[1, 2, 0]]))
    assert found.exit_code == 0 and found.no_rows == 1
    show(found)
    assert "left out: not one row a token  1" in capsys.readouterr().out


def test_what_was_recorded_before_the_first_tokens_is_counted(capsys: pytest.CaptureFixture[str]):
    sides = packed([[1, 2, 0]]), packed([[1, 2, 0]])
    for number, memory in enumerate(sides):
        memory.write("vision.output", torch.full((3, WIDTH), float(number)))
        memory.entries.insert(0, memory.entries.pop())
    show(by_token(*sides))
    assert "left out: recorded before the first input_ids  2" in capsys.readouterr().out


def test_a_table_whose_rows_are_a_multiple_of_one_sides_tokens_is_left_out():
    found = by_token(*(table_of(64, whole) for whole in ([[1, 2] * 4], [[1, 2] * 4, [2, 1, 0]])))
    assert statuses(found).get("rotary.output") is None and found.no_rows == 2


def table_of(rows: int, whole: Sequences) -> Memory:
    memory = packed(whole)
    memory.write("rotary.output", torch.arange(3.0 * rows).view(rows, 3))
    return memory


def test_another_dtype():
    a, b = packed([[1, 2]]), packed([[1, 2]])
    b.replace("norm.output", hidden([1, 2]).double())
    found = by_token(a, b)
    assert found.exit_code == 2 and statuses(found)["norm.output"] == "other dtype"


class Wrapper(nn.Module):
    """Megatron's Float16Module and its DDP, which take arguments without names."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        return self.module(*inputs, **named)


def test_real_models_from_files(tiny_fp32: Path, tmp_path: Path, proof_command: ProofCommand):
    """Hugging Face's padded batch against Megatron's pack, in another order of sequences."""
    hf, megatron = HuggingFace(tiny_fp32, "fp32"), Megatron(tiny_fp32, "fp32")
    whole = [[5, 6, 7, 8, 9], [10, 11], [5, 6, 12]]
    ids, present = torch.zeros(3, 5).long(), torch.zeros(3, 5).long()
    for line, sequence in enumerate(whole):
        ids[line, : len(sequence)] = torch.tensor(sequence)
        present[line, : len(sequence)] = 1
    with torch.no_grad(), pinned(Contract()):
        with record(hf.model, tmp_path / "hf"):
            hf.model(input_ids=ids, attention_mask=present)
        megatron.model = cast(Any, Wrapper(Wrapper(megatron.model)))
        with record(megatron.model, tmp_path / "megatron") as recorder:
            megatron.logits(whole[::-1])
    words = ["diff", tmp_path / "hf", tmp_path / "megatron", "--model", tiny_fp32, "--by-token"]
    assert "pairs of tokens           10" in proof_command(*words, code=0).out
    # A record of log-probs says itself which token is which.
    recorder.log_probs(LogProbRecord.from_sequences([[9]], [[-0.5]]))
    assert "log_probs            missing in A" in proof_command(*words, code=2).out
