"""The few lines of protobuf that offline wandb runs and tensorboard's event files need."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator

from mis_plugins.shared.budget import ITEMS

Field = tuple[int, int | bytes]


def fields(message: bytes) -> Iterator[Field]:
    """Number and content of each field: an int of a varint, the bytes of everything else.

    Raises:
        ValueError: the message is cut or no protobuf.
        RecordError: the message has more fields than the budget.
    """
    place = 0
    for count in itertools.count(1):
        if place >= len(message):
            return
        ITEMS.check(count, len(message), "a message")
        key, place = _varint(message, place)
        kind = key & 7
        if kind == 0:
            value, place = _varint(message, place)
            yield key >> 3, value
            continue
        if kind == 2:
            size, place = _varint(message, place)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of kind {kind}")
        if place + size > len(message):
            raise ValueError("a field is cut")
        yield key >> 3, message[place : place + size]
        place += size


def number(content: bytes) -> float:
    """A float or a double, from its bytes."""
    return struct.unpack("<f" if len(content) == 4 else "<d", content)[0]


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if place >= len(message) or shift > 63:
            raise ValueError("a number is cut")
        byte = message[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
