"""The real loops' tool without a host: bends, command line, processes, and the verdict on recorded runs."""

import asyncio
import copy
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import yaml
from commands import ROOT, ran
from oracle import zigzag
from test_readers import wandb_record

from lab import launches, run_in_host
from lab.in_host import bends, by_version, dumps, importing, launching, on_policy, processes, timed, trees, verdict
from lab.in_host.bends import BENDS, Bend, Line
from lab.in_host.cpu_launch import CONTRACT, HOOK
from lab.in_host.launching import Sizes
from lab.in_host.model import shape_flags, write
from lab.in_host.reward import drop_a_layer, repeat_a_row, score_and_break, swap_stages
from lab.in_host.rows import MIXTURE, ROWS, STOPPED
from lab.records import pack, records
from mis_plugins.metrics.staleness import weight_metrics, weights_by_age
from mis_plugins.versions.segment_wise import BehaviorWeight, Written
from true_on_policy.models.tiny import checkpoint

RECORDS = records(run_in_host.RECORDS)


def failed(record: dict[str, Any]) -> list[str]:
    """Lines of the verdict on a record that do not hold."""
    return [line.what for line in verdict.judge(record) if not line.holds]


# -------------------------------------------------------------------------------------------------------- bends


def written(folder: Path) -> dict[str, Path]:
    """Write trees that hold each quoted line where its bend wants it."""
    rows: dict[Path, dict[int, str]] = {}
    for line in (line for bend in BENDS for line in bend.wanted_by):
        rows.setdefault(folder / line.tree / line.path, {})[line.number] = line.text
    for path, lines in rows.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"    {lines.get(i, '')}\n" for i in range(1, max(lines) + 1)))
    return {tree: folder / tree for tree in {line.tree for bend in BENDS for line in bend.wanted_by}}


def test_a_changed_line_is_refused(tmp_path: Path) -> None:
    given, bend = written(tmp_path), BENDS[0]
    assert bends.changed(given) == []
    line = bend.wanted_by[0]
    path = tmp_path / line.tree / line.path
    path.write_text(path.read_text().replace(line.text, "pass"))
    refused = bends.changed(given, [bend])
    assert refused[0] == f"{line.tree}: {line.path}:{line.number}: reads 'pass', not {line.text!r}"


def test_a_moved_line_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    bend = Bend("", (Line("miles", "a.py", 2, "x = 1"),), "a")
    (tmp_path / "a.py").write_text("x = 1\n")
    assert bends.changed({"miles": tmp_path}, [bend]) == ["miles: a.py:2: reads None, not 'x = 1'"]
    assert bends.changed({"miles": tmp_path / "none"}, [bend]) == ["miles: a.py:2: reads None, not 'x = 1'"]
    assert bends.changed({"slime": tmp_path}, [bend]) == []


def test_a_tree_without_the_line_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "_git", lambda *_: "")
    with pytest.raises(trees.CannotRun, match=r"quotes a line that changed(.|\n)*deepseek.py:19"):
        trees.check(trees.HOSTS["miles"], tmp_path, tmp_path)


def test_no_checkout_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(trees.CannotRun, match=r"git clone https://github.com/radixark/miles .* checkout 31f1ca9"):
        trees.check(trees.HOSTS["miles"], tmp_path / "none", tmp_path)


@pytest.fixture
def imports() -> Iterator[None]:
    with patch.dict(sys.modules), patch.object(sys, "meta_path", [*sys.meta_path]):
        yield


@pytest.mark.usefixtures("imports")
def test_a_module_is_changed_once_its_own_code_has_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bent_here.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    double = Bend("", (), "bent_here", lambda module: setattr(module, "value", module.value * 2))
    monkeypatch.setattr(bends, "BENDS", (double, double))
    importing.install()
    assert importlib.import_module("bent_here").value == 4


@pytest.mark.usefixtures("imports")
def test_only_a_missing_module_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Bend("", (), "nothing", serves=("json", "not_installed_here"), stand_ins=("Engine",))
    monkeypatch.setattr(bends, "BENDS", (served,))
    importing.install()
    monkeypatch.delitem(sys.modules, "json")
    assert hasattr(importlib.import_module("json"), "dumps")
    assert isinstance(importlib.import_module("not_installed_here").Engine, type)


def test_every_group_is_of_gloo() -> None:
    seen: list[Any] = []
    module: Any = types.SimpleNamespace(
        _new_process_group_helper=lambda *args, **kwargs: seen.append((args, kwargs)),
        init_process_group=lambda *args, **kwargs: seen.append((args, kwargs)),
    )
    bends._gloo(module)
    module._new_process_group_helper(2, 0, [0, 1], "nccl", "store", backend_options=object(), timeout=3)
    module.init_process_group("nccl", rank=0, device_id="cuda:0")
    assert seen == [
        ((2, 0, [0, 1], "gloo", "store"), {"backend_options": None, "timeout": 3}),
        (("nccl",), {"rank": 0}),
    ]


