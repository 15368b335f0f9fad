"""Are the stand-ins of `tests/support/stand_in_hosts.py` the real host, as far as our hooks see it?

The program compares each function of the stand-ins with the checkout's own by syntax: its parameters are parameters of
the host's, in the host's order, and what the host requires beyond them is listed. Then it draws 50 random micro-batches
and runs the real `policy_loss_function` and the stand-in's with our TIS hook behind both: loss, gradient of the logits
and our metrics. Every second one rejects sequences, so that the denominators of the host count.

    python -m lab.host_stand_ins --host miles --checkout MILES --json lab/results/stand_ins_miles.json

Exit status: 0 equal, 1 different, 2 could not compare.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.host_stand_ins:main", extra="verify")

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lab.host_checkout import build_parser, load_host, run_ranks, start_groups
from lab.host_modules import Host
from lab.parity.cases import Batch, Case, make_batch
from lab.parity.drive import OURS, drive, host_args, micro_batch
from lab.provenance import as_markdown, markdown_table, provenance, write_record
from mis_plugins.hosts.checkout.search import find
from mis_plugins.hosts.checkout.source import Folder, Function
from mis_plugins.hosts.needs.record import Need
from mis_plugins.hosts.registry import every_host
from mis_plugins.shared.table import print_table

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
SEEDS, TOLERANCE = range(50), 2e-6
LAYOUT = {"miles": "August", "slime": "slime"}
SIGNATURES = (
    "need",
    "function of the host",
    "parameters of the stand-in",
    "the host requires beyond them",
    "verdict",
)


@dataclass
class Apart:
    """The largest differences over the micro-batches, relative to the host's own value."""

    loss: float = 0.0
    gradient: float = 0.0
    metric: float = 0.0
    weight: float = 0.0

    @property
    def equal(self) -> bool:
        return max(self.loss, self.gradient, self.metric) <= TOLERANCE and self.weight > 0


def signatures(needs: Any, checkout: Path) -> Iterator[tuple[str, ...]]:
    """One row for each function that the table names parameters of."""
    tree = Folder(checkout).module
    for need in vars(needs).values():
        place = find(need, tree).place
        if need.parameters and place is not None:
            yield (need.what, str(place), ", ".join(need.parameters), *_against(need, place.node))


def _against(need: Need, node: ast.AST) -> tuple[str, str]:
    if isinstance(node, ast.ClassDef):
        node = next(each for each in node.body if isinstance(each, Function) and each.name == "__init__")
    assert isinstance(node, Function)
    positional = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
    plain = positional[: len(positional) - len(node.args.defaults)]
    keyword = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    required = [*plain, *(each.arg for each, default in keyword if default is None)]
    beyond = [name for name in required if name not in need.parameters and name != "self"]
    shared = [name for name in need.parameters if name in positional]
    in_order = shared == sorted(shared, key=positional.index)
    return ", ".join(beyond) or "nothing", "equal" if in_order else "DIFFERENT ORDER"


def random_batch(seed: int) -> Batch:
    """One to six ragged responses with masked tokens, and log ratios of a spread between 0.05 and 1.5."""
    torch.manual_seed(1000 + seed)
    lengths = [1 + int(torch.randint(24, ())) for _ in range(1 + int(torch.randint(6, ())))]
    spread = 0.05 + 1.45 * float(torch.rand(()))
    return make_batch(
        str(seed), lengths, lambda i, u: (u > 0.25).int(), lambda n: spread * torch.randn(n), seed=seed
    )


def compared(host: Host) -> Apart:
    """Run both losses on each micro-batch."""
    from stand_in_hosts import LAYOUTS, Bodies

    bodies, apart = Bodies(LAYOUTS[LAYOUT[host.name]]), Apart()
    cases = Case("token", "truncate"), Case("token", "truncate", rejection="sequence")
    for seed in SEEDS:
        batch, case = random_batch(seed), cases[seed % 2]
        args = host_args(case.flat_keys(), OURS, False, "thd")
        real = drive(host, args, batch)
        if real.error:
            raise RuntimeError(f"the host's own loss, seed {seed}: {real.error}")
        given, logits = micro_batch(host, args, batch)
        logits = logits.clone().requires_grad_()
        loss, reported = bodies.own_loss(args, given, logits, bodies.reducer(given))
        loss.backward()
        assert logits.grad is not None
        _widen(apart, real, float(loss.detach()), logits.grad.flatten(0, 1), reported)
    return apart


def _widen(apart: Apart, real: Any, loss: float, gradient: torch.Tensor, reported: dict[str, Any]) -> None:
    apart.loss = max(apart.loss, abs(loss - real.loss) / max(1.0, abs(real.loss)))
    size = float(real.gradient.abs().max())
    apart.gradient = max(apart.gradient, float((gradient - real.gradient).abs().max()) / max(size, 1e-12))
    for name, value in reported.items():
        far = abs(float(value) - real.reported[name]) / max(1.0, abs(real.reported[name]))
        apart.metric = max(apart.metric, far)
    apart.weight = max(apart.weight, float((real.weights - 1).abs().max()))


def main() -> int:
    arguments = build_parser(__doc__).parse_args()
    sys.path.append(str(SUPPORT))
    try:
        rows = list(signatures(every_host()[arguments.host].needs, arguments.checkout))
        host = load_host(arguments.host, arguments.checkout)

        def work(rank: int) -> Apart:
            start_groups(host.name, 1)
            return compared(host)

        (apart,) = run_ranks(1, work)
    except Exception as error:
        print(f"could not compare: {error}")
        return 2
    figures = [
        ("loss", f"{apart.loss:.1e}"),
        ("gradient of the logits", f"{apart.gradient:.1e}"),
        ("metrics", f"{apart.metric:.1e}"),
        ("largest weight's distance from 1", f"{apart.weight:.2f}"),
    ]
    print_table(SIGNATURES, rows)
    print_table((f"{len(SEEDS)} random micro-batches", "apart"), figures)
    equal = apart.equal and all(row[-1] == "equal" for row in rows)
    if arguments.json:
        _write(
            arguments.json, arguments.host, rows, figures, provenance({arguments.host: arguments.checkout})
        )
    return 0 if equal else 1


def _write(path: Path, host: str, rows: list[Any], figures: list[Any], measured: dict[str, str]) -> None:
    content = {"measured with": measured, "signatures": rows, "apart": dict(figures)}
    told = f"# The stand-ins of {host} beside the real one\n\n{as_markdown(measured)}\n"
    losses = markdown_table((f"{len(SEEDS)} random micro-batches, relative", "apart"), figures)
    write_record(path, content, f"{told}\n{losses}\n{markdown_table(SIGNATURES, rows)}")
