"""Server processes, engines without theirs, and the stand-in for the kernels that a CPU lacks."""

import asyncio
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
from commands import ROOT
from hostile import answering, ok
from launch import alive

from true_on_policy.bitwise import equal_bits
from true_on_policy.contract.cpu import Contract
from true_on_policy.engines.handover import ASKED, CONTRACT, FOLDER, FORKS, KEY, ORDER, handed_over
from true_on_policy.engines.hf.engine import HuggingFace
from true_on_policy.engines.protocol import EngineError, Request, log_probs
from true_on_policy.engines.server import Server, _telling, free_port, inherited, interpreter, started
from true_on_policy.engines.sglang import engine as sglang
from true_on_policy.engines.sglang import plugin
from true_on_policy.engines.sglang import plugin as sglang_plugin
from true_on_policy.engines.sglang.stand_in import sgl_kernel
from true_on_policy.engines.vllm import plugin as vllm_plugin
from true_on_policy.engines.vllm.engine import VLLM
from true_on_policy.engines.vllm.plugin import Guard
from true_on_policy.errors import PinError
from true_on_policy.kernels.pin import pinned

# Answers any GET with its key at once, /echo with what was posted, /slow never; leaves a child of its own running.
SERVES = """
import http.server, os, subprocess, sys, tempfile, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
left = tempfile.mkstemp()[1]
print("child", child.pid, left, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, body=b"{}"):
        self.send_response(200); self.end_headers(); self.wfile.write(body)
    def do_GET(self):
        wanted = "Bearer " + os.environ["TRUE_ON_POLICY_ENGINE_KEY"]
        self.answer() if self.headers["Authorization"] == wanted else self.send_error(401)
    def do_POST(self):
        if self.path == "/slow": time.sleep(600)
        if self.path == "/refuse": return self.send_error(400, "no such model")
        if self.path == "/die": raise SystemExit
        if self.path == "/key": return self.answer(self.headers["Authorization"].encode())
        if self.path == "/nan": return self.answer(b"[NaN]")
        self.answer(self.rfile.read(int(self.headers["Content-Length"])))
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
SOON = 20.0  # seconds for a Python to start, on a busy machine


def start(source: str) -> Server:
    port = free_port()
    return Server("fake", [sys.executable, "-c", source, str(port)], os.environ, port)


@pytest.fixture
def server() -> Iterator[Server]:
    server = start(SERVES)
    server.wait_until_ready("/health", SOON)
    yield server
    server.close()


def test_a_server_answers_and_its_whole_group_ends_with_it(server: Server):
    assert server.post("/echo", {"tokens": [1, 2]}, SOON) == {"tokens": [1, 2]}
    child, left = server.output().split()[1:]
    assert alive(int(child)) and Path(left).exists()
    server.close()
    assert not alive(int(child)) and not Path(left).exists()
    with socket.socket() as prober:
        assert prober.connect_ex(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) != 0
    server.close()  # a second time does nothing
    with pytest.raises(EngineError, match="^fake: /echo: .*refused"):
        server.post("/echo", {}, SOON)


@pytest.mark.parametrize(
    ("path", "seconds", "message"),
    [
        ("/slow", 0.5, " did not answer within 0.5 s"),
        ("/refuse", SOON, r" answered 400: [^$]*no such model"),
        ("/nan", SOON, ": the answer is no JSON: NaN is no number"),
    ],
)
def test_what_a_server_does_not_answer_is_an_error_and_no_hang(path: str, seconds: float, message: str, server: Server):
    began = time.monotonic()
    with pytest.raises(EngineError, match=f"fake: {path}{message}"):
        server.post(path, {}, seconds)
    assert time.monotonic() - began < SOON


def test_a_server_gets_the_key_of_its_run_beside_its_command_line(server: Server):
    assert server._ask("/key", SOON, {}) == f"Bearer {server.key}".encode()
    process = Path(f"/proc/{server._process.pid}")
    assert f"{KEY}={server.key}".encode() in (process / "environ").read_bytes()
    assert server.key.encode() not in (process / "cmdline").read_bytes()


def test_sglang_reads_its_key_from_a_file_of_this_user_alone(tmp_path: Path):
    arguments, variables = sglang._private(tmp_path, "k")
    assert Path(arguments[1]).read_text() == "api-key: k\n" and "k" not in arguments
    assert list(variables.values()) == [f"file://{tmp_path}/ranks"]
    server = start("import time; time.sleep(600)")
    assert Path(server._scratch.name).stat().st_mode & 0o077 == 0
    server.close()


@pytest.mark.parametrize(
    ("kind", "given", "status"),
    [("http", b"Bearer k", 200), ("http", b"Bearer l", 401), ("http", None, 401), ("websocket", None, 401)],
)
def test_vllms_guard_asks_each_request_for_the_key(
    kind: str, given: bytes | None, status: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(KEY, "k")
    sent = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append({"status": 200})

    async def send(message: dict) -> None:
        sent.append(message)

    headers = [] if given is None else [(b"authorization", given)]
    asyncio.run(Guard(app)({"type": kind, "headers": headers}, cast(Any, None), send))
    assert sent[0]["status"] == status


def test_a_server_that_dies_while_starting_tells_its_last_words():
    server = start("def f():\n    raise RuntimeError('no weights here')\nf()")
    with pytest.raises(EngineError, match=r"exit code 1 while starting[^$]*RuntimeError: no weights here"):
        server.wait_until_ready("/health", SOON)
    server.close()


def test_a_free_port_is_none_that_an_outgoing_connection_may_get():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 1 and all(20_000 <= port < first for port in ports)


@pytest.mark.parametrize(("taken", "served"), [(2, True), (3, False)])
def test_a_port_that_another_process_took_is_replaced(taken: int, served: bool, monkeypatch: pytest.MonkeyPatch):
    """The server's own bind fails twice, and its third port is free; a third failure is an error.

    The first port is a stranger's, which answers every request.
    """
    with ExitStack() as stack:
        stranger = stack.enter_context(answering(ok(b"{}")))
        holders = [stack.enter_context(socket.socket()) for _ in range(taken - 1)]
        for holder in holders:
            holder.bind(("127.0.0.1", 0))
        ports = [int(stranger.rpartition(":")[2]), *(holder.getsockname()[1] for holder in holders), free_port()]
        monkeypatch.setattr("true_on_policy.engines.server.free_port", iter(ports).__next__)
        command = [sys.executable, "-c", SERVES.replace("sys.argv[1]", "sys.argv[2]")]
        if served:
            server = started("fake", command, os.environ)
            stack.callback(server.close)
            assert server.url.endswith(f":{ports[-1]}")
        else:
            with pytest.raises(EngineError, match=r"exit code 1 while starting[^$]*Address already in use"):
                started("fake", command, os.environ)


def test_a_server_that_never_gets_ready_is_an_error():
    server = start("import time; print('loading', flush=True); time.sleep(600)")
    with pytest.raises(EngineError, match=r"not ready within 1 s"):
        server.wait_until_ready("/health", 1)
    server.close()


STARTS_A_SERVER = """
import os, sys, time
from true_on_policy.engines.server import Server, free_port
Server("fake", [sys.executable, "-c", "import time; time.sleep(600)"], os.environ, free_port())
print("started", flush=True)
time.sleep(600)
"""


def test_a_server_ends_when_its_parent_is_killed():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", STARTS_A_SERVER]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    parent.stdout.readline()
    [child] = children(parent.pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + SOON
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


# Hugging Face's engine


REQUESTS = [
    Request((5, 6, 7), 9, seed=1),
    Request(tuple(range(2, 150)), 4, seed=2),  # longer than a chunk of the prefill
    Request((9,), 12, seed=3, temperature=0.7),
]


def test_what_was_asked_is_sampled_and_the_seed_decides(tiny_fp32: Path):
    engine = HuggingFace(tiny_fp32, "fp32")
    samples, again = engine.generate(REQUESTS), engine.generate(REQUESTS)
    assert [len(sample.tokens) for sample in samples] == [9, 4, 12]
    assert [len(sample.log_probs) for sample in samples] == [9, 4, 12]
    assert [sample.tokens for sample in samples] == [sample.tokens for sample in again]
    other = engine.generate([Request((5, 6, 7), 9, seed=4)])
    assert other[0].tokens != samples[0].tokens


def test_an_engine_of_nan_weights_says_so(tiny_fp32: Path):
    engine = HuggingFace(tiny_fp32, "fp32")
    engine._model.get_output_embeddings().weight.data[7] = math.nan
    with pytest.raises(EngineError, match="the model gives NaN for log-probs"):
        engine.generate(REQUESTS)


def test_a_response_is_over_with_its_first_end(tiny_fp32: Path):
    engine = HuggingFace(tiny_fp32, "fp32")
    whole = engine.generate(REQUESTS)[0]
    place = next(at for at in range(1, 8) if whole.tokens[at] not in whole.tokens[:at])
    cut = engine.generate([replace(REQUESTS[0], end=whole.tokens[place]), *REQUESTS[1:]])[0]
    assert cut.tokens == whole.tokens[: place + 1] and len(cut.log_probs) == place + 1
    assert equal_bits(cut.log_probs, whole.log_probs[: place + 1])


@pytest.mark.parametrize(
    ("tokens", "over"),
    [
        ((5, 6, 7, 8), True),
        ((5, 6, 7), False),
        ((5, 2), True),
        ((5, 6, 7, 2), True),
        ((5, 2, 7, 8), False),
        ((), False),
    ],
)
def test_a_response_of_four_tokens_at_most_with_2_as_its_end(tokens: tuple[int, ...], over: bool):
    assert Request((1,), 4, end=2).over(tokens) is over


# SGLang and vLLM, without their servers


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_without_the_environment_the_error_says_what_to_run(
    engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv(f"{engine.upper()}_VENV", str(tmp_path / "nowhere"))
    with pytest.raises(EngineError, match=rf"nowhere: no {engine} there; run `bash .*install.sh {engine}`"):
        interpreter(engine)


def test_an_engine_inherits_neither_our_environment_nor_an_emulated_triton(monkeypatch: pytest.MonkeyPatch):
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "TRITON_INTERPRET", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    given = inherited()
    assert not {"PYTHONPATH", "VIRTUAL_ENV", "TRITON_INTERPRET"} & set(given)
    assert given["OMP_NUM_THREADS"] == given["TORCH_COMPILE_DISABLE"] == "1"


def test_vllm_refuses_a_tree(tmp_path: Path):
    with pytest.raises(EngineError, match="contract.leaves: 2: vLLM adds up no tree"):
        VLLM(tmp_path, "fp32", Contract(leaves=2))


def test_rounded_log_probs_are_refused_and_a_float32_in_fewest_digits_is_not():
    exact = torch.tensor([-0.123456789, -11.25, -1.4142135])
    assert equal_bits(log_probs([float(str(x)) for x in exact.numpy()]), exact)
    with pytest.raises(EngineError, match="log-probs are rounded, as -0.1235 is"):
        log_probs([round(x, 4) for x in exact.tolist()])


def test_a_missing_log_prob_is_never_replaced():
    rows = [[-0.5, 7, None], [None, 8, None]]
    with pytest.raises(EngineError, match="or none"):
        sglang._log_probs(rows, [7, 8])
    with pytest.raises(EngineError, match="other tokens"):
        sglang._log_probs([[-0.5, 7, None]], [8])
    for absent in (None, -9999.0, -9999, -1e9, torch.finfo(torch.float32).min):
        with pytest.raises(EngineError, match="a token without a log-prob"):
            log_probs([-0.5, absent])
    with pytest.raises(EngineError, match="a token without a log-prob; got -3.4"):
        sglang._log_probs([[torch.finfo(torch.float32).min, 7, None]], [7])  # SGLang's log of probability 0


@pytest.mark.parametrize("value", [None, "", "0"])
def test_the_plugins_do_nothing_unless_asked(value: str | None, monkeypatch: pytest.MonkeyPatch):
    for name in (CONTRACT, FOLDER, ASKED, FORKS):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    sglang_plugin.activate()
    sglang_plugin.allow()
    vllm_plugin.activate()
    assert not {"sglang", "vllm"} & set(sys.modules)


def test_the_users_own_contract_does_not_pin_the_control(monkeypatch: pytest.MonkeyPatch):
    for name in (CONTRACT, ORDER):
        monkeypatch.setenv(name, "{}")
    assert not {CONTRACT, ORDER} & inherited().keys()


@pytest.mark.parametrize(
    ("choices", "error"),
    [(None, ImportError), (SimpleNamespace(choices=MagicMock()), TypeError)],
    ids=["another release", "an order that is none"],
)
def test_an_engine_whose_plugin_fails_is_ended_too(
    choices: Any, error: type[Exception], monkeypatch: pytest.MonkeyPatch
):
    """SGLang hides what a plugin raises, and would run on without the contract, or with a part of it."""
    hooks: list[Any] = []
    monkeypatch.setattr(plugin, "_register", lambda target, hook, kind: hooks.append(hook))
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups", choices)
    for name, value in (handed_over(Contract(dtype="bf16"), None) | {ORDER: "{}", FOLDER: "x"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error):
        plugin.activate()
    assert hooks[0] == plugin._taken_up and not any(isinstance(hook, partial) for hook in hooks)


def test_an_engine_whose_release_has_a_function_elsewhere_is_ended(monkeypatch: pytest.MonkeyPatch):
    """SGLang logs, and does not raise, where it cannot apply a hook: the norm would stay SGLang's own."""
    applied = SimpleNamespace(HookRegistry=SimpleNamespace(_patched={plugin.ROPE}))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", applied)
    monkeypatch.setattr("true_on_policy.engines.handover.pin_as_asked", MagicMock())
    plugin._pin([plugin.ROPE])
    with pytest.raises(PinError, match="could not apply our hooks to sglang.srt.layers.layernorm.RMSNorm"):
        plugin._pin([plugin.ROPE, plugin.NORM])


