"""Run the real, unmodified train.py of Miles or slime on a CPU, and judge what it did.

    bash scripts/run-in-host.sh miles|slime [--checkout DIR --megatron DIR] [-- FLAGS OF THE HOST]
    bash scripts/run-in-host.sh rows [ROW ...] [--hosts DIR] [--record DIR]
    bash scripts/run-in-host.sh matrix [--hosts DIR] [--record DIR]
    bash scripts/run-in-host.sh on-policy [--hosts DIR]
    bash scripts/run-in-host.sh table

The first form runs three steps with the TIS hook. The second runs the rows of lab/in_host/rows.py that have no
record yet, or the named ones. `--hosts` is the folder that holds miles, slime, megatron-miles and megatron-slime. The
third runs all rows anew and prints their table; called again, it goes on where it stopped. Both leave records under
outputs/in_host/records, and `python -m lab.records outputs/in_host/records lab/results/in_host.tar.xz` packs them.
The fourth runs the rows whose log-probs must equal the engine's to the bit, with a stock run beside them. The fifth
writes the table of all rows and the certificate from their packed records, which it judges again, and needs no host.

Exit codes: 0 every asserted line holds; 1 a line does not; 2 the host could not be run.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.run_in_host:main")

import argparse
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from lab.in_host import by_version, cpu_launch, dumps, launching, model, on_policy, processes, timed, trees, verdict
from lab.in_host.launching import REPOSITORY
from lab.in_host.rows import ON_POLICY, ROWS, Row
from lab.in_host.trees import HOSTS, CannotRun, Host
from lab.records import Records, records
from mis_plugins.report.readers import curves, paths
from mis_plugins.report.readers.files import Problems
from mis_plugins.shared.budget import RecordError
from mis_plugins.shared.provenance import commit
from mis_plugins.shared.terminal import print_table
from true_on_policy.contract.cpu import Contract
from true_on_policy.engines.handover import ASKED

MEASURED = ("mis_plugins", "true_on_policy", "lab/in_host", "scripts")
PROVEN = "proven.yaml"  # asks for digests of the engine's weights
CONFIGS = REPOSITORY / "lab" / "in_host" / "configs"
RECORDS = REPOSITORY / "lab" / "results" / "in_host.tar.xz"
OWN = REPOSITORY / "outputs" / "in_host" / "records"
ROLLOUTS = REPOSITORY / "lab" / "in_host" / "rollouts"
TABLE = RECORDS.with_name("in_host.md")
CERTIFICATE = RECORDS.with_name("in_host_on_policy.md")
LIMIT_S = 1500.0
RAY_JOB_CONFIG_JSON_ENV_VAR = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # what `ray job submit --runtime-env-json` sets
SHOWN = ("loss", "mis_k3_kl", "mis_kept_fraction", "mis_tis_weight_after_bound", "grad_norm")


def main(argv: Sequence[str] | None = None) -> int:
    sys.path.append(str(REPOSITORY / "tests" / "support"))
    arguments = _parser().parse_intermixed_args(argv)
    if arguments.what == "table":
        return _pages(records(RECORDS))
    recorded = records(RECORDS)
    try:
        if arguments.what == "matrix":
            return _matrix(arguments)
        if arguments.what == "on-policy":
            return _rows(arguments, ON_POLICY, recorded) or _pages({**recorded, **records(arguments.record)})
        return _rows(arguments, ROWS, recorded) if arguments.what == "rows" else _one(arguments)
    except CannotRun as error:
        print(error, file=sys.stderr)
        return 2


def _pages(found: Records) -> int:
    """Write the table, the certificate and, where matplotlib is installed, the picture."""
    TABLE.write_text(table(found))
    CERTIFICATE.write_text(on_policy.page(ON_POLICY, found))
    try:
        on_policy.draw(ON_POLICY, found, CERTIFICATE.with_suffix(".png"))
    except RecordError as error:
        print(f"no picture: {error}", file=sys.stderr)
    return 0


def _matrix(arguments: argparse.Namespace) -> int:
    """Run each row that has no record of the user's own yet, and print and write the table of all."""
    code = _rows(arguments, ROWS, {})
    page = table(records(arguments.record))
    arguments.record.with_suffix(".md").write_text(page)
    print(page)
    return code


