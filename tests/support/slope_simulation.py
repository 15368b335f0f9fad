"""Log-probs of sampled tokens as a trainer and a rollout engine give them, with the commonest errors put in.

`python tests/support/slope_simulation.py` prints the table of `lab/pages/slope.md`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mis_plugins.metrics.slope import Relation, cut_off, not_sampled_from, relation, scaled

VOCABULARY, CHUNK = 400, 5000
Kind = Literal["flat", "mixed", "peaked"]
KINDS: tuple[Kind, ...] = ("flat", "mixed", "peaked")
BF16, INT8, INT3 = 0.02, 0.05, 0.8  # noise a logit


@dataclass(frozen=True)
class Error:
    """What is wrong. side: which one's log-probs are divided by the temperature that is sampled at."""

    noise: float = BF16
    temperature: float = 1.0
    side: Literal["engine", "trainer"] = "engine"
    top_p: float | None = None

    @property
    def name(self) -> str:
        parts = [f"noise {self.noise:g}"]
        if self.temperature != 1:
            parts.append(f"T {self.temperature:g} {self.side}")
        if self.top_p is not None:
            parts.append(f"top-p {self.top_p:g}")
        return ", ".join(parts)


def logits(kind: Kind, tokens: int, generator: torch.Generator) -> Tensor:
    """`[tokens, VOCABULARY]`."""
    noise = torch.randn(tokens, VOCABULARY, dtype=torch.float64, generator=generator)
    if kind == "flat":
        return 3 * noise
    exponents, shares = {
        "mixed": ([1.0, 2.0, 4.0, 8.0], [0.15, 0.2, 0.3, 0.35]),
        "peaked": ([1.5, 3.0, 6.0, 12.0], [0.1, 0.2, 0.3, 0.4]),
    }[kind]
    drawn = torch.multinomial(torch.tensor(shares), tokens, replacement=True, generator=generator)
    ranks = torch.arange(1, VOCABULARY + 1, dtype=torch.float64)
    return -torch.tensor(exponents, dtype=torch.float64)[drawn, None] * ranks.log() + 0.3 * noise


def simulate(kind: Kind, error: Error, tokens: int = 20000, seed: int = 0) -> tuple[Tensor, Tensor]:
    """log pi_old and log mu of the sampled tokens."""
    generator = torch.Generator().manual_seed(seed)
    parts = [_sampled(kind, error, CHUNK, generator) for _ in range(tokens // CHUNK)]
    proximal, behavior = zip(*parts, strict=True)
    return torch.cat(proximal), torch.cat(behavior)


def _sampled(kind: Kind, error: Error, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    trainer = logits(kind, tokens, generator)
    engine = trainer + error.noise * torch.randn(trainer.shape, dtype=torch.float64, generator=generator)
    mu = (engine / error.temperature).log_softmax(-1)
    if error.top_p is not None:
        mu = _nucleus(mu, error.top_p).log_softmax(-1)
    token = torch.multinomial(mu.exp(), 1, generator=generator)
    if error.side == "engine":
        return trainer.log_softmax(-1).gather(1, token)[:, 0], mu.gather(1, token)[:, 0]
    raw, scaled_down = engine.log_softmax(-1), (trainer / error.temperature).log_softmax(-1)
    return scaled_down.gather(1, token)[:, 0], raw.gather(1, token)[:, 0]


def _nucleus(log_probs: Tensor, top_p: float) -> Tensor:
    ordered, order = log_probs.exp().sort(-1, descending=True)
    outside = ordered.cumsum(-1) - ordered >= top_p
    return log_probs.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), -torch.inf)


def sums(proximal: Tensor, behavior: Tensor) -> dict[str, float]:
    """What the partials add up to."""
    ratio = (proximal - behavior).exp()
    columns = {
        "usable": torch.ones_like(ratio), "proximal": proximal, "behavior": behavior,
        "proximal_squared": proximal**2, "behavior_squared": behavior**2, "log_prob_product": proximal * behavior,
        "ratio": ratio, "ratio_squared": ratio**2,
    }  # fmt: skip
    return {name: float(column.sum()) for name, column in columns.items()}


def related(proximal: Tensor, behavior: Tensor) -> Relation:
    """The relation of log-probs of which there is one."""
    found = relation(sums(proximal, behavior))
    assert found is not None
    return found


def found_in(kind: Kind, error: Error, tokens: int = 20000, seed: int = 0) -> Relation:
    return related(*simulate(kind, error, tokens, seed))


def verdict(found: Relation) -> str:
    named = {"scaled": scaled(found), "not what was sampled": not_sampled_from(found), "cut off": cut_off(found)}
    return ", ".join(name for name, holds in named.items() if holds) or "-"


MATCHED = [Error(noise) for noise in (BF16, INT8, INT3)]
SCALED = [Error(temperature=t, side=side) for side in ("engine", "trainer") for t in (0.6, 0.8, 1.2)]
CUT = [Error(top_p=p) for p in (0.9, 0.95)]


def table() -> str:
    rows = ["| error | policies | slope | inverse | mean ratio | verdict |", "|---|---|---|---|---|---|"]
    for error in MATCHED + SCALED + CUT:
        for kind in KINDS:
            f = found_in(kind, error)
            rows.append(
                f"| {error.name} | {kind} | {f.slope:.3f} | {f.inverse:.3f} | {f.mean_ratio:.3f} | {verdict(f)} |"
            )
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
