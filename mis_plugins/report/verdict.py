"""The verdict in words: what matters first, each sentence with the number under it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from mis_plugins.explain.limits import FIRST, LIMITS
from mis_plugins.explain.rungs import Rung, record
from mis_plugins.report.causes import EVEN, FEW, OF_PLACES, PRECISION
from mis_plugins.report.changes import SMALLEST, Change, changes, smallest_rise
from mis_plugins.report.proposal import NOTHING, Proposal
from mis_plugins.report.readers.curves import IN_BYPASS
from mis_plugins.report.readers.files import Curve, Problem, Problems
from mis_plugins.report.record import lacking
from mis_plugins.report.survey import Report

ROUNDING = 1e-5  # by which a number may lie outside of what it can be
AS_MUCH = 3.0  # within this factor of a rung a mismatch counts as that rung's
CALM, WATCH, ALARM = "calm", "watch", "alarm"
CERTAIN = "have a log-prob of exactly 0 on both sides, as padding has; take padding out of the loss mask."
COPIED = "are of responses with equal lists on both sides, as copies have; log what the trainer itself computed."
Steps = Mapping[int, Mapping[str, float]]  # of each step numbers by name
OF_CORRECTION = {"kept_fraction", "ess"}
SAME = "as where the trainer's log-probs are the engine's own (--use-rollout-logprobs), or both are equal bit for bit"
# Numbers that measure nothing at one value, and where they have it.
EMPTY = (
    ((IN_BYPASS, "log_prob_diff_abs_mean"), 0.0, SAME),
    (("train_log_ppl", "rollout_log_ppl"), 0.0, "as where all log-probs are 0"),
    (("kept_fraction", "ess"), 1.0, "as without a correction"),
)
OF_CONFIG = {"all_rejected", "few_kept", "product_too_long", "weights_of_one"}  # alarms of a step, of its correction
MOST_LOST = 0.1  # of what was read: the most that may be unread in a calm run, and the most padding that goes untold
TOLD = {"What to do": "name a dump: without tokens no cause can be told."}
WHY = (
    "log-probs alone cannot tell. An engine of lower precision differs without the sign of any cause, and so does "
    "one whose weights are a little old: look at its quantization, and compare layers with "
    "`python -m true_on_policy diff`."
)


@dataclass(frozen=True)
class Verdict:
    """What to say first.

    level: calm, watch or alarm.
    headline: one sentence.
    parts: how large, since when, where, and what would have helped: a sentence beside each, or none.
    measured: whether a number of the mismatch was read; otherwise the level says nothing of the run.
    """

    level: str
    headline: str
    parts: Mapping[str, str]
    measured: bool = True

    @property
    def lines(self) -> list[str]:
        """The parts in words."""
        return [f"{name}: {text}" for name, text in self.told.items()]

    @property
    def told(self) -> dict[str, str]:
        """The parts that have a sentence."""
        return {name: text for name, text in self.parts.items() if text}


def beyond(values: Mapping[str, float]) -> list[str]:
    """The numbers that lie beyond their limits, in words."""
    return [f"{name} is {words}" for name in LIMITS if name in values and (words := _beyond(name, values[name]))]


def _beyond(name: str, value: float) -> str:
    limits = LIMITS[name]
    if math.isnan(value):
        return "NaN"
    if not possible(name, value):
        return f"{value:.3g}, which cannot be"
    if value > limits.high:
        return f"{_apart(value, limits.high)}, above {limits.high:g}"
    return f"{_apart(value, limits.low)}, below {limits.low:g}" if value < limits.low else ""


def _apart(value: float, limit: float) -> str:
    """The value with three digits, or with as many as tell it from the limit."""
    digits = next((n for n in range(3, 18) if float(f"{value:.{n}g}") != limit), 17)
    return f"{value:.{digits}g}"


def possible(name: str, value: float) -> bool:
    """Whether a number of `LIMITS` is finite and can be at all, but for rounding."""
    limits = LIMITS[name]
    return math.isfinite(value) and limits.least - ROUNDING <= value <= limits.most + ROUNDING


def verdict(report: Report, proposal: Proposal | None, curves: Sequence[Curve] = ()) -> Verdict:
    """The verdict on a run with tokens, which may be a few of the steps that curves beside them show."""
    whole, beside = _of_tokens(report, proposal), of_curves(curves, least=LIMITS[FIRST].high)
    if not beside.measured or beside.level == CALM:
        return whole
    parts = {"Curves beside": beside.headline, **whole.parts}
    if whole.level != CALM:
        return replace(whole, parts=parts, level=max(whole.level, beside.level, key=(WATCH, ALARM).index))
    since_when = beside.parts["Since when"] or whole.parts["Since when"]
    do = {"What to do": "name dumps of the steps that the curves show too.", "What to run with": ""}
    do |= {"Since when": since_when}
    headline = "What was read of tokens agrees as well as a healthy run, but the curves beside call for a look."
    return Verdict(beside.level, headline, parts | do)


def _of_tokens(report: Report, proposal: Proposal | None) -> Verdict:
    """The verdict on the tokens alone."""
    if report.evidence.certain == report.usable:
        return _of_nothing(report)
    limits, level, kl_k3 = beyond(report.whole), level_of(report), report.whole[FIRST]
    is_explained = report.findings and report.findings[0].name != PRECISION
    parts = {
        "How large": f"{FIRST} is {kl_k3:.3g} a token. {in_words(kl_k3)}",
        "Beyond its limit": f"{'; '.join(limits)}." if limits else "",
        "Why": WHY if _differ(report) and not is_explained else "",
        **_at_steps(report),
        **_unread(report),
        "Certain on both sides": _alike(report, report.evidence.certain, CERTAIN),
        "Equal on both sides": _alike(report, report.evidence.copied, COPIED),
        "Since when": since({step: row[FIRST] for step, row in report.steps.items() if FIRST in row}, report.changes),
        "Where": _where(report),
        "What to run with": _helped(proposal) if proposal else "",
    }
    return Verdict(level, _headline(report, level), parts)


def level_of(report: Report) -> str:
    """An alarm at a kl_k3 beyond its alarm or at a cause that is more than low precision; calm within all limits."""
    is_explained = any(finding.name != PRECISION for finding in report.findings)
    bad = _bad_steps(report)
    if is_explained or not report.whole[FIRST] <= LIMITS[FIRST].alarm or max(report.steps) in bad:
        return ALARM
    if bad or _of_config(report):
        return WATCH
    far = beyond({**report.whole, FIRST: _beside_alike(report)}) or _rises(report.changes, LIMITS[FIRST].high)
    return WATCH if far or report.findings or _lost(report) or report.usable < FEW else CALM


def _bad_steps(report: Report) -> dict[int, float]:
    """The kl_k3 of the steps that are an alarm by themselves, and have tokens enough."""
    steps = {step: row[FIRST] for step, row in report.steps.items() if FIRST in row and row["tokens"] >= FEW}
    return {step: x for step, x in steps.items() if x > LIMITS[FIRST].alarm}


def _of_config(report: Report) -> list[str]:
    """The alarms of the steps about what the run's own config does, in words."""
    return [f"at step {step} {message}" for step, name, message in report.alarms if name in OF_CONFIG]


