"""What a recorded run must show: its figures beside the float64 oracle's, from the log-probs that the host dumped.

The oracle is `tests/support/oracle.py`, which imports nothing of `mis_plugins`. A record holds all that a verdict
needs, so a committed record can be judged again without a host.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lab.in_host import by_version
from lab.in_host.by_version import BY_VERSION, NEXT
from lab.in_host.dumps import MicroBatch, Recorded
from mis_plugins.report.readers.curves import our_name

K3_LIMIT = 1e-3
"""The limit where trainer and engine hold equal bf16 weights: 6e-5 to 9e-5 were seen."""
K3_LIMIT_STALE = 1e-2
"""The limit for rollouts of weights that are one update old, or of another run: up to 2e-3 was seen in three
steps at a learning rate of 1e-4, and up to 7e-3 in eight steps."""
RELATIVE, ABSOLUTE = 2e-5, 2e-6
"""Tolerances: hosts add up float32 over a few hundred tokens, and log-perplexities of about 5."""
SPREAD = 100.0
"""Widens the tolerances of spreads, which are roots of differences of squares, and of correlations."""
CURVE = 1e-6
"""Tolerance of values in trackers' files: Tensorboard keeps float32."""
STEP = "train/mis_step/"
HOOK = "train/true_on_policy_"
RESPLIT, RETRACTED = f"{STEP}resplit_", f"{STEP}retracted_"  # of the split, and of the engine: without an oracle
AGAIN = ("train/loss", "train/pg_", "train/grad_norm", "train/mis_", "train/train_rollout_", "train/ppo_kl")
ROUTED, REPLAYED = f"{STEP}route_differs", f"{STEP}route_unequal"
ROUTED_LIMIT = 0.1
"""Share of rows that trainer and engine may route differently: 0.7 to 1.2 % were seen with 8 experts in bf16."""
GRADIENT = 1e-9
CENTERED, CENTER = "centered", ("missing", "target_mass", "behavior_mass", "tail_ratio", "drift", "size")
TAIL = 0.05
"""How far the tail's mass of the trainer may lie from the engine's, where both hold equal bf16 weights."""
WEIGHT_RELATIVE, WEIGHT_ABSOLUTE = 1e-4, 1e-8
"""Tolerances of weights: both sides start from the dump's float32 log-probs, and weights are float32."""


@dataclass(frozen=True)
class Line:
    """One asserted line: what was compared, what was wanted and found, and whether it holds."""

    what: str
    wanted: str
    found: str
    holds: bool


def judge(record: Mapping[str, Any]) -> list[Line]:
    """Judge a record: the run as a whole, and the step whose log-probs the record holds."""
    if record.get("stopped") is not None:
        return list(_of_the_stop(record))
    return [*_of_the_run(record), *_of_the_step(record)]


def _of_the_stop(record: Mapping[str, Any]) -> Iterator[Line]:
    """Check that a planted fault stops the job before its first optimizer step, and is named."""
    code, told, named = record["exit"], record["stopped"]["told"] or "", record["stopped"]["named"]
    yield Line("exit code of train.py", "not 0", str(code), code not in (0, None))
    yield _equal("optimizer steps", 0, len(record["steps"]))
    yield _equal("weight versions of the engine", record["wanted_versions"], record["versions"])
    yield _equal("processes left", 0, record["left"])
    yield Line("what is said of the fault", named, told, bool(re.search(named, told)))


def _of_the_run(record: Mapping[str, Any]) -> Iterator[Line]:
    wanted, steps = record["sizes"]["steps"], record["steps"]
    yield _equal("exit code of train.py", 0, record["exit"])
    yield _equal("optimizer steps", wanted, len(steps))
    yield _equal("weight versions of the engine", record["wanted_versions"], record["versions"])
    yield _equal("processes left", 0, record["left"])
    for text, held in record["log_holds"].items():
        yield Line(f"{text!r} in the log", "True", str(held), held)
    limit = K3_LIMIT_STALE if record["stale"] else K3_LIMIT
    for number, step in enumerate(steps):
        if record["loss"] in BY_VERSION:
            yield from _k3_by_version(step["by_version"], number)
        else:
            yield _at_most(f"k3 of step {number}", step["k3"], limit)
        norm = step["metrics"].get("train/grad_norm", math.nan)
        yield Line(f"gradient norm of step {number}", f"above {GRADIENT:g}", f"{norm:.4g}", norm > GRADIENT)

    yield from _of_the_bits(record)
    yield from _of_the_routes(record["steps"])
    yield from _of_the_split(record)
    if record["loss"] in BY_VERSION:
        yield from _of_the_versions(record["steps"], record["loss"])
    yield from _trained_again(record)


