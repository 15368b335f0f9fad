"""What the init hook checks before it pins, what keeps a trainer from starting, and what it leaves for the doctor.

Everything runs as it is but the kernels, which need a GPU: on this machine pinning refuses, and that is tested too.
"""

import json
import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ran
from stand_ins import Write

from mis_plugins.errors import ConfigError
from true_on_policy import fsdp_worker
from true_on_policy.contract.gpu import MODELS, GpuContract, gpu_contract, model_contract
from true_on_policy.errors import ContractError, HostConfigError, NotSeenError, PinError
from true_on_policy.flags.command import HOOK, launch_flags
from true_on_policy.hosts import miles_init, start
from true_on_policy.observe import dumps

CONTRACT = model_contract("qwen3-4B", "megatron", trainer_tp=8, engine_tp=8)
TIS = "mis_plugins.mis.compute_mis_weights_with_cp"
HOOKS = {
    "loss_type": "custom_loss",
    "custom_loss_function_path": start.LOSS,
    "custom_megatron_before_train_step_hook_path": start.STEP_HOOK,
}


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """What Miles would have parsed from `python -m true_on_policy flags` and our hooks, in the right environment."""
    for name, value in CONTRACT.environment.items():
        monkeypatch.setenv(name, value)
    size = {name: getattr(MODELS["qwen3-4B"][1], name) for name in MODELS["qwen3-4B"][1].__dataclass_fields__}
    checkpoint = tmp_path / "Qwen3-4B"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], **size}))
    flags = {flag.attribute: flag.value for flag in launch_flags(CONTRACT)}
    own = {"hf_checkpoint": str(checkpoint), "train_backend": "megatron", "save": str(tmp_path / "save")}
    return Namespace(**flags, **own, **HOOKS)


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> list[GpuContract]:
    """The contracts that were pinned: nothing of the dump is on disk before."""
    pinned: list[GpuContract] = []
    monkeypatch.setattr(start, "pin", pinned.append)
    return pinned


def test_what_is_checked_is_pinned_and_written_for_the_doctor(args: Namespace, pins: list[GpuContract]):
    miles_init(args)
    assert pins == [CONTRACT]
    contract, seen = dumps.load(Path(args.save) / "true_on_policy" / "trainer.json")
    assert contract == CONTRACT
    assert seen.settings["log-probs come from"] == "prefill"
    assert seen.settings["NCCL_ALGO"] == "Ring"
    assert seen.settings["torch"] == torch.__version__


def test_the_environment_may_name_the_file(
    args: Namespace, pins: list[GpuContract], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(start.DUMP, str(tmp_path / "elsewhere.json"))
    miles_init(args)
    assert dumps.load(tmp_path / "elsewhere.json")[0] == CONTRACT
    assert not Path(args.save).exists()


def test_it_is_written_after_the_pin_and_by_every_rank(
    args: Namespace, pins: list[GpuContract], monkeypatch: pytest.MonkeyPatch
):
    folder = Path(args.save) / "true_on_policy"
    ranks = {"is_initialized": True, "get_world_size": 2}
    for name, value in ranks.items():
        monkeypatch.setattr(f"torch.distributed.{name}", lambda value=value: value)
    for rank in (1, 0):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        miles_init(args)
    assert sorted(file.name for file in folder.iterdir()) == ["trainer.json", "trainer.rank1.json"]
    assert dumps.load(folder)[1].settings[dumps.RANKS] == "all"


def test_a_rank_that_does_not_start_leaves_no_file_of_an_earlier_run(args: Namespace, pins: list[GpuContract]):
    miles_init(args)
    args.sequence_parallel = True
    with pytest.raises(ContractError):
        miles_init(args)
    assert not (Path(args.save) / "true_on_policy" / "trainer.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU may pin")
def test_without_a_gpu_it_refuses_to_start(args: Namespace):
    with pytest.raises((PinError, NotSeenError)):
        miles_init(args)
    assert not Path(args.save).exists()


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"sequence_parallel": True}, ContractError, "sequence_parallel is True: .*--sequence-parallel"),
    ({"batch_invariant_mode": False}, ContractError, "batch_invariant_mode is False; launch with --batch-inv"),
    ({"context_parallel_size": 2, "cp_comm_type": "p2p"}, ContractError, "ring context parallelism"),
    ({"rollout_num_gpus_per_engine": 1}, ContractError, "adds the parts of its .* columns in two orders"),
    ({"bitwise": {"on_diference": "warn"}}, HostConfigError, "bitwise.on_diference: unknown key"),
    ({"bitwise": {"step_hook": "a.b"}}, HostConfigError, "bitwise.step_hook: cannot load 'a.b'"),
    ({"bitwise": {"on_difference": "raise"}, "custom_megatron_before_train_step_hook_path": None},
     HostConfigError, "raise needs --custom-megatron-before-train-step-hook-path true_on_policy.hosts.report_step"),
    ({"use_tis": True, "custom_tis_function_path": TIS,
      "mis": {"weight": {"lower": 3.0, "upper": 2.0, "bound": "clip"}}}, ConfigError, "mis.weight.lower: 3 is not"),
    ({"use_tis": True, "custom_tis_function_path": TIS,
      "mis": {"weight": {"upper": 2.0}, "opsm": {"delta": 1e-4}}}, ConfigError, "mis.opsm: the TIS hook does not see"),
    ({"bitwise": {"loss": "mis_plugins.mis.policy_loss"}, "mis": {"wait": 1}}, ConfigError, "mis.wait: unknown key"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "error", "message"), REFUSED)
