"""Versions of tokens from a rollout to the micro-batch of the loss hook, on each host that says who wrote a token.

The hosts are made from the table of needs; `scripts/run-in-host.sh rows miles-fully-async slime-fully-async` runs
their own loops.
"""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import pytest
import rollout_process
import stand_in_hosts
import torch
from rollout_process import Sample, drawn, finish
from stand_in_hosts import LAYOUTS, VOCABULARY, Bodies
from test_every_hook import LOSS, arguments

from mis_plugins import mis
from mis_plugins.errors import ConfigError, InputError
from mis_plugins.hosts import loss_batch
from mis_plugins.hosts.registry import current
from mis_plugins.hosts.versions import samples as on_samples
from mis_plugins.hosts.versions import scores
from mis_plugins.hosts.versions.carrying import Carrying
from mis_plugins.hosts.versions.rollouts import Numbering
from mis_plugins.hosts.versions.samples import Note
from mis_plugins.hosts.versions.scores import Scores, Trainer, shares
from mis_plugins.versions.spans import Request

pytestmark = pytest.mark.usefixtures("numbering")

NOT_THERE = "not called by the init of the trainer on Megatron; give it there, with"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Bodies:
    rollout_process.alone_in_world(monkeypatch)
    return stand_in_hosts.load(LAYOUTS[name], monkeypatch)


@pytest.fixture(params=("August", "typed", "slime"))
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bodies:
    return load(request.param, monkeypatch)


def given(host: Bodies, segment_wise: dict[str, Any] | None = None, **settings: Any) -> Any:
    return arguments(host.layout, mis={"segment_wise": segment_wise or {}}, **{**LOSS, **settings})


def trainer_of(host: Bodies, args: Any, role: str = "actor") -> Any:
    actor = stand_in_hosts.trainer(host)()
    actor.init(args, role)
    return actor


def carried(host: Bodies, settings: dict[str, Any] | None = None, **segment_wise: Any) -> tuple[Any, Carrying]:
    """A trainer, and what the hook keeps in its process."""
    args = given(host, segment_wise, **(settings or {}))
    return trainer_of(host, args), Carrying(Trainer(current(args)))


def rollout(host: Bodies, own: Numbering, *samples: Any) -> dict[str, Any]:
    indices = [sample.index for sample in samples]
    notes = {host.layout.needs.notes: own.noted(samples, scored=True), "sample_indices": indices}
    return stand_in_hosts.data_of(samples) | notes


def log_probs(tokens: Sequence[int], versions: Sequence[int]) -> list[float]:
    """What the trainer gives to tokens under versions of its weights."""
    rows = [(version * torch.linspace(-1, 1, VOCABULARY)).log_softmax(0) for version in versions]
    return [float(row[token]) for row, token in zip(rows, tokens, strict=True)]


def test_every_token_is_scored_by_the_version_after_its_own(host: Bodies, numbering: Numbering) -> None:
    """A response that three versions write: it runs while the trainer scores, and travels the last time."""
    actor, kept = carried(host)
    held, written = Sample(1), list[int]()
    number = numbering.begin(held, held.prompt)
    for version in (1, 2, 3):
        actor.version = version
        kept.before_training(actor, version, rollout(host, numbering, drawn(numbering, [version])))
        written += [version, version]
        numbering.shelf.say(number, len(written) - 2, [2 * version - 2, 2 * version - 1], [version] * 2)
    finish(held, range(6), written)
    before, data = (rollout(host, numbering, one) for one in (drawn(numbering, [3]), held))
    del held
    for version, trained in ((4, before), (5, data)):
        actor.version = version
        kept.before_training(actor, version, trained)
    columns = kept.of(data)
    assert columns.version == 5 and columns.tokens["output_versions"][0].tolist() == written
    (found,) = columns.tokens["recomputed_log_probs"]
    assert found.tolist() == pytest.approx(log_probs(range(6), [version + 1 for version in written]))
    kept.before_training(actor, 6, rollout(host, numbering, drawn(numbering, [5])))
    assert not kept.scores._of, "nothing is remembered of what was trained on before"


def test_a_rollout_that_is_repeated_is_not_scored_again(host: Bodies, numbering: Numbering) -> None:
    actor, kept = carried(host)
    waiting, actor.version = drawn(numbering, [1, 1]), 2
    data = rollout(host, numbering, drawn(numbering, [2]))
    for _ in range(2):
        kept.before_training(actor, 0, data := dict(data))
    assert len(host.passes) == 1 and kept.of(data).version == 2
    kept.before_training(actor, 1, rollout(host, numbering, drawn(numbering, [2])))  # at the weights of before
    assert len(host.passes) == 1 and waiting is not None


