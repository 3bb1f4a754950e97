"""One case of the suite from its folder to its completed record.

Decides what a run of the suite leaves behind: `config.json` from which it can be run again, and a record that says
what the timeline told; and that a long run which is not timed goes on where it stopped. Which cases there are is the
sweep's business, how a mode trains the modes'.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.bench.modes import OnMessage, parse_mode, run_mode
from outrider.bench.suite.case import Case, Subject, as_block
from outrider.bench.suite.record import measured
from outrider.bench.suite.runs import BLOCK, SuiteRun, read_json, read_run
from outrider.bench.tasks import Task
from outrider.errors import ConfigError, DataError, OutriderError
from outrider.machine.devices import parse_devices
from outrider.runtime import checkpoint
from outrider.runtime.folder import RunFolder
from outrider.runtime.messages import Message

CHECKPOINT_EVERY = 10
"""Epochs of a run that is not timed; what an interrupted one loses at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A case with what it takes to run it."""

    case: Case
    subject: Subject
    make_task: Callable[[], Task]


def run_case(planned: Planned, folder: Path, *, on_message: OnMessage = lambda message: None) -> SuiteRun:
    """Train in processes of its own, in a folder that is not there yet, or holds what can be gone on with."""
    case = planned.case
    settings, keeps = dict(case.settings), _keeps_checkpoint(case)
    if keeps:
        settings["checkpoint_every"] = CHECKPOINT_EVERY
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
            checkpoint.keep_newest(folder)
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

    A timed one begins anew, and so does one that failed again after it had gone on.
    """
    if not _keeps_checkpoint(case):
        return False
    try:
        checkpoint.load_progress(checkpoint.find(folder), identity={})
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
    """The run that came to its end here; None where there is none, or one that cannot be read."""
    try:
        run = read_run(folder)
    except DataError:
        return None
    if run is None or not run.is_finished:
        return None
    return run if run.measured is not None else complete(folder, as_block(planned.case, planned.subject))


def complete(folder: Path, block: dict[str, Any]) -> SuiteRun:
    """Put what the timeline tells into the record, so that reports need the record only."""
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
    # Records are passed on and published: where on this machine they were made is nobody's concern.
    options = {**content.get("options", {}), "run_dir": folder.name}
    if options.get("resume"):
        options["resume"] = folder.name
    RunFolder(folder).write_json(name, {**content, "options": options, BLOCK: block})


def keep_failure(folder: Path, planned: Planned, error: OutriderError) -> None:
    """A run that failed, even before it began, is told in the report with its reason."""
    _annotate(folder, "config.json", as_block(planned.case, planned.subject))
    if not (folder / "record.json").is_file():
        told = {"type": type(error).__name__, "message": error.message, "rank": error.rank, "step": error.step}
        RunFolder(folder).write_json("record.json", {"status": "failed", "error": told, "epochs": []})
