"""Alarms: warnings about an optimizer step, each a function of the config and of the step's sums."""

from collections.abc import Callable, Mapping, Sequence

from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.terms.divergence import LOG_RATIO_CLAMP
from mis_plugins.metrics import slope

Alarm = Callable[[CorrectionConfig, Mapping[str, float]], Sequence[str]]
# Prefix of the step's metrics in a host's log, and the host's key for the number of the step.
PREFIX, STEP_KEY = "train/mis_step/", "train/step"


def all_rejected(config: CorrectionConfig, sums: Mapping[str, float]) -> Sequence[str]:
    return [everything_rejected(config, sums)] if sums["all_rejected"] else []


def few_kept(config: CorrectionConfig, sums: Mapping[str, float]) -> Sequence[str]:
    share = sums["kept"] / max(sums["valid"], 1)
    if not sums["valid"] or share >= config.keep_floor:
        return []
    return [
        f"{share:.1%} of {sums['valid']:.0f} tokens are kept, less than mis.keep_floor: {config.keep_floor:.0%}; "
        f"{_way_out(config)}, or lower the mismatch"
    ]


def _way_out(config: CorrectionConfig) -> str:
    """What a user changes so that the config drops less."""
    raised = ["raise mis.m2_threshold"] * (config.m2_threshold is not None)
    return " and ".join(["widen the bounds of mis.reject"] * bool(config.reject or not raised) + raised)


def product_too_long(config: CorrectionConfig, sums: Mapping[str, float]) -> Sequence[str]:
    """Warn where |sum of log ratios| has a mean above 1, a factor of e, or where the clamp acts at all."""
    count = sums.get("product_count", 0.0)
    size = sums.get("product_size", 0.0) / max(count, 1)
    if not count or (size <= 1 and not sums["product_saturated"]):
        return []
    return [
        f"ratios are multiplied over whole sequences or segments, and |sum of log ratios| has a mean of {size:.2f} "
        f"over {count:.0f} of them; for {sums['product_saturated'] / count:.1%} it is above {LOG_RATIO_CLAMP:g}, where "
        "all look alike. The longer, the further from 1 (1.001^2000 = 7.38): use a geometric mis.weight.level, or "
        "`over: mean`"
    ]


def processed_log_probs(config: CorrectionConfig, sums: Mapping[str, float]) -> Sequence[str]:
    if "log_prob_product" not in sums or not slope.is_suspect(sums):
        return []
    from mis_plugins.metrics.processed import warnings_of

    return warnings_of(sums)


def counted(name: str, words: str) -> Alarm:
    """The alarm of a sum that counts valid tokens: how many there are, and what the words say of such tokens."""

    def alarm(config: CorrectionConfig, sums: Mapping[str, float]) -> Sequence[str]:
        count = sums.get(name, 0.0)
        return [f"{count:.0f} of {sums['valid']:.0f} tokens {words}"] * bool(count)

    return alarm


def weights_of_one(config: CorrectionConfig, sums: Mapping[str, float]) -> Sequence[str]:
    """Warn where a weight is asked for, log-probs differ, and the loss is that of a run without a correction."""
    kept, total = sums["kept"], sums.get("kept/normalized", 0.0)
    differs = sums.get("abs_log_ratio", 0.0) > 1e-5 * kept
    if not config.weight or not kept or kept < sums["usable"] or not differs:
        return []
    mean, deviation = total / kept, sums["kept/normalized_squared"] - total**2 / kept
    # Weights of tiny log ratios have a mean near 1 too, and spread as far as the log ratios do.
    all_one = abs(mean - 1) < 1e-6 and deviation < min(1e-6 * kept, 1e-3 * sums["log_ratio_squared"])
    return [
        f"every weight of {kept:.0f} tokens is 1, although the log-probs of trainer and rollout engine differ: nothing "
        "is corrected. mis.weight.normalize over a single sequence, or over weights that a bound makes equal, does so; "
        "drop mis.weight.normalize, or give larger micro-batches or wider bounds"
    ] * all_one


def nonfinite_log_probs(config: CorrectionConfig, sums: Mapping[str, float]) -> Sequence[str]:
    """Warn of tokens without a ratio; with segment-wise weights the other two alarms tell more of such tokens."""
    count = sums["valid"] - sums["usable"]
    if config.segment_wise_on or not count:
        return []
    meant = (
        "A token without a finite ratio weighs 0, and is" if config.corrects else "A token without a finite ratio is"
    )
    return [
        f"{count:.0f} of {sums['valid']:.0f} tokens have a log-prob that is NaN or infinite, or that stands in for "
        f"none (-9999, -1e9), the trainer's or the rollout engine's. {meant} left out of all means. "
        "mis_nonfinite_train_mb and mis_nonfinite_rollout_mb say whose log-prob it is; "
        "mis_plugins.mis.drop_broken_samples names samples and values"
    ]


COUNT = "--rollout-data-postprocess-path mis_plugins.mis.count_samples"


def diluted(config: CorrectionConfig, sums: Mapping[str, float]) -> Sequence[str]:
    """Warn where fully masked samples lower the host's averages; means of the step hook leave them out."""
    count = sums.get("sequences", 0.0)
    masked = count - sums.get("any_valid", 0.0)
    exact = f"the numbers under {PREFIX} are" if config.reports_step else "mis.metrics: watch logs"
    return [
        f"{masked:.0f} of {count:.0f} sequences have no token in the loss, and without --calculate-per-token-loss the "
        "host divides the mis_ metrics by masked sequences too. Metrics that Miles's mis.py has read too low. All "
        "others do where a whole micro-batch is masked, or where a rollout function of yours may make several samples "
        f"of a rollout, unless {COUNT} counts them; {exact} means over the rest"
    ] * bool(count and masked)


ALARMS: dict[str, Alarm] = {
    "all_rejected": all_rejected,
    "few_kept": few_kept,
    "product_too_long": product_too_long,
    "processed_log_probs": processed_log_probs,
    "lacking_weights": counted(
        "lacking_weights",
        "weigh 0, as nobody stored what their segment-wise weight needs, or knows which version wrote them: drop or "
        "refuse them before training (mis_plugins.versions.segment_wise.admitted)",
    ),
    "nonfinite_weights": counted(
        "nonfinite_weights",
        "weigh 0, as a log-prob of theirs is not finite or stands in for none (-9999), the trainer's or the rollout "
        "engine's: mis_nonfinite_train_mb and mis_nonfinite_rollout_mb say whose",
    ),
    "weights_of_one": weights_of_one,
    "nonfinite_log_probs": nonfinite_log_probs,
    "diluted": diluted,
    "nonfinite_advantages": counted(
        "nonfinite_advantages",
        "have an advantage that is NaN or infinite. An advantage of this kind counts as 0. Look at the rewards, and at "
        "what normalizes rewards (a group without spread, an empty one)",
    ),
}
ONCE = {"product_too_long", "processed_log_probs", "diluted"}  # warned of once a run
EACH_TIME = {"all_rejected"}  # warned of at every step; all other alarms when they begin to hold


def everything_rejected(config: CorrectionConfig, sums: Mapping[str, float]) -> str:
    by = f"{PREFIX}rule_0_rejected_fraction and its like" if config.reports_step else "`mis.metrics: watch`"
    return (
        f"every sequence of {sums['all_rejected']:.0f} of {sums['micro_batches']:.0f} micro-batches was rejected "
        f"(mis.on_all_rejected: {config.on_all_rejected}); {sums['kept'] / max(sums['valid'], 1):.1%} of the step's "
        f"tokens are kept; {_way_out(config)}, or see which rule it is by {by}"
    )