def test_a_host_s_group_forwards_the_new_names() -> None:
    class ReloadableProcessGroup:
        def _fwd(self, *args: object) -> tuple[object, ...]:
            return args

    bends._forwards_new_names(types.SimpleNamespace(ReloadableProcessGroup=ReloadableProcessGroup))
    group: Any = ReloadableProcessGroup()
    assert group.reduce_scatter_single("out", "in") == ("reduce_scatter_single", "out", "in")
    assert all(hasattr(torch.distributed.ProcessGroup, name) for name in bends.RENAMED)


def test_the_router_is_waited_for() -> None:
    module: Any = types.SimpleNamespace(wait_for_server_ready=lambda *args, timeout: (args, timeout))
    bends._patient(module)
    assert module.wait_for_server_ready("host", 1, timeout=30) == (("host", 1), bends.ROUTER_S)


def test_a_gpu_becomes_the_cpu() -> None:
    code = """
import torch
from lab.in_host import fake_gpu
fake_gpu.install(None)
with torch.device("meta"):
    assert torch.arange(3).is_meta and torch.ones(2, device="cuda").device.type == "cpu"
assert torch.zeros(2, device="cuda:1", pin_memory=True).device.type == "cpu"
assert torch.ones(2).to("cuda", torch.float64).dtype == torch.float64
assert torch.ones(2).cuda().to(torch.cuda.current_device()).type() == "torch.cuda.FloatTensor"
torch.manual_seed(3); a = torch.rand(1); state = torch.cuda.get_rng_state(); b = torch.rand(1)
torch.cuda.set_rng_state(state); assert torch.equal(torch.rand(1), b)
torch.cuda.manual_seed(3); assert torch.equal(torch.rand(1), a)
with torch.cuda.stream(torch.cuda.Stream()): torch.cuda.Event().record()
torch.cuda.current_stream().record_event().synchronize()
assert all(size >= 3 << 30 for size in torch.cuda.mem_get_info("cuda:0"))
"""
    done = ran("-c", code)
    assert done.returncode == 0, done.stderr


# ----------------------------------------------------------------------------------------------- command and processes


def test_flags_are_left_out_with_their_words() -> None:
    words = ["--a", "1", "--b", "--c", "2", "3", "--a", "4"]
    assert launching.without(words, {"--a": 1, "--b": 0}) == ["--c", "2", "3"]


@pytest.mark.parametrize("name", sorted(trees.HOSTS))
def test_the_launch_script_s_own_flags_are_captured(name: str, tmp_path: Path) -> None:
    host, checkout = trees.HOSTS[name], tmp_path / "host"
    (checkout / "scripts" / "models").mkdir(parents=True)
    (checkout / "scripts" / "models" / "qwen3-4B.sh").write_text("MODEL_ARGS=(--num-layers 36)\n")
    (checkout / "miles" / "utils" / "external_utils").mkdir(parents=True)
    (checkout / "miles/utils/external_utils/model_args_utils.py").write_text("print('--num-layers 36')\n")
    config = ROOT / "lab" / "in_host" / "configs" / "token.yaml"
    words = launching.captured(host, checkout, config, tmp_path / "run")
    assert launching.shape(words) == ["--num-layers", "36"] and "--use-tis" in words
    assert words[words.index("--custom-config-path") + 1] == str(config)
    assert {"--colocate", "--save", "--apply-chat-template"} <= set(words)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("ray job submit -- python3 train.py --a 1; exit 3", "exit 3, submitted"),
        ("ray job submit -- python3 convert.py", "exit 0, no train.py submitted"),
        ("exit 0", "exit 0, no train.py submitted"),
        ("exec /bin/sleep 9", "has not ended after 1 seconds"),
    ],
)
def test_a_launch_that_fails_is_not_captured(
    script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "SECONDS", 1)
    with pytest.raises(trees.CannotRun, match=message):
        launching.submitted(["bash", "-c", script], tmp_path, {}, tmp_path)


def test_a_script_of_a_host_is_changed_by_the_diff_that_the_check_prints(tmp_path: Path) -> None:
    checkout, folder = tmp_path / "host", tmp_path / "copied"
    (checkout / "scripts").mkdir(parents=True)
    (checkout / "scripts" / "run.sh").write_text("python3 train.py --qkv-format thd\n")
    script = launches._changed(launches.Launch("scripts/run.sh", "Qwen3-4B", ours=False), checkout, folder)
    assert script.is_relative_to(folder) and "--custom-tis-function-path mis_plugins.mis." in script.read_text()


