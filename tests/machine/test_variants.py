"""Variants side by side: which are whole, which is active, and what removing does."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.machine import codec
from outrider.machine.variants import (
    RECORD,
    Variant,
    VariantStore,
    activate,
    active_interpreter,
    active_variant,
    deactivate,
    existing_folder,
    project_root,
    size_of,
)


def add(store: VariantStore, name: str) -> Variant:
    variant = Variant(name=name, backend="cpu", torch="2.13.0+cpu")
    store.path(name).mkdir(parents=True)
    codec.write(variant, store.path(name) / RECORD)
    return variant


def test_variants_live_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "here"))
    assert VariantStore.of_user().folder == tmp_path / "here" / "torch"


def test_variants_live_in_the_data_folder_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OUTRIDER_HOME", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert VariantStore.of_user().folder == tmp_path / "outrider" / "torch"


def test_whole_variants_are_listed_by_name(tmp_path: Path) -> None:
    store = VariantStore(tmp_path)
    newer, older = add(store, "2.14-cpu"), add(store, "2.13-cpu")
    assert store.variants() == (older, newer)


def test_a_half_made_variant_is_not_listed(tmp_path: Path) -> None:
    (tmp_path / "2.13-cpu" / "bin").mkdir(parents=True)
    assert VariantStore(tmp_path).variants() == ()


def test_an_empty_store_has_no_variants(tmp_path: Path) -> None:
    assert VariantStore(tmp_path / "nowhere").variants() == ()


def test_a_mistyped_name_gets_the_nearest(tmp_path: Path) -> None:
    store = VariantStore(tmp_path)
    add(store, "2.13-cpu")
    with pytest.raises(ConfigError) as caught:
        store.get("2.13-cu")
    assert str(caught.value) == "no torch variant '2.13-cu'\nhint: did you mean '2.13-cpu'? installed: 2.13-cpu"


def test_one_variant_is_active_per_project(tmp_path: Path) -> None:
    store, project = VariantStore(tmp_path / "store"), tmp_path / "project"
    project.mkdir()
    add(store, "2.13-cpu")
    add(store, "2.14-cpu")
    activate(project, store, "2.13-cpu")
    activate(project, store, "2.14-cpu")
    assert active_variant(project) == "2.14-cpu"
    assert active_interpreter(project, store) == store.folder / "2.14-cpu/bin/python"
    assert [path.name for path in (project / ".outrider").iterdir()] == ["torch"]


def test_projects_do_not_share_their_choice(tmp_path: Path) -> None:
    store = VariantStore(tmp_path / "store")
    add(store, "2.13-cpu")
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    activate(tmp_path / "one", store, "2.13-cpu")
    assert active_variant(tmp_path / "other") is None
    assert active_interpreter(tmp_path / "other", store) is None


def test_a_variant_that_is_not_installed_cannot_be_activated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        activate(tmp_path, VariantStore(tmp_path / "store"), "2.13-cpu")
    assert str(caught.value) == ("no torch variant '2.13-cpu'\nhint: none is installed: outrider torch install auto")


def test_an_active_variant_that_is_gone_is_an_error(tmp_path: Path) -> None:
    store = VariantStore(tmp_path / "store")
    add(store, "2.13-cpu")
    activate(tmp_path, store, "2.13-cpu")
    store.remove("2.13-cpu")
    with pytest.raises(ConfigError) as caught:
        active_interpreter(tmp_path, store)
    assert caught.value.message == "torch variant 2.13-cpu is active in this project, but not installed"


def test_deactivating_goes_back_to_this_python(tmp_path: Path) -> None:
    store = VariantStore(tmp_path / "store")
    add(store, "2.13-cpu")
    activate(tmp_path, store, "2.13-cpu")
    deactivate(tmp_path)
    assert active_interpreter(tmp_path, store) is None


def test_the_active_variant_is_asked_first(tmp_path: Path) -> None:
    store = VariantStore(tmp_path / "store")
    for name in ("a", "b", "c"):
        add(store, name)
    activate(tmp_path, store, "b")
    assert list(store.interpreters(tmp_path)) == ["b", "a", "c"]


def test_a_removed_variant_leaves_nothing(tmp_path: Path) -> None:
    store = VariantStore(tmp_path)
    add(store, "2.13-cpu")
    store.remove("2.13-cpu")
    assert list(tmp_path.iterdir()) == []


def test_a_project_is_found_from_inside_it(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    inside = tmp_path / "source" / "deep"
    inside.mkdir(parents=True)
    assert project_root(inside) == tmp_path


def test_hard_links_are_counted_once(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"x" * 1000)
    (tmp_path / "two").hardlink_to(tmp_path / "one")
    assert size_of(tmp_path) == 1000


def test_the_disk_of_a_folder_to_be_made_is_that_of_its_nearest_parent(tmp_path: Path) -> None:
    assert existing_folder(tmp_path / "not" / "yet") == tmp_path
    assert existing_folder(tmp_path) == tmp_path
