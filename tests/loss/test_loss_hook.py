"""The loss hook as Miles, slime and the embedded host call it: composition, flags, metrics, and what it refuses.

The hosts are stood in for by modules of their names whose helper takes log-probs for logits; lab/host_parity.py
asks the real ones.
"""

import dataclasses
import itertools
import math
import random
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import loss_oracle
import numpy as np
import oracle
import pytest
import stand_ins
import step_oracle
import torch
import torch.distributed as dist
from drive import one_rank, same_bytes, spread, sum_of_sample_mean
from launch import run_ranks, told
from loss_oracle import Response, Spec
from tolerances import DECISION, EPS, FINITE_STEP, finite_difference_atol, normalized_rtol, sum_rtol
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from lab import tallies
from lab.host.train import log_probs
from lab.host.train.batch import Layout, pack
from lab.host.train.loss import MicroBatch, Reducer, host_batch
from mis_plugins import mis
from mis_plugins.config import reading
from mis_plugins.correction.pipeline import correct
from mis_plugins.errors import ConfigError, InputError, MisError
from mis_plugins.hosts import loss_batch, loss_hook, tracking
from mis_plugins.hosts.registry import current
from mis_plugins.loss import micro_batch as loss
from mis_plugins.metrics import sketch
from mis_plugins.metrics.quantity import QUANTILES

CLIP = {"eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": None}
KL: dict[str, Any] = {"use_kl_loss": True, "kl_loss_type": "k3", "kl_loss_coef": 0.3}
LENGTHS = (7, 1, 5, 9, 4, 6)
ROWS = {"advantages": "advantages", "log_probs": "old", "rollout_log_probs": "behavior", "ref_log_probs": "reference"}
"""Columns of a host's batch, each with the name of the row in a step."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A micro-batch: `old` of each response is the proximal policy; the behavior policy's log-probs beside it."""

    responses: list[Response]
    behavior: list[list[float]]

    def each(self, change: Callable[[Response], dict[str, Any]], first: int = 0) -> "Step":
        """The step with other fields in every response from number `first` on."""
        changed = [dataclasses.replace(x, **change(x)) for x in self.responses[first:]]
        return dataclasses.replace(self, responses=[*self.responses[:first], *changed])

    def rows(self, name: str) -> list[Tensor]:
        values = self.behavior if name == "behavior" else [getattr(x, name) for x in self.responses]
        dtype = torch.int32 if name == "mask" else torch.float64
        return [torch.tensor(row, dtype=dtype) for row in values]

    def batch(self) -> dict[str, Any]:
        lengths = [len(x.mask) for x in self.responses]
        return {
            "unconcat_tokens": [torch.zeros(n + 3, dtype=torch.int64) for n in lengths],
            "total_lengths": [n + 3 for n in lengths], "response_lengths": lengths,
            "loss_masks": self.rows("mask"), "max_seq_lens": None,
            **{name: self.rows(row) for name, row in ROWS.items()},
        }  # fmt: skip


def random_step(seed: int, lengths: Sequence[int] = LENGTHS) -> Step:
    rng = random.Random(seed)
    responses, behavior = [], []
    for i, n in enumerate(lengths):
        target = [rng.uniform(-3, -0.1) for _ in range(n)]
        near = lambda p, scale, shift=0.0: p + rng.gauss(shift, scale)  # noqa: E731
        old = [near(p, 0.15, rng.choice([-0.3, 0.0, 0.3])) for p in target]
        behavior.append([near(p, 0.3, rng.choice([-0.2, 0.0, 0.2])) for p in old])
        advantages = [rng.choice([-1.0, 1.0]) * rng.uniform(0.2, 2)] * n if i % 2 else [rng.gauss(0, 1) for _ in old]
        mask = [rng.random() < 0.85 and i != 5 for _ in range(n)]
        reference = [near(p, 0.3) for p in target]
        responses.append(Response(target, old, reference, advantages, [1.0] * n, mask))
    return Step(responses, behavior)


# ------------------------------------------------------------------------------------------------ stood-in hosts


def host_helper(logits: Tensor, *, response_lengths: Sequence[int], with_entropy: bool, **_: Any) -> dict:
    """`log_probs` are the logits themselves, the entropy their negated square."""
    found = {"log_probs": list(logits.split(list(response_lengths)))}
    return found | ({"entropy": [-(x * x) for x in found["log_probs"]]} if with_entropy else {})


@pytest.fixture(autouse=True)
def hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of the hosts' names, with what the loss asks of them."""
    modules = {
        "miles.backends.training_utils.parallel": {"get_parallel_state": one_rank},
        "miles.backends.training_utils.loss_hub.logit_processors": {"get_log_probs_and_entropy": host_helper},
        "slime.backends.megatron_utils.loss": {
            "get_log_probs_and_entropy": lambda *args, **kwargs: (torch.empty(0), host_helper(*args, **kwargs)),
            "get_rollout_top_p_logprob_kwargs": lambda args, batch: {},
        },
    }  # fmt: skip
    stand_ins.load(modules, monkeypatch)


def reducer(batch: dict[str, Any], host: str, per_token: bool = False) -> Callable[[Tensor], Tensor]:
    """A host's reducer of a micro-batch, whose module tells the hook which host runs."""

    def reduce(x: Tensor) -> Tensor:
        return sum_of_sample_mean(x, batch["loss_masks"], per_token)

    reduce.__module__ = f"{host}.backends.cp_utils"
    return reduce


def flags(**settings: Any) -> Namespace:
    return Namespace(
        **CLIP
        | {"use_tis": False, "qkv_format": "thd", "advantage_estimator": "grpo", "use_rollout_logprobs": False,
           "skip_actor_forward_only": False, "use_unbiased_kl": False, "use_kl_loss": False, "use_opsm": False,
           "entropy_coef": 0.0, "observe_training_entropy": False, "calculate_per_token_loss": False,
           "custom_pg_loss_reducer_function_path": None}
        | settings
    )  # fmt: skip


@dataclasses.dataclass
class Outcome:
    loss: Tensor
    gradient: Tensor
    metrics: dict[str, Tensor]


def call(
    step: Step,
    mis_config: dict | None = None,
    host: str = "miles",
    without: Sequence[str] = (),
    carried: dict[str, Any] | None = None,
    **settings: Any,
) -> Outcome:
    """The hook's answer to a step; `carried` is what its batch holds besides, or in place of the step's own."""
    args = flags(**settings) if mis_config is None else flags(mis=mis_config, **settings)
    batch = {name: value for name, value in step.batch().items() if name not in without}
    return drive(args, batch | (carried or {}), torch.cat(step.rows("target")), host)


def drive(args: Namespace, batch: dict[str, Any], logits: Tensor, host: str = "miles") -> Outcome:
    logits = logits.clone().requires_grad_()
    reduce = reducer(batch, host, args.calculate_per_token_loss)
    loss, metrics = mis.policy_loss(args, batch, logits, reduce)
    (gradient,) = torch.autograd.grad(loss, logits)
    return Outcome(loss.detach(), gradient, metrics)


# -------------------------------------------------------------------------------------------------- composition


@dataclasses.dataclass(frozen=True)
class Question:
    """A config, and the flags beside it."""

    mis: dict
    spec: Spec = Spec()
    kl: str | None = None
    entropy_coef: float = 0.0

    @property
    def objective(self) -> dict:
        return self.mis.get("objective", {})

    @property
    def bypass(self) -> bool:
        return self.objective.get("old") == "behavior"

    @property
    def settings(self) -> dict[str, Any]:
        kl = {} if self.kl is None else KL | {"kl_loss_type": self.kl}
        return kl | {"entropy_coef": self.entropy_coef, "eps_clip_c": self.spec.dual}


def both(first: Sequence[bool], second: Sequence[bool]) -> list[bool]:
    return [a and b for a, b in zip(first, second, strict=True)]


