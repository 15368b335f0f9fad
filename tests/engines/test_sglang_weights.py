"""Every tensor of the real SGLang is named and compared with the checkpoint's, and each planted fault is found."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from test_local_loop import records
from test_training import train
from torch import Tensor

from true_on_policy.__main__ import main
from true_on_policy.contract.cpu import DTYPES
from true_on_policy.engines.handover import KEY
from true_on_policy.engines.sglang.engine import SGLang
from true_on_policy.models.tiny import checkpoint, read_weights, updated
from true_on_policy.weights.comparison import compare

pytestmark = pytest.mark.timeout(1800)
MODELS = ("tiny-qwen3-tied", "tiny-qwen3-moe")


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SGLang, Path]]:
    """A stock server in bf16, and the checkpoint that it was started from."""
    source = checkpoint(request.param, tmp_path_factory.mktemp("weights") / "0", DTYPES["bf16"], 0)
    with closing(SGLang(source, "bf16")) as engine:
        yield engine, source


def changed(source: Path, folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy of a checkpoint after `change`."""
    weights = read_weights(source)
    change(weights)
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def asked(engine: SGLang, trainer: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with patch.dict(os.environ, {KEY: engine._server.key}):
        code = main(["weights", "--engine", engine._server.url, "--trainer", str(trainer)])
    return code, capsys.readouterr().out


def test_equal_through_an_update_and_every_fault_is_named(
    served: tuple[SGLang, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, source = served
    engine.update_weights(source, 0)
    code, said = asked(engine, source, capsys)
    assert code == 0 and "equal in every bit" in said

    after = updated(source, tmp_path / "1", 1)
    code, said = asked(engine, after, capsys)  # a stale engine
    assert code == 1 and "the first: model.embed_tokens.weight" in said
    engine.update_weights(after, 1)
    assert asked(engine, after, capsys)[0] == 0

    def one_ulp(weights: dict[str, Tensor]) -> None:
        value = weights["model.layers.1.self_attn.k_proj.weight"]
        value[0, 0] = torch.nextafter(value[0, 0], value[0, 0] + 1)

    code, said = asked(engine, changed(after, tmp_path / "ulp", one_ulp), capsys)
    assert code == 1 and "1 of " in said and "tensors differ" in said
    assert "the first: model.layers.1.self_attn.qkv_proj.weight: 1 of " in said and "1 ulp apart" in said

    lost = "model.layers.0.input_layernorm.weight"
    final = updated(source, tmp_path / "2", 2)
    engine.update_weights(changed(final, tmp_path / "lost", lambda weights: weights.pop(lost)), 2)
    code, said = asked(engine, final, capsys)
    assert code == 1 and f"tensors differ, the first: {lost}: " in said and said.startswith("1 of ")


def test_tensor_parallel_ranks_are_compared_each(tmp_path: Path) -> None:
    source = checkpoint("tiny-qwen3-tied", tmp_path / "0", DTYPES["fp32"], 0)
    with closing(SGLang(source, "fp32", ranks=2)) as engine:
        found = compare(engine.weights_checker, read_weights(source))
        assert found.equal, str(found)
        stale = compare(engine.weights_checker, read_weights(updated(source, tmp_path / "1", 1)))
    assert {one.rank for one in stale.differences} == {0, 1}


def test_the_embedded_host_checks_at_the_start_after_updates_and_at_resume(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    flags = f"--check-weights-every 2 --save {saved}"
    done = train(flags, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    compared = [row.get("weights_compared") for row in records(tmp_path / "run")]
    assert compared[0] is None and (compared[1] or 0) > 10 and compared[2] is None
    (summary,) = (tmp_path / "run").glob("summary.json")
    assert json.loads(summary.read_text())["status"] == "finished"
    done = train(f"{flags} --load {saved}", tmp_path / "run")
    assert done.returncode == 0, done.stderr
