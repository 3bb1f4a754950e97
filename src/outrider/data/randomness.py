"""The random generators of a rank: Python's, NumPy's, torch's on the host, and torch's on the rank's device.

Seeds, captures and restores them, in memory or in a form for checkpoints. Used around every sample that is read, by the
replicas, by trial steps that must not change any state, and by checkpoints.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_RANK_STRIDE = 1_000_003
"""A prime, so that ranks of runs with neighbouring seeds have different seeds."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RandomStates:
    """The states of the three generators on the host."""

    python: Any
    numpy: dict[str, Any]
    torch: Tensor

    def equals(self, other: RandomStates) -> bool:
        # NumPy advances `pos` with every draw and rewrites `key` only every 624, so both must be compared.
        mine, theirs = self.numpy["state"], other.numpy["state"]
        return (
            self.python == other.python
            and mine["pos"] == theirs["pos"]
            and self.numpy["has_gauss"] == other.numpy["has_gauss"]
            and np.array_equal(mine["key"], theirs["key"])
            and torch.equal(self.torch, other.torch)
        )


def capture() -> RandomStates:
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    return RandomStates(python=random.getstate(), numpy=numpy_state, torch=torch.default_generator.get_state())


def restore(states: RandomStates) -> None:
    random.setstate(states.python)
    np.random.set_state(states.numpy)
    torch.default_generator.set_state(states.torch)


def seed_all(value: int) -> None:
    """Seed the three generators on the host from one 64-bit value; accelerators have generators of their own."""
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    # Do not call torch.manual_seed, which would seed the accelerators too.
    torch.default_generator.manual_seed(value)


def seed_run(seed: int) -> None:
    """Seed all generators, including those of devices, equally on every rank; models are created from this state."""
    seed_all(seed)
    torch.manual_seed(seed)


def seed_rank(seed: int, rank: int) -> None:
    """Give every rank except rank 0 its own seed; rank 0 continues like a single-device loop."""
    if rank > 0:
        seed_run(seed * _RANK_STRIDE + rank)


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the generators of the host at the end of the context."""
    states = capture()
    try:
        yield
    finally:
        restore(states)


# State in checkpoints


def saved_state(device: torch.device) -> dict[str, Any]:
    """The state of all generators of a rank, as tensors and plain numbers."""
    states = capture()
    version, words, gauss = states.python
    own = states.numpy["state"]
    return {
        "torch": states.torch,
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "bit_generator": states.numpy["bit_generator"],
            "key": torch.from_numpy(own["key"].astype(np.int64)),
            "pos": int(own["pos"]),
            "has_gauss": int(states.numpy["has_gauss"]),
            "gauss": float(states.numpy["gauss"]),
        },
        "device": device_state(device),
    }


def restore_saved(device: torch.device, state: dict[str, Any]) -> None:
    """Restore the state of `saved_state`; the state of another kind of device is ignored."""
    python, own = state["python"], state["numpy"]
    numpy_state = {
        "bit_generator": own["bit_generator"],
        "state": {"key": own["key"].numpy().astype(np.uint32), "pos": own["pos"]},
        "has_gauss": own["has_gauss"],
        "gauss": own["gauss"],
    }
    words = tuple(python["words"].tolist())
    restore(RandomStates(python=(python["version"], words, python["gauss"]), numpy=numpy_state, torch=state["torch"]))
    if state["device"] is not None:
        restore_device(device, state["device"])


def device_state(device: torch.device) -> dict[str, Any] | None:
    """The state of an accelerator's generator; None for the CPU, which uses the host generator."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    # There is only one mps device, and its functions take none.
    state = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    return {"kind": device.type, "state": state}


def restore_device(device: torch.device, saved: dict[str, Any]) -> None:
    if saved["kind"] != device.type:
        return
    module = torch.get_device_module(device)
    if device.type == "mps":
        module.set_rng_state(saved["state"])
    else:
        module.set_rng_state(saved["state"], device)
