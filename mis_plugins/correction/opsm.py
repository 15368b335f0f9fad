"""Off-policy sequence masking: no learning from negative advantages where the policy has left the sequence.

DeepSeek-AI 2025, "DeepSeek-V3.2", arxiv.org/abs/2512.02556, section 3.1.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from mis_plugins.config.model import OpsmConfig
from mis_plugins.correction.ratios import log_ratio
from mis_plugins.errors import warn_once
from mis_plugins.packing.ragged import Ragged


@dataclass(frozen=True)
class Departure:
    """Numbers that OPSM compares: means over each sequence's valid tokens, infinite where unknown.

    divergence: mean of log mu - log pi_theta, or of log pi_old - log pi_theta with `reference: proximal`.
    mismatch: mean of log mu - log pi_old, which the engine causes.
    staleness: mean of log pi_old - log pi_theta, which the updates on this rollout cause.
    advantage: mean of A_t.
    """

    divergence: Float[Tensor, " N"]
    mismatch: Float[Tensor, " N"]
    staleness: Float[Tensor, " N"]
    advantage: Float[Tensor, " N"]

    @classmethod
    def of(cls, sums: Sequence[Float[Tensor, " N"]]) -> "Departure":
        """From what the rows of `departure_rows` add up to."""
        valid, advantage, *pairs = sums
        divergence, mismatch, staleness = (
            _mean(total, known, valid) for total, known in zip(pairs[::2], pairs[1::2], strict=True)
        )
        return cls(divergence, mismatch, staleness, advantage / valid.clamp(min=1))


def departure_rows(
    target: Float[Tensor, " T"],
    proximal: Float[Tensor, " T"],
    behavior: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    loss_mask: Bool[Tensor, " T"],
    config: OpsmConfig,
) -> list[Shaped[Tensor, " T"]]:
    """Rows over tokens that `Departure.of` reads added up by sequence."""
    reference = reference_policy(behavior, proximal, config)
    pairs = (reference, target), (behavior, proximal), (proximal, target)
    terms = (log_ratio(*pair, loss_mask) for pair in pairs)
    return [loss_mask, torch.where(loss_mask, advantages, 0), *itertools.chain.from_iterable(terms)]


@torch.no_grad()
def on_policy(
    target: Float[Tensor, " T"],
    reference: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    ragged: Ragged,
    config: OpsmConfig,
) -> Bool[Tensor, " T"]:
    """Tokens that stay in the loss: valid, and not (A < 0 and mean_t(log mu - log pi_theta) > delta).

    One collective over context-parallel ranks. A divergence that a non-finite log-prob leaves unknown counts as above
    delta, as it satisfies no other rule either. (TRL takes such a token for one on which the policies agree.)

    Args:
        reference: log-probs of mu, or of what stands for it.
    """
    divergence, advantage = sequence_means(target, reference, advantages, ragged)
    negative = advantages < 0 if config.advantage == "token" else ragged.to_tokens(advantage < 0)
    return ragged.loss_mask & ~(negative & ragged.to_tokens(divergence > config.delta))


def sequence_means(
    target: Float[Tensor, " T"], reference: Float[Tensor, " T"], advantages: Float[Tensor, " T"], ragged: Ragged
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """mean_t(log mu - log pi_theta), infinite where it is not known, and mean_t A_t, of each sequence.

    The divergence is a sum: mean(log mu - log pi_old), fixed for a rollout, plus mean(log pi_old - log pi_theta).
    """
    mask = ragged.loss_mask
    log_r, usable = log_ratio(reference, target, mask)
    total, advantage, known, valid = ragged.sums(log_r, torch.where(mask, advantages, 0), usable, mask)
    return _mean(total, known, valid), advantage / valid.clamp(min=1)


def _mean(total: Float[Tensor, " N"], known: Float[Tensor, " N"], valid: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Mean over the valid tokens of each sequence, infinite where a valid token is not known."""
    return torch.where(known == valid, total / valid.clamp(min=1), torch.inf)


def reference_policy(
    behavior: Float[Tensor, " T"] | None, proximal: Float[Tensor, " T"], config: OpsmConfig
) -> Float[Tensor, " T"]:
    """The log-probs that stand for mu; the proximal policy's where the rollout engine gave none, with a warning."""
    if config.reference == "proximal":
        return proximal
    if behavior is None:
        warn_once(
            "mis.opsm.reference: behavior, but the rollout engine gave no log-probs: OPSM compares with the proximal "
            "policy and sees staleness only, no train-inference mismatch"
        )
        return proximal
    return behavior
