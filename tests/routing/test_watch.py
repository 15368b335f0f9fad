"""The watch over Megatron's own routers, on gloo ranks, against counts that are made token by token in Python."""

import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import oracle
import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from launch import told as said_of
from megatron.core import parallel_state as mpu
from process_groups import destroy_process_groups
from routing_host import Manager, Stage, engine_routes, fuse, module, own_route
from torch import Tensor

from lab.tallies import tally
from mis_plugins import mis
from mis_plugins.config.reading import from_mapping
from mis_plugins.errors import ConfigError, InputError, MisError
from mis_plugins.hosts import routing as hooks
from mis_plugins.hosts.adapters import miles_fsdp, slime
from mis_plugins.hosts.adapters.miles import NEEDS as MILES
from mis_plugins.hosts.host import Host
from mis_plugins.packing.layout import whole, zigzag
from mis_plugins.routing import watch as watch_room
from mis_plugins.routing.placement import POSITIONS, Grid, placement
from mis_plugins.routing.report import Seen, metrics_of
from mis_plugins.routing.table import Flags, Gathered, Passed

LAYERS = 4
PROMPT, LENGTHS = 3, (21, 9, 30)
SHARE = 0.2
BY_ROUTE = {"weight": None, "reject": [{"statistic": "route", "upper": 0.5}]}
OPERATORS = 53  # of one router in one micro-batch, beside the thousands of its layer
Plant = Callable[[Tensor, list[Any]], None]
Loss = Callable[[Namespace, list[list[int]]], None]


@pytest.fixture(autouse=True)
def groups(tmp_path: Path) -> Iterator[None]:
    yield
    destroy_process_groups()


def samples(data: int) -> list[list[int]]:
    return [[(7 * i + 11 * n + 5 * data) % 50 for i in range(length)] for n, length in enumerate(LENGTHS)]


def batches(data: int) -> list[list[list[int]]]:
    """Two micro-batches of one data-parallel rank."""
    return [samples(data)[:2], samples(data)[2:]]


def recorded(data: int) -> list[list[Tensor]]:
    """Rows of the engine for each sample, its last token without one, as the hosts pad it, with -1."""
    made = []
    for number, batch in enumerate(batches(data)):
        rows = [engine_routes(tokens, LAYERS, SHARE, 10 * data + number) for tokens in batch]
        for each in rows:
            each[-1] = -1
        made.append(rows)
    return made


def held(x: Tensor, cp: int, rank: int, fill: int) -> Tensor:
    """The zigzag part of a sequence, padded with `fill`."""
    if cp == 1:
        return x
    chunk = -(-len(x) // (2 * cp))
    padding = torch.full((2 * cp * chunk - len(x), *x.shape[1:]), fill, dtype=x.dtype)
    chunks = torch.cat([x, padding]).split(chunk)
    return torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]])


def host_args(**more: Any) -> Namespace:
    common = dict(num_layers=LAYERS, sequence_parallel=False, qkv_format="thd", use_tis=True)
    return Namespace(**{**common, "mis": {"weight": None, "reject": [{"upper": 50}]}, **more})


def grid() -> tuple[int, int, int]:
    """Context-parallel size and rank, and the data-parallel rank of this process."""
    cp = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    return *cp, mpu.get_data_parallel_rank(with_context_parallel=False)


def tensor_grid() -> tuple[int, int]:
    return mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()


def stage_of_model(manager: Manager, sequence_parallel: bool) -> Stage:
    pp, stage = mpu.get_pipeline_model_parallel_world_size(), mpu.get_pipeline_model_parallel_rank()
    each, (tp, _) = LAYERS // pp, tensor_grid()
    made = Stage(
        range(stage * each, (stage + 1) * each), LAYERS, manager, tensor_model_parallel_size=tp,
        expert_model_parallel_size=mpu.get_expert_model_parallel_world_size(), sequence_parallel=sequence_parallel,
    )  # fmt: skip
    return made.train(sequence_parallel or tp == 1)  # Megatron refuses to train the other


