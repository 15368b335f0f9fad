"""Launch scripts in the forms of Miles and slime, and what a host makes of the command that one starts."""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mis_plugins.config.file import keys_of
from mis_plugins.hosts.arguments import flags, kinds, recorded

UNRELEASED = {"sglang": {"--sglang-true-on-policy-contract"}}  # of the SGLang that Miles builds for itself
HOOK = "mis_plugins.mis.compute_mis_weights_with_cp"
THEIRS = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
FLAT = 'use_tis: true\ntis_level: "token"\ntis_mode: "truncate"\ntis_upper_bound: 2.0\n'

SHELL = """#!/bin/bash
set -e
MODEL_DIR=${{MODEL_DIR:-/root/models}}
GRPO_ARGS=(
   --advantage-estimator grpo   # the group's mean
   --eps-clip 0.2
{grpo})
CUSTOM_ARGS=(
{custom})
ray job submit --address="http://127.0.0.1:8265" \\
   -- python3 train.py \\
   --hf-checkpoint "$MODEL_DIR/a model" \\
   ${{GRPO_ARGS[@]}} \\
   ${{CUSTOM_ARGS[@]}}
"""
PYTHON = '''from dataclasses import dataclass

import miles.utils.external_utils.command_utils as U
import typer


@dataclass
class ScriptArgs(U.ExecuteTrainConfig):
    enable_mis: bool = False
    upper: float = 2.0
    extra_args: str = ""


def execute(args: ScriptArgs):
    grpo_args = "--advantage-estimator grpo " "--eps-clip 0.2 "
    misc_args = f"--save {args.output_dir}/run "
    if args.enable_mis:
        config_text = f"""
use_tis: true
tis_level: "token"
tis_mode: "truncate"
tis_upper_bound: {args.upper}
""".strip()
        misc_args += (
            f"--custom-config-path {U.encode_pseudo_file(config_text)} "
            "--custom-tis-function-path examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp "
        )
    train_args = f"{grpo_args} " f"{misc_args} " f"{args.extra_args} "
    U.execute_train(train_args=train_args, config=args, megatron_model_type="qwen3-4B")


def main(args: ScriptArgs):
    execute(args)


if __name__ == "__main__":
    typer.run(main)
'''
MILES = """import base64
import dataclasses
import subprocess


@dataclasses.dataclass
class ExecuteTrainConfig:
    output_dir: str = "/runs"


def encode_pseudo_file(text):
    return "base64:" + base64.b64encode(text.encode()).decode()


def execute_train(train_args, config, megatron_model_type):
    subprocess.run(["bash", "-c", f"ray job submit -- python3 train.py {train_args}"], check=True)
"""
TYPER = """import sys


def run(main):
    kind = main.__annotations__["args"]
    given = {word[2:].replace("-", "_"): True for word in sys.argv[1:]}
    main(kind(**given))
"""


def accepted(*parsers: str) -> set[str]:
    """Which flags these parsers of a host accept: what a launch script may pass."""
    return {flag for parser in parsers for flag in flags(parser) | UNRELEASED.get(parser, set())}


def shell(grpo: str = "", custom: str = "") -> str:
    """A shell launcher with further lines in two of its arrays."""
    lines = ["".join(f"   {line}\n" for line in part.splitlines()) for part in (grpo, custom)]
    return SHELL.format(grpo=lines[0], custom=lines[1])


def started(script: Path, folder: Path, *arguments: str) -> list[str]:
    """The words behind train.py, as the running script hands them to a `ray` that submits nothing."""
    for name, text in (("command_utils.py", MILES), ("typer.py", TYPER)):
        place = folder / (name if name == "typer.py" else f"miles/utils/external_utils/{name}")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    ray = folder / "bin" / "ray"
    ray.parent.mkdir(exist_ok=True)
    ray.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" >"{folder}/ray.txt"\n')
    ray.chmod(0o755)
    (folder / "bin" / "python").unlink(missing_ok=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    paths = [str(folder), *sys.path]
    env = os.environ | {"PATH": f"{folder}/bin:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable if script.suffix == ".py" else "bash", str(script), *arguments]
    subprocess.run(command, env=env, cwd=folder, check=True, timeout=60)
    words = (folder / "ray.txt").read_text().splitlines()
    return words[words.index("train.py") + 1 :]


def parsed(words: list[str], host: str = "miles") -> argparse.Namespace:
    """The arguments as the host's parser names them, with the keys of the config file set after them."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    taken = kinds(recorded()[host])
    known = {flag for record in recorded()[host].records for flag in flags(record)}
    for name, kind in taken.items():
        flag = "--" + name.replace("_", "-")
        if flag in known:
            parser.add_argument(flag, dest=name, **_as_taken(kind))
    parser.set_defaults(qkv_format="thd")  # the hosts' default; records hold names alone
    args = parser.parse_args(words)
    if args.custom_config_path:
        for name, value in keys_of(args.custom_config_path).items():
            setattr(args, name, value)
    return args


def _as_taken(kind: str) -> dict[str, Any]:
    if kind == "switch":
        return {"action": "store_true"}
    return {"nargs": "+"} if kind == "other" else {"type": float if kind == "number" else str}
