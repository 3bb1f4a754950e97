"""Ends a program without a traceback if it lost its peers or was interrupted by a signal.

Decides which errors need no traceback. Of several ranks, only the rank that failed first shows its traceback. Called by
World in programs that torchrun or a similar launcher started, and by the handlers of signals.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import TracebackType

from outrider.errors import PeerLostError, WaitError

_BRIEF = (PeerLostError, WaitError)
_IS_TOLD = "_outrider_is_told"


def end_silently(error: BaseException) -> BaseException:
    """Return the exception; if it ends the program, no traceback is shown, because the user was already informed."""
    # Mark the exception: built-in exceptions allow no weak reference, and a strong one would keep its frames alive.
    setattr(error, _IS_TOLD, True)
    _replace_traceback(lambda value: hasattr(value, _IS_TOLD), lambda value: None)
    return error


def tell_briefly(error: BaseException) -> None:
    """If exactly this error ends the program, print only its message and hint; other errors are shown as usual."""
    if isinstance(error, _BRIEF):
        this = weakref.ref(error)
        _replace_traceback(lambda value: value is this(), _print_briefly)


def _print_briefly(error: BaseException) -> None:
    print(f"outrider: {error}", file=sys.stderr, flush=True)


def _replace_traceback(is_meant: Callable[[BaseException], bool], tell: Callable[[BaseException], None]) -> None:
    usual = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        if is_meant(value):
            tell(value)
        else:
            usual(kind, value, traceback)

    sys.excepthook = show
