"""The forward pass of the rollout engine: a Qwen3 or Llama decoder with a KV cache, in plain torch operations.

The decoder shares no forward code with the trainer on purpose, so that engine and trainer mismatch as in real runs. A
mixture of experts chooses, weighs and adds in the order of SGLang (`true_on_policy/contract/rounding.py`), and
Megatron-core's own layer in another.

Shapes: `B` sequences, `T` tokens of this call, `S` cache slots, `L` layers, `G` key-value heads,
`D` head size, `E` hidden size, `V` vocabulary, `K` experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from mis_plugins.errors import ConfigError
from true_on_policy.contract.families import FAMILIES, Family, Shape
from true_on_policy.contract.rounding import chosen, combined


@dataclass(frozen=True)
class ModelConfig(Shape):
    """A Qwen3-shaped decoder: GQA, QK-norm, RMSNorm, SwiGLU, RoPE, an untied head and no bias.

    Without `qk_norm` the decoder is Llama-shaped, with `experts` a Qwen3-MoE.
    """

    tied: bool = False
    qk_norm: bool = True

    def __post_init__(self) -> None:
        if self.head_dim % 2:
            raise ConfigError(f"head_dim: got {self.head_dim}; RoPE rotates pairs, so make it even")

    @property
    def family(self) -> Family:
        """The family that computes what our own decoder computes."""
        return FAMILIES["qwen3-moe" if self.experts else "qwen3-dense" if self.qk_norm else "llama"]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter by its Hugging Face name; a matrix is [out, in]."""
        hidden, head = self.hidden, self.head_dim
        norms = {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)} if self.qk_norm else {}
        layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (self.heads * head, hidden),
            "self_attn.k_proj": (self.kv_heads * head, hidden),
            "self_attn.v_proj": (self.kv_heads * head, hidden),
            "self_attn.o_proj": (hidden, self.heads * head),
            **norms,
            "post_attention_layernorm": (hidden,),
            **self._mlp_shapes(),
        }
        return {
            "model.embed_tokens.weight": (self.vocab, hidden),
            **{
                f"model.layers.{index}.{name}.weight": shape
                for index in range(self.layers)
                for name, shape in layer.items()
            },
            "model.norm.weight": (hidden,),
            "lm_head.weight": (self.vocab, hidden),
        }

    def _mlp_shapes(self) -> dict[str, tuple[int, ...]]:
        wide, narrow = (self.ffn, self.hidden), (self.hidden, self.ffn)
        if not self.experts:
            return {"mlp.gate_proj": wide, "mlp.up_proj": wide, "mlp.down_proj": narrow}
        each = {"gate_proj": wide, "up_proj": wide, "down_proj": narrow}
        return {"mlp.gate": (self.experts, self.hidden)} | {
            f"mlp.experts.{number}.{name}": shape for number in range(self.experts) for name, shape in each.items()
        }


@dataclass(frozen=True)
class LeftPadded:
    """Sequences padded on the left, so that the next token of every sequence goes to the same cache slot."""

    tokens: Int[Tensor, "B T"]
    padding: Int[Tensor, " B"]

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]]) -> LeftPadded:
        longest = max(map(len, sequences))
        padding = [longest - len(sequence) for sequence in sequences]
        rows = [[0] * pad + list(sequence) for pad, sequence in zip(padding, sequences, strict=True)]
        return cls(torch.tensor(rows), torch.tensor(padding))


