"""Our plugin inside vLLM's processes, by its own entry point group `vllm.general_plugins`.

vLLM's CPU build computes in compiled kernels of its own: products in oneDNN, attention and RoPE in C++. The plugin puts
torch's in their place, which the pinned kernels override. Without a contract in the environment it does nothing.
"""

from __future__ import annotations

from true_on_policy.engines.handover import asked_for, ordered_norm, pin_as_asked


def activate() -> None:
    """Replace what vLLM computes in its own kernels. Called by vLLM early in each of its processes."""
    if not asked_for():
        return
    import vllm._custom_ops as custom_ops  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.layers.layernorm import RMSNorm  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.layers.rotary_embedding.base import (  # pyright: ignore[reportMissingImports]
        RotaryEmbedding,
    )
    from vllm.v1.attention.backends.cpu_attn import (  # pyright: ignore[reportMissingImports]
        CPUAttentionBackendImpl,
    )
    from vllm.v1.worker.cpu_worker import CPUWorker  # pyright: ignore[reportMissingImports]

    custom_ops._supports_onednn = False  # what is left then is torch.nn.functional.linear
    CPUAttentionBackendImpl.forward = _attend
    CPUAttentionBackendImpl.do_kv_cache_update = _store
    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native
    RMSNorm.forward_native = ordered_norm()
    CPUWorker.load_model = _pinned(CPUWorker.load_model)


def _pinned(load_model):
    """The worker alone runs the model; vLLM's other processes stay as they are."""

    def load(self, *args, **kwargs):
        pin_as_asked()
        return load_model(self, *args, **kwargs)

    return load


def _store(self, layer, key, value, kv_cache, slot_mapping):
    """Keys and values of the new tokens, side by side: `kv_cache` is [blocks, heads, slots of a block, 2 head_size]."""
    import torch

    block, slot = slot_mapping // kv_cache.shape[2], slot_mapping % kv_cache.shape[2]
    kv_cache[block, :, slot] = torch.cat((key, value), -1)


def _attend(self, layer, query, key, value, kv_cache, attn_metadata, output, *unused, **unused_too):
    """Each sequence's new queries against all its keys, by torch's SDPA."""
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
