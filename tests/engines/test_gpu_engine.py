"""The section `engine` of the session on a lent GPU, around a real SGLang: on the CPU, pinned by our plugin."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import pytest
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lab.gpu import engine, qwen3, sglang_server
from lab.gpu.dry_run import Cpu
from lab.gpu.machine import Cuda
from lab.gpu.plan import TINY
from lab.gpu.receipt import Result
from lab.gpu.sglang_server import STOCK, TARGET
from true_on_policy.contract.cpu import Contract
from true_on_policy.contract.families import Shape
from true_on_policy.engines.sglang.engine import SGLang
from true_on_policy.kernels.pin import pinned

pytestmark = pytest.mark.timeout(2400)  # each of three servers may take 600 s to start

CONTRACT = Contract(dtype="bf16")
PLAN = replace(TINY, model=Shape(128, 256, 2, 4, 2, 32, 320, tied=False), decoded=(4, 9, 12))


def on_cpu(checkpoint: Path, mode: str) -> SGLang:
    contract = None if mode == STOCK else CONTRACT
    return SGLang(checkpoint, "bf16", contract, target="fsdp" if mode == TARGET else None)


@pytest.fixture(scope="module")
def found() -> dict[str, Result]:
    """What the section finds, by title."""
    swapped = {"start": on_cpu, "kernels": partial(pinned, CONTRACT), "in_force": lambda: {"on": "CPU"}}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in swapped.items():
            patch.setattr(sglang_server, name, value)
        patch.setattr(qwen3, "flash_attention", sdpa_attention_forward)
        return {result.title: result for result in engine.engine(PLAN, cast(Cuda, Cpu()))}


def test_all_that_it_demands_holds_of_a_real_engine(found: dict[str, Result]):
    links = found["SGLang's on-policy target and its trainer"]
    assert links.holds and "0.5" in links.note
    tokens = (engine.UPDATES + 1) * sum(request.length for request in engine._requests(PLAN, 0))
    assert {row[0]: row[2] for row in links.rows} == {
        "trainer: alone == in one batch": tokens,
        "prefill == trainer": tokens,
        "decode == trainer, both in bf16": tokens,
    }
    assert found["SGLang, deterministic"].holds


@pytest.mark.parametrize("title", ["The same trainer on stock kernels", "SGLang, stock"])
def test_its_controls_differ(found: dict[str, Result], title: str):
    ((_, *counts),) = found[title].rows
    equal, of, *_ = cast(list[int], counts)
    assert found[title].holds is None and equal < 0.5 * of
