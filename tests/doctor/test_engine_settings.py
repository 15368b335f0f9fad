"""What the doctor sees of an engine over HTTP, on the recorded answers of a real SGLang."""

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from replay import RECORDED, replayed

from true_on_policy.contract.gpu import gpu_contract
from true_on_policy.contract.settings import OF_SERVER
from true_on_policy.doctor import engine_http
from true_on_policy.doctor.diagnosis import diagnose
from true_on_policy.doctor.engine_http import (
    ALONE,
    LOG_SOFTMAX,
    LONGEST,
    PREFILLED,
    PROBED,
    REFUSED,
    SCORED,
    SEEDS,
    observe_engine,
)
from true_on_policy.engines.protocol import sglang_rows
from true_on_policy.engines.server import free_port
from true_on_policy.observe.process import ALL


def test_a_pinned_engine_shows_that_it_is_invariant() -> None:
    with replayed("pinned") as url:
        seen = observe_engine(url + "/")
    equal = dict.fromkeys((ALONE, PREFILLED, SCORED), "equal")
    assert {row: seen.settings[row] for row in PROBED} == equal | {SEEDS: "one each", LOG_SOFTMAX: "fp32"}
    told = {"SGLang": "0.5.23", "device": "cpu", "tensor parallel": "1", "attention": "torch_native"}
    told |= {"deterministic inference": "on", "radix cache": "on", "torch.compile": "off"}
    told |= {"CUDA graph": "decode disabled, prefill disabled"}
    assert told.items() <= seen.settings.items()
    assert seen.unseen == {}
    assert {row for row in seen.settings if seen.how(row) == "observed"} == {*PROBED, "SGLang"}


def test_a_stock_engine_shows_that_it_is_not() -> None:
    """Its flag is off as well, but what is judged are its log-probs."""
    with replayed("stock", {"enable_deterministic_inference": True}) as url:
        seen = observe_engine(url)
    assert "log-probs differ" in seen.settings[ALONE] and "log-probs differ" in seen.settings[SCORED]
    assert seen.settings[SEEDS] == "without effect"
    assert seen.settings["deterministic inference"] == "on"


def test_a_prefill_that_depends_on_its_batch_is_seen() -> None:
    """The recorded stock engine's does not, on CPU at these sizes; one token of a batch is another number here."""
    answers = deepcopy(RECORDED["pinned"]["generate"])
    (batch,) = [answer for asked, answer in answers if len(answer) > 1 and "logprob_start_len" in asked]
    batch[-1]["meta_info"]["input_token_logprobs"][1][0] *= 1 + 2**-20
    with replayed("pinned", answers=answers) as url:
        seen = observe_engine(url).settings
    assert (seen[PREFILLED], seen[ALONE], seen[SCORED]) == ("1 of 55 log-probs differ", "equal", "equal")


@pytest.mark.parametrize(
    ("said", "name", "value"),
    [
        ({}, "contract", "not in this release"),
        ({"true_on_policy_contract": "qwen3_v1"}, "contract", "qwen3_v1"),
        ({"attention_backend": "fa3", "decode_attention_backend": "flashinfer"}, "attention", "fa3 and flashinfer"),
    ],
)
def test_the_contract_and_both_attention_kernels_are_named(said: dict[str, str], name: str, value: str) -> None:
    with replayed("pinned", said) as url:
        assert observe_engine(url).settings[name] == value


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"dtype": "bfloat16"}, "none"),
        ({"dtype": "auto", "enable_mixed_chunk": True}, "enable_mixed_chunk=True"),
        ({"dtype": "auto", "attn_cp_size": 2, "enable_lora": True}, "enable_lora=True, attn_cp_size=2"),
    ],
)
def test_the_arguments_that_a_launch_may_not_have_are_asked_of_a_server_that_runs(
    given: dict[str, Any], refused: str
) -> None:
    """Nobody has checked the flags of an engine that a host did not start."""
    with replayed("pinned", given) as url:
        seen = observe_engine(url)
    assert seen.settings[REFUSED] == refused and seen.how(REFUSED) == "configured"
    row = next(
        row for row in diagnose(gpu_contract("qwen3-dense", "megatron"), seen, seen) if row.check.name == REFUSED
    )
    assert row.verdict == ("green" if refused == "none" else "red")


