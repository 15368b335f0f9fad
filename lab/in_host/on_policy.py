"""The certificate of runs inside the hosts whose log-probs equal the engine's, step after step, beside a stock run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.in_host import verdict
from lab.in_host.rows import Row
from lab.records import Records
from mis_plugins.shared.opened import optional

HEAD = """# Truly on policy inside the hosts' own loops

Made by `bash scripts/run-in-host.sh on-policy`: the real `train.py` of the host on a CPU, with Ray, the real SGLang, a
weight update before each rollout, and one optimizer step a rollout. The log-probs are those of the host's own dump
(`--dump-details`), compared by their bits. The comparison hook ran beside, and stops a pinned run at the first
difference. [docs/hosts.md](../../docs/hosts.md) tells what the flags are.

![log-probs that differ](in_host_on_policy.png)

| run | dtype | rounds as | TP x CP x DP | steps | updates | log-probs | differ | largest k3 | lines | commit |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def page(rows: Sequence[Row], records: Records) -> str:
    """Write the certificate in markdown: a line a run."""
    return HEAD + "".join(f"{_line(row, records.get(row.name))}\n" for row in rows)


def _line(row: Row, record: dict[str, Any] | None) -> str:
    contract = {} if row.contract is None else row.contract
    order = contract.get("norm_order", "engine") if row.contract is not None else "each its own"
    sizes = f"{row.sizes.tensor} x {row.sizes.context} x {row.sizes.data}"
    start = f"| {row.name} | {contract.get('dtype', 'bf16')} | {order} | {sizes} |"
    if record is None:
        return f"{start} **not run** | | | | | | |"
    compared, different = (sum(counts) for counts in zip(*record["bits"], strict=True))
    lines, largest = verdict.judge(record), max(step["k3"] for step in record["steps"])
    held = f"{sum(line.holds for line in lines)} of {len(lines)}"
    updates = record["versions"][-1] - record["versions"][0]
    made = record["commits"]["mis-plugins"]
    return (f"{start} {len(record['steps'])} | {updates} | {compared} | {different} | {largest:.1e} | {held} "
            f"| {made} |")  # fmt: skip


def draw(rows: Sequence[Row], records: Records, path: Path) -> None:
    """Draw the share of log-probs that differ, step by step, and the reward beside it.

    Raises:
        RecordError: matplotlib is not installed.
    """
    figure = optional("matplotlib.figure").Figure(figsize=(9, 3.6), layout="constrained")
    shares, rewards = figure.subplots(1, 2)
    for name, record in ((row.name, records[row.name]) for row in rows if row.name in records):
        style = {"color": "black", "linestyle": "--"} if record["contract"] is None else {}
        label = name.replace("on-policy-", "")
        shares.plot([different / compared for compared, different in record["bits"]], label=label, **style)
        rewards.plot([step["reward"] for step in record["steps"]], label=label, **style)
    shares.set(xlabel="optimizer step", ylabel="share of log-probs that differ", ylim=(-0.03, 1.03))
    rewards.set(xlabel="optimizer step", ylabel="reward")
    shares.legend(fontsize="small")
    figure.savefig(path, dpi=110)