@dataclass
class KVCache:
    """Keys and values of every layer, and what each slot may look at.

    keys, values: [layers, B, G, S, D], filled up to `used` slots.
    bias: [B, 1, S, S], added to attention scores: 0 where a query slot sees a key slot, else -inf.
    cos, sin: [B, S, 1, D], the rotation of each slot's position; `sin` carries the sign of rotate-half.
    routes: [layers, B, S, K], the experts that each slot's token took; None in a dense model.
    """

    keys: Float[Tensor, "L B G S D"]
    values: Float[Tensor, "L B G S D"]
    bias: Float[Tensor, "B 1 S S"]
    cos: Float[Tensor, "B S 1 D"]
    sin: Float[Tensor, "B S 1 D"]
    routes: Int[Tensor, "L B S K"] | None = None
    used: int = 0


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer, with the matrices that read the same input joined into one."""

    input_norm: Tensor
    qkv: Tensor
    qk_norm: Tensor | None
    out: Tensor
    post_norm: Tensor
    mlp: SwiGlu | Experts


class Decoder:
    """The forward pass over weights held by name."""

    def __init__(self, config: ModelConfig, held: Mapping[str, Tensor]) -> None:
        self.config = config
        self.embedding = held["model.embed_tokens.weight"]
        self.norm = held["model.norm.weight"]
        self.head = held["lm_head.weight"]
        self.layers = [_layer_weights(config, held, index) for index in range(config.layers)]

    def cache(self, batch: LeftPadded, max_new_tokens: int) -> KVCache:
        """An empty cache with room for the batch and `max_new_tokens` more."""
        config, dtype = self.config, self.embedding.dtype
        slots = batch.tokens.shape[1] + max_new_tokens
        shape = (config.layers, len(batch.tokens), config.kv_heads, slots, config.head_dim)
        bias = torch.where(_visible(batch.padding, slots), 0.0, -torch.inf).to(dtype)
        cos, sin = _rotation(batch.padding, slots, config)
        keys, values = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
        routes = None
        if config.experts:
            routes = torch.empty(config.layers, len(batch.tokens), slots, config.top_k, dtype=torch.int32)
        return KVCache(keys, values, bias, cos.to(dtype), sin.to(dtype), routes)

    def forward(self, tokens: Int[Tensor, "B T"], cache: KVCache) -> Float[Tensor, "B T V"]:
        """Logits after each of `tokens`, which take the next slots of `cache`."""
        slots = slice(cache.used, cache.used + tokens.shape[1])
        hidden = F.embedding(tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            hidden = hidden + self._attention(hidden, layer, cache, index, slots)
            hidden = hidden + self._mlp(hidden, layer, cache, index, slots)
        cache.used = slots.stop
        return F.linear(self._rms_norm(hidden, self.norm), self.head)

    def _attention(
        self, hidden: Float[Tensor, "B T E"], layer: LayerWeights, cache: KVCache, index: int, slots: slice
    ) -> Float[Tensor, "B T E"]:
        heads, groups = self.config.heads, self.config.kv_heads
        qkv = F.linear(self._rms_norm(hidden, layer.input_norm), layer.qkv)
        qk, value = qkv.unflatten(-1, (-1, self.config.head_dim)).split((heads + groups, groups), dim=2)
        qk = qk if layer.qk_norm is None else self._rms_norm(qk, layer.qk_norm)
        qk = _rotate(qk, cache.cos[:, slots], cache.sin[:, slots])
        query, key = qk.split((heads, groups), dim=2)
        cache.keys[index, :, :, slots] = key.transpose(1, 2)
        cache.values[index, :, :, slots] = value.transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            cache.keys[index, :, :, : slots.stop],
            cache.values[index, :, :, : slots.stop],
            attn_mask=cache.bias[:, :, slots, : slots.stop],
            enable_gqa=heads != groups,
        )
        return F.linear(mixed.transpose(1, 2).flatten(2), layer.out)

    def _mlp(
        self, hidden: Float[Tensor, "B T E"], layer: LayerWeights, cache: KVCache, index: int, slots: slice
    ) -> Float[Tensor, "B T E"]:
        normed = self._rms_norm(hidden, layer.post_norm)
        if isinstance(layer.mlp, SwiGlu):
            return layer.mlp(normed)
        assert cache.routes is not None
        mixed, experts = layer.mlp(normed.flatten(0, 1))
        cache.routes[index, :, slots] = experts.unflatten(0, hidden.shape[:2]).int()
        return mixed.view_as(hidden)

    def _rms_norm(self, x: Float[Tensor, "... n"], weight: Tensor) -> Float[Tensor, "... n"]:
        """`weight x / rms(x)` over the last dimension, in float32."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.norm_eps)
        return weight * (wide * scale).to(x.dtype)


