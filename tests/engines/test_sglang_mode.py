"""The real SGLang's batch-invariant mode, in the engine's own environment: each trap of it, and that a pin sees it."""

import json
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from stand_ins import deep_gemm_source

from true_on_policy.kernels.deep_gemm import SWITCHES

OFF, ON = ["off", False, False, False], ["on", True, True, False]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def seen(ran_in_sglang: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("deep_gemm")
    (folder / "deep_gemm.py").write_text(deep_gemm_source(SWITCHES[0], before=True), encoding="utf-8")
    support = Path(__file__).parents[1] / "support"
    told = ran_in_sglang("sglang_mode.py", sysconfig.get_path("purelib"), folders=(support, folder))
    return json.loads(told.splitlines()[-1])


def test_a_pin_stands_and_is_undone(seen: dict):
    assert seen["a_pin"] == {"inside": [ON, "on"], "failures": [], "after": OFF, "restored": True}


def test_its_flag_lies_after_a_nested_context(seen: dict):
    facts = seen["a_nested_context"]
    assert facts["lie"] == ["on", False, False, False]
    assert facts["again"].startswith("SGLang: the flag of the mode says on, but aten::mm runs stock")
    assert facts["after"] == OFF and facts["restored"]


def test_a_failing_context_leaves_it_on_and_with_bmm(seen: dict):
    facts = seen["a_failing_context"]
    assert facts["left"] == facts["still"] == ["on", True, True, True]
    assert "SGLang: the mode is on with aten::bmm" in facts["pinned"] and facts["restored"]


def test_an_enable_that_half_happens_is_undone(seen: dict):
    facts = seen["half_an_enable"]
    assert "SGLang: the batch-invariant mode cannot be enabled" in facts["message"]
    assert facts["after"] == OFF and facts["restored"]


def test_products_that_the_contract_does_not_name_are_refused(seen: dict):
    facts = seen["variants"]
    assert "ENABLE_MM_FALLBACK_VARIANT is on" in facts["einsum"]
    assert "multiplies by deep_gemm, but DeepGEMM is off here" in facts["triton"]
    assert facts["after"] == OFF


def test_a_product_that_silently_falls_back_is_refused(seen: dict):
    facts = seen["a_silent_fallback"]
    assert facts["fits"] == "not refused"
    assert "linear at (64, 37) in bf16 falls back from DeepGEMM to Triton" in facts["odd"]


def test_megatrons_copy_and_sglangs_refuse_each_other(seen: dict):
    facts = seen["two_copies"]
    assert "aten::mm is overridden already by" in facts["megatron_second"]
    assert "sglang/srt/batch_invariant_ops/batch_invariant_ops.py" in facts["megatron_second"]
    assert "custom_layers/batch_invariant_kernels.py" in facts["sglang_second"]
    assert facts["kept"] == ON and facts["after"] == OFF
