"""The metrics of one optimizer step, each a function of the step's totals.

`lab/pages/metrics.yaml` has the words of each, for `docs/metrics.md`. Notation: r_t = pi_old(y_t) / mu(y_t)
is a token's ratio, trainer over rollout engine; w_t is its bounded weight. Means over tokens are over usable tokens,
means over sequences over sequences with a usable token. log r is clamped at +-20 inside exp. A metric that cannot be
known, such as a mean of nothing, is NaN and is not reported.
"""

from __future__ import annotations

import math

from mis_plugins.config.model import CorrectionConfig
from mis_plugins.metrics.by_turn import TURNS
from mis_plugins.metrics.metric import Metric
from mis_plugins.metrics.partials import Partials
from mis_plugins.metrics.rows import LOG_RATIO_TAILS, PROB_DIFF_TAILS, numbered
from mis_plugins.metrics.step import OLDEST_AGE, Step, exp_clamped, exp_of, log_of, ratio_of

QUANTILES = (25, 50, 75, 95, 99)


def finalize(partials: Partials, config: CorrectionConfig) -> dict[str, float]:
    """Every known metric of a step from its merged partials, which should be on the host by now."""
    step = Step.of(partials, config)
    values = {name: metric(step) for name, metric in METRICS.items()}
    values |= {name: metric(step, *place) for name, (metric, place) in families(config).items()}
    return {name: value for name, value in values.items() if not math.isnan(value)}


def families(config: CorrectionConfig) -> dict[str, tuple[Metric, tuple]]:
    """Metric and place of every member of a family, by name."""
    found: dict[str, tuple[Metric, tuple]] = {
        name.format(percent=percent): (metric, (percent,))
        for name, metric in PERCENTILES.items()
        for percent in QUANTILES
    }
    (log_ratio, of_log_ratio), (prob_diff, of_prob_diff) = TAILS.items()
    for bound in LOG_RATIO_TAILS:
        for side in ("high", "low"):
            found[log_ratio.format(side=side, bound=bound)] = of_log_ratio, (side, bound)
    for bound in PROB_DIFF_TAILS:
        found[prob_diff.format(bound=bound)] = of_prob_diff, (bound,)
    for rule, _ in numbered(config):
        found |= {name.replace("rule_{i}", rule): (metric, (rule,)) for name, metric in RULES.items()}
    for age in range(OLDEST_AGE + 1):
        found |= {name.format(age=age): (metric, (age,)) for name, metric in VERSIONS.items()}
    for turn in range(1, TURNS + 1):
        found |= {name.format(turn=turn): (metric, (turn,)) for name, metric in DIALOGUE.items()}
    return found


# Metrics with one value a step.

AMOUNTS: dict[str, Metric] = {
    "tokens": lambda s: s.sums["valid"],
    "sequences": lambda s: s.sums["any_valid"],
    "live_sequences_fraction": lambda s: s.over("any_valid", "sequences"),
    "nonfinite_train_tokens": lambda s: s.sums["nonfinite_train"],
    "nonfinite_rollout_tokens": lambda s: s.sums["nonfinite_rollout"],
    "nonfinite_advantage_tokens": lambda s: (
        s.sums["nonfinite_advantages"] if s.sums["with_advantage"] else math.nan
    ),
}

