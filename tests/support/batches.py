"""Ragged batches and configs for hypothesis, and the batch as tensors, as a host hands it over."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from hypothesis import strategies as st
from oracle import OF_MIS_PY, Sample, zigzag
from torch import Tensor

from mis_plugins.config.terms.bounds import BOUNDS
from mis_plugins.config.terms.statistics import STATISTICS
from mis_plugins.hosts.batch import without_absent_

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# The mis.yaml that Miles ships.
MILES_YAML = {
    "use_rs": True, "tis_level": "token", "rs_level": "token", "tis_mode": "truncate", "tis_lower_bound": 0.5,
    "tis_upper_bound": 2.0, "rs_lower_bound": None, "rs_upper_bound": None, "rs_veto_threshold": 1e-4,
    "tis_batch_normalize": True,
}  # fmt: skip
MASK_TYPES = (torch.int32, torch.int64, torch.int8, torch.uint8, torch.bool, torch.float32)


@dataclass(frozen=True)
class Batch:
    """Full responses, one tensor a sequence: log-probs `[R]`, loss masks `[R]`; and the prompts' lengths."""

    proximal: list[Tensor]
    behavior: list[Tensor]
    loss_masks: list[Tensor]
    prompts: list[int]

    @property
    def response_lengths(self) -> list[int]:
        return [len(mask) for mask in self.loss_masks]

    @property
    def total_lengths(self) -> list[int]:
        return [p + r for p, r in zip(self.prompts, self.response_lengths, strict=True)]

    @property
    def samples(self) -> list[Sample]:
        rows = zip(self.proximal, self.behavior, self.loss_masks, strict=True)
        return [Sample(p.double().tolist(), b.double().tolist(), m.bool().tolist()) for p, b, m in rows]

    @property
    def flat_mask(self) -> Tensor:
        return torch.cat([m.bool() for m in self.loss_masks])

    def joined(self) -> tuple[Tensor, Tensor]:
        """Both sides' log-probs `[T]`, as every hook joins them."""
        return without_absent_(torch.cat(self.proximal)), without_absent_(torch.cat(self.behavior))

    def select(self, indices: Sequence[int]) -> Batch:
        return Batch(
            [self.proximal[i] for i in indices],
            [self.behavior[i] for i in indices],
            [self.loss_masks[i] for i in indices],
            [self.prompts[i] for i in indices],
        )

    def to(self, dtype: torch.dtype) -> Batch:
        """Log-probs of both sides in this dtype."""
        return replace(
            self, proximal=[x.to(dtype) for x in self.proximal], behavior=[x.to(dtype) for x in self.behavior]
        )

    def pg_loss(self) -> Tensor:
        """A loss a token, `[T]`, distinct and with gradient, as the host's clipped objective gives it."""
        count = sum(self.response_lengths)
        return torch.linspace(-1.0, 1.5, count).requires_grad_() if count else torch.zeros(0, requires_grad=True)

    def hook_kwargs(self) -> dict:
        """What slime hands to the TIS hook; Miles adds two more."""
        return {
            "pg_loss": self.pg_loss(), "train_log_probs": self.proximal, "rollout_log_probs": self.behavior,
            "loss_masks": self.loss_masks, "total_lengths": self.total_lengths,
            "response_lengths": self.response_lengths,
        }  # fmt: skip

    def lists(self) -> dict:
        """What `compute_mis_weights` takes."""
        return {"train_log_probs": self.proximal, "rollout_log_probs": self.behavior, "loss_masks": self.loss_masks}

    def shard(self, cp: int, rank: int, row: int | None) -> tuple[Batch, list[list[int]]]:
        """The zigzag part of one CP rank (masks stay whole, as the hosts leave them), and which tokens it owns."""
        lengths = zip(self.total_lengths, self.response_lengths, strict=True)
        owned = [zigzag(total, response, cp, rank, row) for total, response in lengths]
        local = [[x[i] for x, i in zip(field, owned, strict=True)] for field in (self.proximal, self.behavior)]
        return replace(self, proximal=local[0], behavior=local[1]), owned


