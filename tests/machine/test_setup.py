"""The plan of `outrider setup`: what is made, in which order, and what stops it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.errors import ConfigError, DeviceError
from outrider.machine import codec
from outrider.machine.install_plan import InstallPlan, carry_out, check_possible, make_plan, render_plan, single_recipe
from outrider.machine.machine_facts import Disk, Facts, load_facts
from outrider.machine.torch_choice import resolve
from outrider.machine.variants import RECORD, Variant, VariantStore, active_variant
from outrider.machine.wheels import load_table

FACTS = Path(__file__).parent / "facts"
TABLE = load_table()
STORE = VariantStore(Path("/data/outrider/torch"))


def recorded(machine: str) -> Facts:
    return load_facts(FACTS / f"{machine}.json")


def planned(machine: str, torch: str | None = None, store: VariantStore = STORE) -> InstallPlan:
    facts = recorded(machine)
    return make_plan(resolve(facts, table=TABLE, torch=torch), facts=facts, table=TABLE, store=store)


def test_a_machine_without_cards_gets_the_cpu_build() -> None:
    plan = planned("no-gpu")
    assert [step.name for step in plan.steps] == ["2.13-cpu"]


def test_groups_get_one_step_each() -> None:
    plan = planned("rtx5060ti-gtx1060-wsl2", torch="2.14")
    assert [step.name for step in plan.steps] == ["2.14-cu130", "2.14-cu126"]


def test_the_driver_case_has_no_steps_and_names_the_ways_out() -> None:
    plan = planned("rtx5060ti-gtx1060-bare")
    text = render_plan(plan)
    assert plan.steps == ()
    assert text.startswith("plan: nothing can work as it is\n")
    assert "  way out: WSL2 or Windows: its one driver serves both\n" in text


def test_the_plan_shows_reasons_rejections_and_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_FIND_LINKS", raising=False)
    text = render_plan(planned("rtx3090-rtx3060"))
    assert "plan: one wheel for all cards\n" in text
    assert "  not:     torch 2.13 cu130: needs driver 580.65.06, found 550.163.01\n" in text
    assert "--torch-backend cu126 'torch==2.13.*'\n" in text
    assert "about 3.0 GiB to download, 7.0 GiB on disk\n" in text


def test_only_commands_are_wider_than_a_terminal() -> None:
    lines = render_plan(planned("rtx5060ti-gtx1060-wsl2")).splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith("   $ "))


def test_a_disk_that_is_too_small_stops_the_plan() -> None:
    facts = replace(recorded("h200"), disk=Disk(free_bytes=2**30))
    with pytest.raises(DeviceError) as caught:
        check_possible(planned("h200"), facts)
    assert str(caught.value) == (
        "the plan takes about 7.0 GiB of disk, 1.0 GiB are free\n"
        "hint: make room, or set OUTRIDER_HOME to a folder on a larger disk"
    )


def test_what_is_installed_already_is_only_activated(tmp_path: Path) -> None:
    store = VariantStore(tmp_path / "store")
    store.path("2.13-cpu").mkdir(parents=True)
    codec.write(Variant(name="2.13-cpu", backend="cpu", torch="2.13.0+cpu"), store.path("2.13-cpu") / RECORD)
    carry_out(planned("no-gpu", store=store), store=store, project=tmp_path)
    assert active_variant(tmp_path) == "2.13-cpu"


def test_auto_takes_the_one_build_that_fits() -> None:
    recipe = single_recipe(recorded("v100-a100"), TABLE, torch=None, with_outrider=False)
    assert recipe.name == "2.13-cu126"


def test_auto_keeps_the_version_that_was_asked_for() -> None:
    recipe = single_recipe(recorded("no-gpu"), TABLE, torch="2.12.1", with_outrider=False)
    assert recipe.name == "2.12.1-cpu"


def test_auto_refuses_where_no_single_build_fits() -> None:
    with pytest.raises(ConfigError, match=r"^no single build fits the cards here: driver 470.256.02 is too old"):
        single_recipe(recorded("old-driver"), TABLE, torch=None, with_outrider=False)
