"""`python -m true_on_policy doctor`: what trainer and engine really run, next to each other, and what to set.

Exit codes: 0 green; 1 red; 2 something that the contract needs could not be looked at. Without a trainer's file, this
machine pins the contract for a moment and is looked at in the trainer's place; its environment, a shell's, is not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from true_on_policy.engine_settings import observe_engine
from true_on_policy.errors import PinError
from true_on_policy.flags import add_contract_arguments, contract_of
from true_on_policy.gpu_contract import GpuContract
from true_on_policy.kernels import gpu
from true_on_policy.settings import ALL, COMPILES, KERNELS, PRODUCTS, Observation, load, observe
from true_on_policy.table import print_table

Verdict = Literal["green", "red", "not seen", ""]
EXIT: dict[Verdict, int] = {"green": 0, "": 0, "not seen": 2, "red": 1}

# What one side must show: nothing is asked of it, anything will do, or one of these.
Wanted = tuple[str, ...] | None
ANY: Wanted = ()
INIT = "--custom-megatron-init-path true_on_policy.hosts.miles_init"


@dataclass(frozen=True)
class Check:
    """One row.

    Attributes:
        name: of the setting, on both sides.
        trainer, engine: what each must show.
        remedy: what to set where it does not.
        equal: both must show the same.
    """

    name: str
    trainer: Wanted
    engine: Wanted
    remedy: str = ""
    equal: bool = False


def checks(contract: GpuContract, scored: bool) -> tuple[Check, ...]:
    """The rows of a contract; `scored`: log-probs come from prefill, so those of decode need not agree with it."""
    return (
        *_versions(contract),
        *_kernels(contract, scored),
        *_arithmetic(contract),
        *_layout(contract),
        *_sampling(),
    )


def _versions(contract: GpuContract) -> tuple[Check, ...]:
    own = contract.mode == "sglang"
    shown = ("torch", "CUDA", "NCCL", "Triton", "transformers", "Megatron-core", "Transformer Engine")
    return (
        Check("device", ANY, ("cuda",), "start the engine on a GPU"),
        *(Check(name, ANY, None) for name in shown),
        Check("SGLang", ANY, ANY, "one SGLang: the trainer runs the engine's kernels", equal=own),
        Check(
            "Apex", ("absent", "NVIDIA's"), None, "pip uninstall apex: it has NVIDIA's name and nothing of it"
        ),
        Check("norm of the local spec", ANY, None),
    )


def _kernels(contract: GpuContract, scored: bool) -> tuple[Check, ...]:
    mode, file = contract.mode, MODE_FILES[contract.mode]
    pinned = f"pin in the trainer: {INIT}" if contract.backend == "megatron" else "--true-on-policy-mode"
    operators = ("mm", "addmm", "_log_softmax", "mean.dim")
    deterministic = "--sglang-enable-deterministic-inference"
    return (
        Check(KERNELS, ("batch-invariant",), None, pinned),
        Check(PRODUCTS, ("one kernel", "equal"), ("one kernel", "equal"), "leave --gemm at the trainer's"),
        Check("a row alone and in a batch", None, ("equal",), deterministic),
        Check("decode and prefill", None, ANY if scored else ("equal",), "--recompute-logprobs-via-prefill"),
        Check(f"{mode}: batch-invariant flag", ANY, None),
        *(Check(f"{mode}: aten::{name}", (file,), None, pinned) for name in operators),
        *_gemm(contract),
        Check("flash_attention: FA3 default num_splits", ("1",), None, pinned),
        Check("attention", None, (contract.attention,), f"--sglang-attention-backend {contract.attention}"),
        Check("radix cache", None, ANY),
        Check("CUDA graph", None, ANY),
    )


# The last part of the path of each copy of the batch-invariant mode, as kernels.dispatcher describes it.
MODE_FILES = {
    "megatron": "batch_invariant_kernels.py of megatron",
    "sglang": "batch_invariant_ops.py of sglang",
}


# Whose function Transformer Engine multiplies by, where it is there at all.
TE_GEMMS = ("absent", "not imported", "megatron.core.transformer.custom_layers.batch_invariant_kernels")


def _gemm(contract: GpuContract) -> tuple[Check, ...]:
    """Of the products' library, on each side that multiplies by it."""
    trainer, engine = (gemm == "deep_gemm" for gemm in (contract.trainer_gemm, contract.engine_gemm))
    own = Check("megatron: te general_gemm", TE_GEMMS, None, f"pin in the trainer: {INIT}")
    rows = () if trainer else (own,)
    if not trainer and not engine:
        return rows
    switch = "deep_gemm.use_deterministic_algorithms(True)"
    off = "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_FALLBACK_VARIANT=0 before SGLang is imported"
    install = "install sgl-deep-gemm; SGLANG_ENABLE_JIT_DEEPGEMM=1"
    on_both = lambda *wanted: (wanted if trainer else None, wanted if engine else None)  # noqa: E731
    return (
        *rows,
        Check("deep_gemm: DeepGEMM mode", *on_both("deterministic", "always invariant"), switch),
        Check("sglang: MM DeepGEMM", *on_both("on"), install),
        Check("sglang: MM fallback variant", *on_both("off"), off),
    )


