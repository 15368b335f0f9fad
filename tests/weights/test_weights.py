"""The engine's weights against a checkpoint's: fused and cut as SGLang holds them, and every planted fault named."""

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from commands import ProofCommand
from safetensors.torch import save_file
from torch import Tensor

from lab.host.cli.arguments import parse_args
from lab.host.model.decoder import ModelConfig
from lab.host.rollout.served import ServedEngine
from lab.host.train.parallel import launch
from mis_plugins.errors import ConfigError
from true_on_policy.bitwise import Digest, read_values, values
from true_on_policy.engines.handover import DIGESTS, VALUES
from true_on_policy.engines.protocol import EngineError
from true_on_policy.engines.sglang.plugin import weights_told
from true_on_policy.errors import NotSeenError
from true_on_policy.models import tiny
from true_on_policy.models.tiny import read_weights
from true_on_policy.weights.comparison import compare

HIDDEN, HEADS, GROUPS, HEAD, FFN, VOCABULARY, EXPERTS = 8, 4, 2, 4, 12, 10, 4
LAYER = "model.layers.0"


def checkpoint(tied: bool = False, experts: bool = False) -> dict[str, Tensor]:
    """Weights of one layer by Hugging Face name, all values different."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        f"{LAYER}.self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
        f"{LAYER}.self_attn.k_proj.weight": (GROUPS * HEAD, HIDDEN),
        f"{LAYER}.self_attn.v_proj.weight": (GROUPS * HEAD, HIDDEN),
        f"{LAYER}.self_attn.q_proj.bias": (HEADS * HEAD,),
        f"{LAYER}.self_attn.k_proj.bias": (GROUPS * HEAD,),
        f"{LAYER}.self_attn.v_proj.bias": (GROUPS * HEAD,),
        f"{LAYER}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
        f"{LAYER}.input_layernorm.weight": (HIDDEN,),
    }
    for index in range(EXPERTS if experts else 1):
        mlp = f"{LAYER}.mlp.experts.{index}" if experts else f"{LAYER}.mlp"
        shapes |= {f"{mlp}.{part}_proj.weight": (FFN, HIDDEN) for part in ("gate", "up")}
        shapes[f"{mlp}.down_proj.weight"] = (HIDDEN, FFN)
    if experts:
        shapes[f"{LAYER}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
    if not tied:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def loaded(weights: Mapping[str, Tensor], rank: int = 0, ranks: int = 1, ep: bool = False) -> dict[str, Tensor]:
    """What a rank of SGLang holds of a checkpoint, written out here by slices and without the code under test."""
    attn, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
    heads = slice(rank * HEADS // ranks * HEAD, (rank + 1) * HEADS // ranks * HEAD)
    groups = max(GROUPS // ranks, 1)
    first = rank * GROUPS // ranks * HEAD
    of_group = slice(first, first + groups * HEAD)
    ffn = slice(rank * FFN // ranks, (rank + 1) * FFN // ranks)
    rows = 16 // ranks  # the vocabulary, padded
    held = {}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        padded = torch.zeros(16, HIDDEN)
        padded[:VOCABULARY] = weights.get(name, weights["model.embed_tokens.weight"])
        held[name] = padded[rank * rows : (rank + 1) * rows].clone()
    for kind in ("weight", "bias") if f"{attn}.q_proj.bias" in weights else ("weight",):
        q, k, v = (weights[f"{attn}.{part}_proj.{kind}"] for part in "qkv")
        held[f"{attn}.qkv_proj.{kind}"] = torch.cat([q[heads], k[of_group], v[of_group]])
    held[f"{attn}.o_proj.weight"] = weights[f"{attn}.o_proj.weight"][:, heads].clone()
    held[f"{LAYER}.input_layernorm.weight"] = weights[f"{LAYER}.input_layernorm.weight"].clone()
    if f"{mlp}.gate.weight" not in weights:
        gate, up, down = (weights[f"{mlp}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        held[f"{mlp}.gate_up_proj.weight"] = torch.cat([gate[ffn], up[ffn]])
        held[f"{mlp}.down_proj.weight"] = down[:, ffn].clone()
        return held
    if ep:
        mine, ffn = range(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks), slice(None)
    else:
        mine = range(EXPERTS)
    w13, w2 = [], []
    for index in mine:
        gate, up, down = (weights[f"{mlp}.experts.{index}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        w13.append(torch.cat([gate[ffn], up[ffn]]))
        w2.append(down[:, ffn])
    held[f"{mlp}.experts.w13_weight"], held[f"{mlp}.experts.w2_weight"] = torch.stack(w13), torch.stack(w2)
    held[f"{mlp}.gate.weight"] = weights[f"{mlp}.gate.weight"].clone()
    return held


class Engine:
    """SGLang's weight checker with our plugin, over the tensors of each rank."""

    def __init__(self, ranks: list[dict[str, Tensor]], **place: int) -> None:
        self.ranks, self.place, self.asked = ranks, place, []

    def __call__(self, body: Mapping[str, Any]) -> Any:
        self.asked.append(body["action"])
        return {"success": True, "ranks": [self._rank(rank, body) for rank in range(len(self.ranks))]}

    def _rank(self, rank: int, body: Mapping[str, Any]) -> Any:
        place = {"role": "target", "tp_rank": rank, "tp_size": len(self.ranks), "dp_size": 1, "pp_size": 1}
        info = SimpleNamespace(model_dump=lambda: place | self.place)
        checker = SimpleNamespace(
            _get_model=lambda: SimpleNamespace(state_dict=lambda: self.ranks[rank]), _parallelism_info=lambda role: info
        )
        told = weights_told(pytest.fail, checker, body["action"], False, body.get("skip_tensor_list"), role="target")
        return told | {"parallelism_info": [told["parallelism_info"]]}


