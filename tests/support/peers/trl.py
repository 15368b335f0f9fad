"""TRL 1.16.0: the GRPO trainer's file, imported without the data libraries that hold its prompts.

The importance ratio and its metrics are two `if` statements in the middle of a method that samples and scores. Their
source is taken from the installed file while the tests run, and executed with the names that the method would hold.
The loss is the trainer's own method on a bare instance, for which a model's log-probs are given.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import defaultdict
from types import CodeType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from peers.loading import Peer, load
from peers.rows import Rows

TRAINER = Peer("trl.trainer.grpo_trainer", absent=("pandas", "datasets", "pyarrow", "psutil"))
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
CORRECTS = "self.use_vllm and self.vllm_importance_sampling_correction"


def trainer_class() -> Any:
    return load(TRAINER).GRPOTrainer


def correction_blocks() -> CodeType:
    """The statements of `_generate_and_score_completions` that make the importance ratio and its metrics."""
    method = trainer_class()._generate_and_score_completions
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))
    blocks = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == CORRECTS
    ]
    blocks = sorted(blocks, key=lambda node: node.lineno)[:2]
    return compile(ast.Module(body=list(blocks), type_ignores=[]), inspect.getfile(method), "exec")


def correction(
    batch: Rows,
    mode: str,
    upper: float | None = 3.0,
    lower: float | None = None,
    behavior: Tensor | None = None,
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
        "sampling_per_token_logps": batch.behavior if behavior is None else behavior,
        "completion_mask": batch.mask,
        "tool_mask": None,
        "device": "cpu",
        "mode": "train",
    }
    scope = vars(load(TRAINER)) | names
    exec(correction_blocks(), scope)
    return scope["vllm_importance_sampling_ratio"], {k: v[-1] for k, v in trainer._metrics["train"].items()}


def bare_trainer(**settings: Any) -> Any:
    """An instance that was never initialized, with what the methods read."""
    trainer = object.__new__(trainer_class())
    same = lambda x, **_: x  # noqa: E731
    vars(trainer).update(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        accelerator=SimpleNamespace(gather=same, reduce=same, num_processes=1, sync_gradients=True),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
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
    vars(trainer).update(settings)
    return trainer


def off_policy_mask(batch: Rows, threshold: float, behavior: Tensor | None = None) -> Tensor:
    """`[N, 1]`, 1 where the sequence is kept."""
    compute = trainer_class().get_off_policy_mask
    mu = batch.behavior if behavior is None else behavior
    return compute(batch.advantages[:, None], batch.pad(batch.target), mu, batch.mask, threshold)


def loss(
    batch: Rows, target: Tensor, ratio: Tensor | None, reference: Tensor | None = None, **settings: Any
) -> Tensor:
    """`_compute_loss` for these log-probs of pi_theta; the importance ratio is off where None."""
    trainer = bare_trainer(vllm_importance_sampling_correction=ratio is not None, **settings)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (target, torch.zeros_like(target), None)
    ids = batch.mask.long()
    inputs = {
        "prompt_ids": ids[:, :0], "prompt_mask": ids[:, :0], "completion_ids": ids, "completion_mask": batch.mask,
        "advantages": batch.advantages, "old_per_token_logps": batch.proximal,
        "sampling_per_token_logps": batch.behavior, "importance_sampling_ratio": ratio,
        "ref_per_token_logps": reference, "num_items_in_batch": batch.mask.sum(),
    }  # fmt: skip
    return trainer_class()._compute_loss(trainer, None, inputs)


def metric_table(mode: str) -> dict[str, str]:
    """Their name of every metric, and ours."""
    of = "sequence_weight" if mode.startswith("sequence") else "weight"
    table = {f"sampling/importance_sampling_ratio/{x}": f"{of}_{x}" for x in ("min", "mean", "max")}
    return table | {
        f"sampling/sampling_logp_difference/{x}": f"log_prob_diff_abs_{x}" for x in ("mean", "max")
    }


def file_of(mode: str) -> str:
    """Our preset of the mode's defaults."""
    return f"trl-{mode.replace('_', '-')}"


def mapping_of(mode: str, upper: float | None = 3.0, lower: float | None = None) -> dict:
    """Our words for a mode: sequences by the product; `mask` sets the weight to 0 and leaves the loss mask."""
    level, action = mode.split("_")
    if action == "mask":
        return {"weight": {"level": level, "bound": "zero", "upper": upper, "lower": lower or 0.0}}
    bound = {"bound": "truncate"} if lower is None else {"bound": "clip", "lower": lower}
    return {"weight": {"level": level, "upper": upper, **bound}}
