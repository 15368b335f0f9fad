"""Causes of a mismatch: one record each, with what it looks like, where it comes from, how to mend it, how it is seen.

A detector reads `Facts` and returns the evidence in words, or None. `lab/report_causes.py` measures how often
each detector is right: 50 clean runs, and 50 with each cause planted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from mis_plugins.metrics import slope
from mis_plugins.report.changes import Change
from mis_plugins.report.evidence import Evidence, Moments

STANDARD_ERRORS = 6.0
LEAST_SEQUENCES = 16
END_FACTOR = 5.0
BEGINNING_FACTOR = 2.0
ID_SHARE = 0.013
BROKEN_CORRELATION, BROKEN_SIZE = 0.5, 1.0
ROUTE_FACTOR, AGE_FACTOR, JUMP_FACTOR = 1.2, 2.0, 2.0
LEAST_TOKENS = 200
SURE_SHARE = 1e-4

Table = Sequence[Mapping[str, float | str]]


@dataclass(frozen=True)
class Facts:
    """Everything that a detector may read of a run.

    sums: sums of the whole run, by the names of `metrics/rows.py`.
    places: tables of `places.Tables`.
    changes: changes of kl_k3 over the steps.
    """

    sums: Mapping[str, float]
    evidence: Evidence
    places: Mapping[str, Table]
    changes: Sequence[Change]

    @property
    def relation(self) -> slope.Relation | None:
        return slope.relation(self.sums)


Detect = Callable[[Facts], str | None]


@dataclass(frozen=True)
class Cause:
    """One cause of a mismatch.

    symptom: what a report shows where the cause is at work.
    cause: what is wrong.
    fix: what to do.
    detect: the evidence in words; None where there is none, or too little data to tell.
    threshold: where the detector draws the line, and why there.
    explains: causes whose detectors fire too where this one is at work.
    """

    title: str
    symptom: str
    cause: str
    fix: str
    detect: Detect
    threshold: str
    explains: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Finding:
    """A cause that a detector found, with the evidence.

    also: other causes whose signs this one brings about, so that they are not told apart from it.
    """

    name: str
    cause: Cause
    evidence: str
    also: tuple[str, ...] = ()


def findings(facts: Facts) -> list[Finding]:
    """The causes that show, less those whose signs another one explains."""
    shown = {
        name: evidence for name, cause in CAUSES.items() if (evidence := cause.detect(facts)) is not None
    }
    explained = {other for name in shown for other in CAUSES[name].explains}
    return [
        Finding(name, CAUSES[name], evidence, tuple(sorted(CAUSES[name].explains & shown.keys())))
        for name, evidence in shown.items()
        if name not in explained
    ]


def _nonfinite(facts: Facts) -> str | None:
    train, rollout = (facts.sums.get(f"nonfinite_{side}", 0.0) for side in ("train", "rollout"))
    if not train + rollout:
        return None
    return f"{train:.0f} trainer log-probs and {rollout:.0f} rollout log-probs of valid tokens are NaN or infinite."


def _broken_advantages(facts: Facts) -> str | None:
    count = facts.evidence.broken_advantages
    return f"{count} advantages of valid tokens are NaN or infinite." if count else None


def _placeholder(facts: Facts) -> str | None:
    count, usable = facts.evidence.sure_yet_unlikely, max(facts.sums["usable"], 1)
    if count < 3 or count / usable < SURE_SHARE:
        return None
    return (
        f"{count} valid tokens ({count / usable:.2%}) have a rollout log-prob of exactly 0, while the trainer finds "
        "them unlikely: placeholders of tokens that the engine never sampled."
    )


def _changed_response(facts: Facts) -> str | None:
    if not facts.evidence.sizes:
        return None
    size, correlation = torch.cat(facts.evidence.sizes), torch.cat(facts.evidence.correlations)
    if size.numel() < LEAST_SEQUENCES:
        return None
    others = float(size.median())
    broken = int(((correlation < BROKEN_CORRELATION) & (size > max(BROKEN_SIZE, 5 * others))).sum())
    if not broken or broken > size.numel() / 2:
        return None
    return (
        f"In {broken} of {size.numel()} sequences the two lists of log-probs have nothing to do with each other "
        f"(correlation below {BROKEN_CORRELATION}, mean |log r| above {BROKEN_SIZE:g}), while the median sequence has "
        f"a mean |log r| of {others:.2g}."
    )


def _stands_out(facts: Facts, part: str, factor: float) -> tuple[Moments, Moments] | None:
    """|log r| of the responses' `part` and of their middle; None where the part does not stand out."""
    found, middle, excess = (facts.evidence.moments[name] for name in (part, "middle", f"{part}_excess"))
    if found.count < LEAST_SEQUENCES or found.mean < factor * middle.mean:
        return None
    return (found, middle) if excess.mean > STANDARD_ERRORS * excess.error else None


