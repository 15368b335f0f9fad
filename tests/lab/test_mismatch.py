"""The mismatch of a real model: its rungs, its statistics against loops, and a run that goes on where it stopped."""

import json
import math
import string
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lab import mismatch
from lab.ladder import shipped
from lab.ladder.presets_at import kept_and_weighed, kept_by, of_length
from lab.ladder.rollouts import Amount, Rollouts
from lab.ladder.rungs import RUNGS, fp8, in_groups, write_rollout_weights
from lab.ladder.statistics import Pair, by_turn, summary
from lab.ladder.workloads import (
    TURN_LENGTH,
    TURNS,
    ChatSettings,
    Settings,
    Workload,
    chats,
    converse,
    score_chat,
    tool_turns,
)
from lab.mismatch import Climb
from mis_plugins.config.model import CorrectionConfig, Level, Over, RejectRule, WeightConfig
from mis_plugins.errors import UserError
from mis_plugins.explain import rungs as explained
from mis_plugins.explain.rungs import Responses
from true_on_policy.bitwise import equal_bits
from true_on_policy.contract.cpu import Contract
from true_on_policy.engines.hf.engine import HuggingFace
from true_on_policy.kernels.pin import pinned
from true_on_policy.models.tiny import checkpoint, read_weights
from true_on_policy.trainers.megatron import Megatron