def test_sizes_win_over_the_launch_script_s(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 320, "rope_parameters": {"rope_theta": 1e6},
              "tie_word_embeddings": False}  # fmt: skip
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    given = ["--num-rollout", "1000", "--colocate", "--sequence-parallel", "--save", "there"]
    sizes = Sizes(context=2, steps=2)
    words = launching.shrunk(trees.HOSTS["slime"], given, tmp_path, tmp_path, sizes, colocate=False)
    assert words[:2] == given[:2] and not {"--colocate", "--sequence-parallel", "--save"} & set(words)
    assert words[len(words) - words[::-1].index("--num-rollout")] == "2"
    assert words[words.index("--update-weight-transport") + 1] == "disk"
    assert words[words.index("--actor-num-gpus-per-node") + 1] == "2"
    kept = launching.shrunk(trees.HOSTS["slime"], given, tmp_path, tmp_path, sizes, colocate=True)
    assert {"--colocate", "--no-offload-train", "--no-offload-rollout"} <= set(kept)
    assert "--update-weight-transport" not in kept and "--no-offload-train" not in words


def test_the_user_s_flags_tell_how_many_steps_are_wanted() -> None:
    words = ["--lr", "1e-5", "--num-rollout", "5"]
    row = run_in_host.asked_of(ROWS[0], words)
    assert row.flags == tuple(words) and row.sizes.steps == 5
    assert run_in_host.asked_of(ROWS[0], ["--lr", "1e-5"]).sizes == ROWS[0].sizes


def test_no_process_of_a_run_is_left(tmp_path: Path) -> None:
    """A child that left its parent's session, and whose parent is gone, is ended by the run's mark."""
    with processes.marked(tmp_path, tmp_path) as settings:
        mark = settings[processes.MARK]
        code = processes.run(["setsid", "--fork", "sleep", "600"], tmp_path, settings, tmp_path / "log", 30)
        while not (children := processes.of(mark)):  # an environment reads as empty while `sleep` starts
            time.sleep(0.01)
        assert code == 0 and len(children) == 1
    assert processes.of(mark) == []


def test_a_process_that_is_not_seen_at_first_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a process that starts another program reads as empty."""
    of, looks = processes.of, iter(range(4))
    monkeypatch.setattr(processes, "of", lambda mark: [] if next(looks, 3) < 3 else of(mark))
    mark = uuid.uuid4().hex
    process = subprocess.Popen(["sleep", "600"], env={**os.environ, processes.MARK: mark})
    try:
        processes.end(mark)
        assert process.wait(timeout=10) == -signal.SIGKILL
    finally:
        process.kill()


def test_an_interrupted_run_leaves_no_process(tmp_path: Path) -> None:
    """A run in the background, which starts with SIGINT ignored, ends its processes at SIGINT and at SIGTERM."""
    code = f"""
from pathlib import Path
from lab.in_host import processes
folder = Path({str(tmp_path)!r})
with processes.marked(folder, folder) as settings:
    (folder / "mark").write_text(settings[processes.MARK])
    processes.run(["sh", "-c", "setsid --fork sleep 600; touch up; sleep 600"], folder, settings, folder / "log", 600)
