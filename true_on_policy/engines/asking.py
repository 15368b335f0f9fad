"""Ask a running engine over HTTP, whoever started it."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from true_on_policy.engines.protocol import EngineError


def answer_of(address: str, body: Mapping[str, Any] | None, seconds: float) -> Any:
    """Return the JSON answer to a GET, or to a POST of `body`.

    Raises:
        EngineError: no JSON comes back within `seconds`, or the engine refuses the request.
    """
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as refused:
        told = refused.read().decode(errors="replace")[:200]
        raise EngineError(f"{address} answered {refused.code}: {told}") from refused
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise EngineError(f"{address}: {str(error) or repr(error)}") from error
