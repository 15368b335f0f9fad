"""The client that asks engines, against servers that answer slowly, without end, elsewhere or in another language."""

import errno
import gzip
import json
import resource
import threading
import time

import pytest
from commands import ProofCommand
from hostile import Script, answering, endless, ok, said, slow

from true_on_policy.__main__ import main
from true_on_policy.engines.asking import answer_of
from true_on_policy.engines.handover import KEY
from true_on_policy.errors import EngineError

SECONDS = 0.3
LATE = 5.0  # a busy machine's deadline
BEGIN = b"HTTP/1.1 200 OK\r\n"
CHUNKED = BEGIN + b"Transfer-Encoding: chunked\r\n\r\n"
FAILED = b"HTTP/1.1 500 no\r\n"

HOSTILE: dict[str, tuple[Script, str]] = {
    "a byte now and then": (slow(BEGIN + b"\r\n"), "did not answer within 0.3 s"),
    "a status line now and then": (slow(b"HTTP/1.1 2"), "did not answer within 0.3 s"),
    "a header now and then": (slow(BEGIN + b"X: "), "did not answer within 0.3 s"),
    "an error now and then": (slow(FAILED + b"\r\n"), "did not answer within 0.3 s"),
    "continue, continue": (endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 99), "did not answer within 0.3 s"),
    "trailers without end": (endless(CHUNKED + b"0\r\n", b"X: y\r\n" * 99), "did not answer within 0.3 s"),
    "chunks of one byte": (endless(CHUNKED, b"1\r\n1\r\n" * 999), "did not answer within 0.3 s"),
    "a body without end": (endless(BEGIN + b"\r\n", b" " * 60_000), "more than 1,000,000 bytes"),
    "chunks without end": (endless(CHUNKED, b"FFF\r\n" + b" " * 4095 + b"\r\n"), "more than 1,000,000 bytes"),
    "a negative chunk": (endless(CHUNKED + b"-5\r\n", b" " * 60_000), "more than 1,000,000 bytes"),
    "no chunk": (said(CHUNKED + b"zz\r\n[1]\r\n0\r\n\r\n"), "breaks off"),
    "headers without end": (endless(BEGIN, b"X: y\r\n" * 99), "more than 100 headers"),
    "one header without end": (endless(BEGIN + b"X: ", b"y" * 60_000), "more than 65536 bytes"),
    "a short body": (said(BEGIN + b"Content-Length: 99\r\n\r\n[1]"), "breaks off"),
    "an error without end": (endless(FAILED + b"\r\n", b"x" * 60_000), "answered 500: x{500}$"),
    "elsewhere": (said(b"HTTP/1.1 302 Found\r\nLocation: http://10.0.0.1/\r\n\r\n"), "redirects to http://10.0.0.1/;"),
    "a local file": (said(b"HTTP/1.1 301 Moved\r\nLocation: file:///etc/passwd\r\n\r\n"), "redirects to file"),
    "packed": (ok(gzip.compress(b"[1]"), b"Content-Encoding: gzip\r\n"), "answers in gzip"),
    "packed in secret": (ok(gzip.compress(b"[1]")), "no JSON"),
    "no HTTP": (said(b"\x1b[2J\r\n\r\n"), "speaks no HTTP"),
    "nothing": (said(b""), "without response"),
    "no UTF-8": (ok(b'"\xe9"'), "no JSON"),
    "NaN": (ok(b"[NaN]"), "NaN is no number"),
    "Infinity": (ok(b"[-Infinity]"), "-Infinity is no number"),
    "brackets": (ok(b"[" * 100_000), "more than|too deeply"),
    "5,000 digits": (ok(b"9" * 5000), "no JSON"),
    "a name twice": (ok(b'{"a": 1, "a": 2}'), "a name stands twice"),
    "many values": (ok(b"[" + b"{}," * 100_000 + b"0]"), "more than 62,500 values"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_answer_is_an_error_in_words_soon_and_in_little_memory(case: str) -> None:
    script, words = HOSTILE[case]
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with answering(script) as url, pytest.raises(EngineError, match=words) as found:
        answer_of(url, "/x", {}, SECONDS, limit=1_000_000)
    assert str(found.value).startswith(f"{url}/x")
    assert time.monotonic() - began < LATE
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB


def test_no_thread_reads_on_behind_the_deadline() -> None:
    before = threading.active_count()
    with answering(slow(BEGIN + b"\r\n")) as url:
        with pytest.raises(EngineError):
            answer_of(url, "/x", None, 0.1)
        deadline = time.monotonic() + LATE
        while threading.active_count() > before + 2 and time.monotonic() < deadline:  # the server's two
            time.sleep(0.05)
        assert threading.active_count() <= before + 2


def test_chunks_are_read_and_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with answering(said(CHUNKED + b"2\r\n[1\r\n1\r\n]\r\n0\r\n\r\n")) as url:
        assert answer_of(url, "/x", None, LATE) == [1]


@pytest.mark.parametrize(
    "url",
    ["file:///etc/hosts", "ftp://127.0.0.1", "127.0.0.1:80", "http://", "http:///x", "http://h:99999", "http://h:x",
     "http://[::1", "http://user:word@h", "http://h?x", "http://h#x", "http://h h", "http://h\n", "http://\u0430"],
)  # fmt: skip
@pytest.mark.parametrize("words", [("doctor",), ("weights", "--trainer", "/")], ids=lambda words: words[0])
def test_a_url_that_is_no_servers_is_refused_with_its_words(
    words: tuple[str, ...], url: str, proof_command: ProofCommand
) -> None:
    assert f"got {url!r}; give http://HOST:PORT" in proof_command(*words, "--engine", url, code=2).err


def test_the_users_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def script(wire) -> None:
        wire.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    with answering(script) as url, monkeypatch.context() as patch:
        patch.setenv(KEY, "secret\r\n")  # as a file of variables ends its lines
        patch.setattr("http.client.HTTPConnection.putheader", lambda _, *header: asked.append(header))
        answer_of(url, "/x", None, LATE)
        patch.setenv(KEY, "sec\nret")
        with pytest.raises(EngineError, match=f"^{KEY}: the key .* printable ASCII letters alone$"):
            answer_of(url, "/x", None, LATE)
    assert ("Authorization", "Bearer secret") in asked


@pytest.mark.parametrize(
    ("url", "place", "error", "words"),
    [
        ("http://[::1]", ("::1", 80), None, r"http://\[::1\]/x: refused"),
        ("https://[::1]/a/", ("::1", 443), None, r"https://\[::1\]/a/x: refused"),
        ("http://h", ("h", 80), OSError(errno.ETIMEDOUT, "Connection timed out"), r"http://h/x: \[Errno 110\] Conn"),
    ],
)
def test_a_server_is_looked_for_where_its_url_says_and_a_time_is_told_that_passed(
    url: str, place: tuple[str, int], error: OSError | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(address: tuple[str, int], *_: object) -> None:
        assert address == place
        raise error or OSError("refused")

    monkeypatch.setattr("socket.create_connection", connect)
    with pytest.raises(EngineError, match=words):
        answer_of(url, "/x", None, LATE)


def test_an_error_of_an_engine_steers_no_terminal(capsys: pytest.CaptureFixture, tmp_path) -> None:
    body = json.dumps({"error": "x"}).encode() + b"\x1b[2J\x00\xe2\x80\xae\nbelow"
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    with answering(said(b"HTTP/1.1 400 no\r\n\r\n" + body)) as url:
        assert main(["weights", "--engine", url, "--trainer", str(tmp_path)]) == 2
        main(["doctor", "--engine", url, "--backend", "fsdp", "--model", "qwen3-4B"])
    read = capsys.readouterr()
    assert "answered 400" in read.err and "answered 400" in read.out
    assert all(character.isprintable() or character == "\n" for character in read.out + read.err)
