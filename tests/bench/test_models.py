"""The suite's models: parameter counts, shapes, equal outputs where a network exists twice, and their measures."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from outrider.bench.datasets.cifar10 import normalised
from outrider.bench.models import imagenet_resnet
from outrider.bench.models.image_models import (
    accuracy,
    bytes_accuracy,
    bytes_cross_entropy_step,
    conv_autoencoder,
    cross_entropy_step,
    lenet,
    logistic,
    mlp,
    reconstruction_error,
    resnet,
    resnet_graph,
)
from outrider.bench.models.text_models import char_rnn, gpt2_small, gpt_nano, next_symbol_loss
from outrider.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")

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


def num_parameters(make: Callable[[], nn.Module]) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make().parameters())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (logistic, 7_850),
        (mlp, 203_530),
        (lenet, 44_470),
        (conv_autoencoder, 9_569),
        (char_rnn, 946_625),
        (gpt_nano, 826_433),
        (gpt2_small, 124_082_688),
        (resnet, 269_722),
        (resnet_graph, 269_722),
        (partial(resnet, 110), 1_727_962),
        (imagenet_resnet.resnet18, 11_689_512),
        (imagenet_resnet.resnet34, 21_797_672),
        (imagenet_resnet.resnet50, 25_557_032),
        (imagenet_resnet.resnet101, 44_549_160),
        (imagenet_resnet.resnext50_32x4d, 25_028_904),
        (imagenet_resnet.resnext101_32x8d, 88_791_336),
    ],
)
def test_parameter_counts_are_the_published_ones(make: Callable[[], nn.Module], expected: int) -> None:
    assert num_parameters(make) == expected


@pytest.mark.parametrize("make", MODELS)
def test_images_may_come_flat_or_square(make: Callable[[], nn.Module]) -> None:
    images = torch.rand(3, 1, 28, 28)
    model = make().eval()
    assert torch.equal(model(images), model(images.view(3, 784)))
    assert model(images).shape == (3, 10)


@pytest.mark.parametrize(
    "function",
    [*MODELS, conv_autoencoder, char_rnn, gpt_nano, resnet, resnet_graph, cross_entropy_step, accuracy],
)
def test_a_rank_gets_the_functions_by_reference(function: Callable[..., object]) -> None:
    assert pickle.loads(pickle.dumps(function)) is function


def test_cross_entropy_is_the_mean_over_the_batch() -> None:
    loss = cross_entropy_step(Says(3), (torch.zeros(2, 784), torch.tensor([3, 3])))
    assert loss.item() == pytest.approx(torch.tensor(9 + torch.e).log().item() - 1)


def test_accuracy_is_the_fraction_that_is_right() -> None:
    assert accuracy(Says(3), (torch.zeros(4, 784), torch.tensor([3, 1, 3, 3]))).item() == 0.75


def test_bytes_are_normalised_before_they_are_judged() -> None:
    images, labels = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8), torch.arange(4)
    model = resnet(8).eval()
    expected = cross_entropy_step(model, (normalised(images), labels))
    assert torch.equal(bytes_cross_entropy_step(model, (images, labels)), expected)
    assert bytes_accuracy(model, (images, model(normalised(images)).argmax(1))).item() == 1.0


# The autoencoder.


def test_the_autoencoder_gives_images_of_the_same_shape_between_0_and_1() -> None:
    made = conv_autoencoder()(torch.rand(3, 1, 28, 28))
    assert made.shape == (3, 1, 28, 28)
    assert 0 < made.min() < made.max() < 1


def test_the_reconstruction_error_is_the_mean_square_per_pixel() -> None:
    images = torch.full((2, 1, 28, 28), 0.5)
    assert reconstruction_error(nn.Identity(), (images, torch.zeros(2))).item() == 0.0
    assert reconstruction_error(nn.Sigmoid(), (torch.zeros(2, 1, 28, 28), torch.zeros(2))).item() == 0.25


# Text.


class Evenly(nn.Module):
    """Finds every symbol equally likely."""

    def forward(self, symbols: Tensor) -> Tensor:
        return torch.zeros(*symbols.shape, 65)


def test_the_loss_of_text_is_in_nats_per_symbol() -> None:
    windows = torch.randint(65, (3, 129), dtype=torch.uint8)
    assert next_symbol_loss(Evenly(), (windows,)).item() == pytest.approx(math.log(65), rel=1e-6)


@pytest.mark.parametrize("make", [char_rnn, gpt_nano])
def test_a_new_model_of_text_knows_next_to_nothing(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    windows = torch.randint(65, (3, 129), dtype=torch.uint8)
    assert next_symbol_loss(make().eval(), (windows,)).item() == pytest.approx(math.log(65), abs=0.1)


@pytest.mark.parametrize("make", [char_rnn, gpt_nano])
def test_a_model_of_text_sees_no_later_symbol(make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    symbols = torch.randint(65, (2, 40))
    changed = symbols.clone()
    changed[:, 25:] = (changed[:, 25:] + 1) % 65
    before, after = model(symbols), model(changed)
    torch.testing.assert_close(before[:, :25], after[:, :25])
    assert not torch.allclose(before[:, 25:], after[:, 25:])


# The ResNets of CIFAR.


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Both networks hold their tensors in the same order, under different names."""
    for ours, theirs in zip(source.state_dict().values(), target.state_dict().values(), strict=True):
        theirs.copy_(ours)


@pytest.mark.parametrize("depth", [8, 20])
def test_the_flow_gives_the_outputs_of_the_module(depth: int) -> None:
    torch.manual_seed(0)
    module, graph = resnet(depth), resnet_graph(depth)
    copy_weights(module, graph)
    images = torch.randn(4, 3, 32, 32)
    assert torch.equal(module(images), graph(images))
    # The statistics that both have just taken of the same images are part of it.
    assert torch.equal(module.eval()(images), graph.eval()(images))


def test_flow_and_module_start_from_the_same_weights_for_the_same_seed() -> None:
    torch.manual_seed(0)
    module = resnet(8)
    torch.manual_seed(0)
    graph = resnet_graph(8)
    pairs = zip(module.state_dict().values(), graph.state_dict().values(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("make", [resnet, resnet_graph])
def test_a_depth_that_is_not_six_n_plus_two_is_refused(make: Callable[[int], nn.Module]) -> None:
    with pytest.raises(ConfigError) as caught:
        make(21)
    assert str(caught.value) == ("the depth of a CIFAR ResNet must be 6n + 2, got 21\nhint: pass 20, 32, 44, 56 or 110")


# The ResNets of ImageNet.


def test_imagenet_networks_take_small_images_and_other_classes() -> None:
    assert imagenet_resnet.resnet18(num_classes=10).eval()(torch.randn(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnext50_32x4d"])
def test_torchvisions_weights_load_and_give_its_outputs(name: str) -> None:
    models = pytest.importorskip("torchvision.models", reason="torchvision is not installed")
    theirs, ours = getattr(models, name)().eval(), getattr(imagenet_resnet, name)().eval()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(1, 3, 64, 64)
    assert torch.equal(ours(images), theirs(images))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (imagenet_resnet.resnet18, "layer1.0.conv1.weight"),
        (imagenet_resnet.resnet34, "layer3.5.bn2.running_var"),
        (imagenet_resnet.resnet50, "layer1.0.downsample.0.weight"),
        (imagenet_resnet.resnext101_32x8d, "layer4.2.conv3.weight"),
    ],
)
def test_parameters_have_torchvisions_names(make: Callable[[], nn.Module], name: str) -> None:
    with torch.device("meta"):
        assert name in make().state_dict()
