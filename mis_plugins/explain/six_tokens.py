"""A config at work on six tokens, by the code that the hooks run.

Sequence A: two turns of the model around one token of a tool, which the loss mask leaves out; the trainer
finds its tokens 0.4, 1.25 and 8 times as likely as the rollout engine did. Sequence B: the engines agree to a
thousandth. With segment-wise weights the turns of A have ages 4 and 2, and the tokens of B ages 1 and 0.
Three layers of a mixture of experts route the last token of A otherwise than the engine, and one layer the
last token of B.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mis_plugins.config.model import CorrectionConfig
from mis_plugins.correction.pipeline import Correction, correct, mean_weight_of
from mis_plugins.loss import micro_batch
from mis_plugins.loss.objective import Clip
from mis_plugins.packing.ragged import Ragged
from mis_plugins.versions.segment_wise import NO_VERSION, Written

NAMES = ("A", "B")
LENGTHS = (4, 2)
LABELS, TURNS = ("A1", "A2", "A3", "A4", "B1", "B2"), ("1", "1", "", "2", "1", "1")
LOSS_MASK = (True, True, False, True, True, True)
BEHAVIOR = (0.5, 0.4, 0.3, 0.1, 0.4, 0.5)  # probabilities under mu
PROXIMAL = (0.2, 0.5, 0.3, 0.8, 0.4002, 0.4999)  # pi_old
TARGET = (0.21, 0.52, 0.3, 0.78, 0.3999, 0.4998)  # pi_theta, after a first step on this rollout
VERSIONS = (3, 3, NO_VERSION, 5, 6, 7)
CURRENT = 7  # the version of pi_old
NEXT = (0.45, 0.44, math.nan, 0.25, math.nan, math.nan)  # pi_{v+1}, as a recompute stored it
ROUTES = (0.0, 0.0, 0.0, 3.0, 0.0, 1.0)  # layers that route the token otherwise
ADVANTAGES = (1.0, 1.0, 1.0, 1.0, -1.0, -1.0)
CLIP = 0.2  # --eps-clip

Row = tuple[str, ...]


@dataclass(frozen=True)
class Example:
    """The six tokens after correction.

    keep: tokens in loss_mask that every rule and OPSM keep.
    loss: of each token under the loss hook; None under the TIS hook, which leaves the loss to the host.
    """

    inputs: micro_batch.LossInputs
    correction: Correction
    keep: Bool[Tensor, " T"]
    loss: Float[Tensor, " T"] | None


def work(config: CorrectionConfig) -> Example:
    """Correct the six tokens."""
    x = _inputs()
    behavior = log(BEHAVIOR)
    compared = micro_batch.compared_log_probs(x, config), behavior
    numerator = micro_batch.numerator_of(x.proximal, behavior, x.written, config)
    normalize, mean = config.weight and config.weight.normalize, None
    if normalize and normalize.scope == "rollout":
        mean = mean_weight_of(*compared, x.ragged, config, numerator)
    correction = correct(*compared, x.ragged, config, mean, numerator, torch.tensor(ROUTES))
    share = micro_batch.share_of(x, correction, config)
    keep = correction.keep if share.on_policy is None else correction.keep & share.on_policy
    if not config.needs_loss_hook:
        return Example(x, correction, keep, None)
    handed: list[Tensor] = []  # the surrogates, as the host's reducer would get them

    def reduce(per_token: Tensor) -> Tensor:
        handed.append(per_token.detach())
        return per_token.sum()

    micro_batch.micro_batch_loss(
        x, correction, share, config, micro_batch.LossConfig(Clip(CLIP, CLIP)), torch.sum, reduce
    )
    return Example(x, correction, keep, handed[0])


def log(probabilities: Sequence[float]) -> Float[Tensor, " T"]:
    return torch.tensor([math.log(p) for p in probabilities])


def table(config: CorrectionConfig) -> str:
    """The corrected example as text: a table of tokens, then a table of sequences."""
    example = work(config)
    text = _aligned(list(_token_rows(example))) + "\n\n" + _aligned(list(_sequence_rows(example)))
    if example.correction.mean_weight is not None:
        text += f"\n\nweights are divided by {_number(example.correction.mean_weight)}"
    if config.denominator == "kept" and example.loss is not None:
        text += "\n\nL is told times n / tokens kept of its sequence, because the host divides it by n"
    if config.center is not None:
        text += "\n\nL is told without its centering term, which reads the whole vocabulary"
    return text


def _inputs() -> micro_batch.LossInputs:
    starts = torch.tensor([0, LENGTHS[0], sum(LENGTHS)])
    return micro_batch.LossInputs(
        ragged=Ragged(starts, torch.tensor(LOSS_MASK)),
        target=log(TARGET).requires_grad_(),
        proximal=log(PROXIMAL),
        behavior=log(BEHAVIOR),
        reference=None,
        advantages=torch.tensor(ADVANTAGES),
        entropy=None,
        written=Written(torch.tensor(VERSIONS), log(NEXT), CURRENT),
    )


def _token_rows(example: Example) -> Iterator[Row]:
    correction, config = example.correction, example.correction.config
    trainer, probabilities = ("pi_theta", TARGET) if config.bypass else ("pi_old", PROXIMAL)
    aged, hooked = config.segment_wise_on, example.loss is not None
    heads = ("token", "turn", trainer, "mu", "r") + ("age", "q") * aged + ("w", "kept")
    yield heads + ("A", "L") * hooked
    for t, valid in enumerate(LOSS_MASK):
        if not valid:
            blank = ("",) * (len(heads) - 3)
            yield (LABELS[t], "tool", *blank, "masked") + ("", "") * hooked
            continue
        row = (LABELS[t], TURNS[t], f"{probabilities[t]:g}", f"{BEHAVIOR[t]:g}")
        row += (_number(correction.log_ratio[t].exp()),)
        row += (f"{CURRENT - VERSIONS[t]}", _number(correction.stage.weighed[t])) * aged
        row += (_number(correction.weights[t]), "yes" if example.keep[t] else "no")
        yield row + ((f"{ADVANTAGES[t]:g}", _number(example.loss[t])) if example.loss is not None else ())


def _sequence_rows(example: Example) -> Iterator[Row]:
    ragged, correction = example.inputs.ragged, example.correction
    rows = ragged.sums(correction.log_ratio, ragged.loss_mask, example.keep)
    yield "sequence", "n", "prod r", "(prod r)^(1/n)", "tokens kept"
    for name, total, count, kept in zip(NAMES, *rows, strict=True):
        yield name, f"{count:g}", _number(total.exp()), _number((total / count).exp()), f"{kept:g}"


def _number(x: Tensor) -> str:
    return f"{float(x):.4f}"


def _aligned(rows: Sequence[Row]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"  {line}".rstrip() for line in lines)
