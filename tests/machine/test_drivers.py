"""Whether one kernel driver can serve all cards of a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.machine.drivers import Refusal, driver_refusal
from outrider.machine.machine_facts import Facts, Flavour, Gpu, GpuDriver, Host, load_facts
from outrider.machine.wheels import load_table

FACTS = Path(__file__).parent / "facts"


def refusal(*capabilities: str, flavour: Flavour | None, version: str = "580.95.05") -> Refusal | None:
    cards = tuple(Gpu(index=i, vendor="nvidia", name=f"card {c}", capability=c) for i, c in enumerate(capabilities))
    facts = Facts(
        host=Host(system="Linux", architecture="x86_64", is_wsl=flavour == "wsl"),
        drivers=(GpuDriver(vendor="nvidia", version=version, flavour=flavour),),
        gpus=cards,
    )
    return driver_refusal(facts, cards, load_table())


@pytest.mark.parametrize(
    ("capabilities", "flavour"),
    [
        (("6.1",), "proprietary"),
        (("12.0",), "open"),
        (("8.6", "12.0"), "open"),
        (("7.0", "9.0"), "proprietary"),
        (("6.1", "12.0"), "wsl"),
        (("8.6",), None),
    ],
)
def test_cards_of_one_module_are_served(capabilities: tuple[str, ...], flavour: Flavour | None) -> None:
    assert refusal(*capabilities, flavour=flavour) is None


@pytest.mark.parametrize("flavour", ["open", "proprietary"])
def test_old_and_new_cards_cannot_share_a_module(flavour: Flavour) -> None:
    found = refusal("6.1", "12.0", flavour=flavour)
    assert found is not None
    assert found.what == "no driver serves all cards"


def test_the_open_module_does_not_serve_pascal() -> None:
    assert refusal("6.1", flavour="open") == Refusal(
        what="the wrong kernel module is loaded",
        reasons=("the open kernel module is loaded and does not serve card 6.1 (sm_61)",),
        ways_out=("install the proprietary module of R580",),
    )


def test_the_proprietary_module_does_not_serve_blackwell() -> None:
    assert refusal("12.0", flavour="proprietary") == Refusal(
        what="the wrong kernel module is loaded",
        reasons=("the proprietary kernel module is loaded and does not serve card 12.0 (sm_120)",),
        ways_out=("install the open module, R570 or newer",),
    )


def test_a_driver_too_old_for_any_torch_is_refused() -> None:
    facts = load_facts(FACTS / "old-driver.json")
    assert driver_refusal(facts, facts.gpus, load_table()) == Refusal(
        what="driver 470.256.02 is too old",
        reasons=("torch 2.8 or newer needs driver 525.60.13 for NVIDIA GeForce RTX 2080 Ti (sm_75), found 470.256.02",),
        ways_out=("update the NVIDIA driver to 525.60.13 or newer", "train on the CPU: outrider setup --way cpu"),
    )


def test_blackwell_needs_a_newer_driver_also_on_wsl() -> None:
    found = refusal("12.0", flavour="wsl", version="560.94")
    assert found is not None
    assert found.what == "driver 560.94 is too old"