def _end_token(facts: Facts) -> str | None:
    if (found := _stands_out(facts, "end", END_FACTOR)) is None:
        return None
    end, middle = found
    return (
        f"The last token of a response has a mean |log r| of {end.mean:.2g}, the tokens before it {middle.mean:.2g} "
        f"({end.count:.0f} responses that ended by themselves)."
    )


def _template(facts: Facts) -> str | None:
    if (found := _stands_out(facts, "beginning", BEGINNING_FACTOR)) is None:
        return None
    first, middle = found
    return (
        f"The first four tokens of a response have a mean |log r| of {first.mean:.2g}, later ones {middle.mean:.2g}; "
        f"the mean log r of the first ones is {facts.evidence.moments['beginning_signed'].mean:+.2g}."
    )


def _raw(facts: Facts) -> str | None:
    found = facts.relation
    if found is None or found.tokens < slope.LEAST_TOKENS or not slope.not_sampled_from(found):
        return None
    scale = f"; the slope of log pi_old on log mu is {found.slope:.3f}" if slope.scaled(found) else ""
    return (
        f"The mean of pi_old / mu is {found.mean_ratio:.4f} +- {found.mean_ratio_error:.4f}, and can only be 1 where "
        f"mu is what the engine sampled from{scale}."
    )


def _temperature(facts: Facts) -> str | None:
    found = facts.relation
    if found is None or not slope.scaled(found) or slope.not_sampled_from(found):
        return None
    return (
        f"log pi_old follows log mu with a slope of {found.slope:.3f} (inverse regression {found.inverse:.3f}), as if "
        f"the engine's log-probs alone were divided by a temperature of {found.implied_temperature:.2f} or one "
        "further from 1."
    )


def _cut_off(facts: Facts) -> str | None:
    found = facts.relation
    if found is None or found.tokens < slope.LEAST_TOKENS or not slope.cut_off(found):
        return None
    if found.mean_log_ratio > 0 or abs(math.log(found.mean_ratio) - found.mean_log_ratio) > 0.2:
        return None
    return (
        f"The mean of pi_old / mu is {found.mean_ratio:.4f} +- {found.mean_ratio_error:.4f}: the engine samples from "
        f"{found.mean_ratio:.1%} of the probability mass and renormalizes."
    )


def _other_weights(facts: Facts) -> str | None:
    tokens, found = facts.sums["usable"], facts.relation
    mean = facts.sums["log_ratio"] / max(tokens, 1)
    if tokens < LEAST_TOKENS or mean > -slope.UNLIKELY or (found is not None and slope.cut_off(found)):
        return None
    return (
        f"The mean of log pi_old - log mu is {mean:.2f} a token: the trainer finds the engine's tokens unlikely nearly "
        "everywhere."
    )