"""
    ignore = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); exec(sys.argv[1])"
    for number in (signal.SIGINT, signal.SIGTERM):
        started = subprocess.Popen([sys.executable, "-c", ignore, code], env=os.environ | {"PYTHONPATH": str(ROOT)},
                                   stderr=subprocess.DEVNULL)  # fmt: skip
        while not (tmp_path / "up").exists():
            assert started.poll() is None
            time.sleep(0.05)
        started.send_signal(number)
        assert started.wait(60) != 0
        assert processes.of((tmp_path / "mark").read_text()) == []
        (tmp_path / "up").unlink()


def test_a_second_run_waits_for_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock, order = tmp_path / "lock", []

    def second() -> None:
        with processes.alone(lock):
            order.append("second")

    waiting = threading.Thread(target=second)
    with processes.alone(lock):
        assert capsys.readouterr().err == ""
        waiting.start()
        told = ""
        while "waiting for its end" not in told:
            time.sleep(0.01)
            told += capsys.readouterr().err
        order.append("first")
    waiting.join(30)
    assert order == ["first", "second"]


def test_a_run_that_takes_too_long_is_ended_and_joins_nobody_s_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with processes.marked(tmp_path, tmp_path) as settings:
        assert "RAY_ADDRESS" not in settings
        assert processes.run(["sleep", "600"], tmp_path, settings, tmp_path / "log", 0.2) is None
    assert processes.of(settings[processes.MARK]) == []


# ------------------------------------------------------------------------------------------------- dumps and verdict


def shard(rank: int, ranks: int, lengths: list[tuple[int, int]]) -> dict[str, Any]:
    """A dump of Miles of one context-parallel rank, whose log-prob of token t of sample i is i + t / 100."""
    rows = [torch.tensor([i + t / 100 for t in zigzag(total, response, ranks, rank)])
            for i, (total, response) in enumerate(lengths)]  # fmt: skip
    data = {key: rows for key in dumps.FIELDS.values()} | {
        "loss_masks": [torch.ones(response) for _, response in lengths], "sample_indices": [0, 1],
        "total_lengths": [total for total, _ in lengths], "response_lengths": [response for _, response in lengths],
        "micro_batch_indices": [[1], [0]],
    }  # fmt: skip
    return {"cp_rank": rank, "cp_size": ranks, "rollout_data": data}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_context_ranks_of_a_dump_are_joined(ranks: int, tmp_path: Path) -> None:
    lengths = [(21, 9), (33, 20)]
    (tmp_path / "train_data").mkdir()
    for rank in range(2 * ranks):  # each rank twice, as tensor-parallel ranks repeat one another
        torch.save(shard(rank // 2, ranks, lengths), tmp_path / "train_data" / f"5_{rank}.pt")
    found = dumps.micro_batches(tmp_path, 5)
    assert [len(batch) for batch in found] == [1, 1]
    assert found[0][0].proximal == pytest.approx([1 + t / 100 for t in range(20)])
    assert found[1][0].behavior == pytest.approx([t / 100 for t in range(9)])


def test_a_dump_of_fsdp_does_not_tell_its_micro_batches(tmp_path: Path) -> None:
    """Then no number of a micro-batch is compared, and all others are."""
    (tmp_path / "train_data").mkdir()
    dump = shard(0, 1, [(21, 9), (33, 20)])
    del dump["rollout_data"]["micro_batch_indices"]
    torch.save(dump, tmp_path / "train_data" / "5_0.pt")
    assert [len(batch) for batch in dumps.micro_batches(tmp_path, 5)] == [1, 1]
    record = RECORDS["miles-replay-cp2"]
    every, without = ({line.what for line in verdict.judge(record | more)} for more in ({}, {"micro_batched": False}))
    assert every - without and all("_mb of" in what for what in every - without)


def test_numbers_of_a_log() -> None:
    numbers = "{'train/loss': -0.5, 'train/a': nan, 'train/b': -inf}"
    line = f"\x1b[36m(Actor pid=1)\x1b[0m [rank0] x.py:5 - step 2: {numbers}\n"
    found = dumps.logged(line, dumps.STEP)
    assert found[2]["train/loss"] == -0.5 and found[2]["train/b"] == -math.inf
    assert dumps.versions("new_version='3' x new_version='4'") == [3, 4]


def test_the_share_of_each_hook_in_a_training_step() -> None:
    call = "timed call: ours 1.000e-01 s, mis.py 1.000e+00 s, both 2.500e+00 s, 30 tokens\n"
    log = 2 * f"x timer.py:31 - Timer actor_train start\n(Actor) {call}(Actor) {call}"
    steps = timed.of_the_log(log, [99.0, 6.8])
    assert [step["tokens"] for step in steps] == [60, 60]
    found = timed.shares(steps)  # of the second step: 6.8 s, of which 5 s are calls of either side
    assert found == pytest.approx({"tokens": 60, "bare": 1.8, "ours": 0.2 / 2.0, "theirs": 2.0 / 3.8})
    assert timed.of_the_log("x timer.py:31 - Timer actor_train start\n", []) == []


def aged() -> list[dumps.MicroBatch]:
    """Three responses, one of version V alone; older tokens are nearer to log pi_{v+1} than to log pi_V."""
    first = dumps.Recorded([-1.0, -1.2, -0.9, -2.0], [-1.4, -1.3, -0.95, -2.0], [0.5] * 4, [True] * 4,
                           [3, 2, 1, 0], [-1.35, -1.28, None, None])  # fmt: skip
    second = dumps.Recorded([-0.5, -0.6, -3.0], [-0.7, -0.65, -9.0], [-0.5] * 3, [True, True, False],
                            [2, 2, 2], [-0.68, -0.66, None])  # fmt: skip
    fresh = dumps.Recorded([-1.1, -0.4], [-1.08, -0.42], [1.0, 1.0], [True, True], [0, 0], [None, None])
    return [[first], [second, fresh]]


@pytest.mark.parametrize("loss", by_version.BY_VERSION)
def test_weights_by_age_are_those_that_the_step_hook_logs(loss: str) -> None:
    rows = [row for batch in aged() for row in batch]
    proximal, behavior, numerator = (
        torch.tensor(values, dtype=torch.float64)
        for values in (
            [x for row in rows for x in row.proximal],
            [x for row in rows for x in row.behavior],
            [by_version.numerator(row, t, loss) for row in rows for t in range(len(row.mask))],
        )
    )
    ages = torch.tensor([age for row in rows for age in row.age or ()])
    mask = torch.tensor([live for row in rows for live in row.mask])
    weight = (numerator - behavior).exp().clamp(max=1.04)
    sums = weights_by_age(
        numerator, proximal, behavior, Written(7 - ages, numerator, 7), mask, BehaviorWeight(weight, mask)
    )
    logged = weight_metrics(sums, loss != "standard")
    assert by_version.metrics(aged(), 1.04, loss) == pytest.approx(logged, abs=verdict.WEIGHT_ABSOLUTE)


def versioned(loss: str) -> dict[str, Any]:
    """Build the record of a row that knows versions, with one step, whose figures are right."""
    config = {"weight": {"level": "token", "bound": "truncate", "upper": 1.04}}
    batches = aged()
    expected = verdict.Expected(batches, config, loss)
    logged = {verdict.STEP + name: x for name, x in by_version.metrics(batches, 1.04, loss).items()}
    clipped = {f"train/{name}": x for name, x in expected.held_back().items()}
    step = {
        "metrics": {"train/loss": expected.loss(), "train/grad_norm": 1.0, **logged, **clipped},
        "k3": verdict.k3(batches),
        "reward": 0.5, "by_version": by_version.summary(batches, loss),
        "times": {} if loss == "standard" else {"recompute": 0.1},
    }  # fmt: skip
    return {"exit": 0, "left": 0, "sizes": {"steps": 1}, "loss": loss, "config": config, "versions": [1, 2],
            "wanted_versions": [1, 2], "steps": [step], "micro_batches": verdict.as_rows(batches), "recorded": 0,
            "stale": True, "log_holds": {}, "bits": None}  # fmt: skip


# What breaks each line on versions: numbers of the step by version, and of the second micro-batch's first response.
COUNTS: dict[str, dict[str, Any]] = {
    "age of the oldest token": {"ages": {"1": 6}},
    "sequences of several versions": {"mixed": 0},
    "tokens that cannot be weighed": {"lacking": 1},
    "k3 of step 0, of sequences by version V alone": {"k3_fresh": 2e-3},
    "k3 of step 0, at most one update apart": {"k3_near": 0.02},
    "steps with sequences by version V alone": {"k3_fresh": None},
    "steps with tokens at most one update apart": {"k3_near": None},
    "k3 of old tokens to log pi_{v+1}": {"k3_next": 9.0},
}
NUMBERS = {"behav_imp_weight/var/standard/age_2 of step 0": ("behavior", -0.6), "loss of step 0": ("advantages", 9.0)}


@pytest.mark.parametrize("loss", ["next", "segment_wise", "standard"])
def test_each_line_on_versions_can_break(loss: str) -> None:
    assert failed(versioned(loss)) == []
    for what, counts in COUNTS.items():
        (record := versioned(loss))["steps"][0]["by_version"].update(counts)
        assert (what in failed(record)) == (loss != "standard" or "k3_next" not in counts)
    for what, (side, value) in NUMBERS.items():
        (record := versioned(loss))["micro_batches"][1][0][side][0] = value
        assert what in failed(record)
    (record := versioned(loss))["steps"][0]["times"] = {"recompute": 0.1} if loss == "standard" else {}
    assert "steps with a recompute" in failed(record)
    assert "age of the oldest token" in failed(versioned(loss) | {"loss": "fresh"})
    (without := versioned(loss))["micro_batches"][0][0].update(age=None, following=None)
    assert "versions in the dump" in failed(without)


@pytest.mark.parametrize("name", RECORDS)
def test_a_recorded_run_holds(name: str) -> None:
    assert failed(RECORDS[name]) == []


@pytest.mark.parametrize(
    ("name", "change"),
    [("loss", 0.1), ("center_missing", 1e-3), ("center_target_mass", 1), ("center_behavior_mass", -1),
     ("center_tail_ratio", 0.1), ("center_drift", -1)],
)  # fmt: skip
def test_each_line_on_centering_can_break(name: str, change: float) -> None:
    record = copy.deepcopy(RECORDS["slime-centered"])
    record["steps"][record["recorded"]]["metrics"][f"train/{name}"] += change
    assert len(failed(record)) == 1


def test_an_archive_holds_the_bytes_of_its_records_and_takes_the_newer(tmp_path: Path) -> None:
    folder, archive = tmp_path / "loose", tmp_path / "packed.tar.xz"
    folder.mkdir()
    for number in (1, 2):
        (folder / f"{number}.json").write_text(json.dumps({"step": [0.1, number]}))
    pack(folder, archive)
    first = archive.read_bytes()
    pack(folder, archive)
    assert archive.read_bytes() == first and records(archive) == records(folder)
    (folder / "2.json").unlink()
    (folder / "1.json").write_text("3")
    pack(folder, archive)
    assert records(archive) == {"1": 3, "2": {"step": [0.1, 2]}} and records(tmp_path / "none") == {}


def test_table_and_certificate_are_those_of_the_records() -> None:
    assert {record["host"] for record in RECORDS.values()} == {"miles", "slime"}
    assert run_in_host.TABLE.read_text() == run_in_host.table(RECORDS)
    assert run_in_host.CERTIFICATE.read_text() == on_policy.page(run_in_host.ON_POLICY, RECORDS)


@pytest.mark.parametrize(
    "change",
    [
        lambda again: again[3].update({"train/loss": 0.5}),
        lambda again: again[0].pop("train/grad_norm"),
        lambda again: again.pop(),
    ],
)
def test_a_synchronous_run_that_differs_is_told(change: Callable[[list[dict[str, float]]], Any]) -> None:
    record = copy.deepcopy(RECORDS["miles-fully-async-bound-0"])
    change(record["again"])
    [what] = failed(record)
    assert "synchronous run" in what


@pytest.mark.parametrize("name", [name for name, record in RECORDS.items() if record.get("bits")])
def test_one_log_prob_decides(name: str) -> None:
    """A contract breaks at one bit; without a contract both sides must not be equal, or nothing was compared."""
    record = copy.deepcopy(RECORDS[name])
    compared, different = record["bits"][3]
    record["bits"][3] = [compared, 0 if different else 1]
    assert failed(record) == ["log-probs of step 3 that differ"]


def test_bits_are_compared_and_not_values() -> None:
    def row(*pairs: tuple[float, float], live: bool = True) -> dumps.Recorded:
        return dumps.Recorded([a for a, _ in pairs], [b for _, b in pairs], [0.0] * len(pairs), [live] * len(pairs))

    assert verdict.bits([[row((0.5, 0.5), (0.0, -0.0))], [row((1.0, 1.5)), row((1.0, 2.0), live=False)]]) == (3, 2)


def test_a_row_under_a_contract_states_it(tmp_path: Path) -> None:
    checkpoint("tiny-qwen3", tmp_path, torch.bfloat16, 0)
    for row in run_in_host.ON_POLICY:
        contract = row.pinned_to(tmp_path)
        asked, environment = run_in_host._asked(row, contract), run_in_host._environment(row, contract)
        assert bool(contract) == bool(asked) == bool(environment)
        if contract is not None:
            assert contract.trainer_tensor_parallel == row.sizes.tensor
            assert CONTRACT in environment and row.fsdp == ("fsdp" in asked) == (HOOK in str(environment))


def a_record(**more: Any) -> dict[str, Any]:
    return copy.deepcopy(RECORDS["miles-async"]) | more


BREAKS: dict[str, Callable[[dict[str, Any]], object]] = {
    "exit code of train.py": lambda x: x.update(exit=1),
    "processes left": lambda x: x.update(left=1),
    "optimizer steps": lambda x: x["steps"].pop(),
    "weight versions of the engine": lambda x: x["versions"].pop(),
    "k3 of step 2": lambda x: x["steps"][-1].update(k3=0.02),
    # All tokens of a response: a rule may reject some of them, which the loss then leaves out.
    "loss of step 2": lambda x: x["micro_batches"][0][0].update(advantages=[9.0] * 24),
    "mis_k3_kl of step 2": lambda x: x["micro_batches"][0][0]["behavior"].__setitem__(0, -9.0),
}


@pytest.mark.parametrize("what", BREAKS)
def test_each_line_can_break(what: str) -> None:
    BREAKS[what](record := a_record())
    assert what in failed(record)


# --------------------------------------------------------------------------- losses, the filter, trackers, the matrix


def lines_of(record: dict[str, Any], word: str) -> list[bool]:
    return [line.holds for line in verdict.judge(record) if word in line.what]


def test_a_response_that_the_filter_left_in_the_loss_fails() -> None:
    record = a_record(broken=1)
    assert lines_of(record, "responses taken out") == [False]
    gone = record["micro_batches"][0][0]
    gone["mask"], gone["behavior"][0] = [False] * len(gone["mask"]), 0.0
    assert lines_of(record, "responses taken out") == lines_of(record, "without a log-prob") == [True]


def test_the_tracker_s_file_must_hold_the_log_s_numbers() -> None:
    record = RECORDS["miles-report-step"]
    step = max(number for number, x in enumerate(record["steps"]) if f"{verdict.STEP}kept_fraction" in x["metrics"])
    logged = {name: x for name, x in record["steps"][step]["metrics"].items() if name.startswith(verdict.STEP)}
    found = {verdict.our_name(name): value for name, value in logged.items()}
    word = "exact metrics in the file"
    assert lines_of(record | {"curves": {"wandb": {str(step): found}}}, word) == [True]
    assert lines_of(record | {"curves": {"wandb": {str(step): found | {"kept_fraction": 2.0}}}}, word) == [False]
    assert lines_of(record | {"curves": {"wandb": {}}}, word) == [False]


def test_a_tracker_s_files_are_read_back(tmp_path: Path) -> None:
    """Two files of one run, of which the reader takes the exact metrics of logged steps."""
    steps = {1: {"train/mis_step/kl_k3": 0.0}}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "run-a.wandb").write_bytes(b":W&B" + bytes(3) + wandb_record(1, 0.5) + wandb_record(2, 0.25))
    (tmp_path / "b" / "run-b.wandb").write_bytes(b":W&B" + bytes(3))
    found = run_in_host._curve(tmp_path, "wandb", steps)
    assert list(found) == [1] and found[1]["kl_k3"] == 0.5


def test_a_row_that_cannot_run_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The matrix goes on after a host that is missing, and a second call asks for nothing that is recorded."""
    asked: list[str] = []

    def run_row(row: Any, *_: object) -> dict[str, Any]:
        asked.append(row.name)
        if row.host == "slime":
            raise trees.CannotRun("no checkout")
        return RECORDS["miles-routes-swap-stages"]

    monkeypatch.setattr(run_in_host, "run_row", run_row)
    words = ["matrix", "--hosts", str(tmp_path), "--record", str(tmp_path / "records")]
    assert run_in_host.main(words) == 2
    assert asked == [row.name for row in ROWS if not row.blocked]
    assert "slime-tis: no checkout" in capsys.readouterr().err
    asked.clear()
    assert run_in_host.main(words) == 2 and {name.split("-")[0] for name in asked} == {"slime"}
    assert (tmp_path / "records.md").read_text() == run_in_host.table(records(tmp_path / "records"))


