"""Contradictions between settings that few configs have, loaded where a config has one of them."""

import math

from mis_plugins.config.model import WEIGHT_BOUNDS, CorrectionConfig, SegmentWiseConfig
from mis_plugins.errors import ConfigError


def check(config: CorrectionConfig) -> None:
    """Refuse what contradicts `segment_wise`, `m2_threshold`, `center` or `group_baseline`."""
    if config.segment_wise is not None:
        _check_segment_wise(config, config.segment_wise)
    if config.m2_threshold is not None:
        _check_m2(config, config.m2_threshold)
    if config.center is not None:
        _check_center(config)
    if config.group_baseline is not None:
        _check_group_baseline(config)


def _check_m2(config: CorrectionConfig, threshold: float) -> None:
    if not 0 < threshold < math.inf:
        raise ConfigError(f"{{m2_threshold}}: got {threshold:g}; give a finite number above 0")
    normalize = config.weight and config.weight.normalize
    of_units = config.aggregate == "kept" and config.weight and config.weight.level != "token"
    if normalize and normalize.scope == "rollout" and (normalize.over == "kept" or of_units):
        key = "{weight.normalize.over}" if normalize.over == "kept" else "{aggregate}"
        raise ConfigError(
            f"{key}: kept with {{weight.normalize.scope}}: rollout is a mean over the rollout, and "
            "{m2_threshold} drops tokens of each micro-batch; use valid"
        )


def _check_segment_wise(config: CorrectionConfig, segment_wise: SegmentWiseConfig) -> None:
    """Refuse settings that contradict `segment_wise`, and bounds that another setting decides."""
    if segment_wise.enabled and config.bypass:
        raise ConfigError(
            "{segment_wise}: a weight pi_{v+1} / mu belongs to {objective.old}: proximal; with behavior pi_theta "
            "is compared with mu itself: use proximal, or {segment_wise.enabled}: false"
        )
    weight = config.weight
    if segment_wise.enabled and weight and weight.level != "token":
        raise ConfigError(
            f"{{weight.level}}: {weight.level} beside {{segment_wise}}, which weighs each token by itself; use "
            "token, or {segment_wise.enabled}: false"
        )
    if weight == segment_wise.weight or (weight is None and not config.bypass):
        return
    for name in WEIGHT_BOUNDS:
        if getattr(segment_wise, name) != getattr(SegmentWiseConfig, name):
            why = "beside {weight}, which has bounds" if weight else "with {objective.old}: behavior"
            raise ConfigError(f"{{segment_wise.{name}}}: has no effect {why}; drop it")


def _check_center(config: CorrectionConfig) -> None:
    """Refuse `center` beside settings that leave its term unknown."""
    objective, weight = config.objective, config.weight
    if objective is None or not config.bypass:
        raise ConfigError(
            "{center}: needs {objective.old}: behavior; with proximal the ratio to pi_old would be needed for each "
            "token of the head, which no log-prob pass computes"
        )
    if objective.surrogate != "reinforce":
        raise ConfigError(
            f"{{center}}: needs {{objective.surrogate}}: reinforce; {objective.surrogate} weighs a token by its "
            "advantage too, so that its mean is not the score's"
        )
    if weight and weight.level != "token":
        raise ConfigError(
            f"{{weight.level}}: {weight.level} with {{center}}; a weight of more than a token has no value at tokens "
            "that were not sampled: use token, or leave {center} out"
        )
    if weight and weight.record.drops_token and config.looks_at_kept:
        raise ConfigError(
            f"{{weight.bound}}: {weight.bound} with {{center}} and {{aggregate}}: kept; a token that the bound drops "
            "keeps its centering term, and rules cannot tell it from one that a rule drops: use {weight.bound}: zero, "
            "whose policy loss is equal"
        )


def _check_group_baseline(config: CorrectionConfig) -> None:
    """Refuse a group baseline where nothing is rejected, or where training alone tells what is."""
    setting = f"{{group_baseline}}: {config.group_baseline}"
    if not config.corrects:
        raise ConfigError(f"{setting} has no effect without a weight or a rule, which say what trains")
    unknown = {
        "{objective.old}: behavior, whose weights and rules are of pi_theta": config.bypass,
        "{segment_wise}, whose weights are of pi_{v+1}, and which is on where versions are known unless "
        "{segment_wise.enabled}: false": config.segment_wise_on,
        "{m2_threshold}, which asks what else is in the micro-batch": config.m2_threshold is not None,
        "a rule with statistic: route": config.reads_routes,
        "{on_all_rejected}: keep, which asks what else is in the micro-batch": config.on_all_rejected == "keep",
    }
    for why in (why for why, holds in unknown.items() if holds):
        raise ConfigError(f"{setting} needs to know before training what is rejected; drop one of it and {why}")
