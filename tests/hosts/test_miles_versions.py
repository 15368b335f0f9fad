"""Versions of tokens inside Miles: from a stream of the engine to the micro-batch of the loss hook.

The host's modules are stand-ins with the signatures of Miles 31f1ca9; `scripts/run-in-host.sh rows miles-fully-async`
runs its own.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import rollout_process
import stand_ins
import torch
from rollout_process import DataIterator, get_batch, log_prob, scored

from mis_plugins.errors import ConfigError, InputError
from mis_plugins.hosts import loss_batch
from mis_plugins.hosts.needs.miles import NEEDS
from mis_plugins.hosts.registry import every_host
from mis_plugins.hosts.versions import carrying, generate, rollouts, scores
from mis_plugins.hosts.versions.samples import Note, Numbering
from mis_plugins.hosts.versions.scores import Scores, Trainer, shares
from mis_plugins.hosts.versions.shelf import Shelf
from mis_plugins.versions.recompute import Request


class Sample:
    def __init__(self, index: int = 0) -> None:
        self.index, self.prompt, self.multimodal_inputs = index, (7, 8), None
        self.tokens: list[int] = []
        self.response_length, self.rollout_log_probs, self.weight_versions = 0, [], []


KEY = NEEDS.notes


def shelf(numbering: Numbering) -> Shelf:
    assert isinstance(numbering.shelf, Shelf)
    return numbering.shelf


class HTTPError(Exception):
    pass


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Numbering]:
    """A shelf of this test's own, and modules of the host and its client."""
    stand_ins.load({"httpx": {"HTTPError": HTTPError, "RemoteProtocolError": HTTPError}}, monkeypatch)
    monkeypatch.setattr(generate, "PAUSE_S", 0.0)
    with rollout_process.fresh(monkeypatch) as own:
        yield own


def test_a_note_tells_what_was_packed() -> None:
    note = Note(3, 9, [1, 1, 2, -1, -1, 2])
    assert Note.of(note.packed(), KEY) == note
    assert Note.of(Note(0, 0, []).packed(), KEY) == Note(0, 0, [])


@pytest.mark.parametrize("own", [["1", "2"], [], [1], ["1", 2, 3, 4]])
def test_versions_of_the_host_itself_are_no_note(own: list[Any]) -> None:
    with pytest.raises(InputError, match="convert_with_versions"):
        Note.of(own, KEY)


def test_what_runs_what_waits_and_what_travels_is_scored(fresh: Numbering) -> None:
    running, queued, travelling = Sample(), Sample(), Sample()
    numbers = [fresh.begin(sample, [7]) for sample in (running, queued, travelling)]
    for number in numbers:
        fresh.shelf.say(number, 0, [1, 2, 3], [4, 4, 5])
    fresh.shelf.take(batch := 0, [numbers[2]])
    del travelling
    gc.collect()
    found = shelf(fresh).waiting(4, batch - 1)
    assert {one.number for one in found.requests} == found.alive == set(numbers)
    assert found.requests[0] == Request(found.requests[0].number, (7, 1, 2), (0, 1))
    assert shelf(fresh).waiting(4, batch).alive == {*numbers[:2]}


def test_a_sample_that_the_host_drops_leaves(fresh: Numbering) -> None:
    sample = Sample()
    number = fresh.begin(sample, [7])
    fresh.shelf.say(number, 0, [1], [1])
    del sample
    gc.collect()
    other = fresh.begin(kept := Sample(), [7])
    assert shelf(fresh).waiting(1, -1).alive == {other} and kept is not None
    fresh.shelf.say(number, 1, [2], [1])  # the late token of a call that is cancelled


def test_a_sample_that_is_drawn_again_has_its_new_tokens_alone(fresh: Numbering) -> None:
    sample = Sample()
    fresh.shelf.say(fresh.begin(sample, [7]), 0, [1, 2], [1, 1])
    second = fresh.begin(sample, [7])
    assert shelf(fresh).waiting(1, -1).alive == {second} and not shelf(fresh).waiting(1, -1).requests


