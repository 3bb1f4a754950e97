"""Checkpoints in the middle of a pass of a user's own loop: nothing is trained on twice or left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outrider

NUM_SAMPLES = 40


@pytest.fixture(autouse=True)
def one_device(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.delenv("OUTRIDER_DEVICES", raising=False)


def numbered() -> Tensor:
    return torch.arange(float(NUM_SAMPLES)).reshape(-1, 1)


class Loop:
    """Three epochs of two passes each, which the power may leave at some batch."""

    def __init__(self, folder: Path, *, accumulate: int = 1) -> None:
        self.folder = folder
        self.accumulate = accumulate
        self.seen: list[tuple[int, str, int]] = []
        self.model = nn.Linear(1, 1)

    def run(self, *, dies_at: int | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(1, 1)
        optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        with outrider.Session(devices="cpu", run_dir=self.folder, policy="sync", **options) as s:
            s.prepare(self.model, optimizer)
            for epoch in s.epochs(3):
                for name in ("first", "second"):
                    self._pass(s, epoch, name, dies_at=dies_at)

    def _pass(self, s: outrider.Session, epoch: int, name: str, *, dies_at: int | None) -> None:
        for number, batch in enumerate(s.batches(numbered(), batch_size=4)):
            if len(self.seen) == dies_at:
                raise RuntimeError("the power is gone")
            self.seen += [(epoch, name, int(sample)) for sample in batch]
            s.backward(self.model(batch / NUM_SAMPLES).square().mean())
            if (number + 1) % self.accumulate == 0:
                s.optimizer_step()


def whole(folder: Path, **options: Any) -> Loop:
    loop = Loop(folder, **options)
    loop.run()
    return loop


EVERYTHING = sorted((e, n, i) for e in range(3) for n in ("first", "second") for i in range(NUM_SAMPLES))


@pytest.mark.parametrize("dies_at", [12, 52, 100, 160, 208])
def test_a_loop_that_died_in_a_pass_goes_on_in_its_middle(tmp_path: Path, dies_at: int) -> None:
    loop = Loop(tmp_path / "cut")
    with pytest.raises(RuntimeError, match="the power is gone"):
        loop.run(dies_at=dies_at, checkpoint_every="0.000001s")
    loop.run(checkpoint_every="0.000001s", resume=tmp_path / "cut")
    assert sorted(loop.seen) == EVERYTHING
    expected = whole(tmp_path / "whole")
    assert loop.seen == expected.seen
    assert all(torch.equal(a, b) for a, b in zip(loop.model.parameters(), expected.model.parameters(), strict=True))


def test_gradients_that_were_accumulated_are_in_the_checkpoint(tmp_path: Path) -> None:
    """A pass of ten batches is five steps of two; the power goes between the two batches of a step."""
    loop = Loop(tmp_path / "cut", accumulate=2)
    with pytest.raises(RuntimeError, match="the power is gone"):
        loop.run(dies_at=12, checkpoint_every="0.000001s")
    (newest,) = (tmp_path / "cut" / "checkpoints").glob("epoch00000-*12")
    assert torch.load(newest / "rank0.pt", weights_only=True)["gradients"][0] is not None


def test_the_metrics_of_an_epoch_include_its_part_before_the_checkpoint(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "cut")
    with pytest.raises(RuntimeError, match="the power is gone"):
        loop.run(dies_at=52, checkpoint_every="0.000001s")
    loop.run(resume=tmp_path / "cut")
    whole(tmp_path / "whole")
    epochs, expected = (
        json.loads((tmp_path / name / "record.json").read_text())["epochs"] for name in ("cut", "whole")
    )
    assert [epoch["samples"] for epoch in epochs] == [2 * NUM_SAMPLES] * 3
    assert [epoch["loss"] for epoch in epochs] == pytest.approx([epoch["loss"] for epoch in expected])
