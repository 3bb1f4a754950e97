"""Crop, flip and normalisation against the plain loop over samples, and what they must keep."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outrider.bench.datasets.cifar10 import DEVIATION, MEAN, PADDING, crop_and_flip, cropped, normalised
from outrider.data.keyed import sample_keys

OFFSETS = st.integers(0, 2 * PADDING)


def images(num_images: int, height: int = 32, width: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(num_images)
    return torch.randint(1, 256, (num_images, 3, height, width), dtype=torch.uint8, generator=generator)


def cropped_one(image: Tensor, down: int, right: int, is_mirrored: bool) -> Tensor:
    """As one would write it for a single image."""
    channels, height, width = image.shape
    canvas = torch.zeros(channels, height + 2 * PADDING, width + 2 * PADDING, dtype=image.dtype)
    canvas[:, PADDING : PADDING + height, PADDING : PADDING + width] = image
    cut = canvas[:, down : down + height, right : right + width]
    return cut.flip(2) if is_mirrored else cut


@given(choices=st.lists(st.tuples(OFFSETS, OFFSETS, st.booleans()), min_size=1, max_size=8))
def test_a_batch_is_cropped_as_image_by_image(choices: list[tuple[int, int, bool]]) -> None:
    batch = images(len(choices), height=9, width=7)
    down, right, is_mirrored = (torch.tensor(column) for column in zip(*choices, strict=True))
    expected = [cropped_one(image, *choice) for image, choice in zip(batch, choices, strict=True)]
    assert torch.equal(cropped(batch, down=down, right=right, is_mirrored=is_mirrored), torch.stack(expected))


def test_the_middle_cut_is_the_image_itself() -> None:
    batch, middle = images(3), torch.full((3,), PADDING)
    unchanged = cropped(batch, down=middle, right=middle, is_mirrored=torch.zeros(3, dtype=torch.bool))
    assert torch.equal(unchanged, batch)


@given(seed=st.integers(0, 2**32), epoch=st.integers(0, 300), num_images=st.integers(1, 6))
def test_shape_type_and_labels_stay(seed: int, epoch: int, num_images: int) -> None:
    labels = torch.arange(num_images)
    keys = sample_keys(labels, seed=seed, epoch=epoch)
    changed, same_labels = crop_and_flip((images(num_images), labels), keys)
    assert (changed.shape, changed.dtype) == ((num_images, 3, 32, 32), torch.uint8)
    assert same_labels is labels


@given(cut=st.integers(1, 63))
def test_a_sample_looks_the_same_in_any_batch(cut: int) -> None:
    batch, keys = images(64), sample_keys(torch.arange(64), seed=1, epoch=2)
    (whole,) = crop_and_flip((batch,), keys)
    (first,), (second,) = crop_and_flip((batch[:cut],), keys[:cut]), crop_and_flip((batch[cut:],), keys[cut:])
    assert torch.equal(whole, torch.cat([first, second]))


def test_every_cut_and_both_directions_occur() -> None:
    # One bright pixel in the middle of a lopsided pair tells where the cut was made and whether it was mirrored.
    image = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    image[0, :, 16, 12] = 255
    keys = sample_keys(torch.arange(4_000), seed=0, epoch=0)
    (changed,) = crop_and_flip((image.expand(4_000, -1, -1, -1),), keys)
    places = changed[:, 0].flatten(1).argmax(1).unique()
    assert len(places) == 9 * 9 * 2 - 9 * 2  # columns 8 to 16 and, mirrored, 15 to 23 share two


def test_images_are_augmented_without_the_random_generator() -> None:
    before = torch.get_rng_state()
    crop_and_flip((images(4),), sample_keys(torch.arange(4), seed=0, epoch=0))
    assert torch.equal(torch.get_rng_state(), before)


def test_normalised_images_are_the_textbook_ones() -> None:
    batch = images(5)
    mean, deviation = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(DEVIATION).view(3, 1, 1)
    torch.testing.assert_close(normalised(batch), (batch.float() / 255 - mean) / deviation)
