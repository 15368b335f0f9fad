"""ms-swift 4.6.0: the GRPO trainer's file with TRL behind it, without models, templates, rewards and data sets."""

from types import SimpleNamespace
from typing import Any

import torch
import yaml
from torch import Tensor

from mis_plugins.explain.translate.ms_swift import translate
from peers import trl, verl
from peers.loading import Peer, load
from peers.rows import Metric, Rows

ELSEWHERE = ("dataset", "rewards", "rl_core", "sequence_parallel", "template",
             "trainers", "utils", "rlhf_trainers.gkd_helpers", "rlhf_trainers.arguments",
             "rlhf_trainers.rollout_mixin", "rlhf_trainers.utils")  # fmt: skip
TRAINER = Peer(
    "swift.rlhf_trainers.grpo_trainer",
    bare=("swift", "swift.rlhf_trainers"),
    absent=("pandas", "datasets", "pyarrow", "psutil", *(f"swift.{name}" for name in ELSEWHERE)),
)
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def method(name: str) -> Any:
    """One of the trainer's own; an inherited one would be TRL's."""
    return vars(load(TRAINER).GRPOTrainer)[name]


def bare_trainer(**settings: Any) -> Any:
    """An instance that was never initialized, with what the methods read, of which TRL's trainer has the most."""
    state = dict(
        rollout_importance_sampling_mode=None,
        rollout_importance_sampling_threshold=2.0,
        disable_rollout_importance_sampling=False,
        log_rollout_offpolicy_metrics=False,
        off_policy_sequence_mask_delta=None,
        compute_entropy=False,
        overlong_filter=False,
        kl_in_reward=False,
        _has_teacher=False,
        sdar_loss_coef=0.0,
        chord_sft_iterator=None,
    )
    return trl.bare_trainer(load(TRAINER).GRPOTrainer, **state | settings)


def weights(batch: Rows, mode: str, threshold: float) -> Tensor:
    trainer = bare_trainer(rollout_importance_sampling_mode=mode, rollout_importance_sampling_threshold=threshold)
    return method("_apply_rollout_importance_sampling")(trainer, batch.log_ratio, batch.mask)


def off_policy_mask(batch: Rows, delta: float) -> Tensor:
    """`[N]`, true where the sequence is kept."""
    trainer = bare_trainer(off_policy_sequence_mask_delta=delta)
    compute = method("_compute_off_policy_sequence_mask")
    return compute(trainer, batch.pad(batch.target), batch.behavior, batch.mask, batch.advantages)


def mismatch_metrics(batch: Rows) -> dict[str, float]:
    found = method("_compute_rollout_offpolicy_metrics")(bare_trainer(), batch.proximal, batch.behavior, batch.mask)
    return {name: value.item() for name, value in found.items()}


def weight_metrics(batch: Rows, mode: str, threshold: float) -> dict[str, float]:
    trainer = bare_trainer(rollout_importance_sampling_mode=mode, rollout_importance_sampling_threshold=threshold)
    applied = weights(batch, mode, threshold)
    found = method("_compute_is_correction_metrics")(trainer, batch.log_ratio, applied, batch.mask)
    return {name: value.item() for name, value in found.items()}


def loss(batch: Rows, target: Tensor, reference: Tensor | None = None, **settings: Any) -> Tensor:
    """`_compute_loss_and_metrics` for these log-probs of pi_theta."""
    trainer = bare_trainer(**settings)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (target, None)
    given = SimpleNamespace(
        completion_mask=batch.mask.bool(), truncated_mask=torch.zeros(len(target)), seq_lengths=None,
        old_per_token_logps=batch.proximal, ref_per_token_logps=reference,
        rollout_per_token_logps=batch.behavior, teacher_per_token_logps=None,
        advantages=batch.token_advantages, num_items_in_batch=batch.mask.sum(),
    )  # fmt: skip
    return method("_compute_loss_and_metrics")(trainer, None, {}, given)[0]


# Their names, without `rollout_correction/`, and ours.
MISMATCH: dict[str, Metric] = verl.MISMATCH | {"chi2_seq": "chi2_geometric"}


def weight_table(mode: str) -> dict[str, Metric]:
    """The sequences that `sequence_mask` counts are rejected by a rule of ours, and not by the weight's bound."""
    clipped = "rule_1_unit_high_fraction" if mode == "sequence_mask" else "weight_high_fraction"
    return {"is_weight_mean": "applied_valid_mean", "ess": "ess_lifted", "clipped_frac": clipped}


def mapping_of(mode: str, threshold: float) -> dict:
    """What `config from-ms-swift` makes of a mode."""
    keys = {"rollout_importance_sampling_mode": mode, "rollout_importance_sampling_threshold": threshold}
    return dict(translate(yaml.safe_dump(keys)).mis)
