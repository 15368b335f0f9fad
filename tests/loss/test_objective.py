"""Policy losses against a second implementation, finite differences and the identities that tie them together."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import loss_oracle
import pytest
import torch
import torch.distributed as dist
from drive import same_bytes
from loss_oracle import Response, Spec
from responses import LENGTHS, Held, Place, flat, over_four_ranks, ragged_of, split
from tolerances import EPS, FINITE_STEP, WRITTEN, finite_difference_atol, float64_atol
from torch import Tensor

from lab.break_it.formulas import slope_of_prime_rl
from mis_plugins.config.model import ObjectiveConfig
from mis_plugins.config.terms.surrogates import SURROGATES
from mis_plugins.errors import ConfigError
from mis_plugins.loss import further_terms
from mis_plugins.loss.objective import (
    ESTIMATORS,
    TERMS,
    Clip,
    PolicyTerm,
    cispo_surrogate,
    held_back,
    kl_term,
    moved_away,
    policy_term,
    target_log_ratio,
)

KINK = 1000 * FINITE_STEP  # so that a finite difference does not straddle one
KL_TYPES = tuple(ESTIMATORS)
EVERY_TERM = [*TERMS, *further_terms.TERMS]
UNCLIPPED = ("reinforce", "sapo", "vespo")  # surrogates that hold no token back


def random_responses(seed: int, lengths: Sequence[int] = (7, 1, 5, 0, 9, 4)) -> list[Response]:
    """Ragged, multi-turn, advantages of either sign and 0 within one sequence, one sequence fully masked."""
    rng = random.Random(seed)
    responses = []
    for i, n in enumerate(lengths):
        target = [rng.uniform(-3, -0.01) for _ in range(n)]
        shift, drift = [(0.0, 0.02), (0.4, 0.1), (-0.5, 0.3)][i % 3]
        old, reference = ([p + shift + rng.gauss(0, drift) for p in target] for _ in range(2))
        advantages = [(t % 4 != 2) * rng.gauss(0, 1) for t in range(n)]
        factor = [rng.choice([0.0, 1.0, rng.uniform(0, 2)]) for _ in range(n)]
        mask = [rng.random() < 0.8 and i != 5 for _ in range(n)]
        responses.append(Response(target, old, reference, advantages, factor, mask))
    return responses


def clear_responses(seed: int, spec: Spec) -> list[Response]:
    """The first from this seed on whose ratios keep clear of every kink."""
    candidates = (random_responses(seed + 1000 * i) for i in itertools.count())
    return next(x for x in candidates if loss_oracle.margin(x, spec) > KINK)


def objective(spec: Spec) -> ObjectiveConfig:
    return ObjectiveConfig(spec.surrogate, "behavior", spec.ratio, **spec.settings)  # type: ignore[arg-type]


def clip_of(spec: Spec) -> Clip:
    return Clip(spec.low, spec.high, spec.dual)


def term_of(batch: Sequence[Response], spec: Spec, target: Tensor | None = None, **fields: Tensor) -> PolicyTerm:
    rows = {name: flat(batch, name) for name in ("target", "old", "advantages", "factor")}
    if target is not None:
        rows["target"] = target
    return policy_term(**(rows | fields), ragged=ragged_of(batch), config=objective(spec), clip=clip_of(spec))


def learned(batch: Sequence[Response], spec: Spec, **fields: Tensor) -> tuple[PolicyTerm, Tensor]:
    """The term, and the gradient of its sum by the log-probs of the target policy."""
    target = flat(batch, "target").requires_grad_()
    term = term_of(batch, spec, target, **fields)
    return term, torch.autograd.grad(term.loss.sum(), target)[0]


def assert_rows_close(found: list[list[float]], expected: list[list[float]], atol: float) -> None:
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        for t, (x, y) in enumerate(zip(a, b, strict=True)):
            assert abs(x - y) <= atol, f"{i}:{t}: got {x!r}, expected {y!r}"


SPECS = [
    Spec(surrogate, ratio, low, high, dual)
    for surrogate, ratio in EVERY_TERM
    for low, high, dual in [(0.2, 0.28, None), (0.05, 0.05, 1.6), (1.0, 0.1, None)]
    if surrogate in ("clip", "dppo_tv", "dppo_kl", "ipo") or dual is None
] + [
    *(Spec("sapo", ratio, taus=(0.5, 3.0)) for ratio in ("token", "sequence")),
    Spec("vespo", gammas=(1.5, 0.25, 0.5, 1.0)),
    *(Spec(surrogate, kl_tau=0.3) for surrogate in ("clip", "reinforce", "dppo_tv", "ipo", "sapo")),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient(spec: Spec, seed: int):
    batch = clear_responses(seed, spec)
    term, gradient = learned(batch, spec)
    size = loss_oracle.magnitude(batch)
    sums = [math.fsum(row) for row in split(term.loss, batch)]
    expected = loss_oracle.policy_sums(batch, spec, batch)
    assert_rows_close([sums], [expected], float64_atol(size, term.loss.numel()))
    slopes = loss_oracle.gradient(
        lambda moved: math.fsum(loss_oracle.policy_sums(moved, spec, batch)), batch, FINITE_STEP
    )
    assert_rows_close(split(gradient, batch), slopes, finite_difference_atol(size))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_fraction_and_log_ratio(spec: Spec):
    batch = [x for seed in range(4) for x in clear_responses(seed, spec)]
    term = term_of(batch, spec)
    rows = zip(batch, split(term.clipped, batch), split(term.log_ratio, batch), strict=True)
    for x, clipped, log_ratio in rows:
        atol = float64_atol(sum(map(abs, x.log_ratios)), len(x.mask))
        for t in x.valid:
            assert bool(clipped[t]) == loss_oracle.held_back(x, t, spec)
            assert abs(log_ratio[t] - loss_oracle.unit_log_ratio(x, t, spec)) <= atol
    assert bool(term.clipped.any()) == (spec.surrogate not in UNCLIPPED)


def test_every_surrogate_has_its_terms() -> None:
    by_sequence = {name for name, record in SURROGATES.items() if not record.of_token and not record.of_sequence}
    by_sequence.remove("reinforce")  # a config that asks for it is refused
    named = {("token", name) for name in SURROGATES} | {("sequence", name) for name in by_sequence}
    assert {(ratio, name) for name, ratio in EVERY_TERM} == named


@pytest.mark.parametrize("terms", EVERY_TERM)
def test_only_the_target_learns(terms: tuple[str, str]):
    """Advantages and factor are constants, whoever hands them over; CISPO's ratio is one too."""
    batch = random_responses(3)
    rows = {name: flat(batch, name).requires_grad_() for name in ("target", "advantages", "factor")}
    term = term_of(batch, Spec(*terms), **rows)
    assert not term.log_ratio.requires_grad and not term.clipped.requires_grad
    target, advantages, factor = rows.values()
    found = torch.autograd.grad(term.loss.sum(), (target, advantages, factor), allow_unused=True)
    assert [gradient is None for gradient in found] == [False, True, True]
    ratio = torch.ones(2, requires_grad=True)
    assert not cispo_surrogate(ratio, torch.ones(2), torch.ones(2), Clip(0.2, 0.28)).requires_grad


