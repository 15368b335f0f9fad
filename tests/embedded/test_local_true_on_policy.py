"""The RL loop truly on policy: every log-prob that an engine sampled with is the trainer's, byte for byte.

Kernels are pinned in forked ranks, never in this process. The real SGLang runs the same in tests/engines.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_local_loop import MIS, configured, records, run

from lab.host.rollout.tasks import EOS
from mis_plugins.mis import Answer, compute_mis_weights_with_cp

# Failures push, so that parameters move although a policy that knows nothing earns nothing.
PUSHED = "--advantage-estimator reinforce --reward-shift -1"
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32"
SIDES = {"on": "--rollout-engine local --true-on-policy", "off": "--rollout-weights bf16"}
CONFIGS = {
    "TIS": "{metrics: full, weight: {level: token, bound: truncate, upper: 2.0}}",
    "MIS": "{metrics: full, weight: {level: token, bound: mask, lower: 0.99, upper: 1.01}}",
    "sequence": "{metrics: full, weight: {level: sequence, bound: truncate, upper: 2.0, "
    "normalize: {scope: micro_batch}}, reject: [{over: mean, lower: 0.999, upper: 1.001}]}",
}


def keep_log_probs(args: Namespace, rollout_id: int, data: dict[str, Any]) -> None:
    """A --rollout-data-postprocess-path hook: leaves what engine and trainer say of each token of this rank."""
    ranks = torch.distributed.get_rank()
    kept = {key: data[key] for key in ("tokens", "response_lengths", "rollout_log_probs", "log_probs")}
    torch.save(kept, Path(args.output) / f"rollout-{rollout_id}-{ranks}.pt")


EXTREMES = "extremes.txt"


def note_extremes(args: Namespace, **batch: Any) -> Answer:
    """The --custom-tis-function-path hook; leaves the extremes of ratios and weights, which a host would average."""
    loss, masks, metrics = compute_mis_weights_with_cp(args, **batch)
    assert all(torch.equal(mask, before) for mask, before in zip(masks, batch["loss_masks"], strict=True))
    names = ("mis_ratio_min_mb", "mis_ratio_max_mb", "mis_weight_min_mb", "mis_weight_max_mb")
    with (Path(args.output) / EXTREMES).open("a") as file:
        file.writelines(f"{metrics[name].unique().item()}\n" for name in names)
    return loss, masks, metrics


def trained(flags: str, output: Path) -> list[dict[str, Any]]:
    """What the hook kept of a run of three rollouts, two optimizer steps each."""
    hook = f"--rollout-data-postprocess-path {__name__}.keep_log_probs"
    assert run(f"{PUSHED} --save {output}/save {hook} {flags}", output) == 0
    return [torch.load(path) for path in sorted(output.glob("rollout-*.pt"))]


def sides(kept: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat(kept["rollout_log_probs"]), torch.cat(kept["log_probs"])


def weights(output: Path) -> dict[str, bytes]:
    saved = torch.load(output / "save" / "checkpoint.pt")["weights"]
    return {name: weight.numpy().tobytes() for name, weight in saved.items()}


@pytest.mark.parametrize(
    "flags",
    [
        "--rollout-engine local --context-parallel-size 2",
        "--rollout-engine hf --data-parallel-size 2 --rollout-temperature 0.7",
        "--rollout-engine hf --no-qk-layernorm",
        f"--rollout-engine local --context-parallel-size 2 {EXPERTS}",
        f"--rollout-engine hf {EXPERTS}",
    ],
)
def test_every_log_prob_is_the_trainers_where_stock_kernels_differ(flags: str, tmp_path: Path) -> None:
    """A response ends at its first end of sequence, or is as long as may be: the engine "hf" samples beyond it."""
    whole = []
    for kept in trained(f"{flags} --true-on-policy", tmp_path / "on"):
        rollout, recomputed = sides(kept)
        assert len(rollout) > 10 and rollout.dtype == recomputed.dtype == torch.float32
        assert rollout.numpy().tobytes() == recomputed.numpy().tobytes()
        for tokens, length in zip(kept["tokens"], kept["response_lengths"], strict=True):
            assert EOS not in tokens[-length:-1].tolist()
            whole.append(tokens[-1] != EOS)
    assert any(whole) and not all(whole)
    for row in records(tmp_path / "on"):
        assert (row["train_rollout_logprob_abs_diff"], row["k3_kl"]) == (0, 0)
        assert row["ppo_kl"] != 0, "the second step of a rollout starts from other parameters"
    stock = [sides(kept) for kept in trained(f"{flags} --rollout-weights fp32", tmp_path / "off")]
    assert all((rollout != recomputed).any() for rollout, recomputed in stock)


@pytest.fixture(scope="module")
def uncorrected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs without correction: truly on policy, and under an engine in bf16."""
    folder = tmp_path_factory.mktemp("runs")
    for side, flags in SIDES.items():
        trained(flags, folder / side)
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_a_correction_changes_the_parameters_off_policy_and_not_a_bit_on_policy(name: str, uncorrected: Path) -> None:
    plain = {side: weights(uncorrected / side) for side in SIDES}
    assert plain["off"] != plain["on"]
    hooks = {"on": f"{__name__}.note_extremes", "off": MIS}
    runs = {side: uncorrected / f"{side}-{name}" for side in SIDES}
    for side, flags in SIDES.items():
        trained(f"{flags} {corrected(name, uncorrected, hooks[side])}", runs[side])
    assert weights(runs["on"]) == plain["on"] and weights(runs["off"]) != plain["off"]
    assert (runs["on"] / EXTREMES).read_text().split() == ["1.0"] * 4 * 6  # steps


def corrected(name: str, folder: Path, hook: str) -> str:
    file = configured(folder / f"{name}.yaml", CONFIGS[name])
    return f"--use-tis --custom-tis-function-path {hook} {file}"


def test_an_engine_that_is_not_installed_is_named_by_what_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_VENV", str(tmp_path / "nowhere"))
    assert run("--rollout-engine sglang --true-on-policy", tmp_path / "run") == 2
    assert "no sglang there; run `bash" in capfd.readouterr().err
