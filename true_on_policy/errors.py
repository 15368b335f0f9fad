"""What a user of true_on_policy can get wrong, as one family of exceptions."""

from __future__ import annotations

from mis_plugins.errors import UserError


class TrueOnPolicyError(UserError):
    """Base of every error that a user of true_on_policy can cause and mend."""


class ContractError(TrueOnPolicyError):
    """A contract that cannot hold."""


class ModelError(TrueOnPolicyError):
    """A model that is neither one of the tiny ones nor a checkpoint of Qwen3 on disk."""


class PinError(TrueOnPolicyError):
    """Kernels that cannot be pinned: another provider holds them, or the backend does not run here."""


class ProbeError(TrueOnPolicyError):
    """A pinned kernel whose row alone is not the same row in a batch."""


class NotSeenError(TrueOnPolicyError):
    """A check that could not look: the machine lacks what it needs. Neither a pass nor a failure."""


class HostConfigError(TrueOnPolicyError):
    """A setting under `bitwise:` that cannot work."""


class DifferenceError(TrueOnPolicyError):
    """Log-probs that were to be equal bit by bit and are not."""
