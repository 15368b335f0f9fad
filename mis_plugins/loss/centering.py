"""Score centering: the drift that a mismatch adds to the policy gradient, estimated from the engine's likeliest tokens.

Fix a prefix. The trainer has the distribution p over the next token v, the engine sampled from q, and s_v is the score
grad log p_v. A token weighs w_v = f(p_v / q_v). Under q the weighted score has the mean

    m = sum_v q_v w_v s_v,

which is not 0 where p and q differ, so that a constant reward moves the policy: that is the drift. The centered
surrogate of the sampled token a is

    loss = -A [ sg(w_a) log p_a - sum_v sg(c_v) log p_v ],

whose gradient -A (w_a s_a - m) has the mean 0 under q. The engine names a head H of the vocabulary. Beyond H the
engine is taken to be q_v = rho p_v, and sum_v p_v s_v = 0 leaves

    rho = (1 - sum_H q) / (1 - sum_H p),   alpha = rho f(1 / rho),   c_v = q_v f(p_v / q_v) - alpha p_v   within H.

With top-p or top-k sampling both sides are normalized over the support. A head that is the whole support leaves rho
without effect, because sum_H p_v s_v is then 0.

`Head` holds what a micro-batch gives to the estimate. It decides which tokens keep their term and by which factor, and
reports the drift.

Marek and Ryabinin 2026, "Score Centering Stabilizes Off-policy Reinforcement Learning", arxiv.org/abs/2609.20807,
equations 9, 12 and 14, and appendix A.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mis_plugins.config.model import CorrectionConfig, WeightConfig
from mis_plugins.correction.pipeline import Correction, correct
from mis_plugins.correction.ratios import exp_clamped, widened
from mis_plugins.correction.rejection import bounded_weight, in_bounds
from mis_plugins.loss.micro_batch import LossInputs, Share
from mis_plugins.loss.objective import target_log_ratio
from mis_plugins.packing.collectives import all_reduce
from mis_plugins.packing.exchange import Exchange

SMALLEST_TAIL = 1e-6
"""The least probability that either side is taken to have beyond the head; appendix A of the paper."""
CHUNK = 1 << 18
"""Candidates that are computed at once, in float64: 2 MB for each of a few tensors."""
Weigh = Callable[[Tensor], Tensor]
"""The weight w of each log ratio log p - log q."""


@dataclass(frozen=True)
class Vocabulary:
    """Which tokens of the vocabulary the logits of this rank score.

    start: the id of the first.
    group: the tensor-parallel ranks that score the others; None where this rank scores all.
    """

    start: int = 0
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Candidates:
    """The tokens that the engine named at each position whose logits lie on this rank.

    rows: the row of the logits that scores each position.
    sampled: the id of the token that the engine sampled.
    ids: ids of the head H. A padded entry may hold any id.
    behavior: log q of the head as the engine sampled from it; -inf in a padded entry.
    """

    rows: Int[Tensor, " S"]
    sampled: Int[Tensor, " S"]
    ids: Int[Tensor, "S K"]
    behavior: Float[Tensor, "S K"]

    def __getitem__(self, some: slice) -> "Candidates":
        return Candidates(*(getattr(self, field.name)[some] for field in fields(self)))


@dataclass(frozen=True)
class Center:
    """What the surrogate of each position is less, and how large it is. Only `log_probs` has a gradient.

    log_probs: sum over H of c_v log p_v, whose gradient is the drift m.
    total: sum over H of c_v.
    drift: the norm of m as a step of the logits, its part within H.
    target_mass, behavior_mass: sum over H of p, and of q.
    tail_ratio: rho.
    tail_weight: f(1 / rho), the weight that a token beyond H is taken to have.
    beyond: 1 where the sampled token lies beyond H.
    """

    log_probs: Float[Tensor, " T"]
    total: Float[Tensor, " T"]
    drift: Float[Tensor, " T"]
    target_mass: Float[Tensor, " T"]
    behavior_mass: Float[Tensor, " T"]
    tail_ratio: Float[Tensor, " T"]
    tail_weight: Float[Tensor, " T"]
    beyond: Float[Tensor, " T"]


def weigh_with(weight: WeightConfig | None) -> Weigh:
    """f of a weight of tokens. A ratio beyond a bound that drops or zeroes its token weighs 0; no weight is 1."""
    if weight is None:
        return torch.ones_like

    def weigh(log_ratio: Tensor) -> Tensor:
        known = torch.ones_like(log_ratio, dtype=torch.bool)
        inside = in_bounds(log_ratio, known, weight)
        return bounded_weight(exp_clamped(log_ratio), known, inside, weight) * inside

    return weigh


def center(
    logits: Float[Tensor, "... V"],
    target: Float[Tensor, " T"],
    usable: Bool[Tensor, " T"],
    candidates: Candidates,
    weigh: Weigh,
    temperature: float = 1.0,
    vocabulary: Vocabulary = Vocabulary(),
    exchange: Exchange | None = None,
) -> Center:
    """The centering term of every position, with one gather and one collective over tensor-parallel ranks.

    No second softmax is taken. The logit of the sampled token less its log-prob is the log-sum-exp of the position:

        sum_H c_v log p_v = sum_H c_v z_v - C z_a + C log p_a,   C = sum_H c_v.

    The gradient of log p_a is the host's own. The gradient of the logits z is added in place to the gradient that the
    logits have when it is complete, so that nothing of the vocabulary's size is made.

    Args:
        logits: logits of this rank's vocabulary, with gradient, before the temperature divides them: the tensor that
            the host scored, because its gradient is what is added to.
        target: log p_a of the sampled tokens at this temperature, with gradient.
        usable: positions that have a term; elsewhere any number may stand, NaN too, and the term is 0.
        temperature: what the engine divided its logits by.
        exchange: to the rank whose logits score a token, and back; None where the rank of a token scores it.
    """
    log_p_sampled, scored = target.detach().double(), usable
    if exchange is not None:
        log_p_sampled, scored = exchange.to_scored(torch.stack([log_p_sampled, usable.double()])).unbind()
    steps = _candidate_logits(logits.detach().flatten(0, -2), candidates, temperature, vocabulary)
    parts = []
    for some in _chunks(*steps.shape):
        here = log_p_sampled[some], candidates[some], scored[some].bool()
        step, *numbers = _of_positions(steps[some].double(), *here, weigh)
        steps[some] = step / temperature  # the logits have served: what they shall move by takes their place
        parts.append(torch.stack(numbers).to(steps.dtype))
    linear, *numbers = torch.cat(parts, -1).unbind()
    rows = torch.stack([_moves(linear, logits, candidates, steps, vocabulary), *numbers])
    linear, total, *numbers = (rows if exchange is None else exchange.to_held(rows)).unbind()
    total = total.detach()
    sampled = torch.where(usable, widened(target), 0)
    return Center(linear + total * sampled, total, *(number.detach() for number in numbers))


def _of_positions(
    z: Float[Tensor, "S C"], target: Float[Tensor, " S"], head: Candidates, usable: Bool[Tensor, " S"], weigh: Weigh
) -> tuple[Tensor, ...]:
    """What the logits of sampled token and head shall move by; the term less C log p_a, C, and the other numbers.

    A tail of 1e-5 keeps no more than two digits in float32, and rho divides two of them: all is computed in float64.
    """
    known = (head.behavior > -torch.inf) & usable[:, None]
    relative = torch.where(known, z[:, 1:] - z[:, :1], 0)
    log_p = torch.where(known, relative + target[:, None], -torch.inf)
    log_q = torch.where(known, head.behavior.double(), -torch.inf)
    p, q = log_p.exp(), log_q.exp()
    target_mass, behavior_mass = p.sum(-1), q.sum(-1)
    rho = (1 - behavior_mass).clamp(min=SMALLEST_TAIL) / (1 - target_mass).clamp(min=SMALLEST_TAIL)
    tail_weight = weigh(-rho.log())
    weights = weigh(torch.where(known, log_p - log_q, 0))
    c = q * weights - (rho * tail_weight)[:, None] * p
    total = c.sum(-1)
    drift = (c - total[:, None] * p).norm(dim=-1)
    same = known & (head.ids == head.sampled[:, None])
    beyond = (usable & ~same.any(-1)).double()
    term = (c * relative).sum(-1)
    return _once(-total, c, same), term, total, drift, target_mass, behavior_mass, rho, tail_weight, beyond


def _once(of_sampled: Tensor, of_head: Tensor, same: Tensor) -> Tensor:
    """One step for each token: where the head names the sampled token, its entry takes both, in a fixed order."""
    inside = same.any(-1)
    first = same & (same.cumsum(-1) == 1)
    of_head = of_head + torch.where(first, of_sampled[:, None], 0)
    return torch.cat([torch.where(inside, 0, of_sampled)[:, None], of_head], -1)


def _chunks(positions: int, candidates: int) -> list[slice]:
    size = max(1, CHUNK // candidates)
    return [slice(i, i + size) for i in range(0, positions, size)] or [slice(0, 0)]


def _places(some: Candidates, width: int, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Column of the sampled token and of the head in this rank's logits, and which of them this rank scores."""
    ids = torch.cat([some.sampled[:, None], some.ids], -1).long() - vocabulary.start
    return ids.clamp(0, width - 1), (ids >= 0) & (ids < width)


