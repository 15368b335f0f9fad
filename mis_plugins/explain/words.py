"""A config in words: what it will do, which flags it needs, what to beware of."""

from collections.abc import Iterator

from mis_plugins.config import model
from mis_plugins.config.terms.bounds import Outside
from mis_plugins.config.terms.surrogates import SURROGATES
from mis_plugins.explain.formula import mean_of, trainer_policy
from mis_plugins.hosts.host import LOSS_HOOK, ONE_STEP, ROUTES_HOOK, Host
from mis_plugins.metrics.alarms import COUNT

TIS_HOOK = "--custom-tis-function-path mis_plugins.mis.compute_mis_weights_with_cp"
ROLLOUT_HOOK = "--rollout-data-postprocess-path mis_plugins.mis.normalize_rollout"
STEP_HOOK = "--custom-megatron-before-train-step-hook-path mis_plugins.mis.report_step"

LEVEL: dict[model.Level, str] = {
    "token": "the ratio of each token",
    "segment": "the ratio of each segment (product over its tokens; a segment is a run of ones in the loss mask)",
    "segment_geometric": "the geometric mean ratio of each segment (a run of ones in the loss mask)",
    "sequence": "the ratio of the whole sequence (product over its tokens)",
    "geometric": "the geometric mean ratio of the sequence",
}
OVER: dict[model.Over, str] = {
    "token": "tokens whose {statistic}",
    "sum": "{unit}s with a sum of {statistic} that",
    "mean": "{unit}s with a mean {statistic} that",
    "min": "{unit}s whose smallest {statistic} of a token",
    "max": "{unit}s whose largest {statistic} of a token",
}
OVER_MULTIPLIED = {
    "sum": "{unit}s whose {statistic} (product over tokens)",
    "mean": "{unit}s whose geometric mean {statistic}",
}
AMONG: dict[model.Population | None, str] = {
    None: "",
    "valid": ", dropped tokens included",
    "kept": ", what smaller rules and bounds drop left out",
}
FRESH = {
    "proximal": "at ages 0 and 1, pi_old",
    "behavior": "at ages 0 and 1, mu itself, so that their weight is 1",
    "behavior_at_age_0": "at age 0, mu itself, so that the weight is 1, at age 1, pi_old",
}
OLDER = {
    "recompute": "what was recomputed under pi_{v+1} before the weights moved on",
    "loglinear": "a line in log-probs between pi_v and pi_old",
}
CLIP_AGAINST = {
    "next": "PPO's ratio is pi_theta / pi_{v+1}; rules and OPSM look at pi_old",
    "proximal": "PPO's ratio, rules and OPSM look at pi_old",
}
TOO_OLD = {
    "raise": "a token of which nothing was stored is an error that names its sample",
    "drop": "a token of which nothing was stored leaves the loss mask",
}
ALL_REJECTED = {
    "skip": "trains on nothing",
    "keep": "rejects nothing",
    "raise": "stops the job at the next optimizer step, and trains on nothing until then",
}
RECOMMENDED = (
    "recommended: weight.normalize with weight.level: {level}: weights of sequences differ so much that their mean "
    "changes the learning rate from step to step; the Miles blog recommends it strongly"
)
WHOSE_MEAN: dict[model.Scope, str] = {
    "micro_batch": (
        "normalize: with dynamic batches a host's micro-batch holds max_tokens_per_gpu x context-parallel size tokens, "
        "so that mean and loss change with either; scope: rollout depends on neither"
    ),
    "data_parallel": (
        "normalize: with dynamic batches a host's micro-batch holds max_tokens_per_gpu x context-parallel size tokens "
        "on each data-parallel rank, so that mean and loss change with any of them; scope: rollout does not"
    ),
}
KEPT_AGGREGATE = "aggregate: what a sequence or segment adds up to leaves out what smaller rules and bounds drop"
M2PO = (
    "m2_threshold: the tokens with the largest (log r)^2 of each micro-batch leave the loss, until the mean of the "
    "others is below {:g}"
)
RESPLIT = (
    "trainer against itself: of each {every} rollouts one is scored again from other micro-batches, which costs a "
    "log-prob pass; resplit_differs is 0 where no kernel depends on the batch"
)
BASELINE = {
    "grpo": "group baseline: rewards less the mean over the group's samples that train, over the host's deviation of "
    "these; a sample alone has the advantage 0",
    "rloo": "group baseline: rewards less the mean over the group's other samples that train; a sample alone has the "
    "advantage 0",
}
NOTHING = (
    "metrics: none alone weighs nothing, drops nothing and reports nothing: drop it, or say how to correct (it has "
    f"its effect beside a weight or rules, and where the host's flags make up the loss: {LOSS_HOOK})"
)
WHERE_KNOWN = (
    "segment_wise: on where the host hands on which version wrote each token (Miles and slime: with "
    "mis_plugins.mis.carry_versions): the weight is pi_{v+1} / mu there, and PPO's ratio pi_theta / pi_{v+1}; "
    "enabled: false keeps pi_old in both"
)
EXPERTS = {
    "engine": "routers use the engine's experts where the host replays them",
    "trainer": "routers use the experts that their own gates pick, and the engine's are compared",
}
ON_FAULT = {"warn": "is logged", "raise": "stops the job"}
ROUTING = "routing: {}; a replay that did not happen {}"
CENTER = (
    "center: the mean of the weighted score under mu is subtracted, so that a constant reward moves nothing; from the "
    "engine's {} likeliest tokens at each position, and a model of all others"
)
NO_STEP = "full, since {} calls no hook before a step that would log what watch leaves out"
LONG, DRIFT = 2000, 1.001
HIGHEST_CAP = 100
EFFECT: dict[Outside, str] = {"weighed": "changes", "zeroed": "weighs with 0", "dropped": "drops"}


