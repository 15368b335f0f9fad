"""Compare the weights of a running engine with a trainer's: digests by name, and the first tensor that differs."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from true_on_policy.bitwise import FLOATS, Digest, first_mismatch, read_values
from true_on_policy.engines.asking import LIMIT, reading, whole
from true_on_policy.engines.handover import ASKED, DIGESTS, VALUES
from true_on_policy.errors import EngineError, NotSeenError
from true_on_policy.weights.held import Lacking, Weights

T = TypeVar("T")
Ask = Callable[[Mapping[str, Any]], Any]
"""Posts a body to the engine's `/weights_checker` and returns its answer; raises EngineError."""

SHOWN = 8
LARGEST = 1 << 28  # bytes over all ranks; a larger tensor is not fetched to say by how much it differs
LIMITS = {DIGESTS: LIMIT, VALUES: 2 * LARGEST}  # bytes of an answer; base64 makes 4 of 3
LONGEST = 500  # letters of a tensor's name
ADAPTED = re.compile(r"\.(base_layer|lora_\w+)\.")  # in names, where SGLang, vLLM or PEFT keep an adapter apart
COUNTED = (torch.int64, torch.bool)  # of buffers, such as `position_ids`; no weight is quantized to them
ROUNDED = {str(dtype).removeprefix("torch.") for dtype in FLOATS if dtype.itemsize > 1}


@dataclass(frozen=True)
class Part:
    """The weights of one tensor-parallel rank of the engine, as digests by name."""

    rank: int
    ranks: int
    digests: Mapping[str, Digest]

    @property
    def place(self) -> int | None:
        """Return the rank as a `Difference` has it."""
        return self.rank if self.ranks > 1 else None


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the trainer's.

    name: the tensor's name in the engine, or in the trainer where the engine holds nothing of the tensor.
    rank: the engine's tensor-parallel rank; None on a single rank, or where the engine lacks the tensor.
    why: what differs.
    """

    name: str
    rank: int | None
    why: str

    def __str__(self) -> str:
        return f"{self.name}{'' if self.rank is None else f' (rank {self.rank})'}: {self.why}"


@dataclass(frozen=True)
class Comparison:
    """All tensors of an engine against a trainer's, in the order of the engine's model.

    compared: how many tensors the engine holds, over its ranks, and how many the trainer alone holds.
    differences: the tensors that differ, or that one side lacks.
    """

    compared: int
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def places(self) -> set[tuple[str, int | None]]:
        """Name the tensors that differ, each with its rank."""
        return {(difference.name, difference.rank) for difference in self.differences}

    @property
    def summary(self) -> str:
        if self.equal:
            return f"the engine's weights are the trainer's: {self.compared} tensors, equal in every bit"
        return f"{len(self.differences)} of {self.compared} tensors differ, the first: {self.differences[0]}"

    def __str__(self) -> str:
        others = self.differences[1:]
        lines = [self.summary, *(f"  {other}" for other in others[: SHOWN - 1])]
        if len(others) >= SHOWN:
            lines.append(f"  and {len(others) - SHOWN + 1} more")
        return "\n".join(lines)


def compare(ask: Ask, weights: Mapping[str, Tensor]) -> Comparison:
    """Compare every tensor of the engine with the tensor that a trainer's weights should give.

    The trainer's weights, by Hugging Face name, are rounded to the dtype of the engine's tensor, as an update does.

    Raises:
        NotSeenError: the engine does not tell its weights, or a side holds some in a form that cannot be compared.
    """
    numbers = ((name, held.dtype) for name, held in weights.items() if held.dtype not in COUNTED)
    _check_plain("the trainer", ((name, str(dtype).removeprefix("torch.")) for name, dtype in numbers))
    parts = digests_of(ask)
    comparison = against(parts, weights)
    if comparison.equal:
        return comparison
    first, *others = comparison.differences
    return replace(comparison, differences=(_by_how_much(ask, first, parts, Weights(weights)), *others))


def against(parts: Sequence[Part], weights: Mapping[str, Tensor]) -> Comparison:
    """Compare the digests that an engine told with what a trainer's weights, by Hugging Face name, should give."""
    ours = Weights(weights)
    differences = [difference for part in parts for difference in _of(part, parts[0].digests, ours)]
    differences += [Difference(name, None, "the engine holds nothing of it") for name in ours.unused]
    return Comparison(sum(len(part.digests) for part in parts) + len(ours.unused), tuple(differences))


def digests_of(ask: Ask) -> list[Part]:
    """Ask an engine for the digests of all its tensors, one part a rank.

    Raises:
        NotSeenError: the engine does not answer the question, runs pipeline or data parallel, or holds a
            quantized tensor or an adapter.
    """
    parts = _answered(ask, {"action": DIGESTS, "selector": "target"}, _parts)
    _check_plain("the engine", ((name, held.dtype) for part in parts for name, held in part.digests.items()))
    return parts


