"""Small made-up runs, and recordings of a real model, with one cause of a mismatch planted in each.

A made-up policy is softmax(scale * h W'), h a random hidden state with a common part, as in a real model. The engine's
h has noise of the asked precision, and the engine samples. A plant changes one thing on one side, in three severities.
A recording holds what `lab/mismatch.py` kept of a rung: real engines sampled, and Megatron-core scored. The rungs int4
and int3 are Hugging Face's (`python -m lab.mismatch --engine hf --rungs int4 int3 --results FOLDER`), of int4 half as
many chats; all others are of SGLang or vLLM.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from mis_plugins.report.record import Record

VOCABULARY, WIDTH, SEQUENCES, STEPS = 128, 16, 160, 8
END, END_LOGIT = 0, 6.0
SHORTEST, LONGEST = 30, 230
NEWEST = 3  # version of the trainer, where versions are told
PRECISIONS = {"bf16": 0.02, "int8": 0.036, "fp8": 0.08, "int6": 0.15}
RECORDINGS = Path(__file__).parent / "results" / "mismatch"
LADDER = ("bf16", "int8", "fp8", "int6", "int5")  # recorded rungs, the finest first


@dataclass(frozen=True)
class Flat:
    """Responses of these lengths, end to end."""

    lengths: Tensor

    @property
    def starts(self) -> Tensor:
        return self.lengths.cumsum(0) - self.lengths

    @property
    def positions(self) -> Tensor:
        return torch.arange(int(self.lengths.sum())) - self.starts.repeat_interleave(self.lengths)

    @property
    def sequences(self) -> Tensor:
        """The number of each token's sequence."""
        return torch.arange(len(self.lengths)).repeat_interleave(self.lengths)

    @property
    def left(self) -> Tensor:
        """The number of tokens from each token to the last one of its sequence: 0 at the last one."""
        return self.lengths.repeat_interleave(self.lengths) - 1 - self.positions


@dataclass(frozen=True)
class Run(Flat):
    """All tokens of a made-up run, flat.

    trainer, engine: logits of both sides, [T, vocabulary].
    sampling: the logits that the engine draws from, where it reports other logits.
    versions: the version that wrote each token, where the run tells versions.
    """

    hidden: Tensor
    weights: Tensor
    trainer: Tensor
    engine: Tensor
    generator: torch.Generator
    sampling: Tensor | None = None
    versions: Tensor | None = None

    @property
    def steps(self) -> Tensor:
        """Step of each token."""
        return self.sequences * STEPS // len(self.lengths)

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)


@dataclass(frozen=True)
class Columns(Flat):
    """What both sides would have dumped, flat; the tokens' ids, routes, advantages and versions where they are told."""

    behavior: Tensor
    proximal: Tensor
    generator: torch.Generator
    tokens: Tensor | None = None
    route: Tensor | None = None
    advantages: Tensor | None = None
    versions: Tensor | None = None

    def errors(self) -> Tensor:
        """Draw the size of a normal error for each token."""
        return torch.randn(self.proximal.shape, generator=self.generator).abs()

    def by_sequence(self, column: Tensor, change: Callable[[Tensor], Tensor], every: int = 1) -> Tensor:
        """Return a column of which every `every`-th sequence is changed."""
        parts = column.split(self.lengths.tolist())
        return torch.cat([change(one) if place % every == 0 else one for place, one in enumerate(parts)])


