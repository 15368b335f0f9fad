"""Does score centering help? REINFORCE with and without it, over three seeds.

    python -m lab.centered                  the demonstration's int3 engine: 21 runs, some ten minutes; writes
                                            lab/results/centered.{json,md}
    python -m lab.centered --stale          a float32 engine whose weights are 2, 4 or 8 updates old: 39 runs, some
                                            twenty minutes; writes lab/results/centered_stale.{json,md}
    python -m lab.centered --long           an int4 engine, answers of 200 tokens, 300 updates: 15 runs, some fifty
                                            minutes; writes lab/results/centered_long.{json,md}
    python -m lab.centered --smoke          tiny runs that only show that everything works

An arm that this committed code finished is not repeated.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.centered:main", extra="verify")

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from lab.demo import CORRECTION, RECIPE
from lab.experiments.runner import Arm, in_ranks, made_with, parsed, run_arms, this_code, training
from lab.host.cli.arguments import parse_args
from lab.host.folders import METRICS, SUMMARY
from lab.host.report import MetricsLog
from lab.provenance import markdown_table, write_record

PROGRAM = "python -m lab.centered"
RUN = "--num-rollout 100 --eval-interval 10 --eval-prompts 128 --rollout-top-logprobs-num 16 --quiet".split()
LOSS = "--loss-type custom_loss --custom-loss-function-path mis_plugins.mis.policy_loss".split()
OBJECTIVE = {"objective": {"surrogate": "reinforce", "old": "behavior"}, "metrics": "full"}
TIS = {"weight": {"upper": 2.0}}
ARMS: dict[str, dict[str, Any]] = {
    "nothing": {"weight": None},
    "token TIS": TIS,
    "geometric window": CORRECTION,
    "centered": {"weight": None, "center": {"top_k": 16}},
    "centered, token TIS": TIS | {"center": {"top_k": 16}},
    "centered by 8 tokens": {"weight": None, "center": {"top_k": 8}},
    "centered by 4 tokens": {"weight": None, "center": {"top_k": 4}},
}
"""What `mis:` holds beside the objective. The toy's vocabulary has 16 tokens, so that 16 are exact."""


AGES = (2, 4, 8)
STALE_RUN = "--rollout-weights fp32 --lr 2e-4 --num-rollout 60".split()
STALE_ARMS = ("nothing", "token TIS", "centered", "centered, token TIS")
LONG_RUN = (
    "--num-digits 5 --answer-repeats 40 --warmup-steps 600 --rollout-weights int4 --num-rollout 300 "
    "--rollout-batch-size 4 --global-batch-size 32 --eval-interval 25"
).split()
LONG_ARMS = {"truly on policy": ["--true-on-policy", "--rollout-weights", "fp32"]} | dict.fromkeys(STALE_ARMS, [])


@dataclass(frozen=True)
class Run:
    """One run.

    age: how many updates old the weights are that sample; None is the demonstration's int3 engine, or a long run.
    long: whether answers have 200 tokens, and the engine int4 weights.
    """

    name: str
    seed: int
    age: int | None = None
    long: bool = False

    def arm(self, root: Path, more: Sequence[str]) -> Arm:
        if self.long:
            words = [*LONG_RUN, *LONG_ARMS[self.name], *more]
            return training(partial(command_line, self.name, self.seed, root / "long", words, root))
        if self.age is None:
            return training(partial(command_line, self.name, self.seed, root, more))
        words = command_line(self.name, self.seed, root / f"age{self.age}", [*STALE_RUN, *more], root)
        args = parse_args(words)
        args.age = self.age
        return Arm(Path(args.output), dict(vars(args)), partial(in_ranks, 1, partial(_lagging, args)))


def _lagging(args: Namespace) -> None:
    """Train with an engine that samples with the weights of `args.age` updates ago, or with the first ones."""
    from lab.host.loop import Loop, Row, run_rank

    class Lagging(Loop):
        def publish(self) -> Row:
            kept.append((self.trainer.weights(), self.next_rollout))
            if len(kept) > self.args.age:
                self.engine.update_weights(*kept.pop(0))
            return {}

    kept: list[tuple[Mapping[str, Any], int]] = []
    run_rank(args, Lagging)


