"""Segment-wise weights in the loss hook: against the formulas, beside rules, OPSM and normalization, over ranks."""

import dataclasses
import itertools
import math
import random
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import loss_oracle
import oracle
import pytest
import segmentwise_oracle
import torch
import yaml
from drive import assert_metrics_match
from launch import run_ranks
from segmentwise_oracle import Token
from test_loss_hook import (
    OBJECTIVES,
    OPSM,
    Expected,
    Outcome,
    Question,
    Step,
    assert_loss_and_gradient,
    assert_same,
    assert_same_sums,
    embedded_outcome,
    every_two,
    flags,
    hosts,  # noqa: F401
    in_a_step,
    random_step,
    reducer,
)
from test_loss_hook import drive as drive_batch
from tolerances import DECISION, normalized_rtol, step_atol, step_weight_atol
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lab import tallies
from mis_plugins import mis
from mis_plugins.config import reading
from mis_plugins.correction.pipeline import correct
from mis_plugins.errors import ConfigError, InputError
from mis_plugins.explain.translate.areal import translate
from mis_plugins.hosts import loss_batch, loss_hook
from mis_plugins.hosts.registry import current
from mis_plugins.loss import micro_batch
from mis_plugins.metrics.staleness import weight_metrics
from mis_plugins.metrics.token_metrics import diagnose

CURRENT = 7
STANDARD = {"weight": {"level": "token", "bound": "truncate", "upper": 1.3}, "segment_wise": {"enabled": False}}


@dataclasses.dataclass(frozen=True)
class Aged(Step):
    """A micro-batch whose tokens several versions wrote; `stored` is log pi_{v+1}, None where nobody kept it."""

    versions: list[list[int]]
    stored: list[list[float | None]]

    def rows(self, name: str) -> list[Tensor]:
        if name == "versions":
            return [torch.tensor(row) for row in self.versions]
        if name == "stored":
            nan = [[math.nan if x is None else x for x in row] for row in self.stored]
            return [torch.tensor(row, dtype=torch.float64) for row in nan]
        return super().rows(name)

    def batch(self) -> dict[str, Any]:
        return super().batch() | {
            "output_versions": self.rows("versions"), "recomputed_log_probs": self.rows("stored"),
            "proximal_version": CURRENT,
        }  # fmt: skip

    @property
    def tokens(self) -> list[list[Token]]:
        rows = zip(self.responses, self.behavior, self.stored, self.versions, strict=True)
        return [
            [
                Token(old, mu, kept, version, CURRENT, bool(valid))
                for old, mu, kept, version, valid in zip(x.old, b, s, v, x.mask, strict=True)
            ]
            for x, b, s, v in rows
        ]


def aged(step: Step, seed: int, oldest: int = 5) -> Aged:
    """Versions that only grow along a response; masked tokens are a tool's."""
    rng = random.Random(seed)
    versions, stored = [], []
    for x, mu in zip(step.responses, step.behavior, strict=True):
        wrote = sorted(rng.randint(CURRENT - oldest, CURRENT) for _ in x.mask)
        versions.append([v if valid else -1 for v, valid in zip(wrote, x.mask, strict=True)])
        kept = [b + rng.gauss(0, 0.3) if CURRENT - v >= 2 else None for b, v in zip(mu, wrote, strict=True)]
        stored.append(kept)
    return Aged(step.responses, step.behavior, versions, stored)


def call(step: Step, mis_config: dict, **settings: Any) -> Outcome:
    return drive(flags(mis=mis_config, **settings), step.batch(), step)


def drive(args: Namespace, batch: dict[str, Any], step: Step) -> Outcome:
    return drive_batch(args, batch, torch.cat(step.rows("target")))


# ------------------------------------------------------------------------------------------------- against formulas


