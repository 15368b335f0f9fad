"""Start a server process on a free loopback port in its own process group, and end the whole group."""

import atexit
import ctypes
import itertools
import os
import random
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from true_on_policy.contract.sides import ENGINES
from true_on_policy.engines.asking import address_of, exchanged, parsed
from true_on_policy.engines.handover import ACTIVE, CONTRACT, KEY, ORDER
from true_on_policy.engines.protocol import Request
from true_on_policy.errors import EngineError

HERE = Path(__file__).parent


def interpreter(engine: str) -> Path:
    """Return the python of an engine's environment: in .venv-ENGINE beside the package, or where ENGINE_VENV says.

    Raises:
        EngineError: the engine is not installed there.
    """
    variable = f"{engine.upper()}_VENV"
    folder = Path(os.environ.get(variable) or HERE.parent.parent / f".venv-{engine}")
    python = folder / "bin" / "python"
    if not python.exists():
        raise EngineError(f"{folder}: no {engine} there; run `bash {HERE / 'install.sh'} {engine}`, or set {variable}")
    return python


# PYTHON and VIRTUAL_ lead Python into our environment; TRITON_INTERPRET, which our tests set, emulates a GPU; a
# contract in the user's environment would pin the control too.
WITHHELD = ("PYTHON", "VIRTUAL_", "TRITON_INTERPRET", CONTRACT, ORDER)


