"""RL steps on the real SGLang and vLLM, by the command line, as the ordinary suite takes them on other engines."""

import os
import re
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_local_loop import records
from test_local_true_on_policy import EXTREMES, PUSHED, corrected, sides, weights
from tolerances import FP32_LOG_PROB

from lab.host.train.log_probs import OFFSETS

pytestmark = pytest.mark.timeout(1800)  # two runs at most, each of 800 s at most

ROOT = Path(__file__).resolve().parents[2]
HOOKS = "test_local_true_on_policy"
KEEP = f"--rollout-data-postprocess-path {HOOKS}.keep_log_probs"
Run = Callable[[str], Path]
ON, STOCK = "--true-on-policy", "--rollout-weights fp32"
VLLM = f"{ON} --rollout-engine vllm --kv-channels 32"


def train(flags: str, output: Path) -> subprocess.CompletedProcess[str]:
    """Three rollouts, two optimizer steps each, on an engine of its own."""
    paths = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in ("support", "embedded", "engines"))]
    common = f"--smoke --quiet --rollout-engine sglang {PUSHED} --warmup-cache {output.parent / 'warm'}"
    return subprocess.run(
        [sys.executable, "-m", "lab.host", *f"{common} --output {output} {flags}".split()],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=800,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The folder of a run, made at its first use: without correction, under one, or on vLLM."""
    folder = tmp_path_factory.mktemp("runs")
    hook = f"{HOOKS}.note_extremes"

    @cache
    def made(name: str) -> Path:
        flags = {"plain": ON, "vllm": VLLM}.get(name) or f"{ON} {corrected(name, folder, hook)}"
        done = train(f"{flags} {KEEP} --save {folder / name}/save", folder / name)
        assert done.returncode == 0, done.stderr
        return folder / name

    return made


def kept(output: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [sides(torch.load(path)) for path in sorted(output.glob("rollout-*.pt"))]


@pytest.mark.parametrize("name", ["plain", "vllm"])
def test_every_log_prob_is_the_trainers_through_every_update(name: str, run: Run):
    for rollout, recomputed in kept(run(name)):
        assert len(rollout) > 50 and rollout.numpy().tobytes() == recomputed.numpy().tobytes()
    for row in records(run(name)):
        assert (row["train_rollout_logprob_abs_diff"], row["k3_kl"]) == (0, 0)
        assert row["ppo_kl"] != 0, "the second step of a rollout starts from other parameters"


def test_a_correction_changes_no_bit_of_the_parameters(run: Run):
    assert weights(run("MIS")) == weights(run("plain"))
    assert (run("MIS") / EXTREMES).read_text().split() == ["1.0"] * 4 * 6  # steps


def keep_kept_sets(args: Namespace, rollout_id: int, data: dict[str, Any]) -> None:
    """A --rollout-data-postprocess-path hook: leaves both sides' log-probs, and what each token was sampled from."""
    torch.save(data, Path(args.output) / f"rollout-{rollout_id}.pt")


def test_both_sides_of_a_stock_engine_renormalize_over_what_it_sampled_from(tmp_path: Path):
    """The stock engine is also the control of the runs above: it is near the trainer, and not the trainer."""
    output, cut = tmp_path / "run", "--rollout-top-p 0.6 --rollout-temperature 1.3"
    done = train(f"{STOCK} {cut} --rollout-data-postprocess-path {__name__}.keep_kept_sets", output)
    assert done.returncode == 0, done.stderr
    for data in map(torch.load, sorted(output.glob("rollout-*.pt"))):
        behavior, trainer = sides(data)
        torch.testing.assert_close(trainer, behavior, rtol=0, atol=FP32_LOG_PROB)
        assert (trainer != behavior).any()
        sizes = torch.cat([offsets.diff() for offsets in data[OFFSETS]])
        assert len(sizes) == len(behavior) > 50
        assert (behavior[sizes == 1] == 0).all() and (behavior[sizes > 1] < 0).all()
        assert sizes.double().mean() > 1, "somewhere more than one token is left"
    assert all(row["k3_kl"] < FP32_LOG_PROB**2 for row in records(output))


def kill_engine(args: Namespace, rollout_id: int, data: dict[str, Any]) -> None:
    """A --rollout-data-postprocess-path hook: the server, which leads its process group, dies after one rollout."""
    (server,) = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    os.killpg(int(server), signal.SIGKILL)


def test_an_engine_that_dies_ends_the_run_with_a_clear_error(tmp_path: Path):
    done = train(f"{ON} --rollout-data-postprocess-path {__name__}.kill_engine", tmp_path / "run")
    assert done.returncode == 2
    told = r"error: sglang: /update_weights_from_disk: .*(reset|refused)"
    assert re.match(told, done.stderr), done.stderr
