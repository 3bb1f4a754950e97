"""In which order an average on a device is put together; the device itself is made up here."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.average.device_average import DeviceAverager
from outrider.average.rank_facts import Settled

CUDA = torch.device("cuda", 0)


class Event:
    def __init__(self, **_: bool) -> None: ...

    def record(self, stream: object) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: Event) -> float:
        return 1.0


class Noted:
    """Whatever is asked of it is noted, and done."""

    def __init__(self, notes: list[str], names: str, **attributes: Any) -> None:
        self.__dict__.update(attributes)
        for name in names.split():
            setattr(self, name, lambda *_, name=name: notes.append(name))


@pytest.fixture
def made_up_device(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def on(stream: object) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(wait_event=lambda event: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", on)


@pytest.mark.usefixtures("made_up_device")
def test_behind_steps_a_sum_begins_when_all_ranks_have_come() -> None:
    notes: list[str] = []
    has_packed, all_here = threading.Event(), threading.Event()
    exchange = Noted(
        notes,
        "stage fetch open add_correction report",
        rank=0,
        world_size=2,
        device=CUDA,
        arena=SimpleNamespace(device=CUDA),
        pieces=[],
        pack_norms=lambda: None,
        maxima=[],
        read=lambda: Settled(facts=(), total_samples=2),
    )
    collective = Noted(notes, "sum_ max_ check_peers")

    def await_others() -> None:
        has_packed.set()
        assert all_here.wait(30)

    with DeviceAverager(exchange, collective, await_others=await_others) as averager:  # type: ignore[arg-type]
        averager.begin(1, [])
        assert has_packed.wait(30)
        assert notes == ["stage", "fetch"]
        assert not averager.is_ready()
        notes.append("a step")
        all_here.set()
        assert averager.correct().total_samples == 2
    ordered = [note for note in notes if note != "check_peers"]
    assert ordered == [
        *("stage", "fetch", "a step"),
        *("open", "sum_", "max_", "report", "add_correction"),
    ]
