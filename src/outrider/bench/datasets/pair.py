"""What every data set of the benchmark suite is: a training set, a test set and a name.

Decides nothing. Made by the modules beside it, read by the demo and the benchmarks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.utils.data import TensorDataset

Part = Literal["train", "test"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DataPair:
    """Training and test set; a stand-in is never held against a published figure."""

    name: str
    train: TensorDataset
    test: TensorDataset
    is_stand_in: bool
