"""Compiled functions of a contract: one wrong bit anywhere keeps a function eager, and nothing stays replaced."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lab import compiled_functions
from lab.compiled_functions import Tried, compiled_where_equal, tried
from true_on_policy.contract.cpu import Shapes
from true_on_policy.contract.rounding import ORDERS, add_residual, rms_norm
from true_on_policy.models import hf_decoder

SHAPES = Shapes(linear=((8, 16),), attention=((2, 1, 8),), hidden=(8,), activated=(12,), chosen=((4, 2, 8),))
NAMES = ["rms_norm", "add_residual", "rms_norm", "add_residual", "rotated", "gated", "chosen", "combined", "linear",
         "log_softmax"]  # fmt: skip


def found(monkeypatch: pytest.MonkeyPatch, change: Callable[[Callable], Callable], graphs: list[Any]) -> list[Tried]:
    """What is found where a function is compiled to `change` of it, by a compiler that made these graphs."""
    monkeypatch.setattr(compiled_functions, "_compile", lambda function: (change(function), graphs))
    return list(tried("bf16", SHAPES, ORDERS["sglang"], torch.device("cpu")))


def nudged(function: Callable, rows: int, graph: bool) -> Callable:
    """A function whose last value lies one step higher, in a call of so many rows, with or without a gradient."""

    def wrong(*given: Any) -> Any:
        made = function(*given)
        first = made[0] if isinstance(made, tuple) else made
        if len(first) == rows and torch.is_grad_enabled() == graph:
            value = first.data.view(-1)[-1:]
            value.copy_(torch.nextafter(value, value + 1))
        return made

    return wrong


def test_every_function_of_a_layer_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    same = found(monkeypatch, lambda f: f, [0])
    assert [one.function for one in same] == NAMES
    assert not [one for one in same if one.differs or one.gradient_differs]


@pytest.mark.parametrize("rows", compiled_functions.ROWS)
@pytest.mark.parametrize("graph", [False, True])
def test_one_bit_in_one_call_is_found(rows: int, graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = found(monkeypatch, lambda f: nudged(f, rows, graph), [0])
    assert all(one.differs and one.differs.startswith(f"{rows} rows") for one in wrong)


def test_what_was_not_compiled_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(function: Callable) -> Callable:
        raise NotImplementedError("no compiler\nhere")

    assert {one.differs for one in found(monkeypatch, lambda f: f, [])} == {"nothing was compiled"}
    assert {one.differs for one in found(monkeypatch, fails, [0])} == {"does not run: NotImplementedError: no compiler"}


def test_a_gradient_of_other_bits_is_told_and_keeps_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def steeper(function: Callable) -> Callable:
        def wrong(*given: Any) -> Any:
            if given[0].requires_grad:
                given[0].register_hook(lambda slope: slope * 2)
            return function(*given)

        return wrong

    told = {(one.differs, one.gradient_differs) for one in found(monkeypatch, steeper, [0])}
    assert told == {(None, True), (None, False)}  # the first argument of `combined` has no gradient


def test_only_what_is_equal_at_each_shape_takes_the_place_of_the_eager_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[torch.Size] = []

    def seen(function: Callable) -> tuple[Callable, list[Any]]:
        return lambda *given: [calls.append(given[0].shape), function(*given)][1], [0]

    monkeypatch.setattr(compiled_functions, "_compile", seen)
    compiled_functions._by_rows.cache_clear()
    some = [Tried("rms_norm", "8", None), Tried("add_residual", "8", None), Tried("add_residual", "16", "1 rows")]
    stream, weight, order = torch.randn(2, 3, 8), torch.ones(8), ORDERS["sglang"]
    plain = rms_norm(stream, weight, 1e-6, order)
    with pytest.raises(ZeroDivisionError), compiled_where_equal(some) as kept:
        assert kept == ("rms_norm",) and hf_decoder.add_residual is add_residual
        assert torch.equal(hf_decoder.rms_norm(stream, weight, 1e-6, order), plain)
        raise ZeroDivisionError
    assert calls[0] == (6, 8) and hf_decoder.rms_norm is rms_norm
    compiled_functions._by_rows.cache_clear()
