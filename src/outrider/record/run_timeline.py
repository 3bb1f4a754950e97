"""Writes the timeline files of a run, however it ended; they never make a run fail.

Called by the code that ends a run, after the record: the handle, a session, or the starter of a script's ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path

from outrider.errors import DataError
from outrider.timeline.exports import complete_run
from outrider.timeline.sampler import Sampler
from outrider.timeline.web_page import has_plotly, load_template_engine

_NO_TIMELINE = "outrider: the timeline of the run in {folder} is not complete: {error}"


def prepare_timeline() -> None:
    """Import what `complete_timeline` needs, for programs in which it may be called at exit.

    An import at exit may evaluate text, as `namedtuple` does. Python then forgets that Ctrl-C ended the program, and
    ends with 1 in place of SIGINT.
    """
    if has_plotly():
        load_template_engine()


def complete_timeline(folder: Path, sampler: Sampler | None = None) -> None:
    """Write the timeline files after model and record; a full disk does not make the run fail here."""
    try:
        complete_run(folder, sampler)
    except DataError as error:
        print(_NO_TIMELINE.format(folder=folder, error=error), file=sys.stderr)