class ExpectedAged(Expected):
    """The loss with pi_{v+1} / mu as what the weight bounds, and pi_theta / pi_{v+1} as what PPO clips if asked."""

    step: Aged

    @property
    def block(self) -> dict:
        return self.question.mis.get("segment_wise", {})

    @property
    def on(self) -> bool:
        return self.block.get("enabled", True)

    def numerators(self) -> list[list[float | None]]:
        spec = segmentwise_oracle.Spec(
            method=self.block.get("method", "recompute"), fresh=self.block.get("fresh_tokens", "proximal")
        )
        return [[segmentwise_oracle.numerator(token, spec) for token in row] for row in self.step.tokens]

    def _response(self, i: int, x: loss_oracle.Response) -> loss_oracle.Response:
        found = super()._response(i, x)
        if not self.on or self.block.get("clip_against", "next") == "proximal":
            return found
        known = [math.nan if y is None else y for y in self.numerators()[i]]
        assert not any(math.isnan(known[t]) for t in x.valid)
        return dataclasses.replace(found, old=known)

    @property
    def correction(self) -> dict:
        said = dict(self.question.mis)
        block = said.pop("segment_wise", {})
        if said.get("weight") is None:
            mode, cap, floor = block.get("mode", "truncate"), block["weight_cap"], block.get("weight_floor")
            said["weight"] = {"level": "token", "bound": mode, "upper": cap, "lower": floor}
        return said

    def samples(self) -> list[oracle.Sample]:
        found = super().samples()
        if not self.on:
            return found
        return [
            dataclasses.replace(sample, numerator=[math.nan if x is None else x for x in row])
            for sample, row in zip(found, self.numerators(), strict=True)
        ]


TOKEN_RULE = {"over": "token", "lower": 0.7, "upper": 1.5}
SEQUENCE_RULE = {"over": "mean", "lower": 0.85, "upper": 1.2}
CORRECTIONS = [
    {"segment_wise": {"weight_cap": 1.2}},
    {"segment_wise": {"weight_cap": 1.2, "clip_against": "proximal"}},
    {"segment_wise": {"weight_cap": 1.2, "weight_floor": 0.8, "mode": "mask", "fresh_tokens": "behavior"},
     "denominator": "kept"},
    {"segment_wise": {"weight_cap": 1.3, "weight_floor": 0, "mode": "zero", "method": "loglinear",
                      "fresh_tokens": "behavior_at_age_0"},
     "reject": [SEQUENCE_RULE]},
    {"weight": {"level": "token", "bound": "clip", "upper": 1.3, "lower": 0.7,
                "normalize": {"scope": "micro_batch", "over": "kept"}},
     "segment_wise": {"enabled": True}, "reject": [TOKEN_RULE, SEQUENCE_RULE]},
    {"weight": {"level": "token", "bound": "truncate", "upper": 1.2}},  # nothing said: on where versions are known
    STANDARD,
]  # fmt: skip


def questions() -> Iterator[Question]:
    """Every two of a correction, an OPSM and an objective that compares pi_theta with pi_old."""
    kl = itertools.cycle((None, "k3", "low_var_kl"))
    proximal = [(objective, spec) for objective, spec in OBJECTIVES if objective.get("old") != "behavior"]
    for correction, opsm, (objective, spec) in every_two(CORRECTIONS, OPSM, proximal):
        yield Question({**correction, **opsm, "objective": objective, "metrics": "none"}, spec, next(kl))


def decided(question: Question) -> ExpectedAged:
    """The first random micro-batch of which rules and OPSM each drop a part, and of which no token is near a bound."""
    candidates = (ExpectedAged(aged(random_step(seed), seed), question) for seed in itertools.count())
    return next(e for e in candidates if e.margin > DECISION and e.decides)


@pytest.mark.parametrize("question", list(questions()), ids=str)
def test_composition(question: Question):
    """Only the weight and PPO's ratio look at pi_{v+1}: rules and OPSM look at pi_old and pi_theta."""
    expected = decided(question)
    found = call(expected.step, question.mis, **question.settings)
    assert_loss_and_gradient(found, expected)


