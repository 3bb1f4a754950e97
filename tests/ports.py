"""Free ports for tests of ranks that meet over TCP."""

from __future__ import annotations

import random
import socket

# Below the range from which systems choose ports of their own, so no other program gets one by chance before its use.
_PORTS = range(10_000, 30_000)


def free_port() -> int:
    """A port that nobody listens on."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
