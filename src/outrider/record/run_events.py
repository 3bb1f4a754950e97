"""The events and schedules of a run: one file per rank while it runs, one file per run at its end.

Decides what rank 0 merges, and how ranks with missing files are reported. Events do not go through the store, and
never make a run fail. Called by the rank, after the model was written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from outrider.errors import DataError
from outrider.policy.effects import Lease
from outrider.policy.schedule import ScheduleRecorder
from outrider.record.run_folder import SCHEMA_VERSION, RunFolder
from outrider.timeline.document import NO_FILE, TIMELINE, EventFiles, find_event_files, write_timeline
from outrider.timeline.recorder import Recorder
from outrider.timeline.timeline_files import LineFile, write_pieces
from outrider.world.world import World


class RunEvents:
    """The recording of one rank: `open()` when the folder is known, `merge()` at the end, `close()` in any case."""

    def __init__(
        self,
        folder: RunFolder,
        world: World,
        *,
        origin_s: float,
        has_schedule: bool = False,
        has_pulses: bool = True,
    ) -> None:
        """`has_pulses`: whether the recorder is told what the rank is doing, for the live page."""
        self.recorder = Recorder(world.rank, origin_s=origin_s, world_size=world.size)
        self._folder = folder
        self._world = world
        self._has_schedule = has_schedule
        self._has_pulses = has_pulses
        self._schedule: ScheduleFile | None = None

    def open(self) -> None:
        """Start writing to this rank's files, beginning with the events so far."""
        self.recorder.write_to(self._folder.path, has_pulses=self._has_pulses)
        if self._has_schedule:
            self._schedule = ScheduleFile(self._folder.path, self._world.rank)

    def begin_segment(self, epoch: int, span: Lease, *, is_unmerged: bool) -> ScheduleRecorder | None:
        """The recorder of the next segment's schedule, if schedules are recorded."""
        if self._schedule is None:
            return None
        return self._schedule.begin_segment(epoch, span, is_unmerged=is_unmerged)

    def merge(self) -> None:
        """Merge the files of all ranks that rank 0 can read. All ranks call this."""
        self.close()
        problems = self._world.exchange_json(
            self.recorder.problem, name="states of the event files", what="the end of the run"
        )
        if self._world.rank == 0:
            _or_warn("events", lambda: self._merge_events(problems))
            if self._has_schedule:
                _or_warn("schedules", lambda: merge_schedules(self._folder.path, world_size=self._world.size))

    def close(self) -> None:
        self.recorder.close()
        if self._schedule is not None:
            self._schedule.close()

    def _merge_events(self, problems: list[str | None]) -> None:
        files = find_event_files(self._folder.path)
        if files is not None and files.origin_s == self.recorder.origin_s:
            missing = _missing(files, problems, self._world)
            write_timeline(self._folder.path / TIMELINE, replace(files, missing=missing))


def _missing(files: EventFiles, problems: list[str | None], world: World) -> dict[int, str]:
    """The reasons why events of ranks are missing or incomplete in the merged timeline."""
    missing = dict(files.missing)
    for rank, why in missing.items():
        if why == NO_FILE and world.hosts[rank] != world.hosts[0]:
            missing[rank] = f"they are on {world.hosts[rank]}, in the same folder there"
    return missing | {rank: problem for rank, problem in enumerate(problems) if problem is not None}


def _or_warn(what: str, merge: Callable[[], None]) -> None:
    try:
        merge()
    except (DataError, OSError) as error:
        print(f"outrider: the {what} of the ranks could not be merged: {error}", file=sys.stderr)


SCHEDULE = "schedule.json"
_FOLDER = "schedules"
_SEGMENT = "segment"
_SEGMENT_LINE = b'["segment"'


class ScheduleFile:
    """One rank's schedule, written as it happens."""

    def __init__(self, folder: Path, rank: int) -> None:
        if rank == 0:
            # A replay of an earlier start in this folder may have merged its schedule.
            (folder / SCHEDULE).unlink(missing_ok=True)
        self._file = LineFile(_path(folder, rank), what="the schedule")
        self._file.open({"schema_version": SCHEMA_VERSION, "rank": rank})

    def begin_segment(self, epoch: int, span: Lease, *, is_unmerged: bool = False) -> ScheduleRecorder:
        """The recorder of the next segment's schedule; ranks are unmerged after a checkpoint in mid-epoch."""
        self._file.add([_SEGMENT, epoch, span.start, span.count, is_unmerged])
        return ScheduleRecorder(self._file.add)

    @property
    def problem(self) -> str | None:
        return self._file.problem

    def close(self) -> None:
        self._file.close()


def _path(folder: Path, rank: int) -> Path:
    return folder / _FOLDER / f"rank{rank}.jsonl"


def merge_schedules(folder: Path, *, world_size: int) -> None:
    """Write `schedule.json`, by segment and rank, for replay in the lab; works line by line."""
    paths = [_path(folder, rank) for rank in range(world_size)]
    missing = [rank for rank, path in enumerate(paths) if not path.is_file()]
    if missing:
        raise DataError(f"the schedule of rank {missing[0]} is not in {folder}", hint="record it on one host")
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("rb")) for path in paths]
        write_pieces(folder / SCHEDULE, _pieces([_Segments(file) for file in files]))


class _Segments:
    """Reads the file of one rank, segment by segment."""

    def __init__(self, file: BinaryIO) -> None:
        self._lines = iter(file)
        # The header, then the mark of the first segment.
        next(self._lines, None)
        self.mark: list[Any] | None = None
        """Epoch and span of the next segment, and whether ranks were unmerged; None at the end."""
        for line in self._lines:
            self.mark = json.loads(line)[1:]
            break

    def entries(self) -> Iterator[bytes]:
        """The entries up to the next mark."""
        self.mark = None
        for line in self._lines:
            # The last line of a killed rank may be incomplete.
            if not line.endswith(b"\n"):
                return
            if line.startswith(_SEGMENT_LINE):
                self.mark = json.loads(line)[1:]
                return
            yield line.rstrip()


def _pieces(ranks: Sequence[_Segments]) -> Iterator[bytes]:
    yield b'{"schema_version":%d,"segments":[' % SCHEMA_VERSION
    marks: list[list[Any]] = []
    while all(rank.mark is not None for rank in ranks):
        yield b",[" if marks else b"["
        marks.append(ranks[0].mark or [])
        for number, rank in enumerate(ranks):
            yield b"[" if number == 0 else b",["
            yield from _joined(rank.entries())
            yield b"]"
        yield b"]"
    yield b'],"marks":%s}\n' % json.dumps(marks).encode()


def _joined(entries: Iterator[bytes]) -> Iterator[bytes]:
    for number, entry in enumerate(entries):
        yield entry if number == 0 else b"," + entry
