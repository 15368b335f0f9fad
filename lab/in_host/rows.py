"""The runs inside the hosts, one row each, with the runs that cannot be made here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.in_host.bends import FROM_TENSOR
from lab.in_host.by_version import BY_VERSION
from lab.in_host.faults import LOST
from lab.in_host.launching import Sizes
from lab.in_host.model import MODEL
from true_on_policy.contract.cpu import Contract, Shapes
from true_on_policy.engines.handover import ACTIVE
from true_on_policy.models.tiny import read_config

CORRECTION = {"--use-tis": 0, "--custom-tis-function-path": 1, "--custom-config-path": 1}
LOSS_HOOK = ("--loss-type", "custom_loss", "--custom-loss-function-path", "mis_plugins.mis.policy_loss")
REPORT = ("--custom-megatron-before-train-step-hook-path", "mis_plugins.mis.report_step")
FILTER = ("--rollout-sample-filter-path", "mis_plugins.mis.drop_broken_samples",
          "--custom-rm-path", "lab.in_host.reward.score_and_break")  # fmt: skip
DROPPED = (
    "dropped sample 5 of group 1: 1 of ",
    "dropped sample 21 of group 5: 1 of ",
    "dropped 1 of 16 samples from the loss: rollout log-probs not finite in 1",
)
RETOKENIZED = (
    "dropped sample 5 of group 1: turn 2: the engine sampled other tokens than the trainer has, the first at ",
    "dropped sample 21 of group 5: turn 2: ",
    "dropped 1 of 16 samples from the loss: rollout log-probs of other tokens in 1",
)
KEPT = ("--custom-pg-loss-reducer-function-path", "mis_plugins.mis.kept_token_mean")
GSPO = (*LOSS_HOOK, "--eps-clip", "1e-3", "--eps-clip-high", "1e-3")
WANDB = ("--use-wandb", "--wandb-mode", "offline", "--wandb-project", "in-host", "--wandb-group", "in-host",
         "--disable-wandb-random-suffix")  # fmt: skip
TENSORBOARD = ("--use-tensorboard", "--tb-project-name", "tb")


CARRIED = ("--custom-generate-function-path", "mis_plugins.mis.generate_with_versions",
           "--custom-convert-samples-to-train-data-path", "mis_plugins.mis.convert_with_versions",
           "--custom-megatron-init-path", "mis_plugins.mis.carry_versions")  # fmt: skip
# slime bounds no staleness: eight groups are under way, and as many may wait; a step trains four groups.
SLIME_FULLY_ASYNC = ("--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
                     "--sglang-server-concurrency", "8", *CARRIED)  # fmt: skip


# SGLang returns the tokens that top-p leaves only where top-k bounds their number, and the router of the package index
# drops what a request asks for by a name that it does not know.
TOP_P = ("--use-miles-router", "--rollout-top-p", "0.9", "--rollout-top-k", "16", *CARRIED)


def fully_async(bound: int) -> tuple[str, ...]:
    """List the flags by which Miles says which version wrote each token; `bound` limits a group's oldest age.

    Above a bound of 0 four batches are under way at once, so that tokens get old.
    """
    ahead = ("--async-max-concurrent-samples", "64") if bound else ()
    return (
        *ahead,
        "--fully-async", "--max-weight-staleness", str(bound), "--pause-generation-mode", "in_place", *CARRIED,
        "--sglang-stream-interval", "1", "--sglang-incremental-streaming-output", "--sglang-disable-overlap-schedule",
    )  # fmt: skip


ONE_RANK = Sizes()


@dataclass(frozen=True)
class Row:
    """One run of a host.

    config: a file of `configs/`, which the verdict's oracle reads too.
    flags: words that follow the launch script's words.
    dropped: flags of the launch script that the row leaves out, each with the number of words after it.
    loss: how the step's loss follows from weights: `tis`, `uncorrected` where nothing corrects, a name in
        `BY_VERSION`, `kept` with the mean over kept tokens, or `objective` with the config's surrogate and OPSM.
        `centered` is REINFORCE less its mean over the tokens that the engine names.
    train: the host's script.
    fsdp: whether Miles trains with FSDP, one rank a share of the data, in place of Megatron.
    rollouts: the recorded rollouts of `rollouts/` that the trainer takes in place of an engine's; None
        starts an engine.
    log_holds: texts that the log must hold.
    compared: whether the row compares the log-probs of both sides by their bits.
    curves: kinds of trackers' files whose exact metrics must equal the log's.
    broken: how many responses of each rollout get a NaN for a log-prob before the sample filter sees them.
    contract: fields of the CPU contract that pins both sides; None leaves both sides stock.
    again: flags of a second run, of the host's synchronous train.py, over the rollouts that the first run
        dumped; None for no second run.
    model: a tiny model of `true_on_policy/contract/families.yaml`.
    resplit: what another split of the micro-batches must leave of the trainer's log-probs: all `equal`,
        or some `different`. None where log-probs are computed once.
    saves: whether the trainer saves its weights before each update.
    resumes: whether the trainer starts from other weights than engine and reference, as a resumed run does.
    stopped: what the log must say as the job stops before its first optimizer step; None where it runs through.
    named: a pattern that the first group of `stopped` must match, which names the fault.
    blocked: the line of the host at which the row cannot run here, and why; the row is then not started.
    """

    name: str
    host: str
    config: str = "token.yaml"
    sizes: Sizes = ONE_RANK
    flags: tuple[str, ...] = ()
    dropped: tuple[tuple[str, int], ...] = ()
    loss: str = "tis"
    train: str = "train.py"
    colocate: bool = False
    fsdp: bool = False
    rollouts: str | None = None
    log_holds: tuple[str, ...] = ()
    compared: bool = False
    curves: tuple[str, ...] = ()
    broken: int = 0
    contract: Mapping[str, Any] | None = None
    again: tuple[str, ...] | None = None
    model: str = MODEL
    resplit: str | None = None
    saves: bool = False
    resumes: bool = False
    stopped: str | None = None
    named: str = ""
    blocked: str = ""

    @property
    def launched_with(self) -> str:
        """Name the config that the launch script checks for the TIS hook; the row's own config wins."""
        return "token.yaml" if self.loss in ("objective", "centered", *BY_VERSION) else self.config

    @property
    def stale(self) -> bool:
        """Whether the rollouts were sampled with other weights than the trainer's."""
        return self.rollouts is not None or self.train == "train_async.py"

    def pinned_to(self, checkpoint: Path) -> Contract | None:
        """Return the contract of this row for a model; None where the row leaves both sides stock."""
        if self.contract is None:
            return None
        return Contract(**self.contract, shapes=Shapes.of(read_config(checkpoint), self.sizes.tensor))


