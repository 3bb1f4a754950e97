"""Data sets of Hugging Face and WebDataset: every item once per epoch, and in the middle of a shard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outrider
from outrider.data.stream_feed import StreamFeed

datasets = pytest.importorskip("datasets")
wds = pytest.importorskip("webdataset")

SIZES = (7, 2, 9, 1, 4)


def write_shards(folder: Path) -> list[str]:
    """Five tar shards of unequal size."""
    number, urls = 0, []
    for shard, size in enumerate(SIZES):
        urls.append(str(folder / f"shard{shard}.tar"))
        with wds.TarWriter(urls[-1]) as sink:
            for _ in range(size):
                sink.write({"__key__": f"{number:04d}", "cls": number})
                number += 1
    return urls


def make(kind: str, folder: Path, nodesplitter: Any = None) -> Any:
    rows = datasets.Dataset.from_dict({"x": [float(n) for n in range(sum(SIZES))]})
    if kind == "map":
        return rows.with_format("torch")
    if kind == "streaming":
        return rows.to_iterable_dataset(num_shards=5).shuffle(seed=3, buffer_size=6).with_format("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stream = wds.WebDataset(write_shards(folder), shardshuffle=False, nodesplitter=nodesplitter)
        stream = stream.decode().to_tuple("cls")
    return stream.map(lambda sample: {"x": torch.tensor(float(sample[0]))})


def passes(folder: Path, data: Any, *, load: Any = None, stop: int | None = None, **options: Any) -> Any:
    model, got, state = nn.Linear(1, 1), [], None
    with outrider.Session(devices="cpu", run_dir=folder) as s:
        s.prepare(model, torch.optim.SGD(model.parameters(), 1e-9))
        feed = s.batches(data, batch_size=4, **options)
        if load is not None:
            feed.load_state_dict(load)
        for _ in range(1 if stop or load else 2):
            for number, batch in enumerate(feed, start=1):
                got += [int(x) for x in batch["x"]]
                s.step(model(batch["x"].reshape(-1, 1)).square().mean())
                if number == stop:
                    state = feed.state_dict()
                    break
    return got, state


@pytest.mark.parametrize("kind", ["map", "streaming", "webdataset"])
def test_every_item_comes_once_per_epoch_and_a_pass_goes_on_in_a_shard(tmp_path: Path, kind: str) -> None:
    options = {} if kind == "map" else {"length": sum(SIZES)}
    data = make(kind, tmp_path)
    got, _ = passes(tmp_path / "whole", data, **options)
    first, second = got[:23], got[23:]
    assert sorted(first) == sorted(second) == list(range(23))
    # WebDataset without a shuffle has one order.
    assert (first == second) == (kind == "webdataset")
    begun, state = passes(tmp_path / "first", make(kind, tmp_path), stop=2, **options)
    rest, _ = passes(tmp_path / "rest", make(kind, tmp_path), load=state, **options)
    assert begun + rest == first


def test_a_splitter_of_webdataset_is_refused_with_the_way_out(tmp_path: Path, monkeypatch: Any) -> None:
    # As on two ranks, where WebDataset's own default refuses to read.
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    stream = make("webdataset", tmp_path, wds.shardlists.single_node_only)
    feed = StreamFeed(stream, length=23, device=torch.device("cpu"), seed=0)
    feed.start_epoch(torch.arange(23), 0)
    with pytest.raises(outrider.DataError, match="explicit nodesplitter") as caught:
        feed.first_sample()
    assert "pass nodesplitter=None to WebDataset" in str(caught.value)


def test_feeds_and_sessions_are_stateful() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").Stateful
    with outrider.Session(devices="cpu") as s:
        assert isinstance(s, stateful)
        assert isinstance(s.batches(torch.ones(4, 1), batch_size=2), stateful)


SCRIPT = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_streamed_data import SIZES, make
import torch, outrider
from torch import nn

folder, kind = Path(sys.argv[2]), sys.argv[3]
model, got = nn.Linear(1, 1), []
with outrider.Session(policy="cadence", run_dir=folder / "run", threads_per_rank=1) as s:
    s.prepare(model, torch.optim.SGD(model.parameters(), 1e-9))
    length = {} if kind == "map" else {"length": sum(SIZES)}
    (folder / str(s.rank)).mkdir()
    for epoch in s.epochs(2):
        for batch in s.batches(make(kind, folder / str(s.rank)), batch_size=2, **length):
            got += [int(x) for x in batch["x"]]
            s.step(model(batch["x"].reshape(-1, 1)).square().mean())
    every = s.gather(got)
    if s.is_main:
        (folder / "got.json").write_text(json.dumps(every))
"""


@pytest.mark.parametrize("kind", ["map", "streaming", "webdataset"])
def test_five_uneven_shards_on_three_ranks(tmp_path: Path, kind: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py", str(Path(__file__).parent), str(tmp_path), kind],
        cwd=tmp_path,
        env={**os.environ, "OUTRIDER_DEVICES": "cpu,cpu@0.5,cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    got = json.loads((tmp_path / "got.json").read_text())
    assert all(got)
    assert sorted(item for rank in got for item in rank) == sorted([*range(23)] * 2)


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    outrider.log("sum", batch["x"].mean())
    outrider.log("squares", batch["x"].square().mean())
    return model(batch["x"].reshape(-1, 1)).square().mean()


@pytest.mark.parametrize("kind", ["streaming", "webdataset"])
def test_train_shares_five_uneven_shards_among_three_ranks(tmp_path: Path, kind: str) -> None:
    trained = outrider.train(
        lambda: nn.Linear(1, 1),
        lambda parameters: torch.optim.SGD(parameters, 1e-9),
        step,
        make(kind, tmp_path),
        length=sum(SIZES),
        batch_size=2,
        epochs=2,
        devices="cpu,cpu@0.5,cpu",
        policy="cadence",
        run_dir=tmp_path / "run",
    ).join()
    for epoch in trained.epochs:
        assert epoch.samples == 23
        assert epoch.logged["sum"] * 23 == pytest.approx(sum(range(23)))
        assert epoch.logged["squares"] * 23 == pytest.approx(sum(number**2 for number in range(23)))


def test_train_reads_a_map_style_data_set_in_the_order_of_a_sampler(tmp_path: Path) -> None:
    numbers = [3, 5, 8, 13, 21, 3]
    trained = outrider.train(
        lambda: nn.Linear(1, 1),
        lambda parameters: torch.optim.SGD(parameters, 1e-9),
        step,
        torch.utils.data.DataLoader(make("map", tmp_path), 1, sampler=numbers),
        epochs=1,
        devices="cpu,cpu@0.5",
        policy="cadence",
        run_dir=tmp_path / "run",
    ).join()
    assert trained.epochs[0].samples == 6
    assert trained.epochs[0].logged["sum"] * 6 == pytest.approx(sum(numbers))
