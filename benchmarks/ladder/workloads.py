"""What is sampled on every rung: responses to prompts, and chats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ladder import dialogues
from ladder.dialogues import BATCH, TURNS, Chat, converse, score_chat
from ladder.rollouts import Amount, sample, score
from true_on_policy.engines.protocol import Engine
from true_on_policy.trainers.megatron import Megatron

Prompts = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Settings:
    """What a rollout follows from besides the code; a rung of other settings is sampled anew."""

    model: str
    weights: str
    prompts: str
    engine: str
    length: int


@dataclass(frozen=True)
class ChatSettings(Settings):
    """What a chat follows from besides the code."""

    turns: int = TURNS
    results: tuple[str, ...] = dialogues.RESULTS


@dataclass(frozen=True)
class Workload:
    """What is sampled on a rung.

    Attributes:
        settings: what it follows from; the file of a rung holds them.
        amount: how much is asked for.
        batch: samples what follows the responses that are there: the turns of each rollout, with its prompt's index.
        score: a trainer's log-probs of one rollout, packed end to end.
        suffix: of the file's name, behind the rung's.
    """

    settings: Settings
    amount: Amount
    batch: Callable[[Engine, int], list[tuple[int, Chat]]]
    score: Callable[[Megatron, Chat], Tensor]
    suffix: str = ""


def responses(settings: Settings, amount: Amount, prompts: Prompts, end: int) -> Workload:
    """Responses to prompts: rollouts of one turn."""

    def batch(engine: Engine, done: int) -> list[tuple[int, Chat]]:
        found = sample(engine, prompts, done, amount.batch(done), settings.length, end)
        return [(index, [one]) for index, one in found]

    return Workload(settings, amount, batch, score)


def chats(settings: ChatSettings, number: int, prompts: Prompts, tools: Prompts, end: int) -> Workload:
    """A number of chats; each turn is a response of the file."""
    amount = Amount(number * TURNS, 1)

    def batch(engine: Engine, done: int) -> list[tuple[int, Chat]]:
        start = done // TURNS
        return converse(engine, prompts, range(start, min(start + BATCH, number)), tools, end)

    return Workload(settings, amount, batch, score_chat, "-chats")
