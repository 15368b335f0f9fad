"""The chain of the proof: equal where both sides agree, broken by one bit."""

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from answered import answered
from commands import ProofCommand
from safetensors.torch import load_file, save_file
from torch import Tensor

from lab import certificate_picture
from mis_plugins.shared import terminal
from mis_plugins.shared.provenance import commit
from true_on_policy.contract.cpu import Contract
from true_on_policy.contract.families import tiny_models
from true_on_policy.contract.rounding import NormOrder
from true_on_policy.contract.sides import ENGINES, TRAINERS
from true_on_policy.engines.hf.engine import HuggingFace as Engine
from true_on_policy.engines.protocol import Request, Sample
from true_on_policy.errors import ModelError
from true_on_policy.kernels.pin import active_backend
from true_on_policy.models.hf_decoder import check_weights
from true_on_policy.models.tiny import checkpoint, updated
from true_on_policy.trainers.hf import HuggingFace
from true_on_policy.trainers.megatron import Megatron
from true_on_policy.verify import verification
from true_on_policy.verify.certificate import Certificate, Evidence, Link, link
from true_on_policy.verify.workload import LONG_PROMPT, Workload, arrangements, counted, situations

FEW = "60"


@pytest.fixture
def run(proof_command: ProofCommand) -> ProofCommand:
    """Verify Hugging Face's engine on few tokens, as `proof_command` does."""
    return partial(proof_command, "verify", "--engine", "hf", "--tokens", FEW)


# The command


@pytest.mark.parametrize(
    ("model", "trainer", "dtype", "norm_order"),
    [
        ("tiny-qwen3", "hf", "fp32", "engine"),
        ("tiny-qwen3", "hf", "bf16", "trainer"),
        ("tiny-qwen3", "megatron", "fp32", "trainer"),
        ("tiny-qwen3", "megatron", "bf16", "engine"),
        ("tiny-qwen3-tied", "megatron", "fp32", "engine"),
        ("tiny-llama", "megatron", "bf16", "engine"),
        ("tiny-qwen2.5", "megatron", "bf16", "engine"),
        ("tiny-qwen2.5", "megatron", "bf16", "trainer"),
        ("tiny-qwen3-vl", "megatron", "bf16", "engine"),
        ("tiny-qwen3-vl", "hf", "bf16", "trainer"),
        ("tiny-qwen3-moe", "megatron", "fp32", "trainer"),
        ("tiny-qwen3-moe-64", "megatron", "bf16", "engine"),
        ("tiny-qwen3-moe", "hf", "bf16", "trainer"),
        ("tiny-qwen2-moe", "megatron", "bf16", "engine"),
    ],
)
def test_engine_and_trainer_agree(model: str, trainer: str, dtype: str, norm_order: str, run: ProofCommand):
    """Qwen2.5 has biases on query, key and value, which Megatron's own layer adds to the rounded product."""
    read = run("--trainer", trainer, "--dtype", dtype, "--norm-order", norm_order, "--model", model)
    assert read.out.endswith("verdict: equal\n")
    assert active_backend() is None


