"""Import Megatron-core, without its advice for GPUs, in the process from which `ranks` forks; nothing is computed."""

from __future__ import annotations

import warnings

warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")

import true_on_policy.trainers.ranks  # noqa: E402, F401
