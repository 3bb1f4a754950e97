"""Ends a program that lost its peers, or that a signal interrupted, without a traceback.

Decides which errors need no traceback. Of several ranks only the one that failed first shows its own. Called by World
in programs that torchrun or a similar launcher started, and by the owners of signals.
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
    """Return the exception; if it ends the program, no traceback is shown, because what happened has been told."""
    # Marked, because built-in exceptions cannot be referenced weakly, and a reference would keep what its frames hold.
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
