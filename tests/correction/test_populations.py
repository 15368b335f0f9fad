"""Rules that read different populations of tokens, and the kept denominator of a sequence that keeps no token."""

import oracle
import torch
from batches import ratio_batch
from drive import assert_matches_oracle, run

from mis_plugins.correction.pipeline import denominator_scale

CONFIG = {
    "weight": None,
    "reject": [
        {"over": "token", "upper": 3.0},
        {"over": "max", "upper": 5.0},
        {"over": "mean", "lower": 0.8, "aggregate": "kept"},
    ],
}


def test_a_sequence_stays_where_the_rules_of_every_population_keep_it() -> None:
    """The first passes neither kind of rule, the second and third one each; the last passes both."""
    batch = ratio_batch([[6.0, 0.5], [6.0, 1.0], [1.0, 0.5], [3.5, 1.0]])
    outcome = run(batch, CONFIG)
    assert_matches_oracle(outcome, batch, oracle.correct(batch.samples, CONFIG))
    assert [mask.tolist() for mask in outcome.masks] == [[0, 0], [0, 0], [0, 0], [0, 1]]


def test_no_token_kept_has_no_scale() -> None:
    found = denominator_scale(torch.tensor([4.0, 4.0, 0.0]), torch.tensor([2.0, 0.0, 0.0]))
    assert found.tolist() == [2, 0, 0]
