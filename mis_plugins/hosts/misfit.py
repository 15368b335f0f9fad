"""What an error says of a micro-batch whose lists are missing or do not fit together; loaded where one does not."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

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


def of_sequences(counts: Mapping[str, int]) -> str:
    """What an error says of lists, by their numbers of sequences; `response_lengths` decides where no two agree."""
    most, number = Counter(counts.values()).most_common(1)[0]
    size = most if 2 * number > len(counts) else counts.get("response_lengths")
    odd = {name: count for name, count in counts.items() if count != size}
    every = ", ".join(f"{name} {count}" for name, count in counts.items())
    if size is None:
        return f"{', '.join(odd)}: no two agree on the number of sequences ({every})"
    return f"{', '.join(odd)}: {next(iter(odd.values()))} sequences, but the batch has {size} ({every})"


def of_devices(devices: Mapping[str, str]) -> str:
    """What an error says of lists that lie on several devices."""
    most = Counter(devices.values()).most_common(1)[0][0]
    odd = ", ".join(f"{name}[0]: on {device}" for name, device in devices.items() if device != most)
    return f"{odd}, and the other lists are on {most}; move all lists of a micro-batch to one device"


def of_lengths(i: int, lengths: Mapping[str, Sequence[int]], loss_masks: Sequence[Any] | None) -> str:
    """What an error says of lengths, by name, of which those of sequence i do not fit together."""
    response, total = lengths["response_lengths"][i], lengths["total_lengths"][i]
    mask = None if loss_masks is None else loss_masks[i]
    if response < total:
        return f"max_seq_lens[{i}]: {lengths['max_seq_lens'][i]}, but sequence {i} has {total} tokens"
    if isinstance(mask, Tensor) and mask.numel() != response:
        return f"response_lengths[{i}]: {response} tokens, but sequence {i} has {mask.numel()} by its loss mask"
    return f"total_lengths[{i}]: {total}, but sequence {i} has a prompt and {response} response tokens"


def message(lists: Mapping[str, Sequence[Any]], layout: Layout, if_cut: str) -> str:
    """What an error says of lists, loss masks first, of which an entry is no tensor or has not its sequence's shape."""
    for name, tensors in lists.items():
        for i, tensor in enumerate(tensors):
            if tensor is None:
                return f"{name}[{i}]: None; sequence {i} came without {name.replace('_', ' ')}"
            if not isinstance(tensor, Tensor):
                return f"{name}[{i}]: a {type(tensor).__name__}; expected a tensor with a number for each token"
            if tensor.dim() != 1:
                return f"{name}[{i}]: shape {list(tensor.shape)}; expected one dimension, with a number for each token"
    counts = {name: [len(tensor) for tensor in tensors] for name, tensors in lists.items()}
    fits = dict.fromkeys(lists, layout.local_lengths) | {"loss_masks": list(layout.response_lengths)}
    rows = range(len(layout.response_lengths))
    return _of_sequence(next(i for i in rows if any(counts[x][i] != fits[x][i] for x in lists)), counts, layout, if_cut)


def _of_sequence(i: int, counts: Mapping[str, Sequence[int]], layout: Layout, if_cut: str) -> str:
    """What an error says of a sequence whose lists have several lengths."""
    here = {name: count[i] for name, count in counts.items()}
    response, local = layout.response_lengths[i], layout.local_lengths[i]
    odd, truth = _odd(here, response, local, layout.spans is None)
    lengths = ", ".join(f"{name} {count}" for name, count in here.items())
    if layout.spans is not None:
        lengths += f", response_lengths {response}, of which {local} on this rank"
    elif response != here["loss_masks"]:
        lengths += f", response_lengths {response}"
    mask, *of_rank = here.values()
    if layout.spans is not None and mask == response and len(of_rank) > 1 and len(set(of_rank)) == 1:
        if of_rank[0] == response:
            return f"{', '.join(list(here)[1:])}: the whole response of sequence {i}, not this rank's part ({lengths})"
        return f"total_lengths[{i}] (max_seq_lens[{i}] with bshd): sequence {i} was cut by another length ({lengths})"
    if not odd:
        return f"response_lengths[{i}]: {response} tokens, but sequence {i} has {truth} ({lengths})"
    if len(odd) > 1:
        return f"{', '.join(odd)}: no two agree on the tokens of sequence {i} ({lengths})"
    name = odd[0]
    error = f"{name}[{i}]: {here[name]} tokens, but sequence {i} has {truth} ({lengths})"
    if layout.spans is not None and name == "loss_masks":  # a response of the mask's length may leave as many here
        error += f", unless response_lengths[{i}] is wrong"
    if any(counts[name] != count and sorted(counts[name]) == sorted(count) for count in counts.values()):
        error += "; it has the lengths of all sequences in another order"
    if if_cut and max(of_rank) < mask:
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
    if not is_whole and mask != response and len({local, *counts}) == 2 and len(set(counts)) == 1:
        return [], mask  # nor do the parts on this rank fit the response
    votes = [local if mask == response else mask if is_whole else -1, *counts]
    most, number = Counter(votes).most_common(1)[0]
    truth = most if 2 * number > len(votes) else local if len(votes) == 2 else -1
    odd = [name for name, vote in zip(here, votes, strict=True) if vote != truth or vote < 0]
    return odd, response if odd == ["loss_masks"] and truth == local else truth
