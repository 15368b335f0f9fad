"""The sizes of a session: Qwen3-4B's on an accelerator, tiny ones in a dry run."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from true_on_policy.contract.families import Shape
from true_on_policy.contract.gpu import MODELS, Size, gpu_contract


@dataclass(frozen=True)
class Plan:
    """A plan holds the sizes of everything that a session measures.

    size: the sizes of the model whose kernels are probed and timed.
    rows: sizes of the batches in which the first rows are computed; the last is the whole batch.
    timed_rows: numbers of rows at which products, norms and log-softmax are timed.
    append: sequences and tokens of each that are decoded by appending to a cache.
    attention: as timed, sequences and tokens of each in prefill, and sequences and cached tokens of each
        in decode.
    model: the model whose trainer and decode path are compared by bytes.
    decoded: sequences, tokens of each prompt, tokens that are sampled.
    timed_model: the model whose log-prob forward and training step are timed.
    batch: sequences and tokens of each, as timed.
    corrected: for each size, the sequences and tokens of each whose mismatch is corrected.
    hostile: seconds for each room of random cases.
    copied: bytes of the copy that measures bandwidth.
    product: rows and columns of the product that measures arithmetic.
    """

    size: Size
    rows: tuple[int, ...]
    timed_rows: tuple[int, ...]
    append: tuple[int, int]
    attention: tuple[int, int, int, int]
    model: Shape
    decoded: tuple[int, int, int]
    timed_model: Shape
    batch: tuple[int, int]
    corrected: tuple[tuple[int, int], ...]
    hostile: float
    copied: int
    product: int


# The contract of the session: Qwen3-4B's full shapes on the kernels that Megatron's trainer pins, for any ranks.
CONTRACT = gpu_contract("qwen3-dense", "megatron")
QWEN3_4B = MODELS["qwen3-4B"][1]
WIDTHS = dict(zip(("hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab"), astuple(QWEN3_4B), strict=True))

FULL = Plan(
    size=QWEN3_4B,
    rows=(1, 2, 7, 64, 300, 1024, 8192),
    timed_rows=(1, 64, 1024, 8192),
    append=(4, 1024),
    attention=(4, 2048, 32, 4096),
    model=Shape(1024, 3072, 4, 16, 8, 128, 8192, tied=False),
    decoded=(8, 64, 192),
    timed_model=Shape(layers=4, tied=True, **WIDTHS),
    batch=(4, 1024),
    corrected=((256, 128), (256, 8192)),
    hostile=20.0,
    copied=1 << 32,
    product=8192,
)

TINY = Plan(
    size=Size(32, 32, 2, 1, 16, 32),
    rows=(1, 2, 40),
    timed_rows=(1, 3),
    append=(2, 5),
    attention=(1, 6, 2, 5),
    model=Shape(32, 32, 1, 2, 1, 16, 32, tied=False),
    decoded=(2, 3, 3),
    timed_model=Shape(32, 32, 1, 2, 1, 16, 32, tied=True),
    batch=(2, 4),
    corrected=((3, 20),),
    hostile=0.0,
    copied=1 << 12,
    product=16,
)