def bf16(held: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.bfloat16() for name, tensor in held.items()}


# ------------------------------------------------------------------------------------------------------------ equal


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_as_each_rank_holds_it_is_equal(ranks: int, experts: bool, tied: bool) -> None:
    weights = checkpoint(tied, experts)
    engine = Engine([loaded(weights, rank, ranks) for rank in range(ranks)])
    found = compare(engine, weights)
    assert found.equal and found.compared == sum(map(len, engine.ranks))
    assert "equal in every bit" in str(found) and engine.asked == [DIGESTS]
    assert compare(Engine([bf16(held) for held in engine.ranks]), weights).equal, "rounded to the engine's dtype"


def test_experts_that_are_shared_out_are_equal() -> None:
    weights = checkpoint(experts=True)
    assert compare(Engine([loaded(weights, rank, 2, ep=True) for rank in range(2)]), weights).equal


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_decoder_beside_a_vision_tower_is_compared_and_so_is_the_tower(ranks: int) -> None:
    decoder, fused = checkpoint(), torch.randn(3 * HIDDEN, HIDDEN)
    theirs = {name.replace("model.", "model.language_model."): weight for name, weight in decoder.items()}
    held = [loaded(decoder, rank, ranks) for rank in range(ranks)]
    for rank, part in enumerate(held):
        rows = slice(rank * HIDDEN // ranks, (rank + 1) * HIDDEN // ranks)
        q, k, v = (share[rows] for share in fused.split(HIDDEN))
        part["visual.blocks.0.attn.qkv_proj.weight"] = torch.cat([q, k, v])
    weights = theirs | {"model.visual.blocks.0.attn.qkv.weight": fused}
    assert compare(Engine(held), weights).equal
    fused[-1, -1] += 1
    (difference,) = compare(Engine(held), weights).differences
    named = (difference.name, difference.rank)
    assert named == ("visual.blocks.0.attn.qkv_proj.weight", None if ranks == 1 else 1)


def test_an_mlp_that_is_padded_with_zeros_is_equal_and_one_padded_with_others_is_not() -> None:
    weights, wide = checkpoint(), torch.zeros(HIDDEN, FFN + 4)
    held = loaded(weights)
    gate, up = held[f"{LAYER}.mlp.gate_up_proj.weight"].chunk(2)
    behind = torch.zeros(4, HIDDEN)
    held[f"{LAYER}.mlp.gate_up_proj.weight"] = torch.cat([gate, behind, up, behind])
    wide[:, :FFN] = held[f"{LAYER}.mlp.down_proj.weight"]
    held[f"{LAYER}.mlp.down_proj.weight"] = wide
    assert compare(Engine([held]), weights).equal
    wide[0, -1] = 1
    (difference,) = compare(Engine([held]), weights).differences
    assert difference.name == f"{LAYER}.mlp.down_proj.weight" and "first at [0, 15]" in difference.why


# ---------------------------------------------------------------------------------------------------- planted faults


@pytest.mark.parametrize("numbers", [(0, 1, 2, 7), (1, 2, 3, 4)])
def test_experts_under_other_numbers_are_not_the_engines(numbers: tuple[int, ...]) -> None:
    weights = checkpoint(experts=True)
    other = lambda name: re.sub(r"(?<=experts\.)\d+", lambda at: str(numbers[int(at[0])]), name)  # noqa: E731
    renamed = {other(name): weight for name, weight in weights.items()}
    found = compare(Engine([loaded(weights)]), renamed)
    assert "mlp.experts.w13_weight: the trainer holds no" in str(found)


@pytest.mark.parametrize(
    ("name", "at"),
    [
        (f"{LAYER}.self_attn.qkv_proj.weight", (17, 3)),
        (f"{LAYER}.mlp.experts.w13_weight", (2, 13, 5)),
        ("lm_head.weight", (3, 1)),
    ],
)
def test_one_value_of_one_tensor_is_named_with_its_distance(name: str, at: tuple[int, ...]) -> None:
    weights = checkpoint(experts=True)
    engine = Engine([loaded(weights)])
    value = engine.ranks[0][name][at]
    engine.ranks[0][name][at] = torch.nextafter(value, value + 1)
    found = compare(engine, weights)
    assert [one.name for one in found.differences] == [name]
    said = str(found)
    assert said.startswith(f"1 of {len(engine.ranks[0])} tensors differ, the first: {name}: 1 of ")
    assert f"first at {list(at)}" in said and "1 ulp apart" in said and "largest |difference|" in said
    assert engine.asked == [DIGESTS, VALUES]


def test_a_stale_engine_differs_in_what_the_update_moved() -> None:
    before = checkpoint()
    after = {name: weight if "layernorm" in name else weight + 1e-3 for name, weight in before.items()}
    found = compare(Engine([loaded(before)]), after)
    names = [one.name for one in found.differences]
    assert names == [name for name in loaded(before) if "layernorm" not in name]
    assert str(found).count("other values") == min(len(names), 8) - 1, "the first with its values"


def test_tensors_of_one_side_alone_and_of_other_shapes_are_named() -> None:
    weights = checkpoint()
    held = loaded(weights)
    del held[f"{LAYER}.input_layernorm.weight"]
    held["model.norm.weight"] = torch.ones(HIDDEN)
    held[f"{LAYER}.self_attn.o_proj.weight"] = torch.ones(HIDDEN, HEADS * HEAD + 1)
    found = {one.name: one.why for one in compare(Engine([held]), weights).differences}
    assert found == {
        "model.norm.weight": "the trainer holds no model.norm.weight",
        f"{LAYER}.self_attn.o_proj.weight": "shape [8, 16] against the engine's [8, 17]",
        f"{LAYER}.input_layernorm.weight": "the engine holds nothing of it",
    }


@pytest.mark.parametrize(
    ("kind", "part", "rank"),
    [
        ("lm_head.weight", (slice(5),), 0),
        ("lm_head.weight", (slice(4),), 1),
        ("model.embed_tokens.weight", (slice(1),), 0),
        (f"{LAYER}.mlp.gate_up_proj.weight", (slice(2),), 0),
        (f"{LAYER}.mlp.down_proj.weight", (slice(None), slice(3)), 0),
        (f"{LAYER}.mlp.experts.w13_weight", (slice(2),), 0),
        (f"{LAYER}.mlp.experts.w13_weight", (slice(None), slice(8)), 0),
        (f"{LAYER}.mlp.experts.w2_weight", (slice(3),), 0),
        (f"{LAYER}.mlp.experts.w2_weight", (slice(None), slice(None), slice(5)), 0),
    ],
)
def test_an_engine_that_holds_a_part_of_a_tensor_differs(kind: str, part: tuple[slice, ...], rank: int) -> None:
    weights = checkpoint(experts="experts" in kind)
    held = [loaded(weights, each, 1 + rank) for each in range(1 + rank)]
    held[rank][kind] = held[rank][kind][part].clone()
    found = compare(Engine(held), weights)
    assert {one.name for one in found.differences} == {kind} and "shape" in found.differences[0].why


def test_experts_of_a_padded_width_are_equal_on_ranks_that_share_them() -> None:
    weights = checkpoint(experts=True)
    held = [loaded(weights), loaded(weights)]
    for rank, part in enumerate(held):
        w13, w2 = (part[f"{LAYER}.mlp.experts.{kind}"] for kind in ("w13_weight", "w2_weight"))
        gate, up = (torch.cat([half, torch.zeros(EXPERTS, 4, HIDDEN)], 1) for half in w13.chunk(2, 1))
        mine = slice(rank * 8, (rank + 1) * 8)
        part[f"{LAYER}.mlp.experts.w13_weight"] = torch.cat([gate[:, mine], up[:, mine]], 1)
        wide = torch.cat([w2, torch.zeros(EXPERTS, HIDDEN, 4)], 2)
        part[f"{LAYER}.mlp.experts.w2_weight"] = wide[:, :, mine].clone()
        part |= {name: tensor for name, tensor in loaded(weights, rank, 2).items() if "experts" not in name}
    assert compare(Engine(held), weights).equal


def test_no_more_tensors_differ_than_there_are() -> None:
    found = compare(Engine([{"model.norm.weight": torch.ones(HIDDEN)}]), checkpoint())
    assert found.summary.startswith("14 of 14 tensors differ")


# ---------------------------------------------------------------------------------------------------- not compared


LM_HEAD, O_PROJ = "lm_head.weight", f"{LAYER}.self_attn.o_proj"
IN_INT8, IN_FLOAT8 = (torch.zeros(VOCABULARY, HIDDEN).to(dtype) for dtype in (torch.int8, torch.float8_e4m3fn))
ADAPTER = {f"base_model.model.{O_PROJ}.lora_A.weight": torch.ones(2, HIDDEN)}
# What the engine holds beside the checkpoint's tensors or in their place, what the trainer holds, and what is said.
NOT_COMPARED: list[tuple[dict[str, Tensor], dict[str, Tensor], str]] = [
    ({LM_HEAD: IN_INT8}, checkpoint(),
     r"the engine holds 1 tensors in a quantized or packed form.*the first lm_head.weight \(int8\)"),
    ({}, checkpoint() | {LM_HEAD: IN_FLOAT8}, r"the trainer holds 1 .*the first lm_head.weight \(float8_e4m3fn\)"),
    # SGLang and vLLM keep the weight under an adapter as `base_layer`; PEFT saves the adapter alone.
    ({f"{O_PROJ}.base_layer.weight": torch.ones(HIDDEN, HEADS * HEAD)}, checkpoint(),
     rf"the engine holds 1 .*under an adapter \(LoRA\), the first {O_PROJ}.base_layer.weight"),
    ({}, ADAPTER, "the trainer holds 1 .*under an adapter"),
]  # fmt: skip


@pytest.mark.parametrize(("beside", "weights", "said"), NOT_COMPARED)
def test_tensors_of_another_form_are_not_compared(beside: dict[str, Tensor], weights: dict[str, Tensor], said: str):
    with pytest.raises(NotSeenError, match=said):
        compare(Engine([loaded(checkpoint()) | beside]), weights)


@pytest.mark.parametrize("axis", ["dp_size", "pp_size"])
def test_a_cut_that_is_not_served_is_not_compared(axis: str) -> None:
    with pytest.raises(NotSeenError, match=f"runs with {axis} 2: served is tensor parallelism alone"):
        compare(Engine([loaded(checkpoint())], **{axis: 2}), checkpoint())


def test_a_buffer_of_whole_numbers_is_told_and_hides_no_weight() -> None:
    buffer = {"vision.embeddings.position_ids": torch.arange(4)}
    frequencies = {f"{LAYER}.self_attn.rotary_emb.inv_freq": torch.ones(2)}  # of an old checkpoint; an engine has none
    comparison = compare(Engine([loaded(checkpoint())]), checkpoint() | buffer | frequencies)
    assert comparison.compared == len(loaded(checkpoint())) + 1
    assert [*map(str, comparison.differences)] == ["vision.embeddings.position_ids: the engine holds nothing of it"]


@pytest.mark.parametrize("axis", ["attn_cp_size", "moe_dp_size"])
def test_weights_that_are_cut_over_fewer_ranks_than_others_are_not_told(
    axis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = SimpleNamespace(**{"attn_cp_size": 1, "moe_dp_size": 1, axis: 2})
    context = SimpleNamespace(get_parallel=lambda: sizes)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", cast(Any, context))
    with pytest.raises(NotSeenError, match=f"runs with {axis} 2: served is tensor parallelism alone"):
        compare(Engine([loaded(checkpoint())]), checkpoint())
    setattr(sizes, axis, 1)
    assert compare(Engine([loaded(checkpoint())]), checkpoint()).equal


@pytest.mark.parametrize("order", [[1, 0, 2, 3], [0, 1, 2, 3, 0], [0, 1, 2, 3]])
def test_experts_that_the_engine_copies_or_moves_are_not_told(order: list[int], monkeypatch: pytest.MonkeyPatch):
    placed = SimpleNamespace(physical_to_logical_map=torch.tensor([order]))
    module = SimpleNamespace(get_global_expert_location_metadata=lambda: placed)
    monkeypatch.setitem(sys.modules, "sglang.srt.eplb.expert_location", cast(Any, module))
    weights = checkpoint(experts=True)
    with nullcontext() if order == [0, 1, 2, 3] else pytest.raises(NotSeenError, match="copies or moves its experts"):
        assert compare(Engine([loaded(weights)]), weights).equal


def test_an_engine_without_our_plugin_is_not_compared() -> None:
    def refuses(body: Mapping[str, Any]) -> Any:
        raise EngineError("Unsupported action='true_on_policy.digests'")

    with pytest.raises(NotSeenError, match="start SGLang with TRUE_ON_POLICY_WEIGHTS=1"):
        compare(refuses, checkpoint())


PLACE = {"tp_rank": 0, "tp_size": 1, "dp_size": 1, "pp_size": 1}
HASH = "0" * 64


def told(digest: Any, name: str = "lm_head.weight", **place: Any) -> dict[str, Any]:
    return {"ranks": [{"parallelism_info": [PLACE | place], "checksums": {name: digest}}]}


LIES: dict[str, Any] = {
    "a list": [],
    "null": None,
    "a text": "equal",
    "a number": 1,
    "no ranks": {"ranks": []},
    "ranks of null": {"ranks": [None]},
    "ranks in words": {"ranks": "0"},
    "no place": {"ranks": [{"checksums": {}}]},
    "no tensors": {"ranks": [{"parallelism_info": [PLACE], "checksums": {}}]},
    "tensors without names": {"ranks": [{"parallelism_info": [PLACE], "checksums": [HASH]}]},
    "a rank twice": {"ranks": told(f"float32 10x8 {HASH}", tp_size=2)["ranks"] * 2},
    "a rank too few": told(f"float32 10x8 {HASH}", tp_size=2),
    "a rank beyond": told(f"float32 10x8 {HASH}", tp_rank=1),
    "a rank that is true": told(f"float32 10x8 {HASH}", tp_size=True),
    "a rank in words": told(f"float32 10x8 {HASH}", tp_rank="0"),
    "no digest": told(None),
    "a number for a digest": told(3),
    "an empty digest": told(""),
    "a digest that is not hex": told(f"float32 10x8 {'z' * 64}"),
    "a short digest": told(f"float32 10x8 {HASH[1:]}"),
    "a negative size": told(f"float32 -10x8 {HASH}"),
    "a size of many digits": told(f"float32 {'9' * 5000} {HASH}"),
    "a dtype that is none": told(f"__class__ 10x8 {HASH}"),
    "a name without end": told(f"float32 10x8 {HASH}", "x" * 10_000),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_answer_of_another_shape_is_not_compared(lie: str) -> None:
    with pytest.raises(NotSeenError, match=r"could not compare: the engine's weight checker: |packed form"):
        compare(lambda body: LIES[lie], checkpoint())


def test_a_rank_that_tells_fewer_tensors_is_not_compared() -> None:
    weights = checkpoint()
    engine = Engine([loaded(weights, rank, 2) for rank in range(2)])
    del engine.ranks[1]["lm_head.weight"]
    with pytest.raises(NotSeenError, match=r"ranks 0 and 1 tell other tensors, the first lm_head\.weight"):
        compare(engine, weights)


@pytest.mark.parametrize("shape", ["", "1", "999999999999x8", "0x0", "8x999999999999", "1x1x1x1x1"])
@pytest.mark.parametrize(
    "name",
    ["lm_head.weight", f"{LAYER}.self_attn.qkv_proj.weight", f"{LAYER}.mlp.gate_up_proj.weight",
     f"{LAYER}.mlp.down_proj.weight", f"{LAYER}.mlp.experts.w13_weight", f"{LAYER}.mlp.experts.w2_weight"],
)  # fmt: skip
def test_a_shape_that_no_cut_has_differs_and_takes_no_memory(name: str, shape: str) -> None:
    answer = told(f"float32 {shape} {HASH}", name)
    weights = checkpoint(experts="experts" in name)
    assert compare(lambda body: answer, weights).differences[0].name == name


@pytest.mark.parametrize("values", [None, 3, "", "!", "AAAA", {"a": 1}])
def test_values_that_are_none_are_not_compared(values: Any) -> None:
    engine = Engine([loaded(checkpoint())])
    engine.ranks[0]["lm_head.weight"] += 1

    def asked(body: Mapping[str, Any]) -> Any:
        return engine(body) if body["action"] == DIGESTS else told(values)

    with pytest.raises(NotSeenError, match="could not compare: the engine's weight checker"):
        compare(asked, checkpoint())


# ------------------------------------------------------------------------------------------------ digests and plugin


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 2)])
def test_digests_and_values_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(6)[: max(torch.Size(shape).numel(), 0)].to(dtype).reshape(shape)
    digest = Digest.of(tensor)
    assert Digest.read(digest.text) == digest and digest.shape == shape
    assert torch.equal(read_values(values(tensor), digest), tensor) if tensor.numel() else True


