"""Run a launcher of Miles with stand-ins for packages that are not installed, in the folder of its host.

    python -m lab.launcher SCRIPT [ARGUMENT ...]

`lab/launches.py` calls it, with commands on the path that do nothing in place of ray and the like.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.launcher:main")

import runpy
import sys

from lab.host_arguments import STOOD_IN
from lab.host_checkout import stand_in_for_missing_packages


def main() -> int:
    """Run the script as a program."""
    sys.path.insert(0, ".")
    stand_in_for_missing_packages(STOOD_IN)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0
