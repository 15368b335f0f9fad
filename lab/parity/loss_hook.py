"""The questions for two policy losses, the host's own and ours, and the metrics in which they may differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lab.host_modules import Host
from lab.parity.cases import Batch
from lab.parity.drive import OUR_LOSS, OURS, Outcome, drive, host_args
from lab.parity.verdict import Difference, difference

# The clip must act on log-probs that differ by a few percent.
CLIP = {"eps_clip": 0.03, "eps_clip_high": 0.04}
NARROW = {"eps_clip": 0.004, "eps_clip_high": 0.005}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.3, "opsm_delta": 0.01}
# The host divides a sum over all tokens, masked tokens included, by the number of valid tokens: not a mean.
OPSM_SHARE = ("opsm_clipfrac",)
# In bypass (--use-rollout-logprobs) Miles compares mu with itself.
MU_WITH_MU = ("train_rollout",)

CORRECTIONS: dict[str, dict[str, Any]] = {
    "token TIS": {"weight": {"upper": 1.5}},
    "token IcePop, zeroed": {"weight": {"bound": "zero", "lower": 0.6, "upper": 1.5}},
    "token mask": {"weight": {"bound": "mask", "lower": 0.6, "upper": 1.5}},
    "sequence, normalized": {"weight": {"level": "sequence", "normalize": {"scope": "micro_batch"}}},
    "geometric rejection, token TIS": {
        "weight": {"upper": 1.5},
        "reject": [{"over": "mean", "lower": 0.9, "upper": 1.1}],
    },
}


@dataclass(frozen=True)
class LossCase:
    """A case is a set of the host's flags, with a correction for the host's TIS hook or for our loss.

    mis: the correction; None corrects nothing.
    unshared: names of metrics, or their beginnings, that the two losses define differently.
    """

    name: str
    flags: dict[str, Any] = field(default_factory=dict)
    mis: dict[str, Any] | None = None
    unshared: tuple[str, ...] = ()
    formats: tuple[str, ...] = ("thd", "bshd")

    def theirs(self) -> dict[str, Any]:
        if self.mis is None:
            return self.flags
        return self.flags | {"mis": self.mis, "use_tis": True}

    def ours(self) -> dict[str, Any]:
        return self.flags | {"mis": self.mis or {}, "custom_loss_function_path": OUR_LOSS}


def loss_cases(host: Host) -> list[LossCase]:
    estimators = {"GRPO": {"advantage_estimator": "grpo"}, "GSPO": {"advantage_estimator": "gspo"} | NARROW}
    if host.name == "slime":
        estimators["CISPO"] = {"advantage_estimator": "cispo"}
    return [replace(case, formats=_formats(host, case)) for case in _cases(host, estimators)]


def _formats(host: Host, case: LossCase) -> tuple[str, ...]:
    """List the formats of a case: Miles gathers GSPO's and OPSM's responses as packed, whatever the format."""
    gathers = case.flags.get("advantage_estimator") == "gspo" or case.flags.get("use_opsm")
    return ("thd",) if gathers else host.formats


def _cases(host: Host, estimators: dict[str, dict[str, Any]]) -> Iterator[LossCase]:
    for name, flags in estimators.items():
        yield LossCase(name, flags)
        yield LossCase(f"{name}, per-token loss", flags | {"calculate_per_token_loss": True})
        for correction, mis in CORRECTIONS.items():
            yield LossCase(f"{name}, {correction}", flags, mis)
        everything = flags | KL | {"kl_loss_type": "k3", "entropy_coef": 0.01}
        yield LossCase(f"{name}, entropy, k3", everything)
        for correction, mis in CORRECTIONS.items():
            yield LossCase(f"{name}, entropy, k3, {correction}", everything, mis)
        masked = flags | {"use_opsm": True, "opsm_delta": 0.01}
        yield LossCase(f"{name}, --use-opsm", masked, None, OPSM_SHARE)
        yield LossCase(f"{name}, --use-opsm, token TIS", masked, CORRECTIONS["token TIS"], OPSM_SHARE)
        bypass = flags | {"use_rollout_logprobs": True, "eps_clip_c": 1.5}
        yield LossCase(f"{name}, bypass", bypass, None, MU_WITH_MU if host.name == "miles" else ())
    yield LossCase("GRPO, dual clip", {"eps_clip_c": 1.02})
    yield LossCase("GRPO, entropy observed", {"observe_training_entropy": True})
    yield LossCase("GRPO, unclipped", {"eps_clip": 0.2, "eps_clip_high": 0.28})
    yield LossCase("GRPO, KL observed", {"use_kl_loss": True, "kl_loss_coef": 0.0, "kl_loss_type": "k2"})
    for kind in ("k1", "k2", "k3", "low_var_kl"):
        for unbiased in (False, True):
            flags = KL | {"kl_loss_type": kind, "use_unbiased_kl": unbiased}
            yield LossCase(f"GRPO, {kind}{', unbiased' * unbiased}", flags)
    if host.name == "slime":
        nucleus = {"rollout_top_p": 0.9}
        for name, flags in estimators.items():
            yield LossCase(f"{name}, top-p", flags | nucleus)
        for correction, mis in CORRECTIONS.items():
            yield LossCase(f"GRPO, top-p, {correction}", nucleus, mis)
        yield LossCase("GRPO, top-p, entropy, k3", KL | nucleus | {"kl_loss_type": "k3", "entropy_coef": 0.01})
        yield LossCase("GRPO, top-p, --use-opsm", nucleus | {"use_opsm": True, "opsm_delta": 0.01}, None, OPSM_SHARE)
        yield LossCase("GRPO, top-p, bypass", nucleus | {"use_rollout_logprobs": True, "eps_clip_c": 1.5})
    if host.name == "miles":
        yield LossCase("GRPO, --skip-actor-forward-only", {"skip_actor_forward_only": True})
        reused = {"skip_actor_forward_only": True}
        yield LossCase("GRPO, --skip-actor-forward-only, token TIS", reused, CORRECTIONS["token TIS"])


def ask(host: Host, keys: dict[str, Any], batch: Batch, qkv_format: str) -> Outcome:
    args = host_args({"kl_loss_type": "k1", "kl_loss_coef": 0.0} | CLIP | keys, OURS, False, qkv_format)
    return drive(host, args, batch)


def compared(case: LossCase, ours: Outcome, theirs: Outcome) -> Difference:
    """Compare loss, gradient, and every metric that the host reports; only a TIS hook would show masks."""
    right = replace(theirs, masks=torch.empty(0), tokenwise={})
    return difference(ours, right, torch.empty(0, dtype=torch.bool), case.unshared)
