"""Wraps what torch.cuda leaves untyped: streams, events, elapsed time.

Decides nothing. Called by CudaLane and DeviceAverager.
"""

from __future__ import annotations

import torch


def new_stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def timed_event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


def restful_event() -> torch.cuda.Event:
    """A timed event whose waiting thread sleeps: it does not spin on a core that others compute on."""
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
    return event


def has_passed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def elapsed_ms(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(start.elapsed_time(end))
