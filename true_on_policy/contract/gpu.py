"""The GPU contract: what trainer and engine must share on GPUs for bitwise equal log-probs, as data that is checked.

The GPU contract names kernels of other libraries, and no host has run it on a GPU. The CPU contract
(`contract/cpu.py`) names the kernels of this package, which are pinned and proven here. `gpu.yaml` holds the contract's
words and values. An operation is a row of the contract: what both sides share, and who provides each side's kernel.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from true_on_policy.contract.families import GPU_FAMILIES, IMAGES, MODELS, Family, Size
from true_on_policy.contract.row_sums import engine_order, fsdp_order, megatron_order
from true_on_policy.errors import ContractError

TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("gpu.yaml").read_text(encoding="utf-8"))
REASONS: dict[str, str] = {**TABLE["reasons"], "images": "; ".join(IMAGES)}
PLUGIN = "miles_megatron_plugins/true_on_policy"  # in radixark/Megatron-LM


@dataclass(frozen=True)
class Operation:
    """An operation is one row of the contract.

    bits: dtype and order of rounding, equal on both sides.
    trainer, engine: the kernel that runs on each side.
    """

    name: str
    bits: str
    trainer: str
    engine: str


def compiled(backend: str) -> Iterator[tuple[str, ...]]:
    """Yield (side, region, whether it is compiled) for each region that torch.compile could compile."""
    return (tuple(_of(cell, backend) for cell in row.values()) for row in TABLE["compiled"])


def _of(cell: str | dict[str, str], backend: str) -> str:
    return cell if isinstance(cell, str) else cell[backend]


TrainBackend = Literal["megatron", "fsdp"]
AttentionName = Literal["fa3", "flashinfer", "triton"]
GemmName = Literal["deep_gemm", "triton_persistent"]

NOT_COVERED: dict[str, list[str]] = {
    name: [why.format(**REASONS) for why in reasons] for name, reasons in TABLE["not_covered"].items()
} | {"images": [*IMAGES]}
# The trainer's GEMM where a user names none.
TRAINER_GEMMS: dict[str, GemmName] = {"megatron": "triton_persistent", "fsdp": "deep_gemm"}
MOST_COLUMNS = 1 << 20  # the order of a sum is a tree over columns, which must fit into memory
# The library whose batch-invariant mode replaces a trainer's aten operators.
MODES: dict[str, Literal["megatron", "sglang"]] = {"megatron": "megatron", "fsdp": "sglang"}
# Numbers of tensor-parallel ranks in one machine. On 1 rank, Megatron and SGLang add in different orders.
RANKS = (2, 4, 8)
CHOICES = {"backend": get_args(TrainBackend), "attention": get_args(AttentionName), "engine_gemm": get_args(GemmName)}
LAYOUTS = {
    backend: {name: holds.format(**REASONS) for name, holds in rows.items()}
    for backend, rows in TABLE["layouts"].items()
}
NO_TWIN = "has no twin in Miles's trainers; --sglang-attention-backend fa3"


@dataclass(frozen=True)
class GpuContract:
    """The agreement between a rollout engine and a trainer on GPUs.

    family: one of GPU_FAMILIES.
    backend: a TrainBackend.
    dtype: the dtype of products and attention; bf16 alone has kernels on both sides.
    attention: an AttentionName; the hosts' trainers have fa3 alone.
    engine_gemm: the GemmName of the engine, and on FSDP of the trainer too. On Megatron a probe must find
        the products of both sides equal byte by byte.
    trainer_tp, engine_tp: the tensor-parallel ranks of each side.
    context_parallel: ranks of the trainer that share a sequence, by Ulysses (a2a) alone.
    size: the sizes of the model; None where only the family is known, which leaves orders of partial sums
        and the sharing of heads unchecked.

    Raises:
        ContractError: a choice does not exist, or a layout cannot hold.
    """

    family: Family
    backend: str = "megatron"
    dtype: str = "bf16"
    attention: str = "fa3"
    engine_gemm: str = field(kw_only=True)
    trainer_tp: int = 1
    engine_tp: int = 1
    context_parallel: int = 1
    size: Size | None = None

    def __post_init__(self):
        for name, choices in CHOICES.items():
            if (given := getattr(self, name)) not in choices:
                raise ContractError(f"{name}: got {given!r}; choose one of {', '.join(choices)}")
        _check_layout(self)

    @property
    def mode(self) -> Literal["megatron", "sglang"]:
        """The one library whose batch-invariant mode replaces the trainer's aten operators."""
        return MODES[self.backend]

    @property
    def trainer_gemm(self) -> str:
        """The trainer's GEMM; where the trainer runs SGLang's mode, one variable sets it for both sides."""
        return self.engine_gemm if self.mode == "sglang" else TRAINER_GEMMS[self.backend]

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The operations of the contract in the order of a forward pass."""
        chosen = {
            "plugin": PLUGIN,
            "attention": TABLE["attentions"][self.attention],
            "trainer_gemm": TABLE["gemms"][self.trainer_gemm],
            "engine_gemm": TABLE["gemms"][self.engine_gemm],
            "bias": f", {TABLE['biases'][self.trainer_gemm]}" if self.family.qkv_bias else "",
        }
        parts = ("bits", "trainer", "engine")
        return tuple(
            Operation(row["name"], *(_of(row[part], self.backend).format(**chosen) for part in parts))
            for row in TABLE["operations"]
            if row.get("only", self.backend) == self.backend and (self.family.qk_norm or row["name"] != "q and k norm")
        )

    @property
    def alternatives(self) -> dict[str, str]:
        """The attention and GEMM that a user could choose instead, each with whether the contract then holds."""
        others = (name for name in CHOICES["attention"] if name != self.attention)
        (gemm,) = (name for name in CHOICES["engine_gemm"] if name != self.engine_gemm)
        whose, holds = (
            ("both sides'", "engine and trainer read one variable")
            if self.mode == "sglang"
            else ("engine's", "where the doctor finds the trainer's digest")
        )
        return {f"attention {name}": f"refused: it {NO_TWIN}" for name in others} | {
            f"{whose} products {gemm}": f"`flags --gemm {gemm}`, {holds}"
        }

    @property
    def environment(self) -> dict[str, str]:
        """The variables that must be set before the processes of both sides start."""
        deep_gemm = "1" if self.engine_gemm == "deep_gemm" else "0"
        return ENVIRONMENT | {DEEP_GEMM: deep_gemm}


DEEP_GEMM = "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM"
ENVIRONMENT = {name: row["value"] for name, row in TABLE["variables"].items() if name != DEEP_GEMM}
WHY = {name: row["why"] for name, row in TABLE["variables"].items()}


def family(name: str) -> Family:
    """Return the family of this name; raises ContractError where there is none, which says why MoE is not covered."""
    if name in GPU_FAMILIES:
        return GPU_FAMILIES[name]
    if "moe" in name.lower():
        raise ContractError(f"family: {name!r} is not covered: {'; '.join(NOT_COVERED['MoE'])}")
    raise ContractError(f"family: got {name!r}; choose one of {', '.join(GPU_FAMILIES)}")


def model_contract(model: str, backend: str, **layout: Any) -> GpuContract:
    """Build the contract of a model of MODELS; `layout` takes the other attributes of GpuContract.

    Raises:
        ContractError: there is no such model, or the contract cannot hold.
    """
    name, size = family_and_size(model)
    return gpu_contract(name, backend, size=size, **layout)


def family_and_size(model: str) -> tuple[str, Size]:
    """Return family and sizes of a model of MODELS, named as Hugging Face may; raises ContractError for another."""
    bare = lambda name: name.rpartition("/")[2].lower().replace("-", "")  # noqa: E731
    entry = {bare(name): entry for name, entry in MODELS.items()}.get(bare(model))
    if entry is None and re.search(r"-a\d+b\b|moe", model.lower()):
        raise ContractError(f"--model: {model!r} is not covered: MoE: {'; '.join(NOT_COVERED['MoE'])}")
    if entry is None:
        raise ContractError(f"--model: got {model!r}; choose one of {', '.join(MODELS)}")
    return entry


def fewest_ranks(model: str, backend: str, context: int = 1) -> int:
    """Return the fewest engine ranks that a contract allows; 2 * `context` where none of RANKS holds."""
    if backend == "fsdp":
        return 1
    return next(iter(equal_ranks(family_and_size(model)[1], context)), 2 * context)


def equal_ranks(size: Size, context: int = 1) -> tuple[int, ...]:
    """List the RANKS that Megatron (tensor times context parallel) and an engine can both have under a contract.

    With each of these numbers both sides add up o and down alike, and Megatron's ranks can share the heads.
    """
    return tuple(
        ranks
        for ranks in RANKS
        if ranks % context == 0
        and _shares_heads(size, ranks // context, context)
        and all(
            columns % ranks == 0 and megatron_order(columns, ranks // context, context) == engine_order(columns, ranks)
            for columns in _cut(size).values()
        )
    )


def _shares_heads(size: Size, tensor: int, context: int) -> bool:
    """Whether ranks can share the heads: tensor parallelism cuts the groups, Ulysses cuts the heads of a rank.

    Sources: attention_fa3.py and cp_layout.py of the Megatron fork.
    """
    return size.num_key_value_heads % tensor == 0 and size.num_attention_heads % (tensor * context) == 0


def _cut(size: Size) -> dict[str, int]:
    """Return K of the o and down products, which tensor parallelism splits."""
    return {"o": size.num_attention_heads * size.head_dim, "down": size.intermediate_size}


def gpu_contract(family_name: str, backend: str, **layout: Any) -> GpuContract:
    """Build the contract of a family, with the engine on the trainer's GEMM unless `layout` names another.

    Raises:
        ContractError: there is no such family or backend, or the contract cannot hold.
    """
    gemm = {"engine_gemm": TRAINER_GEMMS.get(backend, "")}
    return GpuContract(family(family_name), backend, **gemm | layout)  # pyright: ignore[reportArgumentType]


def check_environment(contract: GpuContract, environment: Mapping[str, str]) -> None:
    """Check that an environment sets every variable of a contract; a ContractError has the settings to start with."""
    wrong = {name: value for name, value in contract.environment.items() if environment.get(name) != value}
    if wrong:
        values = ", ".join(f"{name} is {environment.get(name)!r}" for name in wrong)
        settings = " ".join(f"{name}={value}" for name, value in wrong.items())
        raise ContractError(f"environment: {values}; start the processes with {settings}")


def _check_layout(contract: GpuContract) -> None:
    for name in ("context_parallel", "trainer_tp", "engine_tp"):
        if getattr(contract, name) < 1:
            raise ContractError(f"{{{name}}}: got {getattr(contract, name)}; a side has 1 rank or more")
    if contract.dtype != "bf16":
        raise ContractError(f"dtype: got {contract.dtype!r}; kernels for both sides exist in bf16 alone")
    if contract.backend == "fsdp" and (contract.trainer_tp, contract.context_parallel) != (1, 1):
        raise ContractError("fsdp is data parallel alone; set {trainer_tp} 1 and {context_parallel} 1")
    if contract.attention != "fa3":
        raise ContractError(f"attention: {contract.attention!r} {NO_TWIN}")
    if contract.size is not None:
        _check_size(contract, contract.size)


def _check_size(contract: GpuContract, size: Size) -> None:
    """Check that both sides add up o and down in one order, and that the trainer's ranks can share the heads."""
    tensor, context = contract.trainer_tp, contract.context_parallel
    for name, columns in _cut(size).items():
        if not 0 < columns <= MOST_COLUMNS:
            raise ContractError(f"the {name} product has {columns} columns; a model's has 1 to {MOST_COLUMNS}")
        ours = fsdp_order(columns) if contract.backend == "fsdp" else megatron_order(columns, tensor, context)
        if ours != engine_order(columns, contract.engine_tp):
            advice = "set {engine_tp} 1" if contract.backend == "fsdp" else _advice(size, context)
            raise ContractError(
                f"{{trainer_tp}} {tensor} x {{context_parallel}} {context}, {{engine_tp}} {contract.engine_tp}: the "
                f"{name} product adds the parts of its {columns} columns in two orders, so it rounds differently (read "
                f"in the sources, see contract/row_sums.py); {advice}"
            )
    if not _shares_heads(size, tensor, context):
        raise ContractError(
            f"{{trainer_tp}} {tensor} x {{context_parallel}} {context} does not share out "
            f"{size.num_attention_heads} heads in {size.num_key_value_heads} groups; tensor parallel must divide the "
            "groups, and both together the heads"
        )


def _advice(size: Size, context: int) -> str:
    """Advise numbers of ranks that hold: with the user's context parallelism, else without any, else FSDP."""
    for shared in dict.fromkeys((context, 1)):
        ranks = equal_ranks(size, shared)
        if ranks and shared > 1:
            tensor, engine = ranks[0] // shared, ranks[0]
            return f"beside {{context_parallel}} {shared} set {{trainer_tp}} {tensor} and {{engine_tp}} {engine}"
        if ranks:
            fitting, alone = " or ".join(map(str, ranks)), "{context_parallel} 1, " * (context > 1)
            return f"set {alone}{{trainer_tp}} and {{engine_tp}} both to {fitting}"
    tried = ", ".join(map(str, RANKS))
    fsdp = "train it with FSDP (--backend fsdp here, --train-backend fsdp of Miles)"
    return f"with as many on both sides none of {tried} holds for this model; {fsdp}"
