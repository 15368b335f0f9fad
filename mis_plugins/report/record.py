"""The neutral record of one response, which every reader yields, and batches of records, packed end to end.

Where a file lacks a key of the record, `lacking` names the nearest spelling among its keys.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher, get_close_matches
from functools import cached_property
from itertools import accumulate, groupby
from operator import attrgetter
from reprlib import repr as shortened
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mis_plugins.packing.ragged import Ragged
from mis_plugins.shared.absent import HIGHEST, LOWEST
from mis_plugins.shared.budget import ITEMS, RecordError


@dataclass(frozen=True)
class Record:
    """One response of R tokens. What a source does not tell is None.

    step: number of the rollout, or of the optimizer step, that trained on the response.
    sample: a name of the response for people.
    behavior_log_probs: log mu, as the rollout engine reported it; NaN where it is missing.
    proximal_log_probs: log pi_old, as the trainer computed it before the update.
    loss_mask: true where a token enters the loss.
    tokens: ids of the response's tokens.
    text: the text of each token.
    prompt, response: texts in whole.
    advantages: of each token.
    versions: version of the weights that wrote each token.
    trainer_version: version of the weights that computed `proximal_log_probs`.
    turns: number of the turn that each token belongs to.
    route_differs: true where trainer and engine chose other experts for a token.
    truncated: whether the response ran into a limit before its end token.
    absent: of each side's valid tokens without a log-prob, how often each entry stands in for one, by its name.
    """

    step: int
    sample: str
    behavior_log_probs: Float[Tensor, " R"]
    proximal_log_probs: Float[Tensor, " R"]
    loss_mask: Bool[Tensor, " R"]
    tokens: Int[Tensor, " R"] | None = None
    text: tuple[str, ...] | None = None
    prompt: str | None = None
    response: str | None = None
    advantages: Float[Tensor, " R"] | None = None
    reward: float | None = None
    versions: Int[Tensor, " R"] | None = None
    trainer_version: int | None = None
    turns: Int[Tensor, " R"] | None = None
    route_differs: Bool[Tensor, " R"] | None = None
    truncated: bool | None = None
    absent: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.loss_mask.numel()

    def copied(self) -> "Record":
        """A copy in memory of its own: a column of a dump is a view that keeps the whole file mapped."""
        tensors = {name: value.clone() for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)

    @property
    def ages(self) -> Int[Tensor, " R"] | None:
        """Trainer version less each token's version. Without a trainer version the newest token counts as age 0."""
        return None if self.newest is None or self.versions is None else self.newest - self.versions

    @property
    def newest(self) -> int | None:
        """The trainer's version, or that of the newest token; None where no token has one."""
        if self.versions is None or not self.size:
            return None
        return int(self.versions.max()) if self.trainer_version is None else self.trainer_version


LONGEST_TEXT = 20_000  # letters that are kept of a prompt or a response
LONGEST_WORD = 200  # letters that are kept of a token's text or of a sample's name
LARGEST = 2**53  # whole numbers up to here are exact in JSON, and their differences fit in 64 bits
CERTAIN = 0.1  # a log-probability is at most 0; a mean so much above is no noise of a few tokens
FALLING = 16  # numbers that follow one another by their size once in 2e13 times by chance
REQUIRED = ("behavior_log_probs", "proximal_log_probs")
KINDS: dict[str, torch.dtype] = {
    **dict.fromkeys((*REQUIRED, "advantages"), torch.float32),
    **dict.fromkeys(("tokens", "versions", "turns"), torch.int64),
    **dict.fromkeys(("loss_mask", "route_differs"), torch.bool),
}


