"""Room `weights`: configs of the TIS hook in any carrier of arguments, on hostile batches, against the oracle."""

from __future__ import annotations

import dataclasses
import math
from argparse import Namespace
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import oracle
import torch
from batches import Batch, batches, configs
from drive import Outcome, assert_matches_oracle, one_rank, spread
from hypothesis import strategies as st
from tolerances import DECISION, EPS

from lab.gpu.machine import moved
from mis_plugins import mis

DEVICE = torch.device("cpu")  # where the hook runs; the oracle stays on the CPU
ABSENT = [math.nan, math.inf, -math.inf, -9999.0, -1e4, -1e9, torch.finfo(torch.float32).min]
SPELLED = {"use_tis": True, "get_mismatch_metrics": False, "qkv_format": "thd"}


def frozen(said: Mapping[str, Any]) -> Any:
    return dataclasses.make_dataclass("Arguments", list(said), frozen=True)(**said)


def slotted(said: Mapping[str, Any]) -> Any:
    made = type("Arguments", (), {"__slots__": tuple(said)})()
    for name, value in said.items():
        setattr(made, name, value)
    return made


def within_a_hook(said: Mapping[str, Any]) -> Any:
    hook = {"path": "mis_plugins.mis.compute_mis_weights_with_cp", "config": {"mis": said["mis"]}}
    return Namespace(**{**said, "mis": None, "custom_tis_function_path": hook})


CARRIERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "namespace": lambda said: Namespace(**said),
    "simple": lambda said: SimpleNamespace(**said),
    "mapping": MappingProxyType,
    "frozen": frozen,
    "slots": slotted,
    "hook": within_a_hook,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the TIS hook."""

    config: dict[str, Any]
    carrier: str
    batch: Batch


@st.composite
def hostile_batches(draw: st.DrawFn) -> Batch:
    """A batch of `tests/support`, perhaps with absent log-probs anywhere, as views or in float64."""
    batch = draw(batches())
    sides = [[x.clone() for x in side] for side in (batch.proximal, batch.behavior)]
    for _ in range(draw(st.sampled_from([0, 0, 1, 2, 4]))):
        side = draw(st.sampled_from(sides))
        rows = [row for row in side if len(row)]
        if rows:
            row = draw(st.sampled_from(rows))
            row[draw(st.integers(0, len(row) - 1))] = draw(st.sampled_from(ABSENT))
    strided = [lambda x: x, lambda x: x.repeat_interleave(2)[::2], lambda x: x.double(), lambda x: x.requires_grad_()]
    views = [draw(st.sampled_from(strided)) for _ in sides]
    proximal, behavior = ([view(x) for x in side] for view, side in zip(views, sides, strict=True))
    if len({x.dtype for x in (*proximal, *behavior)}) > 1:
        proximal, behavior = ([x.to(torch.promote_types(proximal[0].dtype, behavior[0].dtype)) for x in side]
                              for side in (proximal, behavior))  # fmt: skip
    return dataclasses.replace(batch, proximal=proximal, behavior=behavior)


@st.composite
def configured(draw: st.DrawFn) -> tuple[dict[str, Any], str]:
    """A config, perhaps with M2PO, and what carries it."""
    config = draw(configs())
    if draw(st.integers(0, 3)) == 0:
        config["m2_threshold"] = draw(st.sampled_from([1e-3, 0.1, 0.5, 4.0]))
        config["denominator"] = draw(st.sampled_from(["original", "kept"]))
    return config, draw(st.sampled_from(sorted(CARRIERS)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    config, carrier = draw(configured())
    return Case(config, carrier, draw(hostile_batches()))


def judge(case: Case) -> str:
    """`right`, or `unclear` where rounding decides; an AssertionError where a weight or mask is not the oracle's."""
    kwargs = moved(case.batch.hook_kwargs(), DEVICE)
    args = CARRIERS[case.carrier](SPELLED | {"mis": case.config})
    loss, masks, metrics = mis.compute_mis_weights_with_cp(args, **kwargs, parallel_state=one_rank())
    weights = torch.autograd.grad(loss.sum(), kwargs["pg_loss"])[0].cpu()
    assert torch.isfinite(weights).all(), "a weight is not finite"
    finite = {name: torch.isfinite(value.cpu()[case.batch.flat_mask]).all() for name, value in metrics.items()}
    bad = [name for name in finite if not finite[name]]
    assert not bad, f"metrics not finite: {bad}"
    expected = oracle.correct(case.batch.samples, case.config)
    # The sum of a sequence's log ratios rounds by so much as they are large.
    if expected.margin <= DECISION + EPS * max(map(spread, case.batch.samples), default=0.0):
        return "unclear"
    lengths = case.batch.response_lengths
    outcome = Outcome(loss, list(weights.split(lengths)), list(masks), {})
    assert_matches_oracle(outcome, case.batch, expected, full=False)
    return "right"
