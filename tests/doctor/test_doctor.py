"""The doctor: every row turns red by its own setting alone, says what to set, and what was not seen is never green."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import ProofCommand, ran
from replay import RECORDED, replayed
from stand_ins import FLASH_ATTENTION, Write, deep_gemm_source
from test_settings import HOST

from true_on_policy.__main__ import main
from true_on_policy.contract.gpu import DEEP_GEMM, WHY, GpuContract, model_contract
from true_on_policy.contract.settings import ANY, Check
from true_on_policy.doctor import diagnosis as doctor
from true_on_policy.doctor.diagnosis import Row, checks, diagnose
from true_on_policy.doctor.engine_http import ALONE, LOG_SOFTMAX, PREFILLED, PROBED, SCORED
from true_on_policy.engines.server import free_port
from true_on_policy.kernels import gpu
from true_on_policy.observe.dumps import Dump, Process, dump, this_process
from true_on_policy.observe.dumps import write as write_dump
from true_on_policy.observe.process import ALL, KERNELS, PRODUCTS, Observation

CONTRACTS = {
    "megatron": model_contract("qwen3-4B", "megatron", trainer_tp=8, engine_tp=8),
    "fsdp": model_contract("qwen3-4B", "fsdp"),
    "fsdp on Triton": model_contract("qwen3-4B", "fsdp", engine_gemm="triton_persistent"),
}
CASES = [
    (backend, check.name, side)
    for backend, contract in CONTRACTS.items()
    for check in checks(contract, scored=False)
    for side in ("trainer", "engine")
    if getattr(check, side) or check.equal and getattr(check, side) is not None
]


def healthy(contract: GpuContract) -> dict[str, Observation]:
    """Both sides as the contract wants them."""
    sides = {}
    for side in ("trainer", "engine"):
        wanted = {check.name: getattr(check, side) for check in checks(contract, scored=False)}
        sides[side] = Observation(
            {name: choices[0] if choices else "shown" for name, choices in wanted.items() if choices is not None}, {}
        )
    return sides


def judged(backend: str, **changed: Mapping[str, str]) -> list[Row]:
    """The rows of healthy sides where those in `changed` show other values, or in brackets why they show none."""
    sides = healthy(CONTRACTS[backend])
    for side, rows in changed.items():
        unseen = {name: why.strip("()") for name, why in rows.items() if why.startswith("(")}
        shown = {**sides[side].settings, **rows}
        sides[side] = Observation({name: shown[name] for name in shown if name not in unseen}, unseen)
    return diagnose(CONTRACTS[backend], **sides)


def worst(rows) -> int:
    return max(({"red": 1, "not seen": 2}.get(row.verdict, 0) for row in rows), key=[0, 2, 1].index)


@pytest.mark.parametrize("backend", CONTRACTS)
def test_what_the_contract_wants_is_green(backend: str) -> None:
    rows = judged(backend)
    assert worst(rows) == 0
    assert {row.verdict for row in rows} == {"green", ""}
    names = [row.check.name for row in rows]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("backend", "name", "side"), CASES)
def test_one_other_value_is_red_and_says_what_to_set(backend: str, name: str, side: str) -> None:
    rows = judged(backend, **{side: {name: "something else"}})
    (red,) = [row for row in rows if row.verdict == "red"]
    assert (red.check.name, worst(rows)) == (name, 1)
    assert "something else" in (red.trainer, red.engine)
    assert red.cells[-1] == red.check.remedy != ""


@pytest.mark.parametrize(("backend", "name", "side"), CASES)
def test_one_missing_value_is_not_seen(backend: str, name: str, side: str) -> None:
    rows = judged(backend, **{side: {name: "(the lamp is broken)"}})
    (unseen,) = [row for row in rows if row.verdict == "not seen"]
    assert (unseen.check.name, worst(rows), unseen.cells[-1]) == (name, 2, "")
    assert "(the lamp is broken)" in (unseen.trainer, unseen.engine)


# SGLang's mode for prefill splits decode's attention again, by the size of the batch.
PREFILL, DECODE = ({"log-probs come from": source} for source in ("prefill", "decode"))
DECODES = {name: "3 of 16 log-probs differ" for name in (SCORED, ALONE)}
PREFILLS = {PREFILLED: "3 of 55 log-probs differ"}
# As seen of 0.5.23 with --tp-size 2; on one rank nothing but the launch sets it.
OF_NCCL = {"NCCL_ALGO": "allreduce:tree"}


@pytest.mark.parametrize(
    ("backend", "trainer", "engine", "red"),
    [("megatron", {"contract": "none"}, {"contract": "(why)"}, ["contract"]),  # red outweighs what was not seen
     *(("megatron", {}, {name: DECODES[name]}, [name]) for name in DECODES),
     ("megatron", PREFILL, DECODES, []),  # decode may do as it likes where prefill is compared
     ("megatron", PREFILL, PREFILLS, [PREFILLED]),
     ("megatron", DECODE, PREFILLS, [PREFILLED]),
     ("megatron", {}, {"SGLang": "0.0.1"}, []),
     ("fsdp", {}, {"SGLang": "0.0.1"}, ["SGLang"]),  # a trainer on the engine's kernels needs its version
     ("megatron", {}, OF_NCCL, []),  # which SGLang sets itself on several ranks
     ("fsdp", {}, OF_NCCL, ["NCCL_ALGO"]),
     ("megatron", OF_NCCL, OF_NCCL, ["NCCL_ALGO"]),
     ("fsdp", OF_NCCL, OF_NCCL, ["NCCL_ALGO"])],
)  # fmt: skip
def test_what_is_red_depends_on_the_contract(backend: str, trainer: dict, engine: dict, red: list[str]) -> None:
    rows = judged(backend, trainer=trainer, engine=engine)
    assert [row.check.name for row in rows if row.verdict == "red"] == red and worst(rows) == bool(red)
    cells = {row.check.name: (row.trainer, row.engine) for row in rows}
    assert all(cells[name][0] == value for name, value in trainer.items())
    assert all(cells[name][1] == value for name, value in engine.items())


def test_deep_gemm_is_asked_for_where_the_trainer_runs_it() -> None:
    asked = {backend: {check.name for check in checks(contract, False)} for backend, contract in CONTRACTS.items()}
    assert "deep_gemm: DeepGEMM mode" in asked["fsdp"] - asked["megatron"]
    mixed = {check.name: check for check in checks(replace(CONTRACTS["megatron"], engine_gemm="deep_gemm"), False)}
    switch = mixed["deep_gemm: DeepGEMM mode"]
    assert switch.trainer is None and "deterministic" in (switch.engine or ())
    assert "megatron: te general_gemm" in mixed
    assert "megatron: aten::mm" in asked["megatron"] - asked["fsdp"]


@pytest.mark.parametrize("backend", CONTRACTS)
def test_rows_of_one_variable_want_one_value(backend: str) -> None:
    """SGLang reads it when it is imported, on both sides of FSDP: what it did and what it was told must go together."""
    asked = {check.name: check for check in checks(CONTRACTS[backend], False)}
    variable, read = asked[DEEP_GEMM], asked["sglang: MM DeepGEMM"]
    for told, did in ((variable.trainer, read.trainer), (variable.engine, read.engine)):
        assert did is None or (told, did) in ((("1",), ("on",)), (("0",), ("off",)))
    assert (read.trainer is None) == (CONTRACTS[backend].mode == "megatron")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
@pytest.mark.parametrize("printed", [True, False])
def test_a_machine_without_an_accelerator_is_not_seen_in_any_environment(
    printed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell's environment is no trainer's: with it or without, those rows are not seen."""
    names = CONTRACTS["megatron"].environment
    for name, value in names.items():
        monkeypatch.setenv(name, value) if printed else monkeypatch.delenv(name, raising=False)
    done = ran("-m", "true_on_policy", "doctor")
    assert done.returncode == 2, done.stderr
    rows = [line for line in done.stdout.splitlines() if KERNELS in line]
    assert len(rows) == 1 and rows[0].startswith("not seen") and "(no CUDA device)" in rows[0]
    assert " 0 red, " in done.stdout.splitlines()[-1]
    for name in ("torch.compile", *names):
        (row,) = [line for line in done.stdout.splitlines() if f" {name} " in line]
        assert row.startswith("not seen") and "(no --trainer-dump)" in row


