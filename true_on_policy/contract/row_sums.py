"""The order in which a row-parallel product adds the parts of its K; trainer and engine must share one order.

An order is a leaf or a pair. A leaf (begin, end) is one product over these columns, rounded to bf16; a pair of orders
is their rounded sum. Two sides agree where their orders are one tree. The rules were read in the sources. The engine's
kernel was run too, by Triton's interpreter, with 1 to 38 leaves a rank:

* engine: sgl-project/sglang branch sglang-miles, python/sglang/srt/true_on_policy/{contracts,config}.py at 29d5285c and
  d14bacd6, tp_invariant_ops.py as it entered the branch (e687c743, 2026-05-21): with more than one rank, leaves of 128
  columns where these divide a rank's share. Runs of leaves are added one after the other, the runs as a tree.
* Megatron: radixark/Megatron-LM miles-main 2e64d788, miles_megatron_plugins/true_on_policy/matmul.py: leaves of 128
  columns on any number of ranks, as one tree of neighbours. The code takes the engine to have TP x CP ranks.
  Open pull request 65 (98320eea) would add in the engine's order, as observed there on a B200.
* FSDP: one product.
"""

from collections.abc import Sequence
from functools import reduce

from true_on_policy.errors import ContractError

# Columns of a leaf: ROW_LINEAR_INV_BLOCK_K of SGLang, _ROW_LINEAR_INV_BLOCK_K of the Megatron fork.
LEAF = 128
Order = tuple


def engine_order(columns: int, ranks: int) -> Order:
    """Return SGLang's order over `ranks` tensor-parallel ranks.

    Raises:
        ContractError: the ranks cannot share the columns, or are no power of two.
    """
    share = _share(columns, ranks, "engine")
    if ranks == 1:
        return (0, columns)
    return _tree([_engine_part(rank * share, share) for rank in range(ranks)])


def megatron_order(columns: int, ranks: int, context: int) -> Order:
    """Return the Megatron fork's order over `ranks` tensor-parallel and `context` context-parallel ranks.

    Raises:
        ContractError: the tensor-parallel ranks cannot share the columns, or are no power of two.
    """
    share = _share(columns, ranks, "trainer")
    engine_share = columns // (ranks * context) if columns % (ranks * context) == 0 else share
    leaf = LEAF if engine_share % LEAF == 0 else engine_share
    return _tree([_tree(_leaves(rank * share, share, leaf)) for rank in range(ranks)])


def fsdp_order(columns: int) -> Order:
    """Return FSDP's order, which is one product: FSDP gathers a weight before it is used."""
    return (0, columns)


def _share(columns: int, ranks: int, side: str) -> int:
    if ranks < 1 or ranks & (ranks - 1):
        raise ContractError(f"{{{side}_tp}} {ranks}: the tree of partial sums needs a power of two")
    if columns % ranks:
        raise ContractError(f"{{{side}_tp}} {ranks} does not divide the {columns} columns of a weight")
    return columns // ranks


def _engine_part(begin: int, columns: int) -> Order:
    """Return the order of one rank's share in SGLang's kernel: a tree of equal runs of leaves.

    Runs are halved while their length is even and above 2; the leaves of a run are added one after the other.
    """
    leaves = _leaves(begin, columns, LEAF)
    run = len(leaves)
    while run > 2 and run % 2 == 0:
        run //= 2
    runs = [leaves[start : start + run] for start in range(0, len(leaves), run)]
    return _tree([reduce(lambda total, leaf: (total, leaf), leaves) for leaves in runs])


def _leaves(begin: int, columns: int, leaf: int) -> list[Order]:
    """Cut one rank's share into leaves; a share that leaves do not divide is one product."""
    width = columns if columns % leaf else leaf
    return [(start, start + width) for start in range(begin, begin + columns, width)]


def _tree(parts: Sequence[Order]) -> Order:
    """Add parts as a tree, neighbours first; an odd part waits for the next level, as in both sources."""
    while len(parts) > 1:
        pairs = [(parts[i], parts[i + 1]) for i in range(0, len(parts) - 1, 2)]
        parts = [*pairs, *parts[2 * len(pairs) :]]
    return parts[0]
