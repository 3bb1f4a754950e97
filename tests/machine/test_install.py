"""Variants are made whole or not at all; with uv for real, against stand-ins of torch wheels."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from outrider.errors import ConfigError, DeviceError
from outrider.machine.install import (
    InstallRecipe,
    commands,
    find_conda,
    find_uv,
    install,
    outrider_requirement,
    refresh,
    staging,
)
from outrider.machine.variants import VariantStore

has_uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}") is not None
needs_uv = pytest.mark.skipif(not has_uv, reason="uv is neither on PATH nor beside this Python: pip install uv")

STAND_IN = """\
from types import SimpleNamespace

__version__ = "{version}"
version = SimpleNamespace(cuda={cuda!r}, hip=None)
backends = SimpleNamespace(cudnn=SimpleNamespace(version=lambda: 91002))
cuda = SimpleNamespace(
    get_arch_list=lambda: {archs!r},
    device_count=lambda: 0,
    nccl=SimpleNamespace(version=lambda: (2, 28, 9)),
)
_C = SimpleNamespace()
"""


def write_wheel(folder: Path, version: str, *, cuda: str | None = None, archs: tuple[str, ...] = ()) -> None:
    """A wheel called torch that answers what Outrider asks a torch."""
    folder.mkdir(exist_ok=True)
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torch/__init__.py", STAND_IN.format(version=version, cuda=cuda, archs=list(archs)))
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VariantStore:
    """An empty store, and uv told to look at the folder `wheels` only."""
    monkeypatch.setenv("OUTRIDER_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    return VariantStore(tmp_path / "store")


def visible(store: VariantStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir() if not path.name.startswith(".lock-"))


@needs_uv
def test_a_variant_is_installed_and_describes_itself(store: VariantStore, tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels", "2.13.0+cu126", cuda="12.6", archs=("sm_60", "sm_90"))
    variant = install(InstallRecipe(torch="2.13", backend="cu126", with_outrider=False), store)
    assert (variant.name, variant.torch, variant.cuda) == ("2.13-cu126", "2.13.0+cu126", "12.6")
    assert (variant.archs, variant.cudnn, variant.nccl) == (("sm_60", "sm_90"), "9.10.2", "2.28.9")
    assert store.variants() == (variant,)
    assert store.interpreter(variant.name).exists()
    assert visible(store) == ["2.13-cu126"]


@needs_uv
def test_two_variants_stand_side_by_side(store: VariantStore, tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels", "2.13.0+cpu")
    write_wheel(tmp_path / "wheels", "2.12.1+cpu")
    install(InstallRecipe(torch="2.13", backend="cpu", with_outrider=False), store)
    install(InstallRecipe(torch="2.12.1", backend="cpu", with_outrider=False), store)
    assert [variant.torch for variant in store.variants()] == ["2.12.1+cpu", "2.13.0+cpu"]


@needs_uv
def test_a_wheel_that_is_not_there_leaves_nothing(store: VariantStore, tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    with pytest.raises(ConfigError, match=r"ended with exit code 1\nhint: its own message is above; nothing was"):
        install(InstallRecipe(torch="2.13", backend="cpu", with_outrider=False), store)
    assert visible(store) == []


@needs_uv
def test_another_build_than_asked_for_is_refused(store: VariantStore, tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels", "2.13.0+cpu")
    with pytest.raises(DeviceError) as caught:
        install(InstallRecipe(torch="2.13", backend="cu126", with_outrider=False), store)
    assert str(caught.value) == (
        "cu126 was asked for, torch 2.13.0+cpu with no CUDA came\n"
        "hint: check OUTRIDER_FIND_LINKS and uv's index settings; nothing was installed"
    )
    assert visible(store) == []


@needs_uv
def test_a_refresh_reads_what_the_build_holds_now(store: VariantStore, tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels", "2.13.0+cu126", cuda="12.6", archs=("sm_60",))
    variant = install(InstallRecipe(torch="2.13", backend="cu126", with_outrider=False), store)
    (module,) = store.path(variant.name).glob("lib/python*/site-packages/torch/__init__.py")
    text = module.read_text().replace("sm_60", "sm_61")
    module.unlink()
    module.write_text(text)
    # Python compiles a file of equal size again only if its time differs, in whole seconds.
    os.utime(module, (2e9, 2e9))
    assert refresh(variant.name, store).archs == ("sm_61",)
    assert store.get(variant.name).archs == ("sm_61",)


def interrupted_install(store: VariantStore) -> None:
    with staging("2.13-cpu", store, is_relocatable=True) as folder:
        (folder / "bin").mkdir(parents=True)
        raise KeyboardInterrupt


def test_an_interruption_leaves_nothing(tmp_path: Path) -> None:
    store = VariantStore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        interrupted_install(store)
    assert visible(store) == []


def test_what_a_killed_install_left_is_swept_by_the_next(tmp_path: Path) -> None:
    store = VariantStore(tmp_path)
    (tmp_path / ".partial-2.13-cpu" / "bin").mkdir(parents=True)
    (tmp_path / "2.13-cpu" / "bin").mkdir(parents=True)
    with staging("2.13-cpu", store, is_relocatable=True) as folder:
        assert not folder.exists()
        (folder / "new").mkdir(parents=True)
    assert [path.name for path in store.path("2.13-cpu").iterdir()] == ["new"]


def test_two_installs_of_one_variant_do_not_collide(tmp_path: Path) -> None:
    store = VariantStore(tmp_path)
    with open(tmp_path / ".lock-2.13-cpu", "w") as lock:
        lock.write("4242")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError) as caught, staging("2.13-cpu", store, is_relocatable=True):
            pass
    assert str(caught.value) == ("torch variant 2.13-cpu is being installed by process 4242\nhint: wait for it to end")


def test_a_conda_environment_is_made_where_it_will_live(tmp_path: Path) -> None:
    store = VariantStore(tmp_path)
    with staging("2.13-conda-cu129", store, is_relocatable=False) as folder:
        folder.mkdir()
        (folder / "variant.json").touch()
    assert folder == store.path("2.13-conda-cu129")
    assert folder.exists()


def test_an_installed_variant_is_not_made_again(tmp_path: Path) -> None:
    store = VariantStore(tmp_path)
    (tmp_path / "2.13-cpu").mkdir()
    (tmp_path / "2.13-cpu/variant.json").touch()
    with pytest.raises(ConfigError) as caught, staging("2.13-cpu", store, is_relocatable=True):
        pass
    assert str(caught.value) == ("torch variant 2.13-cpu is installed already\nhint: outrider torch remove 2.13-cpu")


def test_the_index_is_chosen_by_uv_from_the_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_FIND_LINKS", raising=False)
    venv, pip = commands(InstallRecipe(torch="2.13", backend="cu126", with_outrider=False), tmp_path)
    assert venv[:3] == ("uv", "venv", "--relocatable")
    assert pip[-3:] == ("--torch-backend", "cu126", "torch==2.13.*")


def test_a_full_version_is_pinned_exactly(tmp_path: Path) -> None:
    pip = commands(InstallRecipe(torch="2.13.1", backend="cu126", with_outrider=False), tmp_path)[1]
    assert pip[-1] == "torch==2.13.1"


def test_the_conda_build_is_asked_for_with_its_cuda(tmp_path: Path) -> None:
    conda, pip = commands(InstallRecipe(torch="2.13", backend="conda-cu129"), tmp_path)
    assert conda[:3] == ("conda", "create", "--yes")
    assert conda[-3:] == ("pytorch=2.13.*", "pytorch-gpu", "cuda-version=12.9")
    assert pip[-len(outrider_requirement()) :] == outrider_requirement()


def test_a_missing_uv_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(ConfigError) as caught:
        find_uv()
    assert str(caught.value) == (
        "uv was not found, neither on PATH nor beside this Python\nhint: install it: pip install uv"
    )


def test_a_missing_conda_says_what_else_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        find_conda()
    assert str(caught.value) == (
        "the conda-forge build needs one of micromamba, mamba, conda, none is on PATH\n"
        "hint: install micromamba, or take another way: outrider setup --way groups"
    )
