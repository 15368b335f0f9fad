"""Is our correction the host's own, inside the host's own loss?

The program drives the real `policy_loss_function` of a Miles or slime checkout on CPU, once with the checkout's mis.py
and once with `mis_plugins.mis`. Level x mode x rejection x veto x normalization meet ragged batches. It compares
the loss, its gradient with respect to the logits, the masks, and every metric that both name.

mis.py gives no sane answer in some cases: normalization in mask mode, at geometric level, or with a fully masked
sequence; a veto without `use_rs`; metrics only; non-finite values. There our answer is compared with mis.py's answer to
the nearest question that it gets right, scaled by hand for normalization; mis.py's own answer is reported.

`--hook loss` asks instead whether `mis_plugins.mis.policy_loss` is the host's own policy loss. Without a correction,
both must give equal loss, gradient and metrics; with one, ours must equal the host's loss with our TIS hook.

Exit status: 0 equal, 1 different, 2 could not compare.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.host_parity:main", extra="verify")

import importlib
import itertools
import math
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.host_checkout import CannotCompare, build_parser, load_host, run_ranks, start_groups
from lab.host_modules import Host
from lab.parity.cases import Batch, Case, batches, config_product
from lab.parity.drive import OURS, Ask, Outcome, asker, drive, host_args
from lab.parity.loss_hook import ask, compared, loss_cases
from lab.parity.verdict import (
    GRADIENT_TOLERANCE,
    METRIC_TOLERANCE,
    Difference,
    defect,
    difference,
    magnitude,
    needs_scaling_by_hand,
    right_answer,
    what_theirs_gave,
)
from lab.provenance import as_markdown, markdown_table, provenance, tracked, write_record
from mis_plugins.shared.numerals import count
from mis_plugins.shared.terminal import print_table

Group = tuple[str, str]
Compared = Iterator[tuple[Group, Difference]]
K3_UNCLAMPED = ("mis_k3_kl",)
NORMALIZED = ("mis_batch_norm_factor", "mis_is_ratio_mean_final", "mis_is_ratio_min_final", "mis_is_ratio_max_final")
REJECTED = ("mis_rs_mask_fraction",)


def worst(differences: Compared) -> dict[Group, Difference]:
    """The worst deviations of each group."""
    groups: dict[Group, Difference] = defaultdict(Difference)
    for group, deviation in differences:
        groups[group].worse_of(deviation)
    return groups


def compare_product(host: Host, limit: int | None) -> Compared:
    for case in tracked(config_product()[:limit], f"{host.name}: config product"):
        for batch, per_token_loss in itertools.product(batches(), (False, True)):
            group, found = _compare(host, case, batch, asker(host, per_token_loss))
            yield group, found.asked_about(f"{case}, {batch.name}, per-token loss {per_token_loss}")


def _compare(host: Host, case: Case, batch: Batch, ask: Ask) -> tuple[Group, Difference]:
    why = defect(case, batch)
    ours = ask(case, batch, OURS)
    right = right_answer(ask, host.tis_path, case, batch)
    saturated = K3_UNCLAMPED if batch.name == "saturated ratios" else ()
    found = difference(ours, right, _valid(batch), _not_shared(case, batch) + saturated)
    if why:
        found.theirs.add(what_theirs_gave(ask(case, batch, host.tis_path), right))
        return ("not sane in mis.py", why), found
    return ("equal to mis.py", f"{case.level}, {case.mode}{', normalized' * case.normalize}"), found


def _not_shared(case: Case, batch: Batch) -> tuple[str, ...]:
    return NORMALIZED * needs_scaling_by_hand(case, batch) + REJECTED * (case.rejection is None)


def _valid(batch: Batch) -> Tensor:
    return torch.cat(batch.loss_masks).bool()


def compare_special(host: Host, limit: int | None) -> Compared:
    """Compare where mis.py fails: non-finite inputs, and switches that it does not understand."""
    cases = [c for c in config_product() if not c.normalize and not c.inherit_bounds][:limit]
    for case in tracked(cases, f"{host.name}: non-finite inputs, metrics only"):
        for name, found in _special(host, case):
            yield ("not sane in mis.py", name), found.asked_about(str(case))


def _special(host: Host, case: Case) -> Iterator[tuple[str, Difference]]:
    ask = asker(host, per_token_loss=False)
    clean = batches()[1]
    for value in (math.nan, math.inf, -math.inf):
        yield f"rollout log-prob {value} at masked positions", _under_the_mask(host, case, clean, value, ask)
    yield "rollout log-prob -inf at a valid token", _at_a_valid_token(host, case, clean, -math.inf, ask)
    yield "rollout log-prob nan at a valid token", _at_a_valid_token(host, case, clean, math.nan, ask)
    yield "metrics only, with the keys", _metrics_only(host, replace(case, use_tis=False), clean)
    yield "metrics only, without the keys", _metrics_only(host, None, clean)


def _under_the_mask(host: Host, case: Case, clean: Batch, value: float, ask: Ask) -> Difference:
    """Compare with a non-finite value under the mask, where no bit of gradient or loss may change."""
    behavior = [torch.where(m.bool(), b, value) for m, b in zip(clean.loss_masks, clean.behavior, strict=True)]
    poisoned = replace(clean, behavior=behavior)
    right = right_answer(ask, host.tis_path, case, clean)
    ours, ours_clean = ask(case, poisoned, OURS), ask(case, clean, OURS)
    # slime itself averages |log-prob difference| unguarded, after our function has returned.
    found = difference(ours, right, _valid(clean), ("train_rollout", *_not_shared(case, clean)))
    if not torch.equal(ours.gradient, ours_clean.gradient) or ours.loss != ours_clean.loss:
        found.faults.update(["a masked value changed a bit of the gradient or the loss"])
    found.theirs.add(what_theirs_gave(ask(case, poisoned, host.tis_path), right))
    return found


def _at_a_valid_token(host: Host, case: Case, clean: Batch, value: float, ask: Ask) -> Difference:
    """Compare with a non-finite value at a valid token, which must count as masked out.

    Where a weight or a rule spans the sequence, the whole sequence must count as masked out.
    """
    sequence, position = 0, int(clean.loss_masks[0].nonzero()[2])
    behavior = [b.clone() for b in clean.behavior]
    behavior[sequence][position] = value
    masks = [m.clone() for m in clean.loss_masks]
    spans_sequence = case.level != "token" or case.rejection in ("sequence", "geometric") or case.veto
    masks[sequence][slice(None) if spans_sequence else position] = 0
    broken, as_if_masked = replace(clean, behavior=behavior), replace(clean, loss_masks=masks)
    right = right_answer(ask, host.tis_path, case, as_if_masked)
    ours = ask(case, broken, OURS)
    found = difference(replace(ours, masks=right.masks), right, _valid(clean), ("",))
    found.theirs.add(what_theirs_gave(ask(case, broken, host.tis_path), right))
    return found


def _metrics_only(host: Host, case: Case | None, batch: Batch) -> Difference:
    """Compare with metrics alone, where the loss must be the host's own, as with both switches off."""
    keys = case.flat_keys() if case else {}
    plain = drive(host, host_args({}, OURS, False, "thd"), batch)
    ours, theirs = (
        drive(host, host_args(keys, path, False, "thd", get_mismatch_metrics=True), batch)
        for path in (OURS, host.tis_path)
    )
    found = difference(replace(ours, masks=plain.masks), plain, _valid(batch))
    if not theirs.error:
        found.worse_of(replace(difference(ours, theirs, _valid(batch)), questions=0))
    found.theirs.add(what_theirs_gave(theirs, plain))
    return found


