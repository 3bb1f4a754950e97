"""Text of 65 symbols, written by the program: the stand-in for Tiny Shakespeare.

Decides how it reads: speakers and lines of made-up words, each word drawn by the one before (a Markov chain), so that
there is spelling, word order and layout to learn. Called by the benchmarks where no real data is at hand.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from torch.utils.data import TensorDataset

from outrider.bench.datasets.pair import Part
from outrider.bench.datasets.shakespeare import WINDOW, encode, windows
from outrider.data.order import mix

NAME = "Markov verses (stand-in)"
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