def make_batch(rows: Sequence[tuple[Sequence[float], Sequence[float], Sequence[int]]], prompt: int = 3) -> Batch:
    """A batch from (proximal, behavior, mask) lists."""
    proximal, behavior, masks = zip(*rows, strict=True)
    tensors = lambda column, dtype: [torch.tensor(x, dtype=dtype) for x in column]  # noqa: E731
    log_probs = tensors(proximal, torch.float32), tensors(behavior, torch.float32)
    return Batch(*log_probs, tensors(masks, torch.int32), [prompt] * len(rows))


def ratio_batch(ratios: Sequence[Sequence[float]], masks: Sequence[Sequence[int]] | None = None) -> Batch:
    """A batch with these importance ratios a token; the behavior policy gives every token -1."""
    masks = [[1] * len(r) for r in ratios] if masks is None else masks
    return make_batch(
        [([math.log(x) - 1.0 for x in r], [-1.0] * len(r), m) for r, m in zip(ratios, masks, strict=True)]
    )


# ---------------------------------------------------------------------------------------------------- strategies

# Sizes of a token's log ratio: none, engine noise, a real mismatch, a broken token (beyond the clamp of 20).
drifts = st.one_of(
    st.just(0.0), st.floats(-(2**-7), 2**-7, width=32), st.floats(-1.5, 1.5, width=32), st.floats(-30.0, 30.0, width=32)
)
behaviors = st.floats(-12.0, 0.0, width=32)


@st.composite
def sequences(draw: Callable, max_length: int, dtypes: tuple, mask_type: torch.dtype, equal: bool) -> tuple:
    length = draw(st.sampled_from([0, 1, max_length]) | st.integers(0, max_length))
    behavior = draw(st.lists(behaviors, min_size=length, max_size=length))
    drift = [0.0] * length if equal else draw(st.lists(drifts, min_size=length, max_size=length))
    mask = draw(masks(length))
    proximal_dtype, behavior_dtype = dtypes
    proximal = torch.tensor([b + d for b, d in zip(behavior, drift, strict=True)]).to(proximal_dtype)
    return proximal, torch.tensor(behavior).to(behavior_dtype), torch.tensor(mask).to(mask_type)


def masks(length: int) -> st.SearchStrategy[list[int]]:
    """All valid, none valid, or turns of a tool between turns of the model."""
    turns = st.lists(st.integers(0, 1), min_size=length, max_size=length)
    return st.one_of(st.just([1] * length), st.just([0] * length), turns, turns)


@st.composite
def batches(draw: Callable, max_sequences: int = 5, max_length: int = 8, min_sequences: int = 1) -> Batch:
    """1 to 5 ragged sequences: empty, one token, fully masked, multi-turn; any dtypes; garbage under the mask."""
    equal = draw(st.integers(0, 9)) == 0
    dtype = draw(st.sampled_from(FLOATS))
    dtypes = (dtype, dtype if equal else draw(st.sampled_from(FLOATS)))
    mask_type = draw(st.sampled_from(MASK_TYPES))
    one = sequences(max_length, dtypes, mask_type, equal)
    rows = draw(st.lists(one, min_size=min_sequences, max_size=max_sequences))
    proximal, behavior, loss_masks = (list(column) for column in zip(*rows, strict=True))
    prompts = draw(st.lists(st.integers(1, 9), min_size=len(rows), max_size=len(rows)))
    return Batch(proximal, behavior, loss_masks, prompts)


garbage = st.sampled_from([math.nan, math.inf, -math.inf])
# What engines and frameworks write for a log-prob that they do not have.
stand_ins = st.sampled_from([-9999.0, -1e4, -1e9, torch.finfo(torch.float32).min])


def poisoned(batch: Batch, proximal: float, behavior: float) -> Batch:
    """The same batch with these values at every masked position."""
    fill = lambda rows, value: [  # noqa: E731
        torch.where(m.bool(), x, torch.full_like(x, value)) for x, m in zip(rows, batch.loss_masks, strict=True)
    ]
    return replace(batch, proximal=fill(batch.proximal, proximal), behavior=fill(batch.behavior, behavior))


