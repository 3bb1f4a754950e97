"""New projects: complete, never over something that is there, and never half-made."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.scaffold.project import TEMPLATES, create_project


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_template_makes_a_complete_project(template: str, tmp_path: Path) -> None:
    project = create_project("my-project", parent=tmp_path, template=template)
    assert files(project) == {
        ".gitignore",
        "Dockerfile",
        "Makefile",
        "README.md",
        "config.toml",
        "jobs/kubernetes.yaml",
        "jobs/slurm.sbatch",
        "jobs/ray.sh" if template == "ray" else "jobs/torchrun.sh",
        "my_project/__init__.py",
        "my_project/config.py",
        "my_project/data.py",
        "my_project/model.py",
        "pyproject.toml",
        "tests/test_config.py",
        "tests/test_data.py",
        "tests/test_model.py",
        "tests/test_train.py",
        "train.py",
    }


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_python_file_compiles_and_nothing_is_left_to_fill_in(template: str, tmp_path: Path) -> None:
    project = create_project("my-project", parent=tmp_path, template=template)
    for path in project.rglob("*.py"):
        compile(path.read_text(), str(path), "exec")
    assert not any("{{" in (project / name).read_text() for name in files(project))


def test_the_project_names_itself(tmp_path: Path) -> None:
    project = create_project("my-project", parent=tmp_path, template="train")
    data = tomllib.loads((project / "pyproject.toml").read_text())
    assert data["project"]["name"] == "my-project"
    assert data["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["my_project"]


def test_shell_scripts_can_be_run(tmp_path: Path) -> None:
    project = create_project("stripes", parent=tmp_path, template="loop")
    assert (project / "jobs/torchrun.sh").stat().st_mode & 0o111


def test_an_existing_folder_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "stripes").mkdir()
    (tmp_path / "stripes" / "train.py").write_text("mine")
    with pytest.raises(ConfigError) as caught:
        create_project("stripes", parent=tmp_path, template="loop")
    assert str(caught.value) == (
        f"{tmp_path}/stripes exists already, and nothing is overwritten\nhint: choose another name or --directory"
    )
    assert (tmp_path / "stripes" / "train.py").read_text() == "mine"


def test_an_existing_file_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "stripes").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        create_project("stripes", parent=tmp_path, template="loop")
    assert (tmp_path / "stripes").read_text() == "mine"


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        create_project("stripes", parent=tmp_path / "nowhere", template="loop")
    assert str(caught.value) == f"there is no folder {tmp_path}/nowhere\nhint: create it first"


def test_an_unfit_name_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        create_project("my project", parent=tmp_path, template="loop")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        create_project("stripes", parent=tmp_path, template="loop")
    assert list(tmp_path.iterdir()) == []
