"""What a user can get wrong: a family of exceptions, a warning that is said once, and how both show a value."""

import functools
import logging
import math
import re
from collections.abc import Mapping
from typing import TypeVar

Error = TypeVar("Error", bound="UserError")
# A word `{field}`, but not a user's `${...}` or `'{...}'`, nor a set of numbers.
FIELD = re.compile(r"(?<![^\s(])\{([^\W\d]\w*(?:\.\w+)*)\}")
LARGEST = 2**63 - 1  # the largest 64-bit integer: seeds and sizes are such integers
SHOWN = 40  # how many characters of a user's value an error shows

logger = logging.getLogger("mis_plugins")


class UserError(ValueError):
    """Base of every error of both packages that a user can cause and mend.

    `message` names settings in braces (`"{weight.lower}: 3.0 is above {weight.upper}: 2.0"`), so that one check can
    quote whichever spelling the user typed: `mis.weight.lower`, or Miles's `tis_lower_bound`.
    """

    def __init__(self, message: str):
        self.template = message
        super().__init__(FIELD.sub(r"\1", message))

    def spelled(self: Error, names: Mapping[str, str], prefix: str = "") -> Error:
        """A copy of the error with each `{field}` replaced by `names[field]`, else by `prefix + field`.

        A nested field `{a.b}` may also be named through `a`.
        """

        def quote(match: re.Match[str]) -> str:
            field = match[1]
            head, _, rest = field.partition(".")
            return names.get(field) or (f"{names[head]}.{rest}" if head in names else prefix + field)

        return type(self)(FIELD.sub(quote, self.template))


class MisError(UserError):
    """Base of every error that a user of mis_plugins can cause and mend."""


class ConfigError(MisError):
    """A setting that cannot work."""


class InputError(MisError):
    """Log-probs, masks or lengths that do not fit together."""


@functools.cache
def warn_once(message: str) -> None:
    """Log `message` as a warning the first time this process says it: a training log holds it once, not once a step."""
    logger.warning(message)


def shown(value: object) -> str:
    """A user's value as an error shows it: a long value by its beginning and its length."""
    if isinstance(value, int) and abs(value) > LARGEST:  # Python refuses to write more than 4300 digits
        return f"an integer of about {math.floor(value.bit_length() * math.log10(2)) + 1} digits"
    return cut(repr(value))


def cut(text: str, most: int = SHOWN) -> str:
    """A text as an error or a comment shows it: a text longer than `most` by its beginning and its length."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"