def test_a_repeated_rollout_trains_with_the_columns_of_its_own_samples(host: Bodies, numbering: Numbering) -> None:
    """A rank is lost, and the rollout is split anew: this rank gets another sample, whose scores it still has."""
    actor, kept = carried(host)
    first, second = drawn(numbering, [1, 1]), drawn(numbering, [1], index=1)
    before, *parts = (rollout(host, numbering, one) for one in (drawn(numbering, [1]), first, second))
    for version, rollout_id, data in ((2, 0, before), (3, 1, parts[0]), (3, 1, parts[1])):
        actor.version = version
        kept.before_training(actor, rollout_id, data)
    columns = kept.of(parts[1])
    assert columns.tokens["output_versions"][0].tolist() == [1]
    assert columns.tokens["recomputed_log_probs"][0].tolist() == pytest.approx(log_probs([0], [2]))


@pytest.mark.parametrize("too_old", ["raise", "drop"])
def test_a_token_that_nobody_scored(too_old: str, host: Bodies, numbering: Numbering) -> None:
    """Dropped again where the host repeats the rollout."""
    actor, kept = carried(host, too_old=too_old)
    actor.version = 4
    data = rollout(host, numbering, drawn(numbering, [1, 3, 4], index=6))
    for attempt in (dict(data), dict(data)):
        if too_old == "raise":
            with pytest.raises(InputError, match="sample 6, token 0: version 1, with the trainer at 4"):
                kept.before_training(actor, 0, attempt)
        else:
            kept.before_training(actor, 0, attempt)
            (mask,) = attempt["loss_masks"]
            assert mask.tolist() == [0, 1, 1] and mask.dtype == torch.int


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ({"method": "loglinear"}, {}),
        ({"enabled": False}, {}),
        *(({"too_old": too_old}, {"use_tis": False, "get_mismatch_metrics": True}) for too_old in ("raise", "drop")),
    ],
)
def test_nothing_is_scored_or_dropped_that_no_weight_reads(
    config: dict[str, Any], settings: dict[str, Any], host: Bodies, numbering: Numbering
) -> None:
    """Nor where a run only watches, whose loss is the host's own."""
    actor, kept = carried(host, settings, **config)
    waiting, actor.version = drawn(numbering, [1]), 4
    kept.before_training(actor, 0, data := rollout(host, numbering, drawn(numbering, [1, 3])))
    assert len(host.passes) == 0 and kept.of(data).version == 4 and waiting is not None
    assert data["loss_masks"][0].tolist() == [1, 1]


def test_the_share_of_retracted_samples_is_told_and_logged_once(
    host: Bodies, numbering: Numbering, caplog: pytest.LogCaptureFixture
) -> None:
    actor, kept = carried(host, enabled=False)
    samples = [drawn(numbering, [1, 1], index) for index in range(4)]
    for one, calls in zip(samples, ([0], [2], [1, 0], [0, 0]), strict=True):
        for before, told in enumerate(calls):
            on_samples.hear_retractions(one, {"num_retractions": told}, before)
    share = on_samples.retracted_share(Namespace(use_rollout_routing_replay=True), samples)
    assert "retracted the requests of 2 of 4 samples; --use-rollout-routing-replay" in caplog.text
    data = rollout(host, numbering, *samples)
    data[host.layout.needs.notes] = numbering.noted(samples, scored=False, of_batch=share)
    for _ in range(2):  # the host repeats the rollout
        kept.before_training(actor, 3, dict(data))
    assert [told["train/mis_step/retracted_fraction"] for told in host.logged] == [0.5]
    on_samples.hear_retractions(samples[0], {"num_retractions": 0}, 0)
    delattr(samples[1], on_samples.RETRACTIONS)
    assert not on_samples.retracted_share(Namespace(), samples), "not known of every sample"


def test_the_loss_hook_gets_what_it_reads(host: Bodies, numbering: Numbering) -> None:
    actor = trainer_of(host, given(host, custom_megatron_init_path="mis_plugins.mis.carry_versions"))
    data = rollout(host, numbering, *(drawn(numbering, [1, 1]) for _ in range(3)))
    get_batch, iterator = host.layout.needs.get_batch.get(), Namespace(rollout_data=data, group=[0])
    assert set(get_batch(iterator, ["tokens", "loss_masks"])) == {"tokens", "loss_masks"}
    assert "output_versions" not in data, "of a pass that only scores"
    assert len(host.layout.needs.train_actor.of(actor)(0, data)) == 2, "what the host's own function returns"
    batch = get_batch(iterator, ["tokens", "advantages"])
    assert loss_batch.knows_versions(batch) and data["proximal_version"] == 1
    written = loss_batch.written(batch, [2])
    assert written.versions.tolist() == [1, 1] and written.current == 1 and written.recomputed.isnan().all()
    with pytest.raises(InputError, match="the rollout in training went past the trainer's train_actor"):
        get_batch(Namespace(rollout_data=dict(data), group=[0]), ["tokens", "advantages"])