def test_an_engine_that_did_not_take_the_contract_up_is_ended():
    with pytest.raises(PinError, match="did not take up; start SGLang with --enable-deterministic-inference"):
        plugin._taken_up(None, None)
    with pinned(Contract()):
        plugin._taken_up(None, None)


# The stand-in for the kernel wheel


def murmur3(words: list[int]) -> int:
    """MurmurHash3_x86_32 of whole words with seed 0, in plain integers."""

    def rotate(x: int, bits: int) -> int:
        return ((x << bits) | (x >> (32 - bits))) % 2**32

    state = 0
    for word in words:
        word = rotate(word * 0xCC9E2D51 % 2**32, 15) * 0x1B873593 % 2**32
        state = (rotate(state ^ word, 13) * 5 + 0xE6546B64) % 2**32
    state ^= 4 * len(words)
    state = (state ^ (state >> 16)) * 0x85EBCA6B % 2**32
    state = (state ^ (state >> 13)) * 0xC2B2AE35 % 2**32
    return state ^ (state >> 16)


def test_the_stand_in_hashes_seed_position_and_column():
    seeds = torch.tensor([0, 42, 2**64 - 3], dtype=torch.uint64)
    hashed = torch.ops.sgl_kernel.murmur_hash32_cpu(seeds, torch.tensor([0, 7, 1999]), torch.arange(5))
    for row, (seed, position) in enumerate(zip(seeds.tolist(), (0, 7, 1999), strict=True)):
        words = [[seed % 2**32, seed >> 32, position, column] for column in range(5)]
        assert hashed[row].tolist() == [murmur3(word) for word in words]


