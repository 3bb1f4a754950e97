"""Project names: fit ones are kept, odd ones get a clear answer and an example that is fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import ConfigError
from outrider.scaffold.project import check_name, package_of


@pytest.mark.parametrize("name", ["stripes", "my-project", "My_Project2", "a"])
def test_fit_names_are_kept(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "a project needs a name, got ''\nhint: for example 'my-project'"),
        ("my project", "a project name has no spaces, got 'my project'\nhint: for example 'my-project'"),
        ("class", "a project name cannot be a Python keyword, got 'class'\nhint: for example 'my-class'"),
        ("a.b", "a project name has only letters, digits, - and _, got 'a.b'\nhint: for example 'a-b'"),
        ("größe", "a project name has only ASCII letters, digits, - and _, got 'größe'\nhint: for example 'groe'"),
        ("模型", "a project name has only ASCII letters, digits, - and _, got '模型'\nhint: for example 'my-project'"),
        ("../up", "a project name is not a path (see --directory), got '../up'\nhint: for example 'up'"),
        ("torch", "a project name cannot hide the module 'torch', got 'torch'\nhint: for example 'my-torch'"),
        ("json", "a project name cannot hide the module 'json', got 'json'\nhint: for example 'my-json'"),
        (
            "2fast",
            "a project name starts with a letter and ends with a letter or digit, got '2fast'\n"
            "hint: for example 'fast'",
        ),
        (
            "-rf",
            "a project name starts with a letter and ends with a letter or digit, got '-rf'\nhint: for example 'rf'",
        ),
    ],
)
def test_odd_names_get_a_clear_answer(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_name(name)
    assert str(caught.value) == message


@given(name=st.text(max_size=20))
def test_the_example_for_an_odd_name_is_itself_fit(name: str) -> None:
    try:
        fit = check_name(name)
    except ConfigError as error:
        fit = check_name((error.hint or "").removeprefix("for example ").strip("'"))
    assert package_of(fit).isidentifier()


def test_the_package_is_importable() -> None:
    assert package_of("My-Project") == "my_project"
