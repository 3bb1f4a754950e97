"""Which environment a device runs in, on the recorded machine of a new card beside one of 2016."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.machine import rank_environments
from outrider.machine.devices import parse_devices
from outrider.machine.diagnosis import diagnose
from outrider.machine.environment_choice import choose_builds, serves
from outrider.machine.machine_facts import TorchBuild, load_facts
from outrider.machine.wheels import load_table

FACTS = load_facts(Path(__file__).parent / "facts" / "rtx5060ti-gtx1060-wsl2.json")
TABLE = load_table()
HERE = replace(FACTS.torches[0], origin="here")
OLD = TorchBuild(
    interpreter="old", origin="cu126", version="2.9.1+cu126", cuda="12.6", archs=("sm_60", "sm_75"), cudnn="9.10.2"
)
CARDS = parse_devices("cuda:0,cuda:1")


def origins(*builds: TorchBuild, devices: str = "cuda:0,cuda:1") -> list[str]:
    return [build.origin for build in choose_builds(parse_devices(devices), builds, FACTS, TABLE)]


def test_each_card_gets_the_first_build_with_code_for_it() -> None:
    assert origins(HERE, OLD) == ["here", "cu126"]
    assert origins(HERE, OLD, devices="cuda:1%50,cuda:1%50,cpu") == ["cu126", "cu126", "here"]


def test_a_card_that_no_build_serves_is_told_with_all_that_were_looked_at() -> None:
    with pytest.raises(ConfigError, match=r"runs on cuda:1, .*GTX 1060 6GB \(sm_61\); looked at here \(torch 2.13.0"):
        origins(HERE)


@pytest.mark.parametrize("change", [{"cuda": "13.0"}, {"cudnn": "9.13.0"}, {"error": "no libcudart"}, {"archs": ()}])
def test_a_build_serves_with_its_driver_its_cudnn_and_its_code(change: dict[str, object]) -> None:
    gtx1060 = FACTS.gpus[1]
    older = replace(FACTS, drivers=(replace(FACTS.drivers[0], version="570.1"),))
    assert serves(OLD, gtx1060, older, TABLE)
    assert not serves(replace(OLD, **change), gtx1060, older, TABLE)  # type: ignore[arg-type]


def test_diagnose_names_the_environment_that_serves_a_card() -> None:
    alone = diagnose(FACTS, TABLE, forecast=None)
    beside = diagnose(
        replace(FACTS, torches=(*FACTS.torches, replace(OLD, origin="variant cu126"))), TABLE, forecast=None
    )
    assert (alone.exit_code, beside.exit_code) == (1, 0)
    (verdict,) = [one for one in beside.verdicts if one.check == "build" and one.level == "warning"]
    assert verdict.why.endswith("torch 2.9.1+cu126 of variant cu126 runs on it")
    assert "--environments auto" in (verdict.hint or "")


def test_auto_starts_ranks_in_the_variants_that_setup_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "torch" / "cu126"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (folder / "lib" / version / "site-packages" / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    variant = {"name": "cu126", "backend": "cu126", "torch": OLD.version, "cuda": OLD.cuda, "archs": OLD.archs}
    (folder / "variant.json").write_text(json.dumps({**variant, "schema_version": 1}))
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    monkeypatch.setattr(rank_environments, "detect_machine", lambda _: FACTS)
    monkeypatch.setattr(rank_environments, "ask_torch", lambda *_, **__: HERE)
    pythons = rank_environments.rank_pythons("auto", CARDS)
    assert pythons is not None
    assert [one.interpreter for one in pythons] == [sys.executable, str(folder / "bin" / "python")]
    told = capsys.readouterr().err
    assert told.endswith("ranks: cuda:0: here (torch 2.13.0+cu130), cuda:1: cu126 (torch 2.9.1+cu126)\n")


def test_auto_is_this_python_where_it_serves_all_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    monkeypatch.setattr(rank_environments, "detect_machine", lambda _: FACTS)
    monkeypatch.setattr(rank_environments, "ask_torch", lambda *_, **__: HERE)
    assert rank_environments.rank_pythons("auto", parse_devices("cuda:0,cpu")) is None
    assert rank_environments.rank_pythons("auto", parse_devices("cpu,cpu@0.5")) is None
