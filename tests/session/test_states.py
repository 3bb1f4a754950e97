"""`state_dict()` of feeds and sessions: a user's own checkpoint goes on in the middle of an epoch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import outrider
from outrider.policy.effects import Lease
from outrider.policy.position_ranges import union, without

SAMPLES = torch.arange(30.0).reshape(-1, 1)


class Numbers(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(SAMPLES)


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """As a checkpoint on disk has it."""
    return json.loads(json.dumps(state))  # type: ignore[no-any-return]


def sit(folder: Path, *, stop: int | None = None, load: Any = None, data: Any = SAMPLES, **options: Any) -> Any:
    """One pass of a feed; the samples, and the state after `stop` batches."""
    model, got, state = nn.Linear(1, 1), [], None
    with outrider.Session(devices="cpu", run_dir=folder) as s:
        s.prepare(model, torch.optim.SGD(model.parameters(), 1e-9))
        feed = s.batches(data, batch_size=4, **options)
        if load is not None:
            feed.load_state_dict(saved(load))
        for number, batch in enumerate(feed, start=1):
            got += [int(x) for x in batch]
            s.step(model(batch).square().mean())
            if number == stop:
                state = feed.state_dict()
                break
    return got, state


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (SAMPLES, {}),
        (SAMPLES, {"shuffle": False}),
        (SAMPLES, {"drop_last": True}),
        (SAMPLES, {"order": lambda epoch: [*range(0, 30, 2), *range(1, 30, 2)]}),
        (Numbers(), {"length": 30}),
    ],
)
def test_a_feed_goes_on_after_the_batch_in_hand(tmp_path: Path, data: Any, options: Any) -> None:
    whole, _ = sit(tmp_path / "whole", data=data, **options)
    first, state = sit(tmp_path / "first", stop=3, data=data, **options)
    rest, _ = sit(tmp_path / "rest", load=state, data=data, **options)
    assert len(first) == 12
    assert first + rest == whole


def test_a_feed_is_looped_over_again_and_a_loaded_one_goes_on_with_the_next_epoch(tmp_path: Path) -> None:
    def epochs(folder: Path, count: int, load: Any = None) -> Any:
        model, got = nn.Linear(1, 1), []
        with outrider.Session(devices="cpu", run_dir=folder) as s:
            s.prepare(model, torch.optim.SGD(model.parameters(), 1e-9))
            feed = s.batches(SAMPLES, batch_size=4)
            if load is not None:
                feed.load_state_dict(load)
            for _ in range(count):
                got.append([int(x) for batch in feed for x in batch])
            return got, feed.state_dict()

    whole, _ = epochs(tmp_path / "whole", 3)
    assert len({tuple(epoch) for epoch in whole}) == 3
    _, state = epochs(tmp_path / "first", 1)
    assert state["epoch"] == 1
    assert epochs(tmp_path / "rest", 2, state)[0] == whole[1:]


def run_session(folder: Path, kept: dict[str, Any], *, stop_at: int | None) -> list[Any]:
    """Two epochs of two passes each, with a schedule; saves everything in `kept` at a step, or goes on from it."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=32)
    got: list[Any] = []
    with outrider.Session(devices="cpu", run_dir=folder, policy="sync") as s:
        s.prepare(model, optimizer, schedule)
        if kept:
            for name, thing in (("model", model), ("optimizer", optimizer), ("schedule", schedule), ("session", s)):
                thing.load_state_dict(kept[name])
        for epoch in s.epochs(2):
            for part in range(2):
                for batch in s.batches(SAMPLES + 100 * part, batch_size=4):
                    s.step(model(batch / 100).square().mean())
                    got.append([epoch, batch.flatten().tolist(), optimizer.param_groups[0]["lr"], s.samples_seen])
                    if len(got) == stop_at:
                        kept |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                        kept |= {"schedule": schedule.state_dict(), "session": saved(s.state_dict())}
                        return [*got, model.weight.item()]
    return [*got, model.weight.item()]


@pytest.mark.parametrize("stop_at", [3, 8, 11, 21])
def test_a_session_goes_on_to_the_bit(tmp_path: Path, stop_at: int) -> None:
    whole = run_session(tmp_path / "whole", {}, stop_at=None)
    kept: dict[str, Any] = {}
    first = run_session(tmp_path / "first", kept, stop_at=stop_at)
    rest = run_session(tmp_path / "rest", kept, stop_at=None)
    assert first[:-1] + rest == whole


def test_a_schedule_whose_state_was_not_loaded_is_refused(tmp_path: Path) -> None:
    kept: dict[str, Any] = {}
    run_session(tmp_path / "first", kept, stop_at=5)
    kept["schedule"] = {}
    with pytest.raises(
        outrider.ConfigError, match="CosineAnnealingLR stands at tick 0, the state of the session at tick"
    ):
        run_session(tmp_path / "rest", kept, stop_at=None)


