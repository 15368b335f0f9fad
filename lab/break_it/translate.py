"""Room `translate`: settings of other frameworks, in a yaml or on a command line, against the frameworks' own formulas.

The formulas are those of `formulas.py`, in float64.
"""

from __future__ import annotations

import functools
import json
import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import yaml
from batches import host_args, ratio_batch
from hypothesis import strategies as st

from lab.break_it import formulas
from mis_plugins import mis
from mis_plugins.config.reading import from_mapping
from mis_plugins.config.writing import to_yaml
from mis_plugins.explain.translate import areal, ms_swift, prime_rl, trl, verl
from mis_plugins.explain.translate.translation import Translation
from mis_plugins.loss.objective import Clip, policy_term
from mis_plugins.packing.ragged import Ragged

RATIOS = [[0.2, 3.0, 1.1, 0.97], [1.7], [0.6, 0.6, 1.02], [0.99, 1.3], [4.0, 0.3]]
IS, RULES = "algorithm.rollout_correction.", "actor.rejection_sampling."
SWIFT = "rollout_importance_sampling_mode", "rollout_importance_sampling_threshold"
TRL = "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"


@dataclass(frozen=True)
class Framework:
    """How a framework says what its formula takes.

    program: what its command line begins with; `settings` there are `KEY=VALUE`, or of `flags` `--KEY VALUE`.
    keys: what its formula takes, in the framework's keys.
    """

    translate: Callable[..., Translation]
    program: str
    flags: bool
    keys: Callable[[Any], dict[str, Any]]


def without_none(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value is not None}


def under(path: str, settings: dict[str, Any]) -> dict[str, Any]:
    return {f"{path}{key}": value for key, value in settings.items()}


FRAMEWORKS = {
    "ms-swift": Framework(
        ms_swift.translate, "swift rlhf --rlhf_type grpo", True,
        lambda settings: dict(zip(SWIFT, settings, strict=True)),
    ),
    "TRL": Framework(
        trl.translate, "trl grpo", True,
        lambda settings: {"use_vllm": True} | without_none(dict(zip(TRL, settings, strict=True))),
    ),
    "verl": Framework(
        verl.translate, "python3 -m verl.trainer.main_ppo", False,
        lambda settings: under(IS, {"rollout_is": None} | settings),
    ),
    "AReaL": Framework(
        areal.translate, "python3 -m areal.launcher.local train.py", False,
        lambda settings: {"actor.use_decoupled_loss": True} | without_none(under(RULES, settings)),
    ),
}  # fmt: skip


def as_yaml(keys: Mapping[str, Any]) -> str:
    """Dotted keys as a yaml."""
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        *folders, name = key.split(".")
        functools.reduce(lambda at, folder: at.setdefault(folder, {}), folders, tree)[name] = value
    return yaml.safe_dump(tree)


def spelled(draw: st.DrawFn, framework: Framework, keys: dict[str, Any]) -> str:
    """The keys as a yaml, or as a script, with a variable in the place of a value."""
    if draw(st.booleans()):
        return as_yaml(keys)
    lines, words = [], []
    for i, (key, value) in enumerate(keys.items()):
        said = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        spot = shlex.quote(said)
        if draw(st.booleans()):
            lines.append(f"V{i}={spot}")
            spot = draw(st.sampled_from([f'"$V{i}"', f"${{V{i}}}", f"${{V{i}:-7}}"]))
        words.append(f"--{key} {spot}" if framework.flags else f"{key}={spot}")
    return "\n".join([*lines, f"{framework.program} \\\n  " + " \\\n  ".join(words)]) + "\n"


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, str, Any]:
    """Framework, text, and what the framework's formula takes."""
    name = draw(st.sampled_from([*FRAMEWORKS, "prime-rl"]))
    if name == "prime-rl":
        return name, *draw(prime_rl_tomls())
    framework, settings = FRAMEWORKS[name], draw(formulas.SETTINGS[name][0])
    return name, spelled(draw, framework, framework.keys(settings)), settings


@st.composite
def prime_rl_tomls(draw: st.DrawFn) -> tuple[str, tuple[Any, ...]]:
    """A toml, and kind, bounds and penalty of the loss; what is not said is prime-rl's default."""
    kind = draw(st.sampled_from(["default", "ipo"]))
    names = ["ipo_threshold"] if kind == "ipo" else ["dppo_mask_low", "dppo_mask_high"]
    bounds = [draw(st.sampled_from([None, 0.02, 0.05])) for _ in names]
    penalty = draw(st.sampled_from([None, 0.0, 0.1]))
    said = {"type": kind, "kl_tau": penalty} | dict(zip(names, bounds, strict=True))
    lines = [f"{key} = {json.dumps(value)}" for key, value in said.items() if value is not None]
    low, *rest = (prime_rl.DEFAULTS[kind][name] if x is None else x for name, x in zip(names, bounds, strict=True))
    text = "\n".join([draw(st.sampled_from(["[loss]", "[trainer.loss]"])), *draw(st.permutations(lines))])
    return text, (kind, low, rest[0] if rest else low, formulas.PENALTY if penalty is None else penalty)


def judge(case: tuple[str, str, Any]) -> str:
    name, text, meant = case
    return judge_prime_rl(text, meant) if name == "prime-rl" else judge_weights(name, text, meant)


def judge_weights(name: str, text: str, meant: Any) -> str:
    said = yaml.safe_load(to_yaml(FRAMEWORKS[name].translate(text).mis))["mis"]
    batch = ratio_batch(RATIOS)
    weights, masks, _ = mis.compute_mis_weights(host_args(mis=said), **batch.lists())
    assert weights is not None, "nothing is weighed"
    for i, wanted in enumerate(formulas.SETTINGS[name][1](meant)([[math.log(r) for r in row] for row in RATIOS])):
        found, kept = (weights[i] * masks[i]).tolist(), sum(masks[i].tolist())
        scale = len(wanted) / kept if said.get("denominator") == "kept" and kept else 1.0
        assert torch.allclose(torch.tensor(found), torch.tensor(wanted) * scale, rtol=1e-4, atol=0), (
            f"sequence {i}: {found}, not {wanted}"
        )
    return "right"


def judge_prime_rl(text: str, meant: tuple[Any, ...]) -> str:
    """The gradient of the translated loss, under the host's flags that a note names."""
    made = prime_rl.translate(text)
    config = from_mapping({"weight": None} | dict(made.mis))
    logs = torch.tensor([math.log(r) for row in RATIOS for r in row], dtype=torch.float64)
    mu, advantages = (
        torch.full_like(logs, -3.0),
        torch.tensor([1.0, -1.0] * len(logs), dtype=torch.float64)[: len(logs)],
    )
    target = (mu + logs).requires_grad_()
    ragged = Ragged(torch.tensor([0, len(logs)]), torch.ones(len(logs), dtype=torch.bool))
    assert config.objective is not None
    clip = Clip(*map(float, re.findall(r"--eps-clip\S* (\S+)", " ".join(made.notes))))
    term = policy_term(target, mu, advantages, torch.ones_like(logs), ragged, config.objective, clip)
    (gradient,) = torch.autograd.grad(term.loss.sum(), target)
    wanted = [
        formulas.slope_of_prime_rl(x, -3.0, a, *meant)
        for x, a in zip(target.tolist(), advantages.tolist(), strict=True)
    ]
    assert torch.allclose(gradient, torch.tensor(wanted, dtype=torch.float64), rtol=1e-9), f"{gradient}, not {wanted}"
    return "right"