def test_a_renamed_setting_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OF_SERVER, "KV cache", "kv_cache_kind")
    with replayed("pinned") as url:
        seen = observe_engine(url)
    assert seen.why("KV cache") == "/server_info tells no kv_cache_kind" and "KV cache" not in seen.settings


def test_an_engine_that_fails_a_request_is_told_but_not_probed() -> None:
    with replayed("pinned", broken="/generate") as url:
        seen = observe_engine(url)
    assert seen.settings["SGLang"] == "0.5.23"
    for row in PROBED:
        assert row not in seen.settings and "/generate answered 500: out of memory" in seen.why(row)


def test_an_answer_to_an_earlier_request_is_not_believed() -> None:
    with replayed("pinned", named=-1) as url:
        assert observe_engine(url).unseen == {}
    with replayed("pinned", named=0) as url:
        seen = observe_engine(url)
    for row in PROBED:
        assert row not in seen.settings and "the answer to another request" in seen.why(row)


def test_an_engine_that_does_not_answer_is_not_seen_at_all() -> None:
    seen = observe_engine(f"http://127.0.0.1:{free_port()}")
    assert seen.settings == {} and "refused" in seen.why("SGLang") and ALL in seen.unseen


def test_a_server_of_something_else_is_not_seen() -> None:
    with replayed("pinned", {}) as url, pytest.MonkeyPatch.context() as patch:
        patch.delitem(RECORDED["pinned"]["server_info"], "version")
        assert "not an answer of SGLang" in observe_engine(url).why("SGLang")