@st.composite
def broken_batches(draw: Callable) -> Batch:
    """A batch where some valid tokens carry no rollout log-prob: not a finite one, or what stands in for one."""
    batch = draw(batches(min_sequences=2))
    behavior = [b.clone() for b in batch.behavior]
    valid = [(i, t) for i, m in enumerate(batch.loss_masks) for t in m.nonzero().flatten().tolist()]
    hits = draw(st.lists(st.sampled_from(valid), min_size=1, max_size=2)) if valid else []
    for i, t in hits:
        behavior[i][t] = torch.tensor(draw(garbage | stand_ins)).to(behavior[i].dtype)
    return replace(batch, behavior=behavior)


# ------------------------------------------------------------------------------------------------------- configs

uppers = st.sampled_from([1.0001, 1.05, 2.0, 5.0])
lowers = st.sampled_from([0.1, 0.5, 0.9, 0.9999])
LEVELS = ("token", "segment", "segment_geometric", "sequence", "geometric")
FLAT_LEVELS = ("token", "sequence", "geometric")
ENDS = (-0.7, -0.1, -0.02, 1e-4, 0.02, 0.1, 0.3, 0.7)
"""Limits of a rule, of which a statistic takes what lies in its range; of `sum`, wide enough for a few tokens."""


def drawn_statistics() -> list[str]:
    """Every statistic of log-probs alone."""
    return sorted(name for name, record in STATISTICS.items() if not record.reads_routes)


@st.composite
def weight_configs(draw: Callable, scope: str = "micro_batch", rejects: bool = False, level: str | None = None) -> dict:
    """`mis.weight`: every key that has an effect for the drawn bound.

    Args:
        rejects: whether a rule drops something.
    """
    bound = draw(st.sampled_from(sorted(BOUNDS)))
    record = BOUNDS[bound]
    weight: dict = {"level": level or draw(st.sampled_from(LEVELS)), "bound": bound}
    if record.has_ceiling:
        weight["upper"] = draw(uppers)
    if record.has_floor and draw(st.booleans()):
        weight["lower"] = draw(lowers | st.just(0.0))
    if draw(st.booleans()):
        choices = ["valid", "kept"] if rejects or record.drops_token else ["valid"]
        weight["normalize"] = {"scope": scope, "over": draw(st.sampled_from(choices))}
    return weight


@st.composite
def rules(draw: Callable) -> dict:
    over = draw(st.sampled_from(["token", "sum", "mean", "min", "max"]))
    rule: dict = {"over": over}
    if over == "token" and draw(st.booleans()):
        rule["down_weigh"] = draw(st.sampled_from([0.01, 0.1, 0.5]))
    if over != "token" and draw(st.integers(0, 3)) == 0:
        rule["unit"] = "segment"
    sides = draw(st.sampled_from([("lower",), ("upper",), ("lower", "upper")]))
    statistic = draw(st.just("ratio") | st.sampled_from(drawn_statistics()))
    record = STATISTICS[statistic]
    if record.factor:
        drawn = {"lower": draw(lowers), "upper": draw(uppers)}
    else:
        ends = st.sampled_from([end for end in ENDS if record.low < end < record.high])
        pair = draw(st.lists(ends, min_size=2, max_size=2, unique=True).map(sorted))
        drawn = dict(zip(("lower", "upper"), pair, strict=True))
    return rule | {"statistic": statistic} | {side: drawn[side] for side in sides}