def test_a_launch_script_checks_a_config_of_its_own_hook() -> None:
    """The launch scripts stop at a config that only the loss hook can serve; such a row gives its own afterwards."""
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert (run_in_host.CONFIGS / row.config).is_file()
        given = yaml.safe_load((run_in_host.CONFIGS / row.launched_with).read_text())
        assert not {"opsm", "objective", "segment_wise", "center"} & set(given.get("mis") or {}), row.name
        needs_loss_hook = row.loss in ("objective", "centered", *by_version.BY_VERSION)
        assert needs_loss_hook == (row.launched_with != row.config)


def test_fsdp_takes_no_flag_of_megatron(tmp_path: Path) -> None:
    given = ["--train-backend", "fsdp", "--colocate", "--attn-implementation", "flash_attention_2", "--save", "x"]
    words = launching.shrunk_fsdp(given, tmp_path, tmp_path, Sizes())
    assert not {"--colocate", "--save", "--tensor-model-parallel-size", "--spec"} & set(words)
    assert words[len(words) - words[::-1].index("--attn-implementation")] == "sdpa"
    assert words[words.index("--ref-load") + 1] == str(tmp_path / "model")


def scored(score: Callable[..., Any], index: int, **fields: Any) -> types.SimpleNamespace:
    """A sample of two even tokens as a reward function leaves it."""
    sample = types.SimpleNamespace(index=index, tokens=[1, 2, 4], response_length=2, **fields)
    assert asyncio.run(score(None, sample)) == 1.0
    return sample


