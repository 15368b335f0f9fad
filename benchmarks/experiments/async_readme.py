"""The experiment's figures in README.md, between two marks, so that they are always those of the results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.async_tables import busy, gains, spread, table, verdict

README = Path("README.md")
BEGIN, END = "<!-- written by scripts/experiment-async.sh -->\n", "<!-- as far as here -->\n"

COSINES = ("on-policy", "standard", "segment-wise", "no weights")
REWARDS = ("synchronous", "standard", "segment-wise")
HEAD = (
    "`--lr`",
    "variance, segment-wise / standard",
    "cosine to the on-policy gradient: another on-policy one / standard / segment-wise / no weights",
    "reward at the start, then synchronous / standard / segment-wise",
)


def with_figures(text: str, content: Mapping[str, Any]) -> str:
    """A README with what stands between its marks replaced.

    Raises:
        ValueError: it has not one of each, in this order.
    """
    before, found, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended or BEGIN in rest or END in after:
        raise ValueError(f"{README}: wants one line {BEGIN.strip()} and after it one line {END.strip()}")
    return "".join([before, BEGIN, figures(content), END, after])


def figures(content: Mapping[str, Any]) -> str:
    """A row a learning rate, means over the seeds; and a list of the rest."""
    return f"{table(HEAD, [_row(lr, content) for lr in content['variance']])}\n{_rest(content)}"


def _row(lr: str, content: Mapping[str, Any]) -> tuple[str, ...]:
    variance = [
        _mean(run["all"][kind] for run in content["variance"][lr]) for kind in ("segment-wise", "standard")
    ]
    cosines = [_mean(run[name]["pooled"] for run in content["bias"][lr]) for name in COSINES]
    curves = content["rewards"][lr]
    start = _mean(run[0][1] for run in curves[REWARDS[0]])
    ends = [_mean(run[-1][1] for run in curves[name]) for name in REWARDS]
    rewards = f"{start:.2f}, then {_joined(ends, '.2f')}"
    return (lr, _joined(variance, ".2g"), _joined(cosines, ".2f"), rewards)


def _rest(content: Mapping[str, Any]) -> str:
    factors = [
        _mean(run["all"]["standard"] / run["all"]["segment-wise"] for run in runs)
        for runs in content["variance"].values()
    ]
    measured = content["throughput"]
    shares = [share for shares in content["recompute_share"].values() for share in shares]
    lines = [
        f"* The variance falls {min(factors):.0f} to {max(factors):.0f} times over.",
        f"* The recompute took {min(shares):.0%} to {max(shares):.0%} of the trainer's time, where every sequence is "
        "scored at each of nine\n  versions.",
        f"* Tokens trained on in a second, over those of the synchronous run: see the tables. {verdict(measured)}"
        if busy(measured)
        else f"* Tokens trained on in a second, over those of the synchronous run:\n{_throughput(measured)}",
    ]
    return "\n".join([*lines, ""])


def _throughput(measured: Mapping[str, Any]) -> str:
    said = [
        f"  * {row['step_seconds']:g} s a decode step, a bound of {row['bound']}: {spread(gain, '{:.2f}')}"
        for row, gain, _ in gains(measured)
        if row["bound"]
    ]
    return "\n".join([*said, f"  * {verdict(measured)}"])


def _joined(values: Sequence[float], form: str) -> str:
    return " / ".join(format(value, form) for value in values)


def _mean(values: Iterable[float]) -> float:
    return fmean(list(values))
