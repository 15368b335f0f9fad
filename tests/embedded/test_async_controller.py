"""The controller and its thread: updates in mid-sequence, places, faults, hooks, what is left behind."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from teacher_forcing import teacher_forced
from test_decoding import CONFIG, engine, weights
from test_decoding import PROMPTS as FOUR_PROMPTS
from tolerances import FP32_LOG_PROB

from lab.host.asynchronous import controller as controller_module
from lab.host.asynchronous.controller import Controller, PauseMode, Settings, Tally, Wanted
from lab.host.asynchronous.response import Response
from lab.host.asynchronous.update_hooks import HookError, Point
from lab.host.model.decoding import Drawn, Sampling
from mis_plugins.errors import InputError

LENGTH, ROLLOUTS = 8, 5
PROMPTS = [*FOUR_PROMPTS, (3, 3), (7, 1)]


def wanted(rollout: int) -> list[Wanted]:
    return [Wanted(prompt, 100 * rollout + index) for index, prompt in enumerate(PROMPTS)]


@contextmanager
def running(
    mode: PauseMode = "retract",
    bound: int = 1,
    step_seconds: float = 0.0,
    steps_per_update: int = 0,
    places: int | None = None,
) -> Iterator[Controller]:
    settings = Settings(CONFIG, "fp32", Sampling(LENGTH, 1.0, eos=-1), mode, step_seconds, steps_per_update, places)
    made = Controller(settings, bound, wanted, range(ROLLOUTS), weights(0))
    try:
        yield made
    finally:
        made.close()


def in_the_midst(made: Controller) -> None:
    """Wait until some response has tokens, and none all."""
    until(lambda: any(0 < count < LENGTH for count in lengths(made)))
    assert max(lengths(made)) < LENGTH


def lengths(made: Controller) -> list[int]:
    return [len(response.tokens) for response in made.pool.snapshot().values()]


def until(ready: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def generated(rollout: int, version: int = 0) -> list[tuple[int, ...]]:
    """What the engine makes of a rollout that nothing interrupts."""
    asked = wanted(rollout)
    sampling, seeds = Sampling(LENGTH, 1.0, eos=-1), [one.seed for one in asked]
    made = engine(version).generate([one.prompt for one in asked], sampling, seeds)
    return [one.tokens for one in made]


def check_written(responses: list[Response], stale_may_differ: bool = False) -> None:
    """Every token has the log-prob that the weights of its version give it."""
    for response in responses:
        assert len(response.tokens) == LENGTH and sorted(response.versions) == list(response.versions)
        sequence = [*response.prompt, *response.tokens]
        for version in set(response.versions):
            (score,) = teacher_forced(engine(version), [sequence], [LENGTH])
            for place, value in enumerate(score.tolist()):
                stale = stale_may_differ and response.stale_cache[place]
                if response.versions[place] == version and not stale:
                    assert response.log_probs[place] == pytest.approx(value, abs=FP32_LOG_PROB)


# --- updates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_the_weights_move_in_mid_sequence(mode: PauseMode) -> None:
    with running(mode, bound=3, step_seconds=0.05) as made:
        in_the_midst(made)
        before = {number: response.tokens for number, response in made.pool.snapshot().items()}
        made.update(weights(1))
        after = made.pool.snapshot()
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
            until(lambda v=version: any(v - 1 in one.versions for one in made.pool.snapshot().values()))
            made.update(weights(version))
            older = older_tokens(made, version)
            time.sleep(0.1)
            assert older_tokens(made, version) == older


def test_aborted_twice_the_responses_are_sent_twice() -> None:
    """Each update ends the responses under way, which begin again from their tokens."""
    with running("abort", bound=2, step_seconds=0.05) as made:
        for version in (1, 2):
            heard = sum(lengths(made))
            until(lambda n=heard: sum(lengths(made)) > n)
            made.update(weights(version))
        until(lambda: made.complete(0))
        check_written(made.rollout(0))


def test_the_tally_adds_up_what_happened_since_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that ticks whenever it is read: twice a wait, and twice an update."""
    ticks = itertools.count()
    monkeypatch.setattr(
        controller_module, "time", SimpleNamespace(perf_counter=lambda: next(ticks), monotonic=time.monotonic)
    )
    with running(bound=1) as made:
        for rollout in (0, 1):
            made.rollout(rollout)
        for version in (1, 2, 3):
            made.update(weights(version))
        assert made.take_tally() == Tally(waited=2, paused=3)
        assert made.take_tally() == Tally()


