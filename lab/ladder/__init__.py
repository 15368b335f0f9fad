"""The parts of mismatch.py: rungs of rollout weights, what is sampled on them, its statistics, and the page."""
