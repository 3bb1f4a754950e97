"""The arithmetic of the study of learning per sample: a stack of runs against a loop by hand."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outrider.data.order import shuffled

SIZE = 4
WINDOWS = [[0, 1, 0, 1], [0, 0, 0, 0], [1], [0, 1, 0, 0, 0, 0, 0]]
"""The rank of each batch, by window; a rank may have none."""
RATE = 0.1


@pytest.fixture(scope="module")
def stack() -> Any:
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    yield importlib.import_module("learning_stack")
    sys.path.remove(folder)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


class Rank:
    """A replica that is stepped by hand."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), RATE, momentum=0.9)
        self.begun = self.values

    @property
    def values(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()

    def add(self, shift: Tensor) -> None:
        nn.utils.vector_to_parameters(self.values + shift, self.model.parameters())
        self.begun = self.begun + shift

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, batch).backward()
        self.optimizer.step()


def by_hand(data: tuple[Tensor, Tensor], *, is_behind: bool) -> tuple[Tensor, list[Tensor]]:
    """The average and the replicas after all windows; with `is_behind` averages come half a window late."""
    order = torch.as_tensor(list(shuffled(sum(map(len, WINDOWS)) * SIZE, seed=0, epoch=0)))
    ranks = [Rank(), Rank()]
    average, number = ranks[0].values, 0
    steps_left, shifts = 0, [torch.zeros_like(average)] * 2
    for window in WINDOWS:
        batches: list[list[int]] = [[], []]
        for rank in window:
            batches[rank].append(number)
            number += 1
        counts = [len(own) for own in batches]
        for place in range(max(counts)):
            for replica, own in zip(ranks, batches, strict=True):
                if place < len(own):
                    index = order[own[place] * SIZE : (own[place] + 1) * SIZE]
                    replica.step((data[0][index], data[1][index]))
            steps_left -= 1
            if steps_left == 0:
                add(ranks, shifts)
        if steps_left > 0:
            add(ranks, shifts)
        ways = [replica.values - replica.begun for replica in ranks]
        way = torch.stack([count / sum(counts) * own for count, own in zip(counts, ways, strict=True)]).sum(0)
        average, shifts, steps_left = average + way, [way - own for own in ways], max(1, max(counts) // 2)
        for replica in ranks:
            replica.begun = replica.values
        if not is_behind:
            add(ranks, shifts)
            steps_left = 0
    return average, [rank.values for rank in ranks]


def add(ranks: list[Rank], shifts: list[Tensor]) -> None:
    for rank, shift in zip(ranks, shifts, strict=True):
        rank.add(shift)


@pytest.mark.parametrize("is_behind", [False, True])
def test_averages_of_a_stack_are_those_of_a_loop_by_hand(stack: Any, is_behind: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    data = (torch.randn(64, 3, generator=generator), torch.randint(0, 2, (64,), generator=generator))
    task = stack.StackTask(
        model=lambda: nn.Linear(3, 2), loss=loss_of, optimizer="sgd", rate=RATE, data="", batch_size=SIZE, batches=16
    )
    # Another run beside it, whose windows end elsewhere, changes nothing.
    runs = [
        stack.StackRun(seed=0, windows=[windows], is_behind=is_behind) for windows in (WINDOWS, [[0] * 8, [1, 0] * 4])
    ]
    stacked = stack.Stack(task, runs, data, length=16)
    stacked.run_segment(0)
    average, replicas = by_hand(data, is_behind=is_behind)
    torch.testing.assert_close(stacked.ref[0], average)
    torch.testing.assert_close(stacked.params[:2], torch.stack(replicas))
    if is_behind:
        assert (replicas[0] - replicas[1]).abs().max() > 1e-3, "the last average has not arrived"
