"""A run goes on from its checkpoint on devices of another kind."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import outrider

DATA = (torch.randn(64, 4), torch.randn(64, 1))


def squared_error(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def train(folder: Path, *, devices: str, epochs: int, resume: Path | None = None) -> outrider.Trained:
    return outrider.train(
        partial(nn.Linear, 4, 1),
        partial(torch.optim.Adam, lr=0.01),
        squared_error,
        DATA,
        batch_size=8,
        epochs=epochs,
        policy="sync",
        devices=devices,
        checkpoint_every=1,
        resume=resume,
        run_dir=folder,
    ).join()


@pytest.mark.parametrize(("before", "after"), [("cuda:0", "cpu"), ("cpu", "cuda:0"), ("cuda:0,cpu", "cpu")])
def test_a_run_goes_on_from_its_checkpoint_on_devices_of_another_kind(tmp_path: Path, before: str, after: str) -> None:
    first = train(tmp_path / "first", devices=before, epochs=1)
    second = train(tmp_path / "second", devices=after, epochs=3, resume=first.run_dir)
    assert [epoch.epoch for epoch in second.epochs] == [1, 2]
    assert all(bool(tensor.isfinite().all()) for tensor in second.load_into(nn.Linear(4, 1)).state_dict().values())
