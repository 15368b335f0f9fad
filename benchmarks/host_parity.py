"""Is our correction the host's own, inside the host's own loss?

Drives the real `policy_loss_function` of a Miles or slime checkout on CPU, once with the checkout's mis.py and once with
`mis_plugins.mis`, over level x mode x rejection x veto x normalization and ragged batches, and compares the loss, its
gradient with respect to the logits, the masks, and every metric of the same name.

Where mis.py gives no sane answer (normalization in mask mode, at geometric level, or with a fully masked sequence; a veto
without `use_rs`; metrics only; non-finite values) ours is compared with what it should be: mis.py on the nearest question
that it does answer, scaled by hand where normalization is at stake. What mis.py itself gives there is reported.

Exit status: 0 equal, 1 different, 2 could not compare.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from host_checkout import HOSTS, CannotCompare, Host, load_host, run_ranks, start_groups
from provenance import as_markdown, provenance

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

OURS = "mis_plugins.mis.compute_mis_weights_with_cp"
LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "clip", "mask")
VETO = 1e-4
TIS_BOUNDS = {"token": (0.5, 2.0), "sequence": (0.3, 3.0), "geometric": (0.9, 1.1)}
RS_BOUNDS = {"token": (0.45, 2.5), "sequence": (0.2, 5.0), "geometric": (0.88, 1.15)}

# Relative to the largest gradient, and to max(1, |value|). A metric may be exp(2 * 20): a float32 sum of 20 carries a
# rounding of about 2e-6, which the exponential turns into a relative error.
GRADIENT_TOLERANCE = 3e-6
METRIC_TOLERANCE = 2e-5


# --------------------------------------------------------------------------------------------------------- the questions


@dataclass(frozen=True)
class Case:
    """One point of the config product, in Miles's flat keys."""

    level: str = "token"
    mode: str = "truncate"
    rejection: str | None = None
    veto: bool = False
    normalize: bool = False
    inherit_bounds: bool = False
    use_tis: bool = True

    def flat_keys(self) -> dict[str, Any]:
        tis_lower, tis_upper = TIS_BOUNDS[self.level]
        rs_lower, rs_upper = (None, None) if self.inherit_bounds else RS_BOUNDS[self.rejection or "token"]
        return {
            "use_tis": self.use_tis, "use_rs": self.rejection is not None,
            "tis_level": self.level, "tis_mode": self.mode,
            "tis_lower_bound": None if self.inherit_bounds else tis_lower, "tis_upper_bound": tis_upper,
            "rs_level": self.rejection or "token", "rs_lower_bound": rs_lower, "rs_upper_bound": rs_upper,
            "rs_veto_threshold": VETO if self.veto else None, "tis_batch_normalize": self.normalize,
        }  # fmt: skip


def config_product() -> list[Case]:
    points = itertools.product(LEVELS, MODES, (None, *LEVELS), (False, True), (False, True), (False, True))
    return [Case(*point) for point in points]


@dataclass(frozen=True)
class Batch:
    """A micro-batch before any CP split. Lists hold one tensor a sequence: logits [L, V], the rest [response]."""

    name: str
    prompt_lengths: list[int]
    logits: list[Tensor]
    tokens: list[Tensor]
    loss_masks: list[Tensor]
    proximal: list[Tensor]
    behavior: list[Tensor]
    advantages: list[Tensor]
    mask_sums: list[Tensor]

    @property
    def response_lengths(self) -> list[int]:
        return [len(mask) for mask in self.loss_masks]

    @property
    def total_lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.tokens]

    @property
    def has_dead_sequence(self) -> bool:
        return any(not mask.any() for mask in self.loss_masks)


Gap = Callable[[int], Tensor]


