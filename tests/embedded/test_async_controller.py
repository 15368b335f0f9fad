"""Controller and worker, two real processes: updates in mid-sequence, deaths, failures, hooks, what is left behind."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from launch import alive
from tolerances import FP32_LOG_PROB

from lab.host.asynchronous import controller as controller_module
from lab.host.asynchronous import process as process_module
from lab.host.asynchronous.controller import Controller, Tally, WorkerError
from lab.host.asynchronous.ledger import Ledger, Wanted
from lab.host.asynchronous.messages import Pause, Publish, Tokens
from lab.host.asynchronous.process import WorkerProcess
from lab.host.asynchronous.response import Response
from lab.host.asynchronous.staleness_bound import HeadOffpolicyness
from lab.host.asynchronous.update_hooks import HookError
from lab.host.asynchronous.watchdog import BEAT_SECONDS, Heartbeat, Watchdog
from lab.host.asynchronous.worker import PauseMode, WorkerSettings
from lab.host.model.decoder import ModelConfig
from lab.host.model.decoding import Sampling
from lab.host.model.engine import DecodeEngine
from lab.host.model.model import initial_weights
from mis_plugins.errors import InputError

CONFIG = ModelConfig(16, 32, 2, 4, 2, 8, 48)
LENGTH, SAMPLES, ROLLOUTS = 8, 6, 5
STUCK_SECONDS = 2.0
PROMPTS = [(1, 2, 3), (4, 5, 6, 7, 8, 11), (2,), (9, 9, 9, 9), (3, 3), (7, 1)]


def weights(version: int) -> dict[str, torch.Tensor]:
    """Of policies far from uniform and from each other."""
    drawn = initial_weights(CONFIG, version)
    return {name: 8 * one if one.dim() == 2 else one for name, one in drawn.items()}


def wanted(rollout: int) -> list[Wanted]:
    return [Wanted(prompt, 100 * rollout + index) for index, prompt in enumerate(PROMPTS)]


@contextmanager
def running(
    mode: PauseMode = "retract",
    bound: int = 1,
    step_seconds: float = 0.0,
    config: Any = CONFIG,
    stuck_s: float = 60.0,
) -> Iterator[Controller]:
    settings = WorkerSettings(CONFIG, "fp32", Sampling(LENGTH, 1.0, eos=-1), mode, step_seconds)
    object.__setattr__(settings, "config", config)  # which may be what its type forbids
    made = Controller(settings, HeadOffpolicyness(bound), wanted, range(ROLLOUTS), weights(0), stuck_s)
    try:
        yield made
    finally:
        made.close()


def in_the_midst(made: Controller) -> None:
    """Wait until some response has tokens, and none all."""
    until(lambda: any(0 < count < LENGTH for count in lengths(made)))
    assert max(lengths(made)) < LENGTH


def lengths(made: Controller) -> list[int]:
    return [len(response.tokens) for response in made.ledger.pool.snapshot().values()]


def until(ready: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def engine(version: int) -> DecodeEngine:
    built = DecodeEngine(CONFIG, "fp32")
    built.update_weights(weights(version), version)
    return built


def generated(rollout: int, version: int = 0) -> list[tuple[int, ...]]:
    """What the engine makes of a rollout that nothing interrupts."""
    asked = wanted(rollout)
    made = engine(version).generate(
        [one.prompt for one in asked],
        max_new_tokens=LENGTH,
        temperature=1.0,
        eos=-1,
        seeds=[one.seed for one in asked],
    )
    return [one.tokens for one in made]


def check_written(responses: list[Response], stale_may_differ: bool = False) -> None:
    """Every token has the log-prob that the weights of its version give it."""
    for response in responses:
        assert len(response.tokens) == LENGTH and sorted(response.versions) == list(response.versions)
        sequence = [*response.prompt, *response.tokens]
        for version in set(response.versions):
            (score,) = engine(version).score([sequence], [LENGTH])
            for place, value in enumerate(score.tolist()):
                stale = stale_may_differ and response.stale_cache[place]
                if response.versions[place] == version and not stale:
                    assert response.log_probs[place] == pytest.approx(value, abs=FP32_LOG_PROB)


# --- updates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_the_weights_move_in_mid_sequence(mode: PauseMode) -> None:
    with running(mode, bound=3, step_seconds=0.05) as made:
        in_the_midst(made)
        before = {number: response.tokens for number, response in made.ledger.pool.snapshot().items()}
        made.update(weights(1))
        after = made.ledger.pool.snapshot()
        assert all(after[number].tokens[: len(tokens)] == tokens for number, tokens in before.items())
        responses = made.rollout(0)
        assert all(set(response.versions) == {0, 1} for response in responses)
        stale = [flag for response in responses for flag in response.stale_cache]
        newer = [version == 1 for response in responses for version in response.versions]
        assert stale == (newer if mode == "in_place" else [False] * len(stale))
        check_written(responses, stale_may_differ=True)
        check_written(made.rollout(1), stale_may_differ=True)


def test_no_token_of_the_old_weights_arrives_after_an_update() -> None:
    """So that a recompute before the next one finds all of them."""
    with running(bound=3, step_seconds=0.02) as made:
        for version in range(1, 4):
            until(
                lambda v=version: any(v - 1 in one.versions for one in made.ledger.pool.snapshot().values())
            )
            made.update(weights(version))
            older = older_tokens(made, version)
            time.sleep(0.1)
            assert older_tokens(made, version) == older


def test_aborted_twice_the_responses_are_sent_twice() -> None:
    """The second pause too waits until the worker has said what it forgot."""
    with running("abort", bound=2, step_seconds=0.05) as made:
        for version in (1, 2):
            heard = sum(lengths(made))
            until(lambda n=heard: sum(lengths(made)) > n)
            made.update(weights(version))
        until(lambda: made.ledger.complete(0))
        check_written(made.rollout(0))


def test_the_tally_adds_up_what_happened_since_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that ticks whenever it is read: twice a wait, and twice an update."""
    ticks = itertools.count()
    monkeypatch.setattr(controller_module, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    with running(bound=1) as made:
        for rollout in (0, 1):
            made.rollout(rollout)
        for version in (1, 2, 3):
            made.update(weights(version))
        assert made.take_tally() == Tally(waited=2, paused=3)
        assert made.take_tally() == Tally()


class Flight:
    """Counts the responses in flight as the trainer hears of them, from the first token drawn to the last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.most, write = set[int](), 0, Ledger.write

        def counted(ledger: Ledger, said: Tokens) -> None:
            self.open |= set(said.drawn.numbers)
            self.most = max(self.most, len(self.open))
            rows = zip(said.drawn.numbers, said.drawn.ended, strict=True)
            self.open -= {number for number, ended in rows if ended}
            write(ledger, said)

        monkeypatch.setattr(Ledger, "write", counted)


@pytest.mark.parametrize(
    ("mode", "places"), [("in_place", 4), ("retract", 4), ("abort", 4), ("retract", None)]
)
def test_no_more_responses_are_in_flight_than_there_are_places(
    mode: PauseMode, places: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over updates in mid-sequence, and with a pace at which a later rollout must not hold the places of an earlier."""
    flight = Flight(monkeypatch)
    settings = WorkerSettings(CONFIG, "fp32", Sampling(LENGTH, 1.0, eos=-1), mode, 0.0, 5, places)
    made = Controller(settings, HeadOffpolicyness(2), wanted, range(ROLLOUTS), weights(0), 60.0)
    try:
        for version in range(ROLLOUTS):
            check_written(made.rollout(version), stale_may_differ=True)
            if mode == "abort":
                flight.open.clear()  # the worker forgets them, and begins others in their places
            made.update(weights(version + 1))
    finally:
        made.close()
    assert flight.most == 4 if places else flight.most > 4


def older_tokens(made: Controller, version: int) -> int:
    known = made.ledger.pool.snapshot().values()
    return sum(wrote < version for response in known for wrote in response.versions)


@pytest.mark.parametrize("bound", [0, 2])
def test_a_trainer_slower_than_the_rollout_finds_no_more_begun_than_may(bound: int) -> None:
    with running(bound=bound) as made:
        for version in range(ROLLOUTS):
            last = min(version + bound, ROLLOUTS - 1)
            assert made.ledger.rollouts == list(range(version, last + 1))
            until(lambda v=version, k=last: all(made.ledger.complete(one) for one in range(v, k + 1)))
            time.sleep(0.05)  # nothing else is generated meanwhile
            assert set(lengths(made)) == {LENGTH}
            (ages,) = (
                {version - wrote for response in made.rollout(version) for wrote in response.versions},
            )
            assert ages == {min(version, bound)}
            made.update(weights(version + 1))


def test_a_slow_engine_is_waited_for() -> None:
    with running(bound=0, step_seconds=0.1) as made:
        responses = made.rollout(0)
        assert made.take_tally().waited > 0.1 * (LENGTH - 1)
        assert [response.tokens for response in responses] == generated(0)


# --- deaths ---------------------------------------------------------------------------------------------------


def stop(made: Controller) -> None:
    os.kill(made.worker.pid, signal.SIGSTOP)


def kill(made: Controller) -> None:
    os.kill(made.worker.pid, signal.SIGKILL)


class Waiting:
    """Keeps the thread that receives it waiting, as a lock that nobody opens, while the others go on."""

    def __reduce__(self) -> tuple[Callable[[float], None], tuple[float]]:
        return time.sleep, (1e6,)


def lock(made: Controller) -> None:
    made.worker._connection.send(Waiting())


@pytest.mark.parametrize("harm", [kill, stop, lock])
def test_harmed_in_mid_sequence_nothing_is_lost_or_counted_twice(
    harm: Callable[[Controller], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The tokens of before stay, those of after are what they would have been, and every response comes once."""
    with running(bound=2, step_seconds=0.05, stuck_s=STUCK_SECONDS) as made:
        in_the_midst(made)
        first = made.worker.pid
        harm(made)
        until(lambda: made.worker.gone)
        until(lambda: not alive(first))  # its end of the pipe closes a moment before it is dead
        assert ("alive, but it used no processor time for" in caplog.text) == (harm is not kill)
        kept = {number: response.tokens for number, response in made.ledger.pool.snapshot().items()}
        assert any(0 < len(tokens) < LENGTH for tokens in kept.values())
        taken = [made.rollout(rollout) for rollout in range(3)]
        assert made.take_tally().restarts == 1
    for rollout, responses in enumerate(taken):
        assert [response.tokens for response in responses] == generated(rollout)
        check_written(responses)
    everything = [response.tokens for responses in taken for response in responses]
    assert all(any(tokens[: len(part)] == part for tokens in everything) for part in kept.values())
    assert len(kept) == 3 * SAMPLES


@pytest.mark.parametrize("harm", [kill, stop])
def test_harmed_during_a_pause_the_next_one_begins_with_the_new_weights(
    harm: Callable[[Controller], None],
) -> None:
    with running(bound=2, step_seconds=0.05, stuck_s=STUCK_SECONDS) as made:
        in_the_midst(made)
        made.hooks.register_post_pause_hook(lambda: harm(made), "harm")
        made.update(weights(1))
        responses = made.rollout(0)
        assert made.take_tally().restarts == 1
    assert all(set(response.versions) == {0, 1} for response in responses)
    check_written(responses)


def test_stopped_before_a_pause_the_update_goes_on() -> None:
    """The trainer waits for the worker to pause, which it never will."""
    with running(bound=2, step_seconds=0.05, stuck_s=STUCK_SECONDS) as made:
        in_the_midst(made)
        made.hooks.register_pre_pause_hook(lambda: stop(made), "stop")
        made.update(weights(1))
        check_written(made.rollout(0))
        assert made.take_tally().restarts == 1


class Computing:
    """Keeps the thread that receives it computing for three times the limit, without a word."""

    def __reduce__(self) -> tuple[Callable[..., bytes], tuple[str, bytes, bytes, int]]:
        sample, began = 200_000, time.process_time()
        hashlib.pbkdf2_hmac("sha256", b"", b"", sample)
        rounds = (
            sample * 3 * STUCK_SECONDS / (time.process_time() - began)
        )  # processors differ by a factor of two
        return hashlib.pbkdf2_hmac, ("sha256", b"", b"", int(rounds))


def test_a_step_longer_than_the_limit_is_no_stand_still() -> None:
    """Neither one that waits for its time nor one that computes."""
    with running(bound=0, step_seconds=2 * STUCK_SECONDS, stuck_s=STUCK_SECONDS) as made:
        until(lambda: max(lengths(made)) == 2)
        began = time.monotonic()
        made.worker._connection.send(Computing())
        until(lambda: made._failed)  # it is no command, once it is there
        assert time.monotonic() - began > 1.5 * STUCK_SECONDS
        assert made._failed is not None and "KeyError" in made._failed.reason


class Endless:
    """Keeps the thread that receives it computing for longer than any test."""

    def __reduce__(self) -> tuple[Callable[..., bytes], tuple[str, bytes, bytes, int]]:
        return hashlib.pbkdf2_hmac, ("sha256", b"", b"", 2**31 - 1)


def test_a_step_without_an_end_is_noticed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It uses processor time, and says so. The next worker goes on from its tokens, though an update waits for it."""
    assert process_module.STEP_LIMITS == 10, "as --help and docs/async.md say"
    monkeypatch.setattr(process_module, "STEP_LIMITS", 2)
    with running(bound=2, step_seconds=0.05, stuck_s=STUCK_SECONDS) as made:
        in_the_midst(made)
        began = time.monotonic()
        made.worker._connection.send(Endless())
        made.update(weights(1))
        assert time.monotonic() - began > 2 * STUCK_SECONDS - 2 * BEAT_SECONDS
        check_written(made.rollout(0))
        assert made.take_tally().restarts == 1
    assert (
        f"has not ended a step, or begun another, for {2 * STUCK_SECONDS:g} s (2 times --roll" in caplog.text
    )
    assert "no processor time" not in caplog.text


def test_a_worker_with_nothing_to_do_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one that waits for its next step to be due, nor a paused one: all of them take turns."""
    monkeypatch.setattr(process_module, "STEP_LIMITS", 1)
    with running(bound=0, stuck_s=STUCK_SECONDS, step_seconds=1.5 * STUCK_SECONDS) as made:
        until(lambda: max(lengths(made)) == 2)
        made.hooks.register_post_pause_hook(lambda: time.sleep(2 * STUCK_SECONDS), "long")
        made.update(weights(1))
        assert not made.worker.gone
    with running(bound=0, stuck_s=STUCK_SECONDS) as made:
        made.rollout(0)
        time.sleep(3 * STUCK_SECONDS)
        assert not made.worker.gone


@pytest.mark.parametrize(
    ("heard", "expected"),
    [
        ([1, 1, 1, 1, 1], True),
        ([1, 1, 1, 1, 2, 2, 2, 2], False),
        ([1, 1, 2, 2, 2, 2, 2], True),
        ([1] * 20, True),
        ([0, 0, 0, 0, 0, 0, 0], False),
    ],
)
def test_only_silence_in_a_row_is_being_stuck_and_not_before_the_first_word(
    heard: list[int], expected: bool
) -> None:
    """Counted in the watch's own turns, of which a trainer that was stopped has none; and told once."""
    turns, stuck = iter(range(len(heard))), []
    turn = next(turns)

    class Over(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal turn
            assert timeout == BEAT_SECONDS
            turn = next(turns, -1)
            return turn == -1

    Watchdog(4 * BEAT_SECONDS, lambda: heard[turn], Over(), lambda: stuck.append(True)).run()
    assert stuck == [True] * expected


def test_a_heart_stops_when_nobody_listens() -> None:
    """And with whatever else is wrong it does not go on in silence."""

    def tell(error: Exception) -> None:
        raise error

    Heartbeat(lambda: tell(BrokenPipeError())).run()
    with pytest.raises(KeyError):
        Heartbeat(lambda: tell(KeyError())).run()


def test_killed_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deaths with a token in between are no deaths in a row."""
    monkeypatch.setattr(controller_module, "FRUITLESS_STARTS", 1)
    with running(bound=4, step_seconds=0.05) as made:
        heard = 0
        for _ in range(3):
            until(lambda n=heard: sum(lengths(made)) > n)
            os.kill(made.worker.pid, signal.SIGKILL)
            until(lambda: made.worker.gone)
            heard = sum(lengths(made))
            made._replace()
        assert [response.tokens for response in made.rollout(4)] == generated(4)
        assert made.take_tally().restarts == 3


class Deadly:
    """Ends the process that receives it."""

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return os._exit, (7,)


def test_a_worker_that_dies_whenever_it_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_module, "FRUITLESS_STARTS", 1)
    with (
        running(config=Deadly()) as made,
        pytest.raises(WorkerError, match=r"died 2 times without a token in between, last with exit code 7"),
    ):
        made.rollout(0)


def test_weights_that_have_diverged_end_the_run() -> None:
    """As an error that the user can mend; another worker would fail as this one did."""
    with running(bound=0) as made:
        made.rollout(0)
        made.update({name: one * torch.nan for name, one in weights(1).items()})
        with pytest.raises(InputError, match="logits are not finite; the weights it was given have diverged"):
            made.rollout(1)


def test_a_fault_of_the_worker_is_told_with_its_traceback() -> None:
    with running(bound=0) as made:
        made.rollout(0)
        made.worker._connection.send("nonsense")
        with pytest.raises(WorkerError, match=r"Traceback[\s\S]*KeyError"):
            made.update(weights(1))
            made.rollout(1)


# --- hooks ----------------------------------------------------------------------------------------------------


def test_hooks_run_around_the_update_while_generation_stands_still() -> None:
    seen: list[tuple[str, int, int]] = []

    def note(made: Controller, name: str) -> Callable[[], None]:
        def hook() -> None:
            count = sum(lengths(made))
            if name.startswith(("post_pause", "pre_resume")):
                time.sleep(0.1)
                assert sum(lengths(made)) == count
            seen.append((name, made.version, count))

        return hook

    with running(bound=3, step_seconds=0.03) as made:
        in_the_midst(made)
        for name in ("pre_pause", "post_pause", "pre_resume", "post_resume"):
            getattr(made.hooks, f"register_{name}_hook")(note(made, name))
        made.update(weights(1))
        made.rollout(0)
    assert [(name, version) for name, version, _ in seen] == [
        ("pre_pause", 0), ("post_pause", 0), ("pre_resume", 1), ("post_resume", 1)
    ]  # fmt: skip
    assert seen[1][2] == seen[2][2]


@pytest.mark.parametrize("point", ["pre_pause", "post_pause"])
def test_a_hook_that_raises_leaves_the_weights_and_generation_going(point: str) -> None:
    def broken() -> None:
        raise ValueError("no room")

    with running(bound=1, step_seconds=0.02) as made:
        getattr(made.hooks, f"register_{point}_hook")(broken, "mine")
        with pytest.raises(HookError, match=f"{point} hook mine raised ValueError: no room"):
            made.update(weights(1))
        assert made.version == 0
        assert [response.tokens for response in made.rollout(0)] == generated(0)
        assert [response.tokens for response in made.rollout(1)] == generated(1)


@pytest.mark.parametrize("point", ["pre_resume", "post_resume"])
def test_a_hook_that_raises_after_the_update_leaves_the_new_weights_and_what_they_admit(point: str) -> None:
    def broken() -> None:
        raise ValueError("no room")

    with running(bound=0) as made:
        made.rollout(0)
        getattr(made.hooks, f"register_{point}_hook")(broken, "mine")
        with pytest.raises(HookError, match=f"{point} hook mine raised ValueError: no room"):
            made.update(weights(1))
        assert made.version == 1
        assert [response.tokens for response in made.rollout(1)] == generated(1, version=1)


# --- what is left behind --------------------------------------------------------------------------------------


def test_closed_in_mid_sequence_no_process_is_left() -> None:
    with running(bound=3, step_seconds=0.2) as made:
        in_the_midst(made)
        pid = made.worker.pid
    assert not alive(pid)


def test_a_worker_that_reads_no_more_is_stopped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its pipe full, where whoever asks it to end would wait for it."""
    monkeypatch.setattr(process_module, "STOP_SECONDS", 0.2)
    settings = WorkerSettings(CONFIG, "fp32", Sampling(LENGTH, 1.0, eos=-1), "retract")
    worker = WorkerProcess(settings, lambda event: None, lambda: None, 60.0)
    os.kill(worker.pid, signal.SIGSTOP)
    much = Publish(0, {"a": np.zeros(10**6)})
    for call in (lambda: worker.send(much), worker.stop):
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(2)
    thread.join(30)
    assert not thread.is_alive() and not alive(worker.pid)


def test_a_worker_that_nobody_hears_is_killed() -> None:
    """What hearing it raised is kept for the trainer's thread."""

    def deaf(event: object) -> None:
        raise ValueError("not understood")

    settings = WorkerSettings(CONFIG, "fp32", Sampling(LENGTH, 1.0, eos=-1), "retract")
    worker = WorkerProcess(settings, deaf, lambda: None, 60.0)
    try:
        worker.send(Pause())
        until(lambda: worker.gone)
        assert worker.exit_code == -signal.SIGKILL and str(worker.fault) == "not understood"
    finally:
        worker.stop()


def test_a_token_that_cannot_be_written_down_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the trainer waits, with what went wrong: no other worker is started for it."""

    def full(said: object) -> None:
        raise ZeroDivisionError("no room")

    with running(step_seconds=0.05) as made:
        in_the_midst(made)
        monkeypatch.setattr(made.ledger, "write", full)
        with pytest.raises(ZeroDivisionError, match="no room"):
            made.rollout(0)
        assert made.take_tally().restarts == 0


def test_a_worker_outlives_no_trainer(tmp_path: Path) -> None:
    """A trainer killed with SIGKILL closes nothing; its worker sees the end of the pipe."""
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import os, signal, test_async_controller as tests\n"
        "if __name__ == '__main__':\n"
        "    with tests.running(bound=3, step_seconds=0.1) as made:\n"
        "        tests.in_the_midst(made)\n"
        "        print(made.worker.pid, flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    script = tmp_path / "trainer.py"
    script.write_text(program)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGKILL
    until(lambda: not alive(int(done.stdout)))
