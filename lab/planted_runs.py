"""Small made-up runs with one cause of a mismatch planted in each, for the report's detectors.

A policy is softmax(scale * h W'), h a random hidden state with a common part, as in a real model. The
engine's h has noise of the asked precision, and the engine samples. A plant changes one thing on one side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from mis_plugins.report.record import Record

VOCABULARY, WIDTH, SEQUENCES, STEPS = 128, 16, 160, 8
END, END_LOGIT = 0, 6.0
SHORTEST, LONGEST = 30, 230
NEWEST = 3  # version of the trainer, where versions are told
PRECISIONS = {"bf16": 0.02, "int8": 0.04, "fp8": 0.08, "int6": 0.15}


@dataclass(frozen=True)
class Run:
    """All tokens of a run, flat.

    Attributes:
        trainer, engine: logits of both sides, [T, vocabulary].
        sampling: the logits that the engine draws from, where it reports other logits.
        versions: the version that wrote each token, where the run tells versions.
    """

    lengths: Tensor
    hidden: Tensor
    weights: Tensor
    trainer: Tensor
    engine: Tensor
    generator: torch.Generator
    sampling: Tensor | None = None
    versions: Tensor | None = None

    @property
    def starts(self) -> Tensor:
        return self.lengths.cumsum(0) - self.lengths

    @property
    def positions(self) -> Tensor:
        return torch.arange(int(self.lengths.sum())) - self.starts.repeat_interleave(self.lengths)

    @property
    def steps(self) -> Tensor:
        """Step of each token."""
        return (torch.arange(SEQUENCES) * STEPS // SEQUENCES).repeat_interleave(self.lengths)

    @property
    def sequences(self) -> Tensor:
        """The number of each token's sequence."""
        return torch.arange(SEQUENCES).repeat_interleave(self.lengths)

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)


@dataclass(frozen=True)
class Columns:
    """What both sides would have dumped, flat."""

    run: Run
    tokens: Tensor
    behavior: Tensor
    proximal: Tensor
    route: Tensor | None = None
    advantages: Tensor | None = None


def drawn(seed: int, precision: str) -> Run:
    """Draw a clean run, with the engine at a precision."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(SHORTEST, LONGEST, (SEQUENCES,), generator=generator)
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
    behavior, proximal = (
        side.log_softmax(-1).gather(1, tokens).squeeze(1) for side in (run.engine, run.trainer)
    )
    return Columns(run, tokens.squeeze(1), behavior, proximal)


def records(columns: Columns) -> list[Record]:
    """Return the neutral records of a run."""
    sizes = columns.run.lengths.tolist()
    parts = [x.split(sizes) for x in (columns.behavior, columns.proximal, columns.tokens)]
    routes, versions, advantages = (
        [None] * SEQUENCES if x is None else x.split(sizes)
        for x in (columns.route, columns.run.versions, columns.advantages)
    )
    return [
        Record(
            place * STEPS // SEQUENCES,
            str(place),
            mu,
            pi,
            torch.ones_like(ids, dtype=torch.bool),
            ids,
            advantages=advantage,
            route_differs=route,
            versions=version,
            trainer_version=None if version is None else NEWEST,
        )
        for place, (mu, pi, ids, route, version, advantage) in enumerate(
            zip(*parts, routes, versions, advantages, strict=True)
        )
    ]


# Plants change logits before tokens are drawn, or columns after.


def _temperature(run: Run) -> Run:
    return replace(run, engine=run.engine / 0.8)


def _raw(run: Run) -> Run:
    return replace(run, sampling=run.engine / 0.7, trainer=run.trainer / 0.7)


def _top_p(run: Run) -> Run:
    ordered, places = run.engine.softmax(-1).sort(-1, descending=True)
    beyond = ordered.cumsum(-1) - ordered > 0.95
    cut = torch.zeros_like(beyond).scatter_(1, places, beyond)
    return replace(run, engine=run.engine.masked_fill(cut, -torch.inf))


def _end_token(run: Run) -> Run:
    trainer = run.trainer.clone()
    trainer[run.starts + run.lengths - 1, END] -= 2 * END_LOGIT
    return replace(run, trainer=trainer)


def _template(run: Run) -> Run:
    shift = torch.exp(-run.positions / 4.0).unsqueeze(1) * run.noise(1, WIDTH)
    return replace(run, trainer=run.trainer + 0.4 * shift @ run.weights.T)


def _other_weights(run: Run) -> Run:
    return replace(run, trainer=1.5 * run.hidden @ run.noise(VOCABULARY, WIDTH).T)


def _drifted(run: Run, where: Tensor) -> Run:
    """Return the run whose trainer has other output weights at the tokens where `where` is true."""
    drift = run.hidden @ (0.35 * run.noise(VOCABULARY, WIDTH)).T
    return replace(run, trainer=torch.where(where.unsqueeze(1), run.trainer + drift, run.trainer))


def _jump(run: Run) -> Run:
    return _drifted(run, run.steps >= STEPS // 2)


def _stale(run: Run) -> Run:
    late = run.sequences % 2 == 1
    return replace(_drifted(run, late), versions=NEWEST - late.long())


def _head(run: Run) -> Run:
    return replace(run, engine=run.engine + run.hidden @ _rounding(run.weights).T)


def _layer(run: Run) -> Run:
    """Return the run whose engine has rounded the layer that makes the hidden states."""
    layer = torch.linalg.qr(run.noise(WIDTH, WIDTH)).Q
    error = run.hidden @ layer @ _rounding(layer).T
    return replace(run, engine=run.engine + error @ run.weights.T)


def _rounding(weights: Tensor) -> Tensor:
    """Return what rounding to int4 adds to a layer [outputs, inputs], with a scale for each output."""
    scale = weights.abs().amax(1, keepdim=True) / 7
    return (weights / scale).round() * scale - weights


def _nonfinite(columns: Columns) -> Columns:
    proximal = columns.proximal.clone()
    proximal[7] = torch.nan
    return replace(columns, proximal=proximal)


def _broken_advantages(columns: Columns) -> Columns:
    """Return the run with advantages, of which one response's are the infinity of a division by no spread."""
    owner = columns.run.sequences
    advantages = torch.where(owner % 2 == 0, 1.0, -1.0)
    return replace(columns, advantages=torch.where(owner == 3, torch.inf, advantages))