def fill(model: Stage, args: Namespace, plant: Plant | None) -> None:
    """What a host does with the engine's rows before the log-prob pass."""
    cp, rank, data = grid()
    tp, tp_rank = tensor_grid()
    for rows in recorded(data):
        packed = torch.cat([held(each, cp, rank, -1) for each in rows])
        packed = torch.cat([packed, packed.new_full((-len(packed) % tp, *packed.shape[1:]), -1)])
        mine = packed.chunk(tp)[tp_rank] if args.sequence_parallel else packed
        mine = torch.where(mine < 0, torch.tensor([0, 1], dtype=mine.dtype), mine)
        for layer in model.layers:
            router: Any = layer.router
            router.routing_replay.top_indices_list.append(mine[:, router.layer_number - 1].clone())
    if plant is not None:
        plant(mine, list(model.layers))


def forward(model: Stage, manager: Manager, args: Namespace, loss: Loss | None = None) -> None:
    """One pass over the micro-batches, as a host runs it, with the loss of each behind its forward."""
    cp, rank, data = grid()
    manager.stage = "replay_forward"
    for layer in model.layers:
        queue: Any = layer.router.routing_replay  # type: ignore[union-attr]
        if queue is not None:
            queue.forward_index = 0
    for batch in batches(data):
        tokens = [held(torch.tensor(each), cp, rank, 0) for each in batch]
        scored = [[int(PROMPT - 1 <= t < len(each) - 1) for t in range(len(each))] for each in batch]
        masks = [held(torch.tensor(each), cp, rank, 0) for each in scored]
        run_packed(model, args, tokens, masks, cp)
        if loss is not None:
            loss(args, batch)
    manager.stage = "fallthrough"


def run_packed(model: Stage, args: Namespace, tokens: list[Tensor], masks: list[Tensor], cp: int) -> None:
    """Run the model over sequences in one row, which is padded for tensor-parallel ranks."""
    tp, tp_rank = tensor_grid()
    pad = -sum(map(len, tokens)) % tp
    lengths = [0, *map(len, tokens), *([pad] if pad else [])]
    flat, mask = (torch.cat([*rows, rows[0].new_zeros(pad)])[None] for rows in (tokens, masks))
    packed = SimpleNamespace(cu_seqlens_q=torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32) * cp)
    cut = (tp, tp_rank) if args.sequence_parallel else (1, 0)
    model(input_ids=flat, packed_seq_params=packed, loss_mask=mask, sp=cut)


def watched(
    args: Namespace, plant: Plant | None = None, fused: bool = False, loss: Loss | None = None
) -> tuple[Seen, hooks.Watching, list[str]]:
    """What the hooks make of a log-prob pass, or of the training pass behind it that computes a loss, on this rank."""
    manager, watching = Manager(), hooks.Watching()
    seen, said, real_read = [], [], hooks.read

    def reading(watch: Any, over: Any) -> Seen:
        seen.append(real_read(watch, over))
        return seen[-1]

    with (
        patch.dict(sys.modules, {MILES.routing_replay.addresses[0].module: module(manager)}),
        patch.object(hooks, "read", reading),
        patch.object(hooks.logger, "warning", lambda text, *given: said.append(text % given)),
        patch.object(hooks.tracking, "log", lambda *given: None),
        patch.object(hooks, "WATCHING", watching),
    ):
        model = stage_of_model(manager, args.sequence_parallel)
        watching.before_log_probs(args, [model], "ref_")
        forward_unwatched(model, manager, args)
        fill(model, args, plant)
        if fused:
            fuse(model)
        watching.before_log_probs(args, [model], "")
        with torch.no_grad():
            forward(model, manager, args)
        watching.before_step(args, 0, 0, [model])
        if loss is not None:
            forward(model, manager, args, loss)
            watching.before_log_probs(args, [model], "ref_")  # nothing is lost to a reference model's pass in between
            watching.before_step(args, 0, 1, [model])
    return seen[-1], watching, said


def forward_unwatched(model: Stage, manager: Manager, args: Namespace) -> None:
    """A reference model's pass: routers route by themselves, and nobody counts."""
    manager.stage = "fallthrough"
    run_packed(model, args, [torch.zeros(8, dtype=torch.long)], [torch.ones(8)], cp=1)


