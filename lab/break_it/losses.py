"""Room `losses`: random configs of the loss hook on hostile micro-batches, against the float64 oracles of `tests/`.

The stand-in host scores real logits in float64, so that score centering, whose gradient is of the whole vocabulary, is
judged beside everything else: the gradient of every logit is compared.
"""

from __future__ import annotations

import dataclasses
import math
import random
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import center_oracle
import loss_oracle
import oracle
import pytest
import stand_ins
import torch
from batches import configs
from center_oracle import Position
from drive import one_rank
from hypothesis import strategies as st
from loss_oracle import Response, Spec
from test_loss_hook import Expected, Question, Step, flags, reducer
from tolerances import DECISION, FINITE_STEP, finite_difference_atol
from torch import Tensor

from lab.gpu.machine import moved
from mis_plugins import mis

DEVICE = torch.device("cpu")  # where the hook runs; the oracle stays on the CPU
VOCABULARY, PROMPT, TOP = 6, 2, 3
ABSENT = [math.nan, math.inf, -math.inf, -9999.0, -1e9]
HEAD = "rollout_topk_token_ids", "rollout_topk_log_probs"


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the loss hook: what the config says under `mis:`, flags of the host, and the micro-batch."""

    mis: dict[str, Any]
    spec: Spec
    kl: str | None
    entropy_coef: float
    seed: int
    lengths: tuple[int, ...]
    faults: tuple[tuple[str, int, float], ...]

    @property
    def question(self) -> Question:
        return Question(self.mis, self.spec, self.kl, self.entropy_coef)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    config = draw(st.builds(dict) | configs())
    config.pop("metrics", None)
    center = draw(st.integers(0, 3)) == 0
    spec, objective = draw(objectives(center, config.get("weight") is not None))
    config["objective"] = objective
    if draw(st.integers(0, 2)) == 0:
        config["m2_threshold"] = draw(st.sampled_from([1e-3, 0.02, 0.1, 0.5]))
        config.setdefault("weight", None)
    if draw(st.integers(0, 2)) == 0:
        config["opsm"] = {"delta": draw(st.sampled_from([0.0, 0.02, 0.1]))} | draw(
            st.sampled_from([{}, {"advantage": "sequence"}, {"reference": "proximal"}])
        )
    for key, choices in (("denominator", ("original", "kept")), ("on_all_rejected", ("skip", "keep", "raise"))):
        if draw(st.integers(0, 2)) == 0:
            config[key] = draw(st.sampled_from(choices))
    if center:
        config["center"] = {"top_k": TOP}
    config["metrics"] = draw(st.sampled_from(["none", "watch", "all", "full", "core"]))
    kl = draw(st.sampled_from([None, None, "k1", "k2", "k3", "low_var_kl"]))
    if kl:
        objective |= draw(st.fixed_dictionaries({"unbiased_kl": st.booleans(), "weigh_kl": st.booleans()}))
    lengths = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 4, 6]), min_size=1, max_size=4)))
    rows = ["old", "behavior", "advantages", "reference"]
    fault = st.tuples(st.sampled_from(rows), st.integers(0, 30), st.sampled_from(ABSENT))
    faults = tuple(draw(st.just([]) | st.lists(fault, max_size=2)))
    return Case(config, spec, kl, draw(st.sampled_from([0.0, 0.01])), draw(st.integers(0, 2**20)), lengths, faults)


@st.composite
def objectives(draw: st.DrawFn, center: bool, weighs: bool) -> tuple[Spec, dict[str, Any]]:
    if center:
        kl_tau = draw(st.sampled_from([0.0, 0.1]))
        return Spec("reinforce", kl_tau=kl_tau), {"old": "behavior", "surrogate": "reinforce", "kl_tau": kl_tau}
    name = draw(st.sampled_from("clip cispo dppo_tv dppo_kl ipo sapo vespo gmpo reinforce".split()))
    old = "behavior" if name == "reinforce" else draw(st.sampled_from(["proximal", "proximal", "behavior"]))
    if weighs and name != "reinforce":
        old = "proximal"
    ratio = draw(st.sampled_from(["token", "sequence"])) if name in ("clip", "cispo", "sapo") else "token"
    kl_tau = draw(st.sampled_from([0.0, 0.0, 0.1])) if ratio == "token" and name not in ("vespo", "gmpo") else 0.0
    own = {"sapo": {"taus": (1.0, 2.0)}, "vespo": {"gammas": (2.0, 3.0, 1.0, 2.0)}}.get(name, {})
    dual = draw(st.sampled_from([None, 1.3])) if name in ("clip", "dppo_tv", "dppo_kl", "ipo") else None
    spec = Spec(name, ratio, dual=dual, kl_tau=kl_tau, **own)
    return spec, {"surrogate": name, "old": old, "ratio": ratio} | spec.settings


@dataclasses.dataclass(frozen=True)
class Made:
    """The micro-batch of a case: the oracle's step, and the positions behind it."""

    step: Step
    positions: list[list[Position]]


