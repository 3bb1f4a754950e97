"""The result of `Session.batches()`: the batches of this rank, with a length that is equal on all ranks, and a state.

Decides what `len()` means in a loop whose ranks take different numbers of batches, and when the position in a pass is
known. The session fetches the batches.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from outrider.data.pass_state import PassState


class PassPlace:
    """The position of one `SessionBatches` in its pass."""

    def __init__(self) -> None:
        self.loaded: PassState | None = None
        self.now: Callable[[], PassState] | None = None
        """Returns the current position; set while a pass is running."""
        self.ended: PassState | None = None

    def begin(self) -> PassState | None:
        """Take the state from which the pass continues; None if it starts from its beginning."""
        loaded, self.loaded = self.loaded, None
        return loaded

    def end(self, state: PassState) -> None:
        self.now, self.ended = None, state


class SessionBatches(Iterator[Any]):
    """The batches of one pass on this rank; a loop after the end of a pass begins the next one.

    `len()` is the number of steps that one device would take in the pass: its samples divided by `batch_size`, rounded
    up. It is equal on all ranks, and `global_step` and prepared schedules advance by it in a pass. With several ranks,
    each takes only some of the batches, except with `balanced`, where every rank takes part in every batch.
    """

    def __init__(
        self,
        begin: Callable[[PassPlace], Generator[Any]],
        *,
        count: Callable[[], int],
        check: Callable[[], object],
        settle: Callable[[], object],
        next_epoch: Callable[[], int],
    ) -> None:
        self._begin = begin
        self._count = count
        self._check = check
        self._settle = settle
        self._next_epoch = next_epoch
        self._place = PassPlace()
        self._batches = begin(self._place)
        self._is_over = self._is_left = False

    def __len__(self) -> int:
        return self._count()

    def __iter__(self) -> SessionBatches:
        self._check()
        if self._is_over:
            self._renew()
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._is_over = True
            raise

    def close(self) -> None:
        """Stop taking batches, as when a generator is closed; the pass ends with the next call to the session."""
        self._batches.close()
        self._is_left = self._place.now is not None
        self._is_over = True

    def state_dict(self) -> dict[str, Any]:
        """The position in the pass: the samples that the model of this rank has not learned from yet.

        The current batch counts as used. After `close()` all ranks must call this; the state is then exact for the
        model that all ranks share, with every policy.
        """
        place = self._place
        if place.loaded is not None:
            return place.loaded.as_dict()
        if place.now is not None:
            if self._is_left:
                self._settle()
            now = place.now()
            if self._is_left:
                place.end(now)
            return now.as_dict()
        return (place.ended or PassState(epoch=self._next_epoch())).as_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next loop over these batches take the rest of that pass, on any number of ranks."""
        loaded = PassState.from_dict(state_dict)
        if self._place.now is not None:
            # The user left the loop by `break`; its pass ends when the next one begins.
            self.close()
        self._renew()
        self._place.loaded = loaded

    def _renew(self) -> None:
        self._place = PassPlace()
        self._batches = self._begin(self._place)
        self._is_over = self._is_left = False
