"""The starter's view of its ranks: their messages, how they ended, and the error that caused a failure.

Decides when ranks are ended and which failure is reported: lost connections and timeouts are consequences and have the
lowest priority. The launcher starts the ranks and returns a Ranks object. A thread watches the ranks, so that the
program does not have to poll. Its clock counts only time in which the process ran, so that no deadline passes while the
process is stopped (Ctrl-Z).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import selectors
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence

from outrider.errors import OutriderError, PeerLostError, WaitError, named
from outrider.launch.rank_process import RankProcess
from outrider.world.messages import Inbox, Message
from outrider.world.rank_errors import rebuild_error

LONGEST_TURN_S = 1.0
"""A longer turn of the watching loop means that the whole process was stopped."""


class WatchClock:
    """Seconds since its creation, summed turn by turn."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._last_s = time.monotonic()

    def advance(self) -> None:
        """Count the time since the last turn, up to LONGEST_TURN_S."""
        now_s = time.monotonic()
        self.now_s += min(LONGEST_TURN_S, now_s - self._last_s)
        self._last_s = now_s


SILENCE_MARGIN_S = 5.0
"""A rank that waits for others raises an error after `timeout_s`, so a rank that is silent even longer hangs."""


class Blame:
    """The failures of a run by kind: causes, ranks that hang, timeouts, lost connections."""

    def __init__(self, *, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._causes: list[OutriderError] = []
        self._hung: list[OutriderError] = []
        self._waits: list[OutriderError] = []
        self._lost: list[OutriderError] = []

    @property
    def has_failures(self) -> bool:
        return bool(self._causes or self._hung or self._waits or self._lost)

    def note(self, failure: OutriderError) -> None:
        if isinstance(failure, PeerLostError):
            self._lost.append(failure)
        elif isinstance(failure, WaitError):
            self._waits.append(failure)
        else:
            self._causes.append(failure)

    @contextlib.contextmanager
    def noted(self, doing: str) -> Iterator[None]:
        """Record an exception of the starter's watching thread as a failure of the run."""
        try:
            yield
        except Exception as error:
            self._causes.append(
                OutriderError(
                    f"{doing} failed: {named(error)}",
                    hint="this is a defect of Outrider; please report it with the traceback",
                    traceback="".join(traceback.format_exception(error)),
                )
            )

    def cause(self) -> OutriderError:
        """The first cause, with one note about its consequences on other ranks."""
        first = (self._causes or self._hung or self._waits or self._lost)[0]
        # Several ranks may find the same mistake; the program of rank 0 shows its own traceback.
        alike = [failure for failure in self._causes if str(failure.message) == str(first.message)]
        first = next((failure for failure in alike if failure.rank == 0), first)
        victims = {lost.rank for lost in self._lost if lost.rank is not None and lost.rank != first.rank}
        if victims and not getattr(first, "__notes__", None):
            first.add_note(_folded(sorted(victims), cause=first.rank))
        return first

    # Ranks that hang

    def finds_silent(self, processes: Sequence[RankProcess], now_s: float) -> bool:
        """Whether a training rank was silent for too long; requests its stacks and names it as the cause."""
        if self._timeout_s is None or self._hung:
            return False
        silent = [process for process in processes if process.is_watched and _is_busy(process)]
        limit_s = self._timeout_s + SILENCE_MARGIN_S
        hung = [process for process in silent if now_s - process.heard_at_s >= limit_s]
        for process in hung:
            self._note_hung(process, f"made no progress for {limit_s:g} s")
        return bool(hung)

    def finds_awaited(self, processes: Sequence[RankProcess]) -> bool:
        """Whether ranks timed out because they waited for a busy rank; names the busy rank as the cause."""
        if self._causes or self._hung or not self._waits:
            return False
        hung = [process for process in processes if _is_busy(process)]
        for process in hung:
            self._note_hung(process, f"does not answer: {self._waits[0].message}")
        return bool(hung)

    def _note_hung(self, process: RankProcess, what: str) -> None:
        if process.is_stopped:
            what = f"is stopped (as by SIGSTOP or Ctrl-Z) and {what}"
            hint = "see what stopped it: a debugger, a batch system or `kill -STOP`"
        else:
            process.ask_for_stacks()
            hint = f"the stacks of its threads are in {process.log}; raise timeout_s if it was only slow"
        self._hung.append(WaitError(f"{process.label} {what}", hint=hint, rank=process.rank))


def _is_busy(process: RankProcess) -> bool:
    return not process.has_ended and not process.has_failed and process.done_at_s is None


def _folded(victims: Sequence[int], *, cause: int | None) -> str:
    is_one = len(victims) == 1
    names = f"rank {victims[0]}" if is_one else f"ranks {', '.join(map(str, victims[:-1]))} and {victims[-1]}"
    peer = "" if cause is None else f" to rank {cause}"
    return f"outrider: {names} lost {'its' if is_one else 'their'} connection{peer} as a consequence"


# Time in which other ranks may notice a failure themselves, and time in which they may end after SIGHUP.
FAILURE_GRACE_S = 2.0
TERMINATE_GRACE_S = 2.0
# A rank that has finished but does not exit (a user's thread, a hanging teardown) is killed after this time.
EXIT_GRACE_S = 10.0
# Hung ranks get this time to write their stacks to their logs.
STACKS_GRACE_S = 1.0
_TURN_S = 0.05
_JOIN_TURN_S = 0.2
_NEVER = float("inf")


class Ranks:
    """Running ranks; leaving the `with` block or the program ends all of them."""

    def __init__(
        self,
        processes: Sequence[RankProcess],
        *,
        on_all_started: Callable[[], None],
        on_end: Callable[[], None],
        timeout_s: float | None = None,
        grace_s: float = 0.0,
    ):
        """A training rank that is silent for `timeout_s` hangs; interrupted ranks get `grace_s` to stop."""
        self._processes = tuple(processes)
        self._on_all_started = on_all_started
        self._on_end = on_end
        self._starter_pid = os.getpid()
        self._queue = Inbox()
        self._clock = WatchClock()
        self._blame = Blame(timeout_s=timeout_s)
        self._grace_s = grace_s
        self._num_started = 0
        self._stop_asked = False
        self._end_asked = False
        self.interrupted_by: signal.Signals | None = None
        """The signal that the starter or a rank received, if any."""
        self._is_interruption_told = False
        self._terminate_at_s = _NEVER
        self._kill_at_s = _NEVER
        self._thread = threading.Thread(target=self._watch, name="outrider-ranks", daemon=True)

    def begin_watching(self) -> None:
        self._thread.start()
        atexit.register(self.close)

    # Called by the starter's program.

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def messages(self) -> Iterator[Message]:
        """Yield messages in order of arrival until all ranks have ended; of progress messages only the newest."""
        while (message := self.next_message()) is not None:
            yield message

    def next_message(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message; None if all ranks have ended or the time is up (see `is_running`)."""
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
        """Ask the ranks to stop at the next average."""
        self._stop_asked = True

    def interrupt(self, number: signal.Signals) -> None:
        """Ask the ranks to stop because of a signal; ranks that still run after the grace period are killed."""
        self.interrupted_by = self.interrupted_by or number

    def end_at_once(self) -> None:
        """Start ending all ranks, by SIGHUP and then SIGKILL, without waiting; safe in a signal handler."""
        self._end_asked = True

    def terminate(self) -> None:
        """End all ranks now, and wait until they have ended."""
        self.end_at_once()
        self.wait(timeout_s=TERMINATE_GRACE_S + EXIT_GRACE_S)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all ranks have ended and all their resources are released."""
        try:
            self._join(timeout_s)
        except KeyboardInterrupt:
            self.end_at_once()
            self._join(TERMINATE_GRACE_S + EXIT_GRACE_S)
            raise
        if self._thread.is_alive():
            running = ", ".join(process.label for process in self._processes if not process.has_ended)
            raise WaitError(f"{running} did not end within {timeout_s:g} s", hint="call stop() or terminate()")
        atexit.unregister(self.close)

    def _join(self, timeout_s: float | None) -> None:
        """Wait for the watching thread; time in which this process was stopped does not count."""
        clock = WatchClock()
        limit_s = _NEVER if timeout_s is None else timeout_s
        while self._thread.is_alive() and clock.now_s < limit_s:
            self._thread.join(min(_JOIN_TURN_S, limit_s - clock.now_s))
            clock.advance()

    def raise_error(self) -> None:
        """Raise the cause of a failure, once all ranks have ended; does nothing if no rank failed."""
        if not self._blame.has_failures:
            return
        # The cause may arrive after its consequences, so wait for all ranks; a failure ends them within seconds.
        self.wait(timeout_s=FAILURE_GRACE_S + STACKS_GRACE_S + TERMINATE_GRACE_S + EXIT_GRACE_S)
        raise self._blame.cause()

    def close(self) -> None:
        """End all ranks that still run, and release all resources."""
        # A fork of the starter also runs this at exit, and must not end the ranks.
        if os.getpid() == self._starter_pid:
            self.terminate()

    # Run by the watching thread, which is the only thread that reads from ranks and signals them.

    def _watch(self) -> None:
        try:
            with self._blame.noted("watching the ranks"), selectors.DefaultSelector() as selector:
                for process in self._processes:
                    selector.register(process.messages_fd, selectors.EVENT_READ, process)
                while not all(process.has_ended for process in self._processes):
                    self._take_turn(selector)
        finally:
            for clean_up in (*(process.close for process in self._processes), self._on_end):
                with self._blame.noted("cleaning up after the ranks"):
                    clean_up()
            self._queue.put(None)

    def _take_turn(self, selector: selectors.BaseSelector) -> None:
        for key, _ in selector.select(_TURN_S):
            process: RankProcess = key.data
            self._handle(process, process.read())
            if process.is_silent:
                selector.unregister(process.messages_fd)
        self._clock.advance()
        for process in self._processes:
            if not process.has_ended and process.poll():
                self._handle(process, process.last_words)
                self._note_death(process)
        self._pass_on_stop()
        self._pass_on_interruption()
        self._look_for_hung_ranks()
        self._escalate(self._clock.now_s)

    def _handle(self, process: RankProcess, messages: Sequence[Message]) -> None:
        for message in messages:
            process.heard_at_s = self._clock.now_s
            if message.kind == "started":
                process.has_started = True
                self._note_start()
            elif message.kind == "done":
                process.done_at_s = self._clock.now_s
            elif message.kind == "error":
                process.has_failed = True
                self._note_failure(rebuild_error(message.fields))
            elif message.kind == "interrupted":
                self.interrupt(signal.Signals(message.fields["signal"]))
            elif message.kind == "watch":
                process.is_watched = message.fields["is_on"]
            else:
                process.is_watched |= message.kind == "progress"
                self._queue.put(message)

    def _note_start(self) -> None:
        self._num_started += 1
        if self._num_started == len(self._processes):
            self._on_all_started()

    def _note_failure(self, failure: OutriderError) -> None:
        self._blame.note(failure)
        self._terminate_at_s = min(self._terminate_at_s, self._clock.now_s + FAILURE_GRACE_S)

    def _note_death(self, process: RankProcess) -> None:
        """Record the death of a rank that reported no error and that we did not end."""
        is_explained = process.done_at_s is not None or process.has_failed or self._kill_at_s < _NEVER
        if not is_explained:
            self._note_failure(process.death())

    def _pass_on_stop(self) -> None:
        if self._stop_asked:
            self._stop_asked = False
            for process in self._processes:
                process.ask_to_stop()

    def _pass_on_interruption(self) -> None:
        if self.interrupted_by is not None and not self._is_interruption_told:
            self._is_interruption_told = True
            self._terminate_at_s = min(self._terminate_at_s, self._clock.now_s + self._grace_s)
            for process in self._processes:
                process.interrupt(self.interrupted_by)

    def _look_for_hung_ranks(self) -> None:
        if self._kill_at_s == _NEVER and self._blame.finds_silent(self._processes, self._clock.now_s):
            self._terminate_at_s = min(self._terminate_at_s, self._clock.now_s + STACKS_GRACE_S)

    def _escalate(self, now_s: float) -> None:
        is_due = self._kill_at_s == _NEVER and now_s >= self._terminate_at_s
        if is_due and not self._end_asked and self._blame.finds_awaited(self._processes):
            self._terminate_at_s = now_s + STACKS_GRACE_S
        elif is_due or (self._kill_at_s == _NEVER and self._end_asked):
            self._kill_at_s = now_s + TERMINATE_GRACE_S
            for process in self._processes:
                process.terminate()
        for process in self._processes:
            overstays = process.done_at_s is not None and now_s >= process.done_at_s + EXIT_GRACE_S
            if overstays or now_s >= self._kill_at_s:
                process.kill()