def expected(data_ranks: int) -> list[dict[str, float]]:
    """Tokens and differing routes of each layer, token by token in Python."""
    found = [{"tokens": 0.0, "differs": 0.0, "strange": 0.0} for _ in range(LAYERS)]
    for data in range(data_ranks):
        for batch, rows in zip(batches(data), recorded(data), strict=True):
            for tokens, routes in zip(batch, rows, strict=True):
                for t in range(PROMPT - 1, len(tokens) - 1):
                    for layer, row in enumerate(found):
                        shared = set(routes[t, layer].tolist()) & set(own_route(tokens[t], layer))
                        row["tokens"] += 1
                        row["differs"] += len(shared) < 2
                        row["strange"] += len(shared) < 1
    return found


GRIDS = {
    "one rank": (1, {}, 1),
    "dp 2": (2, {}, 2),
    "cp 2": (2, {"cp": 2}, 1),
    "cp 4": (4, {"cp": 4}, 1),
    "pp 2": (2, {"pipeline_model_parallel_size": 2}, 1),
    "ep 2": (2, {"expert_model_parallel_size": 2}, 2),
    "tp 2": (2, {"tensor_model_parallel_size": 2}, 1),
    "sp 2": (2, {"tensor_model_parallel_size": 2}, 1),
    "ep 2, sp 2": (4, {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2}, 2),
    "sp 2, pp 2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 1),
    "cp 2, pp 2": (4, {"cp": 2, "pipeline_model_parallel_size": 2}, 1),
}


def on_ranks(name: str, work: Callable[[int], Any], folder: Path) -> list[Any]:
    world, sizes, _ = GRIDS[name]
    sizes = dict(sizes)
    return run_ranks(world, sizes.pop("cp", 1), work, folder, **sizes)


@pytest.mark.parametrize("name", ["one rank", "dp 2", "cp 4", "tp 2", "ep 2, sp 2", "sp 2, pp 2", "cp 2, pp 2"])
def test_counts_do_not_depend_on_the_grid(name: str, tmp_path: Path):
    args = host_args(sequence_parallel="sp 2" in name)

    def work(rank: int) -> Any:
        seen, watching, said = watched(args)
        assert watching.watch is not None and watching.watch.rollout.gathered is not None
        flags = watching.watch.rollout.gathered.flags
        return seen.table.sum(-1)[:, :3].tolist(), said, [(f.differs, f.kind) for f in flags], grid()

    for table, said, flags, (cp, rank, data) in on_ranks(name, work, tmp_path):
        assert said == []
        rows = [dict(zip(("tokens", "differs", "strange"), row, strict=True)) for row in table]
        assert rows == expected(GRIDS[name][2])
        check_flags(flags, cp, rank, data)


def check_flags(flags: list[tuple[Tensor, Tensor]], cp: int, rank: int, data: int) -> None:
    """Flags of each token: how many layers differ at it, and whether any did before it in its sequence."""
    told, routes = [], routed(data)
    for batch in batches(data):
        both = [torch.tensor(next(routes)).T for _ in batch]
        for each in both:
            each[-1] = -1  # padded, and no loss reads it
        told.append(torch.cat([held(each, cp, rank, -1) for each in both]))
    for (differs, kind), both in zip(flags, told, strict=True):
        live = both[:, 0] >= 0
        assert differs[: len(both)][live].tolist() == both[live, 0].tolist()
        assert kind[: len(both)][live].tolist() == both[live, 1].tolist()


def swap(mine: Tensor, layers: list[Any]) -> None:
    """The rows of the first two layers change places."""
    first, second = layers[0].router.routing_replay, layers[1].router.routing_replay
    first.top_indices_list, second.top_indices_list = second.top_indices_list, first.top_indices_list


def swap_stages(mine: Tensor, layers: list[Any]) -> None:
    """Each of two pipeline stages replays the rows of the other one, as with a wrong offset of layers."""
    group: Any = mpu.get_pipeline_model_parallel_group()
    for layer in layers:
        queue = layer.router.routing_replay
        for place, rows in enumerate(queue.top_indices_list):
            of_stages = [torch.empty_like(rows) for _ in range(group.size())]
            dist.all_gather(of_stages, rows, group=group)
            queue.top_indices_list[place] = of_stages[1 - group.rank()]


