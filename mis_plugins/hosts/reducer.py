"""The policy loss averaged over the tokens that are kept, where the masks come from elsewhere than our TIS hook."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from mis_plugins.errors import ConfigError, InputError
from mis_plugins.hosts import megatron
from mis_plugins.hosts.batch import Tensors, counts_of, host_layout
from mis_plugins.hosts.ownership import Hook
from mis_plugins.hosts.registry import current
from mis_plugins.packing.ragged import Ranks, to_device

FLAG = "--custom-pg-loss-reducer-function-path mis_plugins.mis.kept_token_mean"
Reduce = Callable[[Float[Tensor, " T"]], Float[Tensor, ""]]


@Hook
def kept_token_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    masks: Tensors,
    calculate_per_token_loss: bool = False,
) -> Reduce:
    """The pg-loss reducer of Miles and slime: each sequence's mean over the tokens that its mask keeps.

    `sum_i (1 / max(1, sum_t m_it)) sum_t m_it x_it`, over this rank's tokens; the host adds up the ranks. The hosts'
    own reducers divide by the mask before rejection. A sequence counts once, also where several make one rollout.

    Args:
        masks: one 1-D tensor a sequence, the full response on every context-parallel rank, after rejection.

    Raises:
        ConfigError: `calculate_per_token_loss`; padded rows (`qkv_format: bshd`) under context parallelism.
        InputError: lengths that do not fit; the returned function raises it for a tensor of another length.
    """
    if calculate_per_token_loss:
        raise ConfigError(
            f"{FLAG} with --calculate-per-token-loss: the host divides by its own count of tokens before "
            "rejection, whatever a reducer returns; drop --calculate-per-token-loss, or drop the reducer"
        )
    size, rank = _context_parallel()
    layout = host_layout(SimpleNamespace(), total_lengths, response_lengths, None, size, rank, masks)
    counts = counts_of(masks)
    if not counts:
        raise InputError("masks: no sequence in this micro-batch")
    if counts != list(response_lengths):
        raise InputError(f"masks: {counts} tokens, but the responses have {list(response_lengths)}")
    mask = torch.cat([mask.bool() for mask in masks])
    ragged = layout.place(mask, Ranks())
    lengths = ragged.to_tokens(valid_tokens(mask, response_lengths).clamp(min=1))

    def reduce(x: Tensor) -> Tensor:
        if x.shape != lengths.shape:  # a column would be spread over every pair of tokens
            held = f"this rank holds {lengths.numel()} of zigzag thd sequences"
            raise InputError(f"pg_loss: {counts_of([x])[0]} tokens, but {held}")
        return torch.where(ragged.loss_mask, x / lengths, 0).sum()

    return reduce


def valid_tokens(mask: Shaped[Tensor, " R"], response_lengths: Sequence[int]) -> Float[Tensor, " N"]:
    """Number of tokens in the mask of each whole sequence: exact in float32 up to 2^24."""
    lengths = to_device(list(response_lengths), mask.device)
    # unsafe skips a check of the lengths that would wait for the device.
    return torch.segment_reduce(mask.float(), "sum", lengths=lengths, unsafe=True)


def _context_parallel() -> tuple[int, int]:
    """(size, rank) of context parallelism, asked of the running host: it does not hand them to a reducer."""
    size, rank = current().parallel()[1]
    if size > 1 and getattr(megatron.arguments(), "qkv_format", "thd") != "thd":
        raise ConfigError(
            f"{FLAG} with --qkv-format bshd under context parallelism: a reducer is not told how long the rows are; "
            "use --qkv-format thd or --context-parallel-size 1"
        )
    return size, rank
