"""Each extra of setup.py installs every package that its commands import, at once or where they need it."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("mis_plugins", "true_on_policy", "lab")
# The environment of a host or an engine brings these; no extra does.
BROUGHT = {
    "miles",
    "slime",
    "sglang",
    "vllm",
    "ray",
    "wandb",
    "tensorboard",
    "triton",
    "transformer_engine",
    "apex",
    "httpx",
    "pydantic",
}
BROUGHT |= {"jinja2", "markupsafe"}  # by torch
BROUGHT |= {"deep_gemm", "flash_attn", "sgl_kernel", "flash_attn_interface", "flashinfer"}
# Packages whose absence a command names with the extra that brings them.
TOLD = {"pyarrow": "report", "tree_sitter": "scripts", "tree_sitter_bash": "scripts"}
DISTRIBUTIONS = {"megatron": "megatron-core", "yaml": "pyyaml"}
# What each extra serves: packages, and the scripts of lab/ that name it in `run_command`.
SERVED = {
    "report": ("mis_plugins/report",),
    "verify": (
        *("lab/host", "mis_plugins/mis.py", "mis_plugins/__main__.py", "true_on_policy/__main__.py"),
        *(f"true_on_policy/{room}" for room in ("verify", "trainers", "diff", "doctor")),
    ),
}


@cache
def modules() -> dict[str, Path]:
    files = (file for top in OURS for file in (ROOT / top).rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


@cache
def beside() -> set[str]:
    """What a module of lab/ imports from the stand-ins of the tests."""
    return {path.stem for path in (ROOT / "tests/support").iterdir()}


def imported(file: Path) -> Iterator[str]:
    """Every name that a file imports, wherever in it, and those that it hands to `optional`."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(level=0, module=str(module)):
                yield module
                yield from (f"{module}.{alias.name}" for alias in node.names)
            case ast.Call(func=ast.Name(id="optional"), args=[ast.Constant(value=str(module))]):
                yield module


def needed(files: list[Path]) -> dict[str, Path]:
    """Distributions beyond the standard library that files and all of ours that they import need: each, and who."""
    found: dict[str, Path] = {}
    ways, met = list(files), set()
    while ways:
        file = ways.pop()
        if file in met:
            continue
        met.add(file)
        for name in imported(file):
            top = name.partition(".")[0]
            if top in OURS:
                ways += [modules()[name]] if name in modules() else []
            elif top not in sys.stdlib_module_names and top not in beside():
                found[DISTRIBUTIONS.get(top, top)] = file
    return found


def declared(extra: str) -> set[str]:
    """What `pip install .[extra]` installs, by setup.py as it is written."""
    call = next(
        node
        for node in ast.walk(ast.parse((ROOT / "setup.py").read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setup"
    )
    said = {word.arg: word.value for word in call.keywords}
    packages = ast.literal_eval(said["install_requires"]) + ast.literal_eval(said["extras_require"])[extra]
    return {re.split(r"[\[;=<>~! ]", package)[0].lower() for package in packages}


def served(extra: str) -> list[Path]:
    places = [ROOT / place for place in SERVED[extra]]
    files = [file for place in places for file in (place.rglob("*.py") if place.is_dir() else [place])]
    scripts = (ROOT / "lab").glob("*.py")
    return files + [file for file in scripts if f'extra="{extra}"' in file.read_text(encoding="utf-8")]


@pytest.mark.parametrize("extra", SERVED)
def test_an_extra_brings_all_that_its_commands_import(extra: str) -> None:
    lacking = {name: str(file) for name, file in needed(served(extra)).items() if name not in declared(extra)}
    brought = BROUGHT | {name for name, other in TOLD.items() if other != extra}
    assert {name: file for name, file in lacking.items() if name not in brought} == {}


OF_MODELS = {"torch", "transformers", "megatron-core", "safetensors", "rich", "matplotlib"}
MET = {"verify": OF_MODELS, "report": {"torch", "rich", "matplotlib"}}


@pytest.mark.parametrize("extra", SERVED)
def test_the_walk_meets_what_it_looks_for(extra: str) -> None:
    assert needed(served(extra)).keys() >= MET[extra]
