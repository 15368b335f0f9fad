"""Every response from its first token to the trainer: tokens that arrived stay, even where a worker dies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lab.host.asynchronous.messages import Tokens
from lab.host.asynchronous.pool import Pool
from lab.host.asynchronous.response import Response
from lab.host.model.decoding import Unfinished


@dataclass(frozen=True)
class Wanted:
    """A response that a rollout asks for."""

    prompt: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Entry:
    """A response on its way: its number in the pool, and its seed."""

    number: int
    seed: int


@dataclass
class Ledger:
    """The rollouts that have begun and were not taken to be trained on.

    A response is waiting, until it is given to a worker; running, until it ends or its worker does; or ended. The
    thread that hears the worker writes; `changed` is notified whenever something was written.

    shares: number of batches that a rollout is given in, as many as the synchronous host decodes it in.
    """

    shares: int = 1
    pool: Pool = field(default_factory=Pool)
    changed: threading.Condition = field(default_factory=threading.Condition)
    _rollouts: dict[int, list[Entry]] = field(default_factory=dict)
    _running: set[int] = field(default_factory=set)
    _ended: set[int] = field(default_factory=set)

    @property
    def rollouts(self) -> list[int]:
        """Numbers of the rollouts that were not taken yet, in the order of training."""
        with self.changed:
            return sorted(self._rollouts)

    def open(self, rollout: int, wanted: Sequence[Wanted]) -> None:
        """Take in a rollout, its responses waiting."""
        with self.changed:
            self._rollouts[rollout] = [Entry(self.pool.add(Response(one.prompt)), one.seed) for one in wanted]

    def give(self, rollout: int) -> list[list[Unfinished]]:
        """The waiting responses of a rollout as far as they got, in batches; from now on they are running."""
        with self.changed:
            known, taken = self.pool.snapshot(), self._running | self._ended
            entries = self._rollouts[rollout]
            shares = [entries[first :: self.shares] for first in range(self.shares)]
            batches = [
                [_unfinished(entry, known[entry.number]) for entry in share if entry.number not in taken]
                for share in shares
            ]
            self._running.update(one.number for batch in batches for one in batch)
        return [batch for batch in batches if batch]

    def write(self, said: Tokens) -> None:
        """Append the tokens that a worker drew."""
        drawn = said.drawn
        rows = zip(drawn.numbers, drawn.tokens, drawn.log_probs, drawn.ended, strict=True)
        with self.changed:
            for number, token, log_prob, ended in rows:
                assert number in self._running
                self.pool.update(number, _appended(token, log_prob, said.version, said.stale_cache))
                if ended:
                    self._running.discard(number)
                    self._ended.add(number)
            self.changed.notify_all()

    def take_back(self, numbers: frozenset[int]) -> None:
        """Set responses that their worker forgot back to waiting."""
        with self.changed:
            assert numbers <= self._running
            self._running -= numbers

    def take_back_all(self) -> None:
        """Set all running responses back to waiting: the worker is gone, and all its events were heard."""
        with self.changed:
            self._running.clear()

    def complete(self, rollout: int) -> bool:
        with self.changed:
            return all(entry.number in self._ended for entry in self._rollouts[rollout])

    def take(self, rollout: int) -> list[Response]:
        """The responses of a complete rollout, in their order; the ledger forgets them."""
        with self.changed:
            entries = self._rollouts.pop(rollout)
            self._ended.difference_update(entry.number for entry in entries)
            responses = [self.pool.take(entry.number) for entry in entries]
        found = [response for response in responses if response is not None]
        assert entries and len(found) == len(entries)
        return found


def _unfinished(entry: Entry, response: Response) -> Unfinished:
    return Unfinished(entry.number, response.prompt, response.tokens, entry.seed)


def _appended(token: int, log_prob: float, version: int, stale_cache: bool) -> Callable[[Response], Response]:
    return lambda now: now.append([token], [log_prob], version, stale_cache)
