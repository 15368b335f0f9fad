"""One record for each family of models, which is read without torch.

A new family needs one record in FAMILIES. The default `Proof.align` fits a decoder with a norm before each
branch; a family that rounds differently names another function there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from true_on_policy.contract.specs import at


@dataclass(frozen=True)
class Size:
    """The sizes of one model, by Hugging Face's names."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int


@dataclass(frozen=True)
class Shape:
    """The sizes of one tiny model, and whether its head is tied to its embedding.

    Attributes:
        ffn: the width of the MLP; in a mixture of experts, of each expert.
        experts, top_k: how many experts a layer has, and how many of them a token takes; 0 in a dense model.
        shared: the width of the expert that every token takes; 0 where there is none.
    """

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    experts: int = 0
    top_k: int = 0
    shared: int = 0


@dataclass(frozen=True)
class Experts:
    """The mixture of experts that every layer of a family has.

    Attributes:
        divided: whether the weights of a token's experts are divided by their sum.
        shared: whether each layer also has a shared expert, which every token takes. The sigmoid of its own
            gate multiplies its output.
    """

    divided: bool = True
    shared: bool = False


@dataclass(frozen=True)
class Vision:
    """The decoder of a family of vision-language models, which alone computes text.

    Attributes:
        text_type: the model_type of the decoder's own config, `text_config` in a config.json.
        decoder: the prefix of the decoder's weights in Hugging Face's names.
        mrope_section: how many rope frequencies of a tiny model follow a token's time, height and width.
    """

    text_type: str
    decoder: str
    mrope_section: tuple[int, int, int]


@dataclass(frozen=True)
class Proof:
    """What `verify` knows of a family that it can prove on CPU.

    Attributes:
        model_type: what a checkpoint's config.json states.
        title: the family in words.
        tiny: sizes of tiny models of random weights, by the names that `--model` takes.
        align: (Hugging Face model, NormOrder) -> None, which makes norms and residual sums round in this
            order.
    """

    model_type: str
    title: str
    tiny: Mapping[str, Shape]
    align: Callable[..., Any] = field(default=at("true_on_policy.models.hf_decoder:align"))


@dataclass(frozen=True)
class Family:
    """A family is a set of models with one order of operations.

    Attributes:
        name: the key of the family in FAMILIES.
        architectures: Hugging Face's names of the models.
        qk_norm: whether query and key are normalized.
        qkv_bias: whether the product that gives query, key and value has a bias.
        host_contract: the name under which Miles, its SGLang and its Megatron know the family; None where they do not.
        missing: what keeps the family from being launched; empty where nothing does.
        proof: what `verify` needs to know; None where the family is not proven on CPU.
        experts: the mixture of experts in every layer; None in a dense model.
        vision: the decoder beside a vision tower; None where the models take text alone.
    """

    name: str
    architectures: tuple[str, ...]
    qk_norm: bool = False
    qkv_bias: bool = False
    host_contract: str | None = None
    missing: tuple[str, ...] = ()
    proof: Proof | None = None
    experts: Experts | None = None
    vision: Vision | None = None

    @property
    def decoder(self) -> str:
        """The prefix of the decoder's weights in Hugging Face's names."""
        return self.vision.decoder if self.vision else "model"


# Sources: SGLang 0.5.23, transformers 5.23 and megatron-core 0.16.1.
IMAGES = (
    "no row for the vision tower: SGLang and transformers embed patches, interpolate positions and mask attention by "
    "different operations, and Megatron's GPTModel has no tower",
    "no row for rope where a token's time, height and width differ (on text alone they are equal)",
    "no row for what the tower adds to the decoder's first layers",
)
"""What is missing before a prompt with an image can be certified."""

_NO_CONTRACT = (
    "Miles v0.1.0 knows one contract, qwen3_dense_true_on_policy_v1 (miles/true_on_policy/schema.py)"
)
_NARROW_ROPE = (
    "SGLang's native rope computes in q's dtype (rotary_embedding/utils.py), which is bf16 without a norm of q and k; "
    "megatron-core 0.16.1 and transformers cast cos and sin to the same dtype; Miles's fork of Megatron (2e64d788) "
    "computes in fp32"
)