def _stale(facts: Facts) -> str | None:
    known = {str(row["bucket"]): row for row in facts.places.get("age", ())}
    fresh, old = known.get("0"), [row for name, row in known.items() if name != "0"]
    tokens = sum(float(row["tokens"]) for row in old)
    if fresh is None or tokens < LEAST_TOKENS or float(fresh["tokens"]) < LEAST_TOKENS:
        return None
    mean, square = (
        sum(float(row[name]) * float(row["tokens"]) for row in old) / tokens
        for name in ("kl_k3", "k3_squared")
    )
    error = math.sqrt(_variance(fresh) / float(fresh["tokens"]) + max(square - mean**2, 0.0) / tokens)
    base = float(fresh["kl_k3"])
    if mean < AGE_FACTOR * base or mean - base < STANDARD_ERRORS * error:
        return None
    return f"kl_k3 is {base:.2g} at age 0 and {mean:.2g} at age 1 and above."


def _variance(row: Mapping[str, float | str]) -> float:
    return max(float(row["k3_squared"]) - float(row["kl_k3"]) ** 2, 0.0)


def _jump(facts: Facts) -> str | None:
    up = [one for one in facts.changes if one.sudden and one.apart and one.factor >= JUMP_FACTOR]
    if not up:
        return None
    first = up[0]
    return (
        f"kl_k3 jumps from {first.before:.2g} to {first.after:.2g} at step {first.step}, and stays there: other "
        "weights or settings of the engine, or a policy that became unstable."
    )


def _differing_weights(facts: Facts) -> str | None:
    table = facts.evidence.by_id
    if table is None:
        return None
    share, errors = id_share(table)
    if share < ID_SHARE or errors < STANDARD_ERRORS:
        return None
    return (
        f"{share:.1%} of what separates the policies is the same at every occurrence of a token id ({errors:.0f} "
        "standard errors): the weights of both sides differ. Which layers do, log-probs do not tell."
    )


def id_share(table: torch.Tensor) -> tuple[float, float]:
    """Share of the variance of log r that belongs to the token id beyond two lines, and its standard errors.

    One line is in log mu; the other in the variance of log r within the id, which lowers the mean of an id by itself,
    because an engine samples what its own error makes likelier. The share is the mean product of two residuals of one
    id, over the mean square of a residual: 0 where residuals of different occurrences are independent, whatever their
    sizes are. An id that occurs n times counts n times.
    """
    n, r, m, rr, mm, rm = table.sum(1).tolist()
    if n < LEAST_TOKENS:
        return 0.0, 0.0
    spread = mm / n - (m / n) ** 2
    line = (rm / n - r * m / n**2) / spread if spread > 0 else 0.0
    shift = r / n - line * m / n
    count, sr, sm, srr, smm, srm = table[:, table[0] >= 2].unbind()
    total = sr - line * sm - shift * count
    squares = srr + line**2 * smm + shift**2 * count - 2 * line * srm - 2 * shift * (sr - line * sm)
    total, squares = _less_own_variance(count, total, squares)
    products = ((total.square() - squares) / (count - 1)).sum()
    error = (2 * squares.square() / (count * (count - 1))).sum().sqrt()
    if not squares.sum() > 0:
        return 0.0, 0.0
    return float(products / squares.sum()), float(products / error)


