"""A made-up record of each kind, written into a copy of the tree as a user would write it: how many files that takes.

Pages that a command makes anew are not counted. `tests/terms/`, `tests/hosts/` and `tests/verify/` try the answers of
made-up records; here the tree's own tests and commands accept the files, which are all that was touched.
"""

import shutil
from pathlib import Path

import commands
import pytest

ROOT = Path(__file__).parents[2]
COPIED = ("mis_plugins", "true_on_policy", "lab", "yaml", "docs", "tests", "README.md", "pyproject.toml")
TERMS, ENGINE = "mis_plugins/config/terms", "true_on_policy/engines/made_up"
ORACLE, ALGORITHMS = "tests/support/oracle.py", "docs/algorithms.md"
Edits = dict[str, tuple[str, str]]  # by file: the text before which a line is put, or "" for a new file; the line

MADE_UP: dict[str, tuple[int, Edits]] = {
    "statistic": (
        3,
        {
            f"{TERMS}/statistics.py": (
                '    "route": Statistic(',
                '    "made_up_gap": Statistic(value=lambda token: token.log_ratio.abs(), low=0, high=math.inf,\n'
                '                             formula="|log r_t|", words="made-up gap"),\n',
            ),
            ALGORITHMS: ("ratio | k1 | k2", "made_up_gap | "),
            ORACLE: ('    "route": lambda token:', '    "made_up_gap": lambda token: abs(token.log_ratio),\n'),
        },
    ),
    "bound": (
        3,
        {
            f"{TERMS}/bounds.py": (
                '    "none": Bound(',
                '    "made_up_half": Bound(apply=lambda ratio, floor, ceiling: ratio.clamp(max=ceiling) / 2,\n'
                '                          outside="weighed", formula="min({ratio}, {upper}) / 2",\n'
                '                          words="half of it, capped at {upper}", has_floor=False),\n',
            ),
            ALGORITHMS: ("none | truncate | clip", "made_up_half | "),
            ORACLE: (
                '    "none": Bound(',
                '    "made_up_half": Bound(lambda ratio, lower, upper: min(ratio, upper) / 2, has_floor=False),\n',
            ),
        },
    ),
    "preset": (
        1,
        {
            "yaml/made-up.yaml": (
                "",
                "# w_t = min(r_t, 3) / 2; keep tokens with |log r_t| <= 1; r = pi_old/mu\n# Nowhere\nuse_tis: true\n"
                "mis: {weight: {bound: made_up_half, upper: 3}, reject: [{statistic: made_up_gap, upper: 1}]}\n",
            )
        },
    ),
    "host": (
        3,
        {
            "mis_plugins/hosts/adapters/made_up.py": (
                "",
                "import sys\nfrom dataclasses import replace\nfrom mis_plugins.hosts.adapters import unknown\n\n"
                "HOST = replace(unknown.HOST, name='made-up', title='the made-up host', package='made_up',\n"
                "               runs=lambda args: 'made_up' in sys.modules, told_by='modules', records=('made_up',))\n",
            ),
            "mis_plugins/hosts/records/made_up.txt": ("", "# By hand.\nmade_up_flag switch\n"),
        },
    ),
    "engine": (
        3,
        {
            f"{ENGINE}/__init__.py": (
                "",
                "from true_on_policy.contract.specs import HUGGING_FACE, EngineSpec, at\n\n"
                f"ENGINE = EngineSpec(at('{ENGINE.replace('/', '.')}.engine:start'), HUGGING_FACE, ('torch',))\n",
            ),
            f"{ENGINE}/engine.py": ("", "from true_on_policy.engines.hf.engine import start  # noqa: F401\n"),
            f"{ENGINE}/packages.txt": ("", "torch\n"),
        },
    ),
    "family": (
        1,
        {
            "true_on_policy/contract/families.yaml": (
                "models:\n",
                "  mistral:\n    architectures: [MistralForCausalLM]\n    model_type: mistral\n"
                "    title: dense Mistral\n"
                "    tiny: {tiny-made-up: [64, 96, 2, 4, 2, 16, 160, false]}\n",
            )
        },
    ),
}

CODE = """
import sys
from mis_plugins.__main__ import main
from mis_plugins.hosts.registry import current, every_host
from true_on_policy.contract.families import FAMILIES

assert main(["config", "check", "made-up", "--host", "made-up"]) == 0
assert "made-up" in every_host() and current().name == "unknown"
sys.modules["made_up"] = sys
assert current().name == "made-up"
assert "mistral" in FAMILIES
"""
VERIFY = "verify --engine made_up --trainer hf --model tiny-made-up --dtype bf16 --tokens 20"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with all the made-up records."""
    copy = tmp_path_factory.mktemp("tree")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy(ROOT / name, copy / name)
    for _, edits in MADE_UP.values():
        for file, (before, line) in edits.items():
            path = copy / file
            path.parent.mkdir(exist_ok=True)
            text = path.read_text() if before else ""
            assert text.count(before) >= 1, (file, before)
            path.write_text(text.replace(before, line + before, 1))
    return copy


def ran(tree: Path, *words: str) -> str:
    done = commands.ran(*words, folder=tree, PYTHONPATH=str(tree), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", MADE_UP)
def test_a_record_takes_few_files(kind: str) -> None:
    most, edits = MADE_UP[kind]
    assert len(edits) <= most
    assert all((ROOT / file).exists() == bool(before) for file, (before, _) in edits.items())


def test_the_tests_of_the_tree_accept_the_terms(tree: Path) -> None:
    tests = ("tests/terms/test_twins.py", "tests/config/test_yaml.py::test_algorithms_show_every_setting")
    told = ran(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "made_up or every", *tests)
    assert " passed" in told


def test_every_record_is_used(tree: Path) -> None:
    told = ran(tree, "-c", CODE)
    assert "half of it, capped at 3" in told and "made-up gap is above 1" in told


def test_the_engine_and_the_family_are_proven(tree: Path) -> None:
    assert "verdict: equal" in ran(tree, "-m", "true_on_policy", *VERIFY.split())
