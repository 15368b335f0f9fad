"""The rollout engine: its numbers against transformers' Qwen3, its randomness, precisions and refusals."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
import transformers
from teacher_forcing import teacher_forced
from tolerances import BF16_LOG_PROB, FP32_LOG_PROB

from lab.host.model.decoder import ModelConfig
from lab.host.model.decoding import Sampling, counter_uniform, sample
from lab.host.model.engine import DecodeEngine, Generation
from lab.host.model.quantize import at_precision, round_to_int
from mis_plugins.errors import ConfigError, InputError
from true_on_policy.models.tiny import config_of

CONFIG = ModelConfig(32, 48, 2, 4, 2, 8, 16, rope_theta=100.0, norm_eps=1e-5)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 11], [2], [9, 9, 9, 9]]
NO_EOS = -1


@pytest.fixture(scope="module")
def hf() -> torch.nn.Module:
    """A Qwen3 with random weights, large enough that its distributions are far from uniform."""
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config_of(CONFIG.family, CONFIG, torch.float32)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1))
    return model


@pytest.fixture(scope="module")
def weights(hf: torch.nn.Module) -> dict[str, torch.Tensor]:
    return hf.state_dict()


def engine(weights: dict[str, torch.Tensor], precision: str = "fp32") -> DecodeEngine:
    built = DecodeEngine(CONFIG, precision)
    built.update_weights(weights, version=3)
    return built


def generate(built: DecodeEngine, prompts=PROMPTS, seeds=(5, 6, 7, 8), **options) -> list[Generation]:
    settings = {"max_new_tokens": 9, "temperature": 1.0, "eos": NO_EOS} | options
    return built.generate(prompts, Sampling(**settings), list(seeds))


@torch.no_grad()
def hf_log_probs(hf: torch.nn.Module, prompt, response, temperature: float = 1.0) -> torch.Tensor:
    """One unpadded sequence through transformers, teacher forced."""
    sequence = torch.tensor([[*prompt, *response]])
    log_probs = (hf(sequence).logits[0] / temperature).log_softmax(-1)
    return log_probs[len(prompt) - 1 : -1].gather(-1, torch.tensor(response)[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_decoding_gives_the_log_probs_of_transformers(hf, weights, temperature: float) -> None:
    generations = generate(engine(weights), temperature=temperature)
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        expected = hf_log_probs(hf, prompt, generation.tokens, temperature)
        torch.testing.assert_close(torch.tensor(generation.log_probs), expected, rtol=0, atol=FP32_LOG_PROB)


def test_without_qk_norm_the_decoder_is_a_llama() -> None:
    config = replace(CONFIG, qk_norm=False)
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(config_of(config.family, config, torch.float32)).eval()
    built = DecodeEngine(config, "fp32")
    built.update_weights({name: 3 * weight for name, weight in llama.state_dict().items()}, version=0)
    llama.load_state_dict({name: 3 * weight for name, weight in llama.state_dict().items()})
    for prompt, one in zip(PROMPTS, generate(built), strict=True):
        ours = torch.tensor(one.log_probs)
        torch.testing.assert_close(ours, hf_log_probs(llama, prompt, one.tokens), rtol=0, atol=FP32_LOG_PROB)


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4", "int3", "bf16"])
def test_decode_and_prefill_of_the_engine_agree(weights, precision: str) -> None:
    built = engine(weights, precision)
    generations = generate(built, temperature=0.7)
    sequences = [[*prompt, *made.tokens] for prompt, made in zip(PROMPTS, generations, strict=True)]
    scores = teacher_forced(built, sequences, [len(made.tokens) for made in generations], temperature=0.7)
    atol = BF16_LOG_PROB if precision == "bf16" else FP32_LOG_PROB
    for made, score in zip(generations, scores, strict=True):
        torch.testing.assert_close(torch.tensor(made.log_probs), score, rtol=0, atol=atol)


def test_a_response_does_not_depend_on_its_batch(weights) -> None:
    built = engine(weights)
    together = generate(built)
    for index, made in enumerate(together):
        (alone,) = generate(built, [PROMPTS[index]], [5 + index])
        assert alone.tokens == made.tokens
        assert alone.log_probs == pytest.approx(made.log_probs, abs=FP32_LOG_PROB)
    assert [made.tokens for made in generate(built, PROMPTS[::-1], (8, 7, 6, 5))] == [
        made.tokens for made in together[::-1]
    ]


def test_every_step_draws_a_number_of_its_own(weights) -> None:
    """A head of zeros makes every distribution uniform, and token t is then `floor(V u_t)`."""
    built = engine(weights | {"lm_head.weight": torch.zeros_like(weights["lm_head.weight"])})
    expected = (counter_uniform((5, 6, 7, 8), 9) * CONFIG.vocab).floor().long()
    assert [list(made.tokens) for made in generate(built)] == expected.tolist()


def test_a_response_ends_with_its_first_eos(weights) -> None:
    built = engine(weights)
    free = generate(built, [PROMPTS[1]] * 40, range(40))
    stopped = generate(built, [PROMPTS[1]] * 40, range(40), eos=10)
    for whole, made in zip(free, stopped, strict=True):
        length = whole.tokens.index(10) + 1 if 10 in whole.tokens else len(whole.tokens)
        assert made.tokens == whole.tokens[:length]
        assert len(made.log_probs) == length
    assert len({len(made.tokens) for made in stopped}) > 2


def test_samples_follow_the_distribution() -> None:
    count, probabilities = 20_000, torch.tensor([0.5, 0.0, 0.2, 0.3])
    logits = probabilities.log().clamp(min=-1e30).expand(count, -1)
    tokens, log_probs = sample(logits, 1.0, counter_uniform(range(count), 1)[:, 0])
    counted = Counter(tokens.tolist())
    for token, probability in enumerate(probabilities.tolist()):
        deviation = math.sqrt(probability * (1 - probability) / count)
        assert abs(counted[token] / count - probability) <= 4 * deviation
    torch.testing.assert_close(log_probs, probabilities.log()[tokens])


def test_uniform_numbers_are_uniform_and_uncorrelated() -> None:
    uniform = counter_uniform(range(4000), 8)
    assert uniform.min() >= 0 and uniform.max() < 1
    histogram = torch.histc(uniform.float(), 10, 0, 1) / uniform.numel()
    torch.testing.assert_close(histogram, torch.full((10,), 0.1), rtol=0, atol=0.01)
    correlation = torch.corrcoef(uniform.T) - torch.eye(8)
    neighbours = torch.corrcoef(torch.stack([uniform[:-1].flatten(), uniform[1:].flatten()]))[0, 1]
    assert correlation.abs().max() < 0.08 and neighbours.abs() < 0.03
    torch.testing.assert_close(counter_uniform([7], 8)[:, :3], counter_uniform([-1, 7], 3)[1:])


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_rounding_stays_within_half_a_step(bits: int) -> None:
    weight = torch.randn(20, 50, generator=torch.Generator().manual_seed(0)).index_fill(0, torch.tensor(4), 0)
    rounded = round_to_int(weight, bits)
    step = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert ((rounded - weight).abs() <= step / 2 * (1 + 1e-6)).all()
    assert max(len(row.unique()) for row in rounded) <= 2**bits - 1
    torch.testing.assert_close(rounded.abs().amax(1), weight.abs().amax(1))


def test_only_linear_layers_are_rounded(weights) -> None:
    for name, weight in weights.items():
        linear = weight.dim() == 2 and "embed" not in name
        assert torch.equal(at_precision(name, weight, "int4"), weight) is not linear, name


def test_the_mismatch_grows_as_bits_go(weights) -> None:
    made = generate(engine(weights), PROMPTS * 8, range(32))
    sequences = [[*prompt, *one.tokens] for prompt, one in zip(PROMPTS * 8, made, strict=True)]
    lengths = [len(one.tokens) for one in made]

    def k3(precision: str) -> float:
        reference = torch.cat(teacher_forced(engine(weights), sequences, lengths))
        log_ratio = torch.cat(teacher_forced(engine(weights, precision), sequences, lengths)) - reference
        return float((log_ratio.exp() - 1 - log_ratio).mean())

    seen = [k3(precision) for precision in ("fp32", "int8", "int4", "int3")]
    assert seen == sorted(seen)
    assert seen[0] == 0 and seen[1] < 0.01 < 0.1 < seen[3]
    assert 0 < k3("bf16") < 0.01


def test_updating_weights_copies_them_and_sets_the_version(weights) -> None:
    handed = {name: weight.clone() for name, weight in weights.items()}
    built = engine(handed)
    before = generate(built)
    for weight in handed.values():
        weight.add_(1.0)
    assert generate(built) == before
    assert {made.version for made in before} == {built.version} == {3}
    built.update_weights(handed, version=4)
    changed = generate(built)
    assert changed != before and changed[0].version == 4


def test_an_engine_of_diverged_weights_or_without_weights_says_so(weights) -> None:
    with pytest.raises(InputError, match="logits are not finite; the weights it was given have diverged"):
        generate(engine(weights | {"lm_head.weight": weights["lm_head.weight"] * torch.nan}))
    closed = engine(weights)
    closed.close()
    for built in (DecodeEngine(CONFIG, "fp32"), closed):
        with pytest.raises(InputError, match="call update_weights first"):
            generate(built)


def test_impossible_models_and_precisions_are_refused() -> None:
    with pytest.raises(ConfigError, match="--rollout-weights: got 'int2'; choose one of fp32, bf16, int8, int4, int3"):
        DecodeEngine(CONFIG, "int2")
    with pytest.raises(ConfigError, match="head_dim: got 7"):
        ModelConfig(32, 48, 1, 4, 2, 7, 16)


def test_no_prompts_give_no_responses(weights) -> None:
    assert generate(engine(weights), [], ()) == []
