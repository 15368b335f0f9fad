"""What trainer and engine really run, row by row: the checks of a contract, and what each side showed."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from mis_plugins.shared.table import print_table, printable
from true_on_policy.contract.gpu import DEEP_GEMM, GpuContract
from true_on_policy.doctor.engine_http import ALONE, LOG_SOFTMAX, PREFILLED, SCORED, VERSION, observe_engine
from true_on_policy.errors import PinError
from true_on_policy.flags.command import HOOK, host_contract
from true_on_policy.kernels import gpu
from true_on_policy.kernels.mode import SHARED
from true_on_policy.observe.dumps import RANKS, load, load_engine
from true_on_policy.observe.fused import CHOSEN, FUSED
from true_on_policy.observe.process import ALL, COMPILES, KERNELS, PRODUCTS, Observation, observe

Verdict = Literal["green", "red", "not seen", ""]
EXIT: dict[Verdict, int] = {"green": 0, "": 0, "not seen": 2, "red": 1}

# The values that one side may show: None asks nothing of the side, an empty tuple accepts every value.
Wanted = tuple[str, ...] | None
ANY: Wanted = ()
INIT = {
    "megatron": "--custom-megatron-init-path true_on_policy.hosts.miles_init",
    "fsdp": f"Ray's worker_process_setup_hook {HOOK}",
}


@dataclass(frozen=True)
class Check:
    """A check is one row of the doctor, before either side is observed.

    Attributes:
        trainer, engine: the values that each side may show.
        remedy: what to set where a side shows another value.
        equal: whether both sides must show one value.
    """

    name: str
    trainer: Wanted
    engine: Wanted
    remedy: str = ""
    equal: bool = False


SAME_PRODUCTS = (
    "leave --gemm at the trainer's; one GPU kind on both sides; on several ranks releases that add up o and down alike "
    "(docs/gpu.md)"
)
DETERMINISTIC = "--sglang-enable-deterministic-inference"
IN_ENGINE = f"in the engine: {DETERMINISTIC}"
PREFILL = "--recompute-logprobs-via-prefill"
APEX = "pip uninstall apex: the package has NVIDIA's name alone (NVIDIA's own, from source: docs/gpu.md)"
SEEDS = f"{DETERMINISTIC}: without a seed each, all samples of a prompt are one"


def checks(contract: GpuContract, scored: bool) -> tuple[Check, ...]:
    """List the checks of a contract.

    Args:
        scored: whether the rollout's log-probs come from prefill, so that any log-probs of decode are
            accepted.

    Raises:
        ContractError: no release of the host carries the family.
    """
    in_trainer = f"pin in the trainer: {INIT[contract.backend]}"
    return (
        *_versions(contract),
        *_kernels(contract, scored, in_trainer),
        *_modes(contract, in_trainer),
        *_gemms(contract, in_trainer),
        *_arithmetic(contract, in_trainer),
        *_layout(contract),
        Check("temperature", ("1",), None, "--rollout-temperature 1"),
        Check("top-p", ("1",), None, "--rollout-top-p 1"),
        Check("top-k", ("-1",), None, "--rollout-top-k -1"),
        Check("seeds of a prompt's samples", ("one each",), ("one each",), SEEDS),
        Check("log-probs come from", ANY, None),
    )


def _versions(contract: GpuContract) -> Iterator[Check]:
    yield Check("device", ANY, ("cuda",), "start the engine on a GPU")
    alike = "start all ranks with one environment; a rank that wrote nothing has failed"
    yield Check(RANKS, ("all",), ("all",), alike)
    yield from (Check(name, ANY, ANY) for name in ("torch", "CUDA", "NCCL", "Triton", "transformers"))
    yield from (Check(name, ANY, None) for name in ("Megatron-core", "Transformer Engine"))
    one = "one SGLang: the trainer runs the engine's kernels"
    yield Check("SGLang", ANY, ANY, one, equal=contract.mode == "sglang")
    yield Check("Apex", ("absent", "NVIDIA's"), None, APEX)
    yield Check("norm of the local spec", ANY, None)
    if contract.backend == "megatron":  # Transformer Engine's and Apex's kernels
        yield from (Check(row, ANY, None) for row, _, _ in CHOSEN)
        yield from (Check(kernel.row, kernel.wanted, None, kernel.remedy) for kernel in FUSED)


def _kernels(contract: GpuContract, scored: bool, in_trainer: str) -> Iterator[Check]:
    both, decode = f"{in_trainer}; {IN_ENGINE}", ANY if scored else ("equal",)
    yield Check(KERNELS, ("batch-invariant",), ("batch-invariant",), both)
    yield Check(PRODUCTS, ANY, ANY, SAME_PRODUCTS, equal=True)
    yield Check(PREFILLED, None, ("equal",), DETERMINISTIC)
    yield Check(ALONE, None, decode, DETERMINISTIC)
    yield Check(SCORED, None, decode, PREFILL)
    yield Check("flash_attention: FA3 default num_splits", ("1",), ("1",), both)
    yield Check("attention", None, (contract.attention,), f"--sglang-attention-backend {contract.attention}")
    yield Check("radix cache", None, ANY)
    yield Check("CUDA graph", None, ANY)


# The last part of the path of each copy of the batch-invariant mode, as kernels.mode describes it.
MODE_FILES = {
    "megatron": "batch_invariant_kernels.py of megatron",
    "sglang": "batch_invariant_ops.py of sglang",
}


def _modes(contract: GpuContract, in_trainer: str) -> Iterator[Check]:
    """Check whose kernels the dispatcher runs: SGLang's in the engine, the contract's mode in the trainer."""
    for mode, file in MODE_FILES.items():
        remedies = {}
        if mode == contract.mode:
            remedies["trainer"] = in_trainer
        if mode == "sglang":
            remedies["engine"] = IN_ENGINE
        if remedies:
            flags: list[Wanted] = [ANY if side in remedies else None for side in ("trainer", "engine")]
            files: list[Wanted] = [(file,) if side in remedies else None for side in ("trainer", "engine")]
            yield Check(f"{mode}: batch-invariant flag", flags[0], flags[1])
            for name in SHARED:
                yield Check(f"{mode}: aten::{name}", files[0], files[1], " ".join(remedies.values()))


# What Transformer Engine's general_gemm may be: absent, not imported, or the function of this module.
TE_GEMMS = ("absent", "not imported", "megatron.core.transformer.custom_layers.batch_invariant_kernels")


def _gemms(contract: GpuContract, in_trainer: str) -> Iterator[Check]:
    """List the checks of the GEMM libraries, on each side that uses them."""
    trainer, engine = (gemm == "deep_gemm" for gemm in (contract.trainer_gemm, contract.engine_gemm))
    own = contract.mode == "sglang"  # the trainer runs the engine's mode
    if not own:
        yield Check("megatron: te general_gemm", TE_GEMMS, None, in_trainer)
    if trainer or engine:
        modes, switch = ("deterministic", "always invariant"), "deep_gemm.use_deterministic_algorithms(True)"
        yield Check("deep_gemm: DeepGEMM mode", modes if trainer else None, modes if engine else None, switch)
    asked, variable = ("on" if engine else "off",), f"{DEEP_GEMM}={int(engine)} before the processes start"
    installs = "; install sgl-deep-gemm; SGLANG_ENABLE_JIT_DEEPGEMM=1" if engine else ""
    yield Check("sglang: MM DeepGEMM", asked if own else None, asked, variable + installs)
    fallback = "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_FALLBACK_VARIANT=0 before the processes start"
    yield Check("sglang: MM fallback variant", ("off",) if own else None, ("off",), fallback)


def _arithmetic(contract: GpuContract, in_trainer: str) -> Iterator[Check]:
    tf32 = f"{in_trainer}; in the engine: no --sglang-enable-tf32-matmul; no NVIDIA_TF32_OVERRIDE"
    yield Check("TF32", ("off",), ("off",), tf32)
    yield Check(COMPILES, ("off",), ("off",), "TORCH_COMPILE_DISABLE=1; no --sglang-enable-torch-compile")
    yield Check("deterministic algorithms", ("on",), None, "--deterministic-mode")
    rounds = (
        "--true-on-policy-mode, without --fp16; in the engine: --sglang-true-on-policy-contract "
        f"{host_contract(contract.family)}, without --sglang-enable-fp32-lm-head"
    )
    yield Check(LOG_SOFTMAX, ("bf16",), ("bf16",), rounds)
    for name, value in contract.environment.items():
        # On several ranks SGLang sets NCCL_ALGO itself, which changes no bit: the contract's sums are not NCCL's.
        own = ("allreduce:tree",) if name == "NCCL_ALGO" and contract.engine_tp > 1 else ()
        yield Check(name, (value,), (value, *own), f"{name}={value} before the processes start")
    yield Check("KV cache", None, ("auto", "bfloat16", "bf16"), "no --sglang-kv-cache-dtype")
    yield Check("quantization", None, ("None",), "no --sglang-quantization")
    yield Check("speculative decoding", None, ("None",), "no --sglang-speculative-algorithm")


def _layout(contract: GpuContract) -> Iterator[Check]:
    name = host_contract(contract.family)
    yield Check("contract", (name,), (name,), f"--sglang-true-on-policy-contract {name}")
    yield Check("deterministic inference", None, ("on",), DETERMINISTIC)
    tensor, context, engine = map(str, (contract.trainer_tp, contract.context_parallel, contract.engine_tp))
    ranks = f"--rollout-num-gpus-per-engine {engine}"
    if contract.backend == "fsdp":
        yield Check("tensor parallel", None, (engine,), ranks)
    else:
        both = f"--tensor-model-parallel-size {tensor} {ranks}"
        yield Check("tensor parallel", (tensor,), (engine,), both)
        yield Check("context parallel", (context,), None, f"--context-parallel-size {context}")


@dataclass(frozen=True)
class Row:
    """A row of the doctor: a check, its verdict and what each side shows.

    Attributes:
        trainer, engine: the value of each side, or in brackets why the value was not seen.
        how: `observed` or `configured` for each side that has a value, once where both are alike.
    """

    check: Check
    verdict: Verdict
    trainer: str
    engine: str
    how: str

    @property
    def cells(self) -> tuple[str, ...]:
        remedy = self.check.remedy or "the same on every rank"
        return (
            self.verdict,
            self.check.name,
            self.trainer,
            self.engine,
            self.how,
            remedy if self.verdict == "red" else "",
        )


def diagnose(contract: GpuContract, trainer: Observation, engine: Observation) -> list[Row]:
    """Judge every check of a contract against both sides, in the order of `checks`."""
    scored = trainer.settings.get("log-probs come from") == "prefill"
    return [_judge(check, trainer, engine) for check in checks(contract, scored)]


def _judge(check: Check, trainer: Observation, engine: Observation) -> Row:
    sides = [(check.trainer, trainer), (check.engine, engine)]
    asked = [(wanted, side) for wanted, side in sides if wanted is not None]
    verdicts: list[Verdict] = [_verdict(check.name, wanted, side) for wanted, side in asked]
    if check.equal:
        verdicts.append(_equal(check.name, trainer, engine))
    cells = [_cell(check.name, wanted, side) for wanted, side in sides]
    how = dict.fromkeys(side.how(check.name) for _, side in asked)
    return Row(check, _worst(verdicts), cells[0], cells[1], " / ".join(filter(None, how)))


SEVERITY: tuple[Verdict, ...] = ("", "green", "not seen", "red")


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    return max(verdicts, key=SEVERITY.index)


def _verdict(name: str, wanted: tuple[str, ...], side: Observation) -> Verdict:
    if name in side.split:
        return "red"
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


def diagnosed(contract: GpuContract | None, arguments: argparse.Namespace) -> int:
    """Observe both sides, print the table of checks, and return the exit code of the worst row.

    Args:
        contract: what the arguments ask for; None where the trainer's file states it.
    """
    contract, trainer = load(arguments.trainer_dump) if contract is None else (contract, _stand_in(contract))
    engine = _engine(arguments.engine, arguments.engine_dump)
    rows = diagnose(contract, trainer, engine)
    shown, unasked = asked(rows, engine)
    shown, notes = noted(shown)
    print_table(("", "setting", "trainer", "engine", "how", "set"), [row.cells for row in shown])
    for note in (*unasked, *notes):
        print("\n" + "\n".join(map(printable, note.splitlines())))
    verdicts: list[Verdict] = [row.verdict for row in rows]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("green", "red", "not seen"))
    print(f"\n{counts}")
    return EXIT[_worst(verdicts)]


NOT_ASKED = "(not asked)"


def asked(rows: Sequence[Row], engine: Observation) -> tuple[Sequence[Row], list[str]]:
    """Leave out rows of the engine alone where it could not be asked; return the trainer's rows, and a note why."""
    if engine.settings or engine.unseen.keys() != {ALL}:
        return rows, []
    unasked = [row for row in rows if row.check.engine is not None]
    hidden = [row for row in unasked if row.check.trainer is None]
    shown = [replace(row, engine=NOT_ASKED) if row in unasked else row for row in rows if row not in hidden]
    return shown, [
        f"engine: could not be asked, so that {len(unasked)} rows could not be checked, of which {len(hidden)} ask "
        f"the engine alone and are not shown: {engine.unseen[ALL]}"
    ]


