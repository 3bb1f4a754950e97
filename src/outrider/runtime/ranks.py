"""The starter's view of its ranks: what they say, how they end, and which error is the cause.

Decides when ranks are ended and which failure is reported. Starts no rank: launch does.
Used through the handle that launch returns; one thread per Ranks watches, so nothing depends on being polled.
"""

from __future__ import annotations

import atexit
import os
import queue
import selectors
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from outrider.errors import OutriderError, PeerLostError, WaitError
from outrider.runtime.messages import Message, rebuild_error
from outrider.runtime.rank_process import RankProcess

# How long other ranks may take to notice a failure by themselves, and then to obey SIGTERM.
FAILURE_GRACE_S = 2.0
TERMINATE_GRACE_S = 2.0
# A rank that is done but does not exit (a thread of the user's, a hanging teardown) is ended after this.
EXIT_GRACE_S = 10.0
_TURN_S = 0.05
_NEVER = float("inf")


class Ranks:
    """Running ranks; leaving its `with` block, or the program, ends them all."""

    def __init__(
        self, processes: Sequence[RankProcess], *, on_all_started: Callable[[], None], on_end: Callable[[], None]
    ):
        self._processes = tuple(processes)
        self._on_all_started = on_all_started
        self._on_end = on_end
        self._starter_pid = os.getpid()
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._failures: list[OutriderError] = []
        self._num_started = 0
        self._stop_asked = False
        self._end_asked = False
        self._terminate_at_s = _NEVER
        self._kill_at_s = _NEVER
        self._thread = threading.Thread(target=self._watch, name="outrider-ranks", daemon=True)

    def begin_watching(self) -> None:
        self._thread.start()
        atexit.register(self.close)

    # What the starter's program calls.

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def messages(self) -> Iterator[Message]:
        """Every message in order of arrival, until all ranks have ended; then see raise_error()."""
        while (message := self.next_message()) is not None:
            yield message

    def next_message(self, timeout_s: float | None = None) -> Message | None:
        """The next message; None when all ranks have ended, or nothing came in time (see `is_running`)."""
        try:
            message = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None
        except KeyboardInterrupt:
            self.terminate()
            raise
        if message is None:
            self._queue.put(None)
        return message

    def stop(self) -> None:
        """Ask the ranks to stop at their next convenience."""
        self._stop_asked = True

    def terminate(self) -> None:
        """End all ranks now, by SIGTERM and then SIGKILL, and wait until they are gone."""
        self._end_asked = True
        self.wait(timeout_s=TERMINATE_GRACE_S + EXIT_GRACE_S)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all ranks have ended and nothing of them is left."""
        try:
            self._thread.join(timeout_s)
        except KeyboardInterrupt:
            self._end_asked = True
            self._thread.join(TERMINATE_GRACE_S + EXIT_GRACE_S)
            raise
        if self._thread.is_alive():
            running = ", ".join(process.label for process in self._processes if not process.has_ended)
            raise WaitError(f"{running} did not end within {timeout_s:g} s", hint="call stop() or terminate()")
        atexit.unregister(self.close)

    def raise_error(self) -> None:
        """Raise what made the ranks fail, once all of them have ended; nothing where none has failed."""
        if not self._failures:
            return
        # The cause may arrive after its consequences; a failure ends all ranks within seconds.
        self.wait(timeout_s=FAILURE_GRACE_S + TERMINATE_GRACE_S + EXIT_GRACE_S)
        causes = [failure for failure in self._failures if not isinstance(failure, PeerLostError)]
        raise (causes or self._failures)[0]

    def close(self) -> None:
        """End what still runs; nothing of the ranks is left afterwards."""
        # A fork of the starter runs this at its exit too, and must leave the ranks alone.
        if os.getpid() == self._starter_pid:
            self.terminate()

    # What the watching thread does; it alone reads from ranks and signals them.

    def _watch(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                for process in self._processes:
                    selector.register(process.messages_fd, selectors.EVENT_READ, process)
                while not all(process.has_ended for process in self._processes):
                    self._take_turn(selector)
        finally:
            for process in self._processes:
                process.close()
            self._on_end()
            self._queue.put(None)

    def _take_turn(self, selector: selectors.BaseSelector) -> None:
        for key, _ in selector.select(_TURN_S):
            process: RankProcess = key.data
            self._handle(process, process.read())
            if process.is_silent:
                selector.unregister(process.messages_fd)
        for process in self._processes:
            if not process.has_ended and process.poll():
                self._handle(process, process.last_words)
                self._note_death(process)
        self._pass_on_stop()
        self._escalate(time.monotonic())

    def _handle(self, process: RankProcess, messages: Sequence[Message]) -> None:
        for message in messages:
            if message.kind == "started":
                self._note_start()
            elif message.kind == "done":
                process.done_at_s = time.monotonic()
            elif message.kind == "error":
                process.has_failed = True
                self._note_failure(rebuild_error(message.fields))
            else:
                self._queue.put(message)

    def _note_start(self) -> None:
        self._num_started += 1
        if self._num_started == len(self._processes):
            self._on_all_started()

    def _note_failure(self, failure: OutriderError) -> None:
        self._failures.append(failure)
        self._terminate_at_s = min(self._terminate_at_s, time.monotonic() + FAILURE_GRACE_S)

    def _note_death(self, process: RankProcess) -> None:
        """A rank that said nothing and was not ended by us has died of itself."""
        is_explained = process.done_at_s is not None or process.has_failed or self._kill_at_s < _NEVER
        if not is_explained:
            self._note_failure(process.death())

    def _pass_on_stop(self) -> None:
        if self._stop_asked:
            self._stop_asked = False
            for process in self._processes:
                process.ask_to_stop()

    def _escalate(self, now_s: float) -> None:
        if self._kill_at_s == _NEVER and (self._end_asked or now_s >= self._terminate_at_s):
            self._kill_at_s = now_s + TERMINATE_GRACE_S
            for process in self._processes:
                process.terminate()
        for process in self._processes:
            overstays = process.done_at_s is not None and now_s >= process.done_at_s + EXIT_GRACE_S
            if overstays or now_s >= self._kill_at_s:
                process.kill()
