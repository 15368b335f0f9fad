"""report.html: one file without network and without script, for phone and desktop, light and dark, screen and paper."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from mis_plugins import __version__
from mis_plugins.explain.rungs import record
from mis_plugins.report import plots
from mis_plugins.report.causes import CANNOT, CAUSES, Finding
from mis_plugins.report.changes import Change
from mis_plugins.report.numbers import FIRST
from mis_plugins.report.own import Intent
from mis_plugins.report.places import PLACES
from mis_plugins.report.proposal import Judged, Proposal
from mis_plugins.report.readers.source import Curve
from mis_plugins.report.style import CSS
from mis_plugins.report.survey import Report
from mis_plugins.report.written import Document
from mis_plugins.shared.terminal import printable

TILES = {
    FIRST: "k3 estimate of KL(engine ‖ trainer), a token",
    "log_prob_diff_abs_mean": "mean |log π_old − log μ|",
    "ratio_mean": "mean ratio, trainer over engine",
    "ess_ratio": "effective sample of the ratios",
    "prob_correlation": "correlation of probabilities",
    "kept_fraction": "tokens kept by the run's config",
    "tokens": "tokens in the loss",
}
CURVES = (
    FIRST,
    "log_prob_diff_abs_mean",
    "ratio_mean",
    "ess_ratio",
    "kept_fraction",
    "train_log_ppl",
    "reward_rollout",
)
LOGARITHMIC = {FIRST, "log_prob_diff_abs_mean"}
SHOWN_CURVES = 24
SCALE = 2.0  # |log r| at which a token has its full colour
SHOWN_SEQUENCES, SHOWN_TOKENS = 6, 20


def page(documents: Sequence[Document]) -> str:
    """The page of one document, or of several side by side. Controls in foreign texts are shown by their escapes."""
    title = escape(" · ".join(document.title for document in documents))
    body = "\n".join(_body(documents))
    whole = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Mismatch: {title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">\n'
        f"<style>{CSS}</style></head>\n<body>\n{body}\n</body></html>\n"
    )
    return printable(whole, keep="\n\t")


def _body(documents: Sequence[Document]) -> Iterator[str]:
    yield '<a class="skip" href="#numbers">Skip to the numbers</a>'
    yield from (
        ('<div class="runs">', *map(_head, documents), "</div>")
        if len(documents) > 1
        else map(_head, documents)
    )
    yield (
        '<nav aria-label="Sections">'
        + "".join(f'<a href="#{name}">{escape(words)}</a>' for name, words in _sections(documents))
        + "</nav><main>"
    )
    yield _causes(documents)
    yield _numbers(documents)
    yield _over_steps(documents)
    first = documents[0]
    if first.report is not None:
        yield _places(documents)
        yield _configs(first)
        yield _sequences(first.report)
        yield _tokens(first.report)
    yield _read(documents)
    yield f"</main><footer>Made by mis-plugins {escape(__version__)}. Numbers: report.json.</footer>"


def _sections(documents: Sequence[Document]) -> list[tuple[str, str]]:
    found = [("causes", "Causes"), ("numbers", "How large"), ("steps", "Since when")]
    if documents[0].report is not None:
        found += [
            ("places", "Where"),
            ("configs", "What would have happened"),
            ("sequences", "Sequences"),
            ("worst", "Tokens"),
        ]
    return [*found, ("read", "What was read")]


def _head(document: Document) -> str:
    said = document.verdict
    lines = "".join(f"<li>{_bold_start(line)}</li>" for line in said.lines)
    left = "" if document.complete else '<p class="note">Interrupted: what was read before is shown.</p>'
    return (
        f'<header class="{said.level}"><p class="eyebrow">{escape(document.title)}</p>'
        f'<h1><span class="badge">{said.level}</span> {escape(said.headline)}</h1>'
        f'<ul class="verdict">{lines}</ul>{left}</header>'
    )


def _bold_start(line: str) -> str:
    start, colon, rest = line.partition(":")
    return f"<b>{escape(start)}</b>{colon}{escape(rest)}" if colon and len(start) < 24 else escape(line)


def _causes(documents: Sequence[Document]) -> str:
    shown = "".join(_causes_of(document, len(documents) > 1) for document in documents)
    cannot = f'<p class="quiet">{escape(CANNOT)}</p>'
    return f'<section id="causes"><h2>Signs of causes</h2>{shown}{cannot}</section>'


def _causes_of(document: Document, several: bool) -> str:
    found = document.report.findings if document.report else []
    cards = "".join(map(_card, found)) or '<p class="quiet">No detector fired.</p>'
    title = f"<h3>{escape(document.title)}</h3>" if several else ""
    return title + cards + (_alarms(document.report) if document.report else "")


def _card(found: Finding) -> str:
    rows = [("Evidence", found.evidence), ("Cause", found.cause.cause), ("Fix", found.cause.fix)]
    if found.also:
        rows.append(
            ("Also", f"explains the signs of: {', '.join(CAUSES[name].title for name in found.also)}")
        )
    told = "".join(f"<dt>{name}</dt><dd>{_code(text)}</dd>" for name, text in rows)
    more = f"<p>{_code(found.cause.symptom)}</p><p>{_code(found.cause.threshold)}</p>"
    return (
        f'<article class="card"><h3>{escape(found.cause.title)}</h3><dl>{told}</dl>'
        f"<details><summary>How it is detected (docs/report.md#{found.name})</summary>{more}</details></article>"
    )


def _code(text: str) -> str:
    """Text with `code` in backticks."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts))


