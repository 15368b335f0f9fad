"""What is sampled on every rung: responses to prompts, and chats, of which a response is one of a single turn.

In a chat an engine writes the assistant's turns, and a tool's result, which is masked, follows each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.ladder.rollouts import Amount
from mis_plugins.errors import UserError
from true_on_policy.engines.protocol import Engine, Request, Sample
from true_on_policy.trainers.megatron import Megatron

TURNS = 4
TURN_LENGTH = 128  # tokens of a turn, at most
BATCH = 16  # chats
RESULTS = (
    '{"status": "ok", "rows": 3, "first": {"name": "Lisbon", "population": 545796}}',
    '{"status": "error", "message": "timeout after 30 s; try a shorter query"}',
    "ValueError: could not convert string to float: 'n/a' (line 12)",
    '{"temperature": 17.5, "unit": "C", "wind": "NW 14 km/h"}',
    "3 files changed, 41 insertions(+), 7 deletions(-)",
    '["apple", "pear", "quince"]',
    "404 Not Found: the page was moved; see /archive",
    "stdout: 144\nstderr:",
)
"""What tools answer."""

Chat = Sequence[Sample]  # the turns of a chat; a turn's prompt is everything before the turn
Prompts = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Settings:
    """What determines a rollout besides the code; a rung of other settings is sampled anew.

    length: the most tokens of a response or a turn.
    """

    model: str
    weights: str
    prompts: str
    engine: str
    length: int


@dataclass(frozen=True)
class ChatSettings(Settings):
    """What determines a chat besides the code."""

    turns: int = TURNS
    results: tuple[str, ...] = RESULTS


@dataclass(frozen=True)
class Workload:
    """What is sampled on a rung: each response, and each turn of a chat, is a response of the rung's file.

    settings: what determines the rollouts; the file of a rung holds the settings.
    amount: how much is asked for.
    tools: the tokens that may follow a turn.
    suffix: what follows the rung's name in the name of its file.
    """

    settings: Settings
    amount: Amount
    prompts: Prompts
    end: int
    tools: Prompts = ()
    turns: int = 1
    suffix: str = ""

    def batch(self, engine: Engine, done: int) -> list[tuple[int, Chat]]:
        """Sample what follows the first `done` responses; return (index of its prompt, chat) for each."""
        places = range(done // self.turns, (done + self.amount.batch(done)) // self.turns)
        return converse(engine, self.prompts, places, self.settings.length, self.end, self.tools, self.turns)


def chats(settings: ChatSettings, number: int, prompts: Prompts, tools: Prompts, end: int) -> Workload:
    """Build the workload of `number` chats."""
    return Workload(settings, Amount(number * TURNS, 1, BATCH * TURNS), prompts, end, tools, TURNS, "-chats")


def tool_turns(checkpoint: Path, end: int) -> list[tuple[int, ...]]:
    """Return the tokens between two turns of the assistant, for each of RESULTS: end, tool's turn, header."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    written = "WRITTEN"
    turns = []
    for result in RESULTS:
        messages = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": written},
            {"role": "tool", "content": result},
        ]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        turns.append(tuple(tokenizer.encode(text.partition(written)[2], add_special_tokens=False)))
    if any(turn[0] != end for turn in turns):
        raise UserError(f"{checkpoint}: its chat template ends a turn with {turns[0][0]}, its config says {end}")
    return turns


def drawn_tool_turns(vocabulary: int, end: int) -> list[tuple[int, ...]]:
    """Random tokens in place of tools' answers, for a model without a tokenizer."""
    drawn = torch.randint(vocabulary, (len(RESULTS), 5), generator=torch.Generator().manual_seed(1))
    return [(end, *row) for row in drawn.tolist()]


def converse(
    engine: Engine, prompts: Prompts, places: range, length: int, end: int, tools: Prompts = (), turns: int = 1
) -> list[tuple[int, Chat]]:
    """Sample the chats at `places` at temperature 1, one batch for each turn; return (index of its prompt, chat).

    Prompts take turns, and a place decides a seed, so that a run that was stopped goes on as it would have gone.
    """
    indices = [place % len(prompts) for place in places]
    before = [prompts[index] for index in indices]
    sampled: list[list[Sample]] = []
    for turn in range(turns):
        requests = [
            Request(tokens, length, place * turns + turn, end=end) for place, tokens in zip(places, before, strict=True)
        ]
        sampled.append(engine.generate(requests))
        if tools:
            answers = [tools[(place + turn) % len(tools)] for place in places]
            before = [_followed_by(*pair) for pair in zip(sampled[-1], answers, strict=True)]
    return list(zip(indices, zip(*sampled, strict=True), strict=True))


def _followed_by(sample: Sample, tool: tuple[int, ...]) -> tuple[int, ...]:
    """Return the chat so far with a tool's turn; an end of turn that was sampled is not written twice."""
    return sample.sequence + tool[sample.tokens[-1] == tool[0] :]


def score_chat(trainer: Megatron, chat: Chat) -> Tensor:
    """Compute the log-probs of all sampled tokens, packed, in one pass over the chat, as trainers do."""
    first, last = chat[0].request, chat[-1]
    start = len(first.prompt)
    answer = last.sequence[start:]
    whole = Sample(first, answer, torch.zeros(len(answer)), last.version)
    [log_probs] = trainer.log_probs([whole], [1.0])
    begins = [len(turn.request.prompt) - start for turn in chat]
    return torch.cat([log_probs[begin : begin + len(turn.tokens)] for begin, turn in zip(begins, chat, strict=True)])
