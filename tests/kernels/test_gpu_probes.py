"""The accelerator's probes on CPU: each finds one bit that depends on one kind of company, and on nothing else."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lab.gpu import attention
from lab.gpu.attention import decode_failures, mixed_failures
from true_on_policy.bitwise import equal_bits
from true_on_policy.contract.cpu import Shapes
from true_on_policy.kernels import probes
from true_on_policy.kernels.probes import attention_failures, digest, drawing, in_company, product_failures

CPU = torch.device("cpu")
SHAPES = Shapes(linear=((8, 6),), attention=((4, 2, 8),))
SIZES = (1, 2, 7, 40)


@pytest.fixture(autouse=True)
def shorter(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"SIZES": SIZES, "LENGTHS": (1, 5, 9)}.items():
        monkeypatch.setattr(probes, name, value)
    monkeypatch.setattr(attention, "POSITIONS", (0, 4, 8))


def nudged(x: Tensor, where: Any) -> Tensor:
    """x with its first value at `where` one bit larger."""
    x, first = x.clone(memory_format=torch.contiguous_format), x[where].flatten()[0]
    x[where].view(-1)[0] = torch.nextafter(first, first + 1)
    return x


def companies(kernel) -> list[str]:
    found = in_company("kernel", (8,), kernel, torch.randn(SIZES[-1], 8), SIZES)
    return [failure.company for failure in found]


def test_a_kernel_without_company_passes():
    assert companies(lambda x: x * 2) == []


@pytest.mark.parametrize("size", SIZES[:-1])
def test_a_path_chosen_by_the_number_of_rows_is_found(size: int):
    kernel = lambda x: nudged(x, slice(0, 1)) if len(x) == size else x.clone()  # noqa: E731
    assert companies(kernel) == [f"{size} of 40 rows and all"]


def test_a_path_chosen_by_the_place_of_a_row_is_found():
    kernel = lambda x: nudged(x, slice(39, 40)) if len(x) == 40 else x.clone()  # noqa: E731
    assert companies(kernel) == ["a batch in two orders"]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention in float64, rounded once: [T, H, D] each."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out.transpose(0, 1).float()


def library(varies) -> Any:
    """FlashAttention's interface; `varies(starts of queries, starts of keys)` says which sequence gets another bit."""

    def packed(q, k, v, q_starts, k_starts, q_longest, k_longest, causal):
        lengths = [starts.diff().tolist() for starts in (q_starts, k_starts)]
        assert causal and [q_longest, k_longest] == [max(each) for each in lengths]
        parts = [
            attend(*rows) for rows in zip(q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1]), strict=True)
        ]
        return torch.cat([nudged(part, 0) if varies(i, *lengths) else part for i, part in enumerate(parts)]), None

    def cached(q, k, v, cache_seqlens, cu_seqlens_q, max_seqlen_q, causal):
        assert causal and q.shape[0] == 1 and cu_seqlens_q.tolist() == [0, 1]
        seen = int(cache_seqlens)
        out = attend(q, k[0, :seen], v[0, :seen])
        return nudged(out, 0) if varies(None, [max_seqlen_q], [seen]) else out

    interface: Any = ModuleType("flash_attn_interface")
    interface.flash_attn_varlen_func, interface.flash_attn_with_kvcache = packed, cached
    return interface


def found(varies) -> list[str]:
    return [failure.company for failure in attention_failures("fp32", SHAPES, CPU, library(varies))]


def decoded(varies, longest: int = 2) -> list[str]:
    return [failure.company for failure in decode_failures("fp32", SHAPES, CPU, library(varies), longest)]


def mixed(varies) -> list[str]:
    return [failure.company for failure in mixed_failures("fp32", SHAPES, CPU, library(varies))]


LATE = ["token 4 decoded and prefilled", "token 8 decoded and prefilled"]
PREFILLS, DECODES = (f"a {kind} sequence alone and in a mixed batch" for kind in ("prefilling", "decoding"))
# What varies, and what packed attention, a mixed batch, and decode then differ in.
VARIES: dict[str, tuple[Callable[..., bool], list[str], list[str], list[str]]] = {
    "nothing": (lambda i, queries, keys: False, [], [], []),
    "beside another sequence": (
        lambda i, queries, keys: len(queries) > 1 and keys[i] == 5,
        ["a sequence of 5 alone and packed"], [PREFILLS], [],
    ),
    "decode, which no trainer does": (lambda i, queries, keys: i is None and keys[0] > 4, [], [], LATE),
    "decode beside prefill": (
        lambda i, queries, keys: len(queries) == 2 and (queries[i], keys[i]) == (1, 9), [], [DECODES], [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", VARIES)
def test_attention_that_depends_on_its_company_is_found(what: str):
    varies, packed, beside, late = VARIES[what]
    assert (found(varies), mixed(varies), decoded(varies)) == (packed, beside, late)


def test_attention_that_depends_on_its_place_is_found():
    """The first of several sequences."""
    company = found(lambda i, queries, keys: i == 0 and len(queries) > 1)
    assert company[:2] == ["a sequence of 1 alone and packed", "packed sequences in two orders"]


def test_a_lone_query_is_told_from_one_that_keeps_the_causal_tiles():
    lone = lambda i, queries, keys: i is None and queries == [1]  # noqa: E731
    assert len(decoded(lone, 1)) == 3 and decoded(lone, 2) == []


def test_a_product_is_named_by_the_columns_that_ran(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probes, "COLUMNS", 4)
    other = lambda x, weight: nudged(F.linear(x, weight), 0) if len(x) == 1 else F.linear(x, weight)  # noqa: E731
    failures = list(product_failures("linear", "fp32", SHAPES, CPU, other))
    assert [failure.shape for failure in failures] == [(8, 4)]


def test_a_bias_is_contiguous(monkeypatch: pytest.MonkeyPatch):
    """Megatron-core's and SGLang's kernels read it without its stride."""
    biases: list[Tensor] = []
    linear = F.linear

    def recorded(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        biases.extend([] if bias is None else [bias])
        return linear(x, weight, bias)

    monkeypatch.setattr(F, "linear", recorded)
    list(probes.aten_failures("fp32", SHAPES, torch.device("cpu")))
    assert biases and all(bias.is_contiguous() for bias in biases)


def test_a_digest_is_of_every_bit():
    products = [(8, 6, F.linear)]
    here = digest("bf16", products, CPU)
    assert digest("bf16", products, CPU) == here and len(here) == 12
    assert digest("fp32", products, CPU) != here
    other = lambda x, weight: nudged(F.linear(x, weight), 0)  # noqa: E731
    assert digest("bf16", [(8, 6, other)], CPU) != here


def test_numbers_are_the_same_in_each_process():
    assert equal_bits(drawing("bf16", CPU)(3, 4), drawing("bf16", CPU)(3, 4))
    assert drawing("bf16", CPU)(1).dtype is torch.bfloat16
