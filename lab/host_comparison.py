"""Does the bitwise comparison see, inside the host's own loss, each bit that differs, and change nothing?

The program drives the real `policy_loss_function` of a Miles or slime checkout on CPU through
`true_on_policy.hosts.policy_loss`, over ragged batches, loss-mask patterns and the host's layouts: context parallelism
1, 2 and 4, padded rows, Ulysses, and Miles's true-on-policy mode, where both sides are bfloat16. Asked is

unchanged   loss, gradient and every metric keep their bits under our hook, alone and with our TIS hook behind it
equal       with equal log-probs, each valid token is compared on one rank, and none differs
one bit     one flipped bit of one token is found once, one step later, on its rank, at its sequence and place

Exit status: 0 every answer is right, 1 an answer is wrong, 2 could not ask.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.host_comparison:main", extra="verify")

import logging
import tempfile
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lab.host_checkout import build_parser, load_host, run_ranks, start_groups
from lab.host_modules import Host
from lab.parity.cases import Batch, batches, make_batch
from lab.parity.drive import OURS, Outcome, drive, host_args
from lab.provenance import as_markdown, markdown_table, provenance, write_record
from mis_plugins.shared.arrays import load_safetensors
from mis_plugins.shared.progress import tracked
from mis_plugins.shared.table import print_table
from true_on_policy import hosts
from true_on_policy.hosts.watch import Comparison

WATCHED = {"loss_type": "custom_loss", "custom_loss_function_path": "true_on_policy.hosts.policy_loss"}
COUNTS = ("true_on_policy_compared", "true_on_policy_different")
TIS = {
    "use_tis": True,
    "mis": {"weight": {"upper": 1.5}, "reject": [{"over": "mean", "lower": 0.9, "upper": 1.1}]},
}
QUESTIONS = ("unchanged", "unchanged, TIS", "equal", "one bit")


@dataclass(frozen=True)
class Layout:
    """One way in which a host lays a micro-batch out."""

    name: str
    cp: int = 1
    qkv_format: str = "thd"
    cp_comm_type: str | None = None
    dtype: torch.dtype = torch.float32

    def args(self, folder: str, **more: Any) -> Namespace:
        mode = {"true_on_policy_mode": True, "bf16": True} if self.dtype == torch.bfloat16 else {}
        bitwise = {"bitwise": {"folder": folder}}
        return host_args({}, OURS, False, self.qkv_format, **mode, **bitwise, vocab_size=13, **more)

    def start(self, host: Host) -> None:
        start_groups(host.name, self.cp)
        if self.cp_comm_type:
            from miles.backends.training_utils import parallel  # type: ignore[import-not-found]

            parallel.get_parallel_state().cp_comm_type = self.cp_comm_type
            assert parallel.get_parallel_state().is_ulysses_cp


LAYOUTS = {
    "slime": [Layout(f"CP {cp}", cp) for cp in (1, 2, 4)],
    "miles": [
        *(Layout(f"CP {cp}", cp) for cp in (1, 2, 4)),
        *(Layout(f"CP {cp}, padded rows", cp, "bshd") for cp in (1, 2)),
        *(Layout(f"CP {cp}, Ulysses", cp, cp_comm_type="a2a") for cp in (2, 4)),
        *(Layout(f"CP {cp}, bfloat16", cp, dtype=torch.bfloat16) for cp in (1, 2)),
    ],
}


def answer(host: Host, layout: Layout) -> dict[str, Counter[str]]:
    """Count by question how often the answer was right, and name each wrong answer."""

    def work(rank: int) -> list[list[Any]]:
        layout.start(host)
        return [_asked(host, layout, batch) for batch in _batches(layout)]

    ranks, found = run_ranks(layout.cp, work), {name: Counter[str]() for name in QUESTIONS}
    for batch, *answers in zip(_batches(layout), *ranks, strict=True):
        valid = sum(int(mask.bool().sum()) for mask in batch.loss_masks)
        for name, *values in zip(QUESTIONS, *answers, strict=True):
            found[name].update(_judge(name, values, batch, valid))
    return found


def _asked(host: Host, layout: Layout, batch: Batch) -> list[Any]:
    """Collect this rank's part of the answer to each question, for `_judge` to put together."""
    same = replace(batch, behavior=batch.proximal)
    flips = [_watch(host, layout, _flipped(same, *token))[1] for token in _tokens(batch)]
    return [
        _unchanged(host, layout, batch, {}),
        _unchanged(host, layout, batch, TIS),
        _watch(host, layout, same)[0],
        flips,
    ]


