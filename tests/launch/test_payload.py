"""The file that a starter leaves for its ranks: read only where nobody else could have written it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.launch.payload import read_payload, write_payload


@pytest.fixture
def written(tmp_path: Path) -> Path:
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    write_payload(folder / "payload", print, {"number": 3})
    return folder / "payload"


def test_a_private_payload_is_read(written: Path) -> None:
    assert read_payload(written) == (print, {"number": 3})


def test_a_payload_that_others_can_write_is_refused(written: Path) -> None:
    written.chmod(0o622)
    with pytest.raises(ConfigError) as caught:
        read_payload(written)
    assert caught.value.message == f"{written} is not private: owner {os.geteuid()}, mode 622"
    assert caught.value.hint == (
        "set TMPDIR to a folder where you alone may write, on a disk that keeps owners and modes"
    )


def test_a_payload_in_a_folder_of_others_is_refused(written: Path) -> None:
    written.parent.chmod(0o777)
    with pytest.raises(ConfigError) as caught:
        read_payload(written)
    assert caught.value.message == f"{written.parent} is not private: owner {os.geteuid()}, mode 777"


def test_a_payload_of_another_user_is_refused(written: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(written, 65534, -1)
    with pytest.raises(ConfigError) as caught:
        read_payload(written)
    assert caught.value.message == f"{written} is not private: owner 65534, mode 600"
