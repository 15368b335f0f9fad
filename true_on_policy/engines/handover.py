"""The names that our launcher shares with our plugin in an engine's processes, beside the contract.

Launcher and plugin both import this module, so its import loads neither an engine nor the kernels.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from true_on_policy.contract.cpu import Contract
    from true_on_policy.contract.rounding import NormOrder

CONTRACT = "TRUE_ON_POLICY_CONTRACT"  # JSON of Contract
ORDER = "TRUE_ON_POLICY_NORM_ORDER"  # JSON of NormOrder, where the engine follows another order than its own


def handed_over(contract: "Contract | None", order: "NormOrder | None") -> dict[str, str]:
    """Build the variables of the handover; none for an engine that stays stock."""
    given = {CONTRACT: contract, ORDER: order}
    return {name: json.dumps(asdict(value)) for name, value in given.items() if value is not None}


def stated_contract(environment: Mapping[str, str] = os.environ) -> "Contract":
    """Read the contract that the launcher handed over."""
    from mis_plugins.config.reading import convert
    from true_on_policy.contract.cpu import Contract

    return convert(Contract, json.loads(environment[CONTRACT]), CONTRACT)


FOLDER = "TRUE_ON_POLICY_ENGINE_DUMP"  # where the processes that run the model say what they run, for the doctor
ASKED = "TRUE_ON_POLICY_WEIGHTS"  # set for an engine whose weight checker is to return digests of its weights
FORKS = "TRUE_ON_POLICY_FORKS"  # set for an engine on CPU, which forks its processes
KEY = "TRUE_ON_POLICY_ENGINE_KEY"  # the key that a server of ours asks of each request, and that our clients send
# Actions of the weight checker of an engine that was started with `ASKED`. SGLang's own checksum differs between GPU
# and CPU, has 64 bits, and covers neither dtype nor shape.
DIGESTS, VALUES = "true_on_policy.digests", "true_on_policy.values"
ACTIVE = "true_on_policy: pinned"  # printed by the process that runs the model, once its probes have passed


def is_set(name: str) -> bool:
    """Whether a variable asks for something; an empty text and 0 ask for nothing."""
    return os.environ.get(name, "") not in ("", "0")


def asked_for() -> bool:
    """Whether the launcher wants this process pinned."""
    return is_set(CONTRACT)


def pin_as_asked() -> None:
    """Pin the contract that was handed over, for the rest of the process; an error ends the server."""
    from true_on_policy.kernels.pin import active_backend, pin

    pin(stated_contract())
    print(ACTIVE, active_backend(), flush=True)


def texts_of(held: "Mapping[str, Tensor]", action: str, names: Sequence[str] = ()) -> dict[str, str]:
    """Return by name the digest of each tensor as text, or the values of the named tensors."""
    from true_on_policy.bitwise import Digest, values

    if action == DIGESTS:
        return {name: Digest.of(tensor).text for name, tensor in held.items()}
    return {name: values(held[name]) for name in names if name in held}


def ordered_norm() -> Callable | None:
    """Build a forward for an engine's RMSNorm in the order handed over; None where no order was."""
    if ORDER not in os.environ:
        return None
    from true_on_policy.contract.rounding import NormOrder, add_residual, rms_norm

    order = NormOrder(**json.loads(os.environ[ORDER]))

    def forward(self, x, residual=None):
        if residual is None:
            return rms_norm(x, self.weight, self.variance_epsilon, order)
        stream = add_residual(x, residual, order)
        return rms_norm(stream, self.weight, self.variance_epsilon, order), stream.to(x.dtype)

    return forward
