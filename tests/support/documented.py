"""What every preset must say, written a second time: verl's as the fields that its own class methods set."""

from mis_plugins.config.model import (
    BoundName,
    CorrectionConfig,
    Level,
    NormalizeConfig,
    ObjectiveConfig,
    OpsmConfig,
    RejectRule,
    RoutingConfig,
    SegmentWiseConfig,
    WeightConfig,
)


def weigh(
    level: Level, bound: BoundName, lower: float | None = None, upper: float | None = None, **more
) -> WeightConfig:
    return WeightConfig(level, bound, lower, upper, **more)


def truncated(upper: float, level: Level = "token", over: str | None = None) -> WeightConfig:
    normalize = None if over is None else NormalizeConfig("micro_batch", over)  # type: ignore[arg-type]
    return weigh(level, "truncate", upper=upper, normalize=normalize)


def zeroed(lower: float, upper: float, level: Level = "token") -> WeightConfig:
    return weigh(level, "zero", lower, upper)


def corrected(weight: WeightConfig | None, *rules: RejectRule, **more) -> CorrectionConfig:
    return CorrectionConfig(weight, rules, **more)


def mean_ratio(lower: float | None, upper: float) -> RejectRule:
    return RejectRule(over="mean", lower=lower, upper=upper)


NOTHING = CorrectionConfig()
RAW = weigh("token", "none")
MILES_GEOMETRIC = mean_ratio(0.99, 1.001)

DOCUMENTED = {
    "tis": corrected(truncated(2.0)),
    "cis": corrected(weigh("token", "clip", 0.5, 2.0)),
    "icepop": corrected(weigh("token", "mask", 0.5, 5.0)),
    "sequence": corrected(truncated(5.0, "sequence")),
    "geometric-rs": corrected(None, MILES_GEOMETRIC),
    "seq-mask-tis": corrected(RAW, mean_ratio(0.999, 1.002)),
    "dppo-tv": CorrectionConfig(objective=ObjectiveConfig("dppo_tv", "behavior")),
    "dppo-kl": CorrectionConfig(objective=ObjectiveConfig("dppo_kl", "behavior")),
    "sapo": CorrectionConfig(objective=ObjectiveConfig("sapo", tau_pos=1.0, tau_neg=1.05)),
    "areal-sapo": CorrectionConfig(objective=ObjectiveConfig("sapo", "behavior")),
    "vespo": CorrectionConfig(
        objective=ObjectiveConfig("vespo", "behavior", k_pos=2, lambda_pos=3, k_neg=3, lambda_neg=2)
    ),
    "gmpo": CorrectionConfig(objective=ObjectiveConfig("gmpo")),
    "prime-rl-dppo": CorrectionConfig(objective=ObjectiveConfig("dppo_tv", "behavior", kl_tau=1e-3)),
    "prime-rl-ipo": CorrectionConfig(objective=ObjectiveConfig("ipo", "behavior", kl_tau=1e-3)),
    "m2po": CorrectionConfig(m2_threshold=0.04),
    "opsm": CorrectionConfig(opsm=OpsmConfig(1e-4, "token", "behavior")),
    "segment-wise": CorrectionConfig(segment_wise=SegmentWiseConfig(weight_cap=5.0)),
    "metrics-only": NOTHING,
    "route": corrected(truncated(2.0), RejectRule("route", upper=0.5), routing=RoutingConfig("trainer")),
    "mis": corrected(
        truncated(2.0, over="valid"),
        RejectRule(over="token", lower=0.5, upper=2.0),
        RejectRule(over="min", lower=1e-4),
        metrics="full",
    ),
    "geometric-mis": corrected(truncated(2.0, over="kept"), MILES_GEOMETRIC),
    "geometric-mis-wide": corrected(truncated(2.0, over="valid"), mean_ratio(0.8, 1.25)),
    "miles-blog-dense-1": NOTHING,
    "miles-blog-dense-2": corrected(truncated(2.0)),
    "miles-blog-dense-3": corrected(truncated(2.0), MILES_GEOMETRIC),
    "miles-blog-dense-4": corrected(truncated(2.0, over="valid"), MILES_GEOMETRIC),
    "miles-blog-moe-1": corrected(truncated(2.0, over="valid"), MILES_GEOMETRIC),
    "miles-blog-moe-2": corrected(truncated(1.5, over="valid"), MILES_GEOMETRIC),
    "miles-blog-moe-3": corrected(truncated(1.5), MILES_GEOMETRIC),
    "miles-blog-moe-4": corrected(truncated(1.5)),
    "ms-swift-token-truncate": corrected(truncated(2.0)),
    "ms-swift-token-mask": corrected(zeroed(0.0, 2.0)),
    "ms-swift-sequence-truncate": corrected(truncated(2.0, "geometric")),
    "ms-swift-sequence-mask": corrected(RAW, mean_ratio(None, 2.0)),
    "ms-swift-sequence-mask-as-documented": corrected(zeroed(0.0, 2.0, "geometric")),
    "trl-token-truncate": corrected(truncated(3.0)),
    "trl-token-mask": corrected(zeroed(0.0, 3.0)),
    "trl-sequence-truncate": corrected(truncated(3.0, "sequence")),
    "trl-sequence-mask": corrected(zeroed(0.0, 3.0, "sequence")),
    "areal-rejection-sampling": corrected(weigh("token", "mask", 0.0, 5.0)),
    "areal-behav-imp-weight-cap": corrected(zeroed(0.0, 5.0)),
    "areal-behav-imp-weight-floor": corrected(zeroed(0.2, 5.0)),
    "skyrl-chain": corrected(
        truncated(2.0), RejectRule(over="min", lower=1e-4), RejectRule(over="max", upper=100.0), mean_ratio(0.99, 1.01)
    ),
    "roll-segment-filter": corrected(
        truncated(1.2, "segment_geometric"), RejectRule(over="mean", lower=0.8, upper=1.2, unit="segment")
    ),
    "nemo-rl-tis": corrected(truncated(2.0)),
    "nemo-rl-icepop": corrected(zeroed(0.5, 5.0)),
    "nemo-rl-seq-mask-tis": corrected(RAW, mean_ratio(0.999, 1.002)),
    "openrlhf-tis": corrected(weigh("token", "clip", 0.5, 5.0)),
    "openrlhf-icepop": corrected(zeroed(0.5, 5.0)),
    "openrlhf-seq-mask-tis": corrected(RAW, mean_ratio(0.5, 5.0)),
    "openrlhf-token-binary-kl": corrected(RAW, RejectRule("binary_kl", upper=5e-3)),
    "openrlhf-seq-binary-kl": corrected(RAW, RejectRule("binary_kl", "mean", upper=5e-3)),
    "miles-binary-kl": corrected(RAW, RejectRule("binary_kl", "mean", upper=5e-3)),
    "openrlhf-token-tv": corrected(RAW, RejectRule("abs_prob_diff", upper=0.05)),
    "openrlhf-seq-tv": corrected(RAW, RejectRule("abs_prob_diff", "mean", upper=0.05)),
}

