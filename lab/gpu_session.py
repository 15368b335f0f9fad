"""One session on a GPU, within ten minutes: are the pinned kernels what they promise, and what do they cost?

Sections run one after the other, each in its own process with its own time limit. The receipt is written after each.
Exit code: 0 every demand holds, 1 a demand does not hold, 2 a section did not finish, or nothing was demanded.

ceilings    a copy and a product: what the device can do at most
correction  the correction of mis_plugins against Miles's own (PYTHONPATH: a checkout), a loop and a copy; no wait
hostile     random cases of the TIS hook and the loss hook on the device, against float64 oracles on the CPU
attention   FlashAttention-3: tokens appended to a cache and decoded, against prefilled, by bytes
model       a Qwen3 that decodes, against itself as a trainer, by bytes
kernels     equal rows in batches of 1 to 8192: stock, pinned by Megatron-core's mode, DeepGEMM's, by bytes
cost        each pinned kernel, a log-prob forward and a training step, over stock
probes      the tests marked gpu: the probes of both contracts on the real kernels
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

import torch

from lab.gpu import sections
from lab.gpu.plan import CONTRACT
from lab.gpu.receipt import Measured, Receipt, Section, exit_code, held, write
from lab.host.cli.flags import finite
from lab.provenance import parser_of, provenance
from mis_plugins.shared.terminal import print_table
from true_on_policy.kernels import gpu


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    deadline = time.monotonic() + options.seconds
    measured = measured_with(options)
    found: list[Section] = []

    def keep() -> None:
        write(options.receipt, Receipt(1, measured, contract(), tuple(found)))

    keep()  # refuses a place that cannot be written to before any second is spent
    if options.dry_run:
        sections.preload()
    with sections.warming(options.dry_run):
        for name in options.sections:
            print(f"{name} ...", file=sys.stderr, flush=True)
            left = deadline - time.monotonic()
            found.append(sections.run(name, min(sections.SECTIONS[name], left), options.dry_run))
            keep()
    rows = [(each.name, f"{each.seconds:.0f} s", each.ended, held([each])) for each in found]
    print_table(("section", "took", "ended", "demanded"), rows)
    print(f"wrote {options.receipt}")
    return exit_code(found)


def parse(arguments: list[str]) -> Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--receipt", type=Path, required=True, help="write the one file of the session here")
    parser.add_argument(
        "--sections", nargs="+", choices=sections.SECTIONS, default=list(sections.USUAL), metavar="NAME"
    )
    parser.add_argument("--seconds", type=finite, default=550, help="for all sections together")
    parser.add_argument("--commit", help="of the working tree, where no git is there to ask")
    parser.add_argument("--dry-run", action="store_true", help="on CPU, tiny sizes, kernels swapped")
    return parser.parse_args(arguments)


def measured_with(options: Namespace) -> Measured:
    """What the session runs on; this process must not touch CUDA, or its forks could not use it."""
    found = provenance()
    versions = {name: module.version() for name, module in gpu.PROVIDERS.items()}
    name, driver, memory = ("none", "none", "none") if options.dry_run else _device()
    return Measured(
        command=found["command"],
        commit=options.commit or found["mis-plugins commit"],
        python=found["python"],
        cpu=found["cpu"],
        device="cpu" if options.dry_run else "cuda",
        gpu=name,
        driver=driver,
        memory=memory,
        torch=found["torch"],
        cuda=torch.version.cuda or "",
        packages={name: version for name, version in versions.items() if version},
    )


def _device() -> tuple[str, str, str]:
    """Ask nvidia-smi for name, driver and memory of the device."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        name, driver, memory = told.splitlines()[0].split(", ")
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError) as error:
        return f"not seen: {error}", "not seen", "not seen"
    return name, driver, memory


def contract() -> dict[str, str | int]:
    """The contract whose kernels the session pins, by its settings."""
    stated = {
        name: getattr(CONTRACT, name)
        for name in ("backend", "dtype", "attention", "engine_gemm", "trainer_tp", "engine_tp")
    }
    return {"pins": gpu.name(CONTRACT), "family": CONTRACT.family.name, **stated}


def ended(arguments: list[str] | None = None) -> int:
    """Run the session and return its exit code: 2 for an error, because Python's own 1 means a difference."""
    try:
        return main(sys.argv[1:] if arguments is None else arguments)
    except Exception:
        traceback.print_exc()
        return 2
