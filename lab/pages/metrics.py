"""Parts of `docs/metrics.md`: tables made from the records of the metrics and from `metrics.yaml`, their words.

    python -m lab.pages.metrics

The page's own parts say where a section begins: each is named by the first metric of its table.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.pages.metrics:main")

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import yaml

from lab.pages.parts import named, write
from lab.provenance import markdown_table
from mis_plugins.metrics import sketch, slope
from mis_plugins.metrics.alarms import PREFIX
from mis_plugins.metrics.quantity import QUANTILES
from mis_plugins.metrics.tokens import AGES, LOG_RATIO_TAILS, PROB_DIFF_TAILS, TURNS
from mis_plugins.report.readers.curves import PEERS

SAID = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
SIMULATED = Path(__file__).with_name("slope.md").read_text(encoding="utf-8")
WORDS: dict[str, dict[str, str]] = SAID["metrics"]  # what, range, bad and do of each metric
BY_STEP: dict[str, str] = SAID["hook"]
OTHERWISE: dict[str, dict[str, str]] = SAID["otherwise"]

WATCHED = ("kl_k3", "ppl_ratio", "kept_fraction", "ess", "saturated_tokens")
NUMBERS: dict[str, str] = {
    "percentiles": (
        f"percent is one of {', '.join(map(str, QUANTILES))}. Percentiles come from histograms of logarithms, whose "
        f"counts add. A logarithm is off by at most {sketch.RELATIVE_ERROR:.0%} of itself, however the step is split. "
        "A ratio r is thereby off by a factor of at most r^0.01 or its inverse: 0.7% at 2 and at 1/2, 4.7% at 100. "
        "A percentile is interpolated between two values; if they lie on either side of 0, it may be off by more."
    ),
    "tails": (
        f"side is high or low; bound is {' or '.join(map(str, LOG_RATIO_TAILS))} of a log ratio, "
        f"{', '.join(map(str, PROB_DIFF_TAILS))} of a difference of probabilities."
    ),
    "ages": (
        f"age is trainer version minus the version that wrote the token, from 0 to {AGES - 1}. Metrics by age are "
        "reported where the versions are known."
    ),
    "turns": (
        f"turn is 1 to {TURNS}. A turn of the model is a run of ones in the loss mask: it begins where the mask of a "
        "response rises from 0 to 1, wherever context parallelism cuts the response. What the rules reject begins no "
        "turn. Metrics by turn are reported in steps of which a response has two turns or more; elsewhere they "
        "would repeat those of all tokens. In the own loops of both hosts, on responses with two masked spans, they "
        "equal the oracle's (rows `*-turns` of [the table](../lab/results/in_host.md))."
    ),
}
"""What sections say of numbers that the code holds."""

HEAD = ("metric", "what", "range", "bad", "do", "elsewhere")


def part(name: str) -> str:
    """A part of the page: of a section that begins with a metric, or one of its own name."""
    if name in NUMBERS:
        return NUMBERS[name]
    return (PARTS[name]() if name in PARTS else table(sections()[name])).strip("\n")


def sections() -> dict[str, list[str]]:
    """The metrics of each section by the first of them, in the order of `metrics.yaml`."""
    first, found = {name for name in named("metrics.md") if name in WORDS}, dict[str, list[str]]()
    for name in WORDS:
        if name in first:
            found[name] = names = []
        names.append(name)
    return found


def table(names: Iterable[str]) -> str:
    return markdown_table(HEAD, ([f"`{name}`", *cells_of(name), _elsewhere(name)] for name in names))


def cells_of(name: str) -> list[str]:
    """Words of a metric in the order of the columns of `HEAD`."""
    said = WORDS[name]
    return [said[column].replace("|", "\\|") for column in ("what", "range", "bad", "do")]


def _elsewhere(name: str) -> str:
    found = (
        f"{peer}: {', '.join(f'`{theirs}`' for theirs, ours in names.items() if ours == name)}"
        for peer, names in PEERS.items()
        if name in names.values()
    )
    return "; ".join(found)


def _hook_means() -> str:
    return markdown_table(("the hook's", "exact, of the step"), _named(BY_STEP))


def _vanished() -> str:
    return markdown_table(("in the log before", f"now under `{PREFIX}`"), _named(SAID["vanished"]))


def _named(words: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    return ((f"`{name}`", said) for name, said in words.items())


def _peers() -> str:
    rows = ((peer, theirs, words) for peer, names in OTHERWISE.items() for theirs, words in names.items())
    return markdown_table(("package", "theirs", "ours"), rows)


def _simulated() -> str:
    return f"{inspect.cleandoc(slope.__doc__ or '')}\n{SIMULATED}"


PARTS: dict[str, Callable[[], str]] = {
    "watched": lambda: table(WATCHED),
    "hook": _hook_means,
    "vanished": _vanished,
    "peers": _peers,
    "simulated": _simulated,
}


def main() -> int:
    """Write the page."""
    return write("metrics.md", part, __doc__)
