"""What does a narrow window cost a real model: direction, or only responses? SmolLM2-135M-Instruct in bf16."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist, fmean
from typing import Any

from lab.provenance import as_markdown, markdown_table
from lab.toys.real_model_rl import NORMAL, mean_with_error

Row = Mapping[str, Any]
"""A set's numbers."""

TEXT = """# What does a narrow window cost?

Gradients of {model} over the last {layers} layers, after some rollouts of the arm `{arm}` of
[the experiment](real_model_rl.md). A set is {prompts} prompts x {samples} responses. The reference is {reference} other
responses to each prompt, each weighted with its whole ratio. Cosines with the reference: of all responses of a set, of
those with `(prod r)^(1/n)` in [{lower:g}, {upper:g}], which is the window of `{preset}`, and of as many drawn at
random, {draws} draws: their mean, in brackets the least and the greatest. Predicted: the share that the window would
keep if the mean of `log r` over n tokens were normal around -k3 with variance 2 k3 / n.
"""

HEADS = ("rollouts", "set", "k3", "length", "kept", "predicted", "all", "window", "random", "window - random")

MEASURES: Mapping[str, Callable[[Row], float]] = {
    "all": lambda row: row["all"],
    "window": lambda row: row["window"],
    "random": lambda row: fmean(row["random"]),
    "window less random": lambda row: row["window"] - fmean(row["random"]),
}


def markdown(content: Mapping[str, Any]) -> str:
    """Return the page of the record."""
    settings, rows = content["settings"], content["rows"]
    table = markdown_table(HEADS, [_line(row, settings) for row in rows])
    means = ", ".join(
        f"{name} {mean_with_error([*map(measure, rows)])}" for name, measure in MEASURES.items()
    )
    said = f"Means of the {len(rows)} sets with {NORMAL} standard errors on either side: {means}."
    return f"{TEXT.format(**settings)}\n{table}\n{said}\n\n{as_markdown(content['measured_with'])}\n"


def _line(row: Row, settings: Mapping[str, Any]) -> Sequence[object]:
    drawn = row["random"]
    return (
        row["rollout"],
        row["set"],
        f"{row['k3']:.1e}",
        f"{row['length']:.1f}",
        f"{row['kept']:.2f}",
        f"{predicted(row['k3'], row['length'], settings['lower'], settings['upper']):.2f}",
        f"{row['all']:.2f}",
        f"{row['window']:.2f}",
        f"{fmean(drawn):.2f} [{min(drawn):.2f}, {max(drawn):.2f}]",
        f"{row['window'] - fmean(drawn):+.2f}",
    )


def predicted(k3: float, length: float, lower: float, upper: float) -> float:
    """The share of responses in a window of `(prod r)^(1/n)`, where the mean of log r is normal."""
    if k3 == 0:
        return float(lower <= 1 <= upper)
    normal = NormalDist(-k3, math.sqrt(2 * k3 / length))
    return normal.cdf(math.log(upper)) - normal.cdf(math.log(lower))
