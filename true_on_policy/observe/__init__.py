"""Observe from inside a process what it really runs, and write the observation to a file for the doctor."""
