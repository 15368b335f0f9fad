"""Pin a GPU contract in the trainer: a batch-invariant mode, a library of products, attention, and no TF32."""

from collections.abc import Iterator
from contextlib import ExitStack
from types import ModuleType

import torch.nn.functional as F

from true_on_policy.contract.cpu import Shapes
from true_on_policy.contract.gpu import MODELS, GpuContract, Size
from true_on_policy.errors import PinError, ProbeError
from true_on_policy.kernels import deep_gemm, flash_attention, megatron, precision, sglang
from true_on_policy.kernels.probes import Failure, Product
from true_on_policy.kernels.provider import Undo, device

PROVIDERS = {provider.NAME: provider for provider in (megatron, sglang, deep_gemm, flash_attention)}
# The sizes at which kernels are probed where a contract names no model.
PROBED: Size = MODELS["qwen3-4B"][1]


def name(contract: GpuContract) -> str:
    """Join the providers of a contract into one word: two contracts with one name pin equal kernels."""
    return "+".join(provider.NAME for provider in providers(contract))


def providers(contract: GpuContract) -> tuple[ModuleType, ...]:
    """List the providers that the trainer pins for a contract, in the order of pinning."""
    names = [contract.mode]
    if contract.trainer_gemm == "deep_gemm":
        names.append("deep_gemm")
    if contract.attention == "fa3":
        names.append("flash_attention")
    return tuple(PROVIDERS[name] for name in names)


def install(contract: GpuContract) -> Undo:
    """Pin every provider of a contract or none, and return the undo; raises PinError for a provider that cannot."""
    missing = [provider.NAME for provider in providers(contract) if provider.version() is None]
    if missing:
        instead = ", or launch with what `flags --gemm triton_persistent` prints" * ("deep_gemm" in missing)
        raise PinError(
            f"contract.backend: {contract.backend!r} pins {name(contract)}, but {', '.join(missing)} is not installed; "
            f"install it{instead}"
        )
    with ExitStack() as stack:
        stack.callback(precision.pin())
        for provider in providers(contract):
            stack.callback(provider.pin(contract))
        return stack.pop_all().close


def observe(contract: GpuContract) -> dict[str, str]:
    """Read the settings in force now: of TF32, and of each provider that a contract pins."""
    return precision.settings() | {
        f"{provider.NAME}: {key}": value
        for provider in providers(contract)
        for key, value in provider.settings().items()
    }


def failures(contract: GpuContract) -> Iterator[Failure]:
    """Probe every pinned kernel at the shapes of the contract's model, and yield each row whose bits change."""
    for provider in providers(contract):
        yield from provider.probe(contract, shapes(contract))
    yield from precision.probe(device())


def probe(contract: GpuContract) -> None:
    """Probe every pinned kernel; raises ProbeError where a row has other bits in a batch than alone."""
    failure = next(failures(contract), None)
    if failure is not None:
        raise ProbeError(f"contract.backend: {contract.backend!r} does not hold: {failure}")


def products(size: Size, o: Product, down: Product) -> Iterator[tuple[int, int, Product]]:
    """Yield K, N and the function of each product of a model; tensor parallelism cuts the K of o and down."""
    row_parallel = {1: o, 3: down}
    for place, (inner, outer) in enumerate(Shapes.of(size).linear):
        yield inner, outer, row_parallel.get(place, F.linear)


def shapes(contract: GpuContract) -> Shapes:
    """Return the shapes of one tensor-parallel rank of the trainer."""
    return Shapes.of(contract.size or PROBED, contract.trainer_tp)
