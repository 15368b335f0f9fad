"""The real SGLang, stock and pinned: what the ordinary suite shows with Hugging Face's decode, shown with its own."""

import json
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.nn.functional as F
from alignments import COMPLETE, LEFT_OUT, equal_share
from test_verify import OneBitOffTrainer, flipped
from torch import Tensor

from true_on_policy.__main__ import main
from true_on_policy.bitwise import equal_bits
from true_on_policy.contract.cpu import Contract, Shapes
from true_on_policy.contract.gpu import model_contract
from true_on_policy.contract.model_config import stated_size
from true_on_policy.contract.rounding import ORDERS, NormOrder
from true_on_policy.contract.sides import ENGINES, TRAINERS
from true_on_policy.doctor.engine_http import ALONE, LOG_SOFTMAX, PREFILLED, PROBED, SCORED, SEEDS, observe_engine
from true_on_policy.engines.asking import answer_of
from true_on_policy.engines.handover import KEY
from true_on_policy.engines.protocol import Cut, Engine, EngineError, Request, Sample
from true_on_policy.engines.server import interpreter
from true_on_policy.engines.sglang.engine import SGLang
from true_on_policy.flags.command import launch_flags
from true_on_policy.flags.rules import FILES, RELEASES, declares
from true_on_policy.kernels import gpu
from true_on_policy.kernels.pin import pinned
from true_on_policy.kernels.probes import digest, over_ranks
from true_on_policy.models.tiny import read_config, updated
from true_on_policy.observe.dumps import RANKS, load_engine
from true_on_policy.observe.process import KERNELS, PRODUCTS
from true_on_policy.trainers.hf import HuggingFace
from true_on_policy.trainers.megatron import Megatron
from true_on_policy.verify import verification
from true_on_policy.verify.certificate import Evidence

pytestmark = pytest.mark.timeout(1200)  # a server may take 600 s to start

PROMPT = tuple(range(2, 150))  # longer than a chunk of the prefill
REQUESTS = [Request((5, 6, 7), 40, seed=1), Request(PROMPT, 30, seed=2), Request((9,), 35, seed=3)]


def joined(samples: list[Sample]) -> torch.Tensor:
    return torch.cat([sample.log_probs for sample in samples])


def test_company_does_not_matter(engine: SGLang):
    together, alone = engine.generate(REQUESTS), [engine.generate([request])[0] for request in REQUESTS]
    assert [sample.tokens for sample in together] == [sample.tokens for sample in alone]
    assert equal_bits(joined(together), joined(alone))


def test_a_response_is_over_with_its_first_end(engine: SGLang):
    whole = engine.generate(REQUESTS)
    place = next(at for at in range(5, 40) if whole[0].tokens[at] not in whole[0].tokens[:at])
    ending = engine.generate([replace(REQUESTS[0], end=whole[0].tokens[place]), *REQUESTS[1:]])
    assert ending[0].tokens == whole[0].tokens[: place + 1]
    assert equal_bits(ending[0].log_probs, whole[0].log_probs[: place + 1])
    assert [one.tokens for one in ending[1:]] == [one.tokens for one in whole[1:]]


def test_decode_is_prefill_also_where_the_prompt_comes_from_the_cache(engine: SGLang):
    first = engine.generate([Request(PROMPT + (3, 1), 20, seed=4)])
    second = engine.generate([Request(PROMPT + (3, 1), 20, seed=4), Request(first[0].sequence, 20, seed=5)])
    assert second[0].cached >= len(PROMPT) and second[1].cached > len(PROMPT) + 2
    assert equal_bits(first[0].log_probs, second[0].log_probs)
    assert equal_bits(joined(second), torch.cat(engine.score(second)))


def test_a_cut_by_number_keeps_no_more_tokens(engine: SGLang):
    """`test_training.py` cuts by probability alone."""
    [sample] = engine.generate([Request(PROMPT, 40, seed=6, cut=Cut(top_p=0.02, top_k=4))])
    assert sample.kept is not None
    sizes = torch.tensor([len(row) for row in sample.kept])
    assert 1 < sizes.max() <= 4
    assert (sample.log_probs[sizes == 1] == 0).all() and (sample.log_probs[sizes > 1] < 0).all()


def test_the_doctor_sees_from_inside_what_http_does_not_tell(engine: SGLang, engine_dump: Path, tiny: Path):
    """The products have the bits of a trainer that is pinned here, in another process and another environment."""
    seen = load_engine(engine_dump, engine._server.url)
    told = {KERNELS: "batch-invariant", "sglang: aten::mm": "cpu.py of true_on_policy", RANKS: "all"}
    told |= {"attention": "torch_native", "KV cache": "bfloat16", "tensor parallel": "1", "torch.compile": "off"}
    assert told.items() <= seen.settings.items()
    assert all(seen.how(name) == "observed" for name in told)
    size = stated_size(json.loads((tiny / "config.json").read_text()))

    def digested(linear: Callable[[Tensor, Tensor], Tensor]) -> str:
        return digest("bf16", gpu.products(size, linear, linear), torch.device("cpu"))

    with pinned(Contract(dtype="bf16")):
        assert seen.settings[PRODUCTS] == digested(F.linear)
        # Stock kernels are no control: on a processor without bf16 instructions they have the pinned bits.
        assert seen.settings[PRODUCTS] != digested(in_halves)