def _visible(padding: Int[Tensor, " B"], slots: int) -> Bool[Tensor, "B 1 S S"]:
    """Which key slot (last) a query slot sees: earlier ones, itself, no padding.

    Padding sees itself, or its softmax over nothing would be NaN; nobody reads what it computes.
    """
    slot = torch.arange(slots)
    query, key = slot[:, None], slot[None, :]
    return ((key <= query) & ((key >= padding[:, None, None]) | (key == query)))[:, None]


def _rotation(
    padding: Int[Tensor, " B"], slots: int, config: ModelConfig
) -> tuple[Float[Tensor, "B S 1 D"], Float[Tensor, "B S 1 D"]]:
    """RoPE's cosine and signed sine for every slot; position 0 is a sequence's first real token."""
    half = config.head_dim // 2
    # Megatron's and Hugging Face's order of rounding: a reciprocal, not a negative power.
    frequency = 1.0 / config.rope_theta ** (torch.arange(half) / half)
    position = (torch.arange(slots) - padding[:, None]).clamp(min=0)
    angle = position[:, :, None, None] * frequency
    return torch.cat((angle, angle), -1).cos(), torch.cat((-angle, angle), -1).sin()


def _rotate(
    x: Float[Tensor, "B T heads D"], cos: Float[Tensor, "B T 1 D"], sin: Float[Tensor, "B T 1 D"]
) -> Float[Tensor, "B T heads D"]:
    """RoPE: `x cos + rotate_half(x) sin`; the minus of rotate-half is in `sin`, which leaves a roll."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def _layer_weights(config: ModelConfig, held: Mapping[str, Tensor], index: int) -> LayerWeights:
    def joined(*names: str) -> Tensor:
        return torch.cat([held[f"model.layers.{index}.{name}.weight"] for name in names])

    mlp = f"model.layers.{index}.mlp"

    def norm_of_each_head() -> Tensor:
        counts = [("q", config.heads), ("k", config.kv_heads)]
        return torch.cat([joined(f"self_attn.{kind}_norm").expand(count, -1) for kind, count in counts])

    return LayerWeights(
        input_norm=joined("input_layernorm"),
        qkv=joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        qk_norm=norm_of_each_head() if config.qk_norm else None,
        out=joined("self_attn.o_proj"),
        post_norm=joined("post_attention_layernorm"),
        mlp=Experts.of(held, mlp, config.top_k) if config.experts else SwiGlu.of(held, mlp),
    )


@dataclass(frozen=True)
class SwiGlu:
    """`down (silu(gate x) * up x)`, with gate and up joined into one matrix."""

    gate_up: Float[Tensor, "F2 E"]
    down: Float[Tensor, "E F"]

    @classmethod
    def of(cls, held: Mapping[str, Tensor], prefix: str) -> SwiGlu:
        """Join the weights that Hugging Face names behind `prefix`."""
        gate, up, down = (held[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return cls(torch.cat([gate, up]), down)

    def __call__(self, x: Float[Tensor, "*T E"]) -> Float[Tensor, "*T E"]:
        gate, up = F.linear(x, self.gate_up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts, of which each token takes `top_k`."""

    router: Float[Tensor, "X E"]
    experts: tuple[SwiGlu, ...]
    top_k: int

    @classmethod
    def of(cls, held: Mapping[str, Tensor], prefix: str, top_k: int) -> Experts:
        """Take the router and all experts that Hugging Face names behind `prefix`."""
        router = held[f"{prefix}.gate.weight"]
        experts = (SwiGlu.of(held, f"{prefix}.experts.{number}") for number in range(len(router)))
        return cls(router, tuple(experts), top_k)

    def __call__(self, x: Float[Tensor, "T E"]) -> tuple[Float[Tensor, "T E"], Int64[Tensor, "T K"]]:
        """Mix the outputs of each token's experts; return the experts too, the highest score first."""
        weights, experts = chosen(F.linear(x, self.router), self.top_k)
        by_expert = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=len(self.experts)).tolist()
        received = x[by_expert // self.top_k].split(counts)
        pairs = zip(self.experts, received, strict=True)
        outputs = torch.cat([expert(rows) for expert, rows in pairs if len(rows)])
        return combined(outputs, by_expert.argsort().view_as(experts), weights), experts
