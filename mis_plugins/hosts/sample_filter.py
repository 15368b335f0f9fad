"""Take samples whose rollout log-probs do not fit their response out of the loss, before training."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from mis_plugins.errors import InputError
from mis_plugins.hosts.ownership import Hook
from mis_plugins.shared.notices import warn_once

logger = logging.getLogger("mis_plugins")

Cause = Literal["missing", "of another count", "not finite", "of other tokens"]

NAMED = 10
"""How many dropped samples of one rollout are named in the log, before their total."""

UNSAMPLED = 0.0
"""What the hosts themselves give to tokens that no engine sampled, such as a tool's."""

ENTRIES = "output_token_logprobs"
"""SGLang's name, and ours in a sample's metadata, for (log-prob, token id, ...) of each token that it sampled."""


@dataclass(frozen=True)
class Fault:
    """Why a sample cannot be corrected; `detail` has the counts."""

    cause: Cause
    detail: str


@Hook
def drop_broken_samples(args: Any, data: Iterable[Any]) -> None:
    """The sample filter of Miles and slime: `--rollout-sample-filter-path mis_plugins.mis.drop_broken_samples`.

    Sets `remove_sample` where rollout log-probs are missing or of another count than the response's tokens. Sets it too
    where a log-prob is not finite at a token of the loss, or belongs to another token than the response holds there.
    The log names dropped samples; they stay in their group's advantages. The hosts convert their log-probs too, and
    would fail there: missing or non-finite log-probs become 0, all of them outside the loss by then.

    Tokens, which an environment may rewrite, are compared where a sample holds what the engine returned. A generate
    function of the user's may keep SGLang's entries, one for each response token and None where no engine sampled, in
    `metadata["output_token_logprobs"]`. slime has `rollout_top_p_token_ids`: the set that each token was sampled from.
    Sets are not compared with `--sglang-speculative-algorithm`, as slime's engine may accept a draft's
    token from outside its set.

    Args:
        args: the host's. With Miles's `recompute_logprobs_via_prefill` the host scores all but aborted
            samples anew after this hook, and checks the count itself: this filter leaves them alone.
        data: samples, or groups of them, nested however the rollout function left them.

    Raises:
        InputError: none of the samples that were not removed before has any rollout log-prob.
    """
    samples = [sample for sample in _flat(data) if not _scored_later(args, sample)]
    judged = [sample for sample in samples if not sample.remove_sample]
    drafts, dropped = bool(getattr(args, "sglang_speculative_algorithm", None)), []
    for sample in judged:
        fault = fault_of(sample, drafts)
        if fault is not None:
            dropped.append((sample, fault))
            sample.remove_sample = True
    _refuse_an_engine_without_log_probs(judged, dropped)
    for sample in samples:
        _make_readable(sample)
    _report(dropped, len(samples))


def fault_of(sample: Any, drafts: bool = False) -> Fault | None:
    """What is wrong with the rollout log-probs of a host's `Sample`, if anything.

    Args:
        drafts: whether the engine speculates.
    """
    log_probs, expected = _numbers(sample.rollout_log_probs), sample.response_length
    if expected and not log_probs:
        return Fault("missing", f"no rollout log-probs for {expected} response tokens")
    if len(log_probs) != expected:
        return Fault("of another count", f"{len(log_probs)} rollout log-probs for {expected} response tokens")
    pairs = zip(log_probs, _in_loss(sample), strict=True)
    broken = sum(counts and not math.isfinite(x) for x, counts in pairs)
    if broken:
        return Fault("not finite", f"{broken} of {expected} rollout log-probs not finite")
    return _other_tokens(sample, drafts)


def _other_tokens(sample: Any, drafts: bool) -> Fault | None:
    """Whether a token of the loss is another than the engine returned, as far as the sample tells."""
    length, metadata = sample.response_length, getattr(sample, "metadata", None)
    entries = metadata.get(ENTRIES) if isinstance(metadata, Mapping) else None
    if entries is not None and len(entries) != length:
        return Fault("of other tokens", f"{len(entries)} {ENTRIES} for {length} response tokens")
    if entries is not None:
        pairs = zip(entries, _response(sample).tolist(), strict=True)
        changed = [entry is not None and int(entry[1]) != token for entry, token in pairs]
    else:
        changed = [False] * length if drafts else _outside_nucleus(sample)
    in_loss = zip(changed, _in_loss(sample), strict=True)
    places = [i for i, (is_other, counts) in enumerate(in_loss) if is_other and counts]
    if not places:
        return None
    return Fault(
        "of other tokens",
        f"{len(places)} of {length} response tokens are not those that the engine returned, the first at {places[0]}",
    )