_RECORDS = (
    Family(
        name="qwen3-dense",
        architectures=("Qwen3ForCausalLM",),
        qk_norm=True,
        host_contract="qwen3_dense_true_on_policy_v1",
        proof=Proof(
            model_type="qwen3",
            title="dense Qwen3",
            # The second model has sizes that no vector of 16 divides (712, 333), and a tied head.
            tiny={
                "tiny-qwen3": Shape(128, 256, 3, 4, 2, 32, 320, tied=False),
                "tiny-qwen3-tied": Shape(320, 712, 5, 6, 2, 64, 333, tied=True),
            },
        ),
    ),
    Family(
        name="qwen2.5-dense",
        architectures=("Qwen2ForCausalLM",),
        qkv_bias=True,
        proof=Proof(
            model_type="qwen2",
            title="dense Qwen2.5",
            tiny={"tiny-qwen2.5": Shape(128, 256, 3, 4, 2, 32, 320, tied=True)},
        ),
        missing=(
            _NO_CONTRACT,
            "SGLang 0.5.23 aligns embedding, MLP and final norm of Qwen2 (models/qwen2.py), not its layers' norms",
            _NARROW_ROPE,
        ),
    ),
    Family(
        name="qwen3-vl-dense",
        architectures=("Qwen3VLForConditionalGeneration",),
        qk_norm=True,
        vision=Vision("qwen3_vl_text", "model.language_model", (6, 5, 5)),
        proof=Proof(
            model_type="qwen3_vl",
            title="Qwen3-VL (its text path)",
            tiny={"tiny-qwen3-vl": Shape(128, 256, 3, 4, 2, 32, 320, tied=False, rope_theta=5e6)},
        ),
        missing=(
            _NO_CONTRACT,
            "the text path is SGLang's Qwen3 with mrope (models/qwen3_vl.py); images are outside of it",
        ),
    ),
    Family(
        name="llama",
        architectures=("LlamaForCausalLM",),
        proof=Proof(
            model_type="llama",
            title="dense Llama",
            tiny={"tiny-llama": Shape(128, 256, 3, 4, 2, 32, 320, tied=True, rope_theta=1e5, norm_eps=1e-5)},
        ),
        missing=(
            _NO_CONTRACT,
            "SGLang 0.5.23's models/llama.py does not read rl_on_policy_target: its norms, residual and q, k stay as "
            "they are in serving",
            _NARROW_ROPE,
        ),
    ),
    Family(
        name="qwen3-moe",
        architectures=("Qwen3MoeForCausalLM",),
        qk_norm=True,
        experts=Experts(),
        proof=Proof(
            model_type="qwen3_moe",
            title="Qwen3-MoE",
            tiny={
                "tiny-qwen3-moe": Shape(128, 64, 3, 4, 2, 32, 320, tied=False, experts=8, top_k=2),
                "tiny-qwen3-moe-64": Shape(128, 32, 6, 4, 2, 32, 320, tied=False, experts=64, top_k=8),
            },
            align=at("true_on_policy.models.hf_decoder:align_experts"),
        ),
        missing=(
            _NO_CONTRACT,
            "radixark/Megatron-LM has a contract on its branch feat/true_on_policy_qwen_moe, and miles-main has none",
            "miles-main's provider falls back to the ordinary GroupedMLP with a warning (provider.py)",
        ),
    ),
    Family(
        name="qwen2-moe",
        architectures=("Qwen2MoeForCausalLM",),
        qkv_bias=True,
        experts=Experts(divided=False, shared=True),
        proof=Proof(
            model_type="qwen2_moe",
            title="Qwen2-MoE",
            tiny={
                "tiny-qwen2-moe": Shape(128, 64, 3, 4, 2, 32, 320, tied=False, experts=8, top_k=2, shared=96)
            },
            align=at("true_on_policy.models.hf_decoder:align_experts"),
        ),
        missing=(_NO_CONTRACT, _NARROW_ROPE),
    ),
)
FAMILIES = {family.name: family for family in _RECORDS}

# The GPU contract has no row for experts.
GPU_FAMILIES = {name: one for name, one in FAMILIES.items() if not one.experts}


def proven() -> dict[str, tuple[Family, Proof]]:
    """Families that `verify` can prove, by the model_type of a checkpoint's config.json."""
    proofs = [(one.proof.model_type, (one, one.proof)) for one in FAMILIES.values() if one.proof]
    types = [model_type for model_type, _ in proofs]
    if twice := sorted({one for one in types if types.count(one) > 1}):
        raise ValueError(
            f"two records of FAMILIES prove the model_type {', '.join(twice)}; one would hide the other"
        )
    return dict(proofs)


def tiny_models() -> dict[str, tuple[Family, Shape]]:
    """Tiny models of all families, by the names that `--model` takes."""
    return {name: (one, shape) for one, proof in proven().values() for name, shape in proof.tiny.items()}


def covered() -> str:
    """The proven families in words."""
    *others, last = (proof.title for _, proof in proven().values())
    return f"{', '.join(others)} and {last}" if others else last