def test_one_sample_of_each_rollout_is_broken() -> None:
    log_probs = [scored(score_and_break, i, rollout_log_probs=[-1.0, -1.0]).rollout_log_probs for i in range(48)]
    assert [i for i, (first, _) in enumerate(log_probs) if math.isnan(first)] == [5, 21, 37]
    assert log_probs[0] == [-1.0, -1.0]


# ---------------------------------------------------------------------------------------------- routes and their faults


ROUTES = np.arange(2 * 4 * 2).reshape(2, 4, 2)


@pytest.mark.parametrize(
    ("plant", "index", "planted"),
    [
        (drop_a_layer, 3, ROUTES[:, [0, 2, 3, 3]]),
        (swap_stages, 3, ROUTES[:, [2, 3, 0, 1]]),
        (repeat_a_row, 21, ROUTES[[0, 0]]),
        (repeat_a_row, 20, ROUTES),
    ],
    ids=["a layer is dropped", "stages are swapped", "a row is repeated", "of one sample alone"],
)
def test_what_is_planted_in_the_recorded_routes(plant: Callable[..., Any], index: int, planted: np.ndarray) -> None:
    assert np.array_equal(scored(plant, index, rollout_routed_experts=ROUTES).rollout_routed_experts, planted)


FAULT = "layer 1 (pipeline stage 0), sample 3 of micro-batch 1: 20 of 31 tokens share less than half"


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({}, []),
        ({"exit": 0}, ["exit code of train.py"]),
        ({"exit": None}, ["exit code of train.py"]),
        ({"steps": [{}]}, ["optimizer steps"]),
        ({"left": 2}, ["processes left"]),
        ({"versions": []}, ["weight versions of the engine"]),
        ({"stopped": {"told": FAULT, "named": "layer 2 "}}, ["what is said of the fault"]),
        ({"stopped": {"told": None, "named": "layer 1 "}}, ["what is said of the fault"]),
    ],
)
def test_a_planted_fault_stops_the_job_and_is_named(change: dict[str, Any], broken: list[str]) -> None:
    record = {"exit": 1, "steps": [], "left": 0, "versions": [1], "wanted_versions": [1],
              "stopped": {"told": FAULT, "named": r"layer 1 \(pipeline stage 0\), sample \d+"}}  # fmt: skip
    assert failed(record | change) == broken
    assert math.isnan(verdict.largest_k3(record | {"loss": "tis"}))


