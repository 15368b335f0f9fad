"""The embedded host from its command line: errors, hooks, resume, interruption, and what a run leaves behind."""

import itertools
import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ran

from lab.host import report
from lab.host.cli.arguments import parse_args
from lab.host.loop import run_rank
from lab.host.rollout.sampler import ESTIMATORS, derive_seed, draw_problems, training_order
from lab.host.rollout.tasks import EOS, EQUALS, Problem, Task
from lab.host.train import loss
from lab.host.train.batch import pack
from lab.host.train.loss import MicroBatch, clipped_surrogate, policy_loss
from lab.host.train.parallel import GroupInfo, ParallelState, launch
from mis_plugins.config.loading import preset_path
from mis_plugins.errors import ConfigError

MIS = "mis_plugins.mis.compute_mis_weights_with_cp"
TIS_HOOK = f"--use-tis --custom-tis-function-path {MIS}"
LOSS_HOOK = "--loss-type custom_loss --custom-loss-function-path mis_plugins.mis.policy_loss"
NOBODY = GroupInfo(0, 1, None)
ALONE = ParallelState(NOBODY, NOBODY, NOBODY, NOBODY, NOBODY)


def small(flags: str, output: Path, **settings: int) -> Namespace:
    """The arguments of a small run with these flags; settings are those that `--smoke` would overrule.

    Runs whose outputs lie side by side share their warm start.
    """
    args = parse_args(f"--smoke --quiet --output {output} {flags}".split())
    vars(args).update(settings)
    return args


def run(flags: str, output: Path, **settings: int) -> int:
    return launched(small(flags, output, **settings))


def launched(args: Namespace, picture: bool = False) -> int:
    """The exit code of a run. Its picture would take three quarters of the time of a small run."""
    with pytest.MonkeyPatch.context() as patch:
        if not picture:
            patch.setattr(report, "draw_histories", lambda histories, output: None)
        return launch(args.world_size, lambda: run_rank(args))


def configured(path: Path, mis: str) -> str:
    """Write a config of `mis:`; return the flag by which a run reads it."""
    path.write_text(f"mis: {mis}\n")
    return f"--custom-config-path {path}"