TOKENS: dict[str, Metric] = {
    "kl_k1": lambda s: -s.over_tokens("log_ratio"),
    "kl_k2": lambda s: s.over_tokens("log_ratio_squared") / 2,
    "kl_k3": lambda s: s.over_tokens("k3"),
    "reverse_kl_k1": lambda s: s.over_tokens("reverse_k1"),
    "reverse_kl_k2": lambda s: s.over_tokens("reverse_k2"),
    "reverse_kl_k3": lambda s: s.over_tokens("reverse_k3"),
    "log_prob_diff_abs_mean": lambda s: s.over_tokens("abs_log_ratio"),
    "log_prob_diff_abs_max": lambda s: s.largest_size("log_ratio"),
    "ratio_mean": lambda s: s.over_tokens("ratio"),
    "ratio_std": lambda s: s.spread("ratio", "ratio_squared", s.sums["usable"]),
    "ratio_min": lambda s: exp_clamped(s.smallest("log_ratio")),
    "ratio_max": lambda s: exp_clamped(s.largest("log_ratio")),
    "chi2_token": lambda s: s.over_tokens("ratio_squared") - 1,
    "ess_ratio": lambda s: s.effective_share("ratio", "usable"),
    "prob_diff_abs_mean": lambda s: s.over_tokens("abs_prob_diff"),
    "prob_diff_abs_std": lambda s: s.spread(
        "abs_prob_diff", "abs_prob_diff_squared", s.sums["usable"], unbiased=True
    ),
    "prob_diff_abs_max": lambda s: s.largest("abs_prob_diff"),
    "prob_correlation": lambda s: s.correlation("proximal_prob", "behavior_prob", "prob_product"),
    "log_prob_correlation": lambda s: s.correlation("proximal", "behavior", "log_prob_product"),
    "saturated_tokens": lambda s: s.over_tokens("saturated"),
}

SLOPES: dict[str, Metric] = {
    "slope": lambda s: s.related("slope"),
    "slope_inverse": lambda s: s.related("inverse"),
    "slope_error": lambda s: s.related("slope_error"),
    "implied_temperature": lambda s: s.related("implied_temperature"),
    "ratio_mean_error": lambda s: s.related("mean_ratio_error"),
}

SEQUENCES: dict[str, Metric] = {
    "train_log_ppl": lambda s: s.over_sequences("train_log_ppl"),
    "train_ppl": lambda s: s.over_sequences("train_ppl"),
    "rollout_log_ppl": lambda s: s.over_sequences("rollout_log_ppl"),
    "rollout_ppl": lambda s: s.over_sequences("rollout_ppl"),
    "log_ppl_diff": lambda s: s.over_sequences("log_ppl_diff"),
    "log_ppl_abs_diff": lambda s: s.over_sequences("log_ppl_abs_diff"),
    "log_ppl_diff_max": lambda s: -s.smallest("mean_log_ratio"),
    "log_ppl_diff_min": lambda s: -s.largest("mean_log_ratio"),
    "ppl_ratio": lambda s: s.over_sequences("ppl_ratio"),
    "chi2_sequence": lambda s: s.over_sequences("product_squared") - 1,
    "log_chi2_sequence": lambda s: s.log_products[2] - log_of(s.sums["any_usable"]),
    "log_mean_product": lambda s: s.log_products[1] - log_of(s.sums["any_usable"]),
    "ess_product": lambda s: exp_of(2 * s.log_products[1] - s.log_products[2] - log_of(s.sums["any_usable"])),
    "chi2_geometric": lambda s: s.over_sequences("geometric_squared") - 1,
    "sequence_log_ratio_mean": lambda s: s.over_sequences("sequence_log_ratio"),
    "sequence_log_ratio_abs_mean": lambda s: s.over_sequences("abs_sequence_log_ratio"),
    "sequence_log_ratio_min": lambda s: s.smallest("sequence_log_ratio"),
    "sequence_log_ratio_max": lambda s: s.largest("sequence_log_ratio"),
    "saturated_sequences": lambda s: s.over_sequences("saturated_sequences"),
}