def make_batch(
    name: str, responses: list[int], mask_of: Callable[[int, Tensor], Tensor], gap: Gap, seed: int
) -> Batch:
    """`gap(n)` draws n log ratios, proximal minus behavior."""
    torch.manual_seed(seed)
    prompts = [1 + int(torch.randint(9, ())) for _ in responses]
    logits = [torch.randn(p + r, 13) for p, r in zip(prompts, responses, strict=True)]
    tokens = [torch.randint(13, (p + r,)) for p, r in zip(prompts, responses, strict=True)]
    masks = [mask_of(i, torch.rand(r)) for i, r in enumerate(responses)]
    proximal = [
        _log_probs(x, t, r) + 0.05 * torch.randn(r) for x, t, r in zip(logits, tokens, responses, strict=True)
    ]
    behavior = [p - gap(len(p)) for p in proximal]
    advantages = [torch.randn(()).expand(r).clone() for r in responses]
    return Batch(
        name, prompts, logits, tokens, masks, proximal, behavior, advantages, [m.sum() for m in masks]
    )


def _log_probs(logits: Tensor, tokens: Tensor, response: int) -> Tensor:
    start = len(tokens) - response
    chosen = tokens[start:].unsqueeze(-1)
    return logits[start - 1 : -1].log_softmax(-1).gather(-1, chosen).squeeze(-1)


def _noise(scale: float) -> Gap:
    return lambda n: scale * torch.randn(n)


def _with_catastrophes(n: int) -> Tensor:
    return 0.4 * torch.randn(n) - 11.0 * (torch.rand(n) < 0.03)


def _saturated(n: int) -> Tensor:
    return 0.4 * torch.randn(n) + 100.0 * (torch.rand(n) < 0.05) - 60.0 * (torch.rand(n) < 0.05)


def batches() -> list[Batch]:
    single_turn: Callable[[int, Tensor], Tensor] = lambda i, u: torch.ones_like(u)  # noqa: E731
    multi_turn: Callable[[int, Tensor], Tensor] = lambda i, u: (u > 0.3).int()  # noqa: E731
    dead_first: Callable[[int, Tensor], Tensor] = lambda i, u: (u > 0.2).float() * float(i not in (0, 3))  # noqa: E731
    ragged = [7, 1, 24, 12, 3, 18]
    return [
        make_batch("single turn, float mask", ragged, single_turn, _noise(0.4), seed=1),
        make_batch("multi turn, int mask", [30, 2, 11, 1, 16], multi_turn, _with_catastrophes, seed=2),
        make_batch("fully masked sequences", ragged, dead_first, _with_catastrophes, seed=3),
        make_batch("saturated ratios", [15, 9, 28, 4], multi_turn, _saturated, seed=4),
        make_batch("nearly on-policy", [40, 5, 17], single_turn, _noise(0.01), seed=5),
    ]


# ------------------------------------------------------------------------------------------------------- asking the host


@dataclass
class Outcome:
    """What the host made of one micro-batch with one TIS function; `error` where it raised instead."""

    error: str = ""
    loss: float = math.nan
    gradient: Tensor = field(default_factory=lambda: torch.empty(0))
    masks: Tensor = field(default_factory=lambda: torch.empty(0))
    weights: Tensor = field(default_factory=lambda: torch.empty(0))
    reported: dict[str, float] = field(default_factory=dict)
    tokenwise: dict[str, Tensor] = field(default_factory=dict)

    @property
    def finite(self) -> bool:
        return not self.error and math.isfinite(self.loss) and bool(self.gradient.isfinite().all())

    def divided_by(self, mean: float) -> Outcome:
        scaled = {key: self.reported[key] / mean for key in ("loss", "pg_loss") if key in self.reported}
        loss, gradient, weights = self.loss / mean, self.gradient / mean, self.weights / mean
        return replace(self, loss=loss, gradient=gradient, weights=weights, reported=self.reported | scaled)


