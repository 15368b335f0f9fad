"""A server on loopback that answers every request with given bytes, at the pace of its script."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread

Script = Callable[[socket.socket], None]
PAUSE = 0.1  # seconds between the bytes of a slow answer


def said(answer: bytes) -> Script:
    return lambda wire: wire.sendall(answer)


def endless(begin: bytes, block: bytes, pause: float = 0.0) -> Script:
    def script(wire: socket.socket) -> None:
        wire.sendall(begin)
        while True:
            wire.sendall(block)
            time.sleep(pause)

    return script


def slow(begin: bytes) -> Script:
    return endless(begin, b"1", PAUSE)


def ok(body: bytes, headers: bytes = b"") -> Script:
    return said(b"HTTP/1.1 200 OK\r\n%sContent-Length: %d\r\n\r\n%s" % (headers, len(body), body))


@contextmanager
def answering(script: Script) -> Iterator[str]:
    """The URL of the server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(wire: socket.socket) -> None:
            with wire, suppress(OSError):  # the client hangs up
                wire.recv(1 << 16)
                script(wire)
                wire.shutdown(socket.SHUT_WR)
                while wire.recv(1 << 16):  # closed with bytes unread, the connection would be reset
                    pass

        def accept() -> None:
            with suppress(OSError):
                while True:
                    Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

        Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
