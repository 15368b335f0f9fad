"""docs/gpu.md says what the tables say."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from true_on_policy import hosts
from true_on_policy.contract.gpu import FAMILIES, MODELS, NOT_COVERED, equal_ranks
from true_on_policy.flags.command import REFUSALS
from true_on_policy.flags.releases import RELEASES
from true_on_policy.hosts.config import BitwiseConfig

TEXT = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text(encoding="utf-8")
ROWS = [line.split("|")[1:-1] for line in TEXT.splitlines() if line.startswith("| `--")]


def test_every_release_that_was_read_is_named() -> None:
    for release in RELEASES:
        assert any(word in TEXT for word in re.findall(r"[0-9a-f]{8}|v?0\.[\d.]+\d", release.name)), release


def test_what_a_release_lacks_stands_in_its_row() -> None:
    rows = {(flag, owner): absent for flags, _, absent in ROWS for flag, owner in _asked(flags)}
    for release in RELEASES:
        for flag in release.lacks:
            (version,) = re.findall(r"\(([0-9a-f]{8})\)|v?(0\.[\d.]+\d)", release.name)
            assert "".join(version) in rows[flag, release.owner]
    assert set(rows) == {(flag, release.owner) for release in RELEASES for flag in release.lacks}


def _asked(cell: str) -> list[tuple[str, str]]:
    """(flag, owner) of a first column."""
    owner = next((name for name in ("sglang", "megatron") if f"of {name}" in cell.lower()), "slime")
    return [(flag, owner) for flag in re.findall(r"`(--[a-z-]+)`", cell)]


def test_families_and_what_is_not_covered_are_named() -> None:
    for name in FAMILIES:
        assert f"`{name}`" in TEXT
    for name in NOT_COVERED:
        assert name in TEXT


def test_models_whose_tensor_parallelism_holds_are_told_from_the_others() -> None:
    (holding,) = re.findall(r"8 for Qwen3-([^|]+?) \|", TEXT)
    (others,) = re.findall(r"TP 8 holds; of ([^;]+?) no\s+equal 2, 4 or 8", TEXT)
    ranks = {name: equal_ranks(size) for name, (kind, size) in MODELS.items() if kind == "qwen3-dense"}
    for told, expected in ((holding, (8,)), (others, ())):
        sizes = {f"qwen3-{each}" for each in re.findall(r"[\d.]+B", told)}
        assert sizes == {name for name, found in ranks.items() if found == expected}


def test_what_the_host_may_not_set_is_named() -> None:
    words = {
        "rollout_temperature": "temperature",
        "rollout_top_p": "top-p",
        "rollout_top_k": "top-k",
        "fp8": "fp8",
    }
    words |= {"lora_rank": "LoRA", "sglang_speculative_algorithm": "speculative decoding"}
    assert set(words) < {rule.attribute for rule in REFUSALS}
    for word in words.values():
        assert word in TEXT


def test_the_settings_of_the_comparison_are_shown_with_their_defaults() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    stated = yaml.safe_load(block)["bitwise"]
    assert set(stated) == set(BitwiseConfig.__dataclass_fields__)
    assert BitwiseConfig(**stated) == BitwiseConfig()


def test_the_hooks_that_are_named_exist() -> None:
    named = set(re.findall(r"true_on_policy\.hosts\.(\w+)", TEXT))
    assert named == {"policy_loss", "report_step", "miles_init"}
    assert all(callable(getattr(hosts, name)) for name in named)
