"""report.html: one file without network and without script, for phone and desktop, light and dark, screen and paper."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from os.path import commonprefix
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from mis_plugins import __version__
from mis_plugins.explain.limits import FIRST
from mis_plugins.explain.rungs import record
from mis_plugins.report import plots
from mis_plugins.report.causes import CANNOT, CAUSES
from mis_plugins.report.places import PLACES
from mis_plugins.report.verdict import CALM, WATCH, in_steps
from mis_plugins.report.written import Document
from mis_plugins.shared.terminal import printable

KEPT = "kept_fraction"  # what a run's own config keeps
CURVES = (FIRST, "log_prob_diff_abs_mean", "ratio_mean", "ess_ratio", KEPT, "train_log_ppl")
# Parts of the names by which hosts log gradient norm, reward and length of the responses.
SCALARS = ("grad_norm", "reward", "response_len")
LOGARITHMIC = {FIRST, "log_prob_diff_abs_mean"}
SHOWN_CURVES = 24
SCALE = 2.0  # |log r| at which a token has its full colour
UNPROPOSED = {
    CALM: "nothing now, but watch kl_k3",
    WATCH: "look at the engine's precision, and compare layers with `python -m true_on_policy diff`",
}
LOST = "mend the files and records that were not read, listed below, and report again"
IDS = (
    "Numbers stand for tokens, because no tokenizer was found: copy the model's `tokenizer.json` beside the dumps, and "
    "report again to read text."
)
NO_IDS = "Dots stand for tokens, because the dumps hold no token ids."


def page(document: Document) -> str:
    """The page of a document. Controls in foreign texts are shown by their escapes."""
    report, proposal = document.report, document.proposal
    places = {PLACES[name].what: rows for name, rows in report.places.items() if len(rows) > 1} if report else {}
    kl_k3 = report.whole.get(FIRST) if report else None
    whole = _template().render(
        document=document,
        report=report,
        proposal=proposal,
        version=__version__,
        cannot=CANNOT,
        model=record().model,
        ladder=None if kl_k3 is None else plots.ladder(document.title, kl_k3, f"{FIRST} on the ladder of a real model"),
        curves=dict(_curves(document)),
        first_lines=_first_lines(document),
        drawn={
            what: plots.dots(rows, f"kl_k3 by {what}", plots.span(places.values())) for what, rows in places.items()
        },
        places=places,
        **_spelling([token for sequence in report.worst_sequences for token in sequence["tokens"]] if report else []),
    )
    return printable(whole, keep="\n\t")


def _template() -> Any:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=StrictUndefined,
    )  # fmt: skip
    environment.filters |= {
        "number": _number, "code": _code, "shade": _shade, "text": _text, "counted": _counted, "percent": _percent,
        "in_steps": in_steps,
        "cause_title": lambda name: CAUSES[name].title,
    }  # fmt: skip
    return environment.get_template("page.html")


def _first_lines(document: Document) -> dict[str, str]:
    """Since when and what to do: the two lines below the headline, as far as they are known."""
    parts, level, report = document.verdict.told, document.verdict.level, document.report
    if report and report.findings:
        do = report.findings[0].cause.fix.partition(". ")[0]
    elif level == WATCH and any(name.startswith("Not read") for name in parts):
        do = LOST
    elif "What to run with" in parts and level != CALM:
        do = f"run with {parts['What to run with'].partition(';')[0]}"
    else:
        do = parts.get("What to do") or UNPROPOSED.get(level, document.verdict.lines[-1])
    since = {name: text for name, text in parts.items() if name == "Since when"}
    return since | {"What to do": f"{do.rstrip('.')}."}


def _spelling(tokens: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What stands between two shown tokens, and a hint where they have no text."""
    texts = [str(token["text"]) for token in tokens if "text" in token]
    hint = "" if texts else IDS if any("token" in token for token in tokens) else NO_IDS
    return {"gap": "" if any(text.startswith(" ") for text in texts) else " ", "hint": hint}


def _curves(document: Document) -> Iterator[tuple[str, str]]:
    """Name and picture of each number over the steps, of the tokens and of the logs beside them."""
    folder, slash, _ = commonprefix([curve.label for curve in document.curves]).rpartition("/")
    start = len(folder + slash)
    runs = {curve.label[start:]: curve.values for curve in document.curves if len(curve.values) > 1}
    marks: list[int] = []
    if document.report is not None and len(document.report.steps) > 1:
        runs = {document.title: _steps(document)} | runs
        marks = [change.step for change in document.report.changes]
    names = _shown(name for run in runs.values() for row in run.values() for name in row)
    for name in islice(names, SHOWN_CURVES):
        lines = {title: line for title, run in runs.items() if (line := _line(run, name))}
        if lines:
            mine = marks if name == FIRST else ()
            yield name, plots.curve(lines, f"{name} over steps", name in LOGARITHMIC, mine)


def _steps(document: Document) -> dict[int, dict[str, float]]:
    """Numbers of each step that was read from tokens, less what a config keeps where none is known."""
    steps = document.report.steps if document.report else {}
    left_out = () if document.own else (KEPT,)
    return {step: {name: x for name, x in row.items() if name not in left_out} for step, row in steps.items()}


def _shown(names: Iterable[str]) -> Iterator[str]:
    """The names of `CURVES`, then the names of gradient norm, reward and length."""
    held = dict.fromkeys(names)
    yield from (name for name in CURVES if name in held)
    yield from (name for name in held if name not in CURVES and any(part in name for part in SCALARS))


def _line(run: Mapping[int, Mapping[str, float]], name: str) -> dict[int, float]:
    return {step: row[name] for step, row in run.items() if math.isfinite(row.get(name, math.nan))}


# Filters of the template.


def _number(value: Any) -> str:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}".replace(",", " ")
    return f"{value:.3g}" if abs(value) < 1e-3 or abs(value) >= 1e4 else f"{value:.4g}"


def _counted(count: float, noun: str, more: str = "") -> str:
    """A number and its noun, in the singular for 1."""
    return f"{_number(count)} {noun if count == 1 else more or f'{noun}s'}"


def _code(text: str) -> Markup:
    """Text with `code` in backticks."""
    parts = (Markup("<code>{}</code>" if i % 2 else "{}").format(part) for i, part in enumerate(text.split("`")))
    return Markup("").join(parts)


def _shade(token: Mapping[str, Any], valid: bool) -> Markup:
    """Class of a token by the sign of log r, and the strength of its colour."""
    ratio = token["log_ratio"]
    strength = min(abs(ratio) / SCALE, 1.0) if math.isfinite(ratio) else 1.0
    kind = ("more" if ratio > 0 else "less") if valid else "masked"
    style = f' style="--s:{strength:.2f}"' if valid and strength > 0.02 else ""
    return Markup(f'class="{kind}"{style}')


def _text(token: Mapping[str, Any], missing: str = "·") -> str:
    return str(token.get("text", token.get("token", missing))).replace("\n", "⏎\n")


def _percent(log_prob: float) -> str:
    return f"{math.exp(min(log_prob, 0.0)):.2%}" if math.isfinite(log_prob) else "–"
