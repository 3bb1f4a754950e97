"""Decides whether code built for some architectures runs on a card, and what a card's capability is by its name.

A binary runs on the same major with an equal or higher minor; PTX runs on anything newer; AMD code runs on its own
architecture only. Called by verdicts and resolve; holds no table of wheels.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from importlib import resources

_ARCH = re.compile(r"(?P<kind>sm|compute)_(?P<digits>\d{2,3})(?P<suffix>[af]?)")


def capability_of(capability: str) -> tuple[int, int]:
    """`12.0` as (12, 0), so that capabilities compare as numbers."""
    major, _, minor = capability.partition(".")
    return int(major), int(minor or 0)


def serving_arch(capability: str, archs: Iterable[str]) -> str | None:
    """The entry of an architecture list that runs on the card, the closest first; None where there is none."""
    if capability.startswith("gfx"):
        return capability if capability in archs else None
    candidates = [arch for arch in archs if _serves(arch, capability_of(capability))]
    return max(candidates, key=_closeness, default=None)


def sm(capability: str) -> str:
    """`6.1` as `sm_61`; AMD names stay."""
    return capability if capability.startswith("gfx") else f"sm_{capability.replace('.', '')}"


def capability_by_name(name: str) -> str | None:
    """The capability of an NVIDIA card by its market name or chip, where the driver does not tell."""
    for pattern, capability in _names():
        if re.search(pattern, name):
            return capability
    return None


def _serves(arch: str, card: tuple[int, int]) -> bool:
    match = _ARCH.fullmatch(arch)
    if match is None:
        return False
    built = _numbers(match["digits"])
    if match["kind"] == "compute":
        return built <= card
    # sm_90a and its like hold instructions that no other card has.
    if match["suffix"] == "a":
        return built == card
    return built[0] == card[0] and built[1] <= card[1]


def _numbers(digits: str) -> tuple[int, int]:
    return int(digits[:-1]), int(digits[-1])


def _closeness(arch: str) -> tuple[bool, tuple[int, int]]:
    match = _ARCH.fullmatch(arch)
    assert match is not None
    return match["kind"] == "sm", _numbers(match["digits"])


@cache
def _names() -> tuple[tuple[str, str], ...]:
    text = resources.files("outrider.machine").joinpath("cards.json").read_text(encoding="utf-8")
    return tuple((entry["pattern"], entry["capability"]) for entry in json.loads(text)["names"])