def test_a_digest_tells_zero_from_minus_zero_and_ignores_strides() -> None:
    zero = torch.zeros(4, 2)
    assert Digest.of(zero) != Digest.of(-zero)
    assert Digest.of(torch.arange(8).view(2, 4).t()) == Digest.of(torch.arange(8).view(2, 4).t().contiguous())


def test_every_other_action_is_sglangs() -> None:
    calls = []

    def original(*given: Any, **more: Any) -> str:
        calls.append((given, more))
        return "theirs"

    checker = object()
    assert weights_told(original, checker, "compare", True, ["a"], role="target") == "theirs"
    assert calls == [((checker, "compare", True, ["a"]), {"role": "target"})]


# ---------------------------------------------------------------------------------------------------------- command


@pytest.fixture
def weights_command(proof_command: ProofCommand) -> ProofCommand:
    """Compare the weights of the engine at a URL with a checkpoint's, as `proof_command` does."""
    return lambda url, trainer, code=0: proof_command("weights", "--engine", url, "--trainer", trainer, code=code)


@pytest.fixture
def served() -> Iterator[tuple[str, Engine]]:
    """A server whose weight checker is an `Engine`'s; under /vllm it answers as vLLM does."""
    engine = Engine([loaded(checkpoint())])
    paths: dict[str, Callable[[Any], Any]] = {
        "/weights_checker": engine,
        "/vllm/collective_rpc": lambda body: {"results": engine(body["kwargs"])["ranks"]},
    }

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200 if self.path in paths else 404)
            self.end_headers()
            self.wfile.write(json.dumps(paths[self.path](body)).encode() if self.path in paths else b"")

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", engine
    server.shutdown()