def made(case: Case) -> Made:
    rng = random.Random(case.seed)
    responses, behavior, positions = [], [], []
    for length in case.lengths:
        rows, target, old, mu = [], [], [], []
        for _ in range(length):
            logits = [rng.gauss(0, 1.2) for _ in range(VOCABULARY)]
            engine = torch.tensor([x + rng.gauss(0, 0.4) for x in logits], dtype=torch.float64).softmax(0)
            q = engine.tolist()
            sampled = rng.randrange(VOCABULARY)
            head = sorted(range(VOCABULARY), key=lambda v: -q[v])[:TOP]
            rows.append(Position(logits, q, sampled, head if rng.random() < 0.9 else []))
            target.append(float(torch.tensor(logits, dtype=torch.float64).log_softmax(0)[sampled]))
            mu.append(math.log(q[sampled]))
            old.append(target[-1] + rng.choice([0.0, rng.gauss(0, 0.15)]))
        shared = rng.random() < 0.5
        advantages = [rng.gauss(0, 1)] * length if shared else [rng.gauss(0, 1) for _ in rows]
        mask = [rng.random() < 0.85 for _ in rows]
        reference = [p + rng.gauss(0, 0.3) for p in target]
        responses.append(Response(target, old, reference, advantages, [1.0] * length, mask))
        behavior.append(mu)
        positions.append(rows)
    for name, place, value in case.faults:
        lists = behavior if name == "behavior" else [getattr(x, name) for x in responses]
        where = [(row, t) for row in lists for t in range(len(row))]
        if where and not (name == "advantages" and math.isfinite(value)):
            row, t = where[place % len(where)]
            row[t] = value
    return Made(Step(responses, behavior), positions)


class Formula(Expected):
    """The oracle's loss of tokens of which the engine may have named no head."""

    def __init__(self, step: Step, question: Question, positions: list[list[Position]]):
        self.positions = positions
        super().__init__(step, question)

    def _factor(self, i: int) -> list[float]:
        return [f if one.head or "center" not in self.question.mis else 0.0
                for f, one in zip(self.factors[i], self.positions[i], strict=True)]  # fmt: skip

    @property
    def magnitude(self) -> float:
        return 2 * loss_oracle.magnitude(self.frozen) + loss_oracle.magnitude(
            [dataclasses.replace(x, factor=[1.0] * len(x.mask)) for x in self.frozen]
        )


def weigh_of(weight: dict[str, Any] | None) -> center_oracle.Weigh:
    if weight is None:
        return lambda ratio: 1.0
    low, high = oracle.lower_of(weight), oracle.upper_of(weight)
    return lambda ratio: center_oracle.WEIGHTS[weight["bound"]](ratio, low, high)


def centered(case: Case, made: Made, formula: Formula) -> list[list[Tensor]]:
    """The gradient of each position's logits that centering adds: -A f (g - w g_a), by the oracle."""
    weight = case.mis.get("weight")
    rules = {key: value for key, value in case.mis.items() if key != "weight"} | {"weight": None}
    masks = bool(oracle.drops(weight))
    kept = oracle.correct(formula.samples(), rules).keep if masks else formula.corrected.keep
    weigh = weigh_of(weight)
    corrects = case.mis.get("weight") or case.mis.get("reject") or case.mis.get("m2_threshold")
    found = []
    for i, x in enumerate(made.step.responses):
        stays, rows = formula.stays(i, x), []
        sample = formula.samples()[i]
        rules_of = [r for r in case.mis.get("reject", []) if "down_weigh" in r]
        for t, one in enumerate(made.positions[i]):
            g = torch.zeros(VOCABULARY, dtype=torch.float64)
            keep = (kept[i][t] if corrects else x.mask[t]) and x.mask[t]
            keep = (keep and stays[t]) or (formula.restored and x.mask[t])
            if keep and t in sample.usable and one.head:
                down = math.prod(r["down_weigh"] for r in rules_of if not oracle.passes(sample, t, r))
                factor = formula.scale[i] * down / formula.corrected.factor
                log_p = torch.tensor(one.logits, dtype=torch.float64).log_softmax(0)
                g_a = -log_p.exp()
                g_a[one.sampled] += 1
                w = weigh(math.exp(float(log_p[one.sampled]) - made.step.behavior[i][t]))
                g = -x.learned[t] * factor * (center_oracle.gradient(one, weigh) - w * g_a)
                g = g / max(1, len(x.valid))
            rows.append(g)
        found.append(rows)
    return found


