"""Every token that needs log pi_{v+1} gets it, once, of the right version, whatever happens meanwhile."""

import itertools
import math
import threading
from collections.abc import Callable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from lab.host.asynchronous.pool import Batch, Pool, Recomputed, Score, recompute, requests
from lab.host.asynchronous.response import Response, written
from mis_plugins.versions.segment_wise import SegmentWiseConfig, admitted

BUDGET = 12


def log_prob(version: int, tokens: Sequence[int]) -> float:
    """What version v gives the last of these tokens: a number that no other version, prefix or token has."""
    return -float(hash((version, *tokens)) % 2**30) - 1


def each(score: Callable[[Sequence[Sequence[int]], Sequence[int]], Sequence[Sequence[float]]]) -> Score:
    """A function that scores the batches of all ranks, made of one that scores a batch."""
    return lambda batches: [score(*batch) for batch in batches]


class Model:
    """Scores with the version that it is at, and remembers what it was asked."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.calls: list[list[int]] = []

    def __call__(self, sequences: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[float]]:
        self.calls.append([len(sequence) for sequence in sequences])
        return [
            [log_prob(self.version, tokens[: i + 1]) for i in range(len(tokens) - count, len(tokens))]
            for tokens, count in zip(sequences, counts, strict=True)
        ]


def check(response: Response, current: int) -> None:
    """Against the definition: stored where v < current - 1, by pi_{v+1}, over the right prefix; None elsewhere.

    At `current` the tokens of current - 1 may have theirs or not.
    """
    for i, (version, stored) in enumerate(zip(response.versions, response.recomputed, strict=True)):
        if version < 0 or version == current:
            assert stored is None
        elif version < current - 1 or stored is not None:
            assert stored == log_prob(version + 1, response.prompt + response.tokens[: i + 1])


class Asynchronous(RuleBasedStateMachine):
    """Rollout and trainer, interleaved at random, also within a recompute: between plan, score and store."""

    running: Bundle[int] = Bundle("running")
    queued: Bundle[int] = Bundle("queued")
    waiting: Bundle[int] = Bundle("waiting")

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.model, self.current = Pool(), Model(), 0
        self.asked: dict[tuple[int, int], int] = {}  # how often a token of a response was stored
        self.appended: dict[int, list[int]] = {}  # what was written, by number
        self.ids = itertools.count(1)
        self.gone: dict[int, Response] = {}  # as they were when they left

    def _append(self, number: int, count: int) -> None:
        tokens = [next(self.ids) for _ in range(count)]
        log_probs = [-0.5] * count
        stays = self.pool.update(number, lambda now: now.append(tokens, log_probs, self.current))
        assert stays is (number not in self.gone)
        self.appended[number] += tokens

    @rule(target=running, prompt=st.integers(1, 8))
    def start(self, prompt: int) -> int:
        number = self.pool.add(Response(prompt=(0,) * prompt))
        self.appended[number] = []
        return number

    @rule(number=running, count=st.integers(1, 6))
    def generate(self, number: int, count: int) -> None:
        self._append(number, count)

    @rule(number=running, count=st.integers(1, 3))
    def tool(self, number: int, count: int) -> None:
        tokens = [next(self.ids) for _ in range(count)]
        assert self.pool.update(number, lambda now: now.observe(tokens)) is (number not in self.gone)
        self.appended[number] += tokens

    @rule(target=queued, number=consumes(running))
    def finish(self, number: int) -> int:
        return number

    @rule(target=waiting, number=consumes(running))
    def abort(self, number: int) -> int:
        return number

    @rule(target=running, number=consumes(waiting))
    def resume(self, number: int) -> int:
        return number

    @rule(number=consumes(running) | consumes(queued) | consumes(waiting))
    def drop(self, number: int) -> None:
        self._take(number)

    @rule(number=consumes(queued))
    def train(self, number: int) -> None:
        """At any moment, also between two recomputes: nothing that its loss needs is missing."""
        response = self._take(number)
        if response is None:
            return
        scores = written(response.versions, response.recomputed, self.current)
        mask = scores.versions >= 0
        (admitted_mask,) = admitted([str(number)], [scores], [mask], SegmentWiseConfig())
        assert admitted_mask.tolist() == mask.tolist()

    def _take(self, number: int) -> Response | None:
        """Also of one that left in the middle of a recompute, of which this rule does not know."""
        response = self.pool.take(number)
        assert (response is None) is (number in self.gone)
        if response is None:
            return None
        self.gone[number] = response
        check(response, self.current)
        assert list(response.tokens) == self.appended[number]
        return response

    @rule(data=st.data())
    def update(self, data: st.DataObject) -> None:
        """Recompute, with workers writing, finishing and dropping in between; then the weights move on."""
        before = self.pool.snapshot()

        def score(sequences: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[float]]:
            for number in data.draw(st.lists(st.sampled_from(sorted(before)), max_size=2)):
                if data.draw(st.booleans()):
                    self._append(number, 2)
                else:
                    self._take(number)
            return self.model(sequences, counts)

        ranks = data.draw(st.integers(1, 3))
        done = recompute(self.pool, self.current, BUDGET, each(score), ranks)
        after = self.pool.snapshot()
        assert after.keys() == before.keys() - self.gone.keys()
        stored = [
            (number, i)
            for number, response in before.items()
            for i, value in enumerate(response.recomputed)
            if value is None and (self.gone | after)[number].recomputed[i] is not None
        ]
        wanted = sum(len(response.lacking(self.current - 1)) for response in before.values())
        assert done.tokens == len(stored) and done.tokens + done.gone <= wanted
        for token in stored:
            self.asked[token] = self.asked.get(token, 0) + 1
        assert recompute(self.pool, self.current, BUDGET, each(score)) == Recomputed()
        self.current += 1
        self.model.version = self.current

    @invariant()
    def nothing_is_lost(self) -> None:
        for number, response in self.pool.snapshot().items():
            check(response, self.current)
            assert list(response.tokens) == self.appended[number]

    @invariant()
    def once_each(self) -> None:
        assert all(times == 1 for times in self.asked.values())

    @invariant()
    def within_the_budget(self) -> None:
        assert all(sum(call) <= BUDGET or len(call) == 1 for call in self.model.calls)


TestAsynchronous = Asynchronous.TestCase
TestAsynchronous.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def response(version: int, tokens: int, prompt: int = 1) -> Response:
    return Response((0,) * prompt).append(list(range(1, tokens + 1)), [-0.5] * tokens, version)


def test_a_score_that_fails_costs_only_itself():
    """Batches before it are stored, those after it wait for the next call, and none is asked for twice."""
    pool, model = Pool(), Model(4)
    for _ in range(4):
        pool.add(response(3, 4))
    calls = itertools.count()

    def score(sequences: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[float]]:
        if next(calls) == 1:
            raise RuntimeError("out of memory")
        return model(sequences, counts)

    with pytest.raises(RuntimeError, match="out of memory"):
        recompute(pool, 4, 10, each(score))
    assert sum(not one.lacking(3) for one in pool.snapshot().values()) == 2
    assert recompute(pool, 4, 10, each(score)) == Recomputed(tokens=8, scored=10, batches=1)


def test_a_log_prob_that_is_not_finite_is_stored():
    """A log-prob of NaN or infinity counts as an answer, so that the recompute ends; its token will weigh 0."""
    pool = Pool()
    number = pool.add(response(3, 2))
    recompute(pool, 4, 100, each(lambda sequences, counts: [[math.nan, -math.inf]]))
    stored = pool.snapshot()[number].recomputed
    assert stored[0] is not None and math.isnan(stored[0]) and stored[1] == -math.inf


def test_a_pool_of_threads():
    """Writers append and take while recomputes run: nothing is lost, stored twice or of the wrong version."""
    pool, model = Pool(), Model(4)
    taken: list[Response] = []

    def work(worker: int) -> None:
        for i in range(30):
            number = pool.add(response(3, 3, prompt=worker + 1))
            pool.update(number, lambda now: now.append([50], [-0.5], 4))
            if i % 3 == 0:
                one = pool.take(number)
                assert one is not None
                taken.append(one)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        recompute(pool, 4, 64, each(model))
    recompute(pool, 4, 64, each(model))
    assert len(taken) == 4 * 10 and len(pool.snapshot()) == 4 * 20
    for one in pool.snapshot().values():
        check(one, 5 - 1)
        assert one.lacking(3) == []


@pytest.mark.parametrize("answer", [[[[-1.0] * 2]] * 2, [], [[[-1.0] * 2] * 2], [[]]], ids=str)
def test_too_few_batches_or_sequences_or_too_many(answer: list[list[list[float]]]):
    pool = Pool()
    pool.add(response(3, 2))
    with pytest.raises(ValueError, match="argument 2 is (shorter|longer) than argument 1"):
        recompute(pool, 4, 100, lambda batches: answer)


def test_the_longest_is_asked_for_first():
    """First-fit fills batches best from the longest on."""
    pool = Pool()
    for prompt in (2, 5, 3):
        pool.add(response(3, 1, prompt=prompt))
    assert [len(request.tokens) for request in requests(pool, 3)] == [6, 4, 3]


def test_ranks_share_batches_that_are_the_same_for_any_number_of_them():
    """Each call has as many batches as there are ranks, the last one what is left."""
    asked, found = {}, {}
    for ranks in (1, 2, 3):
        pool, model, calls = Pool(), Model(4), []
        for length in (3, 9, 4, 8, 5, 7):
            pool.add(response(3, length))

        def score(batches: Sequence[Batch], model: Model = model, calls: list[int] = calls) -> list[list[list[float]]]:
            calls.append(len(batches))
            return [model(*batch) for batch in batches]

        done = recompute(pool, 4, 10, score, ranks)
        assert calls == {1: [1] * 5, 2: [2, 2, 1], 3: [3, 2]}[ranks] and done.batches == 5
        asked[ranks], found[ranks] = model.calls, pool.snapshot()
        for one in found[ranks].values():
            check(one, 5 - 1)
            assert one.lacking(3) == []
    assert asked[1] == asked[2] == asked[3] and found[1] == found[2] == found[3]
