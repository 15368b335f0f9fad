"""Drive one forward and backward of the host's own policy loss with a TIS function, or of our policy loss."""

from __future__ import annotations

import inspect
import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from lab.host_modules import Host
from lab.parity.cases import Batch, Case, cut

OURS = "mis_plugins.mis.compute_mis_weights_with_cp"
OUR_LOSS = "mis_plugins.mis.policy_loss"


@dataclass
class Outcome:
    """The outcome of one micro-batch in the host with one TIS function; `error` says what was raised, if anything."""

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
        "use_rollout_logprobs": False, "skip_actor_forward_only": False,
        "get_mismatch_metrics": False, "use_tis": False,
        "custom_tis_function_path": tis_path, "custom_pg_loss_reducer_function_path": None,
        "calculate_per_token_loss": per_token_loss, "qkv_format": qkv_format, "allgather_cp": False,
        "advantage_estimator": "grpo", "eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": None,
        "use_opsm": False, "use_kl_loss": False, "use_unbiased_kl": False, "entropy_coef": 0.0,
        "observe_training_entropy": False, "true_on_policy_mode": False, "log_probs_chunk_size": -1,
        "rollout_temperature": 1.0, "rollout_top_p": 1.0,
    }  # fmt: skip
    return Namespace(**{**keys, **case_keys, **more})


def drive(host: Host, args: Namespace, batch: Batch) -> Outcome:
    """Run one forward and backward on this CP rank's share of the batch.

    The loss is the host's own policy loss, or the function that `args.custom_loss_function_path` names.
    """
    leaves = [logits.clone().requires_grad_() for logits in batch.logits]
    record = _Record()
    try:
        with record.of(host):
            given = _given(host, args, batch)
            logits = _host_logits(host, args, leaves)
            path = getattr(args, "custom_loss_function_path", None)
            function = host.loss.load_function(path) if path else host.loss.policy_loss_function
            loss, reported = function(args, given, logits, host.reducer(args, given))
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


def _given(host: Host, args: Namespace, batch: Batch) -> dict[str, Any]:
    """Build the micro-batch of a loss, with the nuclei where top-p leaves a part of the vocabulary."""
    if args.rollout_top_p == 1:
        return _host_batch(host, args, batch)
    renormalized, kept = cut(batch, args.rollout_top_p)
    return _host_batch(host, args, renormalized) | kept


def _host_batch(host: Host, args: Namespace, batch: Batch) -> dict[str, Any]:
    totals, responses = batch.total_lengths, batch.response_lengths
    layout = host.layout(args, max(totals))

    def share(values: list[Tensor]) -> list[Tensor]:
        lengths = zip(values, totals, responses, strict=True)
        return [host.cp.slice_log_prob_with_cp(value, total, response, *layout) for value, total, response in lengths]

    return {
        "unconcat_tokens": batch.tokens, "total_lengths": totals, "response_lengths": responses,
        "loss_masks": batch.loss_masks, "rollout_mask_sums": batch.mask_sums,
        "advantages": share(batch.advantages), "log_probs": share(batch.proximal),
        "rollout_log_probs": share(batch.behavior), "ref_log_probs": share(batch.reference),
        "max_seq_lens": [max(totals)] * len(totals) if args.qkv_format == "bshd" else None,
    }  # fmt: skip


class _Record:
    """A record of the masks and token-wise metrics that a TIS hook returns and the loss does not report."""

    def __init__(self) -> None:
        self.masks = self.weights = torch.empty(0)
        self.tokenwise: dict[str, Tensor] = {}

    @contextmanager
    def of(self, host: Host) -> Iterator[None]:
        load = host.loss.load_function
        with patch.object(host.loss, "load_function", lambda path: self._listening(load(path))):
            yield

    def _listening(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if "pg_loss" not in inspect.signature(function).parameters:
            return function

        def called(**kwargs: Any) -> Any:
            pg_loss, masks, metrics = function(**kwargs)
            ones = torch.ones_like(kwargs["pg_loss"])
            self.weights = function(**{**kwargs, "pg_loss": ones})[0]
            self.masks = torch.cat([mask.float() for mask in masks])
            self.tokenwise = {key: value.detach().float() for key, value in metrics.items()}
            return pg_loss, masks, metrics

        return called


Ask = Callable[[Case, Batch, str], Outcome]


def asker(host: Host, per_token_loss: bool, qkv_format: str = "thd") -> Ask:
    def ask(case: Case, batch: Batch, tis_path: str) -> Outcome:
        return drive(host, host_args(case.flat_keys(), tis_path, per_token_loss, qkv_format), batch)

    return ask
