"""A collapse, its report, and the proposal of the report run: does the proposed config hold?

    python -m lab.report_collapse             some ten minutes a seed on one core; finished runs are taken over
    python -m lab.report_collapse --smoke     shows that it works, in a minute

The embedded host trains the recipe of docs/collapse.md without correction, and a hook writes each rollout in the
neutral form. The report reads that file alone. Where it trusts no config and says to give the engine more bits, the run
is made again with the next of `ENGINES`, still without correction, and reported again. The proposal of the last report
then trains from the same warm start, with that report's engine. At the first seed's warm start the proxy that ranks
configs is held against the true cosine of each config's policy gradient.

A run of the same recipe whose engine has the trainer's own weights is the control: where it falls too, the mismatch is
not why, and no correction can help. A seed is trained only if its warm start reaches `LEAST_START`. Neither the control
nor the start reads what the proposal does. The rules of the proposal were set after the runs of `SEEN` and of seeds
below them; the other default seeds judge the rules.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.report_collapse:main", extra="verify")

import argparse
import json
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.experiments.recipe import ESTIMATORS, RECIPE, precision
from lab.experiments.runner import Arm, in_ranks, run_arms, train
from lab.host.cli.arguments import parse_args
from lab.host.folders import SUMMARY
from lab.host.loop import Loop
from lab.host.rollout.sampler import Rollout, shard
from lab.host.train.gradients import cosine, mean_gradient, on_policy_reference
from lab.host.train.parallel import initialize
from lab.provenance import as_markdown, provenance
from mis_plugins.__main__ import main as mis_plugins
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.report.record import from_mapping
from mis_plugins.report.survey import Survey
from mis_plugins.report.sweep import Candidate, candidates, file_of
from mis_plugins.shared.provenance import committed_tree

ENGINES = (precision("uncorrected"), "int4", "int8")
PROXIES = ("coefficient_cosine", "response_cosine")
DUMP = "dump.jsonl"
HOOK = "mis_plugins.mis.compute_mis_weights_with_cp"
COMPARED = ("tis", "cis", "mis", "icepop", "geometric-mis", "geometric-rs", "sequence", "seq-mask-tis")
EVALUATED = "--eval-interval 10".split()
SEEN = (7, 8, 9, 10, 11)
SEEDS = [*SEEN, 13, 14, 15, 16, 17]
LEAST_START = 0.9  # as in docs/collapse.md: from a poor start a run falls with matched precision too
# The code that training depends on: a change of the report's rules repeats no run.
TRAINING = ("mis.py", "local", "hosts", "loss", "metrics", "versions", "correction", "config", "packing")
ROLLOUTS = 4  # pooled into each gradient
# A policy that still fails often: near its optimum a gradient is nearly all noise.
EARLY = "--num-digits 6 --warmup-steps 120 --rollout-batch-size 64 --global-batch-size 512".split()


def dump(args: Namespace, rollout_id: int, data: Mapping[str, Any]) -> None:
    """Append the rollout to the run's file, in the neutral form: the hook of `--rollout-data-postprocess-path`."""
    with (Path(args.output) / DUMP).open("a", encoding="utf-8") as file:
        for line in neutral(rollout_id, data):
            file.write(json.dumps(line) + "\n")


