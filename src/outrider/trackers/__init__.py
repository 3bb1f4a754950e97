"""Trackers: where the values of a run go besides its own record, such as TensorBoard or Weights & Biases.

One small protocol (`Tracker`) and five implementations. A library is imported when its tracker starts. Rank 0 alone
calls trackers, at the start of the record, after every epoch and at the end of the run.
"""

from outrider.trackers.csv_tracker import CsvTracker
from outrider.trackers.mlflow_tracker import MlflowTracker
from outrider.trackers.tensorboard_tracker import TensorBoardTracker
from outrider.trackers.tracker import TrackedRun, Tracker
from outrider.trackers.trackio_tracker import TrackioTracker
from outrider.trackers.wandb_tracker import WandbTracker

__all__ = [
    "CsvTracker",
    "MlflowTracker",
    "TensorBoardTracker",
    "TrackedRun",
    "Tracker",
    "TrackioTracker",
    "WandbTracker",
]
