"""The note that travels to the trainer beside a sample: its number, and the versions of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mis_plugins.errors import InputError
from mis_plugins.shared import runs


@dataclass(frozen=True)
class Note:
    """Who wrote a sample's tokens, and the number by which the trainer scored them."""

    batch: int
    number: int
    versions: Sequence[int]

    def packed(self) -> list[int]:
        """Batch, number, and then version and count of each run of tokens that one version wrote."""
        return [self.batch, self.number, *runs.packed(self.versions)]

    @classmethod
    def of(cls, packed: Any, key: str) -> Note:
        """Read what `packed` wrote.

        Args:
            key: the host's name of the list that carries notes.

        Raises:
            InputError: `packed` is the host's own value, not a note.
        """
        whole = isinstance(packed, Sequence) and all(isinstance(x, int) for x in packed)
        if not whole or len(packed) < 2 or len(packed) % 2:
            raise InputError(
                f"{key}: not those of mis_plugins; give --custom-convert-samples-to-train-data-path "
                "mis_plugins.mis.convert_with_versions"
            )
        return cls(packed[0], packed[1], runs.unpacked(packed[2:]))
