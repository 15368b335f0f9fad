"""A real HTTP server that gives a recorded SGLang's answers: what `python -m true_on_policy doctor --engine` asks."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

# SGLang 0.5.23 on CPU, tiny-qwen3 in fp32, recorded on 2026-11-21: `pinned` by this project's plugin in deterministic
# mode, and `stock`. Of /server_info some keys are kept, of an answer its log-probs, of a scored batch the last one's.
RECORDED = json.loads((Path(__file__).parent / "recorded_sglang.json").read_text())


@contextmanager
def replayed(
    kind: str, told: dict | None = None, broken: str = "", answers: list | None = None, named: int | None = None
) -> Iterator[str]:
    """The URL of a server that answers as `kind` did; `told` replaces keys of /server_info, `answers` its generations.

    Requests of the path `broken` are answered 500. Answers name the request of the number `named` as theirs.
    """
    names: list[str] = []

    left = list(answers or RECORDED[kind]["generate"])  # a request that was repeated has several answers, in order

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._answer(RECORDED[kind]["server_info"] | (told or {}))

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            names.append(body.pop("rid"))
            answers = left.pop([asked for asked, _ in left].index(body))[1]
            if named is not None:
                answers = [{"meta_info": each["meta_info"] | {"id": f"{names[named]}_0"}} for each in answers]
            self._answer(answers)

        def _answer(self, value) -> None:
            self.send_response(500 if self.path == broken else 200)
            self.end_headers()
            self.wfile.write(b"out of memory" if self.path == broken else json.dumps(value).encode())

        def log_message(self, format, *args):
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()  # seconds until it sees `shutdown`
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