def _differ(report: Report) -> list[str]:
    """The numbers beyond their limits that the correction does not change, in words."""
    return beyond({name: x for name, x in report.whole.items() if name not in OF_CORRECTION})


def _at_steps(report: Report) -> dict[str, str]:
    """Which steps are beyond the alarm where the run is not, and the first alarm of the run's own config."""
    bad, alarms = _bad_steps(report), _of_config(report)
    worst = max(bad, key=lambda step: bad[step], default=0)
    over = f"at {len(bad)} of {len(report.steps)} steps {FIRST} is above {LIMITS[FIRST].alarm:g}"
    steps = f"{over}; the highest is {bad.get(worst, 0):.3g}, at step {worst}."
    more = f"; and {len(alarms) - 1} more alarms" if alarms[1:] else ""
    return {
        "Beyond its limit at some steps": steps if bad and report.whole[FIRST] <= LIMITS[FIRST].high else "",
        "What the config does": f"{alarms[0]}{more}." if alarms else "",
    }


def _others(report: Report) -> int:
    """The number of tokens beside padding and copies."""
    return report.usable - report.evidence.certain - report.evidence.copied


def _beside_alike(report: Report) -> float:
    """The kl_k3 without padding and copies, which add nothing to any sum: equal lists, and 0 on both sides."""
    return report.whole[FIRST] * report.usable / max(_others(report), 1)


