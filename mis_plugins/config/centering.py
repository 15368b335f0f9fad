"""Which configs score centering composes with."""

from __future__ import annotations

from mis_plugins.config.model import CorrectionConfig
from mis_plugins.errors import ConfigError


def check(config: CorrectionConfig) -> None:
    """Refuse a config of which the centering term is not known."""
    objective, weight = config.objective, config.weight
    if objective is None or not config.bypass:
        raise ConfigError(
            "{center}: needs {objective.old}: behavior; with proximal the ratio to pi_old would be needed for each "
            "token of the head, which no log-prob pass computes"
        )
    if objective.surrogate != "reinforce":
        raise ConfigError(
            f"{{center}}: needs {{objective.surrogate}}: reinforce; {objective.surrogate} weighs a token by its "
            "advantage too, so that its mean is not the score's"
        )
    if weight and weight.level != "token":
        raise ConfigError(
            f"{{weight.level}}: {weight.level} with {{center}}; a weight of more than a token has no value at tokens "
            "that were not sampled: use token, or leave {center} out"
        )
    if weight and weight.record.drops_token and config.looks_at_kept:
        raise ConfigError(
            f"{{weight.bound}}: {weight.bound} with {{center}} and {{aggregate}}: kept; a token that the bound drops "
            "keeps its centering term, and rules cannot tell it from one that a rule drops: use {weight.bound}: zero, "
            "whose policy loss is equal"
        )
