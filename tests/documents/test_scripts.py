"""The shell scripts: syntax, the one environment they share, and what the launch arrays hand to a host."""

import itertools
import json
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest
from launch import alive
from launchers import accepted

from mis_plugins.config.file import keys_of
from mis_plugins.config.loading import preset_path, read_keys
from mis_plugins.hosts.registry import every_host
from true_on_policy.contract.gpu import check_environment, model_contract
from true_on_policy.flags.command import HOOK, launch_flags

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "scripts").rglob("*.sh")) + [ROOT / ".ci" / "run"]
SOURCED = {"environment.sh", "cleanup.sh", "tis_config.sh", "qwen3-4b.sh"}
VIME = "run-qwen3-4b-mis-vime.sh"
CORRECTIONS = {
    "run-qwen3-4b-mis.sh": ("miles", "megatron", "sglang"),
    "run-qwen3-4b-mis-slime.sh": ("slime", "megatron", "sglang"),
    VIME: ("vime", "megatron", "vllm"),
    "run-qwen3-4b-mis-fsdp.sh": ("miles", "miles-fsdp", "sglang"),
}
TRUE_ON_POLICY = {"megatron": ("miles", "megatron", "sglang"), "fsdp": ("miles", "miles-fsdp", "sglang")}
ASYNC = "run-qwen2.5-1.5b-async.sh"
LAUNCHES = [(ASYNC, ("miles", "megatron", "sglang"), {})]
LAUNCHES += [(script, parsers, {}) for script, parsers in CORRECTIONS.items()] + [
    ("run-qwen3-4b-true-on-policy.sh", parsers, {"TRAIN_BACKEND": backend})
    for backend, parsers in TRUE_ON_POLICY.items()
]

BLOG = "run-qwen3-blog.sh"
BLOG_PRESETS = {f"{kind}-{i}": f"miles-blog-{kind}-{i}" for kind in ("dense", "moe") for i in range(1, 5)}
WATCHES = {"dense-1", "moe-r3"}  # correct nothing