def _one(arguments: argparse.Namespace) -> int:
    host = HOSTS[arguments.what]
    checkout = arguments.checkout or Path.home() / host.name
    megatron = arguments.megatron or Path.home() / "Megatron-LM"
    row = asked_of(next(row for row in ROWS if row.host == host.name), arguments.words)
    record = run_row(row, checkout.resolve(), megatron.resolve(), arguments.work)
    return _tell(row, record)


def asked_of(row: Row, words: Sequence[str]) -> Row:
    """Give a row the user's flags of the host; `--num-rollout` sets how many steps the verdict wants."""
    number = "--num-rollout"
    steps = int(words[words.index(number) + 1]) if number in words else row.sizes.steps
    return replace(row, flags=tuple(words), sizes=replace(row.sizes, steps=steps))


def _rows(arguments: argparse.Namespace, rows: Sequence[Row], packed: Records) -> int:
    """Run the rows that are asked for, or that have no record, and write a record of each whose lines hold.

    Raises:
        CannotRun: a row that is asked for is none of `rows`.
    """
    if unknown := sorted(set(arguments.words) - {row.name for row in rows}):
        raise CannotRun(f"no row {', '.join(unknown)}; choose from {', '.join(row.name for row in rows)}")
    arguments.record.mkdir(parents=True, exist_ok=True)
    recorded = {*packed, *records(arguments.record)}
    wanted = [row for row in rows if row.name in arguments.words] or [
        row for row in rows if not row.blocked and row.name not in recorded
    ]
    codes = []
    for row in wanted:
        hosts = arguments.hosts.resolve()
        try:
            record = run_row(row, hosts / row.host, hosts / f"megatron-{row.host}", arguments.work)
        except CannotRun as error:
            print(f"{row.name}: {error}", file=sys.stderr)
            codes.append(2)
            continue
        codes.append(_tell(row, record))
        if codes[-1] == 0:
            (arguments.record / f"{row.name}.json").write_text(json.dumps(record, allow_nan=False) + "\n")
    return max(codes, default=0)


def run_row(row: Row, checkout: Path, megatron: Path, work: Path) -> dict[str, Any]:
    """Run one row in its own folder, and return its record.

    Raises:
        CannotRun: a tree does not fit, the launch script refuses, or the host's converter fails.
    """
    host = replace(HOSTS[row.host], launch=trees.FSDP_LAUNCH) if row.fsdp else HOSTS[row.host]
    for warning in trees.check(host, checkout, megatron):
        print(f"warning: {warning}", file=sys.stderr)
    work = work.resolve() / (row.host if row.model == model.MODEL else f"{row.host}-{row.model}")
    folder = work / "runs" / row.name / time.strftime("%H%M%S")
    folder.mkdir(parents=True)
    model.write(work / "model", row.model)
    words = launching.captured(host, checkout, CONFIGS / row.launched_with, folder)
    with processes.alone(), processes.marked(checkout, megatron) as settings:
        words = _shrunk(row, host, checkout, work, folder, words, settings)
        print(f"{row.name}: {folder / 'log'}", file=sys.stderr)
        contract = row.pinned_to(work / "model")
        (folder / "wandb").mkdir()
        kept = {"TENSORBOARD_DIR": str(folder / "tensorboard"), "WANDB_DIR": str(folder / "wandb")}
        settings = settings | kept | _environment(row, contract)
        command = [
            sys.executable,
            row.train,
            *words,
            *_recorded_rollouts(row),
            *_saved(row, folder),
            *("--custom-config-path", str(CONFIGS / row.config)),
            *row.flags,
            *_asked(row, contract),
        ]
        started = time.monotonic()
        code = processes.run(command, checkout, settings, folder / "log", LIMIT_S)
        seconds = time.monotonic() - started
        again = None
        if row.again is not None and code == 0:
            again = _synchronous(row, folder, words, checkout, settings)
        mark = settings[processes.MARK]
    commits = trees.commits({row.host: checkout, "megatron": megatron})
    made = {"seconds": round(seconds), "commits": commits | {"mis-plugins": commit(REPOSITORY, MEASURED)}}
    return _record(row, folder, code, len(processes.of(mark))) | made | {"again": again}


