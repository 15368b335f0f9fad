"""On a CUDA device: the same probes, the real kernels, Qwen3-4B's shapes. `pytest -m gpu` runs these alone.

They passed on an H100 (`docs/receipts.md`).
"""

import pytest
import torch

from true_on_policy.contract.gpu import GpuContract, model_contract
from true_on_policy.kernels import gpu, mode
from true_on_policy.kernels.mode import holder
from true_on_policy.kernels.pin import active_backend, pinned
from true_on_policy.kernels.probes import aten_failures

pytestmark = pytest.mark.gpu

CONTRACTS = {
    "megatron": model_contract("qwen3-4B", "megatron", trainer_tp=8, engine_tp=8),
    "fsdp": model_contract("qwen3-4B", "fsdp"),
}
OWNER = {"megatron": "megatron", "sglang": "fsdp", "deep_gemm": "fsdp", "flash_attention": "megatron"}


def holders() -> list[str | None]:
    return [holder(name, "CUDA") for name in mode.OVERRIDABLE]


def needed(contract: GpuContract, *names: str) -> None:
    missing = [name for name in names if gpu.PROVIDERS[name].version() is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed beside this CUDA device")


def test_stock_products_depend_on_their_company():
    contract = CONTRACTS["fsdp"]
    where = torch.device("cuda")
    found = {failure.kernel for failure in aten_failures(contract.dtype, gpu.shapes(contract), where)}
    assert "linear" in found


@pytest.mark.parametrize("name", OWNER)
def test_a_provider_holds_and_is_undone(name: str):
    contract = CONTRACTS[OWNER[name]]
    needed(contract, name)
    provider, before = gpu.PROVIDERS[name], holders()
    undo = provider.pin(contract)
    try:
        assert list(map(str, provider.probe(contract, gpu.shapes(contract)))) == []
    finally:
        undo()
    assert holders() == before


@pytest.mark.parametrize("backend", CONTRACTS)
def test_a_contract_holds_and_is_undone(backend: str):
    contract, before = CONTRACTS[backend], holders()
    needed(contract, *(provider.NAME for provider in gpu.providers(contract)))
    with pinned(contract):
        assert active_backend() == gpu.name(contract)
    assert holders() == before
