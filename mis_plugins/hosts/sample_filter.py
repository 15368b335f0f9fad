"""Take samples whose rollout log-probs do not fit their response out of the loss, before training."""

import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from reprlib import repr as shortened
from typing import Any, Literal

import torch

from mis_plugins.config.view import view
from mis_plugins.errors import InputError, logger, warn_once
from mis_plugins.hosts.ownership import Hook
from mis_plugins.hosts.turns import JUDGED, NOT_HEARD, flat, listed
from mis_plugins.shared.absent import is_absent, number_of

Cause = Literal[
    "missing",
    "of another count",
    "beside a loss mask of another count",
    "beside a loss mask of other things than numbers",
    "beside a response_length of another count",
    "beside tokens of another count",
    "not finite",
    "absent",
    "of other tokens",
]

LONGEST = 1 << 24
"""Tokens of the longest response; a host makes lists of as many entries as a sample says that it has tokens."""

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

    Sets `remove_sample` where rollout log-probs are missing, or where they, the loss mask and the response's tokens
    differ in number, or where the sample has no token before its response. Sets it too where a token of the loss has no
    log-prob (`shared/absent.py`: None, NaN, -9999), or that of another token than the response holds there. Sets it
    where `response_length`, or an entry of the loss mask, is no number from 0 on. The log names dropped samples; they
    stay in their group's advantages. The hosts convert their lists too, and would fail there: missing log-probs become
    0, as does what is missing of tokens, and a loss mask that does not fit zeros. All of them are outside the loss by
    then.

    Tokens, which an environment may rewrite, are compared where a sample holds what the engine returned. A generate
    function of the user's may be wrapped in `turns_checked`, which compares them by turn. It may also keep SGLang's
    entries, one for each response token and None where no engine sampled, in `metadata["output_token_logprobs"]`. slime
    has `rollout_top_p_token_ids`: the set that each token was sampled from. Sets are not compared with
    `--sglang-speculative-algorithm`, as slime's engine may accept a draft's token from outside its set.

    Args:
        args: the host's. With Miles's `recompute_logprobs_via_prefill` the host scores all but aborted
            samples anew after this hook, and checks the count itself: this filter leaves them alone.
        data: samples, or groups of them, nested however the rollout function left them.

    Raises:
        InputError: none of the samples that were not removed before has any rollout log-prob, or the function that
            compares turns heard nothing of the engine.
    """
    args = view(args)
    samples = [sample for sample in flat(data) if not _scored_later(args, sample)]
    for sample in samples:
        sample.response_length = _as_int(sample.response_length)
    judged = [sample for sample in samples if not sample.remove_sample]
    drafts, dropped = bool(getattr(args, "sglang_speculative_algorithm", None)), []
    for sample in judged:
        fault = fault_of(sample, drafts)
        if fault is not None:
            dropped.append((sample, fault))
            sample.remove_sample = True
    for sample in samples:
        _make_readable(sample)
    _refuse_what_tells_nothing(judged, dropped)
    _report(dropped, len(samples))


def fault_of(sample: Any, drafts: bool = False) -> Fault | None:
    """What is wrong with the rollout log-probs of a host's `Sample`, if anything; `drafts` if the engine speculates."""
    log_probs, expected = listed(sample.rollout_log_probs), sample.response_length
    if not _is_count(expected):
        detail = f"a response_length of {shortened(expected)}, which is no number of tokens"
        return Fault("beside a response_length of another count", detail)
    if expected and not log_probs:
        return Fault("missing", f"no rollout log-probs for {expected} response tokens")
    fault = _other_lengths(len(log_probs), expected, sample.loss_mask)
    if fault is not None:
        return fault
    wrong = [x for x in listed(sample.loss_mask) if not _is_weight(x)]
    if wrong:
        detail = f"a loss mask with {shortened(wrong[0])}, where a number from 0 on should be"
        return Fault("beside a loss mask of other things than numbers", detail)
    pairs = zip(log_probs, _in_loss(sample), strict=True)
    absent = [x for x, counts in pairs if counts and is_absent(x)]
    if absent:
        return _without_log_probs(absent, expected)
    tokens = len(listed(getattr(sample, "tokens", range(expected + 1))))
    if expected and tokens <= expected:
        return Fault("beside tokens of another count", f"{tokens} tokens for a prompt and {expected} response tokens")
    return _other_tokens(sample, drafts)


def _other_lengths(log_probs: int, tokens: int, loss_mask: Any) -> Fault | None:
    """Whether log-probs, tokens and loss mask, where there is one, differ in number; the odd one of three is named."""
    if loss_mask is None:
        mask, of_mask = tokens, ""
    else:
        mask = len(listed(loss_mask))
        of_mask = f" and a loss mask of {mask}"
    if log_probs == tokens == mask:
        return None
    if log_probs == tokens:
        detail = f"a loss mask of {mask} for {tokens} response tokens and {log_probs} rollout log-probs"
        return Fault("beside a loss mask of another count", detail)
    if log_probs == mask:
        detail = f"a response_length of {tokens} for {log_probs} rollout log-probs{of_mask}"
        return Fault("beside a response_length of another count", detail)
    detail = f"{log_probs} rollout log-probs for {tokens} response tokens{of_mask}"
    return Fault("of another count", detail if mask == tokens else f"{detail}: no two agree")


