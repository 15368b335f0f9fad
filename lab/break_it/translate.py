"""Room `translate`: settings of other frameworks, in a yaml or on a command line, against the frameworks' own formulas.

Each formula is written down anew, in float64: of the log ratios of a sequence it gives what each token's loss is
multiplied by, 0 where the token is dropped.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from typing import Any

import torch
import yaml
from batches import host_args, ratio_batch
from hypothesis import strategies as st

from mis_plugins import mis
from mis_plugins.config.writing import to_yaml
from mis_plugins.explain.translate import ms_swift, trl, verl

RATIOS = [[0.2, 3.0, 1.1, 0.97], [1.7], [0.6, 0.6, 1.02], [0.99, 1.3], [4.0, 0.3]]
IS = "algorithm.rollout_correction."
Formula = Callable[[Sequence[float]], list[float]]


def swift(mode: str, upper: float) -> Formula:
    def weights(ratios: Sequence[float]) -> list[float]:
        geometric = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
        return {
            "token_truncate": [min(r, upper) for r in ratios],
            "token_mask": [r if r <= upper else 0.0 for r in ratios],
            "sequence_truncate": [min(geometric, upper)] * len(ratios),
            "sequence_mask": [r if geometric <= upper else 0.0 for r in ratios],
        }[mode]

    return weights


def of_trl(mode: str, upper: float, lower: float) -> Formula:
    def weights(ratios: Sequence[float]) -> list[float]:
        level, _, action = mode.partition("_")
        each = [math.prod(ratios)] * len(ratios) if level == "sequence" else ratios
        if action == "mask":
            return [r if lower <= r <= upper else 0.0 for r in each]
        return [max(lower, min(r, upper)) for r in each]

    return weights


def of_verl(level: str, upper: float, rule: str, least: float, most: float) -> Formula:
    """rollout_is truncates; rollout_rs keeps a sequence whose mean, or a token whose own, statistic lies within."""

    def weights(ratios: Sequence[float]) -> list[float]:
        each = [math.prod(ratios)] * len(ratios) if level == "sequence" else list(ratios)
        found = [min(r, upper) for r in each] if level != "null" else [1.0] * len(ratios)
        logs = list(map(math.log, ratios))
        k3 = [math.expm1(x) - x for x in logs]
        mean = lambda values: math.fsum(values) / len(values)  # noqa: E731
        kept = {
            "": lambda t: True,
            "token_k1": lambda t: 1 / most <= ratios[t] <= 1 / least,
            "seq_mean_k1": lambda t: 1 / most <= math.exp(mean(logs)) <= 1 / least,
            "seq_sum_k1": lambda t: 1 / most <= math.exp(math.fsum(logs)) <= 1 / least,
            "token_k3": lambda t: k3[t] <= most,
            "seq_mean_k3": lambda t: mean(k3) <= most,
            "seq_max_k3": lambda t: max(k3) <= most,
            "token_k2": lambda t: logs[t] ** 2 / 2 <= most,
        }[rule]
        return [w if kept(t) else 0.0 for t, w in enumerate(found)]

    return weights


FORMULAS: dict[str, Callable[..., Formula]] = {"ms-swift": swift, "TRL": of_trl, "verl": of_verl}
TRANSLATE = {"ms-swift": ms_swift.translate, "TRL": trl.translate, "verl": verl.translate}
PROGRAMS = {
    "ms-swift": "swift rlhf --rlhf_type grpo",
    "TRL": "trl grpo",
    "verl": "python3 -m verl.trainer.main_ppo",
}


def spelled(draw: st.DrawFn, framework: str, keys: dict[str, Any]) -> str:
    """The keys as a yaml, or as a script, with a variable in the place of a value."""
    if draw(st.booleans()):
        tree = {key.removeprefix(IS): value for key, value in keys.items()}
        return yaml.safe_dump({"algorithm": {"rollout_correction": tree}} if framework == "verl" else tree)
    lines, words = [], []
    for i, (key, value) in enumerate(keys.items()):
        said = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        spot = shlex.quote(said)
        if draw(st.booleans()):
            lines.append(f"V{i}={spot}")
            spot = draw(st.sampled_from([f'"$V{i}"', f"${{V{i}}}", f"${{V{i}:-7}}"]))
        words.append(f"{key}={spot}" if framework == "verl" else f"--{key} {spot}")
    return "\n".join([*lines, f"{PROGRAMS[framework]} \\\n  " + " \\\n  ".join(words)]) + "\n"


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, str, tuple[Any, ...]]:
    """Framework, text, and the arguments of the framework's formula."""
    framework = draw(st.sampled_from(sorted(FORMULAS)))
    upper = draw(st.sampled_from([1.05, 1.5, 2.0, 5.0]))
    if framework == "ms-swift":
        mode = draw(st.sampled_from(sorted(ms_swift.MODES)))
        keys = {"rollout_importance_sampling_mode": mode, "rollout_importance_sampling_threshold": upper}
        return framework, spelled(draw, framework, keys), (mode, upper)
    if framework == "TRL":
        mode, lower = draw(st.sampled_from(trl.MODES)), draw(st.sampled_from([0.0, 0.5, 0.9]))
        keys = {
            "use_vllm": True,
            "vllm_importance_sampling_mode": mode,
            "vllm_importance_sampling_clip_max": upper,
        }
        keys |= {"vllm_importance_sampling_clip_min": lower} if lower else {}
        return framework, spelled(draw, framework, keys), (mode, upper, lower)
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
    return framework, spelled(draw, framework, keys), (level, upper, rule, least, most)


def judge(case: tuple[str, str, tuple[Any, ...]]) -> str:
    framework, text, meant = case
    said = yaml.safe_load(to_yaml(TRANSLATE[framework](text).mis))["mis"]
    batch, formula = ratio_batch(RATIOS), FORMULAS[framework](*meant)
    weights, masks, _ = mis.compute_mis_weights(host_args(mis=said), **batch.lists())
    assert weights is not None, "nothing is weighed"
    for i, ratios in enumerate(RATIOS):
        found, wanted = (weights[i] * masks[i]).tolist(), formula(ratios)
        kept = sum(masks[i].tolist())
        scale = len(ratios) / kept if said.get("denominator") == "kept" and kept else 1.0
        assert torch.allclose(torch.tensor(found), torch.tensor(wanted) * scale, rtol=1e-4, atol=0), (
            f"sequence {i}: {found}, not {wanted}"
        )
    return "right"
