"""Our plugin inside vLLM's processes, which vLLM finds by its entry point group `vllm.general_plugins`.

vLLM's CPU build computes in its own compiled kernels: products in oneDNN, attention and RoPE in C++. The plugin puts
torch's operators in their place, which the pinned kernels override. Without a contract in the environment the plugin
does nothing.
"""

import hmac
import os
import pkgutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from true_on_policy.engines.handover import ASKED, FORKS, KEY, asked_for, is_set, ordered_norm, pin_as_asked, texts_of

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
PATH, METHOD = "/collective_rpc", "true_on_policy_weights"  # of the server; of each worker, for `weights_told`


def activate() -> None:
    """Replace what vLLM computes in its own kernels; vLLM calls this function early in each process."""
    if is_set(ASKED):
        setattr(pkgutil.resolve_name("vllm.v1.worker.worker_base:WorkerBase"), METHOD, weights_told)  # 0.32.0
    if is_set(FORKS):
        _fork()
    if not asked_for():
        return
    import vllm._custom_ops as custom_ops  # pyright: ignore[reportMissingImports]
    import vllm.model_executor.layers.utils as products  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.layers.layernorm import RMSNorm  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding  # pyright: ignore[reportMissingImports]
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl  # pyright: ignore[reportMissingImports]
    from vllm.v1.worker.cpu_worker import CPUWorker  # pyright: ignore[reportMissingImports]

    custom_ops._supports_onednn = False  # vLLM then calls torch.nn.functional.linear
    products.check_cpu_sgl_kernel = lambda *_: False  # nor SGLang's packed products, where a CPU has AMX
    CPUAttentionBackendImpl.forward = _attend
    CPUAttentionBackendImpl.do_kv_cache_update = _store
    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native
    RMSNorm.forward_native = ordered_norm()
    CPUWorker.load_model = _pinned(CPUWorker.load_model)


def _fork() -> None:
    """Let vLLM fork its processes on CPU: each one that it spawns imports vLLM anew, for 7 s of a processor."""
    from vllm.platforms.cpu import CpuPlatform  # pyright: ignore[reportMissingImports]

    update = CpuPlatform.check_and_update_config

    def then_fork(vllm_config: Any) -> None:
        update(vllm_config)  # sets spawn
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(then_fork)


def _pinned(load_model):
    """Wrap the worker's load_model so that it pins first: the worker alone runs the model."""

    def load(self, *args, **kwargs):
        pin_as_asked()
        return load_model(self, *args, **kwargs)

    return load


def _store(self, layer, key, value, kv_cache, slot_mapping):
    """Store keys and values of the new tokens side by side in `kv_cache` [blocks, heads, slots, 2 head_size]."""
    import torch

    block, slot = slot_mapping // kv_cache.shape[2], slot_mapping % kv_cache.shape[2]
    kv_cache[block, :, slot] = torch.cat((key, value), -1)


def _attend(self, layer, query, key, value, kv_cache, attn_metadata, output, *unused, **unused_too):
    """Attend with each sequence's new queries over all its keys, by torch's SDPA."""
    import torch
    import torch.nn.functional as F

    if attn_metadata is None:  # a warm-up
        return output
    starts = attn_metadata.query_start_loc.tolist()
    for row, length in enumerate(attn_metadata.seq_lens.tolist()):
        queries = query[starts[row] : starts[row + 1]].transpose(0, 1)
        new = queries.shape[1]
        blocks = attn_metadata.block_table[row, : -(-length // kv_cache.shape[2])]
        cached = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length]
        keys, values = cached.split(self.head_size, -1)
        seen = torch.ones(new, length, dtype=torch.bool).tril(length - new)
        mixed = F.scaled_dot_product_attention(
            queries[None], keys[None], values[None], seen, scale=self.scale, enable_gqa=True
        )
        target = output[starts[row] : starts[row + 1]]
        target.copy_(mixed[0].transpose(0, 1).reshape(target.shape))
    return output


def weights_told(worker: Any, action: str, names: Sequence[str]) -> dict[str, Any]:
    """Answer one of our two actions for the parameters of one worker, in the form of SGLang's checksum.

    A weight that vLLM has packed for a CPU's kernels, and emptied, is told with the dtype `packed_bfloat16`.
    """
    held = dict(worker.get_model().named_parameters(remove_duplicate=False))
    texts = texts_of(held, action, names)
    sizes, tensor = worker.parallel_config, worker.parallel_config.tensor_parallel_size
    place = {"tp_rank": worker.rank % tensor, "tp_size": tensor, "pp_size": sizes.pipeline_parallel_size,
             "dp_size": sizes.data_parallel_size}  # fmt: skip
    checksums = {name: text if held[name].numel() else f"packed_{text}" for name, text in texts.items()}
    return {"checksums": checksums, "parallelism_info": [place]}


def request(body: Mapping[str, Any]) -> dict[str, Any]:
    """Put a request for SGLang's weight checker into the form that vLLM's `/collective_rpc` takes."""
    return {"method": METHOD, "kwargs": {"action": body["action"], "names": body.get("skip_tensor_list", [])}}


def answer_as_sglang(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Put vLLM's answer, one entry a worker, into the form of SGLang's weight checker."""
    return {"ranks": answer["results"]}


class Guard:
    """ASGI middleware of vLLM's server, which answers 401 to every request without `Authorization: Bearer KEY`.

    vLLM's own `--api-key` leaves `/collective_rpc` and `/reset_prefix_cache` open, by which anybody on the machine
    could load other weights.
    """

    def __init__(self, app: Callable[[dict[str, Any], Receive, Send], Awaitable[None]]):
        self.app = app
        self._wanted = f"Bearer {os.environ[KEY]}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(given, self._wanted):
            await self.app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"the key of this server is asked for"})
