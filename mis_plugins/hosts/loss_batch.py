"""A host's micro-batch, read for the policy loss: scored with the host's own helper, flat, and checked."""

import pkgutil
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mis_plugins.config import reading
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.view import original, view
from mis_plugins.errors import InputError
from mis_plugins.hosts.batch import check_apart, check_lengths, counts_of, layout_of, without_absent_
from mis_plugins.hosts.host import HEAD_IDS, Batch, Host, Parallel, has_temperature
from mis_plugins.loss.micro_batch import Head, LossInputs, Reduce
from mis_plugins.packing.layout import Layout
from mis_plugins.versions.segment_wise import Written


def read(
    host: Host, args: Any, batch: Batch, logits: Tensor, config: CorrectionConfig, reports_weights: bool = False
) -> LossInputs:
    """Score the tokens with the host's own helper, and lay everything out flat.

    Args:
        reports_weights: whether the weights will be logged by age, which takes versions for standard weights too.

    Raises:
        ConfigError, InputError: a layout that is not read; a list that is missing or does not fit.
    """
    ranks, cp = host.parallel()
    layout = layout_of(args, batch, cp)
    reads_versions = config.segment_wise_on or ((config.reports_step or reports_weights) and knows_versions(batch))
    _check_present(host, args, batch, config, reads_versions)
    recomputed = host.recomputes(args) != "never"
    sides = ("log_probs",) * recomputed + ("rollout_log_probs",)
    check_lengths(batch["loss_masks"], {name: batch[name] for name in sides if _has(batch, name)}, layout)
    log_probs, entropy = host.scores(original(args), batch, logits)

    def constant(name: str) -> Tensor | None:
        return _log_probs(name, batch, layout.local_lengths) if _has(batch, name) else None

    target = _with_graph(_flat("log-probs of the logits", log_probs, layout.local_lengths), logits)
    proximal = constant("log_probs") if recomputed else None
    if proximal is not None and config.corrects and not config.bypass:
        check_apart(batch["log_probs"], batch.get("rollout_log_probs"), "log_probs")
    return LossInputs(
        ragged=layout.place(torch.cat(list(batch["loss_masks"])), ranks),
        target=target,
        proximal=target.detach() if proximal is None else proximal,
        behavior=constant("rollout_log_probs"),
        reference=constant("ref_log_probs"),
        advantages=_flat("advantages", batch["advantages"], layout.local_lengths).detach(),
        entropy=None if entropy is None else _flat("entropy", entropy, layout.local_lengths),
        written=written(batch, layout.local_lengths) if reads_versions else None,
        head=_head(args, batch, logits, layout, (ranks, cp), config),
    )


def _head(
    args: Any, batch: Batch, logits: Tensor, layout: Layout, parallel: Parallel, config: CorrectionConfig
) -> Head | None:
    """The engine's likeliest tokens, where the config centers, or full metrics find them in the batch."""
    names_heads = _has(batch, HEAD_IDS) and _has(batch, "rollout_log_probs") and has_temperature(args)
    if config.center is None and not (config.metrics in ("full", "all") and names_heads):
        return None
    from mis_plugins.hosts.head import head_of

    ranks, cp = parallel
    return head_of(args, batch, logits, layout, cp, ranks, config.center and config.center.top_k)


def _with_graph(target: Tensor, logits: Tensor) -> Tensor:
    """log pi_theta with a graph to the logits, even where this rank holds no response token.

    Collectives in the model's backward, and in a checkpointed loss that the backward runs again, wait for
    every rank. A rank whose loss had no graph would run neither.
    """
    return target if target.numel() else target + logits[..., :0].flatten().to(target.dtype)


VERSIONS = "output_versions"  # which version wrote each token
VERSION = "proximal_version"  # which one the proximal policy is


def knows_versions(batch: Batch) -> bool:
    """Whether the host knows each token's version: it then names the version of the proximal policy.

    The proximal version is the trainer's own number, so that every rank decides alike. A rank that decided by its
    samples, which carry the tokens' versions, could choose other weights and other collectives. It raises InputError
    where the tokens' versions stand without the proximal version.
    """
    if batch.get(VERSION) is None and _has(batch, VERSIONS):
        raise InputError(f"{VERSION}: none beside {VERSIONS}; hand on the version of the weights that log_probs are of")
    return batch.get(VERSION) is not None


