"""The samples of an epoch as listed by the user's sampler, batch sampler, or function of the epoch.

Decides how a rank draws the sequence; each position of it is then handed out once, even if samples repeat. Random
numbers depend on seed and epoch only, so that all ranks and resumed runs draw the same sequence. Drawn at the start of
a pass.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.data import randomness
from outrider.data.order import mix
from outrider.errors import DataError, named

_MOST_SENT_BYTES = 48 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnSequence:
    """The indices of an epoch's samples in order; `ends` has the end of each batch if the sequence has batches."""

    indices: Tensor
    ends: Tensor | None = None

    @property
    def num_positions(self) -> int:
        """The number of items that can be handed out: samples, or whole batches."""
        return len(self.indices) if self.ends is None else len(self.ends)

    @property
    def batch_sizes(self) -> list[int]:
        """The sizes that batches have, each once; empty for a sequence of samples."""
        if self.ends is None:
            return []
        starts = torch.cat([torch.zeros(1, dtype=self.ends.dtype), self.ends[:-1]])
        sizes: list[int] = torch.unique(self.ends - starts).tolist()
        return sizes

    @property
    def digest(self) -> str:
        """A hash that is equal for equal sequences."""
        return hashlib.blake2b(self._bytes(), digest_size=16).hexdigest()

    def to_text(self) -> str:
        """Encode the sequence for a store."""
        text = base64.b64encode(zlib.compress(self._bytes(), 1)).decode()
        if len(text) > _MOST_SENT_BYTES:
            raise DataError(
                f"the ranks drew different sequences of {len(self.indices)} samples, which is too much to send",
                hint="let every rank draw the same: give the sampler a generator, or pass order=f(epoch)",
            )
        return text

    @classmethod
    def from_text(cls, text: str) -> DrawnSequence:
        numbers = torch.from_numpy(np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.int64).copy())
        num_ends = int(numbers[0])
        ends, indices = numbers[1 : num_ends + 1], numbers[num_ends + 1 :]
        return cls(indices=indices, ends=ends if num_ends else None)

    def _bytes(self) -> bytes:
        ends = torch.empty(0, dtype=torch.int64) if self.ends is None else self.ends
        return torch.cat([torch.tensor([len(ends)]), ends, self.indices]).numpy().tobytes()


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSequence:
    """A torch sampler, or a function from the epoch to indices."""

    source: Any
    has_batches: bool = False
    """Whether the source lists batches, which are handed out whole."""

    @classmethod
    def of(cls, order: Any) -> SampleSequence:
        """Wrap an order that a user passed; an order read from a DataLoader is returned unchanged."""
        return order if isinstance(order, SampleSequence) else cls(source=order)

    @property
    def name(self) -> str:
        return getattr(self.source, "__name__", None) or type(self.source).__name__

    def draw(self, *, num_samples: int, seed: int, epoch: int) -> DrawnSequence:
        """Draw the sequence of this epoch over a data set of `num_samples` samples."""
        with randomness.preserved():
            randomness.seed_all(mix(seed, epoch))
            try:
                listed = self._listed(epoch)
            except Exception as error:
                raise DataError(f"{self.name} could not list the samples of epoch {epoch}: {named(error)}") from error
        batches = [as_indices(batch, name=self.name) for batch in listed] if self.has_batches else None
        if batches is None:
            drawn = DrawnSequence(indices=as_indices(listed, name=self.name))
        else:
            batches = [batch for batch in batches if len(batch)]
            ends = torch.tensor([len(batch) for batch in batches], dtype=torch.int64).cumsum(0)
            drawn = DrawnSequence(indices=torch.cat(batches) if batches else torch.empty(0), ends=ends)
        _check(drawn, name=self.name, num_samples=num_samples, epoch=epoch)
        return drawn

    def _listed(self, epoch: int) -> Any:
        if not hasattr(self.source, "__iter__"):
            listed = self.source(epoch)
            return listed if isinstance(listed, Tensor | np.ndarray | Sequence) else list(listed)
        parts: tuple[Any, Any] = (self.source, getattr(self.source, "sampler", None))
        generators = [getattr(part, "generator", None) for part in parts]
        for part in parts:
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)
        with _seeded([one for one in generators if isinstance(one, torch.Generator)], epoch):
            return list(self.source)


def batching_options(name: str, drawn: DrawnSequence, *, sizes: Iterable[int] = ()) -> dict[str, Any]:
    """The options of a run whose batches a batch sampler makes, for records; `sizes` are those of earlier passes.

    Such a run counts batches: its number of samples is a number of batches.
    """
    found = sorted({*sizes, *drawn.batch_sizes})
    return {
        "batch_size": found[0] if len(found) == 1 else found,
        "batch_sampler": {"name": name, "batches": drawn.num_positions, "samples": len(drawn.indices)},
    }


@contextmanager
def _seeded(generators: Sequence[torch.Generator], epoch: int) -> Iterator[None]:
    """Seed the generators from their initial seed and the epoch, because a resumed run cannot know their last state.

    Restores their state afterwards; otherwise the next epoch would take the new seed for the initial one.
    """
    states = [generator.get_state() for generator in generators]
    for generator in dict.fromkeys(generators):
        generator.manual_seed(mix(generator.initial_seed(), epoch) >> 1)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def as_indices(listed: Any, *, name: str) -> Tensor:
    """Convert indices to an int64 tensor of one dimension."""
    try:
        array = listed.numpy() if isinstance(listed, Tensor) else np.asarray(listed)
    except (TypeError, ValueError) as error:
        raise _not_indices(listed, name) from error
    if array.size == 0:
        return torch.empty(0, dtype=torch.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise _not_indices(listed, name)
    return torch.from_numpy(array.astype(np.int64))


def _not_indices(listed: Any, name: str) -> DataError:
    first = next(iter(listed), None) if isinstance(listed, Sequence) else listed
    lists_batches = isinstance(first, Sequence) and not isinstance(first, str)
    return DataError(
        f"{name} must list indices of samples, got {type(first).__name__}",
        hint="pass what lists batches in a loader: DataLoader(dataset, batch_sampler=...)"
        if lists_batches
        else "list whole numbers from 0 to len(dataset) - 1",
    )


def _check(drawn: DrawnSequence, *, name: str, num_samples: int, epoch: int) -> None:
    if not drawn.num_positions:
        raise DataError(f"{name} lists no samples in epoch {epoch}", hint="it needs at least one sample per epoch")
    low, high = (int(bound) for bound in torch.aminmax(drawn.indices))
    if low < 0 or high >= num_samples:
        raise DataError(
            f"{name} lists sample {low if low < 0 else high}, the data set has samples 0 to {num_samples - 1}",
            hint="list whole numbers from 0 to len(dataset) - 1",
        )
