"""``python -m mis_plugins.local``: parse, check, then start the ranks."""

from __future__ import annotations

import sys
from pathlib import Path

from mis_plugins.errors import MisError
from mis_plugins.local.arguments import parse_args


def main() -> int:
    """Run and return the exit code; see ``parallel.launch``."""
    try:
        args = parse_args()
        Path(args.output).mkdir(parents=True, exist_ok=True)
    except MisError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"error: --output {args.output}: {error.strerror}; give a folder that can be written",
            file=sys.stderr,
        )
        return 2
    # Megatron takes seconds to import: not before the settings are known to be right, and once for all ranks.
    from mis_plugins.local.loop import run_rank
    from mis_plugins.local.parallel import launch

    return launch(args.world_size, lambda: run_rank(args))


if __name__ == "__main__":
    sys.exit(main())
