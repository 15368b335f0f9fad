"""Orders of partial sums: what they add is the whole, and equal trees give equal bits where other trees do not."""

import pytest
import torch

from true_on_policy.contract.gpu import MODELS
from true_on_policy.contract.row_sums import engine_order, fsdp_order, megatron_order
from true_on_policy.errors import ContractError

LAYOUTS = [(1, 1, 1), (2, 1, 2), (2, 4, 8), (1, 2, 2), (4, 2, 8), (8, 1, 8), (2, 1, 1)]
COLUMNS = sorted({n for _, s in MODELS.values() for n in (s.num_attention_heads * s.head_dim, s.intermediate_size)})


def leaves(order) -> list[tuple[int, int]]:
    """From left to right."""
    return [order] if isinstance(order[0], int) else leaves(order[0]) + leaves(order[1])


def evaluate(order, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """row @ column in bf16, added up as the order says."""
    if isinstance(order[0], int):
        return (row[slice(*order)].double() @ column[slice(*order)].double()).bfloat16()
    return evaluate(order[0], row, column) + evaluate(order[1], row, column)


@pytest.mark.parametrize("columns", COLUMNS)
def test_every_order_covers_each_column_once(columns: int) -> None:
    orders = [fsdp_order(columns)]
    orders += [engine_order(columns, engine) for _, _, engine in LAYOUTS if columns % engine == 0]
    orders += [megatron_order(columns, tp, cp) for tp, cp, _ in LAYOUTS if columns % tp == 0]
    for order in orders:
        parts = leaves(order)
        assert [end for _, end in parts] == [begin for begin, _ in parts[1:]] + [columns]
        assert parts[0][0] == 0


@pytest.mark.parametrize("leaves_a_rank", range(1, 65))
def test_equal_ranks_agree_where_runs_of_the_kernel_are_a_tree(leaves_a_rank: int) -> None:
    """The engine's kernel adds three leaves as a tree does, and five or six otherwise."""
    columns = 2 * 128 * leaves_a_rank
    same = megatron_order(columns, 2, 1) == engine_order(columns, 2)
    assert same == (leaves_a_rank == 3 or leaves_a_rank & (leaves_a_rank - 1) == 0)


def test_the_engine_adds_runs_in_a_row_and_then_as_a_tree() -> None:
    """Of 6 leaves a rank two runs of 3; of 40 eight runs of 5 (the pull request of the Megatron fork has the same)."""
    (first, second), _ = engine_order(2 * 6 * 128, 2)
    assert first == (((0, 128), (128, 256)), (256, 384))
    assert second == (((384, 512), (512, 640)), (640, 768))
    share, _ = engine_order(2 * 40 * 128, 2)
    assert len(leaves(share[0][0][0])) == 5
    assert leaves(share) == [(n * 128, n * 128 + 128) for n in range(40)]


def test_a_share_that_leaves_do_not_divide_is_one_product() -> None:
    """9728 over 8 ranks: 1216 columns each."""
    assert leaves(engine_order(9728, 8)) == [(n * 1216, n * 1216 + 1216) for n in range(8)]
    assert engine_order(9728, 8) == megatron_order(9728, 8, 1)


@pytest.mark.parametrize("columns", COLUMNS)
def test_one_rank_on_both_sides_agrees_on_fsdp_alone(columns: int) -> None:
    assert fsdp_order(columns) == engine_order(columns, 1)
    assert (megatron_order(columns, 1, 1) == engine_order(columns, 1)) == (columns % 128 != 0 or columns == 128)


def test_the_layout_that_miles_tests_agrees_for_qwen3_4b() -> None:
    for columns in (4096, 9728):
        assert megatron_order(columns, 2, 4) == engine_order(columns, 8)


def test_an_odd_number_of_leaves_sets_equal_ranks_apart() -> None:
    """9728 = 2 x 38 x 128: the engine adds twice 19 in a row, which radixark/miles issue 1485 saw in Qwen3-4B."""
    for layout in ((1, 2), (2, 1)):
        assert megatron_order(9728, *layout) != engine_order(9728, 2)
        assert leaves(megatron_order(9728, *layout)) == leaves(engine_order(9728, 2))


def test_equal_orders_give_equal_bits_and_unequal_ones_do_not() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(32, 9728, generator=generator).bfloat16()
    column = torch.randn(9728, generator=generator).bfloat16()

    def bits(order) -> list:
        return [evaluate(order, row, column).view(torch.int16).item() for row in rows]

    assert bits(megatron_order(9728, 2, 4)) == bits(engine_order(9728, 8))
    assert bits(megatron_order(9728, 1, 1)) != bits(engine_order(9728, 1))
    assert bits(megatron_order(9728, 2, 1)) != bits(engine_order(9728, 2))


def test_ranks_that_no_tree_takes_are_refused() -> None:
    with pytest.raises(ContractError, match="engine_tp 3: the tree .* needs a power of two"):
        engine_order(4096, 3)
    with pytest.raises(ContractError, match="trainer_tp 8 does not divide the 4100 columns"):
        megatron_order(4100, 8, 1)
