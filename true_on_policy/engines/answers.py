"""Read what an engine answers: its JSON, and the numbers and tokens in it, each checked before it is used."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from reprlib import Repr
from typing import Any, NoReturn

from mis_plugins.errors import UserError
from mis_plugins.shared.absent import LOWEST
from true_on_policy.errors import EngineError

LIMIT = 64 << 20  # bytes of an answer
BYTES_A_VALUE = 16  # of the limit: an answer of 64 MiB may hold 4 million numbers, texts, lists and pairs
SHOWN = 80  # letters of a wrong value that an error quotes
IDS = 2**31  # no vocabulary is larger
ROUNDED_UP = 1e-3  # a log-softmax in floating point may lie that far above 0

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = SHOWN


def parsed(body: bytes, limit: int = LIMIT) -> Any:
    """Parse a JSON body strictly: no NaN, no name twice, and no more values than fit the limit of its bytes.

    Raises:
        EngineError: the body is not such JSON.
    """
    if sum(map(body.count, (b",", b"[", b"{"))) > limit // BYTES_A_VALUE:
        raise EngineError(f"answers with more than {limit // BYTES_A_VALUE:,} values")
    try:
        return json.loads(body, parse_constant=_no_number, object_pairs_hook=_once)
    except RecursionError as error:
        raise EngineError("the answer is nested too deeply") from error
    except ValueError as error:
        raise EngineError(f"the answer is no JSON: {error}") from error


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) < len(pairs):
        raise ValueError(f"a name stands twice among {short([name for name, _ in pairs])}")
    return names


@contextmanager
def reading(what: str, engine: str) -> Iterator[None]:
    """Turn every error of reading an engine's answer into an EngineError that begins with `what`."""
    try:
        yield
    except EngineError as error:
        raise EngineError(f"{what}: {error}") from error
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise EngineError(f"{what}: not an answer of {engine} ({short(error)})") from error


def short(value: object) -> str:
    """Write a value for an error, cut off where it is long."""
    return _SHORT.repr(value)


def list_of(value: Any, count: int, what: str) -> list[Any]:
    """Return `value`, a list of `count` entries.

    Raises:
        EngineError: `value` is no list, or has another number of entries.
    """
    if not isinstance(value, list):
        raise EngineError(f"{what}: expected a list of {count}; got {short(value)}")
    if len(value) != count:
        raise EngineError(f"{what}: expected {count}, got {len(value)}")
    return value


def whole(value: Any, what: str, most: int = IDS) -> int:
    """Return `value`, a whole number from 0 to `most`.

    Raises:
        EngineError: `value` is of another type, or out of range.
    """
    if type(value) is not int or not 0 <= value <= most:
        raise EngineError(f"{what}: expected a whole number from 0 to {most}; got {short(value)}")
    return value


def log_prob(value: Any) -> float:
    """Return `value`, a finite log-prob.

    Raises:
        EngineError: `value` is no number, not finite, above 0, or what an engine writes where it has none.
    """
    is_number = type(value) in (int, float)
    if value is None or (is_number and -math.inf < value <= LOWEST):
        raise EngineError(f"a token without a log-prob; got {short(value)}")
    if not is_number or not math.isfinite(value) or value > ROUNDED_UP:
        raise EngineError(f"expected a log-prob, finite and at most 0; got {short(value)}")
    return float(value)


def check_counts(meta: Any, prompt: int, sampled: int | None = None) -> None:
    """Check the numbers of tokens that an answer of SGLang states beside its log-probs, where it states any.

    Raises:
        EngineError: the answer is to a prompt of another length, or states another number of sampled tokens.
    """
    for name, wanted in (("prompt_tokens", prompt), ("completion_tokens", sampled)):
        if wanted is not None and meta.get(name, wanted) != wanted:
            raise EngineError(f"{name}: expected {wanted}, got {short(meta[name])}")
