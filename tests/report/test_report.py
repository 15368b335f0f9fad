"""The report: numbers equal the training path's, causes are found where they are planted, and files are whole."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from report_dumps import write_slime
from test_readers import some_records, write_lines

from lab import records as archives
from lab.pages.metrics import WORDS
from lab.planted_runs import PLANTS, planted
from mis_plugins.__main__ import main
from mis_plugins.config import reading
from mis_plugins.config.loading import file_of, load
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.correction.pipeline import correct
from mis_plugins.errors import ConfigError
from mis_plugins.metrics.partials import finalize, partials
from mis_plugins.packing.ragged import Ragged
from mis_plugins.report import survey as surveys
from mis_plugins.report.causes import CAUSES, DETECTORS
from mis_plugins.report.changes import changes, joined_steps
from mis_plugins.report.proposal import Judged, Proposal, propose
from mis_plugins.report.readers.files import Curve, Problems, Source
from mis_plugins.report.record import Batch, Record, batches, from_mapping
from mis_plugins.report.survey import Report, Survey, report, walk
from mis_plugins.report.sweep import Candidate, candidates
from mis_plugins.report.verdict import ALARM, CALM, LIMITS, WATCH, of_curves, verdict

NONE = CorrectionConfig()
IN_HOST = Path(__file__).parents[2] / "lab/results/in_host.tar.xz"


def surveyed(records, own: CorrectionConfig = NONE, sweep: str = "none") -> Report:
    survey = Survey.of(own, [] if sweep == "none" else candidates(sweep, None))
    survey.add_all(records)
    found = report(survey)
    assert found is not None
    return found


@pytest.mark.parametrize("preset", ["tis", "mis", "geometric-rs"])
def test_numbers_are_those_of_the_training_path(preset: str) -> None:
    """A step's numbers equal `metrics: all` of the training path, whatever micro-batches the path was given."""
    config = replace(load(file_of(preset)), metrics="all")
    config = replace(config, weight=config.weight and replace(config.weight, normalize=None))
    records = some_records(lengths=(7, 20, 30, 5))
    step = None
    for one in records:
        ragged = Ragged(torch.tensor([0, one.size]), one.loss_mask)
        added = partials(correct(one.proximal_log_probs, one.behavior_log_probs, ragged, config))
        step = added if step is None else step.merge(added)
    assert step is not None
    wanted = finalize(step, config)
    wanted = {name: value for name, value in wanted.items() if not name.startswith("all_rejected")}
    found = surveyed(records, config).steps[3]
    assert next(iter(found)) == "kl_k3"
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-12, abs=1e-14)


def test_the_exact_metrics_are_those_that_a_host_logged() -> None:
    record = archives.records(IN_HOST)["miles-report-step"]
    rows = [row for batch in record["micro_batches"] for row in batch]
    records = []
    for place, row in enumerate(rows):
        behavior, proximal, mask = (torch.tensor(row[name]) for name in ("behavior", "proximal", "mask"))
        records.append(Record(1, str(place), behavior, proximal, mask))
    told = record["steps"][record.get("recorded", len(record["steps"]) - 1)]["metrics"]
    found = surveyed(records, reading.from_mapping(record["config"])).steps[1]
    wanted = {name: value for name in found if (value := told.get(f"train/mis_step/{name}")) is not None}
    assert len(wanted) >= 40
    for name, value in wanted.items():  # a spread is the root of a difference of squares
        bound = 1e-4 if name.endswith(("std", "correlation")) else 1e-6
        assert found[name] == pytest.approx(value, rel=bound, abs=bound), name


def test_many_steps_are_kept_sparse_and_alike() -> None:
    records = [record for step in range(20) for record in some_records(step)]
    again, once = surveyed(records + records).steps, surveyed(records).steps
    for step in range(20):
        assert again[step]["kl_k3"] == pytest.approx(once[step]["kl_k3"])
        assert again[step]["tokens"] == 2 * once[step]["tokens"]