def chunks(incremental: bool, finish: str | None = "stop") -> AsyncIterator[dict[str, Any]]:
    """Four tokens: two chunks under version 3, one under 4."""
    rows = [[-0.5, 11], [-0.25, 12], [-1.5, 13], [-2.0, 14]]

    async def told() -> AsyncIterator[dict[str, Any]]:
        for start, stop, version in ((0, 1, "3"), (1, 3, "3"), (3, 4, "4")):
            first = start if incremental else 0
            last = stop == 4 and finish
            meta = {"output_token_logprobs": rows[first:stop], "completion_tokens": stop,
                    "weight_version": version, "finish_reason": {"type": finish} if last else None}  # fmt: skip
            if last:
                meta["weight_versions"] = [
                    {"version": "3", "start": 0, "end": 2},
                    {"version": "4", "start": 2, "end": 4},
                ]
            yield {"text": "abcd"[first:stop], "meta_info": meta}

    return told()


@pytest.mark.parametrize("incremental", [False, True])
def test_a_stream_is_heard_whole(incremental: bool, fresh: Numbering) -> None:
    sample = Sample()
    number = fresh.begin(sample, [7, 8])
    output = asyncio.run(generate.heard(chunks(incremental), number))
    assert output["text"] == "abcd"
    assert [row[1] for row in output["meta_info"]["output_token_logprobs"]] == [11, 12, 13, 14]
    assert shelf(fresh).waiting(3, -1).requests == [Request(number, (7, 8, 11, 12, 13), (0, 1, 2))]


def test_a_chunk_with_too_few_log_probs_is_refused(fresh: Numbering) -> None:
    async def told() -> AsyncIterator[dict[str, Any]]:
        yield {"text": "", "meta_info": {"output_token_logprobs": [[-1.0, 1]], "completion_tokens": 3}}

    with pytest.raises(InputError, match="completion_tokens: 3"):
        asyncio.run(generate.heard(told(), 0))


def test_a_stream_that_breaks_is_asked_for_again(fresh: Numbering) -> None:
    number = fresh.begin(sample := Sample(), [7])
    streams = iter([chunks(False, finish=None), chunks(False)])
    output = asyncio.run(generate.answered(lambda: next(streams), number))
    assert output["text"] == "abcd" and shelf(fresh).waiting(3, -1).requests[0].tokens == (7, 11, 12, 13)
    assert sample is not None


def test_a_response_may_hold_what_other_ends_of_lines_are() -> None:
    text = "a\u0085b\u2028c\u2029d\x0be"
    sent = f"data: {json.dumps({'text': text}, ensure_ascii=False)}\n\ndata: [DONE]\n\n".encode()

    async def parts() -> AsyncIterator[bytes]:
        for i in range(0, len(sent), 7):
            yield sent[i : i + 7]

    async def told() -> list[bytes]:
        return [line async for line in generate.lines(parts()) if line]

    first, last = asyncio.run(told())
    assert json.loads(first.removeprefix(b"data:")) == {"text": text} and last == b"data: [DONE]"


@dataclass(frozen=True)
class Output:
    samples: Any


def host_of_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def update(args: Any, sample: Any, payload: Any, output: Any) -> None:
        rows = output["meta_info"]["output_token_logprobs"]
        sample.tokens = [*payload["input_ids"], *(row[1] for row in rows)]
        sample.response_length = len(rows)
        sample.rollout_log_probs = [row[0] for row in rows]
        sample.weight_versions.append(output["meta_info"]["weight_version"])

    async def own(input: Any) -> Output:
        return Output("the host's own")

    made = {
        "miles.rollout.generate_hub.single_turn": {"generate": own},
        "miles.rollout.generate_utils.generate_endpoint_utils": {
            "compute_prompt_ids_from_sample": lambda state, sample: list(sample.prompt),
            "compute_request_payload": lambda args, **more: ({"input_ids": more["input_ids"]}, None),
            "compute_routing_headers": lambda args, sample: None,
            "update_sample_from_response": update,
        },
    }
    stand_ins.load(made, monkeypatch)
    monkeypatch.setattr(generate, "_stream", lambda url, payload, headers: chunks(True))


