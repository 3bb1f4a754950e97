"""Finds the user at the other end of a Unix socket, as reported by the kernel.

Decides only whether it is this user; the owner of the socket decides whom to reject. Called by the store of a run and
by the shared memory of ranks.
"""

from __future__ import annotations

import os
import socket
import struct

# Process, user and group, as the kernel wrote them down when the connection was made.
_CREDENTIALS = struct.Struct("3i")


def peer_uid(connection: socket.socket) -> int | None:
    """The user at the other end; None on systems without this feature, where the folder's mode protects the socket."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size))
    return int(uid)


def is_same_user(connection: socket.socket) -> bool:
    """Whether the other end is a process of this user; true if the system does not report it."""
    return peer_uid(connection) in (None, os.geteuid())