def test_a_critic_is_left_alone(host: Bodies) -> None:
    needs, kind = host.layout.needs, stand_in_hosts.trainer(host)
    before = getattr(kind, needs.train_actor.name_on(kind)), needs.get_batch.get()
    trainer_of(host, given(host, custom_megatron_init_path="mis_plugins.mis.carry_versions"), "critic")
    assert (getattr(kind, needs.train_actor.name_on(kind)), needs.get_batch.get()) == before


def test_a_subclass_that_ray_makes_is_carried_too(host: Bodies, numbering: Numbering) -> None:
    """With a wrapped copy of each method, as Ray's `_inject_tracing_into_class` sets them."""
    own = stand_in_hosts.trainer(host)
    methods = {
        name: lambda self, *args, method=method, **more: method(self, *args, **more)
        for name, method in vars(own).items()
        if callable(method)
    }
    actor = type(own.__name__, (own,), methods)()
    actor.init(given(host, custom_megatron_init_path="mis_plugins.mis.carry_versions"), "actor")
    data = rollout(host, numbering, *(drawn(numbering, [1]) for _ in range(3)))
    host.layout.needs.train_actor.of(actor)(0, data)
    assert data["proximal_version"] == 1


@pytest.mark.parametrize(("notes", "said"), [(None, "none in this rollout"), ([["a"]], "not those of mis_plugins")])
def test_a_rollout_without_notes_of_ours_is_refused(notes: Any, said: str, host: Bodies) -> None:
    actor, kept = carried(host)
    key = host.layout.needs.notes
    with pytest.raises(InputError, match=f"{key}: {said}; give --custom-convert-samples-to-train"):
        kept.before_training(actor, 0, {key: notes})


SCORED = {"use_rollout_routing_replay", "qkv_format", "release_train", "rollout_top_p"}
MISLEADING: list[tuple[str, dict[str, Any], str]] = [
    *((name, {flag: True}, f"--{flag.replace('_', '-')}") for name in ("August", "slime")
      for flag in ("keep_old_actor", "allgather_cp", "use_rollout_routing_replay")),
    ("August", {"qkv_format": "bshd"}, "--qkv-format"),
    ("August", {"multi_lora": True}, "--multi-lora"),
    ("August", {"indep_dp": True}, "--ft-components train: one cell alone hands new weights"),
    ("August", {"pause_generation_mode": "in_place"}, "give --sglang-disable-overlap-schedule, or pause by retract"),
    ("August", {"pause_generation_mode": "in_place", "sglang_disable_overlap_schedule": True}, NOT_THERE),
    ("August", {}, NOT_THERE),
    ("slime", {"release_train": True}, "--release-train"),
    *((name, {"rollout_top_p": cut}, "--rollout-top-p other than 1") for name in ("August", "slime")
      for cut in (0.9, None)),
    ("slime", {}, NOT_THERE),
    ("vime", {}, "mis_plugins.mis.carry_versions: versions are not carried on vime; leave the flag out"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings", "said"), MISLEADING)
def test_arguments_under_which_versions_would_mislead_are_refused(
    name: str, settings: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of them only where the trainer scores; and so is a function that is not the host's trainer."""
    host = load(name, monkeypatch)
    with pytest.raises(ConfigError, match=said):
        mis.carry_versions(given(host, **settings))
    if settings.keys() & SCORED:
        with pytest.raises(ConfigError, match=NOT_THERE):
            mis.carry_versions(given(host, {"method": "loglinear"}, **settings))


@pytest.mark.parametrize(("ranks", "multiple"), [(1, 1), (2, 1), (3, 2)])
def test_ranks_score_equally_many_micro_batches(ranks: int, multiple: int) -> None:
    requests = [Request(i, (0,) * length, (0,)) for i, length in enumerate((9, 7, 5, 5, 3, 1))]
    planned = shares(requests, 10, ranks, multiple)
    counts = {len(share) for share in planned}
    assert len(planned) == ranks and len(counts) == 1 and counts.pop() % multiple == 0
    assert {one.number for share in planned for batch in share for one in batch} == set(range(6))
    assert all(sum(len(one.tokens) for one in batch) <= 10 for share in planned for batch in share)


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16], ids=str)
def test_only_the_version_after_a_tokens_own_counts(default: torch.dtype) -> None:
    """Whatever torch's default dtype is: a host that makes its model in bfloat16 may leave it so."""
    kept, log_probs = Scores(), torch.tensor([-1.1, -2.1, -3.1])
    torch.set_default_dtype(default)
    try:
        # Token 1 was heard of as of version 1, and is of 2; token 4 was of a stream that broke.
        kept.add(2, scores._answered([Request(5, (0, 1), (0, 1))], [log_probs[:2]]))
        kept.add(3, {5: ((1, 4), log_probs[[2, 0]])})
        written = kept.written(Note(0, 5, [1, 2, 3]), 4)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(written.recomputed[:2], log_probs[[0, 2]]) and written.recomputed[2].isnan()
    kept.keep(frozenset())
    assert kept.written(Note(0, 5, [1, 2, 3]), 4).recomputed.isnan().all()
