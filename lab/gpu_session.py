"""One session on a lent GPU, within nine minutes: are the pinned kernels what they promise, and what do they cost?

Sections run one after the other, each in its own process with its own time limit. Results are written after each.
Exit code: 0 every demand holds, 1 a demand does not hold, 2 a section did not finish, or nothing was demanded.

ceilings    a copy and a product: what the device can do at most
correction  the correction of mis_plugins against a loop over sequences and a copy; no wait for the device
attention   FlashAttention-3: tokens appended to a cache and decoded, against prefilled, by bytes
model       a Qwen3 that decodes, against itself as a trainer, by bytes
kernels     equal rows in batches of 1 to 8192: stock, pinned by Megatron-core's mode, DeepGEMM's, by bytes
cost        each pinned kernel, a log-prob forward and a training step, over stock
engine      a real SGLang against a trainer, by bytes; only where a user asks for it and SGLang is installed
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.gpu_session:ended")

import subprocess
import sys
import time
import traceback
from argparse import Namespace
from pathlib import Path

from lab.gpu import sections
from lab.gpu.results import Section, exit_code, write
from lab.provenance import parser_of, provenance
from mis_plugins.shared.numerals import finite
from mis_plugins.shared.terminal import print_table
from true_on_policy.kernels import gpu


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    deadline = time.monotonic() + options.seconds
    measured = measured_with(options)
    found: list[Section] = []
    write(
        options.json, measured, found
    )  # refuses a place that cannot be written to before any second is spent
    if options.dry_run:
        sections.preload()
    with sections.warming(options.dry_run):
        for name in options.sections:
            print(f"{name} ...", file=sys.stderr, flush=True)
            left = deadline - time.monotonic()
            found.append(sections.run(name, min(sections.SECTIONS[name], left), options.dry_run))
            write(options.json, measured, found)
    rows = [(each.name, f"{each.seconds:.0f} s", each.ended, _verdict(each)) for each in found]
    print_table(("section", "took", "ended", "demanded"), rows)
    return exit_code(found)


def parse(arguments: list[str]) -> Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--json", type=Path, required=True, help="write the figures here, and beside it a .md"
    )
    parser.add_argument(
        "--sections", nargs="+", choices=sections.SECTIONS, default=list(sections.USUAL), metavar="NAME"
    )
    parser.add_argument("--seconds", type=finite, default=480, help="for all sections together")
    parser.add_argument("--commit", help="of the working tree, where no git is there to ask")
    parser.add_argument("--dry-run", action="store_true", help="on CPU, tiny sizes, kernels swapped")
    return parser.parse_args(arguments)


def measured_with(options: Namespace) -> dict[str, str]:
    found = provenance() | {
        "device": "none: a dry run, no figure means anything" if options.dry_run else _device()
    }
    found |= {name: version for name, module in gpu.PROVIDERS.items() if (version := module.version())}
    return found | ({"mis-plugins commit": options.commit} if options.commit else {})


def _device() -> str:
    """Ask nvidia-smi for the device: this process must not touch CUDA, or its forks could not use it."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"not seen: {error}"


def _verdict(section: Section) -> str:
    asked = [result.holds for result in section.results if result.holds is not None]
    return f"{sum(asked)} of {len(asked)} hold" if asked else "nothing"


def ended(arguments: list[str] | None = None) -> int:
    """Run the session and return its exit code: 2 for an error, because Python's own 1 means a difference."""
    try:
        return main(sys.argv[1:] if arguments is None else arguments)
    except Exception:
        traceback.print_exc()
        return 2
