"""Imports: a room imports only rooms below it, and an extra of setup.py installs all that its commands import."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from true_on_policy.contract.sides import ENGINES

ROOT = Path(__file__).parents[2]
OURS = ("mis_plugins", "true_on_policy", "lab")
# From top to bottom, as docs/architecture.md draws them.
FLOORS = {
    "mis_plugins": "__main__ report mis explain hosts routing loss metrics versions correction config "
    "packing shared errors __version__",
    "true_on_policy": "__main__ doctor verify fsdp_worker trainers hosts weights engines observe models diff "
    "flags kernels contract bitwise errors",
}
OPEN_TO_TRUE_ON_POLICY = {"packing", "config", "hosts", "mis", "shared", "errors"}
# The report reads files alone: it knows no host, and only the door imports it.
READ_BY_REPORT = {"report", "config", "packing", "correction", "metrics", "versions", "explain", "shared", "errors"}
ENTRIES = 18


@cache
def modules() -> dict[str, Path]:
    """The files of ours by the dotted names of their modules."""
    files = (file for top in OURS for file in sorted((ROOT / top).rglob("*.py")))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


@cache
def imported(file: Path) -> tuple[str, ...]:
    """Every name that a file imports in full, wherever in it, its modules too, and those handed to `optional`."""
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Import():
                names += [alias.name for alias in node.names]
            case ast.ImportFrom(level=0, module=str(module)):
                names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
            case ast.Call(func=ast.Name(id="optional"), args=[ast.Constant(value=str(module))]):
                names.append(module)
    return tuple(names)


def imports(package: str) -> Iterator[tuple[str, str]]:
    """The modules of a package, each with every name of ours below a package that it imports."""
    for name, file in modules().items():
        if name.partition(".")[0] == package:
            yield from ((name, target) for target in imported(file) if target.split(".")[0] in OURS and "." in target)


def room(name: str) -> tuple[str, str]:
    package, _, rest = name.partition(".")
    return package, rest.partition(".")[0]


@pytest.mark.parametrize("package", FLOORS)
def test_rooms_import_downwards(package: str) -> None:
    order = FLOORS[package].split()
    upwards = [
        f"{name} imports {target}"
        for name, target in imports(package)
        if name != package and room(target)[0] == package
        if order.index(room(target)[1]) < order.index(room(name)[1])
    ]
    assert not upwards


def test_correction_and_bits_meet_in_few_rooms() -> None:
    """mis_plugins imports mis_plugins alone, and no package imports the lab."""
    strangers = [
        f"{name} imports {target}"
        for package in FLOORS
        for name, target in imports(package)
        if room(target)[0] != package
        if package == "mis_plugins" or room(target)[1] not in OPEN_TO_TRUE_ON_POLICY
    ]
    assert not strangers


def test_report_knows_no_host() -> None:
    """Rooms that run a host neither serve the report nor read it."""
    ours = [pair for pair in imports("mis_plugins") if room(pair[1])[0] == "mis_plugins"]
    given = [pair for pair in ours if room(pair[0])[1] == "report" and room(pair[1])[1] not in READ_BY_REPORT]
    taken = [pair for pair in ours if room(pair[1])[1] == "report" and room(pair[0])[1] not in ("report", "__main__")]
    assert not [pair for pair in given if pair[1] != "mis_plugins.__version__"] and not taken


def test_records_of_engines_import_the_contract_alone() -> None:
    """`contract/sides.py`, which stands below the engines, lists their folders and reads these records."""
    read = [pair for pair in imports("true_on_policy") if pair[0].partition("engines.")[2] in ENGINES]
    assert len({name for name, _ in read}) > 2
    assert [pair for pair in read if not f"{pair[1]}.".startswith("true_on_policy.contract.specs.")] == []


@pytest.mark.parametrize("package", FLOORS)
def test_first_floor_is_short(package: str) -> None:
    entries = {path.name for path in (ROOT / package).iterdir()} - {"__pycache__"}
    assert len(entries) <= ENTRIES, sorted(entries)


# What an extra installs.

# The environment of a host or an engine brings these; no extra does.
BROUGHT = set("miles slime sglang vllm ray wandb tensorboard triton transformer_engine apex httpx pydantic".split())
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
def beside() -> set[str]:
    """What a module of lab/ imports from the stand-ins of the tests."""
    return {path.stem for path in (ROOT / "tests/support").iterdir()}


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
