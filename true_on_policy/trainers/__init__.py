"""Trainers compute the log-prob of every token of given sequences, behind one small protocol."""

import warnings

# Set before Megatron-core is imported, in a process of its ranks too: its advice for GPUs, and torch's to it.
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