def describe(config: model.CorrectionConfig, host: Host | None = None, file: str = "FILE") -> str:
    """One line a decision, the flags, and the warnings.

    Args:
        host: whose flags; None is Megatron's under Miles or slime.
        file: what stands behind --custom-config-path.
    """
    trainer = trainer_policy(config)
    full = host is not None and config.metrics == "watch" and not host.step_hook and NO_STEP.format(host.title)
    lines = [
        _weight(config.weight, "pi_{v+1}" if config.segment_wise_on else trainer),
        *_segment_wise(config),
        *_normalization(config.weight),
        *([M2PO.format(config.m2_threshold)] if config.m2_threshold is not None else []),
        *(_rule(rule, trainer) for rule in config.reject),
        *([_opsm(config.opsm)] if config.opsm else []),
        *([ROUTING.format(EXPERTS[watch.experts], ON_FAULT[watch.on_fault])] if (watch := config.routing) else []),
        *([_objective(config.objective, config.clips_against_next)] if config.objective else []),
        *([CENTER.format(config.center.top_k)] if config.center else []),
        *([KEPT_AGGREGATE] if config.aggregate == "kept" else []),
        *(_consequences(config) if config.can_end_empty or config.opsm else []),
        *([BASELINE[config.group_baseline]] if config.group_baseline else []),
        *([RESPLIT.format(every=config.resplit_every)] if config.resplit_every is not None else []),
        f"metrics: {full or config.metrics}",
        f"needs: {flags(config, host)} --custom-config-path {file}",
        *(f"warning: {text}" for text in warnings(config)),
    ]
    return "\n".join(lines)


def flags(config: model.CorrectionConfig, host: Host | None = None) -> str:
    """What the host must be started with, the config file aside."""
    switch = "--use-tis" if config.corrects else "--get-mismatch-metrics"
    tis = TIS_HOOK if host is None else f"--custom-tis-function-path {host.tis_hook}"
    words = [LOSS_HOOK if config.needs_loss_hook else f"{switch} {tis}"]
    if _has_rollout_mean(config):
        words.append(ROLLOUT_HOOK)
    elif config.resplit_every is not None or config.group_baseline:
        words.append(COUNT)
    watches = config.reads_routes or config.routing is not None
    steps = config.reports_step or config.on_all_rejected == "raise" or watches
    if steps and (host is None or host.step_hook):
        words.append(STEP_HOOK)
    if config.objective is not None and (config.objective.unbiased_kl or config.objective.weigh_kl):
        words.append("--use-kl-loss")
    return " ".join([*words, ROUTES_HOOK] if watches else words)


