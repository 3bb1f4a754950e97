"""A source build is checked before it starts, because it takes hours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.machine.build import BuildPlan, build, parse_archs, plan_build
from outrider.machine.machine_facts import Disk, Facts, Memory, Toolkit, load_facts
from outrider.machine.variants import VariantStore
from outrider.machine.wheels import load_table

FACTS = Path(__file__).parent / "facts"
GIB = 2**30


def machine(*toolkits: str) -> Facts:
    facts = load_facts(FACTS / "rtx5060ti-gtx1060-wsl2.json")
    return replace(facts, toolkits=tuple(Toolkit(version=item, path=f"/usr/local/cuda-{item}") for item in toolkits))


def planned(facts: Facts, archs: tuple[str, ...] = ("6.1", "12.0"), jobs: int | None = None) -> BuildPlan:
    return plan_build(facts, load_table(), archs=archs, torch="2.13", jobs=jobs)


def unmet(plan: BuildPlan) -> dict[str, str]:
    return {check.what: check.detail for check in plan.checks if not check.is_met}


@pytest.mark.parametrize("text", ["6.1;12.0", "6.1,12.0", "6.1 12.0", "6.1; 12.0;"])
def test_architectures_may_be_written_in_any_list(text: str) -> None:
    assert parse_archs(text) == ("6.1", "12.0")


@pytest.mark.parametrize(("text", "shown"), [("sm_61", "sm_61"), ("", "nothing"), ("6.1;pascal", "pascal")])
def test_other_architectures_are_refused(text: str, shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_archs(text)
    assert str(caught.value) == (
        f'architectures look like 6.1;12.0, got {shown}\nhint: outrider torch build --archs "6.1;12.0"'
    )


def test_the_toolkit_that_targets_all_cards_is_taken() -> None:
    plan = planned(machine("11.8", "12.9", "13.0"))
    assert (plan.cuda, plan.environment["CUDA_HOME"]) == ("12.9", "/usr/local/cuda-12.9")
    assert plan.environment["TORCH_CUDA_ARCH_LIST"] == "6.1;12.0"


def test_a_toolkit_that_targets_only_some_cards_does_not_do() -> None:
    found = unmet(planned(machine("13.0")))
    assert found["CUDA toolkit"] == "none found that targets 6.1, 12.0 (found: 13.0)"


def test_cards_that_no_toolkit_targets_together_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^no CUDA toolkit compiles for 3.5 and 12.0 at once"):
        planned(machine(), archs=("3.5", "12.0"))


def test_jobs_fit_in_memory() -> None:
    facts = replace(machine("12.9"), memory=Memory(available_bytes=9 * GIB))
    assert planned(facts).jobs == 2


def test_more_jobs_than_memory_is_told_with_a_number_that_fits() -> None:
    facts = replace(machine("12.9"), memory=Memory(available_bytes=9 * GIB))
    plan = planned(facts, jobs=8)
    assert unmet(plan)["memory"] == "8 jobs take about 32 GiB, 9 GiB available"
    assert [check.hint for check in plan.checks if check.what == "memory"] == ["--jobs 2"]


def test_a_small_disk_is_told() -> None:
    facts = replace(machine("12.9"), disk=Disk(free_bytes=5 * GIB))
    assert unmet(planned(facts))["disk"] == "about 40 GiB needed, 5 GiB free"


def test_a_missing_compiler_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert set(unmet(planned(machine("12.9")))) == {"C++ compiler", "git"}


def test_more_jobs_take_less_time_and_more_cards_more() -> None:
    facts = machine("12.9")
    assert planned(facts, jobs=2).hours == 2 * planned(facts, jobs=4).hours
    assert planned(facts).hours > planned(facts, archs=("12.0",)).hours


def test_a_build_that_cannot_work_is_not_started(tmp_path: Path) -> None:
    facts = replace(machine("13.0"), disk=Disk(free_bytes=5 * GIB))
    store = VariantStore(tmp_path / "store")
    with pytest.raises(
        ConfigError, match=r"^this machine cannot build torch: .*CUDA toolkit: none found.*; disk: about"
    ):
        build(planned(facts), store)
    assert not store.folder.exists()


def test_the_commands_build_the_tag_of_the_version(tmp_path: Path) -> None:
    lines = [" ".join(command) for command in planned(machine("12.9")).commands(tmp_path)]
    assert "--branch v2.13.0" in lines[1]
    assert "--no-build-isolation" in lines[3]


def test_the_name_tells_the_cards() -> None:
    assert planned(machine("12.9")).name == "2.13-source-cu129-61-120"
