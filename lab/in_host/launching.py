"""The command line of a host's train.py: the flags of our launch script, and after them the sizes of a tiny run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.in_host import model
from lab.in_host.trees import CannotRun, Host
from true_on_policy.engines.server import named

REPOSITORY = Path(__file__).resolve().parents[2]

# Flags of the launch scripts that a tiny run on a CPU cannot keep, with the number of words that follow each.
DROPPED = {
    "--apply-chat-template": 0,  # the tokenizer of bytes has no template
    "--save": 1,
    "--save-interval": 1,
    "--attention-backend": 1,  # the spec brings its own attention
    "--sglang-mem-fraction-static": 1,
}
SPEC = (
    "--transformer-impl", "local", "--spec", "lab.in_host.layers", "stock_layers",
    "--no-persist-layer-norm", "--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-rope-fusion",
    "--no-bias-swiglu-fusion", "--make-vocab-size-divisible-by", "32", "--seq-length", "512",
)  # fmt: skip
ENGINE = (
    "--sglang-device", "cpu", "--sglang-attention-backend", "torch_native", "--sglang-sampling-backend", "pytorch",
    "--sglang-grammar-backend", "none", "--sglang-disable-cuda-graph", "--sglang-mem-fraction-static", "0.5",
    "--sglang-max-total-tokens", "8192", "--sglang-max-running-requests", "16", "--sglang-sleep-on-idle",
)  # fmt: skip
GPUS = 8
SECONDS = 300  # that a launch script may take until it has submitted
SILENT = ("pkill", "sleep", "hf", "torchrun", "nvidia-smi", "huggingface-cli", "rsync")
"""Commands of launch scripts that do nothing where a launch is only read."""

RESIDENT = ("--no-offload-train", "--no-offload-rollout")
"""Flags beside a colocated engine: nothing is offloaded, because offloading loads torch_memory_saver into
every process, and torch_memory_saver wants libcuda."""


@dataclass(frozen=True)
class Sizes:
    """How a run is split, and how long it is."""

    tensor: int = 1
    context: int = 1
    data: int = 1
    steps: int = 3
    prompts: int = 4
    samples: int = 4
    response: int = 24
    micro_batch_tokens: int = 256

    @property
    def ranks(self) -> int:
        return self.tensor * self.context * self.data


def captured(host: Host, checkout: Path, config: Path, folder: Path) -> list[str]:
    """Run our launch script, and return the words after train.py.

    Raises:
        CannotRun: the launch script refuses.
    """
    settings = {host.variable: checkout, "MODEL_DIR": folder, "DATA_DIR": folder, "MIS_CONFIG": config}
    script = str(REPOSITORY / "scripts" / host.launch)
    return submitted(["bash", script], folder, {name: str(path) for name, path in settings.items()}, folder)


def submitted(command: Sequence[str], folder: Path, settings: Mapping[str, str], cwd: Path) -> list[str]:
    """Run a launch with a `ray` that submits nothing, and return the words after train.py.

    Raises:
        CannotRun: the launch fails, does not end, or submits no train.py.
    """
    written, stubs = folder / "submitted.txt", folder / "bin"
    stubs.mkdir(parents=True, exist_ok=True)
    python = f'exec "{sys.executable}" "$@"'
    bodies = dict.fromkeys(SILENT, "exit 0") | {"python": python, "python3": python}
    bodies["ray"] = f'if [ "$1" = job ]; then printf "%s\\n" "$@" >"{written}"; fi'
    for name, body in bodies.items():
        (stubs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (stubs / name).chmod(0o755)
    paths = {"PATH": f"{stubs}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])}
    environment = os.environ | settings | paths
    launch = " ".join(command)
    try:
        done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise CannotRun(f"{launch}: has not ended after {SECONDS} seconds") from None
    words = written.read_text().splitlines() if written.exists() else []
    programs = [index for index, word in enumerate(words) if word.endswith(("train.py", "train_async.py"))]
    if done.returncode or not programs:
        what = "submitted" if programs else "no train.py submitted"
        raise CannotRun(f"{launch}: exit {done.returncode}, {what}\n{done.stdout}{done.stderr}")
    return words[programs[0] + 1 :]


def shape(words: Sequence[str]) -> list[str]:
    """Return the model's own flags, which the launch script puts between two flags that every model has."""
    return list(words[words.index("--max-tokens-per-gpu") + 2 : words.index("--ref-load")])


def without(words: Sequence[str], dropped: dict[str, int]) -> list[str]:
    """Leave flags out of a command line, each with the words that follow it."""
    kept, skip = [], 0
    for word in words:
        if skip:
            skip -= 1
        elif word in dropped:
            skip = dropped[word]
        else:
            kept.append(word)
    return kept


def shrunk(host: Host, words: Sequence[str], work: Path, run: Path, sizes: Sizes, colocate: bool) -> list[str]:
    """Return the launch script's words, followed by the words of a tiny run, which win."""
    dropped = DROPPED if colocate else DROPPED | {"--colocate": 0}
    if sizes.tensor == 1:
        dropped = dropped | {"--sequence-parallel": 0}
    update = [*host.update, "--update-weight-disk-dir", str(run / "weights")] if host.update else []
    place = RESIDENT if colocate else update
    return [
        *without(words, dropped), *model.shape_flags(work / "model"), *SPEC, *ENGINE, *place, *_sizes(sizes),
        *_split(sizes), "--ref-load", str(work / "torch_dist"), *_data(work, run),
    ]  # fmt: skip


def shrunk_fsdp(words: Sequence[str], work: Path, run: Path, sizes: Sizes) -> list[str]:
    """Return the words of FSDP's launch script, followed by the words of a tiny run, which win."""
    dropped = {name: DROPPED[name] for name in DROPPED if name != "--attention-backend"} | {"--colocate": 0}
    return [
        *without(words, dropped), *ENGINE, *_sizes(sizes), "--attn-implementation", "sdpa",
        "--ref-load", str(work / "model"), *_data(work, run),
    ]  # fmt: skip


def _data(work: Path, run: Path) -> list[str]:
    """Name the model, the prompts and their reward, and where the host dumps what the verdict reads."""
    return [
        "--hf-checkpoint", str(work / "model"), "--prompt-data", str(work / "model" / "prompts.jsonl"),
        "--custom-rm-path", "lab.in_host.reward.score", "--lr", "1e-4", "--dump-details", str(run / "details"),
    ]  # fmt: skip


def _sizes(sizes: Sizes) -> list[str]:
    return named({
        "num-rollout": sizes.steps, "rollout-batch-size": sizes.prompts, "n-samples-per-prompt": sizes.samples,
        "global-batch-size": sizes.prompts * sizes.samples, "rollout-max-response-len": sizes.response,
        "actor-num-gpus-per-node": sizes.ranks, "rollout-num-gpus": 1, "num-gpus-per-node": GPUS,
        "max-tokens-per-gpu": sizes.micro_batch_tokens,
    })  # fmt: skip


def _split(sizes: Sizes) -> list[str]:
    """State Megatron's own ways to split a model and a sequence."""
    gathered = ["--cp-comm-type", "all_gather"] if sizes.context > 1 else []
    split = {"tensor-model-parallel-size": sizes.tensor, "context-parallel-size": sizes.context}
    return [*named(split), *gathered]