@pytest.mark.parametrize("mis_config", [c for c in CORRECTIONS if c.get("denominator") != "kept"], ids=str)
def test_metrics_are_the_oracles(mis_config: dict):
    """Those of the weights look at pi_{v+1}, all others at pi_old; extremes and ESS of the micro-batch too."""
    question = Question(mis_config | {"metrics": "full"})
    expected = decided(question)
    lengths = [len(x.mask) for x in expected.step.responses]
    args, batch = flags(mis=question.mis), expected.step.batch()
    config = loss_hook.config_in_force(args, reading.from_args(args), current(args), versions_known=True)
    host, logits = current(args, reducer(batch, "miles")), torch.cat(expected.step.rows("target"))
    x = loss_batch.read(host, args, batch, logits, config)
    assert x.behavior is not None
    numerator = micro_batch.numerator_of(x.proximal, x.behavior, x.written, config)
    corrected = correct(x.proximal, x.behavior, x.ragged, config, numerator=numerator)
    metrics = diagnose(corrected, average="sequences")
    found = {name: list(value.split(lengths)) for name, value in metrics.items()}
    whole = SimpleNamespace(samples=expected.samples())
    assert_metrics_match(found, whole, expected.corrected)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------ identities


ON = [
    {"segment_wise": {"weight_cap": 1.2}, "opsm": {"delta": 0.05}},
    {"weight": {"bound": "clip", "upper": 1.2, "normalize": {"scope": "micro_batch"}}, "reject": [SEQUENCE_RULE]},
]  # fmt: skip


def switched(config: dict, enabled: bool) -> dict:
    """The same bounds, on or off."""
    return config | {"segment_wise": config.get("segment_wise", {}) | {"enabled": enabled}}


@pytest.mark.parametrize("config", ON)
def test_one_version_behind_is_standard_decoupled(config: dict):
    """Loss and gradient to the last bit, metrics to rounding; older tokens differ."""
    for seed in range(3):
        young = aged(random_step(seed), seed, oldest=1)
        on, off = (call(young, switched(config, enabled)) for enabled in (True, False))
        assert_same(on, off)
        assert on.metrics.keys() == off.metrics.keys()
        for name, value in off.metrics.items():
            torch.testing.assert_close(on.metrics[name], value, rtol=normalized_rtol(3.0), atol=0.0)
    old = aged(random_step(0), 0)
    on, off = (call(old, switched(config, enabled)) for enabled in (True, False))
    assert not torch.equal(on.gradient, off.gradient)


@pytest.mark.parametrize("config", ON)
@pytest.mark.parametrize("metrics", ["full", "core"])
def test_off_does_what_a_host_without_versions_does(config: dict, metrics: str):
    """No operator more, no key more, the same bits: `enabled: false` reads no versions."""
    step, off = random_step(4), switched(config, False) | {"metrics": metrics}
    plain = {name: value for name, value in off.items() if name != "segment_wise"}
    if "weight" not in plain:
        plain["weight"] = {"upper": config["segment_wise"]["weight_cap"]}

    def counted(x: Step, mis_config: dict) -> tuple[Outcome, Any]:
        found: list[Outcome] = []
        args, batch = flags(mis=mis_config), x.batch()
        tally = tallies.tally(lambda: found.append(drive(args, batch, x)))
        return found[0], tally.operators

    (with_versions, ours), (without, standard) = counted(aged(step, 4), off), counted(step, plain)
    assert ours == standard
    assert with_versions.metrics.keys() == without.metrics.keys()
    assert_same(with_versions, without)


@pytest.mark.parametrize("config", [{}, {"weight": None, "reject": [SEQUENCE_RULE]}, {"weight": {"level": "sequence"}}])
def test_without_a_weight_of_tokens_versions_change_nothing(config: dict):
    assert_same(call(aged(random_step(5), 5), config), call(random_step(5), config))


def test_the_mean_of_the_rollout_is_of_the_same_weights():
    step = aged(random_step(3), 3)
    weight = {"upper": 1.2, "normalize": {"scope": "rollout"}}
    args, batch = flags(mis={"weight": weight}, loss_type="custom_loss"), step.batch()
    mis.normalize_rollout(args, 0, batch)
    alone = {"weight": weight | {"normalize": {"scope": "micro_batch"}}}
    assert_same(drive(args, batch, step), call(step, alone))


