"""What a trainer must take over from the engine for its log-probs to be the engine's, and the trainer without each.

The engine samples in bf16, in SGLang's order of rounding, on ordinary sums, with the native kernels.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import product, takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.fusions import fused_softmax
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from other_backend import backwards
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from true_on_policy.contract import rounding as rope
from true_on_policy.contract.cpu import Contract
from true_on_policy.contract.rounding import ORDERS, NormOrder
from true_on_policy.engines.protocol import Sample
from true_on_policy.kernels import cpu
from true_on_policy.kernels.pin import pinned
from true_on_policy.kernels.row_parallel import Tree
from true_on_policy.trainers.hf import HuggingFace
from true_on_policy.trainers.megatron import Megatron
from true_on_policy.verify.certificate import Evidence, LogProbs, conclusion

CONTRACT = Contract(dtype="bf16")
ORDER = ORDERS["sglang"]
AGREED_ROPE = rope.rotated
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
Trained = Callable[[Path, Sequence[Sample]], LogProbs]


def rows_of_the_page(heading: str) -> list[str]:
    """The operations that the first table below a heading of docs/engines.md lists."""
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")
    lines = page.partition(f"{heading}\n")[2].partition("|---")[2].splitlines()[1:]
    return [line.split("|")[1].strip() for line in takewhile(lambda line: line.startswith("|"), lines)]


def equal_share(samples: list[Sample], log_probs: LogProbs) -> float:
    found = conclusion(Evidence(samples=samples, trainer_tempered=log_probs))
    return found.equal / found.total


def aligned(
    checkpoint: Path,
    samples: Sequence[Sample],
    trainer: type[Megatron] | type[HuggingFace] = Megatron,
    order: NormOrder = ORDER,
    tree: Tree | None = None,
    contract: Contract | None = CONTRACT,
    stock: str | None = None,
    kernels: Callable[[], AbstractContextManager] = nullcontext,
) -> LogProbs:
    """The trainer's log-probs; each argument but the first two leaves an alignment out where it is not the default."""
    model = trainer(checkpoint, "bf16", order, tree)
    with kernels(), nullcontext() if contract is None else _without(stock), _pinned(contract):
        return [model.log_probs([sample], [sample.request.temperature])[0] for sample in samples]


def _pinned(contract: Contract | None):
    return nullcontext() if contract is None else pinned(contract)


@contextmanager
def _without(operator: str | None) -> Iterator[None]:
    """A pin that leaves one operator to its stock kernel, which its probe would refuse."""
    if operator is None:
        yield
        return
    every = cpu._overrides

    def others():
        return {name: kernel for name, kernel in every().items() if name.split(".")[0] != operator}

    with patch.object(cpu, "_overrides", others), patch.object(cpu, "probe", lambda _: None):
        yield


def eager(checkpoint: Path, samples: Sequence[Sample]) -> LogProbs:
    """Hugging Face's attention in products and a softmax of their own."""
    trainer = HuggingFace(checkpoint, "bf16", ORDER)
    trainer.model.set_attn_implementation("eager")
    with pinned(CONTRACT):
        return [trainer.log_probs([sample], [sample.request.temperature])[0] for sample in samples]


