"""A wheel built from the tree works in a bare environment, from another folder, and finds its presets there."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = ("mis_plugins", "true_on_policy", "yaml", "setup.py", "pyproject.toml", "README.md", "LICENSE")
PRESETS = sorted(path.relative_to(ROOT / "yaml").as_posix() for path in (ROOT / "yaml").rglob("*.yaml"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build inside the tree would leave folders there that a later build picks up."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SHIPPED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(built),
        str(source),
        cwd=built,
    )
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that holds the wheel, and borrows torch and the like without installing."""
    folder = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder), cwd=folder)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", str(python))
    run(*pip, "install", "--quiet", "--no-deps", str(wheel), cwd=folder)
    # A .pth line adds a folder to sys.path but does not run the .pth files in it: our editable install stays out.
    site_packages = next(folder.glob("lib/python*/site-packages"))
    (site_packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def run(*command: str, cwd: Path) -> str:
    installed = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # no checkout's
    done = subprocess.run(command, cwd=cwd, env=installed, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_setup_imports_nothing_of_the_package() -> None:
    tree = ast.parse((ROOT / "setup.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports for alias in node.names} | {
        node.module for node in imports if isinstance(node, ast.ImportFrom)
    }
    assert names == {"re", "pathlib", "Path", "setuptools", "setup", "find_namespace_packages"}


def test_wheel_holds_every_module_and_preset(wheel: Path) -> None:
    held = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {
        str(path.relative_to(ROOT))
        for top in ("mis_plugins", "true_on_policy")
        for path in (ROOT / top).rglob("*.py")
    }
    data = {
        str(path.relative_to(ROOT))
        for pattern in ("*/*.yaml", "engines/*.sh", "engines/*/packages.txt", "kernels/*.c", "verify/*.txt")
        for path in (ROOT / "true_on_policy").glob(pattern)
    }
    records = {str(path.relative_to(ROOT)) for path in (ROOT / "mis_plugins/hosts/records").glob("*.txt")}
    presets = {f"mis_plugins/presets/{name}" for name in PRESETS}
    others = {"mis_plugins/explain/rungs.json", "mis_plugins/py.typed", "mis_plugins/shared/moved.yaml"}
    shown = {
        f"mis_plugins/report/{name}" for name in ("causes.yaml", "peer_names.yaml", "page.css", "page.html")
    }
    assert held == modules | data | presets | records | others | shown


def test_base_install_needs_little(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    needs = metadata.get_all("Requires-Dist") or []
    assert [need for need in needs if "extra ==" not in need] == ["torch", "pyyaml", "jaxtyping"]
    assert set(metadata["Requires-Python"].split(",")) == {">=3.11", "<3.14"}


def test_the_long_description_has_no_dead_link(wheel: Path) -> None:
    """No address of the project is published, so that a picture or a path of the checkout would lead nowhere."""
    with ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("METADATA"))
        text = archive.read(name).decode()
    assert "# mis-plugins" in text and "![" not in text
    assert [target for target in re.findall(r"\]\(([^)]*)\)", text) if not target.startswith("https:")] == []


def test_yaml_folder_does_not_shadow_pyyaml() -> None:
    assert not (ROOT / "yaml" / "__init__.py").exists()
    out = run(sys.executable, "-c", "import yaml; print(yaml.safe_load('a: 1'))", cwd=ROOT)
    assert out.strip() == "{'a': 1}"


def test_installed_presets_are_found_and_good(bare: Path, tmp_path: Path) -> None:
    """Every one of them, from another folder: the installed copy, and accepted."""
    code = (
        "import sys\n"
        "from mis_plugins.__main__ import main\n"
        "from mis_plugins.config.loading import preset_path\n"
        "for name in sys.argv[1:]:\n"
        "    assert main(['config', 'check', str(preset_path(name))]) == 0, name\n"
        "    print('FOUND', preset_path(name))"
    )
    out = run(str(bare), "-c", code, *(Path(name).stem for name in PRESETS), cwd=tmp_path)
    found = [Path(line.split(" ", 1)[1]) for line in out.splitlines() if line.startswith("FOUND ")]
    for path, place in zip(found, PRESETS, strict=True):
        assert path.is_relative_to(bare.parent.parent)
        assert path.as_posix().endswith(f"mis_plugins/presets/{place}")
        assert path.read_bytes() == (ROOT / "yaml" / place).read_bytes()
    assert run(str(bare), "-m", "mis_plugins", "config", "path", "mis", cwd=tmp_path).strip() in map(
        str, found
    )


def test_import_takes_no_host_and_no_megatron(bare: Path, tmp_path: Path) -> None:
    """Blocked, not merely unused: an import of any of them would raise."""
    code = (
        "import sys\n"
        "for name in ('megatron', 'miles', 'slime', 'transformers', 'rich', 'matplotlib', 'ray'):\n"
        "    sys.modules[name] = None\n"
        "import mis_plugins, mis_plugins.mis, mis_plugins.config.model, true_on_policy\n"
        "print(mis_plugins.__file__)"
    )
    assert Path(run(str(bare), "-c", code, cwd=tmp_path).strip()).is_relative_to(bare.parent.parent)
