"""Miles hands its `parallel_state` to the hook; under fault tolerance Megatron's own data-parallel group is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from mis_plugins.config.view import BACKENDS
from mis_plugins.errors import InputError
from mis_plugins.hosts import host, megatron
from mis_plugins.hosts.host import OWN_HEAD_FLAGS, VERSION_FLAGS, Batch, Host, Parallel, Ranks, sequences_of
from mis_plugins.hosts.needs.miles import NEEDS

# Which tokens the engine could have sampled: Miles's keys (its #2595), and slime's, where they reach Miles.
SAMPLING_SUPPORT = (
    "rollout_sampling_mask_ids",
    "rollout_sampling_mask_offsets",
    "rollout_sampling_mask",
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
)


def trains_on(backend: str, args: Any) -> bool:
    """Whether Miles trains with this backend in place of Megatron, whichever hook it calls."""
    return getattr(args, "train_backend", None) == backend


def runs(args: Any) -> bool:
    """Whether this process has Miles's groups or tracking, and trains with Megatron."""
    elsewhere = any(trains_on(backend, args) for backend in BACKENDS)
    return not elsewhere and (NEEDS.parallel.is_loaded or NEEDS.tracking.is_loaded)


def parallel() -> Parallel:
    """The groups as they are now: Miles makes new ones when a rank is lost or replaced."""
    state = _state()
    return megatron.parallel() if state is None else megatron.handed(state)


def reports(ranks: Ranks) -> bool:
    """Whether Miles logs on this rank of the last pipeline stage.

    The ranks are those that Miles keeps: under fault tolerance a group is torchft's, whose `rank()` is 0 in
    each cell.
    """
    state = _state()
    if state is None:
        return megatron.reports(ranks)
    return all(info.rank == 0 for info in (state.cp, state.effective_dp, state.tp))


def scores(args: Any, batch: Batch, logits: host.Tensor) -> host.Scores:
    """Miles's own log-probs, and its entropy where the loss has a term of it or the run observes it.

    Raises:
        InputError: the engine's log-probs are renormalized over a part of the vocabulary.
    """
    _check_whole_vocabulary(args, batch)
    wants_entropy = args.entropy_coef != 0 or args.observe_training_entropy
    by_name = NEEDS.scores.get()(
        logits,
        args=args,
        with_entropy=wants_entropy,
        entropy_requires_grad=args.entropy_coef != 0,
        max_seq_lens=batch.get("max_seq_lens"),
        **sequences_of(batch),
    )
    return by_name["log_probs"], by_name.get("entropy")


def recomputes(args: Any) -> host.Recomputes:
    """Miles recomputes log-probs before each update unless its arguments skip that."""
    return "never" if args.skip_actor_forward_only else "always"


def hands_on_kept_sets(keys: Mapping[str, Any]) -> bool:
    """Whether our three hooks of versions have the engine return kept sets and the trainer score over them."""
    words = VERSION_FLAGS.split()
    ours = zip(words[::2], words[1::2], strict=True)
    bounded = keys.get("rollout_top_k", -1) > 0
    return bounded and all(keys.get(flag[2:].replace("-", "_")) == path for flag, path in ours)


def _check_whole_vocabulary(args: Any, batch: Batch) -> None:
    """Refuse log-probs of the engine that are renormalized over what top-p or top-k left of the vocabulary."""
    held = {name: batch[name] for name in SAMPLING_SUPPORT if batch.get(name) is not None}
    carried = [name for name, rows in held.items() if any(row is not None for row in rows)]
    if getattr(args, "use_sampling_support_replay", False):
        carried.append("use_sampling_support_replay")
    if carried:
        raise InputError(
            f"{carried[0]}: rollout_log_probs are renormalized over the tokens that top-p or top-k left, and "
            "mis_plugins.mis.policy_loss does not score over these of Miles; give our hooks of docs/hooks.md, or "
            "--rollout-top-p 1 and --rollout-top-k -1"
        )


def _state() -> Any | None:
    """The `parallel_state` of Miles as it is now; None where this process has not loaded it."""
    get_parallel_state = NEEDS.parallel.loaded()
    return None if get_parallel_state is None else get_parallel_state()


HOST = Host(
    name="miles",
    title="Miles",
    package="miles",
    runs=runs,
    parallel=parallel,
    scores=scores,
    recomputes=recomputes,
    log_probs=host.LogProbs(NEEDS.log_probs.owner),
    own_loss=NEEDS.own_loss.get,
    reports=reports,
    tracking=NEEDS.tracking.loaded,
    needs=NEEDS,
    one_sample_a_rollout=True,
    records=("miles", "megatron", "sglang"),
    eval_engines=True,
    version_flags=f"--fully-async {VERSION_FLAGS}",
    head_flags=f"{OWN_HEAD_FLAGS} (Miles of autumn 2026), or {VERSION_FLAGS}",
    rollout_batch=True,
    kept_set=hands_on_kept_sets,
    rescore=partial(megatron.rescore, NEEDS),
)
