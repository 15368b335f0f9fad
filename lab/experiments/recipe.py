"""The recipe of the demonstration and of the collapse experiment: one small setting in which the mismatch is large.

Digits are reversed by a policy that was warm-started to a reward near 0.95 and is sampled by an engine with int3
weights. With the advantage R - 1 only failures have a gradient, and a failure of the rollout policy says
little about the trainer's policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

RECIPE = (
    "--num-digits 10 --warmup-steps 500 "
    "--num-rollout 200 --rollout-batch-size 16 --n-samples-per-prompt 8 --global-batch-size 64 --lr 5e-5"
).split()

ESTIMATORS = {
    "R-1": "--advantage-estimator reinforce --reward-shift -1".split(),
    "group": "--advantage-estimator grpo".split(),
}

TOKEN_TIS = {"level": "token", "bound": "truncate", "upper": 2.0}

# What --custom-config-path holds under `mis:`, or None without the hook. The geometric bounds are wide: int3 weights
# mismatch a hundred times as much as a real engine does.
METHODS: dict[str, Mapping[str, Any] | None] = {
    "uncorrected": None,
    "TIS + geometric + BN": {
        "weight": {**TOKEN_TIS, "normalize": {"scope": "micro_batch", "over": "valid"}},
        "reject": [{"over": "mean", "lower": 0.8, "upper": 1.25}],
    },
    "sequence": {"weight": {"level": "sequence", "bound": "truncate", "upper": 5.0}},
    "token TIS": {"weight": TOKEN_TIS},
    "matched": None,
}


def precision(method: str) -> str:
    """Return the precision of the rollout weights: the trainer's fp32 for `matched`, else int3."""
    return "fp32" if method == "matched" else "int3"


def hook_flags(method: str, folder: Path) -> list[str]:
    """Return the flags that load the correction, and write its YAML to `folder`; empty without a hook."""
    config = METHODS[method]
    if config is None:
        return []
    path = folder / "mis.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({"mis": dict(config)}, sort_keys=False))
    hook = "mis_plugins.mis.compute_mis_weights_with_cp"
    return ["--use-tis", "--custom-tis-function-path", hook, "--custom-config-path", str(path)]


def command_line(method: str, estimator: str, seed: int, output: Path, *extra: str) -> list[str]:
    """Return the arguments of `python -m lab.host` for one run of the recipe."""
    return [
        *RECIPE,
        *ESTIMATORS[estimator],
        *("--rollout-weights", precision(method), "--seed", str(seed), "--output", str(output)),
        *hook_flags(method, output),
        *extra,
    ]