def test_the_exit_code_says_equal_different_or_not_compared(
    served: tuple[str, Engine], tmp_path: Path, weights_command: ProofCommand
) -> None:
    url, engine = served
    save_file(checkpoint(), tmp_path / "model.safetensors")
    for where in ("", "/vllm"):
        assert "8 tensors, equal in every bit" in weights_command(url + where, tmp_path).out
    engine.ranks[0]["lm_head.weight"] += 1
    assert "1 of 8 tensors differ, the first: lm_head.weight" in weights_command(url, tmp_path, code=1).out
    assert "answered 404" in weights_command(url + "/nowhere", tmp_path, code=2).err
    weights_command(url, tmp_path / "empty", code=2)
    read = weights_command("http://127.0.0.1:9", tmp_path, code=2)
    assert "start SGLang with TRUE_ON_POLICY_WEIGHTS=1" in read.err


@pytest.mark.parametrize("flags", ["", "--rollout-engine hf", "--rollout-engine sglang --async"])
def test_the_embedded_host_refuses_an_engine_that_tells_no_weights(flags: str) -> None:
    with pytest.raises(ConfigError, match=r"--check-weights-every \d+ with .*: no weights can be asked for there"):
        parse_args(f"--smoke --check-weights-every 1 {flags}".split())


class Served:
    """An engine of the embedded host that never takes new weights, and tells those that it holds."""

    def __init__(self, source: Path) -> None:
        self.weights_checker = Engine([loaded(read_weights(source))])

    def update_weights(self, checkpoint: Path, version: int, keep_cache: bool = False) -> None: ...

    def close(self) -> None: ...


