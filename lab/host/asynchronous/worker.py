"""The rollout worker: a process that generates, a token of every response at a time, and obeys between two steps."""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

import torch

from lab.host.asynchronous.messages import (
    Beat,
    Begin,
    Command,
    Event,
    Failed,
    Pause,
    Paused,
    Publish,
    Resume,
    Stop,
    Tokens,
)
from lab.host.asynchronous.watchdog import BEAT_SECONDS, Heartbeat
from lab.host.model.decoder import ModelConfig
from lab.host.model.decoding import Sampling
from lab.host.model.steps import Growing, SteppedEngine, stepped
from mis_plugins.errors import UserError

PauseMode = Literal["in_place", "retract", "abort"]


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker is started with.

    pause_mode: what an update does to the responses under way. `in_place` goes on over their keys and values; `retract`
        makes these anew with the new weights; `abort` forgets the responses, for the trainer to send again.
    step_seconds: least seconds of a step; 0 is no delay.
    steps_per_update: most tokens that one version adds to a response before its rollout is due; 0 is no
        limit.
    max_concurrent: responses in flight at most, the others wait for one to end; None is no limit.
    engine: a name of `--rollout-engine`.
    """

    config: ModelConfig
    precision: str
    sampling: Sampling
    pause_mode: PauseMode
    step_seconds: float = 0.0
    steps_per_update: int = 0
    max_concurrent: int | None = None
    engine: str = "local"


def run(connection: Connection, settings: WorkerSettings) -> None:
    """The whole life of a worker process: until it is told to stop, or the trainer is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to answer
    torch.set_num_threads(1)  # as a rank of the trainer: threads may change the last bits of a sum
    voice = Voice(connection)
    Heartbeat(lambda: voice.say(Beat(voice.turns))).start()
    try:
        worker = Worker(connection, voice, settings)
        with closing(worker.engine):
            worker.serve()
    except (EOFError, OSError):
        pass
    except Exception as error:
        by_user = isinstance(error, UserError)
        voice.say(Failed(str(error) if by_user else traceback.format_exc(), by_user))


class Voice:
    """The worker's end of the pipe, for threads to speak through one at a time.

    turns: turns of the generating thread, which the heartbeat's thread sends.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self.turns = 0

    def say(self, event: Event) -> None:
        with self._lock:
            self._connection.send(event)


@dataclass
class Batch:
    """Responses that step together. steps: number of steps taken with the present weights."""

    rollout: int
    decoding: Growing
    steps: int = 0


class Worker:
    """The part of the worker process that generates and obeys commands.

    Attributes:
        batches: the responses in flight.
        waiting: responses that wait for a place, in the order of their arrival, which is the order of
            training.
    """

    def __init__(self, connection: Connection, voice: Voice, settings: WorkerSettings) -> None:
        self.connection, self.voice, self.settings = connection, voice, settings
        keep_cache = settings.pause_mode == "in_place"
        self.engine: SteppedEngine = stepped(settings.engine, settings.config, settings.precision, keep_cache)
        self.batches: list[Batch] = []
        self.waiting: list[Begin] = []
        self.paused = False

    def serve(self) -> None:
        """Obey and generate by turns.

        Raises:
            EOFError, OSError: the trainer is gone.
        """
        due = 0.0
        while True:
            self.voice.turns += 1
            ahead = due - time.monotonic() if self.moving else BEAT_SECONDS
            # At most BEAT_SECONDS: waking up shows that the worker is not stuck.
            if self.connection.poll(min(max(0.0, ahead), BEAT_SECONDS)):
                command = self.connection.recv()
                if isinstance(command, Stop):
                    return
                self.obey(command)
            elif self.moving and time.monotonic() >= due:
                due = time.monotonic() + self.settings.step_seconds
                self.step()

    @property
    def moving(self) -> list[Batch]:
        """The batches that may step now."""
        limit = self.settings.steps_per_update
        if self.paused or not limit:
            return [] if self.paused else self.batches
        return [one for one in self.batches if one.steps < limit or one.rollout <= self.engine.version]

    def step(self) -> None:
        """Draw one token of every response that may have one."""
        for batch in self.moving:
            drawn = batch.decoding.step()
            batch.steps += 1
            self.voice.say(Tokens(drawn, self.engine.version, batch.decoding.stale_cache))
        self.batches = [batch for batch in self.batches if not batch.decoding.ended]
        self.fill()

    def obey(self, command: Command) -> None:
        COMMANDS[type(command)](self, command)

    def begin(self, command: Begin) -> None:
        self.waiting.append(command)
        self.fill()

    def fill(self) -> None:
        """Begin as many of the waiting responses as there are places."""
        while self.waiting and (places := self.places()):
            first, *others = self.waiting
            later = [Begin(first.rollout, first.responses[places:])] if places < len(first.responses) else []
            self.waiting = later + others
            decoding = self.engine.begin(first.responses[:places], self.settings.sampling)
            self.batches.append(Batch(first.rollout, decoding))

    def places(self) -> int:
        """How many responses may join those in flight."""
        if self.settings.max_concurrent is None:
            return sys.maxsize
        return self.settings.max_concurrent - sum(len(batch.decoding.unfinished) for batch in self.batches)

    def pause(self, command: Pause) -> None:
        self.paused = True
        aborted: frozenset[int] = frozenset()
        if self.settings.pause_mode == "abort":
            # Waiting responses too: they come back behind earlier rollouts, which the trainer needs first.
            waiting = [one for begin in self.waiting for one in begin.responses]
            running = [one for batch in self.batches for one in batch.decoding.unfinished]
            aborted = frozenset(one.number for one in (*running, *waiting))
            self.batches, self.waiting = [], []
        self.voice.say(Paused(aborted))

    def publish(self, command: Publish) -> None:
        weights = {name: torch.from_numpy(array) for name, array in command.weights.items()}
        self.engine.update_weights(weights, command.version)
        keep_cache = self.settings.pause_mode == "in_place"
        self.batches = [
            Batch(batch.rollout, batch.decoding.go_on(self.engine.decoder, keep_cache=keep_cache))
            for batch in self.batches
        ]

    def resume(self, command: Resume) -> None:
        self.paused = False


COMMANDS: dict[type, Callable] = {
    Begin: Worker.begin,
    Pause: Worker.pause,
    Publish: Worker.publish,
    Resume: Worker.resume,
}