LONG = 60  # letters; a longer reason that stands in several cells becomes a note


def noted(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """Replace a long reason that several cells share by a number; return the rows, and each such reason as a note."""
    counts = Counter(cell for row in rows for cell in (row.trainer, row.engine) if cell)
    shared = [cell for cell, count in counts.items() if count > 1 and cell[0] == "(" and len(cell) > LONG]
    names = {cell: f"(reason {number})" for number, cell in enumerate(shared, 1)}
    shown = [
        replace(row, trainer=names.get(row.trainer, row.trainer), engine=names.get(row.engine, row.engine))
        for row in rows
    ]
    return shown, [f"{name[1:-1]}: {cell[1:-1]}" for cell, name in names.items()]


def _stand_in(contract: GpuContract) -> Observation:
    """Let this machine stand in for the trainer."""
    seen = _pinned_here(contract)
    of_shell = {COMPILES, *contract.environment}  # TORCH_COMPILE_DISABLE of the shell decides COMPILES
    settings = {name: value for name, value in seen.settings.items() if name not in of_shell}
    return Observation(settings, {ALL: NO_DUMP, **seen.unseen}, seen.configured)


def _pinned_here(contract: GpuContract) -> Observation:
    """Observe this machine, with the contract pinned for a moment where there is an accelerator."""
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
NOT_OVER_HTTP = "HTTP does not tell it: no --engine-dump"


def _engine(url: str | None, path: Path | None) -> Observation:
    """Observe the engine over HTTP where a URL is given, and from inside where a dump is given."""
    if url is not None:
        _tell(f"asking {url} for a few tokens")
    told = Observation({}, {ALL: "no --engine"}) if url is None else observe_engine(url)
    if path is None:
        return Observation(told.settings, {ALL: NOT_OVER_HTTP, **told.unseen}, told.configured)
    return joined(told, load_engine(path, url))


# Rows that both HTTP and the dump report, spelled alike.
TOLD_TWICE = (VERSION, "tensor parallel")


def joined(told: Observation, inside: Observation) -> Observation:
    """Join what a server tells over HTTP with what its processes wrote; the file wins where both have a row.

    A row of TOLD_TWICE in which server and file differ is marked split: another server wrote the file.
    """
    other = [
        name
        for name in TOLD_TWICE
        if name in told.settings and told.settings[name] != inside.settings.get(name, told.settings[name])
    ]
    twice = {name: f"{inside.settings[name]} in the file; {told.settings[name]} over HTTP" for name in other}
    return Observation(
        {**told.settings, **inside.settings, **twice},
        {**inside.unseen, **told.unseen},
        (*(set(told.configured) - inside.settings.keys()), *inside.configured),
        (*inside.split, *other),
    )


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
