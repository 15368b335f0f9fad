"""Room `ranks`: random configs of the TIS hook on two and four real ranks, over gloo and Megatron's own groups.

The ranks' weights are the oracle's of the whole batch. What config, lengths and layout show raises alike on every rank.
In every third case one rank raises, dies or lags at a random meeting with the others: none of them waits longer than
the time-out of its group, and none answers otherwise than without the fault.
"""

from __future__ import annotations

import dataclasses
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import oracle
import torch
import torch.distributed as dist
from batches import Batch, configs, host_args
from faults import KINDS, Fault
from faults import judge as judge_fault
from hypothesis import strategies as st
from launch import run_ranks
from test_parallel import FORMATS, Case, check, correct_on_rank, host_kwargs, random_batch
from test_ranks_apart import PLACES, begun, same
from tolerances import DECISION

from mis_plugins import mis
from mis_plugins.errors import MisError

GRIDS = [(2, 1), (1, 2), (2, 2), (4, 1)]  # context-parallel and data-parallel sizes
SHRINKS = False  # a case starts ranks, and the answer that is wrong names its own
OFFERED = 12  # cases of one start of the ranks


@dataclasses.dataclass(frozen=True)
class Grid:
    """What one start of the ranks is asked.

    cut: for each case, whether its first loss masks are a token too long, which every rank can see.
    """

    cp: int
    dp: int
    asked: tuple[Case, ...]
    cut: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class Odd:
    """A place of `PLACES` where our hooks meet other ranks, and the fault of one rank there."""

    place: str
    fault: Fault


def cases() -> st.SearchStrategy[Grid | Odd]:
    return st.one_of(grids(), grids(), st.builds(Odd, st.sampled_from(list(PLACES)), faults()))


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    return Fault(draw(st.sampled_from(KINDS)), draw(st.integers(0, 3)), draw(st.integers(0, 9)))


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    cp, dp = draw(st.sampled_from(GRIDS))
    asked = []
    for _ in range(OFFERED):
        config: dict[str, Any] = draw(configs(draw(st.sampled_from(["micro_batch", "data_parallel"]))))
        config["metrics"] = "full"  # the oracle's, all of them
        if draw(st.integers(0, 3)) == 0:
            config["m2_threshold"] = draw(st.sampled_from([0.02, 0.1, 0.5]))
        seed = draw(st.integers(0, 2**20))
        batches = tuple(some_of(random_batch(seed + d), draw(st.integers(1, 7))) for d in range(dp))
        asked.append(Case(config, batches, draw(st.sampled_from(FORMATS))))
    return Grid(cp, dp, tuple(asked), tuple(draw(st.lists(st.booleans(), min_size=OFFERED, max_size=OFFERED))))


def some_of(batch: Batch, number: int) -> Batch:
    """Some of the sequences, so that data-parallel ranks hold unequally many; alone, one may be empty."""
    return batch.select([(3 * i + number) % 7 for i in range(number)])


def answered(case: Case, cp: int, cut: bool) -> Any:
    """The answer of this rank, or what its error says."""
    try:
        return correct_on_rank(case, cp, None) if not cut else said_of_a_long_mask(case, cp)
    except MisError as error:
        return str(error)


def said_of_a_long_mask(case: Case, cp: int) -> Any:
    """What the hook makes of a first loss mask that is a token too long on every rank."""
    rank = dist.get_rank()
    kwargs, _ = host_kwargs(case, case.batches[rank // cp], cp, rank % cp, None)
    first = kwargs["loss_masks"][0]
    masks = [torch.cat([first, first.new_ones(1)]), *kwargs["loss_masks"][1:]]
    args = host_args(mis=case.config, qkv_format=case.qkv_format)
    return mis.compute_mis_weights_with_cp(args, **(kwargs | {"loss_masks": masks}))


@cache
def healthy(place: str) -> tuple[Any, ...]:
    """The answers of the ranks without a fault."""
    answers = tuple(one.answer for one in begun(place, Fault()).ended() if one is not None)
    assert answers, f"{place}: no rank answers without a fault either"
    return answers


def judge_odd(odd: Odd) -> str:
    answers = healthy(odd.place)
    fault = dataclasses.replace(odd.fault, rank=odd.fault.rank % len(answers))
    return f"{fault.kind}, others {judge_fault(fault, begun(odd.place, fault).ended(), answers, same)}"


def judge(grid: Grid | Odd) -> str | list[str]:
    """The answer of ranks with a fault, or the answers to each case of one start of the ranks."""
    if isinstance(grid, Odd):
        return judge_odd(grid)
    clear = [
        oracle.correct(case.batches[d].samples, case.config).margin > DECISION and case.expected(d).margin > DECISION
        for case in grid.asked for d in range(grid.dp)
    ]  # fmt: skip
    by_case = [all(clear[i * grid.dp : (i + 1) * grid.dp]) for i in range(len(grid.asked))]

    def work(rank: int) -> list[Any]:
        return [answered(case, grid.cp, cut) for case, cut in zip(grid.asked, grid.cut, strict=True)]

    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(grid.cp * grid.dp, grid.cp, work, Path(folder), limit_s=300.0)
    for number, cut in enumerate(grid.cut):
        said = [rank[number] for rank in found]
        are_errors = [isinstance(one, str) for one in said]
        assert all(are_errors) or not any(are_errors), f"case {number}: some ranks raise alone: {said}"
        assert not cut or all(are_errors), f"case {number}: a loss mask too long passes"
    answers = ["our error" if isinstance(one, str) else "right" if sure else "unclear"
               for one, sure in zip(found[0], by_case, strict=True)]  # fmt: skip
    kept = [i for i, answer in enumerate(answers) if answer == "right"]
    check([grid.asked[i] for i in kept], [[rank[i] for i in kept] for rank in found], grid.cp, grid.dp)
    return answers