def _candidate_logits(
    logits: Tensor, candidates: Candidates, temperature: float, vocabulary: Vocabulary
) -> Float[Tensor, "T C"]:
    """Logits over the temperature of the sampled token, then of the head, on every tensor-parallel rank."""
    z = widened(logits.new_zeros(candidates.ids.shape[0], candidates.ids.shape[1] + 1))
    for some in _chunks(*z.shape):
        column, own = _places(candidates[some], logits.shape[-1], vocabulary)
        z[some] = torch.where(own, logits[candidates.rows[some, None], column], 0) / temperature
    if vocabulary.group is not None:
        all_reduce(z, vocabulary.group)
    return z


class _Received(torch.autograd.Function):
    """A number that takes part in the gradient of the logits, and leaves it to another to write that gradient down."""

    @staticmethod
    def forward(ctx, number: Tensor, logits: Tensor, received: list[Tensor]) -> Tensor:
        ctx.received = received
        return number.clone()

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.received.append(gradients[0])
        return None, None, None


def _moves(
    number: Float[Tensor, " T"],
    logits: Float[Tensor, "... V"],
    candidates: Candidates,
    steps: Float[Tensor, "T C"],
    vocabulary: Vocabulary,
) -> Float[Tensor, " T"]:
    """The number, with `steps` as its gradient by the logits of sampled token and head.

    The steps are added to the gradient that everything else gives the logits, at the moment when it is complete.
    """
    if not logits.requires_grad:
        return number
    received: list[Tensor] = []
    shape, dtype = logits.shape, logits.dtype  # a hook that held the logits themselves would never let them go

    def add(gradient: Tensor | None) -> Tensor:
        if gradient is None:  # nothing else gives the logits one
            gradient = torch.zeros(shape, dtype=dtype, device=steps.device)
        gradient = gradient.contiguous()  # of its own, if it was one number expanded
        while received:
            upstream = received.pop()
            for some in _chunks(*steps.shape):
                column, own = _places(candidates[some], shape[-1], vocabulary)
                place = candidates.rows[some, None].long() * shape[-1] + column
                values = torch.where(own, steps[some] * upstream[some, None], 0)
                gradient.view(-1).index_add_(0, place.flatten(), values.flatten().to(gradient.dtype))
        return gradient

    logits.register_hook(add)
    return _Received.apply(number, logits, received)


