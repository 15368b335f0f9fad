"""How far is a rollout engine from the trainer on a real model, and what does each preset keep of its rollouts?

    python -m lab.mismatch                    128 prompts and 20,000 tokens a rung: hours on two cores
    python -m lab.mismatch --rungs bf16 int5 --prompts 16 --tokens 1000
    python -m lab.mismatch --smoke            a tiny model and Hugging Face's engine, in half a minute

The real SGLang samples on every rung, with rounded weights but for the first two, and vLLM on the last; Megatron-core
scores in bf16 and in fp32. Each rung has chats too, where a tool's result, which is masked, follows each turn. Every
batch is kept: after Ctrl-C the same command goes on, and one with more prompts or tokens adds to what is there.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.mismatch:main", extra="verify")

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import json
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from lab.ladder import picture, shipped
from lab.ladder.page import page
from lab.ladder.presets_at import kept_and_weighed, of_length, window_values
from lab.ladder.rollouts import Amount, Rollouts, start_engine, start_trainer
from lab.ladder.rungs import RUNGS, USUAL, Rung, write_rollout_weights
from lab.ladder.statistics import by_turn, summary
from lab.ladder.workloads import (
    TURN_LENGTH,
    TURNS,
    Chat,
    ChatSettings,
    Settings,
    Workload,
    chats,
    drawn_tool_turns,
    score_chat,
    tool_turns,
)
from lab.provenance import parser_of, provenance, write_json
from mis_plugins.errors import UserError
from mis_plugins.shared.numerals import count
from true_on_policy.contract.model_config import check_model
from true_on_policy.contract.sides import ENGINES
from true_on_policy.engines.protocol import Engine
from true_on_policy.models.pretrained import checkpoint_of
from true_on_policy.models.tiny import read_config, weights_hash
from true_on_policy.trainers.megatron import Megatron
from true_on_policy.verify.prompts import read_prompts

TRAINERS = ("bf16", "fp32")
RESULTS = Path("lab/results")
CARRIED = Path("mis_plugins/explain/rungs.json")  # within a wheel
CUTS = (16, 64, 128, 256, 512, 1024)
LEAST = 4  # a length with fewer responses has no numbers


@dataclass(frozen=True)
class Climb:
    """What all rungs share: the model, where rollouts are kept, and this commit."""

    source: Path
    runs: Path
    commit: str

    def rollouts(self, name: str, asked: Workload) -> Rollouts:
        """Return a rung's rollouts of a workload, and sample what the rung's file lacks."""
        path, rung = self.runs / f"{name}{asked.suffix}.safetensors", RUNGS[name]
        rollouts = taken_over(path, asked.settings)
        if rollouts is not None and asked.amount.share(rollouts) >= 1:
            return rollouts
        with TemporaryDirectory(prefix="mismatch-") as scratch:
            held = write_rollout_weights(self.source, Path(scratch) / "rollout", rung)
            with closing(start_engine(rung.engine or asked.settings.engine, held)) as engine:
                return self._go_on(path, rung, asked, engine, rollouts)

    def _go_on(self, path: Path, rung: Rung, asked: Workload, engine: Engine, rollouts: Rollouts | None) -> Rollouts:
        """Sample and score batches until there is enough; each batch is saved as soon as it is scored."""
        trainers = {dtype: start_trainer(self.source, dtype, rung.fp32_head) for dtype in TRAINERS}
        words = {"settings": _text(asked.settings), "engine": json.dumps(engine.versions()), "commit": self.commit}
        check_engine(path, rollouts, words["engine"])
        began, before = time.monotonic(), asked.amount.share(rollouts)
        while rollouts is None or (share := asked.amount.share(rollouts)) < 1:
            if rollouts is not None and share > before:
                left = (time.monotonic() - began) * (1 - share) / (share - before)
                print(f"{path.stem}: {share:.0%} of the rung, {left / 60:.0f} min left", file=sys.stderr)
            done = 0 if rollouts is None else len(rollouts.lengths)
            more = _scored(asked.batch(engine, done), trainers, words)
            rollouts = more if rollouts is None else rollouts.followed_by(more)
            rollouts.save(path)
        return rollouts


def _scored(found: Sequence[tuple[int, Chat]], trainers: Mapping[str, Megatron], words: Mapping[str, str]) -> Rollouts:
    turns = [(index, one) for index, chat in found for one in chat]
    return Rollouts(
        behavior=torch.cat([one.log_probs for _, one in turns]),
        proximal={
            dtype: torch.cat([score_chat(trainer, chat) for _, chat in found]) for dtype, trainer in trainers.items()
        },
        lengths=torch.tensor([len(one.tokens) for _, one in turns]),
        prompts=torch.tensor([index for index, _ in turns]),
        words=words,
    )


def check_engine(path: Path, rollouts: Rollouts | None, engine: str) -> None:
    """Refuse to mix rollouts of two versions of an engine."""
    if rollouts is not None and rollouts.words["engine"] != engine:
        raise UserError(
            f"{path}: was sampled by {rollouts.words['engine']}, and the engine here is {engine}; "
            "name another folder with --runs, or remove the file"
        )


def _text(settings: Settings) -> str:
    return json.dumps(asdict(settings), sort_keys=True)


def rung_of(rollouts: Rollouts, chats: Rollouts, lengths: Sequence[int]) -> dict[str, Any]:
    """Return the numbers of one rung, for the json."""
    pairs = rollouts.pairs()
    cut = {length: of_length(pairs["bf16"], length) for length in lengths}
    enough = {str(length): pair for length, pair in cut.items() if len(pair.lengths) >= LEAST}
    return {
        "mismatch": {name: summary(pair) for name, pair in pairs.items()},
        "by turn": {name: by_turn(pair, TURNS) for name, pair in chats.pairs().items()},
        "responses": {length: len(pair.lengths) for length, pair in enough.items()},
        "presets": {length: kept_and_weighed(pair) for length, pair in enough.items()},
        "windows": {length: window_values(pair) for length, pair in enough.items()},
        "engine": json.loads(rollouts.words["engine"]),
        "commit": shipped.commits([rollouts.words, chats.words]),
    }


def taken_over(path: Path, settings: Settings) -> Rollouts | None:
    """Return the rollouts of a rung's file; None where there is no file, or its settings are others."""
    if not path.exists():
        return None
    rollouts = Rollouts.load(path)
    return rollouts if rollouts.words["settings"] == _text(settings) else None