WEIGHTS: dict[str, Metric] = {
    "weight_mean": lambda s: s.over_valid("weight"),
    "weight_std": lambda s: s.spread("weight", "weight_squared", s.sums["valid"]),
    "weight_min": lambda s: s.smallest("weight"),
    "weight_max": lambda s: s.largest("weight"),
    "weight_high_fraction": lambda s: s.over_units("weight_high"),
    "weight_low_fraction": lambda s: s.over_units("weight_low"),
    "normalization_factor": lambda s: s.over("weight", "normalized"),
    "applied_mean": lambda s: s.over("kept_weight", "kept"),
    "applied_valid_mean": lambda s: s.over_valid("kept_weight"),
    "applied_min": lambda s: s.smallest("kept_weight"),
    "applied_max": lambda s: s.largest("kept_weight"),
    "kept_weight_min": lambda s: s.smallest("weight_of_kept"),
    "ess": lambda s: s.effective_share("kept_weight", "valid"),
    "ess_bounded": lambda s: s.effective_share("weight", "valid"),
    "ess_lifted": lambda s: s.effective_share("lifted", "valid"),
    "sequence_weight_mean": lambda s: s.over_sequences("sequence_weight"),
    "sequence_weight_std": lambda s: s.spread(
        "sequence_weight", "sequence_weight_squared", s.sums["any_usable"], unbiased=True
    ),
    "sequence_weight_min": lambda s: s.smallest("sequence_weight"),
    "sequence_weight_max": lambda s: s.largest("sequence_weight"),
    "sequence_weight_max_deviation": lambda s: max(
        s.largest("sequence_weight") - 1, 1 - s.smallest("sequence_weight")
    ),
    "sequence_ratio_high_fraction": lambda s: s.over_sequences("sequence_ratio_high"),
    "sequence_ratio_low_fraction": lambda s: s.over_sequences("sequence_ratio_low"),
    "sequence_applied_mean": lambda s: s.over_sequences("sequence_kept_weight"),
    "sequence_applied_min": lambda s: s.smallest("sequence_kept_weight"),
    "sequence_applied_max": lambda s: s.largest("sequence_kept_weight"),
}

REJECTION: dict[str, Metric] = {
    "kept_fraction": lambda s: s.over_valid("kept"),
    "rejected_fraction": lambda s: 1 - s.over_valid("kept"),
    "kept_sequences": lambda s: s.over("kept_sequences", "any_valid"),
    "touched_sequences": lambda s: s.over("touched_sequences", "any_valid"),
    "outside_bound_fraction": lambda s: s.over_tokens("outside_bound"),
    "all_rejected_fraction": lambda s: s.over("all_rejected", "micro_batches"),
    "kept_log_ratio_mean": lambda s: s.over("kept_log_ratio", "kept"),
    "kept_log_ratio_min": lambda s: s.smallest("kept_log_ratio"),
    "kept_log_ratio_max": lambda s: s.largest("kept_log_ratio"),
}

LOSS: dict[str, Metric] = {
    "loss_uncorrected": lambda s: s.over("loss", "with_loss"),
    "loss_original_denominator": lambda s: s.over("corrected_loss", "with_loss"),
    "loss_kept_denominator": lambda s: s.over("corrected_loss", "kept") if s.sums["with_loss"] else math.nan,
}

OPSM: dict[str, Metric] = {
    "opsm_divergence_mean": lambda s: s.over_departures("opsm_divergence"),
    "opsm_divergence_negative_mean": lambda s: s.over_departures("opsm_divergence_negative"),
    "opsm_divergence_positive_mean": lambda s: s.over_departures("opsm_divergence_positive"),
    "opsm_mismatch_mean": lambda s: s.over_departures("opsm_mismatch"),
    "opsm_staleness_mean": lambda s: s.over_departures("opsm_staleness"),
    "opsm_masked_fraction": lambda s: s.over_valid("opsm_masked"),
    "opsm_unknown_sequences": lambda s: s.sums.get("opsm_unknown", math.nan),
}

SECTIONS: dict[str, dict[str, Metric]] = {
    "How much there was": AMOUNTS,
    "How far the two policies are apart, token by token": TOKENS,
    "Whether both sides mean the same by a log-prob: see `metrics/slope.py`": SLOPES,
    "How far the two policies are apart, sequence by sequence": SEQUENCES,
    "The weights": WEIGHTS,
    "What was rejected": REJECTION,
    "What OPSM compares and masks, reported where OPSM is on": OPSM,
    "The loss": LOSS,
}
"""Sections of `docs/metrics.md`, in the order of the page."""

METRICS: dict[str, Metric] = {
    name: metric for section in SECTIONS.values() for name, metric in section.items()
}

# Families: one metric with several places.