class Expected:
    """The loss of a step as a function of the target's log-probs, what is constant in it being taken from the step.

    Log-probs that are no numbers, M2PO and `on_all_rejected` have their part in it.
    """

    def __init__(self, step: Step, question: Question):
        self.question, self.step = question, step
        samples = self.samples()
        self.corrected = oracle.correct(samples, self.correction)
        self.rtol = normalized_rtol(max(map(spread, samples)))
        self._weigh()
        self.frozen = [self._response(i, x) for i, x in enumerate(step.responses)]

    @property
    def correction(self) -> dict:
        """The config as the oracle reads it."""
        return self.question.mis

    def samples(self) -> list[oracle.Sample]:
        rows = zip(self.step.responses, self.step.behavior, strict=True)
        bypass = self.question.bypass
        return [oracle.Sample(x.target if bypass else x.old, b, [bool(m) for m in x.mask]) for x, b in rows]

    def _weigh(self) -> None:
        """Find each token's factor of the surrogate, and its share of entropy and KL."""
        config, made, responses = self.correction, self.corrected, self.step.responses
        corrects = config.get("weight") or config.get("reject") or config.get("m2_threshold")
        valid = [[bool(m) for m in x.mask] for x in responses]
        weights = made.weights if corrects else [[1.0] * len(row) for row in valid]
        keep = list(map(both, made.keep, valid)) if corrects else valid
        left = [both(row, self.stays(i, x)) for i, (row, x) in enumerate(zip(keep, responses, strict=True))]
        weighed = any(k and w > 0 for rows in zip(left, weights, strict=True) for k, w in zip(*rows, strict=True))
        self.restored = "opsm" in config and config.get("on_all_rejected") == "keep" and not weighed
        scale = made.scale if corrects else [1.0] * len(valid)
        rest, kept = scale, keep
        if config.get("denominator") == "kept" and "opsm" in config:
            scale = [len(x.valid) / n if (n := sum(row)) else 0.0 for x, row in zip(responses, left, strict=True)]
        if self.restored:
            left, kept, scale, rest = valid, valid, [1.0] * len(valid), [1.0] * len(valid)
        self.scale, self.share = scale, [[r * k for k in row] for r, row in zip(rest, kept, strict=True)]
        self.factors = [
            [w * s if k else 0.0 for w, k in zip(ws, ks, strict=True)]
            for ws, ks, s in zip(weights, left, scale, strict=True)
        ]

    def stays(self, i: int, x: Response) -> list[bool]:
        """What OPSM keeps."""
        opsm = self.correction.get("opsm")
        if not opsm:
            return [True] * len(x.mask)
        reference = x.old if opsm.get("reference") == "proximal" else self.step.behavior[i]
        policy = [r if oracle.is_log_prob(r) else math.nan for r in reference]
        return loss_oracle.opsm_keep(x, policy, opsm["delta"], opsm.get("advantage") == "sequence")

    def old(self, i: int, x: Response) -> loss_oracle.Row:
        return self.step.behavior[i] if self.question.bypass else x.old

    def _response(self, i: int, x: Response) -> Response:
        """The response as the formula takes it, where a log-prob that is no number is the target's, and weighs 0."""
        old = self.old(i, x)
        usable = [oracle.is_log_prob(o) for o in old]
        if self.question.spec.of_sequence and not all(usable[t] for t in x.valid):
            usable = [False] * len(usable)
        factor = [f if k else 0.0 for f, k in zip(self._factor(i), usable, strict=True)]
        filled, reference = (
            [p if oracle.is_log_prob(p) else x.target[t] for t, p in enumerate(row)] for row in (old, x.reference)
        )
        return dataclasses.replace(x, old=filled, factor=factor, reference=reference)

    def _factor(self, i: int) -> list[float]:
        return self.factors[i]

    def __call__(self, responses: Sequence[Response]) -> float:
        moved = [dataclasses.replace(f, target=x.target) for f, x in zip(self.frozen, responses, strict=True)]
        policy = loss_oracle.policy_sums(moved, self.question.spec, self.frozen)
        rest = [math.fsum(self._rest(i, x, t) for t in x.valid) for i, x in enumerate(moved)]
        return math.fsum((p + r) / max(1, len(x.valid)) for p, r, x in zip(policy, rest, moved, strict=True))

    def _rest(self, i: int, x: Response, t: int) -> float:
        question, given, share, total = self.question, self.step.responses[i], self.share[i][t], 0.0
        if question.entropy_coef:
            total -= question.entropy_coef * share * -(x.target[t] ** 2)
        unbiased = bool(question.objective.get("unbiased_kl"))
        has_ratio = oracle.is_log_prob(self.old(i, given)[t])
        if question.kl and (has_ratio or not unbiased) and oracle.is_log_prob(given.reference[t]):
            kl = loss_oracle.kl(x, t, question.kl, unbiased)
            total += 0.3 * kl * (self._factor(i)[t] if question.objective.get("weigh_kl") else share)
        return total

    @property
    def decides(self) -> bool:
        """Whether rules and OPSM each drop something and not everything; OPSM by token a part of a sequence."""
        kept = [sum(row) for row in self.corrected.keep]
        learned = [sum(map(bool, x.factor)) for x in self.frozen]
        valid = [len(x.valid) for x in self.frozen]
        opsm, by_rule = self.question.mis.get("opsm"), "reject" in self.question.mis
        if opsm and not any(a < b and (a or opsm.get("advantage")) for a, b in zip(learned, kept, strict=True)):
            return False
        return sum(learned) > 0 and (not by_rule or sum(kept) < sum(valid))

    @property
    def margin(self) -> float:
        """From every bound and kink: of the correction, of the clip, of OPSM."""
        gaps = [self.corrected.margin, loss_oracle.margin(self.frozen, self.question.spec)]
        opsm = self.question.mis.get("opsm")
        for x, b in zip(self.step.responses, self.step.behavior, strict=True):
            if opsm and x.valid:
                rows = [[r[t] - x.target[t] for t in x.valid] for r in (b, x.old)]
                means = [math.fsum(row) / len(row) for row in rows if all(map(math.isfinite, row))]
                gaps += [abs(mean - opsm["delta"]) for mean in means]
        return min(gaps)

    @property
    def magnitude(self) -> float:
        return loss_oracle.magnitude(self.frozen) + loss_oracle.magnitude(self.step.responses)


TIS = {"weight": {"level": "token", "bound": "truncate", "upper": 1.3}}
KEPT = {"weight": {"level": "geometric", "bound": "clip", "upper": 1.1, "lower": 0.9}, "denominator": "kept",
        "reject": [{"over": "token", "lower": 0.7, "upper": 1.5},
                   {"over": "mean", "lower": 0.8, "upper": 1.3}]}  # fmt: skip
NORMALIZED = {"weight": {"level": "sequence", "bound": "mask", "upper": 2.5,
                         "normalize": {"scope": "micro_batch", "over": "kept"}}}  # fmt: skip
RULES = {"weight": None, "reject": [{"over": "mean", "lower": 0.8, "upper": 1.3}]}
CORRECTIONS = [{}, {"denominator": "kept"}, TIS, KEPT, NORMALIZED, RULES]
OPSM = [{}, {"opsm": {"delta": 0.05}}, {"opsm": {"delta": 0.05, "advantage": "sequence", "reference": "proximal"}}]
OBJECTIVES = [
    ({}, Spec()),
    ({}, Spec(dual=1.2)),
    ({"ratio": "sequence"}, Spec(ratio="sequence", dual=1.2)),
    ({"surrogate": "cispo"}, Spec("cispo")),
    ({"surrogate": "cispo", "ratio": "sequence"}, Spec("cispo", "sequence")),
    ({"old": "behavior"}, Spec(dual=1.3)),
    ({"old": "behavior", "ratio": "sequence"}, Spec(ratio="sequence")),
    ({"old": "behavior", "surrogate": "reinforce"}, Spec("reinforce")),
    ({"old": "behavior", "surrogate": "dppo_tv"}, Spec("dppo_tv")),
    ({"surrogate": "dppo_kl"}, Spec("dppo_kl", dual=1.3)),
    ({"surrogate": "dppo_tv", "kl_tau": 0.1}, Spec("dppo_tv", kl_tau=0.1)),
    ({"old": "behavior", "surrogate": "ipo", "kl_tau": 0.1}, Spec("ipo", kl_tau=0.1)),
    ({"surrogate": "sapo", "tau_neg": 2.0}, Spec("sapo", taus=(1.0, 2.0))),
    ({"old": "behavior", "surrogate": "sapo", "ratio": "sequence"}, Spec("sapo", "sequence")),
    ({"surrogate": "vespo", "k_neg": 1.0}, Spec("vespo", gammas=(2.0, 3.0, 1.0, 2.0))),
    ({"old": "behavior", "surrogate": "gmpo"}, Spec("gmpo")),
    ({"surrogate": "gmpo"}, Spec("gmpo")),
]


