"""Versions of tokens inside slime: from the answers of its calls to the notes that travel to the trainer.

The host's modules are stand-ins with the signatures of slime 624b824; `scripts/run-in-host.sh rows slime-fully-async`
runs its own.
"""

import asyncio
import copy
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import pytest
import stand_ins
from rollout_process import Sample

from mis_plugins import mis
from mis_plugins.errors import ConfigError, InputError
from mis_plugins.hosts.versions import rollouts
from mis_plugins.hosts.versions.rollouts import Numbering
from mis_plugins.hosts.versions.samples import Note

pytestmark = pytest.mark.usefixtures("numbering")

CONFIG = {"mis": {"segment_wise": {}}}


def engine(monkeypatch: pytest.MonkeyPatch, *calls: Sequence[tuple[int, int]]) -> None:
    """slime's generate: call i answers with tokens of `calls[i]`, pairs of a version and a count."""
    left = list(calls)

    async def own(args: Any, sample: Any, sampling_params: Any) -> Any:
        if not sample.tokens:
            sample.tokens = [7, 8]
        runs, at, spans = left.pop(0), 0, []
        for version, count in runs:
            spans.append({"version": str(version), "start": at, "end": at + count})
            at += count
        first = sample.response_length
        meta = {"weight_versions": spans} if runs else {}
        sample.append_response_tokens(
            args, tokens=list(range(first, first + at)), log_probs=[-1.0] * at, meta_info=meta
        )
        return sample

    stand_ins.load({"slime.rollout.sglang_rollout": {"generate": own}}, monkeypatch)


def drawn(monkeypatch: pytest.MonkeyPatch, *calls: Sequence[tuple[int, int]], index: int = 0) -> Any:
    """A sample whose response was written in these calls."""
    engine(monkeypatch, *calls)
    sample = Sample(index)
    for _ in calls:
        assert asyncio.run(mis.generate_with_versions(Namespace(), sample, {}, evaluation=False)) is sample
    return sample


def test_versions_of_a_continued_response_stand_on_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = drawn(monkeypatch, [(1, 2)], [], [(2, 1), (3, 2)])  # aborted, aborted before a token, finished
    assert sample.output_versions == [1, 1, 2, 3, 3]
    assert "append_response_tokens" not in vars(sample), "the host hands samples to other processes"
    (request,) = rollouts.waiting(1, -1).requests
    assert request.tokens == (7, 8, 0, 1) and request.positions == (0, 1)
    (request,) = rollouts.waiting(3, -1).requests
    assert request.tokens == (7, 8, 0, 1, 2, 3, 4) and request.positions == (3, 4)


def test_a_response_that_begins_anew_leaves_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = drawn(monkeypatch, [(1, 2)])
    sample.tokens, sample.response_length = [], 0
    engine(monkeypatch, [(2, 3)])
    asyncio.run(mis.generate_with_versions(Namespace(), sample, {}))
    assert sample.output_versions == [2, 2, 2]
    assert not rollouts.waiting(1, -1).requests and len(rollouts.waiting(2, -1).requests) == 1


def test_an_evaluation_is_the_hosts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    engine(monkeypatch, [(1, 2)])
    sample = asyncio.run(mis.generate_with_versions(Namespace(), Sample(), {}, evaluation=True))
    assert sample.response_length == 2 and not hasattr(sample, "output_versions")