def test_the_embedded_host_stops_at_a_stale_engine_and_names_the_tensor(capfd: pytest.CaptureFixture[str]) -> None:
    config = ModelConfig(HIDDEN, FFN, 1, HEADS, GROUPS, HEAD, VOCABULARY, qk_norm=False)
    before = {name: weight for name, weight in checkpoint().items() if "bias" not in name}
    after = before | {f"{LAYER}.self_attn.v_proj.weight": before[f"{LAYER}.self_attn.v_proj.weight"] + 1}

    def run() -> None:
        engine = ServedEngine(config, lambda source: cast(Any, Served(source)))
        engine.update_weights(before, 0)
        assert engine.check_weights(before) == 7
        engine.update_weights(after, 1)
        engine.check_weights(after)

    assert launch(1, run) == 2
    said = capfd.readouterr().err
    name = f"{LAYER}.self_attn.qkv_proj.weight"
    assert f"error: --check-weights-every, weights 1: 1 of 7 tensors differ, the first: {name}: 64 of 256" in said


SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]


def sharded(folder: Path, weights: Mapping[str, Tensor], index: Mapping[str, str]) -> None:
    """Weights in the first of two shards, one more than each in the second, and an index that names a shard of each."""
    save_file(dict(weights), folder / SHARDS[0])
    save_file({name: weight + 1 for name, weight in weights.items()}, folder / SHARDS[1])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def test_verify_names_a_damaged_file(tmp_path: Path, proof_command: ProofCommand) -> None:
    tiny.checkpoint("tiny-qwen3", tmp_path, torch.float32, seed=0)
    os.truncate(tmp_path / "model.safetensors", 3000)
    read = proof_command("verify", "--engine", "hf", "--trainer", "megatron", "--model", tmp_path, code=2)
    assert f"{tmp_path / 'model.safetensors'}: cannot be read" in read.err


