"""true_on_policy removes the train-inference mismatch instead of correcting it.

A contract says what trainer and engine must share to agree bit by bit. A pin puts the kernels of a contract in place,
and restores the former kernels on leaving. A probe tries whether a kernel is batch-invariant here and now. A
verification goes through three links: batch invariance, trainer == prefill, prefill == decode.
"""

# Addresses that users' scripts and documents wrote down before the rooms were made.
__path__.append(f"{__path__[0]}/former")