def test_a_verification_says_how_far_it_is(run: ProofCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(terminal, "SECONDS", 0.0)
    told = run("--trainer", "hf").err
    assert len(re.findall(r"\n0 of \d+ computations done\n1 of ", told)) == 5, "of four weights and of the control"
    assert "\n1 batches sampled\n" in told


def test_the_flag_of_a_backend_is_refused_by_the_name_of_ours(run: ProofCommand):
    read = run("--trainer", "hf", "--backend", "fast", code=2)
    assert "--backend is gone: both sides run the kernels `native`" in read.err


@pytest.mark.parametrize(
    ("model", "field", "message"),
    [
        ("tiny-qwen3-moe", {"norm_topk_prob": False}, "norm_topk_prob: False is not covered for qwen3-moe"),
        ("tiny-qwen2-moe", {"norm_topk_prob": True}, "norm_topk_prob: True is not covered for qwen2-moe"),
        (
            "tiny-qwen3-moe",
            {"shared_expert_intermediate_size": 96},
            "shared_expert_intermediate_size: 96 is not covered for qwen3-moe; the contract covers 0",
        ),
        ("tiny-qwen3-moe", {"mlp_only_layers": [0]}, r"mlp_only_layers: [0] is not covered for qwen3-moe"),
        ("tiny-llama", {"attention_bias": True}, "attention_bias: True is not covered for llama"),
        ("tiny-llama", {"mlp_bias": True}, "mlp_bias: True is not covered for llama"),
        ("tiny-qwen3", {"attention_bias": True}, "attention_bias: True is not covered for qwen3-dense"),
        ("tiny-qwen2.5", {"use_sliding_window": True}, "use_sliding_window: True is not covered"),
        ("tiny-llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope of type 'llama3'"),
        ("tiny-qwen3", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope of type 'yarn'"),
        ("tiny-llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: 0.5"),
        ("tiny-qwen3-vl", {"text_config": {"attention_bias": True}}, "attention_bias: True is not covered for"),
        ("tiny-qwen3-vl", {"text_config": {"rope_scaling": {"type": "yarn"}}}, "rope of type 'yarn'"),
        ("tiny-qwen3-vl", {"quantization_config": {"bits": 4}}, "quantization_config: {'bits': 4}"),
        (
            "tiny-qwen3-vl",
            {"model_type": "qwen3_vl_moe"},
            "qwen3_vl_moe is a vision-language model of no proven family; the contract covers dense Qwen3,",
        ),
    ],
)
def test_a_model_that_departs_from_its_family_is_refused_by_the_fields_name(
    model: str, field: dict, message: str, tmp_path: Path, run: ProofCommand
):
    config = checkpoint(model, tmp_path, torch.float32, seed=0) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | field))
    assert f"--model {tmp_path}: {message}" in run("--trainer", "hf", "--model", tmp_path, code=2).err


@pytest.mark.parametrize(
    ("trainer", "ranks", "norm_order", "dtype"),
    [("hf", 1, "engine", "fp32"), ("megatron", 2, "trainer", "fp32"), ("megatron", 4, "engine", "bf16")],
)
def test_on_a_tree_they_agree_whatever_the_trainers_ranks(
    trainer: str, ranks: int, norm_order: str, dtype: str, tmp_path: Path, run: ProofCommand
):
    certificate = tmp_path / "c.json"
    arguments = ["--leaves", 4, "--trainer-tensor-parallel", ranks, "--norm-order", norm_order]
    run("--trainer", trainer, "--dtype", dtype, "--json", certificate, *arguments)
    said = json.loads(certificate.read_text())
    assert said["contract"]["leaves"] == 4 and said["contract"]["trainer_tensor_parallel"] == ranks
    assert said["control"]["equal"] < said["control"]["total"]


def flipped(values: Tensor) -> Tensor:
    """The same float32 values, the last bit of the last one other."""
    changed = values.clone()
    changed.numpy().view(np.int32)[-1] ^= 1
    return changed


class OneBitOffDecode(Engine):
    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        samples = super().generate(requests)
        last = dataclasses.replace(samples[-1], log_probs=flipped(samples[-1].log_probs))
        return [*samples[:-1], last]


class OneBitOffTrainer(HuggingFace):
    def log_probs(self, batch: Sequence[Sample], temperatures: Sequence[float]) -> list[Tensor]:
        values = super().log_probs(batch, temperatures)
        return [*values[:-1], flipped(values[-1])]


def replaced(monkeypatch: pytest.MonkeyPatch, sides: dict, start: Callable) -> None:
    """Another side under the name of Hugging Face's."""
    monkeypatch.setitem(sides, "hf", dataclasses.replace(sides["hf"], start=start))


@pytest.mark.parametrize(
    ("sides", "one_bit_off", "link_name"),
    [
        (ENGINES, OneBitOffDecode, "hence engine decode == trainer, at every temperature: "),
        (TRAINERS, OneBitOffTrainer, "engine prefill == trainer: "),
    ],
)
def test_one_bit_of_a_side_is_different(
    sides: dict, one_bit_off: Callable, link_name: str, monkeypatch: pytest.MonkeyPatch, run: ProofCommand
):
    replaced(monkeypatch, sides, lambda path, contract, order: one_bit_off(path, contract.dtype, order))
    out = run("--trainer", "hf", code=1).out
    assert link_name in out and "1 ulp apart" in out
    assert out.endswith("verdict: different\n")