def _less_own_variance(
    count: torch.Tensor, total: torch.Tensor, squares: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of residuals and of their squares for each id, less a line in the variance within the id."""
    variance = (squares - total.square() / count) / (count - 1)
    centred = variance - (variance * count).sum() / count.sum()
    spread = (count * centred.square()).sum()
    moved = centred * ((total * centred).sum() / spread if spread > 0 else 0.0)
    return total - moved * count, squares - 2 * moved * total + count * moved.square()


def _route(facts: Facts) -> str | None:
    known = {str(row["bucket"]): row for row in facts.places.get("route", ())}
    same, differs = known.get("same"), known.get("differs")
    if same is None or differs is None or float(differs["tokens"]) < LEAST_TOKENS:
        return None
    error = math.sqrt(sum(_variance(row) / float(row["tokens"]) for row in (same, differs)))
    low, high = float(same["kl_k3"]), float(differs["kl_k3"])
    if high < ROUTE_FACTOR * low or high - low < STANDARD_ERRORS * error:
        return None
    share = float(differs["tokens"]) / (float(same["tokens"]) + float(differs["tokens"]))
    return f"Where the experts differ ({share:.1%} of the tokens) kl_k3 is {high:.2g}, elsewhere {low:.2g}."


OF_SCALE = frozenset({"raw-log-probs", "temperature", "top-p", "differing-weights"})
SIX = "six standard errors, which noise alone reaches once in a billion"
CAUSES: dict[str, Cause] = {
    "non-finite": Cause(
        "Log-probs that are no numbers",
        "`nonfinite_train_tokens` or `nonfinite_rollout_tokens` is above 0.",
        "An overflow in the trainer (fp16 logits, a diverged step), or a rollout function that fills in NaN.",
        "Find the samples with `mis_plugins.mis.drop_broken_samples`; keep logits in bf16 or fp32.",
        _nonfinite,
        "One such token is enough: a log-prob is never infinite in a healthy run.",
    ),
    "non-finite-advantage": Cause(
        "Advantages that are no numbers",
        "Advantages of valid tokens are NaN or infinite. No log-prob need differ.",
        "A reward that is NaN or infinite, or a division by the spread of a group whose rewards are all equal.",
        "Look at the rewards, and at what normalizes them. `mis_plugins.mis.loss` takes such an advantage as 0.",
        _broken_advantages,
        "One such token is enough: an advantage is never infinite in a healthy run.",
    ),
    "placeholder": Cause(
        "Placeholders inside the loss",
        "Tokens with a rollout log-prob of exactly 0 that the trainer finds unlikely.",
        "The loss mask covers tokens that the engine never sampled: a tool's answer, a template's end.",
        "Set the loss mask to 0 there (`Sample.loss_mask`), or have the engine score these tokens.",
        _placeholder,
        "Three tokens and 0.01% of all: an engine reports 0 only where a token is certain, and there the trainer "
        "agrees.",
        OF_SCALE,
    ),
    "changed-response": Cause(
        "A response changed at equal length",
        "A few sequences in which both log-probs have nothing to do with each other; all others are fine.",
        "Text was decoded, edited and tokenized again, or samples and log-probs were paired wrongly.",
        "Train on the engine's own token ids; never decode and encode in between.",
        _changed_response,
        "A correlation below 0.5, and a mean |log r| above 1 nat and five times the median; precisions down to int5 "
        "keep a correlation above 0.9. More than half of all sequences is another cause.",
        OF_SCALE,
    ),
    "end-token": Cause(
        "A missing end token",
        "|log r| is large at the last token of responses, and small before it.",
        "One side does not see the end token, which was cut off, added by the host, or stands in another template.",
        "Keep the engine's end token among the response's tokens, or take the added one out of the loss mask.",
        _end_token,
        f"Five times the middle of the same responses, and {SIX}. An end token is likely as a rule, so that its own "
        "|log r| is below the others'.",
        OF_SCALE | {"placeholder"},
    ),
    "template": Cause(
        "A cut or changed template",
        "|log r| is large at the first tokens of responses, and falls with the position.",
        "Both sides saw other prompts: a system prompt or a generation prompt is missing, or a prompt was cut.",
        "Hand the trainer the prompt's token ids as the engine received them.",
        _template,
        f"Twice the middle of the same responses, and {SIX}. A real model's mismatch is nearly flat over "
        "positions.",
        OF_SCALE | {"other-weights"},
    ),
    "raw-log-probs": Cause(
        "Tokens were not sampled from the reported log-probs",
        "`ratio_mean` is above 1 by far more than `ratio_mean_error`.",
        "The engine samples at a temperature or with penalties and returns raw log-probs, or reports another version.",
        "Have the engine return processed log-probs (after temperature), of the weights that sampled.",
        _raw,
        "0.005 and six standard errors from 1, on 16,000 tokens: `metrics/slope.py` derives and simulates both.",
        frozenset({"differing-weights"}),
    ),
    "temperature": Cause(
        "A temperature on one side",
        "`slope` and `slope_inverse` lie on one side of 1.",
        "The engine's log-probs are divided by a temperature and the trainer's are not, or by another one.",
        "Give both sides the same `--rollout-temperature`.",
        _temperature,
        "0.02 and six standard errors from 1, on 16,000 tokens: `metrics/slope.py` derives and simulates both.",
        frozenset({"differing-weights"}),
    ),
    "top-p": Cause(
        "Top-p, top-k or min-p on one side",
        "`ratio_mean` is below 1 by far more than `ratio_mean_error`.",
        "The engine samples from a part of the vocabulary and renormalizes; the trainer does not.",
        "Set `--rollout-top-p 1 --rollout-top-k -1`, or hand the kept tokens to the trainer.",
        _cut_off,
        "0.005 and six standard errors below 1, on 16,000 tokens, with an ESS above one half, and log r nearly the "
        "same everywhere: `metrics/slope.py`.",
    ),
    "other-weights": Cause(
        "Other weights",
        "The mean of log r is below -1: the trainer finds nearly every token unlikely.",
        "Trainer and engine hold different weights: a failed update, another checkpoint, swapped layers, or so few "
        "bits that little is left of them.",
        "Compare the weights of both sides after an update (`python -m true_on_policy weights`).",
        _other_weights,
        "1 nat a token: three times what an int3 engine shows (`metrics/slope.py`). With a policy that had hardly "
        "learned, int3 reached the line.",
        OF_SCALE | {"changed-response"},
    ),
    "stale-weights": Cause(
        "Stale weights",
        "kl_k3 grows with the age of tokens.",
        "The engine samples with weights from before some updates: rollouts wait in a queue, or an update was late.",
        "Bound the age of rollouts, use segment-wise weights.",
        _stale,
        f"Twice that of age 0 and {SIX}.",
        frozenset({"differing-weights", "jump"}),
    ),
    "jump": Cause(
        "The mismatch jumped at one step",
        "kl_k3 jumps at a step and stays.",
        "From this step on the engine has other weights or settings, as after an update that it missed. Or the policy "
        "itself became unstable, and the same engine errs more on it. Log-probs do not tell which.",
        "Compare the engine's weight version with the step, and look at the reward around it. Where the versions "
        "agree, the policy changed: resume from before, with a correction.",
        _jump,
        "A factor of 2 between levels that last three steps each, six standard errors of the noise between neighbours, "
        "half of the change within two steps, and no step of one level within the other.",
        frozenset({"differing-weights"}),
    ),
    "differing-weights": Cause(
        "Quantized or slightly old weights",
        "A part of log r is the same at every occurrence of a token id.",
        "The engine's weights have fewer bits than the trainer's, were rounded differently, or are a little old: in "
        "the output layer, in layers before it, or in all. Log-probs do not tell which.",
        "Compare layers with `python -m true_on_policy diff`, and give more bits to those that differ most. Cheap to "
        "try: keep the LM head in bf16 or fp32 on the engine (leave `lm_head` out of the quantization).",
        _differing_weights,
        f"1.3% of the variance beyond lines in log mu and in the id's own variance, and {SIX}. Noise of a computation "
        "differs from one occurrence to the next, and reaches 1%. An error of weights moves the same token the same "
        "way: a head in int4 beside much noise reaches 1.7%, and a layer before the head as much as the head.",
    ),
    "route": Cause(
        "A route that replay missed",
        "kl_k3 is far higher at tokens whose experts differ.",
        "A mixture of experts chose other experts in the trainer than in the engine.",
        "Replay the engine's routes (R3: `--use-rollout-routing-replay`).",
        _route,
        f"1.2 times the tokens with the same experts, 200 tokens, and {SIX}. Clean runs reach 1.1.",
        OF_SCALE,
    ),
}
CANNOT = (
    "Log-probs of sampled tokens alone cannot tell: which layer differs, whether both sides share one mistake, what "
    "the tokens would have been without the mismatch, and lower precision from weights that are a little old in a "
    "single step without versions. Nor do they tell whether the run would have fallen without any mismatch, by its "
    "learning rate or its rewards, which no config mends: run it once with the trainer's own precision in the engine."
)