# The fields of verl 0.9.1's RolloutCorrectionConfig, by the name of the class method that makes them.
GEO = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
K3 = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
NO_IS = {"rollout_is": None}
TOKEN_IS = {"rollout_is": "token", "rollout_is_threshold": 2.0}
SEQUENCE_IS = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
ICEPOP = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
PPO = {"bypass_mode": True, "loss_type": "ppo_clip"}
PG = {"bypass_mode": True, "loss_type": "reinforce"}
VERL = {
    "decoupled_token_is": TOKEN_IS,
    "decoupled_seq_is": SEQUENCE_IS,
    "decoupled_token_icepop": ICEPOP,
    "decoupled_seq_is_rs": SEQUENCE_IS | {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    "decoupled_geo_rs": NO_IS | GEO,
    "decoupled_geo_rs_seq_tis": SEQUENCE_IS | GEO,
    "decoupled_geo_rs_token_tis": TOKEN_IS | GEO,
    "decoupled_k3_rs": NO_IS | K3,
    "decoupled_k3_rs_seq_tis": SEQUENCE_IS | K3,
    "decoupled_k3_rs_token_tis": TOKEN_IS | K3,
    "bypass_ppo_clip": NO_IS | PPO,
    "bypass_ppo_clip_geo_rs": NO_IS | GEO | PPO,
    "bypass_ppo_clip_k3_rs": NO_IS | K3 | PPO,
    "bypass_pg_is": SEQUENCE_IS | PG,
    "bypass_pg_token_icepop": ICEPOP | PG,
    "bypass_pg_geo_rs": NO_IS | GEO | PG,
    "bypass_pg_geo_rs_seq_tis": SEQUENCE_IS | GEO | PG,
    "bypass_pg_geo_rs_token_tis": TOKEN_IS | GEO | PG,
    "disabled": NO_IS,
}
DEFAULTS = {
    "rollout_is": None, "rollout_is_threshold": 2.0, "rollout_rs": None, "rollout_rs_threshold": None,
    "bypass_mode": False, "loss_type": "ppo_clip", "rollout_is_batch_normalize": False,
}  # fmt: skip
