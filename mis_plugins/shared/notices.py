"""Warnings that a training log holds once, and not once a step."""

from __future__ import annotations

import functools
import logging

logger = logging.getLogger("mis_plugins")


@functools.cache
def warn_once(message: str) -> None:
    """Log `message` as a warning the first time this process says it."""
    logger.warning(message)
