"""Sums over tokens, sequences and token ids for the detectors of causes, kept in one pass."""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy  # noqa: F401  a tensor's `numpy()` without it is no ModuleNotFoundError
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mis_plugins.config.terms.divergence import k3
from mis_plugins.metrics import slope
from mis_plugins.metrics.tokens import Tokens
from mis_plugins.packing.ragged import Ragged
from mis_plugins.report.lists import LONG_ENOUGH, Lists
from mis_plugins.report.record import Batch

BEGINNING = 4  # valid tokens that count as the beginning of a response
WITH_MIDDLE = BEGINNING + 2  # valid tokens of a sequence whose beginning and end are compared with its middle
LARGEST_ID = 1_000_000
CONTEXTS = 2**20  # held of all batches, in 8 MB
FOLDS = 32  # of the sequences, for the standard errors of slopes and means
RELATED = ("usable", *slope.RELATED_SUMS, "inverse")
UNLIKELY = -1.0  # log-prob of one side where the other reports a probability of exactly 1
RUN = 3  # fewest such tokens of a run, which are as unlikely together as so many of `UNLIKELY`
CUT = math.log(0.9)  # of a run the mean: a nucleus of one token seldom leaves less; above it rounding repeats numbers
GRID = 64  # numbers of a person, as -1 or -20.5, are whole multiples of 1/64, and are few enough to keep each
NEVER = -50.0  # a million tokens of this log-prob have a probability of 2e-16 together: none of a run was sampled
MOST_RARE = 2**18  # numbers of one side, the lowest, whose repetition over batches is seen
SIDES = ("trainer", "rollout")


@dataclass(frozen=True)
class Moments:
    """Number, mean and standard error of a number over sequences."""

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def plus(self, x: Float[Tensor, " N"]) -> "Moments":
        """Moments with the finite numbers of `x` added."""
        x = x[x.isfinite()].double()
        return Moments(self.count + x.numel(), self.total + float(x.sum()), self.squares + float(x.square().sum()))

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    @property
    def error(self) -> float:
        """Standard error of the mean; NaN of fewer than two numbers."""
        spread = max(self.squares - self.count * self.mean**2, 0.0)
        return math.sqrt(spread / self.count / (self.count - 1)) if self.count > 1 else math.nan


