"""Values as a run of MLflow, on the tracking server or store that MLflow is set to."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from outrider.errors import MissingExtraError
from outrider.trackers.tracker import TrackedRun, Tracker

_STATUS = {"finished": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_LONGEST_PARAM = 500
_MOST_PARAMS = 100
"""MLflow takes as many at a time."""


class MlflowTracker(Tracker):
    """A run of `experiment` at `tracking_uri`, by default that of MLflow (`MLFLOW_TRACKING_URI`)."""

    name: ClassVar[str] = "mlflow"
    package: ClassVar[str | None] = "mlflow"

    def __init__(self, experiment: str = "outrider", *, tracking_uri: str | None = None) -> None:
        self._experiment = experiment
        self._tracking_uri = tracking_uri
        self._client: Any = None
        self._run_id = ""

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        from mlflow.tracking import MlflowClient

        try:
            self._client = MlflowClient(tracking_uri=self._tracking_uri)
            if run.earlier is None:
                self._create(run)
            else:
                self._run_id = run.earlier["run_id"]
                self._client.update_run(self._run_id, status="RUNNING")
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                f"MLflow cannot open its store: {error}",
                hint="set MLFLOW_TRACKING_URI to a server, or install the full package for a local store: "
                "pip install mlflow",
            ) from error
        return {"run_id": self._run_id}

    def _create(self, run: TrackedRun) -> None:
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        self._run_id = self._client.create_run(experiment, run_name=run.name).info.run_id
        from mlflow.entities import Param

        params = [Param(_allowed(name), str(value)[:_LONGEST_PARAM]) for name, value in run.config.items()]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + _MOST_PARAMS])

    def log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [Metric(_allowed(name), float(value), now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, status: str) -> None:
        self._client.set_terminated(self._run_id, _STATUS.get(status, "FAILED"))


def _allowed(name: str) -> str:
    """MLflow refuses names with other characters, such as `acc@1`."""
    return re.sub(r"[^\w\-. /]", "_", name)
