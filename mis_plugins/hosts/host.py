"""The record of a host: each file of `adapters/` makes one, and `registry.py` finds them there."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from mis_plugins.packing.ragged import Ranks
else:
    Ranks = Tensor = Any  # `config check` reads these records before every job, and needs no torch

LOSS_HOOK = "--loss-type custom_loss --custom-loss-function-path mis_plugins.mis.policy_loss"
ONE_STEP = (
    "slime computes the trainer's log-probs before training only where a rollout is more than one optimizer step: with "
    f"one step give --get-mismatch-metrics beside --use-tis, or use the loss hook ({LOSS_HOOK})"
)
ROUTES_HOOK = "--custom-megatron-before-log-prob-hook-path mis_plugins.mis.watch_routes --use-rollout-routing-replay"
VERSION_FLAGS = (
    "--custom-generate-function-path mis_plugins.mis.generate_with_versions "
    "--custom-convert-samples-to-train-data-path mis_plugins.mis.convert_with_versions "
    "--custom-megatron-init-path mis_plugins.mis.carry_versions"
)
OWN_HEAD_FLAGS = "--rollout-top-logprobs-num 32"  # of a host that asks its engine by itself
HEAD_IDS, HEAD_LOG_PROBS = "rollout_topk_token_ids", "rollout_topk_log_probs"
"""Keys of a micro-batch: the tokens that the engine named as its likeliest at each position, `[response, k]`."""
Batch = Mapping[str, Any]
Parallel = tuple[Ranks, tuple[int, int]]  # process groups, and (size, rank) of context parallelism
Scores = tuple[Sequence[Tensor], Sequence[Tensor] | None]  # log-probs and entropy, one tensor a sequence
Rescore = Callable[[Any, Batch, Ranks], Sequence[Tensor] | None]
Recomputes = Literal["always", "never", "sometimes"]
Sign = Literal["modules", "arguments", "registration", "nothing"]  # what tells that a host runs, the surest first


@dataclass(frozen=True)
class Host:
    """One host, as the hooks and `config check --host` know it.

    Which host it is:
        name: what `config check --host` calls it.
        title: what sentences call it.
        package: the package whose reducer it hands to a loss.
        needs: what our hooks call or read of it, a field each; None where it hands everything over.
        runs: whether this process is one of this host's, as far as its arguments (perhaps None) and modules say.
        told_by: what `runs` looks at, the surest first: `modules` of the host itself; `arguments`, which
            another host may have too; `registration`, where its own code calls `register` in each process
            that it runs; `nothing`, for the host that is left where no other runs.

    A micro-batch and its loss:
        parallel: process groups, and (size, rank) of context parallelism.
        scores: log-probs of the sampled tokens with gradient, and the entropy where the host computes it.
        recomputes: whether its batches carry the trainer's log-probs from before the update; "sometimes"
            leaves that to each batch. Where they are missing, pi_theta stands in.
        own_loss: gives its own policy loss.
        divides_by_kept: whether it divides a sequence's loss by the tokens that the mask of the TIS hook keeps.
        megatron: whether its trainer is Megatron-core.

    Metrics:
        reports: whether this is the rank that logs, among those that hold log-probs.
        tracking: gives its `log(args, metrics, step_key)`, which reads the step from the metrics; None where
            this process has none.
        one_sample_a_rollout: whether its own rollout functions make one sample of each rollout.

    A config before the job:
        records: files of `hosts/records/` that list its arguments; none where `config check --host` does not serve it.
        eval_engines: whether it repeats SGLang's arguments for evaluation, as `eval_sglang_*`.
        config_files: arguments that name a file of its settings, beside --custom-config-path.
        tis_hook: dotted path for --custom-tis-function-path.
        rollout_batch: whether the rollout-data hook is handed the rollout batch, or can read it (`rollout_store.py`).
        versions: whether it says which version wrote each token.
        version_flags: flags with which it says so, where `versions` is false; "" where none do.
            `needs` are then those of `VersionNeeds`.
        head_flags: flags with which its micro-batches have the engine's likeliest tokens; "" where none do.
        step_hook: whether it calls a hook before each train step.
        routers: whether it calls a hook before each log-prob pass, from which routers can be watched.
        kept_set: called with arguments by name: whether it hands the trainer the tokens that top-p or top-k
            left of the vocabulary, so that the trainer scores over the set that the engine sampled from.

    Its log-prob pass:
        rescore: scores the rollout batch again in micro-batches that are cut otherwise, called within the
            rollout-data hook on every rank; None where no hook reaches the pass. It returns None on a
            pipeline stage that computes no log-probs, and where the batch cannot be cut otherwise.
    """

    name: str
    title: str
    package: str
    runs: Callable[[Any], bool]
    parallel: Callable[[], Parallel]
    scores: Callable[[Any, Batch, Tensor], Scores]
    own_loss: Callable[[], Callable[..., Any]]
    reports: Callable[[Ranks], bool]
    told_by: Sign = "modules"
    recomputes: Callable[[Any], Recomputes] = lambda args: "sometimes"
    divides_by_kept: Callable[[Any], bool] = lambda args: False
    megatron: bool = True
    tracking: Callable[[], Callable[..., Any] | None] = lambda: None
    needs: Any = None
    one_sample_a_rollout: bool = False
    records: tuple[str, ...] = ()
    eval_engines: bool = False
    config_files: tuple[str, ...] = ()
    tis_hook: str = "mis_plugins.mis.compute_mis_weights_with_cp"
    rollout_batch: bool = False
    versions: bool = False
    version_flags: str = ""
    head_flags: str = ""
    step_hook: bool = True
    routers: bool = True
    kept_set: Callable[[Mapping[str, Any]], bool] = lambda keys: False
    rescore: Rescore | None = None


def whole_number(value: Any) -> int:
    """The whole number of an argument that counts something: 50 of 50.0, and 0 of null or text, as a file may have."""
    return int(value) if isinstance(value, int | float) and math.isfinite(value) else 0


def has_temperature(args: Any) -> bool:
    """Whether the engine divides its logits by a number; at a temperature of 0 it takes the likeliest token."""
    temperature = getattr(args, "rollout_temperature", 1.0)
    return isinstance(temperature, int | float) and 0 < temperature < math.inf


def sequences_of(batch: Batch) -> dict[str, Any]:
    """Keys of a micro-batch that every host's own helper needs to score its sequences."""
    return {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
