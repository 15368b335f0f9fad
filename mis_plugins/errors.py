"""What a user can get wrong, as one family of exceptions."""

from __future__ import annotations

import re


class MisError(ValueError):
    """Base of every error that a user of mis_plugins can cause and mend."""


class ConfigError(MisError):
    """A setting that cannot work.

    `message` names fields in braces (`"{lower}: 3.0 is above {upper}: 2.0"`), so that one check can quote
    whichever spelling the user typed: `mis.weight.lower`, or Miles's `tis_lower_bound`.
    """

    def __init__(self, message: str):
        self.template = message
        super().__init__(re.sub(r"\{(\w+)\}", r"\1", message))

    def spelled(self, names: dict[str, str], prefix: str = "") -> ConfigError:
        """The same error with each `{field}` replaced by `names[field]`, else by `prefix + field`."""
        quote = lambda match: names.get(match[1]) or prefix + match[1]  # noqa: E731
        return ConfigError(re.sub(r"\{(\w+)\}", quote, self.template))


class InputError(MisError):
    """Log-probs, masks or lengths that do not fit together."""
