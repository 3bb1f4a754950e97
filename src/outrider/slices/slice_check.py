"""Checks that a rank really has its slice: without the daemon, CUDA silently gives it the whole GPU.

Asks the driver for facts that torch does not expose. Called by World when a rank opens its device.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

from outrider.errors import DeviceError
from outrider.machine.devices import DeviceSpec
from outrider.slices.mps import CONTROL, LOGS, SHARE
from outrider.slices.mps_process import log_tail

# Numbers of CUdevice_attribute in the driver's interface.
_COMPUTE_MODE = 20
_MPS_ENABLED = 133
_COMPUTE_MODES = {1: "EXCLUSIVE", 2: "PROHIBITED", 3: "EXCLUSIVE_PROCESS"}


def has_share(spec: DeviceSpec, variables: Mapping[str, str] = os.environ) -> bool:
    """Whether this process has the slice, whose share must be set when the process starts; true without one."""
    return spec.share is None or variables.get(SHARE) == str(spec.share)


def check_share(spec: DeviceSpec, *, rank: int, variables: Mapping[str, str] = os.environ) -> None:
    """Before CUDA starts: check the variable with the share."""
    if not has_share(spec, variables):
        raise DeviceError(
            f"rank {rank} is to use {spec}, but {SHARE} is {variables.get(SHARE) or 'not set'} in its process",
            hint=f"call train() in a plain program, which starts the ranks with it; under torchrun or srun, "
            f"start `{CONTROL} -d` first and set {SHARE}={spec.share} for rank {rank}",
            rank=rank,
        )


def check_served(spec: DeviceSpec, *, rank: int) -> None:
    """After CUDA has started: check that a daemon serves the process; old drivers do not report this and pass."""
    if spec.share is not None and _attribute(_MPS_ENABLED, spec.index or 0) == 0:
        raise DeviceError(
            f"rank {rank} is to use {spec}, but no MPS daemon serves its process",
            hint=f"start `{CONTROL} -d` before the ranks, or call train() in a plain program, which does",
            rank=rank,
        )


def unusable(spec: DeviceSpec, error: BaseException, *, rank: int) -> DeviceError:
    """The error if CUDA refused the device to this rank."""
    trouble = str(error).splitlines()[0] if str(error) else type(error).__name__
    mode = _COMPUTE_MODES.get(_attribute(_COMPUTE_MODE, spec.index or 0) or 0)
    hint = "run `outrider diagnose`"
    if mode is not None:
        trouble += f" (its compute mode is {mode})"
        hint = "end the programs that use the GPU, or have its administrator set compute mode DEFAULT"
    return DeviceError(f"rank {rank} cannot use {spec}: {trouble}", hint=hint, rank=rank, traceback=_daemon_log())


def _daemon_log() -> str | None:
    folder = os.environ.get(LOGS)
    return (log_tail(Path(folder)) or None) if folder else None


def _attribute(number: int, ordinal: int) -> int | None:
    """An attribute of a device from the driver; None without a driver, or if it does not know the attribute."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, value = ctypes.c_int(), ctypes.c_int()
    results = [
        driver.cuInit(0),
        driver.cuDeviceGet(ctypes.byref(device), ordinal),
        driver.cuDeviceGetAttribute(ctypes.byref(value), number, device),
    ]
    return value.value if results == [0, 0, 0] else None
