"""Kept sets on Miles: asked of SGLang by our generate function, carried to the trainer, and scored over there."""

import math
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import stand_in_hosts
import torch
from rollout_process import generated_by_miles, streamed
from stand_in_hosts import LAYOUTS, VOCABULARY

from mis_plugins.errors import ConfigError, InputError
from mis_plugins.hosts.adapters.miles import HOST
from mis_plugins.hosts.host import HEAD_IDS
from mis_plugins.hosts.versions import heads, kept
from mis_plugins.hosts.versions.kept import KEPT, KeptScoring, KeptSets, columns
from mis_plugins.hosts.versions.rollouts import Numbering
from mis_plugins.hosts.versions.samples import Note

pytestmark = pytest.mark.usefixtures("numbering")

SETS = [[4, 1, 6], [2], [0, 7]]  # of each token of a response
TOKENS = [1, 2, 7]
CUT = {"rollout_top_p": 0.9, "rollout_top_k": 4}
CENTER = {"center": {"top_k": 3}, "weight": None, "objective": {"old": "behavior", "surrogate": "reinforce"}}


def support(ids: Sequence[int]) -> list[float]:
    """Log-probs over a kept set, the last token the likeliest."""
    total = math.log(sum(range(1, len(ids) + 1)))
    return [math.log(place + 1) - total for place in range(len(ids))]


# ------------------------------------------------------------------------------------------------------- the engine


def stream(payload: Any, without: str = "") -> AsyncIterator[dict[str, Any]]:
    """Three tokens in two chunks, with what a request may ask for beside them."""
    whole = [support(ids) for ids in SETS]
    chosen = [row[ids.index(token)] for row, ids, token in zip(whole, SETS, TOKENS, strict=True)]
    values = whole if payload.get("sampling_logprobs_mode") == "support" else chosen
    asked = {kept.MASK: SETS, kept.LOG_PROBS: values} if payload.get("return_sampling_mask") else {}
    asked.pop(without, None)
    return streamed([[-9.0, token, None] for token in TOKENS], [1, 3], [3] * 3, **asked)


@pytest.mark.parametrize("centers", [False, True])
def test_a_sample_has_log_probs_over_its_kept_sets(
    centers: bool, numbering: Numbering, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = generated_by_miles(monkeypatch, stream, **CUT, mis=CENTER if centers else {})
    rows = [(support(ids), ids) for ids in SETS]
    expected = [row[ids.index(token)] for (row, ids), token in zip(rows, TOKENS, strict=True)]
    assert sample.rollout_log_probs == expected and sample.tokens[-3:] == TOKENS
    (packed,) = numbering.noted([sample], scored=False, needed={KEPT: "--rollout-top-k"})
    note = Note.of(packed, "notes")
    found = KeptSets.of(note.more)
    assert (found.ids.tolist(), found.sizes.tolist()) == ([4, 1, 6, 2, 0, 7], [3, 1, 2])
    named = heads.unpacked(note.more, 3)
    assert list(named) == ([HEAD_IDS, "rollout_topk_log_probs"] if centers else [])
    if centers:  # the whole set, the likeliest first
        assert named[HEAD_IDS].tolist() == [[6, 1, 4], [2, -1, -1], [7, 0, -1]]
        assert torch.allclose(named["rollout_topk_log_probs"].exp().sum(-1), torch.ones(3))


def test_jobs_that_do_not_cut_ask_for_no_sets_and_none_travels(
    numbering: Numbering, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = generated_by_miles(monkeypatch, stream, index=4, rollout_top_p=1.0, rollout_top_k=-1)
    assert sample.rollout_log_probs == [-9.0] * 3 and not hasattr(sample, KEPT)
    with pytest.raises(InputError, match="sample 4: no output_kept, which --rollout-top-k reads"):
        numbering.noted([sample], scored=False, needed={KEPT: "--rollout-top-k"})


@pytest.mark.parametrize("lost", [kept.MASK, kept.LOG_PROBS])
def test_an_engine_that_returns_no_sets_is_refused(
    lost: str, numbering: Numbering, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = generated_by_miles(monkeypatch, partial(stream, without=lost), index=4, **CUT)
    with pytest.raises(InputError, match="sample 4: .*return_sampling_mask"):
        numbering.noted([sample], scored=False, needed={})


def test_a_set_without_its_token_is_refused() -> None:
    meta = {"output_token_logprobs": [[-1.0, 5]], kept.MASK: [[4, 6]], kept.LOG_PROBS: [-1.0]}
    with pytest.raises(InputError, match="lacks the token 5 that was sampled at 0"):
        kept.over_sets(meta, 0)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"rollout_top_p": 0.9, "rollout_top_k": -1}, "rollout_top_p: 0.9 with rollout_top_k: -1"),
        ({"rollout_top_p": None, "rollout_top_k": None}, "rollout_top_p: None with rollout_top_k: None"),
        ({**CUT, kept.LIMIT: 3}, "rollout_top_k: 4, and SGLang returns 3 tokens at most"),
    ],
)
def test_sets_that_sglang_would_not_return_are_refused(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        kept.asked(Namespace(**args))


# ------------------------------------------------------------------------------------------------------ the trainer


def over(logits: torch.Tensor, ids: Sequence[int], token: int) -> float:
    """The log-prob of a token over a set of the vocabulary, in float64; an empty set is all of it."""
    mass = sum(math.exp(logits[v]) for v in ids or range(len(logits)))
    return float(logits[token]) - math.log(mass)


@pytest.fixture
def scoring(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, KeptScoring]:
    """The host's two functions with ours around them: whole sequences, and a log-softmax that writes on its input."""

    def get_responses(logits: Any, *, args: Any, unconcat_tokens: Any, response_lengths: Any, **_: Any) -> Any:
        end = 0
        for tokens, n in zip(unconcat_tokens, response_lengths, strict=True):
            end += len(tokens)
            yield logits[0, end - n - 1 : end - 1], tokens[len(tokens) - n :]

    def calculate(logits: Any, tokens: Any, group: Any, with_entropy: bool = False, **_: Any) -> Any:
        log_probs = logits.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1) if with_entropy else None
        return log_probs.gather(1, tokens[:, None])[:, 0], entropy

    stand_in_hosts.load(LAYOUTS["August"], monkeypatch)
    module, _ = HOST.needs.responses.owner()
    module.get_responses, module.calculate_log_probs_and_entropy = get_responses, calculate
    own = KeptScoring(HOST)
    own.install()
    return module, own