def _outside_nucleus(sample: Any) -> list[bool]:
    """For each response token, whether it lies outside the set it was sampled from; False without a set."""
    found = [getattr(sample, f"rollout_top_p_token_{name}", None) for name in ("ids", "offsets")]
    none = [False] * sample.response_length
    if any(x is None for x in found):
        return none
    ids, offsets = (torch.as_tensor(x).long().flatten() for x in found)
    tokens = _response(sample)
    if len(offsets) != len(tokens) + 1 or int(offsets[-1] - offsets[0]) != len(ids):
        return none  # slime itself refuses such a sample
    sizes = offsets.diff()
    owner = torch.repeat_interleave(sizes)
    hits = torch.zeros_like(sizes).index_add_(0, owner, (ids == tokens[owner]).long())
    return ((sizes > 0) & (hits == 0)).tolist()


def _response(sample: Any) -> Int[Tensor, " R"]:
    tokens = torch.as_tensor(sample.tokens).long().flatten()
    return tokens[len(tokens) - sample.response_length :]


def _flat(data: Any) -> Iterator[Any]:
    """The samples in order, whatever lists they are in; None is no sample."""
    if isinstance(data, (list, tuple)):
        for item in data:
            yield from _flat(item)
    elif data is not None:
        yield data


def _scored_later(args: Any, sample: Any) -> bool:
    if not getattr(args, "recompute_logprobs_via_prefill", False):
        return False
    warn_once(
        "drop_broken_samples with --recompute-logprobs-via-prefill looks at aborted samples only: "
        "the host replaces the log-probs of all others afterwards"
    )
    return getattr(sample.status, "value", sample.status) != "aborted"


def _numbers(log_probs: Any) -> list[float]:
    """A list, tensor or array as floats: an empty list for None, NaN for a None inside."""
    if log_probs is None:
        return []
    values = log_probs.tolist() if hasattr(log_probs, "tolist") else log_probs
    return [math.nan if value is None else value for value in values]


def _in_loss(sample: Any) -> list[bool]:
    """For each response token, whether it is in the loss: by the loss mask, or all where no mask fits."""
    mask = _numbers(sample.loss_mask)
    return [bool(x) for x in mask] if len(mask) == sample.response_length else [True] * sample.response_length


def _make_readable(sample: Any) -> None:
    """Give the sample one finite log-prob for each response token, where it lacks them."""
    log_probs = _numbers(sample.rollout_log_probs)
    if len(log_probs) != sample.response_length:
        log_probs = [math.nan] * sample.response_length
    elif sample.rollout_log_probs is not None and all(map(math.isfinite, log_probs)):
        return
    sample.rollout_log_probs = [x if math.isfinite(x) else UNSAMPLED for x in log_probs]


def _refuse_an_engine_without_log_probs(samples: list[Any], dropped: list[tuple[Any, Fault]]) -> None:
    missing = sum(fault.cause == "missing" for _, fault in dropped)
    if missing and missing == sum(sample.response_length > 0 for sample in samples):
        raise InputError(
            f"rollout_log_probs: none of {missing} samples has any; the rollout function must ask the engine for "
            "them (return_logprob) and keep them on the sample"
        )


def _report(dropped: list[tuple[Any, Fault]], samples: int) -> None:
    if not dropped:
        return
    for sample, fault in dropped[:NAMED]:
        logger.warning("dropped sample %s of group %s: %s", sample.index, sample.group_index, fault.detail)
    causes = Counter(fault.cause for _, fault in dropped)
    logger.warning(
        "dropped %d of %d samples from the loss: rollout log-probs %s%s",
        len(dropped),
        samples,
        ", ".join(f"{cause} in {count}" for cause, count in causes.items()),
        f"; the first {NAMED} are named above" if len(dropped) > NAMED else "",
    )
