"""Room `routes`: recorded experts of every kind beside a router's own, against counts that Python makes row by row.

A case is one micro-batch of one layer, whose rows context-parallel and sequence-parallel ranks hold in parts.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st

from mis_plugins.routing.choice import compare, selection_scores, strange_at_random
from mis_plugins.routing.placement import POSITIONS, Grid, placement
from mis_plugins.routing.table import KINDS, Passed, faulty_layers

SHAPES = ((4, 1, None, None), (8, 2, None, None), (16, 4, None, None), (8, 2, 4, 2), (16, 4, 4, 2), (12, 3, 4, 1))
GRIDS = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2))
CHUNKS = (1, 1, 1, 2, 2, 9, 9, 40, 600)  # rows of a chunk of a sequence
CLOSE = 1e-5  # gates this near are chosen by rounding
RECORDED = ("own", "own", "own", "other", "random", "padding", "twice", "beyond", "negative")
Sums = Counter[tuple[str, int]]


@dataclass(frozen=True)
class Row:
    """A token at a router: its place, its gates before the selection, and the experts that were recorded and used."""

    sequence: int
    position: int
    counted: bool
    logits: list[float]
    recorded: list[int]
    used: list[int]


@dataclass(frozen=True)
class Case:
    """A router, the rows that it routes over all ranks, and how ranks share the rows."""

    router: Any
    experts: int
    rows: list[Row]
    lengths: list[int]
    grid: tuple[int, int]
    contiguous: bool
    replays: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    experts, topk, groups, chosen = draw(st.sampled_from(SHAPES))
    rng = random.Random(draw(st.integers(0, 2**32)))
    score = draw(st.sampled_from(["softmax", "sigmoid"]))
    bias = [rng.gauss(0, 0.1) for _ in range(experts)] if score == "sigmoid" and draw(st.booleans()) else None
    config = SimpleNamespace(
        moe_router_group_topk=chosen, moe_router_num_groups=groups, moe_router_pre_softmax=draw(st.booleans())
    )
    made = None if bias is None else torch.tensor(bias)
    router = SimpleNamespace(score_function=score, expert_bias=made, topk=topk, config=config)
    cp, sp = draw(st.sampled_from(GRIDS))
    lengths = [2 * cp * sp * n for n in draw(st.lists(st.sampled_from(CHUNKS), min_size=1, max_size=4))]
    kinds = draw(st.lists(st.sampled_from(RECORDED), min_size=1, max_size=4))
    rows = [
        _row(rng, router, experts, sequence, position, rng.choice(kinds))
        for sequence, length in enumerate(lengths)
        for position in range(length)
    ]
    return Case(router, experts, rows, lengths, (cp, sp), draw(st.booleans()), draw(st.booleans()))


def _row(rng: random.Random, router: Any, experts: int, sequence: int, position: int, kind: str) -> Row:
    logits = [rng.gauss(0, 2) for _ in range(experts)]
    own = _choice(router, logits)[0]
    rest = [expert for expert in range(experts) if expert not in own]
    recorded = {
        "own": own,
        "other": [*own[:-1], rng.choice(rest)],
        "random": rng.sample(range(experts), router.topk),
        "padding": [-1] * router.topk,
        "twice": [own[0]] * router.topk,
        "beyond": [*own[:-1], experts + 1],
        "negative": [own[0], *[-1] * (router.topk - 1)],
    }[kind]
    is_whole = len({*recorded}) == router.topk and all(0 <= expert < experts for expert in recorded)
    used = recorded if is_whole and rng.random() < 0.9 else own
    return Row(sequence, position, rng.random() < 0.7, logits, recorded, used)


def _choice(router: Any, logits: list[float]) -> tuple[list[int], float, float]:
    """The experts that the gates pick, the gap to the next one, and the least gap that decides, in float64."""
    total = sum(math.exp(x) for x in logits)
    gates = list(logits)
    if router.score_function == "sigmoid":
        bias = [0.0] * len(logits) if router.expert_bias is None else router.expert_bias.tolist()
        gates = [1 / (1 + math.exp(-x)) + b for x, b in zip(logits, bias, strict=True)]
    elif router.config.moe_router_pre_softmax:
        gates = [math.exp(x) / total for x in logits]
    open_to, gap_of_groups = [*range(len(gates))], math.inf
    if (chosen := router.config.moe_router_group_topk) is not None:
        size = len(gates) // router.config.moe_router_num_groups
        groups = [range(begin, begin + size) for begin in range(0, len(gates), size)]
        worth = [sum(sorted(gates[e] for e in group)[-(router.topk // chosen) :]) for group in groups]
        best = sorted(range(len(groups)), key=lambda g: -worth[g])
        gap_of_groups = worth[best[chosen - 1]] - worth[best[chosen]]
        open_to = [expert for g in best[:chosen] for expert in groups[g]]
    order = sorted(open_to, key=lambda e: -gates[e])
    margin = gates[order[router.topk - 1]] - gates[order[router.topk]] if len(order) > router.topk else 0.0
    decides = min(margin if len(order) > router.topk else math.inf, gap_of_groups)
    return order[: router.topk], margin, decides


def _expected(case: Case) -> tuple[Sums, set[str], bool]:
    """Sums by kind and bucket of positions, the faults of the layer, and whether every choice is clear."""
    sums, is_clear = Sums(), True
    for row in case.rows:
        own, margin, decides = _choice(case.router, row.logits)
        is_clear &= decides > CLOSE
        is_padding, topk = row.recorded[0] < 0, case.router.topk
        named = {min(max(expert, 0), case.experts - 1) for expert in row.recorded}  # so is a broken row counted
        shared = len(named & {*own})
        broken = len({*row.recorded}) < topk or not all(0 <= expert < case.experts for expert in row.recorded)
        differs = not is_padding and shared < topk
        facts = {
            "tokens": row.counted,
            "differs": row.counted and differs,
            "strange": row.counted and not is_padding and 2 * shared < topk,
            "margin": margin if row.counted and differs else 0.0,
            "rows": True,
            "unequal": not is_padding and case.replays and named != {*row.used},
            "broken": not is_padding and broken,
        }
        bucket = max(i for i, start in enumerate(POSITIONS) if start <= row.position)
        sums.update({(kind, bucket): value for kind, value in facts.items()})
    return sums, _faults(case, sums), is_clear


def _faults(case: Case, sums: Sums) -> set[str]:
    of = {kind: sum(sums[kind, bucket] for bucket in range(len(POSITIONS))) for kind in KINDS}
    faults = {kind for kind in ("unequal", "broken") if of[kind]}
    random_share = _strange_by_chance(case.experts, case.router.topk)
    return faults | ({"strange"} if of["tokens"] and of["strange"] / of["tokens"] > random_share / 2 else set())


@cache
def _strange_by_chance(experts: int, topk: int) -> float:
    """How many of all sets of experts share less than half with one of them."""
    sets = [*itertools.combinations(range(experts), topk)]
    return sum(2 * len({*chosen} & {*range(topk)}) < topk for chosen in sets) / len(sets)


def _held(case: Case, cp_rank: int) -> list[Row]:
    """The rows of one context-parallel rank: a piece of the stream, or of each sequence its two zigzag chunks."""
    cp = case.grid[0]
    if case.contiguous:
        size = len(case.rows) // cp
        return case.rows[cp_rank * size : (cp_rank + 1) * size]
    held = []
    for sequence, length in enumerate(case.lengths):
        rows = [row for row in case.rows if row.sequence == sequence]
        chunk = length // (2 * cp)
        for number in (cp_rank, 2 * cp - 1 - cp_rank):
            held += rows[number * chunk : (number + 1) * chunk]
    return held


def _counted_by(case: Case, cp_rank: int, sp_rank: int) -> torch.Tensor:
    """What the pack counts on one rank."""
    cp, sp = case.grid
    held = _held(case, cp_rank)
    bounds = torch.tensor([0, *itertools.accumulate(case.lengths)], dtype=torch.int32)
    mask = torch.tensor([[row.counted for row in held]])
    passed = Passed.begin(placement(mask, bounds, Grid(cp, cp_rank, sp, sp_rank, case.contiguous)), 1)
    size = len(held) // sp
    mine = held[sp_rank * size : (sp_rank + 1) * size]
    used = torch.zeros(size, case.experts, dtype=torch.bool)
    used.scatter_(1, torch.tensor([row.used for row in mine]), True)
    scores = selection_scores(case.router, torch.tensor([row.logits for row in mine]))
    recorded = torch.tensor([row.recorded for row in mine], dtype=torch.int32)
    table = torch.zeros(1, len(KINDS), len(POSITIONS), dtype=torch.float64)
    passed.add(0, table, compare(scores, recorded, used, case.replays))
    assert torch.allclose(passed.samples.sum(-1), table.sum(-1)), "sums of samples are not those of positions"
    return table


def judge(case: Case) -> str:
    """`right`, or `unclear` where rounding decides which experts a router picks."""
    expected, faults, is_clear = _expected(case)
    if not is_clear:
        return "unclear"
    cp, sp = case.grid
    table = torch.stack([_counted_by(case, *ranks) for ranks in itertools.product(range(cp), range(sp))]).sum(0)
    for kind, bucket in itertools.product(KINDS, range(len(POSITIONS))):
        found, value = table[0, KINDS.index(kind), bucket].item(), expected[kind, bucket]
        assert math.isclose(found, value, rel_tol=1e-4, abs_tol=1e-4 if kind == "margin" else 0), (kind, bucket, found)
    random_share = {0: strange_at_random(case.experts, case.router.topk)}
    assert {kind for _, kind in faulty_layers(table, random_share)} == faults, faults
    return "right"
