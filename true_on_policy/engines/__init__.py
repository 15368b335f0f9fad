"""Rollout engines report the log-prob of every token that they sample, behind one small protocol."""
