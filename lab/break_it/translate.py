"""Room `translate`: settings of other frameworks, in a yaml or on a command line, against the frameworks' own formulas.

The formulas are those of `formulas.py`, in float64.
"""

from __future__ import annotations

import functools
import json
import math
import re
import shlex
from collections.abc import Callable
from typing import Any

import torch
import yaml
from batches import host_args, ratio_batch
from hypothesis import strategies as st

from lab.break_it import formulas
from lab.break_it.formulas import Formula
from mis_plugins import mis
from mis_plugins.config.reading import from_mapping
from mis_plugins.config.writing import to_yaml
from mis_plugins.explain.translate import areal, ms_swift, prime_rl, trl, verl
from mis_plugins.loss.objective import Clip, policy_term
from mis_plugins.packing.ragged import Ragged

RATIOS = [[0.2, 3.0, 1.1, 0.97], [1.7], [0.6, 0.6, 1.02], [0.99, 1.3], [4.0, 0.3]]
IS = "algorithm.rollout_correction."
FORMULAS: dict[str, Callable[..., Formula]] = {
    "ms-swift": formulas.of_swift,
    "TRL": formulas.of_trl,
    "verl": formulas.of_verl,
    "AReaL": formulas.of_areal,
}
TRANSLATE = {
    "ms-swift": ms_swift.translate,
    "TRL": trl.translate,
    "verl": verl.translate,
    "AReaL": areal.translate,
    "prime-rl": prime_rl.translate,
}
PROGRAMS = {
    "ms-swift": "swift rlhf --rlhf_type grpo",
    "TRL": "trl grpo",
    "verl": "python3 -m verl.trainer.main_ppo",
    "AReaL": "python3 -m areal.launcher.local train.py",
}
PREFIX = {"verl": IS, "AReaL": "actor."}


def spelled(draw: st.DrawFn, framework: str, keys: dict[str, Any]) -> str:
    """The keys as a yaml, or as a script, with a variable in the place of a value."""
    if draw(st.booleans()):
        tree: dict[str, Any] = {}
        for key, value in keys.items():
            *folders, name = key.split(".")
            functools.reduce(lambda at, folder: at.setdefault(folder, {}), folders, tree)[name] = value
        return yaml.safe_dump(tree)
    lines, words = [], []
    for i, (key, value) in enumerate(keys.items()):
        said = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        spot = shlex.quote(said)
        if draw(st.booleans()):
            lines.append(f"V{i}={spot}")
            spot = draw(st.sampled_from([f'"$V{i}"', f"${{V{i}}}", f"${{V{i}:-7}}"]))
        words.append(f"{key}={spot}" if framework in PREFIX else f"--{key} {spot}")
    return "\n".join([*lines, f"{PROGRAMS[framework]} \\\n  " + " \\\n  ".join(words)]) + "\n"


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, str, tuple[Any, ...]]:
    """Framework, text, and the arguments of the framework's formula."""
    framework = draw(st.sampled_from(sorted(TRANSLATE)))
    upper = draw(st.sampled_from([1.05, 1.5, 2.0, 5.0]))
    if framework == "ms-swift":
        mode = draw(st.sampled_from(sorted(ms_swift.MODES)))
        keys = {"rollout_importance_sampling_mode": mode, "rollout_importance_sampling_threshold": upper}
        return framework, spelled(draw, framework, keys), (mode, upper)
    if framework == "TRL":
        mode, lower = draw(st.sampled_from(trl.MODES)), draw(st.sampled_from([0.0, 0.5, 0.9]))
        keys = {"use_vllm": True, "vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": upper}
        keys |= {"vllm_importance_sampling_clip_min": lower} if lower else {}
        return framework, spelled(draw, framework, keys), (mode, upper, lower)
    if framework == "prime-rl":
        return framework, *draw(prime_rl_tomls())
    if framework == "AReaL":
        block = draw(areal_blocks())
        keys = {"actor.use_decoupled_loss": True}
        keys |= {f"actor.rejection_sampling.{key}": value for key, value in block.items() if value is not None}
        return framework, spelled(draw, framework, keys), tuple(block.values())
    level = draw(st.sampled_from(["token", "sequence", "null"]))
    rule = draw(
        st.sampled_from(
            ["", "token_k1", "seq_mean_k1", "seq_sum_k1", "token_k3", "seq_mean_k3", "seq_max_k3", "token_k2"]
        )
    )
    rule = rule or ("token_k1" if level == "null" else "")
    least, most = (0.8, 1.3) if rule.endswith("k1") else (0.0, draw(st.sampled_from([0.02, 0.1])))
    keys = {f"{IS}rollout_is": None if level == "null" else level, f"{IS}rollout_is_threshold": upper}
    if rule:
        said = f"{least}_{most}" if rule.endswith("k1") else most
        keys |= {f"{IS}rollout_rs": rule, f"{IS}rollout_rs_threshold": said}
    return framework, spelled(draw, framework, keys), (level, upper, None, rule, least, most)


@st.composite
def areal_blocks(draw: st.DrawFn) -> dict[str, Any]:
    """`rejection_sampling` without k3, which is refused, and without a clamp by another than the mean."""
    metric = draw(st.sampled_from(["ratio", "ratio", "kl_k1", "kl_k2"]))
    action = draw(st.sampled_from(["mask", "clamp"])) if metric == "ratio" else "mask"
    level = draw(st.sampled_from(["token", "sequence"]))
    agg = draw(st.sampled_from(["sum", "mean", "max"])) if (level, action) == ("sequence", "mask") else "mean"
    upper = st.sampled_from([1.05, 2.0, 5.0] if metric == "ratio" else [0.01, 0.1, 1.0])
    lower = st.sampled_from([None, 0.5, 0.9] if metric == "ratio" else [None])
    return {"level": level, "action": action, "metric": metric, "agg": agg, "upper": draw(upper), "lower": draw(lower)}


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


def judge(case: tuple[str, str, tuple[Any, ...]]) -> str:
    return judge_prime_rl(*case[1:]) if case[0] == "prime-rl" else judge_weights(*case)


def judge_weights(framework: str, text: str, meant: tuple[Any, ...]) -> str:
    said = yaml.safe_load(to_yaml(TRANSLATE[framework](text).mis))["mis"]
    batch = ratio_batch(RATIOS)
    weights, masks, _ = mis.compute_mis_weights(host_args(mis=said), **batch.lists())
    assert weights is not None, "nothing is weighed"
    for i, wanted in enumerate(FORMULAS[framework](*meant)([[math.log(r) for r in row] for row in RATIOS])):
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
