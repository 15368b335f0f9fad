"""ASGI middleware of vLLM's server that asks each request for the key of the run.

vLLM's own `--api-key` leaves `/collective_rpc` and `/reset_prefix_cache` open, by which anybody on the machine could
load other weights.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

from true_on_policy.engines.handover import KEY

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Guard:
    """Answer 401 to every request without `Authorization: Bearer KEY`."""

    def __init__(self, app: Callable[[dict[str, Any], Receive, Send], Awaitable[None]]):
        self.app = app
        self._wanted = f"Bearer {os.environ[KEY]}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(given, self._wanted):
            await self.app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"the key of this server is asked for"})
