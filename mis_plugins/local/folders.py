"""Where an experiment keeps its runs and its results: those of ``--smoke`` are kept apart."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

RESULTS = Path("benchmarks/results")


def add_folders(parser: ArgumentParser, name: str) -> None:
    """``--runs`` and ``--results`` of the experiment of this name."""
    for flag, usual in (("--runs", Path("runs") / name), ("--results", RESULTS)):
        parser.add_argument(
            flag, type=Path, metavar="FOLDER", help=f"(default: {usual}; with --smoke {_smoke(name)})"
        )


def with_folders(options: Namespace, name: str) -> Namespace:
    """The options, with the folders that were not given filled in."""
    runs, results = (_smoke(name),) * 2 if options.smoke else (Path("runs") / name, RESULTS)
    filled = {"runs": options.runs or runs, "results": options.results or results}
    return Namespace(**{**vars(options), **filled})


def _smoke(name: str) -> Path:
    return Path("runs") / f"{name}-smoke"