def test_a_chain_that_holds_with_stock_kernels_too_proves_nothing(monkeypatch: pytest.MonkeyPatch, run: ProofCommand):
    agreeing = Evidence(
        samples=[Sample(Request((1,), 2), (3, 4), torch.tensor([-1.0, -2.0]), 0)],
        trainer_tempered=[torch.tensor([-1.0, -2.0])],
    )
    monkeypatch.setattr(verification, "_control", lambda *_: agreeing)
    assert run("--trainer", "hf", code=2).out.endswith("verdict: vacuous\n")


def test_the_certificate_says_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    certificate, picture = tmp_path / "results" / "c.json", tmp_path / "results" / "c.png"
    words = ["--engine", "hf", "--trainer", "megatron", "--tokens", FEW, "--json", str(certificate)]
    monkeypatch.setattr("sys.argv", ["lab", "verify"])
    assert certificate_picture.main([str(picture), *words]) == 0
    said = json.loads(certificate.read_text())
    assert said["verdict"] == "equal"
    assert said["engine"]["name"] == "hf" and said["trainer"] == "megatron"
    assert said["machine"]["packages"]["torch"] == torch.__version__
    assert said["commit"] == commit()
    assert len(said["weights"]) == 64 and said["prompts"] is None
    assert said["machine"]["cpu"] and said["machine"]["threads"] == torch.get_num_threads()
    assert said["contract"]["backend"] == "native"
    assert said["situations"]["sampled_tokens"] >= int(FEW)
    assert said["situations"]["longest_sequence"] > 512
    assert said["situations"]["temperatures"] == [0.7, 1.0]
    assert all(link["equal"] == link["total"] > 0 for link in said["links"])
    assert said["control"]["equal"] < said["control"]["total"]
    assert said["hashes"]["engine decode"] == said["hashes"]["trainer, every temperature"]
    assert said["hashes"]["engine decode"] != said["hashes"]["trainer"]  # at temperature 1
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_weights_change_as_often_as_the_certificate_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: ProofCommand
):
    given: list[tuple[int, bytes]] = []

    class Noting(Engine):
        def update_weights(self, checkpoint: Path, version: int) -> None:
            given.append((version, b"".join(path.read_bytes() for path in checkpoint.glob("*.safetensors"))))
            super().update_weights(checkpoint, version)

    replaced(monkeypatch, ENGINES, lambda path, contract, order: Noting(path, contract.dtype, order))
    run("--trainer", "hf", "--json", tmp_path / "c.json")
    count = json.loads((tmp_path / "c.json").read_text())["situations"]["weight_updates"]
    assert [version for version, _ in given] == list(range(1, count + 1)) and count == verification.UPDATES
    assert len({weights for _, weights in given}) == count


def test_the_control_is_stock_on_both_sides(monkeypatch: pytest.MonkeyPatch, run: ProofCommand):
    """Neither side is given an order there, and nothing is pinned."""
    made: list[tuple[str, bool, str | None]] = []

    def engine(path: Path, contract: Contract, order: NormOrder | None) -> Engine:
        made.append(("engine", order is None, active_backend()))
        return Engine(path, contract.dtype, order)

    def trainer(path: Path, contract: Contract, order: NormOrder | None) -> HuggingFace:
        made.append(("trainer", order is None, active_backend()))
        return HuggingFace(path, contract.dtype, order)

    replaced(monkeypatch, ENGINES, engine)
    replaced(monkeypatch, TRAINERS, trainer)
    run("--trainer", "hf")
    pinned, stock = [(side, False, "native") for side in SIDES], [(side, True, None) for side in SIDES]
    assert made == [*pinned, *stock]


SIDES = ("engine", "trainer")