def scored(module: Any, logits: torch.Tensor, data: dict[str, Any], **more: Any) -> list[Any]:
    chunks = module.get_responses(logits, args=Namespace(qkv_format="thd"), **data)
    return [module.calculate_log_probs_and_entropy(rows, tokens, None, **more) for rows, tokens in chunks]


def test_the_trainer_scores_over_the_kept_sets(scoring: tuple[Any, KeptScoring]) -> None:
    module, own = scoring
    sequences = [torch.tensor([5, *TOKENS]), torch.tensor([3, 3, 6])]
    sets = [SETS, [[]]]  # a tool wrote the last token of the second sequence
    data = {"unconcat_tokens": sequences, "total_lengths": [4, 3], "response_lengths": [3, 1]}
    own.take(sequences, [told(rows) for rows in sets])
    logits = torch.randn(1, 7, VOCABULARY, dtype=torch.float64, requires_grad=True)
    found = scored(module, logits, data, with_entropy=True)
    rows = [logits[0, 0:3].detach(), logits[0, 5:6].detach()]
    for (log_probs, entropy), row, tokens, kept_of in zip(found, rows, ([*TOKENS], [6]), sets, strict=True):
        expected = [over(z, ids, token) for z, ids, token in zip(row, kept_of, tokens, strict=True)]
        assert log_probs.tolist() == pytest.approx(expected, rel=1e-12)
        whole = row.log_softmax(-1)
        assert torch.allclose(entropy, -(whole.exp() * whole).sum(-1)), "of the whole vocabulary"
    torch.cat([log_probs for log_probs, _ in found]).sum().backward()
    assert logits.grad is not None and (logits.grad[0, 1] == 0).all(), "a set of one token has no gradient"
    assert logits.grad[0, 0].nonzero().flatten().tolist() == sorted(SETS[0])


def told(sets: Sequence[Sequence[int]]) -> KeptSets:
    ids, sizes = [v for row in sets for v in row], [*map(len, sets)]
    return KeptSets(np.array(ids, np.int32), np.array(sizes, np.int32))


def test_a_share_of_the_vocabulary_and_of_a_response_has_its_part_of_the_sets() -> None:
    """Pieces of a response as context parallelism cuts them, and the second half of the vocabulary."""
    table = columns(told([*SETS, []]), [(0, 1), (2, 4)], 4, torch.zeros(3, 4))
    assert [row.nonzero().flatten().tolist() for row in table] == [[0, 2], [3], [0, 1, 2, 3]]
    with pytest.raises(InputError, match="kept sets of 3 tokens of a response, and logits score 2"):
        columns(told([*SETS, []]), [(0, 1), (2, 4)], 4, torch.zeros(2, 4))


@pytest.mark.parametrize(("rank", "own_part"), [(0, [[1], [2], [0]]), (1, [[0, 2], [], [3]])])
def test_a_rank_of_tensor_parallelism_scores_its_own_part(
    rank: int, own_part: list[list[int]], scoring: tuple[Any, KeptScoring], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, own = scoring
    own.host = cast(Any, Namespace(parallel=lambda: (Namespace(tp=Namespace(rank=lambda: rank)), HOST.parallel()[1])))
    own.take([sequence := torch.tensor([5, 0, 0, 0])], [told(SETS)])
    logits, tables = torch.zeros(1, 4, VOCABULARY // 2), []
    monkeypatch.setattr(kept, "columns", lambda *given: tables.append(columns(*given)) or tables[-1])
    scored(module, logits, {"unconcat_tokens": [sequence], "total_lengths": [4], "response_lengths": [3]})
    assert [row.nonzero().flatten().tolist() for row in tables[0]] == own_part


def test_a_sequence_without_sets_is_refused(scoring: tuple[Any, KeptScoring]) -> None:
    data = {"unconcat_tokens": [torch.tensor([5, 1])], "total_lengths": [2], "response_lengths": [1]}
    with pytest.raises(InputError, match="the trainer has no kept sets of it"):
        scored(scoring[0], torch.zeros(1, 2, VOCABULARY), data)


# ---------------------------------------------------------------------------------------------------- who is served


FLAGS = {"custom_generate_function_path": "mis_plugins.mis.generate_with_versions",
         "custom_convert_samples_to_train_data_path": "mis_plugins.mis.convert_with_versions",
         "custom_megatron_init_path": "mis_plugins.mis.carry_versions"}  # fmt: skip


@pytest.mark.parametrize("lost", ["", "rollout_top_k", *FLAGS])
def test_miles_hands_kept_sets_on_by_all_of_our_hooks(lost: str) -> None:
    given = {name: value for name, value in (CUT | FLAGS).items() if name != lost}
    assert HOST.kept_set(given) == (lost == "")
