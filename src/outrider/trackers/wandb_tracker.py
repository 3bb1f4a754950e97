"""Values as a run of Weights & Biases, on its server or offline (`WANDB_MODE=offline`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from outrider.trackers.tracker import TrackedRun, Tracker

_STEP = "global_step"


class WandbTracker(Tracker):
    """A run of `project`; the options are those of `wandb.init`, and go before what Outrider would pass."""

    name: ClassVar[str] = "wandb"
    package: ClassVar[str | None] = "wandb"

    def __init__(self, project: str | None = None, **options: Any) -> None:
        self._project = project
        self._options = options
        self._run: Any = None
        self._is_own = True

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        import wandb

        if wandb.run is not None:
            # The user's program opened it, and ends it.
            self._run, self._is_own = wandb.run, False
            return {"id": self._run.id}
        options: dict[str, Any] = {"name": run.name, "config": dict(run.config)}
        # W&B's own variables decide where they are set.
        if "WANDB_PROJECT" not in os.environ:
            options["project"] = "outrider"
        if "WANDB_DIR" not in os.environ:
            options["dir"] = str(run.folder)
        if self._project is not None:
            options["project"] = self._project
        if run.earlier is not None:
            options |= {"id": run.earlier["id"], "resume": "allow"}
        self._run = wandb.init(**options | self._options)
        # W&B drops values of a step before the last; with an axis of its own a resumed run may repeat steps.
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)
        return {"id": self._run.id}

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, _STEP: step})

    def finish(self, status: str) -> None:
        self._run.summary["status"] = status
        if self._is_own:
            self._run.finish(exit_code=0 if status in ("finished", "stopped") else 1)
