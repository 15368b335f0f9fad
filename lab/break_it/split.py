"""Room `split`: the cases of room `losses` on two real context-parallel ranks, whose logits lie zigzag or all-gathered.

Zigzag, each sequence is cut; with `--allgather-cp`, the stream of packed sequences is. The loss and the gradient of
every logit, added up over the ranks, are the oracle's of the whole micro-batch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import stand_ins
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from launch import run_ranks
from test_loss_hook import flags
from test_parallel import handed_state
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from lab.break_it import losses
from lab.host.train.batch import pack
from mis_plugins import mis
from mis_plugins.errors import MisError
from mis_plugins.packing.layout import Layout, zigzag

SHRINKS = False  # a case takes seconds, and the answer that is wrong names its own
CP = 2
ASKED = 12  # cases of one start of the ranks
CUT = "advantages", "log_probs", "rollout_log_probs", "ref_log_probs"
Asked = list[tuple[losses.Case, bool]]
"""Cases, and whether the host runs with `--allgather-cp`."""


def cases() -> st.SearchStrategy[Asked]:
    return st.lists(st.tuples(losses.cases(), st.booleans()), min_size=ASKED, max_size=ASKED)


def rows_of(batch: dict[str, Any], gathers: bool, rank: int) -> Tensor:
    """The row of the whole stream that each logit of this rank is; -1 where it is padding."""
    totals = torch.tensor(batch["total_lengths"])
    if gathers:
        share = -(-int(totals.sum()) // CP)
        rows = torch.arange(share) + rank * share
        return torch.where(rows < totals.sum(), rows, -1)
    layout = pack(batch["unconcat_tokens"], batch["response_lengths"], rank, CP)
    starts = totals.cumsum(0) - totals
    return torch.where(layout.positions < totals[layout.sequence], starts[layout.sequence] + layout.positions, -1)


def scores(rows: Tensor, layout: Layout, logits: Tensor, **given: Any) -> dict[str, list[Tensor]]:
    """The stand-in host's helper: the ranks' logits joined, scored as on one rank, and cut zigzag."""
    stream = logits.new_zeros(sum(given["total_lengths"]), losses.VOCABULARY)
    joined = all_reduce(stream.index_add(0, rows[rows >= 0], logits[0, rows >= 0]))
    return {name: layout.cut(x) for name, x in losses.scores(joined[None], **given).items()}


def reducer(batch: dict[str, Any], layout: Layout) -> Callable[[Tensor], Tensor]:
    """Miles's sum over sequences of the mean over the loss mask, of which each rank adds its tokens."""
    lengths = torch.tensor([max(1, int(mask.sum())) for mask in batch["loss_masks"]])
    weights = torch.cat(layout.cut([m / n for m, n in zip(batch["loss_masks"], lengths, strict=True)]))

    def sum_of_sample_mean(x: Tensor) -> Tensor:
        return (x * weights).sum()

    sum_of_sample_mean.__module__ = "miles.backends.cp_utils"
    return sum_of_sample_mean


def on_rank(case: losses.Case, gathers: bool, state: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]] | str:
    """The loss of this rank, its part of the gradient of the stream's logits, and metrics; or what an error says."""
    batch, stream = losses.handed(case, losses.made(case))
    layout = zigzag(batch["total_lengths"], batch["response_lengths"], CP, dist.get_rank())
    batch |= {name: layout.cut(batch[name]) for name in CUT}
    rows = rows_of(batch, gathers, dist.get_rank())
    logits = torch.where(rows[:, None] >= 0, stream[0, rows], 0.0)[None].requires_grad_()
    stand_ins.load({
        "miles.backends.training_utils.parallel": {"get_parallel_state": lambda: state},
        "miles.backends.training_utils.loss_hub.logit_processors": {
            "get_log_probs_and_entropy": partial(scores, rows, layout)
        },
    }, pytest.MonkeyPatch())  # fmt: skip
    args = flags(mis=case.mis, rollout_temperature=1.0, allgather_cp=gathers, **case.question.settings)
    try:
        loss, metrics = mis.policy_loss(args, batch, logits, reducer(batch, layout))
    except MisError as error:
        return str(error)
    (gradient,) = torch.autograd.grad(loss, logits)
    return loss.detach(), torch.zeros_like(stream[0]).index_add(0, rows[rows >= 0], gradient[0, rows >= 0]), metrics


def judge(asked: Asked) -> list[str]:
    """The answer to each case of one start of the ranks."""

    def work(rank: int) -> list[Any]:
        state = handed_state(CP)
        return [on_rank(case, gathers, state) for case, gathers in asked]

    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(CP, CP, work, Path(folder), limit_s=300.0, megatron=False)
    return [answer(case, said) for (case, _), said in zip(asked, zip(*found, strict=True), strict=True)]


def answer(case: losses.Case, said: tuple[Any, ...]) -> str:
    errors = [one for one in said if isinstance(one, str)]
    if errors:
        assert len(errors) == CP, f"a rank raises alone: {said}\n{case}"
        return "our error"
    parts, gradients, metrics = zip(*said, strict=True)
    logged = {f"{name} on rank {rank}": x for rank, one in enumerate(metrics) for name, x in one.items()}
    try:
        return losses.compared(
            case, losses.made(case), torch.stack(parts).sum(0), torch.stack(gradients).sum(0), logged
        )
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from error