def test_batches_never_mix_steps_and_hold_their_size() -> None:
    records = some_records(1) + some_records(2)
    assert [(batch.step, [one.size for one in batch.records]) for batch in batches(records, 10)] == [
        (1, [7, 1]), (1, [30]), (2, [7, 1]), (2, [30]),
    ]  # fmt: skip


def test_ages_count_from_the_newest_token_of_a_step_of_several_batches() -> None:
    """No batch of older tokens alone is taken for one of age 0, whether its step is read first or behind another."""
    versions = [4, 5, 4, 3, 9]
    records = [
        replace(made, versions=torch.full((made.size,), version), step=place // 4)
        for place, (made, version) in enumerate(zip(some_records(lengths=[9] * 5), versions, strict=True))
    ]
    ages = [batch.whole_numbers("ages") for batch in batches(records, 10)]
    assert [x.unique().tolist() for x in ages if x is not None] == [[1], [0], [1], [2], [0]]
    dated = batches([replace(made, trainer_version=11) for made in records], 10)
    assert [int(x.max()) for batch in dated if (x := batch.whole_numbers("ages")) is not None] == [7, 6, 7, 8, 2]


def test_a_placeholder_of_two_tokens_a_step_is_found_over_all_steps() -> None:
    """log(1e-8) in place of a log-prob is no round number, and too rare in each step to be told from chance."""
    records = [one.copied() for one in planted(None, seed=5)]  # the lab keeps its run for the next plant
    for last in {one.step: one for one in records}.values():
        last.behavior_log_probs[[-9, -3]] = math.log(1e-8)
    assert surveyed(records).findings[0].name == "placeholder"


@pytest.mark.parametrize(("plant", "cause"), PLANTS.items())
def test_a_planted_cause_is_found_alone(plant: str, cause: str) -> None:
    assert [found.name for found in surveyed(planted(plant, seed=5)).findings] == [cause]


@pytest.mark.parametrize("cause", ["route", "differing-weights"])
def test_a_cause_is_found_beside_an_engine_of_low_precision(cause: str) -> None:
    found = surveyed(planted(cause, seed=111, precision="int6")).findings
    assert found[0].name == cause and {one.name for one in found} <= {cause, "precision"}


def test_every_cause_has_a_plant() -> None:
    assert set(PLANTS.values()) == set(CAUSES)
    assert all(set(CAUSES[name].explains) <= set(CAUSES) for name in CAUSES)
    assert set(CAUSES) == {*DETECTORS, "precision"}


NOISE = torch.rand(40, generator=torch.Generator().manual_seed(1)).tolist()
LEVEL = [1e-3 * (1 + 0.2 * x) for x in NOISE]
UNSTABLE = [*(10 ** (-4 + 2 * x) for x in NOISE[:20]), *(0.1 * (1 + 2 * x) for x in NOISE[20:])]


@pytest.mark.parametrize(
    ("values", "sudden", "apart"),
    [
        (LEVEL, [], []),
        ([*LEVEL[:25], *(4 * x for x in LEVEL[25:])], [True], [True]),
        ([1e-3 * 1.1**step for step in range(40)], [False] * 7, [True] * 7),  # a drift: no step is to blame
        (UNSTABLE, [True], [True]),
        ([0.15, *UNSTABLE[1:]], [True], [False]),  # one step of the calm level that reaches the later ones
    ],
)
def test_a_level_that_changes_is_told_and_noise_is_not(
    values: list[float], sudden: list[bool], apart: list[bool]
) -> None:
    found = changes(range(40), values)
    assert [one.apart for one in found] == apart and [one.sudden for one in found] == sudden
    if len(found) == 1 and values[:25] == LEVEL[:25]:
        assert found[0].step == 25 and found[0].factor == pytest.approx(4, rel=0.1)


PLAIN = {
    "kept_fraction": 1.0, "ess": 0.5, "applied_mean": 1.0, "kept_by_usual_length": {}, "kept_by_advantage": {},
    "response_cosine": 0.4,
}  # fmt: skip


def among_two(steps: Mapping[int, dict[str, float]], **numbers: float) -> Proposal:
    """What is proposed at a kl_k3 of 0.1 where `sequence` has other numbers than its rivals."""
    outcomes = {"none": PLAIN, "geometric-mis-wide": PLAIN, "sequence": PLAIN | numbers}
    found = propose(candidates("geometric-mis-wide,sequence", None), outcomes, {"kl_k3": 0.1}, steps)
    assert found is not None
    return found


def test_noise_is_borne_and_a_learning_rate_is_told() -> None:
    """A candidate of the best direction stays in with a fifth of the sample, and says what its mean weight does."""
    found = among_two({}, ess=0.2, applied_mean=0.5, response_cosine=0.9)
    assert found.name == "sequence" and found.trusted
    assert "a mean weight of 0.5 acts as that factor on the learning rate" in found.why
    for against in ({"ess": 0.05}, {"applied_mean": 0.2}, {"kept_fraction": 0.4}):
        assert Judged(Candidate("tis", NONE), PLAIN | against).reasons


def test_no_config_is_trusted_where_the_opening_is_beyond_all_rows() -> None:
    """A run that starts anew meets the opening again: the first tenth of 11 steps are two, and NaN is no step."""
    steps = {step: {"kl_k3": x} for step, x in enumerate([0.2, math.nan, 0.4, *[0.01] * 9])}
    found = among_two(steps, response_cosine=0.9)
    assert not found.trusted and found.name == "sequence"
    assert found.why == (
        "repair the engine first: kl_k3 of the first 10% of the steps is 0.3, above 0.25, where README has no row",
        "with a closer engine try sequence",
    )
    assert among_two(steps | {0: {"kl_k3": 0.05}}, response_cosine=0.9).trusted


def test_a_mismatch_without_a_cause_says_that_it_cannot_tell() -> None:
    told = verdict(surveyed(planted("precision", seed=5)), None)
    assert told.parts["Why"].startswith("log-probs alone cannot tell.")


def test_an_infinite_log_prob_leaves_the_sum_of_its_sequence() -> None:
    mu, pi = torch.tensor([-0.5, -torch.inf, -0.75]), torch.tensor([-0.75, -0.5, -0.75])
    (worst,) = surveyed([from_mapping({"behavior_log_probs": mu, "proximal_log_probs": pi}, 0, "a")]).worst_sequences
    assert worst["sequence_log_ratio"] == -0.25


def test_worst_sequences_keep_no_file_in_memory() -> None:
    """A column of a dump lies in a mapped file: whoever holds the column holds the pages of the whole file."""
    survey, records = Survey.of(NONE, []), some_records()
    survey.add_all(records)
    held = {one.behavior_log_probs.data_ptr() for _, one in survey.worst.sequences.held}
    assert held and not held & {one.behavior_log_probs.data_ptr() for one in records}


def test_places_add_up_to_the_whole() -> None:
    found = surveyed(planted("route", seed=3))
    for rows in found.places.values():
        assert sum(float(row["tokens"]) for row in rows) == found.whole["tokens"]
        mean = sum(float(row["tokens"]) * float(row["kl_k3"]) for row in rows) / found.whole["tokens"]
        assert mean == pytest.approx(found.whole["kl_k3"])


def test_limits_are_those_of_the_page() -> None:
    """Each number of `LIMITS` stands in what docs/metrics.md calls bad."""
    for name, limits in LIMITS.items():
        numbers = {float(x) for x in re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", WORDS[name]["bad"])}
        assert {limit for limit in (limits.low, limits.high, limits.alarm) if math.isfinite(limit)} <= numbers, name


@pytest.mark.parametrize("preset", ["tis", "icepop", "mis", "sequence"])
def test_shares_quantiles_and_direction_are_counted_token_by_token(preset: str) -> None:
    """Shares, quantiles and cosine of a candidate equal those of plain loops over the tokens."""
    records = some_records(lengths=(7, 20, 30, 5, 90))
    signs = [
        torch.where(torch.arange(one.size) % 3 > 0, float(place % 2 * 2 - 1), 0.0) for place, one in enumerate(records)
    ]
    given = [None, *signs[1:]]
    records = [replace(one, advantages=advantages) for one, advantages in zip(records, given, strict=True)]
    records[2].behavior_log_probs[4] = torch.nan
    config = load(file_of(preset))
    found = surveyed(records, sweep=preset).outcomes[preset]
    batch = Batch(3, tuple(records))
    correction = correct(batch.proximal, batch.behavior, batch.ragged, config)
    rows = zip(
        correction.ragged.loss_mask.tolist(),
        (correction.keep & correction.stage.usable).tolist(),
        correction.weights.tolist(),
        [place for place, one in enumerate(records) for _ in range(one.size)],
        batch.advantages.tolist(),  # pyright: ignore[reportOptionalMemberAccess]
        batch.proximal.exp().tolist(),
        correction.stage.ratio.tolist(),
        strict=True,
    )
    live = [(kept, w, owner, a, p, r) for mask, kept, w, owner, a, p, r in rows if mask]
    spans = {0: "4-7", 1: "16-31", 2: "16-31", 3: "4-7", 4: "64-127"}
    for name, bucket in (
        ("kept_by_length", lambda row: spans[row[2]]),
        ("kept_by_advantage", lambda row: _sign(row[3])),
    ):
        wanted: dict[str, list[bool]] = {}
        for row in live:
            wanted.setdefault(bucket(row), []).append(row[0])
        wanted.pop("unknown", None)
        assert found[name] == pytest.approx({key: sum(kept) / len(kept) for key, kept in wanted.items()})
    weights = [w for kept, w, *_ in live if kept]
    assert found["kept_fraction"] == pytest.approx(len(weights) / len(live))
    assert found["applied_mean"] == pytest.approx(sum(weights) / len(weights))
    pairs = [(kept * w * a * (1 - p), r * a * (1 - p)) for kept, w, _, a, p, r in live if not math.isnan(a)]
    dot, left, right = (
        sum(x * y for x, y in both) for both in (pairs, [(x, x) for x, _ in pairs], [(y, y) for _, y in pairs])
    )
    assert found["coefficient_cosine"] == pytest.approx(dot / math.sqrt(left * right), rel=1e-5)


def _sign(advantage: float) -> str:
    if math.isnan(advantage):
        return "unknown"
    return "zero" if advantage == 0 else "positive" if advantage > 0 else "negative"


def test_a_config_that_reads_routes_or_micro_batches_is_left_out_of_all_and_refused_by_name() -> None:
    for of_all in ("all", "own"):
        configs = [one.config for one in candidates(of_all, None)]
        assert not [one for one in configs if one.reads_routes or one.m2_threshold is not None]
    routes = "route: statistic: route reads .* which no dump holds"
    batches = "m2po: m2_threshold compares the tokens of a micro-batch, and no dump"
    for asked, said in (("route", routes), ("tis,route", routes), ("tis,m2po", batches)):
        with pytest.raises(ConfigError, match=said):
            candidates(asked, None)


def test_products_of_whole_responses_rank_where_they_bear_it() -> None:
    """Forty short responses tell products apart: a weight of the whole response is the direction itself."""
    generator = torch.Generator().manual_seed(1)
    records = []
    for place in range(40):
        behavior = -torch.rand(6, generator=generator)
        proximal = behavior + 0.3 * torch.randn(6, generator=generator)
        mask = torch.ones(6, dtype=torch.bool)
        records.append(Record(0, str(place), behavior, proximal, mask, advantages=-torch.ones(6)))
    found = surveyed(records, sweep="sequence,tis").outcomes
    assert found["sequence"]["response_cosine"] == pytest.approx(1, abs=0.01)  # its weight is bounded
    assert found["none"]["response_cosine"] < found["tis"]["response_cosine"] < 0.95
    apart = surveyed([replace(one, step=place) for place, one in enumerate(records)], sweep="tis").outcomes["tis"]
    assert apart["response_cosine"] == pytest.approx(found["tis"]["response_cosine"])  # a batch has no part in it
    assert apart["response_cosine_without"] == pytest.approx(found["tis"]["response_cosine_without"])
    assert "response_cosine" not in surveyed(records[:31], sweep="tis").outcomes["tis"]
    far = [replace(one, proximal_log_probs=one.behavior_log_probs * 9) for one in records]
    assert "response_cosine" not in surveyed(far, sweep="tis").outcomes["tis"]


def test_advantages_of_one_sign_lean_to_none() -> None:
    records = [replace(one, advantages=-torch.ones(one.size)) for one in some_records(lengths=(40, 40))]
    numbers = surveyed(records, sweep="tis").outcomes["tis"]
    assert not [reason for reason in Judged(Candidate("tis", NONE), numbers).reasons if "advantages" in reason]


@pytest.fixture
def dumped(tmp_path: Path) -> Path:
    for step in range(3):
        write_slime(tmp_path / "run", some_records(step, (40, 30, 20)))
    return tmp_path


def test_the_page_shows_cause_change_text_and_a_log_beside(tmp_path: Path) -> None:
    records = planted("jump", seed=5)
    far = {"step": records[0].step, "behavior_log_probs": [-1.0], "proximal_log_probs": [-9.0], "prompt": "7 < 9?"}
    write_lines(tmp_path / "run.jsonl", records, json.dumps(far))
    rows = [json.dumps({"rollout": step, "grad_norm": 1.0 + step, "loss": 2}) for step in range(3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*rows, "no json"]) + "\n")
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    shown = (
        CAUSES["jump"].title,
        "<li>kl_k3 rose ",
        "7 &lt; 9?",
        "<figcaption>grad_norm<",
        "Not read</h3>",
        "Proposed: ",
    )
    assert [text for text in shown if text not in page] == []
    assert "<figcaption>loss<" not in page and "{{" not in page and "{%" not in page


def test_whole_files_show_what_a_config_keeps_where_it_is_known(
    dumped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A share without tokens of one sign is a dash."""
    for name, given in (("none", []), ("mis", ["--config", "mis"])):
        assert main(["report", str(dumped / "run"), "--output", str(dumped / name), *given]) == 0
        told = json.loads((dumped / name / "report.json").read_text())
        assert list(told["whole"])[0] == "kl_k3" and len(told["steps"]) == 3 and "kl_k3" in capsys.readouterr().out
    without, own = ((dumped / name / "report.html").read_text() for name in ("none", "mis"))
    assert own.startswith("<!doctype html>") and own.count("<svg") >= 3 and "http" not in _without_names(own)
    for shown in ("<strong>", "<figcaption>kept_fraction<", "kept_<wbr>fraction</code>"):
        assert shown in own and (shown == "<strong>" or shown not in without)
    assert "100% / –" in without and "nan" not in without.partition("<main>")[2]


def test_one_is_singular(tmp_path: Path) -> None:
    write_lines(tmp_path / "run.jsonl", some_records(0, (1,)))
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "out")]) in (0, 2)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "1 sequence, 1 step<" in page and "1 sequences" not in page and "1 tokens," not in page


def _without_names(page: str) -> str:
    """The page less the names of XML namespaces, which no browser loads."""
    return re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)


def test_a_grid_names_what_took_its_place(dumped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["report", str(dumped / "run"), "--output", str(dumped / "out"), "--sweep", "weight.upper=1.5,2"]
    assert main(run) == 2
    assert "write each config to" in capsys.readouterr().err and not (dumped / "out").exists()


def test_watch_ends_with_its_own_code_at_an_alarm(dumped: Path) -> None:
    assert main(["report", str(dumped / "run"), "--output", str(dumped / "out"), "--watch"]) == 3


def test_suggest_prints_a_config_that_can_be_read(dumped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "suggest", str(dumped / "run")]) == 0
    file = dumped / "suggested.yaml"
    file.write_text(capsys.readouterr().out)
    assert main(["config", "check", str(file)]) == 0


def test_suggest_tells_what_it_did_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = ['{"behavior_log_probs": [0.0], "proximal_log_probs": [0.0, 1.0]}'] * 12
    write_lines(tmp_path / "run.jsonl", some_records(), *broken)
    assert main(["config", "suggest", str(tmp_path / "run.jsonl")]) == 0
    printed = capsys.readouterr()
    assert "# from 3 responses of 1 steps; not read at 12 places\n" in printed.out
    assert printed.err.count("not read: ") == 11 and "not read: and 2 more" in printed.err


def test_suggest_that_is_interrupted_says_so(
    dumped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add = Survey.add

    def once(survey: Survey, batch: Batch) -> None:
        if survey.sequences:
            raise KeyboardInterrupt
        add(survey, batch)

    monkeypatch.setattr(Survey, "add", once)
    assert main(["config", "suggest", str(dumped / "run")]) == 130
    assert "interrupted, so the rest was not read" in capsys.readouterr().out


def test_suggest_without_tokens_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kl_k3 of no token is 0, and must not read as a mismatch too small to correct."""
    masked = [replace(one, loss_mask=torch.zeros_like(one.loss_mask)) for one in some_records()]
    write_lines(tmp_path / "run.jsonl", masked)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"rollout": 0, "k3_kl": 0.5}) + "\n")
    for name in ("run.jsonl", "metrics.jsonl"):
        assert main(["config", "suggest", str(tmp_path / name)]) == 2
        assert "no token with two finite log-probs was read in the loss mask" in capsys.readouterr().err


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_broken_advantage_decides_nothing(broken: float) -> None:
    """What one response's advantages would be is unknown: rankings are those of the others, and its sign is none."""
    records = [replace(one, advantages=one.advantages) for one in some_records(lengths=(70, 80, 90))]
    known = [replace(one, advantages=torch.zeros(one.size)) if not place else one for place, one in enumerate(records)]
    records[0] = replace(records[0], advantages=torch.full((70,), broken))
    found, wanted = (surveyed(rows, sweep="tis,sequence") for rows in (records, known))
    for name, numbers in wanted.outcomes.items():
        assert found.outcomes[name]["coefficient_cosine"] == numbers["coefficient_cosine"]
    assert [row["bucket"] for row in found.places["advantage"]] == ["positive"]
    others = {one.name for one in wanted.findings}
    assert [one.name for one in found.findings if one.name not in others] == ["non-finite-advantage"]


