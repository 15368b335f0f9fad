"""The pg-loss reducer beside a mean written down in float64, on one rank and over context-parallel ranks."""

import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import stand_in_hosts
import torch
from batches import Batch, batches, make_batch
from drive import same_bytes
from hypothesis import given
from launch import run_ranks
from stand_in_hosts import LAYOUTS
from tolerances import sum_rtol

from lab.host.cli.loading import load_function
from mis_plugins.errors import ConfigError, InputError

kept_token_mean = load_function("mis_plugins.mis.kept_token_mean", "--custom-pg-loss-reducer-function-path")


def expected(batch: Batch, x: torch.Tensor) -> tuple[float, float]:
    """The value in float64, and the sum of its terms' sizes, which is what rounding grows with."""
    total = size = 0.0
    for values, mask in zip(x.detach().split(batch.response_lengths), batch.loss_masks, strict=True):
        kept = [value for value, keep in zip(values.tolist(), mask.bool().tolist(), strict=True) if keep]
        total += math.fsum(kept) / max(1, len(kept))
        size += math.fsum(map(abs, kept)) / max(1, len(kept))
    return total, size


def gradients(batch: Batch) -> list[torch.Tensor]:
    """1 / n where kept: what each token's loss counts for."""
    return [mask.bool().float() / max(1, int(mask.bool().sum())) for mask in batch.loss_masks]


def reducer(batch: Batch) -> Any:
    return kept_token_mean(batch.total_lengths, batch.response_lengths, batch.loss_masks, False)


def assert_near(found: float, value: float, size: float, terms: int) -> None:
    assert abs(found - value) <= sum_rtol(terms + 2) * size


@given(batches())
def test_mean_over_kept_tokens(batch: Batch):
    x = batch.pg_loss()
    loss = reducer(batch)(x)
    assert loss.shape == () and loss.dtype == torch.float32
    assert_near(loss.item(), *expected(batch, x), x.numel())
    (gradient,) = torch.autograd.grad(loss, x)
    assert same_bytes(gradient, torch.cat(gradients(batch)))


@given(batches(min_sequences=2))
def test_sequences_and_micro_batches_add(batch: Batch):
    """The host sums over micro-batches: one at a time gives the same gradient, bit for bit."""
    alone = [reducer(batch.select([i])) for i in range(len(batch.prompts))]
    x = batch.pg_loss()
    together = torch.autograd.grad(reducer(batch)(x), x)[0]
    parts = [reduce(piece) for reduce, piece in zip(alone, x.split(batch.response_lengths), strict=True)]
    assert same_bytes(torch.autograd.grad(torch.stack(parts).sum(), x)[0], together)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_garbage_under_the_mask_changes_nothing(garbage: float):
    batch = make_batch([([0.0] * 3, [0.0] * 3, [1, 0, 1]), ([0.0] * 2, [0.0] * 2, [0, 0])])
    clean = torch.tensor([1.0, 0.0, 3.0, 0.0, 0.0])
    dirty = torch.where(batch.flat_mask, clean, garbage).requires_grad_()
    loss = reducer(batch)(dirty)
    assert loss.item() == 2.0
    assert torch.autograd.grad(loss, dirty)[0].tolist() == [0.5, 0.0, 0.5, 0.0, 0.0]


# ------------------------------------------------------------------------------------------------- context parallel


def sharded_batch() -> Batch:
    """Long and short prompts: some ranks own none of a response; empty, one-token and wholly rejected sequences."""
    generator = torch.Generator().manual_seed(5)
    lengths, prompts = [9, 1, 0, 20, 3, 6, 33], [3, 30, 5, 1, 20, 8, 2]
    masks = [(torch.rand(n, generator=generator) < 0.7).int() for n in lengths]
    masks[5] = torch.zeros(6, dtype=torch.int32)
    zeros = [torch.zeros(n) for n in lengths]
    return Batch(zeros, zeros, masks, prompts)


def part(batch: Batch, cp: int, rank: int) -> dict:
    """This rank's loss and gradient, and which tokens it owns."""
    _, owned = batch.shard(cp, rank, None)
    full = batch.pg_loss().detach().split(batch.response_lengths)
    x = torch.cat([values[own] for values, own in zip(full, owned, strict=True)]).requires_grad_()
    loss = reducer(batch)(x)
    (gradient,) = torch.autograd.grad(loss, x)
    return {"loss": loss.item(), "gradient": gradient, "owned": owned}


