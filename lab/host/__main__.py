"""`python -m lab.host`: parse, check, then start the ranks."""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.host.__main__:main", extra="verify")

import sys
from pathlib import Path

from lab.host.cli.arguments import parse_args
from lab.host.folders import SUMMARY, run_folder
from mis_plugins.errors import MisError
from mis_plugins.shared.shell import INTERRUPTED, REFUSED, importing
from mis_plugins.shared.terminal import print_error


def main() -> int:
    """Run and return the exit code; see `parallel.launch`."""
    try:
        args = parse_args()
        args.output = str(run_folder(args))
    except MisError as error:
        return _refused(error)
    except OSError as error:
        return _refused(f"--output {args.output}: {error.strerror}; give a folder that can be written")
    # Megatron takes seconds to import: only once the settings are known to be right, and once for all ranks.
    with importing():
        from lab.host.loop import run_rank
        from lab.host.train.parallel import launch

    return _told(Path(args.output), launch(args.world_size, lambda: run_rank(args)))


def _refused(why: MisError | str) -> int:
    print_error(f"error: {why}")
    return REFUSED


def _told(folder: Path, code: int) -> int:
    """Say how the run ended, unless its error was printed."""
    if code == INTERRUPTED:
        print("interrupted", file=sys.stderr)
    if code in (0, INTERRUPTED) and (folder / SUMMARY).exists():
        print(f"wrote {folder}")
    return code
