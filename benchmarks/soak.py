"""A soak: small runs that are killed, stopped, interrupted or denied the disk at random moments, and resumed.

Every run is started again with `resume="auto"` until it ends. Then its accounts must name every sample once per epoch,
`sync` must equal the run that was never disturbed to the bit, and nothing may be left behind: no process, socket,
temporary folder, shared memory or half of a checkpoint. Stops with an error at the first difference.

    python benchmarks/soak.py --minutes 30 --faults 500 --out docs/results/long_runs/soak.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file
from torch import nn

import outrider
from outrider.record.run_record import commit

NUM_SAMPLES, BATCH_SIZE, EPOCHS = 512, 8, 6
DEVICES = "cpu,cpu"
POLICIES = ("sync", "balanced", "cadence", "async")
WAYS = ("train", "train", "train", "session")
FATAL = ("kill", "exception", "sigterm to a rank", "sigterm to the starter", "sigint to the starter")
PASSING = ("disk full", "stopped for a moment")
SHARED_MEMORY = Path("/dev/shm")


# What is trained


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))


def make_data() -> torch.Tensor:
    return torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(5))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    time.sleep(0.002)
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


def options(policy: str, folder: Path) -> dict[str, Any]:
    return {
        "policy": policy,
        "devices": DEVICES,
        "run_dir": folder,
        "resume": "auto",
        "checkpoint_every": "0.2s",
        "timeout_s": 60.0,
        "threads_per_rank": 1,
        "seed": 1,
    }


def train(policy: str, folder: Path) -> outrider.Run:
    return outrider.train(
        model=make_model,
        optimizer=lambda p: torch.optim.Adam(p, 1e-2),
        step=loss_of,
        dataset=make_data(),
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        sample_utilization=False,
        **options(policy, folder),
    )


def run_session(policy: str, folder: Path) -> None:
    """The same in a loop of one's own; this file is run again in every rank."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with outrider.Session(**options(policy, folder)) as s:
        s.prepare(model, optimizer)
        for _ in s.epochs(EPOCHS):
            for batch in s.batches(make_data(), batch_size=BATCH_SIZE):
                s.step(loss_of(model, batch))
        s.save(folder / "model.safetensors")


# One start, with its faults


@dataclass(kw_only=True)
class Start:
    """What is to happen in one start of a run."""

    fatal: str | None
    at_step: int
    rank: int
    disk_full_at: list[int] = field(default_factory=list)
    stops_after_s: float | None = None

    def variables(self) -> str:
        """For OUTRIDER_FAULTS: faults at an exact place."""
        actions = {"kill": "kill", "exception": "exception", "sigterm to a rank": "sigterm"}
        faults = [f"rank=0,at=checkpoint-write,n={n},do=disk-full" for n in self.disk_full_at]
        if self.fatal in actions:
            faults.append(f"rank={self.rank},at=step,n={self.at_step},do={actions[self.fatal]}")
        return "; ".join(faults)


def draw(chance: random.Random, *, ends: bool) -> Start:
    return Start(
        fatal=None if ends else chance.choice(FATAL),
        at_step=chance.randint(1, 120),
        rank=chance.randint(0, 1),
        disk_full_at=sorted(chance.sample(range(2, 9), chance.choice([0, 1, 2]))),
        stops_after_s=chance.uniform(0.2, 0.6) if chance.random() < 0.5 else None,
    )


class Disturber:
    """Sends the signals of one start from a thread, to processes that this program started."""

    def __init__(self, start: Start, *, starter: int, ranks: Any) -> None:
        self._start, self._starter, self._ranks = start, starter, ranks
        self.happened: Counter[str] = Counter()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._disturb, name="soak-disturber", daemon=True)

    def __enter__(self) -> Disturber:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _disturb(self) -> None:
        if self._start.stops_after_s is not None:
            self._stop_a_rank(self._start.stops_after_s)
        number = {"sigterm to the starter": signal.SIGTERM, "sigint to the starter": signal.SIGINT}.get(
            self._start.fatal or ""
        )
        if number is not None and not self._is_over.wait(0.2 + 0.01 * self._start.at_step):
            os.kill(self._starter, number)

    def _stop_a_rank(self, after_s: float) -> None:
        if self._is_over.wait(after_s):
            return
        pids = self._ranks()
        if len(pids) <= self._start.rank:
            return
        try:
            os.kill(pids[self._start.rank], signal.SIGSTOP)
            self._is_over.wait(0.3)
            os.kill(pids[self._start.rank], signal.SIGCONT)
            self.happened["stopped for a moment"] += 1
        except ProcessLookupError:
            pass


def start_train(policy: str, folder: Path, start: Start) -> tuple[bool, Counter[str]]:
    """Whether it came to its end, and the faults that happened."""
    os.environ["OUTRIDER_FAULTS"] = start.variables()
    run = train(policy, folder)
    ended = False
    with Disturber(start, starter=os.getpid(), ranks=lambda: run.ranks.pids) as disturber:  # type: ignore[attr-defined]
        try:
            run.join()
            ended = True
        except (outrider.OutriderError, KeyboardInterrupt, SystemExit):
            pass
    happened = disturber.happened
    if not ended and start.fatal is not None:
        happened[start.fatal] += 1
    return ended, happened