@pytest.mark.parametrize(("mode", "places"), [("in_place", 4), ("retract", 4), ("abort", 4), ("retract", None)])
def test_no_more_responses_are_in_flight_than_there_are_places(
    mode: PauseMode, places: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over updates in mid-sequence, and with a pace at which a later rollout must not hold the places of an earlier."""
    flights, write = list[int](), Controller._write

    def counted(made: Controller, drawn: Drawn, stale_cache: bool) -> None:
        ended = sum(drawn.ended)  # of this batch, whose decoding has let go of them
        flights.append(ended + sum(len(one.decoding.unfinished) for one in made._batches))
        write(made, drawn, stale_cache)

    monkeypatch.setattr(Controller, "_write", counted)
    with running(mode, 2, steps_per_update=5, places=places) as made:
        for version in range(ROLLOUTS):
            check_written(made.rollout(version), stale_may_differ=True)
            made.update(weights(version + 1))
    assert max(flights) == 4 if places else max(flights) > 4


def older_tokens(made: Controller, version: int) -> int:
    known = made.pool.snapshot().values()
    return sum(wrote < version for response in known for wrote in response.versions)


@pytest.mark.parametrize("bound", [0, 2])
def test_a_trainer_slower_than_the_rollout_finds_no_more_begun_than_may(bound: int) -> None:
    with running(bound=bound) as made:
        for version in range(ROLLOUTS):
            last = min(version + bound, ROLLOUTS - 1)
            assert sorted(made._open) == list(range(version, last + 1))
            until(lambda v=version, k=last: all(made.complete(one) for one in range(v, k + 1)))
            time.sleep(0.05)  # nothing else is generated meanwhile
            assert set(lengths(made)) == {LENGTH}
            (ages,) = ({version - wrote for response in made.rollout(version) for wrote in response.versions},)
            assert ages == {min(version, bound)}
            made.update(weights(version + 1))


def test_a_slow_engine_is_waited_for() -> None:
    began = time.perf_counter()
    with running(bound=0, step_seconds=0.1) as made:
        late = time.perf_counter() - began  # generation begins while the controller is made
        responses = made.rollout(0)
        assert made.take_tally().waited > 0.1 * (LENGTH - 1) - late
        assert [response.tokens for response in responses] == generated(0)


# --- faults ---------------------------------------------------------------------------------------------------


def test_weights_that_have_diverged_end_the_run() -> None:
    """The error is one that the user can mend."""
    with running(bound=0) as made:
        made.rollout(0)
        made.update({name: one * torch.nan for name, one in weights(1).items()})
        with pytest.raises(InputError, match="logits are not finite; the weights it was given have diverged"):
            made.rollout(1)


def test_a_token_that_cannot_be_written_down_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's thread raises what went wrong on the thread that samples."""

    def full(*_: object) -> None:
        raise ZeroDivisionError("no room")

    with running(step_seconds=0.05) as made:
        in_the_midst(made)
        monkeypatch.setattr(made, "_write", full)
        with pytest.raises(ZeroDivisionError, match="no room"):
            made.rollout(0)


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
            made.hooks.register(name, note(made, name), name)
        made.update(weights(1))
        made.rollout(0)
    assert [(name, version) for name, version, _ in seen] == [
        ("pre_pause", 0), ("post_pause", 0), ("pre_resume", 1), ("post_resume", 1)
    ]  # fmt: skip
    assert seen[1][2] == seen[2][2]


def broken() -> None:
    raise ValueError("no room")


@pytest.mark.parametrize("point", ["pre_pause", "post_pause"])
def test_a_hook_that_raises_leaves_the_weights_and_generation_going(point: Point) -> None:
    with running(bound=1, step_seconds=0.02) as made:
        made.hooks.register(point, broken, "mine")
        with pytest.raises(HookError, match=f"{point} hook mine raised ValueError: no room"):
            made.update(weights(1))
        assert made.version == 0
        assert [response.tokens for response in made.rollout(0)] == generated(0)
        assert [response.tokens for response in made.rollout(1)] == generated(1)


@pytest.mark.parametrize("point", ["pre_resume", "post_resume"])
def test_a_hook_that_raises_after_the_update_leaves_the_new_weights_and_what_they_admit(point: Point) -> None:
    with running(bound=0) as made:
        made.rollout(0)
        made.hooks.register(point, broken, "mine")
        with pytest.raises(HookError, match=f"{point} hook mine raised ValueError: no room"):
            made.update(weights(1))
        assert made.version == 1
        assert [response.tokens for response in made.rollout(1)] == generated(1, version=1)


# --- what is left behind --------------------------------------------------------------------------------------


def test_closed_in_mid_sequence_no_thread_is_left() -> None:
    with running(bound=3, step_seconds=0.2) as made:
        in_the_midst(made)
        assert made._thread.is_alive()
    assert not made._thread.is_alive()
