"""Where does a log-prob go? One call of the TIS hook, followed from its arguments to the weighted loss and the masks.

A function of mis_plugins is on the way if it runs an operator that reads what was made of a log-prob. The loss or a
mask must depend on what the operator writes. Its callers are on the way too. A helper of one line counts as any other
function, and so does an unnamed one that stands in a table.

A reader opens each function on the way once: where it first runs such an operator, its callers before it. A stop is a
visit to a file: functions of one file that are opened one after the other are one stop. A return is a stop in a file
met before.

Checks of arguments, the places of masks, and what is recorded for warnings and metrics are not on the way: no weight
depends on them. Rows for metrics share a tensor with rows that weights read, so that the walk is made with
`metrics: none`. An earlier call has filled the caches.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.walk:main", extra="verify")

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mis_plugins
from lab.peer_cost import hook_kwargs
from lab.provenance import as_markdown, parser_of, provenance, target, write_record
from lab.sameness import args_of
from mis_plugins import mis

PACKAGE = Path(mis_plugins.__file__).parent
SERVED = ("mis", "geometric-mis", "tis", "cis", "icepop", "sequence", "seq-mask-tis", "geometric-rs")
GENERATED = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")  # parts of a function, not functions


@dataclass(frozen=True)
class Stop:
    """A visit to a file.

    functions: the functions that are opened in the file, in order.
    returns: whether the walk has been to the file before.
    """

    file: str
    functions: tuple[str, ...]
    returns: bool


@dataclass(frozen=True)
class Walk:
    """What one call passes through, as a reader follows a log-prob."""

    name: str
    stops: Sequence[Stop]

    @property
    def files(self) -> int:
        return len({stop.file for stop in self.stops})

    @property
    def returns(self) -> int:
        return sum(stop.returns for stop in self.stops)

    def __str__(self) -> str:
        """A line for each stop; `<-` marks a return to a file."""
        counted = f"{self.name}: {len(self.stops)} stops in {self.files} files, {self.returns} returns"
        rows = (
            f"{number:3} {'<-' if stop.returns else '  '} {stop.file}  {', '.join(stop.functions)}"
            for number, stop in enumerate(self.stops, 1)
        )
        return "\n".join([counted, *rows])


Call = Callable[[], Iterable[Tensor]]
"""A function that makes a call and returns the tensors at the end of the walk."""


@dataclass(frozen=True)
class Operator:
    """An operator that ran.

    functions: functions of the package that were running, from the outermost on.
    after: the numbers of the operators that wrote what the operator read.
    follows: whether the operator read what was made of the tensors at the beginning.
    """

    functions: Sequence[CodeType]
    after: frozenset[int]
    follows: bool


class Trace(TorchDispatchMode):
    """A dispatch mode that records each operator of a block, and the earlier operators that it depends on."""

    def __init__(self, given: Sequence[Tensor]):
        super().__init__()
        self.operators: list[Operator] = []
        self._given = set(map(_memory, given))
        self._writers: dict[int, set[int]] = {}
        self._held: list[Tensor] = []  # kept alive, so that no memory is reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        read, written = _tensors((args, kwargs)), _tensors(found)
        self._held += [*read, *written]
        after = frozenset().union(*(self._writers.get(_memory(x), ()) for x in read))
        follows = any(_memory(x) in self._given for x in read) or any(self.operators[i].follows for i in after)
        for x in written:
            self._writers.setdefault(_memory(x), set()).add(len(self.operators))
        self.operators.append(Operator(_running(), after, follows))
        return found

    def towards(self, answer: Iterable[Tensor]) -> list[Operator]:
        """List the operators between the given tensors and the answer, in the order in which they ran."""
        waiting = [i for x in answer for i in self._writers.get(_memory(x), ())]
        needed = set[int]()
        while waiting:
            i = waiting.pop()
            if i not in needed:
                needed.add(i)
                waiting += self.operators[i].after
        return [self.operators[i] for i in sorted(needed) if self.operators[i].follows]


def _memory(x: Tensor) -> int:
    """Return a name of the memory that a tensor shares with its views."""
    return x.untyped_storage()._cdata


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _running() -> list[CodeType]:
    """List the functions of the package that the followed call is running, from the outermost on."""
    found, frame = list[CodeType](), sys._getframe().f_back
    while frame is not None and frame.f_code is not follow.__code__:
        if _is_ours(frame.f_code) and frame.f_code.co_name not in GENERATED:
            found.append(frame.f_code)
        frame = frame.f_back
    return found[::-1]


def follow(name: str, call: Call, given: Sequence[Tensor]) -> Walk:
    """Follow one call from the given tensors on, after a first call that fills the caches."""
    call()
    with Trace(given) as trace:
        answer = list(call())
    opened = [code for operator in trace.towards(answer) for code in operator.functions]
    return Walk(name, list(_stops(dict.fromkeys(opened))))


def _is_ours(code: CodeType) -> bool:
    return PACKAGE in Path(code.co_filename).parents


def _stops(opened: Iterable[CodeType]) -> Iterator[Stop]:
    """Yield a stop for each run of functions of one file."""
    been = set[str]()
    for file, codes in itertools.groupby(opened, lambda code: code.co_filename):
        path = str(Path(file).relative_to(PACKAGE.parent))
        yield Stop(path, tuple(dict.fromkeys(code.co_qualname for code in codes)), path in been)
        been.add(path)


def hook_call(preset: str) -> tuple[Call, Sequence[Tensor]]:
    """Build a call of the TIS hook with a preset, on three sequences, to loss and masks; and its log-probs."""
    args, kwargs = args_of(preset), hook_kwargs([4, 2, 3], cp=1, rank=0)
    args.mis["metrics"] = "none"
    both = kwargs["train_log_probs"], kwargs["rollout_log_probs"]
    for proximal, behavior in zip(*both, strict=True):
        behavior.copy_(proximal + 5e-4)  # which no preset rejects

    def run() -> Iterable[Tensor]:
        loss, masks, _ = mis.compute_mis_weights_with_cp(args, **kwargs)
        return [loss, *masks]

    return run, [*both[0], *both[1]]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--json", type=target, help="write the walks here, and beside it a .md")
    parser.add_argument("--smoke", action="store_true", help="one preset")
    arguments = parser.parse_args()
    walks = [follow(preset, *hook_call(preset)) for preset in (SERVED[:1] if arguments.smoke else SERVED)]
    print(*walks, sep="\n\n")
    if arguments.json:
        measured = provenance()
        listed = [
            {"name": one.name, "files": one.files, "returns": one.returns, "stops": [vars(stop) for stop in one.stops]}
            for one in walks
        ]
        parts = [as_markdown(measured), (__doc__ or "").strip(), *(f"```\n{walk}\n```" for walk in walks)]
        text = "\n\n".join(part.strip() for part in parts) + "\n"
        write_record(arguments.json, {"measured with": measured, "walks": listed}, text)
    return 0
