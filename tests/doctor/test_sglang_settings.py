"""What our plugin sees inside SGLang's processes, on a stand-in of its ModelRunner; kernels are torch's own on CPU.

tests/engines/test_sglang.py has the real one.
"""

import logging
import socket
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stand_ins import Write, deep_gemm_source
from test_products import model

from true_on_policy.contract.cpu import Shapes
from true_on_policy.contract.gpu import WHY, Size
from true_on_policy.engines.handover import FOLDER
from true_on_policy.engines.sglang import settings as sglang_settings
from true_on_policy.engines.sglang.settings import MODE, SPLITS, observe, written
from true_on_policy.kernels import probes
from true_on_policy.observe.dumps import load_engine
from true_on_policy.observe.process import KERNELS, PRODUCTS

SIZE = Size(32, 48, 4, 2, 16, 64)
SWITCH = ("use_deterministic_algorithms", "get_deterministic_algorithms")


class FlashAttentionBackend:
    fa_impl_ver, num_splits, decode_num_splits = 3, 1, 1


class FlashInferAttnBackend:
    pass


def runner(**changed: Any) -> Any:
    config = SimpleNamespace(to_dict=lambda: vars(SIZE))
    parts = {
        "model": model(64, 48, 2),
        "model_config": SimpleNamespace(dtype=torch.bfloat16, hf_text_config=config),
        "attn_backend": FlashAttentionBackend(),
        "kv_cache_dtype": torch.bfloat16,
        "server_args": SimpleNamespace(host="0.0.0.0", port=30000, dist_init_addr=None),
    }
    return SimpleNamespace(**parts | changed)


@pytest.fixture(autouse=True)
def shorter(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SIZES": (1, 2, 7), "FEW": (1, 2), "DIGESTED": (3, 16)}.items():
        monkeypatch.setattr(probes, name, value)
    write({"sglang/srt/distributed/parallel_state.py": "def get_tensor_model_parallel_world_size():\n    return 2\n"})


def test_what_a_process_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    seen = observe(runner())
    wanted = {
        "device": "cpu", "tensor parallel": "2", "attention": "fa3", SPLITS: "1", "KV cache": "bfloat16",
        "quantization": "None", "TF32": "off", "NCCL_ALGO": "Tree", "torch": torch.__version__,
    }  # fmt: skip
    assert wanted.items() <= seen.settings.items()
    assert set(seen.configured) == set(WHY) and seen.how("attention") == "observed"
    assert seen.why(MODE) == "deep_gemm is not imported"


def test_kernels_are_tried_on_the_device_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = F.linear
    products = sglang_settings._products(model(64, 48, 2), SIZE)
    assert observe(runner()).settings[PRODUCTS] == probes.digest("bf16", products, torch.device("cpu"))
    alone = lambda x, *rest: stock(x, *rest) + (len(x) == 1)  # noqa: E731
    monkeypatch.setattr(probes.F, "linear", alone)
    assert "1 of 7 rows and all" in observe(runner()).settings[KERNELS]


def test_kernels_are_tried_at_the_shapes_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(
        sglang_settings, "aten_failures", lambda dtype, shapes, where: iter(tried.append((dtype, shapes)) or ())
    )
    observe(runner())
    assert tried == [("bf16", Shapes.of(SIZE, 2))]


@pytest.mark.parametrize(
    ("changed", "name", "value"),
    [
        ({"attn_backend": SimpleNamespace(prefill_backend=FlashAttentionBackend(),
                                          decode_backend=FlashInferAttnBackend())}, "attention", "fa3 and flashinfer"),
        ({"attn_backend": SimpleNamespace(num_splits=1, decode_num_splits=0)}, SPLITS, "0, 1"),
        ({"attn_backend": SimpleNamespace(num_splits=1, decode_num_splits=0)}, "attention", "SimpleNamespace"),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "KV cache", "float8_e4m3fn"),
    ],
)  # fmt: skip
def test_what_decides_is_the_object_not_the_flag(changed: dict[str, Any], name: str, value: str) -> None:
    assert observe(runner(**changed)).settings[name] == value


