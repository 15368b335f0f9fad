"""The pin of Miles's FSDP trainer, on a stand-in of its module: after Miles's own step, before its model, once."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from commands import ran
from stand_ins import Write, write  # noqa: F401

from true_on_policy import fsdp_worker
from true_on_policy.contract.gpu import gpu_contract
from true_on_policy.errors import ContractError
from true_on_policy.flags.command import HOOK, launch_flags
from true_on_policy.hosts import start

FILE = "miles/backends/fsdp_utils/actor.py"
# As Miles's, with what it did written down.
ACTOR = """
class FSDPTrainRayActor:
    def init(self, args):
        self._enable_true_on_policy_optimizations(args)
        args.done.append("model")

    def _enable_true_on_policy_optimizations(self, args):
        args.done.append("sglang's mode")
"""


class Args:
    def __init__(self, deterministic_mode: bool = False):
        self.done: list[str] = []
        self.deterministic_mode = deterministic_mode


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(start, "start", lambda args: args.done.append("ours"))
    finders = list(sys.meta_path)
    yield
    sys.meta_path[:] = finders


def trained() -> list[str]:
    args = Args()
    import_module(fsdp_worker.MODULE).FSDPTrainRayActor().init(args)
    return args.done


def test_it_follows_miless_own_step(write: Write) -> None:  # noqa: F811
    write({FILE: ACTOR})
    fsdp_worker.watch()
    assert trained() == ["sglang's mode", "ours", "model"]


@pytest.mark.parametrize("asked", [True, False])
def test_the_flag_that_miles_does_not_read_has_its_effect(
    asked: bool,
    write: Write,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before our own start, which writes down what is in force."""
    seen = []
    monkeypatch.setattr(start, "start", lambda args: seen.append(torch.are_deterministic_algorithms_enabled()))
    write({FILE: ACTOR})
    fsdp_worker.watch()
    try:
        import_module(fsdp_worker.MODULE).FSDPTrainRayActor().init(Args(asked))
        assert seen == [asked] == [torch.are_deterministic_algorithms_enabled()]
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_process_that_has_imported_the_trainer_is_pinned_too_and_once(write: Write) -> None:  # noqa: F811
    write({FILE: ACTOR})
    assert trained() == ["sglang's mode", "model"]
    for _ in range(2):
        fsdp_worker.watch()
    assert trained() == ["sglang's mode", "ours", "model"]


def test_two_calls_before_the_import_pin_once(write: Write) -> None:  # noqa: F811
    write({FILE: ACTOR})
    for _ in range(2):
        fsdp_worker.watch()
    assert trained() == ["sglang's mode", "ours", "model"]


@pytest.mark.parametrize("source", ["", "class FSDPTrainRayActor:\n    pass\n"])
def test_a_miles_without_the_step_is_refused(source: str, write: Write) -> None:  # noqa: F811
    write({FILE: source})
    fsdp_worker.watch()
    with pytest.raises(ContractError, match="no FSDPTrainRayActor._enable_true_on_policy.*nothing would pin"):
        import_module(fsdp_worker.MODULE)


def test_what_cannot_be_pinned_keeps_the_trainer_from_starting(write: Write, monkeypatch) -> None:  # noqa: F811
    def refuse(args: Args) -> None:
        raise ContractError("environment: NCCL_ALGO is None")

    monkeypatch.setattr(start, "start", refuse)
    write({FILE: ACTOR})
    fsdp_worker.watch()
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