def climb(options: Namespace, scratch: Path) -> Iterator[dict[str, Any]]:
    """Measure every rung that is asked for, and yield the content of the json after each."""
    measured = provenance()  # read once: the carried file that is written below changes the tree
    told = partial(print, file=sys.stderr)
    source = checkpoint_of(options.model, scratch / "model", torch.float32, seed=0, tell=told)
    asked, chatted = _workloads(options, source)
    options.runs.mkdir(parents=True, exist_ok=True)
    made = Climb(source, options.runs, measured["mis-plugins commit"])
    lengths = [cut for cut in CUTS if cut < options.length] + [options.length]
    size = f"{options.model}, {options.prompts} prompts and {options.tokens} tokens a rung at least"
    content = {
        "model": options.model,
        "size": f"{size}, responses up to {options.length} tokens",
        "lengths": lengths,
        "rungs": {},
    }
    for name in options.rungs:
        rollouts, talked = made.rollouts(name, asked), made.rollouts(name, chatted)
        content["rungs"][name] = rung_of(rollouts, talked, lengths)
        yield content | {"measured_with": measured}


def _workloads(options: Namespace, source: Path) -> tuple[Workload, Workload]:
    """Build the two workloads: responses, and chats."""
    config = read_config(source)
    end = config.eos_token_id
    named, prompts = _prompts(options, source, config.vocab_size)
    alike = (options.model, weights_hash(source), named, options.engine)
    amount = Amount(options.prompts, options.tokens)
    tools = drawn_tool_turns(config.vocab_size, end) if options.source == "random" else tool_turns(source, end)
    return (
        Workload(Settings(*alike, options.length), amount, prompts, end),
        chats(ChatSettings(*alike, TURN_LENGTH), options.chats, prompts, tools, end),
    )


def _prompts(options: Namespace, source: Path, vocabulary: int) -> tuple[str, Sequence[tuple[int, ...]]]:
    """Return a name of the prompts for the settings, and the prompts; `--source random` draws tokens."""
    if options.source == "random":
        drawn = torch.randint(vocabulary, (options.prompts, 8), generator=torch.Generator().manual_seed(0))
        return f"random {options.prompts}", [tuple(prompt) for prompt in drawn.tolist()]
    found = read_prompts(options.source, source)
    if len(found.tokens) < options.prompts:
        raise UserError(f"--prompts {options.prompts}: {options.source} holds {len(found.tokens)}; give fewer")
    return f"{found.name} {found.sha256}", found.tokens


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rungs", nargs="+", choices=RUNGS, default=USUAL, metavar="RUNG")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--engine", default="sglang", choices=ENGINES)
    parser.add_argument("--source", default="builtin", help="a file of prompts, one a line, or builtin")
    parser.add_argument("--prompts", type=count, default=128, help="how many prompts")
    parser.add_argument("--tokens", type=count, default=20000, help="sampled on each rung, at least")
    parser.add_argument("--chats", type=count, default=32, help="chats of four turns on each rung")
    parser.add_argument("--length", type=count, default=1024, help="tokens of a response, at most")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, few tokens, Hugging Face's engine")
    parser.add_argument("--runs", type=Path, help="where rollouts are kept (default: lab/results/mismatch)")
    parser.add_argument("--results", type=Path, help="(default: lab/results)")
    options = parser.parse_args()
    if options.smoke:
        options.model, options.engine, options.source = "tiny-llama", "hf", "random"
        options.prompts, options.tokens, options.length, options.chats = 8, 100, 24, 2
        options.rungs = [name for name in options.rungs if RUNGS[name].engine is None]
    options.runs = options.runs or (Path("runs/mismatch-smoke") if options.smoke else RESULTS / "mismatch")
    options.results = options.results or (options.runs if options.smoke else RESULTS)
    options.results.mkdir(parents=True, exist_ok=True)
    try:
        check_model(options.model)
        with TemporaryDirectory(prefix="mismatch-model-") as scratch:
            for content in climb(options, Path(scratch)):
                publish(content, options.results / "mismatch.json")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def publish(content: dict[str, Any], path: Path) -> None:
    """Write json, page, picture and the part that is shipped, of the rungs that are finished."""
    carried = CARRIED if path.parent == RESULTS else path.with_name(CARRIED.name)
    shipped.write(carried, content)
    rungs = {name: _with_fits(rung) for name, rung in content["rungs"].items()}
    made = {**content, "rungs": rungs}
    picture.draw(made, path.with_suffix(".png"))
    write_json(path, made)
    path.with_suffix(".md").write_text(page(content), encoding="utf-8")
    print(f"{', '.join(content['rungs'])}: wrote {path} and {path.with_suffix('.md')}")


def _with_fits(rung: Mapping[str, Any]) -> dict[str, Any]:
    """A rung for the record: the window that fits each length in place of the values of each response."""
    kept = {key: rung[key] for key in rung if key != "windows"}
    return kept | {"fits": {length: shipped.fits(values) for length, values in rung["windows"].items()}}
