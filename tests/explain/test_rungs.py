"""What a window keeps at the mismatch of a real model: the committed record, its page, and the warnings of a check."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.ladder import shipped
from lab.ladder.shipped import by_k3
from lab.pages import kept, parts
from mis_plugins.__main__ import main
from mis_plugins.config.loading import load, presets
from mis_plugins.config.model import CorrectionConfig, Over, RejectRule, WeightConfig
from mis_plugins.config.terms.statistics import STATISTICS
from mis_plugins.explain import rungs
from mis_plugins.report.verdict import in_words

ROOT = Path(__file__).parents[2]
MADE = json.loads((ROOT / "lab" / "results" / "mismatch.json").read_text())


@pytest.fixture
def four_responses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two steps and a variant: geometric mean ratios of four sequences of 100 tokens, and of four of 10 tokens."""

    def rung(name: str, k3: float, logs: list[float]) -> dict:
        by_length = {}
        for length, values in (("10", [3 * log for log in logs]), ("100", logs)):
            by_length[length] = {"count": 4, "values": {"ratio": dict.fromkeys(("mean", "min", "max"), values)}}
        sizes = {"k3": k3, "p99": 0.2, "tokens": 400, "prompts": 4}
        return {"name": name, "words": name, "step": name != "vllm-bf16", "by_length": by_length, **sizes}

    logs = [0.0, 0.001, -0.002, 0.02]
    content = [rung("vllm-bf16", 0.001, [5.0] * 4), rung("bf16", 0.002, logs)]
    content.append(rung("int5", 0.14, [10 * log - 0.015 for log in logs]))
    file = tmp_path / "rungs.json"
    file.write_text(json.dumps({"model": "made-up", "commits": "abc", "rungs": content}))
    monkeypatch.setattr(rungs, "FILE", file)
    rungs.record.cache_clear()
    yield
    rungs.record.cache_clear()


def mean(lower: float, upper: float) -> CorrectionConfig:
    return CorrectionConfig(None, (RejectRule("ratio", "mean", lower, upper),))


def product(lower: float, upper: float) -> CorrectionConfig:
    return CorrectionConfig(None, (RejectRule("ratio", "sum", math.exp(lower), math.exp(upper)),))


TOKEN = RejectRule("ratio", "token", 0.9999, 1.0001)
OF_LONG, END = ("reject[0] keeps, of sequences of 100 tokens, ", "; measured on 4 responses or more of made-up (docs/")
WINDOWS = {
    "less than half at one rung": (mean(0.99, 1.001), [f"{OF_LONG}25% at an int5 engine's mismatch (k3 0.1){END}"]),
    "less than half at both": (
        mean(0.9995, 1.0005), [f"{OF_LONG}25% at a bf16 engine's mismatch (k3 2e-3), 0% at an int5"]),
    "half at the finest": (mean(0.9995, 1.0011), [f"{OF_LONG}0% at an int5", "reject[0] keeps, at a bf16"]),
    # in bf16, sequences of 10 tokens have the mean log ratios 0, 0.003, -0.006 and 0.06
    "short sequences": (mean(0.997, 1.0015), [
        f"{OF_LONG}0% at an int5",
        f"reject[0] keeps, at a bf16 engine's mismatch (k3 2e-3), 25% of sequences of 10 tokens{END}"]),
    "half of the short": (mean(0.997, 1.004), [f"{OF_LONG}0% at an int5"]),
    "the first warning has said it": (mean(0.9999, 1.0001), [f"{OF_LONG}25% at a bf16"]),
    "a product, the mean times the length": (product(-0.4, 19.1), [f"{OF_LONG}25% at"]),
    "a wide product": (product(-31.1, 19.1), []),
    "a mask of sequences": (CorrectionConfig(WeightConfig("geometric", "mask", 0.999, 1.003)), [
        "weight.bound: mask keeps, of sequences of 100 tokens, 0% at an int5", "weight.bound: mask keeps, at a"]),
    "a truncating bound": (CorrectionConfig(WeightConfig("geometric", "truncate", upper=1.003)), []),
    "tokens": (CorrectionConfig(None, (TOKEN,)), []),
    "what another rule leaves": (
        CorrectionConfig(None, (TOKEN, RejectRule("ratio", "mean", 0.9999, 1.0001, aggregate="kept"))), []),
    "not measured": (CorrectionConfig(None, (RejectRule("k3", "mean", upper=1e-9),)), []),
}  # fmt: skip


@pytest.mark.usefixtures("four_responses")
@pytest.mark.parametrize("case", WINDOWS)
def test_a_window_that_keeps_less_than_half_is_told(case: str):
    config, said = WINDOWS[case]
    told = list(rungs.warnings(config))
    assert len(told) == len(said) and all(map(str.startswith, told, said)), told


@pytest.mark.usefixtures("four_responses")
def test_a_variant_of_bf16_is_no_step_of_the_ladder():
    assert [rung.name for rung in rungs.record().steps] == ["bf16", "int5"]
    assert "an engine in bf16" in in_words(0.001)


def test_check_warns_of_a_preset_whose_window_is_narrow(capsys: pytest.CaptureFixture[str]):
    assert main(["config", "check", "geometric-rs"]) == 0
    assert "warning: reject[0] keeps, of sequences" in capsys.readouterr().out
    assert main(["config", "check", "tis"]) == 0
    assert "keeps" not in capsys.readouterr().out


@pytest.mark.parametrize("over", ["sum", "mean", "min", "max"])
@pytest.mark.parametrize("statistic", STATISTICS)
def test_a_number_that_the_record_lacks_warns_of_nothing(statistic: str, over: Over):
    """The record has the smallest and the largest of ratios, and the largest k3."""
    rule = RejectRule(statistic, over, upper=0.5)
    assert all(text.startswith("reject[0] keeps, ") for text in rungs.warnings(CorrectionConfig(None, (rule,))))