def pair(log_ratio: float = 0.0, spread: float = 0.0) -> Pair:
    """Eight responses of growing length to four prompts, whose log ratios have this mean and spread."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.arange(3, 43, 5)
    behavior = -3 * torch.rand(int(lengths.sum()), generator=random)
    noise = spread * torch.randn(len(behavior), generator=random)
    return Pair(behavior, behavior + log_ratio + noise, lengths, torch.arange(8) % 4)


# The rungs


def test_a_group_has_a_scale_of_its_own_and_rounds_by_half_of_it_at_most():
    weight = torch.cat([torch.randn(3, 64), 100 * torch.randn(3, 64)], 1)
    off = (in_groups(weight, 5) - weight).abs().unflatten(1, (2, 64)).amax(-1)
    assert (off <= weight.unflatten(1, (2, 64)).abs().amax(-1) / 15 / 2 * 1.001).all() and (off > 0).all()


def test_fp8_keeps_the_largest_weight_and_rounds_others_by_a_sixteenth():
    weight = torch.randn(50, 40)
    held = fp8(weight)
    assert held.abs().max() == pytest.approx(weight.abs().max().item())
    large = weight.abs() > weight.abs().max() / 1000
    assert ((held - weight).abs() <= weight.abs() / 16 * 1.001)[large].all() and (held != weight).any()


@pytest.mark.parametrize("name", ["bf16", "fp32-head", "int8", "fp8", "int6", "int5"])
def test_only_linear_layers_are_rounded_beyond_bf16(name: str, tmp_path: Path):
    source = checkpoint("tiny-llama", tmp_path / "source", torch.float32, seed=0)
    folder = write_rollout_weights(source, tmp_path / "rollout", RUNGS[name])
    before, after = read_weights(source), read_weights(folder)
    assert {weight.dtype for weight in after.values()} == {torch.bfloat16}
    changed = {one for one in before if not torch.equal(before[one].bfloat16(), after[one])}
    assert changed == ({one for one in before if one.endswith("_proj.weight")} if RUNGS[name].rounding else set())
    said = json.loads((folder / "config.json").read_text())
    assert said.get("enable_lm_head_fp32", False) == (name == "fp32-head")


def test_prompts_take_turns_and_every_response_ends_with_its_first_end_of_sequence(tmp_path: Path):
    engine = HuggingFace(checkpoint("tiny-llama", tmp_path, torch.float32, seed=0), "fp32")
    prompts = [(7,), (8,), (9,)]
    whole = converse(engine, prompts, range(2, 5), length=6, end=-1)
    assert [place for place, _ in whole] == [2, 0, 1]
    assert [one.request.prompt for _, (one,) in whole] == [(9,), (7,), (8,)]
    assert [one.request.seed for _, (one,) in whole] == [2, 3, 4]
    end = whole[0][1][0].tokens[2]
    cut = converse(engine, prompts, range(2, 5), length=6, end=end)
    assert cut[0][1][0].tokens == whole[0][1][0].tokens[:3]


# The statistics


def test_equal_policies_have_no_mismatch_and_every_preset_leaves_them_alone():
    found = summary(pair())
    assert found["k1"] == found["k3"] == found["log product"] == [0.0, 0.0, 0.0] and found["max"] == 0
    for name, one in kept_and_weighed(pair()).items():
        if one not in ("needs advantages", "needs routes") and not name.startswith("nemo-rl-seq-mask"):
            assert one == pytest.approx({"tokens": 1, "sequences": 1, "weight": 1, "ess": 1}), name


def test_means_products_and_bins_are_those_of_loops():
    one = pair(-0.1, 0.3)
    found, ratios = summary(one), (one.proximal.double() - one.behavior.double()).tolist()
    assert found["k1"][0] == pytest.approx(-sum(ratios) / len(ratios))
    assert found["k3"][0] == pytest.approx(sum(math.exp(x) - 1 - x for x in ratios) / len(ratios))
    starts = [0, *one.lengths.cumsum(0).tolist()]
    products = [sum(ratios[a:b]) for a, b in zip(starts, starts[1:], strict=False)]
    assert found["log product"][0] == pytest.approx(sum(products) / len(products))
    lengths = one.lengths.tolist()
    early = [math.exp(x) - 1 - x for a, n in zip(starts, lengths, strict=False) for x in ratios[a : a + min(n, 16)]]
    assert found["k3 by position"]["0 to 16"][0] == pytest.approx(sum(early) / len(early))


def test_an_interval_is_drawn_over_prompts_and_holds_the_mean():
    one = pair(0.0, 0.3)
    mean, low, high = summary(one)["k3"]
    assert low < mean < high
    by_prompt = torch.where(one.prompts[one.owners] == 0, 1.0, 0.0)
    alike = Pair(one.behavior, one.behavior + by_prompt, one.lengths, torch.zeros(8, dtype=torch.long))
    assert summary(alike)["k1"][1:] == pytest.approx([summary(alike)["k1"][0]] * 2)  # one prompt: nothing to draw


def test_a_mismatch_beyond_the_window_is_dropped_and_a_shorter_response_has_a_smaller_product():
    far = kept_and_weighed(pair(0.01))
    assert far["geometric-rs"]["sequences"] == 0 and far["tis"]["tokens"] == 1
    assert far["tis"]["weight"] == pytest.approx(math.exp(0.01), rel=1e-5)
    short = of_length(pair(0.01), 10)
    assert short.lengths.tolist() == [10] * 6 and len(short.behavior) == 60
    assert short.prompts.tolist() == [2, 3, 0, 1, 2, 3]
    assert kept_and_weighed(short)["sequence"]["weight"] < far["sequence"]["weight"]


# What a wheel carries


def carried(folder: Path, monkeypatch: pytest.MonkeyPatch, one: Pair) -> Responses:
    """The responses of 8 tokens of a rung, written by the benchmark and read by `config check`."""
    words = {"engine": "{}", "commit": "abc", "settings": ""}
    rollouts = Rollouts(one.behavior, {"bf16": one.proximal}, one.lengths, one.prompts, words)
    monkeypatch.setattr(mismatch, "LEAST", 2)
    content = {"model": "made-up", "rungs": {"int5": mismatch.rung_of(rollouts, rollouts, [8])}}
    shipped.write(folder / "rungs.json", content)
    return explained.read(folder / "rungs.json").rungs[0].by_length[8]


@pytest.mark.parametrize(
    ("statistic", "over"),
    [("ratio", "sum"), *((name, over) for name, overs in shipped.CARRIED.items() for over in overs)],
)
def test_a_window_keeps_what_the_pipeline_keeps(
    statistic: str, over: Over, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    one = of_length(pair(0.02, 0.1), 8)
    held = carried(tmp_path, monkeypatch, one)
    shares = []
    for bound in (0.003, 0.02, 0.11, 0.4, 0.9, 1.02, 1.2):
        config = CorrectionConfig(reject=(RejectRule(statistic, over, upper=bound),))
        window = next(explained.windows(config))
        shares.append(window.keeps(held))
        assert shares[-1] == pytest.approx(kept_by(config, one)["sequences"]), bound
        if bound == 0.9:
            break  # no probability is above 1
    assert shares == sorted(shares)


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_a_mask_bound_of_sequences_is_a_window_too(level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    one = of_length(pair(0.02, 0.1), 8)
    held = carried(tmp_path, monkeypatch, one)
    for upper in (1.01, 1.1, 1.5):
        config = CorrectionConfig(WeightConfig(level, "mask", upper=upper))
        assert next(explained.windows(config)).keeps(held) == pytest.approx(kept_by(config, one)["sequences"])


# The command


def run(monkeypatch: pytest.MonkeyPatch, folder: Path) -> int:
    command = ["mismatch.py", "--smoke", "--rungs", "bf16", "int5", "--runs", str(folder)]
    monkeypatch.setattr(sys, "argv", command)
    return mismatch.main()


def test_a_second_run_samples_nothing_and_writes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert run(monkeypatch, tmp_path) == 0
    first = json.loads((tmp_path / "mismatch.json").read_text())["rungs"]
    monkeypatch.setattr(mismatch, "start_engine", None)
    assert run(monkeypatch, tmp_path) == 0
    assert json.loads((tmp_path / "mismatch.json").read_text())["rungs"] == first
    mild, strong = (first[name]["mismatch"]["bf16"]["k3"][0] for name in ("bf16", "int5"))
    assert 0 < mild < strong
    assert "| int5 | fp32 |" in (tmp_path / "mismatch.md").read_text()
    assert '"name":"int5"' in (tmp_path / "rungs.json").read_text()
    assert (tmp_path / "mismatch.png").stat().st_size > 10_000


def test_a_run_for_more_prompts_adds_to_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    climb = a_climb(tmp_path)
    few = climb.rollouts("bf16", of_five(8))
    more = climb.rollouts("bf16", of_five(16))
    whole = replace(climb, runs=tmp_path / "whole").rollouts("bf16", of_five(16))
    assert len(few.lengths) == 8 and len(more.lengths) == 16 and more.prompts.tolist() == [*range(5)] * 3 + [0]
    for one in ("behavior", "lengths", "prompts"):
        assert torch.equal(getattr(more, one), getattr(whole, one))
    assert more.words["commit"] == few.words["commit"]  # each commit once
    (tmp_path / "bf16.safetensors").unlink()
    replace(few, words={**few.words, "engine": "of yore"}).save(tmp_path / "bf16.safetensors")
    with pytest.raises(UserError, match="was sampled by of yore, .* name another folder with --runs"):
        climb.rollouts("bf16", of_five(16))


def a_climb(folder: Path) -> Climb:
    """A climb with a tiny model."""
    (folder / "whole").mkdir()
    return Climb(checkpoint("tiny-llama", folder / "source", torch.float32, seed=0), folder, "abc")


PROMPTS = [(one, one + 1) for one in range(5)]


def of_five(number: int) -> Workload:
    """A number of responses to five prompts."""
    return Workload(Settings("tiny-llama", "hash", "five", "hf", 6), Amount(number, 1), PROMPTS, 0)


def three_chats(number: int = 3) -> Workload:
    """Chats whose tools answer 0 1 2 or 0 3."""
    settings = ChatSettings("tiny-llama", "hash", "five", "hf", TURN_LENGTH)
    return chats(settings, number, PROMPTS, [(0, 1, 2), (0, 3)], 0)


# Chats


def test_every_turn_follows_what_came_before_and_a_tools_answer(tmp_path: Path):
    engine = HuggingFace(checkpoint("tiny-llama", tmp_path, torch.float32, seed=0), "fp32")
    found = three_chats().batch(engine, 0)
    assert [index for index, _ in found] == [0, 1, 2] and {len(chat) for _, chat in found} == {TURNS}
    for place, (index, chat) in enumerate(found):
        before = PROMPTS[index]
        for turn, one in enumerate(chat):
            assert one.request.prompt == before and one.request.seed == place * TURNS + turn
            tool = [(0, 1, 2), (0, 3)][(place + turn) % 2]
            ended = one.tokens[-1] == 0
            assert ended or len(one.tokens) == TURN_LENGTH
            before = (*before, *one.tokens, *(tool[1:] if ended else tool))


def test_one_pass_over_a_chat_scores_each_turn_as_a_pass_of_its_own(tmp_path: Path):
    source = checkpoint("tiny-llama", tmp_path, torch.float32, seed=0)
    trainer = Megatron(source, "fp32")
    [(_, chat)] = three_chats(1).batch(HuggingFace(source, "fp32"), 0)
    with pinned(Contract()):  # on batch-invariant kernels the length of a pass changes no bit
        alone = torch.cat([trainer.log_probs([turn], [1.0])[0] for turn in chat])
        assert equal_bits(score_chat(trainer, chat), alone)


def test_a_run_for_more_chats_adds_to_what_is_there(tmp_path: Path):
    climb = a_climb(tmp_path)
    climb.rollouts("bf16", three_chats(1))
    more = climb.rollouts("bf16", three_chats(2))
    whole = replace(climb, runs=tmp_path / "whole").rollouts("bf16", three_chats(2))
    assert more.prompts.tolist() == [0] * TURNS + [1] * TURNS
    assert torch.equal(more.lengths, whole.lengths)
    assert not (tmp_path / "bf16.safetensors").exists()


def test_statistics_by_turn_are_those_of_loops():
    one = Pair(
        torch.zeros(6),
        torch.tensor([0.1, 0.2, -0.3, 0.4, 0.5, -0.6]),
        torch.tensor([1, 2, 2, 1]),
        torch.tensor([0, 0, 1, 1]),
    )
    found = by_turn(one, 2)
    assert [found[turn]["tokens"] for turn in ("1", "2")] == [3, 3]
    assert found["1"]["k1"][0] == pytest.approx(-(0.1 + 0.4 + 0.5) / 3)
    assert found["2"]["k3"][0] == pytest.approx(sum(math.exp(x) - 1 - x for x in (0.2, -0.3, -0.6)) / 3)


TEMPLATE = "{% for one in messages %}<{{ one.role }}>{{ one.content }}|{% endfor %}{{ '<assistant>' }}"


def test_what_stands_between_two_turns_is_the_chat_templates(tmp_path: Path):
    known = "?<|>" + string.ascii_letters
    tokenizer = Tokenizer(models.BPE({one: place for place, one in enumerate(known)}, [], unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE).save_pretrained(tmp_path)
    seventh = "".join(known[token] for token in tool_turns(tmp_path, 2)[6])
    assert seventh == "|<tool>????Not?Found??the?page?was?moved??see??archive|<assistant>"
    with pytest.raises(UserError, match="ends a turn with 2, its config says 77"):
        tool_turns(tmp_path, 77)


def test_a_model_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    command = ["mismatch.py", "--model", "none", "--runs", str(tmp_path), "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    assert mismatch.main() == 2
    assert "--model: got 'none'; choose one of tiny-qwen3" in capsys.readouterr().err
