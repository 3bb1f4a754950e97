"""Which code runs on which card."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.machine.wheels import capability_by_name, serving_arch, sm

MAJORS = st.integers(3, 12)
MINORS = st.integers(0, 9)


@given(major=MAJORS, minor=MINORS, built_major=MAJORS, built_minor=MINORS)
def test_a_binary_runs_on_its_major_from_its_minor_on(
    major: int, minor: int, built_major: int, built_minor: int
) -> None:
    found = serving_arch(f"{major}.{minor}", [f"sm_{built_major}{built_minor}"])
    assert (found is not None) == (built_major == major and built_minor <= minor)


@given(major=MAJORS, minor=MINORS, built_major=MAJORS, built_minor=MINORS)
def test_ptx_runs_on_anything_as_new_or_newer(major: int, minor: int, built_major: int, built_minor: int) -> None:
    found = serving_arch(f"{major}.{minor}", [f"compute_{built_major}{built_minor}"])
    assert (found is not None) == ((built_major, built_minor) <= (major, minor))


def test_the_closest_binary_is_preferred_to_ptx() -> None:
    assert serving_arch("8.9", ["compute_50", "sm_80", "sm_86", "sm_90"]) == "sm_86"


def test_code_with_instructions_of_one_card_runs_only_there() -> None:
    assert serving_arch("9.0", ["sm_90a"]) == "sm_90a"
    assert serving_arch("12.1", ["sm_120a"]) is None


def test_amd_code_runs_on_its_own_architecture_only() -> None:
    assert serving_arch("gfx1100", ["gfx1030", "gfx1100"]) == "gfx1100"
    assert serving_arch("gfx1101", ["gfx1030", "gfx1100"]) is None


def test_a_build_without_gpu_code_serves_no_card() -> None:
    assert serving_arch("8.6", []) is None


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("NVIDIA GeForce RTX 5060 Ti", "12.0"),
        ("GP106 [GeForce GTX 1060 6GB]", "6.1"),
        ("NVIDIA GeForce GTX 1060 6GB", "6.1"),
        ("NVIDIA GeForce RTX 4080", "8.9"),
        ("NVIDIA GeForce RTX 3070", "8.6"),
        ("Tesla V100-PCIE-16GB", "7.0"),
        ("NVIDIA A100-SXM4-80GB", "8.0"),
        ("NVIDIA H200", "9.0"),
        ("NVIDIA GeForce GTX 1660 Ti", "7.5"),
        ("Matrox G200", None),
    ],
)
def test_a_name_tells_the_capability_where_the_driver_does_not(name: str, capability: str | None) -> None:
    assert capability_by_name(name) == capability


def test_capabilities_are_written_as_torch_writes_them() -> None:
    assert (sm("12.0"), sm("6.1"), sm("gfx90a")) == ("sm_120", "sm_61", "gfx90a")
