"""Captures work on a CUDA device as a graph, and cleans up after a failed capture.

Decides the stream of captured work, and what a failed capture must undo. `CapturedSteps` decides what is captured.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from outrider.data.packed_batch import PackedBatch

Work = Callable[[], Any]
Overlapped = Callable[[], AbstractContextManager[None]]
"""Context around a backward pass, during which the all-reduce of its gradients may begin."""


class FasterSteps(Protocol):
    """The interface of captured steps, used instead of a replica's eager steps."""

    num_warm_ups: int

    def step(self, packed_batch: PackedBatch, *, samples: int, at: int) -> None: ...

    def gradient(self, packed_batch: PackedBatch, *, samples: int) -> None: ...

    def eager_gradient(self, packed_batch: PackedBatch, *, samples: int, overlapped: Overlapped) -> None: ...

    def update(self, *, at: int) -> None: ...

    def forget(self) -> None: ...

    def give_up(self, reason: str) -> bool: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


class Uncapturable(Exception):
    """A step cannot be captured; the message is the reason, phrased as the end of a sentence."""


class CaptureStream:
    """A side stream for eager work that is captured later, and for the captures.

    As long as a loss is kept anywhere, autograd keeps the stream on which a parameter was first used. A capture on a
    different stream would fail.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._open_pool()

    def run(self, work: Work) -> Any:
        """Run the work now, in order with the current stream."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = work()
        current.wait_stream(self._stream)
        return result

    def capture(self, work: Work) -> torch.cuda.CUDAGraph:
        """Capture the work without running it. The graphs of a stream share memory, so only one may run at a time."""
        # During a capture torch cannot free the memory that eager steps left in its cache.
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), _own_scratch_memory():
            try:
                # Meanwhile other threads, such as background averages, may wait for their own events.
                graph.capture_begin(pool=self._keeper.pool(), capture_error_mode="thread_local")
                work()
                graph.capture_end()
            except Exception as error:
                self._abandon(graph)
                raise Uncapturable(_in_words(error)) from error
        return graph

    def free(self) -> None:
        """Release the memory pool; its memory becomes free when the graphs that use it are gone."""
        self._open_pool()

    def _open_pool(self) -> None:
        """Create an empty graph that keeps the memory pool alive, because a pool ends with its last graph."""
        self._keeper = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            self._keeper.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device=self._device)
            self._keeper.capture_end()

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a failed capture; torch leaves its allocator and generator in capture mode."""
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
    """Allocate the workspace of matrix products from the pool of the graphs.

    torch keeps one workspace per stream and, since 2.11, frees it when any graph of the stream ends, although other
    graphs still write to it (pytorch#193402). Inside the pool only graphs can reuse freed memory, and one graph runs at
    a time; outside, any allocation could get it.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Raise an error for work that waits for the device, because its capture would fail."""
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
    """The first line of the innermost cause, which torch hides behind later errors of a capture."""
    cause: BaseException = error
    while (before := cause.__cause__ or cause.__context__) is not None:
        cause = before
    if isinstance(cause, Uncapturable):
        return str(cause)
    if "called a synchronizing CUDA operation" in str(cause):
        return "the step waits for the device, as .item(), .cpu() or a copy from unpinned memory do"
    lines = str(cause).splitlines() or [""]
    return f"{type(cause).__name__}: {lines[0]}"
