"""Which share of a host's average of an optimizer step trains, counted in the rollout batch before the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mis_plugins.hosts import tracking
from mis_plugins.hosts.reducer import valid_tokens
from mis_plugins.packing.collectives import all_reduce
from mis_plugins.packing.ragged import Ranks, to_device

ROLLOUTS = ("global_batch_sizes", "num_rollouts")  # of each step: slime's key, and Miles's


@dataclass(frozen=True)
class Counted:
    """The host's mean of a metric that is 1 at every token, for each optimizer step of a rollout."""

    rollout_id: int
    shares: Float[Tensor, " steps"]

    def share(self, step: tuple[int, int] | None) -> Float[Tensor, ""] | None:
        """Share of the step that trains now; None where a rollout has several and nothing says which.

        A rollout may have more steps than the host's arguments promise, and its further steps have no known share.
        """
        if len(self.shares) == 1:
            return self.shares[0]
        if step is None or step[0] != self.rollout_id:
            return None
        return self.shares[step[1]] if step[1] < len(self.shares) else None


def count(args: Any, rollout_id: int, data: Mapping[str, Any], ranks: Ranks) -> Counted:
    """Share of each step's average that trains: one small sum over data-parallel ranks, without waiting.

    A rollout counts once, however many samples, ranks and micro-batches hold its tokens. Where the host does
    not tell how many rollouts a step has, each sample counts as one.
    """
    masks = data["loss_masks"]
    step_of_sample, steps = _schedule(args, data)
    valid = valid_tokens(torch.cat(list(masks)), [mask.numel() for mask in masks])
    per_token = getattr(args, "calculate_per_token_loss", False)
    divided_by = valid.clamp(min=1)
    of_rollout = data.get("rollout_mask_sums")
    parts = valid if per_token else valid / (divided_by if of_rollout is None else of_rollout.clamp(min=1))
    rows = torch.stack([parts, divided_by if per_token else torch.ones_like(valid)])
    sums = rows.new_zeros(2, steps).index_add_(1, to_device(step_of_sample, rows.device), rows)
    if ranks.dp is not None:
        all_reduce(sums, ranks.dp)
    trained, whole = sums.unbind()
    rollouts = [data[name] for name in ROLLOUTS if name in data]
    if rollouts and not per_token:
        whole = to_device(list(rollouts[0]), rows.device)
    return Counted(rollout_id, torch.where(trained > 0, trained / whole, 1))


def _schedule(args: Any, data: Mapping[str, Any]) -> tuple[list[int], int]:
    """Step of each sample of this rank, and the number of steps; equal parts in order where no schedule is handed."""
    per_step: Sequence[int] | None = data.get("num_microbatches")
    samples = len(data["loss_masks"])
    if per_step is None:
        steps = tracking.steps_per_rollout(args)
        return [i * steps // samples for i in range(samples)], steps
    of_micro_batch = [step for step, number in enumerate(per_step) for _ in range(number)]
    placed = zip(of_micro_batch, data["micro_batch_indices"], strict=True)
    step_of = {sample: step for step, samples_of in placed for sample in samples_of}
    return [step_of[i] for i in range(samples)], len(per_step)
