"""What the process imports that `ranks` forks from: Megatron-core, without its advice for GPUs; nothing is computed."""

from __future__ import annotations

import warnings

warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")

import true_on_policy.trainers.megatron  # noqa: E402, F401
