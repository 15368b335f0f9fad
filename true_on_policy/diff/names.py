"""The table of tensor names: which tensor of one framework corresponds to which tensor of another.

A name is the path of a module and its input or output: `model.layers.2.self_attn.q_proj.output`. In a pattern, `*` is
the number of a layer, `(.0)` may be missing, and `[q]` at the end takes the part q of a fused tensor.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from operator import mul
from pathlib import Path

import yaml
from jaxtyping import Shaped
from torch import Tensor

from mis_plugins.config.file import parsed, text_of
from mis_plugins.shared.budget import RecordError
from mis_plugins.shared.opened import reason
from true_on_policy.bitwise import equal_bits
from true_on_policy.contract import model_config

# Tensors that identify requests: their values differ between two runs of one engine.
BOOKKEEPING = frozenset({"rids", "req_pool_indices"})
# Tensors that a model is handed: which tokens it computes, and where they stand.
HANDED = frozenset({"input_ids", "positions", "position_ids", "cache_position", "attention_mask", "seq_lens"})


def is_handed(name: str) -> bool:
    """Whether a tensor was handed to the model, or on to one of its modules, and so was not computed."""
    return f".inputs.{name}".rpartition(".inputs.")[2] in HANDED


FRAMEWORKS = ("hf", "sglang", "megatron")  # the columns of `names.yaml`


@cache
def points() -> list[list[str | None]]:
    """Read the rows of `names.yaml`, those of a layer with the prefix of the layer."""
    table = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text(encoding="utf-8"))
    pairs = (zip(table["layers"], row, strict=True) for row in table["in_layer"])
    in_layer = [[name and f"{layer}.{name}" for layer, name in pair] for pair in pairs]
    return [*table["before"], *in_layer, *table["after"]]


# A piece of a module's name that only one framework has.
SIGNATURES = {"megatron": "decoder.layers.", "sglang": ".qkv_proj.", "hf": ".q_proj."}


@dataclass(frozen=True)
class Heads:
    """The attention heads of a model, by which a fused projection is taken apart."""

    query: int
    key_value: int
    size: int

    @classmethod
    def of(cls, checkpoint: Path) -> "Heads":
        """Read the heads from the config.json of a Hugging Face checkpoint, given the file or its folder."""
        file = checkpoint / "config.json" if checkpoint.is_dir() else checkpoint
        try:
            if file.exists() and not file.is_file():
                raise ValueError("no regular file")
            config = model_config.text_of(json.loads(file.read_text(encoding="utf-8")))
            query = int(config["num_attention_heads"])
            size = config.get("head_dim") or int(config["hidden_size"]) // query
            heads = cls(query, int(config.get("num_key_value_heads") or query), int(size))
            if min(heads.query, heads.key_value, heads.size) < 1:
                raise ValueError(heads)
            return heads
        except Exception as error:  # the file is a stranger's
            raise RecordError(f"--model {checkpoint}: no config.json with attention heads: {reason(error)}") from error

    @property
    def width(self) -> int:
        """The width of a fused query, key and value projection."""
        return (self.query + 2 * self.key_value) * self.size


Part = Callable[[Shaped[Tensor, "*S width"], Heads | None], Shaped[Tensor, "*S part"]]


def _qkv(part: int, grouped: bool = False) -> Part:
    """Take a part of a fused projection: all queries, then all keys, then all values.

    If `grouped`, the projection holds for each key-value head its queries, its key and its value.
    """

    def split(x: Tensor, heads: Heads | None) -> Tensor:
        held = _checked(x, heads)
        groups = held.key_value if grouped else 1
        sizes = [count // groups * held.size for count in (held.query, held.key_value, held.key_value)]
        return x.unflatten(-1, (groups, -1)).split(sizes, dim=-1)[part].flatten(-2)

    return split


def _half(part: int) -> Part:
    return lambda x, heads: x.chunk(2, dim=-1)[part]


def _checked(x: Tensor, heads: Heads | None) -> Heads:
    if heads is None:
        raise RecordError("queries, keys and values are fused; name the checkpoint with --model to take them apart")
    if x.shape[-1] != heads.width:
        raise RecordError(
            f"a fused projection of width {x.shape[-1]}, but --model says {heads.width}; "
            "shards of tensor parallelism are not put together"
        )
    return heads


PARTS: Mapping[str, Part] = {
    "q": _qkv(0), "k": _qkv(1), "v": _qkv(2),
    "grouped q": _qkv(0, True), "grouped k": _qkv(1, True), "grouped v": _qkv(2, True),
    "gate": _half(0), "up": _half(1),
}  # fmt: skip


@dataclass(frozen=True)
class Pattern:
    """A pattern matches one name, or with `*` one name in every layer.

    Raises:
        RecordError: the pattern takes a part that PARTS lacks, or holds a notation twice.
    """

    text: str

    def __post_init__(self):
        if self.part is not None and self.part not in PARTS:
            raise RecordError(f"{self.text}: no part {self.part!r}; choose one of {', '.join(PARTS)}")
        for notation in ("*", "(.0)"):  # a search for several of them may never end
            if self.text.count(notation) > 1:
                raise RecordError(f"{self.text}: holds {notation} twice; a pattern holds it once")

    @property
    def part(self) -> str | None:
        return match[1] if (match := re.search(r"\[([^]]*)\]$", self.text)) else None

    def layer(self, name: str) -> str | None:
        """Return the number of the layer if `name` matches ("" for a pattern without a layer), else None."""
        match = _expression(self.text).fullmatch(name)
        return None if match is None else "".join(match.groups()[:1])

    def named(self, layer: str) -> str:
        return self.text.replace("*", layer)


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    """Compile a pattern; each wrapper of the model may put `module.` before the name."""
    escaped = re.escape(re.sub(r"\[[^]]*\]$", "", pattern))
    for notation, expression in ((r"\*", r"(\d+)"), (r"\(\.0\)", r"(?:\.0)?")):
        escaped = escaped.replace(notation, expression)
    return re.compile(rf"(?:module\.)*{escaped}")


OWN = tuple((Pattern(name), None) for name in sorted(BOOKKEEPING))


@dataclass(frozen=True)
class Renaming:
    """A renaming turns the names of one side into common names.

    patterns: pairs of a pattern of this side and its common name; None leaves the name out.
    rest: whether a name without a pattern keeps its spelling; otherwise it is left out.
    """

    patterns: tuple[tuple[Pattern, Pattern | None], ...] = ()
    rest: bool = True

    def of(self, name: str) -> tuple[tuple[str, str | None], ...]:
        """Return the common names of a tensor, each with its part of the tensor; empty if the tensor is left out."""
        matching = [(pattern, common, layer) for pattern, common in self.patterns
                 if (layer := pattern.layer(name)) is not None]  # fmt: skip
        if not matching:
            return ((name, None),) if self.rest else ()
        return tuple((common.named(layer), pattern.part) for pattern, common, layer in matching if common)


@dataclass(frozen=True)
class Correspondence:
    """A correspondence pairs the names of two sides.

    a, b: the renaming of each side.
    regroup: whether shapes may differ in how dimensions group the values: [tokens, width] in one framework is
        [tokens, 1, heads, head size] in another.
    """

    a: Renaming
    b: Renaming
    regroup: bool = False


def correspondence(a: Iterable[str], b: Iterable[str], file: Path | None = None) -> Correspondence:
    """Pair names by `file` if given, else by `points` between two frameworks, else each name with itself."""
    if file is not None:
        pairing, names = _from_file(file), list(a)
        left_out = [pattern for pattern, other in pairing.b.patterns if other is None]
        lines = [(pattern, names) for pattern, _ in pairing.a.patterns] + [(pattern, list(b)) for pattern in left_out]
        if not any(pattern.layer(name) is not None for pattern, held in lines for name in held):
            raise RecordError(f"--map {file}: no line names a tensor of A, such as {', '.join(sorted(names)[:3])}")
        return Correspondence(*(Renaming((*OWN, *side.patterns)) for side in (pairing.a, pairing.b)), regroup=True)
    frameworks = framework(a), framework(b)
    if None in frameworks or frameworks[0] == frameworks[1]:
        return Correspondence(Renaming(OWN), Renaming(OWN))
    columns = [FRAMEWORKS.index(name) for name in frameworks if name]
    rows = [row for row in points() if all(row[column] for column in columns)]
    sides = (Renaming(tuple((Pattern(row[column] or ""), Pattern(row[0] or "")) for row in rows), rest=False)
             for column in columns)  # fmt: skip
    return Correspondence(*sides, regroup=True)


def framework(names: Iterable[str]) -> str | None:
    """Return the framework that the module names belong to, by SIGNATURES; None where no signature occurs."""
    names = list(names)
    return next((name for name, sign in SIGNATURES.items() if any(sign in module for module in names)), None)


def regrouped(a: Shaped[Tensor, "..."], b: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """Return `b` in the shape of `a` if one shape only splits dimensions of the other, else `b` as it is.

    Megatron's rows of a batch, [tokens, batch, width], are put in the order of `a` where they are then equal.
    """
    swapped = b.transpose(0, 1) if b.dim() > 2 else b
    if equal_bits(a, swapped):
        return swapped
    ends = [set(accumulate((size for size in x.shape if size != 1), mul)) for x in (a, b)]
    return b.reshape(a.shape) if a.numel() == b.numel() and (ends[0] <= ends[1] or ends[1] <= ends[0]) else b


def _from_file(file: Path) -> Correspondence:
    """Read a correspondence from YAML or JSON: a name in A -> its name in B, or null to leave it out on both sides."""
    try:
        lines = parsed(text_of(file))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise RecordError(f"--map {file}: cannot be read: {error}") from error
    if not isinstance(lines, dict) or not all(isinstance(line, str) for line in lines):
        raise RecordError(f"--map {file}: expected lines of `name in A: name in B`")
    for name, other in lines.items():
        if not isinstance(other, str | None) or other == "":
            raise RecordError(f"--map {file}: {name}: got {other!r}; expected a name in B, or null to leave it out")
    pairs = [(Pattern(name), other and Pattern(other)) for name, other in lines.items()]
    b = [(other, other) if other else (name, None) for name, other in pairs]
    return Correspondence(Renaming(tuple(pairs)), Renaming(tuple(b)), regroup=True)
