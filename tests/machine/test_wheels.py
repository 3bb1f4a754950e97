"""The wheel table says what it should, with sources and date."""

from __future__ import annotations

import pytest

from outrider.errors import ConfigError
from outrider.machine.wheels import (
    check_backend,
    check_version,
    cuda_of,
    load_table,
    release_of,
    serving_arch,
    table_difference,
    version_of,
)

TABLE = load_table()


def test_the_table_carries_its_date_and_sources() -> None:
    assert version_of(TABLE.date) >= (2026, 11, 15)
    assert len(TABLE.sources) >= 4


@pytest.mark.parametrize(
    ("torch", "backend", "runs", "fails"),
    [
        ("2.6", "cu118", "3.7", "12.0"),
        ("2.6", "cu126", "6.1", "10.0"),
        ("2.7", "cu128", "12.0", "7.0"),
        ("2.8", "cu128", "7.0", "6.1"),
        ("2.8", "cu129", "12.1", "6.1"),
        ("2.10", "cu130", "12.0", "7.0"),
        ("2.11", "cu128", "7.5", "7.0"),
        ("2.13", "cu126", "6.1", "12.0"),
        ("2.13", "cu130", "8.9", "6.1"),
        ("2.14", "cu126", "7.0", "10.0"),
        ("2.15", "cu132", "9.0", "7.0"),
    ],
)
def test_a_wheel_runs_where_its_architectures_say(torch: str, backend: str, runs: str, fails: str) -> None:
    (wheel,) = [item for item in TABLE.wheels if (item.torch, item.backend) == (torch, backend)]
    assert serving_arch(runs, wheel.archs)
    assert not serving_arch(fails, wheel.archs)


def test_only_the_conda_forge_build_has_code_for_pascal_and_blackwell() -> None:
    both = [item for item in TABLE.wheels if serving_arch("6.1", item.archs) and serving_arch("12.0", item.archs)]
    assert both == []
    assert serving_arch("6.1", TABLE.conda.archs)
    assert serving_arch("12.0", TABLE.conda.archs)


def test_every_version_has_one_default_on_the_index() -> None:
    versions = {item.torch for item in TABLE.wheels}
    assert {item.torch: item.backend for item in TABLE.wheels if item.is_default}.keys() == versions
    assert sum(item.is_default for item in TABLE.wheels) == len(versions)


def test_the_preferred_version_comes_first_and_old_ones_not_at_all() -> None:
    assert TABLE.versions()[:3] == ("2.13", "2.15", "2.14")
    assert "2.7" not in TABLE.versions()


@pytest.mark.parametrize(
    ("cuda", "capability", "is_target"),
    [
        ("12.9", "6.1", True),
        ("12.9", "12.0", True),
        ("12.6", "12.0", False),
        ("13.0", "6.1", False),
        ("10.2", "6.1", False),
    ],
)
def test_a_toolkit_compiles_for_its_range_of_cards(cuda: str, capability: str, is_target: bool) -> None:
    assert TABLE.targets(cuda, capability) is is_target


def test_pascal_beside_blackwell_compiles_with_cuda_12_8_and_12_9_only() -> None:
    assert TABLE.compilers(("6.1", "12.0")) == ("12.9", "12.8")


def test_backends_name_their_cuda() -> None:
    assert (cuda_of("cu126"), cuda_of("conda-cu129"), cuda_of("cpu")) == ("12.6", "12.9", "")
    assert release_of("2.13.0+cu130") == "2.13"


def test_a_version_below_the_minimum_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        check_version("2.6", TABLE)
    assert str(caught.value) == (
        "outrider needs torch 2.8 or newer, got 2.6\nhint: known versions: 2.15, 2.14, 2.13, 2.12, 2.11, 2.10, 2.9, 2.8"
    )


def test_a_version_that_the_table_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^torch 3.1 is not in the wheel table of 2026-11-15"):
        check_version("3.1", TABLE)


def test_a_word_is_no_version() -> None:
    with pytest.raises(ConfigError, match=r"^a torch version looks like 2.13 or 2.13.0, got 'newest'"):
        check_version("newest", TABLE)


def test_a_backend_that_a_version_does_not_have_is_refused_with_those_it_has() -> None:
    with pytest.raises(ConfigError) as caught:
        check_backend("cu131", "2.9", TABLE)
    assert str(caught.value) == (
        "there is no cu131 build of torch 2.9\nhint: there are cpu, rocm7.2, cu128, cu130, cu126, or auto"
    )


def test_a_mistyped_backend_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        check_backend("cpuu", "2.9", TABLE)
    assert str(caught.value) == (
        "there is no cpuu build of torch 2.9\n"
        "hint: did you mean cpu? there are cpu, rocm7.2, cu128, cu130, cu126, or auto"
    )


def test_a_build_that_differs_from_the_table_is_told() -> None:
    archs = ("sm_61", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
    assert table_difference(TABLE, torch="2.13.1+cu126", backend="cu126", archs=archs) == (
        "differs from the wheel table of 2026-11-15: holds sm_61, lacks sm_50"
    )


def test_a_build_that_agrees_with_the_table_is_quiet() -> None:
    (wheel,) = [item for item in TABLE.wheels if (item.torch, item.backend) == ("2.13", "cu130")]
    assert table_difference(TABLE, torch="2.13.0+cu130", backend="cu130", archs=wheel.archs) is None
    assert table_difference(TABLE, torch="2.13.0+cpu", backend="cpu", archs=()) is None
