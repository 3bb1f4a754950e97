"""What a classifier is trained with and measured by.

Decides loss and accuracy of a batch (inputs, labels), or of one whose images are bytes of colour. Knows no model.
Called in the ranks, as `step` and `evaluate` of the demo and the benchmarks.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from outrider.bench.datasets.augment import normalised


def cross_entropy_step(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Mean cross-entropy of a batch (inputs, labels)."""
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels)


def accuracy(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Fraction of a batch (inputs, labels) that the model gets right, 0 to 1."""
    inputs, labels = batch
    predicted: Tensor = model(inputs).argmax(dim=1)
    return (predicted == labels).float().mean()


def bytes_cross_entropy_step(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """The same for colour images as bytes, normalised here: a quarter of the memory where the data are kept."""
    images, labels = batch
    return cross_entropy_step(model, (normalised(images), labels))


def bytes_accuracy(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Accuracy on colour images as bytes."""
    images, labels = batch
    return accuracy(model, (normalised(images), labels))
