"""Ask a running engine over HTTP, whoever started it, and read its answer: the one client of this package.

An answer has one deadline and a limit of bytes. No proxy stands between, and no redirect is followed. Numbers and
tokens of an answer are checked before they are used. Every fault of an answer is an `EngineError` in words.
"""

import json
import math
import os
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from http import client
from reprlib import Repr
from socket import SHUT_RDWR, socket
from threading import Thread
from typing import Any, NoReturn, TypeVar
from urllib.parse import SplitResult, urlsplit

from mis_plugins.errors import UserError
from mis_plugins.shared.absent import LOWEST
from true_on_policy.engines.handover import KEY
from true_on_policy.errors import EngineError

T = TypeVar("T")
BLOCK = 1 << 16  # bytes read at once
TOLD = 500  # letters of an error's body that are quoted
SCHEMES: Mapping[str, type[client.HTTPConnection]] = {"http": client.HTTPConnection, "https": client.HTTPSConnection}
LIMIT = 64 << 20  # bytes of an answer
BYTES_A_VALUE = 16  # of the limit: an answer of 64 MiB may hold 4 million numbers, texts, lists and pairs
SHOWN = 80  # letters of a wrong value that an error quotes
IDS = 2**31  # no vocabulary is larger
ROUNDED_UP = 1e-3  # a log-softmax in floating point may lie that far above 0

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = SHOWN


def address_of(url: str) -> SplitResult:
    """Read the address of an engine's server, `http://HOST:PORT`, with or without a path before the engine's own.

    Raises:
        EngineError: the URL is not that of an HTTP server.
    """
    try:
        if not url.isascii() or not url.isprintable() or " " in url:
            raise ValueError("a URL holds no such letters")
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port  # a port that is no number raises here
        if parts.scheme not in SCHEMES or not host:
            raise ValueError("http or https, and a host")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ValueError("no user, no query and no fragment")
    except ValueError as error:
        raise EngineError(f"got {url!r}; give http://HOST:PORT ({error})") from error
    return parts


HELP = f"a running engine, for example http://127.0.0.1:30000; its --api-key comes from ${KEY}"


def url_of_engine(given: str) -> str:
    """Accept the URL of an engine on a command line; other schemes could name a file of this machine."""
    try:
        address_of(given)
    except EngineError as error:
        raise ArgumentTypeError(str(error)) from error
    return given


def answer_of(url: str, path: str, body: Mapping[str, Any] | None, seconds: float, limit: int = LIMIT) -> Any:
    """Return the JSON answer of the server at `url` to a GET of `path`, or to a POST of `body`.

    Raises:
        EngineError: no JSON comes back within `seconds` and `limit` bytes, or the engine refuses the request.
    """
    where = f"{url.rstrip('/')}{path}"
    key = os.environ.get(KEY, "").strip()  # of an engine that somebody else started with `--api-key`
    if not key.isascii() or not key.isprintable():
        raise EngineError(f"{KEY}: the key of an engine holds printable ASCII letters alone")
    answer = exchanged(where, address_of(url), path, body, seconds, limit, key)
    with reading(where, "an engine"):
        return parsed(answer, limit)


def exchanged(
    where: str,
    address: SplitResult,
    path: str,
    body: Mapping[str, Any] | None,
    seconds: float,
    limit: int = LIMIT,
    key: str = "",
) -> bytes:
    """Send one request and return the body of its answer.

    Args:
        where: what an error calls the server.
        seconds: the deadline of the whole answer, from the name of the host to the last byte.
        limit: the most bytes that the answer may have.

    Raises:
        EngineError: no answer came in time and within the limit, or the server refuses the request.
    """
    headers = {"Content-Type": "application/json", "Connection": "close", "Cache-Control": "no-cache"}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    sent = None if body is None else json.dumps(body).encode()
    wire = _Wire(SCHEMES[address.scheme](address.netloc, timeout=seconds))

    def exchange() -> bytes:
        wire.connect()
        wire.connection.request("GET" if sent is None else "POST", address.path.rstrip("/") + path, sent, headers)
        return _body(where, wire.connection.getresponse(), limit)

    try:
        return _within(seconds, exchange)
    except EngineError:
        raise
    except (OSError, ValueError, client.HTTPException) as error:
        raise EngineError(f"{where}{_words(error, seconds)}") from error
    finally:
        wire.cut()


class _Wire:
    """A connection that another thread may cut, whatever the thread that uses it waits for."""

    def __init__(self, connection: client.HTTPConnection):
        self.connection = connection
        self._sockets: list[socket] = []
        self._is_cut = False

    def connect(self) -> None:
        self.connection.connect()
        # http.client forgets its socket before it has read the body.
        self._sockets.append(self.connection.sock)
        if self._is_cut:
            self.cut()

    def cut(self) -> None:
        self._is_cut = True
        for connected in (*self._sockets, self.connection.sock):
            if connected is not None:
                with suppress(OSError):
                    connected.shutdown(SHUT_RDWR)
        self.connection.close()