# What the recorded engine would have told on GPUs, with the contract's flags.
ON_GPUS = {
    "device": "cuda",
    "tp_size": 8,
    "true_on_policy_contract": "qwen3_dense_true_on_policy_v1",
    "attention_backend": "fa3",
}
OVER_HTTP = (*PROBED, "contract", "deterministic inference", "speculative decoding")


def in_bf16(answers: list) -> list:
    """The same after the cast that the contract makes; the recorded engine ran in fp32."""
    rounded = lambda row: [row[0] and torch.tensor(row[0]).bfloat16().item(), *row[1:]]  # noqa: E731
    return [
        (asked, [{"meta_info": {name: [*map(rounded, rows)] for name, rows in each["meta_info"].items()}}
                 for each in answer])
        for asked, answer in answers
    ]  # fmt: skip


def diagnosed(folder: Path, sides: dict[str, Observation], proof_command: ProofCommand) -> str:
    """What is printed beside an engine that answers; every rank of both sides has written what is in `sides`."""
    contract = CONTRACTS["megatron"]
    inside = {name: value for name, value in sides["engine"].settings.items() if name not in OVER_HTTP}
    with replayed("pinned", ON_GPUS, answers=in_bf16(RECORDED["pinned"]["generate"])) as url:
        for rank in (0, 1):
            of_trainer, of_engine = Process(rank, 2), replace(this_process(url), rank=rank, ranks=2)
            write_dump(folder / "trainer.json", Dump(of_trainer, sides["trainer"], contract))
            write_dump(
                folder / "engine-1.json",
                Dump(of_engine, replace(sides["engine"], settings=inside | {"SGLang": "0.5.23"}), None),
            )
        return proof_command("doctor", "--engine", url, "--trainer-dump", folder, "--engine-dump", folder).out


