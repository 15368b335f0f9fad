"""What torch.compile leaves as it is beside a contract's pinned kernels, and the time of a training step with it.

    python -m lab.compiled                 minutes for each dtype

`lab/compiled_functions.py` compiles each function of a layer of tiny-qwen3 with inductor and compares results
by bytes, in the order that SGLang rounds in. A step is a forward and a backward of Hugging Face's decoder; it runs in
turn with its functions eager, and with those compiled that kept their bits.

Exit codes: 0 the log-probs of both steps are equal; 1 they differ; 2 nothing could be compiled.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.compiled:main", extra="verify")

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lab.compiled_functions import Tried, compiled_where_equal, tried
from lab.provenance import as_markdown, markdown_table, parser_of, provenance, target, write_record
from true_on_policy.bitwise import equal_bits
from true_on_policy.contract.cpu import DTYPES, Contract, Shapes
from true_on_policy.contract.rounding import ORDERS
from true_on_policy.kernels.pin import pinned
from true_on_policy.models import hf_decoder
from true_on_policy.models.tiny import checkpoint, read_config

MODEL, ORDER, SEQUENCES, LENGTH = "tiny-qwen3", ORDERS["sglang"], 4, 256


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES])
    parser.add_argument("--rounds", type=int, default=20, help="steps of either kind (default: %(default)s)")
    parser.add_argument("--record", type=target, default=Path("lab/results/compiled.json"))
    options = parser.parse_args(argv)
    found = {dtype: measured(dtype, options.rounds) for dtype in options.dtypes}
    record = {"measured with": provenance(), "dtypes": found}
    write_record(options.record, record, page(record))
    print(page(record))
    if not any(one["kept"] for one in found.values()):
        return 2
    return 0 if all(one["log-probs are equal"] for one in found.values()) else 1


def measured(dtype: str, rounds: int) -> dict[str, Any]:
    """Which functions kept their bits, which of those a trainer of ours calls, and the medians of a step."""
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint(MODEL, Path(folder), DTYPES[dtype], 0)
        shapes = Shapes.of(read_config(path))
        with pinned(Contract(dtype=dtype, shapes=shapes)):
            found: list[Tried] = []
            for one in tried(dtype, shapes, ORDER, torch.device("cpu")):
                print(f"{dtype} {one.function} {one.shape}: {one.differs or 'equal'}", file=sys.stderr)
                found.append(one)
            return {"tried": [asdict(one) for one in found]} | steps(hf_decoder.load(path, dtype, ORDER), found, rounds)


def steps(model: Any, found: list[Tried], rounds: int) -> dict[str, Any]:
    """Eager and compiled steps in turn; the first of each, which compiles, is not counted."""
    tokens = torch.randint(0, model.config.vocab_size, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))
    eager, fast, equal, kept = [], [], True, list[str]()
    for _ in range(rounds + 1):
        began = time.perf_counter()
        ours = step(model, tokens)
        eager.append(time.perf_counter() - began)
        with compiled_where_equal(found) as names:
            began = time.perf_counter()
            theirs = step(model, tokens)
            fast.append(time.perf_counter() - began)
            kept = [*names]
        equal &= equal_bits(ours, theirs)
    return {
        "kept": kept,
        "log-probs are equal": equal,
        "eager ms": 1000 * median(eager[1:]),
        "compiled ms": 1000 * median(fast[1:]),
    }


def step(model: Any, tokens: Tensor) -> Tensor:
    """Log-probs of the next tokens, after a backward through their mean."""
    logits = model(input_ids=tokens).logits[:, :-1]
    log_probs = logits.float().log_softmax(-1).gather(-1, tokens[:, 1:, None])
    model.zero_grad()
    log_probs.mean().backward()
    return log_probs.detach()


def page(record: dict[str, Any]) -> str:
    text = ["# What torch.compile leaves as it is", ""]
    for dtype, one in record["dtypes"].items():
        same = sum(row["differs"] is None for row in one["tried"])
        ratio = one["compiled ms"] / one["eager ms"]
        rows = [(r["function"], r["shape"], r["differs"] or "equal", "other bits" if r["gradient_differs"] else "equal")
                for r in one["tried"]]  # fmt: skip
        text += [
            f"## {dtype}: {same} of {len(rows)} equal",
            "",
            markdown_table(("function", "widths, dtype", "result, compiled against eager", "gradients"), rows),
            f"A step of {SEQUENCES} x {LENGTH} tokens with {' and '.join(one['kept']) or 'nothing'} compiled: "
            f"{one['compiled ms']:.1f} ms against {one['eager ms']:.1f} ms eager, {ratio:.2f} times; log-probs of the "
            f"steps are {'equal' if one['log-probs are equal'] else 'DIFFERENT'}.",
            "",
        ]
    return "\n".join(text) + "\n" + as_markdown(record["measured with"])