def as_normal(errors: float, freedom: float) -> float:
    """The standard errors of a normal distribution with the chance of Student's t (Wallace, 1959); 0 of no freedom.

    Few responses tell their own spread badly: six errors of a normal distribution are 13 at a freedom of 15.
    """
    if freedom < 1:
        return 0.0
    size = math.sqrt(freedom * math.log1p(errors**2 / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)
    return math.copysign(size, errors)


@dataclass
class Evidence:
    """Sums over a whole run that detectors read; the step metrics stand beside them.

    moments: of each number of `of_sequences`.
    fills: of each side and number the tokens with exactly that log-prob, and their sum of `mass`: 0 where the other
        side finds the token, or a run of such tokens, unlikely; numbers below `CUT` where the other is a nat away,
        and all below `NEVER`.
    rare: of each side the numbers that fewer than `RUN` tokens have had, and what `fills` will have of each.
    apart: of each side the tokens with such numbers, by their octave, from a power of two to the next.
    copied: number of usable tokens in responses whose lists are equal, as where one list is a copy of the other.
    certain: number of other usable tokens with log-prob 0 on both sides.
    absent: of each side how often each entry stands in for a log-prob, by its name.
    lists: pairs of both lists of log-probs, for each sequence.
    folds: sums of `RELATED` over the usable tokens of every `FOLDS`-th sequence.
    inner: sums of `RELATED` over those usable tokens of each sequence that no cause of one place touches: neither the
        first `LONG_ENOUGH`, nor the last ones, nor of `fills`, nor of another route or an older version.
    rows: of each sequence its step, the number of usable tokens, and their sum of `mass`.
    seen, repeated: digests of the responses' log-probs, and how many responses repeat an earlier one's.
    contexts: of each remainder by `CONTEXTS` the last context with it.
    by_id: of each token id the count, and the sums of log r, log mu, (log r)^2, (log mu)^2 and their product; of equal
        contexts the first one counts.
    """

    moments: defaultdict[str, Moments] = field(default_factory=lambda: defaultdict(Moments))
    fills: defaultdict[tuple[str, float], Float[Tensor, " 2"]] = field(
        default_factory=lambda: defaultdict(lambda: torch.zeros(2).double())
    )
    rare: dict[str, tuple[Float[Tensor, " _"], Float[Tensor, "_ 2"]]] = field(default_factory=dict)
    apart: Counter[tuple[str, int]] = field(default_factory=Counter)
    copied: int = 0
    certain: int = 0
    broken_advantages: int = 0
    absent: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    lists: Lists = field(default_factory=Lists)
    folds: Float[Tensor, "R F"] = field(default_factory=lambda: torch.zeros(len(RELATED), FOLDS).double())
    inner: list[Float[Tensor, "R _"]] = field(default_factory=list)
    rows: list[Float[Tensor, "3 _"]] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    repeated: int = 0
    contexts: Int[Tensor, " C"] = field(default_factory=lambda: torch.zeros(CONTEXTS, dtype=torch.int64))
    by_id: Float[Tensor, "6 V"] = field(default_factory=lambda: torch.zeros(6, 0))

    def add(self, batch: Batch, tokens: Tokens) -> None:
        ended = torch.tensor([record.truncated is not True for record in batch.records])
        numbers = of_sequences(batch.ragged, tokens, ended)
        for name, values in numbers.items():
            self.moments[name] = self.moments[name].plus(values)
        fills = self._add_fills(batch, tokens)
        for record in batch.records:
            if record.advantages is not None:
                self.broken_advantages += int((~record.advantages.isfinite() & record.loss_mask).sum())
            for side, names in record.absent.items():
                self.absent[side].update(names)
        self._add_lists(batch, tokens, fills)
        again = self._are_repeated(batch)
        ids = batch.whole_numbers("tokens")
        if ids is not None:
            new = ~batch.ragged.to_tokens(again) & self._are_first(contexts_of(ids, batch.positions))
            self._add_ids(ids.masked_fill(~new, -1), tokens)

    def _add_fills(self, batch: Batch, tokens: Tokens) -> Bool[Tensor, " T"]:
        """Add `fills`, `apart`, `copied` and `certain`, and return the tokens that `fills` counts."""
        counted = torch.zeros_like(tokens.usable)
        masses, distant = mass(tokens), tokens.log_ratio.abs() > -UNLIKELY
        rows = (torch.ones_like(tokens.usable), (tokens.log_probs == 0).all(0), tokens.log_ratio != 0)
        usable, sure, apart = batch.ragged.sums(*(tokens.usable & row for row in rows))
        copies = (apart == 0) & (usable >= LONG_ENOUGH) & (sure < usable)
        self.copied, self.certain = self.copied + int(usable[copies].sum()), self.certain + int(sure[~copies].sum())
        for side, own, other in zip(SIDES, tokens.log_probs, tokens.log_probs.flip(0), strict=True):
            sure = tokens.usable & (own == 0)
            odd = sure & ((other < UNLIKELY) | in_unlikely_runs(sure, other, batch.positions))
            apart = tokens.usable & (distant | (own < NEVER)) & (own < CUT)
            octaves, counts = own[apart].frexp().exponent.unique(return_counts=True)
            self.apart.update({(side, place): n for place, n in zip(octaves.tolist(), counts.tolist(), strict=True)})
            numbers, place, counts = own[odd | apart].unique(return_inverse=True, return_counts=True)
            sums = torch.stack([counts, torch.bincount(place, masses[odd | apart], len(numbers))], 1).double()
            counted[odd | apart] |= self._fill(side, numbers, sums)[place]
        return counted

    def _fill(self, side: str, numbers: Float[Tensor, " N"], sums: Float[Tensor, "N 2"]) -> Bool[Tensor, " N"]:
        """Add numbers to `fills`: a person's at once, and others when `RUN` tokens have had one; which ones were added.

        A batch is as small as a step, so that numbers wait in `rare` for the batches behind.
        """
        held, earlier = self.rare.get(side, (numbers[:0], sums[:0]))
        every, place = torch.cat([held, numbers]).unique(return_inverse=True)
        total = sums.new_zeros(len(every), 2).index_add_(0, place, torch.cat([earlier, sums]))
        kept = (total[:, 0] >= RUN) | (GRID * every).frac().eq(0)
        for number, row in zip(every[kept].tolist(), total[kept], strict=True):
            self.fills[side, number] += row
        self.rare[side] = every[~kept][:MOST_RARE], total[~kept][:MOST_RARE]
        return kept[place[len(held) :]]

    def _add_lists(self, batch: Batch, tokens: Tokens, fills: Bool[Tensor, " T"]) -> None:
        """Add the pairs of both lists, and the sums of each fold."""
        ragged, usable = batch.ragged, tokens.usable
        owner = ragged.to_tokens(torch.arange(ragged.size))[usable]
        turns = batch.whole_numbers("turns")
        turn = (ragged.turns if turns is None else turns)[usable]
        y, x = tokens.log_probs[:, usable]
        r = 1 + tokens.excess[usable]
        counts, masses = ragged.sums(usable, mass(tokens))
        self.rows.append(torch.stack([torch.full_like(masses, batch.step), counts, masses]))
        rows = torch.stack([torch.ones_like(x), x, y, x * x, y * y, x * y, r, r * r, 1 / r])
        self.folds.index_add_(1, (owner + self.lists.size) % FOLDS, rows)
        self.lists.add(torch.stack([x, y]), owner, turn, ragged.size)
        first, last = ends(ragged, usable, LONG_ENOUGH, LONG_ENOUGH)
        touched = first | last | fills
        for name in ("route_differs", "ages"):
            if (numbers := batch.whole_numbers(name)) is not None:
                touched |= numbers > 0
        self.inner.append(rows.new_zeros(len(RELATED), ragged.size).index_add_(1, owner, rows * ~touched[usable]))

    def within(self, kept: Bool[Tensor, " N"]) -> Float[Tensor, "R F"]:
        """`folds` over the `inner` tokens of some sequences."""
        sums = torch.cat(self.inner, 1)[:, kept]
        return torch.zeros_like(self.folds).index_add_(1, torch.arange(sums.shape[1]) % FOLDS, sums)

    def _are_repeated(self, batch: Batch) -> Bool[Tensor, " N"]:
        """Which responses have all log-probs of an earlier one, as of a file or a step that was read twice."""
        again = []
        for record in batch.records:
            both = torch.cat([record.behavior_log_probs, record.proximal_log_probs]).numpy().tobytes()
            again.append(record.size >= LONG_ENOUGH and hash(both) in self.seen)
            self.seen.add(hash(both))
        self.repeated += sum(again)
        return torch.tensor(again)

    def _are_first(self, contexts: Int[Tensor, " T"]) -> Bool[Tensor, " T"]:
        """Tokens whose context no earlier token has, as far as `contexts` holds: equal ones err alike in any engine."""
        names, place = contexts.unique(return_inverse=True)
        tokens, slots = torch.arange(len(contexts)), names % len(self.contexts)
        first = torch.full_like(names, len(contexts)).scatter_reduce(0, place, tokens, "amin")
        first[self.contexts[slots] == names] = len(contexts)
        self.contexts[slots] = names
        return first[place] == tokens

    def _add_ids(self, ids: Int[Tensor, " T"], tokens: Tokens) -> None:
        named = tokens.usable & (ids >= 0) & (ids < LARGEST_ID)
        index, r, m = ids[named], tokens.log_ratio[named], tokens.log_probs[1, named]
        if not index.numel():
            return
        held = self.by_id.shape[1]
        size = max(int(index.max()) + 1, held)
        rows = (torch.ones_like(r), r, m, r * r, m * m, r * m)
        added = torch.stack([torch.bincount(index, row, size) for row in rows])
        self.by_id = torch.nn.functional.pad(self.by_id, (0, size - held)) + added


def contexts_of(ids: Int[Tensor, " T"], positions: Int[Tensor, " T"]) -> Int[Tensor, " T"]:
    """A hash of each token's id and of the ids that precede it in its response."""
    mixed = (ids + 1) * 6364136223846793005  # products and sums wrap around at 2^64, as a hash's may
    mixed = (mixed ^ (mixed >> 29)) * (2 * positions + 1)
    sums = torch.cat([mixed.new_zeros(1), mixed.cumsum(0)])
    starts = torch.arange(len(ids)) - positions
    return sums[1:] - sums[starts]


def in_unlikely_runs(
    sure: Bool[Tensor, " T"], other: Float[Tensor, " T"], positions: Int[Tensor, " T"]
) -> Bool[Tensor, " T"]:
    """Tokens of a response in runs of `RUN` or more sure ones, which the other side finds unlikely together."""
    before = torch.cat([sure.new_zeros(1), sure[:-1]]) & (positions > 0)
    number = (sure & ~before).cumsum(0) * sure  # of the token's run; 0 outside of runs
    count, log_prob = torch.bincount(number), torch.bincount(number, torch.where(sure, other, 0))
    return sure & ((log_prob < UNLIKELY * RUN) & (log_prob < CUT * count) & (count >= RUN))[number]


def ends(ragged: Ragged, usable: Bool[Tensor, " T"], first: int, last: int = 1) -> Bool[Tensor, "2 T"]:
    """The `first` usable tokens of each response, and its `last` ones."""
    place = usable.cumsum(0)
    starts = torch.cat([place.new_zeros(1), place])[ragged.cu_seqlens]
    place = place - ragged.to_tokens(starts[:-1])
    return usable & torch.stack([place <= first, place > ragged.to_tokens(starts.diff()) - last])


def mass(tokens: Tokens) -> Float[Tensor, " T"]:
    """How much each token adds to the mismatch: e^-|log r| - 1 + |log r|, the k3 of a ratio below 1, on either side.

    Unlike k3 no single token outweighs a run, so that shares of it tell what a cause accounts for.
    """
    return k3(-tokens.log_ratio.abs())


def of_sequences(ragged: Ragged, tokens: Tokens, ended: Bool[Tensor, " N"]) -> dict[str, Float[Tensor, " L"]]:
    """Numbers of the sequences that have at least `WITH_MIDDLE` usable tokens.

    Returns:
        Mean |log r| of the first tokens (`beginning`), of the last token (`end`, NaN of a response that ran into a
        limit), and of the others (`middle`); the mean log r of the first tokens (`beginning_signed`); what `beginning`
        and `end` are above `middle`; the sum of `mass` that the first tokens (`beginning_mass`) and the last one
        (`end_mass`) have beyond the others, beside the sum of all (`mass`); and whether the largest |log r| of all is
        there (`beginning_largest`, `end_largest`), beside the chance of it (`beginning_chance`, `end_chance`).
    """
    size, masses = tokens.log_ratio.abs(), mass(tokens)
    usable = tokens.usable & (tokens.log_probs != 0).any(0)  # of both sides, a log-prob of 0 is that of padding
    first, last = ends(ragged, usable, BEGINNING)
    owner = ragged.to_tokens(torch.arange(ragged.size))
    most = size.new_zeros(ragged.size).scatter_reduce(0, owner, torch.where(usable, size, 0), "amax")
    largest = ((size == most[owner]) & (size > 0)).to(size.dtype)
    parts = (
        (first, size), (first, tokens.log_ratio), (last, size), (first, masses), (last, masses), (first, largest),
        (last, largest),
    )  # fmt: skip
    rows = torch.stack([*ragged.sums(usable, size, masses, *(torch.where(where, x, 0) for where, x in parts))])
    with_middle = rows[0] >= WITH_MIDDLE
    n, total, whole, begins, signed, end, begins_mass, end_mass, at_first, at_last = rows[:, with_middle].unbind()
    ends_itself = ended[with_middle]
    middle, rest = (total - begins - end) / (n - BEGINNING - 1), n - BEGINNING - 1
    usual = (whole - begins_mass - end_mass) / rest
    at_end, beginning = torch.where(ends_itself, end, torch.nan), begins / BEGINNING
    return {
        "beginning": beginning, "beginning_signed": signed / BEGINNING, "end": at_end, "middle": middle,
        "beginning_excess": beginning - middle, "end_excess": at_end - middle, "mass": whole,
        "beginning_mass": begins_mass - BEGINNING * usual, "end_mass": end_mass - usual,
        "beginning_largest": at_first, "end_largest": torch.where(ends_itself, at_last, torch.nan),
        "beginning_chance": BEGINNING / n, "end_chance": torch.where(ends_itself, 1 / n, torch.nan),
    }  # fmt: skip
