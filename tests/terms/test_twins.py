"""Every statistic and every bound against its float64 twin in the oracle; a record without a twin fails."""

import math
import random

import oracle
import pytest
import torch
from tolerances import EPS

from mis_plugins.config.terms.bounds import BOUNDS
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


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize(("lower", "upper"), [(0.5, 2.0), (0.0, 5.0), (0.9, 1.01)])
def test_bound(name: str, lower: float, upper: float) -> None:
    record, twin = BOUNDS[name], oracle.BOUNDS[name]
    floor, ceiling = lower if record.has_floor else 0.0, upper if record.has_ceiling else math.inf
    ratios = [*(random.Random(name).uniform(0, 7) for _ in range(50)), lower, upper, 0.0]
    weights = record.apply(torch.tensor(ratios), floor, ceiling).tolist()
    for ratio, weight in zip(ratios, weights, strict=True):
        if record.weighs_outside or lower <= ratio <= upper:
            assert weight == pytest.approx(twin.value(ratio, lower, upper), rel=8 * EPS), ratio
    if record.keeps_zero:
        assert twin.value(0.0, lower, upper) == 0


def test_every_record_has_its_twin() -> None:
    """The random batches draw from the records, and the oracle answers from the twins."""
    assert set(oracle.STATISTICS) == set(STATISTICS), "tests/support/oracle.py STATISTICS"
    assert set(oracle.BOUNDS) == set(BOUNDS), "tests/support/oracle.py BOUNDS"
    assert {name for name, record in STATISTICS.items() if record.factor} == oracle.LOGARITHMS
    for name, record in BOUNDS.items():
        twin = oracle.BOUNDS[name]
        assert (twin.drops, twin.zeroes) == (record.drops_token, record.zeroes), name
        assert (twin.has_floor, twin.has_ceiling) == (record.has_floor, record.has_ceiling), name
