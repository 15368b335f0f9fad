"""An old import path, kept for users' code: true_on_policy.kernels.gpu_probes holds the code."""

from true_on_policy.kernels.gpu_probes import *  # noqa: F403
