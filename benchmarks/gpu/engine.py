"""Are the log-probs that a real SGLang samples with those of a trainer, on a GPU? By bytes, in bf16.

SGLang's `--rl-on-policy-target fsdp` is made for a trainer of float32 weights in bf16 autocast: Hugging Face's Qwen3,
on SGLang's batch-invariant kernels. In that mode decode reports the log_softmax of bf16 logits in bf16, prefill in
float32: each is compared with the trainer's own of that kind, and again after new weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from gpu import qwen3, sglang_server
from gpu.machine import Cuda
from gpu.plan import Plan
from gpu.results import Result, compared
from gpu.sglang_server import DETERMINISTIC, STOCK, TARGET
from true_on_policy.engines.protocol import Engine, Request, Sample
from true_on_policy.links import link
from true_on_policy.models import updated

UPDATES = 1
PREFILL, DECODE = torch.float32, torch.bfloat16  # the dtypes in which the target takes log_softmax


def engine(plan: Plan, machine: Cuda) -> Iterator[Result]:
    with TemporaryDirectory() as folder:
        source = Path(folder, "0")
        qwen3.build(plan.model, machine, qwen3.FA3, torch.float32).save_pretrained(source)
        with closing(sglang_server.start(source, TARGET)) as server:
            yield from _on_policy(plan, machine, server, source)
        for how in (DETERMINISTIC, STOCK):
            with closing(sglang_server.start(source, how)) as server:
                yield _against_itself(plan, how, server)


def _on_policy(plan: Plan, machine: Cuda, server: Engine, source: Path) -> Iterator[Result]:
    """The three links of every version of the weights, then the control: the last one's, by stock kernels."""
    decode, prefill, alone, together, in_bf16 = [], [], [], [], []
    for version in range(UPDATES + 1):
        if version:
            source = updated(source, source.with_name(str(version)), seed=version)
            server.update_weights(source, version)
        samples = server.generate(_requests(plan, seed=version))
        decode += [sample.log_probs for sample in samples]
        prefill += server.score(samples)
        trainer = qwen3.load(source, machine, qwen3.FA3)
        with sglang_server.kernels():
            settings = sglang_server.in_force()
            for sample in samples:
                alone += _recomputed(trainer, [sample], machine, PREFILL)
                in_bf16 += _recomputed(trainer, [sample], machine, DECODE)
            together += _recomputed(trainer, samples, machine, PREFILL)
    yield compared(
        f"SGLang's {TARGET} and its trainer",
        (
            link("trainer: alone == in one batch", alone, together),
            link("prefill == trainer", prefill, alone),
            link("decode == trainer, both in bf16", decode, in_bf16),
        ),
        demanded=True,
        note=f"{server.versions()}, weights of {UPDATES + 1} versions.",
    )
    yield Result("What the trainer ran", ("setting", "in force"), tuple(settings.items()))
    stock = _recomputed(trainer, samples, machine, PREFILL)
    yield compared(
        "The same trainer on stock kernels",
        (link("prefill == stock trainer", prefill[-len(stock) :], stock),),
    )


def _against_itself(plan: Plan, how: str, server: Engine) -> Result:
    samples = server.generate(_requests(plan, seed=0))
    decode = [sample.log_probs for sample in samples]
    return compared(
        f"SGLang, {how}",
        (link("decode == prefill", decode, server.score(samples)),),
        demanded=how == DETERMINISTIC,
    )


def _requests(plan: Plan, seed: int) -> list[Request]:
    """Prompts of several lengths, all sequences of one length."""
    count, prompt, length = plan.decoded
    random = torch.Generator().manual_seed(seed)
    prompts = [prompt - i * (prompt - 1) // count for i in range(count)]
    return [
        Request(
            tuple(torch.randint(plan.model.size.vocab_size, (tokens,), generator=random).tolist()),
            prompt + length - tokens,
            seed=count * seed + i,
        )
        for i, tokens in enumerate(prompts)
    ]


@torch.no_grad()
def _recomputed(
    trainer: Qwen3ForCausalLM, samples: Sequence[Sample], machine: Cuda, dtype: torch.dtype
) -> list[Tensor]:
    """Of each sampled token, by one pass over all the samples; log_softmax in `dtype` of logits in bf16."""
    tokens = torch.tensor([sample.sequence for sample in samples], device=machine.device)
    with torch.autocast(machine.device.type, torch.bfloat16):
        logits = trainer(input_ids=tokens, use_cache=False).logits[:, :-1]
    scored = logits.to(dtype).log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0].float().cpu()
    return [row[-len(sample.tokens) :] for row, sample in zip(scored, samples, strict=True)]
