"""The RL loop truly on policy: every log-prob that an engine sampled with is the trainer's, byte for byte.

Kernels are pinned in forked ranks, never in this process. The real SGLang runs the same in tests/engines.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_local_loop import MIS, records, run

from lab.host.rollout.tasks import Task
from mis_plugins.mis import Answer, compute_mis_weights_with_cp
from mis_plugins.shared.shell import REFUSED

# Failures push, so that parameters move although a policy that knows nothing earns nothing.
PUSHED = "--advantage-estimator reinforce --reward-shift -1"
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32"
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
    cache = f"--warmup-cache {output.parent / 'warm'} --save {output}/save"
    assert run(f"{PUSHED} {cache} {hook} {flags}", output) == 0
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
    for kept in trained(f"{flags} --true-on-policy", tmp_path / "on"):
        rollout, recomputed = sides(kept)
        assert len(rollout) > 10 and rollout.dtype == recomputed.dtype == torch.float32
        assert rollout.numpy().tobytes() == recomputed.numpy().tobytes()
    for row in records(tmp_path / "on"):
        assert (row["train_rollout_logprob_abs_diff"], row["k3_kl"]) == (0, 0)
        assert row["ppo_kl"] != 0, "the second step of a rollout starts from other parameters"
    stock = [sides(kept) for kept in trained(f"{flags} --rollout-weights fp32", tmp_path / "off")]
    assert all((rollout != recomputed).any() for rollout, recomputed in stock)


def test_no_correction_changes_a_bit_of_the_parameters(tmp_path: Path) -> None:
    plain = "--rollout-engine local --true-on-policy"
    trained(plain, tmp_path / "plain")
    trained("--rollout-weights bf16", tmp_path / "off")
    assert weights(tmp_path / "off") != weights(tmp_path / "plain")
    for name in CONFIGS:
        trained(f"{plain} {corrected(name, tmp_path, f'{__name__}.note_extremes')}", tmp_path / name)
        assert weights(tmp_path / name) == weights(tmp_path / "plain")
        assert (tmp_path / name / EXTREMES).read_text().split() == ["1.0"] * 4 * 6  # steps


def corrected(name: str, folder: Path, hook: str = MIS) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(f"mis: {CONFIGS[name]}\n")
    return f"--use-tis --custom-tis-function-path {hook} --custom-config-path {path}"


def test_off_policy_the_same_corrections_do_change_them(tmp_path: Path) -> None:
    trained("--rollout-weights bf16", tmp_path / "plain")
    for name in CONFIGS:
        trained(f"--rollout-weights bf16 {corrected(name, tmp_path)}", tmp_path / name)
        assert weights(tmp_path / name) != weights(tmp_path / "plain")


def test_a_response_ends_at_its_first_end_of_sequence(tmp_path: Path) -> None:
    eos, whole = Task(10).eos, []
    for kept in trained("--rollout-engine hf --true-on-policy", tmp_path / "run"):
        for tokens, length in zip(kept["tokens"], kept["response_lengths"], strict=True):
            assert eos not in tokens[-length:-1].tolist()
            whole.append(tokens[-1] != eos)
    assert any(whole) and not all(whole)


def test_an_engine_that_is_not_installed_is_named_by_what_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_VENV", str(tmp_path / "nowhere"))
    flags = f"--rollout-engine sglang --true-on-policy --warmup-cache {tmp_path}"
    assert run(flags, tmp_path / "run") == REFUSED
    assert "no sglang there; run `bash" in capfd.readouterr().err