def _check_plain(side: str, dtypes: Iterable[tuple[str, str]]) -> None:
    """Refuse a side with a quantized tensor, or with an adapter beside its weights, given the dtype of each name."""
    strange = [f"{name} ({dtype})" for name, dtype in dtypes if dtype not in ROUNDED or ADAPTED.search(name)]
    if strange:
        raise NotSeenError(
            f"{side} holds {len(strange)} tensors in a quantized or packed form, or under an adapter (LoRA), the first "
            f"{strange[0]}, and such bits are not the other side's by design"
        )


def _parts(answer: Any) -> list[Part]:
    """Read the digests of every rank."""
    by_rank = _by_rank(answer)
    parts = [
        Part(rank, len(by_rank), {name: Digest.read(text) for name, text in by_rank[rank].items()})
        for rank in range(len(by_rank))
    ]
    if (longest := max((len(name) for part in parts for name in part.digests), default=0)) > LONGEST:
        raise EngineError(f"a tensor's name of {longest} letters")
    for part in parts:
        if odd := sorted(part.digests.keys() ^ parts[0].digests.keys()):
            raise EngineError(f"ranks 0 and {part.rank} tell other tensors, the first {odd[0]}")
    if not parts[0].digests:
        raise EngineError("no tensor is told")
    return parts


def _by_rank(answer: Any) -> dict[int, Mapping[str, str]]:
    """Return what the engine's weight checker tells of each tensor-parallel rank, from 0 on."""
    ranks: dict[int, Mapping[str, str]] = {}
    sizes = set()
    for part in answer["ranks"]:
        (place,) = part["parallelism_info"]
        for axis in ("pp_size", "dp_size"):
            if whole(place[axis], axis) != 1:
                raise NotSeenError(f"the engine runs with {axis} {place[axis]}: served is tensor parallelism alone")
        rank = whole(place["tp_rank"], "tp_rank")
        if rank in ranks:
            raise EngineError(f"rank {rank} is told twice")
        ranks[rank] = part["checksums"]
        sizes.add(whole(place["tp_size"], "tp_size"))
    if sizes != {len(ranks)} or max(ranks) >= len(ranks):
        raise EngineError(f"ranks {sorted(ranks)[:SHOWN]} are told, of {sorted(sizes)[:SHOWN]}")
    return ranks


def untold(error: object) -> str:
    """Say what to do about an engine that does not tell its weights."""
    return (
        f"{error}\nthe engine did not tell its weights: where its answer gives no other reason, start SGLang with "
        f"{ASKED}=1 in its environment, where mis-plugins is installed, and vLLM with VLLM_SERVER_DEV_MODE=1 beside it"
    )


def _answered(ask: Ask, body: Mapping[str, Any], read: Callable[[Any], T]) -> T:
    """Ask the engine, and read its answer."""
    try:
        answer = ask(body)
    except EngineError as error:
        raise NotSeenError(untold(error)) from error
    try:
        with reading("could not compare: the engine's weight checker", "our plugin"):
            return read(answer)
    except EngineError as error:
        raise NotSeenError(str(error)) from error


def _of(part: Part, first: Mapping[str, Digest], weights: Weights) -> Iterator[Difference]:
    """Yield a rank's tensors that are not the trainer's; the shapes of all ranks are taken from the `first`, rank 0."""
    rank = part.place
    for name, digest in part.digests.items():
        try:
            ours = weights.held(name, first[name].shape, part.rank, part.ranks)
        except Lacking as lacking:
            yield Difference(name, rank, f"the trainer holds no {lacking}")
            continue
        except (LookupError, ArithmeticError, ValueError, RuntimeError):
            yield Difference(name, rank, f"no cut of the trainer's has the engine's shape {list(digest.shape)}")
            continue
        if tuple(ours.shape) != digest.shape:
            yield Difference(name, rank, f"shape {list(ours.shape)} against the engine's {list(digest.shape)}")
        elif Digest.of(ours.to(getattr(torch, digest.dtype))) != digest:
            yield Difference(name, rank, "other values")


def _by_how_much(ask: Ask, first: Difference, parts: list[Part], weights: Weights) -> Difference:
    """Fetch the values of a tensor that differs, unless they are too many, and say how far they lie apart."""
    part = parts[first.rank or 0]
    digest = part.digests.get(first.name)
    if digest is None or first.why != "other values":
        return first
    ours = weights.held(first.name, digest.shape, part.rank, part.ranks).to(getattr(torch, digest.dtype))
    if ours.nbytes * part.ranks > LARGEST:
        return first

    asked = {"action": VALUES, "skip_tensor_list": [first.name], "selector": "target"}
    theirs = _answered(ask, asked, lambda answer: read_values(_by_rank(answer)[part.rank][first.name], digest))
    mismatch = first_mismatch(ours, theirs)
    if mismatch is None:
        return Difference(first.name, first.rank, "other values, which were the trainer's when asked again")
    largest = float((ours.double() - theirs.double()).abs().max())
    return Difference(
        first.name, first.rank, f"{mismatch} (trainer against engine; largest |difference| {largest:.3g})"
    )
