"""A config as formulas, one line a decision, in the letters of its documentation.

r_t      importance ratio of a token: pi_old(y_t) / mu(y_t), or pi_theta(y_t) / mu(y_t) in bypass
q_t      segment-wise, for a token that version v wrote: pi_{v+1}(y_t) / mu(y_t); no rule reads it
prod r   over the valid tokens of a sequence (or of a segment), n of them
w_t      importance weight
n_t      number of layers of a mixture of experts that route the token to other experts than the engine
m2       the squares that M2PO leaves, of the tokens of a micro-batch
s        the ratio of a sequence, where a surrogate makes one number of its tokens
s_t      what a surrogate clips: pi_theta(y_t) / pi_old(y_t); over mu(y_t) in bypass, over q_t mu(y_t) segment-wise
"""

from mis_plugins.config import model
from mis_plugins.config.terms.surrogates import SURROGATES

RATIO: dict[model.Level, str] = {
    "token": "r_t",
    "segment": "prod_segment r",
    "segment_geometric": "(prod_segment r)^(1/n)",
    "sequence": "prod r",
    "geometric": "(prod r)^(1/n)",
}
MULTIPLIED = {"sum": "prod{} {}", "mean": "(prod{} {})^(1/n)"}  # ratios; other statistics add up
AMONG: dict[model.Population | None, str] = {
    None: "",
    "valid": " (over all valid tokens)",
    "kept": " (over the tokens that smaller rules and bounds keep)",
}
WITHIN: dict[model.Scope, str] = {
    "micro_batch": "the micro-batch",
    "data_parallel": "one micro-batch of each data-parallel rank",
    "rollout": "the rollout",
}


def formula(config: model.CorrectionConfig) -> list[str]:
    """Formulas of a config, one line a decision."""
    trainer = trainer_policy(config)
    lines = [f"r_t    = {trainer}(y_t) / mu(y_t)"]
    if config.aggregate == "kept":
        lines.append("prod r = product over the tokens that smaller rules and bounds keep, n of them")
    if config.segment_wise and config.segment_wise.enabled:
        fresh, older = FRESH[config.segment_wise.fresh_tokens], OLDER[config.segment_wise.method]
        by_age = [*fresh, f"{older}, from age 2"]  # trainer version minus token version
        lines += [f"q_t    = {by_age[0]}", *(f"       = {other}" for other in by_age[1:])]
    lines.append(f"w_t    = {_weight(config, trainer)}")
    rules = [_rule(rule, trainer) for rule in config.reject if rule.drops]
    if config.m2_threshold is not None:
        lines.append(f"m2     = the most of the smallest (log r_t)^2 with a mean < {config.m2_threshold:g}")
        rules.insert(0, "(log r_t)^2 in m2")
    lines.append("keep_t = " + " and ".join(["mask_t", *rules, *([_opsm(config.opsm)] if config.opsm else [])]))
    if config.needs_loss_hook:
        lines += _objective(config)
    else:
        lines.append("L_t    = w_t * the host's policy loss of the token where keep_t, else 0")
    count = "kept tokens" if config.denominator == "kept" else "tokens before rejection"
    return [*lines, f"L      = sum_t L_t / number of {count}, of each sequence"]


def trainer_policy(config: model.CorrectionConfig) -> str:
    """The policy whose log-probs weights and rules compare with those of mu."""
    return "pi_theta" if config.bypass else "pi_old"


FRESH = {
    "proximal": ["pi_old(y_t) / mu(y_t) at age 0 and 1"],
    "behavior": ["1 at age 0 and 1"],
    "behavior_at_age_0": ["1 at age 0", "pi_old(y_t) / mu(y_t) at age 1"],
}
OLDER = {
    "recompute": "pi_{v+1}(y_t) / mu(y_t), as stored before the weights moved on",
    "loglinear": "(pi_old(y_t) / mu(y_t))^(1 / age)",
}