@dataclass(frozen=True)
class Head:
    """What score centering reads of one micro-batch.

    logits: logits of this rank's share of the vocabulary, with gradient, before the temperature divides them.
    candidates: the tokens that the engine named at each position whose logits lie on this rank.
    named: tokens of this rank's loss at which the engine named at least one.
    exchange: see `center`.
    """

    logits: Float[Tensor, "... V"]
    candidates: Candidates
    named: Bool[Tensor, " T"]
    temperature: float
    vocabulary: Vocabulary
    exchange: Exchange | None = None

    def center(self, target: Float[Tensor, " T"], usable: Bool[Tensor, " T"], config: CorrectionConfig) -> Center:
        """The centering term of each usable position at which the engine named a token; see the head of this file.

        The term has no gradient where the config does not center.
        """
        how = weigh_in(config), self.temperature, self.vocabulary, self.exchange
        with torch.set_grad_enabled(config.center is not None):
            return center(self.logits, target, usable & self.named, self.candidates, *how)

    def shared(self, share: Share, correction: Correction, scale: Float[Tensor, " T"]) -> Share:
        """The share with the factor of the centering term, and without tokens at which the engine named no head.

        A token beyond a mask bound weighs 0 and keeps its term, because the mean that the term subtracts counts the
        token as weighing 0. A token that a rule or OPSM drops loses its term too. `scale` is the factor from the host's
        denominator to the surrogate's.
        """
        stage = correction.stage
        kept = kept_by_rules(correction) | share.keep  # what `on_all_rejected` gives back was dropped by rules
        keep = kept & stage.usable & self.named
        if share.on_policy is not None:
            keep = keep & share.on_policy
        if correction.mean_weight is not None:
            scale = scale / correction.mean_weight
        if stage.down_weight is not None:
            scale = scale * stage.down_weight
        factor = torch.where(self.named, share.factor, 0)
        return replace(share, factor=factor, of_center=torch.where(keep, scale, 0))

    def metrics(
        self, x: LossInputs, centered: Center, share: Share, config: CorrectionConfig
    ) -> Iterator[tuple[str, Float[Tensor, " T"]]]:
        """Numbers of score centering, one a token; 0 at tokens without a term."""
        mask = x.ragged.loss_mask
        named = mask & self.named
        for name in ("drift", "target_mass", "behavior_mass", "tail_ratio"):
            yield f"center_{name}", torch.where(named, getattr(centered, name), 0)
        yield "center_tail_error", torch.where(named, tail_error(x, centered, config), 0)
        yield "center_missing", (mask & ~self.named).to(centered.drift.dtype)
        if share.of_center is not None:
            moved = x.finite_advantages * share.of_center * centered.log_probs.detach()
            yield "center_size", share.kept(moved.abs())