def main() -> int:
    """Return 0, or the exit code of the arm that failed or was interrupted."""
    parser = ArgumentParser(prog=PROGRAM, description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--stale", action="store_true", help="old weights in place of rounded ones")
    which.add_argument("--long", action="store_true", help="answers of 200 tokens and 300 updates")
    options = parsed(parser, "centered")
    smoke = ["--smoke"] if options.smoke else []
    made = made_with(PROGRAM)
    arms = {run: run.arm(options.runs, smoke) for seed in options.seeds for run in _runs(seed, options)}
    if code := run_arms(list(arms.values()), options.processes, this_code()):
        return code
    rows = [{**_named(run), **_outcome(arm.folder)} for run, arm in arms.items()]
    content = {"rows": rows, "measured_with": made}
    name, page = (
        ("_stale", stale_markdown) if options.stale else ("_long", long_markdown) if options.long else ("", markdown)
    )
    path = options.results / f"centered{name}.json"
    write_record(path, content, "\n".join(page(content)))
    print(f"wrote {path.with_suffix('.md')}")
    return 0


def _runs(seed: int, options: Namespace) -> list[Run]:
    if options.long:
        return [Run(name, seed, long=True) for name in LONG_ARMS]
    if not options.stale:
        return [Run(name, seed) for name in ARMS]
    return [Run("nothing", seed, 0), *(Run(name, seed, age) for age in AGES for name in STALE_ARMS)]


def _named(run: Run) -> dict[str, Any]:
    return {"arm": run.name, "seed": run.seed} | ({} if run.age is None else {"age": run.age})


def command_line(name: str, seed: int, root: Path, more: Sequence[str], warm: Path | None = None) -> list[str]:
    """Return the arguments of `python -m lab.host` for an arm, and write its config to its folder.

    Args:
        warm: the folder of the warm start; `root` for None.
    """
    folder = root / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "mis.yaml"
    config.write_text(yaml.safe_dump({"mis": OBJECTIVE | ARMS.get(name, ARMS["nothing"])}, sort_keys=False))
    places = ["--output", str(folder), "--custom-config-path", str(config)]
    cache = ["--warmup-cache", str((warm or root) / "warm-start")]
    return [*RECIPE, *RUN, *LOSS, "--seed", str(seed), *cache, *places, *more]


def _outcome(folder: Path) -> dict[str, Any]:
    """Held-out rewards of the trainer on the way and of both policies at the end, the k3, and the minutes."""
    summary = json.loads((folder / SUMMARY).read_text())
    log = MetricsLog(folder / METRICS).read()
    way = [row["eval_trainer"] for row in log if "eval_trainer" in row]
    kept = ("trainer_final", "rollout_final", "k3_kl")
    return {key: summary[key] for key in kept} | {
        "first": way[0],
        "lowest": min(way),
        "mean": sum(way) / len(way),
        "largest_k3": max(row["k3_kl"] for row in log),
        "minutes": sum(row["seconds"] for row in log) / 60,
    }


def table(
    content: Mapping[str, Any], names: Sequence[str], headings: Sequence[str], keys: Mapping[str, str]
) -> Iterator[str]:
    """A table with a row for each arm by `names`, whose cells have a number for each seed; then what measured it.

    Args:
        keys: what each further column shows of a run, and in which format.
    """
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in content["rows"]:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    shown = [
        [*arm, *(", ".join(format(row[key], form) for row in rows) for key, form in keys.items())]
        for arm, rows in found.items()
    ]
    yield markdown_table((*names, *headings), shown)
    yield markdown_table(("measured with", ""), content["measured_with"].items())


def markdown(content: Mapping[str, Any]) -> Iterator[str]:
    yield "# Score centering on a toy\n"
    yield f"Made by `{PROGRAM}`: the demonstration's recipe (int3 engine, advantage R - 1) with REINFORCE and"
    yield "`old: behavior`, 100 rollouts. Rewards on held-out prompts at the end, one number a seed. *Lowest* is the"
    yield "trainer's lowest on the way.\n"
    headings = ("trainer", "engine", "lowest", "k3 of the last rollouts")
    keys: Mapping[str, str] = dict.fromkeys(("trainer_final", "rollout_final", "lowest", "k3_kl"), ".2f")
    arms, measured = table(content, ["arm"], headings, keys)
    yield from (arms, "```\n" + yaml.safe_dump(json.loads(json.dumps(ARMS)), sort_keys=False) + "```\n", measured)


def stale_markdown(content: Mapping[str, Any]) -> Iterator[str]:
    yield "# Score centering on stale rollouts of a toy\n"
    yield f"Made by `{PROGRAM} --stale`: the task, the advantage R - 1 and the arms of [centered.md](centered.md), but"
    yield "the engine samples in float32 with the trainer's weights of `age` updates ago, so that staleness is the only"
    yield f"mismatch. An update is a rollout of two optimizer steps (`{' '.join(STALE_RUN)}`). Rewards of"
    yield "the trainer's policy on held-out prompts, one number a seed. *Lowest* is the lowest on the way.\n"
    headings = ("at the end", "lowest", "largest k3 of a rollout")
    yield from table(content, ["age", "arm"], headings, dict.fromkeys(("trainer_final", "lowest", "largest_k3"), ".2f"))


def long_markdown(content: Mapping[str, Any]) -> Iterator[str]:
    yield "# A longer run of a toy\n"
    yield f"Made by `{PROGRAM} --long`: five digits are to be reversed and said forty times, 200 tokens. Advantage and"
    yield "losses are those of [centered.md](centered.md), and these settings differ:\n"
    yield f"```\n{' '.join(LONG_RUN)}\n```\n"
    yield "*Truly on policy* samples in float32 by the trainer's kernels. Held-out rewards of the trainer's policy, one"
    yield "number a seed: *mean* and *lowest* are over the evaluations on the way. Minutes are of a process that shared"
    yield "two cores.\n"
    headings = ("at the start", "mean", "lowest", "at the end", "largest k3 of a rollout", "minutes")
    keys = dict.fromkeys(("first", "mean", "lowest", "trainer_final"), ".2f") | {"largest_k3": ".1e", "minutes": ".1f"}
    yield from table(content, ["arm"], headings, keys)