def compare_context_parallel(host: Host, limit: int | None) -> Compared:
    cases = [case for case in config_product() if not case.inherit_bounds][:limit]
    for qkv_format, batch in itertools.product(host.formats, (batches()[1], batches()[2])):
        alone = _over_ranks(host, 1, cases, batch, qkv_format)
        for size in (2, 4):
            split = _over_ranks(host, size, cases, batch, qkv_format)
            for case, ours, right in zip(cases, split, alone, strict=True):
                found = difference(ours, right, torch.empty(0, dtype=torch.bool))
                yield ("ours at CP 1", f"CP {size}, {qkv_format}"), found.asked_about(f"{case}, {batch.name}")


def _over_ranks(host: Host, size: int, cases: list[Case], batch: Batch, qkv_format: str) -> list[Outcome]:
    ask = asker(host, False, qkv_format)
    return _summed_over(host, size, lambda: [ask(case, batch, OURS) for case in cases])


def _summed_over(host: Host, size: int, answered: Callable[[], list[Outcome]]) -> list[Outcome]:
    """The outcomes of context-parallel ranks, each added up over the ranks."""

    def work(rank: int) -> list[Outcome]:
        start_groups(host.name, size)
        return answered()

    return [_summed(answers) for answers in zip(*run_ranks(size, work), strict=True)]


def _summed(answers: tuple[Outcome, ...]) -> Outcome:
    """Add losses, gradients and reported values over CP ranks, as the host does; the full masks must agree."""
    errors = [answer.error for answer in answers if answer.error]
    if errors:
        return Outcome(error=errors[0])
    first = answers[0]
    if any(not torch.equal(first.masks, answer.masks) for answer in answers):
        return Outcome(error="CP ranks returned different masks")
    if any(first.reported.keys() != answer.reported.keys() for answer in answers):
        return Outcome(error="CP ranks returned different metric names")
    reported = {key: sum(answer.reported[key] for answer in answers) for key in first.reported}
    gradient = torch.stack([answer.gradient for answer in answers]).sum(0)
    return Outcome("", sum(a.loss for a in answers), gradient, first.masks, reported=reported)


