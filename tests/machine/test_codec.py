"""Facts and records survive a file, and a broken file says where it is broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.errors import DataError
from outrider.machine import codec
from outrider.machine.machine_facts import Facts, load_facts

FACTS = Path(__file__).parent / "facts"
MACHINES = sorted(path.stem for path in FACTS.glob("*.json"))


@pytest.mark.parametrize("machine", MACHINES)
def test_recorded_facts_survive_a_round_trip(machine: str) -> None:
    facts = load_facts(FACTS / f"{machine}.json")
    assert codec.decode(Facts, codec.encode(facts)) == facts


def test_a_mistyped_key_is_named_with_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.write_text(json.dumps({"host": {"system": "Linux", "architecture": "x86_64"}, "gpu": []}))
    with pytest.raises(DataError) as caught:
        load_facts(path)
    assert str(caught.value) == "facts.json: unknown key 'gpu'\nhint: did you mean 'gpus'?"


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.write_text(json.dumps({"host": {"system": "Linux"}}))
    with pytest.raises(DataError, match=r"^facts.json.host: missing architecture"):
        load_facts(path)


def test_a_wrong_type_is_named_with_its_place(tmp_path: Path) -> None:
    gpu = {"index": "0", "vendor": "nvidia", "name": "card"}
    path = tmp_path / "facts.json"
    path.write_text(json.dumps({"host": {"system": "Linux", "architecture": "x86_64"}, "gpus": [gpu]}))
    with pytest.raises(DataError, match=r"^facts.json.gpus\[0\].index: expected int, got '0'$"):
        load_facts(path)


def test_a_word_outside_the_choices_is_refused(tmp_path: Path) -> None:
    driver = {"vendor": "matrox"}
    path = tmp_path / "facts.json"
    path.write_text(json.dumps({"host": {"system": "Linux", "architecture": "x86_64"}, "drivers": [driver]}))
    with pytest.raises(DataError, match="expected one of 'nvidia', 'amd', 'intel', 'other', got 'matrox'"):
        load_facts(path)


def test_text_that_is_not_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.write_text("no facts")
    with pytest.raises(DataError, match="is not JSON"):
        load_facts(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*nowhere.json: No such file or directory"):
        load_facts(tmp_path / "nowhere.json")


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.write_text(json.dumps({"host": {"system": "Linux", "architecture": "x86_64"}, "schema_version": 9}))
    with pytest.raises(DataError, match=r"facts.json has schema_version 9, this outrider reads 1"):
        load_facts(path)


def test_a_whole_diagnosis_can_be_replayed(tmp_path: Path) -> None:
    facts = load_facts(FACTS / "h200.json")
    path = tmp_path / "diagnosis.json"
    path.write_text(json.dumps({"schema_version": 1, "facts": codec.encode(facts), "verdicts": []}))
    assert load_facts(path) == facts


def test_no_recorded_machine_names_a_host_or_a_serial_number() -> None:
    texts = "".join(path.read_text() for path in FACTS.glob("*.json")).lower()
    assert not any(word in texts for word in ("hostname", "serial", "uuid", "/home/"))
