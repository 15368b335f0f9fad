"""A collapse, its report, and the proposal of the report run: does the proposed config hold?

    python benchmarks/report_collapse.py             some four minutes a seed on one core
    python benchmarks/report_collapse.py --smoke     shows that it works, in a minute

The embedded host trains the recipe of the collapse experiment without correction, in fewer and larger steps, and a hook
writes each rollout in the neutral form. The report reads that file alone. Its proposal then trains from the same warm
start. At the first seed's warm start the proxy that ranks configs is held against the true cosine of each config's
policy gradient.

The rules of the proposal were set after seeds 1 to 3 had been seen; the default seeds are others.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("report_collapse:main", extra="local")

import argparse
import json
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.recipe import ESTIMATORS, RECIPE
from provenance import as_markdown, provenance

from mis_plugins.__main__ import main as mis_plugins
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.local.cli.arguments import parse_args
from mis_plugins.local.folders import METRICS
from mis_plugins.local.loop import Loop, run_rank
from mis_plugins.local.rollout.sampler import Rollout, shard
from mis_plugins.local.train.gradients import cosine, mean_gradient, on_policy_reference
from mis_plugins.local.train.parallel import initialize, launch
from mis_plugins.report.record import from_mapping
from mis_plugins.report.survey import Survey
from mis_plugins.report.sweep import Candidate, candidates, file_of

PROXIES = ("coefficient_cosine", "response_cosine")
DUMP = "dump.jsonl"
HOOK = "mis_plugins.mis.compute_mis_weights_with_cp"
COMPARED = ("tis", "cis", "mis", "icepop", "geometric-mis", "geometric-rs", "sequence", "seq-mask-tis")
SHORT = "--lr 2e-4 --num-rollout 40 --eval-interval 5 --eval-prompts 64".split()
SEEDS = [4, 5, 6]
ROLLOUTS = 4  # pooled into each gradient
# A policy that still fails often: near its optimum a gradient is nearly all noise.
EARLY = "--num-digits 6 --warmup-steps 120 --rollout-batch-size 64 --global-batch-size 512".split()


def dump(args: Namespace, rollout_id: int, data: Mapping[str, Any]) -> None:
    """Append the rollout to the run's file, in the neutral form: the hook of `--rollout-data-postprocess-path`."""
    with (Path(args.output) / DUMP).open("a", encoding="utf-8") as file:
        for line in neutral(rollout_id, data):
            file.write(json.dumps(line) + "\n")