def _alike(report: Report, count: int, how: str) -> str:
    """How many tokens agree to the bit, where these are more than `MOST_LOST` and not all; else an empty text."""
    rest = f"{FIRST} of the others is {_beside_alike(report):.3g}." * bool(_others(report))
    return f"{count} of {report.usable} tokens {how} {rest}" * (MOST_LOST * report.usable < count < report.usable)


def _lost(report: Report) -> str:
    """What of a run was not read or measured, in words; empty where that is little."""
    rejected = _rejected(report) if report.rejected > MOST_LOST * report.sequences else ""
    return rejected or "a file broke off, or is empty" * bool(report.torn) or _ended(report.steps)


def _unread(report: Report) -> dict[str, str]:
    """How many records were rejected, and which files could not be read to their end."""
    rejected = f"{_rejected(report)}, so the verdict is on the others." if report.rejected else ""
    again = report.evidence.repeated
    twice = f"{again} of {report.sequences} responses have all log-probs of an earlier one, and count twice."
    more = f" and {len(report.together) - 2} more" if report.together[2:] else ""
    same = f"steps stand twice, or have no number, in {' and '.join(report.together[:2])}{more}; "
    none = f"{report.empty} of {report.sequences} responses have no token that can be compared."
    alone = {"Read as one run": f"{same}report each run alone where there are several." if report.together else ""}
    ended = {"Not measured to the end": f"{why}." if (why := _ended(report.steps)) else ""}
    parts = {"Not read": rejected, "Nothing in the loss": none if report.empty else ""} | ended
    return parts | {"Read twice": twice if again else ""} | _broke_off(report.torn) | alone


def _broke_off(torn: Sequence[str]) -> dict[str, str]:
    """The files that could not be read to their end, in words; nothing of none."""
    more = f" and {len(torn) - 1} more" if torn[1:] else ""
    return {"Not read to the end": f"{torn[0]}{more}. How much is missing is not known." if torn else ""}


def _rejected(report: Report) -> str:
    return were_rejected(report.rejected, report.rejected + report.sequences)


def were_rejected(count: int, of: int) -> str:
    """How many records were rejected, in words."""
    return f"{count} of {of} record{'' if of == 1 else 's'} {'was' if count == 1 else 'were'} rejected"


def _of_nothing(report: Report) -> Verdict:
    """The verdict where no token can be compared, so that no number tells of a mismatch."""
    valid = int(report.whole["tokens"])
    why = f"none of the {valid} valid tokens has two finite log-probs"
    if report.usable:
        why = f"all log-probs of the {valid} valid tokens are 0"
    elif not valid:
        why = "the loss mask keeps no token"
    look = {"What to do": "look at the loss masks and at the log-probs of both sides."}
    return Verdict(ALARM, f"Nothing was measured: {why}.", look | _unread(report), measured=False)


def of_curves(
    curves: Sequence[Curve], rejected: int = 0, unread: int = 0, problems: Problems | None = None, least: float = 0.0
) -> Verdict:
    """The verdict on curves without tokens, by the last value of each number: a log's row holds only some numbers.

    A number that lay beyond its limit before is told too.

    rejected: number of records of tokens that could not be read.
    unread: number of rows of the curves that could not be read.
    problems: what could not be read, and which files broke off; None where all was read.
    least: the kl_k3 above which a rise counts.
    """
    problems = problems or Problems()
    rows = [(curve, name, step, x) for curve in curves for name, (step, x) in _last(curve.values).items()]
    limits = [
        f"{limit}, at step {step}{_of(curve, curves)}" for curve, name, step, x in rows for limit in beyond({name: x})
    ]
    words = "; ".join(dict.fromkeys(limits))
    logged = (row for curve in curves for _, row in _logged(curve))
    differing = (row for row in logged if row.get("train_log_ppl", 1) or row.get("rollout_log_ppl", 1))
    if not any(_measures(name, x) for row in differing for name, x in row.items()):
        why = words or _unread_curves(curves, rejected, problems.kept)
        return Verdict(ALARM, f"Nothing was read that measures the mismatch: {why}.", TOLD, measured=False)
    earlier = {"Beyond its limit before": _each(curves, _earlier)}
    over_time, rose = _over_time(curves, least)
    read = sum(len(curve.values) for curve in curves)
    few = f"{unread} of {unread + read} rows of the curves." if unread > MOST_LOST * read else ""
    tokens = f"{were_rejected(rejected, rejected)}." if rejected else ""
    lost = {"Tokens were not read": tokens, "Not read": few} | _broke_off([*problems.torn])
    lost |= {"Not logged to the end": _each(curves, lambda curve: _ended(curve.values, curve.replaced))}
    parts, again = TOLD | over_time | _how_large(curves), {"Logged again": _each(curves, _again)}
    if limits:
        alarming = any(name == FIRST and x > LIMITS[FIRST].alarm for _, name, _, x in rows)
        level, headline = ALARM if alarming else WATCH, f"Last seen beyond its limit: {words}."
        return Verdict(level, headline, parts | earlier | lost | again)
    if rose or any((earlier | lost).values()):
        name, text = next((name, text) for name, text in (lost | earlier | over_time).items() if text)
        return Verdict(WATCH, f"{name}: {text}", parts | lost | earlier | over_time | again | {name: ""})
    names = ", ".join(dict.fromkeys(name for _, name, _, _ in rows))
    return Verdict(CALM, f"The curves end within their limits: {names}.", parts | again)