def bash(*words: object, given: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run bash with these words, and with the given variables beside those of this process."""
    return subprocess.run(
        ["bash", *map(str, words)], env=os.environ | (given or {}), capture_output=True, text=True, timeout=120
    )


launch_script = pytest.mark.parametrize("script", sorted(CORRECTIONS))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_syntax(script: Path) -> None:
    done = bash("-n", script)
    assert (done.returncode, done.stderr) == (0, "")
    assert os.access(script, os.X_OK) or script.name in SOURCED


def test_quick_names_tests_that_exist() -> None:
    words = (ROOT / "scripts" / "test.sh").read_text().replace("(", " ").replace("=", " ").replace(")", " ").split()
    named = [ROOT / word for word in words if word.startswith("tests/")]
    assert len(named) > 4 and all(path.exists() for path in named)


INSTALLING = [path for path in SCRIPTS if re.search(r"/(install|environment)\.sh", path.read_text())]


@pytest.mark.parametrize("script", INSTALLING, ids=lambda path: path.name)
def test_help_installs_nothing(script: Path, tmp_path: Path) -> None:
    folders = {name: str(tmp_path / name) for name in ("MIS_VENV", "IN_HOST_VENV", "SGLANG_VENV")}
    done = bash(script, "--help", given=folders)
    assert done.returncode == 0 and f"bash scripts/{script.name}" in done.stdout and not list(tmp_path.iterdir())


def test_every_launch_script_is_checked() -> None:
    assert {script for script, _, _ in LAUNCHES} | {BLOG} == {
        path.name for path in (ROOT / "scripts").glob("run-qwen*.sh")
    }


def executable(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def launch(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a launch script with a `ray` that submits nothing: it writes its arguments, one a line, to ray.txt."""
    executable(folder / "bin" / "ray", f'printf "%s\\n" "$@" >"{folder}/ray.txt"')
    executable(folder / "bin" / "python3", f'exec "{sys.executable}" "$@"')
    host = folder / "a host"
    model_args = host / "miles" / "utils" / "external_utils" / "model_args_utils.py"
    model_args.parent.mkdir(parents=True)
    model_args.write_text("print('--num-layers 36 --swiglu')")
    executable(host / "scripts" / "models" / "qwen3-4B.sh", "MODEL_ARGS=(--num-layers 36 --swiglu)")
    paths = dict.fromkeys(("MILES_DIR", "SLIME_DIR", "VIME_DIR"), str(host))
    paths |= {"MODEL_DIR": str(folder / "my models"), "SAVE_DIR": str(folder / "my runs")}
    found_first = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return bash(ROOT / "scripts" / script, "--seed", "7", given=paths | found_first | environment)


Launched = Callable[..., Path]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Launch a script that must succeed, once for all tests; return the folder of the launch."""

    @cache
    def folder(script: str, environment: frozenset[tuple[str, str]]) -> Path:
        made = tmp_path_factory.mktemp("launch")
        done = launch(script, made, **dict(environment))
        assert done.returncode == 0, done.stderr
        return made

    return lambda script, **environment: folder(script, frozenset(environment.items()))


def after(words: list[str], flag: str = "--custom-config-path") -> str:
    """The word behind a flag."""
    return words[words.index(flag) + 1]


def trainer_arguments(folder: Path) -> list[str]:
    """What follows `-- python3 .../train.py`."""
    words = (folder / "ray.txt").read_text().splitlines()
    python = words.index("--") + 1
    train = "train_async.py" if "--fully-async" in words else "train.py"
    assert words[python : python + 2] == ["python3", f"{folder / 'a host'}/{train}"]
    return words[python + 2 :]


def flags_of(arguments: list[str], *parsers: str) -> set[str]:
    """The flags of a launch, each of which these parsers accept, and none of which stands there twice."""
    flags = [word for word in arguments if word.startswith("--")]
    assert set(flags) - accepted(*parsers) == set() and len(flags) == len(set(flags))
    return set(flags)


@pytest.mark.parametrize(("script", "parsers", "environment"), LAUNCHES)
def test_launch_passes_only_flags_of_its_host(
    script: str, parsers: tuple[str, ...], environment: dict[str, str], launched: Launched
) -> None:
    folder = launched(script, **environment)
    arguments = trainer_arguments(folder)
    flags_of(arguments, *parsers)
    assert arguments[-2:] == ["--seed", "7"]
    model = "Qwen2.5-1.5B-Instruct" if script == ASYNC else "Qwen3-4B"
    assert str(folder / "my models" / model) in arguments
    assert ("--num-layers" in arguments) == ("megatron" in parsers)


RECORDS = [ROOT / "lab" / "results" / f"launches_{host}.json" for host in ("miles", "slime")]
ROWS = {row["launch"]: row for path in RECORDS for row in json.loads(path.read_text())["rows"]}
FAKE_SHAPE = Counter(("--num-layers", "36", "--swiglu", "--seed", "7"))


def test_a_record_says_that_the_hosts_own_validators_accept_every_launch() -> None:
    """`lab/launches.py` made it; the flags of true-on-policy launches are those of a branch of SGLang.

    vime's validators saw no launch, since no checkout of vime can be had.
    """
    scripts = {script for script, _, environment in LAUNCHES if "TRAIN_BACKEND" not in environment} - {VIME}
    recipes = {f"RECIPE={recipe} {BLOG}" for recipe in (*BLOG_PRESETS, "moe-r3")}
    assert scripts | recipes == {name for name, row in ROWS.items() if row["ours"]}
    assert {row["result"] for row in ROWS.values()} == {"good"}


def test_the_hosts_own_launchers_are_corrected_as_the_oracle_says() -> None:
    theirs = [row for row in ROWS.values() if not row["ours"]]
    assert "scripts/run_qwen3_4b.py" in {row["launch"] for row in theirs}
    assert all(any(abs(weight - 1) > 0.1 for weight in row["oracle"]) for row in theirs)


@pytest.mark.parametrize("row", [name for name, row in ROWS.items() if row["ours"]])
def test_the_record_is_of_the_words_that_a_launch_passes_today(row: str, launched: Launched) -> None:
    *environment, script = row.split()
    folder = launched(script, **dict(one.split("=") for one in environment))
    words = Counter(word for word in trainer_arguments(folder) if "/" not in word)
    words.subtract(FAKE_SHAPE)
    assert +words - Counter(shlex.split(ROWS[row]["words"])) == Counter()


@pytest.mark.parametrize("recipe", [*BLOG_PRESETS, "moe-r3"])
def test_each_run_of_the_blog_is_launched_with_its_own_config(recipe: str, launched: Launched) -> None:
    folder = launched(BLOG, RECIPE=recipe)
    arguments = trainer_arguments(folder)
    flags = flags_of(arguments, "miles", "megatron", "sglang")
    assert Path(after(arguments)) == preset_path(BLOG_PRESETS.get(recipe, "metrics-only"))
    assert ("--use-tis" in flags) != ("--get-mismatch-metrics" in flags) == (recipe in WATCHES)
    assert ("--use-rollout-routing-replay" in flags) == (recipe == "moe-r3")
    model = "Qwen3-4B-Base" if recipe.startswith("dense") else "Qwen3-30B-A3B-Base"
    assert str(folder / "my models" / model) in arguments
    assert ("--ckpt-step" in flags) == recipe.startswith("moe")
    assert {"aime24", "aime25"} < set(arguments)


def test_the_blog_has_no_other_run(tmp_path: Path) -> None:
    done = launch(BLOG, tmp_path, RECIPE="dense-5")
    assert done.returncode == 2 and "RECIPE=dense-5 is none of dense-1 to dense-4" in done.stderr


@pytest.mark.parametrize("enabled", ["true", "false"])
def test_an_asynchronous_launch_says_which_version_wrote_a_token(enabled: str, tmp_path: Path) -> None:
    assert launch(ASYNC, tmp_path, SEGMENT_WISE=enabled).returncode == 0
    arguments = trainer_arguments(tmp_path)
    for flag, value in itertools.pairwise(arguments):
        if value.startswith("mis_plugins."):
            assert callable(pkgutil.resolve_name(value)), flag
    assert set(every_host()["miles"].version_flags.split()) <= set(arguments)
    assert read_keys(keys_of(after(arguments))).segment_wise_on == (enabled == "true")


@launch_script
def test_launch_loads_our_function_with_our_config(script: str, launched: Launched) -> None:
    arguments = trainer_arguments(launched(script))
    assert callable(pkgutil.resolve_name(after(arguments, "--custom-tis-function-path")))
    assert Path(after(arguments)).name == "tis.yaml"
    assert "--use-tis" in arguments


@pytest.mark.parametrize(
    ("script", "config", "said"),
    [
        # No hook of Miles on FSDP sees the rollout batch.
        *((script, "mis: {weight: {normalize: {scope: rollout}}}",
           "rollout needs the rollout batch, which no hook of Miles on FSDP sees") for script in sorted(CORRECTIONS)),
        (VIME, "mis: {weight: {level: token, bound: clip, lower: 3.0, upper: 2.0}}", "mine.yaml"),
        ("run-qwen3-4b-mis-slime.sh", "mis: {opsm: {delta: 0.1}}", "mine.yaml needs the flags above"),
    ],
)  # fmt: skip
def test_launch_stops_at_a_config_that_its_host_cannot_serve(
    config: str, said: str, script: str, tmp_path: Path
) -> None:
    """The launch says so before a job is submitted."""
    (tmp_path / "mine.yaml").write_text(config)
    done = launch(script, tmp_path, MIS_CONFIG=str(tmp_path / "mine.yaml"))
    serves = "FSDP" in said and "fsdp" not in script
    assert (tmp_path / "ray.txt").exists() == serves == (done.returncode == 0)
    assert (said in done.stderr) != serves
    assert "opsm" not in config or "--loss-type custom_loss" in done.stdout


@pytest.mark.parametrize(
    ("script", "given"), [(VIME, "geometric-mis"), *((script, "mine.yaml") for script in sorted(CORRECTIONS))]
)
def test_a_job_is_handed_a_path_that_it_finds_from_its_own_folder(
    given: str, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text("mis: {weight: {upper: 3.0}}")
    monkeypatch.chdir(tmp_path)
    assert launch(script, tmp_path, MIS_CONFIG=given).returncode == 0
    config = Path(after(trainer_arguments(tmp_path)))
    assert config.is_absolute() and config.is_file()
    assert config.stem == Path(given).stem


@pytest.mark.parametrize(("name", "value"), [("BITWISE_CONFIG", "/no/such.yaml"), ("TRAIN_BACKEND", "deepspeed")])
def test_a_true_on_policy_launch_stops_where_it_cannot_hold(name: str, value: str, tmp_path: Path) -> None:
    done = launch("run-qwen3-4b-true-on-policy.sh", tmp_path, **{name: value})
    assert done.returncode != 0 and value in done.stderr
    assert not (tmp_path / "ray.txt").exists()


@pytest.mark.parametrize("backend", TRUE_ON_POLICY)
def test_a_true_on_policy_launch_keeps_its_contract(backend: str, tmp_path: Path) -> None:
    """The host would parse what `check_host` asks for, in an environment that `check_environment` accepts."""
    config = tmp_path / "bitwise.yaml"
    config.write_text("bitwise: {on_difference: raise}")
    done = launch("run-qwen3-4b-true-on-policy.sh", tmp_path, TRAIN_BACKEND=backend, BITWISE_CONFIG=str(config))
    assert done.returncode == 0, done.stderr
    arguments = trainer_arguments(tmp_path)
    ranks = 8 if backend == "megatron" else 1
    contract = model_contract("qwen3-4B", backend, trainer_tp=ranks, engine_tp=ranks)
    for flag in launch_flags(contract):
        place = arguments.index(flag.words[0])
        assert tuple(arguments[place : place + len(flag.words)]) == flag.words
    runtime = json.loads(after((tmp_path / "ray.txt").read_text().splitlines(), "--runtime-env-json"))
    environment = runtime["env_vars"]
    check_environment(contract, environment)
    assert environment["TRUE_ON_POLICY_ENGINE_DUMP"].endswith("/true_on_policy")
    assert runtime.get("worker_process_setup_hook") == (HOOK if backend == "fsdp" else None)
    assert environment["PYTHONPATH"].startswith(str(tmp_path / "a host"))
    assert after(arguments) == str(config)
    for flag, hook in itertools.pairwise(arguments):
        if flag.startswith("--custom-") and flag != "--custom-config-path":
            assert callable(pkgutil.resolve_name(hook)), flag
    assert ("--custom-megatron-init-path" in arguments) == (backend == "megatron")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with its `.venv`, an environment of a host and one named `mine`; each `python` logs its arguments."""
    monkeypatch.delenv("MIS_VENV", raising=False)
    for name in ("scripts/environment.sh", "setup.py", "pyproject.toml", "constraints.txt", "constraints-hashed.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for environment in (".venv", "host", "mine"):
        executable(tmp_path / environment / "bin" / "python", 'echo "$@" >>"${0%/bin/python}/installs.txt"')
    return tmp_path


def enter(checkout: Path, *then: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Source environment.sh as a script does, in a shell in which the host's environment is active."""
    host = {"VIRTUAL_ENV": f"{checkout}/host", "PATH": f"{checkout}/host/bin:{os.environ['PATH']}"}
    script = "\n".join([f'cd "{checkout}"', f'source "{checkout}/scripts/environment.sh"', *then])
    return bash("-euo", "pipefail", "-c", script, given=host | environment)


def installs(checkout: Path, environment: str = ".venv", **variables: str) -> int:
    """Enter the environment; how often anything was installed into the one named, so far."""
    done = enter(checkout, **variables)
    assert done.returncode == 0, done.stderr
    log = checkout / environment / "installs.txt"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_environment_is_installed_once_and_again_after_a_change(checkout: Path) -> None:
    assert [installs(checkout), installs(checkout)] == [2, 2]  # files by their hashes, then torch and this project
    with (checkout / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    assert [installs(checkout), installs(checkout)] == [4, 4]


def test_every_pinned_package_but_torch_has_hashes() -> None:
    """`bash scripts/supply.sh lock` makes the one file of the other."""
    pinned = re.compile(r"^([\w.-]+)==(\S+)", re.MULTILINE)
    versions, hashed = (
        {re.sub("[-_.]+", "-", name.lower()): version for name, version in pinned.findall((ROOT / file).read_text())}
        for file in ("constraints.txt", "constraints-hashed.txt")
    )
    assert versions.pop("torch") and hashed == versions
    entries = (ROOT / "constraints-hashed.txt").read_text().replace("\\\n", "").splitlines()
    assert all("--hash=sha256:" in entry for entry in entries if not entry.startswith("#"))


def test_an_active_environment_is_left_alone(checkout: Path) -> None:
    """The commands would put the CPU build of torch into the environment of a host."""
    assert installs(checkout, "host") == 0
    done = enter(checkout, "command -v python", 'echo "$VIRTUAL_ENV"')
    assert done.stdout.split() == [f"{checkout}/.venv/bin/python", f"{checkout}/.venv"]
    assert f"leaving the active environment {checkout}/host alone; using {checkout}/.venv" in done.stderr


@pytest.mark.parametrize("named", ["mine", "{checkout}/mine"])
def test_another_environment_is_used_where_a_variable_names_it(named: str, checkout: Path) -> None:
    named = named.format(checkout=checkout)
    assert installs(checkout, "mine", MIS_VENV=named) == 2
    assert installs(checkout, "mine", MIS_VENV=named) == 2
    assert not (checkout / ".venv" / "installs.txt").exists()
    done = enter(checkout, "cd /", "command -v python", MIS_VENV=named)
    assert done.stdout.strip() == f"{checkout}/mine/bin/python"


def test_the_active_environment_is_used_where_the_variable_names_it(checkout: Path) -> None:
    assert installs(checkout, "host", MIS_VENV=f"{checkout}/host") == 2
    assert enter(checkout, MIS_VENV=f"{checkout}/host").stderr == ""


def test_a_missing_environment_is_made(checkout: Path) -> None:
    shutil.rmtree(checkout / ".venv")
    copies_mine = f'if [ "$1" = -m ]; then echo "$@" >>"{checkout}/made.txt"; cp -r "{checkout}/mine" "$3"; fi'
    executable(checkout / "any-python", copies_mine)
    assert installs(checkout, PYTHON=f"{checkout}/any-python") == 2
    assert f"-m venv {checkout}/.venv" in (checkout / "made.txt").read_text()


def test_failed_install_is_tried_again(checkout: Path) -> None:
    executable(checkout / ".venv" / "bin" / "python", f'echo "$@" >>"{checkout}/installs.txt"; exit 1')
    assert enter(checkout).returncode != 0
    assert enter(checkout).returncode != 0
    assert len((checkout / "installs.txt").read_text().splitlines()) == 2


def test_environment_refuses_a_python_it_does_not_support(checkout: Path) -> None:
    executable(checkout / "old-python", "exit 1")
    shutil.rmtree(checkout / ".venv")
    done = enter(checkout, PYTHON=f"{checkout}/old-python")
    assert done.returncode != 0
    assert "is not Python 3.11 to 3.13" in done.stderr


# The rollout engines


def install(folder: Path, *engines: str, free_kb: int, python: str = "") -> subprocess.CompletedProcess[str]:
    """On a disk of our making, by a python that writes down what it was asked, and does no more unless told."""
    executable(folder / "bin" / "df", f"printf 'Avail\\n{free_kb}\\n'")
    executable(folder / "python", f'echo "$@" >>"{folder}/calls.txt"\n{python}')
    found = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHON": str(folder / "python")}
    homes = {f"{engine}_VENV": str(folder / engine) for engine in ("SGLANG", "VLLM")}
    return bash(ROOT / "true_on_policy" / "engines" / "install.sh", *engines, given=found | homes)


def test_a_full_disk_is_said_before_any_engine_is_installed(tmp_path: Path) -> None:
    done = install(tmp_path, "sglang", "vllm", free_kb=10 * 2**20 - 1)
    assert done.returncode == 2
    assert f"{tmp_path}/SGLANG: 9 GB free, 10 GB needed; free some, or let SGLANG_VENV" in done.stderr
    assert "venv" not in (tmp_path / "calls.txt").read_text()


def test_with_room_each_engine_gets_its_environment(tmp_path: Path) -> None:
    done = install(tmp_path, "vllm", free_kb=10 * 2**20)
    assert f"installing vllm into {tmp_path}/VLLM (once)" in done.stderr
    assert f"-m venv {tmp_path}/VLLM" in (tmp_path / "calls.txt").read_text()


def test_engines_are_installed_side_by_side_and_a_failure_of_one_is_the_scripts(tmp_path: Path) -> None:
    """Each pip waits until both environments are there, and vLLM's then fails."""
    venv = 'if [ "$2" = venv ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; exit; fi'
    both = f'until [ -d "{tmp_path}/SGLANG" ] && [ -d "{tmp_path}/VLLM" ]; do sleep 0.05; done'
    done = install(
        tmp_path,
        "sglang",
        "vllm",
        free_kb=10 * 2**20,
        python=f'{venv}\nif [ "$2" = pip ]; then {both}; fi\n[[ $0 != *VLLM* ]]',
    )
    assert done.returncode == 1
    made = [(tmp_path / name / ".mis-plugins-engine").exists() for name in ("SGLANG", "VLLM")]
    assert made == [True, False]


@pytest.mark.parametrize("engines", [(), ("sglang", "trtllm")])
def test_an_engine_that_there_is_not_is_a_usage_error(engines: tuple[str, ...], tmp_path: Path) -> None:
    done = install(tmp_path, *engines, free_kb=10 * 2**20)
    assert done.returncode == 2 and "usage: bash" in done.stderr
    assert "/install.sh sglang|vllm ..." in done.stderr
    assert not (tmp_path / "calls.txt").exists()


@pytest.mark.parametrize("ends", ["true", "false", "kill -TERM $$"])
def test_what_a_script_started_ends_with_it(ends: str) -> None:
    script = f'source "{ROOT}/scripts/cleanup.sh"; setsid sleep 600 & echo $!; {ends}'
    done = subprocess.run(["bash", "-ec", script], stdout=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode == 0) == (ends == "true")
    deadline = time.monotonic() + 20
    while alive(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(int(done.stdout))