PERCENTILES: dict[str, Metric] = {
    "ratio_p{percent}": lambda s, percent: exp_of(s.quantile("log_ratio", percent)),
    "weight_p{percent}": lambda s, percent: exp_of(s.quantile("log_weight", percent)),
    "sequence_log_ratio_p{percent}": lambda s, percent: s.quantile("sequence_log_ratio", percent),
    "geometric_ratio_p{percent}": lambda s, percent: exp_of(s.quantile("mean_log_ratio", percent)),
    "opsm_divergence_p{percent}": lambda s, percent: s.quantile("opsm_divergence", percent),
    "opsm_divergence_negative_p{percent}": lambda s, percent: s.quantile("opsm_divergence_negative", percent),
    "opsm_divergence_positive_p{percent}": lambda s, percent: s.quantile("opsm_divergence_positive", percent),
    "opsm_mismatch_p{percent}": lambda s, percent: s.quantile("opsm_mismatch", percent),
    "opsm_staleness_p{percent}": lambda s, percent: s.quantile("opsm_staleness", percent),
}

TAILS: dict[str, Metric] = {
    "log_ratio_tail_{side}_{bound}": lambda s, side, bound: s.over_tokens(
        f"{'above' if side == 'high' else 'below'}_{bound}"
    ),
    "prob_diff_tail_{bound}": lambda s, bound: s.over_tokens(f"prob_diff_above_{bound}"),
}

RULES: dict[str, Metric] = {
    "rule_{i}_mean": lambda s, rule: s.over_rule(rule, ""),
    "rule_{i}_std": lambda s, rule: s.spread(
        f"{rule}_bounded", f"{rule}_bounded_squared", s.sums[f"{rule}_count"]
    ),
    "rule_{i}_min": lambda s, rule: s.smallest(rule if f"{rule}_min" in s.maxima else f"{rule}_unit"),
    "rule_{i}_max": lambda s, rule: s.largest(rule if f"{rule}_max" in s.maxima else f"{rule}_unit"),
    "rule_{i}_low_fraction": lambda s, rule: s.over_rule(rule, "_low"),
    "rule_{i}_high_fraction": lambda s, rule: s.over_rule(rule, "_high"),
    "rule_{i}_rejected_fraction": lambda s, rule: s.over_rule(rule, "_low") + s.over_rule(rule, "_high"),
    "rule_{i}_unit_mean": lambda s, rule: s.over_rule(rule, "_unit", "_unit_count"),
    "rule_{i}_unit_std": lambda s, rule: s.spread(
        f"{rule}_unit", f"{rule}_unit_squared", s.sums[f"{rule}_unit_count"], unbiased=True
    ),
    "rule_{i}_unit_min": lambda s, rule: s.smallest(f"{rule}_unit"),
    "rule_{i}_unit_max": lambda s, rule: s.largest(f"{rule}_unit"),
    "rule_{i}_unit_max_deviation": lambda s, rule: s.largest_size(f"{rule}_unit"),
    "rule_{i}_unit_low_fraction": lambda s, rule: s.over_rule(rule, "_unit_low", "_unit_count"),
    "rule_{i}_unit_high_fraction": lambda s, rule: s.over_rule(rule, "_unit_high", "_unit_count"),
    "rule_{i}_unit_rejected_fraction": lambda s, rule: s.over_rule(rule, "_unit_touched", "_unit_count"),
}

VERSIONS: dict[str, Metric] = {
    "lag_{age}_share": lambda s, age: ratio_of(s.ages[age]["tokens"], sum(row["tokens"] for row in s.ages)),
    "lag_{age}_kl_k1": lambda s, age: -s.over_age("log_ratio", age),
    "lag_{age}_kl_k3": lambda s, age: s.over_age("k3", age),
    "lag_{age}_ratio_mean": lambda s, age: s.over_age("ratio", age),
    "lag_{age}_kept_fraction": lambda s, age: s.over_age("kept", age),
}

DIALOGUE: dict[str, Metric] = {
    "turn_{turn}_share": lambda s, turn: (
        ratio_of(s.turns[turn]["tokens"], s.sums["usable"]) if s.has_turns else math.nan
    ),
    "turn_{turn}_kl_k1": lambda s, turn: -s.over_turn("log_ratio", turn),
    "turn_{turn}_kl_k3": lambda s, turn: s.over_turn("k3", turn),
    "turn_{turn}_log_prob_diff_abs_mean": lambda s, turn: s.over_turn("log_ratio_abs", turn),
    "turn_{turn}_ratio_mean": lambda s, turn: s.over_turn("ratio", turn),
    "turn_{turn}_kept_fraction": lambda s, turn: s.over_turn("kept", turn),
}
