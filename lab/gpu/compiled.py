"""Which functions of a layer keep their bits under torch.compile beside the pinned kernels? What does a step gain?"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lab.compiled_functions import Tried, compiled_where_equal, tried
from lab.gpu import qwen3
from lab.gpu.kernels import installed
from lab.gpu.machine import Cuda
from lab.gpu.plan import CONTRACT, Plan
from lab.gpu.receipt import Result, compared
from true_on_policy.contract.rounding import ORDERS
from true_on_policy.kernels import gpu
from true_on_policy.models import hf_decoder
from true_on_policy.verify.certificate import link

ORDER = ORDERS["sglang"]
COSTS = ("step", "compiled", "eager ms", "again ms", "compiled ms", "compiled / eager")


def compiled(plan: Plan, machine: Cuda) -> Iterator[Result]:
    with installed():
        found = list(tried(CONTRACT.dtype, gpu.shapes(CONTRACT), ORDER, machine.device))
        yield _functions(found)
        yield from _step(plan, machine, found)


def _functions(found: list[Tried]) -> Result:
    equal = sum(one.differs is None for one in found)
    rows = tuple((one.function, one.shape, one.differs or "", int(one.gradient_differs)) for one in found)
    columns = ("function", "widths, dtype", "first difference", "other gradients")
    note = f"{equal} of {len(found)} functions keep their bits, and nothing is demanded of the others."
    return Result("Functions of a layer, compiled against eager", columns, rows, note=note)


def _step(plan: Plan, machine: Cuda, found: list[Tried]) -> Iterator[Result]:
    """A training step, eager and with each function compiled that kept its bits; equal log-probs are demanded."""
    count, length = plan.batch
    network = qwen3.build(plan.timed_model, machine, "sdpa")
    hf_decoder.align(network, ORDER)
    tokens = torch.randint(plan.timed_model.size.vocab_size, (count, length), device=machine.device)

    def step() -> torch.Tensor:
        network.zero_grad()
        log_probs = qwen3.log_probs(network, tokens)
        log_probs.sum().backward()
        return log_probs.detach()

    eager, first = step(), machine.milliseconds(step)
    with compiled_where_equal(found) as names:
        fast, took = step(), machine.milliseconds(step)
    again, named = machine.milliseconds(step), " ".join(names)
    links = [link("compiled == eager", [*fast.cpu()], [*eager.cpu()])]
    yield compared("A step with compiled functions", links, demanded=bool(names))
    row = (f"{count} x {length} tokens", named or "nothing", first, again, took, 2 * took / (first + again))
    yield Result("Cost: a step with compiled functions", COSTS, (row,))
