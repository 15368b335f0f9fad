"""A record is all that a new engine, trainer or family needs: `verify` uses each that a test makes up."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from commands import ProofCommand, ran

import true_on_policy.engines
from true_on_policy.contract import sides
from true_on_policy.contract.cpu import Contract, Shapes
from true_on_policy.contract.families import FAMILIES, Family, Shape, tiny_models
from true_on_policy.contract.rounding import NormOrder
from true_on_policy.contract.sides import ENGINES, TRAINERS
from true_on_policy.engines.handover import handed_over, stated_contract
from true_on_policy.models import hf_decoder
from true_on_policy.models.tiny import config_of

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


RECORD = """
from true_on_policy.contract.specs import HUGGING_FACE, EngineSpec, at

ENGINE = EngineSpec(start=at("builtins:print"), order=HUGGING_FACE, packages=("torch",))
"""


def test_an_engine_is_found_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "late_engine"
    folder.mkdir()
    (folder / "__init__.py").write_text(RECORD)
    monkeypatch.setattr(true_on_policy.engines, "__path__", [*true_on_policy.engines.__path__, str(tmp_path)])
    found = sides.engines()
    assert found.pop("late_engine").packages == ("torch",)
    assert found == ENGINES


def test_records_of_engines_need_no_torch_and_start_nothing() -> None:
    """The command line offers its choices before anything heavy is imported."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from true_on_policy.contract.sides import ENGINES\n"
        "print(sorted(name for name in sys.modules if name.startswith('true_on_policy.engines.')))"
    )
    done = ran("-c", code)
    names = [f"true_on_policy.engines.{name}" for name in ENGINES]
    assert done.stdout.strip() == str(names), done.stderr


def test_a_new_engine_and_a_new_trainer_are_their_records(
    asked: list[NormOrder | None], tmp_path: Path, proof_command: ProofCommand
) -> None:
    file, words = tmp_path / "c.json", "verify --engine fused --trainer other --dtype bf16 --json".split()
    proof_command(*words, file, *FEW, code=2)  # its record promises a cache that it does not have
    assert asked == [FUSED, FUSED, None, None]
    said = json.loads(file.read_text())
    assert (said["engine"]["name"], said["trainer"]) == ("fused", "other")
    assert said["order"] == {"rounds_sum": True, "rounds_normalized": False}
    assert all(link["equal"] == link["total"] > 0 for link in said["links"])
    assert [*said["not_met"]] == ["prefix-cache hit"] and said["not_of_engine"] == ["preemption"]
    read = proof_command("verify", "--engine", "none", "--trainer", "other", code=2)
    assert ", ".join(map(repr, ENGINES)) in read.err


def made_up(aligned: list[NormOrder]) -> Family:
    """A family that no record describes, with an alignment that notes its orders."""

    def align(model: Any, order: NormOrder) -> None:
        aligned.append(order)
        hf_decoder.align(model, order)

    return Family("mistral", ("MistralForCausalLM",), "mistral", "dense Mistral", {"tiny-new": SHAPE}, align)


@pytest.mark.parametrize("trainer", ["hf", "megatron"])
def test_a_new_family_is_its_record(trainer: str, proof_command: ProofCommand) -> None:
    """The engine follows the order of the trainer."""
    aligned: list[NormOrder] = []
    with patch.dict(FAMILIES, mistral=made_up(aligned)):
        words = "verify --engine hf --model tiny-new --dtype bf16 --norm-order trainer --trainer".split()
        assert proof_command(*words, trainer, *FEW).out.endswith("verdict: equal\n")
    assert aligned == ([] if trainer == "hf" else [TRAINERS["megatron"].order])


def test_two_families_of_one_model_type_are_told() -> None:
    with (
        patch.dict(FAMILIES, other=next(iter(FAMILIES.values()))),
        pytest.raises(ValueError, match="prove the model_type qwen3;"),
    ):
        tiny_models()


@pytest.mark.parametrize("name", tiny_models())
def test_an_engine_reads_the_contract_that_was_handed_over(name: str) -> None:
    """The shapes are tuples of tuples, which JSON does not know."""
    family, shape = tiny_models()[name]
    shapes = Shapes.of(config_of(family, shape, torch.bfloat16).get_text_config())
    contract = Contract(dtype="bf16", trainer_tensor_parallel=2, leaves=4, shapes=shapes)
    assert stated_contract(handed_over(contract, FUSED)) == contract