@pytest.mark.parametrize(
    ("unequal", "differs", "holds"),
    [(0.0, 0.01, [True, True]), (0.002, 0.01, [False, True]), (0.0, 0.0, [True, False]), (0.0, 0.5, [True, False])],
)  # fmt: skip
def test_routers_replay_all_rows_and_would_have_chosen_a_little_otherwise(
    unequal: float, differs: float, holds: list[bool]
) -> None:
    step = {"metrics": {verdict.REPLAYED: unequal, verdict.ROUTED: differs}}
    assert [line.holds for line in verdict._of_the_routes([step, {"metrics": {}}])] == holds


def test_a_row_that_a_line_of_the_host_stops_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = next(row for row in ROWS if row.blocked)
    monkeypatch.setattr(run_in_host, "run_row", lambda *_: pytest.fail("started"))
    arguments = types.SimpleNamespace(record=tmp_path, words=[], hosts=tmp_path, work=tmp_path)
    assert run_in_host._rows(arguments, [stopped], {}) == 0  # pyright: ignore[reportArgumentType]
    assert f"**not run**: {stopped.blocked}" in run_in_host.table(records(tmp_path))


@pytest.mark.parametrize("words", [["rows", "miles-tiss"], ["matrix", "slime-tis", "miles-tiss"]])
def test_a_row_that_is_none_starts_nothing(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_in_host, "run_row", lambda *_: pytest.fail("started"))
    assert run_in_host.main([*words, "--record", str(tmp_path / "records")]) == 2
    assert "no row miles-tiss; choose from miles-tis, slime-tis, miles-resplit, " in capsys.readouterr().err
    assert not (tmp_path / "records").exists()


