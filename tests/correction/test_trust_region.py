"""The binary-KL trust region as Miles and slime have it built in, by formula, against the preset of its name."""

import math
from dataclasses import replace

import torch
from batches import Batch, batches
from drive import assert_close, run, spread
from hypothesis import assume, given
from oracle import Sample
from tolerances import DECISION, normalized_rtol

from mis_plugins.config.loading import load, preset_path
from mis_plugins.config.writing import as_mapping

PRESET = as_mapping(load(preset_path("miles-binary-kl")))
THRESHOLD, LIMIT, LEAST = 5e-3, 30.0, 1e-6  # --tis-binary-kl-threshold, and the clamps of Miles's function


def mean_binary_kl(sample: Sample) -> float:
    """The mean over a sequence's loss tokens of KL(Bern(mu) || Bern(pi_old)), of clamped probabilities."""
    total = 0.0
    for t in sample.valid:
        p, q = (min(max(math.exp(x[t]), LEAST), 1 - LEAST) for x in (sample.behavior, sample.proximal))
        total += p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    return total / max(len(sample.valid), 1)


def within_our_clamp(batch: Batch) -> Batch:
    """The hosts' clamp of a log ratio is 30 and ours 20, so that log ratios stay below 20."""
    rows = zip(batch.proximal, batch.behavior, strict=True)
    near = [p.float().clamp(b.float() - 19.5, b.float() + 19.5).to(p.dtype) for p, b in rows]
    return replace(batch, proximal=near)


@given(batch=batches().map(within_our_clamp))
def test_the_preset_weighs_the_policy_loss_as_the_hosts_own_function(batch: Batch) -> None:
    """Each token by its whole ratio, and a sequence beyond the threshold by 0; the hosts' denominator stays."""
    samples = batch.samples
    assert all(abs(s.log_ratios[t]) < 20 for s in samples for t in s.valid)
    means = [mean_binary_kl(s) for s in samples]
    assume(all(abs(x - THRESHOLD) > DECISION for x in means))
    found = run(batch, PRESET)
    rtol = normalized_rtol(max(spread(s) for s in samples))
    for sample, mean, weights, mask in zip(samples, means, found.weights, found.masks, strict=True):
        applied = torch.where(mask.bool(), weights, 0).tolist()
        for t in sample.valid:
            log_ratio = min(max(sample.log_ratios[t], -LIMIT), LIMIT)
            expected = math.exp(log_ratio) if mean <= THRESHOLD else 0.0
            assert_close(applied[t], expected, rtol, 0.0, f"weight of token {t}")
