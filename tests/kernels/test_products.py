"""What the digest of both sides' products sees: at tensor parallelism o and down run functions of each side's own.

Stand-ins of both functions add leaves in the orders that row_sums.py read in the real ones.
"""

import sys
from collections.abc import Callable
from functools import reduce

import pytest
import torch
from stand_ins import Write
from torch import Tensor

from true_on_policy.contract.gpu import MODELS, Size, gpu_contract
from true_on_policy.contract.row_sums import engine_order, megatron_order
from true_on_policy.engines.sglang import settings as sglang_settings
from true_on_policy.errors import NotSeenError
from true_on_policy.kernels import gpu, probes
from true_on_policy.kernels import megatron as mode
from true_on_policy.observe import process

CPU = torch.device("cpu")

# As radixark/Megatron-LM's: the numbers of ranks are those of Megatron's groups.
MATMUL = """
from megatron.core import parallel_state

def sglang_reference_matmul(
    input_, weight, bias, *, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, row_parallel=False
):
    assert row_parallel and bias is None
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    share = input_.shape[1] * ranks // parallel_state.get_tensor_and_context_parallel_world_size()
    leaf = 128 if share % 128 == 0 else share
    parts = [(a.double() @ b.double().t()).to(a.dtype) for a, b in zip(input_.split(leaf, 1), weight.split(leaf, 1))]
    while len(parts) > 1:
        pairs = [parts[i] + parts[i + 1] for i in range(0, len(parts) - 1, 2)]
        parts = [*pairs, *parts[2 * len(pairs) :]]
    return parts[0]
"""


class RowParallelLinear(torch.nn.Module):
    """As SGLang's: with several ranks its kernel adds runs of leaves in a row, and the runs as a tree."""

    def __init__(self, inner: int, ranks: int):
        super().__init__()
        self.input_size, self.input_size_per_partition, self.ranks = inner, inner // ranks, ranks
        self.weight = torch.nn.Parameter(torch.zeros(8, inner // ranks))

    def forward(self, input_: Tensor, skip_all_reduce: bool = False) -> tuple[Tensor, None]:
        assert skip_all_reduce, "a probe waits for no other rank"
        width = self.weight.shape[1]
        leaf = 128 if self.ranks > 1 and width % 128 == 0 else width
        pairs = zip(input_.split(leaf, 1), self.weight.split(leaf, 1), strict=True)
        parts = [(a.double() @ b.double().t()).to(a.dtype) for a, b in pairs]
        run = len(parts)
        while run > 2 and run % 2 == 0:
            run //= 2
        runs = [reduce(Tensor.add, parts[i : i + run]) for i in range(0, len(parts), run)]
        while len(runs) > 1:
            runs = [a + b for a, b in zip(runs[::2], runs[1::2], strict=True)]
        return runs[0], None


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "device", lambda: CPU)
    monkeypatch.setattr(probes, "DIGESTED", (4, 16))


@pytest.fixture
def groups(write: Write, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """groups(tensor, context): Megatron has these, and its fork is installed."""
    from megatron.core import parallel_state

    write({f"{mode.FORK.replace('.', '/')}.py": MATMUL})

    def make(tensor: int, context: int) -> None:
        for name, value in {"model_parallel_is_initialized": True, "get_tensor_model_parallel_world_size": tensor,
                            "get_tensor_and_context_parallel_world_size": tensor * context}.items():  # fmt: skip
            monkeypatch.setattr(parallel_state, name, lambda value=value: value)

    return make


def size(o: int, down: int) -> Size:
    return Size(64, down, o // 64, 8, 64, 96)


def model(o: int, down: int, ranks: int) -> torch.nn.Module:
    """With the layers of SGLang that are looked for, and one before them that is not."""
    found = torch.nn.Module()
    found.embed, found.o_proj, found.down_proj = (
        torch.nn.Linear(2, 2),
        *(  # type: ignore[assignment]
            RowParallelLinear(inner, ranks) for inner in (o, down)
        ),
    )
    return found


def of_engine(o: int, down: int, ranks: int) -> str:
    return probes.digest("bf16", sglang_settings._products(model(o, down, ranks), size(o, down)), CPU)


def of_trainer(o: int, down: int) -> str:
    contract = gpu_contract("qwen3-dense", "megatron")
    object.__setattr__(contract, "size", size(o, down))  # a layout that cannot hold would be refused
    return process._products(contract)


LAYOUTS = [
    (2, 1, 2, 1024, 2048),
    (2, 1, 2, 1024, 3 * 256),
    (2, 1, 2, 1024, 6 * 256),
    (2, 1, 2, 5 * 256, 1024),
    (2, 4, 8, 1024, 8 * 192),
    (4, 2, 8, 2048, 5 * 1024),
    (2, 1, 8, 1024, 1024),
]


@pytest.mark.parametrize(("tensor", "context", "engine", "o", "down"), LAYOUTS)
def test_digests_agree_where_the_orders_do(
    tensor: int, context: int, engine: int, o: int, down: int, groups: Callable[[int, int], None]
) -> None:
    groups(tensor, context)
    same = all(megatron_order(n, tensor, context) == engine_order(n, engine) for n in (o, down))
    assert (of_trainer(o, down) == of_engine(o, down, engine)) == same


def test_layouts_of_both_kinds_are_tried() -> None:
    found = {
        all(megatron_order(n, tensor, context) == engine_order(n, engine) for n in (o, down))
        for tensor, context, engine, o, down in LAYOUTS
    }
    assert found == {True, False}


def test_one_rank_of_an_engine_is_one_product_as_on_fsdp() -> None:
    contract = gpu_contract("qwen3-dense", "fsdp", size=size(1024, 2048))
    exact = lambda x, weight: (x.double() @ weight.double().t()).to(x.dtype)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        for module in (process.F, gpu.F):
            patch.setattr(module, "linear", exact)
        assert process._products(contract) == of_engine(1024, 2048, 1) != of_engine(1024, 2048, 2)


def test_the_weights_of_the_model_are_left_alone() -> None:
    found = model(1024, 2048, 2)
    before = dict(found.named_parameters())
    for inner, outer, multiply in sglang_settings._products(found, size(1024, 2048)):
        assert multiply(torch.ones(2, inner), torch.ones(outer, inner)).eq(inner).all()
    after = dict(found.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    assert not any(weight.any() for name, weight in after.items() if name.endswith("proj.weight"))


def test_what_is_not_there_is_not_seen(groups: Callable[[int, int], None], monkeypatch) -> None:
    with pytest.raises(NotSeenError, match="not seen: Megatron's groups"):
        mode.row_parallel()
    monkeypatch.delitem(sys.modules, "megatron.core.parallel_state")
    with pytest.raises(NotSeenError, match="not seen: Megatron's groups"):
        mode.row_parallel()
    with pytest.raises(NotSeenError, match="Linear has no o_proj"):
        sglang_settings._products(torch.nn.Linear(2, 2), size(1024, 2048))


def test_each_function_multiplies_its_own_product() -> None:
    _, size = MODELS["qwen3-4B"]
    o, down = (lambda x, weight: x for _ in range(2))
    inner = {multiply: inner for inner, _, multiply in gpu.products(size, o, down)}
    assert inner[o] == size.num_attention_heads * size.head_dim
    assert inner[down] == size.intermediate_size


def test_without_the_fork_the_row_is_not_seen() -> None:
    with pytest.raises(NotSeenError, match=f"not seen: no {mode.FORK}"):
        mode.row_parallel()