def _has_rollout_mean(config: model.CorrectionConfig) -> bool:
    normalize = config.weight and config.weight.normalize
    return bool(normalize and normalize.scope == "rollout")


def warnings(config: model.CorrectionConfig) -> Iterator[str]:
    """Warnings about settings that work as documented and may still surprise."""
    if not (config.corrects or config.needs_loss_hook or config.metrics != "none"):
        yield NOTHING
    yield from _bounds(config)
    yield from _products(config)
    if _has_rollout_mean(config) and not config.needs_loss_hook:
        yield f"weight.normalize.scope: rollout: {ONE_STEP}"


def _bounds(config: model.CorrectionConfig) -> Iterator[str]:
    """Bounds that change or drop tokens on which trainer and rollout engine agree, and caps that never act."""
    if config.weight:
        ours = ("segment_wise.weight_cap", "segment_wise.mode") if config.weighs_by_segment_wise else None
        yield from _weight_bounds(config.weight, *(ours or ("weight.upper", "weight.bound")))
    for i, rule in enumerate(config.reject):
        agreed = rule.record.on_policy
        if agreed is not None and not holds(rule.lower, agreed, rule.upper):
            verb = "drops" if rule.drops else "down-weighs"
            yield (
                f"reject[{i}] {verb} what trainer and rollout engine agree on: there its {rule.statistic} is {agreed}, "
                f"which is outside {_interval(rule.lower, rule.upper)}"
            )


def _weight_bounds(weight: model.WeightConfig, cap: str, bound: str) -> Iterator[str]:
    """Warnings about a weight's bounds; `cap` and `bound` are the user's names of the two keys."""
    if not weight.record.has_ceiling:
        return
    if not weight.record.has_floor and weight.ceiling < 1:
        yield (
            f"{cap}: {weight.ceiling:g} caps the weight below 1 also where trainer and rollout engine agree, which "
            f"multiplies the loss there by {weight.ceiling:g}; a cap of TIS is above 1"
        )
    elif not holds(weight.floor, 1, weight.ceiling):
        effect = EFFECT[weight.record.outside]
        yield (
            f"{bound}: {weight.bound} {effect} what trainer and rollout engine agree on: there the ratio is 1, "
            f"which is outside {_interval(weight.floor, weight.ceiling)}"
        )
    if weight.ceiling > HIGHEST_CAP:
        yield (
            f"{cap}: {weight.ceiling:g} hardly ever acts, and one token or sequence may weigh as much as "
            f"{weight.ceiling:g} others; the largest cap of a preset is 5"
        )


def holds(lower: float | None, value: float, upper: float | None) -> bool:
    """Whether a value lies within bounds, of which None leaves a side open."""
    return (lower is None or lower <= value) and (upper is None or value <= upper)


def _interval(lower: float | None, upper: float | None) -> str:
    """An interval in words, with a bound that is not set left open."""
    return f"[{'-inf' if lower is None else f'{lower:g}'}, {'inf' if upper is None else f'{upper:g}'}]"


def _products(config: model.CorrectionConfig) -> list[str]:
    products = []
    if config.weight and config.weight.level in ("sequence", "segment"):
        products.append(f"weight.level: {config.weight.level}")
    products += [f"reject[{i}] with over: sum" for i, rule in enumerate(config.reject) if rule.multiplies]
    return [
        f"{what} multiplies the ratios of all tokens: {DRIFT} at each of {LONG} tokens is {DRIFT}^{LONG} = "
        f"{DRIFT**LONG:.2f}, and log ratios beyond +-20 look alike; mis_saturated_sequence_fraction tells how many. "
        "geometric (over: mean) does not grow with length"
        for what in products
    ]


def _weight(weight: model.WeightConfig | None, trainer: str) -> str:
    if weight is None:
        return "weight: none"
    within = f"[{weight.floor:g}, {weight.ceiling:g}]"
    where = f"in {within}" if weight.floor else f"up to {weight.ceiling:g}"
    bound = weight.record.words.format(upper=f"{weight.ceiling:g}", range=within, where=where)
    line, mean = f"weight: {LEVEL[weight.level]}, {trainer} / mu, {bound}", mean_of(weight)
    return f"{line}; divided by {mean}" if mean else line