def every_two(*axes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """A third of the product of three axes, in which every two values of different axes meet; one axis has three."""
    places = itertools.product(*(range(len(axis)) for axis in axes))
    return (tuple(axis[i] for axis, i in zip(axes, place, strict=True)) for place in places if not sum(place) % 3)


def questions() -> Iterator[Question]:
    """Every two of a correction, an OPSM and an objective; KL and entropy in turn."""
    turn = itertools.cycle(itertools.product((None, "k1", "k2", "k3", "low_var_kl"), (False, True), (False, True)))
    for correction, opsm, (objective, spec) in every_two(CORRECTIONS, OPSM, OBJECTIVES):
        if objective.get("old") == "behavior" and spec.surrogate != "reinforce" and correction.get("weight"):
            continue  # refused: the ratio would count twice
        if correction == {"denominator": "kept"} and not opsm:
            continue  # refused: nothing is rejected
        kl, unbiased, weigh = next(turn)
        extra = {"unbiased_kl": unbiased, "weigh_kl": weigh} if kl else {}
        config = {**correction, **opsm, "objective": objective | extra, "metrics": "none"}
        yield Question(config, spec, kl, 0.01 if unbiased else 0.0)


def assert_loss_and_gradient(found: Outcome, expected: Expected) -> None:
    """The loss is the formula's, and its gradient the formula's finite differences, not all of them near 0."""
    atol = expected.rtol * expected.magnitude
    assert abs(found.loss.item() - expected(expected.step.responses)) <= atol
    slopes = loss_oracle.gradient(expected, expected.step.responses, FINITE_STEP)
    atol += finite_difference_atol(expected.magnitude)
    flat = [slope for row in slopes for slope in row]
    for found_slope, slope in zip(found.gradient.tolist(), flat, strict=True):
        assert abs(found_slope - slope) <= atol
    assert any(abs(slope) > 10 * atol for slope in flat)


def answered(question: Question, change: Callable[[Step], Step] = lambda step: step) -> tuple[Expected, Outcome]:
    """What is expected of the first step that decides clearly, and the hook's answer to it."""
    candidates = (Expected(change(random_step(seed)), question) for seed in itertools.count())
    expected = next(e for e in candidates if e.margin > DECISION and e.decides)
    return expected, call(expected.step, question.mis, **question.settings)


@pytest.mark.parametrize("question", list(questions()), ids=str)
def test_composition(question: Question):
    """Loss and gradient are those of the formulas, whatever is combined with whatever."""
    expected, found = answered(question)
    assert_loss_and_gradient(found, expected)


@pytest.mark.parametrize("unbiased", [True, False])
def test_a_kl_times_a_ratio_that_is_not_known_is_left_out(unbiased: bool):
    """`unbiased_kl` multiplies by pi_theta / old: without log old the KL term is 0, and not the term itself."""
    step = random_step(1)
    cast(list[float], step.responses[0].old)[t := step.responses[0].valid[0]] = math.nan
    k2: dict[str, Any] = KL | {"kl_loss_type": "k2"}
    found = call(step, {"objective": {"unbiased_kl": unbiased}}, **k2)
    assert (found.gradient[t] == 0) == unbiased and found.gradient.isfinite().all()


# --------------------------------------------------------------------------------------------- flags of the host


def assert_same(first: Outcome, second: Outcome) -> None:
    assert same_bytes(first.loss, second.loss) and same_bytes(first.gradient, second.gradient)


@pytest.mark.parametrize(
    "settings, objective",
    [
        ({"advantage_estimator": "gspo"}, {"ratio": "sequence"}),
        ({"advantage_estimator": "cispo"}, {"surrogate": "cispo"}),
        ({"use_rollout_logprobs": True}, {"old": "behavior"}),
        ({"use_unbiased_kl": True, **KL}, {"unbiased_kl": True}),
    ],
)  # fmt: skip
def test_flags_and_objective_say_the_same(settings: dict, objective: dict):
    """The host's flag alone, `mis.objective` alone, and both agree; and they change something."""
    step = random_step(1)
    flag, field = next(iter(settings.items()))
    rest = {name: value for name, value in settings.items() if name != flag}
    by_flag = call(step, None, **settings)
    assert_same(by_flag, call(step, {"objective": objective}, **rest))
    assert_same(by_flag, call(step, {"objective": objective}, **settings))
    plain = call(step, None, **rest)
    assert not torch.equal(by_flag.gradient, plain.gradient), field


BYPASS: dict[str, Any] = {"use_rollout_logprobs": True}
OPSM_BY_FLAG: dict[str, Any] = {"use_opsm": True, "opsm_delta": 0.02}
OPSM_BY_KEY = [{"opsm": {"delta": 0.02, "reference": policy}} for policy in ("proximal", "behavior")]
NUMBERS, TEXTS = (KL | dict.fromkeys(("entropy_coef", "kl_loss_coef"), x) for x in (0.01, "1e-2"))
# Two configs, each with the arguments beside it.
SAME: dict[str, tuple[tuple[dict, dict[str, Any]], tuple[dict, dict[str, Any]]]] = {
    "OPSM by the host's flag is against the proximal policy": (({}, OPSM_BY_FLAG), (OPSM_BY_KEY[0], {})),
    "and against the behavior policy in bypass": (({}, OPSM_BY_FLAG | BYPASS), (OPSM_BY_KEY[1], BYPASS)),
    "bypass asks for no log-probs of the proximal policy": (({}, BYPASS | {"without": ["log_probs"]}), ({}, BYPASS)),
    "nothing compares with rollout log-probs": (({}, {"without": ["rollout_log_probs"]}), ({}, {})),
    "our reducer may stand where nothing is dropped": (
        (TIS, {"custom_pg_loss_reducer_function_path": "mis_plugins.mis.kept_token_mean"}), (TIS, {})),
    "YAML reads 1e-2 as text, and a host hands the keys of a file on": (({}, TEXTS), ({}, NUMBERS)),
}  # fmt: skip


@pytest.mark.parametrize("why", SAME)
def test_loss_and_gradient_are_the_same(why: str):
    step = random_step(0)
    first, second = (call(step, config, **given) for config, given in SAME[why])
    assert_same(first, second)
    assert "OPSM" not in why or first.metrics["opsm_clipfrac"] > 0
    assert "rollout" not in why or not any(name.startswith(("mis_", "train_rollout")) for name in first.metrics)


def of(**objective: Any) -> dict:
    return {"objective": objective}


@pytest.mark.parametrize(
    "config, settings, message",
    [
        (of(ratio="token"), {"advantage_estimator": "gspo"},
         r"mis\.objective\.ratio: token contradicts --advantage-estimator gspo, which means ratio: sequence"),
        (of(surrogate="cispo", ratio="sequence"), {"advantage_estimator": "gspo"},
         r"mis\.objective\.surrogate: cispo contradicts --advantage-estimator gspo"),
        *((of(surrogate=name), {"advantage_estimator": estimator},
           rf"mis\.objective\.surrogate: {name} contradicts --advantage-estimator {estimator}, which means")
          for name in ("sapo", "vespo", "gmpo", "ipo") for estimator in ("gspo", "cispo")),
        (of(ratio="sequence"), {"advantage_estimator": "cispo"},
         r"mis\.objective\.surrogate: clip contradicts --advantage-estimator cispo, which means surrogate: cispo"),
        (of(old="proximal"), {"use_rollout_logprobs": True},
         r"mis\.objective\.old: proximal contradicts --use-rollout-logprobs, which means old: behavior"),
        (of(), {"use_unbiased_kl": True, "use_kl_loss": True},
         r"mis\.objective\.unbiased_kl: false contradicts --use-unbiased-kl, which means unbiased_kl: true"),
        (of(unbiased_kl=True), {}, r"mis\.objective\.unbiased_kl: true has no effect without --use-kl-loss"),
        (of(weigh_kl=True), {}, r"mis\.objective\.weigh_kl: true has no effect without --use-kl-loss"),
        *((beside, {"custom_pg_loss_reducer_function_path": "mis_plugins.mis.kept_token_mean"},
           r"kept_token_mean: mis_plugins\.mis\.policy_loss hands a reducer the masks before.*denominator: kept")
          for beside in (RULES, {"opsm": {"delta": 0.1}})),
        ({"opsm": {"delta": 0.1}}, {"use_opsm": True, "opsm_delta": 0.1},
         r"--use-opsm and mis\.opsm are both set; keep one"),
        (TIS, {"use_rollout_logprobs": True}, r"mis\.weight: with mis\.objective\.old: behavior"),
        ({"weight": {"normalize": {"scope": "rollout"}},
          "objective": {"old": "behavior", "surrogate": "reinforce"}}, {},
         r"mis\.weight\.normalize\.scope: rollout .*mis\.objective\.old: behavior.*use scope: data_parallel"),
        (KEPT, {"calculate_per_token_loss": True}, r"mis\.denominator: kept .*--calculate-per-token-loss"),
        ({}, {"use_kl_loss": True, "kl_loss_type": "k4"}, r"--kl-loss-type: got 'k4'; choose one of k1, k2, k3"),
        ({}, {"eps_clip_c": 0.9}, r"^--eps-clip-c: got 0\.9; a dual clip lies above 1"),
        ({}, {"eps_clip_c": math.nan}, r"^--eps-clip-c: got nan; a dual clip lies above 1"),
        *(({}, {name: "much", **KL} | {name: "much"}, rf"^--{name.replace('_', '-')}: got 'much'; expected a number")
          for name in ("entropy_coef", "kl_loss_coef")),
        *(({}, {name: width}, rf"^--{name.replace('_', '-')}: got {width}; the width of a clip is a number that is no")
          for name in ("eps_clip", "eps_clip_high") for width in (-1, math.nan)),
        ({}, {"use_opsm": True, "opsm_delta": math.nan}, r"^--opsm-delta: got nan; give a finite number of nats"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(config: dict, settings: dict, message: str):
    """A contradiction of flags and config quotes both."""
    with pytest.raises(ConfigError, match=message):
        call(random_step(0), config, **settings)


@pytest.mark.parametrize(
    "config, without, settings, message",
    [
        (TIS, "rollout_log_probs", {}, r"rollout_log_probs: none in this micro-batch; the rollout engine"),
        ({}, "rollout_log_probs", {"use_rollout_logprobs": True}, r"rollout_log_probs: none in this micro-batch"),
        ({}, "ref_log_probs", KL, r"ref_log_probs: none in this micro-batch; --use-kl-loss needs"),
        ({}, "log_probs", {}, r"log_probs: none in this micro-batch; the trainer's log-probs"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(config: dict, without: str, settings: dict, message: str):
    with pytest.raises(InputError, match=message):
        call(random_step(0), config, without=[without], **settings)


SUPPORT = ["rollout_sampling_mask_ids", "rollout_sampling_mask_offsets", "rollout_top_p_token_ids"]


@pytest.mark.parametrize("name", SUPPORT)
def test_sampling_support_is_refused_on_miles(name: str):
    """The engine's log-probs are renormalized there, and ours of the whole vocabulary; slime scores the nucleus."""
    rows = [torch.arange(n) for n in LENGTHS]
    refused = f"^{name}: rollout_log_probs are renormalized .* does not score over these of Miles; give our hooks"
    for given in (rows, [None, *rows[1:]]):
        with pytest.raises(InputError, match=refused):
            call(random_step(0), TIS, carried={name: given})
    assert_same(call(random_step(0), TIS, "slime", carried={name: rows}), call(random_step(0), TIS))


def test_sampling_support_that_no_sample_has_is_none_but_where_the_argument_of_miles_asks():
    """A batch of a loss need not carry what the actor's own pass has read."""
    plain = call(random_step(0), TIS)
    for carried in (dict.fromkeys(SUPPORT), dict.fromkeys(SUPPORT, [None] * len(LENGTHS)), dict.fromkeys(SUPPORT, [])):
        assert_same(call(random_step(0), TIS, carried=carried, use_sampling_support_replay=False), plain)
    with pytest.raises(InputError, match="^use_sampling_support_replay: rollout_log_probs are renormalized"):
        call(random_step(0), TIS, use_sampling_support_replay=True)


def test_slimes_helper_is_asked_over_the_tokens_that_top_p_left(monkeypatch: pytest.MonkeyPatch):
    """What slime makes of arguments and batch reaches its helper beside the sequences, and its log-probs are scored."""
    handed: list[dict[str, Any]] = []

    def helper(logits: Tensor, **given: Any) -> tuple[Tensor, dict]:
        handed.append(given)
        return torch.empty(0), host_helper(2 * logits, **given)

    kept = lambda args, batch: {"kept": (args.rollout_top_p, batch["top_p"])}  # noqa: E731
    module = sys.modules["slime.backends.megatron_utils.loss"]
    monkeypatch.setattr(module, "get_log_probs_and_entropy", helper)
    monkeypatch.setattr(module, "get_rollout_top_p_logprob_kwargs", kept)
    step, carried = random_step(0), {"top_p": "ids"}
    found = call(step, {}, "slime", carried=carried, rollout_top_p=0.8, entropy_coef=0.01)
    (given,) = handed
    assert given["args"].rollout_top_p == 0.8 and given["kept"] == (0.8, "ids") and given["with_entropy"]
    assert all(given[name] == step.batch()[name] for name in ("total_lengths", "response_lengths"))
    assert given.keys() == {"args", "kept", "with_entropy", "unconcat_tokens", "total_lengths", "response_lengths"}
    doubled = step.each(lambda x: {"target": [2 * p for p in x.target]})
    plain = call(doubled, {}, entropy_coef=0.01)
    assert same_bytes(found.loss, plain.loss) and torch.equal(found.gradient, 2 * plain.gradient)


def of_length(count: int) -> Callable[[list[Tensor]], list[Tensor]]:
    """Gives the third sequence so many tokens, all 1."""
    return lambda rows: [*rows[:2], rows[2].new_ones(count), *rows[3:]]


@pytest.mark.parametrize(
    "name, change, settings, message",
    [
        ("advantages", lambda rows: rows[:-1], {},
         r"advantages: \[7, 1, 5, 9, 4\] tokens a sequence, but this rank expects"),
        ("ref_log_probs", lambda rows: rows[::-1], KL, r"ref_log_probs: \[6, 4, 9, 5, 1, 7\] tokens a sequence"),
        ("ref_log_probs", lambda rows: [row[:, None] for row in rows], KL,
         r"ref_log_probs: \[\[7, 1\], \[1, 1\], .*\] tokens a sequence"),  # would broadcast to a pair of tokens
        *((name, of_length(count), {"mis": {}}, rf"^{name}\[2\]: {count} tokens, but sequence 2 has 5 .*{name} {count}")
          for name, count in (("loss_masks", 6), ("log_probs", 4), ("rollout_log_probs", 0))),
    ],
)  # fmt: skip
def test_a_list_that_does_not_fit_is_named_with_all_counts(name: str, change: Callable, settings: dict, message: str):
    step = random_step(0)
    with pytest.raises(InputError, match=message):
        call(step, carried={name: change(step.batch()[name])}, **settings)


def test_a_reducer_of_no_host_is_named():
    elsewhere = r"sum_of_sample_mean comes from elsewhere; the hook serves losses of .*miles, slime"
    with pytest.raises(InputError, match=elsewhere):
        call(random_step(0), host="elsewhere")


def test_without_recomputed_log_probs_the_policy_is_its_own_proximal():
    """slime reuses the training forward, Miles under --skip-actor-forward-only: the ratio is 1, not its gradient 0."""
    step = random_step(2)
    expected = call(step.each(lambda x: {"old": x.target}), TIS)
    assert_same(expected, call(step, TIS, "slime", without=["log_probs"]))
    assert_same(expected, call(step, TIS, skip_actor_forward_only=True))
    assert expected.metrics["ppo_kl"] == 0 and expected.gradient.any()


def twice_the_sum(
    total_lengths: list[int], response_lengths: list[int], masks: list[Tensor], per_token: bool
) -> Callable[[Tensor], Tensor]:
    """A pg-loss reducer: twice the sum, over a constant; it sees the masks before rejection, and the host's flag."""
    assert per_token
    assert [int(m.sum()) for m in masks] == twice_the_sum.expected  # type: ignore[attr-defined]
    return lambda x: 2 * (x * torch.cat(masks)).sum() / 100


def test_entropy_is_computed_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch):
    """With a gradient only where the loss has a term of it; Miles may observe it alone."""
    asked: list[tuple[bool, bool]] = []

    def helper(*args: Any, **kwargs: Any) -> dict:
        asked.append((kwargs["with_entropy"], kwargs["entropy_requires_grad"]))
        return host_helper(*args, **kwargs)

    module = sys.modules["miles.backends.training_utils.loss_hub.logit_processors"]
    monkeypatch.setattr(module, "get_log_probs_and_entropy", helper)
    plain, observed, learned = (
        call(random_step(4), {}, entropy_coef=coefficient, observe_training_entropy=observe)
        for coefficient, observe in ((0.0, False), (0.0, True), (0.01, False))
    )
    assert asked == [(False, False), (True, False), (True, True)]
    assert_same(plain, observed)
    assert plain.metrics["entropy_loss"] == 0 != observed.metrics["entropy_loss"]
    assert_close(learned.loss, plain.loss - 0.01 * observed.metrics["entropy_loss"])


def test_pg_loss_reducer(monkeypatch: pytest.MonkeyPatch):
    """It reduces the surrogate alone; a rejected token is 0 in it."""
    step = random_step(4)
    monkeypatch.setattr(twice_the_sum, "expected", [sum(x.mask) for x in step.responses], raising=False)
    path = "test_loss_hook.twice_the_sum"
    monkeypatch.setitem(sys.modules, "test_loss_hook", sys.modules[__name__])
    for objective in ({}, {"ratio": "sequence"}):
        config = RULES | {"objective": objective}
        given = {"calculate_per_token_loss": True, "entropy_coef": 0.01, **KL}
        plain, reduced = (
            call(step, config, **given),
            call(step, config, custom_pg_loss_reducer_function_path=path, **given),
        )
        assert_close(reduced.metrics["pg_loss"], plain.metrics["pg_loss"] / 50)
        for name in ("kl_loss", "entropy_loss"):
            assert torch.equal(reduced.metrics[name], plain.metrics[name]) and plain.metrics[name] != 0
        rest = 0.3 * reduced.metrics["kl_loss"] - 0.01 * reduced.metrics["entropy_loss"]
        assert_close(reduced.loss, reduced.metrics["pg_loss"] + rest)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert abs(found.item() - expected.item()) <= 4 * EPS * max(1.0, abs(expected.item()))


# ------------------------------------------------------------------------------------------------------- metrics


def test_metrics_of_the_host_and_ours():
    step = random_step(5)
    found = call(step, TIS | {"opsm": {"delta": 0.02}, "metrics": "full"}, entropy_coef=0.01, **KL).metrics
    theirs = {"loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl", "kl_loss", "opsm_clipfrac", "ois",
              "ess_ratio", "train_rollout_logprob_abs_diff", "train_rollout_kl"}  # fmt: skip
    assert theirs <= found.keys()
    assert {"mis_k3_kl", "mis_kept_fraction", "mis_tis_truncate_fraction"} <= found.keys()
    assert not any(value.requires_grad for value in found.values())
    assert all(value.ndim == 0 and value.isfinite() for value in found.values())
    expected = found["pg_loss"] - 0.01 * found["entropy_loss"] + 0.3 * found["kl_loss"]
    assert_close(found["loss"], expected)


def test_metric_values():
    """By hand: one sequence of two tokens, one of one, every mask whole."""
    old, target = [[-1.0, -2.0], [-1.5]], [[-1.5, -1.75], [-1.5]]
    rows = zip(target, old, [[-1.0, -1.0], [1.0]], strict=True)
    responses = [Response(p, o, p, a, [1.0] * len(p), [True] * len(p)) for p, o, a in rows]
    step = Step(responses, [[-1.0, -1.0], [-1.5]])
    config = {"opsm": {"delta": 0.6}, "metrics": "full"}
    found = {name: value.item() for name, value in call(step, config).metrics.items()}
    ratios = [math.exp(-0.5), math.exp(0.25)]
    exact = {
        "ppo_kl": (0.5 - 0.25) / 2,
        "pg_clipfrac": 0.5,  # exp(-0.5) lies below 0.8 where A < 0
        "opsm_clipfrac": 1.0,  # mean(log mu - log pi_theta) = (0.5 + 0.75) / 2
        "train_rollout_logprob_abs_diff": 0.5,
        "train_rollout_kl": (math.exp(-1) - 1 + 1) / 2,
        "ess_ratio": sum(ratios) ** 2 / (2 * sum(r * r for r in ratios)) + 1,
        "pg_loss": -1.0,
    }
    for name, value in exact.items():
        assert abs(found[name] - value) <= 8 * EPS, name
    assert abs(call(step, TIS).metrics["ois"].item() - (sum(ratios) / 2 + 1)) <= 8 * EPS
    assert "ois" not in found


def test_the_effective_share_is_of_the_tokens_in_the_mask():
    masks = [[True, False, True], [False, True, False]]
    rows = zip([[-1.0, -1.0, -2.0], [-1.0] * 3], [[-1.5, -1.0, -1.0], [-1.0] * 3], masks, strict=True)
    responses = [Response(p, o, p, [1.0] * 3, [1.0] * 3, mask) for p, o, mask in rows]
    found = call(Step(responses, [[-1.0] * 3] * 2), {"metrics": "full"}).metrics["ess_ratio"].item()
    ratios = [math.exp(0.5), math.exp(-1.0)]
    assert abs(found - (sum(ratios) ** 2 / (2 * sum(r * r for r in ratios)) + 1)) <= 8 * EPS


@pytest.mark.parametrize("config", [{}, TIS, KEPT, {"opsm": {"delta": 0.05}}, {"metrics": "none"}])
def test_names_depend_on_the_config_alone(config: dict):
    """A host takes the names of the first micro-batch for those of all."""
    steps = [random_step(6), random_step(7, (1,)), masked_out(random_step(8))]
    names = [list(call(step, config).metrics) for step in steps]
    assert names[0] == names[1] == names[2]
    ours = [name for name in names[0] if name.startswith("mis_")]
    assert bool(ours) == (config.get("metrics") != "none")


def test_core_has_no_metric_that_costs_sums_over_sequences():
    reported = {x: "ess_ratio" in call(random_step(6), {"metrics": x}).metrics for x in ("all", "full", "core", "none")}
    assert reported == {"all": True, "full": True, "core": False, "none": False}


def in_a_step(step: Step, *more: Any, **settings: Any) -> Outcome:
    """`call` as the one micro-batch of an optimizer step, which is reported."""
    mis.report_step(flags(), 0, 0)
    found = call(step, *more, **settings)
    mis.report_step(flags(), 0, 1)
    return found


def masked_out(step: Step) -> Step:
    return step.each(lambda x: {"mask": [False] * len(x.mask)})


def test_the_teacher_kl_is_passed_on():
    step = random_step(0)
    found = call(step, carried={"opd_reverse_kl": [torch.full_like(x, 0.25) for x in step.rows("target")]}).metrics
    valid = sum(any(x.mask) for x in step.responses)
    assert_close(found["opd_reverse_kl"], torch.tensor(0.25 * valid))


def test_rejected_tokens_leave_metrics_of_the_host_and_stay_in_ours():
    """As in the hosts with our TIS hook: theirs count a rejected token 0, ours average over the mask of before."""
    everything = {"weight": None, "reject": [{"over": "max", "upper": 1e-6}]}
    step = random_step(1)
    found, plain = call(step, everything).metrics, call(step, {}).metrics
    theirs = ("ppo_kl", "pg_clipfrac", "train_rollout_kl", "train_rollout_logprob_abs_diff")
    assert all(found[name] == 0 and plain[name] != 0 for name in theirs)
    nothing = {"weight": None, "reject": [{"over": "max", "upper": 1e6}]}
    for name, settings in (("ois", {}), ("opsm_clipfrac", {"opsm": {"delta": 0.05}})):
        both = [call(step, config | settings).metrics[name] for config in (everything, nothing)]
        assert torch.equal(*both) and both[0] > 0
    assert found["mis_kept_fraction"] == 0 and torch.equal(found["mis_k3_kl"], plain["mis_k3_kl"])


# -------------------------------------------------------------------------------------------- what must not break


GARBAGE = [math.nan, math.inf, -math.inf]
ROBUST = [
    TIS | {"opsm": {"delta": 0.05}},
    KEPT | {"objective": {"ratio": "sequence", "weigh_kl": True}},
    {"weight": {"level": "sequence", "upper": 2.0}, "objective": {"old": "behavior", "surrogate": "reinforce"}},
]


@pytest.mark.parametrize("config", ROBUST)
@pytest.mark.parametrize("value", GARBAGE)
def test_nothing_under_the_mask_counts(config: dict, value: float):
    step = random_step(2)
    hide = lambda row, mask: [x if valid else value for x, valid in zip(row, mask, strict=True)]  # noqa: E731
    names = ("old", "reference", "advantages")
    hidden = Step(
        step.each(lambda x: {name: hide(getattr(x, name), x.mask) for name in names}).responses,
        [hide(b, x.mask) for x, b in zip(step.responses, step.behavior, strict=True)],
    )
    first, second = call(step, config, **KL), call(hidden, config, **KL)
    # slime and Miles multiply by the mask when they reduce: a metric of theirs or ours that held a NaN would show.
    assert_same(first, second)
    assert all(same_bytes(first.metrics[name], second.metrics[name]) for name in first.metrics)


@pytest.mark.parametrize("config", ROBUST)
@pytest.mark.parametrize("value", GARBAGE)
def test_an_unknown_rollout_log_prob_leaves_loss_and_gradient_finite(config: dict, value: float):
    step = random_step(3)
    broken = Step(step.responses, [[value] + row[1:] for row in step.behavior])
    found = call(broken, config, **KL)
    assert found.loss.isfinite() and found.gradient.isfinite().all() and found.gradient.any()
    assert_same(call(broken, {}), call(step, {}))  # a lost log-prob weighs 0 in a correction, and there is none


@pytest.mark.parametrize("config", ROBUST)
@pytest.mark.parametrize("name", ["log_probs", "rollout_log_probs", "ref_log_probs"])
def test_what_stands_in_for_a_log_prob_counts_as_none(config: dict, name: str):
    step = random_step(3)

    def found(value: float) -> Outcome:
        rows = step.batch()[name]
        for row in rows:
            row[-1] = value
        return call(step, config, carried={name: rows}, **KL)

    expected = found(math.nan)
    for value in (-9999.0, -1e9):
        assert_same(found(value), expected)


@pytest.mark.parametrize(("name", "objective"), [("log_probs", {"kl_tau": 0.1}), ("ref_log_probs", {"weigh_kl": True})])
def test_a_rejected_token_adds_nothing_however_far_its_policies_are(name: str, objective: dict):
    """The square of its log ratio is infinite, and 0 times infinity would make the loss NaN."""
    step = random_step(3)
    rows, behavior = step.batch()[name], step.batch()["rollout_log_probs"]
    token = step.responses[0].valid[0]
    rows[0][token], behavior[0][token] = 1e200, math.nan
    config = RULES | {"objective": objective}
    found = call(step, config, carried={name: rows, "rollout_log_probs": behavior}, **KL | {"kl_loss_type": "k2"})
    assert found.loss.isfinite() and found.gradient.isfinite().all() and found.gradient.any()


def without_advantages(step: Step, value: float) -> Step:
    """The first valid token of every response but one has the advantage `value`."""
    lost = lambda x: [value if [t] == x.valid[:1] else a for t, a in enumerate(x.advantages)]  # noqa: E731
    return step.each(lambda x: {"advantages": lost(x)}, first=1)


@pytest.mark.parametrize(("value", "opsm", "objective"), every_two(GARBAGE, OPSM, OBJECTIVES), ids=str)
def test_an_advantage_that_is_no_number_teaches_nothing(objective: tuple[dict, Spec], opsm: dict, value: float):
    """Loss and gradient are the formulas' with the advantage 0, whose bits they have; the KL term stays."""
    question = Question({**opsm, "objective": objective[0], "metrics": "none"}, objective[1], "k3")
    expected, found = answered(question, lambda step: without_advantages(step, value))
    zero = expected.step.each(lambda x: {"advantages": x.learned})
    assert_same(found, call(zero, question.mis, **question.settings))
    assert_loss_and_gradient(found, expected)


@pytest.mark.parametrize("without", [(), ("rollout_log_probs",)])
@pytest.mark.parametrize("metrics", ["all", "full", "none"])
def test_an_advantage_that_is_no_number_is_counted_and_told(
    logged: list[dict], caplog: pytest.LogCaptureFixture, metrics: str, without: Sequence[str]
):
    """Whatever the config, and without rollout log-probs too."""
    step = random_step(5)
    lost = sum(bool(x.valid) for x in step.responses[1:])
    valid = sum(len(x.valid) for x in step.responses)
    divided_by = sum(max(len(x.valid), 1) for x in step.responses)
    for number, advantages in enumerate((step, without_advantages(step, math.nan), step)):
        mis.report_step(flags(), 0, number)
        found = call(advantages, {"metrics": metrics}, without=without, calculate_per_token_loss=True).metrics
        reported = found["nonfinite_advantages"].item() if metrics != "none" else None
        assert reported is None or reported == pytest.approx(lost * (number == 1) * divided_by / valid)
        assert caplog.text.count(f"{lost} of") == (number == 2)
    mis.report_step(flags(), 0, 3)
    assert "an advantage that is NaN or infinite" in caplog.text
    if metrics == "all" and not without:
        assert [row["nonfinite_advantage_tokens"] for row in logged] == [0, lost, 0]


def share_of(step: Step, config: dict) -> loss.Share:
    """What the hook makes of correction and OPSM."""
    args, batch = flags(mis=config), step.batch()
    reduce, logits = reducer(batch, "miles"), torch.cat(step.rows("target"))
    in_force = loss_hook.config_in_force(args, reading.from_args(args), current(args))
    inputs = loss_batch.read(current(args, reduce), args, batch, logits, in_force)
    assert inputs.behavior is not None
    correction = correct(loss.compared_log_probs(inputs, in_force), inputs.behavior, inputs.ragged, in_force)
    return loss.share_of(inputs, correction, in_force)


FIRST_ALONE = {"statistic": "k1", "over": "sum", "lower": 34.0}  # a rule that keeps the first of bad sequences


def test_the_breaker_sees_rules_and_opsm_together():
    """Rules leave one sequence and OPSM masks that one: nothing is left, and that is said whatever is done about it."""
    bad, good = all_bad(random_step(5)), random_step(5)
    opsm = {"opsm": {"delta": 0.05}}
    first_alone = {"weight": None, "reject": [FIRST_ALONE]}
    counts = [share_of(bad, config).all_rejected for config in (opsm, first_alone, first_alone | opsm)]
    assert [bool(flag) for flag in counts] == [True, False, True]
    assert bool(share_of(bad, opsm | {"on_all_rejected": "keep"}).all_rejected)
    assert not share_of(good, opsm).all_rejected and share_of(good, {}).all_rejected is None
    assert not share_of(masked_out(bad), opsm).all_rejected
    of_one_token = bad.each(lambda x: {"mask": [t == 0 for t in range(len(x.mask))]})
    assert share_of(of_one_token, opsm).all_rejected


def test_what_weighs_nothing_is_not_left():
    """OPSM leaves the first sequence alone, and a zero bound gives a weight to the others alone."""
    step = first_good(all_bad(random_step(5))).each(lambda x: {"old": [p + 5 for p in x.old]}, first=1)
    opsm = {"opsm": {"delta": 0.05}}
    assert bool(share_of(step, opsm | {"weight": {"bound": "zero"}}).all_rejected)
    assert not share_of(step, opsm | {"weight": {"bound": "clip"}}).all_rejected


def test_the_breaker_hears_of_rules_whose_work_opsm_goes_on_with():
    """Rules reject everything, `keep` gives it back, and OPSM leaves a part of it."""
    config = {"weight": None, "reject": [{"over": "mean", "upper": 1e-6}], "on_all_rejected": "keep"}
    share = share_of(random_step(7), config | {"opsm": {"delta": 0.05}})
    assert bool(share.all_rejected) and 0 < int((share.factor > 0).sum()) < int(share.keep.sum())


def test_what_everything_rejected_gives_back_is_given_to_nobody_else():
    """Entropy and KL keep the denominator of the kept tokens, in float32, where OPSM leaves some."""
    config = RULES | {"reject": [{"over": "token", "upper": 1.05}], "denominator": "kept", "opsm": {"delta": 0.05}}
    keeps, skips = (share_of(random_step(5), config | {"on_all_rejected": fate}) for fate in ("keep", "skip"))
    assert not keeps.all_rejected and keeps.factor.dtype == torch.float32
    assert torch.equal(keeps.scale, skips.scale) and (keeps.scale > 1).any()
    assert torch.equal(keeps.factor, skips.factor)


def test_one_token_left_is_not_nothing():
    """OPSM leaves one token of the micro-batch, which `on_all_rejected: keep` must not take for none."""
    step = all_bad(random_step(5))
    one = next(x for x in step.responses if x.valid)
    cast(list[float], one.advantages)[one.valid[0]] = 1.0
    share = share_of(step, {"opsm": {"delta": 0.05}, "on_all_rejected": "keep"})
    assert not share.all_rejected and int((share.factor > 0).sum()) == 1


def all_bad(step: Step) -> Step:
    """OPSM drops every sequence: bad ones, which the engine finds far likelier."""
    return Step(with_advantages(step, -1.0).responses, [[x + 5 for x in row] for row in step.behavior])


def first_good(step: Step) -> Step:
    return Step([*with_advantages(step, 1.0).responses[:1], *step.responses[1:]], step.behavior)


def with_advantages(step: Step, value: float) -> Step:
    return step.each(lambda x: {"advantages": [value] * len(x.mask)})


@pytest.mark.parametrize("without", [(), ("rollout_log_probs",)])
@pytest.mark.parametrize("metrics", ["full", "none"])
def test_opsm_of_everything_stops_the_job(metrics: str, without: Sequence[str]):
    """Whatever the metrics, and without rollout log-probs too; a step with something left goes on."""
    config = {"opsm": {"delta": 0.05}, "on_all_rejected": "raise", "metrics": metrics}
    in_a_step(random_step(5), config)
    bad = all_bad(random_step(5))
    if without:  # OPSM then compares with the proximal policy
        bad = bad.each(lambda x: {"old": [p + 5 for p in x.old]})
    call(bad, config, without=without)
    with pytest.raises(MisError, match=r"every sequence of 1 of 1 micro-batches.*; 0\.0% of the step's tokens"):
        mis.report_step(flags(), 0, 2)


@pytest.mark.parametrize("lost", [lambda step: step, lambda step: without_advantages(step, math.nan)])
@pytest.mark.parametrize(
    "objective",
    [
        {"ratio": "token"},
        {"ratio": "sequence"},
        {"surrogate": "sapo", "ratio": "sequence"},
        {"surrogate": "vespo"},
        {"surrogate": "gmpo"},
    ],
    ids=str,
)
def test_both_denominators_are_reported(logged: list[dict], objective: dict, lost: Callable[[Step], Step]):
    """Of the whole step, whatever the loss is divided by: its sum over valid and over kept tokens.

    Of a ratio of the sequence too, where advantages differ from token to token.
    """
    config = {"weight": {"upper": 1.2}, "reject": [{"over": "token", "upper": 1.3}], "opsm": {"delta": 0.05},
              "objective": objective, "metrics": "all"}  # fmt: skip
    step = lost(random_step(5))
    found = in_a_step(step, config, calculate_per_token_loss=True)
    valid = sum(sum(x.mask) for x in step.responses)
    share = share_of(step, config)
    kept = int((share.keep & share.on_policy).sum()) if share.on_policy is not None else 0
    total = found.metrics["pg_loss"].item()
    assert 0 < kept < valid
    for name, count in (("loss_original_denominator", valid), ("loss_kept_denominator", kept)):
        assert_close(torch.tensor(logged[0][name] * count), torch.tensor(total).double())


def test_a_sequence_whose_ratio_nobody_knows_adds_to_no_loss(logged: list[dict]):
    valid = sum(sum(x.mask) for x in random_step(5).responses)
    for objective in ({"ratio": "sequence"}, {"surrogate": "vespo"}, {"surrogate": "gmpo"}):
        config, step = {"objective": objective | {"old": "behavior"}, "metrics": "all"}, random_step(5)
        step.behavior[0][step.responses[0].mask.index(True)] = math.nan
        found = in_a_step(step, config, calculate_per_token_loss=True)
        total = torch.tensor(logged[-1]["loss_original_denominator"] * valid)
        assert_close(total, found.metrics["pg_loss"].double())


@pytest.mark.parametrize("correction", [{}, {"weight": {"upper": 1.2}, "reject": [{"over": "token", "upper": 1.3}]}])
@pytest.mark.parametrize("opsm", [{"delta": 0.05}, {"delta": 0.05, "advantage": "sequence"}])
def test_metrics_of_sequences_count_what_opsm_masks(logged: list[dict], correction: dict, opsm: dict):
    config, step = correction | {"opsm": opsm, "metrics": "all"}, random_step(7)
    in_a_step(step, config)
    share = share_of(step, config)
    lengths = [len(x.mask) for x in step.responses]
    rows = zip(share.factor.split(lengths), step.rows("mask"), strict=True)
    factors = [factor[mask.bool()] for factor, mask in rows if mask.any()]
    means = torch.stack([factor.mean() for factor in factors])
    kept = [factor > 0 for factor in factors]
    expected = {
        "kept_sequences": sum(bool(k.any()) for k in kept) / len(kept),
        "touched_sequences": sum(not k.all() for k in kept) / len(kept),
        "sequence_applied_mean": float(means.mean()),
        "sequence_applied_min": float(means.min()),
        "sequence_applied_max": float(means.max()),
    }
    assert share.on_policy is not None and (share.keep & ~share.on_policy).any()
    assert {name: logged[0][name] for name in expected} == pytest.approx(expected, rel=1e-6)


WATCHED = [
    {"opsm": {"delta": 0.05}},
    {"opsm": {"delta": 0.05, "advantage": "sequence", "reference": "proximal"}},
    TIS | {"opsm": {"delta": 0.05}, "objective": {"ratio": "sequence"}},
]


def broken(step: Step) -> Step:
    """One sequence lacks an advantage, another a rollout log-prob."""
    step = without_advantages(step, math.nan)
    behavior = [list(row) for row in step.behavior]
    behavior[3][step.responses[3].valid[0]] = math.nan
    return dataclasses.replace(step, behavior=behavior)


@pytest.mark.parametrize("config", WATCHED, ids=str)
@pytest.mark.parametrize("change", [lambda step: step, broken])
def test_what_opsm_looks_at_is_reported(logged: list[dict], config: dict, change: Callable[[Step], Step]):
    """Of a step of three micro-batches, against the second implementation; a sequence counts in each it belongs to."""
    steps = [change(random_step(seed)) for seed in (7, 8, 9)]
    mis.report_step(flags(), 0, 0)
    for step in steps:
        call(step, config | {"metrics": "all"})
    mis.report_step(flags(), 0, 1)
    responses, behavior = ([x for step in steps for x in getattr(step, name)] for name in ("responses", "behavior"))
    found = {name: value for name, value in logged[0].items() if name.startswith("opsm_")}
    atol = 4 * sum_rtol(len(responses)) * 4  # of log-probs up to 4 in size, each rounded to float32
    for name, value in step_oracle.opsm(responses, behavior, config["opsm"]).items():
        assert abs(found.pop(name) - value) <= atol, name
    for name, data in step_oracle.departures(responses, behavior, config["opsm"]).items():
        assert len(data) > 2
        for percent in QUANTILES:
            exact = np.quantile(np.sort(data), percent / 100)
            size = float(np.max(np.abs(data)))
            assert abs(found.pop(f"{name}_p{percent}") - exact) <= sketch.RELATIVE_ERROR * size + atol, name
    assert not found


def test_without_opsm_nothing_of_it_is_reported(logged: list[dict]):
    in_a_step(random_step(7), TIS | {"metrics": "all"})
    assert logged and not [name for name in logged[0] if name.startswith("opsm_")]


@pytest.mark.parametrize("rules", [[], [FIRST_ALONE]], ids=["OPSM", "a rule and OPSM"])
@pytest.mark.parametrize("denominator", ["original", "kept"])
def test_keep_gives_back_what_rules_and_opsm_took_together(denominator: str, rules: list[dict]):
    """In surrogate, entropy and KL alike, which a rule had taken from all sequences but one."""
    step, opsm = all_bad(random_step(5)), {"opsm": {"delta": 0.05}}
    config = opsm | {"weight": None, "reject": rules, "on_all_rejected": "keep", "denominator": denominator}
    for beside in ({}, {"entropy_coef": 0.01, **KL}):
        found = call(step, config, **beside)
        assert_same(found, call(step, {}, **beside))
        assert found.metrics["opsm_clipfrac"] == 0
    mended = first_good(step)
    assert_same(call(mended, opsm | {"on_all_rejected": "keep"}), call(mended, opsm))


def test_the_mean_of_the_rollout_serves_the_loss_hook():
    """`scope: rollout` without --use-tis: the loss hook asks for the correction."""
    weight = {"level": "sequence", "upper": 1.5, "normalize": {"scope": "rollout"}}
    args = flags(mis={"weight": weight, "opsm": {"delta": 9.0}}, loss_type="custom_loss")
    step = random_step(3)
    batch = step.batch()
    mis.normalize_rollout(args, 0, batch)
    found = drive(args, batch, torch.cat(step.rows("target")))
    alone = {"weight": weight | {"normalize": {"scope": "micro_batch"}}, "opsm": {"delta": 9.0}}
    assert_same(found, call(step, alone))


def test_a_mean_of_other_segment_wise_weights_is_refused():
    """The setting says what stands for pi_{v+1} in the weights pi_{v+1} / mu."""
    step = random_step(3)
    ages = [torch.full((len(x.mask),), 3) for x in step.responses]
    batch = step.batch() | {"output_versions": ages, "proximal_version": 4}
    weight = {"upper": 1.5, "normalize": {"scope": "rollout"}}
    one, other = (
        flags(
            mis={"weight": weight, "segment_wise": {"fresh_tokens": fresh, "method": "loglinear"}},
            loss_type="custom_loss",
        )
        for fresh in ("proximal", "behavior")
    )
    mis.normalize_rollout(one, 0, batch)
    drive(one, batch, torch.cat(step.rows("target")))
    with pytest.raises(InputError, match="computed under another config.*fresh_tokens='proximal'"):
        drive(other, batch, torch.cat(step.rows("target")))


def test_opsm_of_everything_skips():
    step = all_bad(random_step(5))
    skipped = call(step, {"opsm": {"delta": 0.05}})
    assert skipped.loss == 0 and not skipped.gradient.any()
    assert_close(skipped.metrics["opsm_clipfrac"], torch.tensor(float(sum(any(x.mask) for x in step.responses))))


def test_a_rank_without_tokens_still_has_a_gradient(monkeypatch: pytest.MonkeyPatch):
    """Its backward must run: the model's own collectives wait for it. The hosts score no token without a graph.
    Logits of the padding, or of a masked vocabulary, are anything.
    """
    helper = sys.modules["miles.backends.training_utils.loss_hub.logit_processors"]
    empty = lambda logits, **_: {"log_probs": [logits.new_zeros(0)]}  # noqa: E731
    monkeypatch.setattr(helper, "get_log_probs_and_entropy", empty)
    batch = Step([Response([], [], [], [], [], [])], [[]]).batch()
    for objective in ({}, {"ratio": "sequence"}):
        found = drive(flags(mis=TIS | {"objective": objective}), batch, torch.tensor([1.0, -math.inf, math.nan, 2.0]))
        assert found.loss == 0 and torch.equal(found.gradient, torch.zeros(4))


COSTLY = KEPT | {"opsm": {"delta": 0.05}, "objective": {"ratio": "sequence", "unbiased_kl": True}}


def flat_call(sequences: int) -> Callable[[], Tensor]:
    """The hook on so many sequences, with a reducer whose own work does not depend on their number."""
    step = random_step(7, [5] * sequences)
    batch, logits = step.batch(), torch.cat(step.rows("target")).requires_grad_()
    args = flags(mis=COSTLY, **KL)
    mask = torch.cat(step.rows("mask"))

    def reduce(x: Tensor) -> Tensor:
        return (x * mask).sum()

    reduce.__module__ = "miles.backends.cp_utils"
    return lambda: mis.policy_loss(args, batch, logits, reduce)[0]


UNCORRECTED: list[dict] = [{"mis": None}, {"mis": {}}, {"mis": {"weight": None}}]
CURED = [
    {"mis": {"metrics": "full"}},
    {"mis": {"opsm": {"delta": 0.1}}},
    {"mis": {"weight": {}}},
    {"use_rollout_logprobs": True},
    {"use_opsm": True, "opsm_delta": 0.1},
    {"get_mismatch_metrics": True},
]


@pytest.mark.parametrize("settings", UNCORRECTED + CURED)
def test_a_loss_that_nothing_corrects_is_told_unless_the_run_watches_or_has_another_cure(
    settings: dict, caplog: pytest.LogCaptureFixture
):
    call(random_step(6), **settings)
    nothing = "policy_loss weighs and rejects nothing, since nothing says how to correct (looked"
    assert (nothing in caplog.text) == ("weighs and rejects nothing" in caplog.text) == (settings in UNCORRECTED)


BY_TOKEN: dict = {"weight": None, "reject": [{"over": "token", "upper": 2.0}]}
WITHOUT_THE_TRAINERS = [
    ({"metrics": "full"}, {}),
    ({"opsm": {"delta": 0.1}}, {}),
    ({"objective": {"surrogate": "reinforce", "old": "behavior"}, "weight": {}}, {}),
    (BY_TOKEN, {"use_rollout_logprobs": True}),
    ({"weight": {}}, {"skip_actor_forward_only": True}),
]


def one_tensor(config: dict, share: Callable[[list[Tensor]], list[Tensor]], **settings: Any) -> Outcome:
    batch = random_step(6).batch()
    batch["log_probs"] = share(batch["rollout_log_probs"])
    batch |= {"output_versions": [torch.ones_like(m) for m in batch["loss_masks"]], "proximal_version": 2,
              "recomputed_log_probs": batch["ref_log_probs"]} if "segment_wise" in config else {}  # fmt: skip
    return call(random_step(6), config, carried=batch, **settings)


@pytest.mark.parametrize("config", [{"weight": {}}, BY_TOKEN, {"segment_wise": {}}])
@pytest.mark.parametrize("share", [lambda rows: rows, list, lambda rows: [row.detach() for row in rows]])
def test_the_engines_log_probs_in_place_of_the_trainers_are_refused(config: dict, share: Callable):
    with pytest.raises(InputError, match=r"^log_probs\[0\] and rollout_log_probs\[0\]: one tensor"):
        one_tensor(config, share)
    one_tensor(config, lambda rows: [row.clone() for row in rows])


@pytest.mark.parametrize(("config", "settings"), WITHOUT_THE_TRAINERS)
def test_a_config_that_does_not_compare_the_two_takes_one_tensor_for_both(config: dict, settings: dict):
    one_tensor(config, lambda rows: rows, **settings)


def test_nothing_waits_for_the_device():
    """Fake tensors have no values: whatever asked for one would raise."""
    with FakeTensorMode():
        flat_call(4)().backward()


def test_operators_do_not_grow_with_sequences():
    """Forward: backward, joining a list of tensors takes a view of each."""
    few, many = (tallies.tally(flat_call(n)) for n in (4, 32))
    assert few.operators == many.operators
    assert not many.waits


# ------------------------------------------------------------------------------------ the embedded host, over ranks


VOCABULARY = 11
PROMPTS = [3, 30, 1, 25, 8]


def embedded_outcome(args: Namespace, step: Step, cp: int) -> dict[str, Any]:
    """This rank's loss, gradient with respect to the logits of the whole sequences, and metrics."""
    return outcome_of(args, *embedded_batch(step, dist.get_rank(), cp))


def outcome_of(
    args: Namespace, layout: Layout, batch: MicroBatch, loss_of: Callable[..., Any] = mis.policy_loss
) -> dict[str, Any]:
    torch.manual_seed(0)
    logits = torch.randn(sum(layout.total_lengths), VOCABULARY, requires_grad=True)
    starts = torch.tensor([0, *itertools.accumulate(layout.total_lengths)])[layout.sequence]
    lengths = torch.tensor(layout.total_lengths)[layout.sequence]
    slots = logits[starts + layout.positions.minimum(lengths - 1)]
    reduce = Reducer.of(batch, batch.loss_masks, per_token=args.calculate_per_token_loss)
    loss, metrics = loss_of(args, host_batch(batch), slots.unsqueeze(0), reduce)
    loss.backward()
    return {"loss": loss.detach(), "gradient": logits.grad, **metrics}


def embedded_batch(step: Step, rank: int, cp: int) -> tuple[Layout, MicroBatch]:
    responses = [len(x.mask) for x in step.responses]
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(VOCABULARY, (p + r,), generator=generator) for p, r in zip(PROMPTS, responses, strict=True)]
    layout = pack(tokens, responses, rank, cp)

    def local(name: str) -> list[Tensor]:
        # Log-probs of a random model lie near -log(vocabulary).
        shift = 0.0 if name == "advantages" else math.log(VOCABULARY) - 1.5
        whole = torch.cat(step.rows(name)).float() - shift
        return list(whole[layout.response_index].split(layout.local_lengths))

    data: dict[str, Any] = {name: local(row) for name, row in ROWS.items()}
    data |= {"tokens": tokens, "loss_masks": step.rows("mask")}
    version = step.batch().get("proximal_version")
    if version is not None:
        versions = torch.cat(step.rows("versions"))[layout.response_index]
        data |= {"output_versions": list(versions.split(layout.local_lengths)), "proximal_version": version}
        data["recomputed_log_probs"] = local("stored")
    return layout, MicroBatch(layout, data)


OF_EMBEDDED = {"rollout_temperature": 1.0, "true_on_policy": False}
EMBEDDED = [
    {"weight": {"level": "sequence", "upper": 5.0}, "opsm": {"delta": 0.1}, "denominator": "kept",
     "objective": {"ratio": "sequence", "weigh_kl": True}},
    {"weight": {"level": "token", "normalize": {"scope": "micro_batch"}}, "metrics": "full",
     "objective": {"old": "behavior", "surrogate": "reinforce", "unbiased_kl": True}},
    {"weight": None, "reject": [{"over": "min", "lower": 0.1}], "opsm": {"delta": 0.1, "advantage": "sequence"},
     "objective": {"surrogate": "cispo", "ratio": "sequence"}},
]  # fmt: skip


@pytest.mark.parametrize("config", EMBEDDED)
def test_context_parallel_ranks_add_up_to_one(config: dict, tmp_path: Path):
    """Loss, gradient and metrics with the embedded host's own batch, log-probs and reducer, at CP 1 and 4."""
    step = random_step(11, (9, 1, 20, 13, 6))
    args = flags(mis=config, entropy_coef=0.01, **OF_EMBEDDED, **KL)
    answers = []
    for cp in (1, 4):
        ranks = run_ranks(cp, cp, lambda _, cp=cp: embedded_outcome(args, step, cp), tmp_path / str(cp))
        answers.append({name: torch.stack([rank[name] for rank in ranks]).sum(0) for name in ranks[0]})
    assert_same_sums(answers, sum(len(x.mask) for x in step.responses))


def assert_same_sums(answers: Sequence[dict[str, Tensor]], tokens: int) -> None:
    """One rank and the sum of several have the same numbers, but for the rounding of sums over so many tokens."""
    alone, split = answers
    assert alone["gradient"].any() and split.keys() == alone.keys()
    for name, value in alone.items():
        atol = 4 * sum_rtol(tokens) * max(1.0, value.abs().max().item())
        assert (split[name] - value).abs().max() <= atol, name


def opsm_of_rank(args: Namespace, steps: Sequence[Step], cp: int) -> list[dict]:
    """What this rank logs of a step in which each data-parallel rank trains on every so many-th of `steps`."""
    logged: list[dict] = []
    tracking.log = lambda args, metrics, *_: logged.append(dict(metrics))
    sys.modules.pop("miles.backends.training_utils.parallel")  # the embedded host's groups are Megatron's
    rank, dp = dist.get_rank(), dist.get_world_size() // cp
    mis.report_step(args, 0, 0)
    for step in steps[rank // cp :: dp]:
        outcome_of(args, *embedded_batch(step, rank % cp, cp))
    mis.report_step(args, 0, 1)
    return [{name: value for name, value in row.items() if name.startswith("opsm_")} for row in logged]


def test_what_opsm_looks_at_is_the_same_over_ranks(tmp_path: Path):
    """Of a step of two micro-batches, over context-parallel ranks and over data-parallel ones."""
    steps = [broken(random_step(seed, (9, 1, 20, 13, 6))) for seed in (11, 12)]
    args = flags(mis={"opsm": {"delta": 0.1}, "metrics": "all"}, **OF_EMBEDDED)
    answers = []
    for world, cp in ((1, 1), (2, 2), (2, 1), (4, 2)):
        ranks = run_ranks(world, cp, lambda _, cp=cp: opsm_of_rank(args, steps, cp), tmp_path / f"{world}-{cp}")
        (logged,) = [row for rows in ranks for row in rows]
        answers.append(logged)
    assert answers[0]["opsm_unknown_sequences"] == 2.0
    assert len(answers[0]) > 30
    for split in answers[1:]:
        assert split == pytest.approx(answers[0], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(("config", "reentrant"), zip(EMBEDDED, (False, True, False), strict=True))
def test_a_rank_without_tokens_recomputes_with_the_others(
    config: dict, reentrant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A checkpointed loss asks all ranks once more in its backward; Miles scores no token without a graph."""
    scores = log_probs.get_log_probs_and_entropy

    def graph_with_tokens(logits: Tensor, **kwargs: Any) -> dict[str, Any]:
        found = scores(logits, **kwargs)
        on_the_tape = any(map(len, found["log_probs"]))
        return found if on_the_tape else {name: [x.detach() for x in values] for name, values in found.items()}

    monkeypatch.setattr(log_probs, "get_log_probs_and_entropy", graph_with_tokens)
    monkeypatch.setattr(sys.modules[__name__], "PROMPTS", [3])
    step = random_step(11, (2,))
    args = flags(mis=config, entropy_coef=0.01, **OF_EMBEDDED, **KL)
    recomputed = partial(checkpoint, mis.policy_loss, use_reentrant=reentrant)

    def work(rank: int) -> list[dict[str, Any]]:
        layout, batch = embedded_batch(step, rank, 2)
        assert sum(layout.local_lengths) == 2 * rank
        return [outcome_of(args, layout, batch, loss_of) for loss_of in (mis.policy_loss, recomputed)]

    for once, twice in run_ranks(2, 2, work, tmp_path, limit_s=20):
        assert all(same_bytes(once[name], twice[name]) for name in once)


QUIET = {"metrics": "none", "opsm": {"delta": 0.1}}
DIFFERENT = {
    "objective": ({"metrics": "none"}, {"metrics": "none", "objective": {"surrogate": "cispo"}}),
    "weight": (QUIET, QUIET | {"weight": {"upper": 2.0}}),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_context_parallel_ranks_with_different_configs(what: str, tmp_path: Path):
    """Also where nothing but the loss itself differs, which compares no policy with mu: every rank says so."""
    step = random_step(11, (9, 1, 20, 13, 6))

    def work(rank: int) -> str:
        args = flags(mis=DIFFERENT[what][rank], **OF_EMBEDDED)
        return told(lambda: embedded_outcome(args, step, 2))

    assert all("different mis configs" in message for message in run_ranks(2, 2, work, tmp_path, limit_s=20))


def with_a_masked(step: Step) -> Step:
    """The step, and its first response once more, fully masked."""
    masked = dataclasses.replace(step.responses[0], mask=[0] * len(step.responses[0].mask))
    return Step([*step.responses, masked], [*step.behavior, step.behavior[0]])


def test_a_masked_sample_does_not_dilute_our_metrics():
    """The host divides what the hook reduced by all samples; names of Miles's `mis.py` take that as they do there."""
    step = random_step(3)
    config = {"weight": {"upper": 1.2}, "reject": [{"over": "token", "upper": 1.5}], "metrics": "full"}
    alone, found = (call(x, config, rollout_function_path=None).metrics for x in (step, with_a_masked(step)))
    size = len(step.responses)
    assert found["mis_kl"] == pytest.approx(alone["mis_kl"].item())
    for name in ("mis_kept_fraction", "mis_ratio_max_mb", "mis_ess_mb"):
        assert found[name].item() / (size + 1) == pytest.approx(alone[name].item() / size)


@pytest.mark.parametrize("without", [(), ("rollout_log_probs",)])
@pytest.mark.parametrize("per_token", [False, True])
def test_a_masked_sample_does_not_dilute_the_share_of_advantages_that_are_no_number(
    per_token: bool, without: Sequence[str]
):
    """With and without rollout log-probs, as the host divides by all samples, or by at least 1 token of each."""
    step = without_advantages(random_step(3), math.nan)
    settings = {"rollout_function_path": None, "calculate_per_token_loss": per_token}
    alone, found = (
        call(x, {"metrics": "core"}, without=without, **settings).metrics["nonfinite_advantages"].item()
        for x in (step, with_a_masked(step))
    )
    size = sum(max(len(x.valid), 1) for x in step.responses) if per_token else len(step.responses)
    assert alone > 0 and found / (size + 1) == pytest.approx(alone / size)
