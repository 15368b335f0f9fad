"""Parse what launch scripts start with a host's own parser and validators, and hand the result to the TIS hook.

    python -m lab.launches --host miles --checkout MILES --megatron MEGATRON --json launches_miles.json
    python -m lab.launches --host slime --checkout SLIME --megatron MEGATRON --json launches_slime.json

Launches are our own scripts, and scripts of the host as `config check | patch` changes them. Each script runs with a
`ray` that submits nothing, so that its words are those of a real job. The host's `parse_args` gets them with the shape
of the real model on disk, and its validators compare the two. With the arguments that it returns the TIS hook weighs
a batch, and the weights have to be the oracle's and not 1.

MEGATRON is the host's Megatron (`lab/in_host/trees.py` names commits). The environment is that of
`scripts/run-in-host.sh`, with typer, hypothesis and the extra `scripts`. Stand-ins replace other packages that are not
installed.
`run-qwen3-4b-true-on-policy.sh` is not among the launches: its flags are those of SGLang's branch sglang-miles.

Exit codes: 0 every launch is parsed and weighs as the oracle; 1 one is refused or weighs otherwise; 2 nothing ran.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.launches:main", extra="verify")

import importlib
import io
import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import torch

from lab.host_arguments import STOOD_IN
from lab.host_checkout import build_parser, stand_in_for_missing_packages
from lab.in_host.launching import submitted
from lab.provenance import as_markdown, markdown_table, provenance, write_record
from mis_plugins.config.reading import from_args
from mis_plugins.config.writing import as_mapping

ROOT = Path(__file__).resolve().parents[1]
HOPPER = SimpleNamespace(name="NVIDIA H100", major=9, minor=0, total_memory=80 << 30)
STAND_INS = "from lab.launches import run_script; run_script()"
QWEN3 = {"model_type": "qwen3", "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "vocab_size": 151936}
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-4B": QWEN3 | {
        "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 9728, "tie_word_embeddings": True,
    },
    "Qwen3-30B-A3B-Base": QWEN3 | {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "tie_word_embeddings": False,
    },
    "Qwen2.5-1.5B-Instruct": {
        "model_type": "qwen2", "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "intermediate_size": 8960, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000, "vocab_size": 151936,
    },
}  # fmt: skip
"""What the `config.json` of each model says on Hugging Face."""
SHAPES["Qwen3-4B-Base"] = SHAPES["Qwen3-4B"]


@dataclass(frozen=True)
class Launch:
    """A script and what it is started with.

    ours: whether the script is this pack's; a script of the host is changed by `config check` first.
    weighs: whether the TIS hook corrects there; otherwise the command is parsed alone.
    """

    script: str
    model: str
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    ours: bool = True
    weighs: bool = True

    @property
    def title(self) -> str:
        return " ".join([*(f"{name}={value}" for name, value in self.environment), self.script, *self.arguments])


BLOG = [
    Launch(
        "run-qwen3-blog.sh",
        "Qwen3-4B-Base" if recipe.startswith("dense") else "Qwen3-30B-A3B-Base",
        environment=(("RECIPE", recipe),),
        weighs=False,
    )
    for recipe in (*(f"dense-{i}" for i in range(1, 5)), *(f"moe-{i}" for i in range(1, 5)), "moe-r3")
]
EXAMPLE = "examples/infra_features/train_infer_mismatch_helper"
LAUNCHES: dict[str, list[Launch]] = {
    "miles": [
        Launch("run-qwen3-4b-mis.sh", "Qwen3-4B"),
        Launch("run-qwen3-4b-mis-fsdp.sh", "Qwen3-4B"),
        Launch("run-qwen2.5-1.5b-async.sh", "Qwen2.5-1.5B-Instruct", weighs=False),
        *BLOG,
        Launch("scripts/run_qwen3_4b.py", "Qwen3-4B", ours=False),
        Launch("scripts/run_qwen3_4b.py", "Qwen3-4B", ("--enable-mis",), ours=False),
        Launch(f"{EXAMPLE}/run-qwen3-4b-mis.sh", "Qwen3-4B", ours=False),
        Launch(f"{EXAMPLE}/run-qwen3-4b-fsdp-mis.sh", "Qwen3-4B", ours=False),
    ],
    "slime": [
        Launch("run-qwen3-4b-mis-slime.sh", "Qwen3-4B"),
        Launch("examples/train_infer_mismatch_helper/run-qwen3-4b-mis.sh", "Qwen3-4B", ours=False),
        Launch("scripts/run-qwen3-4B.sh", "Qwen3-4B", ours=False),
    ],
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser(__doc__)
    parser.add_argument("--megatron", type=Path, required=True, help="root of the host's Megatron")
    parser.add_argument("--parse", action="store_true", help="parse words from the standard input, and no more")
    parser.add_argument("--weighs", action="store_true", help="with --parse: call the TIS hook too")
    arguments = parser.parse_args(argv)
    if arguments.parse:
        print(json.dumps(_weighed(arguments, json.load(sys.stdin))))
        return 0
    rows = []
    for launch in LAUNCHES[arguments.host]:
        rows.append(_row(launch, arguments))
        print("{result:<8} {launch}  {said}".format(**rows[-1]), flush=True)
    if arguments.json:
        trees = {arguments.host: arguments.checkout, "Megatron": arguments.megatron}
        write(arguments.json, rows, provenance(trees))
    return int(any(row["result"] != "good" for row in rows))


def write(path: Path, rows: Sequence[Mapping[str, Any]], measured: Mapping[str, str]) -> None:
    """Write the rows as JSON, and a table of them beside it."""
    shown = [(row["launch"], row["model"], row["result"], row["said"]) for row in rows]
    table = markdown_table(["launch", "model", "result", "what was seen"], shown)
    write_record(path, {"measured with": measured, "rows": rows}, f"# Launches\n\n{as_markdown(measured)}\n{table}")


def _row(launch: Launch, arguments: Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        row = {"launch": launch.title, "ours": launch.ours, "model": launch.model}
        try:
            words = _started(launch, arguments, folder)
            return row | _judged(launch, arguments, folder, words)
        except (subprocess.CalledProcessError, RuntimeError, OSError, ValueError) as error:
            said = getattr(error, "stderr", None) or str(error)
            return row | {"result": "refused", "said": said.strip().splitlines()[-1][:300]}


def _started(launch: Launch, arguments: Namespace, folder: Path) -> list[str]:
    """The words behind train.py, as the running script hands them to `ray job submit`."""
    checkout = arguments.checkout.resolve()
    settings = dict(launch.environment) | {
        "MILES_DIR": str(checkout), "SLIME_DIR": str(checkout), "MEGATRON_DIR": str(arguments.megatron.resolve()),
        "MODEL_DIR": str(folder / "models"), "SAVE_DIR": str(folder / "runs"), "DATA_DIR": str(folder / "data"),
        "LOAD_DIR": str(folder / "step-300"), "HOME": str(folder), "WANDB_KEY": "key", "WANDB_API_KEY": "key",
    }  # fmt: skip
    script = ROOT / "scripts" / launch.script if launch.ours else _changed(launch, checkout, folder)
    command = [sys.executable, "-c", STAND_INS] if script.suffix == ".py" else ["bash"]
    command += [str(script), *launch.arguments]
    return submitted(command, folder, settings, folder if launch.ours else folder / "host")


def run_script() -> None:
    """Run the launcher of Miles that the command line names, with stand-ins for packages that are not installed."""
    sys.path.insert(0, ".")  # the folder of its host
    stand_in_for_missing_packages(STOOD_IN)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _changed(launch: Launch, checkout: Path, folder: Path) -> Path:
    """A copy of the host's tree, of which the script is changed by the diff that `config check` prints."""
    from mis_plugins.__main__ import main as ours

    tree = folder / "host"
    shutil.copytree(checkout, tree, ignore=shutil.ignore_patterns(".git", "tests", "docs", "docker"))
    script = tree / launch.script
    # slime's own example names the folder of its image.
    script.write_text(script.read_text().replace("/root/slime/", f"{tree}/"))
    told = io.StringIO()
    given = ["--", *launch.arguments] if launch.arguments else []
    with chdir(tree), redirect_stdout(told):
        code = ours(["config", "check", launch.script, *given])
    if code != 1:
        raise RuntimeError(f"config check found nothing to change, and its exit code is {code}")
    subprocess.run(["patch", "-p0"], cwd=tree, input=told.getvalue(), text=True, check=True, capture_output=True)
    return script


