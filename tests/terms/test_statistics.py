"""Every statistic against its second writing, of log-probs as float32 and as bfloat16 hold them."""

from __future__ import annotations

import random

import oracle
import pytest
import torch
from tolerances import EPS

from mis_plugins.config.terms.statistics import STATISTICS, Evidence


@pytest.mark.parametrize("name", STATISTICS)
def test_record_says_what_the_value_reads(name: str) -> None:
    """A value that is not made of log-probs costs no cut where they are not usable; one that is must be cut."""
    log_ratio, near, far, farther = (torch.tensor([x]) for x in (0.5, -1.0, -2.0, -4.0))
    value = STATISTICS[name].value
    first = value(Evidence(log_ratio, near, far, torch.tensor([1.0])))
    reads = [
        bool((value(Evidence(log_ratio, *log_probs, torch.tensor([routes]))) != first).any())
        for log_probs, routes in (((far, farther), 1.0), ((near, far), 2.0))
    ]
    assert reads == [STATISTICS[name].reads_probabilities, STATISTICS[name].reads_routes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STATISTICS)
def test_value(name: str, dtype: torch.dtype) -> None:
    """Probabilities are made of the log-probs in float32, whatever holds these."""
    rng = random.Random(name)
    pairs = [[rng.uniform(-4, -0.05) for _ in range(50)] for _ in range(2)]
    proximal, behavior = (torch.tensor(row).to(dtype) for row in pairs)
    routes = [float(rng.randrange(4)) for _ in range(50)]
    sample = oracle.Sample(proximal.tolist(), behavior.tolist(), [True] * 50, routes=routes)
    evidence = Evidence(proximal.float() - behavior.float(), proximal, behavior, torch.tensor(routes))
    value = STATISTICS[name].value(evidence)
    expected = [oracle.token_statistic(sample, t, name) for t in range(50)]
    torch.testing.assert_close(value, torch.tensor(expected), rtol=100 * EPS, atol=8 * EPS)