@pytest.mark.parametrize("shard", [0, 1])
def test_the_index_says_which_shards_count(
    shard: int, served: tuple[str, Engine], tmp_path: Path, weights_command: ProofCommand
) -> None:
    sharded(tmp_path, checkpoint(), dict.fromkeys(checkpoint(), SHARDS[shard]))
    weights_command(served[0], tmp_path, code=shard)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / SHARDS[0]).unlink(), rf"{SHARDS[0]}: cannot be read: No such file"),
        (lambda folder: (folder / SHARDS[0]).write_bytes(b""), rf"{SHARDS[0]}: cannot be read"),
        (lambda folder: os.truncate(folder / SHARDS[0], 2000), rf"{SHARDS[0]}: cannot be read"),
        (lambda folder: ((folder / SHARDS[0]).unlink(), os.mkfifo(folder / SHARDS[0])), "is no regular file"),
        (lambda folder: save_file({}, folder / SHARDS[0]), r"index\.json: lm_head\.weight is not in .*" + SHARDS[0]),
        (lambda folder: (folder / "model.safetensors.index.json").unlink(), "lm_head.weight is in an earlier file too"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{"), r"index\.json: cannot be read"),
        (lambda folder: sharded(folder, {}, {"lm_head.weight": cast("str", 3)}), r"index\.json: cannot be read"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_not_compared(
    spoil: Callable[[Path], Any], message: str, served: tuple[str, Engine], tmp_path: Path, weights_command: Any
) -> None:
    index = dict.fromkeys(checkpoint(), SHARDS[0]) | {"model.embed_tokens.weight": SHARDS[1]}
    sharded(tmp_path, checkpoint(), index)
    spoil(tmp_path)
    assert re.search(message, weights_command(served[0], tmp_path, code=2).err)