def _trained_again(record: Mapping[str, Any]) -> Iterator[Line]:
    """Compare each step with the host's synchronous run over the same rollouts: every number that both logged."""
    if record.get("again") is None:
        return
    yield _equal("optimizer steps of the synchronous run", len(record["steps"]), len(record["again"]))
    for number, (step, again) in enumerate(zip(record["steps"], record["again"], strict=False)):
        found = step["metrics"]
        names = sorted(name for name in found.keys() & again.keys() if name.startswith(AGAIN))
        differ = [name for name in names if found[name] != again[name]]
        holds = not differ and "train/loss" in names and "train/grad_norm" in names
        told = f"{len(names) - len(differ)} of {len(names)} equal{differ and f', not {differ}' or ''}"
        yield Line(f"step {number} as in the synchronous run", "every number equal", told, holds)


def _k3_by_version(found: Mapping[str, Any], number: int) -> Iterator[Line]:
    """Limit k3 between neighbouring versions alone, because k3 grows with every update in between."""
    if found["k3_fresh"] is not None:
        yield _at_most(f"k3 of step {number}, of sequences by version V alone", found["k3_fresh"], K3_LIMIT)
    if found["k3_near"] is not None:
        yield _at_most(f"k3 of step {number}, at most one update apart", found["k3_near"], K3_LIMIT_STALE)


def _at_most(what: str, found: float, limit: float) -> Line:
    return Line(what, f"at most {limit:g}", f"{found:.2e}", 0 <= found <= limit)


def largest_k3(record: Mapping[str, Any]) -> float:
    """Return the largest k3 of a run's steps that a line limits; NaN of a run without a step."""
    if not record["steps"]:
        return math.nan
    if record["loss"] not in BY_VERSION:
        return max(step["k3"] for step in record["steps"])
    known = (step["by_version"]["k3_near"] for step in record["steps"])
    return max(found for found in known if found is not None)


def _of_the_bits(record: Mapping[str, Any]) -> Iterator[Line]:
    """Compare the log-probs of both sides by bits: all equal under a contract, and some that differ without one."""
    if not record.get("bits"):
        return
    pinned = record["contract"] is not None
    wanted = "none of some" if pinned else "some"
    for number, ((compared, different), step) in enumerate(zip(record["bits"], record["steps"], strict=False)):
        by_hook = step["metrics"].get(f"{HOOK}different", math.nan)
        told = f"{different} of {compared} in the dump, {by_hook:g} a sample by the hook"
        holds = compared > 0 and step["metrics"].get(f"{HOOK}compared", 0) > 0
        holds = holds and ((different == 0 and by_hook == 0) if pinned else (different > 0 and by_hook > 0))
        yield Line(f"log-probs of step {number} that differ", wanted, told, holds)


