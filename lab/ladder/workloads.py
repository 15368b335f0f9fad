"""What is sampled on every rung: responses to prompts, and chats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from lab.ladder import dialogues
from lab.ladder.dialogues import BATCH, TURNS, Chat, converse, score_chat
from lab.ladder.rollouts import Amount, sample, score
from true_on_policy.engines.protocol import Engine
from true_on_policy.trainers.megatron import Megatron

Prompts = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Settings:
    """What determines a rollout besides the code; a rung of other settings is sampled anew."""

    model: str
    weights: str
    prompts: str
    engine: str
    length: int


@dataclass(frozen=True)
class ChatSettings(Settings):
    """What determines a chat besides the code."""

    turns: int = TURNS
    results: tuple[str, ...] = dialogues.RESULTS


@dataclass(frozen=True)
class Workload:
    """What is sampled on a rung.

    settings: what determines the rollouts; the file of a rung holds the settings.
    amount: how much is asked for.
    batch: (engine, number of responses so far) -> the next rollouts, each as (prompt index, turns).
    score: a trainer's log-probs of one rollout, packed end to end.
    suffix: what follows the rung's name in the name of its file.
    """

    settings: Settings
    amount: Amount
    batch: Callable[[Engine, int], list[tuple[int, Chat]]]
    score: Callable[[Megatron, Chat], Tensor]
    suffix: str = ""


def responses(settings: Settings, amount: Amount, prompts: Prompts, end: int) -> Workload:
    """Build the workload of responses to prompts: rollouts of one turn."""

    def batch(engine: Engine, done: int) -> list[tuple[int, Chat]]:
        found = sample(engine, prompts, done, amount.batch(done), settings.length, end)
        return [(index, [one]) for index, one in found]

    return Workload(settings, amount, batch, score)


def chats(settings: ChatSettings, number: int, prompts: Prompts, tools: Prompts, end: int) -> Workload:
    """Build the workload of `number` chats; each turn is a response of the file."""
    amount = Amount(number * TURNS, 1)

    def batch(engine: Engine, done: int) -> list[tuple[int, Chat]]:
        start = done // TURNS
        return converse(engine, prompts, range(start, min(start + BATCH, number)), tools, end)

    return Workload(settings, amount, batch, score_chat, "-chats")
