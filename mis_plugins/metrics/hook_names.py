"""The exact step metric for each hook metric whose mean in the host's log can be too low."""

from __future__ import annotations

BY_STEP: dict[str, str] = {
    "mis_kept_fraction": "`kept_fraction`, over tokens",
    "mis_kept_sequences_mb": "`kept_sequences`, which also counts a sequence as lost when token rules take all of it",
    "mis_ess_mb": "`ess`, of the whole step",
    "mis_ratio_max_mb": "`ratio_max`, of the whole step",
    "mis_ratio_min_mb": "`ratio_min`, of the whole step",
    "mis_weight_max_mb": "`weight_max`, before normalization",
    "mis_weight_min_mb": "`weight_min`, before normalization",
    "mis_nonfinite_train_mb": "`nonfinite_train_tokens`, their number in the step",
    "mis_nonfinite_rollout_mb": "`nonfinite_rollout_tokens`, their number in the step",
    "mis_saturated_fraction": "`saturated_tokens`, over tokens",
    "mis_saturated_sequence_fraction": "`saturated_sequences`, of the product",
    "mis_saturated_segment_fraction": "none",
    "mis_tis_zero_fraction_high": "`weight_high_fraction`",
    "mis_tis_zero_fraction_low": "`weight_low_fraction`",
    "mis_rs_mask_fraction_high_{i}": "`rule_{i}_high_fraction`, or `rule_{i}_unit_high_fraction` of units",
    "mis_rs_mask_fraction_low_{i}": "`rule_{i}_low_fraction`, or `rule_{i}_unit_low_fraction` of units",
    "mis_rs_catastrophic_seq_fraction_{i}": "`rule_{i}_unit_rejected_fraction`",
    "mis_rs_catastrophic_token_fraction_{i}": "none: of tokens, by a rule over sequences",
    "nonfinite_advantages": "`nonfinite_advantage_tokens`, their number in the step",
}
"""Names of a hook that Miles's `mis.py` lacks; `i` is 2 or more, the second rule of its kind and so on."""
