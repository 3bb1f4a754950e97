"""How many threads torch uses on this rank: its own part of the host's cores, or also those of ranks that rest.

Called by the driver in the thread that trains, because torch counts threads for each thread that calls it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class HostThreads:
    """Switches between the threads of a rank that works beside others and of one that works alone.

    A number that the user's code has set stays.
    """

    def __init__(self, beside_others: int = 1, alone: int = 1) -> None:
        self._beside_others, self._alone = beside_others, alone
        self._has_switched = False

    @property
    def has_more_alone(self) -> bool:
        """Whether ranks that rest leave this one any cores."""
        return self._alone > self._beside_others

    def work_alone(self) -> None:
        """Use the cores of ranks that rest."""
        self._switch(is_alone=True)

    def work_beside_others(self) -> None:
        """Use only the cores of this rank again."""
        self._switch(is_alone=False)

    @contextmanager
    def of(self, *, is_alone: bool) -> Iterator[None]:
        """Inside, use the threads of a rank that works alone, if it does."""
        self._switch(is_alone=is_alone)
        try:
            yield
        finally:
            self.work_beside_others()

    def _switch(self, *, is_alone: bool) -> None:
        if is_alone is self._has_switched:
            return
        before, after = (self._beside_others, self._alone) if is_alone else (self._alone, self._beside_others)
        is_ours = torch.get_num_threads() == before
        if before != after and is_ours:
            torch.set_num_threads(after)
        self._has_switched = is_alone and is_ours
