"""Decides whether one kernel driver can serve all cards of a machine, and what to do if not.

On bare-metal Linux Blackwell needs the open kernel module and cards below Turing the proprietary one: no driver is
both. Called by resolve and by the verdicts; knows nothing of torch builds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.machine.machine_facts import Facts, Gpu, GpuDriver
from outrider.machine.wheels import WheelTable, capability_of, sm, version_of

TRAIN_ON_CPU = "train on the CPU: outrider setup --way cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """What stands in the way of these cards, why, and the ways out."""

    what: str
    reasons: tuple[str, ...]
    ways_out: tuple[str, ...]


def driver_refusal(facts: Facts, cards: Sequence[Gpu], table: WheelTable) -> Refusal | None:
    """The reason that stands in the way of every torch build, if there is one."""
    driver = facts.driver("nvidia")
    if driver is None:
        return Refusal(
            what="no NVIDIA driver is loaded",
            reasons=("the cards need one",),
            ways_out=("install the NVIDIA driver and run this again", TRAIN_ON_CPU),
        )
    if facts.host.system != "Linux" or facts.host.is_wsl or driver.flavour == "wsl":
        return _too_old(driver, cards, table)
    return _module_conflict(cards, table) or _wrong_module(driver, cards, table) or _too_old(driver, cards, table)


def _module_conflict(cards: Sequence[Gpu], table: WheelTable) -> Refusal | None:
    old, new = _below_open(cards, table), _open_only(cards, table)
    if not old or not new:
        return None
    branch = table.modules.last_branch_below_open
    return Refusal(
        what="no driver serves all cards",
        reasons=(
            f"{_names(new)} needs the open kernel module (R{table.modules.open_only_driver} or newer)",
            f"{_names(old)} needs the proprietary kernel module (R{branch} is its last branch)",
            "bare-metal Linux loads one of them, not both",
        ),
        ways_out=(
            "WSL2 or Windows: its one driver serves both",
            "a second host, joined with torchrun",
            "a virtual machine with one card passed through",
            f"leave a card out: outrider setup --cards {','.join(str(gpu.index) for gpu in new)}",
        ),
    )


def _wrong_module(driver: GpuDriver, cards: Sequence[Gpu], table: WheelTable) -> Refusal | None:
    old, new = _below_open(cards, table), _open_only(cards, table)
    if old and driver.flavour == "open":
        return Refusal(
            what="the wrong kernel module is loaded",
            reasons=(f"the open kernel module is loaded and does not serve {_names(old)}",),
            ways_out=(f"install the proprietary module of R{table.modules.last_branch_below_open}",),
        )
    if new and driver.flavour == "proprietary":
        return Refusal(
            what="the wrong kernel module is loaded",
            reasons=(f"the proprietary kernel module is loaded and does not serve {_names(new)}",),
            ways_out=(f"install the open module, R{table.modules.open_only_driver} or newer",),
        )
    return None


def _too_old(driver: GpuDriver, cards: Sequence[Gpu], table: WheelTable) -> Refusal | None:
    if driver.version is None:
        return None
    needed = minimum_driver(cards, table)
    if version_of(driver.version) >= version_of(needed):
        return None
    return Refusal(
        what=f"driver {driver.version} is too old",
        reasons=(f"torch {table.minimum} or newer needs driver {needed} for {_names(cards)}, found {driver.version}",),
        ways_out=(f"update the NVIDIA driver to {needed} or newer", TRAIN_ON_CPU),
    )


def minimum_driver(cards: Sequence[Gpu], table: WheelTable) -> str:
    """The oldest driver with which any torch that Outrider runs on serves these cards."""
    oldest_cuda = table.minimum_driver("12")
    return table.modules.open_only_driver if _open_only(cards, table) else oldest_cuda


def _below_open(cards: Sequence[Gpu], table: WheelTable) -> list[Gpu]:
    limit = capability_of(table.modules.open_from)
    return [gpu for gpu in cards if gpu.capability and capability_of(gpu.capability) < limit]


def _open_only(cards: Sequence[Gpu], table: WheelTable) -> list[Gpu]:
    limit = capability_of(table.modules.open_only_from)
    return [gpu for gpu in cards if gpu.capability and capability_of(gpu.capability) >= limit]


def _names(cards: Sequence[Gpu]) -> str:
    return " and ".join(dict.fromkeys(f"{gpu.name} ({sm(gpu.capability or '')})" for gpu in cards))