def _measures(name: str, value: float) -> bool:
    """Whether a number measures the mismatch; without a correction every run keeps all tokens, at a weight of 1."""
    return name in LIMITS and possible(name, value) and not (name in OF_CORRECTION and value == 1)


def _of(curve: Curve, curves: Sequence[Curve]) -> str:
    """The label of a curve that is one of several, for the end of a sentence."""
    return f" ({curve.label})" if curves[1:] else ""


def _how_large(curves: Sequence[Curve]) -> dict[str, str]:
    """The last kl_k3 where one curve has it, in words."""
    sizes = [size for curve in curves if (size := _last(curve.values).get(FIRST)) and possible(FIRST, size[1])]
    words = [f"{FIRST} is {x:.3g} at step {step}. {in_words(x)}" for step, x in sizes]
    return {"How large": "".join(words) if len(words) == 1 else ""}


def _each(curves: Sequence[Curve], words: Callable[[Curve], str]) -> str:
    """What is said of each curve, with the label of the curve where there are several."""
    sentences = dict.fromkeys(f"{text}{_of(curve, curves)}" for curve in curves if (text := words(curve)))
    return "; ".join(sentences) + "." * bool(sentences)


def _over_time(curves: Sequence[Curve], least: float) -> tuple[dict[str, str], bool]:
    """How kl_k3 changes on the first curve that rises, or else on the first with several steps; whether it rises."""
    moved = []
    for curve in curves:
        values = {step: x for step, row in curve.values.items() if math.isfinite(x := row.get(FIRST, math.nan))}
        moved.append((curve, values, changes(list(values), list(values.values()))))
    order = sorted(moved, key=lambda move: (not _rises(move[2], least), len(move[1]) < 2))
    curve, values, moves = order[0]
    sentence = since(values, moves).removesuffix(".") + _of(curve, curves)
    return {"Since when": f"{sentence}."}, _rises(moves, least)


def _rises(moves: Sequence[Change], least: float) -> bool:
    return any(move.factor > 1 and move.after > least for move in moves)


def _ended(values: Steps, replaced: Sequence[tuple[int, Mapping[str, float]]] = ()) -> str:
    """The last step of kl_k3, or of the last number with a limit, where the steps go on without; else nothing.

    A kl_k3 does not count where both lists are equal bit for bit, as copies and padding have them, and others are not.
    """
    of_lists = {step: row for step, row in values.items() if FIRST in row and row.get("tokens", FEW) >= FEW}
    equal = {step for step, row in of_lists.items() if row.get("log_prob_diff_abs_max", row[FIRST]) == 0}
    if len(equal) < len(of_lists):
        values = {step: {} if step in equal else row for step, row in values.items()}
    last = {name: step for name, (step, _) in _last(values).items()}
    name, step = (FIRST, last[FIRST]) if FIRST in last else max(last.items(), key=lambda pair: pair[1], default=("", 0))
    without = len({later for later in values if later > step} - {again for again, _ in replaced})
    places = [place for place, held in enumerate(sorted(values)) if name in values[held]]
    usual = median([last - first for first, last in pairwise(places)] or [1])  # as of a number of every tenth step
    goes_on = name and without > MOST_LOST * len(values) and without >= usual
    how = ", where both sides are equal bit for bit, as copies are" * (max(values) in equal)
    return f"{name} was last known at step {step}, and the steps go on to {max(values)}{how}" if goes_on else ""


