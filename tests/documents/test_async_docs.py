"""`docs/async.md`: its settings are the defaults, and its example runs."""

import dataclasses
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

import torch
import yaml

from lab.host.asynchronous import pool as recompute_module
from lab.host.asynchronous import response as versions
from lab.host.asynchronous import update_hooks as hooks_module
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.correction.pipeline import correct
from mis_plugins.packing.layout import whole
from mis_plugins.packing.ragged import Ranks
from mis_plugins.versions import segment_wise

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "async.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)
    return textwrap.dedent(found)


def test_settings_are_the_defaults():
    stated = yaml.safe_load(block("yaml"))["segment_wise"]
    assert stated == dataclasses.asdict(segment_wise.SegmentWiseConfig())


class Engine:
    def __init__(self) -> None:
        self.log: list[object] = []

    def pause(self) -> None:
        self.log.append("pause")

    def resume(self) -> None:
        self.log.append("resume")

    def update_weights(self, weights: object, version: int) -> None:
        self.log.append(version)


def test_example():
    """A response of three versions: the oldest tokens weigh by what was stored at version 1, the others by pi_2."""

    def score(asked: Sequence[recompute_module.Batch]) -> list[list[list[float]]]:
        return [[[-1.5] * count for count in counts] for _, counts in asked]

    pool, engine = recompute_module.Pool(), Engine()
    response = versions.Response((9,))
    for version in range(3):
        response = response.append([version], [-1.0], version)
    number = pool.add(response)
    proximal, behavior = torch.tensor([-4.0, -0.5, -1.0]), torch.tensor(response.log_probs)
    names = {
        "Hooks": hooks_module.Hooks, "recompute": recompute_module.recompute, "pool": pool, "number": number,
        "version": 1, "V": 2, "token_budget": 64, "score": score, "engine": engine, "weights": {}, "name": "a",
        "admitted": segment_wise.admitted, "proximal_t": segment_wise.proximal_t, "correct": correct,
        "config": CorrectionConfig(segment_wise=segment_wise.SegmentWiseConfig()),
        "proximal": proximal, "behavior": behavior,
        "ragged": whole([3]).place(torch.ones(3, dtype=torch.bool), Ranks()),
    }  # fmt: skip
    exec(compile(block("python"), "docs/async.md", "exec"), names)
    assert engine.log == ["pause", 2, "resume"]
    assert names["numerator"].tolist() == [-1.5, -0.5, -1.0]
    expected = torch.tensor([-0.5, 0.5, 0.0]).exp()
    assert torch.equal(names["correction"].weights, expected)
