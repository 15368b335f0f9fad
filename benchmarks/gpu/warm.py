"""DeepGEMM compiles a kernel at its first call, for seconds each: all of the session's, beside its first sections.

What is compiled lies in DeepGEMM's cache on disk, where the later sections find it.
"""

from __future__ import annotations

from gpu.machine import Cuda
from gpu.plan import CONTRACT, Plan
from true_on_policy.kernels import deep_gemm, gpu
from true_on_policy.kernels.gpu_probes import drawing
from true_on_policy.kernels.probes import COLUMNS


def warm(plan: Plan, machine: Cuda) -> None:
    """Every product of the sections kernels and cost once."""
    if deep_gemm.version() is None:
        return
    draw = drawing(CONTRACT.dtype, machine.device)
    for inner, outer in gpu.shapes(CONTRACT).linear:
        for columns in {min(outer, COLUMNS), outer}:
            weight = draw(columns, inner)
            for rows in {*plan.rows, *plan.timed_rows}:
                deep_gemm.product(draw(rows, inner), weight)
