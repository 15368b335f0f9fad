"""What do other precisions cost? The mismatch of a real model under fp16, MXFP8, NVFP4, an FP8 cache, and LoRA merges.

    python -m lab.precision                      64 prompts, responses up to 128 tokens: about an hour on two cores
    python -m lab.precision --rungs fp16 nvfp4
    python -m lab.precision --smoke              a tiny model, in half a minute

Hugging Face's model is both engine and trainer: the engine samples with a key-value cache, the trainer scores whole
responses in one pass. A CPU has no kernel of MXFP8, NVFP4 or an FP8 cache: the numbers are rounded where such a kernel
would round them, and multiplied in bf16. Each rung is kept as soon as it is measured: after Ctrl-C the command goes on.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.precision:main", extra="verify")

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from lab.ladder.page import span
from lab.ladder.presets_at import kept_by
from lab.ladder.statistics import Pair, summary
from lab.ladder.workloads import converse
from lab.provenance import as_markdown, markdown_table, parser_of, provenance, write_record
from mis_plugins.__main__ import load
from mis_plugins.config.loading import presets
from mis_plugins.shared.numerals import count
from true_on_policy.engines.hf import engine as hugging_face
from true_on_policy.engines.hf.engine import HuggingFace
from true_on_policy.models.pretrained import checkpoint_of
from true_on_policy.models.tiny import read_config
from true_on_policy.verify.prompts import read_prompts

Rounding = Callable[[Tensor], Tensor]
RESULT = Path("lab/results/precision.json")
KEPT = ("geometric-mis", "geometric-mis-wide")
BATCH = 32
E4M3, E2M1 = 448.0, 6.0  # the greatest numbers
NVFP4_STEPS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1, without signs
RANK, UPDATES, LEARNING_RATE = 16, 20, 2e-4


def mxfp8(x: Tensor) -> Tensor:
    """Round to e4m3 with a power of two as the scale of each 32 neighbours (OCP Microscaling 1.0, section 6.3)."""
    blocks = x.float().unflatten(-1, (-1, 32))
    scale = torch.exp2(blocks.abs().amax(-1, keepdim=True).clamp_min(2.0**-126).log2().floor() - 8)
    return ((blocks / scale).clamp(-E4M3, E4M3).to(torch.float8_e4m3fn).float() * scale).flatten(-2).to(x.dtype)


def nvfp4(x: Tensor) -> Tensor:
    """Round to e2m1 with an e4m3 scale of each 16 neighbours, and one float32 scale of the tensor."""
    whole = x.float().abs().amax().clamp_min(1e-30) / (E2M1 * E4M3)
    blocks = x.float().unflatten(-1, (-1, 16)) / whole
    scale = (blocks.abs().amax(-1, keepdim=True) / E2M1).to(torch.float8_e4m3fn).float()
    steps = torch.tensor(NVFP4_STEPS)
    units = (blocks / scale.clamp_min(2.0**-9)).clamp(-E2M1, E2M1)
    nearest = steps[torch.bucketize(units.abs(), (steps[1:] + steps[:-1]) / 2)].copysign(units)
    return (nearest * scale * whole).flatten(-2).to(x.dtype)


def fp8(x: Tensor) -> Tensor:
    """Round to e4m3 without a scale, as an engine does whose checkpoint carries no scales of its cache."""
    return x.clamp(-E4M3, E4M3).to(torch.float8_e4m3fn).to(x.dtype)


class Fp8Cache(DynamicCache):
    """A cache that holds keys and values in e4m3."""

    def update(self, key_states: Tensor, value_states: Tensor, *rest: Any, **more: Any) -> Any:
        return super().update(fp8(key_states), fp8(value_states), *rest, **more)


@dataclass(frozen=True)
class Rung:
    """A rung is an engine's way to compute beside a trainer's.

    words: the rung in words, for the page.
    engine, trainer: the dtype of each side's products.
    rounding: rounds weights and inputs of the engine's linear layers.
    cache: the engine's key-value cache.
    merges: how LoRA's product reaches the engine's weights, `bf16` or `fp32`; None is no LoRA.
    """

    words: str
    engine: torch.dtype = torch.bfloat16
    trainer: torch.dtype = torch.bfloat16
    rounding: Rounding | None = None
    cache: type[DynamicCache] = DynamicCache
    merges: str | None = None


RUNGS = {
    "bf16": Rung("bf16 on both sides"),
    "fp16": Rung("fp16 on both sides", torch.float16, torch.float16),
    "fp16-bf16": Rung("fp16 engine, bf16 trainer", torch.float16),
    "fp32-trainer": Rung("bf16 engine, fp32 trainer", trainer=torch.float32),
    "fp8-cache": Rung("bf16, the engine's cache in FP8 (e4m3, no scale)", cache=Fp8Cache),
    "mxfp8": Rung("MXFP8 weights and activations, bf16 trainer", rounding=mxfp8),
    "nvfp4": Rung("NVFP4 weights and activations, bf16 trainer", rounding=nvfp4),
    "lora-fp32": Rung(f"LoRA of rank {RANK}, merged in fp32, {UPDATES} updates", merges="fp32"),
    "lora-bf16": Rung(f"LoRA of rank {RANK}, merged and unmerged in bf16, {UPDATES} updates", merges="bf16"),
}


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a decoder by name, its head left out."""
    named = model.named_modules()
    return {name: module for name, module in named if isinstance(module, nn.Linear) and name.endswith("_proj")}


