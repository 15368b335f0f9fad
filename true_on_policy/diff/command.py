"""Compare recorded tensors bit by bit and name the first operation whose result differs.

A and B are files or folders: of SGLang's dumper, of `true_on_policy.diff.module_recorder.record`, safetensors, npz,
files of `torch.save`, or records of log-probs. A dump of Miles or slime by --dump-details is read too; its log-probs
alone are compared.

    python -m true_on_policy diff train_data/7_0.pt             a host's dump: its engine beside its trainer
    python -m true_on_policy diff engine/ trainer/ --by-token   two recordings, whatever their batches were

Exit codes: 0 all equal; 1 a tensor or a text differs; 2 nothing differs, but a tensor could not be compared: it is
missing, unreadable, of another dtype or shape, or a token has no log-prob.
"""

import argparse
import json
from pathlib import Path

from mis_plugins.shared.files import check_writable, write_text
from mis_plugins.shared.terminal import print_table, printable
from true_on_policy.diff.names import Heads, correspondence
from true_on_policy.diff.records import engine_and_trainer, read_recording
from true_on_policy.diff.tensors import Report, Row, compare
from true_on_policy.diff.tokens import compare_by_token

SHOWN = 10  # the table shows at most this many rows that are not equal
VERDICTS = ("equal", "different", "not comparable")  # by exit code


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("diff", help="compare recorded tensors bit by bit", description=__doc__)
    parser.add_argument("a", metavar="A", type=Path, help="file or folder")
    alone = "file or folder; without it A is a host's dump, whose engine is compared with its trainer"
    parser.add_argument("b", metavar="B", type=Path, nargs="?", help=alone)
    names = "YAML of `name in A: name in B`, null to leave out, in place of the built-in names of frameworks"
    parser.add_argument("--map", type=Path, metavar="FILE", help=names)
    of_heads = "whose config.json tells how many heads a fused query-key-value projection has"
    parser.add_argument("--model", type=Path, metavar="CHECKPOINT", help=of_heads)
    by_token = "match rows by the tokens before them, whatever batch or step they were computed in"
    parser.add_argument("--by-token", action="store_true", help=by_token)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every row of the comparison")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.json:
        check_writable(arguments.json, "--json")
    a = read_recording(arguments.a)
    a, b = engine_and_trainer(a) if arguments.b is None else (a, read_recording(arguments.b))
    heads = Heads.of(arguments.model) if arguments.model else None
    matched = compare_by_token if arguments.by_token else compare
    report = matched(a, b, correspondence(a.names, b.names, arguments.map), heads)
    show(report)
    if arguments.json:
        write_json(report, arguments.json)
    return report.exit_code


def show(report: Report) -> None:
    """Print the counts, the first divergence, and the first rows that are not equal."""
    counts = {status: count for status, count in report.counts.items() if count or status == "equal"}
    if report.tokens is not None:
        counts["pairs of tokens"] = report.tokens
    unmatched = {
        "left out: no counterpart": report.left_out,
        "left out: not one row a token": report.no_rows,
        "left out: recorded before the first input_ids": report.early,
        "left out: masked tokens": report.masked,
    }
    counts |= {what: count for what, count in unmatched.items() if count}
    print_table(("recorded", ""), list(counts.items()))
    if report.first:
        print(f"\n{divergence(report, report.first)}")
    unequal = [row for row in report.rows if row.status != "equal"]
    if unequal:
        print()
        print_table(
            ("not equal, in order", "", ""),
            [(row.key, row.status, row.detail or str(row.mismatch or "")) for row in unequal[:SHOWN]],
        )
    if len(unequal) > SHOWN:
        print(f"... and {len(unequal) - SHOWN} more; --json FILE writes all of them")
    if report.rows and not report.computed:
        print("\nno tensor that a model computed was compared; --map FILE pairs other names")
    print(f"\n{VERDICTS[report.exit_code]}")


def divergence(report: Report, first: Row) -> str:
    """Describe the first operation whose result differs, and what was equal before it."""
    mismatch = first.mismatch
    lines = [f"first divergence: {first.operation}", f"  {first.key}: {mismatch}"]
    if mismatch and mismatch.histogram and mismatch.has_distance:
        lines.append(f"  ulps: {', '.join(f'{apart}: {count}' for apart, count in mismatch.histogram.items())}")
    if report.feeds and not first.is_output:
        lines.append("  no recorded module returned the tensor: the tensors below, or others like them, gave it")
    lines += [f"  equal before it: {row.key}" for row in report.feeds]
    if not report.feeds:
        lines.append("  nothing equal was recorded before it")
    return "\n".join(printable(line) for line in lines)


def write_json(report: Report, file: Path) -> None:
    """Write every row of the comparison to a file, whole or not at all."""
    document = {
        "a": str(report.a),
        "b": str(report.b),
        "verdict": VERDICTS[report.exit_code],
        **{name: getattr(report, name) for name in ("counts", "left_out", "no_rows", "early", "tokens", "masked")},
        "first_divergence": report.first and {
            "operation": report.first.operation,
            "tensor": _as_json(report.first),
            "equal_before_it": [str(row.key) for row in report.feeds],
        },
        "rows": [_as_json(row) for row in report.rows],
    }  # fmt: skip
    write_text(file, json.dumps(document, indent=1))


def _as_json(row: Row) -> dict:
    """Convert a row for JSON, which has no NaN: the values of a mismatch become texts."""
    entry: dict = {**vars(row.key), "status": row.status}
    if row.detail:
        entry["detail"] = row.detail
    if row.mismatch:
        entry["mismatch"] = vars(row.mismatch) | {"values": [str(value) for value in row.mismatch.values]}
    return entry