def asked(sample: Any, evaluation: bool = False) -> Namespace:
    args = Namespace(sglang_router_ip="127.0.0.1", sglang_router_port=1)
    return Namespace(args=args, sample=sample, state=None, sampling_params={}, evaluation=evaluation)


def test_the_versions_of_the_engine_stand_on_the_sample(
    monkeypatch: pytest.MonkeyPatch, fresh: Numbering
) -> None:
    host_of_rollouts(monkeypatch)
    sample = asyncio.run(generate.miles(asked(Sample()))).samples
    assert sample.output_versions == [3, 3, 4, 4]  # the last chunk of version 3 held a token of version 4
    assert sample.weight_versions == ["3", "4"]
    assert shelf(fresh).waiting(3, -1).requests[0].positions == (0, 1)
    assert asyncio.run(generate.miles(asked(Sample(), evaluation=True))) == Output("the host's own")


def converted(samples: Sequence[Any], monkeypatch: pytest.MonkeyPatch, **args: Any) -> dict[str, Any]:
    def own(args: Any, samples: Any, metadata: Any, custom: Any, rewards: Any) -> dict[str, Any]:
        assert metadata == {} and custom is None and rewards is json.loads
        return {"tokens": [sample.tokens for sample in samples], "weight_versions": [["5"]] * len(samples)}

    conversion = {"miles.ray.rollout.train_data_conversion": {"convert_samples_to_train_data": own}}
    stand_ins.load(conversion, monkeypatch)
    given = Namespace(custom_reward_post_process_path="json.loads", **args)
    return rollouts.convert(given, samples, NEEDS)


def drawn(own: Numbering, versions: Sequence[int], index: int = 0) -> Any:
    sample: Any = Sample(index)
    number = own.begin(sample, sample.prompt)
    sample.response_length, sample.output_versions = len(versions), list(versions)
    sample.tokens = [*sample.prompt, *range(len(versions))]
    own.shelf.say(number, 0, list(range(len(versions))), versions)
    return sample


def test_train_data_holds_a_note_of_each_sample(monkeypatch: pytest.MonkeyPatch, fresh: Numbering) -> None:
    samples = [drawn(fresh, [1, 2]), drawn(fresh, [2, 2, 2])]
    data = converted(samples, monkeypatch)
    assert [Note.of(packed, KEY) for packed in data["weight_versions"]] == [
        Note(0, samples[0].response_number, [1, 2]),
        Note(0, samples[1].response_number, [2, 2, 2]),
    ]


def test_a_sample_of_another_generate_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="sample 0: no output_versions; generate with --custom-generate"):
        converted([Sample()], monkeypatch)


def test_a_response_that_was_cut_is_refused(monkeypatch: pytest.MonkeyPatch, fresh: Numbering) -> None:
    sample = drawn(fresh, [1, 2])
    sample.response_length = 1
    with pytest.raises(InputError, match="output_versions of 2 tokens, and the response has 1"):
        converted([sample], monkeypatch)