def padded_logits(trainer: Megatron, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """The logits of each sequence, in one pass over all sequences padded on the right."""
    tokens = pad_sequence([torch.tensor(sequence) for sequence in sequences], batch_first=True)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    logits = trainer._forward(input_ids=tokens, position_ids=positions)
    return [rows[: len(sequence)] for rows, sequence in zip(logits, sequences, strict=True)]


def own_core_attention(checkpoint: Path, samples: Sequence[Sample]) -> LogProbs:
    """Megatron's, which knows no packed sequences."""
    trainer = Megatron(checkpoint, "bf16", ORDER)
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    for layer in trainer.model.decoder.layers:
        attention: Any = layer.self_attention
        attention.core_attention = DotProductAttention(
            attention.config, attention.layer_number, AttnMaskType.causal, "self", pg_collection=groups
        )
    trainer.logits = partial(padded_logits, trainer)
    # On a GPU it makes its mask and keeps the random numbers of its dropout.
    no_dropout = patch.object(CudaRNGStatesTracker, "fork", lambda self: nullcontext())
    mask = patch.object(fused_softmax, "get_default_causal_mask", lambda n: torch.ones(n, n).triu(1).bool())
    with pinned(CONTRACT), no_dropout, mask:
        return [trainer.log_probs([sample], [sample.request.temperature])[0] for sample in samples]


def rope_in_float32(t: Tensor, *args: Any, **options: Any) -> Tensor:
    """Rope of queries and keys in bf16 as Miles's fork of Megatron-core rotates them."""
    return AGREED_ROPE(t.float(), *args, **options).to(t.dtype)


def without_rope(checkpoint: Path, samples: Sequence[Sample]) -> LogProbs:
    """A trainer that leaves rope as an installed Megatron-core has it, and that is Miles's fork."""
    with patch.object(rope, "rotated", rope_in_float32):
        return aligned(checkpoint, samples)


def with_rope(checkpoint: Path, samples: Sequence[Sample]) -> LogProbs:
    """A trainer that rotates as agreed, on Miles's fork of Megatron-core."""
    with patch.object(rope_utils, rope.ROPE_NAME, rope_in_float32):
        return aligned(checkpoint, samples)


def by_formula(
    formula: Callable[[Tensor, Tensor, float], Tensor], checkpoint: Path, samples: Sequence[Sample]
) -> LogProbs:
    """`formula(logits, tokens, temperature)` of the sampled tokens, in place of the one that agrees."""
    trainer = Megatron(checkpoint, "bf16", ORDER)
    log_probs = []
    with pinned(CONTRACT), torch.no_grad():
        for sample in samples:
            [logits] = trainer.logits([sample.sequence])
            rows = logits[-len(sample.tokens) - 1 : -1]
            log_probs.append(formula(rows, torch.tensor(sample.tokens), sample.request.temperature))
    return log_probs


def _picked(log_probs: Tensor, tokens: Tensor) -> Tensor:
    return log_probs.float().gather(1, tokens[:, None])[:, 0]


def _cross_entropy(rows: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    return -vocab_parallel_cross_entropy((rows.float() / temperature)[:, None], tokens[:, None])[:, 0]


FORMULAS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "log_softmax(logits / T)": lambda x, t, T: _picked((x.float() / T).log_softmax(-1), t),
    "logits / T - logsumexp": lambda x, t, T: _picked(x.float() / T - (x.float() / T).logsumexp(-1, keepdim=True), t),
    "log(softmax)": lambda x, t, T: _picked((x.float() / T).softmax(-1).log(), t),
    "log_softmax in bf16": lambda x, t, T: _picked((x.float() / T).bfloat16().log_softmax(-1), t),
    "logits divided in bf16": lambda x, t, T: _picked((x / T).float().log_softmax(-1), t),
    "logits * (1 / T)": lambda x, t, T: _picked((x.float() * (1 / T)).log_softmax(-1), t),
    "without temperature": lambda x, t, T: _picked(x.float().log_softmax(-1), t),
    "vocab_parallel_cross_entropy": _cross_entropy,
}
AGREES = "log_softmax(logits / T)"

TRAINERS = (Megatron, HuggingFace)
ALL_ORDERS = [NormOrder(*rounds) for rounds in product((False, True), repeat=2)]

# Nothing is left out: these must be equal.
COMPLETE: dict[str, Trained] = {
    **{trainer.__name__: partial(aligned, trainer=trainer) for trainer in TRAINERS},
    AGREES: partial(by_formula, FORMULAS[AGREES]),
    "Megatron, on a fork that rotates in float32": with_rope,
}
# One thing is left out: none of these may be.
LEFT_OUT: dict[str, Trained] = {
    f"{trainer.__name__}, {what}": partial(aligned, trainer=trainer, **change)
    for trainer in TRAINERS
    for what, change in {
        "stock kernels": {"contract": None},
        "another backend": {"kernels": backwards},
        "stock mm": {"stock": "mm"},
        "stock attention": {"stock": ATTENTION},
        **{str(order): {"order": order} for order in ALL_ORDERS if order != ORDER},
        "sums on a tree": {"tree": Tree(leaves=4)},
    }.items()
}
LEFT_OUT |= {
    "HuggingFace, eager attention": eager,
    "Megatron, its own core attention": own_core_attention,
    "Megatron, rope in float32": without_rope,
    **{name: partial(by_formula, formula) for name, formula in FORMULAS.items() if name != AGREES},
}
# What leaves each row of the contract out.
OF_ROW = {
    "products": "Megatron, stock mm",
    "attention": "Megatron, its own core attention",
    "norm and residual": f"Megatron, {ORDERS['megatron']}",
    "rope": "Megatron, rope in float32",
    "sums over K": "Megatron, sums on a tree",
    "log-prob": "vocab_parallel_cross_entropy",
}
