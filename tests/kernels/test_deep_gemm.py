"""DeepGEMM's switch under each of its names, on a stand-in whose products depend on their company unless it is on."""

import sys

import pytest
import torch
from stand_ins import Write, deep_gemm_source, write  # noqa: F401

from true_on_policy.contract.cpu import Shapes
from true_on_policy.contract.gpu import gpu_contract
from true_on_policy.errors import NotSeenError, PinError
from true_on_policy.kernels import deep_gemm, gpu_probes
from true_on_policy.kernels.gpu_probes import product_failures

CONTRACT = gpu_contract("qwen3-dense", "fsdp")
SHAPES = Shapes(linear=((48, 32), (64, 16)))
SGL, FORK = deep_gemm.SWITCHES


@pytest.fixture(autouse=True)
def fewer_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_probes, "SIZES", (1, 2, 7))


def failures() -> list:
    where = torch.device("cpu")
    return list(product_failures("deep_gemm", "bf16", SHAPES, where, deep_gemm.product))


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("switches", [(SGL,), (FORK,), (SGL, FORK)], ids=["sgl", "fork", "both"])
def test_every_switch_is_turned_and_turned_back(write: Write, switches, before: bool):  # noqa: F811
    write({"deep_gemm.py": deep_gemm_source(*switches, before=before)})
    undo = deep_gemm.pin(CONTRACT)
    library = sys.modules["deep_gemm"]
    getters = [getter for _, getter in switches]
    assert all(getattr(library, getter)() is True for getter in getters)
    assert deep_gemm.settings() == {"DeepGEMM switch": ", ".join(getters), "DeepGEMM mode": "deterministic"}
    assert failures() == []
    undo()
    assert all(getattr(library, getter)() is before for getter in getters)


def test_off_it_is_found_out(write: Write):  # noqa: F811
    write({"deep_gemm.py": deep_gemm_source(SGL)})
    deep_gemm.pin(CONTRACT)()
    assert deep_gemm.settings()["DeepGEMM mode"] == "cuBLASLt"
    assert {failure.company for failure in failures()} >= {"1 of 7 rows and all"}


def test_one_switch_of_two_is_not_enough(write: Write):  # noqa: F811
    write({"deep_gemm.py": deep_gemm_source(SGL, FORK)})
    deep_gemm.pin(CONTRACT)()
    sys.modules["deep_gemm"].use_deterministic_algorithms(True)
    assert deep_gemm.settings()["DeepGEMM mode"] == "cuBLASLt"
    assert failures()


def test_versions_without_a_switch_are_always_invariant(write: Write):  # noqa: F811
    write({"deep_gemm.py": deep_gemm_source()})
    deep_gemm.pin(CONTRACT)()
    assert deep_gemm.settings() == {"DeepGEMM switch": "none", "DeepGEMM mode": "always invariant"}
    assert failures() == []


def test_a_setter_without_a_getter_is_refused(write: Write):  # noqa: F811
    write({"deep_gemm.py": deep_gemm_source() + "def set_batch_invariant(on): ...\n"})
    with pytest.raises(PinError, match="of set_batch_invariant and get_batch_invariant it has one alone"):
        deep_gemm.pin(CONTRACT)


def test_a_switch_without_effect_is_refused_and_the_first_turned_back(write: Write):  # noqa: F811
    deaf = "def set_batch_invariant(on): ...\ndef get_batch_invariant(): return False\n"
    write({"deep_gemm.py": deep_gemm_source(SGL) + deaf})
    with pytest.raises(PinError, match=r"cannot be switched on \(set_batch_invariant\(True\) has no effect\)"):
        deep_gemm.pin(CONTRACT)
    assert deep_gemm.settings()["DeepGEMM mode"] == "cuBLASLt"
    assert sys.modules["deep_gemm"].get_deterministic_algorithms() is False


def test_a_library_that_does_not_load_is_refused(write: Write):  # noqa: F811
    write({"deep_gemm.py": "raise OSError('libcudart.so.13')\n"})
    with pytest.raises(PinError, match="DeepGEMM: deep_gemm cannot be imported .libcudart.so.13"):
        deep_gemm.pin(CONTRACT)


def test_where_it_is_not_installed():
    assert deep_gemm.version() is None and deep_gemm.settings() == {}
    with pytest.raises(PinError, match="deep_gemm cannot be imported"):
        deep_gemm.pin(CONTRACT)


def test_its_version_is_read_without_importing_it(write: Write):  # noqa: F811
    write({"deep_gemm.py": "raise OSError('libcudart.so.13')\n"})
    assert deep_gemm.version() == "deep_gemm of unknown version"
    write({"sgl_deep_gemm-0.2.5.dist-info/METADATA": "Name: sgl-deep-gemm\nVersion: 0.2.5\n"})
    assert deep_gemm.version() == "sgl-deep-gemm 0.2.5"
    assert deep_gemm.settings() == {"DeepGEMM switch": "not imported", "DeepGEMM mode": "not imported"}


def test_without_a_device_nothing_is_seen(write: Write):  # noqa: F811
    write({"deep_gemm.py": deep_gemm_source()})
    with pytest.raises(NotSeenError, match="not seen: no CUDA device"):
        next(deep_gemm.probe(CONTRACT, SHAPES))
