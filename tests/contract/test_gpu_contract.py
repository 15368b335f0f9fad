"""The GPU contract as data: choices, layouts, environment, and how it is printed."""

import pytest
import torch
from commands import ProofCommand, ran
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from true_on_policy.bitwise import equal_bits
from true_on_policy.contract.gpu import (
    CHOICES,
    GPU_FAMILIES,
    LAYOUTS,
    MODELS,
    RANKS,
    Size,
    check_environment,
    compiled,
    equal_ranks,
    family,
    fewest_ranks,
    gpu_contract,
    model_contract,
)
from true_on_policy.errors import ContractError
from true_on_policy.kernels import gpu

QWEN3 = [name for name, (kind, _) in MODELS.items() if kind == "qwen3-dense"]


# Ranks of both sides on Megatron: 38 or 19 leaves a rank are added in two orders, 3 and 9.5 are not.
HOLD = {"qwen3-0.6B": (8,), "qwen3-4B": (8,)}


@pytest.mark.parametrize("model", QWEN3)
@pytest.mark.parametrize("ranks", RANKS)
def test_equal_tensor_parallel_holds_where_orders_agree(model: str, ranks: int) -> None:
    layout = {"trainer_tp": ranks, "engine_tp": ranks}
    if ranks in HOLD.get(model, ()):
        contract = model_contract(model, "megatron", **layout)
        gemms = contract.mode, contract.trainer_gemm, contract.engine_gemm
        assert gemms == ("megatron", "triton_persistent", "triton_persistent")
    else:
        fitting = (
            "both to 8$"
            if model in HOLD
            else r"none of 2, 4, 8 holds .* \(--backend fsdp here, --train-backend fsdp .*\)$"
        )
        with pytest.raises(ContractError, match=f"two orders.*{fitting}"):
            model_contract(model, "megatron", **layout)


def test_the_fewest_ranks_that_hold_are_taken() -> None:
    assert [fewest_ranks(model, "megatron") for model in ("qwen3-0.6B", "Qwen3-4b", "qwen3-8B")] == [8, 8, 2]
    assert fewest_ranks("qwen3-4B", "fsdp") == 1
    two_groups = MODELS["qwen2.5-3B"][1]  # the trainer's ranks must divide them, not the engine's
    assert [equal_ranks(two_groups, context) for context in (1, 2, 4, 8)] == [(), (4,), (4, 8), (8,)]
    for model, (_, size) in MODELS.items():
        assert equal_ranks(size) == HOLD.get(model, ())


