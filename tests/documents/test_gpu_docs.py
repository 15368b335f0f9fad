"""docs/gpu.md shows settings and hooks that exist."""

import re
from pathlib import Path

import yaml

from true_on_policy import hosts
from true_on_policy.hosts.config import BitwiseConfig

TEXT = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text(encoding="utf-8")


def test_the_settings_of_the_comparison_are_shown_with_their_defaults() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    stated = yaml.safe_load(block)["bitwise"]
    assert set(stated) == set(BitwiseConfig.__dataclass_fields__)
    assert BitwiseConfig(**stated) == BitwiseConfig()


def test_the_hooks_that_are_named_exist() -> None:
    named = set(re.findall(r"true_on_policy\.hosts\.(\w+)", TEXT))
    assert named == {"policy_loss", "report_step", "miles_init", "prove_weights"}
    assert all(callable(getattr(hosts, name)) for name in named)