def test_both_sides_as_the_contract_wants_them_are_0_and_one_rank_with_another_environment_is_red(
    tmp_path: Path, proof_command: ProofCommand
) -> None:
    """GPU readings are the contract's own words; the engine's answers are those of a real one."""
    sides = healthy(CONTRACTS["megatron"])
    assert " 0 red, 0 not seen" in diagnosed(tmp_path, sides, proof_command).splitlines()[-1]
    other = replace(sides["trainer"], settings={**sides["trainer"].settings, "torch": "2.0"})
    write_dump(tmp_path / "trainer.json", Dump(Process(1, 2), other, CONTRACTS["megatron"]))
    printed = proof_command("doctor", "--trainer-dump", tmp_path, code=1).out
    (row,) = [line for line in printed.splitlines() if line.startswith("red")]
    assert row.split()[1] == "torch" and "shown on rank 0; 2.0 on rank 1" in row
    assert row.endswith("the same on every rank")


def test_a_file_of_another_server_is_red() -> None:
    told, inside = (Observation({"tensor parallel": ranks, "SGLang": "1"}, {}) for ranks in ("2", "4"))
    both = doctor.joined(told, inside)
    assert both.split == ("tensor parallel",)
    assert both.settings == {"SGLang": "1", "tensor parallel": "4 in the file; 2 over HTTP"}
    assert doctor.joined(told, told).split == ()