def start_session(policy: str, folder: Path, start: Start) -> tuple[bool, Counter[str]]:
    script = subprocess.Popen(
        [sys.executable, __file__, "--session", policy, str(folder)],
        env={**os.environ, "OUTRIDER_FAULTS": start.variables()},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    # Python and torch are imported by every process of a script first.
    start.at_step += 400
    if start.stops_after_s is not None:
        start.stops_after_s += 4.0
    with Disturber(start, starter=script.pid, ranks=lambda: _rank_pids(script.pid)) as disturber:
        code = script.wait(timeout=300)
    if code != 0 and start.fatal is not None:
        disturber.happened[start.fatal] += 1
    return code == 0, disturber.happened


def _rank_pids(starter: int) -> list[int]:
    try:
        children = psutil.Process(starter).children()
        return sorted(child.pid for child in children if "rank" in " ".join(child.cmdline()))
    except psutil.Error:
        return []


# What must hold at the end


def refused_writes(folder: Path) -> int:
    path = folder / "events" / "rank0.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return sum('"checkpoint failed"' in line for line in lines)


def check_accounts(folder: Path) -> None:
    record = json.loads((folder / "record.json").read_text())
    samples: Counter[int] = Counter()
    for epoch in record["epochs"]:
        samples[epoch["epoch"]] += epoch["samples"]
    assert record["status"] == "finished", f"{folder}: {record['status']}"
    assert samples == dict.fromkeys(range(EPOCHS), NUM_SAMPLES), f"{folder}: {samples}"


def check_files(folder: Path) -> None:
    rest = [path.name for path in (folder / "checkpoints").iterdir() if not path.name.startswith("epoch")]
    assert not rest, f"{folder}: {rest} left in checkpoints"


def surroundings() -> dict[str, Any]:
    children = psutil.Process().children(recursive=True)
    return {
        "processes": [child.pid for child in children if "forkserver" not in " ".join(child.cmdline())],
        "folders": sorted(path.name for path in Path(tempfile.gettempdir()).glob("outrider-*")),
        "shared memory": sorted(path.name for path in SHARED_MEMORY.glob("*") if not path.name.startswith("nccl")),
        "ports": [one.laddr.port for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"],
    }


def check_nothing_left(before: dict[str, Any]) -> None:
    deadline_s = time.monotonic() + 5.0
    while (now := surroundings()) != before and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert now == before, f"left behind: {now}, before: {before}"


def same_model(left: Path, right: Path) -> bool:
    a, b = (load_file(folder / "model.safetensors") for folder in (left, right))
    return all(torch.equal(a[name], b[name]) for name in a)


# The soak


def soak(*, minutes: float, num_faults: int, seed: int, folder: Path) -> Iterator[dict[str, Any]]:
    """What was found so far, after each run whose checks have passed."""
    chance = random.Random(seed)
    undisturbed = {way: folder / f"undisturbed-{way}" for way in set(WAYS)}
    for way, path in undisturbed.items():
        starter = start_train if way == "train" else start_session
        ended, _ = starter("sync", path, Start(fatal=None, at_step=0, rank=0))
        assert ended, f"the undisturbed {way} failed"
    before = surroundings()
    faults: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    starts = 0
    began_s = time.monotonic()
    while sum(faults.values()) < num_faults and time.monotonic() - began_s < 60 * minutes:
        way, policy = chance.choice(WAYS), chance.choice(POLICIES)
        path = folder / f"{sum(runs.values()):04d}-{way}-{policy}"
        starts += one_run(way, policy, path, chance, faults)
        runs[f"{way} {policy}"] += 1
        check_accounts(path)
        check_files(path)
        check_nothing_left(before)
        if policy == "sync":
            assert same_model(path, undisturbed[way]), f"{path} differs from the undisturbed run"
        print(f"{time.monotonic() - began_s:6.0f} s  {sum(faults.values()):4d} faults  {path.name}", flush=True)
        yield {
            "faults": sum(faults.values()),
            "faults_by_kind": dict(sorted(faults.items())),
            "runs": sum(runs.values()),
            "runs_by_kind": dict(sorted(runs.items())),
            "starts": starts,
            "seconds": round(time.monotonic() - began_s),
        }


def one_run(way: str, policy: str, path: Path, chance: random.Random, faults: Counter[str]) -> int:
    """Start a run again and again until it ends; the number of starts."""
    starter = start_train if way == "train" else start_session
    fatal_starts = chance.randint(2, 5)
    for number in range(50):
        ended, happened = starter(policy, path, draw(chance, ends=number >= fatal_starts))
        happened["disk full"] += refused_writes(path)
        faults.update({name: count for name, count in happened.items() if count})
        if ended:
            return number + 1
    raise AssertionError(f"{path} did not end in 50 starts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--session", nargs=2, metavar=("POLICY", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.session:
        run_session(given.session[0], Path(given.session[1]))
        return
    torch.set_num_threads(1)
    about = {
        "schema_version": 1,
        "environment": {"torch": torch.__version__, "python": platform.python_version(), "num_cores": os.cpu_count()},
        "commit": commit(),
        "devices": DEVICES,
        "seed": given.seed,
    }
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        for found in soak(minutes=given.minutes, num_faults=given.faults, seed=given.seed, folder=Path(folder)):
            if given.out is not None:
                given.out.parent.mkdir(parents=True, exist_ok=True)
                given.out.write_text(json.dumps({**about, **found}, separators=(",", ":")) + "\n")
    print(json.dumps({**about, **found}, indent=1))


if __name__ == "__main__":
    main()