def _synchronous(
    row: Row, folder: Path, words: Sequence[str], checkout: Path, settings: dict[str, str]
) -> list[dict[str, float]]:
    """Train again by the host's synchronous script, on the run's rollouts; return each step's metrics."""
    assert row.again is not None
    command = [
        sys.executable,
        "train.py",
        *words,
        *("--load-debug-rollout-data", str(folder / "details" / "rollout_data" / "{rollout_id}.pt")),
        *("--dump-details", str(folder / "again")),
        *("--custom-config-path", str(CONFIGS / row.config)),
        *row.again,
    ]
    log = folder / "again.log"
    if processes.run(command, checkout, settings, log, LIMIT_S) != 0:
        raise CannotRun(f"{row.name}: the synchronous run failed; read {log}")
    steps = dumps.logged(log.read_text(errors="replace"), dumps.STEP)
    return [steps[number] for number in sorted(steps)]


def _shrunk(
    row: Row, host: Host, checkout: Path, work: Path, run: Path, words: Sequence[str], settings: dict[str, str]
) -> list[str]:
    """Return the command line of a tiny run, with the checkpoint that its trainer loads in place."""
    asked = launching.without(words, dict(row.dropped))
    if row.fsdp:
        return launching.shrunk_fsdp(asked, work, run, row.sizes)
    _convert(host, checkout, work / "model", work / "torch_dist", words, settings)
    shrunk = launching.shrunk(host, asked, work, run, row.sizes, row.colocate)
    if not row.resumes:
        return shrunk
    later = model.write(work / "later", row.model, model.SEED + 1)
    _convert(host, checkout, later, work / "later_dist", words, settings)
    return [*shrunk, "--load", str(work / "later_dist"), "--finetune", "--no-load-optim", "--no-load-rng",
            "--start-rollout-id", "0"]  # fmt: skip


def _environment(row: Row, contract: Contract | None) -> dict[str, str]:
    """Return the variables of a contract; on FSDP the job's own environment names the hook of Ray's workers, too."""
    if row.config == PROVEN:
        return {ASKED: "1"}
    if contract is None:
        return {}
    job = {"runtime_env": {"worker_process_setup_hook": cpu_launch.HOOK}}
    hooked = {RAY_JOB_CONFIG_JSON_ENV_VAR: json.dumps(job)} if row.fsdp else {}
    return cpu_launch.environment_of(contract, _backend(row)) | hooked


def _asked(row: Row, contract: Contract | None) -> list[str]:
    """List the flags of a contract, which win over the launch script's."""
    flags = () if contract is None else cpu_launch.launch_flags(contract, _backend(row))
    return [word for flag in flags for word in flag.words]


def _backend(row: Row) -> str:
    return cpu_launch.FSDP if row.fsdp else cpu_launch.MEGATRON


def _recorded_rollouts(row: Row) -> list[str]:
    if row.rollouts is None:
        return []
    return ["--load-debug-rollout-data", str(ROLLOUTS / row.rollouts / "{rollout_id}.pt")]


def _saved(row: Row, run: Path) -> list[str]:
    """List the flags with which the trainer saves before each update, in Hugging Face's names too."""
    if not row.saves:
        return []
    return ["--save", str(run / "saved"), "--save-hf", str(run / "hf" / "{rollout_id}"), "--save-interval", "1"]