def rounded(model: nn.Module, rounding: Rounding) -> None:
    """Round the weights of all linear layers now, and what enters them at each call."""
    for module in linears(model).values():
        module.weight.data = rounding(module.weight.data)
        module.register_forward_pre_hook(lambda _, inputs: (rounding(inputs[0]), *inputs[1:]))


class Adapter(nn.Module):
    """LoRA of one linear layer, W x + B (A x), with A and B in float32."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.to(x.dtype).T @ self.b.to(x.dtype).T

    def product(self) -> Tensor:
        return (self.b @ self.a).detach()


def adapted(model: nn.Module) -> dict[str, Adapter]:
    """Put an adapter on every linear layer of the decoder."""
    model.requires_grad_(False)
    made = {name: Adapter(linear) for name, linear in linears(model).items()}
    for name, adapter in made.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, adapter)
    return made


def merge_bf16(weight: Tensor, before: Tensor, now: Tensor) -> Tensor:
    """Take the last product off a bf16 weight and add the new one, as merging and unmerging in place does."""
    return weight - before.bfloat16() + now.bfloat16()


def merge_fp32(base: Tensor, now: Tensor) -> Tensor:
    """Add the product to the base in float32, and round once."""
    return (base.float() + now).bfloat16()


def trained(trainer: HuggingFace, engine: HuggingFace, merges: str, texts: Sequence[Sequence[int]]) -> None:
    """Update LoRA on texts, a text an update, and merge after each update into the engine's weights."""
    adapters, held = adapted(trainer._model), linears(engine._model)
    optimizer = torch.optim.AdamW([p for one in adapters.values() for p in (one.a, one.b)], lr=LEARNING_RATE)
    before = {name: adapter.product() for name, adapter in adapters.items()}
    for update in range(UPDATES):
        text = torch.tensor([texts[update % len(texts)]])
        with torch.enable_grad():
            logits = trainer._model(input_ids=text[:, :-1]).logits.float()
            nn.functional.cross_entropy(logits[0], text[0, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, adapter in adapters.items():
            now, weight = adapter.product(), held[name].weight
            weight.data = (
                merge_bf16(weight.data, before[name], now)
                if merges == "bf16"
                else merge_fp32(adapter.base.weight.data, now)
            )
            before[name] = now


def measured(rung: Rung, checkpoint: Path, prompts: Sequence[tuple[int, ...]], length: int) -> Pair:
    """Sample a response to each prompt with the rung's engine, and score the responses with its trainer."""
    torch.manual_seed(0)
    engine, trainer = (_at(checkpoint, dtype) for dtype in (rung.engine, rung.trainer))
    if rung.rounding:
        rounded(engine._model, rung.rounding)
    if rung.merges:
        trained(trainer, engine, rung.merges, prompts)
    end, found = read_config(checkpoint).eos_token_id, []
    with _cache(rung.cache):
        for done in range(0, len(prompts), BATCH):
            batch = min(BATCH, len(prompts) - done)
            found += [one for _, (one,) in converse(engine, prompts, range(done, done + batch), length, end)]
            print(f"{rung.words}: {done + batch} of {len(prompts)} responses", file=sys.stderr)
    scores = [trainer.score([one])[0] for one in found]
    lengths = torch.tensor([len(one.tokens) for one in found])
    return Pair(torch.cat([one.log_probs for one in found]), torch.cat(scores), lengths, torch.arange(len(found)))


def _at(checkpoint: Path, dtype: torch.dtype) -> HuggingFace:
    side = HuggingFace(checkpoint, "bf16")
    side._model.to(dtype)
    return side


@contextmanager
def _cache(kind: type[DynamicCache]) -> Iterator[None]:
    with patch.object(hugging_face, "DynamicCache", kind):
        yield


def climbed(options: Namespace, checkpoint: Path, content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure every rung that is asked for and not on record, and yield the record after each."""
    prompts = _prompts(options, checkpoint)
    for name in options.rungs:
        if name in content["rungs"] and not options.again:
            continue
        pair = measured(RUNGS[name], checkpoint, prompts, options.length)
        kept = {preset: kept_by(load(presets()[preset]), pair) for preset in KEPT}
        content["rungs"][name] = {"mismatch": summary(pair), "kept": kept}
        yield content


def _prompts(options: Namespace, checkpoint: Path) -> Sequence[tuple[int, ...]]:
    if options.smoke:
        random = torch.Generator().manual_seed(0)
        words = read_config(checkpoint).vocab_size
        return [tuple(row) for row in torch.randint(words, (options.prompts, 8), generator=random).tolist()]
    return read_prompts("builtin", checkpoint).tokens[: options.prompts]


def page(content: Mapping[str, Any]) -> str:
    rows = [
        (
            RUNGS[name].words,
            one["mismatch"]["tokens"],
            *(span(one["mismatch"][what]) for what in ("k1", "k3", "p99")),
            *(f"{one['kept'][preset]['sequences']:.0%}" for preset in KEPT),
        )
        for name in RUNGS
        if (one := content["rungs"].get(name))
    ]
    heads = ("rung", "tokens", "k1", "k3", "p99 of abs log r", *(f"kept by {preset}" for preset in KEPT))
    head = f"# The mismatch under other precisions\n\n{content['size']}. {HEAD}\n"
    return f"{head}\n{markdown_table(heads, rows)}\n{as_markdown(content['measured_with'])}"


HEAD = """Hugging Face's model on both sides on a CPU: the engine decodes from its cache, the trainer scores in one
pass. MXFP8, NVFP4 and the FP8 cache are emulated by rounding. In brackets: 95% of a bootstrap over prompts. With LoRA
the trainer adds the adapter's product to activations, and the engine's weights hold it merged."""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rungs", nargs="+", choices=RUNGS, default=list(RUNGS), metavar="RUNG")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=count, default=64)
    parser.add_argument("--length", type=count, default=128, help="tokens of a response, at most")
    parser.add_argument("--again", action="store_true", help="measure anew what is on record")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few tokens; the record is left alone")
    options = parser.parse_args()
    path = RESULT
    if options.smoke:
        options.model, options.prompts, options.length = "tiny-llama", 4, 12
        path = Path("runs/precision.json")
    size = f"{options.model}, {options.prompts} prompts, responses up to {options.length} tokens, temperature 1"
    content: dict[str, Any] = {"size": size, "rungs": {}}
    if path.exists() and not options.smoke and (held := json.loads(path.read_text()))["size"] == size:
        content = held
    with TemporaryDirectory(prefix="precision-") as scratch:
        tell = lambda text: print(text, file=sys.stderr)  # noqa: E731
        checkpoint = checkpoint_of(options.model, Path(scratch) / "model", torch.float32, seed=0, tell=tell)
        for made in climbed(options, checkpoint, content):
            made["measured_with"] = provenance()
            write_record(path, made, page(made))
            print(f"wrote {path} and {path.with_suffix('.md')}")
    return 0
