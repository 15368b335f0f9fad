"""Compare two recordings token by token, whatever batch, step or layout each token was computed in.

An engine decodes one token a step, in batches that change; a trainer takes whole sequences, padded or packed. A row of
a tensor belongs to a token. A token is identified by its id and the ids of all tokens before it in its sequence. A
module's result for a token must have equal bits wherever it was computed.

The recordings say which row is which token: `input_ids`, with SGLang's `rids`, `positions` and `seq_lens`, or with a
trainer's `position_ids` and `attention_mask`.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from hashlib import blake2b
from itertools import groupby, takewhile
from math import prod

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from mis_plugins.shared.budget import RecordError
from mis_plugins.shared.opened import read
from mis_plugins.shared.terminal import progress
from true_on_policy.bitwise import Mismatch, equal_bits, first_mismatch
from true_on_policy.diff.names import Correspondence, Heads, Renaming, is_handed
from true_on_policy.diff.records import LOG_PROBS, Entry, Key, Recording, Value
from true_on_policy.diff.tensors import Report, Row, Status, left_out, renamed, row_of, verdict

HEALTH_CHECK = "HEALTH_CHECK"  # prefix of the ids of SGLang's own requests
BEFORE = b""  # the prefix before the first token of a sequence

Prefix = bytes  # digest of a token and of all tokens before it


@dataclass(frozen=True)
class Token:
    """One computation of a token in a recording.

    prefix: the digest of the sequence up to this token.
    before: the digest of the sequence up to the token before.
    forward, row: the pass, and the row of its tensors, that hold the token.
    sequence, position: the place of the token in its recording, for messages.
    """

    prefix: Prefix
    before: Prefix
    forward: int
    row: int
    sequence: int
    position: int


Pair = tuple[Token, Token]


@dataclass(frozen=True)
class Forward:
    """One pass through a model: the entries by common name, and the number of rows of each tensor."""

    entries: Mapping[Key, Entry]
    rows: int


@dataclass(frozen=True)
class Side:
    """One side of the comparison: a recording as passes and tokens."""

    forwards: tuple[Forward, ...]
    tokens: tuple[Token, ...]

    @cached_property
    def by_prefix(self) -> dict[Prefix, list[Token]]:
        tokens: dict[Prefix, list[Token]] = defaultdict(list)
        for token in self.tokens:
            tokens[token.prefix].append(token)
        return tokens

    @cached_property
    def keys(self) -> dict[Key, None]:
        """The keys of all passes, each where it first comes in execution order."""
        return dict.fromkeys(key for forward in self.forwards for key in forward.entries)


def compare_by_token(a: Recording, b: Recording, names: Correspondence, heads: Heads | None = None) -> Report:
    """Compare every tensor at the tokens that both sides computed.

    The coordinate of a mismatch is (sequence of A, position, place in the row). A token that only one side computed is
    reported as missing, except the last of a sequence: an engine never computes on the last token that it samples.

    Raises:
        RecordError: a recording does not tell which row is which token.
    """
    left, right = (
        read(recording.path, partial(_side, recording, naming, heads))
        for recording, naming in ((a, names.a), (b, names.b))
    )
    pairs = _pairs(left, right)
    both = dict.fromkeys((*left.keys, *right.keys))
    keys = [
        key for key in both if key.name != LOG_PROBS and not is_handed(key.name)
    ]  # records are matched on their own
    rows = [_row(key, left, right, pairs) for key in progress(keys, "tensors compared")]
    alone = [*_unmatched(left, right, "missing in B"), *_unmatched(right, left, "missing in A")]
    return Report(
        a.path,
        b.path,
        rows=(*alone, *(row for row in rows if row), *_log_probs(a, b)),
        left_out=left_out(a, names.a) + left_out(b, names.b),
        no_rows=rows.count(None),
        early=_early(a, names.a) + _early(b, names.b),
        tokens=len(pairs),
    )


def _side(recording: Recording, renaming: Renaming, heads: Heads | None) -> Side:
    passes = _passes(recording)
    tokens = tuple(_tokens(recording, passes))
    common = (renamed(Recording(recording.path, tuple(entries)), renaming, heads) for entries in passes)
    sizes = (_load(entries, "input_ids").numel() for entries in passes)
    return Side(tuple(Forward(entries, rows) for entries, rows in zip(common, sizes, strict=True)), tokens)


def _passes(recording: Recording) -> list[list[Entry]]:
    """Split the entries of a recording into passes through the model; a pass begins with `input_ids`."""
    if len({entry.key.rank for entry in recording.entries}) > 1:
        raise RecordError(f"{recording.path}: of several ranks; tokens are matched within one")
    passes: list[list[Entry]] = []
    for entry in recording.entries:
        if entry.key.name == "input_ids" and not entry.key.recompute:
            passes.append([])
        if passes:
            passes[-1].append(entry)
    if not passes:
        raise RecordError(f"{recording.path}: records no input_ids, which tell the token of each row")
    return passes


def _early(recording: Recording, renaming: Renaming) -> int:
    """Count what could be compared but for its place before the first pass, where it belongs to no token."""
    names = takewhile(lambda name: name != "input_ids", (entry.key.name for entry in recording.entries))
    return sum(name != LOG_PROBS and not is_handed(name) and bool(renaming.of(name)) for name in names)


def _tokens(recording: Recording, passes: Sequence[Sequence[Entry]]) -> Iterator[Token]:
    """Yield every token of every pass; an engine's sequence goes on from pass to pass."""
    chains: dict[object, list[Prefix]] = {}
    numbers: dict[object, int] = {}
    for forward, entries in enumerate(passes):
        ids = _load(entries, "input_ids").flatten().tolist()
        for name, position, row in _layout(entries, forward):
            chain, number = chains.setdefault(name, []), numbers.setdefault(name, len(numbers))
            if position > len(chain):
                raise RecordError(
                    f"{recording.path}: pass {forward} begins a sequence at position {position}, and the tokens "
                    "before were not recorded; switch the engine's prefix cache off during the recording"
                )
            del chain[position:]  # the engine computes again from this position, as after a preemption
            before = chain[-1] if chain else BEFORE
            chain.append(blake2b(before + ids[row].to_bytes(8, "little", signed=True)).digest())
            yield Token(chain[-1], before, forward, row, number, position)


