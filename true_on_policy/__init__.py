"""Removes the train-inference mismatch instead of correcting it. Empty so far.

It will hold a contract of what must be pinned for both engines to agree bit by bit, a context manager that pins it and
restores what it found, probes that a kernel is batch-invariant here and now, and a verification of the three links:
batch invariance, trainer == prefill, prefill == decode. It and `mis_plugins` never import each other's insides.
"""
