"""What measuring costs: epochs with sampling and recording against epochs without, in one run.

Epochs go with, without, without, with, so that a machine that gets slower hurts both alike; the first four are warm-up.
Prints the median ratio of the seconds of neighbouring epochs with its interval, and the CPU time that sampling and
recording took in a second run, which a busy machine does not blur. Before that it times what a local step calls to be
measured, for steps so short that a whole run does not show it. `--json FILE` keeps all numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional

import outrider
from outrider.rank.meter import Meter
from outrider.rank.throttle import Throttle
from outrider.record.run_record import commit
from outrider.timeline.activity import Activity
from outrider.timeline.recorder import Recorder
from outrider.timeline.sampler import Sampler
from outrider.timeline.windows import WindowLog

WARM_UP_EPOCHS = 4
RECORDING = ((Recorder, "event"), (WindowLog, "stepped"), (WindowLog, "averaged"), (WindowLog, "end"))
NUM_RESAMPLES = 2_000
MEASURING = ((Activity, "enter"), (Activity, "belonged_to"), (Recorder, "add_wait"))
NUM_STEPS = 8_000


def is_measured(epoch: int) -> bool:
    return epoch % 4 in (0, 3)


def make_model(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))


def switch_recording(context: outrider.EpochContext) -> None:
    """Called in every rank before an epoch."""
    switch(is_measured=is_measured(context.epoch))


def switch(*, is_measured: bool) -> None:
    """Let the methods that measure and record do so in this process, or let them do nothing."""
    for owner, name in (*RECORDING, *MEASURING):
        original = owner.__dict__.get(f"original_{name}") or owner.__dict__[name]
        setattr(owner, f"original_{name}", original)
        setattr(owner, name, original if is_measured else lambda *_, **__: 0.0)


def timed(method: Callable[..., None], spent_s: list[float]) -> Callable[..., None]:
    """The method, with its CPU time added up."""

    def call(*arguments: Any, **options: Any) -> None:
        started_s = time.thread_time()
        method(*arguments, **options)
        spent_s[0] += time.thread_time() - started_s

    return call


class Account:
    """Adds up the CPU time of recording in a rank, and leaves it in a file after every epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, context: outrider.EpochContext) -> None:
        if context.epoch == 0:
            self.spent_s = [0.0]
            for owner, name in RECORDING:
                setattr(owner, name, timed(owner.__dict__[name], self.spent_s))

    def end(self, context: outrider.EpochContext) -> None:
        (self.folder / f"spent{context.rank}.json").write_text(json.dumps(self.spent_s[0]))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def train(policy: str, options: argparse.Namespace, folder: Path, step: Any = loss, **more: Any) -> outrider.Run:
    inputs, labels = torch.randn(options.samples, 784), torch.randint(10, (options.samples,))
    return outrider.train(
        partial(make_model, options.width),
        lambda parameters: torch.optim.SGD(parameters, 0.01),
        step,
        (inputs, labels),
        batch_size=options.batch_size,
        policy=policy,
        devices=options.devices,
        anchor=20 if policy in ("cadence", "async") else None,
        run_dir=folder,
        threads_per_rank=1,
        **more,
    )


def epoch_seconds(policy: str, options: argparse.Namespace, folder: Path) -> list[float]:
    """Training seconds of every epoch of one run."""
    epoch = 0
    original = Sampler._sample

    def sample(self: Sampler, gauges: Any) -> None:
        if is_measured(epoch):
            original(self, gauges)

    seconds = []
    with patch.object(Sampler, "_sample", sample):
        epochs = WARM_UP_EPOCHS + options.epochs
        for metrics in train(policy, options, folder, epochs=epochs, epoch_start=switch_recording):
            epoch = metrics.epoch + 1
            seconds.append(metrics.seconds)
    return seconds