def repeat(mine: Tensor, layers: list[Any]) -> None:
    """Twelve tokens of the last sample get the row of the token before, or as many as this rank has, in all layers."""
    for layer in layers:
        rows = layer.router.routing_replay.top_indices_list[-1]
        rows[8:20] = rows[7:19].clone()[: len(rows) - 8]


def drop(mine: Tensor, layers: list[Any]) -> None:
    layers[1].router.routing_replay = layers[1].router.router_replay = None


def break_row(mine: Tensor, layers: list[Any]) -> None:
    layers[0].router.routing_replay.top_indices_list[0][5] = 3


def break_second_sample(mine: Tensor, layers: list[Any]) -> None:
    layers[0].router.routing_replay.top_indices_list[0][LENGTHS[0] + 2] = 3


def use_others(mine: Tensor, layers: list[Any]) -> None:
    """The router of the second layer consumes a row and uses the one before it."""
    router = layers[1].router

    def shifted(scores: Tensor, topk: int, groups: Any, group_topk: Any, default: Any) -> Any:
        _, rows = real(scores, topk, groups, group_topk, default)
        return scores.gather(1, rows.roll(1, 0)), rows.roll(1, 0)

    real, router.router_replay.get_replay_topk = router.router_replay.get_replay_topk, shifted


def of_layers(layers: Sequence[int], says: str, stages: int = 2) -> tuple[str, ...]:
    """What is said of each of these layers, of which each stage has equally many."""
    return tuple(rf"layer {layer} \(pipeline stage {layer * stages // LAYERS}\), {says}" for layer in layers)