def test_the_stand_in_writes_each_request_its_slots():
    pool = torch.zeros(3, 8, dtype=torch.int32)
    sgl_kernel.assign_req_to_token_pool_cpu(
        torch.tensor([2, 0]), pool, torch.tensor([1, 0]), torch.tensor([3, 4]), torch.arange(10, 16), 8
    )
    assert pool.tolist() == [[12, 13, 14, 15, 0, 0, 0, 0], [0] * 8, [0, 10, 11, 0, 0, 0, 0, 0]]


def test_every_other_name_of_the_stand_in_says_what_it_is():
    said = r"sgl_kernel.fused_experts: mis-plugins' stand-in for CPU does not hold the operator"
    with pytest.raises(NotImplementedError, match=said):
        sgl_kernel.fused_experts()
    with pytest.raises(NotImplementedError, match=r"sgl_kernel.fused_sigmoid_mul_cpu: mis-plugins' stand-in"):
        torch.ops.sgl_kernel.fused_sigmoid_mul_cpu(torch.ones(1), torch.ones(1))


def test_the_resource_trackers_traceback_does_not_hide_the_servers() -> None:
    own = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nPinError: the native kernels\n'
    place = '  File "lib/multiprocessing/resource_tracker.py", line 239, in main\n'
    tracker = f"Traceback (most recent call last):\n{place}KeyError: '/mp-1'\n"
    assert _telling(own + "Killed\n" + tracker).splitlines()[:3] == own.splitlines()
    assert "KeyError" in _telling(tracker)  # with nothing better to tell
