"""A tensor as SGLang holds it, built from the weights of a checkpoint under their Hugging Face names.

SGLang 0.5.23 fuses q, k and v, gate and up, and the experts of a layer, and cuts fused weights over
tensor-parallel ranks.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
EXPERTS = {"w13_weight": GATE_UP, "w2_weight": ("down_proj",)}
MOST_PADDING = 4096  # rows
COMPUTED = "rotary_emb.inv_freq"  # rope's frequencies, which old checkpoints hold and an engine computes
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
VOCABULARY = (HEAD, EMBEDDING)
# Parts of the names of a vision-language model's weights: Hugging Face's, each with SGLang's.
NAMES = {"model.language_model.": "model.", "model.visual.": "visual.", ".attn.qkv.": ".attn.qkv_proj."}


class Lacking(Exception):
    """The checkpoint lacks a weight from which an engine's tensor is built."""


@dataclass
class Weights:
    """Weights by Hugging Face name, with a note of each weight that an engine's tensor was built from.

    named: the tensors.
    used: the names that `held` has read.
    """

    named: Mapping[str, Tensor]
    used: set[str] = field(default_factory=set)

    def __post_init__(self):
        self._own = {in_sglang(name): name for name in self.named}

    def __contains__(self, name: str) -> bool:
        return name in self._own

    def __getitem__(self, name: str) -> Tensor:
        if name not in self and name == HEAD:
            name = EMBEDDING  # a tied head has no weights of its own
        if name not in self:
            raise Lacking(name)
        self.used.add(self._own[name])
        return self.named[self._own[name]]

    @property
    def unused(self) -> list[str]:
        return [name for name in self.named if name not in self.used and not name.endswith(COMPUTED)]

    def held(self, name: str, shape: Sequence[int], rank: int, ranks: int) -> Tensor:
        """Build the tensor that a tensor-parallel rank of SGLang holds under `name`.

        Args:
            shape: the shape of the engine's tensor, which tells how the weight is cut; the result may have
                another.

        Raises:
            Lacking: the checkpoint lacks a weight that the tensor is built from.
        """
        module, _, kind = name.rpartition(".")
        parent, _, part = module.rpartition(".")
        if part == "experts" and kind in EXPERTS:
            return self._experts(module, kind, shape, rank, ranks)
        if part == "qkv_proj":
            # The fused weight of a vision tower is split.
            fused = [*self[name].chunk(len(QKV))] if name in self else None
            return _qkv(fused or [self[f"{parent}.{source}.{kind}"] for source in QKV], shape[0], rank, ranks)
        if part == "gate_up_proj":
            sources = [self[f"{parent}.{source}.{kind}"] for source in GATE_UP]
            return torch.cat([_padded(source, shape[0] // 2, rank, ranks) for source in sources])
        whole = self[name]
        if name in VOCABULARY:
            return _padded(whole, shape[0], rank, ranks)
        if part == "down_proj" and kind == "weight":
            return _padded(whole, shape[1], rank, ranks, 1)
        for dim, (size, mine) in enumerate(zip(whole.shape, shape, strict=False)):
            if mine < size == mine * ranks:
                return whole.chunk(ranks, dim)[rank]
        return whole

    def _experts(self, module: str, kind: str, shape: Sequence[int], rank: int, ranks: int) -> Tensor:
        """Stack the experts of a rank: `[K, 2F, H]` gate above up, or `[K, H, F]` down."""
        pattern = re.compile(rf"{re.escape(module)}\.(\d+)\.")
        count = len({match[1] for match in map(pattern.match, self.named) if match})
        rows = [[self[f"{module}.{number}.{source}.weight"] for source in EXPERTS[kind]] for number in range(count)]
        if not rows:
            raise Lacking(f"{module}.0")
        dim, mine = (0, shape[1] // 2) if kind == "w13_weight" else (1, shape[2])
        groups = len(rows) // shape[0]  # of ranks: each group has experts of its own, shared by its ranks
        parts = ranks // groups
        if (groups * shape[0], groups * parts) != (len(rows), ranks):
            raise ValueError(f"{ranks} times {shape[0]} of {len(rows)} experts")
        group, part = divmod(rank, parts)
        held = rows[group * shape[0] : (group + 1) * shape[0]]
        cut = partial(_padded, mine=mine, rank=part, ranks=parts, dim=dim)
        return torch.stack([torch.cat([cut(source) for source in expert]) for expert in held])


def in_sglang(name: str) -> str:
    """Return the name under which SGLang holds a weight before fusing weights."""
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def _qkv(sources: Sequence[Tensor], rows: int, rank: int, ranks: int) -> Tensor:
    """Return a rank's rows of q, k and v, joined; ranks beyond the key-value heads hold copies of k and v."""
    q, k, v = sources
    if rows == len(q) + len(k) + len(v):
        return torch.cat(list(sources))
    mine = (rows - len(q) // ranks) // 2
    copies = max(mine * ranks // len(k), 1)
    return torch.cat([q.chunk(ranks)[rank], *(x.chunk(ranks // copies)[rank // copies] for x in (k, v))])


def _padded(whole: Tensor, mine: int, rank: int, ranks: int, dim: int = 0) -> Tensor:
    """Return a rank's share of `mine` rows or columns, padded with zeros where the weight ends first.

    SGLang pads the vocabulary and, on a CPU, the width of an MLP. Shares that do not cover the weight are a ValueError.
    """
    if mine * ranks < whole.shape[dim] or mine > 2 * whole.shape[dim] + MOST_PADDING:
        raise ValueError(f"{mine} rows of {whole.shape[dim]}")
    start = 0 if mine >= whole.shape[dim] else min(rank * mine, whole.shape[dim])
    share = whole.narrow(dim, start, min(mine, whole.shape[dim] - start))
    zeros = [*whole.shape]
    zeros[dim] = mine - share.shape[dim]
    return torch.cat([share, whole.new_zeros(zeros)], dim)