def test_what_was_observed_outweighs_what_was_configured() -> None:
    told = Observation({"torch.compile": "off", "radix cache": "on"}, {}, ("torch.compile", "radix cache"))
    both = doctor.joined(told, Observation({"torch.compile": "on"}, {"KV cache": "why"}, ()))
    assert both.settings["torch.compile"] == "on" and both.how("torch.compile") == "observed"
    assert both.how("radix cache") == "configured" and both.why("KV cache") == "why"


def test_how_a_value_was_seen_stands_in_its_row() -> None:
    sides = healthy(CONTRACTS["megatron"])
    sides["trainer"] = replace(sides["trainer"], configured=tuple(WHY))
    rows = {row.check.name: row for row in diagnose(CONTRACTS["megatron"], **sides)}
    assert rows["NCCL_ALGO"].how == "configured / observed"
    assert rows[KERNELS].how == "observed" and rows[KERNELS].cells[4] == "observed"
    assert rows["temperature"].how == "observed"


def test_a_recorded_engine_and_a_file_stand_side_by_side(tmp_path: Path, proof_command: ProofCommand) -> None:
    file = tmp_path / "trainer.json"
    dump(file, CONTRACTS["fsdp"], Namespace(**vars(HOST) | {"recompute_logprobs_via_prefill": False}))
    with replayed("stock") as url:
        lines = proof_command("doctor", "--engine", url, "--trainer-dump", file, code=1).out.splitlines()
    row = next(line for line in lines if ALONE in line)
    assert row.startswith("red") and "13 of 16 log-probs differ" in row
    assert row.endswith("--sglang-enable-deterministic-inference")
    assert next(line for line in lines if " tensor parallel " in line).startswith("green")
    row = next(line for line in lines if f" {LOG_SOFTMAX} " in line)
    assert row.startswith("red") and " fp32 " in row and row.endswith("without --sglang-enable-fp32-lm-head")
    for name in (PRODUCTS, "deep_gemm: DeepGEMM mode", *CONTRACTS["fsdp"].environment):
        row = next(line for line in lines if f" {name} " in line)
        assert "(HTTP does not tell it: no --engine-dump)" in row and not row.startswith("green")
    assert next(line for line in lines if " top-p " in line).split()[:3] == ["red", "top-p", "0.95"]
    assert lines[-1].endswith("not seen")


def test_an_engine_that_is_gone_is_told(tmp_path: Path, proof_command: ProofCommand) -> None:
    dump(tmp_path / "trainer.json", CONTRACTS["fsdp"], HOST)
    url = f"http://127.0.0.1:{free_port()}"
    out = proof_command("doctor", "--engine", url, "--trainer-dump", tmp_path / "trainer.json", code=1).out
    assert out.count("Connection refused") == 1 and "reason 1" not in out
    (line,) = [line for line in out.splitlines() if line.startswith("engine: ")]
    assert line.endswith("Connection refused") and url in line


@pytest.mark.parametrize("backend", CONTRACTS)
def test_an_engine_that_was_not_asked_leaves_the_trainers_rows(backend: str) -> None:
    contract, gone = CONTRACTS[backend], Observation({}, {ALL: "gone"})
    trainer = Observation({"TF32": "off"}, {ALL: "no --trainer-dump"})
    rows = diagnose(contract, trainer, gone)
    shown, notes = doctor.asked(rows, gone)
    assert [row.check for row in shown] == [row.check for row in rows if row.check.trainer is not None]
    assert {row.engine for row in shown} == {"(not asked)", "-"}
    cells = {row.check.name: (row.trainer, row.engine) for row in shown}
    assert cells["TF32"] == ("off", "(not asked)") and cells["top-k"] == ("(no --trainer-dump)", "-")
    unasked, hidden = sum(row.check.engine is not None for row in rows), len(rows) - len(shown)
    assert notes == [
        f"engine: could not be asked, so that {unasked} rows could not be checked, of which {hidden} ask the engine "
        "alone and are not shown: gone"
    ]