def _both(name: str, config: str = "token.yaml", sizes: Sizes = ONE_RANK, **more: Any) -> list[Row]:
    return [Row(f"{host}-{name}", host, config, sizes, **more) for host in ("miles", "slime")]


_BY_LOSS = tuple(CORRECTION.items())[:2]


def _replayed(name: str, config: str = "token.yaml", sizes: Sizes = ONE_RANK, **more: Any) -> list[Row]:
    """Build rows whose trainers take the rollouts that an engine left in another run of the host."""
    return [replace(row, rollouts=row.host) for row in _both(f"replay-{name}", config, sizes, **more)]


def _fully_async(host: str, name: str, loss: str, flags: tuple[str, ...], config: str = "versions.yaml",
                 **more: Any) -> Row:  # fmt: skip
    flags = (*LOSS_HOOK, *flags, *REPORT, *TENSORBOARD)
    return Row(f"{host}-fully-async{name}", host, config, Sizes(steps=8, response=96), flags, _BY_LOSS, loss,
               "train_async.py", log_holds=("behav_imp_weight/",), **more)  # fmt: skip


COMPARED_ON_FSDP = ("--loss-type", "custom_loss", "--custom-loss-function-path", "true_on_policy.hosts.policy_loss")
COMPARED = (*COMPARED_ON_FSDP,
            "--custom-megatron-before-train-step-hook-path", "true_on_policy.hosts.report_step")  # fmt: skip
PINNED = (*COMPARED, "--custom-megatron-init-path", "lab.in_host.cpu_trainer.miles_init")
PROVEN = ("--custom-megatron-init-path", "true_on_policy.hosts.prove_weights")
CHECKED = ("--custom-rm-path", "lab.in_host.reward.check_weights", *PROVEN)
WHERE = "where they differ, the engine holds "
EVERY = rf"^(\d+) of \1 tensors differ, .*; {WHERE}"
REFERENCE = ("--use-kl-loss", "--kl-loss-coef", "0", "--kl-loss-type", "low_var_kl")
STEPS = 20


