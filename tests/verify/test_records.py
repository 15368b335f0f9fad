"""A record is all that a new engine, trainer or family needs: `verify` uses each that a test makes up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from true_on_policy.__main__ import main
from true_on_policy.contract.families import FAMILIES, Family, Proof, Shape
from true_on_policy.contract.norm_order import NormOrder
from true_on_policy.contract.sides import ENGINES, TRAINERS
from true_on_policy.models import hf_decoder

FUSED = NormOrder(rounds_sum=True, rounds_normalized=False)  # neither vLLM's nor Hugging Face's
SHAPE = Shape(64, 96, 2, 4, 2, 16, 160, tied=False)
FEW = ("--tokens", "20")


def noting(start: Callable[..., Any], asked: list[Any]) -> Callable[..., Any]:
    """A `start` that notes the order that it is given."""

    def noted(path: Path, contract: Any, order: NormOrder | None) -> Any:
        asked.append(order)
        return start(path, contract, order)

    return noted


@pytest.fixture
def asked() -> Iterator[list[NormOrder | None]]:
    """Orders that a made-up engine and a made-up trainer are given, each on Hugging Face's model."""
    orders: list[NormOrder | None] = []
    hf = ENGINES["hf"]
    engine = replace(hf, start=noting(hf.start, orders), order=FUSED, abilities=("prefix cache",))
    trainer = replace(TRAINERS["hf"], start=noting(TRAINERS["hf"].start, orders))
    with patch.dict(ENGINES, fused=engine), patch.dict(TRAINERS, other=trainer):
        yield orders


def test_a_new_engine_and_a_new_trainer_are_their_records(
    asked: list[NormOrder | None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.json"
    command = ["verify", "--engine", "fused", "--trainer", "other", "--dtype", "bf16", "--json", str(file)]
    assert main([*command, *FEW]) == 2  # its record promises a cache that it does not have
    assert asked == [FUSED, FUSED, None, None]
    said = json.loads(file.read_text())
    assert (said["engine"]["name"], said["trainer"]) == ("fused", "other")
    assert said["order"] == {"rounds_sum": True, "rounds_normalized": False}
    assert all(link["equal"] == link["total"] > 0 for link in said["links"])
    assert [*said["not_met"]] == ["prefix-cache hit"] and said["not_of_engine"] == ["preemption"]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["verify", "--engine", "none", "--trainer", "other"])
    assert "'hf', 'fused'" in capsys.readouterr().err


class BiasAfter(torch.nn.Linear):
    """Adds the bias to the rounded product, as Megatron does."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.nn.functional.linear(input, self.weight) + self.bias


def made_up(name: str, model_type: str, aligned: list[NormOrder]) -> Family:
    """A family of the GPU contract that a record makes provable on CPU, with an alignment that notes its orders."""

    def align(model: Any, order: NormOrder) -> None:
        aligned.append(order)
        hf_decoder.align(model, order)
        for module in model.modules():
            if getattr(module, "bias", None) is not None:
                module.__class__ = BiasAfter

    return replace(FAMILIES[name], proof=Proof(model_type, f"dense {name}", {"tiny-new": SHAPE}, align))


@pytest.mark.parametrize(("name", "model_type"), [("llama", "llama"), ("qwen2.5-dense", "qwen2")])
@pytest.mark.parametrize("trainer", ["hf", "megatron"])
def test_a_new_family_is_its_record(
    name: str, model_type: str, trainer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither normalizes query and key, and one has biases there; the engine follows the order of the trainer."""
    aligned: list[NormOrder] = []
    with patch.dict(FAMILIES, {name: made_up(name, model_type, aligned)}):
        command = ["verify", "--engine", "hf", "--trainer", trainer, "--model", "tiny-new", "--dtype", "bf16"]
        assert main([*command, "--norm-order", "trainer", *FEW]) == 0
    assert capsys.readouterr().out.endswith("verdict: equal\n")
    assert aligned == ([] if trainer == "hf" else [TRAINERS["megatron"].order])


def test_without_its_record_a_family_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--engine", "hf", "--trainer", "hf", "--model", "tiny-new"]) == 2
    assert "got 'tiny-new'; choose one of tiny-qwen3, tiny-qwen3-tied, or" in capsys.readouterr().err
