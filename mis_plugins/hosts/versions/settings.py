"""Settings of the config in force that need versions."""

from __future__ import annotations

from typing import Any

from mis_plugins.config import reading
from mis_plugins.config.model import SegmentWiseConfig

LOGLINEAR = "say mis.segment_wise.method: loglinear"


def segment_wise(args: Any) -> SegmentWiseConfig | None:
    """Segment-wise weights as the loss hook will have them; None where they are off."""
    config = reading.from_args(args).where_versions_are_known()
    return config.segment_wise if config.segment_wise_on else None


def recomputes(config: SegmentWiseConfig | None) -> bool:
    """Whether weights read log-probs that a recompute stored."""
    return config is not None and config.method == "recompute"
