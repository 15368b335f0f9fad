"""Texts: prompt and response of whole samples, and the text of single tokens by the tokenizer beside a dump."""

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from report_dumps import write_rollout, write_slime
from test_readers import read, reported, some_records

from mis_plugins.report.record import from_mapping

pytestmark = pytest.mark.usefixtures("no_pictures")


def tokenizer(folder: Path) -> Path:
    """A tokenizer of forty words, as a host writes it into the folder of its dump."""
    words = {f"word{place}": place for place in range(40)} | {"[UNK]": 40}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    (folder / "tokenizer").mkdir(parents=True)
    made.save(str(folder / "tokenizer" / "tokenizer.json"))
    return folder / "tokenizer" / "tokenizer.json"


def test_tokens_have_the_text_of_the_tokenizer_beside_the_dump(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_slime(run, some_records())
    tokenizer(run)
    _, found = reported(run)
    shown = [token for one in found["worst_sequences"] for token in one["tokens"]] + found["worst_tokens"]
    assert shown and all(token["text"] == f"word{token['token']}" for token in shown)
    page = (tmp_path / "out" / "report.html").read_text()
    assert ">word7</span>" in page and "Numbers stand for tokens" not in page


@pytest.mark.parametrize("beside", ["run/tokenizer.json", "tokenizer.json", "tokenizer/tokenizer.json"])
def test_a_tokenizer_beside_or_above_the_dumps_is_found(tmp_path: Path, beside: str) -> None:
    run = tmp_path / "all" / "run"
    write_slime(run, some_records())
    made = tokenizer(tmp_path / "made")
    (run.parent / beside).parent.mkdir(exist_ok=True)
    made.rename(run.parent / beside)
    assert all("text" in token for token in reported(run)[1]["worst_tokens"])


def test_without_a_tokenizer_a_hint_says_where_it_belongs(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_slime(run, some_records())
    reported(run)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "no tokenizer was found" in page and "<code>tokenizer.json</code>" in page


def test_tokens_with_blanks_of_their_own_are_read_as_text(tmp_path: Path) -> None:
    line = {"step": 0, "behavior_log_probs": [-1.0] * 3, "proximal_log_probs": [-0.5] * 3}
    (tmp_path / "run.jsonl").write_text(json.dumps(line | {"text": ["one", " two", "\n"]}) + "\n")
    reported(tmp_path / "run.jsonl")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "one</span><span" in page and ">⏎\n</span></p>" in page


def test_a_broken_tokenizer_is_named_and_ids_stay(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_slime(run, some_records())
    tokenizer(run).write_text("{")
    _, found = reported(run)
    (lost,) = found["problems"]
    assert lost["file"].endswith("tokenizer.json") and "line 1 column 2" in lost["reason"]
    assert all("text" not in token and "token" in token for token in found["worst_tokens"])


def test_prompt_and_response_are_those_of_the_rollouts_dump(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_slime(run, some_records())
    write_rollout(run, some_records())
    file = run / "rollout_data" / "3.pt"
    content = torch.load(file, weights_only=True)
    for sample in content["samples"]:
        sample |= {"prompt": [{"role": "user", "content": "2 + 2?"}], "response": f"<four {sample['index']}>"}
    torch.save(content, file)
    found, _ = read(run)
    assert [one.response for one in found] == ["<four 0>", "<four 1>", "<four 2>"]
    assert {one.prompt for one in found} == {"user: 2 + 2?"}
    assert {one["response"] for one in reported(run)[1]["worst_sequences"]} == {"<four 0>", "<four 1>", "<four 2>"}
    assert "&lt;four 1&gt;</pre>" in (tmp_path / "out" / "report.html").read_text()


def test_the_neutral_form_takes_a_text_of_each_token_or_one_text() -> None:
    values = {"behavior_log_probs": [0.0, -1.0], "proximal_log_probs": [0.0, -1.0]}
    each = from_mapping(values | {"text": ["a", "b"]}, 0, "0")
    whole = from_mapping(values | {"text": "ab", "prompt": "say ab"}, 0, "0")
    assert (each.text, each.response) == (("a", "b"), None)
    assert (whole.text, whole.response, whole.prompt) == (None, "ab", "say ab")