def drawn(seed: int, precision: str, longest: int = LONGEST) -> Run:
    """Draw a clean run, with the engine at a precision."""
    generator = torch.Generator().manual_seed(seed)
    shortest = min(SHORTEST, longest // 2)
    lengths = torch.randint(shortest, longest, (SEQUENCES,), generator=generator)
    count = int(lengths.sum())
    noise = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    hidden, weights = noise(count, WIDTH) + 0.5 * noise(WIDTH), noise(VOCABULARY, WIDTH)
    sharpness = 0.3 + 0.5 * torch.rand(count, 1, generator=generator)
    hidden = hidden * sharpness
    error = PRECISIONS[precision] * noise(count, WIDTH)
    run = Run(lengths, hidden, weights, hidden @ weights.T, (hidden + error) @ weights.T, generator)
    for side in (run.trainer, run.engine):
        side[:, END] -= END_LOGIT
        side[run.starts + lengths - 1, END] += 3 * END_LOGIT
    return run


def sampled(run: Run) -> Columns:
    """Draw the tokens, and score them on both sides."""
    source = run.engine if run.sampling is None else run.sampling
    tokens = torch.multinomial(source.softmax(-1), 1, generator=run.generator)
    behavior, proximal = (side.log_softmax(-1).gather(1, tokens).squeeze(1) for side in (run.engine, run.trainer))
    return Columns(run.lengths, behavior, proximal, run.generator, tokens.squeeze(1), versions=run.versions)


@lru_cache(maxsize=16)
def rollouts(rung: str) -> Mapping[str, Tensor]:
    """Load the chats that were kept of a rung: behavior, lengths, and the log-probs of each trainer."""
    return load_file(RECORDINGS / f"{rung}-chats.safetensors")


def recorded(rung: str, seed: int, trainer: str = "bf16") -> Columns:
    """Return the turns of a rung's chats in an order that the seed draws."""
    kept, generator = rollouts(rung), torch.Generator().manual_seed(seed)
    order = torch.randperm(len(kept["lengths"]), generator=generator).tolist()
    sizes = kept["lengths"].tolist()
    behavior, proximal = (kept[name].split(sizes) for name in ("behavior", f"trainer {trainer}"))
    behavior, proximal = (torch.cat([side[place] for place in order]) for side in (behavior, proximal))
    return Columns(kept["lengths"][order], behavior, proximal, generator)


def records(columns: Columns, steps: int = STEPS) -> list[Record]:
    """Return the neutral records of a run of so many steps."""
    sizes, count = columns.lengths.tolist(), len(columns.lengths)
    flat = {
        "behavior_log_probs": columns.behavior, "proximal_log_probs": columns.proximal, "tokens": columns.tokens,
        "loss_mask": torch.ones(columns.behavior.shape, dtype=torch.bool), "advantages": columns.advantages,
        "route_differs": columns.route, "versions": columns.versions,
    }  # fmt: skip
    split: dict[str, Any] = {name: column.split(sizes) for name, column in flat.items() if column is not None}
    trainer = None if columns.versions is None else NEWEST
    by_sequence = (dict(zip(split, parts, strict=True)) for parts in zip(*split.values(), strict=True))
    return [
        Record(place * steps // count, str(place), trainer_version=trainer, **values)
        for place, values in enumerate(by_sequence)
    ]


def as_line(record: Record, **more: object) -> str:
    """Return a record as a line of the neutral form, with more keys of that form."""
    values = {name: x.tolist() if isinstance(x, Tensor) else x for name, x in vars(record).items() if name != "absent"}
    return json.dumps(values | more)


# Plants change logits before tokens are drawn, or columns after; each takes a size.


def _temperature(run: Run, temperature: float) -> Run:
    return replace(run, engine=run.engine / temperature)


def _raw(run: Run, temperature: float) -> Run:
    return replace(run, sampling=run.engine / temperature, trainer=run.trainer / temperature)


def _top_p(run: Run, mass: float) -> Run:
    ordered, places = run.engine.softmax(-1).sort(-1, descending=True)
    beyond = ordered.cumsum(-1) - ordered > mass
    cut = torch.zeros_like(beyond).scatter_(1, places, beyond)
    return replace(run, engine=run.engine.masked_fill(cut, -torch.inf))


def _end_token(run: Run, logits: float) -> Run:
    trainer = run.trainer.clone()
    trainer[run.starts + run.lengths - 1, END] -= logits
    return replace(run, trainer=trainer)


def _template(run: Run, size: float) -> Run:
    shift = torch.exp(-run.positions / 4.0).unsqueeze(1) * run.noise(1, WIDTH)
    return replace(run, trainer=run.trainer + size * shift @ run.weights.T)


def _other_weights(run: Run, scale: float) -> Run:
    return replace(run, trainer=scale * run.hidden @ run.noise(VOCABULARY, WIDTH).T)


def _drifted(run: Run, size: Tensor) -> Run:
    """Return the run whose trainer has other output weights, by a size of each token."""
    drift = run.hidden @ run.noise(VOCABULARY, WIDTH).T
    return replace(run, trainer=run.trainer + size.unsqueeze(1) * drift)


def _jump(run: Run, size: float) -> Run:
    return _drifted(run, size * (run.steps >= STEPS // 2))


def _rise(run: Run, size: float) -> Run:
    return _drifted(run, size * 2.0 ** (run.steps - STEPS + 1))


def _stale(run: Run, size: float) -> Run:
    late = run.sequences % 2 == 1
    return replace(_drifted(run, size * late), versions=NEWEST - late.long())


def _noisier(run: Run, size: float) -> Run:
    error = size * run.noise(len(run.hidden), WIDTH)
    return replace(run, engine=run.engine + error @ run.weights.T)


def _head(run: Run, bits: float) -> Run:
    return replace(run, engine=run.engine + run.hidden @ _rounding(run.weights, bits).T)


def _layer(run: Run, bits: float) -> Run:
    """Return the run whose engine has rounded the layer that makes the hidden states."""
    layer = torch.linalg.qr(run.noise(WIDTH, WIDTH)).Q
    error = run.hidden @ layer @ _rounding(layer, bits).T
    return replace(run, engine=run.engine + error @ run.weights.T)


def _rounding(weights: Tensor, bits: float) -> Tensor:
    """Return what rounding adds to a layer [outputs, inputs], with a scale for each output."""
    scale = weights.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    return (weights / scale).round() * scale - weights


def _nonfinite(columns: Columns, count: float) -> Columns:
    broken = torch.arange(7, 7 + int(count))
    return replace(columns, proximal=columns.proximal.index_fill(0, broken, torch.nan))


def _broken_advantages(columns: Columns, count: float) -> Columns:
    """Return the run with advantages, of which some responses' are the infinity of a division by no spread."""
    owner = columns.sequences
    advantages = torch.where(owner % 2 == 0, 1.0, -1.0)
    return replace(columns, advantages=torch.where(owner < count, torch.inf, advantages))


def _placeholder(columns: Columns, every: float) -> Columns:
    filled = torch.arange(len(columns.behavior)) % int(every) == 5
    return replace(columns, behavior=columns.behavior.masked_fill(filled, 0.0))


def _changed(columns: Columns, every: float) -> Columns:
    def mixed(one: Tensor) -> Tensor:
        return one[torch.randperm(len(one), generator=columns.generator)]

    return replace(columns, proximal=columns.by_sequence(columns.proximal, mixed, int(every)))


def _padded_end(columns: Columns, count: float) -> Columns:
    """Return the run whose responses end in tokens of the host's own, with 0 for the engine's log-probs."""
    last = columns.left < count
    proximal = torch.where(last, -3 - columns.errors(), columns.proximal)
    return replace(columns, behavior=columns.behavior.masked_fill(last, 0.0), proximal=proximal)


def _shifted(columns: Columns, every: float) -> Columns:
    rolled = columns.by_sequence(columns.proximal, lambda one: one.roll(1), int(every))
    return replace(columns, proximal=rolled)


def _shifted_across(columns: Columns, places: float) -> Columns:
    return replace(columns, proximal=columns.proximal.roll(int(places)))


def _swapped(columns: Columns, noise: float) -> Columns:
    return replace(columns, behavior=columns.proximal, proximal=columns.behavior)


def _route(columns: Columns, size: float) -> Columns:
    errors = columns.errors()
    route = torch.rand(columns.proximal.shape, generator=columns.generator) < 0.1
    return replace(columns, route=route, proximal=columns.proximal - size * errors * route)


def _cut_prompt(columns: Columns, size: float) -> Columns:
    errors = size * torch.exp(-columns.positions / 4.0) * columns.errors()
    return replace(columns, proximal=columns.proximal - errors)


def _lost_end(columns: Columns, size: float) -> Columns:
    return replace(columns, proximal=columns.proximal - size * (columns.left == 0))


def _unit(columns: Columns, factor: float) -> Columns:
    return replace(columns, behavior=columns.behavior * factor)


OfLogits = Callable[[Run, float], Run]
OfColumns = Callable[[Columns, float], Columns]
Sizes = tuple[float, float, float]
OF_LOGITS: dict[str, tuple[OfLogits, Sizes]] = {
    "temperature": (_temperature, (0.9, 0.8, 0.6)),
    "temperature, above 1": (_temperature, (1.1, 1.25, 1.6)),
    "raw-log-probs": (_raw, (0.9, 0.7, 0.5)),
    "top-p": (_top_p, (0.97, 0.95, 0.8)),
    "end-token": (_end_token, (8.0, 12.0, 16.0)),
    "template": (_template, (0.25, 0.4, 0.8)),
    "other-weights": (_other_weights, (1.0, 1.5, 2.0)),
    "stale-weights": (_stale, (0.15, 0.35, 0.7)),
    "jump": (_jump, (0.2, 0.35, 0.7)),
    "rise": (_rise, (0.3, 0.5, 0.8)),
    "precision": (_noisier, (0.15, 0.25, 0.4)),
    "differing-weights": (_head, (5, 4, 3)),
    "differing-weights, before the head": (_layer, (5, 4, 3)),
}
OF_COLUMNS: dict[str, tuple[OfColumns, Sizes]] = {
    "non-finite": (_nonfinite, (1, 20, 400)),
    "non-finite-advantage": (_broken_advantages, (1, 8, 40)),
    "placeholder": (_placeholder, (400, 100, 20)),
    "placeholder, at the end": (_padded_end, (1, 2, 5)),
    "changed-response": (_changed, (40, 20, 5)),
    "different-tokens": (_shifted, (4, 2, 1)),
    "different-tokens, across the join": (_shifted_across, (1, 2, -1)),
    "route": (_route, (0.2, 0.4, 0.8)),
    "unit": (_unit, (1 / math.log(2), 1 / math.log(10), math.log(2))),
}
OF_RECORDINGS: dict[str, tuple[OfColumns, Sizes]] = OF_COLUMNS | {
    "template": (_cut_prompt, (0.5, 1.0, 2.0)),
    "end-token": (_lost_end, (3.0, 6.0, 12.0)),
}
OF_RUNGS = ("precision", "swapped", "jump", "rise", "stale-weights")  # a rung that is coarser with the severity
COARSE = ("fp8", "int6", "int5")
PLANTS = {name: name.partition(",")[0] for name in (*OF_LOGITS, *OF_COLUMNS, "swapped")}
"""The cause that each plant stands for."""


@lru_cache(maxsize=1)
def _clean(seed: int, precision: str) -> tuple[Run, Columns]:
    run = drawn(seed, precision)
    columns = sampled(run)
    return run, replace(columns, route=torch.rand(columns.behavior.shape, generator=run.generator) < 0.1)


def planted(plant: str | None, seed: int, precision: str = "bf16", severity: int = 1) -> list[Record]:
    """Return the records of a made-up run with one of `PLANTS`, or of a clean run, in which routes change nothing."""
    run, columns = _clean(seed, precision)
    if plant in OF_LOGITS:
        make, sizes = OF_LOGITS[plant]
        columns = replace(sampled(make(run, sizes[severity])), route=columns.route)
    elif plant == "swapped":
        columns = _swapped(sampled(_noisier(run, (0.1, 0.15, 0.25)[severity])), 0)
    elif plant is not None:
        make, sizes = OF_COLUMNS[plant]
        columns = make(columns, sizes[severity])
    return records(columns)


def planted_in_recording(plant: str, seed: int, rung: str = "bf16", severity: int = 1) -> list[Record]:
    """Return the records of a rung with one plant of `OF_RECORDINGS`, or of a coarser rung beside or after bf16."""
    coarse = COARSE[severity]
    columns = recorded(LADDER[0] if plant in OF_RUNGS else rung, seed)
    if plant == "precision":
        return records(recorded(coarse, seed))
    if plant == "swapped":
        return records(_swapped(recorded(coarse, seed), 0))
    if plant == "jump":
        first, last = records(columns), records(recorded(coarse, seed))
        return [*first[: len(first) // 2], *last[len(last) // 2 :]]
    if plant == "rise":
        rungs = LADDER[: LADDER.index(coarse) + 1]
        by_step = [records(recorded(name, seed), len(rungs)) for name in rungs]
        return [one for step, rows in enumerate(by_step) for one in rows if one.step == step]
    if plant == "stale-weights":
        fresh, old = records(columns), records(recorded(coarse, seed))
        mixed = [(old if place % 2 else fresh)[place] for place in range(len(fresh))]
        ages = [torch.full_like(one.loss_mask, NEWEST - place % 2, dtype=torch.long) for place, one in enumerate(mixed)]
        return [replace(one, versions=age, trainer_version=NEWEST) for one, age in zip(mixed, ages, strict=True)]
    make, sizes = OF_RECORDINGS[plant]
    return records(make(columns, sizes[severity]))


IN_RECORDINGS: Mapping[str, str] = {name: name.partition(",")[0] for name in (*OF_RECORDINGS, *OF_RUNGS)}
"""The cause that each plant in a recording stands for."""


def clean(seed: int) -> list[Record]:
    """Return the records of a run below a kl_k3 of 1e-2: made up of long or short responses, or recorded."""
    if seed % 2:
        made = drawn(seed, ("bf16", "int8")[seed // 2 % 2], (LONGEST, 12)[seed // 4 % 2])
        return records(sampled(made))
    rungs = ("bf16", "fp32-head", "vllm-bf16", "int8")
    return records(recorded(rungs[seed // 2 % 4], seed, ("bf16", "fp32")[seed // 8 % 2]))
