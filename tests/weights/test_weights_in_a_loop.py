"""The proof in a host's loop: each planted update is found, and named by whose weights the engine holds."""

import logging
import sys
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
from test_weights import LAYER, Engine, checkpoint, loaded
from torch import Tensor

from mis_plugins.errors import warn_once
from mis_plugins.hosts.adapters.slime import SLIME
from mis_plugins.hosts.adapters.vime import VIME
from true_on_policy.errors import DifferenceError, HostConfigError, NotSeenError
from true_on_policy.hosts import prove_weights, report_step, weights

TRAINER = """
class MegatronTrainRayActor:
    def init(self, args, role):
        self.args, self.role = args, role
        prove(args)
        self.weight_updater = updater

    def update_weights(self):
        if not self.args.debug_train_only:
            self.weight_updater.update_weights()

    def train_actor(self, rollout_id, rollout_data):
        return rollout_id
"""
LOST = f"{LAYER}.mlp.down_proj.weight"
ALL = r"(\d+) of \1 tensors differ, .*other values"
HELD = "; where they differ, the engine holds"


def moved(by: float) -> dict[str, Tensor]:
    return {name: weight + by for name, weight in checkpoint().items()}


START, ACTOR, REFERENCE = loaded(checkpoint()), loaded(moved(1)), loaded(moved(2))
PLANTS: dict[str, tuple[dict[str, Tensor], str]] = {
    "stale": (START, f"engine 0: {ALL}{HELD} what it held before this update \\("),
    "reference": (REFERENCE, f"engine 0: {ALL}{HELD} the reference's weights \\(--ref-load\\) \\("),
    "lost": (ACTOR | {LOST: START[LOST]}, f"1 of .* first: {LOST}: other values{HELD} what it held before this"),
    "stranger": (loaded(moved(3)), f"engine 0: {ALL} \\(bitwise.weights"),
    "absent": ({name: x for name, x in ACTOR.items() if name != LOST}, f"1 of .*{LOST}: the engine holds nothing"),
}  # fmt: skip


class Loop:
    """slime's loop of one rank and one engine, which holds what `rank` says after each update."""

    def __init__(self, patch: pytest.MonkeyPatch, bitwise: Any = None, needs: Any = SLIME, **args: Any) -> None:
        self.engine, named = Engine([dict(START)]), {"actor": moved(1), "ref": moved(2)}
        chunks = SimpleNamespace(get_hf_weight_chunks=lambda local: [[item] for item in local.items()])
        base = SimpleNamespace(create=lambda args, model, model_name, quantization_config: chunks)
        address = f"slime.{weights.BASE.partition(':')[0]}"
        patch.setitem(sys.modules, address, SimpleNamespace(HfWeightIteratorBase=base))
        patch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda answer: answer))
        patch.setattr(weights, "current", lambda args: SimpleNamespace(needs=needs, package="slime"))
        updater = Updater(self.engine, args.get("update_weight_transport") == "disk")
        module = {"__name__": "slime.backends.megatron_utils.actor", "prove": prove_weights, "updater": updater}
        exec(TRAINER, module)
        own: Any = module["MegatronTrainRayActor"]
        self.trainer, self._update_weights = own(), own.update_weights  # Ray keeps the methods of a class
        self.trainer.model = None
        self.trainer.weights_backuper = SimpleNamespace(backup_tags=list(named), get=named.__getitem__)
        bitwise = bitwise or {"weights": "every", "on_difference": "raise"}
        self.trainer.init(Namespace(**{"debug_train_only": False, "bitwise": bitwise} | args), "actor")

    def update(self, held: dict[str, Tensor]) -> None:
        """Update the weights, and begin to train on a rollout."""
        self.trainer.weight_updater.next = dict(held)
        self._update_weights(self.trainer)
        self.engine.ranks[0] = dict(held)
        self.trainer.train_actor(0, {})


class Updater:
    model_name, quantization_config, weight_version = "", None, 0

    def __init__(self, engine: Engine, reloads_later: bool) -> None:
        ask = SimpleNamespace(remote=lambda action: engine({"action": action}))
        self.rollout_engines, self._engine = [SimpleNamespace(check_weights=ask)], engine
        self._reloads_later, self.next = reloads_later, dict[str, Tensor]()

    def update_weights(self) -> None:
        self.weight_version += 1
        if not self._reloads_later:
            self._engine.ranks[0] = self.next


@pytest.mark.parametrize("transport", ["nccl", "disk"])
@pytest.mark.parametrize("plant", PLANTS)
def test_each_plant_stops_the_run_and_is_named(
    plant: str, transport: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    args = {"update_weight_transport": transport, "update_weight_mode": "full"}
    with caplog.at_level(logging.INFO, "true_on_policy"):
        Loop(monkeypatch, **args).update(ACTOR)
    assert "weights of version 1, 1 engines: the engine's weights are the trainer's" in caplog.text
    held, said = PLANTS[plant]
    with pytest.raises(DifferenceError, match=f"^weights of version 1, .*{said}"):
        Loop(monkeypatch, **args).update(held)


@pytest.mark.parametrize(("when", "asked"), [("first", 2), ("every", 4)])
def test_every_update_is_proven_where_asked_and_a_warning_stops_nothing(
    when: str, asked: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(monkeypatch, {"weights": when})
    for _ in range(3):
        loop.update(REFERENCE)
    assert len(loop.engine.asked) == asked
    assert caplog.text.count("the reference's weights") == asked - 1


def test_a_second_call_of_the_hook_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A user's function calls it beside `miles_init`, which has called it already."""
    warn_once.cache_clear()
    monkeypatch.setitem(globals(), "prove_weights", lambda args, prove=prove_weights: [prove(args), prove(args)])
    loop = Loop(monkeypatch)
    loop.update(ACTOR)
    assert len(loop.engine.asked) == 2 and not caplog.records


def test_what_cannot_be_proven_is_an_error_or_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(monkeypatch)
    loop.engine.place = {"pp_size": 2}
    with pytest.raises(NotSeenError, match="pp_size 2"):
        loop.update(ACTOR)
    loop.trainer.weight_updater.rollout_engines = []
    with pytest.raises(NotSeenError, match="updates no engine"):
        loop.update(ACTOR)
    Loop(monkeypatch, debug_train_only=True).update(ACTOR)
    assert "the host has sent no weights to an engine" in caplog.text
    disk = {"update_weight_transport": "disk", "update_weight_mode": "full"}
    for name in ("release_train", "offload_rollout"):
        with pytest.raises(HostConfigError, match=f"^--{name.replace('_', '-')} beside"):
            Loop(monkeypatch, **disk, **{name: True})
    for name, value in (("lora_rank", 8), ("lora_adapter_path", "adapter"), ("multi_lora", True)):
        with pytest.raises(HostConfigError, match=r"^LoRA \(--lora-rank\): "):
            Loop(monkeypatch, **{name: value})
    with pytest.raises(HostConfigError, match="not called by the init"):
        Loop(monkeypatch, needs=VIME)
    with pytest.raises(HostConfigError, match=r"bitwise\.weights: got 'all'; choose one of first, every"):
        Loop(monkeypatch, {"weights": "all"})
    monkeypatch.delitem(sys.modules, weights.__name__)
    with pytest.raises(HostConfigError, match=r"bitwise\.weights: nothing proves the engines' weights"):
        report_step(Namespace(bitwise={"weights": "first"}), 0, 0)
