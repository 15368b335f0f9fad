"""Experiments, proofs and measurements: run from a checkout as `python -m lab.NAME`, never installed."""

from mis_plugins.shared import moved as _moved  # noqa: F401  refuses commands of earlier releases