def _weight(config: model.CorrectionConfig, trainer: str) -> str:
    """The weight of a token, in the order in which it is made: its bound, rules that down-weigh, its mean."""
    weight = config.weight
    factors = [f"(1 where {_rule(rule, trainer)}, else {rule.down_weigh:g})" for rule in config.down_weighing]
    if weight is None:
        return " * ".join(factors) or "1"
    ratio, lower, upper = "q_t" if config.segment_wise_on else RATIO[weight.level], weight.floor, weight.ceiling
    within = _within(ratio, lower or None, upper)
    bounded = weight.record.formula.format(ratio=ratio, lower=f"{lower:g}", upper=f"{upper:g}", within=within)
    over_mean = f" / {mean_of(weight)}" if weight.normalize else ""
    if (factors or over_mean) and not weight.record.weighs_outside:
        bounded = f"({bounded})"
    if weight.level == "token":
        return " * ".join([bounded, *factors]) + over_mean
    return " * ".join([bounded + over_mean, *factors])


def mean_of(weight: model.WeightConfig) -> str:
    """The mean that a weight is divided by, in words; empty where the config does not normalize."""
    if weight.normalize is None:
        return ""
    unit = "sequences" if weight.by_sequence else "segments" if weight.by_segment else "tokens"
    return f"its mean over the {weight.normalize.over} {unit} of {WITHIN[weight.normalize.scope]}"


def _rule(rule: model.RejectRule, trainer: str) -> str:
    where = "_segment" if rule.unit == "segment" else ""
    whose = AMONG[rule.aggregate]
    if rule.record.factor is not None and rule.over in MULTIPLIED:
        return _within(MULTIPLIED[rule.over].format(where, rule.record.factor), rule.lower, rule.upper) + whose
    each = rule.record.formula.format(trainer=trainer)
    over = each if rule.over == "token" else f"{rule.over}{where or '_t'} {each}"
    return _within(over, rule.lower, rule.upper) + whose


def _within(what: str, lower: float | None, upper: float | None) -> str:
    if lower is None:
        return f"{what} <= {upper:g}"
    return f"{lower:g} <= {what}" + ("" if upper is None else f" <= {upper:g}")


def _opsm(opsm: model.OpsmConfig) -> str:
    advantage = "A_t" if opsm.advantage == "token" else "mean_t A_t"
    reference = "mu" if opsm.reference == "behavior" else "pi_old"
    return f"not ({advantage} < 0 and mean_t(log {reference} - log pi_theta) > {opsm.delta:g})"


def _center(config: model.CorrectionConfig) -> list[str]:
    """The centering term, and what its coefficients are made of."""
    assert config.center is not None
    bound = "the weight's bound" if config.weight else "1"
    return [
        f"         + A_t sum_v c_v log pi_theta(v), v the engine's {config.center.top_k} likeliest tokens",
        f"c_v    = mu(v) f(r(v)) - rho f(1/rho) pi_theta(v), f = {bound}",
        "rho    = (1 - sum_v mu(v)) / (1 - sum_v pi_theta(v))",
    ]


def _objective(config: model.CorrectionConfig) -> list[str]:
    objective = config.objective or model.ObjectiveConfig()
    old = "mu" if config.bypass else "pi_old"
    ratio = f"pi_theta(y_t) / {old}(y_t)"
    if config.clips_against_next:
        old, ratio = "(q_t mu)", "pi_theta(y_t) / (q_t mu(y_t))"
    record = SURROGATES[objective.surrogate]
    reads_ratio = objective.surrogate != "reinforce" or bool(objective.kl_tau)
    averaged = ratio if objective.ratio == "token" else f"(prod_t {ratio})^(1/n)"
    lines = [f"s_t    = {averaged}"] * (reads_ratio and record.of_sequence is None)
    lines += [line.format(**vars(objective) | {"old": old, "ratio": ratio}) for line in record.lines]
    kept = "keep_t and not away_t" if any(line.startswith("away_t") for line in record.lines) else "keep_t"
    lines.append(f"L_t    = {record.formula} where {kept}, else 0")
    if objective.kl_tau:
        lines.append(f"       + w_t {objective.kl_tau:g} (log s_t)^2 where keep_t")
    if config.center is not None:
        lines += _center(config)
    factors = [f"({ratio})"] * objective.unbiased_kl + ["w_t"] * objective.weigh_kl
    if factors:
        kept = ", 0 where not keep_t" if objective.weigh_kl else ""
        lines.append(f"KL_t   = {' * '.join(factors)} * the host's KL estimate{kept}")
    return lines
