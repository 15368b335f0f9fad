"""What trainer and engine really run, row by row: the checks of a contract, and what each side showed."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from mis_plugins.shared.terminal import print_table, printable, tell
from true_on_policy.contract.gpu import GpuContract
from true_on_policy.contract.settings import SETTINGS, Check, Wanted
from true_on_policy.doctor.engine_http import VERSION, observe_engine
from true_on_policy.errors import PinError
from true_on_policy.flags.command import HOOK, host_contract
from true_on_policy.kernels import gpu, megatron, sglang
from true_on_policy.observe.dumps import load, load_engine
from true_on_policy.observe.process import ALL, COMPILES, KERNELS, Observation, observe

Verdict = Literal["green", "red", "not seen", ""]
EXIT: dict[Verdict, int] = {"": 0, "green": 0, "not seen": 2, "red": 1}  # the worst verdict is the last

INIT = {
    "megatron": "--custom-megatron-init-path true_on_policy.hosts.miles_init",
    "fsdp": f"Ray's worker_process_setup_hook {HOOK}",
}
DETERMINISTIC = "--sglang-enable-deterministic-inference"


def checks(contract: GpuContract, scored: bool) -> tuple[Check, ...]:
    """List the checks of a contract: its settings, and its variables.

    Args:
        scored: whether the rollout's log-probs come from prefill, so that any log-probs of decode are
            accepted.

    Raises:
        ContractError: no release of the host carries the family.
    """
    cases = (contract.backend, f"trainer {contract.trainer_gemm}", f"engine {contract.engine_gemm}")
    cases += ("prefilled" if scored else "decoded",)
    words = _words(contract)
    return (*filter(None, (setting.check(cases, words) for setting in SETTINGS)), *_variables(contract))


def _words(contract: GpuContract) -> dict[str, str]:
    """The words of a contract that the texts of settings name."""
    in_trainer = f"pin in the trainer: {INIT[contract.backend]}"
    in_engine = f"in the engine: {DETERMINISTIC}"
    return {
        "in_trainer": in_trainer,
        "both": f"{in_trainer}; {in_engine}",
        "sglang_mode": f"{in_trainer} {in_engine}" if contract.mode == "sglang" else in_engine,
        "deterministic": DETERMINISTIC,
        "attention": contract.attention,
        "contract": host_contract(contract.family),
        "deep_gemm": "on" if contract.engine_gemm == "deep_gemm" else "off",
        "megatron_module": megatron.MODE.module,
        "megatron_file": megatron.MODE.file,
        "sglang_file": sglang.MODE.file,
        "trainer_tp": str(contract.trainer_tp),
        "engine_tp": str(contract.engine_tp),
        "context": str(contract.context_parallel),
    }


def _variables(contract: GpuContract) -> Iterator[Check]:
    for name, value in contract.environment.items():
        # On several ranks SGLang sets NCCL_ALGO itself, which changes no bit: the contract's sums are not NCCL's.
        own = ("allreduce:tree",) if name == "NCCL_ALGO" and contract.engine_tp > 1 else ()
        yield Check(name, (value,), (value, *own), f"{name}={value} before the processes start")


@dataclass(frozen=True)
class Row:
    """A row of the doctor: a check, its verdict and what each side shows.

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
        remedy = (self.check.remedy or "the same on every rank") if self.verdict == "red" else ""
        return self.verdict, self.check.name, self.trainer, self.engine, self.how, remedy


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


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    return max(verdicts, key=[*EXIT].index)


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
    shown, notes = asked(rows, engine)
    print_table(("", "setting", "trainer", "engine", "how", "set"), [row.cells for row in shown])
    for note in notes:
        print("\n" + "\n".join(map(printable, note.splitlines())))
    verdicts: list[Verdict] = [row.verdict for row in rows]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("green", "red", "not seen"))
    print(f"\n{counts}")
    return EXIT[_worst(verdicts)]


def asked(rows: Sequence[Row], engine: Observation) -> tuple[Sequence[Row], list[str]]:
    """Leave out rows of the engine alone where it could not be asked; return the trainer's rows, and a note why."""
    if engine.settings or engine.unseen.keys() != {ALL}:
        return rows, []
    unasked = [row for row in rows if row.check.engine is not None]
    hidden = [row for row in unasked if row.check.trainer is None]
    shown = [replace(row, engine="(not asked)") if row in unasked else row for row in rows if row not in hidden]
    return shown, [
        f"engine: could not be asked, so that {len(unasked)} rows could not be checked, of which {len(hidden)} ask "
        f"the engine alone and are not shown: {engine.unseen[ALL]}"
    ]


def _stand_in(contract: GpuContract) -> Observation:
    """Let this machine stand in for the trainer."""
    seen = _pinned_here(contract)
    of_shell = {COMPILES, *contract.environment}  # TORCH_COMPILE_DISABLE of the shell decides COMPILES
    settings = {name: value for name, value in seen.settings.items() if name not in of_shell}
    return Observation(settings, {ALL: "no --trainer-dump", **seen.unseen}, seen.configured)


def _pinned_here(contract: GpuContract) -> Observation:
    """Observe this machine, with the contract pinned for a moment where there is an accelerator."""
    tell("looking at this machine")
    with ExitStack() as stack:
        if torch.cuda.is_available():
            tell(f"pinning {gpu.name(contract)} and probing it")
            try:
                stack.callback(gpu.install(contract))
            except PinError as error:
                return Observation({KERNELS: str(error)}, {})
        return observe(contract)


def _engine(url: str | None, path: Path | None) -> Observation:
    """Observe the engine over HTTP where a URL is given, and from inside where a dump is given."""
    if url is not None:
        tell(f"asking {url} for a few tokens")
    over_http = Observation({}, {ALL: "no --engine"}) if url is None else observe_engine(url)
    if path is None:
        unseen = {ALL: "HTTP does not tell it: no --engine-dump", **over_http.unseen}
        return Observation(over_http.settings, unseen, over_http.configured)
    return joined(over_http, load_engine(path, url))


# Rows that both HTTP and the dump report, spelled alike.
TOLD_TWICE = (VERSION, "tensor parallel")


def joined(over_http: Observation, inside: Observation) -> Observation:
    """Join what a server tells over HTTP with what its processes wrote; the file wins where both have a row.

    A row of TOLD_TWICE in which server and file differ is marked split: another server wrote the file.
    """
    sides = over_http.settings, inside.settings
    other = [name for name in TOLD_TWICE if len({side[name] for side in sides if name in side}) > 1]
    twice = {name: f"{inside.settings[name]} in the file; {over_http.settings[name]} over HTTP" for name in other}
    return Observation(
        {**over_http.settings, **inside.settings, **twice},
        {**inside.unseen, **over_http.unseen},
        (*(set(over_http.configured) - inside.settings.keys()), *inside.configured),
        (*inside.split, *other),
    )
