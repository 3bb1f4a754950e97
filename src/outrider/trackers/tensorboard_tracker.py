"""Values as scalars of TensorBoard, in the run folder: `tensorboard --logdir runs` shows all runs."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from outrider.trackers.tracker import TrackedRun, Tracker

_FOLDER = "tensorboard"


class TensorBoardTracker(Tracker):
    """Event files in `log_dir`, by default the folder `tensorboard` of the run folder."""

    name: ClassVar[str] = "tensorboard"
    package: ClassVar[str | None] = "tensorboard"

    def __init__(self, log_dir: str | PathLike[str] | None = None) -> None:
        self._log_dir = None if log_dir is None else Path(log_dir)
        self._writer: Any = None

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        from torch.utils.tensorboard.writer import SummaryWriter

        log_dir = self._log_dir or run.folder / _FOLDER
        purge_step = None
        if run.earlier is not None:
            before = Path(run.earlier["log_dir"])
            if before.is_dir() and before.resolve() != log_dir.resolve():
                shutil.copytree(before, log_dir, dirs_exist_ok=True)
            # What the run did after its checkpoint, it does again: TensorBoard hides the first time.
            purge_step = run.step + 1
        self._writer = SummaryWriter(str(log_dir), purge_step=purge_step)
        if run.earlier is None:
            rows = "".join(f"| {name} | {value} |\n" for name, value in run.config.items())
            self._writer.add_text("config", f"| option | value |\n| --- | --- |\n{rows}", run.step)
        return {"log_dir": str(log_dir.absolute())}

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, status: str) -> None:
        self._writer.add_text("status", status)
        self._writer.close()
