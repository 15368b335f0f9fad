"""Does a real SGLang on a GPU sample with the log-probs of a trainer? Compared by bytes, in bf16.

SGLang's `--rl-on-policy-target fsdp` is made for a trainer of float32 weights in bf16 autocast: Hugging Face's Qwen3,
on SGLang's batch-invariant kernels. With this flag decode takes the log_softmax of bf16 logits in bf16, prefill in
float32. Each is compared with the trainer's log_softmax in its dtype, before and after new weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import Qwen3ForCausalLM

from lab.gpu import qwen3, sglang_server
from lab.gpu.machine import Cuda
from lab.gpu.plan import Plan
from lab.gpu.receipt import Result, compared
from lab.gpu.sglang_server import DETERMINISTIC, STOCK, TARGET
from true_on_policy.engines.protocol import Engine, Request, Sample
from true_on_policy.models.tiny import updated
from true_on_policy.verify.certificate import Evidence, LogProbs, conclusion, link

UPDATES = 1
PREFILL, DECODE = torch.float32, torch.bfloat16  # the dtypes in which the target takes log_softmax
TOGETHER = "in one batch"


def engine(plan: Plan, machine: Cuda) -> Iterator[Result]:
    os.environ["SGLANG_ENABLE_JIT_DEEPGEMM"] = "0"  # SGLang and its trainer both multiply by Triton
    with TemporaryDirectory() as folder:
        source = Path(folder, "0")
        qwen3.build(plan.model, machine, qwen3.FA3, torch.float32).save_pretrained(source)
        with closing(sglang_server.start(source, TARGET)) as server:
            yield from _on_policy(plan, machine, server, source)
        for mode in (DETERMINISTIC, STOCK):
            with closing(sglang_server.start(source, mode)) as server:
                yield _against_itself(plan, mode, server)


def _on_policy(plan: Plan, machine: Cuda, server: Engine, source: Path) -> Iterator[Result]:
    """Compare the links over all versions of the weights; then, as the control, the last version by stock kernels."""
    evidence = Evidence()
    for version in range(UPDATES + 1):
        if version:
            source = updated(source, source.with_name(str(version)), seed=version)
            server.update_weights(source, version)
        samples = server.generate(_requests(plan, seed=version))
        trainer, prefill = qwen3.load(source, machine), server.score(samples)
        with sglang_server.kernels():
            settings = sglang_server.in_force()
            evidence += _evidence(samples, prefill, trainer, machine)
    yield compared(
        f"SGLang's {TARGET} and its trainer",
        (
            link(f"trainer: alone == {TOGETHER}", evidence.trainer, evidence.packed[TOGETHER]),
            link("prefill == trainer", evidence.prefill, evidence.trainer),
            conclusion(evidence, "decode == trainer, both in bf16"),
        ),
        demanded=True,
        note=f"{server.versions()}, weights of {UPDATES + 1} versions.",
    )
    yield Result("What the trainer ran", ("setting", "in force"), tuple(settings.items()))
    stock = _recomputed(trainer, samples, machine, PREFILL)
    yield compared("The same trainer on stock kernels", (link("prefill == stock trainer", prefill, stock),))


def _evidence(samples: list[Sample], prefill: LogProbs, trainer: Qwen3ForCausalLM, machine: Cuda) -> Evidence:
    def alone(dtype: torch.dtype) -> LogProbs:
        return [_recomputed(trainer, [sample], machine, dtype)[0] for sample in samples]

    return Evidence(
        samples=samples,
        prefill=prefill,
        trainer=alone(PREFILL),
        trainer_tempered=alone(DECODE),
        packed={TOGETHER: _recomputed(trainer, samples, machine, PREFILL)},
    )


def _against_itself(plan: Plan, mode: str, server: Engine) -> Result:
    samples = server.generate(_requests(plan, seed=0))
    decode = [sample.log_probs for sample in samples]
    return compared(
        f"SGLang, {mode}", (link("decode == prefill", decode, server.score(samples)),), demanded=mode == DETERMINISTIC
    )


def _requests(plan: Plan, seed: int) -> list[Request]:
    """Make requests with prompts of several lengths, whose sequences all end at one length."""
    count, prompt, length = plan.decoded
    random = torch.Generator().manual_seed(seed)
    prompts = [prompt - i * (prompt - 1) // count for i in range(count)]
    return [
        Request(
            tuple(torch.randint(plan.model.vocab, (tokens,), generator=random).tolist()),
            prompt + length - tokens,
            seed=count * seed + i,
        )
        for i, tokens in enumerate(prompts)
    ]


@torch.no_grad()
def _recomputed(trainer: Qwen3ForCausalLM, samples: Sequence[Sample], machine: Cuda, dtype: torch.dtype) -> LogProbs:
    """Recompute the log-probs of sampled tokens in one pass over all samples: log_softmax in `dtype` of bf16 logits."""
    tokens = torch.tensor([sample.sequence for sample in samples], device=machine.device)
    with torch.autocast(machine.device.type, torch.bfloat16):
        logits = trainer(input_ids=tokens, use_cache=False).logits[:, :-1]
    scored = logits.to(dtype).log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0].float().cpu()
    return [row[-len(sample.tokens) :] for row, sample in zip(scored, samples, strict=True)]
