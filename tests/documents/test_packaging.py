"""A wheel built from the tree works in a bare environment, from another folder, and finds its presets there."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.metadata import Metadata
from readme_renderer import markdown

ROOT = Path(__file__).parents[2]
SHIPPED = ("mis_plugins", "true_on_policy", "yaml", "setup.py", "pyproject.toml", "README.md", "LICENSE")
PRESETS = sorted(path.relative_to(ROOT / "yaml").as_posix() for path in (ROOT / "yaml").rglob("*.yaml"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of its own, whose one commit holds what lies in the tree."""
    folder = tmp_path_factory.mktemp("source")
    for name in (*SHIPPED, "scripts"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    (folder / ".gitignore").write_text("__pycache__/\n")
    for words in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -q -m all"):
        run("git", *words.split(), cwd=folder)
    return folder


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what scripts/release.sh builds."""
    folder = tmp_path_factory.mktemp("built")
    release(source, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


def release(source: Path, folder: Path) -> None:
    run("env", f"PYTHON={sys.executable}", "bash", str(source / "scripts/release.sh"), str(folder), cwd=folder)


def test_a_release_has_the_same_bytes_again(source: Path, built: Path, tmp_path: Path) -> None:
    """At another hour, and with other files beside it that no commit holds."""
    (source / "mis_plugins" / "notes.py").touch()
    release(source, tmp_path)
    (source / "mis_plugins" / "notes.py").unlink()
    names = ["mis_plugins-0.1.0-py3-none-any.whl", "mis_plugins-0.1.0.tar.gz"]
    assert sorted(file.name for file in built.iterdir()) == names
    assert all((tmp_path / name).read_bytes() == (built / name).read_bytes() for name in names)


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


def paths(folder: str, *patterns: str) -> set[str]:
    """The files of a folder of the tree that have these patterns."""
    return {str(path.relative_to(ROOT)) for pattern in patterns for path in (ROOT / folder).glob(pattern)}


def test_wheel_holds_every_module_and_preset(wheel: Path) -> None:
    held = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    code = paths("mis_plugins", "**/*.py", "hosts/records/*.txt")
    data = ("*/*.yaml", "engines/*.sh", "engines/*/packages.txt", "kernels/*.c", "verify/*.txt")
    code |= paths("true_on_policy", "**/*.py", *data)
    presets = {f"mis_plugins/presets/{name}" for name in PRESETS}
    others = {"mis_plugins/explain/rungs.json", "mis_plugins/py.typed", "mis_plugins/shared/moved.yaml"}
    shown = {f"mis_plugins/report/{name}" for name in ("causes.yaml", "peer_names.yaml", "page.css", "page.html")}
    assert held == code | presets | others | shown


def stated(wheel: Path) -> bytes:
    """The metadata of a wheel."""
    with ZipFile(wheel) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("METADATA")))


def test_base_install_needs_little(wheel: Path) -> None:
    metadata = HeaderParser().parsestr(stated(wheel).decode())
    needs = metadata.get_all("Requires-Dist") or []
    assert [need for need in needs if "extra ==" not in need] == ["torch", "pyyaml", "jaxtyping"]
    assert set(metadata["Requires-Python"].split(",")) == {">=3.11", "<3.14"}


def test_the_first_page_is_what_an_index_renders(built: Path, wheel: Path) -> None:
    """By the index's own renderer, from metadata that holds to the standard; wheel and sdist say one thing."""
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        packed = archive.extractfile("mis_plugins-0.1.0/PKG-INFO")
        assert packed is not None and packed.read() == stated(wheel)
    metadata = Metadata.from_email(stated(wheel), validate=True)
    assert metadata.description_content_type == "text/markdown" and metadata.description is not None
    assert len(metadata.description.splitlines()) <= 10
    page = markdown.render(metadata.description)
    assert page is not None and page.count("<h1") == page.count("<pre") == 1
    shown = re.sub("<[^>]*>", "", page)
    assert "pip install 'mis-plugins[scripts]'" in shown and "mis-plugins config check" in shown
    assert "](" not in shown and "<img" not in page


def made_up(folder: Path, name: str, version: str, lines: str = "") -> Path:
    """A wheel of one empty module."""
    file, stem = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with ZipFile(file, "w") as archive:
        archive.writestr(f"{name}/__init__.py", lines)
        archive.writestr(f"{stem}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{stem}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        held = [f"{name}/__init__.py", *(f"{stem}/{part}" for part in ("METADATA", "WHEEL", "RECORD"))]
        archive.writestr(f"{stem}/RECORD", "".join(f"{each},,\n" for each in held))
    return file


def files(site: Path) -> dict[Path, tuple[int, bytes]]:
    """When each file of torch was written, and what it holds."""
    found = (file for file in site.glob("torch*/**/*") if file.is_file())
    return {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in found}


@pytest.mark.parametrize("way", [(), ("--upgrade",)])
def test_an_install_leaves_a_foreign_torch_alone(way: tuple[str, ...], wheel: Path, tmp_path: Path) -> None:
    """A host's torch, built by its vendor, beside an index that has a newer one; no flag keeps pip from it."""
    index, python = tmp_path / "index", tmp_path / "host" / "bin" / "python"
    index.mkdir()
    shutil.copy(wheel, index)
    for name, version in {"torch": "2.99.0", "pyyaml": "6.0", "jaxtyping": "0.3"}.items():
        made_up(index, name, version)
    vendors = made_up(tmp_path, "torch", "2.11.0a0+ecf3bae40a.nv26.4", "__version__ = 'foreign'")
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "host"), cwd=tmp_path)
    alone = ("env", "-u", "PIP_FIND_LINKS", "PIP_CONFIG_FILE=/dev/null", sys.executable, "-m", "pip")
    pip = (*alone, "--python", str(python), "install", "--quiet", "--no-index")
    run(*pip, str(vendors), cwd=tmp_path)
    site = next((tmp_path / "host").glob("lib/python*/site-packages"))
    before = files(site)
    run(*pip, *way, "--find-links", str(index), "mis-plugins", cwd=tmp_path)
    assert files(site) == before and site / "torch/__init__.py" in before
    assert (site / "mis_plugins").is_dir() and (site / "jaxtyping").is_dir()


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
    assert run(str(bare), "-m", "mis_plugins", "config", "path", "mis", cwd=tmp_path).strip() in map(str, found)


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
