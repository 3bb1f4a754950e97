"""The secret with which ranks on several hosts authenticate each other.

Decides where the secret is read from. `world.store` decides which ranks need it. It is never printed and never sent.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider.store.store_protocol import proof

VARIABLE = "OUTRIDER_SECRET"
FILE_VARIABLE = "OUTRIDER_SECRET_FILE"
_MIN_LENGTH = 16
_HOW = "make one with `openssl rand -hex 16`"
_SAME_HINT = f"set the same {VARIABLE} on all ranks, or on none"


def shared_secret(variables: Mapping[str, str] = os.environ) -> bytes | None:
    """The secret of this run, from the environment or from the file that it names; None without either."""
    text, path = variables.get(VARIABLE, ""), variables.get(FILE_VARIABLE, "")
    if text and path:
        raise ConfigError(f"both {VARIABLE} and {FILE_VARIABLE} are set", hint="unset one of them")
    source = FILE_VARIABLE if path else VARIABLE
    secret = _read(Path(path)) if path else text.strip()
    if not (text or path):
        return None
    if len(secret) < _MIN_LENGTH:
        raise ConfigError(f"{source} has {len(secret)} characters, {_MIN_LENGTH} are needed", hint=_HOW)
    return secret.encode()


def required_secret(*, why: str, variables: Mapping[str, str] = os.environ) -> bytes:
    """The secret; raises an error that explains why one is needed."""
    secret = shared_secret(variables)
    if secret is None:
        raise ConfigError(
            f"{VARIABLE} is not set, and {why}",
            hint=f"{_HOW} and set it on all ranks, or put it into a file of mode 600 that {FILE_VARIABLE} names; "
            "ranks on one host need none with MASTER_ADDR=127.0.0.1",
        )
    return secret


def check_same_secret(exchange: Callable[[Any], list[Any]], *, rank: int, secret: bytes | None) -> None:
    """Check that all ranks have the same secret, if any rank has one; for a foreign store. All ranks call this.

    `exchange` sends a value to all ranks and returns the values of all. Each rank proves that it has the secret by
    signing random numbers of all ranks, so proofs from another run cannot be replayed.
    """
    nonces = exchange(None if secret is None else secrets.token_hex(32))
    without = [other for other, nonce in enumerate(nonces) if nonce is None]
    if len(without) == len(nonces):
        return
    if without or secret is None:
        raise ConfigError(f"{VARIABLE} is set on some ranks, but not on {_listed(without)}", hint=_SAME_HINT, rank=rank)
    told = [str(nonce).encode() for nonce in nonces]
    proofs = exchange(proof(secret, _role(rank), *told).hex())
    differing = [
        other
        for other, words in enumerate(proofs)
        if not hmac.compare_digest(str(words).encode(), proof(secret, _role(other), *told).hex().encode())
    ]
    if differing:
        raise ConfigError(f"{VARIABLE} of rank {rank} is not that of {_listed(differing)}", hint=_SAME_HINT, rank=rank)


def _role(rank: int) -> bytes:
    return f"rank {rank}".encode()


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def _read(path: Path) -> str:
    try:
        with open(path) as file:
            status = os.fstat(file.fileno())
            if status.st_mode & 0o077:
                raise ConfigError(
                    f"{path} can be read by others: mode {stat.S_IMODE(status.st_mode):o}",
                    hint=f"run `chmod 600 {path}`",
                )
            return file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{FILE_VARIABLE} names {path}, which cannot be read: {error}", hint="see that the file is on all hosts"
        ) from error