def _placeholder(columns: Columns) -> Columns:
    behavior = columns.behavior.clone()
    behavior[columns.run.positions % 100 == 50] = 0.0
    return replace(columns, behavior=behavior)


def _padded_end(columns: Columns) -> Columns:
    """Return the run whose responses end in five tokens of the host's own, with 0 for the engine's log-probs."""
    run = columns.run
    others = torch.randint(1, VOCABULARY, columns.tokens.shape, generator=run.generator)
    scored = run.trainer.log_softmax(-1).gather(1, others.unsqueeze(1)).squeeze(1)
    last = run.positions >= (run.lengths - 5).repeat_interleave(run.lengths)
    return replace(
        columns,
        tokens=torch.where(last, others, columns.tokens),
        behavior=torch.where(last, 0.0, columns.behavior),
        proximal=torch.where(last, scored, columns.proximal),
    )


def _changed(columns: Columns) -> Columns:
    run = columns.run
    owner = run.sequences
    others = torch.randint(1, VOCABULARY, owner.shape, generator=run.generator)
    scored = run.trainer.log_softmax(-1).gather(1, others.unsqueeze(1)).squeeze(1)
    return replace(columns, proximal=torch.where(owner % 40 == 3, scored, columns.proximal))


def _route(columns: Columns) -> Columns:
    run = columns.run
    route = torch.rand(columns.tokens.shape, generator=run.generator) < 0.1
    moved = columns.proximal - 0.4 * run.noise(*route.shape).abs()
    return replace(columns, route=route, proximal=torch.where(route, moved, columns.proximal))


OF_LOGITS: dict[str, Callable[[Run], Run]] = {
    "temperature": _temperature,
    "raw-log-probs": _raw,
    "top-p": _top_p,
    "end-token": _end_token,
    "template": _template,
    "other-weights": _other_weights,
    "stale-weights": _stale,
    "jump": _jump,
    "differing-weights": _head,
    "differing-weights, before the head": _layer,
}
OF_COLUMNS: dict[str, Callable[[Columns], Columns]] = {
    "non-finite": _nonfinite,
    "non-finite-advantage": _broken_advantages,
    "placeholder": _placeholder,
    "placeholder, at the end": _padded_end,
    "changed-response": _changed,
    "route": _route,
}
PLANTS = {name: name.partition(",")[0] for name in (*OF_LOGITS, *OF_COLUMNS)}
"""The cause that each plant stands for."""


@lru_cache(maxsize=1)
def _clean(seed: int, precision: str) -> tuple[Run, Columns]:
    run = drawn(seed, precision)
    columns = sampled(run)
    return run, replace(columns, route=torch.rand(columns.tokens.shape, generator=run.generator) < 0.1)


def planted(plant: str | None, seed: int, precision: str = "bf16") -> list[Record]:
    """Return the records of a run with one of `PLANTS`, or of a clean run, in which routes change nothing."""
    run, columns = _clean(seed, precision)
    if plant in OF_LOGITS:
        columns = replace(sampled(OF_LOGITS[plant](run)), route=columns.route)
    return records(OF_COLUMNS[plant](columns) if plant in OF_COLUMNS else columns)