def test_nothing_is_pinned_where_something_cannot_hold(
    changed: dict[str, Any], error: type[Exception], message: str, args: Namespace, pins: list[GpuContract]
):
    vars(args).update(changed)
    with pytest.raises(error, match=message):
        miles_init(args)
    assert pins == [] and not Path(args.save).exists()


def test_a_variable_that_does_not_stand(args: Namespace, pins: list[GpuContract], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NCCL_ALGO")
    with pytest.raises(ContractError, match="environment: NCCL_ALGO is None; start the processes with NCCL_ALGO=Ring"):
        miles_init(args)
    assert pins == []


@pytest.mark.parametrize(
    "unread",
    [{"use_tis": True, "custom_tis_function_path": "a.b"}, {"use_tis": False, "custom_tis_function_path": TIS}],
)
def test_a_config_that_no_hook_of_ours_reads_is_not_ours_to_check(
    unread: dict[str, Any], args: Namespace, pins: list[GpuContract]
):
    vars(args).update(unread, mis={"wait": 1})
    miles_init(args)
    assert pins == [CONTRACT]


@pytest.mark.parametrize(
    ("flags", "warned"), [({}, 0), ({"custom_loss_function_path": None}, 1), ({"loss_type": "policy_loss"}, 1)]
)
def test_a_run_that_compares_nothing_is_told_so(
    flags: dict[str, Any], warned: int, args: Namespace, pins: list[GpuContract], caplog: pytest.LogCaptureFixture
):
    """A host calls the function of --custom-loss-function-path under --loss-type custom_loss alone."""
    vars(args).update(flags)
    with caplog.at_level(logging.WARNING, "true_on_policy"):
        miles_init(args)
    assert sum("log-probs are not compared" in record.getMessage() for record in caplog.records) == warned


@pytest.fixture
def on_fsdp(args: Namespace, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """The same on FSDP: Ray's hook calls what the init hook calls on Megatron."""
    contract = model_contract("qwen3-4B", "fsdp")
    for name, value in contract.environment.items():
        monkeypatch.setenv(name, value)
    flags = {flag.attribute: flag.value for flag in launch_flags(contract)}
    kept = ("hf_checkpoint", "save", "loss_type", "custom_loss_function_path")
    return Namespace(**{name: getattr(args, name) for name in kept}, **flags)


def test_on_fsdp_a_rank_that_differs_may_stop_alone(
    on_fsdp: Namespace, pins: list[GpuContract], caplog: pytest.LogCaptureFixture
):
    """Miles calls no step hook there: none is asked for."""
    on_fsdp.bitwise = {"on_difference": "raise"}
    with caplog.at_level(logging.WARNING, "true_on_policy"):
        miles_init(on_fsdp)
    assert [contract.backend for contract in pins] == ["fsdp"] and not caplog.records


@pytest.mark.parametrize(
    "hook",
    [
        {"custom_megatron_before_train_step_hook_path": start.STEP_HOOK},
        {"bitwise": {"step_hook": "mis_plugins.mis.report_step"}},
    ],
)
def test_a_step_hook_on_fsdp_is_told_to_be_without_effect(
    hook: dict[str, Any], on_fsdp: Namespace, pins: list[GpuContract], caplog: pytest.LogCaptureFixture
):
    vars(on_fsdp).update(hook)
    with caplog.at_level(logging.WARNING, "true_on_policy"):
        miles_init(on_fsdp)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("without effect on FSDP") and pins


# The pin of Miles's FSDP trainer, on a stand-in of its module: after Miles's own step, before its model, once.

# As Miles's, with what it did written down.
ACTOR = """
class FSDPTrainRayActor:
    def init(self, args):
        self._enable_true_on_policy_optimizations(args)
        args.done.append("model")

    def _enable_true_on_policy_optimizations(self, args):
        args.done.append("sglang's mode")
"""


@pytest.fixture
def watched(write: Write, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Write the module of Miles's trainer, which is not imported yet, and watch for it some times."""
    monkeypatch.setattr(start, "start", lambda args: args.done.append("ours"))
    finders = list(sys.meta_path)

    def written(source: str = ACTOR, times: int = 1) -> None:
        write({"miles/backends/fsdp_utils/actor.py": source})
        for _ in range(times):
            fsdp_worker.watch()

    yield written
    sys.meta_path[:] = finders


def trained(deterministic_mode: bool = False) -> list[str]:
    """What a trainer does while it begins, in order."""
    args = Namespace(done=[], deterministic_mode=deterministic_mode)
    import_module(fsdp_worker.MODULE).FSDPTrainRayActor().init(args)
    return args.done


@pytest.mark.parametrize("times", [1, 2])
def test_the_pin_follows_miless_own_step_once(times: int, watched: Callable[..., None]) -> None:
    watched(times=times)
    assert trained() == ["sglang's mode", "ours", "model"]


def test_a_look_for_the_trainer_and_a_failed_import_leave_the_pin_to_come(
    watched: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries ask whether a module is there before they import it, and try again after an import that failed."""
    monkeypatch.delenv("LACKING", raising=False)
    watched("import os\nos.environ['LACKING']\n" + ACTOR)
    assert find_spec(fsdp_worker.MODULE)
    with pytest.raises(KeyError, match="LACKING"):
        import_module(fsdp_worker.MODULE)
    monkeypatch.setenv("LACKING", "")
    assert trained() == ["sglang's mode", "ours", "model"]


def test_a_process_that_has_imported_the_trainer_is_pinned_too_and_once(watched: Callable[..., None]) -> None:
    watched(times=0)
    assert trained() == ["sglang's mode", "model"]
    for _ in range(2):
        fsdp_worker.watch()
    assert trained() == ["sglang's mode", "ours", "model"]


@pytest.mark.parametrize("asked", [True, False])
def test_the_flag_that_miles_does_not_read_has_its_effect(
    asked: bool, watched: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before our own start, which writes down what is in force."""
    seen = []
    monkeypatch.setattr(start, "start", lambda args: seen.append(torch.are_deterministic_algorithms_enabled()))
    watched()
    try:
        trained(asked)
        assert seen == [asked] == [torch.are_deterministic_algorithms_enabled()]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("source", ["", "class FSDPTrainRayActor:\n    pass\n"])
def test_a_miles_without_the_step_is_refused(source: str, watched: Callable[..., None]) -> None:
    watched(source)
    with pytest.raises(ContractError, match="no FSDPTrainRayActor._enable_true_on_policy.*nothing would pin"):
        import_module(fsdp_worker.MODULE)


def test_what_cannot_be_pinned_keeps_the_trainer_from_starting(
    watched: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(args: Namespace) -> None:
        raise ContractError("environment: NCCL_ALGO is None")

    monkeypatch.setattr(start, "start", refuse)
    watched()
    with pytest.raises(ContractError, match="NCCL_ALGO"):
        trained()


def test_workers_that_train_nothing_pay_nothing() -> None:
    code = (
        "import sys; from true_on_policy import fsdp_worker; fsdp_worker.watch(); "
        "print({'torch', 'miles'} & set(sys.modules))"
    )
    done = ran("-c", code)
    assert done.stdout.strip() == "set()", done.stderr


def test_the_launch_names_the_hook() -> None:
    script = (Path(__file__).parents[2] / "scripts" / "run-qwen3-4b-true-on-policy.sh").read_text()
    assert f'"worker_process_setup_hook": "{HOOK}"' in script.replace("\\", "")
    module, _, name = HOOK.rpartition(".")
    assert callable(getattr(import_module(module), name))
    assert launch_flags(gpu_contract("qwen3-dense", "fsdp"))