def test_a_target_without_permission_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: ProofCommand
) -> None:
    """The superuser of a container may write anywhere: it is asked for, not tried."""
    asked: list[tuple[Path, int]] = []
    monkeypatch.setattr("os.access", lambda path, mode: asked.append((path, mode)))
    old = tmp_path / "old.json"
    old.touch()
    for file, of, what in ((old, old, "may"), (tmp_path / "new.json", tmp_path, "the folder of the file may")):
        assert f"\n--json {file}: {what} not be written" in run("--trainer", "hf", "--json", file, code=2).err
        assert asked.pop() == (of, os.W_OK)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--model", "tiny-gemma"),
            "--model: got 'tiny-gemma'; choose one of tiny-qwen3, tiny-qwen3-tied, tiny-qwen2.5, tiny-qwen3-vl, "
            "tiny-llama, tiny-qwen3-moe, tiny-qwen3-moe-64, tiny-qwen2-moe, smollm2-135m, or",
        ),
        (("--tokens", "0"), "--tokens: got 0; compare one at least"),
        (("--json", "."), "--json .: is a folder; name a file"),
        (("--model", "smollm2-135m", "--leaves", "3"), "transformers\n--leaves: got 3; choose a power"),
        (
            ("--trainer", "megatron", "--trainer-tensor-parallel", "2"),
            "--trainer-tensor-parallel: 2 but --engine-tensor-parallel: 1. A row-parallel layer adds",
        ),
        (
            tuple("--trainer megatron --trainer-tensor-parallel 4 --leaves 4 --model tiny-qwen3-tied".split()),
            "--trainer-tensor-parallel: 4 ranks cannot share the model's 6 attention heads",
        ),
        (("--leaves", "16", "--model", "tiny-qwen3-tied"), "--leaves: 16 do not divide the 712 inputs of down_proj"),
        (("--prompts", "builtin"), "--prompts builtin: the model has no tokenizer.json; choose --model smollm2-135m"),
        (("--prompts", ""), "--prompts : is no regular file"),  # an empty name is no wish for random tokens
        (
            ("--trainer-tensor-parallel", "2", "--leaves", "2"),
            "--trainer-tensor-parallel: hf runs on one rank; choose --trainer megatron",
        ),
        (
            ("--engine-tensor-parallel", "2", "--leaves", "2"),
            "--engine-tensor-parallel: hf runs on one rank; choose --engine sglang",
        ),
    ],
)
def test_what_cannot_run_exits_with_2(arguments: tuple[str, ...], message: str, run: ProofCommand):
    told = run("--trainer", "hf", *arguments, code=2).err
    assert message in told and "sampled" not in told


# The situations

EVERY = ["batch of 1", "batch of 3", "batch of 8", "temperature 0.7", "temperature 1"]
EVERY += ["sequence beyond 512 tokens", "continued sequence", "weight update"]
OF_SERVERS = ["prefix-cache hit", "preemption"]


def test_few_tokens_meet_every_situation_and_the_certificate_names_them(tmp_path: Path, run: ProofCommand):
    out = run("--trainer", "hf", "--tokens", 1, "--json", tmp_path / "c.json").out
    said = json.loads((tmp_path / "c.json").read_text())
    assert said["met"] == EVERY and said["not_met"] == {} and said["not_of_engine"] == OF_SERVERS
    assert {"1", "3", "8"} == said["situations"]["batches"].keys()
    assert all(said["situations"]["batches"].values()) and said["situations"]["continued_sequences"] == 3
    assert f"met: {', '.join(EVERY)}\nnot of this engine: {', '.join(OF_SERVERS)}\nverdict: equal\n" in out


def test_a_situation_that_an_engine_should_meet_and_did_not_is_no_equal(
    monkeypatch: pytest.MonkeyPatch, run: ProofCommand
):
    able = dataclasses.replace(ENGINES["hf"], abilities=("prefix cache", "preemption"))
    monkeypatch.setitem(ENGINES, "hf", able)
    out = run("--trainer", "hf", code=2).out
    assert "not met: prefix-cache hit: give more --tokens, and leave the engine's prefix cache on\n" in out
    assert "not met: preemption: give more --tokens: " in out and out.endswith("verdict: incomplete\n")


def sampled(cached: int = 0, preempted: int = 0) -> Evidence:
    """A first sequence, one that continues it at another temperature and version, in batches of 1 and 3."""
    first = Sample(Request((1,), 2), (3, 4), torch.tensor([-1.0, -2.0]), 0)
    onward = Sample(Request((1, 3, 4), 1, 0, 0.7), (5,), torch.tensor([-1.0]), 1, cached, preempted)
    return Evidence(samples=[first, onward], batches=[1, 3])