def _layout(entries: Sequence[Entry], forward: int) -> Iterator[tuple[object, int, int]]:
    """Yield (name of the sequence, position in the sequence, row) for every token of a pass."""
    if any(entry.key.name == "rids" for entry in entries):
        return _engine_layout(entries)
    if any("decoder.layers." in entry.key.name for entry in entries) and len(_load(entries, "input_ids")) > 1:
        raise RecordError("rows of a batch of Megatron's stand in another order than its input_ids; pack the sequences")
    return _trainer_layout(entries, forward)


def _engine_layout(entries: Sequence[Entry]) -> Iterator[tuple[object, int, int]]:
    """Lay out an engine's pass: requests end to end, each with its new tokens; SGLang's health checks are skipped."""
    positions = _load(entries, "positions").tolist()
    row = 0
    for request, length in zip(_load(entries, "rids"), _load(entries, "seq_lens").tolist(), strict=True):
        new = range(positions[row], length)
        if not str(request).startswith(HEALTH_CHECK):
            yield from ((str(request), position, row + index) for index, position in enumerate(new))
        row += len(new)


def _trainer_layout(entries: Sequence[Entry], forward: int) -> Iterator[tuple[object, int, int]]:
    """Lay out a trainer's pass: sequences are rows of a batch, padded where the mask is 0, or packed end to end."""
    ids = torch.atleast_2d(_load(entries, "input_ids"))
    present, positions = (_like(ids, _find(entries, name)) for name in ("attention_mask", "position_ids"))
    for line, columns in enumerate(torch.arange(ids.numel()).view(ids.shape).tolist()):
        name, position = (forward, line, 0), 0
        for column, row in enumerate(columns):
            if present is not None and not present[line, column]:
                continue
            position = position if positions is None else int(positions[line, column])
            if position == 0:
                name = (forward, line, column)
            yield name, position, row
            position += 1


def _like(ids: Int[Tensor, "B T"], entry: Entry | None) -> Shaped[Tensor, "B T"] | None:
    """Load an entry as one value a token, in the shape of `ids`; None where the entry is missing or does not fit."""
    value = entry.load() if entry else None
    if not isinstance(value, Tensor) or value.shape not in (ids.shape, (1, ids.shape[1])):
        return None
    return value.expand_as(ids)


def _find(entries: Sequence[Entry], name: str) -> Entry | None:
    return next((entry for entry in entries if entry.key.name == name), None)


def _load(entries: Sequence[Entry], name: str) -> Value:
    entry = _find(entries, name)
    if entry is None:
        raise RecordError(f"{name} is not recorded, which tells the token of each row")
    return entry.load()


def _pairs(a: Side, b: Side) -> list[Pair]:
    """Pair the n-th computation of each token in A with the n-th in B, or with the last where B has fewer."""
    theirs = b.by_prefix
    return [
        (mine[min(n, len(mine) - 1)], others[min(n, len(others) - 1)])
        for prefix, mine in a.by_prefix.items()
        if (others := theirs.get(prefix))
        for n in range(max(len(mine), len(others)))
    ]