def test_ctrl_c_leaves_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(problems: Problems):
        yield from some_records(0)
        yield from some_records(1)
        raise KeyboardInterrupt

    survey = Survey.of(NONE, [])
    source = Source("made up", (), interrupted)
    assert not walk(survey, [source], Problems(), lambda done, total: None)
    found = surveys.report(survey)
    assert found is not None and list(found.steps) == [0]


NOTHING = "Nothing was read that measures the mismatch: "


def of_k3(values: Sequence[float]) -> list[dict[str, float]]:
    return [{"kl_k3": x} for x in values]


CURVES = [  # of each file its rows, hosts log rollouts in rows of their own; level, headline, and what a line says
    ([[{"kl_k3": 0.5}, {"response_len": 200.0}]], ALARM, "Last seen beyond its limit: kl_k3 is 0.5, above 0.01"),
    ([[{"loss": 0.1}], [{"kl_k3": 0.5}]], ALARM, "Last seen beyond its limit: kl_k3 is 0.5"),
    ([[{"kl_k3": 2e-2}]], WATCH, "Last seen"),
    ([[{"kl_k3": 0.5}, {"kl_k3": 1e-3}]], WATCH,
     "Beyond its limit before: kl_k3 is 0.5, above 0.01, at step 0 (1 of 2 steps)"),
    ([[{"ess_ratio": 0.1}, *[{"kl_k3": 1e-3}] * 9]] * 2, WATCH,
     "Last seen beyond its limit: ess_ratio is 0.1, below 0.5, at step 0 (a run)."),
    ([[{"kl_k3": 1e-3}, {"kl_k3": math.nan}]], WATCH, "Last seen beyond its limit: kl_k3 is NaN, at step 1"),
    ([[{"kl_k3": 1e-4}, {"kl_k3": 5e-3}]], WATCH, "Since when: kl_k3 rose 50 times"),
    ([[{"kl_k3": -1e-8, "ess_ratio": 1 + 1e-7}]], CALM, "The curves end"),  # rounding
    ([[{"loss": 0.1}]], None, f"{NOTHING}no curve holds a number that measures it"),
    ([[{"ess": 1.0, "kept_fraction": 1.0}] * 9], None, f"{NOTHING}at every step ess and kept_fraction = 1, as without"),
    ([[{"ratio_mean": 1.0}] * 9], CALM, "The curves end within their limits: ratio_mean.", "kl_k3 was read at no step"),
    ([[{"kl_k3": 0.0}] * 9], CALM, "The curves end", "kl_k3 is 0 at step 8. Both policies agree to rounding"),
    ([[*[{"kl_k3": 1e-3}] * 9, *[{"grad_norm": 1.0}] * 9]], WATCH,
     "Not logged to the end: kl_k3 was last known at step 8, and the steps go on to 17."),
    ([[{"kl_k3": 1e-3}] * 30, [{"kl_k3": 1e-4 * 1.15**step} for step in range(30)]], WATCH,
     "Since when: kl_k3 rose 2.85 times by step 7"),
    ([[{"loss": 1.0, "k3kl": 0.1}]], None,
     f"{NOTHING}no curve holds a number that measures it: no kl_k3; found 'loss', 'k3kl'"),
    ([[{"kl_k3": math.nan}]], None, f"{NOTHING}kl_k3 is NaN"),
    ([[{"kl_k3": -5.0}]], None, f"{NOTHING}kl_k3 is -5, which cannot be"),
    ([[{"ess_ratio": 1.5}]], None, f"{NOTHING}ess_ratio is 1.5, which cannot be"),
    ([[{"kl_k3": math.inf}]], None, f"{NOTHING}kl_k3 is inf, which cannot be"),
    ([[{"kept_fraction": -0.1}]], None, f"{NOTHING}kept_fraction is -0.1, which cannot be"),
    ([of_k3([*[2e-3] * 20, 0.2, *[2e-3] * 19])], WATCH,
     "Beyond its limit before: kl_k3 is 0.2, above 0.01, at step 20 (1 of 40 steps)"),
    ([of_k3([*[2e-3] * 500, *[0.2] * 4, *[2e-3] * 496])], WATCH, "Beyond its limit before: kl_k3 is 0.2, above 0.01",
     "rose 100 times at step 500, from 0.002 to 0.2"),
    ([of_k3([*[0.3] * 8, 1e-4])], WATCH, "Beyond its limit before: kl_k3 is 0.3", "fell 3e+03 times at step 8"),
    ([of_k3([*[0.3] * 8, 0.0])], WATCH, "Not logged to the end: kl_k3 was last known at step 7",
     "fell to 0 at step 8, from 0.3", "Beyond its limit before: kl_k3 is 0.3"),
    ([of_k3([*[2e-3] * 30, *[math.nan] * 10])], WATCH, "Last seen beyond its limit: kl_k3 is NaN"),
]  # fmt: skip


def test_steps_of_few_tokens_count_with_those_behind_and_the_last_ones_with_those_before() -> None:
    values, tokens = {0: 1.0, 1: 2.0, 2: 4.0, 3: 8.0}, {0: 100, 1: 40, 2: 60, 3: 10}
    assert joined_steps(values, tokens, 100) == {0: 1.0, 1: (2.0 * 40 + 4.0 * 60 + 8.0 * 10) / 110}
    assert joined_steps({0: 3.0}, {0: 1}, 100) == {0: 3.0} and joined_steps({}, {}, 100) == {}


@pytest.mark.parametrize("case", CURVES)
def test_curves_are_judged_by_the_last_value_of_each_number_and_at_every_step(case: tuple) -> None:
    files, level, headline, *said = case
    found = of_curves([Curve("a run", dict(enumerate(rows))) for rows in files])
    assert (found.measured, found.level) == (level is not None, level or ALARM)
    told = f"{found.headline} {' '.join(found.lines)}"
    assert told.startswith(headline) and all(one in told for one in said) and "nan times" not in told