@pytest.mark.parametrize(
    "engine",
    [Observation({"TF32": "off"}, {ALL: "no --engine-dump"}), Observation({}, {ALL: "x", PREFILLED: "a reason"})],
)
def test_an_engine_that_told_anything_keeps_every_row(engine: Observation) -> None:
    rows = diagnose(CONTRACTS["fsdp"], Observation({}, {ALL: "no --trainer-dump"}), engine)
    assert doctor.asked(rows, engine) == (rows, [])


def test_a_contract_beside_that_of_the_file_is_exit_2(tmp_path: Path, proof_command: ProofCommand) -> None:
    dump(tmp_path / "trainer.json", CONTRACTS["fsdp"], HOST)
    words = ["--backend", "megatron", "--engine-tp", "8"]
    read = proof_command("doctor", "--trainer-dump", tmp_path, *words, code=2)
    assert read.out == "" and read.err.startswith("--backend, --engine-tp: without effect beside --trainer-dump")


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b"\xff\xfe\x00", b'{"format": 3, "process": null}', b"[" * 100_000]
)
@pytest.mark.parametrize("side", ["--trainer-dump", "--engine-dump"])
def test_a_file_of_something_else_is_exit_2(
    side: str, content: bytes, tmp_path: Path, proof_command: ProofCommand
) -> None:
    file = tmp_path / "file.json"
    file.write_bytes(content)
    told = proof_command("doctor", side, file, code=2).err.splitlines()[-1]
    assert told.startswith(f"{file}: not written by true_on_policy.observe.dumps (") and len(told) < 300


def test_a_family_that_cannot_be_launched_has_no_rows(proof_command: ProofCommand) -> None:
    read = proof_command("doctor", "--model", "qwen2.5-3B", code=2)
    assert read.out == "" and "qwen2.5-dense cannot be launched: Miles v0.1.0 knows one contract" in read.err


def test_every_check_asks_something_of_a_side() -> None:
    for contract in CONTRACTS.values():
        for check in checks(contract, True):
            assert isinstance(check, Check) and (check.trainer, check.engine) != (None, None)
            assert check.remedy or not (check.trainer or check.engine)
    assert ANY == ()


def test_rows_of_libraries_are_named_as_their_providers_name_them(write: Write) -> None:
    """SGLang's mode is the one that cannot be imported here."""
    write({"flash_attn_interface.py": FLASH_ATTENTION, "deep_gemm.py": deep_gemm_source()})
    for module in ("flash_attn_interface", "deep_gemm"):
        import_module(module)
    for contract in CONTRACTS.values():
        reported = gpu.observe(contract)
        asked = [check.name for check in checks(contract, False) if ": " in check.name]
        absent = [name for name in asked if name not in reported and not name.startswith("sglang: ")]
        assert asked and absent == []


@pytest.fixture
def accelerated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor believes in an accelerator; what it then calls is real, and runs on CPU."""
    cuda = SimpleNamespace(is_available=lambda: True)
    monkeypatch.setattr(doctor, "torch", SimpleNamespace(cuda=cuda))


def test_a_machine_that_cannot_pin_is_red(accelerated, proof_command: ProofCommand) -> None:
    read = proof_command("doctor", "--backend", "fsdp", code=1)
    row = next(line for line in read.out.splitlines() if KERNELS in line)
    assert row.startswith("red") and "sglang" in row and "is not installed" in row
    assert "pinning sglang+deep_gemm+flash_attention" in read.err


def test_what_was_pinned_for_a_moment_is_undone(accelerated, monkeypatch) -> None:
    done = []
    monkeypatch.setattr(gpu, "install", lambda contract: done.append(contract) or (lambda: done.append("undone")))
    main(["doctor"])
    assert done == [CONTRACTS["megatron"], "undone"]
