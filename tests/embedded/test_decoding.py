"""Stepwise decoding: what a response becomes when the weights move between two of its tokens."""

import pytest
import torch
from teacher_forcing import teacher_forced
from tolerances import FP32_LOG_PROB

from lab.host.model.decoder import ModelConfig
from lab.host.model.decoding import Decoding, Sampling, Unfinished
from lab.host.model.engine import DecodeEngine
from lab.host.model.model import initial_weights

CONFIG = ModelConfig(32, 48, 2, 4, 2, 8, 16)
LENGTH = 9
FREE = Sampling(LENGTH, 1.0, eos=-1)
PROMPTS = [(1, 2, 3), (4, 5, 6, 7, 8, 11), (2,), (9, 9, 9, 9)]


def weights(version: int) -> dict[str, torch.Tensor]:
    """Weights of policies that are far from uniform and from each other."""
    drawn = initial_weights(CONFIG, version)
    return {name: 8 * one if one.dim() == 2 else one for name, one in drawn.items()}


def engine(version: int) -> DecodeEngine:
    built = DecodeEngine(CONFIG, "fp32")
    built.update_weights(weights(version), version)
    return built


OLD, NEW = engine(0), engine(1)


def begun(built: DecodeEngine) -> Decoding:
    return built.begin([Unfinished(i, prompt, (), 5 + i) for i, prompt in enumerate(PROMPTS)], FREE)


def drawn(decoding: Decoding, steps: int | None = None) -> dict[int, tuple[list[int], list[float]]]:
    """By number: the tokens and log-probs of so many steps, or of all."""
    found: dict[int, tuple[list[int], list[float]]] = {}
    while not decoding.ended and steps != 0:
        step = decoding.step()
        for number, token, log_prob in zip(step.numbers, step.tokens, step.log_probs, strict=True):
            tokens, log_probs = found.setdefault(number, ([], []))
            tokens.append(token)
            log_probs.append(log_prob)
        steps = None if steps is None else steps - 1
    return found


def scored(built: DecodeEngine, number: int, tokens: list[int]) -> torch.Tensor:
    (score,) = teacher_forced(built, [[*PROMPTS[number], *tokens]], [len(tokens)])
    return score


@pytest.mark.parametrize("keep_cache", [False, True])
def test_every_token_is_drawn_by_the_weights_of_its_step(keep_cache: bool) -> None:
    """Up to the update by the old weights alone; after it by the new ones, unless the cache still holds the old."""
    decoding = begun(OLD)
    before = drawn(decoding, 4)
    decoding = decoding.go_on(NEW.decoder, keep_cache=keep_cache)
    assert decoding.stale_cache is keep_cache
    after = drawn(decoding)
    for number, (tokens, log_probs) in before.items():
        everything = tokens + after[number][0]
        assert len(everything) == LENGTH
        old, new = scored(OLD, number, everything), scored(NEW, number, everything)
        torch.testing.assert_close(torch.tensor(log_probs), old[:4], rtol=0, atol=FP32_LOG_PROB)
        by_new = (torch.tensor(after[number][1]) - new[4:]).abs()
        assert (by_new.max() > 0.01) if keep_cache else (by_new.max() <= FP32_LOG_PROB)
        assert (torch.tensor(after[number][1]) - old[4:]).abs().max() > 0.01


def test_a_cache_that_holds_nothing_yet_is_not_stale() -> None:
    decoding = begun(OLD).go_on(NEW.decoder, keep_cache=True)
    assert not decoding.stale_cache
    assert drawn(decoding) == drawn(begun(NEW))
    decoding = begun(OLD)
    drawn(decoding, 1)
    twice = decoding.go_on(NEW.decoder, keep_cache=True).go_on(OLD.decoder, keep_cache=True)
    assert twice.stale_cache, "what went stale stays stale"


def test_responses_of_different_lengths_go_on_together() -> None:
    long, short = Unfinished(0, (1, 2), (3, 4, 5, 6, 7, 8), 3), Unfinished(1, (1, 2, 3, 4), (), 4)
    together = drawn(OLD.begin([long, short], FREE))
    assert [len(tokens) for tokens, _ in together.values()] == [3, LENGTH]
    for one in (long, short):
        ((tokens, _),) = drawn(OLD.begin([one], FREE)).values()
        assert together[one.number][0] == tokens


def test_a_step_says_which_responses_it_ended() -> None:
    decoding = OLD.begin([Unfinished(7, (1,), (2,) * (LENGTH - 1), 0), Unfinished(8, (1,), (), 0)], FREE)
    step = decoding.step()
    assert (step.numbers, step.ended) == ([7, 8], [True, False])
    assert decoding.step().numbers == [8] and [one.number for one in decoding.unfinished] == [8]