def scores(logits: Tensor, *, unconcat_tokens: Sequence[Tensor], total_lengths: Sequence[int],
           response_lengths: Sequence[int], with_entropy: bool, **_: Any) -> dict[str, list[Tensor]]:  # fmt: skip
    """The stand-in host's helper: log-probs of whole sequences in one stream; their negated squares as entropy."""
    found, start = [], 0
    for tokens, total, response in zip(unconcat_tokens, total_lengths, response_lengths, strict=True):
        rows = logits[0, start + total - response - 1 : start + total - 1].log_softmax(-1)
        found.append(rows.gather(-1, tokens[total - response :, None])[:, 0])
        start += total
    return {"log_probs": found} | ({"entropy": [-(x * x) for x in found]} if with_entropy else {})


def handed(case: Case, made: Made) -> tuple[dict[str, Any], Tensor]:
    """The micro-batch as a host hands it over, and the logits."""
    batch = made.step.batch()
    batch["total_lengths"] = [PROMPT + n for n in case.lengths]
    batch["unconcat_tokens"] = [torch.tensor([0] * PROMPT + [one.sampled for one in rows]) for rows in made.positions]
    if "center" in case.mis:
        pad = lambda one, values, fill: (values + [fill] * TOP)[:TOP]  # noqa: E731
        ids = [[pad(one, list(one.head), -1) for one in rows] for rows in made.positions]
        log_q = [
            [pad(one, [math.log(one.engine[v]) for v in one.head], -math.inf) for one in rows]
            for rows in made.positions
        ]
        batch[HEAD[0]] = [torch.tensor(rows).reshape(-1, TOP) for rows in ids]
        batch[HEAD[1]] = [torch.tensor(rows, dtype=torch.float64).reshape(-1, TOP) for rows in log_q]
    idle = [[0.0] * VOCABULARY]
    stream = [row for rows in made.positions for row in idle * (PROMPT - 1) + [list(o.logits) for o in rows] + idle]
    return batch, torch.tensor([stream], dtype=torch.float64)


def call(case: Case, made: Made) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    batch, logits = moved([*handed(case, made)], DEVICE)
    logits.requires_grad_()
    args: Namespace = flags(mis=case.mis, rollout_temperature=1.0, **case.question.settings)
    loss, metrics = mis.policy_loss(args, batch, logits, reducer(batch, "miles"))
    (gradient,) = torch.autograd.grad(loss, logits)
    return loss.detach().cpu(), gradient[0].cpu(), metrics


def expected(case: Case, made: Made, formula: Formula) -> Tensor:
    slopes = loss_oracle.gradient(formula, made.step.responses, FINITE_STEP)
    rows = []
    extra = centered(case, made, formula) if "center" in case.mis else None
    for i, positions in enumerate(made.positions):
        rows += [torch.zeros(VOCABULARY, dtype=torch.float64)] * (PROMPT - 1)
        for t, one in enumerate(positions):
            row = -torch.tensor(one.logits, dtype=torch.float64).softmax(0)
            row[one.sampled] += 1
            row = row * slopes[i][t]
            rows.append(row if extra is None else row + extra[i][t])
        rows.append(torch.zeros(VOCABULARY, dtype=torch.float64))
    return torch.stack(rows)


def judge(case: Case) -> str:
    """`right`, or `unclear` where rounding decides; an AssertionError where the gradient is not the oracle's."""
    it = made(case)
    return compared(case, it, *call(case, it))


def compared(case: Case, it: Made, loss: Tensor, gradient: Tensor, metrics: dict[str, Tensor]) -> str:
    formula = Formula(it.step, case.question, it.positions)
    if formula.margin <= DECISION:  # rounding decides
        return "unclear"
    atol = 10 * formula.rtol * formula.magnitude + finite_difference_atol(formula.magnitude)
    wanted = expected(case, it, formula)
    worst = (gradient - wanted).abs().max()
    assert torch.isfinite(gradient).all() and torch.isfinite(loss), "not finite"
    assert worst <= atol, f"gradient off by {worst:.3g}, more than {atol:.3g}\n{gradient}\n{wanted}"
    bad = [name for name, value in metrics.items() if not torch.isfinite(value)]
    assert not bad, f"metrics not finite: {bad}"
    if "center" not in case.mis:
        assert abs(float(loss) - formula(it.step.responses)) <= atol, "loss"
    return "right" if wanted.abs().max() > 10 * atol else "idle"


def install(patched: pytest.MonkeyPatch) -> None:
    stand_ins.load({
        "miles.backends.training_utils.parallel": {"get_parallel_state": one_rank},
        "miles.backends.training_utils.loss_hub.logit_processors": {"get_log_probs_and_entropy": scores},
    }, patched)  # fmt: skip
