"""The direction of imports: a room imports only rooms below it, so that no two rooms import each other."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from true_on_policy.contract.sides import ENGINES

ROOT = Path(__file__).parents[2]
# From top to bottom, as docs/architecture.md draws them.
FLOORS = {
    "mis_plugins": "__main__ report mis explain hosts routing loss metrics versions correction config "
    "packing shared errors __version__",
    "true_on_policy": "__main__ doctor verify fsdp_worker trainers hosts weights engines observe models diff "
    "flags kernels contract bitwise errors",
}
OPEN_TO_TRUE_ON_POLICY = {"packing", "config", "hosts", "mis", "shared", "errors"}
# The report reads files alone: it knows no host, and only the door imports it.
READ_BY_REPORT = {"report", "config", "packing", "correction", "metrics", "explain", "shared", "errors"}
ENTRIES = 18


def modules(package: str) -> Iterator[tuple[str, ast.Module]]:
    for file in sorted((ROOT / package).rglob("*.py")):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        yield name, ast.parse(file.read_text(encoding="utf-8"))


def imported(tree: ast.Module) -> Iterator[str]:
    """Names of ours, in full: `from mis_plugins import mis` is mis_plugins.mis."""
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name for name in names if name.split(".")[0] in {*FLOORS, "lab"} and "." in name)


def room(name: str) -> tuple[str, str]:
    package, _, rest = name.partition(".")
    return package, rest.partition(".")[0]


@pytest.mark.parametrize("package", FLOORS)
def test_rooms_import_downwards(package: str) -> None:
    order = FLOORS[package].split()
    upwards = [
        f"{name} imports {target}"
        for name, tree in modules(package)
        for target in imported(tree)
        if name != package and room(target)[0] == package
        if order.index(room(target)[1]) < order.index(room(name)[1])
    ]
    assert not upwards


def test_correction_and_bits_meet_in_few_rooms() -> None:
    """mis_plugins imports mis_plugins alone, and no package imports the lab."""
    strangers = [
        f"{name} imports {target}"
        for package in FLOORS
        for name, tree in modules(package)
        for target in imported(tree)
        if room(target)[0] != package
        if package == "mis_plugins" or room(target)[1] not in OPEN_TO_TRUE_ON_POLICY
    ]
    assert not strangers


def test_report_knows_no_host() -> None:
    """Rooms that run a host neither serve the report nor read it."""
    ours = [
        (name, target)
        for name, tree in modules("mis_plugins")
        for target in imported(tree)
        if room(target)[0] == "mis_plugins"
    ]
    given = [pair for pair in ours if room(pair[0])[1] == "report" and room(pair[1])[1] not in READ_BY_REPORT]
    taken = [pair for pair in ours if room(pair[1])[1] == "report" and room(pair[0])[1] not in ("report", "__main__")]
    assert not [pair for pair in given if pair[1] != "mis_plugins.__version__"] and not taken


def test_records_of_engines_import_the_contract_alone() -> None:
    """`contract/sides.py`, which stands below the engines, lists their folders and reads these records."""
    records = {
        name: set(imported(ast.parse((folder / "__init__.py").read_text())))
        for name in ENGINES
        for folder in [ROOT / "true_on_policy" / "engines" / name]
    }
    assert len(records) > 2
    for name, targets in records.items():
        assert all(target.startswith("true_on_policy.contract.specs.") for target in targets), name


@pytest.mark.parametrize("package", FLOORS)
def test_first_floor_is_short(package: str) -> None:
    entries = {path.name for path in (ROOT / package).iterdir()} - {"__pycache__"}
    assert len(entries) <= ENTRIES, sorted(entries)
