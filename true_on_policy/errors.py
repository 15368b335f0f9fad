"""The exceptions for what a user of true_on_policy can get wrong, as one family."""

from mis_plugins.errors import UserError


class TrueOnPolicyError(UserError):
    """The base of every error that a user of true_on_policy can cause and mend."""


class ContractError(TrueOnPolicyError):
    """A contract cannot hold."""


class ModelError(TrueOnPolicyError):
    """A model is neither one of this package by name nor a checkpoint of a proven family on disk."""


class PinError(TrueOnPolicyError):
    """Kernels cannot be pinned: another provider holds them, or they do not run here."""


class ProbeError(TrueOnPolicyError):
    """A pinned kernel gives a row other bits alone than in a batch."""


class NotSeenError(TrueOnPolicyError):
    """A check could not run because the machine lacks what it needs: neither a pass nor a failure."""


class HostConfigError(TrueOnPolicyError):
    """A setting under `bitwise:` cannot work."""


class EngineError(TrueOnPolicyError):
    """An engine did not start, died, was too slow, or gave an answer that does not fit the request."""


class DifferenceError(TrueOnPolicyError):
    """Log-probs that must be equal bit by bit are not."""
