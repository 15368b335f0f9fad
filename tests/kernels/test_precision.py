"""TF32 is off inside a pin, whoever allowed it and by which of torch's switches, and afterwards as it was found."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import attrgetter

import pytest
import torch

from true_on_policy.errors import PinError
from true_on_policy.kernels import precision

ALLOWED: dict[str, Callable[[], None]] = {
    "the older way": lambda: torch.set_float32_matmul_precision("high"),
    "the older way, for less": lambda: torch.set_float32_matmul_precision("medium"),
    "by cuBLAS": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "by cuDNN": lambda: setattr(torch.backends.cudnn, "allow_tf32", True),
    "the newer way": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "of convolutions": lambda: setattr(attrgetter("cudnn.conv")(torch.backends), "fp32_precision", "tf32"),
}


def state() -> list[tuple[str, object]]:
    """Of every switch that torch can read now."""
    return [(switch.name, value) for switch, value in precision._readable()]


@pytest.fixture(autouse=True)
def as_found() -> Iterator[None]:
    before = precision._readable()
    yield
    for switch, value in before:
        switch.put(value)


@pytest.mark.parametrize("way", ALLOWED)
def test_off_and_then_as_it_was_found(way: str):
    ALLOWED[way]()
    before = state()
    assert precision.settings() != {"torch: TF32 allowed by": "nothing"}
    undo = precision.pin()
    assert precision.settings() == {"torch: TF32 allowed by": "nothing"}
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    undo()
    assert state() == before


@pytest.mark.parametrize(
    ("place", "value"),
    [("cuda.matmul", "tf32"), ("cudnn.conv", "tf32"), ("cudnn.rnn", "tf32"), ("mkldnn.matmul", "tf32"),
     ("mkldnn.matmul", "bf16")],
)  # fmt: skip
def test_each_place_is_seen_and_switched_off_with_all_others_off_already(place: str, value: str):
    precision.pin()
    owner = attrgetter(place)(torch.backends)
    owner.fp32_precision = value
    assert f"{place}.fp32_precision" in precision.settings()["torch: TF32 allowed by"]
    precision.pin()
    assert owner.fp32_precision == "ieee"


def test_what_torch_cannot_read_is_left_alone():
    ALLOWED["the newer way"]()
    with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
        torch.get_float32_matmul_precision()
    undo = precision.pin()
    assert torch.get_float32_matmul_precision() == "highest"
    undo()
    with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
        torch.get_float32_matmul_precision()


def test_a_switch_without_effect_is_told_and_the_others_are_restored(monkeypatch: pytest.MonkeyPatch):
    ALLOWED["the older way"]()
    before = state()
    dead = replace(precision.SWITCHES[-1], name="dead", get=lambda: "tf32", put=lambda value: None)
    monkeypatch.setattr(precision, "SWITCHES", (*precision.SWITCHES, dead))
    with pytest.raises(PinError, match="TF32 cannot be switched off .still allowed by dead"):
        precision.pin()
    assert state() == [*before, ("dead", "tf32")]


def test_ctrl_c_between_two_switches_restores_them(monkeypatch: pytest.MonkeyPatch):
    ALLOWED["the older way"]()
    before = state()
    puts = iter([KeyboardInterrupt])

    def put(value: object) -> None:
        for interrupt in puts:
            raise interrupt

    last = replace(precision.SWITCHES[-1], name="last", get=lambda: "tf32", put=put)
    monkeypatch.setattr(precision, "SWITCHES", (*precision.SWITCHES, last))
    with pytest.raises(KeyboardInterrupt):
        precision.pin()
    assert state() == [*before, ("last", "tf32")]


def test_the_probe_sees_what_loses_bits(monkeypatch: pytest.MonkeyPatch):
    """As TF32 would: 10 bits of mantissa."""
    here = torch.device("cpu")
    assert list(precision.probe(here)) == []
    exact = torch.bmm
    rounded = lambda x, y: (exact(x, y) * 2**10).round() / 2**10  # noqa: E731
    monkeypatch.setattr(torch, "bmm", rounded)
    (failure,) = precision.probe(here)
    assert str(failure).startswith("bmm in float32 at (64, 64), times the identity and itself: 4096 of 4096")