def _again(curve: Curve) -> str:
    """Which steps a log holds more than once, in words."""
    steps = sorted({step for step, _ in curve.replaced})
    if not steps:
        return ""
    rows = f"numbers of {len(steps)} step{'s' * (len(steps) > 1)} from step {steps[0]} on"
    return f"{rows} give way to later rows, as where a run starts anew, and are judged as earlier ones"


def _logged(curve: Curve) -> list[tuple[int, Mapping[str, float]]]:
    """All rows of a curve, and those that later rows replaced."""
    return [*curve.replaced, *curve.values.items()]


def _unread_curves(curves: Sequence[Curve], rejected: int, problems: Sequence[Problem]) -> str:
    """Why no number was read that measures the mismatch: of curves without one, the numbers that they hold."""
    if rejected:
        first = f"; the first: {problems[0]}" if problems else ""
        return f"{were_rejected(rejected, rejected)}{first}"
    if curves:
        held: dict[str, set[float]] = {}
        for name, x in (pair for curve in curves for _, row in _logged(curve) for pair in row.items()):
            held.setdefault(name, set()).add(x)
        alike = [
            ([name for name in held if name.endswith(names) and held[name] == {x}], x, why) for names, x, why in EMPTY
        ]
        empty = [f"at every step {' and '.join(names)} = {x:g}, {why}" for names, x, why in alike if names]
        return "; ".join(empty) or f"no curve holds a number that measures it: {lacking((FIRST,), held)}"
    return str(problems[0]) if problems else "the folder holds no file of a run"


def _last(values: Steps) -> dict[str, tuple[int, float]]:
    """Step and value where each number that has a limit was logged last."""
    rows = sorted(values.items())
    return {name: (step, row[name]) for name in LIMITS for step, row in rows if name in row}


def _earlier(curve: Curve) -> str:
    """The worst of each number's values that lay beyond its limit, where the last one does not, in words."""
    last, sentences = _last(curve.values), []
    for name in (name for name in LIMITS if not (name in last and beyond({name: last[name][1]}))):
        values = [(step, row[name]) for step, row in _logged(curve) if name in row]
        out = [(step, x) for step, x in values if beyond({name: x})]
        if out:
            end = last.get(name, (0, 0.0))[1]
            step, x = max(out, key=lambda pair: abs(pair[1] - end) if math.isfinite(pair[1]) else -1.0)
            count, of = (len({step for step, _ in pairs}) for pairs in (out, values))
            sentences.append(f"{beyond({name: x})[0]}, at step {step} ({count} of {of} steps)")
    return "; ".join(sentences)


def _headline(report: Report, level: str) -> str:
    if report.findings:
        first, *others = report.findings
        more = f", and {len(others)} other cause{'s' if len(others) > 1 else ''}" if others else ""
        mostly = f"{_rejected(report)}; of the others: " if report.rejected > report.sequences else ""
        alone = all(other.name == PRECISION for other in others)
        hidden = f", which may hide {first.cause.hides}" if first.cause.hides and alone else ""
        part = f" ({first.share:.0%} of the mismatch)" if first.name in OF_PLACES and first.share < 0.5 else ""
        return f"{mostly}{first.cause.title}{part}{hidden}{more}."
    if report.usable < FEW:
        return f"{report.usable} token{'s' * (report.usable > 1)} can be compared, too few to tell anything by."
    if report.whole["log_prob_diff_abs_max"] == 0:
        return "Both lists are equal bit for bit: those of a run that is truly on policy are, and so are copies."
    if level == CALM:
        return "Rollout engine and trainer agree as well as a healthy run."
    if (lost := _lost(report)) and not beyond(report.whole):
        return f"What was read agrees as well as a healthy run, but {lost}."
    if steps := _at_steps(report)["Beyond its limit at some steps"]:
        return f"{steps[0].upper()}{steps[1:]}"
    if not _differ(report) and (does := [*beyond(report.whole), *_of_config(report)]):
        return (
            f"Rollout engine and trainer agree as well as a healthy run, but look at the run's own config: {does[0]}."
        )
    return "Rollout engine and trainer differ more than a healthy run; no single cause shows."


