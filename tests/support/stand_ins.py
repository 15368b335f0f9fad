"""Modules that stand where a library or a host would: on disk, with their interfaces in torch, or in memory alone."""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Write = Callable[[Mapping[str, str]], None]

FLASH_ATTENTION = '''
"""FlashAttention-3's interface. A row is the sum of rounded tiles of 3 keys, or of two rounded parts if it is split.

Like upstream's, a call whose longest query is one token counts as one without a causal mask: its tiles are of 5 keys.
"""
import torch

def _attend(q, k, v, causal, num_splits, longest):
    heads, groups = q.shape[1], k.shape[1]
    k, v = (x.double().repeat_interleave(heads // groups, 1) for x in (k, v))
    out = []
    for i, row in enumerate(q.double()):
        seen = len(k) - len(q) + i + 1 if causal else len(k)
        scores = torch.stack([(row * key).sum(-1) for key in k[:seen]])
        weighted = (scores * q.shape[-1] ** -0.5).softmax(0)[..., None] * v[:seen]
        tile = 3 if causal and longest > 1 else 5
        parts = weighted.split(tile) if num_splits == 1 else weighted.tensor_split((seen // 2,))
        out.append(sum(part.sum(0).to(q.dtype) for part in parts))
    return torch.stack(out)

calls = []

def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False, num_splits=1):
    calls.append(num_splits)
    parts = [
        _attend(q[a:b], k[c:d], v[c:d], causal, num_splits, max_seqlen_q)
        for a, b, c, d in zip(cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, cu_seqlens_k[1:], strict=False)
    ]
    return torch.cat(parts)

def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, cu_seqlens_q=None, max_seqlen_q=None, causal=False,
    num_splits=0,
):
    calls.append(num_splits)
    if k is not None:
        for row, n in enumerate(cache_seqlens):
            k_cache[row, n : n + k.shape[1]], v_cache[row, n : n + v.shape[1]] = k[row], v[row]
        cache_seqlens = cache_seqlens + k.shape[1]
    queries, longest = list(q), q.shape[1]
    if cu_seqlens_q is not None:
        queries, longest = q.split(cu_seqlens_q.diff().tolist()), max_seqlen_q
    rows = zip(queries, k_cache, v_cache, cache_seqlens, strict=True)
    out = [_attend(query, k[:n], v[:n], causal, num_splits, longest) for query, k, v, n in rows]
    return torch.stack(out) if cu_seqlens_q is None else torch.cat(out), None

def flash_attn_combine(out_partial, lse_partial):
    raise AssertionError
'''

DEEP_GEMM = '''
"""DeepGEMM's bf16 products. Off, a row that is alone is the sum of two rounded parts, as cuBLASLt's split-K is."""
import torch

{switches}

def bf16_gemm_nt(a, b, d, c=None):
    if a.dtype != torch.bfloat16 or len(b) < 16:
        raise RuntimeError("shape or dtype")
    cut = a.shape[1] // 2 if len(a) == 1 and not ({on}) else 0
    terms = a.double()[:, None] * b.double()
    d.copy_(sum(part.sum(-1).to(d.dtype) for part in (terms[..., :cut], terms[..., cut:])))

def bf16_gemm_nn(a, b, d, c=None):
    bf16_gemm_nt(a, b.t(), d)
'''

SWITCH = """
state = {{"{getter}": {before}}}

def {setter}(on):
    state["{getter}"] = on

def {getter}():
    return state["{getter}"]
"""


def deep_gemm_source(*switches: tuple[str, str], before: bool = False) -> str:
    """The source of a DeepGEMM with these (setter, getter) pairs."""
    named = "".join(
        SWITCH.format(setter=s, getter=g, before=before).replace("state", f"state_{g}") for s, g in switches
    )
    on = " and ".join(f"{getter}()" for _, getter in switches) or "True"
    return DEEP_GEMM.format(switches=named, on=on)


def load(modules: Mapping[str, Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of these paths, and packages above them, hold these names until the test ends; nothing is on disk."""
    for path, names in modules.items():
        parts = path.split(".")
        for i in range(1, len(parts)):
            package = ".".join(parts[:i])
            monkeypatch.setitem(sys.modules, package, sys.modules.get(package) or ModuleType(package))
        module = ModuleType(path)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, path, module)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """write({"package/module.py": source}): modules that can be imported until the test ends."""
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)

    def add(sources: Mapping[str, str]) -> None:
        for name, source in sources.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            for folder in path.relative_to(tmp_path).parents[:-1]:
                (tmp_path / folder / "__init__.py").touch()
            path.write_text(source, encoding="utf-8")
        importlib.invalidate_caches()

    yield add
    for name in set(sys.modules) - known:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
