"""What an error says of a micro-batch whose lists are missing or do not fit together; loaded where one does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from mis_plugins.packing.layout import Layout

NO_ROLLOUT_LOG_PROBS = (
    "rollout_log_probs: None: the samples carry no log-probs of the rollout engine, so that no ratio is known; the "
    "rollout engine must return one for each sampled token: let the function of --custom-generate-function-path or "
    "--rollout-function-path set sample.rollout_log_probs (Miles scores samples anew with "
    "--recompute-logprobs-via-prefill)"
)
NO_TRAIN_LOG_PROBS = (
    "train_log_probs: None: the trainer's log-probs were neither recomputed nor handed on, so that no ratio is known; "
    "both hosts leave them out with --use-rollout-logprobs: drop it, or give --get-mismatch-metrics in place of "
    "--use-tis, which recomputes them"
)


def message(i: int, counts: Mapping[str, Sequence[int]], layout: Layout, if_cut: str) -> str:
    """What an error says of the first sequence whose lists have several lengths."""
    here = {name: count[i] for name, count in counts.items()}
    response, local = layout.response_lengths[i], layout.local_lengths[i]
    odd, truth = _odd(here, response, local, layout.spans is None)
    told = ", ".join(f"{name} {count}" for name, count in here.items())
    if layout.spans is not None:
        told += f", response_lengths {response}, of which {local} on this rank"
    elif response != here["loss_masks"]:
        told += f", response_lengths {response}"
    if not odd:
        return f"response_lengths[{i}]: {response} tokens, but sequence {i} has {truth} ({told})"
    if len(odd) > 1:
        return f"{', '.join(odd)}: no two agree on the tokens of sequence {i} ({told})"
    name, mask = odd[0], here["loss_masks"]
    error = f"{name}[{i}]: {here[name]} tokens, but sequence {i} has {truth} ({told})"
    if any(sorted(counts[name]) == sorted(count) for other, count in counts.items() if other != name):
        error += "; it has the lengths of all sequences in another order"
    if if_cut and max(list(here.values())[1:]) < mask:
        error += f"; {if_cut}"
    return error


def _odd(here: Mapping[str, int], response: int, local: int, is_whole: bool) -> tuple[list[str], int]:
    """The lists that disagree with the majority, and the number of tokens by the majority.

    Every list is named where no two agree, and none where all agree against `response_lengths`, which decides between
    two lists alone.

    Args:
        here: number of tokens by list, of the loss mask first.
        response, local: number of tokens by `response_lengths`, and how many of them lie on this rank.
        is_whole: whether responses lie whole on this rank, so that masks and log-probs have equal lengths.
    """
    mask, *counts = here.values()
    votes = [local if mask == response else mask if is_whole else -1, *counts]
    most, number = Counter(votes).most_common(1)[0]
    truth = most if 2 * number > len(votes) else local if len(votes) == 2 else -1
    odd = [name for name, vote in zip(here, votes, strict=True) if vote != truth or vote < 0]
    return odd, response if odd == ["loss_masks"] and truth == local else truth
