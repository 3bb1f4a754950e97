"""Runs one case of the suite, from its folder to its completed record.

Decides how a case is started, resumed and checked, and which numbers of the timeline are added to its record, so that
reports need no timeline. Called by the sweep and its workers.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.bench.modes import OnMessage, parse_mode, run_mode
from outrider.bench.suite.runs import BLOCK, Case, Subject, SuiteRun, as_block, read_json, read_run
from outrider.bench.tasks import Task
from outrider.errors import ConfigError, DataError, OutriderError
from outrider.machine.devices import parse_devices
from outrider.record import checkpoint_files
from outrider.record.run_folder import RunFolder
from outrider.timeline.document import Timeline
from outrider.timeline.idle import recorded_s, sampled_s
from outrider.timeline.timeline_summary import anchor_history
from outrider.world.messages import Message

Epochs = Sequence[Mapping[str, Any]]


def measured(timeline: Mapping[str, Any], epochs: Epochs) -> dict[str, Any]:
    """The block `measured` of a record, from `timeline.json`; peers keep none, for them the epochs have to do."""
    whole = Timeline(name="", events=timeline.get("events", []), utilization=timeline.get("utilization"))
    return {
        "idle_s_by_rank": _by_rank(recorded_s(whole.events)) or _idle_from_epochs(epochs),
        "sampled_idle_s_by_rank": _by_rank(sampled_s(whole.utilization, whole.gaps)),
        "average_ms": _average_ms(whole.events) or _average_ms_from_epochs(epochs),
        "anchors": [change.after for change in anchor_history(whole)],
    }


def _by_rank(seconds: Mapping[int, Mapping[str, float]]) -> list[dict[str, float]]:
    return [{cause: round(value, 4) for cause, value in seconds[rank].items()} for rank in sorted(seconds)]


def _idle_from_epochs(epochs: Epochs) -> list[dict[str, float]]:
    """Only the mean over the ranks is known of a run without a timeline: each rank is given that."""
    if not epochs or any(epoch["wait_fraction"] is None for epoch in epochs):
        return []
    waited_s = sum(epoch["wait_fraction"] * epoch["seconds"] for epoch in epochs)
    return [{"average": round(waited_s, 4)} for _ in epochs[0]["share_by_rank"]]


def _average_ms(events: Iterable[Mapping[str, Any]]) -> float | None:
    """Mean time of an average without the wait for others: the last rank to arrive did not wait.

    Averages that were merged into one event per slot are omitted, because their ranks cannot be matched.
    """
    by_window: dict[int, list[float]] = defaultdict(list)
    for event in events:
        if event["kind"] == "average end" and "count" not in event:
            by_window[event["window"]].append(event["ms"])
    least = [min(times) for times in by_window.values()]
    return round(sum(least) / len(least), 4) if least else None


def _average_ms_from_epochs(epochs: Epochs) -> float | None:
    """Of averages in every step, too many for an event each: what they took from the ranks, by their number."""
    averages = sum(epoch["averages"] for epoch in epochs)
    if not averages or any(epoch["exposed_average_fraction"] is None for epoch in epochs):
        return None
    taken_s = sum(epoch["exposed_average_fraction"] * epoch["seconds"] for epoch in epochs)
    return float(round(taken_s * 1e3 / averages, 4))


CHECKPOINT_EVERY = 10
"""Epochs between checkpoints of an untimed run: the most that an interrupted one loses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A case and the objects that are needed to run it."""

    case: Case
    subject: Subject
    make_task: Callable[[], Task]


def run_case(planned: Planned, folder: Path, *, on_message: OnMessage = lambda message: None) -> SuiteRun:
    """Train in separate processes, in a new folder or in one with a run that can be resumed."""
    case = planned.case
    settings, keeps = dict(case.settings), _keeps_checkpoint(case)
    if keeps:
        settings |= {"checkpoint_every": CHECKPOINT_EVERY, "keep": 1}
    goes_on = can_go_on(folder, case)
    if folder.exists() and not goes_on:
        raise ConfigError(f"{folder} is there already", hint="name a folder that is not")
    if goes_on:
        settings["resume"] = folder
    block = as_block(case, planned.subject)
    devices = parse_devices(case.devices)

    def saw(message: Message) -> None:
        if keeps and message.kind == "epoch":
            # A session writes its configuration with its first batch, over the one that was there.
            _annotate(folder, "config.json", block)
        on_message(message)

    try:
        run_mode(
            parse_mode(case.mode, num_devices=len(devices)),
            planned.make_task(),
            devices=devices,
            run_dir=folder,
            settings=settings,
            on_start=lambda: _annotate(folder, "config.json", block),
            on_message=saw,
        )
    except OutriderError as error:
        keep_failure(folder, planned, error)
        raise
    except KeyboardInterrupt:
        _annotate(folder, "config.json", block)
        raise
    if keeps:
        shutil.rmtree(RunFolder(folder).checkpoints, ignore_errors=True)
    return complete(folder, block)


def can_go_on(folder: Path, case: Case) -> bool:
    """Whether a run stopped here after a checkpoint, or failed, as all of an MPS daemon do when one of them faults.

    A timed run starts again, and so does a run that failed again after a resume.
    """
    if not _keeps_checkpoint(case):
        return False
    try:
        checkpoint_files.find(folder)
        run = read_run(folder)
    except DataError:
        return False
    return run is not None and not (run.error is not None and run.went_on)


def _keeps_checkpoint(case: Case) -> bool:
    """Of the suite's own, which goes when the run has ended; those that a user asks for are the user's."""
    is_long = case.epochs > CHECKPOINT_EVERY and not case.is_timed
    mode = parse_mode(case.mode, num_devices=len(case.devices))
    return is_long and mode.can_resume and "checkpoint_every" not in case.settings


def finished_run(folder: Path, planned: Planned) -> SuiteRun | None:
    """The run that came to its end here; None if there is none, or one that cannot be read."""
    try:
        run = read_run(folder)
    except DataError:
        return None
    if run is None or not run.is_finished:
        return None
    return run if run.measured is not None else complete(folder, as_block(planned.case, planned.subject))


def complete(folder: Path, block: dict[str, Any]) -> SuiteRun:
    """Add numbers of the timeline to the record, so that reports need the record only."""
    timeline = read_json(folder / "timeline.json") or {}
    record = read_json(folder / "record.json") or {}
    _annotate(folder, "config.json", block)
    _annotate(folder, "record.json", block | {"measured": measured(timeline, record.get("epochs", []))})
    run = read_run(folder)
    assert run is not None, "the configuration was written when the run began"
    return run


def _annotate(folder: Path, name: str, block: dict[str, Any]) -> None:
    RunFolder(folder).create()
    content = read_json(folder / name) or {}
    # Records are published, so they must not contain paths of this machine.
    options = {**content.get("options", {}), "run_dir": folder.name}
    if options.get("resume"):
        options["resume"] = folder.name
    RunFolder(folder).write_json(name, {**content, "options": options, BLOCK: block})


def keep_failure(folder: Path, planned: Planned, error: OutriderError) -> None:
    """Write a record for a failed run, even if it failed before its start, so that reports show the reason."""
    _annotate(folder, "config.json", as_block(planned.case, planned.subject))
    if not (folder / "record.json").is_file():
        told = {"type": type(error).__name__, "message": error.message, "rank": error.rank, "step": error.step}
        RunFolder(folder).write_json("record.json", {"status": "failed", "error": told, "epochs": []})