@pytest.mark.parametrize("flag", ["use_dynamic_global_batch_size", "multi_lora"])
def test_what_the_conversion_is_not_handed_is_refused(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--" + flag.replace("_", "-")):
        converted([], monkeypatch, **{flag: True})


@pytest.mark.parametrize(("ranks", "multiple"), [(1, 1), (2, 1), (3, 2)])
def test_ranks_score_equally_many_micro_batches(ranks: int, multiple: int) -> None:
    requests = [Request(i, (0,) * length, (0,)) for i, length in enumerate((9, 7, 5, 5, 3, 1))]
    planned = shares(requests, 10, ranks, multiple)
    counts = {len(share) for share in planned}
    assert len(planned) == ranks and len(counts) == 1 and counts.pop() % multiple == 0
    scored = {one.number for share in planned for batch in share for one in batch}
    assert scored == set(range(6))
    assert all(sum(len(one.tokens) for one in batch) <= 10 for share in planned for batch in share)


def test_only_the_version_after_a_tokens_own_counts() -> None:
    kept = Scores()
    kept.add(
        2, {5: ((0, 1), torch.tensor([-1.0, -2.0]))}
    )  # token 1 was heard of as of version 1, and is of 2
    kept.add(3, {5: ((1, 4), torch.tensor([-3.0, -9.0]))})  # token 4 was of a stream that broke
    written = kept.written(Note(0, 5, [1, 2, 3]), 4)
    assert written.recomputed[:2].tolist() == [-1.0, -3.0] and written.recomputed[2].isnan()
    kept.keep(frozenset())
    assert kept.written(Note(0, 5, [1, 2, 3]), 4).recomputed.isnan().all()


TRAINER_OF_MILES = Trainer(every_host()["miles"], NEEDS)
CONFIG = {"mis": {"segment_wise": {}}}


def install(args: Any) -> None:
    carrying.install(args, every_host()["miles"])


class Actor:
    """What the carried trainer reads of Miles's: log-probs are a formula of token and version."""

    def __init__(self, own: Numbering, **args: Any) -> None:
        self.args = Namespace(max_tokens_per_gpu=16, qkv_format="thd", **{**CONFIG, **args})
        self.weight_updater, self._active_model_tag = Namespace(weight_version=1), "actor"
        self.passes = 0

    def _set_replay_stage(self, stage: str) -> None:
        assert stage == "fallthrough"

    def compute_log_prob(
        self, iterators: Any, counts: list[int], rollout_id: int, store_prefix: str
    ) -> dict[str, list[torch.Tensor]]:
        self.passes += 1
        return scored(self, iterators, counts, store_prefix)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> type:
    """Modules of the host's trainer on one rank."""

    alone = Namespace(size=1, rank=0, group=None)
    state = Namespace(
        cp=alone, tp=alone, effective_dp=alone, vpp_size=1, microbatch_group_size_per_vp_stage=None
    )
    names = {
        "miles.utils.replay_base": {"all_replay_managers": []},
        "miles.backends.training_utils.parallel": {"get_parallel_state": lambda: state},
        "miles.backends.training_utils.data": {"DataIterator": DataIterator},
        "miles.backends.megatron_utils.actor": {"install": install},
        "miles.backends.megatron_utils.model": {"get_batch": get_batch},
    }
    stand_ins.load(names, monkeypatch)
    monkeypatch.setattr(scores, "dist", rollout_process.alone_in_world())
    actor = vars(sys.modules["miles.backends.megatron_utils.actor"])
    exec(TRAINER, actor)
    return as_ray_runs_it(actor["MegatronTrainRayActor"])


TRAINER = """
class MegatronTrainRayActor:
    def init(self, args, role):
        self.role = role
        install(args)

    def train_actor(self, rollout_id, rollout_data, external_data=None):
        return f"trained {rollout_id}"
"""


def as_ray_runs_it(actor: type) -> type:
    """A subclass with a wrapped copy of each method, as Ray's `_inject_tracing_into_class` sets them."""

    def resumed(method: Any) -> Any:
        return lambda self, *args, **more: method(self, *args, **more)

    methods = {name: resumed(method) for name, method in vars(actor).items() if callable(method)}
    return type("MegatronTrainRayActor", (actor,), methods)


def rollout(own: Numbering, samples: Sequence[Any]) -> dict[str, Any]:
    return rollout_process.rollout(own, samples, KEY)


def test_every_token_is_scored_by_the_version_after_its_own(fresh: Numbering, trainer: Any) -> None:
    """A response that three versions write: it runs while the trainer scores, and travels the last time."""
    actor, carried = Actor(fresh), carrying.Carrying(TRAINER_OF_MILES)
    held = Sample(1)
    number = fresh.begin(held, held.prompt)
    written: list[int] = []
    for version in (1, 2, 3):
        actor.weight_updater.weight_version = version
        other = drawn(fresh, [version])
        carried.before_training(actor, version, rollout(fresh, [other]))
        written += [version, version]
        fresh.shelf.say(number, len(written) - 2, [2 * version, 2 * version + 1], [version] * 2)
    held.tokens, held.response_length = [*held.prompt, *range(2, 8)], 6
    held.output_versions = written  # type: ignore[attr-defined]
    before, data = rollout(fresh, [drawn(fresh, [3])]), rollout(fresh, [held])
    del held
    gc.collect()
    for version, trained in ((4, before), (5, data)):
        actor.weight_updater.weight_version = version
        carried.before_training(actor, version, trained)
    columns = carried.of(data)
    assert columns.version == 5
    (found,) = columns.tokens["recomputed_log_probs"]
    wanted = [log_prob(token, version + 1) for token, version in zip(range(2, 8), written, strict=True)]
    assert found.tolist() == torch.tensor(wanted).tolist()
    assert columns.tokens["output_versions"][0].tolist() == written
    carried.before_training(actor, 6, rollout(fresh, [drawn(fresh, [5])]))
    assert not carried.scores._of, "nothing is remembered of what was trained on before"


def test_a_rollout_that_is_repeated_is_not_scored_again(fresh: Numbering, trainer: Any) -> None:
    actor, carried = Actor(fresh), carrying.Carrying(TRAINER_OF_MILES)
    waiting = drawn(fresh, [1, 1])
    actor.weight_updater.weight_version = 2
    data = rollout(fresh, [drawn(fresh, [2])])
    for _ in range(2):
        carried.before_training(actor, 0, data := dict(data))
    assert actor.passes == 1 and carried.of(data).version == 2
    carried.before_training(actor, 1, rollout(fresh, [drawn(fresh, [2])]))  # the weights did not move on
    assert actor.passes == 1 and waiting is not None


def test_a_repeated_rollout_trains_with_the_columns_of_its_own_samples(
    fresh: Numbering, trainer: Any
) -> None:
    """A rank is lost, and the rollout is split anew: this rank gets another sample, whose scores it still has."""
    actor, carried = Actor(fresh), carrying.Carrying(TRAINER_OF_MILES)
    first, second = drawn(fresh, [1, 1]), drawn(fresh, [1], index=1)
    before, shares = rollout(fresh, [drawn(fresh, [1])]), [rollout(fresh, [one]) for one in (first, second)]
    for version, rollout_id, data in ((2, 0, before), (3, 1, shares[0]), (3, 1, shares[1])):
        actor.weight_updater.weight_version = version
        carried.before_training(actor, rollout_id, data)
    columns = carried.of(shares[1])
    assert columns.tokens["output_versions"][0].tolist() == [1]
    (found,) = columns.tokens["recomputed_log_probs"]
    assert found.tolist() == torch.tensor([log_prob(second.tokens[-1], 2)]).tolist()


def test_a_repeated_rollout_drops_its_old_tokens_again(fresh: Numbering, trainer: Any) -> None:
    actor, carried = (
        Actor(fresh, mis={"segment_wise": {"too_old": "drop"}}),
        carrying.Carrying(TRAINER_OF_MILES),
    )
    actor.weight_updater.weight_version = 4
    data = rollout(fresh, [drawn(fresh, [1, 3, 4])])
    for attempt in (dict(data), dict(data)):
        carried.before_training(actor, 0, attempt)
        assert attempt["loss_masks"][0].tolist() == [0, 1, 1]


@pytest.mark.parametrize("too_old", ["raise", "drop"])
def test_a_token_that_nobody_scored(too_old: str, fresh: Numbering, trainer: Any) -> None:
    actor = Actor(fresh, mis={"segment_wise": {"too_old": too_old}})
    actor.weight_updater.weight_version = 4
    data = rollout(fresh, [drawn(fresh, [1, 3, 4], index=6)])
    carried = carrying.Carrying(TRAINER_OF_MILES)
    if too_old == "raise":
        with pytest.raises(InputError, match="sample 6, token 0: version 1, with the trainer at 4"):
            carried.before_training(actor, 0, data)
        return
    carried.before_training(actor, 0, data)
    assert data["loss_masks"][0].tolist() == [0, 1, 1] and data["loss_masks"][0].dtype == torch.int


@pytest.mark.parametrize("config", [{"method": "loglinear"}, {"enabled": False}])
def test_nothing_is_scored_that_no_weight_reads(
    config: dict[str, Any], fresh: Numbering, trainer: Any
) -> None:
    actor, carried = Actor(fresh, mis={"segment_wise": config}), carrying.Carrying(TRAINER_OF_MILES)
    waiting = drawn(fresh, [1])
    actor.weight_updater.weight_version = 2
    carried.before_training(actor, 0, data := rollout(fresh, [drawn(fresh, [2])]))
    assert actor.passes == 0 and carried.of(data).version == 2 and waiting is not None


def test_the_loss_hook_gets_what_it_reads(fresh: Numbering, trainer: Any) -> None:
    actor = trainer()
    vars(actor).update(vars(Actor(fresh)))
    trainer.compute_log_prob, trainer._set_replay_stage = Actor.compute_log_prob, Actor._set_replay_stage
    actor.init(actor.args, "actor")
    data = rollout(fresh, [drawn(fresh, [1, 1])])
    assert actor.train_actor(0, data) == "trained 0"
    carried_batch = sys.modules["miles.backends.megatron_utils.model"].get_batch
    iterator = Namespace(rollout_data=data)
    before = carried_batch(iterator, ["tokens", "loss_masks"])
    assert set(before) == {"tokens", "loss_masks"} and "output_versions" not in data, "of the log-prob pass"
    batch = carried_batch(iterator, ["tokens", "advantages"])
    assert loss_batch.knows_versions(batch) and data["proximal_version"] == 1
    written = loss_batch.written(batch, [2])
    assert written.versions.tolist() == [1, 1] and written.current == 1 and written.recomputed.isnan().all()
    with pytest.raises(InputError, match="the rollout in training went past the trainer's train_actor"):
        carried_batch(Namespace(rollout_data=dict(data)), ["tokens", "advantages"])


def test_a_critic_is_left_alone(fresh: Numbering, trainer: Any) -> None:
    before, own = trainer.train_actor, sys.modules["miles.backends.megatron_utils.model"].get_batch
    trainer().init(Actor(fresh).args, "critic")
    assert trainer.train_actor is before
    assert sys.modules["miles.backends.megatron_utils.model"].get_batch is own


def test_a_host_whose_trainer_is_not_found_is_refused(fresh: Numbering, trainer: Any) -> None:
    with pytest.raises(
        ConfigError, match="not called by the init of the trainer on Megatron; give it there, with Miles"
    ):
        install(Actor(fresh).args)


@pytest.mark.parametrize(
    "args",
    [
        {"keep_old_actor": True},
        {"allgather_cp": True},
        {"use_rollout_routing_replay": True},
        {"qkv_format": "bshd"},
    ],
)
def test_arguments_under_which_versions_would_mislead_are_refused(args: dict[str, Any], trainer: Any) -> None:
    (name,) = args
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        install(Namespace(**{"qkv_format": "thd", **CONFIG, **args}))


def test_cells_of_fault_tolerance_are_refused(trainer: Any) -> None:
    with pytest.raises(ConfigError, match="--ft-components train: one cell alone hands new weights"):
        carrying.check(Namespace(indep_dp=True, **CONFIG), NEEDS.refusals)


def test_an_overlapped_step_may_not_meet_an_update_in_place(trainer: Any) -> None:
    given = {"qkv_format": "thd", "pause_generation_mode": "in_place", **CONFIG}
    with pytest.raises(ConfigError, match="give --sglang-disable-overlap-schedule, or pause by retract"):
        install(Namespace(**given))
    with pytest.raises(
        ConfigError, match="not called by the init of the trainer on Megatron; give it there, with Miles"
    ):  # the next check
        install(Namespace(**given, sglang_disable_overlap_schedule=True))


def test_a_rollout_without_notes_is_refused(fresh: Numbering, trainer: Any) -> None:
    with pytest.raises(InputError, match="weight_versions: none in this rollout"):
        carrying.Carrying(TRAINER_OF_MILES).before_training(Actor(fresh), 0, {})
