"""The engines of `true_on_policy` that serve a training loop: how each is started for one, and what it can do there.

A record is read without torch, before any engine is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from true_on_policy.contract.cpu import Contract
    from true_on_policy.engines.protocol import Engine

CACHED_TOKENS = 1 << 16  # slots of the key-value cache
OWN_SERVER = "its server, in the environment that true_on_policy/engines/install.sh makes"


@dataclass(frozen=True)
class Serving:
    """The record of an engine that serves a training loop.

    start: (checkpoint, dtype, contract, running sequences) -> Engine; without a contract the engine is stock.
    words: a description of the engine for a help text.
    tells_weights: whether the server, as it is started here, tells its weights that returns weight digests.
    head_sizes: the sizes of an attention head that the engine's CPU kernels know; empty: any.
    cuts: whether the engine can sample by top-p and top-k, and return the tokens that they kept.
    """

    start: Callable[[Path, str, Contract | None, int], Engine]
    words: str = OWN_SERVER
    tells_weights: bool = False
    head_sizes: tuple[int, ...] = ()
    cuts: bool = False


def _hugging_face(checkpoint: Path, dtype: str, contract: Contract | None, running: int) -> Engine:
    """Start the engine in this process, on the kernels that are pinned here."""
    from true_on_policy.engines.hf.engine import HuggingFace

    return HuggingFace(checkpoint, dtype)


def _sglang(checkpoint: Path, dtype: str, contract: Contract | None, running: int) -> Engine:
    from true_on_policy.engines.sglang.engine import Pool, SGLang

    return SGLang(checkpoint, dtype, contract, pool=Pool(CACHED_TOKENS, running))


def _vllm(checkpoint: Path, dtype: str, contract: Contract | None, running: int) -> Engine:
    from true_on_policy.engines.vllm.engine import BLOCK, VLLM, Pool

    # A decode step computes one token of each running sequence.
    pool = Pool(CACHED_TOKENS // BLOCK, running, max(Pool.prefill_chunk, running))
    return VLLM(checkpoint, dtype, contract, pool=pool)


SERVING = {
    "hf": Serving(_hugging_face, words="Hugging Face transformers"),
    "sglang": Serving(_sglang, tells_weights=True, cuts=True),
    "vllm": Serving(_vllm, head_sizes=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)),
}