@pytest.mark.parametrize(
    ("backend", "layout", "message"),
    [
        ("megatron", {}, "trainer_tp 1 x context_parallel 1, engine_tp 1: the o product"),
        ("megatron", {"trainer_tp": 2, "engine_tp": 1}, "two orders"),
        ("megatron", {"trainer_tp": 1, "context_parallel": 2, "engine_tp": 2}, "the down product"),
        ("megatron", {"trainer_tp": 2, "engine_tp": 2}, "the down product adds .* both to 8"),
        ("megatron", {"trainer_tp": 0}, "trainer_tp: got 0; a side has 1 rank or more"),
        ("megatron", {"engine_tp": -2}, "engine_tp: got -2"),
        ("megatron", {"context_parallel": 0}, "context_parallel: got 0"),
        (
            "megatron",
            {"trainer_tp": 16, "engine_tp": 16},
            "trainer_tp 16 x context_parallel 1 does not share out 32 he",
        ),
        ("fsdp", {"engine_tp": 2}, "set engine_tp 1$"),
        ("fsdp", {"trainer_tp": 2, "engine_tp": 2}, "data parallel alone"),
        ("fsdp", {"context_parallel": 2}, "data parallel alone"),
        ("fsdp", {"dtype": "fp32"}, "dtype: got 'fp32'"),
        ("fsdp", {"attention": "triton"}, "'triton' has no twin"),
        ("fsdp", {"attention": "sdpa"}, "attention: got 'sdpa'; choose one of fa3, flashinfer, triton"),
        ("fsdp", {"engine_gemm": "cublas"}, "engine_gemm: got 'cublas'; choose one of deep_gemm, triton_persistent"),
        ("deepspeed", {}, "backend: got 'deepspeed'; choose one of megatron, fsdp"),
    ],
)
def test_what_cannot_hold_is_refused(backend: str, layout: dict, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        model_contract("qwen3-4B", backend, **layout)


def test_ulysses_shares_the_heads_of_a_tensor_parallel_rank() -> None:
    """Of 24 heads a rank of 8 has 3, which 2 ranks cannot share."""
    size = Size(1024, 4096, 24, 8, 128, 151936)
    layout = {"trainer_tp": 8, "engine_tp": 8, "size": size}
    gpu_contract("qwen3-dense", "megatron", **layout)
    with pytest.raises(ContractError, match="trainer_tp 8 x context_parallel 2 does not share out 24 heads"):
        gpu_contract("qwen3-dense", "megatron", **{**layout, "engine_tp": 16}, context_parallel=2)


def test_the_advice_of_a_size_that_few_ranks_share_is_of_the_users_ranks() -> None:
    """An MLP of 3076 columns cannot be cut into 8 equal parts, one for each rank."""
    with pytest.raises(ContractError, match="engine_tp 1: the o product .* trainer_tp and engine_tp both to 2 or 4$"):
        gpu_contract("qwen3-dense", "megatron", size=Size(1024, 3076, 16, 8, 128, 151936))


def test_unknown_names_list_the_choices() -> None:
    for name in ("qwen3-30B-A3B", "Qwen3-235B-A22B-Instruct", "olmoe-7B"):
        with pytest.raises(ContractError, match=f"--model: '{name}' is not covered: MoE: no row for the router"):
            model_contract(name, "megatron")
    with pytest.raises(ContractError, match="--model: got 'qwen3-5B'; choose one of qwen3-0.6B, "):
        model_contract("qwen3-5B", "fsdp")
    with pytest.raises(ContractError, match="family: got 'gpt2'; choose one of qwen3-dense, "):
        gpu_contract("gpt2", "fsdp")
    with pytest.raises(ContractError, match="'qwen3-moe' is not covered: no row for the router"):
        family("qwen3-moe")


@pytest.mark.parametrize("name", GPU_FAMILIES)
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_a_family_that_no_host_knows_says_what_is_missing(name: str, backend: str) -> None:
    contract = gpu_contract(name, backend)
    assert bool(contract.family.missing) == (contract.family.host_contract is None)
    names = [operation.name for operation in contract.operations]
    assert ("q and k norm" in names) == contract.family.qk_norm
    products = {operation.name: operation.bits for operation in contract.operations}
    assert ("+ bias" in products["q, k, v product"]) == contract.family.qkv_bias
    assert ("sum over tensor-parallel ranks" in names) == (backend == "megatron")
    assert len(names) == len(set(names))


def test_the_engines_product_follows_the_trainers_unless_it_is_asked_otherwise() -> None:
    key = "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM"
    assert gpu_contract("qwen3-dense", "megatron").environment[key] == "0"
    assert gpu_contract("qwen3-dense", "fsdp").environment[key] == "1"
    other = gpu_contract("qwen3-dense", "megatron", engine_gemm="deep_gemm")
    assert other.environment[key] == "1"
    products = {row.name: row for row in other.operations}
    head, row_parallel = products["LM head"], products["o and down product"]
    assert head.trainer.startswith("Triton persistent") and head.engine.startswith("DeepGEMM")
    # SGLang's kernel for what tensor parallelism cuts is neither, whatever the switch says.
    assert row_parallel.trainer == head.trainer and "tp_invariant_ops.py" in row_parallel.engine
    alone = {row.name: row.engine for row in gpu_contract("qwen3-dense", "fsdp").operations}
    assert alone["o and down product"] == alone["LM head"] == head.engine


@pytest.mark.parametrize("gemm", CHOICES["engine_gemm"])
def test_on_fsdp_one_variable_chooses_the_products_of_both_sides(gemm: str) -> None:
    """Both run SGLang's mode, which a launch starts with one environment."""
    contract = gpu_contract("qwen3-dense", "fsdp", engine_gemm=gemm)
    assert contract.trainer_gemm == gemm
    (head,) = (row for row in contract.operations if row.name == "LM head")
    assert head.trainer == head.engine
    assert ("deep_gemm" in gpu.name(contract).split("+")) == (gemm == "deep_gemm")


def test_the_environment_is_checked_name_by_name() -> None:
    contract = gpu_contract("qwen3-dense", "megatron")
    check_environment(contract, contract.environment | {"HOME": "/"})
    for name in contract.environment:
        missing = {key: value for key, value in contract.environment.items() if key != name}
        with pytest.raises(ContractError, match=f"{name} is None; start .* with {name}={contract.environment[name]}$"):
            check_environment(contract, missing)
    with pytest.raises(ContractError, match="NCCL_ALGO is 'Tree'; .* NCCL_ALGO=Ring$"):
        check_environment(contract, contract.environment | {"NCCL_ALGO": "Tree"})


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
@pytest.mark.parametrize("name", GPU_FAMILIES)
def test_show_prints_every_row(name: str, backend: str, proof_command: ProofCommand) -> None:
    printed = proof_command("contract", "show", name, "--backend", backend).out
    contract = gpu_contract(name, backend)
    for row in contract.operations:
        assert row.name in printed and row.engine in printed
    for variable, value in contract.environment.items():
        assert f"{variable}={value}" in printed
    for gap in (*contract.family.missing, "no row for the router", "no host has run it on a GPU"):
        assert gap in printed
    for row in (*LAYOUTS[backend].items(), *compiled(backend)):
        assert all(cell in printed for cell in row)
    assert "the blog runs torch.compile on parts of the models, rope among them; this contract turns it off" in printed
    assert ("No release launches this family" in printed) == bool(contract.family.missing)


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_what_is_printed_as_refused_is_refused_and_the_rest_holds(backend: str) -> None:
    contract = gpu_contract("qwen3-dense", backend)
    asked = {f"attention {name}": {"attention": name} for name in CHOICES["attention"]}
    whose = {"megatron": "engine's", "fsdp": "both sides'"}[backend]
    asked |= {f"{whose} products {name}": {"engine_gemm": name} for name in CHOICES["engine_gemm"]}
    assert set(asked) - set(contract.alternatives) == {"attention fa3", f"{whose} products {contract.engine_gemm}"}
    for name, told in contract.alternatives.items():
        if told.startswith("refused"):
            with pytest.raises(ContractError, match="has no twin"):
                gpu_contract("qwen3-dense", backend, **asked[name])
        else:
            gpu_contract("qwen3-dense", backend, **asked[name])


# By the words of a row: what becomes of x / rms and an fp32 weight.
ROUNDINGS = {
    "x / rms * weight, all fp32": lambda x, weight: x * weight,
    "x / rms in fp32, rounded to bf16, times the weight in fp32": lambda x, weight: x.bfloat16() * weight,
}


@pytest.mark.parametrize(("name", "given"), [("RMSNorm of a layer", torch.float32), ("q and k norm", torch.bfloat16)])
def test_norms_round_as_hugging_faces_do_on_the_trainers_dtypes(name: str, given: torch.dtype) -> None:
    """The FSDP trainer's own class, on the fp32 stream and on the bf16 product: the other row's rounding is no twin."""
    (row,) = (row for row in gpu_contract("qwen3-dense", "fsdp").operations if row.name == name)
    words = row.bits.partition(";")[0]
    generator = torch.Generator().manual_seed(0)
    stream = torch.randn(64, 128, generator=generator).to(given)
    norm = Qwen3RMSNorm(128)
    norm.weight.data = torch.rand(128, generator=generator) + 0.5
    wide = stream.float()
    normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    equal = [each for each in ROUNDINGS if equal_bits(norm(stream), ROUNDINGS[each](normalized, norm.weight))]
    assert equal == [words]


def test_show_refuses_a_family_with_exit_2(proof_command: ProofCommand) -> None:
    assert "not covered" in proof_command("contract", "show", "qwen3-moe", code=2).err


def test_the_contract_imports_no_torch() -> None:
    """It is printed on machines that only launch."""
    code = "import sys, true_on_policy.contract.gpu, true_on_policy.flags.command; sys.exit('torch' in sys.modules)"
    assert ran("-c", code).returncode == 0