def test_the_mean_of_other_weights_than_the_micro_batches():
    """The rollout-data hook saw no versions, the loss hook does."""
    step = aged(random_step(3), 3)
    config = {"weight": {"upper": 1.2, "normalize": {"scope": "rollout"}}}
    args = flags(mis=config, loss_type="custom_loss")
    mis.normalize_rollout(args, 0, random_step(3).batch())
    message = r"proximal_version: of the micro-batch, and not of rollout_data.*rollout .*use scope: data_parallel"
    with pytest.raises(InputError, match=message):
        drive(args, step.batch(), step)


# ---------------------------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize(
    ("keys", "places"),
    [
        ({"behav_imp_weight_cap": 1.2, "tis_upper_bound": 2.0}, "behav_imp_weight_cap"),
        ({"behav_imp_weight_mode": "token_mask"}, "behav_imp_weight_mode"),
        ({"rejection_sampling": {"action": "clamp"}}, "rejection_sampling"),
        ({"actor": {"use_decoupled_loss": False, "path": "x"}, "mis": {"weight": {}}}, "actor.use_decoupled_loss"),
    ],
)  # fmt: skip
def test_areals_keys_are_refused_by_the_hook_which_names_the_translator(keys: dict, places: str):
    step = random_step(0)
    with pytest.raises(ConfigError, match=f"^{places}: of AReaL; give the host the file .* config from-areal"):
        drive(flags(**keys), step.batch(), step)


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        ({"use_decoupled_loss": False, "enable_segment_wise_ppo": True},
         r"^enable_segment_wise_ppo: true contradicts use_decoupled_loss: false"),
        ({"behav_imp_weight_floor": 0.2}, r"^behav_imp_weight_floor: 0\.2 alone .* behav_imp_weight_cap too"),
        ({"behav_imp_weight_cap": 5, "behav_imp_weight_floor": 6},
         r"^behav_imp_weight_floor: 6 is not below behav_imp_weight_cap: 5"),
        ({"behav_imp_weight_cap": -1}, r"^behav_imp_weight_cap: got -1; every ratio is above 0"),
        ({"enable_segment_wise_ppo": "yes"}, r"^enable_segment_wise_ppo: got 'yes'; expected true or false"),
    ],
)  # fmt: skip
def test_areals_names_that_cannot_work(flat: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        translate(yaml.safe_dump(flat))


FLAT = {"tis_upper_bound": 2.0}
TOKEN, ON_NOTHING = {"weight": {"level": "token"}}, {"segment_wise": {}}
NO_VERSIONS = {"output_versions": None, "proximal_version": None, "recomputed_log_probs": None}
KNOWN = r"output_versions: none here, and proximal_version: 7 says .*hand it on with every micro-batch"
STORES = r"recomputed_log_probs: none .*mis\.segment_wise\.method: loglinear, or mis\.segment_wise\.enabled: false"
# What `mis:` says (None: flat keys), what the batch has in place of its own, and the error.
LACKS: list[tuple[dict | None, dict, str]] = [
    (None, {"recomputed_log_probs": None}, r"method \(in place of Miles's flat keys\): loglinear, or .*keys\): false$"),
    (ON_NOTHING, NO_VERSIONS, r"output_versions: none here; mis\.segment_wise needs .*docs/async\.md.*as mis\.weight"),
    (ON_NOTHING, {"proximal_version": None}, r"proximal_version: none beside output_versions; hand on the version"),
    (ON_NOTHING, {"output_versions": [torch.zeros(3)]}, r"output_versions: \[3\] tokens a sequence, but this"),
    (ON_NOTHING, {"recomputed_log_probs": [torch.zeros(3)]}, r"recomputed_log_probs: \[3\] tokens a sequence"),
    *((said, {"output_versions": None}, KNOWN) for said in (ON_NOTHING, TOKEN, {"metrics": "all"})),
    *((said, {"recomputed_log_probs": None}, STORES) for said in (ON_NOTHING, TOKEN)),
]  # fmt: skip


@pytest.mark.parametrize(("said", "change", "message"), LACKS)
def test_what_a_batch_lacks_is_told_in_the_users_words(said: dict | None, change: dict, message: str):
    """Tokens would silently have other weights than on ranks whose batches are whole, or none."""
    step, keys = aged(random_step(0), 0), FLAT if said is None else {"mis": said}
    with pytest.raises(InputError, match=message):
        drive(flags(**keys), step.batch() | change, step)
    if said in (ON_NOTHING, TOKEN):  # the mean of a rollout would be of those weights too
        weight = said.get("weight", {}) | {"normalize": {"scope": "rollout"}}
        args = flags(mis=said | {"weight": weight}, loss_type="custom_loss")
        with pytest.raises(InputError, match=message.replace("mis\\.weight", "")):
            mis.normalize_rollout(args, 0, step.batch() | change)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"mis": {"segment_wise": {}}}, r"^mis\.segment_wise: a weight .* belongs to mis\.objective\.old: proximal"),
        (FLAT, r"^tis_upper_bound: with mis\.objective\.old: behavior"),
        ({"mis": {"weight": {"upper": 2}, "objective": {"old": "behavior"}}}, r"^mis\.weight: with .*null$"),
    ],
)  # fmt: skip
def test_what_a_flag_contradicts_is_told_in_the_users_words(said: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        drive(flags(use_rollout_logprobs=True, **said), random_step(0).batch(), random_step(0))


def test_the_interpolation_needs_nothing_stored():
    step = aged(random_step(0), 0)
    batch, config = step.batch(), {"segment_wise": {"method": "loglinear"}}
    assert_same(drive(flags(mis=config), batch | {"recomputed_log_probs": None}, step), call(step, config))


@pytest.mark.parametrize(
    ("use_tis", "flag"),
    [(True, "--use-tis"), (False, "--get-mismatch-metrics, and to watch use_tis: false in the file")],
)
def test_the_tis_hook_cannot_serve_it(use_tis: bool, flag: str):
    message = (
        "mis.segment_wise: the TIS hook does not see which version wrote a token; pass --loss-type custom_loss "
        f"--custom-loss-function-path mis_plugins.mis.policy_loss in place of {flag}"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        mis.config_in_force(Namespace(use_tis=use_tis, mis={"segment_wise": {}}))
    off = mis.config_in_force(Namespace(use_tis=True, mis={"segment_wise": {"enabled": False}}))
    assert off.weight is not None and off.weight.ceiling == 5.0


# ------------------------------------------------------------------------------------------------------- metrics


def cut(step: Aged, part: slice) -> Aged:
    return Aged(step.responses[part], step.behavior[part], step.versions[part], step.stored[part])


CAP = {"segment_wise": {"weight_cap": 1.2}}
AGES = (None, 0, 1, 2, 5)


def valid_tokens(step: Aged) -> list[Token]:
    return [token for row in step.tokens for token in row if token.valid]


def of_age(found: dict[str, float], age: int | None) -> dict[str, float]:
    """The metrics of one age, or of all, without the suffix that names it."""
    suffix = "" if age is None else f"/age_{age}"
    return {name.removesuffix(suffix): x for name, x in found.items() if name.endswith(suffix)}


@pytest.mark.parametrize("metrics", ["full", "core", "all"])
@pytest.mark.parametrize("config", [CAP, STANDARD], ids=["segment-wise", "standard"])
def test_a_step_reports_its_weights_by_age(
    config: dict, metrics: str, logged: list[dict[str, float]], caplog: pytest.LogCaptureFixture
):
    """A step has both variances over one set of tokens, and the weights applied, however it is split.

    Switched off, AReaL's names are of what pi_old / pi_v weighs, with no word of pi_{v+1}, which nobody knows.
    """
    step, is_on = aged(random_step(9), 9), config is CAP
    mis.report_step(flags(), 0, 0)
    call(cut(step, slice(0, 2)), config | {"metrics": metrics})
    call(cut(step, slice(2, None)), config | {"metrics": metrics})
    mis.report_step(flags(), 0, 1)
    (found,) = logged
    assert any("segment_wise" in name for name in found) == is_on and "segment-wise" not in caplog.text
    cap, spec = (1.2 if is_on else 1.3), segmentwise_oracle.Spec(cap=1.2)
    for age in AGES:
        part = [token for token in valid_tokens(step) if age is None or token.age == age]
        tops = [segmentwise_oracle.numerator(x, spec) if is_on else x.proximal for x in part]
        steps = [top - x.behavior for x, top in zip(part, tops, strict=True) if top is not None]
        standard = [math.exp(x.proximal - x.behavior) for x in part]
        ratios, row = list(map(math.exp, steps)), of_age(found, age)
        weights = [min(x, cap) for x in ratios]
        assert row["staleness/tokens"] == len(part) == len(steps) > 0
        coarse, fine = step_weight_atol(len(part), cap**2), step_atol(len(part), max(ratios + standard) ** 2)
        mean = math.fsum(weights) / len(part)
        assert row["behav_imp_weight/avg"] == pytest.approx(mean, abs=coarse)
        assert row["behav_imp_weight/max"] == pytest.approx(max(weights), abs=coarse)
        ess = segmentwise_oracle.effective_share(weights)
        assert row["behav_imp_weight/ess"] == pytest.approx(ess, abs=coarse)
        assert row["behav_kl/avg"] == pytest.approx(-math.fsum(steps) / len(part), abs=coarse)
        for name, values in {"segment_wise": ratios, "standard": standard}.items() if is_on else ():
            variance = segmentwise_oracle.variance(values)
            assert row[f"behav_imp_weight/var/{name}"] == pytest.approx(variance, abs=fine)
    assert ("kl_k3" in found) == (metrics == "all")


@pytest.mark.parametrize("enabled", [True, False])
def test_the_mismatch_is_split_by_lag(enabled: bool, logged: list[dict[str, float]]):
    """`metrics: all`, whichever weights are in force; of pi_old against mu, so that staleness shows."""
    step = aged(random_step(9), 9)
    in_a_step(step, switched(CAP, enabled) | {"metrics": "all"})
    (found,) = logged
    assert "behav_imp_weight/avg" in found
    assert ("behav_imp_weight/var/segment_wise" in found) == enabled
    valid = valid_tokens(step)
    for lag in range(6):
        part = [token.proximal - token.behavior for token in valid if token.age == lag]
        assert found[f"lag_{lag}_share"] == pytest.approx(len(part) / len(valid))
        mean = -math.fsum(part) / len(part)
        assert found[f"lag_{lag}_kl_k1"] == pytest.approx(mean, abs=step_weight_atol(len(part), 3.0))


def test_nothing_is_added_up_without_metrics_or_without_a_weight_of_tokens(logged: list[dict[str, float]]):
    step = aged(random_step(9), 9)
    mis.report_step(flags(), 0, 0)
    for config in (CAP, STANDARD):
        call(step, config | {"metrics": "none"})
    for config in ({"weight": {"level": "sequence"}}, {"weight": None, "reject": [SEQUENCE_RULE]},
                   {"objective": {"old": "behavior"}}):  # fmt: skip
        call(step, config | {"metrics": "full"})
    mis.report_step(flags(), 0, 1)
    assert logged == []


def test_a_weight_that_is_not_known_is_warned_of(logged: list[dict[str, float]], caplog: pytest.LogCaptureFixture):
    step = aged(random_step(9), 9)
    lost = dataclasses.replace(step, stored=[[None] * len(row) for row in step.stored])
    old = sum(token.valid and token.age >= 2 for row in step.tokens for token in row)
    found = in_a_step(lost, CAP)
    tokens = sum(sum(x.mask) for x in step.responses)
    assert f": {old} of {tokens} tokens weigh 0, as nobody stored what their segment-wise weight needs" in caplog.text
    assert "not finite" not in caplog.text
    assert logged[0]["staleness/unknown"] == old > 0
    ages = [CURRENT - v if v >= 0 else -1 for row in step.versions for v in row]
    assert all(g == 0 for g, age in zip(found.gradient.tolist(), ages, strict=True) if age >= 2)
    assert found.gradient.any() and found.loss.isfinite()


@pytest.mark.parametrize("value", [-math.inf, -9999.0])
@pytest.mark.parametrize("method", ["recompute", "loglinear"])
def test_a_log_prob_that_is_not_finite_is_not_taken_for_one_that_was_not_stored(
    logged: list[dict[str, float]], caplog: pytest.LogCaptureFixture, method: str, value: float
):
    step = aged(random_step(9), 9)
    i, t, token = next((i, t, x) for i, row in enumerate(step.tokens) for t, x in enumerate(row) if x.valid)
    assert math.isfinite(token.behavior)
    step.behavior[i][t] = value
    in_a_step(step, {"segment_wise": {"method": method}})
    tokens = sum(sum(x.mask) for x in step.responses)
    assert f": 1 of {tokens} tokens weigh 0, as a log-prob of theirs is not finite" in caplog.text
    assert "stored" not in caplog.text
    assert logged[0]["staleness/unknown"] == 1


# -------------------------------------------------------------------------------------------- over ranks, on devices


@pytest.mark.parametrize("method", ["recompute", "loglinear"])
def test_nothing_waits_for_the_device(method: str):
    """Fake tensors have no values: whatever asked for one would raise."""
    step = aged(random_step(7), 7)
    config = {"segment_wise": {"method": method}, "metrics": "all"}
    args, mask = flags(mis=config), torch.cat(step.rows("mask"))

    def reduce(x: Tensor) -> Tensor:
        return (x * mask).sum()

    reduce.__module__ = reducer(step.batch(), "miles").__module__
    with FakeTensorMode(allow_non_fake_inputs=True):
        mis.report_step(flags(), 0, 0)
        logits = torch.cat(step.rows("target")).requires_grad_()
        mis.policy_loss(args, step.batch(), logits, reduce)[0].backward()


EMBEDDED = [
    {"segment_wise": {"weight_cap": 1.2, "mode": "clip"}, "reject": [SEQUENCE_RULE | {"lower": 0.1, "upper": 9}],
     "opsm": {"delta": 0.1}, "denominator": "kept"},
    {"weight": {"upper": 1.2, "normalize": {"scope": "micro_batch"}}, "segment_wise": {"method": "loglinear"}},
]  # fmt: skip


@pytest.mark.parametrize("config", EMBEDDED)
def test_context_parallel_ranks_add_up_to_one(config: dict, tmp_path: Path):
    """Loss, gradient, metrics and what is added up by age, by the embedded host's own batch, at CP 1 and 4."""
    lengths = (9, 1, 20, 13, 6)
    step = aged(random_step(11, lengths), 11)
    args = flags(mis=config, rollout_temperature=1.0, true_on_policy=False)
    answers, ages = [], []
    for cp in (1, 4):
        ranks = run_ranks(cp, cp, lambda _, cp=cp: rank_outcome(args, step, cp), tmp_path / str(cp))
        ages.append([rank.pop("ages") for rank in ranks])
        answers.append({name: torch.stack([rank[name] for rank in ranks]).sum(0) for name in ranks[0]})
    assert_same_sums(answers, sum(lengths))
    (whole,) = ages[0]
    assert whole["staleness/tokens/age_3"] > 0
    for of_rank in itertools.chain(*ages[1:]):
        assert of_rank == pytest.approx(whole, abs=step_weight_atol(sum(lengths), 10.0))


def rank_outcome(args: Namespace, step: Aged, cp: int) -> dict[str, Any]:
    """This rank's outcome, and the metrics by age that all ranks together report."""
    mis.report_step(args, 0, 0)
    found = embedded_outcome(args, step, cp)
    (recorded,) = mis.RECORDER.pending.values()
    ages = recorded.over_ranks().ages
    assert ages is not None
    return found | {"ages": weight_metrics(ages)}