def _alarms(report: Report) -> str:
    if not report.alarms:
        return ""
    shown = "".join(f"<li>step {step}: {escape(text)}</li>" for step, _, text in report.alarms[:20])
    return f"<details><summary>{len(report.alarms)} alarms of the steps</summary><ul>{shown}</ul></details>"


def _numbers(documents: Sequence[Document]) -> str:
    runs = {one.title: one.report.whole for one in documents if one.report is not None}
    if not runs:
        return '<section id="numbers"><h2>How large</h2><p class="quiet">No tokens were read.</p></section>'
    tiles = "".join(_tile(name, words, runs) for name, words in TILES.items())
    known = {title: whole[FIRST] for title, whole in runs.items() if FIRST in whole}
    drawn = ""
    if known:  # a run without a token to compare has no kl_k3
        ladder = plots.ladder(known, "kl_k3 on the ladder of a real model")
        drawn = _figure(ladder, f"Beside a real model ({record().model})")
    table = _table(["metric", *runs], _metric_rows(runs))
    details = f"<details><summary>All numbers of docs/metrics.md</summary>{table}</details>"
    return (
        f'<section id="numbers"><h2>How large</h2><div class="tiles">{tiles}</div>{drawn}{details}</section>'
    )


def _tile(name: str, words: str, runs: Mapping[str, Mapping[str, float]]) -> str:
    values = [whole.get(name) for whole in runs.values()]
    if all(value is None for value in values):
        return ""
    shown = "".join(f'<span class="run{i}">{_shown(value)}</span>' for i, value in enumerate(values))
    return (
        f'<div class="tile"><code>{name}</code><strong>{shown}</strong><small>{escape(words)}</small></div>'
    )


def _shown(value: Any) -> str:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}".replace(",", " ")
    return f"{value:.3g}" if abs(value) < 1e-3 or abs(value) >= 1e4 else f"{value:.4g}"