@pytest.mark.parametrize(
    ("answers", "found"),
    [(([1], [1], [2]), "without effect"), (([1], [1], [1]), "one for all"), (([1], [2], [1]), "one each")],
)
def test_what_seeds_decide(answers: tuple, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replies = iter(answers)
    monkeypatch.setattr(engine_http, "_generate", lambda *_, **__: [(tuple(next(replies)), None)])
    assert engine_http._seeds("") == found


@pytest.mark.parametrize(
    ("values", "found"),
    [((-1.5, -0.00390625), "bf16"), ((-1.5, -1 - 2**-20), "fp32"), ((-0.0,), "bf16"), ((-1.5 - 2**-8,), "fp32")],
)
def test_a_log_prob_tells_what_it_was_rounded_to(values: tuple[float, ...], found: str) -> None:
    _, log_probs = sglang_rows([[value, 7, None] for value in values])
    assert engine_http._dtype(log_probs) == found


def test_log_probs_in_their_fewest_digits_are_read() -> None:
    values = -torch.rand(99, generator=torch.Generator().manual_seed(0)).exp()
    rows = [[float(str(value)), 7, None] for value in values.numpy()]
    assert any(row[0] != float(value) for row, value in zip(rows, values, strict=True))
    assert torch.equal(sglang_rows(rows)[1], values)


def test_bits_decide_not_numbers() -> None:
    rows = [[0.0, 7, None]]
    a, b = (sglang_rows([[value, 7, None]]) for value in (0.0, -0.0))
    assert engine_http._compared(a, b) == "1 of 1 log-probs differ"
    assert engine_http._compared(a, sglang_rows(rows)) == "equal"
    assert engine_http._compared(a, sglang_rows([[0.0, 8, None]])) == "other tokens"


Change = Callable[[Any], Any]


def each_log_prob(value: Any) -> Change:
    """Every log-prob of every answer becomes `value`."""
    return lambda answers: changed_rows(answers, lambda rows: [[value, *row[1:]] for row in rows])


def each_token(value: Any) -> Change:
    return lambda answers: changed_rows(answers, lambda rows: [[row[0], value, *row[2:]] for row in rows])


def changed_rows(answers: Any, change: Change) -> Any:
    return [{"meta_info": {name: change(rows) for name, rows in answer["meta_info"].items()}} for answer in answers]


def written(digits: str) -> Change:
    short = lambda row: [row[0] and float(format(row[0], digits)), *row[1:]]  # noqa: E731
    return lambda answers: changed_rows(answers, lambda rows: [*map(short, rows)])


def beside(**told: Any) -> Change:
    """Every answer states `told` beside its log-probs."""
    return lambda answers: [{"meta_info": answer["meta_info"] | told} for answer in answers]


LIES: dict[str, Change] = {
    "no answers": lambda answers: [],
    "one answer too many": lambda answers: [*answers, answers[0]],
    "eight answers to a prompt": lambda answers: answers * 8 if len(answers) == 1 else answers,
    "one answer": lambda answers: answers[:1],
    "a dict": lambda answers: {"0": answers},
    "null": lambda answers: None,
    "a text": lambda answers: "equal",
    "answers of null": lambda answers: [None for _ in answers],
    "no tokens": lambda answers: changed_rows(answers, lambda rows: []),
    "one of sixteen": lambda answers: changed_rows(answers, lambda rows: rows[:1]),
    "one token more": lambda answers: changed_rows(answers, lambda rows: [*rows, *rows[-1:]]),
    "rows of null": lambda answers: changed_rows(answers, lambda rows: [None for _ in rows]),
    "rows without tokens": lambda answers: changed_rows(answers, lambda rows: [row[:1] for row in rows]),
    "log-probs of null": each_log_prob(None),
    "log-probs of NaN": each_log_prob(math.nan),
    "log-probs of infinity": each_log_prob(-math.inf),
    "log-probs above 0": each_log_prob(0.5),
    "one log-prob for all": each_log_prob(-0.5),
    "log-probs in words": each_log_prob("-0.5"),
    "log-probs that are true": each_log_prob(True),
    "log-probs of many digits": each_log_prob(-(10**4000)),
    "log-probs of four decimals": written(".4f"),
    "log-probs of six decimals": written(".6f"),
    "log-probs of six digits": written(".6g"),
    "log-probs of seven digits": written(".7g"),
    "tokens in words": each_token("7"),
    "tokens that are true": each_token(True),
    "tokens below 0": each_token(-1),
    "tokens of many digits": each_token(10**4000),
    "an answer to a shorter prompt": beside(prompt_tokens=3),
    "fewer tokens than it says": beside(completion_tokens=17),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_was_not_answered_is_not_compared(lie: str) -> None:
    answers = [(asked, LIES[lie](deepcopy(answer))) for asked, answer in RECORDED["pinned"]["generate"]]
    with replayed("pinned", answers=answers) as url:
        seen = observe_engine(url)
    assert seen.settings["SGLang"] == "0.5.23"
    for row in PROBED:
        assert row not in seen.settings and seen.why(row).startswith("could not compare: ")


def test_scores_of_other_tokens_than_were_asked_for_are_not_compared() -> None:
    answers = deepcopy(RECORDED["pinned"]["generate"])
    for asked, answer in answers:
        if "logprob_start_len" in asked:
            answer[-1]["meta_info"]["input_token_logprobs"][5][1] += 1
    with replayed("pinned", answers=answers) as url:
        assert "other tokens than were asked for" in observe_engine(url).why(SCORED)


@pytest.mark.parametrize(
    "told", [{"cuda_graph_config": {"decode": 3}}, {"device": ["cuda"]}, {"attention_backend": {}}, {"version": []}]
)
def test_settings_of_another_shape_are_not_seen(told: dict) -> None:
    with replayed("pinned", told) as url:
        seen = observe_engine(url)
    assert not seen.settings and seen.why("device").startswith(f"{url}/server_info: ")


def test_a_setting_without_end_is_cut() -> None:
    with replayed("pinned", {"cuda_graph_config": {"decode" * 10_000: {"backend": "full"}}}) as url:
        assert len(observe_engine(url).settings["CUDA graph"]) == LONGEST
