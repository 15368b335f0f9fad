"""One record for each family of models, which is read without torch from `families.yaml`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

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

    divided: whether the weights of a token's experts are divided by their sum.
    shared: whether each layer also has a shared expert, which every token takes. The sigmoid of its own
        gate multiplies its output.
    """

    divided: bool = True
    shared: bool = False


@dataclass(frozen=True)
class Vision:
    """The decoder of a family of vision-language models, which alone computes text.

    text_type: the model_type of the decoder's own config, `text_config` in a config.json.
    decoder: the prefix of the decoder's weights in Hugging Face's names.
    mrope_section: how many rope frequencies of a tiny model follow a token's time, height and width.
    """

    text_type: str
    decoder: str
    mrope_section: Sequence[int]


@dataclass(frozen=True)
class Family:
    """A family is a set of models with one order of operations.

    name: the key of the family in FAMILIES.
    architectures: Hugging Face's names of the models.
    model_type: what a checkpoint's config.json states.
    title: the family in words.
    tiny: sizes of tiny models of random weights, by the names that `--model` takes.
    align: (Hugging Face model, NormOrder) -> None, which makes norms and residual sums round in this order.
    qk_norm: whether query and key are normalized.
    qkv_bias: whether the product that gives query, key and value has a bias.
    host_contract: the name under which Miles, its SGLang and its Megatron know the family; None where they do not.
    missing: what keeps the family from being launched; empty where nothing does.
    experts: the mixture of experts in every layer; None in a dense model.
    vision: the decoder beside a vision tower; None where the models take text alone.
    """

    name: str
    architectures: tuple[str, ...]
    model_type: str
    title: str
    tiny: Mapping[str, Shape]
    align: Callable[..., Any] = field(default=at("true_on_policy.models.hf_decoder:align"))
    qk_norm: bool = False
    qkv_bias: bool = False
    host_contract: str | None = None
    missing: tuple[str, ...] = ()
    experts: Experts | None = None
    vision: Vision | None = None

    @property
    def decoder(self) -> str:
        """The prefix of the decoder's weights in Hugging Face's names."""
        return self.vision.decoder if self.vision else "model"


_TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("families.yaml").read_text("utf-8"))
# What is missing before a prompt with an image can be certified.
IMAGES: tuple[str, ...] = tuple(_TABLE["images"])


def _family(name: str, row: dict[str, Any]) -> Family:
    """Build a record from its row, whose keys are the fields of Family."""
    fields = {
        **row,
        "architectures": tuple(row["architectures"]),
        "tiny": {model: Shape(*sizes) for model, sizes in row["tiny"].items()},
        "missing": tuple(why.format(**_TABLE["reasons"]) for why in row.get("missing", ())),
    }
    if "align" in row:
        fields["align"] = at(row["align"])
    for part, kind in (("experts", Experts), ("vision", Vision)):
        if part in row:
            fields[part] = kind(**row[part])
    return Family(name, **fields)


FAMILIES = {name: _family(name, row) for name, row in _TABLE["families"].items()}
# The family and the sizes of models that a launch may name.
MODELS = {name: (row[0], Size(*row[1:])) for name, row in _TABLE["models"].items()}
# The GPU contract has no row for experts.
GPU_FAMILIES = {name: family for name, family in FAMILIES.items() if not family.experts}


def proven() -> dict[str, Family]:
    """All families, by the model_type of a checkpoint's config.json."""
    types = [family.model_type for family in FAMILIES.values()]
    if twice := sorted({name for name in types if types.count(name) > 1}):
        raise ValueError(f"two records of FAMILIES prove the model_type {', '.join(twice)}; one would hide the other")
    return dict(zip(types, FAMILIES.values(), strict=True))


def tiny_models() -> dict[str, tuple[Family, Shape]]:
    """Tiny models of all families, by the names that `--model` takes."""
    return {name: (family, shape) for family in proven().values() for name, shape in family.tiny.items()}


def covered() -> str:
    """The proven families in words."""
    *others, last = (family.title for family in proven().values())
    return f"{', '.join(others)} and {last}" if others else last
