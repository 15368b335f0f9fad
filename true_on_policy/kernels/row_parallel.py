"""A row-parallel product whose bits do not depend on the number of ranks: partial sums meet in one fixed tree.

Tensor parallelism splits the K of a row-parallel weight over ranks and adds their partial sums, so that each number of
ranks rounds differently. Here K is split into `leaves` equal parts on every layout, one rank included. A part is one
product in float32, parts are added as a balanced binary tree, and the sum is rounded to the dtype once. A rank that
holds a power of two of neighbouring leaves holds a subtree, so that its ranks add up to the same tree.

The idea is that of tree-based invariant kernels (Zhang et al. 2025, "Deterministic Inference across Tensor Parallel
Sizes That Eliminates Training-Inference Mismatch", arXiv:2511.17826); here it stands on the kernels of `cpu`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from true_on_policy.contract.cpu import Contract
from true_on_policy.errors import ContractError
from true_on_policy.kernels.cpu import BACKENDS, Backend


@dataclass(frozen=True)
class Tree:
    """How the row-parallel products of a model add up.

    Attributes:
        backend: whose product a leaf is.
        leaves: see `row_parallel`.
    """

    backend: str
    leaves: int

    def product(
        self, x: Float[Tensor, "*B K"], weight: Float[Tensor, "N K"], group: Any = None
    ) -> Float[Tensor, "*B N"]:
        """`row_parallel` on this tree."""
        return row_parallel(BACKENDS[self.backend], x, weight, self.leaves, group)


def agreed_tree(contract: Contract) -> Tree | None:
    """The tree of both sides; None where the contract leaves row-parallel products as they are."""
    return Tree(contract.backend, contract.leaves) if contract.leaves > 1 else None


def row_parallel(
    backend: Backend,
    x: Float[Tensor, "*B K"],
    weight: Float[Tensor, "N K"],
    leaves: int,
    group: dist.ProcessGroup | None = None,
) -> Float[Tensor, "*B N"]:
    """x @ weight.T summed over the ranks of `group`, each of which holds its share of K; differentiable.

    Args:
        leaves: parts of the whole K; a power of two, the same on both sides, and a multiple of every number of ranks.
        group: ranks in the order of their shares of K; None is one rank that holds all of it.

    Raises:
        ContractError: the leaves do not divide K, or the ranks do not divide the leaves.
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    _check(leaves, ranks, weight.shape[1])
    group = group if ranks > 1 else None
    return _RowParallel.apply(backend, x, weight, leaves // ranks, group)


def _check(leaves: int, ranks: int, depth: int) -> None:
    if leaves < 1 or leaves & (leaves - 1):
        raise ContractError(f"leaves: got {leaves}; choose a power of two")
    if leaves % ranks:
        raise ContractError(
            f"leaves: {leaves} do not share out over {ranks} ranks; choose a multiple of {ranks}"
        )
    if depth % (leaves // ranks):
        raise ContractError(
            f"leaves: {leaves // ranks} a rank do not divide its K of {depth}; choose fewer leaves"
        )


class _RowParallel(torch.autograd.Function):
    """Forward adds over the ranks; backward gives each rank the gradient of its own share, as Megatron-core does."""

    @staticmethod
    def forward(ctx, backend: Backend, x: Tensor, weight: Tensor, leaves: int, group):
        ctx.save_for_backward(x, weight)
        rows, columns = x.reshape(-1, x.shape[-1]), weight.t()
        parts = zip(rows.chunk(leaves, 1), columns.chunk(leaves, 0), strict=True)
        own = tree_sum([backend.product(a[None], b[None], torch.float32)[0] for a, b in parts])
        total = own if group is None else tree_sum(_gather(own, group))
        return total.to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, *gradients):
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        return None, (rows @ weight).view(x.shape), rows.t() @ x.reshape(-1, x.shape[-1]), None, None


def tree_sum(parts: list[Tensor]) -> Tensor:
    """Neighbours first; a power of two of parts."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _gather(own: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Every rank's partial sum, in the order of the ranks: an all-reduce would pick an order of its own."""
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own.contiguous(), group=group)
    return parts
