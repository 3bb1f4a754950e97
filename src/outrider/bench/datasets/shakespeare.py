"""Tiny Shakespeare (Karpathy, char-rnn 2015) from its one file, as windows of symbols.

Decides whether the file is the official one (MD5), the split and what the tensors look like. Downloads nothing.
Called by the benchmarks with a folder from `find_data`; the stand-in shares symbols and windows.
"""

from __future__ import annotations

import string
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from outrider.bench.datasets.official import read_checked
from outrider.bench.datasets.pair import DataPair, Part
from outrider.errors import DataError

FILE = "input.txt"
MD5 = "6fb458f1232090904fb40fe944165e91"
SYMBOLS = "\n !$&',-.3:;?" + string.ascii_uppercase + string.ascii_lowercase
"""The 65 symbols in order of their codes; a symbol's number is its place."""
WINDOW = 128
_TRAIN_TENTHS = 9


def shakespeare(directory: str | Path) -> DataPair:
    """7,842 training and 871 test windows as uint8 [N, 129]; the last 10 % of the text are the test."""
    folder = Path(directory).expanduser()
    return DataPair(
        name="Tiny Shakespeare", train=read_part(folder, "train"), test=read_part(folder, "test"), is_stand_in=False
    )


def read_part(folder: Path, part: Part) -> TensorDataset:
    """One of the two sets alone."""
    path = folder / FILE
    if not path.is_file():
        raise DataError(f"{FILE} is missing in {folder}", hint="name the folder with Tiny Shakespeare's input.txt")
    symbols = encode(read_checked(path, MD5).decode("ascii"))
    edge = len(symbols) * _TRAIN_TENTHS // 10
    return TensorDataset(windows(symbols[:edge] if part == "train" else symbols[edge:]))


def encode(text: str) -> Tensor:
    """Every symbol's number as uint8; text must be made of the 65 symbols."""
    table = bytes.maketrans(SYMBOLS.encode(), bytes(range(len(SYMBOLS))))
    return torch.frombuffer(bytearray(text.encode("ascii").translate(table)), dtype=torch.uint8)


def windows(symbols: Tensor) -> Tensor:
    """Windows [N, 129] that follow each other: 128 symbols and the one after, which begins the next window."""
    return symbols.unfold(0, WINDOW + 1, WINDOW).contiguous()
