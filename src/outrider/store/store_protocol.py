"""The wire format of the store: frames of parts, and the proof that both ends know the secret of a run.

Decides the format and its limits. Does not know keys and values, and does not import torch. Used by server and client.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
from collections.abc import Iterator

MAX_FRAME_BYTES = 64 * 2**20
"""The maximum size of a frame; a longer frame ends the connection."""
NONCE_BYTES = 32
PROOF_BYTES = 32
HELLO = b"outrider-store-1"
"""Sent before the server's nonce, so that a client recognises a foreign server."""
_LENGTH = struct.Struct("!I")


def frame(*parts: bytes) -> bytes:
    """Encode parts as one message: the total length, then every part with its length."""
    body = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return _LENGTH.pack(len(body)) + body


def take_frame(inbox: bytearray) -> list[bytes] | None:
    """Remove the first complete frame; None if it has not arrived yet. Raises ValueError for an invalid frame."""
    if len(inbox) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(inbox)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length:,} bytes")
    end = _LENGTH.size + length
    if len(inbox) < end:
        return None
    body = bytes(memoryview(inbox)[_LENGTH.size : end])
    del inbox[:end]
    return list(_parts(body))


def _parts(body: bytes) -> Iterator[bytes]:
    place = 0
    while place < len(body):
        if place + _LENGTH.size > len(body):
            raise ValueError("a part without its length")
        (length,) = _LENGTH.unpack_from(body, place)
        place += _LENGTH.size
        if place + length > len(body):
            raise ValueError("a part longer than its frame")
        yield body[place : place + length]
        place += length


def read_frame(connection: socket.socket, inbox: bytearray) -> list[bytes]:
    """Receive the next frame within the socket's timeout."""
    while (parts := take_frame(inbox)) is None:
        chunk = connection.recv(65_536)
        if not chunk:
            raise ConnectionError("the other end has closed the connection")
        inbox += chunk
    return parts


def read_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        chunk = connection.recv(num_bytes - len(found))
        if not chunk:
            raise ConnectionError("the other end has closed the connection")
        found += chunk
    return found


def proof(secret: bytes, role: bytes, *nonces: bytes) -> bytes:
    """The HMAC of the nonces with the secret; the role prevents a proof from being replayed to its sender."""
    return hmac.digest(secret, b"|".join((b"outrider", role, *nonces)), hashlib.sha256)


def is_proof(told: bytes, secret: bytes, role: bytes, *nonces: bytes) -> bool:
    return hmac.compare_digest(told, proof(secret, role, *nonces))