def neutral(rollout_id: int, data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield one object of the neutral form for each response of a rollout."""
    names = {"behavior_log_probs": "rollout_log_probs", "proximal_log_probs": "log_probs",
             "loss_mask": "loss_masks", "advantages": "advantages"}  # fmt: skip
    for place, (tokens, size) in enumerate(zip(data["tokens"], data["response_lengths"], strict=True)):
        line = {"step": rollout_id, "sample": str(place), "tokens": tokens[-size:].tolist()}
        yield line | {ours: data[theirs][place].tolist() for ours, theirs in names.items()}


def arguments(folder: Path, options: argparse.Namespace, *extra: str) -> Namespace:
    """Return the settings of one run."""
    small = ["--smoke"] if options.smoke else []
    cache = ["--warmup-cache", str(options.runs / "warm-start"), "--seed", str(options.seed)]
    engine = ["--rollout-weights", precision("uncorrected"), "--quiet"]
    words = [*RECIPE, *ESTIMATORS["R-1"], *EVALUATED, *engine, *cache, "--output", str(folder)]
    return parse_args([*words, *extra, *small])


def corrected(config: Path) -> list[str]:
    return ["--use-tis", "--custom-tis-function-path", HOOK, "--custom-config-path", str(config)]


def trained(name: str, options: argparse.Namespace, *extra: str, config: str = "") -> dict[str, Any]:
    """Return the summary of a run of the seed, trained now unless this code finished it with equal settings.

    Args:
        config: what the file of `--custom-config-path` says.
    """
    folder = options.runs / f"seed-{options.seed}" / name

    def work() -> int:
        (folder / DUMP).unlink(missing_ok=True)
        return train(arguments(folder, options, *extra))

    arm = Arm(folder, dict(vars(arguments(folder, options, *extra))) | {"config": config}, work)
    if code := run_arms([arm], 1, trained_by()):
        raise SystemExit(code)
    return json.loads((folder / SUMMARY).read_text())


def trained_by() -> str | None:
    """Return a name of the committed code that trains; None where the code has uncommitted changes."""
    names = [committed_tree(f"mis_plugins/{room}") for room in TRAINING]
    return None if None in names else " ".join(map(str, names))


def diagnosed(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the report over the file of a run."""
    output = folder / "report"
    if mis_plugins(["report", str(folder / DUMP), "--sweep", options.sweep, "--output", str(output)]):
        raise SystemExit("no report")
    return json.loads((output / "report.json").read_text())


def proxies(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return each config's proxies in the report, and its true cosine to the on-policy gradient."""
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
    parser.add_argument("--results", type=Path, default=Path("lab/results"), metavar="FOLDER")
    parser.add_argument("--sweep", default="own", help="as of the report (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, metavar="SEED")
    parser.add_argument("--smoke", action="store_true", help="tiny runs, and nothing is written")
    options = parser.parse_args(argv)
    made: dict[int, dict[str, Any]] = {}
    for seed in options.seeds:
        options.seed = seed
        made[seed] = of_seed(options)
        publish(options, made, {})
    options.seed = next(seed for seed, one in made.items() if "reports" in one)
    publish(options, made, in_process(options))
    return 0


def of_seed(options: argparse.Namespace) -> dict[str, Any]:
    """Train a seed with matched precision and without correction, read the reports, and train the last proposal."""
    start = trained("start", options, "--num-rollout", "1")["trainer_start"]
    if start < LEAST_START and not options.smoke:
        return {"start": start}
    runs = {"matched": trained("matched", options, "--rollout-weights", precision("matched"))}
    reports: dict[str, dict[str, Any]] = {}
    for engine in ENGINES:
        name = f"uncorrected-{engine}"
        hook = ("--rollout-data-postprocess-path", "lab.report_collapse.dump")
        runs[name] = trained(name, options, "--rollout-weights", engine, *hook)
        said = diagnosed(options.runs / f"seed-{options.seed}" / name, options)
        reports[engine] = {key: said[key] for key in ("verdict", "causes", "opening", "proposal")}
        if said["proposal"]["trusted"]:
            break
    runs["proposed"] = proposed(said["proposal"], engine, options)
    return {"start": start, "runs": {name: _outcome(run) for name, run in runs.items()}, "reports": reports}


def proposed(proposal: Mapping[str, Any], engine: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train the proposal of a report with the engine of the run that was reported."""
    path = options.runs / f"seed-{options.seed}" / "proposal.yaml"
    path.write_text(proposal["yaml"])
    config = corrected(path) if proposal["name"] != "none" else []
    return trained("proposed", options, "--rollout-weights", engine, *config, config=proposal["yaml"])


def _outcome(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {name: summary[name] for name in ("trainer_start", "trainer_final", "rollout_final", "collapsed")}


def in_process(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Run `proxies` in a process group of its own."""
    path = options.runs / "proxies.json"
    code = in_ranks(1, lambda: path.write_text(json.dumps(proxies(options))) and None)
    if code:
        raise SystemExit(code)
    return json.loads(path.read_text())


def page(made: Mapping[int, Mapping[str, Any]], compared: Mapping[str, Mapping[str, float]]) -> str:
    """Return the record for people."""
    run = {seed: one for seed, one in made.items() if "runs" in one}
    poor = ", ".join(f"{seed} ({one['start']:.2f})" for seed, one in made.items() if seed not in run)
    text = (
        "# A collapse, its report, and the proposal run\n\nReward of the trainer's policy, at the start and over the "
        "last tenth of the run. matched: the engine has the trainer's own weights, so that nothing is to be "
        "corrected. A run with the next engine was made only where the report before trusted no config. In brackets: "
        "the overlap of both policies over whole responses in the run's opening, of which the report asks one half. "
        "fell: below half of the start.\n\n"
    )
    for heading, chosen in _groups(run):
        heads = (
            "seed",
            "start",
            "matched",
            *(f"uncorrected, {engine}" for engine in ENGINES),
            "proposed",
            "proposal",
        )
        text += f"{heading}\n\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}\n"
        text += "".join(_row(seed, one) for seed, one in chosen.items()) + "\n"
    text += f"Not trained, for a warm start below {LEAST_START:g}: {poor}.\n" if poor else ""
    for seed, one in run.items():
        for engine, said in one["reports"].items():
            verdict = "\n".join(
                f"* {line}" for line in (said["verdict"]["headline"], *said["verdict"]["lines"])
            )
            text += f"\nThe report on the file of seed {seed}'s uncorrected run with {engine} alone:\n\n{verdict}\n"
    return text + (_proxies(compared) if compared else "")


def _groups(run: Mapping[int, Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[int, Mapping[str, Any]]]]:
    """Yield the seeds that judge the rules and the seeds that made the rules, each with a heading, if any."""
    fresh = {seed: one for seed, one in run.items() if seed > max(SEEN)}
    if fresh:
        yield "Seeds that nobody had seen when the rules were set:", fresh
    if len(fresh) < len(run):
        yield "Seeds from which the rules were made:", {seed: run[seed] for seed in run if seed not in fresh}


def _row(seed: int, one: Mapping[str, Any]) -> str:
    """Write the row of a seed in the table."""
    runs, reports = one["runs"], one["reports"]
    uncorrected = [
        f"{_final(runs[f'uncorrected-{engine}'])} [{reports[engine]['opening']['response_overlap']:.2f}]"
        if engine in reports
        else ""
        for engine in ENGINES
    ]
    engine = list(reports)[-1]
    told = f"{reports[engine]['proposal']['name']}, with {engine}"
    cells = (
        seed,
        f"{one['start']:.2f}",
        _final(runs["matched"]),
        *uncorrected,
        _final(runs["proposed"]),
        told,
    )
    return f"| {' | '.join(map(str, cells))} |\n"


def _final(run: Mapping[str, Any]) -> str:
    return f"{run['trainer_final']:.2f}{' (fell)' if run['collapsed'] else ''}"


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