def _unproven(host: str, name: str, hook: str, words: str) -> Row:
    """Build a row whose resumed trainer publishes other weights than its own: the proof stops it at the start.

    slime 624b824 itself publishes the reference's, which it loaded last, where the trainer is not offloaded.
    """
    return Row(f"{host}-weights-{name}", host, "proven.yaml", flags=("--custom-megatron-init-path", hook, *REFERENCE),
               resumes=True, stopped=r"DifferenceError: weights of version 1, engine 0: (.*)", named=words)  # fmt: skip


def _on_policy(host: str, name: str, contract: Mapping[str, Any], **sizes: int) -> Row:
    """Build a row whose log-probs must equal the engine's to the bit, step after step."""
    return Row(f"{host}-on-policy-{name}", host, "on_policy.yaml", Sizes(steps=STEPS, **sizes), PINNED,
               (("--sequence-parallel", 0),), log_holds=(ACTIVE,), compared=True, contract=contract)  # fmt: skip


ON_POLICY: tuple[Row, ...] = (
    *_both("compared-stock", "compared.yaml", Sizes(steps=STEPS), flags=COMPARED, compared=True),
    _on_policy("miles", "fp32", {"dtype": "fp32"}),
    _on_policy("miles", "bf16", {"dtype": "bf16"}),
    _on_policy("miles", "bf16-trainer-order", {"dtype": "bf16", "norm_order": "trainer"}),
    _on_policy("miles", "fp32-cp2", {"dtype": "fp32"}, context=2),
    _on_policy("miles", "fp32-dp2", {"dtype": "fp32"}, data=2),
    _on_policy("miles", "fp32-tp2", {"dtype": "fp32", "trainer_tensor_parallel": 2, "leaves": 4}, tensor=2),
    _on_policy("miles", "bf16-tp2", {"dtype": "bf16", "trainer_tensor_parallel": 2, "leaves": 4}, tensor=2),
    replace(_on_policy("miles", "fsdp-fp32", {"dtype": "fp32"}), fsdp=True, flags=COMPARED_ON_FSDP),
    replace(_on_policy("miles", "fsdp-bf16", {"dtype": "bf16"}), fsdp=True, flags=COMPARED_ON_FSDP),
    _on_policy("slime", "fp32", {"dtype": "fp32"}),
    _on_policy("slime", "bf16", {"dtype": "bf16"}),
)

MIXTURE = "tiny-qwen3-moe"
# With 8 experts, two tokens share one of their two experts too often for one sample's fault to show.
MANY_EXPERTS = "tiny-qwen3-moe-64"
# SGLang's recorder of routes is as large as a chunk of prefill, so prefill must be chunked.
WATCHED = ("--use-rollout-routing-replay", "--sglang-chunked-prefill-size", "2048",
           "--custom-megatron-before-log-prob-hook-path", "mis_plugins.mis.watch_routes", *REPORT)  # fmt: skip
STOPPED = r"MisError: mis\.routing\.on_fault: raise: (.*)"
FUSED = r"(moe_router_fusion: .*)"


def _routed(name: str, *flags: str, **more: Any) -> list[Row]:
    """Build rows in which the trainer replays the engine's routes, and the watch checks the replay.

    Before a rollout's only step, slime makes a log-prob pass only where metrics of the mismatch are asked
    for.
    """
    more = {"model": MIXTURE} | more
    rows = _both(f"routes{name}", "routes.yaml", **more)
    own = {"miles": "--use-miles-router", "slime": "--get-mismatch-metrics"}
    return [replace(row, flags=(own[row.host], *WATCHED, *flags)) for row in rows]


def _planted(fault: str, words: str, **more: Any) -> list[Row]:
    """Build rows whose recorded routes carry a fault: the watch names it before the first optimizer step."""
    return _routed(f"-{fault}", "--custom-rm-path", f"lab.in_host.reward.{fault.replace('-', '_')}",
                   stopped=STOPPED, named=words, **more)  # fmt: skip


