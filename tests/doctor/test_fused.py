"""Kernels of Transformer Engine and Apex: a row says whether one is asked for, and whether it could run."""

import enum
import sys
from argparse import Namespace
from types import ModuleType

import pytest

from true_on_policy.contract.gpu import model_contract
from true_on_policy.contract.settings import CHOSEN, FUSED, Setting
from true_on_policy.flags.command import launch_flags
from true_on_policy.observe.process import chosen, fused_of_host, observe

MEGATRON = model_contract("qwen3-4B", "megatron", trainer_tp=8, engine_tp=8)
ROPE = next(fused for fused in FUSED if fused.host == "apply_rope_fusion")


class AttnBackend(enum.Enum):
    """The values into which Megatron parses --attention-backend."""

    flash = 1
    fused = 2
    auto = 5


ASKED = {"transformer_impl": "transformer_engine", "attention_backend": AttnBackend.auto}


def asked(fused: Setting) -> Namespace:
    return Namespace(**{fused.host: ASKED.get(fused.host, True)})


@pytest.mark.parametrize("fused", FUSED, ids=lambda fused: fused.host)
def test_a_kernel_is_on_where_it_is_asked_for_and_its_library_is_there(
    fused: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = f"off, no {fused.module}"
    assert fused_of_host(asked(fused)) == {fused.name: absent}
    monkeypatch.setattr("true_on_policy.observe.process.findable", lambda module: module == fused.module)
    assert fused_of_host(asked(fused)) == {fused.name: f"asked for, {fused.module} not imported"}
    monkeypatch.setitem(sys.modules, fused.module, ModuleType(fused.module))
    assert fused_of_host(asked(fused)) == {fused.name: "on"}
    assert fused_of_host(Namespace(**{fused.host: fused.off[0]})) == {fused.name: "off"}


def test_every_remedy_is_a_flag_of_the_launch() -> None:
    words = [" ".join(flag.words) for flag in launch_flags(MEGATRON)]
    assert all(fused.remedy in words for fused in FUSED if fused.remedy)


def test_what_megatron_chose_is_seen_once_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core.optimizer  # noqa: F401
    from megatron.core.transformer import transformer_block

    assert chosen("megatron.core.optimizer", "Adam") == "AdamW of torch"
    assert chosen(transformer_block.__name__, "LayerNormImpl") == "WrappedTorchNorm of megatron"
    assert chosen("megatron.core.fusions.fused_layer_norm", "HAVE_FUSED_LAYER_NORM") == "absent"
    monkeypatch.setattr("megatron.core.fusions.fused_layer_norm.HAVE_FUSED_LAYER_NORM", True)
    assert chosen("megatron.core.fusions.fused_layer_norm", "HAVE_FUSED_LAYER_NORM") == "found"
    assert chosen("no.such.module", "x") == "not imported"


def test_flags_are_configured_and_choices_observed() -> None:
    seen = observe(MEGATRON, Namespace(apply_rope_fusion=False, true_on_policy_mode=False))
    assert seen.settings[ROPE.name] == "off" and seen.how(ROPE.name) == "configured"
    assert all(seen.how(row) == "observed" for row in CHOSEN)
