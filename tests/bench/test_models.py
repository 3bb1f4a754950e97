"""The small classifiers and what they are measured by."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from outrider.bench.models.classification import accuracy, cross_entropy_step
from outrider.bench.models.digits import lenet, logistic, mlp

MODELS = [logistic, mlp, lenet]


class Says(nn.Module):
    """Answers the same class for everything."""

    def __init__(self, answer: int) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, inputs: Tensor) -> Tensor:
        logits = torch.zeros(len(inputs), 10)
        logits[:, self.answer] = 1.0
        return logits


@pytest.mark.parametrize(("make", "expected"), [(logistic, 7_850), (mlp, 203_530), (lenet, 44_470)])
def test_parameter_counts_are_the_published_ones(make: Callable[[], nn.Module], expected: int) -> None:
    assert sum(parameter.numel() for parameter in make().parameters()) == expected


@pytest.mark.parametrize("make", MODELS)
def test_images_may_come_flat_or_square(make: Callable[[], nn.Module]) -> None:
    images = torch.rand(3, 1, 28, 28)
    model = make().eval()
    assert torch.equal(model(images), model(images.view(3, 784)))
    assert model(images).shape == (3, 10)


@pytest.mark.parametrize("function", [*MODELS, cross_entropy_step, accuracy])
def test_a_rank_gets_the_functions_by_reference(function: Callable[..., object]) -> None:
    assert pickle.loads(pickle.dumps(function)) is function


def test_cross_entropy_is_the_mean_over_the_batch() -> None:
    loss = cross_entropy_step(Says(3), (torch.zeros(2, 784), torch.tensor([3, 3])))
    assert loss.item() == pytest.approx(torch.tensor(9 + torch.e).log().item() - 1)


def test_accuracy_is_the_fraction_that_is_right() -> None:
    assert accuracy(Says(3), (torch.zeros(4, 784), torch.tensor([3, 1, 3, 3]))).item() == 0.75
