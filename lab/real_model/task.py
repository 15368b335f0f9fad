"""The task: the sum of two digits, asked in words; the last number of the answer is what counts.

A score of "the sum stands somewhere" can be gamed by listing numbers; the last number cannot.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

HELD_OUT_PAIRS = 15  # of 55 unordered pairs
SPLIT = 0  # seed of the split, the same for all arms and seeds
TURN = "<|im_start|>user\nWhat is {0} + {1}?<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Problem:
    """Two digits to add, with the prompt as token ids."""

    digits: tuple[int, int]
    prompt: tuple[int, ...]

    @property
    def answer(self) -> int:
        return sum(self.digits)


@dataclass(frozen=True)
class Task:
    """Problems in two parts that share no sum's operands, and how a response is read.

    Attributes:
        training, held_out: the problems that train and those that are only asked.
        end: the token that ends a response.
        decode: the text of token ids.
    """

    training: Sequence[Problem]
    held_out: Sequence[Problem]
    end: int
    decode: Callable[[Sequence[int]], str]

    def text(self, response: Sequence[int]) -> str:
        """The text of a response without its end token."""
        return self.decode([token for token in response if token != self.end])


def last_number(text: str) -> int | None:
    """The last run of decimal digits in a text; None where there is none."""
    found = re.findall(r"[0-9]+", text)
    return int(found[-1]) if found else None


def reward(problem: Problem, text: str) -> float:
    """1 where the last number of the answer is the sum, else 0."""
    return float(last_number(text) == problem.answer)


def split() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All ordered pairs of digits, for training and held out; a pair and its reverse are on one side."""
    unordered = list(combinations_with_replacement(range(10), 2))
    held = set(random.Random(SPLIT).sample(unordered, HELD_OUT_PAIRS))
    ordered = [(a, b) for a in range(10) for b in range(10)]
    side = {pair: (min(pair), max(pair)) in held for pair in ordered}
    return [pair for pair in ordered if not side[pair]], [pair for pair in ordered if side[pair]]


def addition(encode: Callable[[str], Sequence[int]], decode: Callable[[Sequence[int]], str], end: int) -> Task:
    """The task in the tokens of a tokenizer; every digit is one token, so that all prompts are equally long."""
    training, held_out = ([Problem(pair, tuple(encode(TURN.format(*pair)))) for pair in pairs] for pairs in split())
    assert len({len(problem.prompt) for problem in [*training, *held_out]}) == 1, "one length of prompts"
    return Task(training, held_out, end, decode)


def of_tokenizer(tokenizer: Any) -> Task:
    """The task in the tokens of a tokenizer of Hugging Face."""

    def encode(text: str) -> Sequence[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    return addition(encode, tokenizer.decode, tokenizer.eos_token_id)


LETTERS = "0123456789+." + 12 * " "


def of_letters(end: int) -> Task:
    """The task for a tiny random model without a tokenizer: a token is a letter, and half of the tokens are spaces."""

    def encode(text: str) -> Sequence[int]:
        return [2 + LETTERS.index(letter) for letter in text if letter in LETTERS]

    def decode(tokens: Sequence[int]) -> str:
        return "".join(LETTERS[token % len(LETTERS)] for token in tokens)

    return addition(encode, decode, end)