def _words(error: Exception, seconds: float) -> str:
    """Say in words, behind the name of the server, why no answer came."""
    if isinstance(error, TimeoutError) and error.errno is None:  # Linux gives up on a connection by ETIMEDOUT
        return f" did not answer within {seconds:g} s"
    if isinstance(error, client.IncompleteRead):
        return ": the answer breaks off"
    if isinstance(error, client.BadStatusLine) and not isinstance(error, client.RemoteDisconnected):
        return f": speaks no HTTP: {str(error)[:TOLD]}"
    return f": {str(error)[:TOLD] or repr(error)}"


def _within(seconds: float, work: Callable[[], T]) -> T:
    """Run `work` in a thread, and return its result or raise its error.

    A socket's own timeout begins anew with each byte, and the search for a host's address has none.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    return done.result(seconds)


def _body(where: str, response: client.HTTPResponse, limit: int) -> bytes:
    """Read the body of an answer."""
    if not 200 <= response.status < 300:
        answer = b""
        with suppress(client.HTTPException):
            answer = _read(response, TOLD)
        target = response.getheader("Location")
        hint = f"redirects to {target[:TOLD]}; name the engine's own address: " if target else ""
        raise EngineError(f"{where} answered {response.status}: {hint}{answer.decode(errors='replace')}")
    packing = response.getheader("Content-Encoding", "identity")
    if packing != "identity":
        raise EngineError(f"{where} answers in {packing[:TOLD]}, which nobody asked for")
    body = _read(response, limit + 1)
    if len(body) > limit:
        raise EngineError(f"{where} answers with more than {limit:,} bytes")
    if response.length:  # http.client itself is silent about a body that ends before its length
        raise client.IncompleteRead(b"", response.length)
    return body


def _read(response: client.HTTPResponse, most: int) -> bytes:
    # Where a chunk's size is negative, http.client's `read` goes on without a limit; its `read1` gives a block.
    read = response.read1 if response.chunked else response.read
    body = bytearray()
    while len(body) < most and (part := read(min(BLOCK, most - len(body)))):
        body += part
    return bytes(body)


def parsed(body: bytes, limit: int = LIMIT) -> Any:
    """Parse a JSON body strictly: no NaN, no name twice, and no more values than fit the limit of its bytes.

    Raises:
        EngineError: the body is not such JSON.
    """
    if sum(map(body.count, (b",", b"[", b"{"))) > limit // BYTES_A_VALUE:
        raise EngineError(f"answers with more than {limit // BYTES_A_VALUE:,} values")
    try:
        return json.loads(body, parse_constant=_no_number, object_pairs_hook=_once)
    except RecursionError as error:
        raise EngineError("the answer is nested too deeply") from error
    except ValueError as error:
        raise EngineError(f"the answer is no JSON: {error}") from error


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) < len(pairs):
        raise ValueError(f"a name stands twice among {short([name for name, _ in pairs])}")
    return names


@contextmanager
def reading(what: str, engine: str) -> Iterator[None]:
    """Turn every error of reading an engine's answer into an EngineError that begins with `what`."""
    try:
        yield
    except EngineError as error:
        raise EngineError(f"{what}: {error}") from error
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise EngineError(f"{what}: not an answer of {engine} ({short(error)})") from error


def short(value: object) -> str:
    """Write a value for an error, cut off where it is long."""
    return _SHORT.repr(value)


def list_of(value: Any, count: int, what: str) -> list[Any]:
    """Return `value`, a list of `count` entries; raises EngineError where it is no such list."""
    if not isinstance(value, list):
        raise EngineError(f"{what}: expected a list of {count}; got {short(value)}")
    if len(value) != count:
        raise EngineError(f"{what}: expected {count}, got {len(value)}")
    return value


def whole(value: Any, what: str, most: int = IDS) -> int:
    """Return `value`, a whole number from 0 to `most`; raises EngineError where it is none."""
    if type(value) is not int or not 0 <= value <= most:
        raise EngineError(f"{what}: expected a whole number from 0 to {most}; got {short(value)}")
    return value


def log_prob(value: Any) -> float:
    """Return `value`, a finite log-prob; raises EngineError where it is none, or what an engine writes for none."""
    is_number = type(value) in (int, float)
    if value is None or (is_number and -math.inf < value <= LOWEST):
        raise EngineError(f"a token without a log-prob; got {short(value)}")
    if not is_number or not math.isfinite(value) or value > ROUNDED_UP:
        raise EngineError(f"expected a log-prob, finite and at most 0; got {short(value)}")
    return float(value)


def check_counts(meta: Any, prompt: int, sampled: int | None = None) -> None:
    """Check the numbers of tokens that an answer of SGLang states beside its log-probs, where it states any.

    Raises:
        EngineError: the answer is to a prompt of another length, or states another number of sampled tokens.
    """
    for name, wanted in (("prompt_tokens", prompt), ("completion_tokens", sampled)):
        if wanted is not None and meta.get(name, wanted) != wanted:
            raise EngineError(f"{name}: expected {wanted}, got {short(meta[name])}")