def _unchanged(host: Host, layout: Layout, batch: Batch, more: dict[str, Any]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        hosts.COMPARISON = Comparison()
        own, watched = (drive(host, layout.args(folder, **more, **ours), batch) for ours in ({}, WATCHED))
    if own.error or watched.error:
        return own.error or watched.error
    return "" if _bits(own) == _bits(watched) else "other bits"


def _bits(outcome: Outcome) -> tuple[Any, ...]:
    reported = {name: repr(value) for name, value in outcome.reported.items() if name not in COUNTS}
    return repr(outcome.loss), outcome.gradient.numpy().tobytes(), reported, outcome.masks.numpy().tobytes()


Watched = tuple[tuple[str, float, float], tuple[int, tuple[int, int] | None]]


def _watch(host: Host, layout: Layout, batch: Batch) -> Watched:
    """Run one step and begin the next; return what the host logged, and what the step hook then read and wrote."""
    hosts.COMPARISON = comparison = Comparison()
    with tempfile.TemporaryDirectory() as folder:
        args = layout.args(folder, **WATCHED)
        hosts.report_step(args, 0, 0)
        outcome = drive(host, args, batch)
        early = comparison.totals.different
        hosts.report_step(args, 0, 1)
        place = _place(comparison.written) if comparison.written else None
    compared, different = (outcome.reported.get(name, -1.0) for name in COUNTS)
    return (outcome.error, compared, different), (comparison.totals.different if not early else -1, place)


def _place(folder: Path) -> tuple[int, int]:
    """Read from the written files the first token of the sequence and the differing place in the response."""
    engine, trainer = (
        load_safetensors(folder / f"{side}.safetensors", "log_probs") for side in ("engine", "trainer")
    )
    (differs,) = (engine != trainer).nonzero().flatten().tolist()
    sample = {name: load_safetensors(folder / "sample.safetensors", name) for name in ("tokens", "positions")}
    return int(sample["tokens"][0]), int(sample["positions"][differs])


def _judge(name: str, values: list[Any], batch: Batch, valid: int) -> Counter[str]:
    if name.startswith("unchanged"):
        return Counter([max(values)])
    if name == "equal":
        errors = [error for error, _, _ in values if error]
        compared, different = (sum(value[i] for value in values) for i in (1, 2))
        wrong = (
            "" if (compared, different) == (valid, 0) else f"{different:g} of {compared:g}, not 0 of {valid}"
        )
        return Counter([errors[0] if errors else wrong])
    found = Counter[str]()
    for (sequence, position), *ranks in zip(_tokens(batch), *values, strict=True):
        places = [place for count, place in ranks if (count, place is not None) == (1, True)]
        quiet = sum(count == 0 for count, _ in ranks)
        right = [(int(batch.tokens[sequence][0]), position)] == places and quiet == len(ranks) - 1
        found["" if right else f"not found at sequence {sequence}, token {position}"] += 1
    return found


def _tokens(batch: Batch) -> list[tuple[int, int]]:
    """Pick the first, middle and last valid token of each sequence."""
    valid = [mask.bool().nonzero().flatten().tolist() for mask in batch.loss_masks]
    picked = [sorted({row[0], row[len(row) // 2], row[-1]}) if row else [] for row in valid]
    return [(i, token) for i, row in enumerate(picked) for token in row]


def _batches(layout: Layout) -> list[Batch]:
    """Make the batches in the layout's dtype; the first token of each sequence is its number.

    In its true-on-policy mode Miles 31f1ca9 fails where a rank has exactly one token of a response, because
    `get_log_probs_and_entropy` squeezes it away. In this mode the responses are therefore longer.
    """
    long_enough = [make_batch("long", [17, 24, 31], lambda i, u: (u > 0.3).int(), torch.zeros, seed=6)]
    made = []
    for batch in batches() if layout.dtype == torch.float32 else long_enough:
        tokens = [torch.cat([torch.tensor([i]), x[1:]]) for i, x in enumerate(batch.tokens)]
        cast = lambda rows: [x.to(layout.dtype) for x in rows]  # noqa: E731
        made.append(
            replace(batch, tokens=tokens, proximal=cast(batch.proximal), behavior=cast(batch.behavior))
        )
    return made


def _flipped(batch: Batch, sequence: int, token: int) -> Batch:
    turned = batch.behavior[sequence].clone()
    turned.view({2: torch.int16, 4: torch.int32}[turned.element_size()])[token] ^= 1
    return replace(batch, behavior=[turned if i == sequence else x for i, x in enumerate(batch.behavior)])


def cells(found: dict[str, Counter[str]]) -> list[str]:
    """Write for each question how many answers were right, of how many, and the first wrong one."""
    out = []
    for counter in found.values():
        wrong = next((text for text in counter if text), "")
        out.append(f"{counter['']} of {counter.total()}{f': {wrong}' if wrong else ''}")
    return out


HEADINGS = ("layout", *QUESTIONS)


def lines(rows: dict[str, dict[str, Counter[str]]]) -> list[list[str]]:
    return [[name, *cells(found)] for name, found in rows.items()]


def write_results(path: Path, rows: dict[str, dict[str, Counter[str]]], measured: dict[str, str]) -> None:
    """Write the answers to `path` as JSON, and as a table to a .md beside it."""
    legend = (__doc__ or "").partition("Asked is\n\n")[2].rpartition("\n\n")[0]
    text = f"{as_markdown(measured)}\n```\n{legend}\n```\n\n{markdown_table(HEADINGS, lines(rows))}"
    write_record(path, {"measured with": measured, "rows": rows}, text)


def main() -> int:
    arguments = build_parser(__doc__).parse_args()
    try:
        host = load_host(arguments.host, arguments.checkout)
        logging.getLogger("true_on_policy").setLevel(logging.CRITICAL)
        layouts = tracked(LAYOUTS[host.name], f"{host.name}: layouts")
        rows = {layout.name: answer(host, layout) for layout in layouts}
    except Exception as error:  # Python would exit with 1, which means different
        print(f"could not compare: {error}")
        return 2
    print_table(HEADINGS, lines(rows))
    if arguments.json:
        write_results(arguments.json, rows, provenance({host.name: arguments.checkout}))
    return int(any(set(counter) != {""} for found in rows.values() for counter in found.values()))
