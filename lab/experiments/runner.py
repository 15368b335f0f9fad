"""Run an experiment: arm after arm, each in a process of its own, resumed arm by arm; and what its command takes.

    options = parsed(ArgumentParser(prog="bash scripts/NAME.sh", description=__doc__), "NAME")
    arms = [Arm(options.runs / f"{method}-{seed}", {...}, work) for seed in options.seeds for method in METHODS]
    if code := run_arms(arms, this_code()):   # what this code finished is not repeated
        return code
    content = {"measured_with": made_with("bash scripts/NAME.sh"), **numbers(arms)}
    write_record(options.results / "NAME.json", content, markdown(content))

An arm is finished when its folder holds a stamp of its settings and of the code. A failure or Ctrl-C ends the
experiment, and what was finished before stays.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.provenance import as_given, committed_tree, measured_with, write_json
from mis_plugins.shared.numerals import whole
from mis_plugins.shared.shell import add_version, importing

STAMP = "made_of.json"
SEEDS, RESULTS = (0, 1, 2), Path("lab/results")
MEASURED_CODE = ("mis_plugins", "lab", "scripts", ":!lab/results")


@dataclass(frozen=True)
class Arm:
    """One run of an experiment.

    folder: holds all that the run leaves.
    settings: what the outcome depends on besides the code, in values that JSON can hold.
    work: does the run, as the one rank of a forked process.
    """

    folder: Path
    settings: Mapping[str, Any]
    work: Callable[[], None]

    def made(self, code: str | None) -> bool:
        """Whether the folder holds a complete run of these settings and this code; never for `code` None."""
        path = self.folder / STAMP
        return code is not None and path.is_file() and json.loads(path.read_text()) == self.stamp(code)

    def stamp(self, code: str | None) -> dict[str, Any]:
        """Which settings and code make the folder, as its stamp says."""
        return json.loads(json.dumps({"settings": self.settings, "code": code}))


def this_code() -> str | None:
    """Return a name of the committed code that runs depend on; None where changes are uncommitted."""
    return committed_tree("mis_plugins")


def run_arms(arms: Sequence[Arm], code: str | None) -> int:
    """Run the arms that are not made yet; return 0, or the exit code of the arm that failed or was interrupted.

    Args:
        code: a name of the code, as `this_code` gives it; None repeats every arm.
    """
    with importing():  # Megatron takes seconds: here, once for all forks
        import lab.host.loop  # noqa: F401
        from lab.host.train.parallel import launch

    missing, begun = [arm for arm in arms if not arm.made(code)], time.monotonic()
    for number, arm in enumerate(missing, 1):
        stamp = arm.folder / STAMP
        stamp.unlink(missing_ok=True)  # an interrupt shall leave no stamp of an earlier run
        arm.folder.mkdir(parents=True, exist_ok=True)
        if failed := launch(1, arm.work):
            return failed
        write_json(stamp, arm.stamp(code))
        left = (time.monotonic() - begun) / number * (len(missing) - number) / 60
        print(f"{number} of {len(missing)}: {arm.folder} done; some {left:.0f} min left", file=sys.stderr, flush=True)
    return 0


def parsed(parser: ArgumentParser, name: str) -> Namespace:
    """Parse the options of the experiment `name`: its own, and the options that all experiments have."""
    folders, smoke = {"runs": Path("runs") / name, "results": RESULTS}, Path("runs") / f"{name}-smoke"
    for flag, usual in folders.items():
        told = f"(default: {usual}; with --smoke {smoke})"
        parser.add_argument(f"--{flag}", type=Path, metavar="FOLDER", help=told)
    parser.add_argument("--seeds", type=whole, nargs="+", default=SEEDS, help="(default: 0 1 2)")
    parser.add_argument("--smoke", action="store_true", help="tiny runs that only show that everything works")
    add_version(parser)
    options = parser.parse_args()
    for flag, usual in folders.items():
        if getattr(options, flag) is None:
            setattr(options, flag, smoke if options.smoke else usual)
    return options


def made_with(program: str) -> dict[str, str]:
    """Describe what the results are measured with, as of now."""
    return measured_with(as_given(program, sys.argv[1:]), MEASURED_CODE)