@st.composite
def configs(draw: Callable, scope: str = "micro_batch", metrics: str | None = None) -> dict:
    """The nested `mis:` mapping: any weight or none, up to two rules; never neither. `metrics` draws if None."""
    reject = draw(st.lists(rules(), max_size=2))
    drops = any("down_weigh" not in rule for rule in reject)
    weight = draw(weight_configs(scope, drops) if not reject else st.none() | weight_configs(scope, drops))
    config = {
        "weight": weight,
        "reject": reject,
        "metrics": metrics or draw(st.sampled_from(["full", "full", "core", "none"])),
    }
    masks = weight is not None and BOUNDS[weight["bound"]].drops_token
    zeroes = weight is not None and BOUNDS[weight["bound"]].zeroes
    if drops or masks:
        config["denominator"] = draw(st.sampled_from(["original", "original", "kept"]))
    by_token = [rule["over"] == "token" and "down_weigh" not in rule for rule in reject]
    narrow = any(by_token) or (weight is not None and masks and weight["level"] == "token")
    larger = [rule for rule in reject if rule["over"] != "token"] if narrow else []
    for rule in larger:
        if draw(st.booleans()):
            rule["aggregate"] = draw(st.sampled_from(["valid", "kept"]))
    if narrow and (
        any("aggregate" not in rule for rule in larger) or (weight is not None and weight["level"] != "token")
    ):
        config["aggregate"] = draw(st.sampled_from(["valid", "kept"]))
    kept = {config.get("aggregate"), *(rule.get("aggregate") for rule in reject)}
    if drops and not masks and not zeroes and "kept" not in kept:
        config["on_all_rejected"] = draw(st.sampled_from(["skip", "keep"]))
    return config


flat_lowers = st.none() | st.just(0.0) | lowers


@st.composite
def flat_configs(draw: Callable) -> dict:
    """Miles's flat keys, where mis.py itself gives a sane answer."""
    level, mode = draw(st.sampled_from(FLAT_LEVELS)), draw(st.sampled_from(OF_MIS_PY))
    normal = mode != "mask" and level != "geometric" and draw(st.booleans())
    use_rs = draw(st.booleans())
    return {
        "use_tis": True, "use_rs": use_rs, "tis_level": level, "tis_mode": mode,
        "tis_lower_bound": draw(flat_lowers), "tis_upper_bound": draw(uppers), "tis_batch_normalize": normal,
        "rs_level": draw(st.sampled_from(FLAT_LEVELS)), "rs_lower_bound": draw(flat_lowers),
        "rs_upper_bound": draw(st.none() | uppers),
        "rs_veto_threshold": draw(st.sampled_from([None, 1e-4])) if use_rs else None,
    }  # fmt: skip


def nested(flat: dict) -> dict:
    """What flat keys mean, in the words of the nested config."""
    fallback = 1.0 / flat["tis_upper_bound"] if flat["tis_lower_bound"] is None else flat["tis_lower_bound"]
    lower = fallback if flat["rs_lower_bound"] is None else flat["rs_lower_bound"]
    weight = {"level": flat["tis_level"], "bound": flat["tis_mode"], "upper": flat["tis_upper_bound"]}
    if flat["tis_mode"] != "truncate":
        weight["lower"] = flat["tis_lower_bound"]
    if flat["tis_batch_normalize"]:
        weight["normalize"] = {"scope": "micro_batch", "over": "valid"}
    reject = []
    if flat["use_rs"]:
        over = {"token": "token", "sequence": "sum", "geometric": "mean"}[flat["rs_level"]]
        reject.append({"over": over, "lower": lower or None,
                       "upper": flat["rs_upper_bound"] or flat["tis_upper_bound"]})  # fmt: skip
    if flat["rs_veto_threshold"] is not None:
        reject.append({"over": "min", "lower": flat["rs_veto_threshold"]})
    return {"weight": weight, "reject": reject}


def host_args(**settings: object) -> SimpleNamespace:
    """A host's Namespace: `--use-tis`, `--qkv-format thd`, all metrics unless told otherwise, then the YAML's keys."""
    nested = settings.get("mis")
    if isinstance(nested, dict):
        settings["mis"] = {"metrics": "full", **nested}
    given = {"use_tis": True, "get_mismatch_metrics": False, "qkv_format": "thd"}
    return SimpleNamespace(**(given | settings))