def compare_losses(host: Host, limit: int | None) -> Compared:
    """Compare our loss with the host's own at equal context parallelism, added over its ranks."""
    questions = [
        (case, batch, qkv_format)
        for case in loss_cases(host)[:limit]
        for batch in (batches()[1], batches()[2], batches()[4])
        for qkv_format in case.formats
    ]
    for size in (1, 2):
        ours = _summed_over(
            host, size, lambda: [ask(host, case.ours(), batch, form) for case, batch, form in questions]
        )
        theirs = _summed_over(
            host, size, lambda: [ask(host, case.theirs(), batch, form) for case, batch, form in questions]
        )
        for (case, batch, qkv_format), mine, right in zip(questions, ours, theirs, strict=True):
            found = compared(case, mine, right).asked_about(f"{batch.name}, {qkv_format}")
            yield (f"the host's own, CP {size}", case.name), found


HEADINGS = tuple("compared with,group,runs,loss,gradient,metrics,mask tokens,mis.py gave,verdict".split(","))


def lines(groups: dict[Group, Difference]) -> list[tuple[str, ...]]:
    return [(*group, *_figures(f), "equal" if f.equal else "DIFFERENT") for group, f in groups.items()]


def _figures(found: Difference) -> tuple[str, ...]:
    metric = f"{found.metric:.1e} {found.metric_name.removeprefix('mis_')}" if found.metric else "0"
    counts = f"{found.loss:.1e}", f"{found.gradient:.1e}", metric, str(found.mask_tokens)
    return (str(found.questions), *counts, _ranges(found.theirs))


def _ranges(theirs: set[str]) -> str:
    """Join answers, with `gradient off by 1e-2`, `... 1e-1` and `... 1e0` as one range."""
    off = sorted(float(text.rpartition(" ")[2]) for text in theirs if text.startswith("gradient off"))
    others = sorted(text for text in theirs if not text.startswith("gradient off"))
    spans = [f"gradient off by {magnitude(off[0])} to {magnitude(off[-1])}"] if off else []
    return "; ".join(others + spans)


def as_json(groups: dict[Group, Difference], measured: dict[str, str]) -> dict[str, Any]:
    rows = [
        {"compared with": against, "group": name, **asdict(found), "theirs": sorted(found.theirs), "equal": found.equal}
        for (against, name), found in groups.items()
    ]
    tolerances = {"loss and gradient": GRADIENT_TOLERANCE, "metrics": METRIC_TOLERANCE}
    return {"measured with": measured, "tolerances": tolerances, "groups": rows}


def write_results(path: Path, groups: dict[Group, Difference], measured: dict[str, str]) -> None:
    """Write the differences to `path` as JSON, and as a table to a .md beside it."""
    note = (
        "Worst deviation over the runs of each row: loss and metrics relative to max(1, value), gradient relative to "
        f"its largest entry. Equal means at most {GRADIENT_TOLERANCE:g} (loss, gradient), {METRIC_TOLERANCE:g} "
        "(metrics), and identical masks."
    )
    text = f"{as_markdown(measured)}\n{note}\n\n{markdown_table(HEADINGS, lines(groups))}"
    write_record(path, as_json(groups, measured), text)


def parse_arguments() -> Namespace:
    parser = build_parser(__doc__)
    parser.add_argument("--hook", choices=("tis", "loss"), default="tis", help="which of our functions")
    parser.add_argument("--limit", type=count, help="only the first N configurations")
    return parser.parse_args()


def compare_all(host: Host, limit: int | None) -> Compared:
    def alone(rank: int) -> dict[Group, Difference]:
        start_groups(host.name, 1)
        _check_that_the_host_runs(host)
        return worst(itertools.chain(compare_product(host, limit), compare_special(host, limit)))

    yield from sorted(run_ranks(1, alone)[0].items(), key=lambda item: item[0][0])
    yield from compare_context_parallel(host, limit)


def _check_that_the_host_runs(host: Host) -> None:
    for batch in batches():
        plain = drive(host, host_args({}, OURS, False, "thd"), batch)
        if not plain.finite:
            raise CannotCompare(f"the host's own loss on '{batch.name}': {plain.error or 'not finite'}")


def main() -> int:
    arguments = parse_arguments()
    try:
        host = load_host(arguments.host, arguments.checkout)
        importlib.import_module(OURS.rpartition(".")[0])
        compare = compare_losses if arguments.hook == "loss" else compare_all
        groups = worst(compare(host, arguments.limit))
    except Exception as error:
        print(f"could not compare: {error}")
        return 2
    measured = provenance({arguments.host: arguments.checkout})
    title = "policy_loss_function" if arguments.hook == "tis" else "loss_function, as --custom-loss-function-path"
    print(f"mis_plugins in {arguments.host}'s own {title}")
    print_table(HEADINGS, lines(groups))
    for (_, name), found in groups.items():
        for fault, example in found.example.items():
            print(f"{name}: {fault} ({max(1, found.faults[fault])}x); e.g. {example}")
    if arguments.json:
        write_results(arguments.json, groups, measured)
    return 0 if all(found.equal for found in groups.values()) else 1