def from_mapping(values: Mapping[str, Any], step: Any, sample: str) -> Record:
    """A record from lists, arrays or tensors by the names of the neutral form.

    `null` in a list of log-probs, and a number that stands in for one (`shared/absent.py`), is NaN.

    Raises:
        RecordError: a list is missing, holds something else than numbers, or has another length than the response.
    """
    if any(values.get(name) is None for name in REQUIRED):
        held = [name for name, value in values.items() if value is not None]
        raise RecordError(f"sample {sample}: {lacking(REQUIRED, held)}")
    columns = {name: _tensor(name, values[name]) for name in KINDS if values.get(name) is not None}
    size = columns["behavior_log_probs"].numel()
    columns.setdefault("loss_mask", torch.ones(size, dtype=torch.bool))
    for name, value in columns.items():
        if value.numel() != size:
            raise RecordError(f"sample {sample}: {name} has {value.numel()} values, and behavior_log_probs {size}")
    absent = {name: _absent(values[name], columns[name], columns["loss_mask"]) for name in REQUIRED}
    for name in REQUIRED:
        columns[name] = torch.threshold(columns[name], LOWEST, math.nan)
        mean = float(columns[name][columns["loss_mask"] & columns[name].isfinite()].double().mean())
        if mean > CERTAIN:  # as of probabilities, or of negative log-probs
            raise RecordError(f"{name}: the mean is {mean:.3g}, and no log-probability is above 0")
        columns[name] = columns[name].masked_fill(columns[name] > HIGHEST, math.nan)
        if bool((columns[name].diff() <= 0).all()) and columns[name].unique().numel() >= FALLING:
            raise RecordError(f"{name}: never rises from token to token, as a running sum; give each token's own")
    if size >= FALLING and all(columns[name].unique().numel() == 1 and columns[name].any() for name in REQUIRED):
        raise RecordError("both sides have one number throughout, as a mean has; give each token's own log-prob")
    trainer, versions = _version(values.get("trainer_version")), columns.get("versions")
    if trainer is not None and versions is not None and size and versions.max() > trainer:
        raise RecordError(f"trainer_version: got {trainer}; no token is newer, and versions has {int(versions.max())}")
    return Record(
        step=step_of(step),
        sample=printed(sample, LONGEST_WORD),
        text=_text(values.get("text"), size),
        prompt=_whole_text(values.get("prompt")),
        response=_whole_text(values.get("text")),
        reward=_number("reward", values.get("reward")),
        trainer_version=trainer,
        truncated=bool(values["truncated"]) if values.get("truncated") in (0, 1) else None,
        absent=absent,
        **columns,  # pyright: ignore[reportArgumentType]
    )


def step_of(value: Any) -> int:
    """The number of a step. Writers of JSON that know no whole numbers write 3.0 for 3."""
    whole = int(value) if type(value) is int or (type(value) is float and value.is_integer()) else -1
    if not 0 <= whole <= LARGEST:
        raise RecordError(f"step: got {shortened(value)}; give a whole number from 0 to {LARGEST}")
    return whole


def printed(text: Any, most: int) -> str:
    """A foreign value as text of bounded length that can be written as UTF-8: half a surrogate pair becomes `?`."""
    return str(text)[:most].encode("utf-8", "backslashreplace").decode("utf-8")


def _tensor(name: str, values: Any) -> Tensor:
    kind = KINDS[name]
    numbers = values.detach().reshape(-1).to("cpu") if isinstance(values, Tensor) else _of_list(name, values, kind)
    ITEMS.check(numbers.numel(), 0, name)
    of_whole = name in REQUIRED and isinstance(values, Tensor) and not numbers.is_floating_point()
    if of_whole or numbers.is_complex() or (kind.is_floating_point and numbers.dtype == torch.bool):
        raise RecordError(f"{name}: holds numbers of another kind ({numbers.dtype})")
    if kind == torch.int64:
        whole = (numbers >= -LARGEST) & (numbers <= LARGEST) & (numbers == numbers.double().trunc())
        if not whole.all():
            raise RecordError(f"{name}: holds a number that is not whole, or lies beyond {LARGEST}")
    if kind == torch.bool and not ((numbers == 0) | (numbers == 1)).all():
        raise RecordError(f"{name}: holds a number other than 0 and 1")
    return numbers.to(kind)


def _of_list(name: str, values: Any, kind: torch.dtype) -> Tensor:
    try:
        if kind.is_floating_point and None in values:
            values = [math.nan if value is None else value for value in values]
        numbers = torch.as_tensor(values) if isinstance(values, list | tuple) else None
    except (TypeError, ValueError, RuntimeError, ArithmeticError):
        numbers = None
    if numbers is None or numbers.dim() != 1:
        raise RecordError(f"{name}: no list of numbers: {shortened(values)}")
    return numbers