def weigh_in(config: CorrectionConfig) -> Weigh:
    """f of a config: the bound of its weight of tokens; 1 where it weighs nothing, or more than a token at once."""
    weight = config.weight if config.corrects else None
    return weigh_with(weight if weight is None or weight.level == "token" else None)


def tail_error(x: LossInputs, centered: Center, config: CorrectionConfig) -> Float[Tensor, " T"]:
    """The weight of a token sampled beyond the head, else 0, less the weight that the tail is taken to have.

    Its mean over tokens is the part of the drift that centering leaves, and 0 where the tail's model holds.
    """
    assert x.behavior is not None
    log_ratio, _ = target_log_ratio(x.target.detach(), x.behavior, x.ragged.loss_mask)
    taken = (1 - centered.behavior_mass) * centered.tail_weight
    return centered.beyond * weigh_in(config)(log_ratio) - taken


def kept_by_rules(correction: Correction) -> Bool[Tensor, " T"]:
    """Tokens that every rule keeps, whatever the weight's bound drops."""
    config = correction.config
    if config.weight is None or not config.weight.record.drops_token:
        return correction.keep
    rules = CorrectionConfig(reject=config.reject, m2_threshold=config.m2_threshold, metrics="none")
    stage = correction.stage
    log_probs = stage.proximal_log_probs, stage.behavior_log_probs
    return correct(*log_probs, correction.ragged, rules, routes=stage.routes).keep
