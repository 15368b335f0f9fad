"""The words and values of the GPU contract, which `gpu.yaml` holds, as records.

An operation is a row of the contract: what trainer and engine must share, and who provides each side's kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from true_on_policy.contract.families import IMAGES

TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("gpu.yaml").read_text(encoding="utf-8"))
REASONS: dict[str, str] = {**TABLE["reasons"], "images": "; ".join(IMAGES)}
PLUGIN = "miles_megatron_plugins/true_on_policy"  # in radixark/Megatron-LM


@dataclass(frozen=True)
class Operation:
    """An operation is one row of the contract.

    Attributes:
        bits: dtype and order of rounding, equal on both sides.
        trainer, engine: the kernel that runs on each side.
    """

    name: str
    bits: str
    trainer: str
    engine: str


def operations(
    backend: str, attention: str, trainer_gemm: str, engine_gemm: str, qk_norm: bool, qkv_bias: bool
) -> tuple[Operation, ...]:
    """List the operations of a contract in the order of a forward pass."""
    chosen = {
        "plugin": PLUGIN,
        "attention": TABLE["attentions"][attention],
        "trainer_gemm": TABLE["gemms"][trainer_gemm],
        "engine_gemm": TABLE["gemms"][engine_gemm],
        "bias": f", {TABLE['biases'][trainer_gemm]}" if qkv_bias else "",
    }
    return tuple(
        Operation(
            row["name"], *(_of(row[part], backend).format(**chosen) for part in ("bits", "trainer", "engine"))
        )
        for row in TABLE["operations"]
        if row.get("only", backend) == backend and (qk_norm or row["name"] != "q and k norm")
    )


def compiled(backend: str) -> Iterator[tuple[str, ...]]:
    """Yield (side, region, whether it is compiled) for each region that torch.compile could compile."""
    return (tuple(_of(cell, backend) for cell in row.values()) for row in TABLE["compiled"])


def _of(cell: str | dict[str, str], backend: str) -> str:
    return cell if isinstance(cell, str) else cell[backend]
