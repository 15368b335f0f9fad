"""Rollout engines that report the log-prob of every token they sample, behind one small protocol."""