@pytest.mark.parametrize("terms", EVERY_TERM)
def test_a_ratio_on_its_bound_is_inside(terms: tuple[str, str]):
    """Equal policies are not clipped, however narrow the range."""
    batch = random_responses(3)
    target, ragged = flat(batch, "target"), ragged_of(batch)
    rows = {"advantages": flat(batch, "advantages"), "factor": flat(batch, "factor")}
    config = objective(Spec(*terms))
    term = policy_term(target, target.clone(), **rows, ragged=ragged, config=config, clip=Clip(0.0, 0.0))
    assert not term.clipped.any()


def test_without_an_advantage_nothing_is_held_back():
    """The clip takes a gradient only where A has one."""
    ratio = torch.tensor([0.1, 9.0])
    for advantage, expected in ((0.0, [0, 0]), (1.0, [0, 1]), (-1.0, [1, 0])):
        assert held_back(ratio, torch.full((2,), advantage), Clip(0.2, 0.28)).tolist() == expected


def test_dppo_masks_what_leaves_the_trust_region_and_not_its_edge():
    moved, advantages = torch.tensor([0.25, -0.25, 0.5, -0.5]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert moved_away(moved.abs(), moved, advantages, Clip(0.25, 0.25)).tolist() == [False, False, True, True]


@pytest.mark.parametrize("kind", KL_TYPES)
@pytest.mark.parametrize("unbiased", [False, True])
def test_kl(kind: str, unbiased: bool):
    batch = random_responses(11)
    rows = {name: flat(batch, name) for name in ("old", "reference", "factor")}
    ragged = ragged_of(batch)

    def summed(target: Tensor) -> Tensor:
        log_ratio = target_log_ratio(target, rows["old"], ragged.loss_mask)[0] if unbiased else None
        kl = kl_term(target, rows["reference"], ragged.loss_mask, kind, log_ratio)  # type: ignore[arg-type]
        return (kl * rows["factor"]).sum()

    target, size = flat(batch, "target").requires_grad_(), loss_oracle.magnitude(batch)
    value = math.fsum(loss_oracle.kl_sums(batch, kind, unbiased))
    assert abs(summed(target).item() - value) <= float64_atol(size, target.numel())
    assert torch.autograd.gradcheck(summed, (target,), eps=FINITE_STEP, atol=finite_difference_atol(size), rtol=0.0)


def test_low_var_kl_is_bounded():
    far = torch.tensor([-40.0, -0.5, 30.0])
    kl = kl_term(torch.full((3,), -1.0), far, torch.ones(3, dtype=torch.bool), "low_var_kl")
    assert kl.tolist()[0] <= 10 and kl.tolist()[2] == 10.0


def test_a_far_reference_still_pulls():
    """log pi_theta - log pi_ref of 30: k3 is 29, its slope 1, as the hosts'. Of -30 theirs overflows, ours rests."""
    target = torch.tensor([-1.0, -31.0], requires_grad=True)
    kl = kl_term(target, torch.tensor([-31.0, -1.0]), torch.ones(2, dtype=torch.bool), "k3")
    kl.sum().backward()
    assert kl.tolist() == pytest.approx([29.0, math.exp(20.0) - 21], rel=WRITTEN)
    assert target.grad is not None and target.grad.tolist() == [1.0, 0.0]


def test_unbiased_kl_is_the_kl():
    """Over all that `old` can sample, the weighted k3 and its gradient are KL(pi_theta, pi_ref)'s."""
    torch.manual_seed(0)
    logits, old, reference = (torch.randn(9, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    log_pi = logits.log_softmax(-1)
    old, reference = old.log_softmax(-1), reference.log_softmax(-1)
    mask = torch.ones(9, dtype=torch.bool)
    exact = (log_pi.exp() * (log_pi - reference)).sum()
    log_ratio = target_log_ratio(log_pi, old, mask)[0]
    weighted = (old.exp() * kl_term(log_pi, reference, mask, "k3", log_ratio)).sum()
    plain = (old.exp() * kl_term(log_pi, reference, mask, "k3")).sum()
    atol = float64_atol(float(old.abs().sum() + reference.abs().sum()), 9)
    assert abs(weighted.item() - exact.item()) <= atol
    slopes = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (exact, weighted, plain)]
    assert (slopes[1] - slopes[0]).abs().max() <= atol
    assert (slopes[2] - slopes[0]).abs().max() > 1e3 * atol


# ------------------------------------------------------------------------------------------------------ identities


@pytest.mark.parametrize("surrogate", ["dppo_tv", "ipo"])
def test_prime_rls_losses_by_formula(surrogate: str):
    """-A r + tau (log r)^2, the first 0 where the probability moved too far: the gradient, of tokens of every kind.

    prime-rl (559b447, trainer/rl/loss.py) is on no index. Its default masks by the direction of A, its IPO by the
    distance alone; both leave the penalty on masked tokens, and neither caps the ratio.
    """
    spec = Spec(surrogate, low=0.1, high=0.15, dual=1e4, kl_tau=0.02)
    batch = [replace(x, factor=[1.0] * len(x.factor)) for x in clear_responses(4, spec)]
    slopes = [
        [
            slope_of_prime_rl(target, old, advantage, spec.surrogate, spec.low, spec.high, spec.kl_tau) * valid
            for target, old, advantage, valid in zip(x.target, x.old, x.advantages, x.mask, strict=True)
        ]
        for x in batch
    ]
    term, gradient = learned(batch, spec)
    assert_rows_close(split(gradient, batch), slopes, float64_atol(loss_oracle.magnitude(batch), 1))
    masked = [t for t, held in enumerate(term.clipped.tolist()) if held]
    assert masked and all(gradient[t] != 0 for t in masked)


def test_dual_clip_at_or_below_one_is_refused():
    with pytest.raises(ConfigError, match=r"dual: got 1; a dual clip lies above 1"):
        Clip(0.2, 0.2, 1.0)


# ------------------------------------------------------------------------------------------ what is not a number


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nothing_under_the_mask_counts(spec: Spec, value: float):
    batch = clear_responses(2, spec)
    hidden = ~flat(batch, "mask", torch.bool)
    answers = []
    for poison in (False, True):
        rows = {name: flat(batch, name) for name in ("target", "old", "advantages", "factor")}
        rows = {name: x.masked_fill(hidden, value) if poison else x for name, x in rows.items()}
        target = rows.pop("target").requires_grad_()
        term = term_of(batch, spec, target, **rows)
        answers.append((term.loss.detach(), *torch.autograd.grad(term.loss.sum(), target)))
    assert all(map(same_bytes, *answers))
    assert not answers[0][1][hidden].any()


@pytest.mark.parametrize("surrogate, ratio", EVERY_TERM)
def test_an_unknown_ratio_drops_what_it_enters(surrogate: str, ratio: str):
    """Its token; where the ratio is a sequence's, the sequence. Everything else is as it was."""
    spec = Spec(surrogate, ratio)
    batch = clear_responses(6, spec)
    broken = batch[0].valid[1]
    old = flat(batch, "old")
    old[broken] = math.nan
    term, gradient = learned(batch, spec, old=old)
    mask = list(batch[0].mask)
    mask = [False] * len(mask) if spec.of_sequence else [m and t != broken for t, m in enumerate(mask)]
    expected, expected_gradient = learned([replace(batch[0], mask=mask), *batch[1:]], spec)
    assert torch.equal(term.loss, expected.loss) and torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_log_probs_are_widened_before_they_are_subtracted(dtype: torch.dtype):
    batch = random_responses(8)
    rows = {name: flat(batch, name, dtype) for name in ("target", "old", "advantages", "factor")}
    term = term_of(batch, Spec(), **rows)
    exact = term_of(batch, Spec(), **{name: x.double() for name, x in rows.items()})
    assert term.loss.dtype == torch.float32
    assert (term.loss - exact.loss).abs().max() <= 4 * EPS * loss_oracle.magnitude(batch)


# -------------------------------------------------------------------------------------------------- several ranks


def test_objectives_of_a_sequence_over_ranks_have_the_gradient_of_one(tmp_path: Path):
    """Surrogates of a whole sequence give on four ranks what they give in one process, which the oracle judges.

    Weights and advantages differ within a sequence.
    """
    batch = random_responses(21, LENGTHS)
    specs = [Spec(ratio="sequence"), Spec("sapo", "sequence"), Spec("vespo"), Spec("gmpo")]

    def work(held: Held, place: Place) -> list[Tensor]:
        found, rows = [], {name: held(name) for name in ("old", "advantages", "factor")}
        ragged = place(dist.group.WORLD)
        for spec in specs:
            target = held("target").requires_grad_()
            loss = policy_term(target, **rows, ragged=ragged, config=objective(spec), clip=clip_of(spec)).loss
            found += [loss, *torch.autograd.grad(loss.sum(), target)]
        return found

    found = over_four_ranks(batch, work, tmp_path)
    atol = float64_atol(loss_oracle.magnitude(batch), sum(LENGTHS))
    for spec, losses, slopes in zip(specs, found[::2], found[1::2], strict=True):
        term, gradient = learned(batch, spec)
        assert_rows_close([list(map(math.fsum, losses))], [list(map(math.fsum, split(term.loss, batch)))], atol)
        assert_rows_close(slopes, split(gradient, batch), atol)
