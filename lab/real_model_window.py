"""What does a narrow window cost a real model: direction, or only responses? SmolLM2-135M-Instruct in bf16.

    python -m lab.real_model_window            half an hour on one core
    python -m lab.real_model_window --smoke    a tiny random model, in seconds

The arm `bf16` of real_model_rl.py trains for twenty rollouts. After ten and after twenty, two gradients are compared:
of the responses that the blog's window keeps, and of as many responses drawn at random from one set. What counts is
the cosine of each with the gradient of many on-policy responses.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.real_model_window:main", extra="verify")

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import NormalDist, fmean
from tempfile import TemporaryDirectory
from typing import Any

from lab.provenance import as_markdown, markdown_table, parser_of, provenance, target, write_record
from lab.real_model.arms import ARMS, preset
from lab.real_model.directions import NORMAL
from lab.real_model.lost import Scope, measured
from lab.real_model.page import mean_with_error
from lab.real_model.unit import Recipe, Row, Unit
from lab.real_model_rl import MODEL, SMOKE, SMOKE_MODEL, model_of
from mis_plugins.errors import UserError
from mis_plugins.shared.numerals import whole

ARM, PRESET = "bf16", "miles-blog-dense-3"
SMOKE_SCOPE = Scope(policies=(0, 1), prompts=4, reference=8, samples=8, sets=2, draws=2)
SMOKE_WINDOW = (0.999, 1.001)

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


def main() -> int:
    """Return 0, or 2 where there is no model to measure."""
    parser = parser_of(__doc__)
    parser.add_argument("--seed", type=whole, default=0, help="(default: %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="a tiny random model")
    parser.add_argument("--output", type=target, help="(default: lab/results/real_model_window.json)")
    options = parser.parse_args()
    output = options.output or _default_output(options.smoke)
    try:
        content = _content(options.seed, options.smoke)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write_record(output, content, text(content))
    print(f"wrote {output} and .md")
    return 0


def _default_output(smoke: bool) -> Path:
    if not smoke:
        return Path("lab/results/real_model_window.json")
    Path("runs").mkdir(exist_ok=True)
    return Path("runs/real-model-window-smoke.json")


def _content(seed: int, smoke: bool) -> dict[str, Any]:
    """Measure, and return what the record holds."""
    recipe, scope = (SMOKE, SMOKE_SCOPE) if smoke else (Recipe(), Scope())
    measured_with = provenance()
    with TemporaryDirectory(prefix="real-model-") as scratch:
        source, task = model_of(smoke, Path(scratch))
        unit = Unit.start(ARMS[ARM], seed, recipe, task, source)
        rule = preset(PRESET)["mis"]["reject"][0]
        window = SMOKE_WINDOW if smoke else (rule["lower"], rule["upper"])
        rows = [*measured(unit, scope, window, partial(print, file=sys.stderr))]
    settings = {"model": SMOKE_MODEL if smoke else MODEL, "layers": recipe.layers, "arm": ARM}
    bounds = {"preset": PRESET, "lower": window[0], "upper": window[1], "seed": seed}
    return {"settings": settings | bounds | asdict(scope), "rows": rows, "measured_with": measured_with}


def text(content: Mapping[str, Any]) -> str:
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
