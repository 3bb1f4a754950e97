"""Values as a run of Trackio, which keeps them on this machine unless a Space or a server is named."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any, ClassVar

from outrider.trackers.tracker import TrackedRun, Tracker


class TrackioTracker(Tracker):
    """A run of `project`; the options are those of `trackio.init`, and go before what Outrider would pass."""

    name: ClassVar[str] = "trackio"
    package: ClassVar[str | None] = "trackio"

    def __init__(self, project: str = "outrider", **options: Any) -> None:
        self._project = project
        self._options = options
        self._run: Any = None

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        options: dict[str, Any] = {"name": run.name, "config": dict(run.config), "embed": False}
        if run.earlier is not None:
            options |= {"name": run.earlier["name"], "resume": "allow"}
        # Trackio prints where its dashboard is; standard output belongs to the user's program.
        with redirect_stdout(sys.stderr):
            import trackio

            self._run = trackio.init(project=self._project, **options | self._options)
        return {"name": self._run.name}

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, status: str) -> None:
        import trackio

        with redirect_stdout(sys.stderr):
            trackio.finish()
