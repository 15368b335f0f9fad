"""What a user can get wrong, as one family of exceptions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

Error = TypeVar("Error", bound="MisError")
FIELD = re.compile(r"(?<!\$)\{(\w+(?:\.\w+)*)\}")  # `{field}`, but not a user's own `${...}`


class UserError(ValueError):
    """Base of every error of both packages that a user can cause and mend."""


class MisError(UserError):
    """Base of every error that a user of mis_plugins can cause and mend.

    `message` names fields of the config in braces (`"{weight.lower}: 3.0 is above {weight.upper}: 2.0"`), so that one
    check can quote whichever spelling the user typed: `mis.weight.lower`, or Miles's `tis_lower_bound`.
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


class ConfigError(MisError):
    """A setting that cannot work."""


class InputError(MisError):
    """Log-probs, masks or lengths that do not fit together."""
