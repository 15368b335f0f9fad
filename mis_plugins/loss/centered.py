"""Score centering in a policy loss: which tokens keep their term, by which factor, and what is reported of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mis_plugins.config.model import CorrectionConfig
from mis_plugins.correction.pipeline import Correction, correct
from mis_plugins.loss.centering import Candidates, Center, Vocabulary, Weigh, center, weigh_with
from mis_plugins.loss.micro_batch import LossInputs, Share
from mis_plugins.loss.objective import target_log_ratio
from mis_plugins.packing.exchange import Exchange


@dataclass(frozen=True)
class Head:
    """What score centering reads of one micro-batch.

    logits: logits of this rank's share of the vocabulary, with gradient, before the temperature divides them.
    candidates: the tokens that the engine named at each position whose logits lie on this rank.
    named: tokens of this rank's loss at which the engine named at least one.
    exchange: see `center`.
    """

    logits: Float[Tensor, "... V"]
    candidates: Candidates
    named: Bool[Tensor, " T"]
    temperature: float
    vocabulary: Vocabulary
    exchange: Exchange | None = None

    def center(self, target: Float[Tensor, " T"], usable: Bool[Tensor, " T"], config: CorrectionConfig) -> Center:
        """The centering term of each usable position at which the engine named a token; see `loss/centering.py`.

        The term has no gradient where the config does not center.
        """
        with torch.set_grad_enabled(config.center is not None):
            return center(
                self.logits,
                target,
                usable & self.named,
                self.candidates,
                weigh_in(config),
                self.temperature,
                self.vocabulary,
                self.exchange,
            )

    def shared(self, share: Share, correction: Correction, scale: Float[Tensor, " T"]) -> Share:
        """The share with the factor of the centering term, and without tokens at which the engine named no head.

        A token beyond a mask bound weighs 0 and keeps its term, because the mean that the term subtracts counts the
        token as weighing 0. A token that a rule or OPSM drops loses its term too.

        Args:
            scale: factor from the host's denominator to that of the surrogate.
        """
        stage = correction.stage
        kept = kept_by_rules(correction) | share.keep  # what `on_all_rejected` gives back was dropped by rules
        keep = kept & stage.usable & self.named
        if share.on_policy is not None:
            keep = keep & share.on_policy
        if correction.mean_weight is not None:
            scale = scale / correction.mean_weight
        if stage.down_weight is not None:
            scale = scale * stage.down_weight
        factor = torch.where(self.named, share.factor, 0)
        return replace(share, factor=factor, of_center=torch.where(keep, scale, 0))

    def metrics(
        self, x: LossInputs, centered: Center, share: Share, config: CorrectionConfig
    ) -> Iterator[tuple[str, Float[Tensor, " T"]]]:
        """Numbers of score centering, one a token; 0 at tokens without a term."""
        mask = x.ragged.loss_mask
        named = mask & self.named
        for name in ("drift", "target_mass", "behavior_mass", "tail_ratio"):
            yield f"center_{name}", torch.where(named, getattr(centered, name), 0)
        yield "center_tail_error", torch.where(named, tail_error(x, centered, config), 0)
        yield "center_missing", (mask & ~self.named).to(centered.drift.dtype)
        if share.of_center is not None:
            moved = x.finite_advantages * share.of_center * centered.log_probs.detach()
            yield "center_size", share.kept(moved.abs())


def weigh_in(config: CorrectionConfig) -> Weigh:
    """f of a config: the bound of its weight of tokens; 1 where it weighs nothing, or more than a token at once."""
    weight = config.weight if config.corrects else None
    return weigh_with(weight if weight is None or weight.level == "token" else None)


def tail_error(x: LossInputs, centered: Center, config: CorrectionConfig) -> Float[Tensor, " T"]:
    """The weight of a token sampled beyond the head, else 0, less the weight that the tail is taken to have.

    Its mean over tokens is the part of the drift that centering leaves, and 0 where the tail's model holds.
    """
    assert x.behavior is not None
    log_ratio, _ = target_log_ratio(x.target.detach(), x.behavior, x.ragged.loss_mask)
    taken = (1 - centered.behavior_mass) * centered.tail_weight
    return centered.beyond * weigh_in(config)(log_ratio) - taken


def kept_by_rules(correction: Correction) -> Bool[Tensor, " T"]:
    """Tokens that every rule keeps, whatever the weight's bound drops."""
    config = correction.config
    if config.weight is None or not config.weight.record.drops_token:
        return correction.keep
    rules = CorrectionConfig(reject=config.reject, m2_threshold=config.m2_threshold, metrics="none")
    stage = correction.stage
    log_probs = stage.proximal_log_probs, stage.behavior_log_probs
    return correct(*log_probs, correction.ragged, rules, routes=stage.routes).keep
