"""Real prompts: what a file may hold, what a model needs, and the requests that a workload makes of them."""

import json
import os
from pathlib import Path

import pytest
import torch
from answered import answered
from commands import ProofCommand
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from true_on_policy.models.tiny import checkpoint, weights_hash
from true_on_policy.verify.prompts import LONGEST, PromptsError, prompt_lines, read_prompts
from true_on_policy.verify.workload import LONG_PROMPT, Workload

TEMPLATE = "<u>{{ messages[0]['content'] }}<a>"


@pytest.fixture
def spelled(tmp_path: Path) -> Path:
    """A tiny model whose tokenizer knows single letters, and whose chat template frames a turn."""
    folder = checkpoint("tiny-llama", tmp_path / "model", torch.float32, seed=0)
    letters = {letter: index for index, letter in enumerate("?abcdefghijklmnopqrstuvwxyz<>/ .")}
    tokenizer = Tokenizer(models.BPE(letters, [], unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE).save_pretrained(folder)
    return folder


def test_a_prompt_is_the_users_turn_of_the_models_chat_template(spelled: Path, tmp_path: Path):
    file = tmp_path / "p.txt"
    file.write_text("ab\n\n  c \n")
    prompts = read_prompts(str(file), spelled)
    assert (prompts.name, len(prompts.sha256)) == ("p.txt", 64)
    framed = [(27, 21, 28, 1, 2, 27, 1, 28), (27, 21, 28, 3, 27, 1, 28)]
    assert [*prompts.tokens] == framed


def test_the_certificate_names_model_hash_and_prompts(spelled: Path, tmp_path: Path, proof_command: ProofCommand):
    file, certificate = tmp_path / "p.txt", tmp_path / "c.json"
    file.write_text("abc\nde\n")
    words = "verify --engine hf --trainer hf --tokens 1".split()
    proof_command(*words, "--json", certificate, "--model", spelled, "--prompts", file)
    said = json.loads(certificate.read_text())
    assert said["weights"] == weights_hash(spelled)
    assert said["prompts"]["name"] == "p.txt" and said["prompts"]["count"] == 2


def test_a_workload_asks_every_real_prompt_and_joins_them_to_a_long_one():
    prompts = [tuple(range(10 * n, 10 * n + 9 + n)) for n in range(5)]
    batches = Workload(100, seed=0, prompts=prompts).sample(answered, 1, full_set=True)
    long, *short, _, _, _ = [sample.request for batch in batches for sample in batch]
    assert LONG_PROMPT <= len(long.prompt) < LONG_PROMPT + 13 and set(long.prompt) >= set(prompts[4])
    assert {one.prompt for one in short} == set(prompts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"--prompts .*p.txt: cannot be read"),
        ("a pipe", r"--prompts .*p.txt: is no regular file"),
        ("\n \n", "holds no prompt; write one a line"),
        ("a" * (LONGEST + 1), f"has {LONGEST + 7} tokens; give 1 to {LONGEST}"),
    ],
)
def test_prompts_that_cannot_be_used_are_refused(text: str | None, message: str, spelled: Path, tmp_path: Path):
    file = tmp_path / "p.txt"
    if text == "a pipe":
        os.mkfifo(file)
    elif text is not None:
        file.write_text(text)
    with pytest.raises(PromptsError, match=message):
        read_prompts(str(file), spelled)


def test_a_prompt_that_a_tokenizer_leaves_out_is_refused(spelled: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("true_on_policy.verify.prompts._tokens", lambda *_: ())
    with pytest.raises(PromptsError, match="has 0 tokens; give 1 to"):
        read_prompts("builtin", spelled)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a vision tower, whose tokenizer knows bytes and the placeholders of images."""
    return checkpoint("tiny-qwen3-vl", tmp_path_factory.mktemp("seeing"), torch.float32, seed=0)


@pytest.mark.parametrize(
    ("prompt", "what"),
    [
        (
            "Describe <|vision_start|><|image_pad|><|vision_end|>.",
            "the token 316, which is image_token_id in the model's",
        ),
        ("<|video_pad|> again", "the token 317, which is video_token_id in the model's config.json"),
        ('{"prompt": "What is this?", "images": ["a.png"]}', "the key or part 'images'"),
        ('[{"role": "user", "content": [{"type": "image_url"}]}]', "the key or part 'image_url'"),
        ('{"messages": [{"content": [{"type": "video", "fps": 2}]}]}', "the key or part 'video'"),
        ('{"prompt": "one\u2028two", "images": ["a.png"]}', "the key or part 'images'"),
    ],
)
def test_a_prompt_with_an_image_is_refused_with_what_is_missing(
    prompt: str, what: str, seeing: Path, tmp_path: Path, proof_command: ProofCommand
):
    file = tmp_path / "p.txt"
    file.write_text(f"{prompt}\ntext alone\n", encoding="utf-8-sig")
    words = "verify --engine hf --trainer hf --model".split()
    said = proof_command(*words, seeing, "--prompts", file, code=2).err
    assert f"--prompts {file}: {prompt[:40]!r} holds {what}" in said
    assert "Images are not certified: no row for the vision tower" in said


def test_prompts_of_text_alone_are_taken_by_a_model_that_sees(seeing: Path, tmp_path: Path):
    file = tmp_path / "p.txt"
    file.write_text('{"images": [], "prompt": "a"}\n{not JSON, an image}\nab\n')
    *_, short = read_prompts(str(file), seeing).tokens
    assert [len(tokens) for tokens in read_prompts(str(file), seeing).tokens] == [29, 20, 2] and len(short) == 2


def test_our_own_prompts_are_128_different_ones():
    _, prompts = prompt_lines("builtin")
    assert len(prompts) == len(set(prompts)) == 128
