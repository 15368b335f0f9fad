"""What other packages call our metrics: by package, ours beside a name of theirs, as `peer_names.yaml` lists them."""

from __future__ import annotations

from pathlib import Path

import yaml

PEERS: dict[str, dict[str, str]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)
