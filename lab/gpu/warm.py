"""Compile all DeepGEMM kernels of a session beside its first sections: a first call compiles for seconds.

DeepGEMM keeps compiled kernels in a cache on disk, where later sections find them.
"""

from __future__ import annotations

from lab.gpu.machine import Cuda
from lab.gpu.plan import CONTRACT, Plan
from true_on_policy.kernels import deep_gemm, gpu
from true_on_policy.kernels.gpu_probes import drawing
from true_on_policy.kernels.probes import COLUMNS


def warm(plan: Plan, machine: Cuda) -> None:
    """Multiply once by every product of the sections `kernels` and `cost`."""
    if deep_gemm.version() is None:
        return
    draw = drawing(CONTRACT.dtype, machine.device)
    for inner, outer in gpu.shapes(CONTRACT).linear:
        for columns in {min(outer, COLUMNS), outer}:
            weight = draw(columns, inner)
            for rows in {*plan.rows, *plan.timed_rows}:
                deep_gemm.product(draw(rows, inner), weight)
