"""Segment-wise decoupled PPO: a sequence written by several weight versions, each token weighed one step from its own.

Of a token that version v wrote, while the trainer is at version V and pi_V is its proximal policy:

    loss_t = -w_t min(r_t A_t, clip(r_t) A_t),    r_t = pi_theta / pi_{v+1},    w_t = bound(pi_{v+1} / pi_v)

Standard decoupled PPO has w_t = pi_V / pi_v and r_t = pi_theta / pi_V: the two policies of w_t are V - v updates apart,
and w_t varies accordingly. Here w_t r_t is pi_theta / pi_v up to bound and clip. AReaL's branch clips pi_theta / pi_V
beside the segment-wise weight (`clip_against: proximal`), and leaves pi_V / pi_{v+1} uncorrected. All of these losses
agree where V - v is 1. Decoupling: Hilton et al. 2021, arxiv.org/abs/2110.00641, section 3; asynchronous training: Fu
et al. 2025, "AReaL", arxiv.org/abs/2505.24298, section 5.2; segment-wise weights: AReaL's `enable_segment_wise_ppo`.

A token's age is V - v: 0 for a token that the trainer's own version wrote.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mis_plugins.config.model import SegmentWiseConfig
from mis_plugins.correction.ratios import widened
from mis_plugins.errors import InputError

NO_VERSION = -1  # stands for the version of a token that no version wrote: a prompt's, a tool's
STORED_FROM = 2  # from this age on the trainer has left pi_{v+1}, whose log-probs must have been stored


@dataclass(frozen=True)
class Written:
    """Which weight version wrote each token of a micro-batch.

    versions: the version of each token; `NO_VERSION` where no version wrote the token.
    recomputed: log pi_{v+1} as stored before the weights moved from v + 1 to v + 2; NaN where none was stored.
    current: V, the version of the proximal policy.
    """

    versions: Int[Tensor, " T"]
    recomputed: Float[Tensor, " T"]
    current: int

    @property
    def age(self) -> Int[Tensor, " T"]:
        return self.current - self.versions

    @property
    def known(self) -> Bool[Tensor, " T"]:
        """Tokens that some version wrote which the trainer has reached."""
        return (self.versions > NO_VERSION) & (self.versions <= self.current)

    @property
    def known_age(self) -> Int[Tensor, " T"]:
        """Age of each token; -1 where the version is not known."""
        return torch.where(self.known, self.age, -1)


@torch.no_grad()
def proximal_t(
    proximal: Float[Tensor, " T"], behavior: Float[Tensor, " T"], written: Written, config: SegmentWiseConfig
) -> Float[Tensor, " T"]:
    """log pi_{v+1} of each token, the numerator of its behavior weight; NaN where it is not known.

    With segment-wise weights off the result is `proximal` itself, and nothing is read. Nothing waits for the device.

    Args:
        proximal: log-probs under pi_V, the trainer before the update.
        behavior: log-probs under pi_v, which sampled the tokens.
    """
    if not config.enabled:
        return proximal
    fresh = FRESH[config.fresh_tokens](proximal, behavior, written)
    older = OLDER[config.method](proximal, behavior, written)
    log_prob = torch.where(written.age < STORED_FROM, fresh, older)
    return torch.where(written.known, log_prob, torch.nan)


Numerator = Callable[[Tensor, Tensor, Written], Float[Tensor, " T"]]


@torch.no_grad()
def loglinear(
    proximal: Float[Tensor, " T"], behavior: Float[Tensor, " T"], age: Int[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """Log pi_{v+1} without a forward pass: a straight line in log-probs between pi_v and the trainer's pi_V.

        log pi_{v+1}  ~  log pi_v + alpha (log pi_V - log pi_v),        alpha = 1 / (V - v)

    The line is exact at age V - v = 1, and where every update moves a token's log-prob by the same amount. At age 0
    nothing lies between the two versions, and pi_V stands in. AReaL's `prox_logp_method: loglinear` takes a point of
    this line at alpha = (V - 1 - v) / (V - v): AReaL's proximal policy is one update older than the one being trained.
    Both points agree at age 2 alone.
    """
    near, far = widened(behavior), widened(proximal)
    return torch.where(age > 1, near + (far - near) / age, far)


FRESH: dict[str, Numerator] = {
    "proximal": lambda proximal, behavior, written: proximal,
    "behavior": lambda proximal, behavior, written: behavior,
    "behavior_at_age_0": lambda proximal, behavior, written: torch.where(written.age == 0, behavior, proximal),
}
OLDER: dict[str, Numerator] = {
    "recompute": lambda proximal, behavior, written: written.recomputed,
    "loglinear": lambda proximal, behavior, written: loglinear(proximal, behavior, written.age),
}


@dataclass(frozen=True)
class BehaviorWeight:
    """The bounded weight of each token, and which tokens the bound keeps.

    weights: w_t; 0 where it is not known, and outside the loss mask.
    keep: the loss mask, less the tokens that `mode: mask` drops.
    """

    weights: Float[Tensor, " T"]
    keep: Bool[Tensor, " T"]


def lacking(written: Written, config: SegmentWiseConfig) -> Bool[Tensor, " T"]:
    """Tokens whose log pi_{v+1} is not known, tokens that no version wrote among them."""
    unknown = ~written.known
    if config.method == "loglinear":
        return unknown
    return unknown | ((written.age >= STORED_FROM) & written.recomputed.isnan())


def admitted(
    names: Sequence[str],
    written: Sequence[Written],
    loss_masks: Sequence[Bool[Tensor, " _"]],
    config: SegmentWiseConfig,
) -> list[Bool[Tensor, " _"]]:
    """The loss masks, less the tokens that cannot be weighed: called once a rollout, on the host, one tensor a sample.

    Raises:
        InputError: a valid token has an impossible version, or, with `too_old: raise`, no stored log-prob. The message
            names the sample, the token and the version.
    """
    if not config.enabled:
        return list(loss_masks)
    masks = []
    for name, tokens, mask in zip(names, written, loss_masks, strict=True):
        _refuse(name, tokens, mask & (tokens.versions <= NO_VERSION), "no version wrote it, so mask it")
        _refuse(name, tokens, mask & (tokens.versions > tokens.current), "the trainer has not reached it")
        missing = mask & lacking(tokens, config)
        if config.too_old == "raise":
            _refuse(name, tokens, missing, TOO_OLD)
        masks.append(mask & ~missing)
    return masks


TOO_OLD = (
    "what its next version gives it was not stored; recompute before every update, bound the staleness tighter, or "
    "say too_old: drop"
)


def _refuse(name: str, written: Written, wrong: Bool[Tensor, " _"], why: str) -> None:
    positions = wrong.nonzero().flatten().tolist()
    if positions:
        version = int(written.versions[positions[0]])
        raise InputError(
            f"sample {name}, token {positions[0]}: version {version}, with the trainer at {written.current}: {why} "
            f"({len(positions)} such tokens)"
        )