def since(steps: Mapping[int, float], moves: Sequence[Change]) -> str:
    """How kl_k3 changed over the steps, or the smallest rise that would have shown."""
    if len(steps) < 2:
        return f"{FIRST} was read at {'one step' if steps else 'no step'}, so no change over time can be seen."
    finite = {step: x for step, x in steps.items() if math.isfinite(x)}
    if not moves:
        least, top = smallest_rise(list(finite.values())), max(finite, key=lambda step: finite[step], default=None)
        highest = f", and the highest is {finite[top]:.2g}, at step {top}" if top is not None else ""
        rise = f"a lasting rise of {least:.2g} times would show{highest}"
        return f"{FIRST} shows no change over {len(finite)} steps; {rise}."
    return f"{FIRST} {', then '.join(map(in_steps, moves))}."


def in_steps(change: Change) -> str:
    """How kl_k3 changed, in words."""
    if change.after < 2 * SMALLEST < change.before:
        return f"fell to 0 at step {change.step}, from {change.before:.2g}"
    if change.before < 2 * SMALLEST < change.after:
        return f"rose from 0 to {change.after:.2g} at step {change.step}"
    how = f"{'rose' if change.factor > 1 else 'fell'} {max(change.factor, 1 / change.factor):.3g} times"
    when = "at" if change.sudden else "by"
    return f"{how} {when} step {change.step}, from {change.before:.2g} to {change.after:.2g}"


def _where(report: Report) -> str:
    """The bucket of each table whose kl_k3 stands out most against the whole run."""
    phrases = []
    total = sum(float(row["tokens"]) for row in report.places.get("position", ()))
    for name, rows in report.places.items():
        wide = {float(row["kl_k3"]): row["bucket"] for row in reversed(rows) if float(row["tokens"]) > 0.01 * total}
        high, low = max(wide, default=0.0), min(wide, default=0.0)
        if high > 3 * max(low, 1e-12) and name != "probability":
            phrases.append(f"{name} {wide[high]} ({high:.2g}, against {low:.2g} at {wide[low]})")
    few = [f"as if in {share:.1%} of the {name} alone" for name, share in report.spread.items() if share < EVEN[name]]
    most = [f"most at {'; '.join(phrases)}"] if phrases else []
    return f"{'; '.join(most + few) or 'nowhere in particular'}."


def _helped(proposal: Proposal) -> str:
    if proposal.name == NOTHING:
        return f"nothing else is proposed, as {proposal.why[0]}."
    first = proposal.name if proposal.trusted else "an engine closer to the trainer"
    return f"{first}; {'; '.join(proposal.why)}."


# How large a mismatch is, beside that of one real model, which `explain/rungs.py` records.


def nearest(kl_k3: float, rungs: Sequence[Rung]) -> Rung:
    """The rung whose k3 is nearest by its logarithm."""
    return min(rungs, key=lambda rung: abs(math.log(max(kl_k3, 1e-12) / rung.k3)))


def in_words(kl_k3: float) -> str:
    """Where a kl_k3 stands on the ladder."""
    if kl_k3 <= 1e-10:
        return (
            "Both policies agree to rounding: there is nothing to correct, or the run stored the engine's log-probs as "
            "the trainer's, as a bypass does; then log the trainer's own."
        )
    rungs = record().steps
    rung = nearest(kl_k3, rungs)
    if rung.k3 / AS_MUCH <= kl_k3 <= AS_MUCH * rung.k3:
        return f"A real model shows as much ({rung.k3:.2g}) with an engine in {rung.words}."
    below, above = ([measured for measured in rungs if (measured.k3 > kl_k3) == side] for side in (False, True))
    if not (below and above):
        shown = f"a real model shows with an engine in {rung.name}"
        far = f"{kl_k3 / rung.k3:.0f} times what" if below else f"{rung.k3 / kl_k3:.0f} times less than"
        return f"The mismatch is {far} {shown}."
    low, high = below[-1], above[0]
    return (
        f"The mismatch lies between what a real model shows with an engine in {low.name} ({low.k3:.2g}) and in "
        f"{high.name} ({high.k3:.2g})."
    )