def _of_the_routes(steps: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    """Check watched routers: each replays the recorded experts, and alone would choose a few others."""
    seen = [(number, step["metrics"]) for number, step in enumerate(steps) if ROUTED in step["metrics"]]
    for number, metrics in seen:
        yield _equal(f"share of rows of step {number} with other experts than recorded", 0.0, metrics[REPLAYED])
        own = metrics[ROUTED]
        yield Line(f"share that the trainer alone routes otherwise in step {number}", f"above 0, below {ROUTED_LIMIT}",
                   f"{own:.4g}", 0 < own < ROUTED_LIMIT)  # fmt: skip


def _of_the_split(record: Mapping[str, Any]) -> Iterator[Line]:
    """Check what another split of the micro-batches changed in the trainer's log-probs of each rollout."""
    expected = record.get("resplit")
    if expected is None:
        return
    wanted = "0" if expected == "equal" else "above 0, at most 1"
    for number, step in enumerate(record["steps"]):
        differ, largest = (step["metrics"].get(RESPLIT + name, math.nan) for name in ("differs", "diff_abs_max"))
        holds = differ == largest == 0 if expected == "equal" else 0 < differ <= 1 and 0 < largest < math.inf
        told = f"{differ:.4g}, by {largest:.4g} at most"
        yield Line(f"share of tokens of step {number} that another split changes", wanted, told, holds)


def bits(batches: Sequence[MicroBatch]) -> tuple[int, int]:
    """Count the valid tokens of a step, and the valid tokens whose two log-probs differ in a bit."""
    pairs = [(struct.pack("d", p), struct.pack("d", b)) for batch in batches for row in batch
             for p, b, live in zip(row.proximal, row.behavior, row.mask, strict=True) if live]  # fmt: skip
    return len(pairs), sum(p != b for p, b in pairs)


def _equal(what: str, wanted: object, found: object) -> Line:
    return Line(what, str(wanted), str(found), wanted == found)


def _of_the_step(record: Mapping[str, Any]) -> Iterator[Line]:
    """Compare loss and metrics of the recorded step with the oracle's."""
    if not record["steps"] or not record["micro_batches"]:
        yield Line("a recorded step", "its log-probs", "none", False)
        return
    number = record.get("recorded", len(record["steps"]) - 1)
    if number >= len(record["steps"]):
        yield Line("a recorded step", f"step {number}", f"{len(record['steps'])} steps", False)
        return
    metrics = record["steps"][number]["metrics"]
    batches = [[Recorded(**row) for row in batch] for batch in record["micro_batches"]]
    if record["loss"] in BY_VERSION and any(row.age is None for batch in batches for row in batch):
        yield Line("versions in the dump", "of every token", "none", False)
        return
    expected = Expected(batches, record["config"], record["loss"], record.get("flags", ()))
    if record["loss"] == CENTERED:
        yield from _centered(expected.loss(), metrics, number)
    else:
        yield _close(f"loss of step {number}", expected.loss(), metrics.get("train/loss"))
    yield from _of_the_objective(expected, metrics, number)
    if record["loss"] in BY_VERSION:
        yield from _weights_by_age(batches, record, metrics, number)
        return
    compared = {name: value for name, value in expected.metrics().items() if f"train/mis_{name}" in metrics
                if record.get("micro_batched", True) or not name.endswith("_mb")}  # fmt: skip
    yield Line(
        "metrics compared", "at least 10", str(len(compared)), len(compared) >= 10 or record["loss"] == "uncorrected"
    )
    for name, value in compared.items():
        yield _close(f"mis_{name} of step {number}", value, metrics[f"train/mis_{name}"])
    yield from _of_the_filter(record, batches, number)
    yield from _exact(expected, metrics, number)
    yield from _of_the_curves(record)


def _centered(uncentered: float, metrics: Mapping[str, float], number: int) -> Iterator[Line]:
    """Check that the engine named a head for each token, and that the loss moved by no more than what was subtracted.

    The dump holds no head, so that the loss itself has no oracle here; tests/loss/test_centering.py has one.
    """
    found = {name: metrics.get(f"train/center_{name}", math.nan) for name in CENTER}
    yield _equal(f"share of tokens of step {number} without a head", 0.0, found["missing"])
    for name in ("target_mass", "behavior_mass"):
        yield Line(f"{name} of the head in step {number}", "above 0, at most 1", f"{found[name]:.4g}",
                   0 < found[name] <= 1 + RELATIVE)  # fmt: skip
    yield Line(f"tail ratio of step {number}", f"1, to {TAIL:g}", f"{found['tail_ratio']:.6g}",
               abs(found["tail_ratio"] - 1) <= TAIL)  # fmt: skip
    yield Line(f"drift of step {number}", "above 0", f"{found['drift']:.3g}", 0 < found["drift"] < math.inf)
    moved = abs(metrics.get("train/loss", math.nan) - uncentered)
    yield _at_most(f"what centering moves the loss of step {number} by", moved, found["size"] + ABSOLUTE)


def _of_the_objective(expected: Expected, metrics: Mapping[str, float], number: int) -> Iterator[Line]:
    """Compare what clip and OPSM held back with the oracle's share.

    In a row of an objective, clip and OPSM must each hold back some tokens and not all.
    """
    for name, value in expected.held_back().items():
        yield _close(f"{name} of step {number}", value, metrics.get(f"train/{name}"))
        if expected.kind == "objective":
            yield Line(f"{name} of step {number} decides", "above 0, below 1", f"{value:.4g}", 0 < value < 1)


def _of_the_filter(record: Mapping[str, Any], batches: Sequence[MicroBatch], number: int) -> Iterator[Line]:
    """Count the responses without a token in the loss, and their tokens whose log-prob the filter replaced."""
    if not record.get("broken"):
        return
    gone = [row for batch in batches for row in batch if not any(row.mask)]
    yield _equal(f"responses taken out of step {number}", record["broken"], len(gone))
    mended = [sum(value == 0 for value in row.behavior) for row in gone]
    yield _equal("their tokens without a log-prob", [1] * record["broken"], mended)


def _of_the_curves(record: Mapping[str, Any]) -> Iterator[Line]:
    """Compare the exact metrics in the tracker's files with the metrics of the host's log, step by step."""
    for kind, points in (record.get("curves") or {}).items():
        compared, wrong = 0, []
        for number, found in points.items():
            logged = record["steps"][int(number)]["metrics"]
            exact = {our_name(name): value for name, value in logged.items() if name.startswith(STEP)}
            wrong += [name for name, value in exact.items()
                      if not math.isclose(found.get(name, math.nan), value, rel_tol=CURVE, abs_tol=CURVE)]  # fmt: skip
            compared += len(exact)
        told = f"{compared}, {len(wrong)} of them otherwise: {', '.join(wrong[:3])}" if wrong else str(compared)
        yield Line(f"exact metrics in the file of {kind}", "at least 40, all equal", told, compared >= 40 and not wrong)


def _of_the_versions(steps: Sequence[Mapping[str, Any]], loss: str) -> Iterator[Line]:
    """Check the versions of all steps: sequences of several versions, old tokens, and no missing log-prob."""
    found = [step["by_version"] for step in steps]
    oldest = max((int(age) for one in found for age in one["ages"]), default=0)
    mixed, scored = sum(one["mixed"] for one in found), sum("recompute" in step["times"] for step in steps)
    if loss == "fresh":
        yield Line("age of the oldest token", "at most 1", str(oldest), oldest <= 1)
    else:
        yield Line("age of the oldest token", "at least 2", str(oldest), oldest >= 2)
        yield Line("sequences of several versions", "at least 1", str(mixed), mixed >= 1)
    for what, name in (("tokens at most one update apart", "k3_near"), ("sequences by version V alone", "k3_fresh")):
        number = sum(one[name] is not None for one in found)
        yield Line(f"steps with {what}", "at least 1", str(number), number >= 1)
    yield _equal("tokens that cannot be weighed", 0, sum(one["lacking"] for one in found))
    if loss == "standard":
        yield _equal("steps with a recompute", 0, scored)
    if loss in ("segment_wise", NEXT):
        yield Line("steps with a recompute", "at least 1", str(scored), scored >= 1)
        yield from _nearer(found)


def _nearer(found: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    """Check that old tokens are nearer to pi_{v+1} than to pi_V: a wrong version would turn this round."""
    pairs = [(one["k3_next"], one["k3_present"]) for one in found if one["k3_next"] is not None]
    nearer, further = (math.fsum(pair[i] for pair in pairs) for i in (0, 1))
    yield Line(
        "k3 of old tokens to log pi_{v+1}", f"below {further:.3g}, to log pi_V", f"{nearer:.3g}", nearer < further
    )


def _weights_by_age(
    batches: Sequence[MicroBatch], record: Mapping[str, Any], metrics: Mapping[str, float], number: int
) -> Iterator[Line]:
    """Compare the weights that the step hook logged, of all tokens and by age, with weights from the dump."""
    wanted = by_version.metrics(batches, record["config"]["weight"]["upper"], record["loss"])
    for name, value in wanted.items():
        found = metrics.get(STEP + name)
        holds = found is not None and math.isclose(value, found, rel_tol=WEIGHT_RELATIVE, abs_tol=WEIGHT_ABSOLUTE)
        yield Line(f"{name} of step {number}", f"{value:.7g}", "not logged" if found is None else f"{found:.7g}", holds)


def _exact(expected: Expected, metrics: Mapping[str, float], number: int) -> Iterator[Line]:
    """Compare the exact metrics of `metrics: all`, which are of the whole step, with the oracle's."""
    logged = {
        name.removeprefix(STEP): value
        for name, value in metrics.items()
        if name.startswith(STEP) and not name.startswith((RESPLIT, RETRACTED))
    }
    if not logged:
        return
    wanted = {name: value for name, value in expected.of_the_step().items() if name in logged}
    yield Line("exact metrics compared", "at least 40", str(len(wanted)), len(wanted) >= 40)
    for name, value in wanted.items():
        spread = SPREAD if name.endswith(("std", "correlation")) else 1.0
        yield _close(f"mis_step/{name} of step {number}", value, logged[name], spread)


def _close(what: str, wanted: float, found: float | None, wider: float = 1.0) -> Line:
    if found is None:
        return Line(what, f"{wanted:.7g}", "not logged", False)
    holds = math.isclose(wanted, found, rel_tol=RELATIVE * wider, abs_tol=ABSOLUTE * wider)
    return Line(what, f"{wanted:.7g}", f"{found:.7g}", holds)


class Expected:
    """The oracle's answers for one optimizer step, in which the target is still the proximal policy."""

    def __init__(self, batches: Sequence[MicroBatch], config: dict[str, Any], loss: str, flags: Sequence[str] = ()):
        import oracle

        self.batches, self.kind = batches, loss
        self.one_sample = "--custom-generate-function-path" not in flags
        self.objective, self.opsm = config.get("objective") or {}, config.get("opsm")
        self.clip = {side: _number_after(flags, flag) for side, flag in CLIPS.items()}
        self.samples = [[oracle.Sample(row.proximal, row.behavior, row.mask) for row in batch] for batch in batches]
        self.config = {key: value for key, value in config.items() if key in KEYS}
        self.corrected = [oracle.correct(batch, self.config, self._others(batch)) for batch in self.samples]

    def _others(self, batch: Any) -> list[Any]:
        """Return the micro-batches that share the mean weight with `batch`."""
        scope = ((self.config.get("weight") or {}).get("normalize") or {}).get("scope")
        return [other for other in self.samples if other is not batch] if scope == "rollout" else []

    def loss(self) -> float:
        """Average -A w, or the surrogate, over each response's valid or kept tokens, then over responses."""
        total = 0.0
        for batch, corrected in zip(self.batches, self.corrected, strict=True):
            for i, row in enumerate(batch):
                factors = self._factors(row, corrected.weights[i], corrected.keep[i])
                if self.kind in ("objective", CENTERED, NEXT):
                    total += self._surrogate(row, factors)
                    continue
                counted = corrected.keep[i] if self.kind == "kept" else row.mask
                total -= _mean(counted, [a * w for a, w in zip(row.advantages, factors, strict=True)])
        return total / sum(map(len, self.batches))

    def _factors(self, row: Recorded, weights: Sequence[float], keep: Sequence[bool]) -> list[float]:
        """Return the weight of each token, 0 where the token is rejected."""
        if self.kind == "uncorrected":
            return [1.0] * len(weights)
        if self.kind in BY_VERSION:
            return by_version.factors(row, self.config["weight"]["upper"], self.kind)
        stays = self._stays(row)
        return [w if kept and stay else 0.0 for w, kept, stay in zip(weights, keep, stays, strict=True)]

    def _stays(self, row: Recorded) -> list[bool]:
        """Tell which tokens OPSM keeps."""
        from loss_oracle import opsm_keep

        if self.opsm is None:
            return [True] * len(row.mask)
        reference = row.proximal if self.opsm.get("reference") == "proximal" else row.behavior
        by_sequence = self.opsm.get("advantage") == "sequence"
        return opsm_keep(self._response(row, ()), reference, self.opsm["delta"], by_sequence)

    def _surrogate(self, row: Recorded, factors: Sequence[float]) -> float:
        """Average the configured surrogate over a response's valid tokens."""
        from loss_oracle import policy_sums

        response = self._response(row, factors)
        valid = len(response.valid)
        return policy_sums([response], self._spec(), [response])[0] / valid if valid else 0.0

    def _response(self, row: Recorded, factors: Sequence[float]) -> Any:
        from loss_oracle import Response

        old = row.behavior if self.objective.get("old") == "behavior" else row.proximal
        if self.kind == NEXT:
            old = [by_version.numerator(row, t, NEXT) for t in range(len(row.mask))]
        return Response(row.proximal, old, row.proximal, row.advantages, factors, row.mask)

    def _spec(self) -> Any:
        from loss_oracle import Spec

        fields: dict[str, Any] = {name: self.objective[name] for name in SHAPE if name in self.objective}
        fields |= {side: value for side, value in self.clip.items() if value is not None}
        return Spec(**fields)

    def held_back(self) -> dict[str, float]:
        """Average over responses the shares that the objective's clip holds back and that OPSM masks."""
        from loss_oracle import held_back

        rows = [row for batch in self.batches for row in batch]
        found: dict[str, float] = {}
        if self.opsm is not None:
            masked = [_mean(row.mask, [not stay for stay in self._stays(row)]) for row in rows]
            found["opsm_clipfrac"] = math.fsum(masked) / len(rows)
        if self.objective or self.kind == NEXT:
            spec = self._spec()
            shares = [_mean(row.mask, [held_back(self._response(row, ()), t, spec) and valid
                                       for t, valid in enumerate(row.mask)]) for row in rows]  # fmt: skip
            found["pg_clipfrac"] = math.fsum(shares) / len(rows)
        return found

    def of_the_step(self) -> dict[str, float]:
        """Compute the exact metrics over all samples at once, where no micro-batch has a mean weight of its own."""
        import oracle
        from step_oracle import step_metrics

        everything = [sample for batch in self.samples for sample in batch]
        found, _ = step_metrics(everything, self.config, oracle.correct(everything, self.config))
        return found

    def metrics(self) -> dict[str, float]:
        """Average each metric as the hosts do: over a response's valid tokens, then over all responses.

        A response without a valid token adds 0 to the mean. Metrics that Miles's `mis.py` lacks are scaled
        back within the micro-batch that holds such a response, but for a generate function of the user's: it may make
        several samples of a rollout.
        """
        import oracle

        scale = oracle.host_scale if self.one_sample else lambda name, samples: 1.0
        totals: dict[str, float] = {}
        for batch, samples, corrected in zip(self.batches, self.samples, self.corrected, strict=True):
            for name, rows in corrected.metrics.items():
                added = sum(_mean(row.mask, values) for row, values in zip(batch, rows, strict=True))
                totals[name] = totals.get(name, 0.0) + added * scale(name, samples)
            for name, value in oracle.batch_metrics(samples, self.config, corrected).items():
                taught = sum(any(row.mask) for row in batch)
                totals[name] = totals.get(name, 0.0) + value * taught * scale(name, samples)
        return {name: total / sum(map(len, self.batches)) for name, total in totals.items()}


CLIPS = {"low": "--eps-clip", "high": "--eps-clip-high"}
SHAPE = ("surrogate", "ratio")
KEYS = ("weight", "reject", "denominator", "on_all_rejected", "aggregate")


def _number_after(flags: Sequence[str], flag: str) -> float | None:
    """Return the number that follows a flag of the row; None where the row keeps the launch script's."""
    return float(flags[flags.index(flag) + 1]) if flag in flags else None


def _mean(mask: Sequence[bool], values: Sequence[float]) -> float:
    """Average over the valid tokens; 0 where there is none."""
    counted = [value for value, valid in zip(values, mask, strict=True) if valid]
    return math.fsum(counted) / len(counted) if counted else 0.0


def k3(batches: Sequence[MicroBatch]) -> float:
    """Average k3 over all valid tokens of a step."""
    logs = [p - b for batch in batches for row in batch
            for p, b, valid in zip(row.proximal, row.behavior, row.mask, strict=True) if valid]  # fmt: skip
    return math.fsum(math.expm1(x) - x for x in logs) / len(logs) if logs else math.nan


def as_rows(batches: Sequence[MicroBatch]) -> list[list[dict[str, Any]]]:
    return [[asdict(row) for row in batch] for batch in batches]