ROUTED: tuple[Row, ...] = (
    *_routed("", log_holds=("mis_step/route_differs", "mis_step/route_kl_k3")),
    *_planted("drop-a-layer", r"layer 1 \(pipeline stage 0\), sample \d+ of micro-batch \d+: \d+ of \d+ tokens share "
              r"less than half of their recorded experts with the router's own: the rows belong to another layer"),
    *_planted("swap-stages", r"layer 0 \(pipeline stage 0\), sample .*; layer 1 \(pipeline stage 0\), sample .*; "
              r"layer 2 \(pipeline stage 0\), sample .*: the rows belong to another layer, stage or sample"),
    *_planted("repeat-a-row", r"sample \d+ of micro-batch \d+, layers [0-5, ]+ \(pipeline stage 0\): \d+ tokens share "
              r"less than half .*: rows of another token, repeated, stale or missing", model=MANY_EXPERTS),
    *_routed("-fusion", "--moe-router-fusion", stopped=FUSED, named="the fused router of megatron-core returns before "
             "the replay"),
)  # fmt: skip


def _on_one_rank(fault: str, stopped: str, named: str, *flags: str) -> list[Row]:
    """Build rows of two ranks, the second of which has a fault."""
    plant = ("--custom-megatron-init-path", f"lab.in_host.faults.{fault}")
    return _replayed(f"rank-{fault.replace('_', '-')}", sizes=Sizes(context=2), flags=(*plant, *flags),
                     stopped=stopped, named=named)  # fmt: skip


def _resplit(name: str, expected: str, *flags: str) -> list[Row]:
    """Build rows whose trainers compute the log-probs of each rollout twice; slime needs a flag for this."""
    rows = _both(f"resplit{name}", "resplit.yaml", resplit=expected)
    own = {"miles": (), "slime": ("--get-mismatch-metrics",)}
    counted = ("--rollout-data-postprocess-path", "mis_plugins.mis.count_samples")
    return [replace(row, flags=(*own[row.host], *counted, *flags)) for row in rows]