def test_the_committed_record_is_the_benchmarks():
    """The wheel's part and the json under lab/results are of one run."""
    assert [rung.name for rung in rungs.record().rungs] == list(by_k3(MADE["rungs"]))
    for rung in rungs.record().rungs:
        said = MADE["rungs"][rung.name]
        numbers = said["mismatch"]["bf16"]
        assert (rung.tokens, rung.prompts) == (numbers["tokens"], numbers["prompts"])
        assert rung.k3 == pytest.approx(numbers["k3"][0], rel=1e-3) and said["commit"] in rungs.record().commits
        assert {n: one.count for n, one in rung.by_length.items()}.items() <= {
            int(n): count for n, count in said["responses"].items()
        }.items()
    assert rungs.FILE.stat().st_size < 16_000


def test_windows_and_presets_of_the_record_agree():
    """A preset of one window keeps the share of sequences that its window keeps, to one of twenty order statistics."""
    seen = 0
    for name, file in presets().items():
        config = load(file)
        windows = list(rungs.windows(config))
        dropped = any(rule.over == "token" for rule in config.reject) or config.drops_below("sequence")
        if len(windows) != 1 or len(config.reject) != 1 or dropped or config.opsm or config.reads_routes:
            continue
        for rung in rungs.record().steps:
            for length, responses in rung.by_length.items():
                measured = MADE["rungs"][rung.name]["presets"][str(length)]
                kept_by = measured.get(name) or measured[file.stem]  # a name that came later has its file's config
                seen += 1
                share = windows[0].keeps(responses)
                assert share == pytest.approx(kept_by["sequences"], abs=0.09), (name, rung.name, length)
    assert seen > 20


def test_the_committed_page_is_the_generated_one():
    assert parts.named("presets.md") and parts.current("presets.md", kept.part), "python -m lab.pages.kept"


def test_a_window_that_fits_keeps_nine_of_ten():
    """The percentile 5 of four values lies at 0.15 of the way from the first to the second."""
    logs = [0.0, 0.001, -0.002, 0.02]
    fits = shipped.fits({"ratio": {"mean": logs}})
    assert fits == pytest.approx((math.exp(0.15 * 0.002 - 0.002), math.exp(0.02 - 0.15 * 0.019)), rel=1e-5)
    assert kept.window(fits) == "[0.998, 1.018]"


CHOOSE = (ROOT / "docs" / "choose.md").read_text(encoding="utf-8")
ENGINES = {
    "bf16": "bf16",
    "bf16, sampled by vLLM": "vllm-bf16",
    "bf16, fp32 LM head on both sides": "fp32-head",
    "int8 per channel": "int8",
    "fp8 e4m3 per tensor": "fp8",
    "int6 per channel": "int6",
    "int5, groups of 64": "int5",
}


def rows_after(heading: str) -> list[list[str]]:
    """The cells of the table whose first line begins so."""
    table = CHOOSE[CHOOSE.index(heading) :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip(" *`") for cell in line.strip("|").split("|")] for line in table]


def rounds(value: float, printed: str) -> bool:
    """Whether a value rounds to what is printed, at its last digit."""
    return abs(value - float(printed)) <= 0.5 * 10.0 ** -len(printed.partition(".")[2]) * (1 + 1e-6)


def test_the_page_on_choosing_quotes_the_record_of_each_rung():
    rows = rows_after("| rollout weights |")
    assert {ENGINES[words] for words, *_ in rows} == set(MADE["rungs"])
    for words, tokens, *cells in rows:
        numbers = MADE["rungs"][ENGINES[words]]["mismatch"]["bf16"]
        assert int(tokens.replace(",", "")) == numbers["tokens"]
        quoted = [*cells[:3], *cells[3].split(", ")]
        for key, cell in zip(("k1", "k3", "p99", "log product", "log product sd"), quoted, strict=True):
            assert rounds(numbers[key][0], cell), (words, key)


def test_the_page_on_choosing_quotes_the_windows_and_the_rule():
    known = {rung.name: rung for rung in rungs.record().rungs}
    rows = rows_after("| engine | h at n = 128 |")
    assert len(rows) == len(rungs.record().steps)
    for words, *cells in rows:
        rung = known[words.split()[0]]
        numbers = MADE["rungs"][rung.name]["mismatch"]["bf16"]
        for length, h, window in ((128, cells[0], cells[2]), (1024, cells[3], cells[4])):
            rule = numbers["k1"][0] + 2 * math.sqrt(2 * numbers["k3"][0] / length)
            assert rounds(rule, h), (words, length)
            assert kept.window(MADE["rungs"][rung.name]["fits"][str(length)]) == window, (words, length)
        low, high = map(float, cells[1].strip("[]").split(", "))
        assert (1 - low, high - 1) == pytest.approx((float(cells[0]),) * 2)


def test_the_page_on_choosing_quotes_what_presets_keep():
    for preset, *cells in rows_after("| preset | bf16 engine |"):
        for engine, cell in zip(("bf16", "fp8", "int5"), cells, strict=True):
            kept, _, weight = cell.replace("*", "").partition("; ")
            held = [MADE["rungs"][engine]["presets"][length][preset] for length in ("16", "128", "1024")]
            assert kept == ", ".join(f"{one['sequences']:.0%}" for one in held), (preset, engine)
            assert weight == ("" if held[-1]["weight"] is None else f"{held[-1]['weight']:.2f}")