def in_halves(x: Tensor, weight: Tensor) -> Tensor:
    """The product as two ranks make it: each half of K is rounded before both are added."""
    (x_left, x_right), (left, right) = x.chunk(2, -1), weight.chunk(2, -1)
    return F.linear(x_left, left) + F.linear(x_right, right)


def test_the_digest_is_of_the_layers_that_ranks_share(engine_dump: Path, tiny: Path):
    """SGLang's own RowParallelLinear on two ranks, beside the pinned products of a trainer on two."""
    size = stated_size(json.loads((tiny / "config.json").read_text()))
    contract = Contract(dtype="bf16", shapes=Shapes.of(read_config(tiny), 2))
    with closing(SGLang(tiny, "bf16", contract, ranks=2)) as two:
        seen = load_engine(engine_dump, two._server.url)
    assert (seen.settings["tensor parallel"], seen.settings[RANKS]) == ("2", "all")
    with pinned(Contract(dtype="bf16")):
        alone, shared = (
            digest("bf16", gpu.products(size, row, row), torch.device("cpu"))
            for row in (F.linear, over_ranks(F.linear, 2))
        )
    assert seen.settings[PRODUCTS] == shared != alone


def test_the_doctor_sees_over_http_that_it_is_invariant(engine: SGLang, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(KEY, engine._server.key)
    seen = observe_engine(engine._server.url).settings
    told = dict.fromkeys((ALONE, PREFILLED, SCORED), "equal") | {SEEDS: "one each", LOG_SOFTMAX: "fp32"}
    assert {row: seen[row] for row in PROBED} == told
    assert (seen["SGLang"], seen["deterministic inference"]) == (engine.versions()["sglang"], "on")


def test_its_sources_declare_what_the_table_of_releases_says():
    (package,) = interpreter("sglang").parent.parent.glob("lib/python*/site-packages/sglang")
    text = "\n".join(path.read_text() for pattern in FILES["sglang"] for path in package.glob(pattern))
    asked = [flag.name for flag in launch_flags(model_contract("qwen3-4B", "fsdp")) if flag.owner == "sglang"]
    (release,) = [release for release in RELEASES if release.name == "SGLang 0.5.23 (PyPI)"]
    assert [flag for flag in asked if not declares(text, flag)] == list(release.lacks)


def test_the_trainer_follows_through_an_update(engine: SGLang, tiny: Path, tmp_path: Path):
    trainer = Megatron(tiny, "bf16", ORDERS["sglang"])
    for version, path in enumerate((updated(tiny, tmp_path / "1", seed=1), tiny)):
        engine.update_weights(path, version)
        trainer.load(path)
        samples = engine.generate(REQUESTS)
        with pinned(Contract(dtype="bf16")):
            assert equal_bits(joined(samples), torch.cat(trainer.log_probs(samples, [1.0] * 3)))
        assert {sample.version for sample in samples} == {version}


def test_weights_that_do_not_exist_are_an_error(engine: SGLang, tmp_path: Path):
    with pytest.raises(EngineError, match="sglang: "):
        engine.update_weights(tmp_path / "nowhere", 9)
    assert len(engine.generate(REQUESTS[:1])[0].tokens) == 40  # it still runs


@pytest.fixture(scope="module")
def sampled(engine: SGLang) -> list[Sample]:
    # Of 210 tokens none differs on some processors where sums alone are left out.
    warm = [replace(request, temperature=0.7, seed=seed) for request in REQUESTS for seed in range(9, 17)]
    return engine.generate(REQUESTS + warm)


@pytest.mark.parametrize("what", COMPLETE)
def test_with_every_alignment_the_trainer_has_the_engines_log_probs(sampled, tiny, what):
    assert equal_share(sampled, COMPLETE[what](tiny, sampled)) == 1.0


@pytest.mark.parametrize("what", LEFT_OUT)
def test_without_one_alignment_it_has_not(sampled, tiny, what):
    assert equal_share(sampled, LEFT_OUT[what](tiny, sampled)) < 1.0


def left_open(engine: SGLang) -> Mock:
    """It, for a user who would end it."""
    return Mock(wraps=engine, close=Mock())


@pytest.fixture
def shared(engine: SGLang, stock: SGLang, tiny: Path) -> Iterator[None]:
    """A verification that would start a server like one that runs takes that one, with the first weights again."""
    spec = ENGINES["sglang"]

    def serve(checkpoint: Path, contract: Contract, order: NormOrder | None) -> Engine:
        own_sums = (contract.engine_tensor_parallel, contract.leaves) == (1, 1)
        alike = order is None or (order == ORDERS["sglang"] and own_sums)
        if contract.dtype != "bf16" or not alike:
            return spec.start(checkpoint, contract, order)
        running = engine if order else stock
        running.update_weights(tiny, 0)
        return left_open(running)

    with patch.dict(ENGINES, sglang=replace(spec, start=serve)):
        yield


@pytest.mark.parametrize(
    "arguments",
    [
        "--trainer megatron --dtype bf16 --norm-order trainer",
        "--trainer hf --dtype bf16 --norm-order engine",
        "--trainer megatron --dtype bf16 --trainer-tensor-parallel 2 --leaves 4",
        "--trainer megatron --dtype fp32 --engine-tensor-parallel 2 --leaves 2",
    ],
)
def test_the_command_certifies_it(arguments: str, shared: None, tmp_path: Path):
    """Float32 has an engine on two ranks; `lab/results` has certificates of engine and trainer on one."""
    certificate = tmp_path / "c.json"
    command = ["verify", "--engine", "sglang", "--tokens", "1200", "--json", str(certificate)]
    assert main([*command, *arguments.split()]) == 0
    said = json.loads(certificate.read_text())
    assert said["engine"]["sglang"] == "0.5.23"
    assert all(link["equal"] == link["total"] > 0 for link in said["links"])
    assert said["not_of_engine"] == [] and said["not_met"] == {}
    assert said["situations"]["preemptions"] > 0 and said["situations"]["prompt_tokens_from_cache"] > 0


def one_bit_off(samples: list[Sample]) -> list[Sample]:
    return [*samples[:-1], replace(samples[-1], log_probs=flipped(samples[-1].log_probs))]


@pytest.mark.parametrize(("side", "code"), [("neither", 0), ("engine", 1), ("trainer", 1)])
def test_one_bit_of_either_process_is_seen(side: str, code: int, engine: SGLang, tiny: Path):
    engine.update_weights(tiny, 0)
    running = left_open(engine)
    if side == "engine":
        running.generate.side_effect = lambda requests: one_bit_off(engine.generate(requests))
    trainer = OneBitOffTrainer if side == "trainer" else HuggingFace
    unequal = Evidence([Sample(Request((1,), 1), (2,), torch.tensor([-1.0]), 0)])
    unequal.trainer_tempered = [torch.tensor([-2.0])]
    with (
        patch.dict(ENGINES, sglang=replace(ENGINES["sglang"], start=lambda *_: running)),
        patch.dict(
            TRAINERS,
            hf=replace(TRAINERS["hf"], start=lambda path, contract, order: trainer(path, contract.dtype, order)),
        ),
        patch.object(verification, "_control", lambda *_: unequal),
    ):
        command = "verify --engine sglang --trainer hf --dtype bf16 --tokens 60"
        assert main(command.split()) == code


def test_a_pin_that_cannot_hold_ends_the_server_with_its_reason(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CC", "false")  # a compiler that compiles nothing
    with pytest.raises(EngineError, match=r"PinError: the native kernels do not build here"):
        SGLang(tiny, "bf16", Contract(dtype="bf16"))


def test_a_stranger_without_the_key_is_refused_and_ps_does_not_show_it(stock: SGLang):
    for path, body in (("/generate", {}), ("/update_weights_from_disk", {}), ("/server_info", None)):
        with pytest.raises(EngineError, match=f"{path} answered 401"):
            answer_of(stock._server.url, path, body, 60)
    listed = subprocess.run(["ps", "-eww", "-o", "args="], capture_output=True, text=True, check=True)
    assert "--config" in listed.stdout and stock._server.key not in listed.stdout


def test_its_processes_are_forked(stock: SGLang):
    """A spawned process brings Python's resource tracker with it."""
    command = ["ps", "-ww", "-o", "args=", "--sid", str(stock._server._process.pid)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "sglang::scheduler" in listed.stdout and "multiprocessing" not in listed.stdout


def test_nothing_of_a_closed_server_is_left(stock: SGLang):
    group, port = stock._server._process.pid, int(stock._server.url.rsplit(":", 1)[1])
    assert members(group) and listening(port)
    stock.close()
    assert not members(group) and not listening(port)


def members(group: int) -> list[str]:
    listed = subprocess.run(["ps", "-eo", "pgid=,stat=,pid="], capture_output=True, text=True, check=True)
    rows = (line.split() for line in listed.stdout.splitlines())
    return [pid for pgid, stat, pid in rows if int(pgid) == group and not stat.startswith("Z")]


def listening(port: int) -> bool:
    with socket.socket() as prober:
        return prober.connect_ex(("127.0.0.1", port)) == 0
