"""The snippets of `docs/examples.md` run as they stand, and say what their comments say."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "examples.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run(block: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_weights_by_hand() -> None:
    weights = run(BLOCKS[0])["weights"]
    assert torch.allclose(weights[0], torch.tensor([1.0, 1.1052, 2.0]), atol=1e-4)


def test_what_a_preset_would_have_kept_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {"sample": "near", "proximal_log_probs": [-1.0, -2.0], "behavior_log_probs": [-1.0, -2.001]},
        {"sample": "far", "proximal_log_probs": [-1.0, -2.0], "behavior_log_probs": [-1.0, -1.0]},
    ]
    Path("rollout.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert run(BLOCKS[1])["kept_out"] == ["far"]


def test_a_weight_in_a_loop_of_ones_own() -> None:
    names = run(BLOCKS[2])
    weights = (names["proximal"] - names["engine"]).exp().clamp(max=2.0)
    assert torch.allclose(names["target"].grad, -weights / 3)
