"""The CPU contract in environment variables, which a launcher sets and every process of a launch can read.

An import of this module loads neither torch nor the kernels.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from true_on_policy.contract.cpu import Contract
    from true_on_policy.contract.norm_order import NormOrder

CONTRACT = "TRUE_ON_POLICY_CONTRACT"  # JSON of Contract
ORDER = "TRUE_ON_POLICY_NORM_ORDER"  # JSON of NormOrder, where the engine follows another order than its own


def handed_over(contract: Contract | None, order: NormOrder | None) -> dict[str, str]:
    """Build the variables of the handover; none for an engine that stays stock."""
    given = {CONTRACT: contract, ORDER: order}
    return {name: json.dumps(asdict(value)) for name, value in given.items() if value is not None}


def stated_contract(environment: Mapping[str, str] = os.environ) -> Contract:
    """Read the contract that the launcher handed over."""
    from true_on_policy.contract.cpu import Contract, Shapes

    stated = json.loads(environment[CONTRACT])
    shapes = Shapes(**{name: _tuples(value) for name, value in stated.pop("shapes").items()})
    return Contract(**stated, shapes=shapes)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
