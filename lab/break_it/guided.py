"""Feed the readers of strangers' texts and files with bytes, guided by the branches that each input reaches in them.

A fault is an error that is not ours, or an input that takes over ten seconds or 4 GB. It is kept in a file, whose name
is printed, and `--again FILE` reads that file once more.

    python -m lab.break_it.guided translate --minutes 5
    python -m lab.break_it.guided translate --again /tmp/translate-crash-0123abcd

Exit status: 0 no fault, 1 a fault, 2 could not run.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.break_it.guided:main", extra="dev")

import hashlib
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from lab.break_it import ROOT
from lab.provenance import parser_of

LIMIT = 10  # seconds for one input
LARGEST = 4096  # bytes of an input
MEMORY = 4096  # MiB of the process
STATUS = {0: 0, 70: 1, 71: 1, 77: 1}  # of libFuzzer: no fault; too slow; out of memory; an exception
BEGUN = 100  # inputs of a room's own strategy


@dataclass(frozen=True)
class Target:
    """What reads bytes, and the strategy of the inputs that atheris begins with."""

    read: Callable[[bytes], object]
    begun: st.SearchStrategy[bytes]


def translate() -> Target:
    """Settings of another framework, which the first byte picks: a file of keys, a script, or a launcher."""
    from lab.break_it.translate import FRAMEWORKS, cases
    from mis_plugins.explain.translate import prime_rl

    readers = {name: each.translate for name, each in FRAMEWORKS.items()} | {"prime-rl": prime_rl.translate}
    names = sorted(readers)
    begun = cases().map(lambda case: bytes([names.index(case[0])]) + case[1].encode())
    return Target(lambda content: readers[names[content[0] % len(names)]](_text(content[1:])), begun)


def scripts() -> Target:
    """Launch scripts of bash; none is run."""
    from lab.break_it.scripts import cases
    from mis_plugins.explain.launch import bash

    return _launches("s.sh", bash.launches, cases())


def launchers() -> Target:
    """Python launchers; none is run."""
    from lab.break_it.launchers import cases
    from mis_plugins.explain.launch import python

    return _launches("run.py", python.launches, cases())


def _launches(name: str, read: Callable[..., Any], cases: st.SearchStrategy[str]) -> Target:
    from mis_plugins.explain.launch.reader import Reading

    return Target(lambda content: read(_text(content), Path(name), Reading(len(content), name)), cases.map(str.encode))


def config() -> Target:
    """A mis.yaml, which a host reads into its arguments."""
    from mis_plugins.config.file import keys_of
    from mis_plugins.config.reading import from_args

    def read(content: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "mis.yaml")
            path.write_bytes(content)
            args = Namespace()
            vars(args).update(keys_of(path) | {"use_tis": True, "custom_config_path": str(path)})
            from_args(args)

    return Target(read, st.sampled_from([file.read_bytes() for file in sorted((ROOT / "yaml").rglob("*.yaml"))]))


def dumps() -> Target:
    """A file of a run, whose kind the first byte picks, under the watch of `tests/shared/test_fuzz.py`."""
    from lab.break_it.dumps import KINDS, cases, judge

    names = sorted(KINDS)
    begun = cases().map(lambda case: bytes([names.index(case[0])]) + case[1])
    return Target(lambda content: judge((names[content[0] % len(names)], content[1:])), begun)


TARGETS: dict[str, Callable[[], Target]] = {
    made.__name__: made for made in (translate, scripts, launchers, config, dumps)
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    import atheris  # noqa: F401  a machine that lacks it is told so here, and not by the process that is fed

    seconds = max(1, round(60 * arguments.minutes))  # libFuzzer takes 0 for no end
    asked = [f"-max_total_time={seconds}", f"-seed={arguments.seed}"]
    kept = [str(path.resolve()) for path in ([arguments.again] if arguments.again else arguments.corpus)]
    limits = [f"-timeout={LIMIT}", f"-rss_limit_mb={MEMORY}", f"-max_len={LARGEST}"]
    limits.append(f"-artifact_prefix={Path(tempfile.gettempdir(), arguments.target)}-")
    with tempfile.TemporaryDirectory() as folder:
        asked, begun = (kept, None) if arguments.again else ([*asked, *kept, folder], folder)
        code = f"from lab.break_it.guided import fuzz; fuzz({arguments.target!r}, {begun!r})"
        ended = subprocess.run([sys.executable, "-c", code, *limits, *asked], check=False, cwd=ROOT).returncode
    return STATUS.get(ended, 2)


def fuzz(target: str, begun: str | None) -> None:
    """Feed one target, in a process of its own: libFuzzer ends it.

    Args:
        begun: the folder for the inputs to begin with; None makes none.
    """
    import atheris

    with atheris.instrument_imports(include=["mis_plugins"]):  # pyright: ignore[reportAttributeAccessIssue]
        from lab.break_it.__main__ import answered

        made = TARGETS[target]()

    def judge(content: bytes) -> str:
        made.read(content or b"\0")
        return "read"

    def fed(content: bytes) -> None:
        answered(judge, content)

    if begun is not None:
        _begin(made, Path(begun))
    atheris.Setup(sys.argv, fed)
    atheris.Fuzz()


def _begin(made: Target, folder: Path) -> None:
    @seed(0)
    @settings(max_examples=BEGUN, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list[Any](HealthCheck))  # fmt: skip
    @given(made.begun)
    def keep(content: bytes) -> None:
        folder.joinpath(hashlib.sha256(content).hexdigest()).write_bytes(content)

    keep()


def _text(content: bytes) -> str:
    return content.decode(errors="replace")


def _parser() -> ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("target", choices=TARGETS, help="what reads the bytes")
    parser.add_argument("corpus", type=Path, nargs="*", help="folders of inputs to begin with; the first one grows")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long")
    parser.add_argument("--seed", type=int, default=1, help="of libFuzzer; 0 is the time")
    parser.add_argument("--again", type=Path, metavar="FILE", help="read this file, and end")
    return parser
