"""The experiment with a real model: reward, split, directions against float64 sums, records, and a whole tiny run."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lab import real_model_rl
from lab.real_model.arms import ARMS, FITTED, preset, units, window
from lab.real_model.correction import NONE, UNBIASED, arguments, fitted_window, loss, pair
from lab.real_model.directions import cosines, gram
from lab.real_model.page import averaged, interval
from lab.real_model.policy import Batch, Trainer, decoded, drawing, on_policy
from lab.real_model.records import finished
from lab.real_model.summary import summary
from lab.real_model.task import Problem, last_number, of_letters, reward, split
from lab.real_model.unit import Unit
from mis_plugins.errors import UserError
from true_on_policy.models.tiny import checkpoint, read_config

END = 1


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("tiny-llama", tmp_path_factory.mktemp("model") / "tiny", torch.float32, seed=0)


def batch(behavior: torch.Tensor, lengths: list[int]) -> Batch:
    """Responses of two prompt tokens with these log-probs."""
    tokens = torch.full(behavior.shape, 3)
    return Batch(torch.full((len(lengths), 2), 5), tokens, torch.tensor(lengths), behavior)


# The task


@pytest.mark.parametrize(
    "text, number",
    [
        ("7 + 5 = 12", 12),
        ("12, as 7 + 5", 5),
        ("it is 012.", 12),
        ("twelve", None),
        ("3.12", 12),
        ("-12", 12),
    ],
)
def test_the_last_number_of_an_answer_counts(text: str, number: int | None):
    assert last_number(text) == number
    assert reward(Problem((7, 5), ()), text) == (number == 12)


def test_no_held_out_sum_trains_in_either_order():
    training, held_out = split()
    assert len(training) + len(held_out) == len({*training, *held_out}) == 100
    assert not {frozenset(pair) for pair in training} & {frozenset(pair) for pair in held_out}
    assert 20 <= len(held_out) <= 30


# The policy


def test_the_trainers_own_pass_samples_with_its_bits_and_a_cache_draws_the_same_tokens(source: Path):
    trainer, seeds = Trainer(source, lr=1e-3), range(6)
    prompts = torch.randint(2, 300, (6, 5), generator=torch.Generator().manual_seed(0))
    own = on_policy(trainer, prompts, seeds, 8, END)
    cached = decoded(trainer.model, prompts, seeds, 8, END)
    scored = trainer.log_probs(own.prompts, own.tokens).detach()
    assert torch.equal(scored[own.valid], own.behavior[own.valid])
    assert torch.equal(own.tokens[:, 0], cached.tokens[:, 0])  # random numbers are shared
    assert (scored - cached.behavior).abs()[:, 0].max() < 0.2


def test_tokens_are_drawn_by_their_probability_and_close_samplers_rarely_differ():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    moved = torch.tensor([0.47, 0.3, 0.15, 0.08])
    draws = 4000
    choose = drawing(range(draws))
    here, there = (choose(one.log().expand(draws, -1), 2) for one in (probabilities, moved))
    frequencies = here.bincount(minlength=4) / draws
    errors = (probabilities * (1 - probabilities) / draws).sqrt()
    assert ((frequencies - probabilities).abs() < 4 * errors).all()
    variation = 0.03
    assert 0 < (here != there).double().mean() < 2 * variation
    elsewhere = choose(probabilities.log().expand(draws, -1), 3)
    alike = probabilities.square().sum()  # of two independent draws
    assert ((here == elsewhere).double().mean() - alike).abs() < 4 * (alike / draws) ** 0.5


@pytest.mark.parametrize("sharper", [1.0, 1.3, 3.0])
def test_a_wrong_draft_leaves_no_trace_in_what_the_trainers_own_pass_samples(source: Path, sharper: float):
    """A pass that is sharper than the cache, as a planted mismatch, redraws many tokens of the draft."""
    trainer, seeds, length = _Sharper(source, sharper), range(8), 6
    prompts = torch.randint(2, 300, (8, 5), generator=torch.Generator().manual_seed(1))
    choose = drawing(seeds)
    tokens, behavior = torch.full((8, length), END), torch.zeros(8, length)
    with torch.no_grad():
        for place in range(length):
            log_probs = trainer.distribution(prompts, tokens)[:, place]
            ended = (tokens[:, :place] == END).any(1)
            tokens[:, place] = torch.where(ended, END, choose(log_probs, place))
            behavior[:, place] = log_probs.gather(1, tokens[:, place, None])[:, 0]
    trainer.passes = 0
    own = on_policy(trainer, prompts, seeds, length, END)
    assert torch.equal(own.tokens, tokens)
    assert torch.equal(own.behavior[own.valid], behavior[own.valid])
    assert (trainer.passes == 1) == (sharper == 1)


class _Sharper(Trainer):
    """A trainer whose pass raises each probability to a power."""

    def __init__(self, source: Path, power: float):
        super().__init__(source, lr=1e-3)
        self.power, self.passes = power, 0

    def distribution(self, prompts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        found = super().distribution(prompts, tokens)
        return found if self.power == 1 else (self.power * found).log_softmax(-1)


def test_a_response_ends_at_its_end_token_and_fills_up_with_it(source: Path):
    trainer = Trainer(source, lr=1e-3)
    prompts = torch.full((16, 3), 7)
    first = decoded(trainer.model, prompts, range(16), 4, END).tokens[0, 1].item()
    found = decoded(trainer.model, prompts, range(16), 4, end=int(first))
    for row, length in zip(found.tokens.tolist(), found.lengths.tolist(), strict=True):
        assert first not in row[: length - 1] and set(row[length:]) <= {first}
        assert length == 4 or row[length - 1] == first
    assert found.lengths[0] == 2
    same = decoded(trainer.model, prompts[:1].expand(2, -1), [0, 0], 4, end=int(first))
    own = on_policy(trainer, prompts[:1].expand(2, -1), [0, 0], 4, end=int(first))
    assert (same.tokens.shape, own.tokens.shape) == ((2, 2), (2, 4))


def test_a_step_moves_the_master_weights_and_hands_them_over_rounded(source: Path):
    trainer = Trainer(source, lr=1e-3)
    before = {name: weight.detach().clone() for name, weight in trainer.master.items()}
    tokens = torch.randint(2, 300, (2, 4), generator=torch.Generator().manual_seed(0))
    scored = trainer.log_probs(tokens, tokens).sum()
    scored.neg().backward()
    trainer.collect()
    trainer.step()
    assert trainer.log_probs(tokens, tokens).sum() > scored + 0.1
    moved = [name for name, weight in trainer.master.items() if not torch.equal(weight, before[name])]
    assert len(moved) == len(before)
    assert all(torch.equal(p, trainer.master[name].bfloat16()) for name, p in trainer.parameters.items())
    engine = Trainer(source, lr=1e-3).model
    trainer.hand_over(engine, ARMS["int5-none"].rounding)
    held = dict(engine.named_parameters())
    rounded = {name for name in held if not torch.equal(held[name], trainer.parameters[name])}
    assert rounded == {name for name in held if name.endswith("_proj.weight")}


# The correction


def test_the_loss_is_the_hosts_with_the_packs_weights():
    """The loss of PPO at a ratio of 1: the mean over each response of -A times min(pi / mu, 2)."""
    behavior = torch.tensor([[-1.0, -2.0, -9.0], [-0.5, -9.0, -9.0]])
    proximal = (behavior + torch.tensor([[0.5, 3.0, 0.0], [-0.25, 0.0, 0.0]])).requires_grad_()
    advantages = torch.tensor([2.0, -1.0])
    one = batch(behavior, [2, 1])
    plain, _ = loss(NONE, one, advantages, proximal)
    assert plain.item() == pytest.approx(-2.0 + 1.0)
    weighed, _ = loss(arguments(preset("tis")), one, advantages, proximal)
    assert weighed.item() == pytest.approx(-2.0 * (math.exp(0.5) + 2) / 2 + math.exp(-0.25))
    unbiased, _ = loss(UNBIASED, one, advantages, proximal)
    assert unbiased.item() == pytest.approx(-2.0 * math.exp(3.5) + math.exp(-0.25))
    kept, metrics = loss(arguments(window(0.5, 1.1)), one, advantages, proximal)
    assert kept.item() == pytest.approx(1.0) and metrics["kept_fraction"].item() == pytest.approx(1.0)


def test_an_arm_without_a_hook_has_the_loss_of_one_that_watches():
    behavior = -torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    one, advantages = batch(behavior, [4, 2, 3]), torch.tensor([1.0, -1.0, 0.5])
    found = [
        loss(arguments(one_of), one, advantages, behavior + 0.3)[0]
        for one_of in (None, preset("metrics-only"))
    ]
    assert torch.equal(*found)


def test_a_fitted_window_keeps_nine_of_ten_sequences():
    random = torch.Generator().manual_seed(0)
    behavior = -torch.rand(200, 5, generator=random)
    proximal = behavior - 0.1 + 0.2 * torch.randn(200, 5, generator=random)
    low, high = fitted_window(pair([batch(behavior, [5] * 200)], [proximal]))
    means = (proximal - behavior).mean(1).exp()
    assert ((means >= low) & (means <= high)).double().mean().item() == pytest.approx(0.9, abs=0.01)
    assert (means < low).double().mean().item() == pytest.approx(0.05, abs=0.01)
    assert low < math.exp(-0.1) < high


def test_every_arm_has_a_correction_that_the_host_takes():
    for arm in ARMS.values():
        named = arm.correction
        correction = window(0.9, 1.1) if named == FITTED else None if named is None else preset(named)
        args = arguments(correction)
        corrects = arm.correction not in (None, "metrics-only", "miles-blog-dense-1")
        assert (args.use_tis, args.get_mismatch_metrics) == (
            corrects,
            not corrects and arm.correction is not None,
        )


# The directions


def test_cosines_and_their_jackknife_are_those_of_sums_over_prompts():
    random = torch.Generator().manual_seed(0)
    signal, count = torch.randn(50, dtype=torch.float64, generator=random), 5
    sets = {
        name: [signal + torch.randn(50, dtype=torch.float64, generator=random) for _ in range(count)]
        for name in ("first", "second", "arm")
    }
    found = cosines(gram([one.float() for part in sets.values() for one in part]), [*sets], count)

    def by_hand(left_out: int | None) -> float:
        kept = [index for index in range(count) if index != left_out]
        arm = sum(sets["arm"][index] for index in kept)
        reference = sum(sets[half][index] for half in ("first", "second") for index in kept)
        assert isinstance(arm, torch.Tensor) and isinstance(reference, torch.Tensor)
        return float(arm @ reference / arm.norm() / reference.norm())

    without = [by_hand(index) for index in range(count)]
    mean = sum(without) / count
    error = math.sqrt((count - 1) / count * sum((one - mean) ** 2 for one in without))
    assert found["arm"] == pytest.approx(
        [by_hand(None), by_hand(None) - 1.96 * error, by_hand(None) + 1.96 * error]
    )
    assert (
        found["agreement"] is not None
        and 0 < found["agreement"][0] < 1
        and found.keys() == {"arm", "agreement"}
    )


def test_cosines_know_a_sign_and_a_gradient_of_zero():
    one, zero = torch.tensor([3.0, 4.0]), torch.zeros(2)
    sets = ("first", "second", "against", "nothing")
    found = cosines(gram([one, one, one, one, -one, -one, zero, zero]), sets, 2)
    assert found["agreement"] == pytest.approx([1, 1, 1]) and found["against"] == pytest.approx([-1, -1, -1])
    assert found["nothing"] is None


# Units and records


def test_all_arms_of_a_seed_come_before_the_next_and_two_of_the_blogs_run_once():
    order = units([*ARMS], (0, 1, 2))
    assert [seed for _, seed in order] == sorted(seed for _, seed in order)
    assert [name for name, _ in order[:4]] == ["on-policy", "bf16", "int5-none", "fp8-none"]
    assert len(order) == len(set(order)) == 11 * 3 + 2
    assert units(["int5-tis", "bf16-dense-2"], (2, 0)) == [
        ("int5-tis", 2),
        ("bf16-dense-2", 2),
        ("int5-tis", 0),
    ]


def test_a_record_of_other_settings_is_refused():
    there, name = {"bf16-seed0": {"settings": {"lr": 1.0, "seed": 0}}}, "bf16-seed0"
    assert finished({}, name, {"lr": 1.0}) is None
    assert finished(there, name, {"lr": 1.0, "seed": 0}) is not None
    with pytest.raises(
        UserError, match=r"bf16-seed0 has a record of other settings \(lr: 1.0 there, 2.0 here\)"
    ):
        finished(there, name, {"lr": 2.0, "seed": 0})


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([0.0, -0.1, 0.1], "0.00 [-0.10, 0.10]"),
        ([0.0, -2.0, 2.0], "0.00 [-0.96, 0.96]"),
        ([0.8, 0.44, 1.16], "0.80 [0.10, 0.97]"),  # 0.36 over 1 - 0.8 ** 2 is 1; tanh(log 3 + 1) is 0.97
        ([1.0, 1.0, 1.0], "1.00"),
        (None, "-"),
    ],
)
def test_no_interval_of_a_cosine_passes_one(value: list[float] | None, told: str):
    assert interval(value) == told


def test_directions_are_averaged_over_seeds_and_rollouts_where_all_three_are_there():
    def course(*found: tuple[float, float, float] | None) -> dict[str, Any]:
        keys = ("agreement", "arm", "uncorrected")
        return {
            "directions": [
                dict.fromkeys(keys)
                if one is None
                else {key: [v, v, v] for key, v in zip(keys, one, strict=True)}
                for one in found
            ]
        }

    there = {
        ("int5-tis", 0): course((0.5, 0.6, 0.3), None),
        ("int5-tis", 1): course((0.3, 0.2, 0.1)),
        ("bf16", 0): course((0.4, 0.3, 0.3)),
        ("fp8-tis", 0): course(None),
    }
    told = "\n".join(averaged(there))
    assert (
        "| int5, token TIS | 2 | 0.40 [0.20, 0.60] | 0.40 [0.01, 0.79] | 0.20 [0.00, 0.40] | 0.20 [0.00, 0.40] |"
        in told
    )
    assert "| bf16, none (dense 1) | 1 | 0.40 | 0.30 | 0.30 | 0.00 |" in told and "fp8" not in told


def test_an_arm_is_compared_with_bf16_of_an_equal_seed():
    def record(accuracies: list[float], reward: float, k3: float) -> dict[str, Any]:
        rows = [{"reward": reward, "kept": 0.5, "k3": 0.0}, {"reward": reward + 0.2, "kept": 1.0, "k3": k3}]
        rows = [{**row, "trainer_ppl": 1 + 100 * k3} for row in rows]
        return {"held_out": [{"accuracy": one} for one in accuracies], "rollouts": rows}

    there = {
        ("bf16", 0): record([0.9, 0.2, 0.4], 0.5, 1e-3),
        ("bf16", 1): record([0.9, 0.4, 0.8], 0.5, 2e-3),
        ("int5-tis", 1): record([0.9, 0.5, 0.9], 0.1, 3e-1),
        ("int5-tis", 2): record([0.9, 0.1, 0.3], 0.3, 1e-1),
        ("fp8-tis", 2): record([0.9, 0.1, 0.3], 0.3, 1e-2),
    }
    told = "\n".join(summary(there))
    bf16 = "0.60 [0.40, 0.80] | 0.45 [0.30, 0.60] | 0.60 [0.60, 0.60] | 1.15 [1.10, 1.20] | 0.75 [0.75, 0.75]"
    assert f"| bf16, none (dense 1) | 2 | {bf16} | - | 2.0e-03 |" in told
    int5 = (
        "0.60 [0.30, 0.90] | 0.45 [0.20, 0.70] | 0.30 [0.20, 0.40] | 21.00 [11.00, 31.00] | 0.75 [0.75, 0.75]"
    )
    assert f"| int5, token TIS | 2 | {int5} | +0.10 | 3.0e-01 |" in told
    assert "| fp8, token TIS | 1 | 0.30 | 0.20 | 0.40 | 2.00 | 0.75 | - | 1.0e-02 |" in told


def test_a_unit_is_the_same_whenever_it_runs(source: Path):
    task = of_letters(read_config(source).eos_token_id)

    def run(seed: int) -> str:
        found = Unit.start(
            ARMS["int5-geometric"], seed, replace(real_model_rl.SMOKE, rollouts=1), task, source
        )
        numbers = found.run(lambda done: None)
        return json.dumps({**numbers, "cpu_seconds": 0, "correction": found.correction})

    assert run(0) == run(0) != run(1)


def smoke(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> int:
    command = ["real_model_rl.py", "--smoke", "--runs", str(folder), "--arms", *words, "--seeds", "0"]
    monkeypatch.setattr(sys, "argv", command)
    return real_model_rl.main()


def test_a_smoke_run_writes_all_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert smoke(monkeypatch, tmp_path, "on-policy") == 0
    first = tmp_path / "on-policy-seed0.json"
    before = first.stat().st_mtime_ns
    record = json.loads(first.read_text())
    assert all(row["equal"] == row["tokens"] and row["k3"] == 0 for row in record["rollouts"])
    assert smoke(monkeypatch, tmp_path, "on-policy", "int5-geometric") == 0
    assert first.stat().st_mtime_ns == before
    second = json.loads((tmp_path / "int5-geometric-seed0.json").read_text())
    assert all(row["equal"] < row["tokens"] and row["k3"] > 0 for row in second["rollouts"])
    assert second["correction"]["mis"]["reject"][0]["over"] == "mean"
    assert (
        [one["rollout"] for one in second["held_out"]]
        == [0, 2]
        == [one["rollout"] for one in second["directions"]]
    )
    assert "rollout 2 of 2, 0 min left; unit 1 of 1" in capsys.readouterr().err
    page = (tmp_path / "real_model_rl.md").read_text()
    assert "2 of 35 units" in page and "bf16 (seed 0, 1, 2)" in page and "on-policy (seed 1, 2)" in page

    monkeypatch.setattr(real_model_rl, "SMOKE", replace(real_model_rl.SMOKE, lr=1.0))
    assert smoke(monkeypatch, tmp_path, "bf16", "on-policy") == 2
    assert "lr: 5e-06 there, 1.0 here" in capsys.readouterr().err
    assert not (tmp_path / "bf16-seed0.json").exists()
