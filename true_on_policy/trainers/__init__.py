"""Trainers compute the log-prob of every token of given sequences, behind one small protocol."""

import warnings

# Silences, before Megatron-core is imported, its advice for GPUs and torch's advice on collectives that it calls.
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