def host_args(
    case_keys: dict[str, Any], tis_path: str, per_token_loss: bool, qkv_format: str, **more: Any
) -> Namespace:
    keys = {
        "use_rollout_logprobs": False, "skip_actor_forward_only": False, "get_mismatch_metrics": False, "use_tis": False,
        "custom_tis_function_path": tis_path, "custom_pg_loss_reducer_function_path": None,
        "calculate_per_token_loss": per_token_loss, "qkv_format": qkv_format, "allgather_cp": False,
        "advantage_estimator": "grpo", "eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": None,
        "use_opsm": False, "use_kl_loss": False, "use_unbiased_kl": False, "entropy_coef": 0.0,
        "observe_training_entropy": False, "true_on_policy_mode": False, "rollout_temperature": 1.0, "rollout_top_p": 1.0,
        "log_probs_chunk_size": -1,
    }  # fmt: skip
    return Namespace(**{**keys, **case_keys, **more})


def drive(host: Host, args: Namespace, batch: Batch) -> Outcome:
    """One forward and backward of the host's policy loss on this CP rank's share of the batch."""
    leaves = [logits.clone().requires_grad_() for logits in batch.logits]
    record = _Record()
    try:
        with record.of(host):
            given = _host_batch(host, args, batch)
            logits = _host_logits(host, args, leaves)
            loss, reported = host.loss.policy_loss_function(args, given, logits, host.reducer(args, given))
        loss.backward()
    except Exception as error:
        return Outcome(error=f"{type(error).__name__}: {error}")
    gradient = torch.cat([leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves])
    scalars = {key: float(value) for key, value in reported.items()}
    return Outcome("", loss.item(), gradient, record.masks, record.weights, scalars, record.tokenwise)


def _host_logits(host: Host, args: Namespace, leaves: list[Tensor]) -> Tensor:
    longest = max(map(len, leaves))
    rows = [host.cp.slice_with_cp(leaf, 0, *host.layout(args, longest)) for leaf in leaves]
    return torch.stack(rows) if args.qkv_format == "bshd" else torch.cat(rows).unsqueeze(0)


def _host_batch(host: Host, args: Namespace, batch: Batch) -> dict[str, Any]:
    totals, responses = batch.total_lengths, batch.response_lengths
    layout = host.layout(args, max(totals))

    def share(values: list[Tensor]) -> list[Tensor]:
        lengths = zip(values, totals, responses, strict=True)
        return [
            host.cp.slice_log_prob_with_cp(value, total, response, *layout)
            for value, total, response in lengths
        ]

    return {
        "unconcat_tokens": batch.tokens, "total_lengths": totals, "response_lengths": responses,
        "loss_masks": batch.loss_masks, "rollout_mask_sums": batch.mask_sums,
        "advantages": share(batch.advantages), "log_probs": share(batch.proximal),
        "rollout_log_probs": share(batch.behavior),
        "max_seq_lens": [max(totals)] * len(totals) if args.qkv_format == "bshd" else None,
    }  # fmt: skip