def written(batch: Batch, lengths: Sequence[int]) -> Written:
    """Versions and recomputed log-probs of tokens, by the keys of docs/async.md; raises InputError for a misfit."""
    versions = _flat(VERSIONS, batch[VERSIONS], lengths).long()
    if _has(batch, "recomputed_log_probs"):
        recomputed = _log_probs("recomputed_log_probs", batch, lengths)
    else:
        recomputed = torch.full_like(versions, torch.nan, dtype=torch.float32)
    return Written(versions, recomputed, batch[VERSION])


def _check_present(host: Host, args: Any, batch: Batch, config: CorrectionConfig, reads_versions: bool) -> None:
    always_recomputed = host.recomputes(args) == "always" and not config.bypass
    compares = config.corrects or config.bypass
    rows = (
        ("rollout_log_probs", compares, "the rollout engine must return one for each sampled token"),
        ("ref_log_probs", getattr(args, "use_kl_loss", False), "--use-kl-loss needs those of a reference policy"),
        ("log_probs", always_recomputed, "the trainer's log-probs were neither recomputed nor handed on"),
        ("loss_masks", True, "the loss hook needs one of each response"),
        ("advantages", True, "the policy loss needs one for each token"),
    )
    for name, is_wanted, why in rows:
        if is_wanted and not _has(batch, name):
            raise InputError(f"{name}: none in this micro-batch; {why}")
    if reads_versions:
        check_versions(args, batch, config)


def check_versions(args: Any, batch: Batch, config: CorrectionConfig) -> None:
    """Refuse a micro-batch or rollout that lacks keys which segment-wise weights or metrics by age read."""
    lacks = _lacking(batch, config)
    if lacks is not None:
        raise InputError(lacks).spelled(reading.spelling(args), "mis.")


def _lacking(batch: Batch, config: CorrectionConfig) -> str | None:
    if not knows_versions(batch):
        return (
            f"{VERSIONS}: none here; {{segment_wise}} needs to know which version wrote each token, which this host "
            "does not say; Miles fully asynchronous does with more flags (see docs/async.md); else leave "
            "{segment_wise} out, and give its bounds as {weight}"
        )
    if not _has(batch, VERSIONS):
        return (
            f"{VERSIONS}: none here, and {VERSION}: {batch[VERSION]} says that this host knows who wrote each token; "
            "hand it on with every micro-batch, and leave out, or refuse, samples without"
        )
    stores = config.segment_wise_on and config.segment_wise and config.segment_wise.method == "recompute"
    if stores and not _has(batch, "recomputed_log_probs"):
        return (
            f"recomputed_log_probs: none here; beside {VERSIONS}, segment-wise weights need what the version after "
            "each token's gives it (see docs/async.md); without, say {segment_wise.method}: loglinear, or "
            "{segment_wise.enabled}: false"
        )
    return None


def _has(batch: Batch, name: str) -> bool:
    """Whether a batch holds a list, or a stacked tensor, of this name."""
    value = batch.get(name)
    return value is not None and len(value) > 0


def _flat(name: str, tensors: Sequence[Tensor | None], lengths: Sequence[int]) -> Tensor:
    counts = counts_of(tensors)
    if counts != list(lengths):
        raise InputError(f"{name}: {counts} tokens a sequence, but this rank expects {list(lengths)}")
    return torch.cat([x for x in tensors if x is not None])


def _log_probs(name: str, batch: Batch, lengths: Sequence[int]) -> Tensor:
    """A list of log-probs, flat and without gradient; NaN where there is none."""
    return without_absent_(_flat(name, batch[name], lengths).detach())


def passed_on(batch: Batch, reduce: Reduce) -> dict[str, Tensor]:
    """Metrics that the hosts only report: the KL to a distillation teacher."""
    if not batch.get("opd_reverse_kl"):
        return {}
    return {"opd_reverse_kl": reduce(torch.cat(list(batch["opd_reverse_kl"]))).detach()}


def policy_reducer(args: Any, batch: Batch) -> Reduce | None:
    """The user's reducer of the policy loss, built with the masks before rejection; None without one."""
    path = view(args).get("custom_pg_loss_reducer_function_path")
    if path is None:
        return None
    build = pkgutil.resolve_name(path)
    masks, per_token = batch["loss_masks"], args.calculate_per_token_loss
    return build(batch["total_lengths"], batch["response_lengths"], masks, per_token)
