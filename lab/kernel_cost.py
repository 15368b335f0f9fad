"""What do batch-invariant kernels cost, against the stock ones?

A random Qwen3 of Hugging Face runs on one thread of one process. Stock, native, tile and leaves take turns, so that a
busy machine slows all four. A figure is the median processor time of the calls; the ratio is what counts. "leaves" is
native with four leaves in each row-parallel product, as unequal tensor parallelism needs them, on one rank.

prefill     logits of one batch without gradients
decode      steps of one token each, after a prefill that is not timed
train       log-probs, backward through them, no optimizer
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.kernel_cost:main", extra="verify")

import ctypes
import itertools
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from lab.provenance import as_markdown, markdown_table, parser_of, provenance, target, write_record
from lab.tile import TILE
from mis_plugins.shared.numerals import count
from mis_plugins.shared.table import print_table
from true_on_policy.contract.cpu import DTYPES, Contract
from true_on_policy.kernels import native
from true_on_policy.kernels.pin import pinned
from true_on_policy.kernels.row_parallel import Tree
from true_on_policy.models import hf_decoder

BACKENDS = ("native", TILE.name)
TREE = Tree("native", leaves=4)
GOALS = {
    ("fp32", "prefill"): 2, ("fp32", "train"): 2, ("fp32", "decode"): 3,
    ("bf16", "prefill"): 3, ("bf16", "train"): 3, ("bf16", "decode"): 4,
}  # fmt: skip
PREFILLED = 64
STEPS = 8


@dataclass(frozen=True)
class Size:
    """The sizes of a model; `heads` is (query heads, key-value heads, width of a head)."""

    hidden: int
    ffn: int
    layers: int
    heads: tuple[int, int, int]
    vocab: int


SIZES = {
    "h256": Size(256, 768, 4, (8, 2, 32), 1024),
    "h512": Size(512, 1536, 4, (8, 4, 64), 4096),
    "h1024": Size(1024, 3072, 2, (16, 8, 128), 8192),
}
WORKLOADS = {
    "prefill 1x256": ("prefill", 1, 256), "prefill 8x64": ("prefill", 8, 64),
    "decode B1": ("decode", 1, PREFILLED), "decode B8": ("decode", 8, PREFILLED),
    "train 8x64": ("train", 8, 64),
}  # fmt: skip


def instructions() -> str:
    """Name the instructions that multiply bfloat16 matrices here: machines with other instructions get other bits."""
    kernels = native.library()
    kernels.bi_instructions.restype = ctypes.c_char_p
    return kernels.bi_instructions().decode()


@dataclass(frozen=True)
class Row:
    """The milliseconds of processor time of one workload, by kernels."""

    model: str
    dtype: str
    workload: str
    goal: int
    stock: float
    native: float
    tile: float
    leaves: float

    def ratio(self, backend: str) -> float:
        """Return the time of a backend over the time of the stock kernels."""
        return getattr(self, backend) / self.stock

    @property
    def leaves_ratio(self) -> float:
        """The time of native with leaves over the time of native with ordinary products."""
        return self.leaves / self.native


def build(size: Size, dtype: torch.dtype) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    heads, groups, width = size.heads
    config = Qwen3Config(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=width,
    )
    return Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=dtype).eval()


def call(kind: str, model: Qwen3ForCausalLM, tokens: torch.Tensor) -> Callable[[], float]:
    """Return a function that runs a workload once and returns its processor time in milliseconds."""
    return {"prefill": _prefill, "decode": _decode, "train": _train}[kind](model, tokens)


def _prefill(model, tokens) -> Callable[[], float]:
    def run() -> float:
        with torch.no_grad():
            return spent(lambda: model(input_ids=tokens))

    return run


def _decode(model, tokens) -> Callable[[], float]:
    def run() -> float:
        with torch.no_grad():
            cache = DynamicCache(config=model.config)
            model(input_ids=tokens, past_key_values=cache)
            step = lambda: model(input_ids=tokens[:, :1], past_key_values=cache)  # noqa: E731
            return sum(spent(step) for _ in range(STEPS)) / STEPS

    return run


def _train(model, tokens) -> Callable[[], float]:
    def step() -> None:
        logits = model(input_ids=tokens).logits[:, :-1].float()
        logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).sum().backward()
        model.zero_grad()

    return lambda: spent(step)


def spent(function: Callable[[], object]) -> float:
    started = time.process_time_ns()
    function()
    return (time.process_time_ns() - started) / 1e6


def measure(name: str, dtype: str, workload: str, calls: int) -> Row:
    kind, batch, length = WORKLOADS[workload]
    tokens = torch.randint(SIZES[name].vocab, (batch, length))
    ordinary, on_tree = (build(SIZES[name], DTYPES[dtype]) for _ in range(2))
    hf_decoder.add_as(TREE, on_tree)
    runs = {"stock": (nullcontext, call(kind, ordinary, tokens))}
    runs |= {backend: (_pinned(backend, dtype), call(kind, ordinary, tokens)) for backend in BACKENDS}
    runs["leaves"] = (_pinned(TREE.backend, dtype), call(kind, on_tree, tokens))
    times: dict[str, list[float]] = {kernel: [] for kernel in runs}
    for turn in range(calls + 1):
        for kernel, (context, run) in runs.items():
            with context():
                took = run()
            if turn:  # the first turn warms the caches
                times[kernel].append(took)
    return Row(
        name, dtype, workload, GOALS[dtype, kind], **{kernel: median(took) for kernel, took in times.items()}
    )


def _pinned(backend: str, dtype: str):
    return lambda: pinned(Contract(backend=backend, dtype=dtype))


def as_cells(row: Row) -> list[str]:
    milliseconds = [f"{getattr(row, kernel):.2f}" for kernel in ("stock", *BACKENDS, "leaves")]
    ratios = [*(f"{row.ratio(backend):.2f}" for backend in BACKENDS), f"{row.leaves_ratio:.2f}"]
    met = "yes" if row.ratio("native") <= row.goal else "no"
    return [row.model, row.dtype, row.workload, *milliseconds, *ratios, f"{row.goal}", met]


HEADINGS = ("model", "dtype", "workload", *(f"{kernel} ms" for kernel in ("stock", *BACKENDS, "leaves")))
HEADINGS += ("native / stock", "tile / stock", "leaves / native", "goal", "native meets it")


def write(path: Path, rows: list[Row]) -> None:
    found = provenance() | {"bfloat16 products of native": instructions()}
    text = f"{as_markdown(found)}\n{markdown_table(HEADINGS, map(as_cells, rows))}"
    write_record(path, {"measured with": found, "rows": [asdict(row) for row in rows]}, text)


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--calls", type=count, default=9, help="of each, after one that is not counted")
    parser.add_argument("--json", type=target, help="write the figures here, and a table beside it")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    settings = itertools.product(options.models, DTYPES, WORKLOADS)
    rows = [measure(*setting, options.calls) for setting in settings]
    print_table(HEADINGS, list(map(as_cells, rows)))
    if options.json:
        write(options.json, rows)
    return 0
