"""Which torch build is chosen for which machine, and why not another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import ConfigError
from outrider.machine.machine_facts import Facts, Gpu, GpuDriver, Host, load_facts
from outrider.machine.torch_choice import TorchChoice, resolve
from outrider.machine.wheels import capability_of, load_table, serving_arch

FACTS = Path(__file__).parent / "facts"
TABLE = load_table()
CAPABILITIES = ("5.2", "6.0", "6.1", "7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0", "12.1")


def recorded(machine: str) -> Facts:
    return load_facts(FACTS / f"{machine}.json")


def machine(*capabilities: str, driver: str = "581.42", is_wsl: bool = True, architecture: str = "x86_64") -> Facts:
    return Facts(
        host=Host(system="Linux", architecture=architecture, is_wsl=is_wsl),
        drivers=(GpuDriver(vendor="nvidia", version=driver, flavour="wsl" if is_wsl else "open"),),
        gpus=tuple(Gpu(index=i, vendor="nvidia", name=f"card {c}", capability=c) for i, c in enumerate(capabilities)),
    )


def summary(resolution: TorchChoice) -> tuple[str, list[tuple[str | None, str]]]:
    return resolution.way, [(item.torch, item.backend) for item in resolution.environments]


@pytest.mark.parametrize(
    ("name", "way", "environments"),
    [
        ("no-gpu", "cpu", [(None, "cpu")]),
        ("h200", "wheel", [("2.13", "cu130")]),
        ("rtx3090-rtx3060", "wheel", [("2.13", "cu126")]),
        ("rtx4080-rtx3070", "wheel", [("2.13", "cu130")]),
        ("v100-a100", "wheel", [("2.13", "cu126")]),
        ("rtx5060ti-gtx1060-wsl2", "conda", [("2.13", "conda-cu129")]),
        ("rtx5060ti-gtx1060-bare", "none", []),
        ("old-driver", "none", []),
        ("two-amd", "wheel", [(None, "rocm7.2")]),
        ("mig-slices", "wheel", [("2.13", "cu126")]),
        ("unreadable-nvml", "wheel", [("2.13", "cu126")]),
    ],
)
def test_each_recorded_machine_gets_its_build(name: str, way: str, environments: list[tuple[str | None, str]]) -> None:
    assert summary(resolve(recorded(name), table=TABLE)) == (way, environments)


def test_a_driver_too_old_for_the_default_wheel_is_named_among_the_rejected() -> None:
    resolution = resolve(recorded("rtx3090-rtx3060"), table=TABLE)
    assert resolution.rejected == (
        "torch 2.13 cu130: needs driver 580.65.06, found 550.163.01",
        "torch 2.13 cu132: needs driver 580.65.06, found 550.163.01",
    )


def test_volta_beside_blackwell_gets_an_older_torch_whose_wheel_has_both() -> None:
    resolution = resolve(machine("7.0", "12.0"), table=TABLE)
    assert summary(resolution) == ("wheel", [("2.10", "cu128")])
    assert resolution.reasons[1] == "no wheel of torch 2.13 has code for all of them"


def test_a_version_without_a_common_build_gets_one_environment_per_group() -> None:
    resolution = resolve(recorded("rtx5060ti-gtx1060-wsl2"), table=TABLE, torch="2.14")
    assert summary(resolution) == ("groups", [("2.14", "cu130"), ("2.14", "cu126")])
    assert resolution.environments[1].cards == ("NVIDIA GeForce GTX 1060 6GB",)


def test_the_source_build_is_taken_where_no_wheel_has_the_card() -> None:
    resolution = resolve(machine("11.0"), table=TABLE)
    assert summary(resolution) == ("build", [("2.13", "source-cu130")])
    assert resolution.environments[0].archs == ("11.0",)


def test_pascal_beside_blackwell_can_be_built_with_cuda_12_9() -> None:
    resolution = resolve(recorded("rtx5060ti-gtx1060-wsl2"), table=TABLE, way="build")
    assert summary(resolution) == ("build", [("2.13", "source-cu129")])
    assert resolution.environments[0].archs == ("6.1", "12.0")


def test_a_card_that_nothing_compiles_for_is_refused_with_ways_out() -> None:
    resolution = resolve(machine("3.5"), table=TABLE)
    assert resolution.way == "none"
    assert resolution.ways_out == (
        "leave a card out: outrider setup --cards",
        "train on the CPU: outrider setup --way cpu",
    )


def test_pascal_beside_blackwell_on_bare_metal_is_refused_with_ways_out() -> None:
    resolution = resolve(recorded("rtx5060ti-gtx1060-bare"), table=TABLE)
    assert resolution.reasons == (
        "no driver serves all cards",
        "NVIDIA GeForce RTX 5060 Ti (sm_120) needs the open kernel module (R570 or newer)",
        "GP106 [GeForce GTX 1060 6GB] (sm_61) needs the proprietary kernel module (R580 is its last branch)",
        "bare-metal Linux loads one of them, not both",
    )
    assert resolution.ways_out == (
        "WSL2 or Windows: its one driver serves both",
        "a second host, joined with torchrun",
        "a virtual machine with one card passed through",
        "leave a card out: outrider setup --cards 0",
    )


def test_leaving_a_card_out_solves_the_driver_case() -> None:
    resolution = resolve(recorded("rtx5060ti-gtx1060-bare"), table=TABLE, cards=[0])
    assert summary(resolution) == ("wheel", [("2.13", "cu130")])


def test_the_cpu_way_is_open_on_every_machine() -> None:
    assert summary(resolve(recorded("old-driver"), table=TABLE, way="cpu")) == ("cpu", [(None, "cpu")])


def test_a_card_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(recorded("h200"), table=TABLE, cards=[3])
    assert str(caught.value) == "card 3 is not there\nhint: found 0 (NVIDIA H200)"


def test_nvidia_beside_amd_gets_an_environment_each() -> None:
    facts = machine("8.6")
    amd = recorded("two-amd").gpus[:1]
    resolution = resolve(replace(facts, gpus=facts.gpus + amd), table=TABLE)
    assert summary(resolution) == ("groups", [("2.13", "cu130"), (None, "rocm7.2")])


def test_an_amd_card_without_code_is_refused() -> None:
    card = Gpu(index=0, vendor="amd", name="old card", capability="gfx803")
    facts = Facts(host=Host(system="Linux", architecture="x86_64"), gpus=(card,))
    resolution = resolve(facts, table=TABLE)
    assert (resolution.way, resolution.reasons) == ("none", ("rocm7.2 has no code for old card (gfx803)",))


def test_a_platform_that_the_table_does_not_know_is_not_guessed_at() -> None:
    resolution = resolve(machine("9.0", architecture="aarch64", is_wsl=False), table=TABLE)
    assert resolution.reasons == ("the wheel table speaks for linux-x86_64, this is linux-aarch64",)


def test_a_card_of_unknown_capability_is_not_guessed_at() -> None:
    facts = machine("9.0")
    unknown = replace(facts.gpus[0], capability=None)
    assert resolve(replace(facts, gpus=(unknown,)), table=TABLE).reasons == (
        "the compute capability of card 9.0 is not known",
    )


def test_a_machine_without_a_driver_is_refused() -> None:
    facts = replace(machine("8.6"), drivers=())
    assert resolve(facts, table=TABLE).reasons == ("no NVIDIA driver is loaded", "the cards need one")


@given(cards=st.lists(st.sampled_from(CAPABILITIES), min_size=1, max_size=4))
def test_a_chosen_wheel_has_code_for_every_card(cards: list[str]) -> None:
    resolution = resolve(machine(*cards), table=TABLE, way="wheel")
    for environment in resolution.environments:
        (wheel,) = [w for w in TABLE.wheels if (w.torch, w.backend) == (environment.torch, environment.backend)]
        assert all(serving_arch(card, wheel.archs) for card in cards)


@given(cards=st.lists(st.sampled_from(CAPABILITIES), min_size=1, max_size=4))
def test_groups_serve_each_card_exactly_once(cards: list[str]) -> None:
    resolution = resolve(machine(*cards), table=TABLE, way="groups")
    served = sorted(name for environment in resolution.environments for name in environment.cards)
    assert served == sorted(f"card {card}" for card in cards)


@given(cards=st.lists(st.sampled_from(CAPABILITIES), min_size=1, max_size=4))
def test_a_modern_driver_on_wsl_always_finds_a_way(cards: list[str]) -> None:
    assert resolve(machine(*cards), table=TABLE).way != "none"


@given(cards=st.lists(st.sampled_from(CAPABILITIES), min_size=1, max_size=4))
def test_bare_metal_refuses_exactly_cards_that_no_module_serves_together(cards: list[str]) -> None:
    versions = [capability_of(card) for card in cards]
    facts = machine(*cards, is_wsl=False)
    unflavoured = replace(facts, drivers=(replace(facts.drivers[0], flavour=None),))
    is_refused = resolve(unflavoured, table=TABLE).way == "none"
    assert is_refused == (min(versions) < (7, 5) and max(versions) >= (10, 0))
