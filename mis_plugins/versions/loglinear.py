"""Log pi_{v+1} without a forward pass: a straight line in log-probs between pi_v and the trainer's pi_V.

    log pi_{v+1}  ~  log pi_v + alpha (log pi_V - log pi_v),        alpha = 1 / (V - v)

The line is exact at age V - v = 1, and where every update moves a token's log-prob by the same amount. At age 0 nothing
lies between the two versions, and pi_V stands in. AReaL's `prox_logp_method: loglinear` takes a point of this line at
alpha = (V - 1 - v) / (V - v): AReaL's proximal policy is one update older than the one being trained. Both points agree
at age 2 alone.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mis_plugins.correction.ratios import widened


@torch.no_grad()
def loglinear(
    proximal: Float[Tensor, " T"], behavior: Float[Tensor, " T"], age: Int[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """Interpolate log pi_{v+1} of each token by the token's age V - v."""
    near, far = widened(behavior), widened(proximal)
    return torch.where(age > 1, near + (far - near) / age, far)