class _Record:
    """Listens to what the host's own loader loads, to see the masks and token-wise metrics that the loss swallows."""

    def __init__(self) -> None:
        self.masks = self.weights = torch.empty(0)
        self.tokenwise: dict[str, Tensor] = {}

    def of(self, host: Host) -> _Record:
        self._module, self._load = host.loss, host.loss.load_function
        self._module.load_function = lambda path: self._listening(self._load(path))
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        self._module.load_function = self._load

    def _listening(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(**kwargs: Any) -> Any:
            pg_loss, masks, metrics = function(**kwargs)
            ones = torch.ones_like(kwargs["pg_loss"])
            self.weights = function(**{**kwargs, "pg_loss": ones})[0]
            self.masks = torch.cat([mask.float() for mask in masks])
            self.tokenwise = {key: value.detach().float() for key, value in metrics.items()}
            return pg_loss, masks, metrics

        return called


# ------------------------------------------------------------------------------------------------- what the answer must be


@dataclass(frozen=True)
class Question:
    """A case on a batch. `why` names the defect of mis.py that rules out plain equality; empty where it is sane."""

    case: Case
    batch: Batch
    per_token_loss: bool
    why: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    reference: Callable[[Host], Outcome] | None = None
    metrics_too: bool = True


Ask = Callable[[Case, Batch, str], Outcome]


def asker(host: Host, per_token_loss: bool, qkv_format: str = "thd", **more: Any) -> Ask:
    def ask(case: Case, batch: Batch, tis_path: str) -> Outcome:
        return drive(host, host_args(case.flat_keys(), tis_path, per_token_loss, qkv_format, **more), batch)

    return ask


def defect(case: Case, batch: Batch) -> str:
    """Which documented defect of mis.py this question meets."""
    if case.normalize and case.level == "geometric":
        return "geometric level with normalization"
    if case.normalize and case.mode == "mask":
        return "mask mode with normalization"
    if case.normalize and case.level == "sequence" and batch.has_dead_sequence:
        return "normalization with a fully masked sequence"
    if case.veto and case.rejection is None:
        return "veto without use_rs"
    return ""


def needs_scaling_by_hand(case: Case, batch: Batch) -> bool:
    """mis.py's own mean is wrong, or it has none."""
    dead = case.level == "sequence" and batch.has_dead_sequence
    return case.normalize and (case.mode == "mask" or case.level == "geometric" or dead)


def right_answer(ask: Ask, theirs: str, case: Case, batch: Batch) -> Outcome:
    """mis.py on the nearest case that it answers right; then the normalization it gets wrong, by hand."""
    by_hand = needs_scaling_by_hand(case, batch)
    sane = replace(case, normalize=case.normalize and not by_hand)
    outcome = _ask_with_veto(ask, theirs, sane, batch)
    return outcome.divided_by(_mean_weight(ask, theirs, case, batch)) if by_hand else outcome


def _ask_with_veto(ask: Ask, theirs: str, case: Case, batch: Batch) -> Outcome:
    """A veto alone is a rejection whose ratio bounds let everything pass."""
    if not case.veto or case.rejection is not None:
        return ask(case, batch, theirs)
    return ask(_VetoAlone(**asdict(case)), batch, theirs)


class _VetoAlone(Case):
    def flat_keys(self) -> dict[str, Any]:
        return super().flat_keys() | {"use_rs": True, "rs_lower_bound": 0.0, "rs_upper_bound": 1e30}


def _mean_weight(ask: Ask, theirs: str, case: Case, batch: Batch) -> float:
    """Over the valid tokens, or the live sequences, that the mask mode itself keeps; each sequence counts once."""
    bounded = ask(replace(case, rejection=None, veto=False, normalize=False), batch, theirs)
    weights = bounded.weights.double().split(batch.response_lengths)
    kept = bounded.masks.bool().split(batch.response_lengths)
    if case.level == "token":
        counted = torch.cat([w[k] for w, k in zip(weights, kept, strict=True)])
    else:
        counted = torch.stack(
            [w[k][0] for w, k in zip(weights, kept, strict=True) if k.any()] or [torch.tensor(1.0)]
        )
    mean = counted.mean().item() if len(counted) else 1.0
    return mean if mean > 1e-8 else 1.0


# ------------------------------------------------------------------------------------------------------------ the verdict


@dataclass
class Difference:
    """Worst deviations over any number of questions; `faults` are the ones that no tolerance excuses."""

    questions: int = 0
    loss: float = 0.0
    gradient: float = 0.0
    metric: float = 0.0
    metric_name: str = ""
    mask_tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    example: dict[str, str] = field(default_factory=dict)
    theirs: set[str] = field(default_factory=set)

    @property
    def equal(self) -> bool:
        within = max(self.loss, self.gradient) <= GRADIENT_TOLERANCE and self.metric <= METRIC_TOLERANCE
        return within and not self.mask_tokens and not self.faults

    def asked_about(self, what: str) -> Difference:
        """Remember an example of what does not hold."""
        wrong = list(self.faults) or ([] if self.equal else ["deviates"])
        self.example = {fault: what for fault in wrong}
        return self

    def worse_of(self, other: Difference) -> None:
        self.questions += other.questions
        self.loss, self.gradient = max(self.loss, other.loss), max(self.gradient, other.gradient)
        if other.metric > self.metric:
            self.metric, self.metric_name = other.metric, other.metric_name
        self.mask_tokens += other.mask_tokens
        self.faults += other.faults
        self.example = other.example | self.example
        self.theirs |= other.theirs


def difference(ours: Outcome, right: Outcome, valid: Tensor, skip: tuple[str, ...] = ()) -> Difference:
    """`skip`: metric names (or their beginnings) that the reference question does not share."""
    found = Difference(questions=1)
    if ours.error or right.error:
        found.faults.update(
            [f"ours raised {ours.error}" if ours.error else f"the reference raised {right.error}"]
        )
        return found
    found.loss = abs(ours.loss - right.loss) / max(1.0, abs(right.loss))
    found.gradient = _relative(ours.gradient, right.gradient)
    if len(right.masks):
        found.mask_tokens = int((ours.masks.bool() != right.masks.bool()).sum())
    names = [name for name in right.reported if not name.startswith(skip)]
    found.faults.update(f"no metric {name}" for name in names if name not in ours.reported)
    for name in (name for name in names if name in ours.reported):
        _compare_metric(found, name, ours, right, valid)
    found.faults.update(
        f"{key} is not finite" for key, value in ours.tokenwise.items() if not value.isfinite().all()
    )
    found.loss, found.gradient = _nan_is_inf(found.loss), _nan_is_inf(found.gradient)
    return found


def _compare_metric(found: Difference, name: str, ours: Outcome, right: Outcome, valid: Tensor) -> None:
    apart = _far(torch.tensor(ours.reported[name]), torch.tensor(right.reported[name]))
    if name in ours.tokenwise and name in right.tokenwise:
        apart = max(apart, _far(ours.tokenwise[name][valid], right.tokenwise[name][valid]))
    if apart > found.metric:
        found.metric, found.metric_name = apart, name


def _far(a: Tensor, b: Tensor) -> float:
    return _nan_is_inf(((a - b).abs() / b.abs().clamp_min(1.0)).max().item()) if a.numel() else 0.0


def _relative(a: Tensor, b: Tensor) -> float:
    """A gradient that should vanish is compared with 1."""
    largest = b.abs().max().item()
    return (a - b).abs().max().item() / (largest if largest > 0 else 1.0)


def _nan_is_inf(x: float) -> float:
    return math.inf if math.isnan(x) else x


def what_theirs_gave(theirs: Outcome, right: Outcome) -> str:
    if theirs.error:
        return "raises " + theirs.error.partition(":")[0]
    if not theirs.finite:
        return "non-finite loss or gradient"
    if not all(value.isfinite().all() for value in theirs.tokenwise.values()):
        return "non-finite metrics"
    apart = _relative(theirs.gradient, right.gradient)
    return "right" if apart <= GRADIENT_TOLERANCE else f"gradient off by {_magnitude(apart)}"


def _magnitude(x: float) -> str:
    return f"1e{math.floor(math.log10(x))}"


# ------------------------------------------------------------------------------------------------------------- the groups

Group = tuple[str, str]
K3_UNCLAMPED = ("mis_k3_kl",)
NORMALIZED = (
    "mis_batch_norm_factor",
    "mis_is_ratio_mean_final",
    "mis_is_ratio_min_final",
    "mis_is_ratio_max_final",
)
REJECTED = ("mis_rs_mask_fraction",)


def compare_product(host: Host, limit: int | None) -> dict[Group, Difference]:
    groups: dict[Group, Difference] = defaultdict(Difference)
    for case in track(config_product()[:limit], description=f"{host.name}: config product"):
        for batch, per_token_loss in itertools.product(batches(), (False, True)):
            group, found = _compare(host, case, batch, asker(host, per_token_loss))
            groups[group].worse_of(
                found.asked_about(f"{case}, {batch.name}, per-token loss {per_token_loss}")
            )
    return groups


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


def compare_special(host: Host, limit: int | None) -> dict[Group, Difference]:
    """The inputs that mis.py does not survive, and the switches that it does not understand."""
    groups: dict[Group, Difference] = defaultdict(Difference)
    cases = [c for c in config_product() if not c.normalize and not c.inherit_bounds][:limit]
    for case in track(cases, description=f"{host.name}: non-finite inputs, metrics only"):
        for name, found in _special(host, case):
            groups["not sane in mis.py", name].worse_of(found.asked_about(str(case)))
    return groups


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
    """Not one bit may change."""
    behavior = [
        torch.where(m.bool(), b, value) for m, b in zip(clean.loss_masks, clean.behavior, strict=True)
    ]
    poisoned = replace(clean, behavior=behavior)
    right = right_answer(ask, host.tis_path, case, clean)
    ours, ours_clean = ask(case, poisoned, OURS), ask(case, clean, OURS)
    # slime itself averages |log-prob difference| without a guard, after our function has returned.
    found = difference(ours, right, _valid(clean), ("train_rollout", *_not_shared(case, clean)))
    if not torch.equal(ours.gradient, ours_clean.gradient) or ours.loss != ours_clean.loss:
        found.faults.update(["a masked value changed a bit of the gradient or the loss"])
    found.theirs.add(what_theirs_gave(ask(case, poisoned, host.tis_path), right))
    return found


def _at_a_valid_token(host: Host, case: Case, clean: Batch, value: float, ask: Ask) -> Difference:
    """Weight 0 for the token, or for its sequence where a weight or a rule spans the sequence: as if masked out."""
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
    """The loss must be the host's own, as with both switches off."""
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


# ------------------------------------------------------------------------------------------------------- context parallel


def compare_context_parallel(host: Host, limit: int | None) -> dict[Group, Difference]:
    groups: dict[Group, Difference] = defaultdict(Difference)
    cases = [case for case in config_product() if not case.inherit_bounds][:limit]
    for qkv_format, batch in itertools.product(host.formats, (batches()[1], batches()[2])):
        alone = _over_ranks(host, 1, cases, batch, qkv_format)
        for size in (2, 4):
            split = _over_ranks(host, size, cases, batch, qkv_format)
            for case, ours, right in zip(cases, split, alone, strict=True):
                found = difference(ours, right, torch.empty(0, dtype=torch.bool))
                groups["ours at CP 1", f"CP {size}, {qkv_format}"].worse_of(
                    found.asked_about(f"{case}, {batch.name}")
                )
    return groups


def _over_ranks(host: Host, size: int, cases: list[Case], batch: Batch, qkv_format: str) -> list[Outcome]:
    def work(rank: int) -> list[Outcome]:
        start_groups(host.name, size)
        ask = asker(host, False, qkv_format)
        return [ask(case, batch, OURS) for case in cases]

    ranks = run_ranks(size, work)
    return [_summed(answers) for answers in zip(*ranks, strict=True)]


def _summed(answers: tuple[Outcome, ...]) -> Outcome:
    """As the host does: losses, gradients and reported values add over CP ranks; the masks are full and must agree."""
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


# ----------------------------------------------------------------------------------------------------------- the printing


NUMBERS = ("runs", "loss", "gradient", "metrics", "mask tokens")
HEADINGS = ("compared with", "group", *NUMBERS, "mis.py gave", "verdict")


def summary_table(groups: dict[Group, Difference], title: str) -> Table:
    table = Table(title=title)
    for heading in HEADINGS:
        table.add_column(heading, no_wrap=heading in NUMBERS)
    for (against, name), found in groups.items():
        verdict = "[green]equal" if found.equal else "[red]DIFFERENT"
        table.add_row(against, name, *_figures(found), verdict)
    return table


def _figures(found: Difference) -> tuple[str, ...]:
    metric = f"{found.metric:.1e} {found.metric_name.removeprefix('mis_')}" if found.metric else "0"
    counts = f"{found.loss:.1e}", f"{found.gradient:.1e}", metric, str(found.mask_tokens)
    return (str(found.questions), *counts, _ranges(found.theirs))


def _ranges(theirs: set[str]) -> str:
    """`gradient off by 1e-2`, `... 1e-1`, `... 1e0` read better as one range."""
    off = sorted(float(text.rpartition(" ")[2]) for text in theirs if text.startswith("gradient off"))
    others = sorted(text for text in theirs if not text.startswith("gradient off"))
    spans = [f"gradient off by {_magnitude(off[0])} to {_magnitude(off[-1])}"] if off else []
    return "; ".join(others + spans)


def as_json(groups: dict[Group, Difference], measured: dict[str, str]) -> dict[str, Any]:
    rows = [
        {
            "compared with": against,
            "group": name,
            **asdict(found),
            "theirs": sorted(found.theirs),
            "equal": found.equal,
        }
        for (against, name), found in groups.items()
    ]
    tolerances = {"loss and gradient": GRADIENT_TOLERANCE, "metrics": METRIC_TOLERANCE}
    return {"measured with": measured, "tolerances": tolerances, "groups": rows}


def write_results(path: Path, groups: dict[Group, Difference], measured: dict[str, str]) -> None:
    """FILE.json, and beside it FILE.md for people."""
    path.write_text(json.dumps(as_json(groups, measured), indent=1) + "\n")
    lines = [[*HEADINGS], ["---"] * len(HEADINGS)]
    lines += [[a, n, *_figures(f), "equal" if f.equal else "DIFFERENT"] for (a, n), f in groups.items()]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    note = (
        "Worst deviation over the runs of each row: loss and metrics relative to max(1, value), gradient relative to its "
        f"largest entry. Equal means at most {GRADIENT_TOLERANCE:g} (loss, gradient), {METRIC_TOLERANCE:g} (metrics), and "
        "identical masks."
    )
    path.with_suffix(".md").write_text(f"{as_markdown(measured)}\n{note}\n\n{table}\n")


def parse_arguments() -> Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", choices=sorted(HOSTS), required=True)
    parser.add_argument("--checkout", type=Path, required=True, help="root of a source checkout of the host")
    parser.add_argument("--json", type=Path, help="write the figures here, and beside it a .md")
    parser.add_argument("--limit", type=int, help="only the first N configurations")
    return parser.parse_args()


def compare_all(host: Host, limit: int | None) -> dict[Group, Difference]:
    def alone(rank: int) -> dict[Group, Difference]:
        start_groups(host.name, 1)
        _check_that_the_host_runs(host)
        return {**compare_product(host, limit), **compare_special(host, limit)}

    groups = run_ranks(1, alone)[0]
    together = {group: groups[group] for group in sorted(groups, key=lambda group: group[0])}
    return {**together, **compare_context_parallel(host, limit)}


def _check_that_the_host_runs(host: Host) -> None:
    for batch in batches():
        plain = drive(host, host_args({}, OURS, False, "thd"), batch)
        if not plain.finite:
            raise CannotCompare(f"the host's own loss on '{batch.name}': {plain.error or 'not finite'}")


def main() -> int:
    arguments = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 170)
    try:
        groups = compare_all(load_host(arguments.host, arguments.checkout), arguments.limit)
    except Exception as error:
        console.print(f"[red]could not compare:[/] {error}")
        return 2
    measured = provenance({arguments.host: arguments.checkout})
    console.print(summary_table(groups, f"mis_plugins in {arguments.host}'s own policy_loss_function"))
    for (_, name), found in groups.items():
        for fault, example in found.example.items():
            console.print(f"{name}: {fault} ({max(1, found.faults[fault])}x); e.g. {example}", markup=False)
    if arguments.json:
        write_results(arguments.json, groups, measured)
    return 0 if all(found.equal for found in groups.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
