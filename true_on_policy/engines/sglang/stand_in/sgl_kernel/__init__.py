"""A stand-in by mis-plugins for SGLang's wheel of kernels, which exists for GPUs alone.

On a CPU without AMX SGLang computes with plain torch and only imports names from `sgl_kernel`. The stand-in holds the
two functions that SGLang calls there. Every other name is a stub that raises when it is called. The stand-in lacks the
operator `convert_weight_packed`, so that SGLang stays on plain torch where AMX exists, too.

SGLang's image processor of Qwen3-VL imports the module of Qwen3.5. At import, the module looks up four
operators that only its own layers call.
"""

from collections.abc import Callable

import torch
from torch import Tensor

LOW_32 = 0xFFFFFFFF


def assign_req_to_token_pool_cpu(
    requests: Tensor, req_to_token: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, _pool_len: int
) -> None:
    """Write the cache slots of each request's new tokens, which lie one after the other in `slots`, into its row."""
    taken = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        req_to_token[request, start:end] = slots[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def murmur_hash32_cpu(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Hash the seed's two words, position and column by MurmurHash3 (32 bits): `[N], [N], [V] -> [N, V]` in int64."""
    seed = seed.to(torch.int64)[:, None]
    state = _mix(torch.zeros_like(seed), seed & LOW_32)
    state = _mix(state, (seed >> 32) & LOW_32)
    state = _mix(state, positions.to(torch.int64)[:, None] & LOW_32)
    state = _mix(state, columns.to(torch.int64)[None])
    return _finish(state ^ 16)


def _mix(state: Tensor, word: Tensor) -> Tensor:
    word = _rotate((word * 0xCC9E2D51) & LOW_32, 15)
    state = _rotate(state ^ ((word * 0x1B873593) & LOW_32), 13)
    return (state * 5 + 0xE6546B64) & LOW_32


def _rotate(word: Tensor, bits: int) -> Tensor:
    return ((word << bits) | (word >> (32 - bits))) & LOW_32


def _finish(state: Tensor) -> Tensor:
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & LOW_32
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & LOW_32
    return state ^ (state >> 16)


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
_library.impl("murmur_hash32_cpu", murmur_hash32_cpu, "CPU")


def __getattr__(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name}: mis-plugins' stand-in for CPU does not hold the operator")

    return missing


for _operator in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    setattr(torch.ops.sgl_kernel, _operator, __getattr__(_operator))