@pytest.mark.parametrize(
    ("meta", "message"), [({"weight_version": "3"}, "meta_info: no weight_versions"), (None, ".*Error")]
)
def test_an_answer_without_spans_is_refused(meta: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the conversion: slime logs what is raised here, and waits."""

    async def own(args: Any, sample: Any, sampling_params: Any) -> None:
        sample.append_response_tokens(args, tokens=[1], log_probs=[-1.0], meta_info=meta)

    stand_ins.load({"slime.rollout.sglang_rollout": {"generate": own}}, monkeypatch)
    sample = asyncio.run(mis.generate_with_versions(Namespace(), Sample(3), {}))
    with pytest.raises(InputError, match=f"sample 3: {message}"):
        manager(monkeypatch, **CONFIG)._convert_samples_to_train_data([sample])


MANAGER = """
class RolloutManager:
    def __init__(self, args, hook):
        self.args, self.custom_convert_samples_to_train_data_func = args, hook

    def _convert_samples_to_train_data(self, samples):
        if self.custom_convert_samples_to_train_data_func is not None:
            return self.custom_convert_samples_to_train_data_func(self.args, samples)
        return {"tokens": [sample.tokens for sample in samples], "source_names": ["gsm8k"] * len(samples)}
"""


def manager(monkeypatch: pytest.MonkeyPatch, **args: Any) -> Any:
    tracking = "slime.observability.logging_utils"  # by which a process is known to be slime's
    stand_ins.load({tracking: {}, "slime.ray.rollout": {"__name__": "slime.ray.rollout"}}, monkeypatch)
    module = vars(sys.modules["slime.ray.rollout"])
    exec(MANAGER, module)
    return module["RolloutManager"](Namespace(**args), mis.convert_with_versions)


def test_train_data_is_the_hosts_own_with_a_note_of_each_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [drawn(monkeypatch, [(1, 1)], [(2, 1)]), drawn(monkeypatch, [(2, 3)])]
    rollouts = manager(monkeypatch, **CONFIG)
    for batch in range(2):
        data = rollouts._convert_samples_to_train_data(samples)
        assert data["tokens"] == [sample.tokens for sample in samples]
        notes = [Note.of(packed, "source_names") for packed in data["source_names"]]
        assert [note.versions for note in notes] == [[1, 2], [2, 2, 2]]
        assert {note.batch for note in notes} == {batch}, "the hook is called for the next rollout too"


def test_a_conversion_out_of_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = manager(monkeypatch)
    with pytest.raises(ConfigError, match="not called by slime's RolloutManager"):
        mis.convert_with_versions(rollouts.args, [])


@pytest.mark.parametrize("method", ["recompute", "loglinear"])
def test_images_are_refused_where_tokens_are_scored_again(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = drawn(monkeypatch, [(1, 1)], index=4)
    sample.multimodal_train_inputs = {"pixel_values": 0}
    rollouts = manager(monkeypatch, mis={"segment_wise": {"method": method}}, loss_type="custom_loss")
    if method == "loglinear":
        assert rollouts._convert_samples_to_train_data([sample])["source_names"]
        return
    with pytest.raises(InputError, match="sample 4: multimodal_train_inputs.*method: loglinear"):
        rollouts._convert_samples_to_train_data([sample])


def test_a_number_of_another_process_is_no_ones_here(monkeypatch: pytest.MonkeyPatch, numbering: Numbering) -> None:
    ours = drawn(monkeypatch, [(1, 2)])
    theirs = Sample(5)
    theirs.tokens, theirs.response_length = [9, 4], 1
    theirs.response_number, theirs.output_versions = ours.response_number, [1]
    assert numbering.known(ours) and not numbering.known(theirs)
    engine(monkeypatch, [(1, 1)])
    asyncio.run(mis.generate_with_versions(Namespace(), theirs, {}))
    found = {request.tokens for request in rollouts.waiting(1, -1).requests}
    assert found == {(7, 8, 0, 1), (9, 4, 1)}, "theirs begins here, with what it had"
    assert theirs.output_versions == [1, 1]


@pytest.mark.parametrize("scored", [True, False])
def test_the_shelf_forgets_what_nobody_asks_for(
    scored: bool, monkeypatch: pytest.MonkeyPatch, numbering: Numbering
) -> None:
    sample = drawn(monkeypatch, [(1, 2)])
    numbering.noted([sample], scored)
    assert bool(rollouts.waiting(1, -1).alive) == scored


def test_copies_are_noted_without_a_number(monkeypatch: pytest.MonkeyPatch, numbering: Numbering) -> None:
    sample = drawn(monkeypatch, [(1, 2)])
    (packed,) = numbering.noted([copy.copy(sample)], scored=True)
    assert Note.of(packed, "source_names").number == -1, "what is scored is the sample's, not its copy's"