def records(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def numbers(output: Path) -> list[dict[str, Any]]:
    """The records without what a clock measured."""
    return [{key: value for key, value in record.items() if "seconds" not in key} for record in records(output)]


# --- errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--rollout-batch-size 3 --global-batch-size 9", r"--rollout-batch-size x .* = 24 .*--global-batch-size 9"),
        ("--global-batch-size 8 --data-parallel-size 3", r"--global-batch-size = 8 .*--data-parallel-size 3"),
        ("--global-batch-size 8 --micro-batch-size 3", r"--global-batch-size / .* = 8 .*--micro-batch-size 3"),
        ("--tensor-model-parallel-size 4", "--num-query-groups = 2 .*--tensor-model-parallel-size 4"),
        ("--num-attention-heads 6 --num-query-groups 4", "--num-attention-heads = 6 .*--num-query-groups 4"),
        ("--num-rollout 0", "--num-rollout: got 0; give at least 1"),
        ("--rollout-temperature 0", "--rollout-temperature: got 0.0"),
        ("--rollout-temperature inf", "--rollout-temperature: got inf; give a finite number"),
        ("--rollout-temperature nan", "--rollout-temperature: got nan; give a finite number"),
        ("--save-interval 0", "--save-interval: got 0; give at least 1"),
        ("--grad-cosine-every -1", "--grad-cosine-every: got -1; give a whole number, at least 0"),
        ("--use-tis", "--use-tis needs --custom-tis-function-path"),
        ("--get-mismatch-metrics", "--get-mismatch-metrics needs --custom-tis-function-path"),
        (f"--use-rollout-logprobs {TIS_HOOK}", "--use-tis with --use-rollout-logprobs"),
        (f"--custom-tis-function-path {MIS}", "--custom-tis-function-path has no effect without --use-tis"),
        (f"--custom-config-path {preset_path('metrics-only')}",
         "--custom-config-path: `mis:` in the file has no effect without a hook"),
        (f"--custom-config-path {preset_path('mis')}", "--use-tis needs --custom-tis-function-path"),
        ("--lr -1", "--lr: got -1.0; give a finite number, at least 0"),
        ("--lr nan", "--lr: got nan"),
        ("--eps-clip -0.2", "--eps-clip: got -0.2"),
        ("--clip-grad inf", "--clip-grad: got inf"),
        ("--use-tis --custom-tis-function-path mis_plugins.mis.nothing", "--custom-tis-function-path: cannot load"),
        ("--rollout-data-postprocess-path mis_plugins.nothing.fn", "--rollout-data-postprocess-path: cannot load"),
        ("--n-samples-per-prompt 1", "--advantage-estimator grpo with --n-samples-per-prompt 1"),
        ("--reward-shift -1", "--reward-shift -1 with --advantage-estimator grpo: a group"),
        ("--loss-type custom_loss", "--loss-type custom_loss and --custom-loss-function-path need each other"),
        ("--custom-loss-function-path mis_plugins.mis.policy_loss", "need each other; give both or none"),
        (f"--custom-pg-loss-reducer-function-path a.b {LOSS_HOOK}",
         "--custom-pg-loss-reducer-function-path has no effect with --loss-type"),
        ("--rollout-sample-filter-path mis_plugins.nothing", "--rollout-sample-filter-path: cannot load"),
        ("--custom-megatron-before-train-step-hook-path x", "--custom-megatron-before-train-step-hook-path: cannot"),
        ("--rollout-engine sglang --rollout-weights int3", "--rollout-engine sglang with --rollout-weights int3: only"),
        ("--rollout-engine vllm --rollout-weights fp32", "--rollout-engine vllm with --kv-channels 16: .*of 32, "),
        ("--true-on-policy --rollout-weights bf16", "--true-on-policy with --rollout-weights bf16: the trainer comp"),
        ("--true-on-policy --tensor-model-parallel-size 2", "--true-on-policy with --tensor-model-parallel-size 2: t"),
        ("--moe-router-topk 2", "--moe-router-topk has no effect without --num-experts"),
        ("--use-rollout-routing-replay", "--use-rollout-routing-replay has no effect without --num-experts"),
        ("--num-experts 4 --moe-router-topk 5", "--moe-router-topk 5 with --num-experts 4: a token cannot"),
        ("--num-experts 4 --tensor-model-parallel-size 2", "--num-experts 4 with --tensor-model-parallel-size 2"),
        ("--num-experts 4 --no-qk-layernorm", "--num-experts 4 with --no-qk-layernorm"),
        ("--num-experts 4 --use-rollout-routing-replay --rollout-engine hf",
         "--use-rollout-routing-replay with --rollout-engine hf"),
        ("--num-experts 4 --use-rollout-routing-replay --async", "--use-rollout-routing-replay with --async"),
        ("--rollout-top-p 0.9", "--rollout-top-p 0.9 with --rollout-engine local: .*; choose sglang"),
        ("--rollout-top-k 5 --rollout-engine hf",
         "--rollout-top-k 5 with --rollout-engine hf: the engine returns no list"),
        ("--rollout-top-p 0.9 --rollout-engine vllm --kv-channels 32",
         "with --rollout-engine vllm: the engine returns no list"),
        ("--rollout-top-p 0", "--rollout-top-p: got 0.0; give a number above 0, at most 1"),
        ("--rollout-top-p 1.5", "--rollout-top-p: got 1.5"),
        ("--rollout-top-k 1 --rollout-engine sglang", "--rollout-top-k: got 1; give -1 for all tokens, or at least 2"),
        ("--rollout-top-k 5 --rollout-engine sglang --async", "with --async: the tokens that are left are"),
        ("--rollout-top-k 5 --rollout-engine sglang --true-on-policy", "5 with --true-on-policy: engine and trainer"),
        ("--rollout-top-p 0.5 --rollout-engine sglang --grad-cosine-every 2",
         "0.5 with --grad-cosine-every 2: the grad"),
        ("--rollout-top-logprobs-num 4 --rollout-engine sglang",
         "4 with --rollout-engine sglang: no other engine hands on what it names"),
        ("--rollout-top-logprobs-num -1", "--rollout-top-logprobs-num: got -1; give a whole number"),
        ("--async --max-head-offpolicyness -1", "--max-head-offpolicyness: got -1; give a whole number, at least 0"),
        ("--max-head-offpolicyness 2", "--max-head-offpolicyness has no effect without --async"),
        ("--pause-generation-mode abort", "--pause-generation-mode has no effect without --async"),
        ("--async --recompute-token-budget 0", "--recompute-token-budget: got 0; give at least 1"),
        ("--async --rollout-step-seconds -1", "--rollout-step-seconds: got -1.0; give a finite number, at least 0"),
        ("--async --rollout-steps-per-update -1", "--rollout-steps-per-update: got -1; give a finite number"),
        ("--async --grad-cosine-every 2", "--grad-cosine-every 2 with --async"),
        ("--async --true-on-policy", "--async with --true-on-policy"),
        ("--async --max-concurrent-rollouts 0", "--max-concurrent-rollouts: got 0; give at least 1"),
        ("--max-concurrent-rollouts 4", "--max-concurrent-rollouts has no effect without --async"),
        ("--post-pause-hook-path os.getpid", "--post-pause-hook-path has no effect without --async"),
        ("--async --pre-pause-hook-path os.nothing", "--pre-pause-hook-path: cannot load 'os.nothing'"),
        ("--async --pre-resume-hook-path shutil.copy", "--pre-resume-hook-path: shutil.copy needs arguments"),
        ("--custom-config-path /nowhere.yaml", "--custom-config-path /nowhere.yaml: .*No such file"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused_by_their_flags(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_args(flags.split())


def test_the_loss_hook_takes_a_preset_of_the_tis_hook() -> None:
    """The file says `use_tis: true`, which asks for no TIS hook where the loss hook corrects."""
    assert parse_args([*LOSS_HOOK.split(), "--custom-config-path", str(preset_path("tis"))]).use_tis


@pytest.mark.parametrize(
    ("flags", "message"),
    [("--use-tis", "--use-tis needs"), ("--output {0}/file/below", "--output {0}/file/below: Not")],
)
def test_a_users_mistake_is_told_in_one_line_and_exits_2(flags: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = ran("-m", "lab.host", "--output", tmp_path, *flags.format(tmp_path).split())
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message.format(tmp_path)}") and done.stderr.count("\n") == 1


def test_an_error_inside_the_ranks_is_told_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = f"--context-parallel-size 2 --load {tmp_path / 'nothing'}"
    assert run(flags, tmp_path / "run") == 2
    assert capfd.readouterr().err.count("no checkpoint.pt there") == 1


# --- config and hooks -----------------------------------------------------------------------------------------


def test_every_key_of_the_yaml_lands_on_args_as_in_the_hosts(tmp_path: Path) -> None:
    path = tmp_path / "custom.yaml"
    path.write_text("lr: 0.5\ntis_level: token\nmis: {metrics: core}\n")
    flags = ["--get-mismatch-metrics", "--custom-tis-function-path", MIS, "--custom-config-path", str(path)]
    args = parse_args(flags)
    assert (args.lr, args.tis_level, args.mis) == (0.5, "token", {"metrics": "core"})
    assert args.qkv_format == "thd"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: 0.5\nlr: 0.25", "^--custom-config-path {}: lr: in line 1 and again in line 2"),
        ("[1, 2]", r"^--custom-config-path {}: got \[1, 2\]; expected a mapping"),
        ("weight: {upper: 2}", "^--custom-config-path {}: weight: stands beside `mis:`"),
        ("num_rollout: ten", "--num-rollout: got 'ten'; give a whole number"),
        ("rollout_step_seconds: soon", "--rollout-step-seconds: got 'soon'; give a finite number"),
        ("eps_clip: null", "--eps-clip: got None; give a finite number"),
        ("rollout_temperature: 1e-1", "--rollout-temperature: got '1e-1'; give a finite number"),
        ("weight_decay: 1e-4", "--weight-decay: got '1e-4'; give a finite number"),
        ("lr: true", "--lr: got True; give a finite number"),
        ("warmup_steps: soon", "--warmup-steps: got 'soon'; give a whole number"),
        ("true_on_policy: maybe", "--true-on-policy: got 'maybe'; give true or false"),
        ("advantage_estimator: gae", "--advantage-estimator: got 'gae'; choose one of grpo, reinforce"),
        ("rollout_weights: int2", "--rollout-weights: got 'int2'; choose one of fp32, bf16, int8, int4, int3"),
        ("max_head_offpolicyness: far", "--max-head-offpolicyness: got 'far'; give a whole number"),
        ("max_head_offpolicyness: 1.5", "--max-head-offpolicyness: got 1.5; give a whole number"),
        ("max_concurrent_rollouts: true", "--max-concurrent-rollouts: got True; give a whole number"),
        (f"num_rollout: 1{'0' * 400}", "--num-rollout: got an integer of about 401 digits; give at least 1"),
        (f"lr: 1{'0' * 400}", "--lr: got an integer of about 401 digits; give a finite number"),
        ("day: 2024-13-45", "line 1: '2024-13-45' reads as YAML's timestamp"),
    ],
)
def test_a_yaml_that_no_run_can_have_is_refused(text: str, message: str, tmp_path: Path) -> None:
    """By the name of the file where hosts would misread it, and of a number by its flag."""
    path = tmp_path / "custom.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message.replace("{}", str(path))):
        parse_args(["--custom-config-path", str(path)])


def micro_batch(*, rejected: bool) -> tuple[MicroBatch, list[torch.Tensor], torch.Tensor]:
    """Two samples, 3 and 2 response tokens; what a hook that rejects the second sample returns; target log-probs."""
    lengths, prompt = [3, 2], 2
    layout = pack([torch.arange(prompt + length) for length in lengths], lengths)
    masks = [torch.tensor([1, 0, 1]), torch.tensor([1, 1])]
    values = [torch.full((length,), -1.0) for length in lengths]
    tokens = [torch.arange(prompt + length) for length in lengths]
    advantages = [torch.full((length,), 2.0) for length in lengths]
    data = {"tokens": tokens, "loss_masks": masks, "advantages": advantages, "log_probs": values}
    batch = MicroBatch(layout, data | {"rollout_log_probs": [v - 0.5 for v in values]})
    kept = [masks[0], masks[1] * (0 if rejected else 1)]
    return batch, kept, torch.full((5,), -1.0, requires_grad=True)


@pytest.mark.parametrize("use_tis", [True, False])
def test_the_hook_is_called_as_miles_calls_it(use_tis: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    batch, kept, log_probs = micro_batch(rejected=True)

    def hook(**kwargs: Any) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
        calls.append(kwargs)
        return 3 * kwargs["pg_loss"], kept, {"seen": torch.arange(5.0)}

    monkeypatch.setattr(loss, "load_function", lambda path, flag: hook)
    args = settings(use_tis=use_tis, get_mismatch_metrics=not use_tis)
    total, metrics = policy_loss(args, ALONE, batch, log_probs)
    (call,) = calls
    assert set(call) == {
        "args", "pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths",
        "response_lengths", "parallel_state", "max_seq_lens",
    }  # fmt: skip
    assert (call["total_lengths"], call["response_lengths"]) == ([5, 4], [3, 2])
    assert call["train_log_probs"] is batch.data["log_probs"] and call["loss_masks"] is batch.loss_masks
    # ratio 1, advantage 2: loss -2 a token, times 3; the second sample is rejected, the first averages 2 of 3 tokens
    assert total.item() == pytest.approx(-6.0)
    # metrics keep the masks of the batch: (0 + 2) / 2 + (3 + 4) / 2
    assert metrics["seen"].item() == pytest.approx(4.5)
    assert metrics["kept_fraction"].item() == pytest.approx(1.0)


def settings(**given: Any) -> Namespace:
    return Namespace(**{
        "use_tis": False, "get_mismatch_metrics": False, "use_rollout_logprobs": False, "eps_clip": 0.2,
        "eps_clip_high": 0.28, "calculate_per_token_loss": False,
        "custom_tis_function_path": "a.b", "custom_pg_loss_reducer_function_path": None, **given,
    })  # fmt: skip


def test_a_rejected_token_leaves_the_numerator_only(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, _, log_probs = micro_batch(rejected=False)
    one_dropped = [torch.tensor([1, 0, 0]), torch.tensor([1, 1])]
    monkeypatch.setattr(loss, "load_function", lambda path, flag: lambda **kw: (kw["pg_loss"], one_dropped, {}))
    total, _ = policy_loss(settings(use_tis=True), ALONE, batch, log_probs)
    assert total.item() == pytest.approx(-2 * (1 / 2 + 2 / 2))


def test_without_recomputed_log_probs_the_target_policy_is_the_proximal_one() -> None:
    batch, _, log_probs = micro_batch(rejected=False)
    bypass = replace(batch, data={name: rows for name, rows in batch.data.items() if name != "log_probs"})
    total, metrics = policy_loss(settings(use_rollout_logprobs=True), ALONE, bypass, log_probs)
    # ratio exp(0.5) is clipped at 1.28
    assert total.item() == pytest.approx(-2 * 1.28 * 2, rel=1e-6)
    assert metrics["pg_clipfrac"].item() == pytest.approx(2.0)


# --- what a run leaves behind ---------------------------------------------------------------------------------


def test_a_corrected_run_over_two_context_ranks_leaves_complete_files(tmp_path: Path) -> None:
    config = "{metrics: full, weight: {level: token, bound: truncate, upper: 2.0}}"
    hook = f"{TIS_HOOK} {configured(tmp_path / 'mis.yaml', config)}"
    flags = f"--context-parallel-size 2 --rollout-weights int4 --grad-cosine-every 2 {hook}"
    assert launched(small(flags, tmp_path / "run"), picture=True) == 0
    rows = records(tmp_path / "run")
    assert [row["rollout"] for row in rows] == [row["weight_version"] for row in rows] == [0, 1, 2]
    assert all(0 < row["k3_kl"] < 1 and row["mis_kl"] is not None for row in rows)
    assert -1 <= rows[0]["grad_cosine"] <= 1 and "grad_cosine" not in rows[1]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "finished" and summary["arguments"]["rollout_weights"] == "int4"
    assert (tmp_path / "run/curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_resumed_run_gives_the_same_numbers(tmp_path: Path) -> None:
    """Four rollouts at once, and two, then two more from the checkpoint."""
    common, straight, resumed = "--seed 7 --rollout-weights int8", tmp_path / "straight", tmp_path / "resumed"
    assert run(common, straight, num_rollout=4) == 0
    assert run(f"{common} --save {tmp_path}/save", resumed, num_rollout=2) == 0
    assert run(f"{common} --load {tmp_path}/save", resumed, num_rollout=4) == 0
    assert numbers(resumed) == numbers(straight)
    assert len(numbers(straight)) == 4


def test_another_layout_of_ranks_reads_the_checkpoint(tmp_path: Path) -> None:
    assert run(f"--save {tmp_path}/save", tmp_path / "one", num_rollout=2) == 0
    ranks = "--tensor-model-parallel-size 2 --context-parallel-size 2"
    assert run(f"--load {tmp_path}/save {ranks}", tmp_path / "four") == 0
    assert [row["rollout"] for row in records(tmp_path / "four")] == [2]


# --- pieces ---------------------------------------------------------------------------------------------------


def test_advantages() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    grpo = Namespace(disable_grpo_std_normalization=False)
    centred = Namespace(disable_grpo_std_normalization=True)
    half = 0.5 / torch.tensor([1.0, 0.0, 0.0, 1.0]).std()
    assert torch.allclose(ESTIMATORS["grpo"](grpo, rewards)[0], half * torch.tensor([1.0, -1, -1, 1]), rtol=1e-5)
    assert torch.equal(ESTIMATORS["grpo"](centred, rewards)[0], torch.tensor([0.5, -0.5, -0.5, 0.5]))
    assert torch.equal(ESTIMATORS["grpo"](grpo, rewards)[1], torch.zeros(4)), "a group of equals teaches nothing"
    assert torch.equal(ESTIMATORS["reinforce"](Namespace(reward_shift=-1.0), rewards), rewards - 1)


def test_the_clip_acts_on_the_side_that_gains() -> None:
    log_ratio = torch.tensor([2.0, 0.5, 2.0, 0.5]).log()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    values, clipped = clipped_surrogate(log_ratio, advantages, 0.2, 0.28)
    assert torch.allclose(values, torch.tensor([-1.28, -0.5, 2.0, 0.8]))
    assert clipped.tolist() == [1, 0, 0, 1]


def test_training_order_gives_every_rank_its_part_of_every_step() -> None:
    orders = [training_order(16, 8, rank, 2) for rank in range(2)]
    assert sorted(orders[0] + orders[1]) == list(range(16))
    for step in range(2):
        block = {index for order in orders for index in order[4 * step : 4 * step + 4]}
        assert block == set(range(8 * step, 8 * step + 8))


def test_held_out_prompts_are_never_trained_on() -> None:
    task = Task(1)
    held_out = frozenset(problem.prompt for problem in draw_problems(task, 4, seed=0))
    assert not held_out & {problem.prompt for problem in draw_problems(task, 200, 1, held_out)}
    everything = frozenset(problem.prompt for problem in draw_problems(task, 500, seed=0))
    with pytest.raises(ConfigError, match="--eval-prompts holds out nearly every prompt"):
        draw_problems(task, 1, 1, everything)


TASK = Task(4)


def problems(seed: int = 0) -> list[Problem]:
    return TASK.sample(50, torch.Generator().manual_seed(seed))


def test_the_answer_is_the_digits_backwards_and_alone_earns_the_reward() -> None:
    for problem in problems():
        assert problem.prompt[-1] == EQUALS and len(problem.prompt) == 5
        assert problem.answer == (*problem.prompt[-2::-1], EOS)
        assert len(problem.answer) == TASK.max_response and TASK.eos == EOS
        assert all(0 <= token < TASK.vocab_size for token in (*problem.prompt, *problem.answer))
    assert len({problem.prompt for problem in problems()}) > 40
    assert problems() == problems() != problems(seed=1)
    problem = problems()[0]
    wrong = (problem.answer[0] + 1, *problem.answer[1:])
    assert TASK.reward(problem, list(problem.answer)) == 1.0
    for response in (wrong, problem.answer[:-1], (*problem.answer, EOS), ()):
        assert TASK.reward(problem, response) == 0.0


def test_seeds_differ_with_every_part() -> None:
    parts = itertools.product(range(3), ("rollout", "x"), range(9), ("sample",), range(9))
    assert len({derive_seed(*each) for each in parts}) == 3 * 2 * 9 * 9
