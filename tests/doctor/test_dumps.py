"""The files that the processes of a side write, one a rank, and what they make together."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from itertools import product
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from test_settings import CONTRACT, HOST

from mis_plugins.errors import UserError
from true_on_policy.contract.gpu import gpu_contract, model_contract
from true_on_policy.engines.server import free_port
from true_on_policy.errors import ContractError
from true_on_policy.observe import dumps
from true_on_policy.observe.dumps import CONTRACT as CONTRACT_ROW
from true_on_policy.observe.dumps import (
    RANKS,
    Dump,
    DumpError,
    Process,
    dump,
    load,
    load_engine,
    merged,
    remove,
    this_process,
    write,
)
from true_on_policy.observe.process import Observation, observe


def test_a_file_gives_back_what_was_seen(tmp_path: Path) -> None:
    file = tmp_path / "made" / "trainer.json"
    dump(file, CONTRACT, HOST)
    contract, seen = load(file)
    assert contract == CONTRACT
    here = observe(CONTRACT, HOST)
    assert dict(seen.settings) == {**here.settings, RANKS: "all"}
    assert seen.unseen == here.unseen and set(seen.configured) == set(here.configured)
    without_sizes = gpu_contract("llama", "fsdp", engine_gemm="deep_gemm")
    dump(file, without_sizes)
    assert load(file)[0] == without_sizes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stated: stated.update(format=1), "format 1, this version reads 3"),
        (lambda stated: stated.pop("settings"), "not written by true_on_policy.observe.dumps .*settings"),
        (lambda stated: stated["contract"].pop("size"), "not written by"),
        (lambda stated: stated.update(unseen=3), "not written by"),
    ],
)
def test_another_file_is_refused(change, message: str, tmp_path: Path) -> None:
    file = tmp_path / "trainer.json"
    dump(file, CONTRACT)
    stated = json.loads(file.read_text())
    change(stated)
    file.write_text(json.dumps(stated))
    with pytest.raises(DumpError, match=message):
        load(file)
    file.write_text("not json")
    with pytest.raises(DumpError, match="not written by"):
        load(file)
    file.unlink()
    with pytest.raises(DumpError, match="no such file; true_on_policy.hosts.miles_init writes"):
        load(file)


def test_a_contract_that_cannot_hold_is_refused_from_a_file_too(tmp_path: Path) -> None:
    dump(tmp_path / "trainer.json", CONTRACT)
    stated = json.loads((tmp_path / "trainer.json").read_text())
    stated["contract"]["engine_tp"] = 1
    (tmp_path / "trainer.json").write_text(json.dumps(stated))
    with pytest.raises(ContractError, match="two orders"):
        load(tmp_path / "trainer.json")


def rank_of_a_trainer(rank: int, ranks: int, port: int, path: str, algorithm: tuple[str, ...]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NCCL_ALGO": algorithm[rank]}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    dump(Path(path), CONTRACT, HOST)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("algorithm", "shown"), [(("Ring", "Tree"), "Ring on rank 0; Tree on rank 1"), (("Ring", "Ring"), "Ring")]
)
def test_every_rank_over_gloo_is_read(algorithm: tuple[str, ...], shown: str, tmp_path: Path) -> None:
    mp.spawn(rank_of_a_trainer, (2, free_port(), str(tmp_path / "trainer.json"), algorithm), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trainer.json", "trainer.rank1.json"]
    for path in (tmp_path / "trainer.json", tmp_path):
        _, seen = load(path)
        assert seen.settings["NCCL_ALGO"] == shown and seen.settings[RANKS] == "all"
        assert seen.split == (("NCCL_ALGO",) if "Tree" in shown else ())


def ranks(*settings: dict[str, str], of: int | None = None, **more) -> list[Dump]:
    """One dump a rank."""
    count = of or len(settings)
    return [Dump(Process(i, count), Observation(each, {}), None, **more) for i, each in enumerate(settings)]


def test_a_rank_that_wrote_nothing_is_not_seen() -> None:
    seen = merged(ranks({"a": "1"}, {"a": "1"}, of=4))
    assert seen.settings == {"a": "1"} and seen.why(RANKS) == "ranks 2, 3 of 4 wrote nothing"


def test_a_row_that_one_rank_lacks_is_not_seen_and_one_in_which_others_differ_is_told() -> None:
    sides = ranks({"a": "1", "b": "1"}, {"a": "1", "b": "2"}, {})
    sides[2].seen.unseen.update({"a": "no CUDA device"})  # pyright: ignore[reportAttributeAccessIssue]
    seen = merged(sides)
    assert seen.why("a") == "rank 2: no CUDA device" and "a" not in seen.settings
    assert seen.settings["b"] == "1 on rank 0; 2 on rank 1" and seen.split == ("b",)


def test_many_ranks_are_counted() -> None:
    seen = merged(ranks(*[{"a": str(rank == 7)} for rank in range(16)]))
    assert seen.settings["a"] == "False on 15 ranks, the first 0; True on rank 7"


@pytest.mark.parametrize(
    ("written", "of_ranks", "why"),
    [
        (((0, 4), (3, 4), (0, 2), (1, 2)), {RANKS: "all"}, "not stated"),
        (((1, 4), (0, 2)), {}, "rank 1 of 2 wrote nothing"),
    ],
)
def test_what_a_larger_run_left_is_not_read(written: tuple, of_ranks: dict, why: str, tmp_path: Path) -> None:
    path = tmp_path / "trainer.json"
    for rank, count in written:
        write(path, Dump(Process(rank, count), Observation({"a": str(count)}, {}), CONTRACT))
    seen = load(path)[1]
    assert seen.settings == {"a": "2"} | of_ranks and seen.why(RANKS) == why


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = write(tmp_path / "trainer.json", Dump(Process(0, 2), Observation({}, {}), CONTRACT))
    os.mkfifo(tmp_path / "trainer.rank1.json")
    with pytest.raises(DumpError, match=r"trainer\.rank1\.json: is no regular file"):
        load(path)


def test_a_trainers_file_is_no_engines(tmp_path: Path) -> None:
    path = write(tmp_path / "trainer.json", Dump(Process(), Observation({}, {}), CONTRACT))
    with pytest.raises(DumpError, match=r"trainer\.json: states a contract, as a trainer's file does"):
        load_engine(path, None)


def test_a_rank_that_fails_does_not_show_its_earlier_self(tmp_path: Path) -> None:
    path = tmp_path / "trainer.json"
    dump(path, CONTRACT)
    write(path, Dump(Process(1, 2), Observation({}, {}), CONTRACT))
    remove(path)
    assert [file.name for file in tmp_path.iterdir()] == ["trainer.rank1.json"]


def test_ranks_with_two_contracts_are_told(tmp_path: Path) -> None:
    path, other = tmp_path / "trainer.json", model_contract("qwen3-4B", "fsdp")
    for rank, contract in enumerate((CONTRACT, other)):
        write(path, Dump(Process(rank, 2), Observation({}, {}), contract))
    contract, seen = load(path)
    assert contract == CONTRACT and CONTRACT_ROW in seen.split
    assert "'fsdp'" in seen.settings[CONTRACT_ROW] and "on rank 1" in seen.settings[CONTRACT_ROW]


def test_a_rank_with_two_files_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trainer.json"
    for rank in (0, 1):
        write(path, Dump(Process(rank, 2), Observation({}, {}), CONTRACT))
    (tmp_path / "trainer.rank1.old.json").write_bytes((tmp_path / "trainer.rank1.json").read_bytes())
    with pytest.raises(DumpError, match=r"trainer\.json: more than one file of rank 1"):
        load(path)


def engine(folder: Path, port: int, **process) -> Path:
    where = Process(url=f"http://10.0.0.1:{port}", **process)
    return write(folder / f"engine-{port}.json", Dump(where, Observation({"port": str(port)}, {}), None))


def test_an_engine_is_found_by_its_port(tmp_path: Path) -> None:
    for port in (1, 2):
        engine(tmp_path, port)
    assert load_engine(tmp_path, "http://127.0.0.1:2/").settings["port"] == "2"
    for url, message in ((None, "2 engines at any URL"), ("http://127.0.0.1:3", "0 engines at .*:3; there are: eng")):
        with pytest.raises(DumpError, match=message):
            load_engine(tmp_path, url)
    assert load_engine(tmp_path / "engine-1.json", None).settings["port"] == "1"
    with pytest.raises(DumpError, match="states no contract"):
        load(tmp_path / "engine-1.json")  # no trainer's


def test_engines_of_one_port_are_told_apart_by_their_machine(tmp_path: Path) -> None:
    here = this_process().host
    for address, host in (("10.0.0.1", "elsewhere"), ("10.0.0.2", here)):
        told = Dump(replace(this_process(f"http://{address}:1"), host=host), Observation({"at": address}, {}), None)
        write(tmp_path / f"engine-{address}-1.json", told)
    for url, found in (
        ("http://10.0.0.1:1", "10.0.0.1"),
        ("http://10.0.0.2:1/", "10.0.0.2"),
        ("http://127.0.0.1:1", "10.0.0.2"),
        ("http://localhost:1", "10.0.0.2"),
        ("http://[::1]:1", "10.0.0.2"),
    ):
        assert load_engine(tmp_path, url).settings["at"] == found
    with pytest.raises(DumpError, match="0 engines at http://10.0.0.3:1; there are: engine-10.0.0.1-1.json, "):
        load_engine(tmp_path, "http://10.0.0.3:1")


def test_an_engine_that_has_ended_is_not_believed(tmp_path: Path) -> None:
    here = vars(this_process())
    del here["rank"], here["ranks"], here["url"]
    assert load_engine(engine(tmp_path, 1, **here), None).settings["port"] == "1"
    assert load_engine(engine(tmp_path, 1, **here | {"host": "elsewhere", "began": 1}), None).settings["port"] == "1"
    zombie = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    running = {"pid": zombie.pid, "began": dumps._began(zombie.pid)}
    assert load_engine(engine(tmp_path, 1, **here | running), None).settings["port"] == "1"
    zombie.kill()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    for other in (running, {"began": here["began"] - 1}):  # a later process has the process id
        with pytest.raises(DumpError, match=f"process .* of {here['host']}, which wrote it, has ended"):
            load_engine(engine(tmp_path, 1, **here | other), None)
    zombie.wait()
    with pytest.raises(DumpError, match=f"process {zombie.pid} of {here['host']}, which wrote it, has ended"):
        load_engine(engine(tmp_path, 1, **here | {"pid": zombie.pid}), None)


ODD = [None, True, 10**12, "x", [1], {"a": ["b"]}]


def places(stated: Any, at: tuple = ()) -> Iterator[tuple]:
    yield at
    for name in stated if isinstance(stated, dict) else ():
        yield from places(stated[name], (*at, name))


def test_no_value_of_a_strangers_file_is_more_than_an_error_in_words(tmp_path: Path) -> None:
    file = tmp_path / "trainer.json"
    dump(file, CONTRACT)
    text = file.read_text()
    for place, value in product([*places(json.loads(text))][1:], ODD):
        stated = json.loads(text)
        *path, last = place
        reduce(getitem, path, stated)[last] = value
        file.write_text(json.dumps(stated))
        with suppress(UserError):
            load(file)


def test_a_damaged_file_hides_no_other_engine(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    seen = Observation({"device": "cuda"}, {})
    write(tmp_path / "engine-a-30000.json", Dump(this_process("http://h:30000"), seen, None))
    (tmp_path / "engine-b-30001.json").write_text("\x1b[2J")
    assert load_engine(tmp_path, "http://h:30000").settings["device"] == "cuda"
    read = capsys.readouterr().err
    assert read.startswith("not read: ") and "engine-b-30001.json" in read and "\x1b" not in read
