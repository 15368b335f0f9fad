"""A whole Qwen3: the trainer's padded batch, decode with a cache and chunked prefill, every log-prob by bytes."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from true_on_policy.bitwise import equal_bits
from true_on_policy.contract.cpu import DTYPES, Contract
from true_on_policy.kernels.pin import pinned

LENGTHS = (9, 40, 26)
VOCAB = 333


@pytest.fixture(scope="module", params=DTYPES)
def model(request) -> Qwen3ForCausalLM:
    """Random weights, the norms' too; widths that no vector divides."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=96,
        intermediate_size=200,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
    )
    model = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=DTYPES[request.param])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.1).add_(1.0 if "norm" in name else 0.0)
    return model.eval()


@pytest.fixture(scope="module")
def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in LENGTHS]


def test_trainer_decode_and_chunked_prefill_have_the_same_bits(model, sequences):
    with pinned(Contract(dtype=name_of(model.dtype))):
        alone = [trained(model, [sequence])[0] for sequence in sequences]
        ways = {
            "right-padded batch": trained(model, sequences),
            "decoded alone": [decoded(model, [sequence])[0] for sequence in sequences],
            "decoded in a left-padded batch": decoded(model, sequences),
            "prefilled in chunks": [chunked(model, sequence, 7) for sequence in sequences],
        }
    for way, log_probs in ways.items():
        for ours, wanted in zip(log_probs, alone, strict=True):
            assert equal_bits(ours, wanted), way


def test_stock_kernels_differ(model, sequences):
    """The control: at these shapes there is a mismatch to remove."""
    batch, decode = trained(model, sequences), decoded(model, sequences)
    assert not all(equal_bits(ours, theirs) for ours, theirs in zip(batch, decode, strict=True))


def test_training_mode_and_checkpointing_change_no_bit(model, sequences):
    """Log-probs as in evaluation; gradients as without checkpointing."""
    with pinned(Contract(dtype=name_of(model.dtype))):
        evaluated = trained(model, sequences)
        plain = step(model, sequences)
        model.activation_checkpointing_enable({"use_reentrant": False})
        recomputed = step(model, sequences)
        model.activation_checkpointing_disable()
    for log_probs, gradients in (plain, recomputed):
        assert all(equal_bits(ours, wanted) for ours, wanted in zip(log_probs, evaluated, strict=True))
        assert all(equal_bits(ours, wanted) for ours, wanted in zip(gradients, plain[1], strict=True))


def name_of(dtype: torch.dtype) -> str:
    return next(name for name, value in DTYPES.items() if value == dtype)


def step(model, sequences: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    model.train()
    log_probs = trained(model, sequences, grad=True)
    torch.cat(log_probs).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model.eval()
    return [part.detach() for part in log_probs], gradients


def trained(model, sequences: list[Tensor], grad: bool = False) -> list[Tensor]:
    """Log-probs of each sequence's tokens after its first, from one right-padded batch."""
    tokens = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    present = torch.nn.utils.rnn.pad_sequence([torch.ones_like(s) for s in sequences], batch_first=True)
    with nullcontext() if grad else torch.no_grad():
        logits = model(input_ids=tokens, attention_mask=present).logits
        return [
            gathered(row[: len(sequence) - 1], sequence[1:]) for row, sequence in zip(logits, sequences, strict=True)
        ]


@torch.no_grad()
def decoded(model, sequences: list[Tensor]) -> list[Tensor]:
    """The same from a cache: half of the shortest sequence prefilled behind padding, then token by token."""
    longest, first = max(map(len, sequences)), min(map(len, sequences)) // 2
    padding = torch.tensor([[longest - len(sequence)] for sequence in sequences])
    tokens = torch.stack([torch.nn.functional.pad(s, (longest - len(s), 0)) for s in sequences])
    present = (torch.arange(longest) >= padding).long()
    positions = (torch.arange(longest) - padding).clamp(min=0)
    cache, logits = DynamicCache(config=model.config), []
    start, stop = 0, longest - min(map(len, sequences)) + first
    while start < longest:
        part = slice(start, stop)
        output = model(
            input_ids=tokens[:, part],
            attention_mask=present[:, :stop],
            position_ids=positions[:, part],
            past_key_values=cache,
        )
        logits.append(output.logits)
        start, stop = stop, stop + 1
    together = torch.cat(logits, 1)
    return [
        gathered(row[longest - len(sequence) : -1], sequence[1:])
        for row, sequence in zip(together, sequences, strict=True)
    ]


@torch.no_grad()
def chunked(model, sequence: Tensor, size: int) -> Tensor:
    cache, logits = DynamicCache(config=model.config), []
    for part in sequence.split(size):
        logits.append(model(input_ids=part[None], past_key_values=cache).logits[0])
    return gathered(torch.cat(logits)[:-1], sequence[1:])


def gathered(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