def _normalization(weight: model.WeightConfig | None) -> list[str]:
    """Say what else changes the mean that weights are divided by, or recommend to normalize."""
    if weight is not None and weight.normalize is None:
        return [RECOMMENDED.format(level=weight.level)] if weight.by_sequence else []
    scope = weight and weight.normalize and weight.normalize.scope
    return [WHOSE_MEAN[scope]] if scope in WHOSE_MEAN else []


def _segment_wise(config: model.CorrectionConfig) -> list[str]:
    asked = config.segment_wise
    if config.segment_wise_on and asked is not None:
        too_old = f"; {TOO_OLD[asked.too_old]}" if asked.method == "recompute" else ""
        return [
            "segment_wise: v is the version that wrote the token; for pi_{v+1} stands, "
            f"{FRESH[asked.fresh_tokens]}, from age 2 on {OLDER[asked.method]}{too_old}; "
            f"{CLIP_AGAINST[asked.clip_against]}"
        ]
    if asked is not None:
        return ["segment_wise: off, whichever version wrote a token"]
    by_default = config.needs_loss_hook and config.weighs_behavior and config.group_baseline is None
    return [WHERE_KNOWN] if by_default else []


def _rule(rule: model.RejectRule, trainer: str) -> str:
    over = None if rule.record.factor is None else OVER_MULTIPLIED.get(rule.over)
    what = (over or OVER[rule.over]).format(unit=rule.unit, statistic=rule.record.words.format(trainer=trainer))
    bounds = [f"below {rule.lower:g}"] if rule.lower is not None else []
    bounds += [f"above {rule.upper:g}"] if rule.upper is not None else []
    outside = f"{what} is {' or '.join(bounds)}"
    if rule.down_weigh is not None:
        return f"down-weigh: {outside}: {rule.down_weigh:g} times their weight, and they stay in the loss mask"
    return f"reject: {outside}{AMONG[rule.aggregate]}"


def _opsm(opsm: model.OpsmConfig) -> str:
    unit = "tokens with a negative advantage" if opsm.advantage == "token" else "all tokens"
    whose = "" if opsm.advantage == "token" else " and a negative mean advantage"
    behind = "mu (pi_old where the rollout engine gave none)" if opsm.reference == "behavior" else "pi_old"
    return f"opsm: drops {unit} in sequences with mean(log {behind} - log pi_theta) above {opsm.delta:g}{whose}"


def _objective(objective: model.ObjectiveConfig, next_version: bool) -> str:
    old = "pi_{v+1}" if next_version else "mu" if objective.old == "behavior" else "pi_old"
    ratio = f"pi_theta / {old}" + ("" if objective.ratio == "token" else " (geometric mean over the sequence)")
    words = SURROGATES[objective.surrogate].words
    line = f"objective: {words.format(**vars(objective) | {'ratio': ratio})}"
    if objective.old == "behavior":
        line += "; weight and rules look at pi_theta / mu too (bypass)"
    if objective.kl_tau:
        line += f"; a penalty of {objective.kl_tau:g} times the square of log pi_theta - log {old}"
    if objective.unbiased_kl:
        line += f"; the KL term times pi_theta / {old}"
    return line + ("; the KL term weighted and dropped like the loss" if objective.weigh_kl else "")


def _consequences(config: model.CorrectionConfig) -> list[str]:
    return [
        f"denominator: a sequence's loss is divided by {_denominator(config)}",
        f"all rejected: a micro-batch of which nothing is kept {ALL_REJECTED[config.on_all_rejected]}, and says so",
        f"keep floor: warns where a step keeps less than {config.keep_floor:.0%} of its tokens",
    ]


def _denominator(config: model.CorrectionConfig) -> str:
    if config.denominator == "original":
        return "the tokens before rejection"
    if not config.needs_loss_hook:
        return (
            "the kept tokens: by the TIS hook in the policy term alone, while KL and entropy stay divided by the "
            f"tokens before rejection; by the loss hook ({LOSS_HOOK}) in KL and entropy too"
        )
    dropped = "; what OPSM drops counts in the policy term alone" if config.opsm else ""
    return f"the kept tokens, in KL and entropy too{dropped}"