def neutral(rollout_id: int, data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One object of the neutral form for each response of a rollout."""
    names = {"behavior_log_probs": "rollout_log_probs", "proximal_log_probs": "log_probs",
             "loss_mask": "loss_masks", "advantages": "advantages"}  # fmt: skip
    for place, (tokens, size) in enumerate(zip(data["tokens"], data["response_lengths"], strict=True)):
        line = {"step": rollout_id, "sample": str(place), "tokens": tokens[-size:].tolist()}
        yield line | {ours: data[theirs][place].tolist() for ours, theirs in names.items()}


def arguments(folder: Path, options: argparse.Namespace, *extra: str) -> Namespace:
    """Settings of one run."""
    small = ["--smoke"] if options.smoke else []
    cache = ["--warmup-cache", str(options.runs / "warm-start"), "--seed", str(options.seed)]
    recipe = [*RECIPE, *ESTIMATORS["R-1"], *SHORT, "--rollout-weights", "int3", "--quiet"]
    return parse_args([*recipe, *cache, "--output", str(folder), *extra, *small])


def corrected(config: Path) -> list[str]:
    return ["--use-tis", "--custom-tis-function-path", HOOK, "--custom-config-path", str(config)]


def train(args: Namespace) -> dict[str, float]:
    """Train, and return the trainer's reward at the start and over the last tenth."""
    code = launch(args.world_size, lambda: run_rank(args))
    if code:
        raise SystemExit(code)
    rows = [json.loads(line) for line in (Path(args.output) / METRICS).read_text().splitlines()]
    rewards = [row["eval_trainer"] for row in rows if "eval_trainer" in row]
    return {"start": rewards[0], "final": fmean(rewards[-max(len(rewards) // 10, 1) :])}


def diagnosed(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The report over the file of a run, and its proposal as a file."""
    output = folder / "report"
    if mis_plugins(["report", str(folder / DUMP), "--sweep", options.sweep, "--output", str(output)]):
        raise SystemExit("no report")
    found = json.loads((output / "report.json").read_text())
    (folder / "proposal.yaml").write_text(found["proposal"]["yaml"])
    return found


def proxies(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The report's proxies and the true cosine to the on-policy gradient of each config, on the same rollouts."""
    args = arguments(options.runs / "proxy", options, *([] if options.smoke else EARLY))
    loop = Loop.start(args, initialize(1, 1))
    sampled = _pool(loop, loop.engine, "cosine", options)
    samples = (_pool(loop, loop.fp32(), "first", options), _pool(loop, loop.reference, "second", options))
    reference = on_policy_reference(args, loop.state, loop.trainer, samples)
    swept = candidates(",".join(COMPARED), None)
    survey = Survey.of(CorrectionConfig(), swept)
    for rollout in sampled:
        data = shard(args, loop.state, rollout)
        loop.prepare(0, data)
        survey.add_all([from_mapping(line, 0, line["sample"]) for line in neutral(0, data)])
    found = {"on-policy": {"true": reference.agreement}}
    outcomes = survey.sweep.numbers()
    for one in swept:
        gradient = mean_gradient(_with(one, options), loop.state, loop.trainer, sampled)
        told = {name: outcomes[one.name][name] for name in PROXIES if name in outcomes[one.name]}
        found[one.name] = told | {"true": cosine(gradient, reference.mean)}
    return found


def _with(candidate: Candidate, options: argparse.Namespace) -> Namespace:
    extra = corrected(file_of(candidate.name)) if candidate.config.corrects else []
    return arguments(options.runs / "proxy", options, *([] if options.smoke else EARLY), *extra)


def _pool(loop: Loop, engine: Any, name: str, options: argparse.Namespace) -> list[Rollout]:
    return [loop.collect(engine, name, index) for index in range(1 if options.smoke else ROLLOUTS)]


def main(argv: Sequence[str] | None = None) -> int:
    """Train, report and train the proposal on each seed, compare the proxy on the first, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/report-collapse"))
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), metavar="FOLDER")
    parser.add_argument("--sweep", default="own", help="as of the report (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, metavar="SEED")
    parser.add_argument("--smoke", action="store_true", help="tiny runs, and nothing is written")
    options = parser.parse_args(argv)
    made: dict[int, dict[str, Any]] = {}
    for seed in options.seeds:
        options.seed = seed
        made[seed] = of_seed(options, options.runs / f"seed-{seed}")
        publish(options, made, {})
    options.seed = options.seeds[0]
    publish(options, made, in_process(options))
    return 0


def of_seed(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train a seed without correction, read the report, and train its proposal."""
    first, second = folder / "uncorrected", folder / "proposed"
    first.mkdir(parents=True, exist_ok=True)
    (first / DUMP).unlink(missing_ok=True)
    hook = ("--rollout-data-postprocess-path", "report_collapse.dump")
    runs = {"uncorrected": train(arguments(first, options, *hook))}
    said = diagnosed(first, options)
    config = corrected(first / "proposal.yaml") if said["proposal"]["name"] != "none" else []
    runs["proposed"] = train(arguments(second, options, *config))
    return {"runs": runs} | {name: said[name] for name in ("verdict", "causes", "proposal")}


def in_process(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """`proxies` in a process group of its own."""
    path = options.runs / "proxies.json"
    code = launch(1, lambda: path.write_text(json.dumps(proxies(options))) and None)
    if code:
        raise SystemExit(code)
    return json.loads(path.read_text())


def page(made: Mapping[int, Mapping[str, Any]], compared: Mapping[str, Mapping[str, float]]) -> str:
    """The record for people."""
    rows = "".join(
        f"| {seed} | {one['proposal']['name']} | {_rewards(one['runs'])} |\n" for seed, one in made.items()
    )
    text = (
        "# A collapse, its report, and the proposal run\n\nThe trainer's reward at the start and at the end. "
    )
    text += "The rules of the proposal were set after seeds 1 to 3 had been seen.\n\n"
    text += (
        "| seed | proposal | start | uncorrected, final | proposed, final |\n|---|---|---|---|---|\n" + rows
    )
    for seed, one in made.items():
        verdict = "\n".join(f"* {line}" for line in (one["verdict"]["headline"], *one["verdict"]["lines"]))
        text += f"\nThe report on the file of seed {seed}'s uncorrected run alone:\n\n{verdict}\n"
    return text + (_proxies(compared) if compared else "")


def _rewards(runs: Mapping[str, Mapping[str, float]]) -> str:
    bare, proposed = runs["uncorrected"], runs["proposed"]
    return f"{bare['start']:.2f} | {bare['final']:.2f} | {proposed['final']:.2f}"


def _proxies(compared: Mapping[str, Mapping[str, float]]) -> str:
    columns = (*PROXIES, "true")
    lines = "".join(f"| {name} | {_cells(one, columns)} |\n" for name, one in compared.items())
    return (
        "\nThe first seed's proxies beside the true cosine to the on-policy gradient (first row: two such gradients):\n"
        f"\n| config | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}\n{lines}"
    )


def _cells(one: Mapping[str, float], columns: Sequence[str]) -> str:
    return " | ".join(f"{one[name]:.3f}" if name in one else "" for name in columns)


def publish(
    options: argparse.Namespace,
    made: Mapping[int, Mapping[str, Any]],
    compared: Mapping[str, Mapping[str, float]],
) -> None:
    """Print what is known, and write the record: json for programs, markdown for people."""
    print(page(made, compared))
    if options.smoke:
        return
    where = provenance()
    content = {"measured_with": where, "seeds": made, "proxies": compared}
    folder = options.results
    (folder / "report_collapse.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (folder / "report_collapse.md").write_text(
        f"{page(made, compared)}\n{as_markdown(where)}", encoding="utf-8"
    )
