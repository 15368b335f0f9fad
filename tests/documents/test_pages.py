"""Settings that pages show are the defaults, hooks that they name exist, and their Python runs as it stands."""

import ast
import dataclasses
import inspect
import json
import pkgutil
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lab.host.asynchronous import pool as recompute_module
from lab.host.asynchronous import response as versions
from lab.host.asynchronous import update_hooks as hooks_module
from mis_plugins import mis
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.correction.pipeline import correct
from mis_plugins.packing.layout import whole
from mis_plugins.packing.ragged import Ranks
from mis_plugins.versions import segment_wise
from true_on_policy import hosts
from true_on_policy.hosts.config import BitwiseConfig

DOCS = Path(__file__).resolve().parents[2] / "docs"


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```$", text_of(page), flags=re.DOTALL | re.MULTILINE)
    return list(map(textwrap.dedent, found))


def run(page: str, block: int = 0, **names: Any) -> dict[str, Any]:
    """What the names are after a block of a page's Python has run with these."""
    exec(compile(blocks(page, "python")[block], page, "exec"), names)
    return names


@pytest.mark.parametrize(
    ("page", "key", "defaults"),
    [("async.md", "segment_wise", segment_wise.SegmentWiseConfig()), ("gpu.md", "bitwise", BitwiseConfig())],
)
def test_settings_are_shown_with_their_defaults(page: str, key: str, defaults: Any) -> None:
    (block,) = blocks(page, "yaml")
    stated = yaml.safe_load(block)[key]
    assert set(stated) == {field.name for field in dataclasses.fields(defaults)}
    assert type(defaults)(**stated) == defaults


PAGES = [DOCS.parent / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted(DOCS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_dotted_name_on_a_page_exists(page: Path) -> None:
    for name in set(
        re.findall(r"\b(?:mis_plugins|true_on_policy)(?:\.[a-zA-Z_]\w*)+", page.read_text(encoding="utf-8"))
    ):
        pkgutil.resolve_name(name)


def test_every_test_that_a_page_names_exists() -> None:
    tests = "\n".join(file.read_text(encoding="utf-8") for file in (DOCS.parent / "tests").rglob("test_*.py"))
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"`(test_\w+)`", pages))
    assert named - set(re.findall(r"^def (test_\w+)", tests, flags=re.MULTILINE)) == set()


def test_the_page_of_functions_names_what_each_module_defines() -> None:
    """The site reads sources alone: a function that a module loads late is on no page."""
    shown = re.findall(r"^::: (\S+)(?:\n    options:\n      members: \[(.*)\])?", text_of("api.md"), flags=re.MULTILINE)
    named = {address: members.split(", ") if members else [] for address, members in shown}
    for address, members in named.items():
        shown_object = pkgutil.resolve_name(address)
        module = shown_object if members else sys.modules[shown_object.__module__]
        body = ast.parse(inspect.getsource(module)).body
        defined = {getattr(node, "name", "") for node in body}
        assert set(members or [shown_object.__name__]) <= defined, address
    assert {f"mis_plugins.hosts.{file}.{name}" for name, file in mis.ELSEWHERE.items()} <= set(named)


def test_the_hooks_that_gpu_md_names_exist() -> None:
    named = set(re.findall(r"true_on_policy\.hosts\.(\w+)", text_of("gpu.md")))
    assert named == {"policy_loss", "report_step", "miles_init", "prove_weights"}
    assert all(callable(getattr(hosts, name)) for name in named)


def test_weights_by_hand() -> None:
    weights = run("examples.md", 0)["weights"]
    assert torch.allclose(weights[0], torch.tensor([1.0, 1.1052, 2.0]), atol=1e-4)


def test_what_a_preset_would_have_kept_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {"sample": "near", "proximal_log_probs": [-1.0, -2.0], "behavior_log_probs": [-1.0, -2.001]},
        {"sample": "far", "proximal_log_probs": [-1.0, -2.0], "behavior_log_probs": [-1.0, -1.0]},
        {"sample": "tool", "proximal_log_probs": [-1.0, -2], "behavior_log_probs": [-1.0, 0], "loss_mask": [1, 0]},
        {"proximal_log_probs": [-1.0], "behavior_log_probs": [-2.0]},
    ]
    Path("rollout.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert run("examples.md", 1)["kept_out"] == ["far", 3]


def test_a_weight_in_a_loop_of_ones_own() -> None:
    names = run("examples.md", 2)
    weights = (names["proximal"] - names["engine"]).exp().clamp(max=2.0)
    assert torch.allclose(names["target"].grad, -weights / 3)


class Engine:
    def __init__(self) -> None:
        self.log: list[object] = []

    def pause(self) -> None:
        self.log.append("pause")

    def resume(self) -> None:
        self.log.append("resume")

    def update_weights(self, weights: object, version: int) -> None:
        self.log.append(version)


def test_a_response_of_three_versions() -> None:
    """The oldest tokens weigh by what was stored at version 1, the others by pi_2."""

    def score(asked: Sequence[recompute_module.Batch]) -> list[list[list[float]]]:
        return [[[-1.5] * count for count in counts] for _, counts in asked]

    pool, engine = recompute_module.Pool(), Engine()
    response = versions.Response((9,))
    for version in range(3):
        response = response.append([version], [-1.0], version)
    number = pool.add(response)
    proximal, behavior = torch.tensor([-4.0, -0.5, -1.0]), torch.tensor(response.log_probs)
    names = run(
        "async.md", Hooks=hooks_module.Hooks, recompute=recompute_module.recompute, pool=pool, number=number,
        version=1, V=2, token_budget=64, score=score, engine=engine, weights={}, name="a",
        admitted=segment_wise.admitted, proximal_t=segment_wise.proximal_t, correct=correct,
        config=CorrectionConfig(segment_wise=segment_wise.SegmentWiseConfig()), proximal=proximal, behavior=behavior,
        ragged=whole([3]).place(torch.ones(3, dtype=torch.bool), Ranks()),
    )  # fmt: skip
    assert engine.log == ["pause", 2, "resume"]
    assert names["numerator"].tolist() == [-1.5, -0.5, -1.0]
    expected = torch.tensor([-0.5, 0.5, 0.0]).exp()
    assert torch.equal(names["correction"].weights, expected)