def test_context_parallel(tmp_path: Path):
    """The ranks' sums add up to the whole mean; each gradient is the whole one's, bit for bit."""
    batch = sharded_batch()
    parts = run_ranks(4, 4, lambda rank: part(batch, 4, rank), tmp_path)
    x = batch.pg_loss()
    assert_near(math.fsum(one["loss"] for one in parts), *expected(batch, x), x.numel())
    wanted = gradients(batch)
    for one in parts:
        mine = [gradient[own] for gradient, own in zip(wanted, one["owned"], strict=True)]
        assert same_bytes(one["gradient"], torch.cat(mine))
    assert sum(len(own) for one in parts for own in one["owned"]) == x.numel()


def under_miles(monkeypatch: pytest.MonkeyPatch, cp: int, rank: int, ulysses: bool = False) -> None:
    """Make Miles's own state that of one of `cp` context-parallel ranks."""
    state = stand_in_hosts.load(LAYOUTS["August"], monkeypatch).state
    vars(state).update(cp=SimpleNamespace(size=cp, rank=rank, group=None), is_ulysses_cp=ulysses)


@pytest.mark.parametrize("ulysses", [False, True])
@pytest.mark.parametrize("cp", [2, 4])
def test_miles_own_state_comes_before_megatrons(cp: int, ulysses: bool, monkeypatch: pytest.MonkeyPatch):
    """Sums are local, so that a rank needs to know only its place: no process group is touched."""
    batch, total = sharded_batch(), 0.0
    for rank in range(cp):
        under_miles(monkeypatch, cp, rank, ulysses)
        total += part(batch, cp, rank)["loss"]
    x = batch.pg_loss()
    assert_near(total, *expected(batch, x), x.numel())


# ----------------------------------------------------------------------------------------------------------- errors


def test_per_token_loss_is_refused():
    batch = sharded_batch()
    with pytest.raises(ConfigError, match="kept_token_mean with --calculate-per-token-loss: the host divides by its"):
        kept_token_mean(batch.total_lengths, batch.response_lengths, batch.loss_masks, True)


@pytest.mark.parametrize(("size", "refused"), [(1, False), (2, True)])
def test_padded_rows_under_context_parallelism_are_refused(size: int, refused: bool, monkeypatch: pytest.MonkeyPatch):
    """`--qkv-format bshd`, read from the arguments that the host gave to Megatron: the hook itself is not told."""
    under_miles(monkeypatch, size, 0)
    megatron = SimpleNamespace(_GLOBAL_ARGS=SimpleNamespace(qkv_format="bshd"))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", megatron)
    if refused:
        with pytest.raises(ConfigError, match="--qkv-format bshd under context parallelism"):
            reducer(sharded_batch())
    else:
        reducer(sharded_batch())


def test_padded_rows_that_nobody_announced_are_seen_by_their_count(monkeypatch: pytest.MonkeyPatch):
    batch = sharded_batch()
    under_miles(monkeypatch, 2, 0)
    _, owned = batch.shard(2, 0, 64)
    with pytest.raises(InputError, match="this rank holds .* zigzag thd"):
        reducer(batch)(torch.zeros(sum(map(len, owned))))


@pytest.mark.parametrize("shape", [[0], [1], [2], [4], [3, 1], [1, 3]])
def test_a_loss_of_other_tokens_is_refused(shape: list[int]):
    """One of a single token would be broadcast."""
    reduce = kept_token_mean([5, 4], [2, 1], [torch.ones(2), torch.ones(1)])
    tokens = shape if len(shape) > 1 else shape[0]
    with pytest.raises(InputError, match=re.escape(f"pg_loss: {tokens} tokens, but this rank holds 3 of zigzag thd")):
        reduce(torch.ones(shape))
    assert reduce(torch.ones(3)) == 2


def test_lengths_that_do_not_fit():
    batch = sharded_batch()
    with pytest.raises(InputError, match=r"masks: \[2\] tokens, but the responses have \[3\]"):
        kept_token_mean([5], [3], [torch.ones(2)])
    for mask in (torch.ones(3, 1), torch.ones(1, 3)):
        with pytest.raises(InputError, match=r"^masks: \[\[., .\]\] tokens, but the responses have \[3\]"):
            kept_token_mean([5], [3], [mask])
    with pytest.raises(InputError, match=r"^response_lengths: 1 sequences, but the batch has 2 "):
        kept_token_mean([5, 4], [3], [torch.ones(3), torch.ones(2)])
    with pytest.raises(InputError, match="masks: no sequence"):
        kept_token_mean([], [], [])
    with pytest.raises(InputError, match="total_lengths"):
        kept_token_mean(batch.total_lengths[:-1], batch.response_lengths, batch.loss_masks)
