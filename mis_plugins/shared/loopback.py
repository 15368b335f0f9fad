"""The loopback interface, on which alone the ranks of one machine listen to each other."""

from __future__ import annotations

import socket


def on_loopback() -> dict[str, str]:
    """Return the variables that bind gloo to loopback: by itself it takes the interface of the machine's name."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}
