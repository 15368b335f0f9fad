"""Are the configs of ROLL, NeMo-RL and prime-rl, which no package index has, what their source computes?

The program takes the statements of the correction from a git checkout of each package. It runs them in float64 on
random padded batches. Weights and masks of ROLL and NeMo-RL are compared with those of the presets, and the gradients
of prime-rl's losses with what `config from-prime-rl` makes of their toml. Clusters and engines are not imported.

    python -m lab.source_parity --roll CHECKOUT --nemo-rl CHECKOUT --prime-rl CHECKOUT

Exit status: 0 equal, 1 different, 2 could not compare.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.source_parity:main", extra="verify")

import ast
import dataclasses
import re
import subprocess
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from torch import Tensor

from lab.provenance import parser_of
from mis_plugins.config.loading import preset_path
from mis_plugins.config.reading import from_mapping
from mis_plugins.correction.pipeline import correct
from mis_plugins.explain.translate.prime_rl import translate
from mis_plugins.loss.objective import Clip, policy_term
from mis_plugins.packing.ragged import Ragged

BATCHES = 300
TOLERANCE = 1e-6  # largest difference of a weight, relative above 1: the rounding of float32


@dataclass(frozen=True)
class Padded:
    """A padded batch: three tensors of shape `[N, L]`."""

    proximal: Tensor
    behavior: Tensor
    mask: Tensor


class Different(Exception):
    """A preset keeps other tokens than its source."""


Answer = tuple[Tensor, Tensor]  # the weight of each token, and whether it is kept
Peer = Callable[[Padded], Answer]


def batches(count: int) -> Iterator[Padded]:
    """Yield random batches with holes in the mask; every sequence has a valid token."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        shape = tuple(int(torch.randint(1, high, (), generator=generator)) for high in (6, 13))
        behavior = -3 * torch.rand(shape, generator=generator) - 0.05
        spread = torch.tensor([0.0005, 0.05, 0.3, 1.0])[torch.randint(4, (), generator=generator)]
        mask = torch.rand(shape, generator=generator) > 0.25
        mask[:, 0] |= ~mask.any(1)
        yield Padded(behavior + spread * torch.randn(shape, generator=generator), behavior, mask)


