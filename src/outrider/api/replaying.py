"""`outrider.replay()`: repeat a recorded run in this process, to look at every step of it.

Decides whether a recording belongs to the arguments, and how to set up the process for bit-identical results.
`outrider replay` runs a script again with the variable `OUTRIDER_REPLAY`; `train()` in that script then calls this.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn, Unpack

import torch

from outrider.api.options import CheckedRun, Options, make_order
from outrider.api.replay_wish import DEPARTED, ReplayWish
from outrider.errors import ConfigError, DataError, OutriderError
from outrider.record.run_events import SCHEDULE, merge_schedules
from outrider.replica import recipe as recipes
from outrider.replica.recipe import ModelSource, OptimizerFactory, Recipe, StepFunction
from outrider.timeline.timeline_files import finite, read_json, read_record, write_text
from outrider.virtual.recorded_run import COLUMNS, Replay, as_rows, read_recording, replay_run


def replay(
    run: str | os.PathLike[str],
    model: ModelSource,
    optimizer: OptimizerFactory,
    step: StepFunction,
    dataset: Any,
    **options: Unpack[Options],
) -> Replay:
    """Train again in this process exactly as a run with `record_schedule=True` did, and compare.

    Pass the arguments of the run. The result has the loss of every step of every rank, the model, and the first place
    where the replay differs from the recording, if any. Nothing is evaluated or saved, and no callback is called.
    """
    order = make_order({"model": model, "optimizer": optimizer, "step": step, "dataset": dataset}, options)
    return _replay(Path(run), order)


def _replay(folder: Path, order: CheckedRun) -> Replay:
    # A run that failed early has no record yet, and a run with a user's own loop has no configuration.
    record = read_record(folder) or read_json(folder / "config.json")
    devices = tuple(record["devices"])
    recipe = order.recipe.with_devices(devices)
    _refuse_other_options(recipe, record["options"])
    path = folder / SCHEDULE
    if not path.is_file():
        if not (folder / "schedules").is_dir():
            raise DataError(f"{folder} has no recorded schedule", hint="pass record_schedule=True to the run")
        # A failed run has only the schedule files of its ranks.
        merge_schedules(folder, world_size=len(devices))
    others = [device for device in devices if not device.startswith("cpu")]
    bare = replace(recipe, evaluate=None, eval_dataset=None)
    with _as_in_a_rank(record):
        return replay_run(
            bare, read_recording(path), collate=order.config.collate, recorded_on=others[0] if others else None
        )


def _refuse_other_options(recipe: Recipe, recorded: Mapping[str, Any]) -> None:
    """Raise if the arguments differ from those of the run."""
    given = json.loads(json.dumps(recipes.settings(recipe), default=str))
    if "batch_sampler" in recorded:
        # The record has the sizes of its batches; the recipe counts batches.
        del given["batch_size"]
    for name, value in given.items():
        if name in recorded and recorded[name] != value and name not in ("evaluate", "eval_dataset"):
            raise ConfigError(
                f"the run was recorded with {name}={recorded[name]!r}, and is replayed with {value!r}",
                hint="replay it with the arguments of the run",
            )


@contextmanager
def _as_in_a_rank(record: Mapping[str, Any]) -> Iterator[None]:
    """Use the thread count of a rank and flush denormals as ranks do; otherwise sums differ in their last bits."""
    threads = record.get("environment", {}).get("threads_per_rank")
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)


# Replays that `outrider replay` requests from a script


def replay_instead(order: CheckedRun, wish: ReplayWish) -> NoReturn:
    """Replay instead of training, report, and exit, because the code after `train()` expects a real run."""
    try:
        result = _replay(Path(wish.run), order)
        document = json.dumps(finite(_document(result)), indent=1, allow_nan=False)
        print(document if wish.as_json else "\n".join(replay_lines(result)), flush=True)
        if wish.losses is not None:
            _write_losses(Path(wish.losses), result)
    except OutriderError as error:
        wish.fail(error)
    if wish.losses is not None and not wish.as_json:
        print(f"the loss of each of {len(result.steps)} steps is in {wish.losses}", flush=True)
    wish.end(0 if result.departure is None else DEPARTED)


_BITS = {True: "same bits", False: "other bits", None: "bits not compared"}


def replay_lines(result: Replay) -> list[str]:
    """The report of a replay, for a terminal."""
    lines = [
        f"epoch {one.epoch}  loss {one.loss:.4f}  {one.averages} averages  " + _BITS[one.has_same_bits]
        for one in result.epochs
    ]
    if result.recorded_on is not None:
        lines.append(f"recorded on {result.recorded_on}: bits are not compared with those of the CPU")
    if result.error is not None:
        lines.append(f"then it fails as the run did, or before it: {result.error.message}")
    if result.highest is not None:
        step = result.highest
        positions = f"{step.batch.start} to {step.batch.stop - 1}"
        lines.append(
            f"highest loss of a step: {step.loss:.4g}, epoch {step.epoch}, rank {step.rank}, positions {positions}"
        )
    departure = result.departure
    lines.append("no departure from the recording" if departure is None else f"departs at {departure}")
    return lines


def _document(result: Replay) -> dict[str, Any]:
    return {
        "epochs": [asdict(epoch) for epoch in result.epochs],
        "recorded_on": result.recorded_on,
        "departure": result.departure,
        "error": None if result.error is None else result.error.message,
        "steps": len(result.steps),
        "highest": None if result.highest is None else as_rows([result.highest])[0],
    }


def _write_losses(path: Path, result: Replay) -> None:
    text = io.StringIO()
    table = csv.DictWriter(text, fieldnames=COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(as_rows(result.steps))
    write_text(path, text.getvalue())
