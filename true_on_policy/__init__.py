"""true_on_policy removes the train-inference mismatch instead of correcting it.

A contract says what trainer and engine must share to agree bit by bit. A pin installs the kernels of a
contract, and restores the previous kernels on exit. A probe tests whether a kernel is batch-invariant on this
machine. A verification checks three links: batch invariance, trainer == prefill, prefill == decode.
"""

from mis_plugins.shared import moved as _moved  # noqa: F401  refuses imports of earlier releases
