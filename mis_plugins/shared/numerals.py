"""Numbers as a command line spells them: types for argparse, which refuse what no tensor and no loop can use."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError

LARGEST = 2**63 - 1  # the largest 64-bit integer: seeds and sizes are such integers
SHOWN = 40  # how many characters of a user's value an error shows


def whole(text: str) -> int:
    """A whole number that 64 bits hold.

    Raises:
        ArgumentTypeError: text that is no such number.
    """
    try:
        value = int(text)
    except ValueError:
        raise ArgumentTypeError(f"got {shown(text)}; expected a whole number") from None
    if abs(value) > LARGEST:
        raise ArgumentTypeError(f"got {shown(text)}; the largest whole number is {LARGEST}")
    return value


def count(text: str) -> int:
    """A whole number of at least 1.

    Raises:
        ArgumentTypeError: text that is no such number.
    """
    value = whole(text)
    if value < 1:
        raise ArgumentTypeError(f"got {value}; expected at least 1")
    return value


def counts(text: str) -> list[int]:
    """Read counts that stand between commas.

    Raises:
        ArgumentTypeError: a part that is no count.
    """
    return [count(part) for part in text.split(",")]


def finite(text: str) -> float:
    """A number that is neither infinite nor NaN.

    Raises:
        ArgumentTypeError: text that is no such number.
    """
    try:
        value = float(text)
    except ValueError:
        raise ArgumentTypeError(f"got {shown(text)}; expected a number") from None
    if not math.isfinite(value):
        raise ArgumentTypeError(f"got {shown(text)}; expected a finite number")
    return value


def shown(value: object) -> str:
    """A user's value as an error shows it: a long value by its beginning and its length."""
    return cut(repr(value) if not isinstance(value, int) or abs(value) <= LARGEST else _digits(value))


def cut(text: str, most: int = SHOWN) -> str:
    """A text as an error or a comment shows it: a text longer than `most` by its beginning and its length."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def _digits(value: int) -> str:
    """A large integer by its number of digits: Python refuses to write more than 4300 digits."""
    return f"an integer of about {math.floor(value.bit_length() * math.log10(2)) + 1} digits"