def inherited() -> dict[str, str]:
    """Return the variables of an engine on this machine: this process's, with torch.compile off, which changes bits."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(WITHHELD)}
    eager = {"TORCH_COMPILE_DISABLE": "1"}
    return kept | eager | on_loopback() | {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}


START_SECONDS = 600  # a start took 10 s on two idle cores, and over 300 s on overloaded cores
GENERATE_SECONDS = 300
LARGEST = 1 << 30  # bytes of an answer: a batch of a training loop, with the tokens that each cut kept
TOKEN_SECONDS = 0.1  # a token took 0.02 s in a batch of 32, on an overloaded core
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
TAIL_LINES = 25
POLL_SECONDS = 0.25
PROBE_SECONDS = 10  # a stranger on the port may accept a connection and never answer
GRACE_SECONDS = 1  # SGLang checks only every five seconds whether it was asked to end
PR_SET_PDEATHSIG = 1  # linux/prctl.h
OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST_PORT = 20_000
PORTS_LOOKED_AT = 100
STARTS = 3
TAKEN = "address already in use"
Private = Callable[[Path, str], tuple[Sequence[str], Mapping[str, str]]] | None
"""Gives the arguments and variables that an engine takes from the folder and the key of its run; None: none."""


def free_port() -> int:
    """Return a port that nobody has bound, and that Linux gives to no outgoing connection.

    An engine binds its port only seconds after it is started. By then a port of Linux's own choice may be taken.
    """
    first = int(OUTGOING.read_text().split()[0])
    ports = range(LOWEST_PORT, max(first, LOWEST_PORT))
    # Processes that were seeded alike must not look at one list of ports.
    looked_at = random.SystemRandom().sample(ports, min(len(ports), PORTS_LOOKED_AT))
    for port in (*looked_at, 0):
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return listener.getsockname()[1]
    raise EngineError("no free port on 127.0.0.1: end what listens there")


def named(options: Mapping[str, Any]) -> list[str]:
    """Write options as arguments of a command line: --name value."""
    return [str(part) for name, value in options.items() for part in (f"--{name}", value)]


def patience(requests: Sequence[Request]) -> float:
    """How long an engine may take to sample these requests, in seconds."""
    return GENERATE_SECONDS + TOKEN_SECONDS * sum(request.length for request in requests)


def started(
    name: str, command: Sequence[str], environment: Mapping[str, str], starts: int = STARTS, private: Private = None
) -> "Server":
    """Start an engine's server on a free port and wait until it is healthy.

    A port that another process takes before the server binds it is replaced by another port.

    Args:
        private: what the engine takes from its run, beside the variable KEY, which holds the key.

    Raises:
        EngineError: the server did not become healthy; its processes have been ended.
    """
    port = free_port()
    server = Server(name, [*command, "--port", str(port)], environment, port, private)
    try:
        server.wait_until_ready("/v1/models", START_SECONDS)  # SGLang's /health asks for no key
        return server
    except BaseException as error:
        is_taken = isinstance(error, EngineError) and TAKEN in server.output().lower()
        server.close()
        if not is_taken or starts == 1:
            raise
    return started(name, command, environment, starts - 1, private)


class Server:
    """A child process that speaks HTTP on loopback; every error quotes what the process printed.

    key: the key of this run, which the server may ask of each request. It stands in no command line, because
        every user of the machine can list these.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], port: int, private: Private = None
    ):
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.key = secrets.token_hex()
        # A killed engine leaves its sockets in TMPDIR; a folder of our own is removed with them.
        self._scratch = tempfile.TemporaryDirectory(prefix=f"{name}-", ignore_cleanup_errors=True)
        self._log = Path(self._scratch.name, "log").open("wb")
        arguments, variables = private(Path(self._scratch.name), self.key) if private else ((), {})
        self._process = subprocess.Popen(
            [*command, *arguments],
            env={**environment, "TMPDIR": self._scratch.name, KEY: self.key, **variables},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        atexit.register(self.close)

    def wait_until_ready(self, path: str, seconds: float) -> None:
        """Return once GET `path` asks for this run's key; EngineError where the process ends or `seconds` are over."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise self._error(f"ended with exit code {self._process.returncode} while starting")
            if self._answers(path, self.key) and not self._answers(path, ""):
                return
            time.sleep(POLL_SECONDS)
        raise self._error(f"not ready within {seconds:g} s")

    def _answers(self, path: str, key: str) -> bool:
        """Whether GET `path` succeeds with a key."""
        with suppress(EngineError):
            exchanged(path, address_of(self.url), path, None, PROBE_SECONDS, key=key)
            return True
        return False

    def check_pinned(self) -> None:
        """Check that our plugin has pinned the kernels of this engine; an engine without the plugin is ended.

        Raises:
            EngineError: the plugin is not installed in the engine's environment.
        """
        if ACTIVE not in self.output():
            self.close()
            raise EngineError(f"{self.name}: runs, but never printed {ACTIVE!r}: our plugin is not installed there")

    def post(self, path: str, body: Mapping[str, Any], seconds: float = GENERATE_SECONDS) -> Any:
        """Post JSON, return the JSON answer; raises EngineError where the process died, refused, or was too slow."""
        answer = self._ask(path, seconds, body)
        try:
            return parsed(answer, LARGEST)
        except EngineError as error:
            raise self._error(f"{path}: {error}") from error

    def get(self, path: str, seconds: float) -> str:
        """Return the text at `path`; raises EngineError where the process died, refused, or was too slow."""
        return self._ask(path, seconds).decode(errors="replace")

    def _ask(self, path: str, seconds: float, body: Mapping[str, Any] | None = None) -> bytes:
        try:
            return exchanged(path, address_of(self.url), path, body, seconds, LARGEST, self.key)
        except EngineError as error:
            raise self._error(str(error)) from error

    def output(self) -> str:
        """Return everything that the process has printed, but for the key; nothing is left of it behind `close`."""
        log = Path(self._log.name)
        return log.read_text(errors="replace").replace(self.key, "KEY") if log.exists() else ""

    def _error(self, what: str) -> EngineError:
        return EngineError(f"{self.name}: {what}; from what it printed:\n{_telling(self.output())}")

    def close(self) -> None:
        """End the whole process group: ask first, kill after a grace period. `close` may be called twice."""
        atexit.unregister(self.close)
        for stop in (signal.SIGTERM, signal.SIGKILL):
            if not _signal_group(self._process.pid, stop):
                break
            _wait_for_group(self._process)
        self._log.close()
        self._scratch.cleanup()


class Served:
    """An engine behind a server of its own, in the environment that install.sh made."""

    name: str
    _server: Server

    def versions(self) -> dict[str, str]:
        folders = interpreter(self.name).parent.parent.glob("lib/python*/site-packages")
        installed = {package.name: package.version for package in distributions(path=[*map(str, folders)])}
        return {name: installed[name] for name in ENGINES[self.name].packages}

    def close(self) -> None:
        self._server.close()


def _telling(output: str) -> str:
    """Pick the lines around the last traceback's message, else the last lines: a server prints much after its fault.

    Python's resource tracker adds a traceback when it outlives the killed process; its traceback is skipped.
    """
    lines = output.splitlines()
    traces = [
        number
        for number, (line, place) in enumerate(itertools.pairwise([*lines, ""]))
        if "Traceback (most recent call last)" in line and "multiprocessing/resource_tracker.py" not in place
    ]
    if not traces:
        return "\n".join(lines[-TAIL_LINES:])
    later = enumerate(lines[traces[-1] + 1 :], traces[-1] + 1)
    message = next((number for number, line in later if line and not line.startswith(" ")), len(lines))
    return "\n".join(lines[max(traces[-1], message - TAIL_LINES // 2) : message + TAIL_LINES // 2])


def _die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, even where the parent could not call `close`."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal_group(group: int, what: signal.Signals | int) -> bool:
    """Signal a process group, and return whether it still had a process."""
    try:
        os.killpg(group, what)
    except ProcessLookupError:
        return False
    return True


def _wait_for_group(leader: subprocess.Popen) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        leader.poll()  # reap the leader: a zombie would keep its group alive
        if not _signal_group(leader.pid, 0):
            return
        time.sleep(0.05)


def on_loopback() -> dict[str, str]:
    """Return the variables that bind gloo to loopback: by itself it takes the interface of the machine's name."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}