def test_situations_are_counted_from_what_the_engine_returned():
    assert counted(sampled(cached=2, preempted=1)) == {
        "sampled_tokens": 3,
        "sequences": 2,
        "longest_sequence": 4,
        "temperatures": [0.7, 1.0],
        "batches": {"1": 1, "3": 1, "8": 0},
        "continued_sequences": 1,
        "weight_updates": 1,
        "prompt_tokens_from_cache": 2,
        "preemptions": 1,
    }
    lacking = ["batch of 8", "sequence beyond 512 tokens"]
    not_met = lambda evidence, *able: [*situations(counted(evidence), able).not_met]  # noqa: E731
    assert not_met(sampled(2, 1), "prefix cache", "preemption") == lacking
    assert not_met(sampled(), "prefix cache", "preemption") == [*lacking, *OF_SERVERS]
    assert not_met(sampled()) == lacking


@pytest.mark.parametrize(
    ("link", "apart", "control", "furthest", "not_met", "verdict"),
    [
        (1, 0.0, 0, 0.5, {}, "equal"),
        (1, 0.0, 0, None, {}, "incomplete"),  # a control of NaN shows nothing
        (1, 0.0, 0, 0.5, {"preemption": "why"}, "incomplete"),
        (0, 0.5, 0, 0.5, {"preemption": "why"}, "different"),
        (0, None, 0, 0.5, {}, "incomplete"),  # links of NaN show no difference
        (1, 0.0, 1, 0.0, {"preemption": "why"}, "vacuous"),
    ],
)
def test_a_difference_outweighs_a_situation_that_was_not_met(
    link: int, apart: float | None, control: int, furthest: float | None, not_met: dict[str, str], verdict: str
):
    links, broken = [Link("a", link, 1, None, apart)], Link("b", control, 1, None, furthest)
    certificate = SimpleNamespace(links=links, control=broken, not_met=not_met)
    assert Certificate.verdict.fget(certificate) == verdict  # pyright: ignore[reportOptionalCall]


def test_a_full_set_that_an_earlier_call_sampled_is_not_sampled_again():
    workload = Workload(320, seed=0)
    assert [len(batch) for batch in workload.sample(answered, 1, full_set=True)] == [1, 1, 3, 8, 3]
    assert len(workload.sample(answered, 1, full_set=True)) == 1


# The pieces


@pytest.mark.parametrize("name", tiny_models())
def test_megatron_holds_the_weights_of_the_checkpoint(name: str, tmp_path: Path):
    path = checkpoint(name, tmp_path, torch.float32, seed=3)
    tokens = torch.arange(2, 40)
    stock = HuggingFace(path, "fp32").model(input_ids=tokens[None]).logits[0]
    [logits] = Megatron(path, "fp32").logits([tokens.tolist()])
    assert (stock - logits).abs().max() < 1e-4 * stock.abs().max()


@pytest.mark.parametrize("trainer", [HuggingFace, Megatron])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.self_attn.q_norm.weight"])
def test_a_checkpoint_without_a_weight_is_no_model(trainer: Any, name: str, tmp_path: Path):
    """Transformers makes the weight up, each time another or ones."""
    file = checkpoint("tiny-qwen3", tmp_path, torch.float32, seed=0) / "model.safetensors"
    weights = load_file(file)
    del weights[name]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ModelError, match=f"{tmp_path}: holds no {name}"):
        trainer(tmp_path, "fp32")