def _convert(
    host: Host, checkout: Path, source: Path, made: Path, words: Sequence[str], settings: dict[str, str]
) -> None:
    """Make the trainer's checkpoint once, by the host's own converter."""
    if (made / "latest_checkpointed_iteration.txt").exists():
        return
    flags = [*launching.shape(words), *model.shape_flags(source), *launching.SPEC]
    command = [sys.executable, "tools/convert_hf_to_torch_dist.py", *flags,
               "--hf-checkpoint", str(source), "--save", str(made)]  # fmt: skip
    log = made.with_name(f"convert-{made.name}.log")
    if processes.run(command, checkout, settings, log, LIMIT_S) != 0:
        raise CannotRun(f"{host.name}: its converter failed; read {log}")


def _record(row: Row, folder: Path, code: int | None, left: int) -> dict[str, Any]:
    log = (folder / "log").read_text(errors="replace")
    rewards, said = dumps.logged(log, dumps.ROLLOUT), dumps.logged(log, dumps.STEP)
    # A watch that stops the job logs what it saw under a step's number, before that step.
    steps = {number: metrics for number, metrics in said.items() if "train/loss" in metrics}
    recorded = [dumps.micro_batches(folder / "details", number) for number in sorted(steps)]
    reported = [
        i for i, number in enumerate(sorted(steps)) if any(name.startswith(verdict.STEP) for name in steps[number])
    ]
    last = max(reported, default=len(recorded) - 1)  # a step's exact metrics are logged when the next one starts
    perf = dumps.logged(log, dumps.PERF)
    return {
        "row": row.name, "host": row.host, "exit": code, "left": left, "sizes": asdict(row.sizes), "loss": row.loss,
        "config": yaml.safe_load((CONFIGS / row.config).read_text()).get("mis", {}), "flags": list(row.flags),
        "versions": sorted(set(dumps.versions(log))),
        "wanted_versions": [] if row.rollouts else list(range(1, 2 if row.stopped else row.sizes.steps + 2)),
        "steps": [
            {"metrics": steps[number], "k3": verdict.k3(batches), "reward": rewards[number].get("rollout/raw_reward")}
            | _versions_of(row, batches, perf[number])
            for number, batches in zip(sorted(steps), recorded, strict=True)
        ],
        "micro_batches": verdict.as_rows(recorded[last]) if recorded else [],
        "recorded": last,
        "stale": row.stale,
        "broken": row.broken,
        "micro_batched": not row.fsdp,
        "curves": {kind: _curve(folder, kind, steps) for kind in row.curves},
        "log_holds": {text: text in log for text in row.log_holds},
        "stopped": None if row.stopped is None else {"told": _told(row.stopped, log), "named": row.named},
        "resplit": row.resplit,
        "contract": None if row.contract is None else dict(row.contract),
        "timed": timed.of_the_log(log, [perf[number]["perf/actor_train_time"] for number in sorted(perf)]),
        "bits": [verdict.bits(batches) for batches in recorded] if row.compared else None,
    }  # fmt: skip


def _told(pattern: str, log: str) -> str | None:
    """Return what the first group of `pattern` matches in the log; None where the pattern does not match."""
    found = re.search(pattern, log)
    return None if found is None else found[1]


def _versions_of(row: Row, batches: Sequence[dumps.MicroBatch], perf: Mapping[str, float]) -> dict[str, Any]:
    if row.loss not in by_version.BY_VERSION:
        return {}
    return {"by_version": by_version.summary(batches, row.loss), "times": by_version.times(perf)}


