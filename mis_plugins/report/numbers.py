"""The step metrics of docs/metrics.md, of every step and of the whole run.

The functions are those of the training path: `correct` makes weights and masks, `partials` their sums, and `finalize`
the numbers. A dump of one optimizer step therefore gives the numbers that `metrics: all` logged for the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from mis_plugins.config.model import CorrectionConfig
from mis_plugins.correction.pipeline import Correction, correct
from mis_plugins.explain.limits import FIRST
from mis_plugins.metrics.alarms import ALARMS
from mis_plugins.metrics.catalogue import finalize
from mis_plugins.metrics.partials import partials
from mis_plugins.metrics.totals import Partials
from mis_plugins.report.record import Batch


def corrected(batch: Batch, config: CorrectionConfig) -> Correction:
    """The correction of a batch. A mean weight over other ranks or a whole rollout is that of the batch."""
    return correct(batch.proximal, batch.behavior, batch.ragged, with_own_mean(config))


def with_own_mean(config: CorrectionConfig) -> CorrectionConfig:
    """The config with normalization over the batch at hand, whatever scope it names."""
    weight = config.weight
    if weight is None or weight.normalize is None:
        return config
    return replace(config, weight=replace(weight, normalize=replace(weight.normalize, scope="micro_batch")))


def ordered(values: Mapping[str, float]) -> dict[str, float]:
    """Metrics with `kl_k3` first."""
    return ({FIRST: values[FIRST]} if FIRST in values else {}) | dict(values)


@dataclass
class StepNumbers:
    """Partials of every step. Steps beyond the last `OPEN` are kept sparse: a tenth of 0.1 MB each."""

    OPEN = 8
    config: CorrectionConfig
    steps: dict[int, Partials] = field(default_factory=dict)

    def add(self, batch: Batch, correction: Correction) -> None:
        """Add a batch; `correction` is of this config."""
        added = partials(correction, ages=batch.whole_numbers("ages"))
        earlier = self.steps.pop(batch.step, None)
        self.steps[batch.step] = added if earlier is None else _dense(earlier).merge(added)
        if len(self.steps) > self.OPEN:
            last = list(self.steps)[-1 - self.OPEN]
            self.steps[last] = _sparse(self.steps[last])

    def metrics(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Metrics of each step, in order."""
        for step in sorted(self.steps):
            yield step, ordered(finalize(_dense(self.steps[step]), self.config))

    def whole(self) -> Partials:
        """Partials of the whole run."""
        found = list(self.steps.values())
        merged = _dense(found[0])
        for part in found[1:]:
            merged = merged.merge(_dense(part))
        return merged

    def alarms(self) -> Iterator[tuple[int, str, str]]:
        """Step, name and message of every alarm of docs/metrics.md that fires."""
        for step in sorted(self.steps):
            sums = self.steps[step].named_sums
            for name, alarm in ALARMS.items():
                yield from ((step, name, message) for message in alarm(self.config, sums))


def _sparse(part: Partials) -> Partials:
    return part.map(lambda x: x.to_sparse() if x.dim() == 2 and not x.is_sparse else x)


def _dense(part: Partials) -> Partials:
    return part.map(lambda x: x.to_dense() if x.is_sparse else x)