def test_narrow_weights_are_told() -> None:
    model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    model.scale = torch.nn.Parameter(torch.zeros(1).to(torch.float8_e4m3fn), requires_grad=False)
    model.norm = torch.nn.Parameter(torch.zeros(1, dtype=torch.float16))
    assert observe(runner(model=model)).settings["quantization"] == "float8_e4m3fn"


def test_what_another_release_holds_elsewhere_costs_one_row() -> None:
    changed = runner()
    del changed.kv_cache_dtype
    seen = observe(changed)
    assert "KV cache" not in seen.settings and "no attribute 'kv_cache_dtype'" in seen.why("KV cache")
    assert seen.settings["attention"] == "fa3"


def test_a_model_without_the_layers_is_not_seen() -> None:
    seen = observe(runner(model=torch.nn.Linear(4, 4, dtype=torch.bfloat16)))
    assert PRODUCTS not in seen.settings and seen.why(PRODUCTS) == "Linear has no o_proj"
    assert seen.settings[KERNELS] == "batch-invariant"


def test_a_backend_without_splits_is_not_seen() -> None:
    seen = observe(runner(attn_backend=FlashInferAttnBackend()))
    assert SPLITS not in seen.settings and seen.why(SPLITS) == "FlashInferAttnBackend tells no num_splits"


def around_each_call(library: Any) -> Callable[..., torch.Tensor]:
    """As SGLang 0.5.23 multiplies: the switch is on during a call, and off again after it."""

    def linear(x: torch.Tensor, weight: torch.Tensor, bias=None) -> torch.Tensor:
        library.use_deterministic_algorithms(True)
        out = torch.empty(len(x), len(weight), dtype=x.dtype)
        library.bf16_gemm_nn(x, weight.t(), out)
        library.use_deterministic_algorithms(False)
        return out

    return linear


def test_deep_gemms_mode_is_that_of_the_call(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write({"deep_gemm.py": deep_gemm_source(SWITCH)})
    library = import_module("deep_gemm")
    assert observe(runner()).why(MODE) == "SGLang's product did not call deep_gemm"
    monkeypatch.setattr(probes.F, "linear", around_each_call(library))
    assert not library.get_deterministic_algorithms()
    where, shapes = torch.device("cpu"), Shapes.of(SIZE, 1)
    assert sglang_settings._deep_gemm_mode("bf16", shapes, where) == "deterministic"


def test_it_is_written_where_the_doctor_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "written"
    monkeypatch.setenv(FOLDER, str(folder))
    written(None, runner())
    assert [file.name for file in folder.iterdir()] == [f"engine-{socket.gethostname()}-30000.json"]
    assert load_engine(folder, "http://127.0.0.1:30000").settings["attention"] == "fa3"


@pytest.mark.parametrize(("first", "named"), [("10.0.0.2:15003", "10.0.0.2"), ("[fe80::1]:15003", "_fe80__1_")])
def test_engines_of_two_machines_with_one_port_write_two_files(
    first: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Miles starts them: each machine's ports begin at 15000, and all write to one folder."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "written"))
    for where, host in (("10.0.0.1:15003", "10.0.0.1"), (first, "10.0.0.2")):
        written(None, runner(server_args=SimpleNamespace(host=host, port=15000, dist_init_addr=where)))
    names = {file.name for file in (tmp_path / "written").iterdir()}
    assert names == {"engine-10.0.0.1-15000.json", f"engine-{named}-15000.json"}
    assert load_engine(tmp_path / "written", "http://10.0.0.2:15000").settings["attention"] == "fa3"


def test_an_engine_that_cannot_be_looked_at_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "written"))
    with caplog.at_level(logging.ERROR, "true_on_policy"):
        written(None, SimpleNamespace())
    assert not (tmp_path / "written").exists()
    assert "nothing written for the doctor" in caplog.text
