"""Experiments, proofs and measurements: run from a checkout as `python -m lab.NAME`, never installed."""
