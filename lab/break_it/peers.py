"""Hostile batches through the corrections of other packages: who crashes, hangs, answers NaN, or misses its formula.

    .venv-peers/bin/python -m lab.break_it.peers --miles CHECKOUT --cases 20000 --record

Each batch is one of the room `weights`. Each package gets it as its own trainer pads it, with settings of its own at
random. It is judged by its own formula (`formulas.py`, float64, of valid tokens alone): the gradient of its own loss at
every token. Our hook gets the batch with the settings of one package in our words. It is judged by the oracle of
`tests/support`, which must agree with the package's formula wherever every log-prob is a number.

Exit status: 0 no fault of ours, 1 a fault of ours, 2 could not run.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.break_it.peers:main", extra="dev")

import importlib.util
import json
import math
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oracle
import torch
from batches import Batch, flat_configs, nested, ratio_batch
from hypothesis import strategies as st
from peers import areal, ms_swift, openrlhf, trl, verl
from peers.rows import Rows
from tolerances import DECISION, EPS, normalized_rtol
from torch import Tensor

from lab.break_it import ROOT, formulas, weights
from lab.break_it.__main__ import OURS as ERROR
from lab.break_it.__main__ import tried
from lab.break_it.formulas import Formula, Row, lowers, uppers
from lab.provenance import as_markdown, markdown_table, parser_of, provenance, write_record

RECORD = ROOT / "lab" / "results" / "break_it_peers.json"
HELPER = Path("examples", "infra_features", "train_infer_mismatch_helper", "mis.py")
LIMIT_S = 30.0
SIGNS = (1.0, -1.0, 0.5, -2.0)
ANSWERS = ("right", "refused", "unclear", "crash", "hang", "NaN", "wrong", "trains on the unknown")
KINDS = {
    "trainer": "a log-prob of the trainer is not a finite number",
    "engine": "a valid token's log-prob of the engine is NaN or infinite",
    "stand-in": "a valid token has -9999 or less for the engine's log-prob",
    "nothing": "no valid token in the batch",
    "masked": "a masked token's log-prob of the engine is none",
    "half": "log-probs in bfloat16 or float16",
    "huge": "log ratios of a sequence whose sizes add up to more than 20",
    "dead": "a sequence that is empty or fully masked",
    "plain": "ragged lengths, holes, single tokens",
}
"""Kinds of input, the gravest first: a batch counts for the first that it is of."""


@dataclass(frozen=True)
class Given(Rows):
    """The batch as a trainer pads it: in its own dtype, at least one token wide, with masks of integers."""

    @property
    def mask(self) -> Tensor:
        return self.pad([m.bool().long() for m in self.batch.loss_masks])

    def pad(self, responses: list[Tensor]) -> Tensor:
        rows = torch.nn.utils.rnn.pad_sequence(responses, batch_first=True)
        return rows if rows.shape[1] else rows.new_zeros(len(responses), 1)

    @property
    def by_response(self) -> Tensor:
        """What a mean of the means of responses divides each token by, `[N, 1]`."""
        return self.mask.sum(-1, keepdim=True).clamp(min=1) * len(self.mask)


@dataclass(frozen=True)
class Package:
    """One package's correction.

    settings: draws settings of its own.
    formula: its formula under these settings.
    loss: its own loss of pi_theta's log-probs `[N, L]`, and what it divides a token's loss by.
    words: the settings in our words.
    reach: whose ratios enter a token's weight: its own `token`, its `sequence`, or the `batch`.
    """

    settings: st.SearchStrategy[Any]
    formula: Callable[[Any], Formula]
    loss: Callable[[Given, Tensor, Any], tuple[Tensor, Tensor | float]]
    words: Callable[[Any], dict[str, Any]]
    reach: Callable[[Any], str]


# ------------------------------------------------------------------------------------------------------- packages


@cache
def mis_py() -> Any:
    spec = importlib.util.spec_from_file_location("miles_mis", MILES[0] / HELPER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MILES: list[Path] = []


def reach_of_mis_py(said: Mapping[str, Any]) -> str:
    if said["tis_batch_normalize"]:
        return "batch"
    levels = {said["tis_level"], *([said["rs_level"]] if said["use_rs"] else [])}
    return "token" if levels == {"token"} and said["rs_veto_threshold"] is None else "sequence"


def loss_of_mis_py(x: Given, target: Tensor, said: Mapping[str, Any]) -> tuple[Tensor, float]:
    """The host's loss around the hook: -A r, times the weights, added up under the masks that the hook hands back."""
    host = lambda rows: [row[:n] for row, n in zip(rows, x.batch.response_lengths, strict=True)]  # noqa: E731
    each = -x.token_advantages * (target - x.proximal).exp()
    masks = [m.to(torch.int32) for m in x.batch.loss_masks]
    loss, kept, _ = mis_py().compute_mis_weights_fsdp(
        SimpleNamespace(**said), pg_loss=torch.cat(host(each)), train_log_probs=x.batch.proximal,
        rollout_log_probs=x.batch.behavior, loss_masks=masks,
    )  # fmt: skip
    return (loss * torch.cat(list(kept))).sum(), 1.0