ROWS: tuple[Row, ...] = (
    *_both("tis"),
    *_resplit("", "equal"),
    *_resplit("-planted", "different", "--custom-megatron-init-path", "lab.in_host.faults.depends_on_the_batch"),
    *_both("tis-cp2", sizes=Sizes(context=2)),
    *_both("policy-loss", flags=LOSS_HOOK, dropped=_BY_LOSS),
    *_both("centered", "centered.yaml", Sizes(steps=10), flags=(*LOSS_HOOK, *CARRIED), dropped=_BY_LOSS,
           loss="centered"),
    Row("miles-top-p", "miles", flags=TOP_P),
    Row("miles-top-p-cp2", "miles", sizes=Sizes(context=2), flags=TOP_P),
    Row("miles-top-p-centered", "miles", "centered.yaml", flags=(*LOSS_HOOK, *TOP_P), dropped=_BY_LOSS,
        loss="centered"),
    *_both("report-step", "all_metrics.yaml", flags=(*REPORT, *TENSORBOARD), log_holds=("mis_step/",),
           curves=("tensorboard",)),
    *_both("turns", "all_metrics.yaml", flags=(*REPORT, "--custom-rm-path", "lab.in_host.reward.score_a_dialogue"),
           log_holds=("mis_step/turn_1_kl_k3", "mis_step/turn_2_kl_k3", "mis_step/turn_3_kl_k3")),
    *_both("filter", flags=FILTER, broken=1, log_holds=DROPPED),
    *_both("turns-checked", flags=("--custom-generate-function-path", "lab.in_host.dialogue.generate", *FILTER[:2]),
           log_holds=RETOKENIZED),
    Row("miles-retracted", "miles", sizes=Sizes(response=96), flags=(
        *CARRIED, "--sglang-max-total-tokens", "640", "--sglang-schedule-conservativeness", "0.01"),
        log_holds=("the engine retracted the requests of", "mis_step/retracted_fraction")),
    *_both("weights", "proven.yaml", flags=CHECKED, log_holds=(
        "weights of rollout 1, saved 0 updates earlier: exit 0: ",
        "weights of rollout 2, saved 0 updates earlier: exit 0: ",
        "weights of rollout 2, saved 1 updates earlier: exit 1: ",
        *(f"weights of version {version}, 1 engines: the engine's weights are the trainer's" for version in (1, 2, 3)),
    ), saves=True),
    Row("miles-weights-resumed", "miles", "proven.yaml", flags=(*PROVEN, *REFERENCE), resumes=True, log_holds=(
        "weights of version 1, 1 engines: the engine's weights are the trainer's",)),
    _unproven("slime", "reference", "true_on_policy.hosts.prove_weights", rf"{EVERY}.*the reference's weights"),
    _unproven("miles", "stale", "lab.in_host.faults.loses_all_weights", f"{EVERY}what it held before this update"),
    _unproven("miles", "lost", "lab.in_host.faults.loses_one_weight", r"^1 of \d+ tensors differ, the first: "
              rf"{re.escape(LOST)}: other values; {WHERE}what it held before this update"),
    *_both("async", train="train_async.py"),
    Row("miles-colocate", "miles", colocate=True),
    Row("slime-colocate", "slime", colocate=True, blocked=f"slime/{FROM_TENSOR}:423 hands on weights that no "
        "`begin_weight_update` announces, and SGLang 0.5.23 answers 400"),
    *_replayed("cp2", sizes=Sizes(context=2)),
    *_replayed("dp2", sizes=Sizes(data=2)),
    *_replayed("tp2", sizes=Sizes(tensor=2)),
    *_replayed("micro-batch-cp2", "micro_batch.yaml", Sizes(context=2)),
    *_replayed("micro-batch", "micro_batch.yaml"),
    *_replayed("sequence-cp2", "sequence.yaml", Sizes(context=2)),
    *_replayed("geometric", "geometric.yaml"),
    *_replayed("policy-loss-cp2", "sequence.yaml", Sizes(context=2), flags=LOSS_HOOK, dropped=_BY_LOSS),
    *_replayed("policy-loss", flags=LOSS_HOOK, dropped=_BY_LOSS),
    _fully_async("miles", "", "next", fully_async(4)),
    _fully_async("miles", "-clip-proximal", "segment_wise", fully_async(4), "versions_proximal.yaml"),
    _fully_async("miles", "-off", "standard", fully_async(4), "versions_off.yaml"),
    _fully_async("miles", "-bound-0", "fresh", fully_async(0), again=(*LOSS_HOOK, *REPORT)),
    _fully_async("slime", "", "next", SLIME_FULLY_ASYNC),
    _fully_async("slime", "-off", "standard", SLIME_FULLY_ASYNC, "versions_off.yaml"),
    *_on_one_rank("has_another_config", r"ConfigError: (ranks have different mis configs: [^\n]*)",
                  r"mis\.weight\.upper is 1\.004 on rank 0, 3\.0 on rank 1; give all ranks one config"),
    *_on_one_rank("fails", r"RuntimeError: (planted on rank \d)", "planted on rank 1"),
    *_on_one_rank("never_comes", r"MisError: ([^\n]* waited [^\n]*)", r"waited 60 s, [^:]* for rank 1: dead, slow",
                  "--distributed-timeout-minutes", "1"),
    *_replayed("opsm", "opsm.yaml", flags=LOSS_HOOK, dropped=_BY_LOSS, loss="objective"),
    *_replayed("gspo", "gspo.yaml", flags=GSPO, dropped=_BY_LOSS, loss="objective"),
    *_replayed("kept-token-mean", "kept.yaml", flags=KEPT, loss="kept"),
    *_replayed("wandb", "all_metrics.yaml", flags=(*REPORT, *WANDB, *TENSORBOARD),
               log_holds=("mis_step/",), curves=("tensorboard", "wandb")),
    Row("miles-replay-fsdp", "miles", fsdp=True, rollouts="miles"),
    *_replayed("rollout-scope", "rollout.yaml", flags=(
        "--rollout-data-postprocess-path", "mis_plugins.mis.normalize_rollout", "--get-mismatch-metrics")),
    *_both("cost", "mis.yaml", Sizes(steps=4, samples=8, response=96, micro_batch_tokens=4096),
           flags=("--custom-tis-function-path", "lab.in_host.timed.compute"), log_holds=("timed call",)),
    *ROUTED,
    *ON_POLICY,
)  # fmt: skip