def _arithmetic(contract: GpuContract) -> tuple[Check, ...]:
    tf32 = "torch.backends.cuda.matmul.allow_tf32 = False"
    return (
        Check("TF32", ("off",), None, tf32),
        Check(COMPILES, ("off",), ("off",), "TORCH_COMPILE_DISABLE=1; no --sglang-enable-torch-compile"),
        Check("deterministic algorithms", ("on",), None, "--deterministic-mode"),
        Check("log-softmax", ("bf16",), None, "--true-on-policy-mode"),
        *(
            Check(name, (value,), (value,), f"{name}={value} before the processes start")
            for name, value in contract.environment.items()
        ),
        Check("KV cache", None, ("auto", "bfloat16", "bf16"), "no --sglang-kv-cache-dtype"),
        Check("quantization", None, ("None",), "no --sglang-quantization"),
        Check("speculative decoding", None, ("None",), "no --sglang-speculative-algorithm"),
    )


def _layout(contract: GpuContract) -> tuple[Check, ...]:
    name = str(contract.family.host_contract)
    tensor, context, engine = map(str, (contract.trainer_tp, contract.context_parallel, contract.engine_tp))
    own = "--rollout-num-gpus-per-engine"
    return (
        Check("contract", (name,), (name,), f"--sglang-true-on-policy-contract {name}"),
        Check("deterministic inference", None, ("on",), "--sglang-enable-deterministic-inference"),
        *(
            (Check("tensor parallel", None, (engine,), f"{own} {engine}"),)
            if contract.backend == "fsdp"
            else (
                Check(
                    *("tensor parallel", (tensor,), (engine,)),
                    f"--tensor-model-parallel-size {tensor} {own} {engine}",
                ),
                Check("context parallel", (context,), None, f"--context-parallel-size {context}"),
            )
        ),
    )


def _sampling() -> tuple[Check, ...]:
    seeded = "--sglang-enable-deterministic-inference: without a seed each, all samples of a prompt are one"
    return (
        Check("temperature", ("1",), None, "--rollout-temperature 1"),
        Check("top-p", ("1",), None, "--rollout-top-p 1"),
        Check("top-k", ("-1",), None, "--rollout-top-k -1"),
        Check("seeds of a prompt's samples", ("one each",), ("one each",), seeded),
        Check("log-probs come from", ANY, None),
    )


@dataclass(frozen=True)
class Row:
    """A check and what was found: the value of each side, or in brackets why it was not seen."""

    check: Check
    verdict: Verdict
    trainer: str
    engine: str

    @property
    def cells(self) -> tuple[str, ...]:
        remedy = self.check.remedy if self.verdict == "red" else ""
        return self.verdict, self.check.name, self.trainer, self.engine, remedy


