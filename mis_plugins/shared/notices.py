"""Warnings that are worth one line of a training log, not one a step."""

from __future__ import annotations

import functools
import logging

logger = logging.getLogger("mis_plugins")


@functools.cache
def warn_once(message: str) -> None:
    """Log `message` as a warning the first time this process says it."""
    logger.warning(message)
