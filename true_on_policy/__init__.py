"""Removes the train-inference mismatch instead of correcting it.

A contract says what must be pinned for both engines to agree bit by bit; a context manager pins it and restores what it
found; probes see whether a kernel is batch-invariant here and now; and a verification goes through the three links:
batch invariance, trainer == prefill, prefill == decode. It and `mis_plugins` never import each other's insides.
"""

# Addresses of before the rooms were made, which documents and scripts of users hold.
__path__.append(f"{__path__[0]}/former")
