"""Scripts that end as a user's do, each in a process of its own, forked from one that has run their common beginning.

An interpreter that imports torch takes seconds to start, a fork of it does not. Its streams and its exit are its own.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from commands import ran

LIMIT = 600  # seconds that all scripts may take, the imports of their beginning included
FORKING = """
{beginning}
import json as _json, os as _os, sys as _sys
_scripts, _folder, _children, _script = _json.load(_sys.stdin), _sys.argv[1], [], ""
for _place, _each in enumerate(_scripts):
    if not (_child := _os.fork()):
        for _stream, _name in ((1, "out"), (2, "errors")):
            _os.dup2(_os.open(f"{{_folder}}/{{_place}}.{{_name}}", _os.O_CREAT | _os.O_WRONLY, 0o644), _stream)
        _script = _each
        break
    _children.append(_child)
else:
    print([_os.waitstatus_to_exitcode(_os.waitpid(_child, 0)[1]) for _child in _children])
exec(_script)
"""


@dataclass(frozen=True)
class Ended:
    """How a script ended, and what it wrote."""

    code: int
    out: str
    errors: str


def ended(scripts: Sequence[str], folder: Path, beginning: str = "import torch", **environment: str) -> list[Ended]:
    """Run all scripts at once, each in a fork of an interpreter that has run `beginning`."""
    words = "-c", FORKING.format(beginning=beginning), folder
    done = ran(*words, folder=folder, given=json.dumps(scripts), seconds=LIMIT, **environment)
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout)
    texts = [[(folder / f"{place}.{name}").read_text() for name in ("out", "errors")] for place in range(len(scripts))]
    return [Ended(code, *text) for code, text in zip(codes, texts, strict=True)]