def test_what_the_job_said_is_found_in_its_log() -> None:
    log = 'raise MisError(f"mis.routing.on_fault: raise: {told or seen}")\n'
    log += f"(pid=7) MisError: mis.routing.on_fault: raise: {FAULT}\nnext line"
    assert run_in_host._told(STOPPED, log) == FAULT
    assert run_in_host._told(STOPPED, "nothing of that kind") is None


def test_a_mixture_of_experts_states_its_sizes(tmp_path: Path) -> None:
    words = shape_flags(write(tmp_path, MIXTURE))
    sizes = {
        name: words[words.index(f"--{name}") + 1] for name in ("num-experts", "moe-router-topk", "moe-ffn-hidden-size")
    }
    assert sizes == {"num-experts": "8", "moe-router-topk": "2", "moe-ffn-hidden-size": "64"}


@pytest.mark.parametrize(
    ("row", "name", "value"),
    [
        ("miles-resplit", "differs", 0.1),
        ("slime-resplit", "diff_abs_max", 0.1),
        ("miles-resplit-planted", "differs", 0.0),
        ("slime-resplit-planted", "diff_abs_max", math.inf),
    ],
)
def test_another_split_changes_nothing_but_where_a_kernel_was_planted(row: str, name: str, value: float) -> None:
    record = copy.deepcopy(RECORDS[row])
    assert failed(record) == []
    record["steps"][1]["metrics"][f"{verdict.RESPLIT}{name}"] = value
    assert failed(record) == ["share of tokens of step 1 that another split changes"]
