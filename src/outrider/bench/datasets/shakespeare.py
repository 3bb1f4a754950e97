"""Tiny Shakespeare (Karpathy, char-rnn 2015) as windows of symbols, and its stand-in: text written by the program.

Decides the alphabet, the windows and the stand-in's grammar. Called by `source` and by the models of text.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from outrider.bench.datasets.dataset_files import Part, read_checked
from outrider.data.order import mix
from outrider.errors import DataError

FILE = "input.txt"
MD5 = "6fb458f1232090904fb40fe944165e91"
SYMBOLS = "\n !$&',-.3:;?" + string.ascii_uppercase + string.ascii_lowercase
"""The 65 symbols in order of their codes; a symbol's number is its place."""
WINDOW = 128
_TRAIN_TENTHS = 9


def read_part(folder: Path, part: Part) -> TensorDataset:
    """7,842 training or 871 test windows as uint8 [N, 129]; the last 10 % of the text are the test."""
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


STAND_IN_NAME = "Markov verses (stand-in)"
_ONSETS = [*"bcdfghjklmnprstvwxyz", "qu", "br", "st", "th", "sh", "tr"]
_CORES = [*"aeiou", "ea", "ou", "ai"]
_ENDINGS = ["", "", "n", "r", "s", "t", "ll", "nd"]
_NUM_WORDS = 300
_NUM_FOLLOWERS = 6
_NUM_SPEAKERS = 12
_ENDS = [",", ",", "", "", ".", ".", ";", ":", "!", "?"]
# Rare in the original, too.
_ASIDES = ["&c", "$3", "'tis", "well-a-day"]
_ASIDE_CHANCE = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class _Language:
    """The same for training and test, or nothing that was learned would help."""

    followers: dict[str, list[str]]
    speakers: list[str]


def draw_part(part: Part, num_windows: int, seed: int = 0) -> TensorDataset:
    """Windows as uint8 [N, 129]; the same for the same seed."""
    language = _language(random.Random(mix(seed, 4)))
    text = _write(language, num_windows * WINDOW + 1, random.Random(mix(seed, 5 if part == "train" else 6)))
    return TensorDataset(windows(encode(text)))


def _language(chance: random.Random) -> _Language:
    words = list(dict.fromkeys(_word(chance) for _ in range(_NUM_WORDS)))
    # Some words are frequent and most are rare, as in any language (Zipf).
    weights = [1 / (1 + place) for place in range(len(words))]
    return _Language(
        followers={word: chance.choices(words, weights, k=_NUM_FOLLOWERS) for word in words},
        speakers=[_word(chance).upper() for _ in range(_NUM_SPEAKERS)],
    )


def _word(chance: random.Random) -> str:
    syllables = [
        chance.choice(_ONSETS) + chance.choice(_CORES) + chance.choice(_ENDINGS) for _ in range(chance.randint(1, 2))
    ]
    return "".join(syllables)


def _write(language: _Language, length: int, chance: random.Random) -> str:
    speeches: list[str] = []
    written = 0
    while written < length:
        speeches.append(_speech(language, chance))
        written += len(speeches[-1])
    return "".join(speeches)[:length]


def _speech(language: _Language, chance: random.Random) -> str:
    lines = "".join(_line(language, chance) for _ in range(chance.randint(1, 5)))
    return f"{chance.choice(language.speakers)}:\n{lines}\n"


def _line(language: _Language, chance: random.Random) -> str:
    words = [chance.choice(list(language.followers))]
    for _ in range(chance.randint(3, 7)):
        words.append(chance.choice(language.followers[words[-1]]))
    if chance.random() < _ASIDE_CHANCE:
        words.append(chance.choice(_ASIDES))
    line = " ".join(words)
    return f"{line[0].upper()}{line[1:]}{chance.choice(_ENDS)}\n"
