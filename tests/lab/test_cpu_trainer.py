"""What the init hook puts in place on a CPU: the log-prob's formula, rope and float32, by their bits."""

import sys
import types
from argparse import Namespace
from importlib import import_module
from typing import Any, cast

import pytest
import torch

from lab.in_host import cpu_trainer
from mis_plugins.hosts.needs import NeedError
from mis_plugins.hosts.registry import every_host
from true_on_policy.bitwise import equal_bits
from true_on_policy.contract import rounding as rope
from true_on_policy.contract.cpu import Contract
from true_on_policy.engines.protocol import Request, Sample
from true_on_policy.errors import ContractError
from true_on_policy.trainers.protocol import sampled_log_probs

VOCABULARY = 40


def seeded(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_log_probs_are_those_of_the_proof_without_padding() -> None:
    logits, tokens = seeded(9, VOCABULARY + 8), torch.arange(9)
    sample = Sample(Request((1,), 9), tuple(tokens.tolist()), torch.zeros(9), 0)
    expected = sampled_log_probs(logits[:, :VOCABULARY], sample, 1.0)
    assert equal_bits(cpu_trainer.log_probs_of(VOCABULARY)(logits, tokens, None), expected)
    padded = cpu_trainer.log_probs_of(VOCABULARY + 8)(logits, tokens, None)
    assert not equal_bits(padded, expected)


def test_log_probs_have_gradients() -> None:
    logits = seeded(3, VOCABULARY).requires_grad_()
    cpu_trainer.log_probs_of(VOCABULARY)(logits, torch.tensor([1, 2, 3]), None).sum().backward()
    expected = -logits.detach().softmax(-1)
    expected[torch.arange(3), torch.tensor([1, 2, 3])] += 1
    assert logits.grad is not None and torch.allclose(logits.grad, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_is_that_of_megatron_core(dtype: torch.dtype) -> None:
    stock = getattr(import_module(rope.ROPE_MODULE), rope.ROPE_NAME)
    t, freqs = seeded(7, 2, 3, 16).to(dtype), seeded(7, 1, 1, 12)
    assert equal_bits(rope.rotated(t, freqs), stock(t, freqs))
    in_float32 = stock(t.float(), freqs).to(dtype)
    assert equal_bits(rope.rotated(t, freqs), in_float32) == (dtype == torch.float32)


class Launched(types.ModuleType):
    """A host's module of log-probs, whose function adds up logits, and Megatron's of rope."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, host: str):
        address = every_host()[host].needs.log_probs.addresses[0]
        (self.name,) = address.names
        super().__init__(address.module)
        setattr(self, self.name, lambda logits, *rest, **options: (logits, logits.sum(-1)))
        rotates = import_module(rope.ROPE_MODULE)
        monkeypatch.setattr(rotates, rope.ROPE_NAME, getattr(rotates, rope.ROPE_NAME))
        monkeypatch.setitem(sys.modules, address.module, self)
        monkeypatch.setattr(cpu_trainer, "current", lambda args: every_host()[host])

    def __call__(self, *given: torch.Tensor, **options: Any) -> Any:
        return getattr(self, self.name)(*given, None, **options)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("host", cpu_trainer.aligned())
def test_a_trainer_is_aligned(monkeypatch: pytest.MonkeyPatch, host: str, dtype: str) -> None:
    launched = Launched(monkeypatch, host)
    own = Namespace(bf16=True, params_dtype=torch.bfloat16)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", cast(Any, Namespace(_GLOBAL_ARGS=own)))
    args = Namespace(vocab_size=VOCABULARY)
    cpu_trainer.align(Contract(dtype=dtype), args)
    assert args == Namespace(vocab_size=VOCABULARY), "the arguments of the hook may be frozen"
    logits, tokens = seeded(2, VOCABULARY), torch.tensor([4, 5])
    expected = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    found = launched(logits, tokens, with_entropy=False, log_prob_keep_mask=None)
    assert equal_bits(found[0][:, 0] if host == "slime" else found, expected)
    rotates = getattr(import_module(rope.ROPE_MODULE), rope.ROPE_NAME) is rope.rotated
    assert rotates == every_host()[host].megatron
    wanted = (False, torch.float32) if dtype == "fp32" and every_host()[host].megatron else (True, torch.bfloat16)
    assert (own.bf16, own.params_dtype) == wanted


def test_megatron_without_arguments_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A contract of fp32 would be one of bf16."""
    Launched(monkeypatch, "miles")
    with pytest.raises(ContractError, match="the host must call set_args before"):
        cpu_trainer.align(Contract(dtype="fp32"), Namespace(vocab_size=VOCABULARY))


@pytest.mark.parametrize("host", ["miles", "slime"])
def test_a_vocabulary_that_nobody_stated_is_refused(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """Columns that pad the vocabulary would take part in the log-probs."""
    Launched(monkeypatch, host)
    with pytest.raises(ContractError, match="vocab_size is None.*launch with --vocab-size"):
        cpu_trainer.align(Contract(), Namespace(vocab_size=None))


def test_the_entropy_of_slime_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = Launched(monkeypatch, "slime")
    cpu_trainer.align(Contract(dtype="bf16"), Namespace(vocab_size=VOCABULARY))
    logits, tokens = seeded(1, VOCABULARY), torch.tensor([4])
    log_probs, entropy = launched(logits, tokens, with_entropy=True, log_prob_keep_mask=None)
    assert log_probs.shape == (1, 1) and equal_bits(entropy, logits.sum(-1))
    assert launched(logits, tokens, with_entropy=False, log_prob_keep_mask=None)[1] is None


@pytest.mark.parametrize("host", cpu_trainer.aligned())
def test_a_host_without_the_function_is_refused(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    launched = Launched(monkeypatch, host)
    delattr(launched, launched.name)
    with pytest.raises(NeedError, match=f"dropped its formula of log-probs, .*{launched.name}"):
        cpu_trainer.align(Contract(), Namespace(vocab_size=VOCABULARY))


def test_another_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_trainer, "current", lambda args: every_host()["unknown"])
    with pytest.raises(ContractError, match="log-probs of unknown have no agreed formula on a CPU"):
        cpu_trainer.align(Contract(), Namespace())
