"""Does the report name the right rung of the ladder for rollouts of a real model?

    python -m lab.report_rungs                some seconds

The chats that `lab/mismatch.py` kept (real SGLang sampled, Megatron-core scored) are written in the neutral form,
and the command reads each rung's file. Then each response alone is held to a ladder that the other responses of all
rungs make, so that no response names itself.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.report_rungs:main", extra="verify")

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from lab.ladder.rollouts import Rollouts
from lab.provenance import as_markdown, provenance
from mis_plugins.__main__ import main as mis_plugins
from mis_plugins.explain.rungs import record
from mis_plugins.report.verdict import nearest

TRAINERS = ("bf16", "fp32")


def responses(rollouts: Rollouts, trainer: str) -> list[tuple[Tensor, Tensor]]:
    """Pair the log-probs of engine and trainer of each response."""
    sizes = rollouts.lengths.tolist()
    return list(zip(rollouts.behavior.split(sizes), rollouts.proximal[trainer].split(sizes), strict=True))


def k3(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Compute k3 of every token."""
    logs = torch.cat([proximal - behavior for behavior, proximal in pairs]).double()
    return logs.exp() - 1 - logs


def reported(pairs: Sequence[tuple[Tensor, Tensor]], folder: Path) -> dict[str, Any]:
    """Return the report of the command on responses, written in the neutral form to `folder`."""
    folder.mkdir(parents=True)
    lines = (
        {"sample": str(place), "behavior_log_probs": mu.tolist(), "proximal_log_probs": pi.tolist()}
        for place, (mu, pi) in enumerate(pairs)
    )
    (folder / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if mis_plugins(["report", str(folder / "run.jsonl"), "--sweep", "none", "--output", str(folder)]):
        raise SystemExit("no report")
    return json.loads((folder / "report.json").read_text())


def measure(kept: Mapping[str, Rollouts], scratch: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each rung and trainer."""
    for trainer in TRAINERS:
        held = {name: responses(rollouts, trainer) for name, rollouts in kept.items()}
        for name, pairs in held.items():
            told = reported(pairs, scratch / trainer / name)
            value = told["whole"]["kl_k3"]
            right = sum(_named_alone(held, name, place) == name for place in range(len(pairs)))
            yield {
                "rung": name, "trainer": trainer, "kl_k3": value, "named": nearest(value, record().steps).name,
                "said": told["verdict"]["lines"][0], "causes": [one["name"] for one in told["causes"]],
                "right_alone": right, "responses": len(pairs),
            }  # fmt: skip


def _named_alone(held: Mapping[str, Sequence[tuple[Tensor, Tensor]]], name: str, place: int) -> str:
    """Return the rung nearest to one response, on a ladder that all other responses make."""
    others = {
        rung: [pair for i, pair in enumerate(pairs) if (rung, i) != (name, place)]
        for rung, pairs in held.items()
    }
    known = {rung.name: rung for rung in record().steps}
    rungs = [replace(known[rung], k3=float(k3(pairs).mean())) for rung, pairs in others.items()]
    return nearest(float(k3([held[name][place]]).mean()), rungs).name


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and write the record; exit status 1 where a rung is named wrongly."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("lab/results/mismatch"), metavar="FOLDER")
    parser.add_argument("--results", type=Path, default=Path("lab/results"), metavar="FOLDER")
    options = parser.parse_args(argv)
    kept = {one.name: Rollouts.load(options.runs / f"{one.name}-chats.safetensors") for one in record().steps}
    with TemporaryDirectory(prefix="report-rungs-") as scratch:
        rows = list(measure(kept, Path(scratch)))
    write(options.results, rows)
    return int(any(row["named"] != row["rung"] for row in rows))


def write(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the record: json for programs, markdown for people."""
    made = provenance()
    text = (
        "# Rollouts of a real model, told apart\n\nA response alone is judged on a ladder of all others.\n\n"
    )
    text += "| rollout | trainer | kl_k3 | rung that the report names | named right alone | causes told |\n"
    text += "|---|---|---|---|---|---|\n"
    for row in rows:
        alone = f"{row['right_alone']} of {row['responses']}"
        causes = ", ".join(row["causes"]) or "none"
        cells = (row["rung"], row["trainer"], f"{row['kl_k3']:.2g}", row["named"], alone, causes)
        text += f"| {' | '.join(cells)} |\n"
    print(text)
    content = {"measured_with": made, "rows": list(rows)}
    (folder / "report_rungs.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (folder / "report_rungs.md").write_text(f"{text}\n{as_markdown(made)}", encoding="utf-8")