@pytest.mark.parametrize(
    ("change", "data", "message"),
    [
        ({}, SAMPLES[:20], "is that of 30 samples, the data set has 20"),
        (
            {"order": ["shuffled", 5]},
            SAMPLES,
            r"another order of the samples: \['shuffled', 5\], now \['shuffled', 0\]",
        ),
        ({"schema_version": 9}, SAMPLES, "has schema_version 9, expected 1"),
        ({"model": 1}, SAMPLES, "this is no state of s.batches"),
    ],
)
def test_a_state_of_other_data_is_refused(tmp_path: Path, change: Any, data: Any, message: str) -> None:
    _, state = sit(tmp_path / "first", stop=3)
    with pytest.raises(outrider.ConfigError, match=message):
        sit(tmp_path / "rest", load=state | change, data=data)


def test_a_feed_of_another_epoch_than_the_loop_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    with outrider.Session(devices="cpu", run_dir=tmp_path) as s:
        s.prepare(model, torch.optim.SGD(model.parameters(), 1e-9))
        feed = s.batches(SAMPLES, batch_size=4)
        feed.load_state_dict({"epoch": 2})
        for _ in s.epochs(1):
            with pytest.raises(outrider.ConfigError, match=r"is of epoch 2, the loop over s.epochs\(\) is in epoch 0"):
                next(feed)


def test_ranges_of_positions() -> None:
    used = [Lease(6, 2), Lease(0, 3), Lease(3, 1), Lease(7, 4), Lease(20, 0)]
    assert union(used) == (Lease(0, 4), Lease(6, 5))
    assert without(Lease(2, 10), used) == (Lease(4, 2), Lease(11, 1))
    assert without(Lease(0, 4), used) == ()


SCRIPT = """
import json, sys
from pathlib import Path
import torch, outrider
from torch import nn

folder, sitting = Path(sys.argv[1]), int(sys.argv[2])
data = torch.arange(403.0).reshape(-1, 1)
for policy in ("sync", "cadence", "async", "balanced"):
    kept = folder / f"{policy}.json"
    model, got = nn.Linear(1, 1), []
    options = {"anchor": 2} if policy in ("cadence", "async") else {}
    with outrider.Session(policy=policy, run_dir=folder / policy / str(sitting), threads_per_rank=1, **options) as s:
        s.prepare(model, torch.optim.SGD(model.parameters(), 1e-9))
        feed = s.batches(data, batch_size=4)
        state = json.loads(kept.read_text()) if sitting else {"epoch": 0}
        feed.load_state_dict(state)
        if state["epoch"]:
            continue  # Others took all that was left before rank 0 came to its third batch.
        for number, batch in enumerate(feed, start=1):
            got += [int(x) for x in batch] if s._run.loop.samples else []
            s.step(model(batch).square().mean())
            if sitting < 2 and number == 3 and s.is_main:
                if policy != "async":
                    inside = feed.state_dict()
                    (folder / f"inside-{policy}-{sitting}.json").write_text(json.dumps({"got": got, "state": inside}))
                else:
                    try:
                        feed.state_dict()
                    except outrider.ConfigError as error:
                        (folder / "refused").write_text(str(error))
                break
        feed.close()
        state = feed.state_dict()
        every = s.gather([got, state])
        if s.is_main:
            assert all(told == every[0][1] for _, told in every)
            kept.write_text(json.dumps(state))
            (folder / f"got-{policy}-{sitting}.json").write_text(json.dumps([one for one, _ in every]))
"""


@pytest.mark.slow
def test_a_pass_goes_on_with_any_number_of_ranks_and_every_sample_comes_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    for sitting, devices in enumerate(("cpu,cpu@0.4", "cpu,cpu@0.5,cpu", "cpu")):
        done = subprocess.run(
            [sys.executable, "script.py", str(tmp_path), str(sitting)],
            cwd=tmp_path,
            env={**os.environ, "OUTRIDER_DEVICES": devices, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    for policy in ("sync", "cadence", "async", "balanced"):
        told = [json.loads(path.read_text()) for path in tmp_path.glob(f"got-{policy}-*.json")]
        assert sorted(item for ranks in told for got in ranks for item in got) == list(range(403)), policy
    assert (tmp_path / "refused").read_text().startswith("state_dict() was called inside the loop, while every rank")
    order = outrider_order(403)
    for policy in ("sync", "balanced", "cadence"):
        inside = json.loads((tmp_path / f"inside-{policy}-0.json").read_text())
        left = [
            order[position] for start, count in inside["state"]["remaining"] for position in range(start, start + count)
        ]
        # What this model has learned from, and nothing else, is used.
        assert not set(left) & set(inside["got"])
        assert len(left) == 403 - {"sync": 24, "balanced": 12}.get(policy, 403 - len(left))


def outrider_order(num_samples: int) -> list[int]:
    from outrider.data.order import shuffled

    return shuffled(num_samples, seed=0, epoch=0).tolist()
