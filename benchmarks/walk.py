"""Where does a log-prob go? One call of the TIS hook, followed from file to file.

A step is a call of a named function in another file of mis_plugins than the call before it. Going back to a caller that
calls nothing there is none. A stop is a step of a reader, who opens each function once: where it is first called, and
only if it is given tensors, itself or in what holds them. A return is a stop, or a step, in a file met before.

The walk starts in the hook and ends with its answer. The host reads the metrics later, and those calls are not on it.
An earlier call has filled the caches.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("walk:main", extra="local")

import inspect
import json
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import torch
import yaml
from provenance import as_markdown, provenance, target

import mis_plugins
from mis_plugins import mis

PACKAGE = Path(mis_plugins.__file__).parent
PRESETS = PACKAGE.parent / "yaml"


@dataclass(frozen=True)
class Stop:
    """A visit to a file.

    does: the first line of the function's docstring; empty where it has none.
    returns: the walk has been to this file.
    """

    file: str
    function: str
    does: str
    returns: bool


@dataclass(frozen=True)
class Walk:
    """What one call passes through: as a reader follows it, and as Python does."""

    name: str
    stops: Sequence[Stop]
    steps: Sequence[Stop]

    @property
    def files(self) -> int:
        return len({stop.file for stop in self.stops})

    @property
    def returns(self) -> int:
        return _returns(self.stops)

    @property
    def counted(self) -> str:
        read = f"{len(self.stops)} stops in {self.files} files, {self.returns} returns"
        return f"{self.name}: {read}; every call: {len(self.steps)} steps, {_returns(self.steps)} returns"


def _returns(stops: Sequence[Stop]) -> int:
    return sum(stop.returns for stop in stops)


@dataclass(frozen=True)
class Visit:
    """A function that Python enters; `given`: its arguments hold a tensor."""

    code: CodeType
    given: bool


def follow(name: str, call: Callable[[], object]) -> Walk:
    """The walk of one call, which has run once before."""
    call()
    with _visited() as visits:
        call()
    first = {visit.code: visit for visit in reversed(visits) if visit.given}
    return Walk(
        name,
        stops=list(_stops([visit.code for visit in visits if first.get(visit.code) is visit])),
        steps=list(_stops([visit.code for visit in visits])),
    )


@contextmanager
def _visited() -> Iterator[list[Visit]]:
    """Every named function of the package that Python enters meanwhile, in order."""
    visits: list[Visit] = []
    before = sys.getprofile()

    def enter(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and _is_ours(code):
            visits.append(Visit(code, any(map(_holds_tensors, frame.f_locals.values()))))

    sys.setprofile(enter)
    try:
        yield visits
    finally:
        sys.setprofile(before)


def _holds_tensors(value: object, depth: int = 2) -> bool:
    """Whether it is one, or one lies in it: in a list, or in an object's fields."""
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, type | str):
        return False
    inside = value if isinstance(value, list | tuple) else getattr(value, "__dict__", {}).values()
    return any(_holds_tensors(x, depth - 1) for x in inside)


def _is_ours(code: CodeType) -> bool:
    return PACKAGE in Path(code.co_filename).parents and not code.co_name.startswith("<")


def _stops(visits: Sequence[CodeType]) -> Iterator[Stop]:
    been, last = set[str](), ""
    for code in visits:
        file = str(Path(code.co_filename).relative_to(PACKAGE.parent))
        if file != last:
            yield Stop(file, code.co_qualname, _does(code), file in been)
        been.add(file)
        last = file


def _does(code: CodeType) -> str:
    """The docstring's first line: the first constant of a function that has one."""
    first = code.co_consts[0] if code.co_consts else None
    return inspect.cleandoc(first).partition("\n")[0] if isinstance(first, str) else ""


def hook_call(preset: str) -> Callable[[], Any]:
    """The TIS hook on three sequences of one process, with a preset and all metrics of its config."""
    keys = yaml.safe_load((PRESETS / f"{preset}.yaml").read_text())
    keys["mis"]["metrics"] = "full"
    args = Namespace(**{"use_tis": True, "qkv_format": "thd", "get_mismatch_metrics": False, **keys})
    lengths = [4, 2, 3]
    proximal = [-torch.ones(length) for length in lengths]
    alone = SimpleNamespace(rank=0, size=1, group=None)
    groups = SimpleNamespace(
        cp=alone, tp=alone, effective_dp=alone, effective_dp_cp=alone, is_ulysses_cp=False
    )
    return lambda: mis.compute_mis_weights_with_cp(
        args,
        pg_loss=torch.ones(sum(lengths)),
        train_log_probs=proximal,
        rollout_log_probs=[x + 5e-4 for x in proximal],
        loss_masks=[torch.ones(length, dtype=torch.int) for length in lengths],
        total_lengths=[length + 1 for length in lengths],
        response_lengths=lengths,
        parallel_state=groups,
    )


def as_text(walk: Walk) -> str:
    """A line a stop, marked where the walk comes back to the file."""
    rows = [
        f"{number:3} {'<-' if stop.returns else '  '} {stop.file}  {stop.function}: {stop.does}".rstrip(": ")
        for number, stop in enumerate(walk.stops, 1)
    ]
    return "\n".join([walk.counted, *rows])


def as_document(walks: Sequence[Walk], measured: dict[str, str]) -> str:
    legend = (__doc__ or "").strip()
    parts = [as_markdown(measured), legend, *(f"```\n{as_text(walk)}\n```" for walk in walks)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def write(path: Path, walks: Sequence[Walk], measured: dict[str, str]) -> None:
    """FILE.json, and beside it FILE.md for people."""
    listed = [
        {
            "name": walk.name,
            "files": walk.files,
            "returns": walk.returns,
            "stops": [vars(stop) for stop in walk.stops],
            "steps": len(walk.steps),
        }
        for walk in walks
    ]
    path.write_text(json.dumps({"measured with": measured, "walks": listed}, indent=1) + "\n")
    path.with_suffix(".md").write_text(as_document(walks, measured))


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=target, help="write the walks here, and beside it a .md")
    parser.add_argument("--smoke", action="store_true", help="one preset")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    presets = ["mis"] if arguments.smoke else ["mis", "geometric-mis"]
    walks = [follow(preset, hook_call(preset)) for preset in presets]
    print("\n\n".join(map(as_text, walks)))
    if arguments.json:
        write(arguments.json, walks, provenance())
    return 0