def loss_of_trl(x: Given, target: Tensor, said: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    ratio, _ = trl.correction(x, *said)
    return trl.loss(x, target, ratio), x.by_response


def loss_of_swift(x: Given, target: Tensor, said: tuple[str, float]) -> tuple[Tensor, Tensor]:
    keys = ("rollout_importance_sampling_mode", "rollout_importance_sampling_threshold")
    return ms_swift.loss(x, target, **dict(zip(keys, said, strict=True))), x.by_response


def loss_of_areal(x: Given, target: Tensor, said: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    return areal.loss(x, target, areal.settings(**said))[0], x.mask.sum().clamp(min=1)


def loss_of_openrlhf(x: Given, target: Tensor, said: tuple[str, str, float, float]) -> tuple[Tensor, float]:
    """Handed the tokens of the whole step, as its trainer does, so that no batch is divided by 0 tokens."""
    level, mode, *bounds = said
    module = openrlhf.load(openrlhf.LOSS).PolicyLoss(
        0.2, 0.28, is_correction_level=level, is_correction_mode=mode, is_correction_threshold=bounds
    )
    count = {"batch_num_tokens": 1.0}
    return module(target, x.proximal, x.token_advantages, x.mask, x.behavior, **count)[0], 1.0


PACKAGES = {
    "Miles's mis.py": Package(flat_configs(), formulas.of_mis_py, loss_of_mis_py, nested, reach_of_mis_py),
    "verl 0.9.1": Package(
        *formulas.SETTINGS["verl"],
        lambda x, target, said: (verl.decoupled_loss(x, target, verl.Settings(said), "token-sum"), 1.0),
        verl.mapping_of,
        lambda said: "sequence" if "seq" in f"{said.get('rollout_is')} {said.get('rollout_rs')}" else "token",
    ),
    "TRL 1.16.0": Package(
        *formulas.SETTINGS["TRL"],
        loss_of_trl,
        lambda said: trl.mapping_of(*said),
        lambda said: said[0].partition("_")[0],
    ),
    "ms-swift 4.6.0": Package(
        *formulas.SETTINGS["ms-swift"],
        loss_of_swift,
        lambda said: ms_swift.mapping_of(*said),
        lambda said: said[0].partition("_")[0],
    ),
    "AReaL 1.0.4": Package(*formulas.SETTINGS["AReaL"], loss_of_areal, areal.mapping_of, lambda said: said["level"]),
    "OpenRLHF 0.11.2": Package(
        st.tuples(st.sampled_from([("token", "clip"), ("token", "mask"), ("seq", "mask")]), lowers, uppers).map(
            lambda drawn: (*drawn[0], *drawn[1:])
        ),
        lambda said: formulas.of_openrlhf(*said),
        loss_of_openrlhf,
        lambda said: openrlhf.mapping_of(said[2:], {"is_correction_level": said[0], "is_correction_mode": said[1]}),
        lambda said: "sequence" if said[0] == "seq" else "token",
    ),
}
OURS = "ours"

# ---------------------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """One batch, the settings of each package, and whose are put into our words."""

    batch: Batch
    settings: dict[str, Any]
    words: str


@st.composite
def cases(draw: st.DrawFn) -> Case:
    batch = draw(weights.hostile_batches())
    detached = [[x.detach() for x in side] for side in (batch.proximal, batch.behavior)]
    if draw(st.integers(0, 3)):  # a trainer whose own log-probs are not finite has another fault
        detached[0] = [torch.where(is_one(x), x, torch.full_like(x, -1.0)) for x in detached[0]]
    settings = {name: draw(package.settings) for name, package in PACKAGES.items()}
    words = draw(st.sampled_from(sorted(PACKAGES)))
    return Case(replace(batch, proximal=detached[0], behavior=detached[1]), settings, words)


def is_one(x: Tensor) -> Tensor:
    """Whether a log-prob is one."""
    return x.isfinite() & (x.double().exp() > 0)


def kind_of(batch: Batch) -> str:
    proximal, behavior = torch.cat(batch.proximal), torch.cat(batch.behavior)
    valid, known = batch.flat_mask, is_one(behavior)
    holds = {
        "trainer": not is_one(proximal).all(),
        "engine": (valid & ~behavior.isfinite()).any(),
        "stand-in": (valid & ~known).any(),
        "nothing": not valid.any(),
        "masked": not known.all(),
        "half": resolution(batch) > EPS,
        "huge": beyond_the_clamp(batch),
        "dead": any(not m.any() for m in batch.loss_masks),
        "plain": True,
    }
    return next(kind for kind in KINDS if holds[kind])


def beyond_the_clamp(batch: Batch) -> bool:
    """Whether packages that clamp a token's log ratio, that of a sequence, or none, may part."""
    return any(math.fsum(map(abs, row)) > formulas.CLAMP for row in log_ratios(batch)[0])


def resolution(batch: Batch) -> float:
    """The spacing at 1 of the type that a difference of the log-probs has."""
    return max(torch.finfo(torch.promote_types(batch.proximal[0].dtype, batch.behavior[0].dtype)).eps, EPS)


# --------------------------------------------------------------------------------------------------------- verdict


@dataclass(frozen=True)
class Expected:
    """What a formula says of each valid token, `[N][R]`: its weight, and whether no absent log-prob enters it."""

    weights: list[Row]
    settled: list[list[bool]]


def log_ratios(batch: Batch) -> tuple[list[Row], list[list[bool]]]:
    """Log ratios of the valid tokens of each sequence, 0 where one is not known, and which of them are."""
    rows, known = [], []
    for p, b, m in zip(batch.proximal, batch.behavior, batch.loss_masks, strict=True):
        p, b = p[m.bool()].double(), b[m.bool()].double()
        known.append((is_one(p) & is_one(b)).tolist())
        rows.append([x if k else 0.0 for x, k in zip((p - b).tolist(), known[-1], strict=True)])
    return rows, known


def expected(batch: Batch, formula: Formula, reach: str) -> Expected | None:
    """What the formula says; None where rounding may decide."""
    rows, known = log_ratios(batch)
    here = formula(rows)
    eps = resolution(batch)
    step = DECISION if eps == EPS else 16 * eps
    for scale, shift in ((1, step), (1, -step), (1 + step, 0), (1 - step, 0)):
        moved = formula([[x * scale + shift for x in row] for row in rows])
        if any(_jumps(*row, step) for row in zip(here, moved, rows, strict=True)):
            return None
    whole = all(map(all, known))
    return Expected(here, [{"token": ks, "sequence": [all(ks)] * len(ks), "batch": [whole] * len(ks)}[reach]
                           for ks in known])  # fmt: skip


def _jumps(here: Row, there: Row, logs: Row, step: float) -> bool:
    """Whether a weight changes by more than a continuous formula can over so small a step."""
    most = 4 * step * (len(logs) + math.fsum(map(abs, logs)))
    return any((a > 0) != (b > 0) or (a > 0 and abs(math.log(a) - math.log(b)) > most)
               for a, b in zip(here, there, strict=True) if math.isfinite(a) and math.isfinite(b))  # fmt: skip


def verdict(gradient: Tensor, x: Given, wanted: Expected) -> str:
    """What a package's gradient, as the weight of each token, is beside what its formula says."""
    rows, known = log_ratios(x.batch)
    total = max(math.fsum(map(abs, row)) for row in rows)
    rtol = normalized_rtol(total) * resolution(x.batch) / EPS
    unknown = False
    for i, mask in enumerate(x.batch.loss_masks):
        valid = mask.bool()
        if gradient[i][: len(mask)][~valid].any() or gradient[i][len(mask) :].any():
            return "wrong"
        for t, found in enumerate(gradient[i][: len(mask)][valid].tolist()):
            if wanted.settled[i][t] and abs(found - wanted.weights[i][t]) > rtol * wanted.weights[i][t]:
                return "wrong"
            unknown |= not known[i][t] and found != 0
    return "trains on the unknown" if unknown else "right"


def answer(package: Package, x: Given, said: Any) -> str:
    """The verdict on one package."""
    target = x.pad([torch.where(is_one(p), p, torch.full_like(p, -1.0)) for p in x.batch.proximal]).requires_grad_()
    try:
        with within(LIMIT_S):
            loss, divisor = package.loss(x, target, said)
            (gradient,) = torch.autograd.grad(loss, target)
    except TimeoutError:
        return "hang"
    except Exception as error:
        return "refused" if _in_words(error) else "crash"
    wanted = expected(x.batch, package.formula(said), package.reach(said))
    if not gradient.isfinite().all():
        return "NaN"  # at a masked token too, whose gradient reaches the parameters
    return "unclear" if wanted is None else verdict(-gradient.double() * divisor / x.token_advantages, x, wanted)


def _in_words(error: Exception) -> bool:
    """Whether the package itself raised the error, by `raise` or `assert`."""
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    return line.startswith(("raise ", "assert "))


@contextmanager
def within(seconds: float) -> Iterator[None]:
    def end(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def ours(package: Package, batch: Batch, said: Any) -> str:
    """Our hook's verdict by the oracle, which the package's formula must equal where every log ratio is in the clamp.

    Raises:
        AssertionError: a fault of ours, or of a formula.
    """
    config = package.words(said)
    found = weights.judge(weights.Case(config, "namespace", batch))
    wanted = expected(batch, package.formula(said), package.reach(said))
    if wanted is None or found == "unclear" or beyond_the_clamp(batch) or resolution(batch) > EPS:
        return found
    made = oracle.correct(batch.samples, config)
    for i, sample in enumerate(batch.samples):
        for n, t in enumerate(sample.valid):
            if wanted.settled[i][n]:
                weight = made.weights[i][t] if made.keep[i][t] else 0.0
                assert math.isclose(weight, wanted.weights[i][n], rel_tol=1e-9), f"formula: {i}, {t}: {weight}"
    return found


def judge(case: Case) -> list[str]:
    """`package; kind; answer` of each package, and of ours, for one batch."""
    kind, said = kind_of(case.batch), []
    signs = torch.tensor([SIGNS[i % len(SIGNS)] for i in range(len(case.batch.prompts))])
    x = Given(case.batch, [], signs)
    rounds = resolution(case.batch) > EPS  # then `wrong` may be rounding
    for name, package in PACKAGES.items():
        found = answer(package, x, case.settings[name])
        said.append(f"{name}; {kind}; {'unclear' if rounds and found == 'wrong' else found}")
    asked = PACKAGES[case.words]
    return [*said, f"{OURS}; {kind}; {ours(asked, case.batch, case.settings[case.words])}"]


# ---------------------------------------------------------------------------------------------------------- record


Counts = Counter[tuple[str, ...]]  # package, kind, answer


def told_apart(answers: Mapping[str, int]) -> Counts:
    return Counter({tuple(text.split("; ")): n for text, n in answers.items() if text != ERROR})


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--miles", type=Path, required=True, help="a checkout of Miles")
    parser.add_argument("--cases", type=int, default=20_000, help="how many batches in all, 100 of a seed")
    parser.add_argument("--record", action="store_true", help=f"go on behind {RECORD.name}, and add the counts")
    arguments = parser.parse_args(argv)
    MILES.append(arguments.miles)
    ran, counts = _known() if arguments.record else ([], Counter())
    first = seed = max((last + 1 for _, last in ran), default=0)
    for package in PACKAGES.values():  # imported before their time is taken
        answer(package, Given(ratio_batch([[1.0]]), [], torch.ones(1)), package.settings.example())
    while counts.total() < arguments.cases * (len(PACKAGES) + 1):
        try:
            counts += told_apart(tried("peers", seed))
        except AssertionError as error:
            print("\n".join([str(error), *getattr(error, "__notes__", [])]))
            print(f"\na fault of ours, or of a formula: seed {seed}")
            return 1
        seed += 1
        print(f"seeds below {seed}", file=sys.stderr, flush=True)
        if arguments.record:
            _write([*ran, [first, seed - 1]], counts, provenance({"miles": arguments.miles}))
    print(page(counts))
    return 0


def _known() -> tuple[list[list[int]], Counts]:
    """The first and the last seed of each earlier run, and what the record has counted."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"seeds": [], "counts": {}}
    return record["seeds"], told_apart(record["counts"])


def _write(seeds: list[list[int]], counts: Counts, measured: dict[str, str]) -> None:
    """Write the record; seeds: the first and the last of each run of seeds."""
    rows = {"; ".join(key): n for key, n in sorted(counts.items())}
    text = f"{page(counts)}\n{as_markdown(measured)}"
    write_record(RECORD, {"seeds": seeds, "counts": rows, "measured with": measured}, text)


def page(counts: Counts) -> str:
    names = [OURS, *PACKAGES]

    def number(name: str, kind: str | None = None, found: str | None = None) -> int:
        return sum(n for (a, b, c), n in counts.items() if a == name and kind in (None, b) and found in (None, c))

    def faults(name: str, kind: str) -> str:
        told = [f"{n:,} {found}" for found in ANSWERS[3:] if (n := number(name, kind, found))]
        return ", ".join(told) or "-"

    totals = [(name, f"{number(name):,}", *(f"{number(name, None, found):,}" for found in ANSWERS)) for name in names]
    by_kind = [
        (words, f"{number(OURS, kind):,}", *(faults(name, kind) for name in names)) for kind, words in KINDS.items()
    ]
    return TEXT.format(
        batches=number(OURS),
        totals=markdown_table(("package", "batches", *ANSWERS), totals),
        by_kind=markdown_table(("input", "batches", *names), by_kind),
    )


TEXT = """# Break it: the peers

{batches:,} hostile batches through the packages' own functions and losses, each with settings of its own at random, \
and the settings of one of them in our words through our hook. A package is judged by its own formula in float64.

{totals}
`refused`: an error that the package raises itself. `unclear`: rounding may decide, as it may of any weight in half \
precision. `NaN`: a gradient that is not finite. `wrong`: a token that is masked, or whose every log-prob is a number, \
is not weighed as the package's formula says. `trains on the unknown`: a token without a log-prob of the engine gets a \
finite weight; TRL and AReaL say in their code that it shall be 1, and no package says that it knows numbers that \
stand for none. Ours weighs such a token by 0.

What a package's contract excludes is not asked: AReaL's k3, whose help contradicts its code, and settings of mis.py \
that it refuses or that have no sane answer. OpenRLHF's divergences are not asked either. verl refuses a batch without \
a valid token in words. Its crash is a division by zero where all weights are 0.

{by_kind}"""
