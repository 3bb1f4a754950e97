"""Utilization, sampled from real processes; NVML is the operating system's, so that is faked."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.timeline.sampler import SampledProcess, Sampler, _Series

HERE = SampledProcess(rank=0, device="cpu", pid=os.getpid(), num_threads=1)


class FakeNvml(SimpleNamespace):
    """Two GPUs, the second of which cannot be asked."""

    class NVMLError(Exception):
        pass

    is_shut_down = False

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        self.is_shut_down = True

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return f"GPU-{handle}".encode()

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if handle == 1:
            raise self.NVMLError
        return SimpleNamespace(gpu=73)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def ready(rank: int, gpu: str | None) -> dict[str, Any]:
    return {"t": 1.0, "rank": rank, "kind": "ready", "device": "cuda:0", "gpu": gpu}


def sampled(*workers: SampledProcess, samples: int = 3) -> Sampler:
    """A sampler that ended by itself after some samples."""
    turns: Iterator[bool] = iter([False] * samples + [True])
    sampler = Sampler(workers, origin_s=time.time(), is_over=lambda: next(turns))
    sampler.begin()
    sampler._thread.join(30)
    return sampler


def test_a_cpu_rank_is_sampled_by_its_process() -> None:
    utilization = sampled(HERE).utilization([])
    (device,) = utilization["devices"]
    assert (device["rank"], device["device"], device["source"]) == (0, "cpu", "psutil")
    assert len(device["percent"]) == len(utilization["t"]) == 3
    assert all(0 <= value <= 100 for value in device["percent"])
    assert utilization["period_ms"] == 100


def test_the_times_of_samples_are_seconds_of_the_run() -> None:
    times_s = sampled(HERE).utilization([])["t"]
    assert times_s == sorted(times_s)
    assert times_s[0] > 0


def test_a_process_that_is_gone_has_no_utilization() -> None:
    gone = SampledProcess(rank=0, device="cpu", pid=2**22 + 1, num_threads=1)
    assert sampled(gone).utilization([])["devices"][0]["percent"] == [None] * 3


def test_a_gpu_rank_gets_the_samples_of_the_gpu_that_it_named(nvml: FakeNvml) -> None:
    workers = [SampledProcess(rank=rank, device=f"cuda:{rank}", pid=os.getpid(), num_threads=1) for rank in (0, 1)]
    sampler = sampled(*workers, samples=2)
    devices = sampler.utilization([ready(0, "GPU-1"), ready(1, "GPU-0")])["devices"]
    assert [device["percent"] for device in devices] == [[None, None], [73.0, 73.0]]
    assert [device["source"] for device in devices] == ["nvml", "nvml"]
    assert nvml.is_shut_down


def test_without_nvml_a_gpu_rank_is_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    worker = SampledProcess(rank=0, device="cuda:0", pid=os.getpid(), num_threads=1)
    assert sampled(worker).utilization([ready(0, "GPU-0")])["devices"][0]["percent"] is None


def test_end_leaves_no_thread_behind() -> None:
    sampler = Sampler([HERE], origin_s=time.time(), is_over=lambda: False)
    sampler.begin()
    sampler.end()
    assert "outrider-sampler" not in {thread.name for thread in threading.enumerate()}


def test_a_long_run_keeps_a_bounded_number_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.timeline.sampler.MAX_SAMPLES", 4)
    monkeypatch.setattr("outrider.timeline.sampler.PERIOD_S", 0.001)
    utilization = sampled(HERE, samples=37).utilization([])
    (device,) = utilization["devices"]
    assert len(utilization["t"]) == len(device["percent"]) < 4
    assert utilization["period_ms"] == 16


def test_samples_that_are_joined_become_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.timeline.sampler.MAX_SAMPLES", 4)
    series = _Series()
    series.begin(["gpu"])
    for number, percent in enumerate([10.0, 30.0, None, 50.0, 60.0, 80.0, 90.0]):
        series.add(float(number), {"gpu": percent})
    assert (series.times_s, series.percents["gpu"]) == ([1.0, 3.0, 5.0], [20.0, 50.0, 70.0])
    assert series.readings_per_sample == 2


def test_a_sampler_that_fails_says_so_at_the_end_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> bool:
        raise RuntimeError("nobody knows")

    sampler = Sampler([HERE], origin_s=time.time(), is_over=fail)
    sampler.begin()
    sampler._thread.join()
    sampler.end()
    assert capsys.readouterr().err == (
        "outrider: utilization was not sampled to the end of the run: RuntimeError: nobody knows\n"
    )
