"""Orders of partial sums: what they add is the whole, and equal trees give equal bits where other trees do not."""

from __future__ import annotations

import pytest
import torch

from true_on_policy.errors import ContractError
from true_on_policy.gpu_contract import MODELS
from true_on_policy.row_sums import engine_order, fsdp_order, megatron_order

LAYOUTS = [(1, 1, 1), (2, 1, 2), (2, 4, 8), (1, 2, 2), (4, 2, 8), (8, 1, 8), (2, 1, 1)]
COLUMNS = sorted(
    {n for _, s in MODELS.values() for n in (s.num_attention_heads * s.head_dim, s.intermediate_size)}
)


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


@pytest.mark.parametrize("columns", COLUMNS)
def test_equal_powers_of_two_agree_on_megatron(columns: int) -> None:
    for ranks in (2, 4, 8):
        if columns % ranks == 0:
            assert megatron_order(columns, ranks, 1) == engine_order(columns, ranks)


@pytest.mark.parametrize("columns", COLUMNS)
def test_one_rank_on_both_sides_agrees_on_fsdp_alone(columns: int) -> None:
    assert fsdp_order(columns) == engine_order(columns, 1)
    assert (megatron_order(columns, 1, 1) == engine_order(columns, 1)) == (
        columns % 128 != 0 or columns == 128
    )


def test_the_layout_that_miles_tests_agrees_for_qwen3_4b() -> None:
    for columns in (4096, 9728):
        assert megatron_order(columns, 2, 4) == engine_order(columns, 8)


def test_an_odd_number_of_leaves_sets_trees_apart() -> None:
    """9728 = 76 x 128: one tree of 76 leaves pairs the 19th with the 20th part, two trees of 38 cannot."""
    assert megatron_order(9728, 1, 2) != engine_order(9728, 2)
    assert leaves(megatron_order(9728, 1, 2)) == leaves(engine_order(9728, 2))


def test_equal_orders_give_equal_bits_and_unequal_ones_do_not() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(32, 9728, generator=generator).bfloat16()
    column = torch.randn(9728, generator=generator).bfloat16()

    def bits(order) -> list:
        return [evaluate(order, row, column).view(torch.int16).item() for row in rows]

    assert bits(megatron_order(9728, 2, 1)) == bits(engine_order(9728, 2))
    assert bits(megatron_order(9728, 1, 1)) != bits(engine_order(9728, 1))
    assert bits(megatron_order(9728, 1, 2)) != bits(engine_order(9728, 2))


def test_ranks_that_no_tree_takes_are_refused() -> None:
    with pytest.raises(ContractError, match="engine tensor parallel 3: the tree .* needs a power of two"):
        engine_order(4096, 3)
    with pytest.raises(ContractError, match="trainer tensor parallel 8 does not divide the 4100 columns"):
        megatron_order(4100, 8, 1)