def _curve(folder: Path, kind: str, steps: Mapping[int, Mapping[str, float]]) -> dict[int, dict[str, float]]:
    """Read the exact metrics from a tracker's files, of the logged steps that the files hold completely.

    Hosts end their trainers without closing the tracker, and an offline wandb run then lacks its last 32 KB
    or less.
    """
    found: dict[int, dict[str, float]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and paths.format_of(path) == kind):
        for number, values in curves.curve([path], kind, Problems()).values.items():
            found[number] = {**found.get(number, {}), **values}
    exact = {number: {curves.our_name(name) for name in steps[number] if name.startswith(verdict.STEP)}
             for number in found if number in steps}  # fmt: skip
    return {number: {name: found[number][name] for name in sorted(names)}
            for number, names in exact.items() if names and names <= found[number].keys()}  # fmt: skip


def _tell(row: Row, record: dict[str, Any]) -> int:
    """Print the run's steps and the asserted lines, and return the exit code."""
    print(f"{row.name}: {record['seconds']} s, versions of the engine {record['versions']}")
    steps = record["steps"]
    shown = [name for name in SHOWN if steps and f"train/{name}" in steps[0]["metrics"]]
    print_table(
        ["step", "reward", "k3", *shown],
        [[i, f"{step['reward']:.4f}", f"{step['k3']:.1e}", *(f"{step['metrics'][f'train/{x}']:.6g}" for x in shown)]
         for i, step in enumerate(steps)],
    )  # fmt: skip
    lines = verdict.judge(record)
    failed = [line for line in lines if not line.holds]
    print_table(["asserted", "wanted", "found", "holds"], [list(asdict(line).values()) for line in failed or lines])
    print(f"{row.name}: {len(lines) - len(failed)} of {len(lines)} lines hold", flush=True)
    return 1 if failed else 0


def table(found: Records) -> str:
    """Write a line of markdown for each row: what its record shows, or that it was not run."""
    lines = [
        "# Inside the hosts' own loops",
        "",
        "Made by `bash scripts/run-in-host.sh table` from `in_host.tar.xz` ([docs/hosts.md](../../docs/hosts.md)).",
        "Rows with an engine start the real SGLang and update its weights every step; the others train on the rollouts",
        "that an engine left in another run of that host. k3 compares a step's tokens with the trainer's log-probs; in",
        "the rows `*-fully-async*` with those of weights that are a token's own, or one update newer.",
        "",
        "| row | TP x CP x DP | config | engine | steps | lines that hold | largest k3 | versions | commit |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_table_line(row, found.get(row.name)) for row in ROWS),
    ]
    made = [found[row.name] for row in ROWS if row.name in found]
    timed_hooks = [record for record in made if record.get("timed")]
    return "\n".join(lines) + "\n" + timed.section(timed_hooks) + by_version.section(made)


def _table_line(row: Row, record: dict[str, Any] | None) -> str:
    sizes = f"{row.sizes.tensor} x {row.sizes.context} x {row.sizes.data}"
    start = f"| {row.name} | {sizes} | {row.config} | {'recorded' if row.rollouts else 'SGLang'} |"
    if record is None:
        return f"{start} **not run**{row.blocked and f': {row.blocked}'} | | | | |"
    judged = verdict.judge(record)
    held, largest = sum(line.holds for line in judged), verdict.largest_k3(record)
    versions = f"{record['versions'][0]} to {record['versions'][-1]}" if record["versions"] else ""
    made = record["commits"]["mis-plugins"][:12]
    return f"{start} {len(record['steps'])} | {held} of {len(judged)} | {largest:.1e} | {versions} | {made} |"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*HOSTS, "rows", "matrix", "on-policy", "table"])
    parser.add_argument("words", nargs="*", help="rows by name; or after --, flags of the host")
    parser.add_argument("--checkout", type=Path, help="the host's checkout; default ~/miles or ~/slime")
    parser.add_argument("--megatron", type=Path, help="its Megatron; default ~/Megatron-LM")
    parser.add_argument("--hosts", type=Path, default=Path.home())
    parser.add_argument(
        "--work", type=Path, default=REPOSITORY / "outputs" / "in_host", help="checkpoints, logs, dumps"
    )
    parser.add_argument("--record", type=Path, default=OWN, help="folder of new records; the table lies beside it")
    return parser