def _absent(given: Any, column: Float[Tensor, " R"], mask: Bool[Tensor, " R"]) -> dict[str, int]:
    """How many valid entries are no log-prob, by what stands there: `-9999`, `None`, `nan`."""
    places = (mask & ~((column > LOWEST) & (column <= HIGHEST))).nonzero().flatten().tolist()
    lacking = 0 if isinstance(given, Tensor) else sum(given[place] is None for place in places)
    numbers = Counter(f"{x:g}" for x in column[places].tolist())
    return {name: n for name, n in {"None": lacking, **numbers, "nan": numbers["nan"] - lacking}.items() if n}


def _text(values: Any, size: int) -> tuple[str, ...] | None:
    """The text of each token; None where the source gives one text for the whole response."""
    if not isinstance(values, list | tuple) or len(values) != size:
        return None
    return tuple(printed(value, LONGEST_WORD) for value in values)


def _whole_text(value: Any) -> str | None:
    """A text, or the messages of a chat one below the other; None of anything else."""
    if isinstance(value, str):
        return printed(value, LONGEST_TEXT)
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        return None
    messages = (f"{message.get('role')}: {message.get('content')}" for message in value)
    return printed("\n".join(messages), LONGEST_TEXT) or None


def _number(name: str, value: Any) -> float | None:
    if not isinstance(value, int | float):
        return None
    if abs(value) > LARGEST and not math.isinf(value):
        raise RecordError(f"{name}: got {shortened(value)}, which is beyond {LARGEST}")
    return float(value)


def _version(value: Any) -> int | None:
    """The version of a trainer, which hosts also write as text."""
    if isinstance(value, str) and value.isdecimal() and len(value) < LONGEST_WORD:
        value = int(value)
    if value is not None and (type(value) is not int or abs(value) > LARGEST):
        raise RecordError(f"trainer_version: got {shortened(value)}; give a whole number")
    return value


BATCH_TOKENS = 131_072  # rows of a batch stay in the cache of a core
UNKNOWN = -1


@dataclass(frozen=True)
class Batch:
    """N responses of one step, packed into T tokens."""

    step: int
    records: tuple[Record, ...]

    @cached_property
    def ragged(self) -> Ragged:
        ends = accumulate(record.size for record in self.records)
        return Ragged(torch.tensor([0, *ends]), torch.cat([record.loss_mask for record in self.records]))

    @cached_property
    def proximal(self) -> Float[Tensor, " T"]:
        return torch.cat([record.proximal_log_probs for record in self.records])

    @cached_property
    def behavior(self) -> Float[Tensor, " T"]:
        return torch.cat([record.behavior_log_probs for record in self.records])

    @cached_property
    def advantages(self) -> Float[Tensor, " T"] | None:
        """Advantages, NaN of a response without; None where no response has them."""
        return self._column("advantages", torch.nan, torch.float32)

    def whole_numbers(self, name: str) -> Int[Tensor, " T"] | None:
        """The records' `tokens`, `ages`, `turns` or `route_differs`, -1 where unknown; None where all are."""
        return self._column(name, UNKNOWN, torch.int64)

    @cached_property
    def positions(self) -> Int[Tensor, " T"]:
        """Place of each token in its response, from 0."""
        starts = self.ragged.to_tokens(self.ragged.cu_seqlens[:-1])
        return torch.arange(starts.numel()) - starts

    def _column(self, name: str, missing: float, dtype: torch.dtype) -> Tensor | None:
        values = [getattr(record, name) for record in self.records]
        if all(value is None for value in values):
            return None
        filled = (
            torch.full((record.size,), missing, dtype=dtype) if value is None else value.to(dtype)
            for value, record in zip(values, self.records, strict=True)
        )
        return torch.cat(list(filled))


HELD = 2**22  # tokens of a step that wait for the newest version among them