def cpu_share(policy: str, options: argparse.Namespace, folder: Path) -> float:
    """CPU time of sampling and recording, as a part of the time the ranks trained; free of the machine's noise."""
    account, sampling_s, started_s = Account(folder), [0.0], time.perf_counter()
    with patch.object(Sampler, "_sample", timed(Sampler._sample, sampling_s)):
        epochs = max(1, options.epochs // 4)
        trained = train(policy, options, folder, epochs=epochs, epoch_start=account.begin, epoch_end=account.end).join()
    run_s = time.perf_counter() - started_s
    recording_s = [json.loads(path.read_text()) for path in folder.glob("spent*.json")]
    train_s = sum(metrics.seconds for metrics in trained.epochs)
    # Sampling goes on during set-up too, recording hardly.
    return float(sum(recording_s) / train_s + sampling_s[0] / run_s) / len(recording_s)


def ratios(seconds: list[float]) -> list[float]:
    """With over without, for each two neighbouring epochs."""
    pairs = zip(range(0, len(seconds), 2), range(1, len(seconds), 2), strict=True)
    return [seconds[a] / seconds[b] if is_measured(a) else seconds[b] / seconds[a] for a, b in pairs]


def interval(values: list[float]) -> tuple[float, float]:
    """95 % of the medians of bootstrap samples."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES))
    return medians[round(0.025 * NUM_RESAMPLES)], medians[round(0.975 * NUM_RESAMPLES) - 1]


# Single steps


def step_microseconds(options: argparse.Namespace) -> dict[str, float]:
    """What a local step of the stepper calls to be measured, timed after steps of the model, and in a loop of its own.

    A step empties caches and branch predictors of what was called before it, so the first number is several times the
    second one. Medians, without what the timing itself takes.
    """
    torch.set_num_threads(1)
    recorder = Recorder(1, origin_s=time.time())
    meter = Meter(rank=1, throttle=Throttle(1.0), recorder=recorder)
    model = make_model(options.width)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    batch = torch.randn(options.batch_size, 784), torch.randint(10, (options.batch_size,))

    def train_step() -> None:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()

    def measuring() -> None:
        measure_step(recorder, meter)

    def after_steps(call: Callable[[], None]) -> float:
        train_step()
        return seconds_of(call)

    loops = range(NUM_STEPS)
    steps_s = statistics.median(seconds_of(train_step) for _ in loops)
    cold = [(after_steps(measuring), after_steps(lambda: None)) for _ in loops]
    warm = [(seconds_of(measuring), seconds_of(lambda: None)) for _ in loops]
    differences_us = [statistics.median(a - b for a, b in pairs) * 1e6 for pairs in (cold, warm)]
    names = ("after_steps_us", "alone_us", "train_step_us")
    return dict(zip(names, (round(one, 2) for one in (*differences_us, steps_s * 1e6)), strict=True))


def measure_step(recorder: Recorder, meter: Meter) -> None:
    """The calls by which `Stepper`, `Driver.fetch` and `Driver.steps` measure a local step."""
    activity = recorder.activity
    started_s = time.perf_counter()
    before = activity.phase
    data_s = activity.enter("data")
    recorder.add_wait("data", activity.enter(before) - data_s)
    meter.ended_step(64, time.perf_counter() - started_s)
    time.perf_counter()


def seconds_of(call: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def measure(policy: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        seconds = epoch_seconds(policy, options, Path(folder))[WARM_UP_EPOCHS:]
    with tempfile.TemporaryDirectory() as folder:
        share = cpu_share(policy, options, Path(folder))
    found = ratios(seconds)
    low, high = interval(found)
    middle = statistics.median(found)
    print(f"{policy}: with / without {middle:.4f} (95 % {low:.4f} to {high:.4f}, {len(found)} pairs of epochs)")
    print(f"{policy}: sampling and recording took {share:.3%} of the ranks' time")
    return {
        "ratio": round(middle, 5),
        "ci95": [round(low, 5), round(high, 5)],
        "cpu_share": round(share, 6),
        "epoch_seconds": [round(one, 4) for one in seconds],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--policies", default="cadence,sync")
    parser.add_argument("--devices", default="cpu,cpu@0.4")
    parser.add_argument("--epochs", type=int, default=80, help="a multiple of four; besides the warm-up")
    parser.add_argument("--samples", type=int, default=8_000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=256, help="of the hidden layer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the results with their raw seconds")
    options = parser.parse_args()
    single = step_microseconds(options)
    print("measuring a local step takes {after_steps_us} µs after steps of {train_step_us} µs".format(**single))
    print("and {alone_us} µs in a loop of its own".format(**single))
    results = {policy: measure(policy, options) for policy in options.policies.split(",") if policy}
    if options.json:
        where = {"machine": platform.machine(), "num_cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
        what = {"devices": options.devices, "batch_size": options.batch_size, "samples_per_epoch": options.samples}
        what |= {"model": "mlp", "width": options.width}
        versions = {"torch": torch.__version__, "outrider": outrider.__version__, "commit": commit()}
        document = {"measured": {**what, **where, **versions}, "step": single, "results": results}
        options.json.write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