ALL_OF, ONE_OF = "all samples of micro-batch 0: .*", r"sample \d of micro-batch \d: "
STRANGE = rf"{ONE_OF}\d+ of \d+ tokens .* belong to another layer, stage or sample; so it is in 2 more samples"
REPEATED = r"\d+ tokens .* repeated, stale or missing"
REPEATED_SAMPLE = (rf"sample 0 of micro-batch 1, layers 0, 1, 2, 3 \(pipeline stage 0\): {REPEATED}",)
BY_STAGE = r"layers 0, 1 \(pipeline stage 0\); layers 2, 3 \(pipeline stage 1\)"
BROKEN = "1 of {} recorded rows name an expert twice"
# The grid, the plant (None fuses the routers), and what the ranks of the grid have to say, all together.
PLANTS: dict[str, tuple[str, Plant | None, tuple[str, ...]]] = {
    "a dropped layer": ("pp 2", drop, of_layers((1, 3), f"{ALL_OF}the layer was left out")),
    "swapped layers": ("one rank", swap, of_layers((0, 1), STRANGE, stages=1)),
    "a swapped stage": ("pp 2", swap_stages, of_layers(range(LAYERS), STRANGE)),
    "a repeated row": ("pp 2", repeat, (f"sample 0 of micro-batch 1, {BY_STAGE}: {REPEATED}",)),
    "a repeated row on context-parallel ranks": ("cp 2", repeat, REPEATED_SAMPLE),
    "a repeated row on sequence-parallel ranks": ("sp 2", repeat, REPEATED_SAMPLE),
    "a repeated row on expert-parallel ranks": ("ep 2", repeat, REPEATED_SAMPLE),
    "a broken row": ("one rank", break_row, of_layers([0], f"sample 0 of micro-batch 0: {BROKEN.format(21)}")),
    "a broken row of the second sample": (
        "one rank", break_second_sample, of_layers([0], f"sample 1 of micro-batch 0: {BROKEN.format(9)}")
    ),
    "other experts than recorded": (
        "pp 2", use_others, of_layers((1, 3), rf"{ONE_OF}\d+ of \d+ rows were used with other experts than recorded")
    ),
    "router fusion": ("pp 2", None, of_layers(range(LAYERS), f"{ALL_OF}--moe-router-fusion does so")),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_named_and_stops_the_run(name: str, tmp_path: Path):
    """Layer, stage and sample are named in the log of a rank that knows them, and each rank stops."""
    where, plant, told = PLANTS[name]
    cut = "sequence" in name
    args = host_args(sequence_parallel=cut)
    stops = host_args(sequence_parallel=cut, mis=args.mis | {"routing": {"on_fault": "raise"}})

    def work(rank: int) -> tuple[list[str], str]:
        _, _, said = watched(args, plant, fused=plant is None)
        return said, said_of(lambda: watched(stops, plant, fused=plant is None))

    said, stopped = zip(*on_ranks(where, work, tmp_path), strict=True)
    for pattern in told:
        assert any(re.search(pattern, line) for lines in said for line in lines), (pattern, said)
    assert all("mis.routing.on_fault: raise" in text for text in stopped), stopped
    assert all(re.search(pattern, "; ".join(stopped)) for pattern in told), stopped


def log_probs(batch: list[list[int]]) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probs of trainer and engine for each response token, by its token and place."""
    proximal, behavior = [], []
    for tokens in batch:
        places = torch.arange(PROMPT, len(tokens), dtype=torch.float32)
        proximal.append(-1 - places / 40)
        behavior.append(-1 - places / 40 + torch.sin(places * len(tokens)))
    return proximal, behavior


def hooked(kept: list[list[bool]], weights: list[dict[int, float]] | None = None) -> Loss:
    """A loss that calls the TIS hook as a host does, and keeps the masks that come back.

    Args:
        weights: gets, for each sample, what the loss of each of this rank's response tokens was multiplied by.
    """

    def loss(args: Namespace, batch: list[list[int]]) -> None:
        cp, rank, _ = grid()
        lengths = [len(tokens) - PROMPT for tokens in batch]
        spans = zigzag([len(tokens) for tokens in batch], lengths, cp, rank) if cp > 1 else whole(lengths)
        pieces = [
            [torch.cat([x[a:b] for a, b in spans.pieces(i)]) for i, x in enumerate(rows)] for rows in log_probs(batch)
        ]
        weighed, masks, _ = mis.compute_mis_weights_with_cp(
            args,
            pg_loss=torch.ones(sum(len(x) for x in pieces[0]), requires_grad=True),
            train_log_probs=pieces[0],
            rollout_log_probs=pieces[1],
            loss_masks=[torch.ones(length) for length in lengths],
            total_lengths=[len(tokens) for tokens in batch],
            response_lengths=lengths,
        )
        kept.extend(mask.bool().tolist() for mask in masks)
        if weights is not None:
            for i, part in enumerate(weighed.detach().split([len(x) for x in pieces[0]])):
                places = [t for a, b in spans.pieces(i) for t in range(a, b)]
                weights.append(dict(zip(places, part.tolist(), strict=True)))

    return loss


def routed(data: int) -> Iterator[tuple[list[int], list[int]]]:
    """Return, for each sample, how many layers differ at each position, and the class of each position."""
    for batch, rows in zip(batches(data), recorded(data), strict=True):
        for tokens, routes in zip(batch, rows, strict=True):
            counts = [
                sum(set(routes[t, n].tolist()) != set(own_route(token, n)) for n in range(LAYERS))
                for t, token in enumerate(tokens)
            ]
            yield counts, [1 if count else 2 if any(counts[:t]) else 0 for t, count in enumerate(counts)]


ROUTED = [(name, None) for name in ("one rank", "cp 2", "tp 2", "sp 2", "sp 2, pp 2")]


@pytest.mark.parametrize(("name", "down_weigh"), [*ROUTED, ("one rank", 0.25), ("cp 2", 0.25), ("cp 4", 0.25)])
def test_tokens_by_route_in_the_hook(name: str, down_weigh: float | None, tmp_path: Path):
    """`statistic: route` drops or down-weighs tokens that differ in a layer; k3 is split by class, as by an oracle."""
    reject = [{"statistic": "route", "upper": 0.5, "down_weigh": down_weigh}]
    rule = {"weight": None, "reject": reject, "metrics": "full"}
    args = host_args(sequence_parallel="sp 2" in name, mis=rule)

    def work(rank: int) -> Any:
        kept: list[list[bool]] = []
        weights: list[dict[int, float]] = []
        seen, _, said = watched(args, loss=hooked(kept, weights))
        return kept, weights, seen.split.tolist(), said

    beyond, drops = down_weigh or 0.0, down_weigh is None
    proximal, behavior = log_probs(samples(0))
    held: list[set[int]] = [set() for _ in proximal]
    for kept, weights, split, said in on_ranks(name, work, tmp_path):
        assert said == []
        expected = [[0.0] * 4 for _ in range(3)]
        for i, (counts, kinds) in enumerate(routed(0)):
            places = range(PROMPT - 1, len(counts) - 1)
            alike = [counts[t] == 0 for t in places]
            assert kept[i] == (alike if drops else [True] * len(alike))
            assert weights[i] == {t: 1.0 if alike[t] else beyond for t in weights[i]}
            held[i] |= weights[i].keys()
            for t, p, b in zip(places, proximal[i].tolist(), behavior[i].tolist(), strict=True):
                row, ratio = expected[kinds[t]], p - b
                for n, value in enumerate((1, oracle.k3(ratio), abs(ratio) > 0.5, counts[t] == 0 or not drops)):
                    row[n] += value
        if "pp" not in name:  # elsewhere only the last stage has a loss, and here each one calls the hook
            assert split == [pytest.approx(row, rel=1e-5) for row in expected]
    assert held == [set(range(len(rows))) for rows in proximal]


def test_the_statistic_stops_where_a_layer_compared_nothing(tmp_path: Path):
    """Tokens of unknown routes would count as routed alike, and be kept."""
    stopped = on_ranks("pp 2", lambda _: said_of(lambda: watched(host_args(mis=BY_ROUTE), drop)), tmp_path)
    for said in stopped:  # a layer of each stage, in two micro-batches
        assert "mis.reject: statistic: route: the log-prob pass lacks 4 comparisons" in said


IDLE = {
    "no replay": patch.object(hooks.Queues, "replaying", lambda source: False),
    "a dense model": patch.object(watch_room, "routers_of", lambda model: iter(())),
}


@pytest.mark.parametrize("name", IDLE)
def test_the_statistic_is_refused_where_no_router_compared(name: str, tmp_path: Path):
    """The hook says so; a critic, whose routers replay nothing, calls no such hook and trains on."""
    args = host_args(mis=BY_ROUTE)

    def stop(rank: int) -> str:
        with IDLE[name], patch.object(hooks, "current", lambda args: slime.HOST):
            watched(args)
            return said_of(lambda: watched(args, loss=hooked([])))

    (said,) = on_ranks("one rank", stop, tmp_path)
    assert "mis.reject: statistic: route needs" in said and "none of these micro-batches was watched" in said


def test_own_experts_leave_the_recorded_ones_unused(tmp_path: Path):
    """`routing.experts: trainer` compares, and the router uses what its gates pick."""
    args = host_args(mis=BY_ROUTE | {"routing": {"experts": "trainer"}})

    def work(rank: int) -> Any:
        used: list[Tensor] = []
        real = watch_room.compare

        def compare(scores: Tensor, rows: Tensor, map_: Tensor, replays: bool) -> Any:
            used.append((map_ != torch.zeros_like(map_).scatter_(1, scores.topk(2).indices, True)).any())
            return real(scores, rows, map_, replays)

        with patch.object(watch_room, "compare", compare):
            seen, _, said = watched(args)
        return seen.table.sum(-1)[:, :2].tolist(), said, [x.item() for x in used]

    ((table, said, used),) = on_ranks("one rank", work, tmp_path)
    assert said == [] and not any(used)
    assert table == [[row["tokens"], row["differs"]] for row in expected(1)]


@pytest.mark.parametrize(
    ("host", "error", "told"),
    [
        (slime.HOST, InputError, r"mis\.reject: statistic: route needs .* mis_plugins\.mis\.watch_routes"),
        (miles_fsdp.HOST, ConfigError, r"mis\.reject: statistic: route needs a hook .* Miles on FSDP does not call"),
    ],
)  # fmt: skip
def test_the_statistic_is_refused_where_no_pass_was_watched(host: Host, error: type[MisError], told: str):
    args = host_args(mis=BY_ROUTE)
    with patch.object(hooks, "current", lambda args: host), pytest.raises(error, match=told):
        mis.compute_mis_weights(
            args, train_log_probs=[torch.zeros(2)], rollout_log_probs=[torch.zeros(2)], loss_masks=[torch.ones(2)]
        )


def test_the_mean_of_a_rollout_is_refused_beside_the_statistic():
    weight = {"normalize": {"scope": "rollout"}}
    with pytest.raises(ConfigError, match=r"mis\.weight\.normalize\.scope: rollout is computed before the routes"):
        from_mapping(BY_ROUTE | {"weight": weight})


def begun(rows: int) -> Passed:
    mask = torch.ones(1, rows)
    return Passed.begin(placement(mask, torch.tensor([0, rows], dtype=torch.int32), Grid()), LAYERS)


def pass_of(*rows: int) -> Gathered:
    """Flags of a log-prob pass, of which the first token names its micro-batch."""
    flags = [Flags(torch.full((n,), i), torch.zeros(n, dtype=torch.long)) for i, n in enumerate(rows)]
    return Gathered(tuple(flags), ())


def training(gathered: Gathered, chunks: int = 1) -> watch_room.Watch:
    """A watch whose rollout trains."""
    run, rollout = watch_room.Pass(watch_room.TRAIN), watch_room.Rollout(gathered=gathered)
    return watch_room.Watch(hooks.Targets(), Grid(), chunks=chunks, run=run, rollout=rollout)


def test_flags_are_those_of_the_micro_batch_whose_loss_runs():
    """With two chunks on a rank the first runs ahead, and the loss follows the last."""
    watch = training(pass_of(3, 4), chunks=2)
    for chunk, rows, expected in ((0, 3, None), (0, 4, None), (1, 3, 0), (1, 4, 1)):
        watch._enter(chunk, begun(rows))
        flags = watch.flags()
        assert (None if flags is None else int(flags.differs[0])) == expected


def test_flags_of_a_pass_that_was_cut_otherwise_are_not_used():
    watch = training(pass_of(3, 4))
    for rows, known in ((3, True), (5, False), (4, False)):
        watch._enter(0, begun(rows))
        assert (watch.flags() is not None) == known


def test_a_forward_asks_nobody_and_waits_for_nothing(tmp_path: Path):
    """Operators of one watched router call, and no collective: what the step hook does is not among them."""
    args = host_args()

    def work(rank: int) -> Any:
        counts: list[int] = []
        real = watch_room.Watch._compare

        def compare(*given: Any) -> None:
            found = tally(lambda: real(*given))
            assert not found.waits and not found.copies and not found.collectives, found
            counts.append(found.operators)

        with patch.object(watch_room.Watch, "_compare", compare):
            watched(args)
        return counts

    (counts,) = on_ranks("one rank", work, tmp_path)
    assert set(counts) == {OPERATORS}


def test_every_metric_of_a_step_is_a_share_of_two_sums() -> None:
    table = torch.rand(2, 7, len(POSITIONS), dtype=torch.float64)
    split = torch.rand(3, 4, dtype=torch.float64)
    wanted = {}
    last = f"/position_{POSITIONS[-1]}"
    for place, sums in (("", table.sum((0, 2))), ("/layer_1", table[1].sum(-1)), (last, table[..., -1].sum(0))):
        tokens, differs, strange, margin, rows, unequal, _ = sums.tolist()
        wanted |= {f"route_differs{place}": differs / tokens, f"route_strange{place}": strange / tokens}
        wanted |= {f"route_margin{place}": margin / differs, f"route_unequal{place}": unequal / rows}
    all_tokens, all_k3, _, _ = split.sum(0).tolist()
    for place, sums in zip(("/same", "/other", "/earlier"), split.tolist(), strict=True):
        tokens, k3, tail, kept = sums
        wanted |= {f"route_tokens{place}": tokens / all_tokens, f"route_kl_k3{place}": k3 / tokens}
        wanted |= {f"route_share_of_k3{place}": k3 / all_k3, f"route_tail{place}": tail / tokens}
        wanted[f"route_kept{place}"] = kept / tokens
    metrics = metrics_of(Seen(table, split, mine=(), faults=(), tells=True, faulty=0, unknown=0))
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted, rel=1e-12)
    assert len(metrics) == 4 * (1 + 2 + len(POSITIONS)) + 5 * 3
