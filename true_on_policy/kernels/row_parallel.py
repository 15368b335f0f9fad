"""A row-parallel product whose bits do not depend on the number of ranks: partial sums meet in one fixed tree.

Tensor parallelism splits the K of a row-parallel weight over ranks and adds their partial sums, so that each number of
ranks rounds differently. Here K is split into `leaves` equal parts on every layout, one rank included. A part is one
product in float32, parts are added as a balanced binary tree, and the sum is rounded to the dtype once. A rank holds
neighbouring leaves, a power of two of them. These leaves form a subtree, so every number of ranks adds up one tree.

The method follows tree-based invariant kernels (Zhang et al. 2025, "Deterministic Inference across Tensor Parallel
Sizes That Eliminates Training-Inference Mismatch", arXiv:2511.17826); here it runs on the native kernels.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from true_on_policy.contract.cpu import Contract
from true_on_policy.errors import ContractError
from true_on_policy.kernels import native


@dataclass(frozen=True)
class Tree:
    """A tree is the order in which the row-parallel products of a model add up.

    leaves: equal parts of the whole K; a power of two, equal on both sides, and a multiple of every number of ranks.
    """

    leaves: int

    def product(
        self, x: Float[Tensor, "*B K"], weight: Float[Tensor, "N K"], group: Any = None
    ) -> Float[Tensor, "*B N"]:
        """Sum x @ weight.T over the ranks of `group`, each of which holds its share of K; differentiable.

        Args:
            group: the process group, ranks in the order of their shares of K; None is one rank that holds all of K.

        Raises:
            ContractError: the leaves do not divide K, or the ranks do not divide the leaves.
        """
        leaves, ranks, depth = self.leaves, 1 if group is None else dist.get_world_size(group), weight.shape[1]
        if leaves < 1 or leaves & (leaves - 1):
            raise ContractError(f"leaves: got {leaves}; choose a power of two")
        if leaves % ranks:
            raise ContractError(f"leaves: {leaves} do not share out over {ranks} ranks; choose a multiple of {ranks}")
        if depth % (leaves // ranks):
            raise ContractError(f"leaves: {leaves // ranks} a rank do not divide its K of {depth}; choose fewer leaves")
        own = group if ranks > 1 else None
        return _RowParallel.apply(x, weight, leaves // ranks, own)


def agreed_tree(contract: Contract) -> Tree | None:
    """Return the tree that both sides share; None where the contract leaves row-parallel products as they are."""
    return Tree(contract.leaves) if contract.leaves > 1 else None


class _RowParallel(torch.autograd.Function):
    """The forward adds over the ranks; the backward gives each rank its own share's gradient, as in Megatron-core."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, leaves: int, group):
        ctx.save_for_backward(x, weight)
        rows, columns = x.reshape(-1, x.shape[-1]), weight.t()
        parts = zip(rows.chunk(leaves, 1), columns.chunk(leaves, 0), strict=True)
        own = tree_sum([native.product(a[None], b[None], torch.float32)[0] for a, b in parts])
        total = own
        if group is not None:  # gathered in the order of the ranks: an all-reduce would choose its own order
            sums = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
            dist.all_gather(sums, own.contiguous(), group=group)
            total = tree_sum(sums)
        return total.to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, *gradients):
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (rows @ weight).view(x.shape), rows.t() @ x.reshape(-1, x.shape[-1]), None, None


def tree_sum(parts: list[Tensor]) -> Tensor:
    """Add parts, a power of two of them, as a balanced binary tree: neighbours first."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