EMBEDDING = "model.embed_tokens.weight"
Q, OF_2 = "model.layers.2.self_attn.q_proj.weight", "model.layers.2.mlp.experts.0.down_proj.weight"


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        (
            "tiny-qwen3",
            lambda held: {Q.replace("2", "3"): held[Q] + 1},
            r"holds model.layers.3.self_attn.q_proj.weight \[128, 128\], other than",
        ),
        ("tiny-qwen3", lambda held: {Q: held[Q][:, :7].clone()}, rf"holds no {Q} \[128, 128\]"),
        ("tiny-qwen3-tied", lambda held: {"lm_head.weight": torch.ones(333, 320)}, "other than the embedding"),
        ("tiny-qwen3-tied", lambda held: {"lm_head.weight": held[EMBEDDING].clone()}, None),
        (
            "tiny-qwen3-tied",
            lambda held: {name: held[EMBEDDING] * math.nan for name in (EMBEDDING, "lm_head.weight")},
            None,
        ),
        ("tiny-llama", lambda held: {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}, None),
        ("tiny-qwen3-moe", lambda held: {OF_2.replace(".0.", ".8."): held[OF_2] + 1}, "holds no .*experts.8.gate_proj"),
        ("tiny-qwen3-moe", lambda held: {OF_2: held[OF_2][:3].clone()}, "experts of other shapes"),
        (
            "tiny-qwen3-moe",
            lambda held: {f"{OF_2}.bias": held[OF_2][0].clone()},
            rf"holds {OF_2}.bias \[.*, other than",
        ),
        ("tiny-qwen3-vl", lambda held: {}, None),
    ],
)
def test_a_checkpoint_holds_the_weights_of_its_config(model: str, change: Any, message: str | None, tmp_path: Path):
    """A proof of the first layers would else name the hash of all layers."""
    file = checkpoint(model, tmp_path, torch.float32, seed=0) / "model.safetensors"
    held = load_file(file)
    save_file(held | change(held), file, {"format": "pt"})
    with pytest.raises(ModelError, match=message) if message else nullcontext():
        check_weights(tmp_path)


def test_a_tiny_model_is_its_seed_and_has_random_norms(tmp_path: Path):
    first, again, other = (
        checkpoint("tiny-qwen3", tmp_path / str(number), torch.float32, seed) for number, seed in enumerate((0, 0, 1))
    )
    read = [(path / "model.safetensors").read_bytes() for path in (first, again, other)]
    assert read[0] == read[1] != read[2]
    norms = [p for name, p in HuggingFace(first, "fp32").model.named_parameters() if "norm" in name]
    assert all(norm.unique().numel() == norm.numel() for norm in norms)
    assert (updated(first, tmp_path / "updated", 1) / "model.safetensors").read_bytes() != read[0]


def test_the_workload_meets_its_situations():
    batches = Workload(320, seed=0).sample(generate := Mock(side_effect=answered), 600)
    samples, asked = [sample for batch in batches for sample in batch], [call.args[0] for call in generate.mock_calls]
    assert [len(batch) for batch in batches] == [len(batch) for batch in asked]
    assert [len(batch) for batch in asked[:5]] == [1, 1, 3, 8, 3]
    assert len(asked[0][0].prompt) == LONG_PROMPT
    earlier = {sample.sequence for sample in samples[:13]}
    assert all(request.prompt in earlier for request in asked[4])
    assert len({sample.request.seed for sample in samples}) == len(samples)
    for _, batches in arrangements(samples, seed=0):
        assert sorted(index for batch in batches for index in batch) == list(range(len(samples)))


@pytest.mark.parametrize(
    ("left", "right", "first"),
    [
        ([[0.0] * 3], [torch.zeros(3, dtype=torch.float64)], "dtype torch.float32 against torch.float64"),
        ([[0.0] * 3], [[0.0]], "shape (3,) against (1,)"),
        ([[0.0] * 3], [[0.0] * 4], "shape (3,) against (4,)"),
        *(
            ([[-1.0], [-0.5, number]], [[-1.0], [-0.5, number]], "no log-prob at [1, 1]")
            for number in (torch.nan, -torch.inf, -9999.0, 1.0)
        ),
        ([[-1.0], [-0.0]], [[-1.0], [-0.0]], None),
        ([[0.0], [0.0] * 2], [[0.0] * 2, [0.0]], "sequences of other lengths"),
    ],
)
def test_log_probs_of_another_dtype_or_number_and_nan_never_hold(left: list, right: list, first: str | None):
    found = link("a link", *([torch.as_tensor(values) for values in side] for side in (left, right)))
    assert (found.holds, found.first) == (first is None, first)
    assert (found.furthest == 0) == found.holds
