"""The metrics of one optimizer step, each a function of the step's totals.

`python -m mis_plugins.metrics.docs` makes `docs/metrics.md` from the words below. Notation: r_t = pi_old(y_t) / mu(y_t)
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
    values = {name: metric.value(step) for name, metric in METRICS.items()}
    values |= {name: metric.value(step, *place) for name, (metric, place) in families(config).items()}
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
    "tokens": Metric(
        lambda s: s.sums["valid"],
        "Number of valid tokens: those in the loss mask.",
        range="at least 0.",
        bad="far from the batch size times the usual length.",
        do="look at the loss masks and at the sample filter.",
    ),
    "sequences": Metric(
        lambda s: s.sums["any_valid"],
        "Number of sequences with a valid token.",
        range="at least 0.",
        bad="below the global batch size.",
        do="look for samples whose mask is all 0 (truncated, removed by a filter).",
    ),
    "live_sequences_fraction": Metric(
        lambda s: s.over("any_valid", "sequences"),
        "Share of the sequences that have a valid token.",
        range="0 to 1.",
        bad="below 1: the host divides what a hook returns by the other sequences too.",
        do="as sequences. In the host's own log divide the step's mean of a name of Miles's mis.py by this share.",
    ),
    "nonfinite_train_tokens": Metric(
        lambda s: s.sums["nonfinite_train"],
        "Number of valid tokens whose trainer log-prob is NaN or infinite.",
        range="0 and above.",
        bad="above 0. The host's loss is already not finite, and a warning is logged.",
        do="look for overflow in the trainer (fp16 logits, a diverged step); nothing here can mend it.",
    ),
    "nonfinite_rollout_tokens": Metric(
        lambda s: s.sums["nonfinite_rollout"],
        "Number of valid tokens whose rollout log-prob is NaN or infinite.",
        range="0 and above.",
        bad="above 0. The tokens counted get weight 0, and a warning is logged.",
        do="find out which samples (mis_plugins.mis.drop_broken_samples names them); often a custom rollout function.",
    ),
    "nonfinite_advantage_tokens": Metric(
        lambda s: s.sums["nonfinite_advantages"] if s.sums["with_advantage"] else math.nan,
        "Number of valid tokens whose advantage is NaN or infinite; the loss takes such an advantage as 0. The loss "
        "hook reports this metric, because no other hook receives advantages.",
        range="0 and above.",
        bad="above 0. The tokens counted learn nothing, and a warning is logged.",
        do="look at the rewards, and at what normalizes them (a group without spread, an empty one).",
    ),
}

TOKENS: dict[str, Metric] = {
    "kl_k1": Metric(
        lambda s: -s.over_tokens("log_ratio"),
        "KL(mu || pi_old), estimator k1: mean over tokens of -log r_t.",
        range="any; its expectation is at least 0.",
        bad="above 0.05, or a rise: the trainer finds the sampled tokens unlikely. Below -0.01, which samples of mu "
        "cannot give: the engine did not sample with the log-probs that it reports.",
        do="above: as kl_k3, and compare weights, chat template and precision of both. Below: see `slope`; else "
        "compare with kl_k3, which has less noise.",
    ),
    "kl_k2": Metric(
        lambda s: s.over_tokens("k2"),
        "KL(mu || pi_old), estimator k2: mean over tokens of (log r_t)^2 / 2.",
        range="0 and above.",
        bad="as kl_k3; far above it when a few tokens differ much, or nearly all are unlikely.",
        do="as kl_k3; look at the tails.",
    ),
    "kl_k3": Metric(
        lambda s: s.over_tokens("k3"),
        "KL(mu || pi_old), estimator k3: mean over tokens of r_t - 1 - log r_t.",
        range="0 and above; about 2e-3 for a bf16 engine, 0 for an exact one.",
        bad="above 1e-2, or a rise over days; far below kl_k1: nearly all ratios lie under 1, where k3 grows more "
        "slowly than k1.",
        do="correct (token TIS first), raise the engine's precision, sync weights more often.",
    ),
    "reverse_kl_k1": Metric(
        lambda s: s.over_tokens("reverse_k1"),
        "KL(pi_old || mu), estimator k1, by importance weighting: mean over tokens of r_t log r_t.",
        range="any; its expectation is at least 0.",
        bad="far above kl_k3: pi_old puts mass where mu seldom samples. Below -0.01: nearly all ratios lie under 1, "
        "and the estimate says nothing of that mass.",
        do="as kl_k3; look at ratio_max and at the upper tail.",
    ),
    "reverse_kl_k2": Metric(
        lambda s: s.over_tokens("reverse_k2"),
        "KL(pi_old || mu), estimator k2, by importance weighting: mean over tokens of r_t (log r_t)^2 / 2.",
        range="0 and above.",
        bad="far above kl_k3, as reverse_kl_k1; far below kl_k2: ratios are near 0, and pull the estimate to 0.",
        do="as reverse_kl_k1.",
    ),
    "reverse_kl_k3": Metric(
        lambda s: s.over_tokens("reverse_k3"),
        "KL(pi_old || mu), estimator k3, by importance weighting: mean over tokens of r_t log r_t - r_t + 1.",
        range="0 and above.",
        bad="far above kl_k3, as reverse_kl_k1; at most 1 where ratios are near 0, however far.",
        do="as reverse_kl_k1.",
    ),
    "log_prob_diff_abs_mean": Metric(
        lambda s: s.over_tokens("abs_log_ratio"),
        "Mean over tokens of |log pi_old - log mu|.",
        range="0 and above; 0.01 to 0.03 for bf16.",
        bad="above 0.05, or a rise.",
        do="as kl_k3.",
    ),
    "log_prob_diff_abs_max": Metric(
        lambda s: s.largest_size("log_ratio"),
        "Largest |log pi_old - log mu| of a token.",
        range="0 and above.",
        bad="above 5: a token that one policy finds 150 times as likely.",
        do="find the token; a veto or a token mask drops such ones.",
    ),
    "ratio_mean": Metric(
        lambda s: s.over_tokens("ratio"),
        "Mean over tokens of r_t before any bound.",
        range="above 0; its expectation is 1 when mu is what was sampled from, and the mass of the nucleus under "
        "top-p.",
        bad="above 1.02: the engine did not sample with the log-probs that it reports. Below 0.98: mu is cut off "
        "(top-p, top-k), or the trainer finds nearly all sampled tokens unlikely.",
        do="have the engine return the log-probs of what it samples from, and the trainer compute the same; far "
        "below 1, compare weights, chat template and precision of both.",
    ),
    "ratio_std": Metric(
        lambda s: s.spread("ratio", "ratio_squared", s.sums["usable"]),
        "Standard deviation over tokens of r_t before any bound.",
        range="0 and above; near the square root of 2 kl_k3.",
        bad="above 1. The deviation falls with the ratios: near 0 at a ratio_mean far under 1 is no good sign.",
        do="bound the weights; look at ratio_max.",
    ),
    "ratio_min": Metric(
        lambda s: exp_clamped(s.smallest("log_ratio")),
        "Smallest r_t before any bound.",
        range="2e-9, where the clamp acts, to 1 as a rule.",
        bad="below 1e-4: the engine sampled a token that the trainer thinks impossible. Above 1: the trainer "
        "finds every token likelier.",
        do="a veto, {over: min, lower: 1e-4}, drops such sequences.",
    ),
    "ratio_max": Metric(
        lambda s: exp_clamped(s.largest("log_ratio")),
        "Largest r_t before any bound.",
        range="1 as a rule, to 4.9e8, where the clamp acts.",
        bad="above 100; below 1: the trainer finds every token less likely.",
        do="above: bound the weights. Below: as ratio_mean.",
    ),
    "chi2_token": Metric(
        lambda s: s.over_tokens("ratio_squared") - 1,
        "chi^2(pi_old || mu) of a token: mean over tokens of r_t^2, less 1.",
        range="-1 and above; its expectation is at least 0.",
        bad="above 1: token weights alone halve the effective sample. Below -0.1: the ratios shrink together, as "
        "at ratio_mean.",
        do="above: bound the weights; raise the engine's precision. Below: as ratio_mean.",
    ),
    "ess_ratio": Metric(
        lambda s: s.effective_share("ratio", "usable"),
        "Effective sample size of the unbounded r_t: (sum r)^2 / (n sum r^2), as a share of the tokens.",
        range="0 to 1; 1 where the policies agree, and where all ratios are off by one factor.",
        bad="below 0.5. A factor that all ratios share does not show: read ratio_mean too.",
        do="compare with ess, to see what the bound has won.",
    ),
    "prob_diff_abs_mean": Metric(
        lambda s: s.over_tokens("abs_prob_diff"),
        "Mean over tokens of |pi_old - mu|, of probabilities.",
        range="0 to 1; below 0.01 for bf16.",
        bad="above 0.05.",
        do="as kl_k3. Tokens that both policies find unlikely hardly enter this metric.",
    ),
    "prob_diff_abs_std": Metric(
        lambda s: s.spread("abs_prob_diff", "prob_diff_squared", s.sums["usable"], unbiased=True),
        "Standard deviation over tokens of |pi_old - mu|, unbiased.",
        range="0 to 1.",
        bad="far above prob_diff_abs_mean: few tokens differ, but much.",
        do="look at the prob_diff tails.",
    ),
    "prob_diff_abs_max": Metric(
        lambda s: s.largest("abs_prob_diff"),
        "Largest |pi_old - mu| of a token.",
        range="0 to 1.",
        bad="above 0.5: one policy was sure of a token, the other not.",
        do="find the token; often a kernel that differs, a stale weight or a wrong template.",
    ),
    "prob_correlation": Metric(
        lambda s: s.correlation("proximal_prob", "behavior_prob", "prob_product"),
        "Pearson correlation over tokens of pi_old and mu.",
        range="-1 to 1; above 0.99 for bf16.",
        bad="below 0.95. A factor that all probabilities share does not show: read ratio_mean too.",
        do="as kl_k3. MiniMax 2025, arxiv.org/abs/2506.13585, found about 0.9 and mended the precision of the "
        "output layer.",
    ),
    "log_prob_correlation": Metric(
        lambda s: s.correlation("proximal", "behavior", "log_prob_product"),
        "Pearson correlation over tokens of log pi_old and log mu.",
        range="-1 to 1; above 0.99 for bf16.",
        bad="below 0.95 while prob_correlation is high: unlikely tokens differ. One shift of all log-probs does not "
        "show: read kl_k1.",
        do="as kl_k3.",
    ),
    "saturated_tokens": Metric(
        lambda s: s.over_tokens("saturated"),
        "Share of the tokens with |log r_t| above 20, where the clamp makes all ratios alike.",
        range="0 to 1.",
        bad="above 0.",
        do="find the tokens; a log-prob of -20 or so is often a placeholder.",
    ),
}

SLOPES: dict[str, Metric] = {
    "slope": Metric(
        lambda s: s.related("slope"),
        "Least squares slope over tokens of log pi_old on log mu.",
        range="above 0; 1 where the policies agree, a little less under noise.",
        bad="slope and slope_inverse both on one side of 1 by 0.02: one side's log-probs are scaled by a "
        "temperature. One shift of all log-probs does not show: read kl_k1.",
        do="check --rollout-temperature on both sides and whether the engine's log-probs are raw or processed.",
    ),
    "slope_inverse": Metric(
        lambda s: s.related("inverse"),
        "Inverse of the least squares slope over tokens of log mu on log pi_old.",
        range="at least slope.",
        bad="as slope.",
        do="as slope.",
    ),
    "slope_error": Metric(
        lambda s: s.related("slope_error"),
        "Standard error of slope.",
        range="0 and above.",
        bad="nothing by itself.",
        do="compare |slope - 1| with it.",
    ),
    "implied_temperature": Metric(
        lambda s: s.related("implied_temperature"),
        "The temperature of mu against pi_old that both slopes imply: sqrt(slope x slope_inverse).",
        range="above 0; 1 where the policies agree. The true temperature is 1 to 5 times as far from 1.",
        bad="as slope.",
        do="as slope.",
    ),
    "ratio_mean_error": Metric(
        lambda s: s.related("mean_ratio_error"),
        "Standard error of ratio_mean. Tokens need not be independent, because r_t - 1 has mean 0 given all tokens "
        "before it.",
        range="0 and above.",
        bad="|ratio_mean - 1| above 6 standard errors: see ratio_mean.",
        do="as ratio_mean.",
    ),
}

SEQUENCES: dict[str, Metric] = {
    "train_log_ppl": Metric(
        lambda s: s.over_sequences("train_log_ppl"),
        "Mean over sequences of the log perplexity of the trainer: -mean_t log pi_old.",
        range="0 and above.",
        bad="a fall towards 0 (the policy loses its entropy), or a jump.",
        do="compare with rollout_log_ppl; if both fall, look at the entropy and the learning rate.",
    ),
    "train_ppl": Metric(
        lambda s: s.over_sequences("train_ppl"),
        "Mean over sequences of the perplexity of the trainer: exp(-mean_t log pi_old).",
        range="1 and above.",
        bad="as train_log_ppl.",
        do="as train_log_ppl.",
    ),
    "rollout_log_ppl": Metric(
        lambda s: s.over_sequences("rollout_log_ppl"),
        "Mean over sequences of the log perplexity of the rollout engine: -mean_t log mu.",
        range="0 and above.",
        bad="as train_log_ppl.",
        do="as train_log_ppl.",
    ),
    "rollout_ppl": Metric(
        lambda s: s.over_sequences("rollout_ppl"),
        "Mean over sequences of the perplexity of the rollout engine: exp(-mean_t log mu).",
        range="1 and above.",
        bad="as train_log_ppl.",
        do="as train_log_ppl.",
    ),
    "log_ppl_diff": Metric(
        lambda s: s.over_sequences("log_ppl_diff"),
        "Mean over sequences of log perplexity of the trainer less that of the engine: -mean_t log r_t.",
        range="any; its expectation is at least 0.",
        bad="above 0.05, or a rise: the sampled tokens surprise the trainer more and more. Below -0.01: as kl_k1.",
        do="as kl_k3. Each sequence has one vote here, where each token has one in kl_k1.",
    ),
    "log_ppl_abs_diff": Metric(
        lambda s: s.over_sequences("log_ppl_abs_diff"),
        "Mean over sequences of |mean_t log r_t|.",
        range="0 and above.",
        bad="above 0.05; far above |log_ppl_diff|: sequences differ in both directions.",
        do="geometric rejection drops the worst; see log_ppl_diff_max.",
    ),
    "log_ppl_diff_max": Metric(
        lambda s: -s.smallest("mean_log_ratio"),
        "Largest -mean_t log r_t of a sequence.",
        range="any, at least log_ppl_diff.",
        bad="above 1: a sequence that the trainer finds e times as surprising a token. Below -0.01: every "
        "sequence surprises the trainer less than the engine.",
        do="find the sequence; often the weights, the template or the truncation are wrong.",
    ),
    "log_ppl_diff_min": Metric(
        lambda s: -s.largest("mean_log_ratio"),
        "Smallest -mean_t log r_t of a sequence.",
        range="any, at most log_ppl_diff.",
        bad="below -1. Above 0.05: every sequence surprises the trainer more than the engine.",
        do="as log_ppl_diff_max.",
    ),
    "ppl_ratio": Metric(
        lambda s: s.over_sequences("ppl_ratio"),
        "Mean over sequences of perplexity of the trainer over that of the engine: exp(-mean_t log r_t).",
        range="above 0; near 1.",
        bad="above 1.02 with a bf16 engine, above 1.1 with any; below 0.99.",
        do="as log_ppl_diff.",
    ),
    "chi2_sequence": Metric(
        lambda s: s.over_sequences("product_squared") - 1,
        "chi^2 of whole sequences: mean over sequences of (prod_t r_t)^2, less 1; the log of the product "
        "clamped at +-20.",
        range="-1 to 2.4e17, where the clamp acts.",
        bad="above 1: the value tells mostly how long the sequences are, and beyond 1e17 nothing. Below -0.5: all "
        "products are near 0, as at log_mean_product.",
        do="do not weigh by the product; read log_chi2_sequence.",
    ),
    "log_chi2_sequence": Metric(
        lambda s: s.log_products[2] - log_of(s.sums["any_usable"]),
        "log(1 + chi^2) of whole sequences, without a clamp: log of the mean of (prod_t r_t)^2.",
        range="any; its expectation is at least 0. Exact while |sum_t log r_t| is below 2048.",
        bad="above 0.69, which is log 2: few products carry the step. Below -0.69: the products are near 0 "
        "together, and have no variance left.",
        do="geometric or token weights in place of the product.",
    ),
    "log_mean_product": Metric(
        lambda s: s.log_products[1] - log_of(s.sums["any_usable"]),
        "log of the mean over sequences of prod_t r_t, without a clamp.",
        range="any; 0 in expectation, but far below 0 in any sample once the products spread.",
        bad="below -1: nearly all sequences have a product near 0, and product weights shrink the gradient. Above"
        " 1: products grow with the length, and their bound decides.",
        do="geometric or token weights in place of the product, or normalize.",
    ),
    "ess_product": Metric(
        lambda s: exp_of(2 * s.log_products[1] - s.log_products[2] - log_of(s.sums["any_usable"])),
        "Effective sample size of the unbounded products prod_t r_t, as a share of the sequences.",
        range="1 / sequences to 1.",
        bad="below 0.5; at 1 / sequences one sequence carries the whole step. A factor that all products share does "
        "not show: read log_mean_product too.",
        do="geometric or token weights in place of the product.",
    ),
    "chi2_geometric": Metric(
        lambda s: s.over_sequences("geometric_squared") - 1,
        "Mean over sequences of the squared geometric mean of r_t, less 1.",
        range="above -1; near 0.",
        bad="above 0.1: the trainer finds whole sequences likelier. Below -0.1: less likely.",
        do="geometric rejection; as kl_k1 where nearly all lie on one side.",
    ),
    "sequence_log_ratio_mean": Metric(
        lambda s: s.over_sequences("sequence_log_ratio"),
        "Mean over sequences of sum_t log r_t.",
        range="any; its expectation is at most 0, and falls with the length.",
        bad="below -1 or above 1 in a config that weighs by the product.",
        do="geometric or token weights.",
    ),
    "sequence_log_ratio_abs_mean": Metric(
        lambda s: s.over_sequences("abs_sequence_log_ratio"),
        "Mean over sequences of |sum_t log r_t|.",
        range="0 and above; grows with the length. r_t = 1.001 at each of 2000 tokens is 2: a product of 7.38.",
        bad="above 1 in a config that weighs or rejects by the product; at 20 the clamp acts and all look alike.",
        do="geometric or token weights.",
    ),
    "sequence_log_ratio_min": Metric(
        lambda s: s.smallest("sequence_log_ratio"),
        "Smallest sum_t log r_t of a sequence.",
        range="any.",
        bad="below -20 in a config that weighs or rejects by the product. Above 1: every product is far above 1.",
        do="as sequence_log_ratio_abs_mean.",
    ),
    "sequence_log_ratio_max": Metric(
        lambda s: s.largest("sequence_log_ratio"),
        "Largest sum_t log r_t of a sequence.",
        range="any.",
        bad="above 20 in a config that weighs or rejects by the product. Below -1: every product is near 0.",
        do="as sequence_log_ratio_abs_mean.",
    ),
    "saturated_sequences": Metric(
        lambda s: s.over_sequences("saturated_sequences"),
        "Share of the sequences with |sum_t log r_t| above 20, where the clamp makes all products alike.",
        range="0 to 1.",
        bad="above 0 in a config that weighs by the product.",
        do="geometric or token weights.",
    ),
}

WEIGHTS: dict[str, Metric] = {
    "weight_mean": Metric(
        lambda s: s.over_valid("weight"),
        "Mean over valid tokens of the bounded weight, before normalization and rejection. An unknown weight is 0.",
        range="0 to the upper bound.",
        bad="below 0.95 or above 1.05: the correction changes the learning rate.",
        do="normalize, or lower the mismatch.",
    ),
    "weight_std": Metric(
        lambda s: s.spread("weight", "weight_squared", s.sums["valid"]),
        "Standard deviation over valid tokens of the bounded weight, before normalization and rejection.",
        range="0 to half the upper bound.",
        bad="above 0.5. The deviation falls with the weights: near 0 at a weight_mean far under 1 is no good sign.",
        do="tighten the bound.",
    ),
    "weight_min": Metric(
        lambda s: s.smallest("weight"),
        "Smallest bounded weight, before normalization and rejection.",
        range="0 to the upper bound; a zero bound makes weights of 0.",
        bad="0 without a zero bound; above 1: no token is found unlikely.",
        do="look at ratio_min.",
    ),
    "weight_max": Metric(
        lambda s: s.largest("weight"),
        "Largest bounded weight, before normalization and rejection. A mask bound drops tokens and bounds no weight.",
        range="0 to the upper bound.",
        bad="the upper bound in every step: see weight_high_fraction. Below 1: every weight shrinks the gradient.",
        do="as weight_high_fraction.",
    ),
    "weight_high_fraction": Metric(
        lambda s: s.over_units("weight_high"),
        "Share of the tokens (of the sequences, if the weight is per sequence) whose ratio is above the upper bound.",
        range="0 to 1.",
        bad="above a few percent: the bound no longer cuts a tail but shapes the gradient.",
        do="lower the mismatch before raising the bound.",
    ),
    "weight_low_fraction": Metric(
        lambda s: s.over_units("weight_low"),
        "Share of the tokens (of the sequences, if the weight is per sequence) whose ratio is below the lower bound, "
        "or below 1 / upper without one.",
        range="0 to 1.",
        bad="far above weight_high_fraction: the trainer finds many sampled tokens unlikely.",
        do="as kl_k3.",
    ),
    "normalization_factor": Metric(
        lambda s: s.over("weight", "normalized"),
        "Mean bounded weight over mean normalized weight: the divisor of the weights, averaged over micro-batches.",
        range="above 0; 1 without normalization.",
        bad="below 0.95: weights shrink the gradient, which normalization has to undo. Above 1.05: weights blow the "
        "gradient up.",
        do="look at log_mean_product and at the bound.",
    ),
    "applied_mean": Metric(
        lambda s: s.over("kept_weight", "kept"),
        "Mean over kept tokens of the weight as multiplied into the loss.",
        range="0 and above.",
        bad="below 0.95 or above 1.05.",
        do="normalize over kept tokens. Normalized weights have a mean of 1 whatever the ratios are: read "
        "normalization_factor.",
    ),
    "applied_valid_mean": Metric(
        lambda s: s.over_valid("kept_weight"),
        "Mean over valid tokens of the weight as multiplied into the loss, 0 where dropped.",
        range="0 and above.",
        bad="below 0.5: half of the gradient is gone, be it by weights or by rejection. Above 1.5: weights blow the "
        "gradient up.",
        do="compare with applied_mean and kept_fraction.",
    ),
    "applied_min": Metric(
        lambda s: s.smallest("kept_weight"),
        "Smallest weight as multiplied into the loss, 0 where dropped.",
        range="0 and above.",
        bad="nothing by itself.",
        do="compare with kept_fraction.",
    ),
    "applied_max": Metric(
        lambda s: s.largest("kept_weight"),
        "Largest weight as multiplied into the loss.",
        range="0 and above.",
        bad="above the upper bound by much: normalization has blown the weight up.",
        do="look at normalization_factor.",
    ),
    "kept_weight_min": Metric(
        lambda s: s.smallest("weight_of_kept"),
        "Smallest weight of a kept token, as multiplied into the loss.",
        range="0 and above.",
        bad="near 0: the token is kept, and hardly learned from.",
        do="set a lower bound, by clip, mask or a rule.",
    ),
    "ess": Metric(
        lambda s: s.effective_share("kept_weight", "valid"),
        "Effective sample size of the weights as multiplied into the loss, 0 where dropped: (sum w)^2 / (n sum w^2).",
        range="0 to 1, as a share of the valid tokens; at most kept_fraction.",
        bad="below 0.5. A factor that all weights share does not show: read weight_mean too.",
        do="tighten the bound; lower the mismatch. (Kish 1965)",
    ),
    "ess_bounded": Metric(
        lambda s: s.effective_share("weight", "valid"),
        "Effective sample size of the bounded weights before rejection, as a share of the valid tokens.",
        range="0 to 1.",
        bad="below 0.5; as ess.",
        do="compare with ess, to see what rejection costs.",
    ),
    "ess_lifted": Metric(
        lambda s: s.effective_share("lifted", "valid"),
        "Effective sample size of the weights in the loss, clamped to [1 / upper, upper]; a dropped token's weight is "
        "1 / upper. upper is the upper bound of the weight; of an unbounded weight, that of the first rule on ratios "
        "that has one.",
        range="0 to 1.",
        bad="nothing by itself; rejection does not show.",
        do="use ess. ess_lifted is here for users who come from ms-swift.",
    ),
    "sequence_weight_mean": Metric(
        lambda s: s.over_sequences("sequence_weight"),
        "Mean over sequences of a sequence's mean bounded weight, before normalization and rejection.",
        range="0 to the upper bound.",
        bad="far from weight_mean: long and short sequences are weighed differently.",
        do="look at sequence_log_ratio_mean.",
    ),
    "sequence_weight_std": Metric(
        lambda s: s.spread("sequence_weight", "sequence_weight_squared", s.sums["any_usable"], unbiased=True),
        "Standard deviation over sequences of a sequence's mean bounded weight, unbiased.",
        range="0 and above.",
        bad="above 0.5. Near 0 with sequence_weight_mean near 0: the products shrink together.",
        do="geometric weights, or a tighter bound.",
    ),
    "sequence_weight_min": Metric(
        lambda s: s.smallest("sequence_weight"),
        "Smallest mean bounded weight of a sequence.",
        range="0 to the upper bound.",
        bad="near 0; above 1: every sequence counts more than once.",
        do="find the sequence.",
    ),
    "sequence_weight_max": Metric(
        lambda s: s.largest("sequence_weight"),
        "Largest mean bounded weight of a sequence.",
        range="0 to the upper bound.",
        bad="the upper bound in every step. Below 1: every sequence counts less than once.",
        do="find the sequence.",
    ),
    "sequence_weight_max_deviation": Metric(
        lambda s: max(s.largest("sequence_weight") - 1, 1 - s.smallest("sequence_weight")),
        "Largest distance from 1 of a sequence's mean bounded weight.",
        range="0 and above.",
        bad="near 1 (a weight of 0), or near the upper bound less 1, in every step.",
        do="find the sequence.",
    ),
    "sequence_ratio_high_fraction": Metric(
        lambda s: s.over_sequences("sequence_ratio_high"),
        "Share of the sequences whose ratio (the mean ratio, if weights are per token or segment) is above the upper "
        "bound.",
        range="0 to 1.",
        bad="above a few percent.",
        do="lower the mismatch.",
    ),
    "sequence_ratio_low_fraction": Metric(
        lambda s: s.over_sequences("sequence_ratio_low"),
        "Share of the sequences whose ratio (the mean ratio, if weights are per token or segment) is below the lower "
        "bound, or below 1 / upper without one.",
        range="0 to 1.",
        bad="above a few percent.",
        do="lower the mismatch.",
    ),
    "sequence_applied_mean": Metric(
        lambda s: s.over_sequences("sequence_kept_weight"),
        "Mean over sequences of a sequence's mean weight as multiplied into the loss, 0 where a token is dropped.",
        range="0 and above.",
        bad="below 0.5, or above 1.5.",
        do="as applied_valid_mean.",
    ),
    "sequence_applied_min": Metric(
        lambda s: s.smallest("sequence_kept_weight"),
        "Smallest mean of a sequence's weights as multiplied into the loss, 0 where a token is dropped.",
        range="0 and above.",
        bad="nothing by itself.",
        do="compare with kept_sequences.",
    ),
    "sequence_applied_max": Metric(
        lambda s: s.largest("sequence_kept_weight"),
        "Largest mean of a sequence's weights as multiplied into the loss, 0 where a token is dropped.",
        range="0 and above.",
        bad="above the upper bound by much.",
        do="look at normalization_factor.",
    ),
}

REJECTION: dict[str, Metric] = {
    "kept_fraction": Metric(
        lambda s: s.over_valid("kept"),
        "Share of the valid tokens that no rule, no mask bound and no OPSM dropped.",
        range="0 to 1.",
        bad="below 0.5; below `keep_floor` a warning is logged.",
        do="see which rule_i_rejected_fraction is high, and widen that rule or lower the mismatch.",
    ),
    "rejected_fraction": Metric(
        lambda s: 1 - s.over_valid("kept"),
        "1 - kept_fraction.",
        range="0 to 1.",
        bad="above 0.5.",
        do="as kept_fraction.",
    ),
    "kept_sequences": Metric(
        lambda s: s.over("kept_sequences", "any_valid"),
        "Share of the sequences that keep at least one token.",
        range="0 to 1.",
        bad="below 0.5: groups lose members, and their baseline no longer fits.",
        do="as kept_fraction.",
    ),
    "touched_sequences": Metric(
        lambda s: s.over("touched_sequences", "any_valid"),
        "Share of the sequences that lose at least one token.",
        range="0 to 1; at least 1 - kept_sequences.",
        bad="near 1 while kept_fraction is high: almost every sequence loses a few tokens.",
        do="nothing, unless a rule over sequences would do what the rules over tokens do.",
    ),
    "outside_bound_fraction": Metric(
        lambda s: s.over_tokens("outside_bound"),
        "Share of the tokens whose ratio, or whose unit's ratio, lies outside the bound of the weight, which "
        "truncates, clips, drops or zeroes it.",
        range="0 to 1.",
        bad="above a few percent.",
        do="lower the mismatch, or widen the bound; truncate in place of masking.",
    ),
    "all_rejected_fraction": Metric(
        lambda s: s.over("all_rejected", "micro_batches"),
        "Share of the micro-batches whose every sequence was rejected. The share depends on the split into "
        "micro-batches.",
        range="0 to 1.",
        bad="above 0; `on_all_rejected` says what was done, and a warning is logged.",
        do="widen the rules; a geometric rule must be far narrower or wider than a token rule.",
    ),
    "kept_log_ratio_mean": Metric(
        lambda s: s.over("kept_log_ratio", "kept"),
        "Mean over kept tokens of log r_t.",
        range="any.",
        bad="nothing by itself.",
        do="compare with -kl_k1, to see what rejection leaves of the mismatch.",
    ),
    "kept_log_ratio_min": Metric(
        lambda s: s.smallest("kept_log_ratio"),
        "Smallest log r_t of a kept token.",
        range="any.",
        bad="below -5: a token that the trainer finds unlikely is still learned from. Above 0: the trainer finds every "
        "kept token likelier than the engine.",
        do="add a veto, or a token rule with a lower bound.",
    ),
    "kept_log_ratio_max": Metric(
        lambda s: s.largest("kept_log_ratio"),
        "Largest log r_t of a kept token.",
        range="any.",
        bad="above 5, in a config that does not bound weights from above. Below 0: the trainer finds every kept token "
        "less likely than the engine.",
        do="bound the weights, or add a token rule with an upper bound.",
    ),
}

LOSS: dict[str, Metric] = {
    "loss_uncorrected": Metric(
        lambda s: s.over("loss", "with_loss"),
        "Policy loss before correction: sum over valid tokens / valid tokens.",
        range="any.",
        bad="nothing by itself.",
        do="compare with loss_original_denominator.",
    ),
    "loss_original_denominator": Metric(
        lambda s: s.over("corrected_loss", "with_loss"),
        "Policy loss after correction: sum over kept tokens of w_t loss_t / valid tokens.",
        range="any.",
        bad="far smaller than loss_kept_denominator: rejection acts as a lower learning rate.",
        do="set `denominator: kept`, if rejection shall not act so.",
    ),
    "loss_kept_denominator": Metric(
        lambda s: s.over("corrected_loss", "kept") if s.sums["with_loss"] else math.nan,
        "Policy loss after correction: sum over kept tokens of w_t loss_t / kept tokens.",
        range="any.",
        bad="far larger than loss_original_denominator.",
        do="as loss_original_denominator.",
    ),
}

OPSM: dict[str, Metric] = {
    "opsm_divergence_mean": Metric(
        lambda s: s.over_departures("opsm_divergence"),
        "Mean over sequences of the divergence that OPSM compares with delta: mean_t(log mu - log pi_theta), or with "
        "`reference: proximal` mean_t(log pi_old - log pi_theta).",
        range="any; its expectation is at least 0.",
        bad="near or above delta: OPSM masks usual sequences. Far below 0: the engine did not sample with the "
        "log-probs that it reports.",
        do="see which of opsm_mismatch_mean and opsm_staleness_mean is large.",
    ),
    "opsm_divergence_negative_mean": Metric(
        lambda s: s.over_departures("opsm_divergence_negative"),
        "opsm_divergence_mean of the sequences with a negative mean advantage: OPSM can mask no others.",
        range="any.",
        bad="near or above delta.",
        do="choose delta by the percentiles of opsm_divergence_negative.",
    ),
    "opsm_divergence_positive_mean": Metric(
        lambda s: s.over_departures("opsm_divergence_positive"),
        "opsm_divergence_mean of the sequences with a positive mean advantage.",
        range="any.",
        bad="far below opsm_divergence_negative_mean: updates push failures away faster than they pull successes.",
        do="lower the learning rate, or take fewer optimizer steps a rollout.",
    ),
    "opsm_mismatch_mean": Metric(
        lambda s: s.over_departures("opsm_mismatch"),
        "Mean over sequences of mean_t(log mu - log pi_old): the part of the divergence that the engine makes before "
        "any update.",
        range="any; its expectation is at least 0.",
        bad="near or above delta: OPSM masks because of the engine. Clearly below 0: as kl_k1.",
        do="raise the engine's precision, raise delta, or say `reference: proximal`, which leaves this part out.",
    ),
    "opsm_staleness_mean": Metric(
        lambda s: s.over_departures("opsm_staleness"),
        "Mean over sequences of mean_t(log pi_old - log pi_theta): the part of the divergence that the updates on this "
        "rollout made.",
        range="any; 0 in the first optimizer step of a rollout.",
        bad="above delta, or growth from step to step of a rollout.",
        do="take fewer optimizer steps a rollout, or lower the learning rate.",
    ),
    "opsm_masked_fraction": Metric(
        lambda s: s.over_valid("opsm_masked"),
        "Share of the valid tokens that OPSM masks, also where rules reject them.",
        range="0 to 1; at most the share of the tokens with a negative advantage.",
        bad="0 in every step (delta does nothing), or most of the tokens with a negative advantage.",
        do="choose delta by the percentiles of opsm_divergence_negative.",
    ),
    "opsm_unknown_sequences": Metric(
        lambda s: s.sums.get("opsm_unknown", math.nan),
        "Number of sequences with a log-prob that is not finite. OPSM takes the unknown divergence as above delta.",
        range="0 and above.",
        bad="above 0.",
        do="as nonfinite_rollout_tokens.",
    ),
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
    "ratio_p{percent}": Metric(
        lambda s, percent: exp_of(s.quantile("log_ratio", percent)),
        "Percentile over tokens of r_t before any bound, from logs that are within 1% of themselves.",
        range="above 0.",
        bad="p99 above the upper bound of the weight; p50 off 1 by 0.05 or more on either side.",
        do="as weight_high_fraction.",
    ),
    "weight_p{percent}": Metric(
        lambda s, percent: exp_of(s.quantile("log_weight", percent)),
        "Percentile over tokens of the bounded weight before normalization and rejection, from logs that are within 1% "
        "of themselves.",
        range="0 to the upper bound.",
        bad="p95 at the upper bound; p50 off 1 by 0.05 or more.",
        do="as weight_high_fraction.",
    ),
    "sequence_log_ratio_p{percent}": Metric(
        lambda s, percent: s.quantile("sequence_log_ratio", percent),
        "Percentile over sequences of sum_t log r_t, from sums that are within 1% of themselves.",
        range="any.",
        bad="p25 or p75 beyond +-1 in a config that weighs by the product.",
        do="as sequence_log_ratio_abs_mean.",
    ),
    "geometric_ratio_p{percent}": Metric(
        lambda s, percent: exp_of(s.quantile("mean_log_ratio", percent)),
        "Percentile over sequences of the geometric mean of r_t, from logs that are within 1% of themselves.",
        range="above 0; 0.99 to 1.01 for bf16.",
        bad="p25 or p75 outside the bounds of a geometric rule: the rule drops a quarter or more.",
        do="choose the bounds of a geometric rule by these percentiles.",
    ),
    "opsm_divergence_p{percent}": Metric(
        lambda s, percent: s.quantile("opsm_divergence", percent),
        "Percentile over sequences of the divergence that OPSM compares with delta.",
        range="any.",
        bad="p50 above delta, or p99 far below it.",
        do="as opsm_divergence_mean.",
    ),
    "opsm_divergence_negative_p{percent}": Metric(
        lambda s, percent: s.quantile("opsm_divergence_negative", percent),
        "Percentile over the sequences with a negative mean advantage of the divergence that OPSM compares with delta.",
        range="any.",
        bad="p50 above delta: OPSM masks half of the failures.",
        do="a delta at p95 masks one in twenty of these sequences, one at p99 one in a hundred.",
    ),
    "opsm_divergence_positive_p{percent}": Metric(
        lambda s, percent: s.quantile("opsm_divergence_positive", percent),
        "Percentile over the sequences with a positive mean advantage of the divergence that OPSM compares with delta.",
        range="any.",
        bad="as opsm_divergence_positive_mean.",
        do="as opsm_divergence_positive_mean.",
    ),
    "opsm_mismatch_p{percent}": Metric(
        lambda s, percent: s.quantile("opsm_mismatch", percent),
        "Percentile over sequences of mean_t(log mu - log pi_old).",
        range="any.",
        bad="p95 above delta: the engine alone gets sequences masked.",
        do="as opsm_mismatch_mean.",
    ),
    "opsm_staleness_p{percent}": Metric(
        lambda s, percent: s.quantile("opsm_staleness", percent),
        "Percentile over sequences of mean_t(log pi_old - log pi_theta).",
        range="any; 0 in the first optimizer step of a rollout.",
        bad="p95 above delta: updates alone get sequences masked.",
        do="as opsm_staleness_mean.",
    ),
}

TAILS: dict[str, Metric] = {
    "log_ratio_tail_{side}_{bound}": Metric(
        lambda s, side, bound: s.over_tokens(f"{'above' if side == 'high' else 'below'}_{bound}"),
        "Share of the tokens with log r_t above the bound (high), or below minus the bound (low).",
        range="0 to 1.",
        bad="at 1.0 above 0.001; one side far above the other.",
        do="a token mask or a veto drops such tokens.",
    ),
    "prob_diff_tail_{bound}": Metric(
        lambda s, bound: s.over_tokens(f"prob_diff_above_{bound}"),
        "Share of the tokens with |pi_old - mu| above the bound.",
        range="0 to 1.",
        bad="at 0.2 above 0.01.",
        do="as prob_diff_abs_max; a rule of `statistic: abs_prob_diff` drops such tokens.",
    ),
}

RULES: dict[str, Metric] = {
    "rule_{i}_mean": Metric(
        lambda s, rule: s.over_rule(rule, ""),
        "Mean over tokens of the value that the rule compares (for ratios the log). The value of a unit stands at "
        "each of its tokens.",
        range="that of the statistic.",
        bad="near a bound, or beyond one.",
        do="widen the rule, or lower the mismatch.",
    ),
    "rule_{i}_std": Metric(
        lambda s, rule: s.spread(f"{rule}_bounded", f"{rule}_bounded_squared", s.sums[f"{rule}_count"]),
        "Standard deviation over tokens of the value that the rule compares, clamped to the bounds (to 0 where there "
        "is no lower one).",
        range="0 and above.",
        bad="as wide as the bounds; 0 with rule_i_rejected_fraction near 1: all values lie beyond one bound.",
        do="as rule_mean.",
    ),
    "rule_{i}_min": Metric(
        lambda s, rule: s.smallest(rule if f"{rule}_min" in s.maxima else f"{rule}_unit"),
        "Smallest value that the rule compares.",
        range="that of the statistic.",
        bad="far outside the bounds.",
        do="find the token or the unit.",
    ),
    "rule_{i}_max": Metric(
        lambda s, rule: s.largest(rule if f"{rule}_max" in s.maxima else f"{rule}_unit"),
        "Largest value that the rule compares.",
        range="that of the statistic.",
        bad="far outside the bounds.",
        do="find the token or the unit.",
    ),
    "rule_{i}_low_fraction": Metric(
        lambda s, rule: s.over_rule(rule, "_low"),
        "Share of the tokens that lie below the rule's lower bound, or whose unit does.",
        range="0 to 1.",
        bad="far above rule_i_high_fraction.",
        do="as kl_k3.",
    ),
    "rule_{i}_high_fraction": Metric(
        lambda s, rule: s.over_rule(rule, "_high"),
        "Share of the tokens that lie above the rule's upper bound, or whose unit does.",
        range="0 to 1.",
        bad="far above rule_i_low_fraction.",
        do="widen the rule, or lower the mismatch.",
    ),
    "rule_{i}_rejected_fraction": Metric(
        lambda s, rule: s.over_rule(rule, "_low") + s.over_rule(rule, "_high"),
        "Share of the tokens that this rule alone would drop, or down-weigh.",
        range="0 to 1.",
        bad="near rejected_fraction: this rule makes most of the rejection.",
        do="widen the rule.",
    ),
    "rule_{i}_unit_mean": Metric(
        lambda s, rule: s.over_rule(rule, "_unit", "_unit_count"),
        "Mean over units of the value that the rule compares; for a rule over tokens, of a sequence's mean value.",
        range="that of the statistic.",
        bad="near a bound, or beyond one.",
        do="as rule_mean.",
    ),
    "rule_{i}_unit_std": Metric(
        lambda s, rule: s.spread(
            f"{rule}_unit", f"{rule}_unit_squared", s.sums[f"{rule}_unit_count"], unbiased=True
        ),
        "Standard deviation over units of the value that rule_i_unit_mean averages, unbiased.",
        range="0 and above.",
        bad="as wide as the bounds.",
        do="as rule_mean.",
    ),
    "rule_{i}_unit_min": Metric(
        lambda s, rule: s.smallest(f"{rule}_unit"),
        "Smallest value of a unit that rule_i_unit_mean averages.",
        range="that of the statistic.",
        bad="far outside the bounds.",
        do="find the unit.",
    ),
    "rule_{i}_unit_max": Metric(
        lambda s, rule: s.largest(f"{rule}_unit"),
        "Largest value of a unit that rule_i_unit_mean averages.",
        range="that of the statistic.",
        bad="far outside the bounds.",
        do="find the unit.",
    ),
    "rule_{i}_unit_max_deviation": Metric(
        lambda s, rule: s.largest_size(f"{rule}_unit"),
        "Largest absolute value of a unit that rule_i_unit_mean averages.",
        range="0 and above.",
        bad="far outside the bounds.",
        do="find the unit.",
    ),
    "rule_{i}_unit_low_fraction": Metric(
        lambda s, rule: s.over_rule(rule, "_unit_low", "_unit_count"),
        "Share of the units whose value in rule_i_unit_mean lies below the lower bound.",
        range="0 to 1.",
        bad="far above rule_i_unit_high_fraction.",
        do="as rule_low_fraction.",
    ),
    "rule_{i}_unit_high_fraction": Metric(
        lambda s, rule: s.over_rule(rule, "_unit_high", "_unit_count"),
        "Share of the units whose value in rule_i_unit_mean lies above the upper bound.",
        range="0 to 1.",
        bad="far above rule_i_unit_low_fraction.",
        do="as rule_high_fraction.",
    ),
    "rule_{i}_unit_rejected_fraction": Metric(
        lambda s, rule: s.over_rule(rule, "_unit_touched", "_unit_count"),
        "Share of the units of which this rule alone would drop, or down-weigh, at least one token.",
        range="0 to 1.",
        bad="near 1 for a rule over units: nothing is kept.",
        do="widen the rule.",
    ),
}

VERSIONS: dict[str, Metric] = {
    "lag_{age}_share": Metric(
        lambda s, age: ratio_of(s.ages[age]["tokens"], sum(row["tokens"] for row in s.ages)),
        "Share of this age among the usable tokens of known age; the last age takes all older tokens too.",
        range="0 to 1.",
        bad="a large share at old ages.",
        do="sync weights more often, or bound the staleness.",
    ),
    "lag_{age}_kl_k1": Metric(
        lambda s, age: -s.over_age("log_ratio", age),
        "kl_k1 of the tokens of this age.",
        range="any.",
        bad="a rise with the age: staleness, not the engine, makes the mismatch. Below -0.01: as kl_k1.",
        do="sync weights more often, or bound the staleness.",
    ),
    "lag_{age}_kl_k3": Metric(
        lambda s, age: s.over_age("k3", age),
        "kl_k3 of the tokens of this age.",
        range="0 and above.",
        bad="as lag_kl_k1; high at age 0: the engine, not staleness, makes the mismatch.",
        do="as lag_kl_k1, or as kl_k3.",
    ),
    "lag_{age}_ratio_mean": Metric(
        lambda s, age: s.over_age("ratio", age),
        "ratio_mean of the tokens of this age.",
        range="above 0.",
        bad="far from 1.",
        do="as ratio_mean.",
    ),
    "lag_{age}_kept_fraction": Metric(
        lambda s, age: s.over_age("kept", age),
        "Share of the tokens of this age that are kept.",
        range="0 to 1.",
        bad="a fall with the age to near 0: stale tokens are generated for nothing.",
        do="bound the staleness, or widen the rules.",
    ),
}

DIALOGUE: dict[str, Metric] = {
    "turn_{turn}_share": Metric(
        lambda s, turn: ratio_of(s.turns[turn]["tokens"], s.sums["usable"]) if s.has_turns else math.nan,
        "Share of this turn among the usable tokens; the last turn takes all later ones too.",
        range="0 to 1.",
        bad="0 of turns that the dialogues have: the loss mask leaves their tokens out.",
        do="look at the loss masks that the rollout function makes.",
    ),
    "turn_{turn}_kl_k1": Metric(
        lambda s, turn: -s.over_turn("log_ratio", turn),
        "kl_k1 of the tokens of this turn.",
        range="any.",
        bad="a rise with the turn: what stands between two turns is not the same text, or not at the same place, on "
        "both sides. Below -0.01: as kl_k1.",
        do="compare the tokens of both sides before the first turn that is high: a tool's answer or a chat template "
        "that was tokenized a second time, or a prefix that the engine computed with other weights.",
    ),
    "turn_{turn}_kl_k3": Metric(
        lambda s, turn: s.over_turn("k3", turn),
        "kl_k3 of the tokens of this turn.",
        range="0 and above.",
        bad="as turn_kl_k1; alike in all turns: the engine, not the dialogue, makes the mismatch.",
        do="as turn_kl_k1, or as kl_k3.",
    ),
    "turn_{turn}_log_prob_diff_abs_mean": Metric(
        lambda s, turn: s.over_turn("log_ratio_abs", turn),
        "log_prob_diff_abs_mean of the tokens of this turn, the number of verl#5229.",
        range="0 and above.",
        bad="as turn_kl_k3.",
        do="as turn_kl_k3.",
    ),
    "turn_{turn}_ratio_mean": Metric(
        lambda s, turn: s.over_turn("ratio", turn),
        "ratio_mean of the tokens of this turn.",
        range="above 0.",
        bad="far from 1.",
        do="as ratio_mean.",
    ),
    "turn_{turn}_kept_fraction": Metric(
        lambda s, turn: s.over_turn("kept", turn),
        "Share of the tokens of this turn that are kept.",
        range="0 to 1.",
        bad="a fall with the turn to near 0: late turns are generated for nothing.",
        do="as turn_kl_k1, or widen the rules; rules over segments drop a turn alone.",
    ),
}