def diagnose(contract: GpuContract, trainer: Observation, engine: Observation) -> list[Row]:
    """Every row, judged; in the order of `checks`."""
    scored = trainer.settings.get("log-probs come from") == "prefill"
    return [_judge(check, trainer, engine) for check in checks(contract, scored)]


def _judge(check: Check, trainer: Observation, engine: Observation) -> Row:
    sides = [(check.trainer, trainer), (check.engine, engine)]
    verdicts: list[Verdict] = [
        _verdict(check.name, wanted, side) for wanted, side in sides if wanted is not None
    ]
    if check.equal:
        verdicts.append(_equal(check.name, trainer, engine))
    return Row(check, _worst(verdicts), *(_cell(check.name, wanted, side) for wanted, side in sides))


SEVERITY: tuple[Verdict, ...] = ("", "green", "not seen", "red")


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    return SEVERITY[max(map(SEVERITY.index, verdicts))]


def _verdict(name: str, wanted: tuple[str, ...], side: Observation) -> Verdict:
    if not wanted:
        return ""
    if name not in side.settings:
        return "not seen"
    return "green" if side.settings[name] in wanted else "red"


def _equal(name: str, trainer: Observation, engine: Observation) -> Verdict:
    if name not in trainer.settings or name not in engine.settings:
        return "not seen"
    return "green" if trainer.settings[name] == engine.settings[name] else "red"


def _cell(name: str, wanted: Wanted, side: Observation) -> str:
    if wanted is None:
        return "-"
    return side.settings[name] if name in side.settings else f"({side.why(name)})"


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "doctor", help="what trainer and engine really run, and what to set", description=__doc__
    )
    parser.add_argument(
        "--engine", metavar="URL", help="a running SGLang, for example http://127.0.0.1:30000"
    )
    parser.add_argument(
        "--trainer-dump", metavar="FILE", type=Path, help="what the trainer's init hook wrote"
    )
    add_contract_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    contract, trainer = _trainer(arguments)
    engine = _engine(arguments.engine)
    rows = diagnose(contract, trainer, engine)
    print_table(("", "setting", "trainer", "engine", "set"), [row.cells for row in rows])
    return _conclude(rows)


def _trainer(arguments: argparse.Namespace) -> tuple[GpuContract, Observation]:
    if arguments.trainer_dump is not None:
        return load(arguments.trainer_dump)
    contract = contract_of(arguments)
    seen = _pinned_here(contract)
    of_shell = {COMPILES, *contract.environment}  # TORCH_COMPILE_DISABLE decides the first
    settings = {name: value for name, value in seen.settings.items() if name not in of_shell}
    return contract, Observation(settings, {ALL: NO_DUMP, **seen.unseen})


def _pinned_here(contract: GpuContract) -> Observation:
    """This machine, with the contract pinned for a moment where there is an accelerator."""
    _tell("looking at this machine")
    with ExitStack() as stack:
        if torch.cuda.is_available():
            _tell(f"pinning {gpu.name(contract)} and probing it")
            try:
                stack.callback(gpu.install(contract))
            except PinError as error:
                return Observation({KERNELS: str(error)}, {})
        return observe(contract)


NO_DUMP = "no --trainer-dump"
NO_ENGINE = Observation({}, {ALL: "no --engine"})


def _engine(url: str | None) -> Observation:
    if url is None:
        return NO_ENGINE
    _tell(f"asking {url} for a few tokens")
    return observe_engine(url)


def _conclude(rows: Sequence[Row]) -> int:
    """Says how many of each, and which code that is."""
    counts = {verdict: [row.verdict for row in rows].count(verdict) for verdict in SEVERITY}
    print(f"\n{counts['green']} green, {counts['red']} red, {counts['not seen']} not seen")
    return EXIT[_worst([row.verdict for row in rows])]


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