def _without_log_probs(absent: list[Any], tokens: int) -> Fault:
    """The fault of a sample whose entries for tokens of the loss are no log-probs; what stands there is named."""
    names = [shortened(x) if x is None or isinstance(x, str) else f"{number_of(x):g}" for x in absent]
    named = Counter(name for name in names if name not in ("nan", "inf", "-inf"))
    cause: Cause = "absent" if set(named) - {"None"} else "not finite"
    entries = ", ".join(f"{name} in {count}" for name, count in named.items())
    return Fault(cause, f"{len(absent)} of {tokens} rollout log-probs {cause}{entries and ': ' + entries}")


def _other_tokens(sample: Any, drafts: bool) -> Fault | None:
    """Whether a token of the loss is another than the engine returned, as far as the sample tells."""
    judged = getattr(sample, JUDGED, None)
    if judged is not None and judged.fault:
        return Fault("of other tokens", judged.fault)
    length, metadata = sample.response_length, getattr(sample, "metadata", None)
    entries = metadata.get(ENTRIES) if isinstance(metadata, Mapping) else None
    if entries is not None and len(listed(entries)) != length:
        return Fault("of other tokens", f"{len(listed(entries))} {ENTRIES} for {length} response tokens")
    if entries is not None:
        pairs = zip(listed(entries), _response(sample), strict=True)
        changed = [entry is not None and _token_of(entry) != token for entry, token in pairs]
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


def _token_of(entry: Any) -> int | None:
    """The token that an entry of SGLang's names; None where it names none."""
    try:
        return int(entry[1])
    except (TypeError, ValueError, LookupError):
        return None


def _outside_nucleus(sample: Any) -> list[bool]:
    """For each response token, whether it lies outside the set it was sampled from; False without a set."""
    kept_set = [getattr(sample, f"rollout_top_p_token_{name}", None) for name in ("ids", "offsets")]
    none = [False] * sample.response_length
    if any(x is None for x in kept_set):
        return none
    ids, offsets = (torch.as_tensor(x).long().flatten() for x in kept_set)
    tokens, sizes = torch.tensor(_response(sample), dtype=torch.float64), offsets.diff()
    if len(sizes) != len(tokens) or int(sizes.sum()) != len(ids) or (sizes < 0).any():
        return none  # slime itself refuses such a sample
    owner = torch.repeat_interleave(sizes)
    hits = torch.zeros_like(sizes).index_add_(0, owner, (ids == tokens[owner]).long())
    return ((sizes > 0) & (hits == 0)).tolist()


def _response(sample: Any) -> list[float]:
    """Ids of the response's tokens; NaN, which is no id, where an entry is no number."""
    tokens = listed(sample.tokens)
    return [number_of(token) for token in tokens[len(tokens) - sample.response_length :]]


def _scored_later(args: Any, sample: Any) -> bool:
    if not getattr(args, "recompute_logprobs_via_prefill", False):
        return False
    warn_once(
        "drop_broken_samples with --recompute-logprobs-via-prefill looks at aborted samples only: "
        "the host replaces the log-probs of all others afterwards"
    )
    return getattr(sample.status, "value", sample.status) != "aborted"


def _in_loss(sample: Any) -> list[bool]:
    """For each response token, whether it is in the loss: by the loss mask, or all without a mask."""
    mask = sample.loss_mask
    return [True] * sample.response_length if mask is None else [bool(x) for x in listed(mask)]


def _as_int(entry: Any) -> Any:
    """A whole number of an array or a tensor as Python's own: an array times a list is no longer list."""
    try:
        return operator.index(entry)
    except TypeError:
        return entry


def _is_count(entry: Any) -> bool:
    """Whether a sample's response_length is a whole number from 0 on, of tokens that a list can hold."""
    return isinstance(entry, int) and 0 <= entry <= LONGEST


def _is_weight(entry: Any) -> bool:
    """Whether an entry of a loss mask is a truth value, or a number from 0 on."""
    return isinstance(entry, bool) or 0 <= number_of(entry) < math.inf


def _make_readable(sample: Any) -> None:
    """Give the sample tokens, log-probs and a loss mask as long as its response, where it lacks them."""
    if not _is_count(sample.response_length):
        sample.response_length = 0
    log_probs, tokens = listed(sample.rollout_log_probs), sample.response_length
    if sample.rollout_log_probs is None or len(log_probs) != tokens:
        sample.rollout_log_probs = [UNSAMPLED] * tokens
    elif any(map(is_absent, log_probs)):
        sample.rollout_log_probs = [UNSAMPLED if is_absent(x) else x for x in log_probs]
    mask = listed(sample.loss_mask)
    if sample.loss_mask is not None and (len(mask) != tokens or not all(map(_is_weight, mask))):
        sample.loss_mask = [0] * tokens
    held = listed(getattr(sample, "tokens", range(tokens + 1)))
    if tokens and len(held) <= tokens:
        sample.tokens = [*held, *[0] * (tokens + 1 - len(held))]


def _refuse_what_tells_nothing(samples: list[Any], dropped: list[tuple[Any, Fault]]) -> None:
    if any(fault.detail == NOT_HEARD for _, fault in dropped):
        raise InputError(
            f"turns_checked: {NOT_HEARD}; answers of /generate are heard by the host's own post alone, in the process "
            "that generates: drop --use-distributed-post, and sessions, or generate without turns_checked"
        )
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