def _unmatched(side: Side, other: Side, status: Status) -> list[Row]:
    """Report in one row the tokens that the other side never computed; no row where there are none.

    The last token of a sequence may be missing, unless the other side computed another token in its place.
    """
    prefixes, followed = other.by_prefix, {token.before for token in side.tokens}
    replaced = {token.before for token in other.tokens if token.prefix not in side.by_prefix}
    missed = [token for token in side.tokens if token.prefix not in prefixes]
    alone = [t for t in missed if t.prefix in followed or t.before not in prefixes or t.before in replaced]
    if not alone:
        return []
    first = alone[0]
    where = f"the first at position {first.position} of sequence {first.sequence}"
    return [Row(Key("input_ids"), status, detail=f"{len(alone)} of {len(side.tokens)} tokens, {where}")]


def _row(key: Key, a: Side, b: Side, pairs: Sequence[Pair]) -> Row | None:
    """Compare one key over all pairs of tokens; None where the rows of its tensor are not tokens."""
    if key not in a.keys or key not in b.keys:
        return Row(key, "missing in B" if key in a.keys else "missing in A")
    try:
        left, right = (_gathered(key, side, [pair[i] for pair in pairs]) for i, side in enumerate((a, b)))
    except (RecordError, IndexError, RuntimeError) as error:
        return Row(key, "not comparable", detail=str(error))
    if left is None or right is None:
        lacking, other = ("A", b) if left is None else ("B", a)
        if not _rows_are_tokens(key, other):
            return None
        return Row(key, "not comparable", detail=f"{lacking} has not one row for each token")
    mismatch = first_mismatch(left, right)
    return None if mismatch and _is_constant(key, a, b) else verdict(key, _located(mismatch, pairs))


def _is_constant(key: Key, a: Side, b: Side) -> bool:
    """Whether all passes of both sides recorded equal bits, whatever their tokens: the rows are not tokens."""
    entries = (forward.entries.get(key) for side in (a, b) for forward in side.forwards)
    first, *others = (entry.load() for entry in entries if entry)
    return all(isinstance(each, Tensor) and equal_bits(first, each) for each in others)


def _gathered(key: Key, side: Side, tokens: Sequence[Token]) -> Shaped[Tensor, "tokens width"] | None:
    """Gather the rows of the tokens, flattened; None where the tensor has not one row for each token."""
    load = cache(partial(_by_row, key, side))
    parts = []
    for forward, run in groupby(tokens, lambda token: token.forward):
        rows = load(forward)
        if rows is None:
            return None
        parts.append(rows[[token.row for token in run]])
    if len({part.shape[1] for part in parts}) != 1:
        return None
    if len({part.dtype for part in parts}) > 1:
        raise RecordError(f"{key} has another dtype in another pass")
    return torch.cat(parts)


def _by_row(key: Key, side: Side, forward: int) -> Shaped[Tensor, "rows width"] | None:
    """Reshape [tokens, ...], [batch, tokens, ...] or [tokens x heads, ...] to one row a token; None where it cannot."""
    entry, rows = side.forwards[forward].entries.get(key), side.forwards[forward].rows
    if entry is None:
        raise RecordError(f"{key} was not recorded in pass {forward}")
    value = entry.load()
    if not isinstance(value, Tensor) or value.dim() == 0 or not rows:
        return None
    return value.reshape(rows, -1) if rows in _leading(value) or value.shape[0] % rows == 0 else None


def _rows_are_tokens(key: Key, side: Side) -> bool:
    """Whether the first dimensions of the tensor count the tokens of each pass. A pass of one token says nothing."""
    several = [forward for forward in side.forwards if forward.rows > 1 and key in forward.entries]
    return bool(several) and all(forward.rows in _leading(forward.entries[key].load()) for forward in several)


def _leading(value: Value) -> set[int]:
    """The products of the first dimensions: [tokens, ...] and [batch, tokens, ...] have one that counts tokens."""
    dims = range(1, value.dim() + 1) if isinstance(value, Tensor) else ()
    return {prod(value.shape[:leading]) for leading in dims}


def _located(mismatch: Mismatch | None, pairs: Sequence[Pair]) -> Mismatch | None:
    """Return the mismatch with A's (sequence, position) in place of the number of the pair."""
    if mismatch is None or mismatch.kind != "bytes":
        return mismatch
    token, place = pairs[mismatch.coordinate[0]][0], mismatch.coordinate[1:]
    return replace(mismatch, coordinate=(token.sequence, token.position, *place))


def _log_probs(a: Recording, b: Recording) -> list[Row]:
    """Compare the records of log-probs, which need no matching by token."""
    left, right = ({e.key: e for e in side.entries if e.key.name == LOG_PROBS} for side in (a, b))
    keys = dict.fromkeys((*left, *right))
    return [row_of(key, left.get(key), right.get(key), regroup=False) for key in keys]