def text(checkout: Path, path: str) -> str:
    command = ["git", "-C", str(checkout), "show", f"HEAD:{path}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def taken(source: str, names: list[str], scope: dict[str, Any]) -> None:
    """Define the named functions and classes of a source, and no other name of the source."""
    found = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    future = ast.parse("from __future__ import annotations").body
    module = ast.Module([*future, *(found[name] for name in names)], [])
    exec(compile(ast.fix_missing_locations(module), "<taken>", "exec"), scope)


def roll(checkout: Path) -> dict[str, Peer]:
    """Take ROLL's `compute_train_infer_correction`, by segments, with its default bounds."""
    scope = {name: getattr(typing, name) for name in ("Dict", "List", "Literal", "Optional", "Tuple")}
    scope |= {"torch": torch, "dataclass": dataclass, "field": dataclasses.field, "__name__": __name__}
    taken(text(checkout, "roll/utils/functionals.py"), ["masked_mean", "masked_sum", "agg_loss"], scope)
    taken(text(checkout, "roll/pipeline/agentic/utils.py"), ["compute_segment_masked_mean"], scope)
    configs = [f"TrainInfer{name}Config" for name in ("ISWeight", "Filter", "Correction")]
    taken(text(checkout, "roll/configs/base_config.py"), configs, scope)
    counts = [f"_infer_global_valid_{unit}_from_mask" for unit in ("samples", "tokens")]
    functions = ["_compute_all_granularity", *counts, "compute_train_infer_correction"]
    taken(text(checkout, "roll/utils/train_infer_corrections.py"), functions, scope)
    weigh, drop, both = (scope[name] for name in configs)
    config = both(weigh(enabled=True, weight_type="segment"), [drop(enabled=True, agg_type="segment")])

    def segments(x: Padded) -> Answer:
        compute = scope["compute_train_infer_correction"]
        weights, kept, _ = compute(config, x.mask.long(), x.proximal.double(), x.behavior.double())
        return weights, kept.bool()

    return {"roll-segment-filter": segments}


def nemo_rl(checkout: Path) -> dict[str, Peer]:
    """Take NeMo-RL's statements of `ClippedPGLossFn.__call__` from the importance weight to its truncation."""
    scope: dict[str, Any] = {"torch": torch, "Optional": typing.Optional}
    taken(text(checkout, "nemo_rl/algorithms/utils.py"), ["masked_mean"], scope)
    lines = text(checkout, "nemo_rl/algorithms/loss/loss_functions.py").splitlines()
    stripped = [line.strip() for line in lines]
    middle = stripped.index("# ---- Truncated Importance Sampling ----")
    start = middle - stripped[:middle][::-1].index("# Token-level correction")
    end = stripped.index("actor_importance_weights = actor_importance_weights_expanded")
    statements = "\n".join(textwrap.dedent("\n".join(part)) for part in (lines[start:middle], lines[middle:end]))
    code = compile(statements, "<taken>", "exec")

    def truncated(kind: str, low: float | None, high: float) -> Peer:
        key = "truncated_importance_sampling"
        settings = {f"{key}_type": kind, f"{key}_ratio_min": low, f"{key}_ratio": high}

        def weigh(x: Padded) -> Answer:
            mask = x.mask.double()
            local = {"self": SimpleNamespace(**settings), "mask": mask, "token_mask": mask}
            local |= {"prev_logprobs": x.proximal.double(), "generation_logprobs": x.behavior.double()}
            local |= {"sample_mask": mask.amax(1), "global_valid_toks": mask.sum(), "global_valid_seqs": len(mask)}
            exec(code, answered := scope | local)
            return answered["actor_importance_weights_expanded"], x.mask

        return weigh

    return {
        "nemo-rl-tis": truncated("tis", None, 2.0),
        "nemo-rl-icepop": truncated("icepop", 0.5, 5.0),
        "nemo-rl-seq-mask-tis": truncated("seq-mask-tis", 0.999, 1.002),
    }


LOSSES = {"prime-rl's default": "[loss]", "prime-rl's ipo": "[loss]\ntype = 'ipo'"}
"""prime-rl's losses by a toml."""


def prime_rl(checkout: Path) -> dict[str, Peer]:
    """Take prime-rl's losses of one sample; the answer is the gradient of their sum to the trainer's log-probs."""
    scope: dict[str, Any] = {"torch": torch, "dataclass": dataclass, "field": dataclasses.field, "__name__": __name__}
    names = ["LossInputs", "LossOutputs", "_safe_mean", "compute_importance_ratio_and_mismatch_kl"]
    source = text(checkout, "src/prime_rl/trainer/rl/loss.py")
    taken(source, [*names, "default_loss_fn", "ipo_loss_fn"], scope)

    def gradient(name: str, keys: dict[str, Any]) -> Peer:
        config = SimpleNamespace(adv_tau=1.0, kl_tau=1e-3, **keys)

        def differentiate(x: Padded) -> Answer:
            target = x.proximal.double().requires_grad_()
            rows = zip(target, x.behavior.double(), advantages(x).double(), x.mask, strict=True)
            inputs = (scope["LossInputs"](row, mu, None, advantage, mask) for row, mu, advantage, mask in rows)
            loss = torch.stack([scope[name](one, config).loss for one in inputs]).sum()
            return torch.autograd.grad(loss, target)[0], x.mask

        return differentiate

    both = {"dppo_mask_low": 0.2, "dppo_mask_high": 0.2}, {"ipo_threshold": 0.1}
    functions = zip(LOSSES, ("default_loss_fn", "ipo_loss_fn"), both, strict=True)
    return {title: gradient(name, keys) for title, name, keys in functions}


def advantages(x: Padded) -> Tensor:
    """An advantage of each token, of either sign by sequence."""
    rows = torch.arange(len(x.mask)) % 2 * 2.0 - 1
    return rows[:, None].expand(x.mask.shape)


def gradient_difference(name: str, peer: Peer, x: Padded) -> tuple[float, int]:
    """Return the largest difference of the gradients, and how many tokens have one.

    Raises:
        Different: prime-rl gives other tokens a gradient than the translated config.
    """
    made = translate(LOSSES[name])
    config = from_mapping({"weight": None} | dict(made.mis))
    starts = torch.arange(len(x.mask) + 1) * x.mask.shape[1]
    target, mu, ragged = (x.proximal.flatten().requires_grad_(), x.behavior.flatten(), Ragged(starts, x.mask.flatten()))
    correction = correct(target.detach(), mu, ragged, config)
    factor = torch.where(correction.keep, correction.weights, 0)
    assert config.objective is not None
    clip = Clip(*map(float, re.findall(r"--eps-clip\S* (\S+)", " ".join(made.notes))))
    term = policy_term(target, mu, advantages(x).flatten(), factor, ragged, config.objective, clip)
    mine = torch.autograd.grad(term.loss.sum(), target)[0].view_as(x.mask)[x.mask]
    theirs = peer(x)[0][x.mask]
    if not torch.equal(theirs != 0, mine != 0):
        raise Different(f"{name}: other tokens have a gradient")
    return apart(theirs, mine), int((mine != 0).sum())


def difference(name: str, peer: Peer, x: Padded) -> tuple[float, int]:
    """Return the largest difference of the applied weights, and how many tokens have a weight above 0.

    Raises:
        Different: preset and source keep different tokens.
    """
    config = from_mapping(yaml.safe_load(preset_path(name).read_text())["mis"])
    starts = torch.arange(len(x.mask) + 1) * x.mask.shape[1]
    ours = correct(x.proximal.flatten(), x.behavior.flatten(), Ragged(starts, x.mask.flatten()), config)
    weights, kept = peer(x)
    theirs = torch.where(kept, weights, 0)[x.mask]
    mine = torch.where(ours.keep, ours.weights, 0).view_as(x.mask)[x.mask]
    if not torch.equal(theirs > 0, mine > 0):
        raise Different(f"{name}: other tokens are kept")
    return apart(theirs, mine), int((mine > 0).sum())


def apart(theirs: Tensor, mine: Tensor) -> float:
    """Return the largest difference, relative above 1; infinite where a number is NaN, which no bound refuses."""
    return ((theirs - mine).abs() / theirs.abs().clamp(min=1)).nan_to_num(torch.inf).max().item()


def main() -> int:
    parser = parser_of(__doc__)
    sources = {"roll": roll, "nemo_rl": nemo_rl, "prime_rl": prime_rl}
    for name in sources:
        parser.add_argument(f"--{name.replace('_', '-')}", type=Path)
    options = {name: path for name, path in vars(parser.parse_args()).items() if path is not None}
    if not options:
        parser.error("name a checkout")
    try:
        peers = {title: peer for name, path in options.items() for title, peer in sources[name](path).items()}
    except (subprocess.CalledProcessError, KeyError, ValueError) as error:
        print(f"could not compare: {error!r}", file=sys.stderr)
        return 2
    tokens, worst = sum(int(x.mask.sum()) for x in batches(BATCHES)), 0.0
    for name, peer in peers.items():
        compare, what = (gradient_difference, "with a gradient") if name in LOSSES else (difference, "weighed")
        try:
            rows = [compare(name, peer, x) for x in batches(BATCHES)]
        except Different as error:
            print(error)
            return 1
        largest, counted = max(row[0] for row in rows), sum(row[1] for row in rows)
        worst = max(worst, largest)
        print(f"{name}: {counted} of {tokens} tokens {what}, largest difference {largest:.1e}")
    return int(worst > TOLERANCE)
