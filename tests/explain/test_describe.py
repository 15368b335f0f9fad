"""What `config show` prints: the config read back, its formula, its words, and six tokens against the oracle."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import loss_oracle
import oracle
import pytest
import segmentwise_oracle
import torch
import yaml
from batches import configs
from documented import DOCUMENTED
from drive import assert_close
from hypothesis import given
from tolerances import normalized_rtol

from mis_plugins.__main__ import load, main
from mis_plugins.config import writing
from mis_plugins.config.loading import presets
from mis_plugins.config.model import CorrectionConfig, ObjectiveConfig, OpsmConfig, WeightConfig
from mis_plugins.config.reading import from_mapping
from mis_plugins.config.terms.statistics import STATISTICS
from mis_plugins.explain import formula, six_tokens
from mis_plugins.explain import words as describe

PRESETS = {name: load(file) for name, file in presets().items()}


# ---------------------------------------------------------------------------------------------------- written, read


@given(configs())
def test_what_is_written_is_read_back(mapping: dict):
    config = from_mapping(mapping)
    assert from_mapping(yaml.safe_load(writing.to_yaml(writing.as_mapping(config)))["mis"]) == config


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_read_back(name: str):
    assert from_mapping(writing.as_mapping(PRESETS[name])) == PRESETS[name]


def test_comments_stand_beside_their_settings():
    mis = {"weight": {"level": "token", "upper": 1e-5}, "reject": [{"over": "min", "lower": 0.5}], "metrics": "full"}
    text = writing.to_yaml(mis, {"weight.upper": "a", "reject[0]": "b", "metrics": "c"})
    assert text.splitlines() == [
        "mis:",
        "  weight:",
        "    level: token",
        "    upper: 1.0e-05             # a",
        "  reject:",
        "    - {over: min, lower: 0.5}  # b",
        "  metrics: full                # c",
    ]
    assert yaml.safe_load(text)["mis"] == mis


# ------------------------------------------------------------------------------------------------- words and formula


FORMULAS = yaml.safe_load(Path(__file__).with_name("formulas.yaml").read_text())


@pytest.mark.parametrize("case", FORMULAS, ids=lambda case: case["line"])
def test_formula(case: dict):
    found = formula.formula(from_mapping(case["mis"]))
    assert case["line"] in found, "\n".join(found)


def test_every_setting_is_told():
    told = [describe.describe(from_mapping(mapping)) for mapping in (case["mis"] for case in FORMULAS)]
    assert len(set(told)) == len(told)


@pytest.mark.parametrize("name", STATISTICS)
def test_a_statistics_formula_is_what_it_says(name: str):
    """As Python it gives what the oracle does; of a ratio that logarithm which is compared."""
    text = STATISTICS[name].formula.format(trainer="pi_old").replace("log r_t", "log(r_t)").replace("^", "**")
    if text.startswith("|"):
        text = f"abs({text.strip('|')})"
    names = {"r_t": 0.25, "pi_old": 0.2, "mu": 0.8, "n_t": 3.0, "log": math.log, "abs": abs}
    found = eval(text, {"__builtins__": {}}, names)
    sample = oracle.Sample([math.log(0.2)], [math.log(0.8)], [True], routes=[3.0])
    expected = oracle.token_statistic(sample, 0, name)
    assert found == pytest.approx(math.exp(expected) if name == "ratio" else expected, rel=1e-12)


def test_bypass_compares_the_policy_itself_with_mu():
    mapping = {"weight": None, "reject": [{"statistic": "prob_diff", "upper": 0.2}]}
    for objective, scored in ((None, "pi_old"), ({"old": "behavior"}, "pi_theta")):
        config = from_mapping(mapping | {"objective": objective})
        assert formula.formula(config)[0] == f"r_t    = {scored}(y_t) / mu(y_t)"
        assert formula.formula(config)[2] == f"keep_t = mask_t and ({scored} - mu) <= 0.2"
        assert f"tokens whose probability difference ({scored} - mu) is above 0.2" in describe.describe(config)


@pytest.mark.parametrize(("host", "handed"), [("miles", "watch"), ("fsdp", "full, since Miles on FSDP calls no hook")])
def test_metrics_are_told_as_the_host_is_handed_them(host: str, handed: str, capsys: pytest.CaptureFixture):
    """A host without a step hook is handed all metrics in place of five: nothing else would log the others."""
    assert main(["config", "check", "tis", "--host", host]) == 0
    assert f"\nmetrics: {handed}" in capsys.readouterr().out


PRODUCT = " multiplies the ratios of all tokens: 1.001 at each of 2000 tokens is 1.001^2000 = 7.38"


@pytest.mark.parametrize(
    ("mapping", "said"),
    [
        ({"weight": {"upper": 0.5}}, ["weight.upper: 0.5 caps the weight below 1"]),
        ({"segment_wise": {"weight_cap": 0.5}}, ["segment_wise.weight_cap: 0.5 caps the weight below 1"]),
        ({"weight": {"upper": 1}}, []),
        ({"weight": {"bound": "mask", "lower": 1.5, "upper": 2}}, ["weight.bound: mask drops what trainer"]),
        ({"weight": {"bound": "clip", "lower": 0.1, "upper": 0.9}}, ["weight.bound: clip changes what trainer"]),
        ({"weight": {"bound": "zero", "lower": 0, "upper": 0.9}}, ["weight.bound: zero weighs with 0 what trainer"]),
        ({"segment_wise": {"weight_cap": 0.5, "weight_floor": 0.1, "mode": "mask"}},
         ["segment_wise.mode: mask drops what trainer"]),
        ({"weight": {"bound": "mask", "lower": 1, "upper": 1.5}}, []),
        ({"weight": {"bound": "none"}}, []),
        ({"weight": {"upper": 200}}, ["weight.upper: 200 hardly ever acts"]),
        ({"weight": {"upper": 100}}, []),
        ({"weight": None, "reject": [{"lower": 1.2}, {"over": "mean", "upper": 0.99}, {"over": "max", "upper": 100}]},
         ["reject[0] drops what trainer and rollout engine agree on: there its ratio is 1, which is outside [1.2, inf]",
          "reject[1] drops what trainer and rollout engine agree on: there its ratio is 1, which is outside"]),
        ({"weight": None, "reject": [{"lower": 1.2, "down_weigh": 0.5}]},
         ["reject[0] down-weighs what trainer and rollout engine agree on: there its ratio is 1"]),
        ({"weight": None, "reject": [{"statistic": "k3", "over": "max", "lower": 0.1}]},
         ["reject[0] drops what trainer and rollout engine agree on: there its k3 is 0"]),
        ({"weight": None, "reject": [{"statistic": "proximal_prob", "over": "min", "lower": 0.1}]}, []),
        *(({"weight": {"level": level}}, [f"weight.level: {level}{PRODUCT}"]) for level in ("sequence", "segment")),
        ({"weight": None, "reject": [{"over": "min", "lower": 0.1}, {"over": "sum", "upper": 2}]},
         [f"reject[1] with over: sum{PRODUCT}"]),
        ({"weight": {"level": "geometric"}, "reject": [{"over": "mean", "upper": 2}]}, []),
        ({"weight": None, "reject": [{"statistic": "k3", "over": "sum", "upper": 2}]}, []),
    ],
)  # fmt: skip
def test_bounds_that_cannot_be_meant_and_products_are_warned_of(mapping: dict, said: list[str]):
    told = list(describe.warnings(from_mapping(mapping)))
    assert len(told) == len(said) and all(map(str.startswith, told, said)), told


@pytest.mark.parametrize("name", PRESETS)
def test_bounds_of_presets_are_not_warned_of(name: str):
    config = PRESETS[name]
    assert all(" multiplies the ratios" in warning for warning in describe.warnings(config))
    if name in DOCUMENTED:
        assert config.weight is None or config.weight.bound == "none" or config.weight.ceiling <= 5


def normalized(scope: str) -> dict:
    return {"weight": {"normalize": {"scope": scope}}}


KEPT = {"weight": None, "reject": [{"over": "token", "upper": 2}], "denominator": "kept"}
DOWN_WEIGHED = {"weight": {}, "reject": [{"statistic": "route", "upper": 0.5, "down_weigh": 0.1}]}
STOPPING = {"weight": None, "reject": [{"upper": 2}], "on_all_rejected": "raise", "keep_floor": 0.25}
RECOMMENDED = "\nrecommended: weight.normalize with weight.level: "
# slime hands `normalize_rollout` no log-probs of the trainer, unless something else asks for them
ONE_STEP = "with one step give --get-mismatch-metrics beside --use-tis, or use the loss hook"
SAID = [
    (DOWN_WEIGHED, "down-weigh: tokens whose number of layers with other experts than the engine's is above 0.5: 0.1 "
     "times their weight, and they stay in the loss mask", "reject:"),
    (DOWN_WEIGHED, "watch_routes", "all rejected"),
    ({"weight": None, "reject": [{"over": "min", "upper": 2}]}, "reject: sequences whose smallest ratio of a token is "
     "above 2", ""),
    ({"weight": None, "reject": [{"over": "max", "lower": 0.5, "unit": "segment"}]}, "reject: segments whose largest "
     "ratio of a token is below 0.5", ""),
    (STOPPING, "stops the job at the next optimizer step", ""),
    (STOPPING, "less than 25% of its tokens", ""),
    ({"weight": {}}, "", "all rejected"),
    *(({"weight": {"level": level}}, f"{RECOMMENDED}{level}: ", "") for level in ("sequence", "geometric")),
    *(({"weight": {"level": level}}, "", RECOMMENDED) for level in ("token", "segment", "segment_geometric")),
    *(({"weight": {"level": level, "normalize": {}}}, "", RECOMMENDED) for level in ("sequence", "geometric")),
    (normalized("micro_batch"), "x context-parallel size tokens, so that mean and loss change", ONE_STEP),
    (normalized("data_parallel"), "size tokens on each data-parallel rank, so that mean and loss change", ONE_STEP),
    (normalized("rollout"), ONE_STEP, "\nnormalize: "),
    (normalized("rollout") | {"objective": {}}, "", ONE_STEP),
    (KEPT, "by the TIS hook in the policy term alone, while KL and entropy stay divided by the tokens before", ""),
    (KEPT | {"objective": {}}, "divided by the kept tokens, in KL and entropy too\n", ""),
    (KEPT | {"opsm": {"delta": 1e-4}}, "in KL and entropy too; what OPSM drops counts in the policy term alone\n", ""),
]  # fmt: skip


@pytest.mark.parametrize(("mapping", "said", "unsaid"), SAID)
def test_what_is_said_of_a_setting(mapping: dict, said: str, unsaid: str):
    told = describe.describe(from_mapping(mapping))
    assert said in told and (not unsaid or unsaid not in told)


def test_flags():
    rollout = from_mapping({"weight": {"normalize": {"scope": "rollout"}}})
    assert describe.flags(rollout).startswith("--use-tis ") and "normalize_rollout" in describe.flags(rollout)
    assert describe.flags(CorrectionConfig()).startswith("--get-mismatch-metrics ")
    for name in ("unbiased_kl", "weigh_kl"):
        config = from_mapping({"objective": {name: True}})
        assert describe.flags(config).split()[-1] == "--use-kl-loss"  # without it the host stops
    assert describe.flags(CorrectionConfig(opsm=OpsmConfig(0.1))).startswith("--loss-type custom_loss ")


# ------------------------------------------------------------------------------------------------ the worked example


PARTS = [slice(0, six_tokens.LENGTHS[0]), slice(six_tokens.LENGTHS[0], sum(six_tokens.LENGTHS))]


def samples(config: CorrectionConfig) -> list[oracle.Sample]:
    scored = six_tokens.TARGET if config.bypass else six_tokens.PROXIMAL
    return [
        oracle.Sample(
            _log(scored[part]),
            _log(six_tokens.BEHAVIOR[part]),
            six_tokens.LOSS_MASK[part],
            numerator=numerators(part) if config.segment_wise_on else None,
            routes=six_tokens.ROUTES[part],
        )
        for part in PARTS
    ]


def numerators(part: slice) -> list[float]:
    """Log pi_{v+1} by the defaults."""
    rows = zip(six_tokens.PROXIMAL, six_tokens.BEHAVIOR, six_tokens.NEXT, six_tokens.VERSIONS, strict=True)
    tokens = [
        segmentwise_oracle.Token(math.log(old), math.log(mu), math.log(stored), version, six_tokens.CURRENT)
        for old, mu, stored, version in rows
    ][part]
    found = [segmentwise_oracle.numerator(token, segmentwise_oracle.Spec()) for token in tokens]
    return [math.nan if value is None else value for value in found]


def _log(row: Sequence[float]) -> list[float]:
    return [math.log(p) for p in row]


@pytest.mark.parametrize("name", PRESETS)
def test_weights_and_masks_are_the_oracles(name: str):
    config = PRESETS[name]
    batch = samples(config)
    expected = oracle.correct(batch, writing.as_mapping(dataclasses.replace(config, segment_wise=None)))
    worked = six_tokens.work(config)
    rtol = normalized_rtol(max(sum(map(abs, sample.log_ratios)) for sample in batch))
    keep, stays = sum(expected.keep, []), sum(map(stays_of, PARTS, [config] * 2), [])
    assert worked.keep.tolist() == [k and s for k, s in zip(keep, stays, strict=True)]
    for t, weight in enumerate(sum(expected.weights, [])):
        if six_tokens.LOSS_MASK[t]:
            assert_close(worked.correction.weights[t].item(), weight, rtol, 0.0, f"weight of token {t}")


def stays_of(part: slice, config: CorrectionConfig) -> list[bool]:
    """What OPSM leaves of a sequence."""
    if config.opsm is None:
        return [True] * (part.stop - part.start)
    behavior = _log(six_tokens.BEHAVIOR[part])
    return loss_oracle.opsm_keep(response(part), behavior, config.opsm.delta, config.opsm.advantage == "sequence")


def response(
    part: slice, old: Sequence[float] = six_tokens.PROXIMAL, factor: list[float] | None = None
) -> loss_oracle.Response:
    ones = [1.0] * (part.stop - part.start)
    return loss_oracle.Response(
        _log(six_tokens.TARGET[part]), _log(old[part]), ones, six_tokens.ADVANTAGES[part], factor or ones,
        six_tokens.LOSS_MASK[part],
    )  # fmt: skip


@pytest.mark.parametrize("name", [name for name, config in PRESETS.items() if config.needs_loss_hook])
def test_losses_are_the_oracles(name: str):
    config = PRESETS[name]
    objective = config.objective or ObjectiveConfig()
    worked = six_tokens.work(config)
    assert worked.loss is not None
    widths = six_tokens.CLIP, six_tokens.CLIP
    spec = loss_oracle.Spec(objective.surrogate, objective.ratio, *widths, kl_tau=objective.kl_tau)
    old = six_tokens.BEHAVIOR if config.bypass else six_tokens.PROXIMAL
    if config.clips_against_next:  # stored of tokens of age 2 and more, which at younger ones is pi_old
        old = [x if math.isnan(kept) else kept for x, kept in zip(old, six_tokens.NEXT, strict=True)]
    for part in PARTS:
        one = response(part, old)
        for i, t in enumerate(range(part.start, part.stop)):
            factor = worked.correction.weights[t].item() if worked.keep[t] else 0.0
            expected = factor * loss_oracle.surrogate(one, one, i, spec) if six_tokens.LOSS_MASK[t] else 0.0
            assert_close(worked.loss[t].item(), expected, normalized_rtol(4.0), 0.0, f"loss of token {t}")


@pytest.mark.parametrize("name", ["mis", "opsm", "verl-bypass-pg-geo-rs-token-tis", "segment-wise"])
def test_show_prints_what_was_computed(name: str, capsys: pytest.CaptureFixture):
    assert main(["config", "show", name]) == 0
    told = capsys.readouterr().out
    worked = six_tokens.work(PRESETS[name])
    for t, label in enumerate(["A1", "A2", "A3", "A4", "B1", "B2"]):
        row = next(line.split() for line in told.splitlines() if line.split()[:1] == [label])
        if not six_tokens.LOSS_MASK[t]:
            assert row[1:] == ["tool", "masked"]
            continue
        aged = [str(six_tokens.CURRENT - six_tokens.VERSIONS[t]), f"{worked.correction.stage.weighed[t]:.4f}"]
        aged = aged if PRESETS[name].segment_wise_on else []
        assert row[4 : 7 + len(aged)] == [
            f"{worked.correction.log_ratio[t].exp():.4f}",
            *aged,
            f"{worked.correction.weights[t]:.4f}",
            "yes" if worked.keep[t] else "no",
        ]
        if worked.loss is not None:
            assert row[-1] == f"{worked.loss[t]:.4f}"


@pytest.mark.parametrize("objective", [{}, {"objective": {}}])
def test_the_weight_in_the_table_is_that_of_the_formula(objective: dict):
    """Whatever the loss is divided by: 0.4 within a cap of 2, and not 0.6 of two tokens in the place of three."""
    table = six_tokens.table(from_mapping({**KEPT, "weight": {"upper": 2}, **objective}))
    assert [line.split()[5] for line in table.splitlines() if line.split()[:1] in (["A1"], ["A4"])] == [
        "0.4000",
        "2.0000",
    ]
    assert ("L is told times n / tokens kept of its sequence" in table) == bool(objective)


def test_scope_rollout_is_the_mean_of_the_six():
    weigh = lambda scope: from_mapping({"weight": {"normalize": {"scope": scope}}})  # noqa: E731
    whole, part = (six_tokens.work(weigh(scope)).correction for scope in ("rollout", "micro_batch"))
    assert whole.mean_weight is not None and torch.equal(whole.weights, part.weights)
    assert f"divided by {whole.mean_weight:.4f}" in six_tokens.table(weigh("rollout"))


def test_the_example_shows_something():
    """Bounds on either side, segments that differ from their sequence, a sequence that stays, one that OPSM drops."""
    ratios = six_tokens.work(CorrectionConfig()).correction.log_ratio.exp()
    assert torch.allclose(ratios, torch.tensor([0.4, 1.25, 1.0, 8.0, 1.0005, 0.9998]))
    by_segment = six_tokens.work(CorrectionConfig(WeightConfig("segment", "none"))).correction.weights
    by_sequence = six_tokens.work(CorrectionConfig(WeightConfig("sequence", "none"))).correction.weights
    assert by_segment[0] != by_sequence[0] and by_segment[4] == by_sequence[4]
    assert six_tokens.work(PRESETS["opsm"]).keep.tolist() == [True, True, False, True, False, False]
    assert six_tokens.work(PRESETS["geometric-rs"]).keep.tolist() == [False] * 4 + [True] * 2
