"""Toy experiments: their pages are those of their records, and recipes parse to what their names say."""

import json
import math
from functools import partial
from pathlib import Path

import pytest

from lab.async_weights import FULL, command_line
from lab.demo import RUNS
from lab.demo import command_line as command_line_of_demo
from lab.experiments.runner import Arm, run_arms
from lab.host import report
from lab.host.cli.arguments import parse_args
from lab.host.folders import SUMMARY
from lab.host.loop import run_rank
from lab.toys import DRAWN, RESULTS
from mis_plugins.__main__ import load
from mis_plugins.config.loading import presets
from mis_plugins.config.reading import from_args

ROOT = Path(__file__).resolve().parents[2]
TIS = "--custom-tis-function-path mis_plugins.mis.compute_mis_weights_with_cp"
LOSS = "--loss-type custom_loss --custom-loss-function-path mis_plugins.mis.policy_loss"
# A preset of the TIS hook meets that hook in tests/config and tests/lab/test_benchmarks.py; here is one of each kind.
OF_THE_TIS_HOOK = ("metrics-only", "tis", "mis", "icepop", "m2po", "geometric-rs", "seq-mask-tis", "sequence")
DENSE = {
    file.stem: file
    for file in sorted(set(presets().values()))
    if not load(file).reads_routes and (load(file).needs_loss_hook or file.stem in OF_THE_TIS_HOOK)
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_drawn_from_the_record(name: str, tmp_path: Path) -> None:
    content = json.loads((ROOT / RESULTS / f"{name}.json").read_text())
    DRAWN[name](content, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_demonstration_corrects_where_its_name_says(tmp_path: Path) -> None:
    runs = {name: parse_args(command_line_of_demo(name, 3, tmp_path / name)) for name in RUNS}
    for name, args in runs.items():
        assert args.num_rollout >= 200 and args.seed == 3
        assert args.rollout_weights == "int3" and args.advantage_estimator == "reinforce"
        assert args.use_tis == (name == "corrected")
    config = from_args(runs["corrected"])
    assert config.weight is not None and config.weight.normalize is not None and config.reject
    assert not config.reports_step, "the first run that a reader sees warns of no hook"


def test_the_demonstration_differs_in_the_correction_alone(tmp_path: Path) -> None:
    plain, corrected = (vars(parse_args(command_line_of_demo(name, 0, tmp_path))) for name in RUNS)
    differing = {key for key in corrected if corrected[key] != plain.get(key)}
    assert differing == {"use_tis", "custom_tis_function_path", "custom_config_path", "mis"}


def test_stale_weights_are_compared_without_a_bound(tmp_path: Path) -> None:
    args = parse_args(command_line(FULL.rates[0], 2, tmp_path / "run", tmp_path))
    config = from_args(args)
    assert args.loss_type == "custom_loss" and args.seed == 2
    assert config.segment_wise is not None and config.segment_wise.weight_cap is None


# ------------------------------------------------------------------------------------------------ presets, end to end


def hook(file: Path | None) -> list[str]:
    """The flags that load the hook which a preset needs."""
    if file is None:
        return []
    config = load(file)
    called = f"--use-tis {TIS}" if config.corrects else f"--get-mismatch-metrics {TIS}"
    head = [] if config.center is None else ["--rollout-top-logprobs-num", str(config.center.top_k)]
    return [*(LOSS if config.needs_loss_hook else called).split(), *head, "--custom-config-path", str(file)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    root = tmp_path_factory.mktemp("presets")

    def arm(name: str, file: Path | None, precision: str) -> Arm:
        shared = ["--warmup-cache", str(root / "warm"), "--output", str(root / name), "--quiet", "--smoke"]
        signs = "--advantage-estimator reinforce --reward-shift -1 --rollout-weights".split()
        args = parse_args([*signs, precision, *hook(file), *shared])
        return Arm(root / name, {}, partial(run_rank, args))

    made = {"uncorrected": (None, "int3"), "matched": (None, "fp32")}
    made |= {name: (file, "int3") for name, file in DENSE.items()}
    arms = {name: arm(name, *how) for name, how in made.items()}
    with pytest.MonkeyPatch.context() as patch:  # pictures would take three quarters of the time
        patch.setattr(report, "draw_histories", lambda histories, output: None)
        assert run_arms([*arms.values()], None) == 0
    return {name: json.loads((arm.folder / SUMMARY).read_text()) for name, arm in arms.items()}


NUMBERS = ("trainer_start", "trainer_final", "rollout_start", "rollout_final", "k3_kl")


def test_presets_run_end_to_end(runs: dict[str, dict[str, float]]) -> None:
    assert runs.keys() > {*OF_THE_TIS_HOOK, "opsm", "segment-wise", "centered"}
    for name, summary in runs.items():
        assert all(math.isfinite(summary[key]) for key in NUMBERS), name
        assert summary["kept_fraction"] is None or 0 <= summary["kept_fraction"] <= 1 + 1e-6, name
        assert (summary["k3_kl"] > 1e-4) == (name != "matched"), name


def test_a_preset_that_changes_nothing_gives_the_uncorrected_run(runs: dict[str, dict[str, float]]) -> None:
    """To the last digit."""
    assert all(runs["uncorrected"][key] == runs["metrics-only"][key] for key in NUMBERS)
    assert any(runs["tis"][key] != runs["uncorrected"][key] for key in NUMBERS)
