"""Log pi_{v+1} without a forward pass: a straight line in log-probs between pi_v and the trainer's pi_V.

    log pi_{v+1}  ~  log pi_v + alpha (log pi_V - log pi_v),        alpha = 1 / (V - v)

Exact where every update moves a token's log-prob by the same amount, and at V - v = 1. At V = v nothing lies between,
and pi_V stands in. AReaL's `prox_logp_method: loglinear` takes another point of the same line: its proximal policy is
one update behind the one being trained, alpha = (V - 1 - v) / (V - v), which is ours at V - v = 2 alone.
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
    """Log pi_{v+1} of each token, by its age V - v."""
    near, far = widened(behavior), widened(proximal)
    return torch.where(age > 1, near + (far - near) / age.clamp(min=1), far)
