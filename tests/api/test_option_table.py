"""Options are declared once: builder, Session, `--set` and the guide follow the table."""

from __future__ import annotations

import inspect
import re
import runpy
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

import outrider
from outrider.api import advising, ddp_builder, graph_setup, session, train, train_in_lab, wrap
from outrider.api.ddp_builder import DdpBuilder
from outrider.api.option_table import COMMAND_LINE_OPTIONS, OPTIONS, REQUIRED, SESSION_OPTIONS, shown_default
from outrider.api.options import Options, SessionOptions
from outrider.bench.suite.setting_options import OWN
from outrider.record.run_config import RunConfig
from outrider.replica.option_info import OPTION_INFOS
from outrider.replica.recipe import LoopRecipe, Recipe

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = (DOCS / "training.md").read_text()


def test_every_field_of_recipe_and_run_is_a_row_and_the_other_way_round() -> None:
    assert sorted(field.name for kind in (Recipe, RunConfig) for field in fields(kind)) == sorted(OPTION_INFOS)
    assert [*REQUIRED, *OPTIONS] == list(OPTION_INFOS)


def test_train_and_the_builder_take_every_option() -> None:
    methods = {name for name in vars(DdpBuilder) if not name.startswith("_")}
    assert set(Options.__annotations__) == set(OPTIONS)
    assert methods - {"dataset", "num_epochs", "run"} == set(OPTIONS)


def test_a_session_takes_the_options_that_say_so() -> None:
    assert set(SessionOptions.__annotations__) == set(SESSION_OPTIONS)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (train.train, Options),
        (session.Session.__init__, SessionOptions),
        (graph_setup.setup, SessionOptions),
        (wrap.wrap, SessionOptions),
        (train_in_lab.lab, Options),
        (advising.advise, Options),
    ],
    ids=["train", "Session", "setup", "wrap", "lab", "advise"],
)
def test_signatures_are_typed_by_the_options(function: Any, options: type) -> None:
    unpacked = get_type_hints(function)["options"]
    assert get_args(unpacked) == (options,)


def test_train_and_the_builder_take_the_same_arguments() -> None:
    assert list(inspect.signature(outrider.train).parameters) == [*REQUIRED, "options"]
    assert list(inspect.signature(outrider.Ddp.builder).parameters) == [name for name in REQUIRED if name != "dataset"]


@pytest.mark.parametrize("name", OPTIONS)
def test_the_method_of_the_builder_has_the_type_of_the_option(name: str) -> None:
    method = getattr(DdpBuilder, name)
    [argument] = [part for part in inspect.signature(method).parameters if part != "self"]
    taken = get_type_hints(method, vars(ddp_builder))[argument]
    # None means "left out", for which a builder has no need.
    assert _without_none(taken) == _without_none(OPTIONS[name].type)


def _without_none(annotation: Any) -> set[str]:
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return {str(part) for part in parts if part is not NoneType}


@pytest.mark.parametrize("name", [*OPTIONS, "dataset"])
def test_the_method_of_the_builder_has_the_words_of_the_option(name: str) -> None:
    assert inspect.getdoc(getattr(DdpBuilder, name)) == OPTION_INFOS[name].meaning


@pytest.mark.parametrize("name", OPTION_INFOS)
def test_a_meaning_is_one_sentence(name: str) -> None:
    meaning = OPTION_INFOS[name].meaning
    assert re.fullmatch(r"[A-Z`][^\n]*\.", meaning)
    assert ". " not in meaning


@pytest.mark.parametrize("name", [name for name, row in OPTIONS.items() if not row.is_of_lab])
def test_the_lab_refuses_what_is_about_devices(name: str) -> None:
    with pytest.raises(outrider.ConfigError) as caught:
        outrider.lab(dict, dict, dict, (), speeds=(1.0,), batch_size=1, **{name: None})  # type: ignore[arg-type]
    assert caught.value.message == f"the lab has no option {name!r}: its ranks are replicas in this process"


def test_what_a_benchmark_decides_cannot_be_set() -> None:
    assert set(OWN).isdisjoint(COMMAND_LINE_OPTIONS)
    assert set(OWN) <= set(OPTIONS)


def test_objects_cannot_be_written_on_a_command_line() -> None:
    assert [name for name in COMMAND_LINE_OPTIONS if OPTION_INFOS[name].is_object] == []


def test_only_the_batch_size_is_required() -> None:
    assert [name for name, row in OPTIONS.items() if row.default is MISSING] == ["batch_size"]


def test_the_default_of_the_lower_anchor_is_what_the_planner_uses() -> None:
    assert shown_default(OPTIONS["min_anchor"]) == str(_recipe().planner_config(2, batch_size=1).min_anchor)


def _recipe() -> Recipe:
    return Recipe(model=dict, optimizer=dict, step=dict, dataset=(), batch_size=1)  # type: ignore[arg-type]


def test_the_tables_of_the_guide_are_those_of_the_declarations() -> None:
    script = runpy.run_path(str(DOCS / "tables.py"))
    assert sorted(re.findall(r"<!-- table: (\w+)", GUIDE)) == sorted(script["TABLES"])
    assert script["written"](GUIDE) == GUIDE, "run `make docs`"


def test_a_session_has_the_options_of_any_loop_and_of_no_model_or_data() -> None:
    of_any_loop = {field.name for field in fields(LoopRecipe)}
    of_recipe = {field.name for field in fields(Recipe)}
    assert set(SESSION_OPTIONS) & of_recipe == of_any_loop