def dated(step: Iterator[Record]) -> Iterator[Record]:
    """The records of a step with a trainer version: where none is told, the newest token of the step has age 0.

    One step trained on all its responses, so a step is held back to its end where its tokens alone have versions. Of a
    step beyond `HELD` tokens the newest token so far counts.
    """
    newest: int | None = None
    while held := list(_until_dated(step)):
        versions = (newest, *(record.newest for record in held))
        newest = max((version for version in versions if version is not None), default=None)
        for record in held:
            is_dated = newest is None or record.trainer_version is not None
            yield record if is_dated else replace(record, trainer_version=newest)


def _until_dated(step: Iterator[Record]) -> Iterator[Record]:
    """The next record of a step, and those behind it where one of them has versions without a trainer's."""
    size, waits = 0, False
    for record in step:
        size, waits = size + record.size, waits or (record.versions is not None and record.trainer_version is None)
        yield record
        if not waits or size > HELD:
            return


def batches(records: Iterable[Record], tokens: int = BATCH_TOKENS) -> Iterator[Batch]:
    """Batches of at most `tokens` tokens, or of one longer response; responses of one step that follow one another."""
    for step, run in groupby(records, attrgetter("step")):
        held, size = list[Record](), 0
        for record in dated(run):
            if held and size + record.size > tokens:
                yield Batch(step, tuple(held))
                held, size = [], 0
            held.append(record)
            size += record.size
        yield Batch(step, tuple(held))


SHOWN = 12  # keys of a file
ALIKE = 0.6  # share of letters in common, as `difflib` counts them
BEHAVIOR, PROXIMAL = ("behaviour rollout engine sampler sampling mu inference", "old trainer train training actor pi")
OTHERS = {"ref", "reference", "teacher", "critic"}
SPELLED = 0.7  # share of letters in common of two spellings of one word
ONE_WORD: dict[str, str] = {
    **dict.fromkeys(BEHAVIOR.split(), "behavior"),
    **dict.fromkeys(PROXIMAL.split(), "proximal"),
    **dict.fromkeys(("logprobs", "logprob", "logps", "logp"), "log probs"),
    "prob": "probs",
}  # fmt: skip


def nearest(needed: str, names: Iterable[str]) -> str | None:
    """The key of `names` that is spelled nearest to `needed`, whatever the order of its words; None where none is near.

    Of two near keys one has all words of the other, and the last word of `needed`, which says what it counts. A key of
    another model's log-probs, such as the reference's, is not near.
    """
    words, asked = {key: _words(key) for key in names}, _words(needed).split()
    noun = _words(needed.rpartition("_")[2]).split()
    rated = (
        (SequenceMatcher(None, _words(needed), spelled).ratio(), key)
        for key, spelled in words.items()
        if OTHERS.isdisjoint(spelled.split())
        and (_are_among(spelled.split(), asked) or _are_among(asked, spelled.split()))
        and _are_among(noun, spelled.split())
    )
    rate, key = max(rated, default=(0.0, ""))
    return key if rate >= ALIKE else None


def _are_among(words: Sequence[str], others: Sequence[str]) -> bool:
    return all(get_close_matches(word, others, 1, SPELLED) for word in words)


def _words(key: str) -> str:
    words = re.findall(r"[a-z]+|\d+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", key[:200]).lower())
    spelled = [ONE_WORD[word] if word in ONE_WORD else word for word in words]
    return " ".join(sorted(" ".join(spelled).split()))


def lacking(needed: Sequence[str], names: Iterable[str]) -> str:
    """What is missing among the keys `names`, the nearest spelling of each missing key, and the keys, in words."""
    keys = list(map(str, names))
    missing = [key for key in needed if key not in keys]
    near: dict[str, str] = {}
    for key in missing:
        if close := nearest(key, set(keys) - {*needed, *near.values()}):
            near[key] = close
    renamed = ", ".join(f"{shortened(close)} -> {key}" for key, close in near.items())
    shown = ", ".join(map(shortened, keys[:SHOWN])) + (", ..." if len(keys) > SHOWN else "")
    return f"no {' and no '.join(missing)}; found {shown or 'no key'}" + (f"; rename {renamed}" if renamed else "")