def _metric_rows(runs: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    names = dict.fromkeys(name for whole in runs.values() for name in whole)
    return [[name, *(_shown(whole.get(name)) for whole in runs.values())] for name in names]


def _over_steps(documents: Sequence[Document]) -> str:
    drawn = "".join(_figure(svg, name) for name, svg in _curves(documents))
    told = "".join(
        _change(one) for document in documents if document.report for one in document.report.changes
    )
    told = f"<ul>{told}</ul>" if told else ""
    words = (
        drawn and f'<div class="grid">{drawn}</div>' or '<p class="quiet">Fewer than two steps were read.</p>'
    )
    return f'<section id="steps"><h2>Since when</h2>{told}{words}</section>'


def _change(one: Change) -> str:
    way = "rose" if one.factor > 1 else "fell"
    when = "At" if one.sudden else "Around"
    return f"<li>{when} step {one.step} {FIRST} {way} from {one.before:.2g} to {one.after:.2g}, and stayed there.</li>"


def _curves(documents: Sequence[Document]) -> Iterator[tuple[str, str]]:
    runs: dict[str, Mapping[int, Mapping[str, float]]] = {}
    for document in documents:
        if document.report is not None and len(document.report.steps) > 1:
            runs[document.title] = document.report.steps
        runs |= {_label(curve): curve.values for curve in document.curves if len(curve.values) > 1}
    names = dict.fromkeys(name for run in runs.values() for values in run.values() for name in values)
    wanted = [name for name in CURVES if name in names] or list(names)[:SHOWN_CURVES]
    marks = [one.step for document in documents[:1] if document.report for one in document.report.changes]
    for name in wanted:
        lines = [_line(title, run, name) for title, run in runs.items()]
        lines = [line for line in lines if line.x]
        if lines:
            yield (
                name,
                plots.curve(lines, f"{name} over steps", name in LOGARITHMIC, marks if name == FIRST else ()),
            )


def _label(curve: Curve) -> str:
    return Path(curve.label).name


def _line(title: str, run: Mapping[int, Mapping[str, float]], name: str) -> plots.Line:
    points = [
        (step, values[name]) for step, values in run.items() if name in values and math.isfinite(values[name])
    ]
    return plots.Line(title, [x for x, _ in points], [y for _, y in points])


def _figure(svg: str, caption: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>"


def _places(documents: Sequence[Document]) -> str:
    drawn = "".join(
        _of_place(name, document, len(documents) > 1) for name in PLACES for document in documents
    )
    return f'<section id="places"><h2>Where</h2><div class="grid">{drawn}</div></section>'


def _of_place(name: str, document: Document, several: bool) -> str:
    rows = document.report.places.get(name, []) if document.report else []
    if len(rows) < 2:
        return ""
    words = f"{document.title}: {PLACES[name].what}" if several else PLACES[name].what
    columns = ["bucket", "tokens", "kl_k1", "kl_k3", "log_prob_diff_abs_mean"]
    table = _table(
        columns, [[str(row["bucket"]), *(_shown(row[column]) for column in columns[1:])] for row in rows]
    )
    drawn = _figure(plots.bars(rows, f"kl_k3 by {words}"), f"By {words}")
    return f"<div>{drawn}<details><summary>Numbers</summary>{table}</details></div>"


def _configs(document: Document) -> str:
    if document.proposal is None:
        quiet = '<p class="quiet">No config was tried.</p>'
        return f'<section id="configs"><h2>What would have happened</h2>{quiet}</section>'
    proposal = document.proposal
    rows = [_config_row(one) for one in proposal.ranking]
    columns = ["config", "kept tokens", "kept sequences", "ess", "mean weight", "weight p99",
               "kept: shortest / longest", "kept: A > 0 / A < 0", "cosine", "against it"]  # fmt: skip
    note = (
        "The cosine is that of w A (1 − p) and v A (1 − p) over tokens: a proxy of how far a config turns the policy "
        "gradient. The weights v are products over whole responses where these bear a mean, and else ratios of tokens. "
        "The cosine needs advantages."
    )
    return (
        f'<section id="configs"><h2>What would have happened</h2>{_proposal(proposal, document)}'
        f'<div class="configs">{_table(columns, rows)}</div>'
        f"<p class='quiet'>{escape(note)}</p></section>"
    )


def _proposal(proposal: Proposal, document: Document) -> str:
    why = "".join(f"<li>{escape(text)}</li>" for text in proposal.why)
    kind, title = (
        ("card good", "Proposed") if proposal.trusted else ("card", "No config is trusted; ranked first")
    )
    return (
        f'{_own(document.own)}<article class="{kind}"><h3>{title}: <code>{escape(proposal.name)}</code></h3>'
        f"<ul>{why}</ul>"
        f'<pre tabindex="0">{escape(proposal.yaml)}</pre><pre tabindex="0">{escape(proposal.flags)}</pre></article>'
    )


def _own(own: Intent | None) -> str:
    if own is None:
        return ""
    told = "".join(f"<li>{escape(text)}</li>" for text in own.told)
    short = (
        "The config did what its bounds mean."
        if own.as_meant
        else "The config did not do what its bounds mean."
    )
    kind = "card good" if own.as_meant else "card"
    return (
        f'<article class="{kind}"><h3>The run had: <code>{escape(own.name)}</code></h3><p>{short}</p>'
        f"<ul>{told}</ul></article>"
    )


def _config_row(one: Judged) -> list[str]:
    n = one.numbers
    lengths, signs = list(n["kept_by_length"].values()), n["kept_by_advantage"]
    by_sign = (
        f"{signs.get('positive', math.nan):.0%} / {signs.get('negative', math.nan):.0%}" if signs else "–"
    )
    by_length = f"{lengths[0]:.0%} / {lengths[-1]:.0%}" if lengths else "–"
    shares = (f"{n['kept_fraction']:.1%}", f"{n['kept_sequences']:.1%}", f"{n['ess']:.1%}")
    weights = (f"{n['applied_mean']:.3f}", _shown(n.get("weight_p99")))
    cosine = "–" if one.cosine is None else f"{one.cosine:.3f}"
    return [one.candidate.name, *shares, *weights, by_length, by_sign, cosine, "; ".join(one.reasons) or "–"]


def _sequences(report: Report) -> str:
    shown = "".join(map(_sequence, report.worst_sequences[:SHOWN_SEQUENCES]))
    legend = (
        '<p class="quiet">Orange: the trainer finds the token less likely than the engine did; blue: likelier. Hover '
        "or focus a token to see both policies. Grey tokens are outside the loss.</p>"
    )
    return f'<section id="sequences"><h2>Worst sequences</h2>{legend}{shown}</section>'


def _sequence(told: Mapping[str, Any]) -> str:
    reward = f", reward {_shown(told['reward'])}" if "reward" in told else ""
    head = (
        f"step {told['step']}, sample {escape(str(told['sample']))}: {told['length']} tokens, mean |log r| "
        f"{_shown(told['log_prob_diff_abs_mean'])}, sum {_shown(told['sequence_log_ratio'])}{reward}"
    )
    tokens = "".join(_token(token, valid) for token, valid in zip(told["tokens"], told["valid"], strict=True))
    start = f"from token {told['first']}" if told["first"] else "from its first token"
    shown = f'<p class="eyebrow">{start}</p><p class="tokens">{tokens}</p>'
    return f'<article class="sequence"><h3>{head}</h3>{shown}{_texts(told)}</article>'


def _texts(told: Mapping[str, Any]) -> str:
    """Prompt and response in whole, folded up."""
    parts = [(name, told[name]) for name in ("prompt", "response") if told.get(name)]
    return "".join(
        f'<details><summary>{name}</summary><pre tabindex="0" class="text">{escape(text)}</pre></details>'
        for name, text in parts
    )


def _token(token: Mapping[str, Any], valid: bool) -> str:
    ratio = token["log_ratio"]
    strength = min(abs(ratio) / SCALE, 1.0) if math.isfinite(ratio) else 1.0
    side = "less" if not ratio > 0 else "more"
    text = str(token.get("text", token.get("token", "·")))
    style = f' style="--s:{strength:.2f}"' if valid and strength > 0.02 else ""
    kind = side if valid else "masked"
    tip = escape(_tip(token), quote=True)
    return f'<span tabindex="0" class="{kind}"{style} data-tip="{tip}">{escape(text)}</span> '


def _tip(token: Mapping[str, Any]) -> str:
    behavior, proximal = token["behavior_log_prob"], token["proximal_log_prob"]
    parts = [
        f"position {token['position']}",
        f"engine {behavior:.3f} ({_percent(behavior)})",
        f"trainer {proximal:.3f} ({_percent(proximal)})",
        f"log r {token['log_ratio']:+.3f}",
    ]
    parts += [f"{name} {token[name]:.3g}" for name in ("advantage", "version") if name in token]
    parts += [f"token {token['token']}"] if "token" in token else []
    return "\n".join(parts)


def _percent(log_prob: float) -> str:
    return f"{math.exp(min(log_prob, 0.0)):.2%}" if math.isfinite(log_prob) else "–"


def _tokens(report: Report) -> str:
    columns = ["step", "sample", "position", "token", "engine", "trainer", "log r"]
    rows = [
        [str(one["step"]), str(one["sample"]), str(one["position"]), str(one.get("text", one.get("token", "–"))),
         _shown(one["behavior_log_prob"]), _shown(one["proximal_log_prob"]), f"{one['log_ratio']:+.3f}"]
        for one in report.worst_tokens[:SHOWN_TOKENS]
    ]  # fmt: skip
    return f'<section id="worst"><h2>Worst tokens</h2>{_table(columns, rows)}</section>'


def _read(documents: Sequence[Document]) -> str:
    files = "".join(f"<li>{escape(text)}</li>" for one in documents for text in one.inputs[:200])
    lost = [(one.file, one.place, one.reason) for each in documents for one in each.problems.first()]
    broken = f"<h3>Not read</h3>{_table(['file', 'place', 'reason'], lost)}" if lost else ""
    counts = [
        f"{one.title}: {one.report.sequences} sequences, {len(one.report.steps)} steps"
        for one in documents
        if one.report
    ]
    words = "".join(f"<p>{escape(text)}</p>" for text in counts)
    return (
        f'<section id="read"><h2>What was read</h2>{words}{broken}<details><summary>Files</summary><ul>{files}</ul>'
        "</details></section>"
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls by itself on a narrow screen."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
