"""Captures work on a CUDA device as a graph, and cleans up where that fails.

Decides on which stream work runs that is to be captured, and what a failed capture must undo. What is captured is the
caller's business: `CapturedSteps`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

Work = Callable[[], Any]


class Uncapturable(Exception):
    """Why a step cannot be captured, in words that end a sentence."""


class CaptureStream:
    """A side stream for eager work that is captured later, and for the captures.

    Autograd keeps the stream on which a parameter was first used for as long as a loss is kept anywhere; a capture on
    another stream than that would fail.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._open_pool()

    def run(self, work: Work) -> Any:
        """Do the work now, in order with the current stream."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = work()
        current.wait_stream(self._stream)
        return result

    def capture(self, work: Work) -> torch.cuda.CUDAGraph:
        """The work as a graph; it is not done now. The graphs of a stream share memory: one may run at a time."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), _own_scratch_memory():
            try:
                # Other threads may wait for their own events meanwhile, as averages in the background do.
                graph.capture_begin(pool=self._keeper.pool(), capture_error_mode="thread_local")
                work()
                graph.capture_end()
            except Exception as error:
                self._abandon(graph)
                raise Uncapturable(_in_words(error)) from error
        return graph

    def _open_pool(self) -> None:
        """A pool ends with its last graph; this one does nothing and stays."""
        self._keeper = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            self._keeper.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device=self._device)
            self._keeper.capture_end()

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed; torch leaves its allocator and its generator in the state of capturing."""
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._index, self._keeper.pool())
        generator = torch.cuda.default_generators[self._index]
        generator.graphsafe_set_state(generator.clone_state())
        self._open_pool()

    @property
    def _index(self) -> int:
        return torch.cuda.current_device() if self._device.index is None else self._device.index


@contextlib.contextmanager
def _own_scratch_memory() -> Iterator[None]:
    """Matrix products take their scratch memory from the graphs' own pool.

    torch keeps that memory by stream, and from 2.11 on frees it when any graph that was captured on the stream ends,
    though others still write to it (pytorch#193402). Freed in the pool, only graphs can have it, of which one runs at
    a time; freed outside, it would be anybody's.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Work that waits for the device raises: it would end a capture, and is found out here without one."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except Uncapturable:
        raise
    except Exception as error:
        raise Uncapturable(_in_words(error)) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _in_words(error: BaseException) -> str:
    """The first line of the deepest cause: torch hides what failed in a capture behind what noticed it."""
    cause: BaseException = error
    while (before := cause.__cause__ or cause.__context__) is not None:
        cause = before
    if isinstance(cause, Uncapturable):
        return str(cause)
    if "called a synchronizing CUDA operation" in str(cause):
        return "the step waits for the device, as .item(), .cpu() or a copy from unpinned memory do"
    lines = str(cause).splitlines() or [""]
    return f"{type(cause).__name__}: {lines[0]}"
