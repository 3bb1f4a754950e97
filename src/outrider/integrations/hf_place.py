"""The place in an epoch that a checkpoint of a Trainer tells: which ranges of its order no step has used yet.

Decides what is written beside the Trainer's own files, and whether a run can go on from there. Used by
`outrider.integrations.huggingface`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider.integrations.hf_steps import StepCount

PLACE_FILE = "outrider.json"
Place = Mapping[str, Any]


def place_after(
    done: int | None, *, count: StepCount, num_samples: int, remaining: Callable[..., list[list[int]] | None]
) -> Place:
    """The place after so many samples of the pass under way; None: after all of it."""
    is_whole = done is None or done >= num_samples
    rest = None if done is None or is_whole else remaining(done=done)
    if done is not None and not is_whole and rest is None:
        # The pass was left early, and the session has no place in it any more.
        rest = [[done, num_samples - done]]
    return {
        "schema_version": 1,
        "epoch": count.epoch + 1 if is_whole else count.epoch,
        "remaining": rest,
        "step_samples": count.step_samples,
        "steps_per_epoch": count.steps_per_epoch,
    }


def write_place(place: Place, checkpoint: str) -> None:
    Path(checkpoint, PLACE_FILE).write_text(json.dumps(place))


def read_place(checkpoint: str | None) -> Place | None:
    """The place that a checkpoint tells; None for one of a plain Trainer, whose steps tell it."""
    if checkpoint is None:
        return None
    path = Path(checkpoint, PLACE_FILE)
    if not path.exists():
        return None
    place: Place = json.loads(path.read_text())
    return place


def check_place(place: Place, count: StepCount) -> None:
    """Raise if the steps of the checkpoint are not those of this run."""
    found = (place["step_samples"], place["steps_per_epoch"])
    if found != (count.step_samples, count.steps_per_epoch):
        raise ConfigError(
            f"the checkpoint counts {found[1]} steps of {found[0]} samples per epoch, this run "
            f"{count.steps_per_epoch} of {count.step_samples}",
            hint="resume with the same data, per_device_train_batch_size and gradient_accumulation_steps; policy sync "
            "also needs the same number of ranks, the others do not",
        )