def _judged(launch: Launch, arguments: Namespace, folder: Path, words: list[str]) -> dict[str, Any]:
    """Parse the words in a process of their own: Megatron's parser and the stand-ins stay there."""
    shape = folder / "shape"
    shape.mkdir()
    (shape / "config.json").write_text(json.dumps(SHAPES[launch.model]))
    command = [
        sys.executable, __file__, "--host", arguments.host, "--checkout", str(arguments.checkout),
        "--megatron", str(arguments.megatron), "--parse", *(["--weighs"] if launch.weighs else []),
    ]  # fmt: skip
    done = subprocess.run(
        command,
        input=json.dumps([*words, "--hf-checkpoint", str(shape), "--ref-load", str(shape)]),
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        cwd=folder / "host" if not launch.ours else folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    kept = [word.replace(str(folder), "FOLDER").replace(str(ROOT), "PACK") for word in words] if launch.ours else []
    return found | {"words": shlex.join(kept)}


def _weighed(arguments: Namespace, words: list[str]) -> dict[str, Any]:
    """What the host's parser makes of the words, and what the hook makes of that."""
    args = _parsed(arguments, words)
    shape = {name: getattr(args, name, None) for name in ("hidden_size", "num_layers", "rotary_base")}
    if not arguments.weighs:
        return {"result": "good", "said": "parsed and validated", "shape": shape}
    sys.path.append(str(ROOT / "tests" / "support"))
    found, expected = _weights(args)
    equal = all(abs(one - other) <= 1e-6 * abs(other) for one, other in zip(found, expected, strict=True))
    moved = any(abs(one - 1) > 1e-3 for one in found)
    said = f"parsed and validated; weights {[round(one, 4) for one in found]}"
    return {"result": "good" if equal and moved else "wrong", "said": said, "shape": shape, "oracle": expected}


def _weights(args: Namespace) -> tuple[list[float], list[float]]:
    """The weights of the hook that the arguments name, and the oracle's, one number a token of a small batch."""
    import oracle
    from batches import ratio_batch
    from drive import one_rank

    batch = ratio_batch([[0.6, 1.5], [1.2], [0.9, 3.0]])
    hook = resolve_name(args.custom_tis_function_path)
    loss, _, _ = hook(args=args, **batch.hook_kwargs(), parallel_state=one_rank())
    config = {name: value for name, value in as_mapping(from_args(args)).items() if value is not None}
    corrected = oracle.correct(batch.samples, config)
    expected = [
        weight if kept else 0.0
        for row, keep in zip(corrected.weights, corrected.keep, strict=True)
        for weight, kept in zip(row, keep, strict=True)
    ]
    return (loss / batch.pg_loss()).tolist(), expected


def _parsed(arguments: Namespace, words: Sequence[str]) -> Namespace:
    sys.path[:0] = [str(arguments.checkout.resolve()), str(arguments.megatron.resolve())]
    stand_in_for_missing_packages(STOOD_IN)
    # Megatron's validator asks for the generation of the GPU, and for what each launch sets in the job's environment.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    torch.cuda.get_device_properties = lambda *_: HOPPER  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda *_: (HOPPER.major, HOPPER.minor)
    sys.argv = ["train.py", *words]
    with redirect_stdout(sys.stderr):
        return importlib.import_module(f"{arguments.host}.utils.arguments").parse_args()
