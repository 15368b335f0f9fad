"""TRL 1.16.0: the GRPO trainer's file, imported without the data libraries that hold its prompts.

The importance ratio and its metrics are two `if` statements in the middle of a method that samples and scores. Their
source is taken from the installed file while the tests run, and executed with the names that the method would hold.
The loss is the trainer's own method on a bare instance, for which a model's log-probs are given.

DPPO is of 1.8.0, which `peers-earlier.txt` pins: the last release with `trl.experimental.dppo` (trl#6402).
"""

import ast
import functools
import inspect
import textwrap
from collections import defaultdict
from types import CodeType, SimpleNamespace
from typing import Any

import torch
import yaml
from torch import Tensor

from mis_plugins.explain.translate import trl as from_trl
from mis_plugins.loss.objective import DPPO_CAP, Clip
from peers.loading import Peer, bare, defaults, load
from peers.rows import Rows

ABSENT = ("pandas", "datasets", "pyarrow", "psutil")
TRAINER = Peer("trl.trainer.grpo_trainer", absent=ABSENT)
GMPO = Peer("trl.experimental.gmpo.gmpo_trainer", absent=ABSENT)
DPPO = Peer("trl.experimental.dppo.dppo_trainer", absent=ABSENT, earlier=True)
KEYS = (from_trl.MODE, from_trl.CLIP_MAX, from_trl.CLIP_MIN)
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
CORRECTS = "self.use_vllm and self.vllm_importance_sampling_correction"


def trainer_class() -> Any:
    return load(TRAINER).GRPOTrainer


@functools.cache
def correction_blocks() -> CodeType:
    """The statements of `_generate_and_score_completions` that make the importance ratio and its metrics."""
    method = trainer_class()._generate_and_score_completions
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == CORRECTS]
    blocks = sorted(blocks, key=lambda node: node.lineno)[:2]
    return compile(ast.Module(body=list(blocks), type_ignores=[]), inspect.getfile(method), "exec")


def correction(
    batch: Rows, mode: str, upper: float | None = 3.0, lower: float | None = None
) -> tuple[Tensor, dict[str, float]]:
    """(importance ratio, `[N, L]` or of a sequence `[N, 1]`; metrics)."""
    trainer = bare_trainer(
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=upper,
        vllm_importance_sampling_clip_min=lower,
    )
    names = {
        "self": trainer,
        "old_per_token_logps": batch.proximal,
        "sampling_per_token_logps": batch.behavior,
        "completion_mask": batch.mask,
        "tool_mask": None,
        "device": "cpu",
        "mode": "train",
    }
    scope = vars(load(TRAINER)) | names
    exec(correction_blocks(), scope)
    return scope["vllm_importance_sampling_ratio"], {k: v[-1] for k, v in trainer._metrics["train"].items()}


def bare_trainer(kind: Any = None, **settings: Any) -> Any:
    """An instance that was never initialized, with what the methods read; of `kind`, or the GRPO trainer."""
    same = lambda x, **_: x  # noqa: E731
    state = dict(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        accelerator=SimpleNamespace(
            gather=same, gather_for_metrics=same, reduce=same, num_processes=1, sync_gradients=True
        ),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        args=SimpleNamespace(**grpo_defaults() | {"use_bias_correction_kl": False, "steps_per_generation": 1}),
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=0.28,
        loss_type="grpo",
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
    )
    return bare(kind or trainer_class(), **state | settings)


def grpo_defaults() -> dict[str, Any]:
    """What its `GRPOConfig` sets where the user sets nothing."""
    return defaults(load(TRAINER).GRPOConfig)


def gmpo_loss(batch: Rows, target: Tensor, clip: Clip) -> Tensor:
    """GMPO's own `_compute_loss`, against the proximal policy: the mean over responses."""
    trainer = bare_trainer(load(GMPO).GMPOTrainer, epsilon_low=clip.low, epsilon_high=clip.high)
    return computed_loss(trainer, batch, target)


def off_policy_mask(batch: Rows, threshold: float) -> Tensor:
    """`[N, 1]`, 1 where the sequence is kept."""
    compute = trainer_class().get_off_policy_mask
    return compute(batch.advantages[:, None], batch.pad(batch.target), batch.behavior, batch.mask, threshold)


def loss(batch: Rows, target: Tensor, ratio: Tensor | None, reference: Tensor | None = None, **settings: Any) -> Tensor:
    """`_compute_loss` for these log-probs of pi_theta; the importance ratio is off where None."""
    trainer = bare_trainer(vllm_importance_sampling_correction=ratio is not None, **settings)
    return computed_loss(trainer, batch, target, ratio, reference)


def dppo_trainer(kind: str, clip: Clip) -> Any:
    """A bare trainer of DPPO, whose divergence is `binary_tv` or `binary_kl`."""
    return bare_trainer(
        load(DPPO).DPPOTrainer,
        divergence_type=kind,
        epsilon_low=clip.low,
        epsilon_high=clip.high,
        clip_ratio_c=clip.dual or DPPO_CAP,
    )


def dppo_mask(batch: Rows, kind: str, clip: Clip) -> Tensor:
    """`_compute_divergence_mask`, `[N, L]`: 1 where a valid token of the target policy keeps its gradient."""
    return dppo_trainer(kind, clip)._compute_divergence_mask(
        batch.pad(batch.target), batch.behavior, batch.advantages[:, None], batch.mask
    )


def dppo_loss(batch: Rows, target: Tensor, kind: str, clip: Clip) -> Tensor:
    """DPPO's own `_compute_loss`, against the rollout engine: the mean over all tokens."""
    return computed_loss(dppo_trainer(kind, clip), batch, target)


def computed_loss(
    trainer: Any, batch: Rows, target: Tensor, ratio: Tensor | None = None, reference: Tensor | None = None
) -> Tensor:
    """What the trainer's own method makes of the batch, given the model's log-probs."""
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (target, torch.zeros_like(target), None)
    ids = batch.mask.long()
    inputs = {
        "prompt_ids": ids[:, :0], "prompt_mask": ids[:, :0], "completion_ids": ids, "completion_mask": batch.mask,
        "advantages": batch.advantages, "old_per_token_logps": batch.proximal,
        "sampling_per_token_logps": batch.behavior, "importance_sampling_ratio": ratio,
        "ref_per_token_logps": reference, "num_items_in_batch": batch.mask.sum(),
    }  # fmt: skip
    return type(trainer)._compute_loss(trainer, None, inputs)


def metric_table(mode: str) -> dict[str, str]:
    """Their name of every metric, and ours."""
    of = "sequence_weight" if mode.startswith("sequence") else "weight"
    table = {f"sampling/importance_sampling_ratio/{x}": f"{of}_{x}" for x in ("min", "mean", "max")}
    return table | {f"sampling/sampling_logp_difference/{x}": f"log_prob_diff_abs_{x}" for x in ("mean", "max")}


def mapping_of(mode: str, upper: float | None = 3.0, lower: float | None = None) -> dict:
    """What `config from-trl` makes of a mode and its bounds."""
    keys = dict(zip(KEYS, (mode, upper, lower), strict=True))
    return dict(from_trl.translate(yaml.safe_dump({"use_vllm": True} | keys)).mis)
