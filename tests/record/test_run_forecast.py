"""The receipt: which forecast belongs to a run, and how far off it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.api.run_lines import end_line
from outrider.record.run_folder import RunFolder
from outrider.record.run_forecast import find_forecast, keep_advice, open_receipt, receipt

RUN: dict[str, Any] = {
    "policy": "async",
    "devices": ("cpu", "cpu@0.4"),
    "num_samples": 640,
    "parameters": 100,
    "options": {"batch_size": 32, "precision": "fp32", "micro_batch": ("auto", 8), "epochs": 3},
}


def document(samples_per_s: float = 900.0, **changed: Any) -> dict[str, Any]:
    options = {"batch_size": 32, "precision": "fp32", "micro_batch": ("auto", 8), "epochs": 1, **changed}
    cells = [
        {"devices": ["cpu"], "policy": "solo", "samples_per_s": 500.0},
        {"devices": ["cpu", "cpu@0.4"], "policy": "async", "samples_per_s": samples_per_s},
    ]
    return {"parameters": 100, "workload": {"num_samples": 640, "options": options}, "forecasts": cells}


def test_a_run_finds_its_newest_forecast(tmp_path: Path) -> None:
    keep_advice(document(700.0), folder=tmp_path)
    newest = keep_advice(document(900.0), folder=tmp_path)
    found = find_forecast(RUN, folder=tmp_path)
    assert found is not None
    assert (found["samples_per_s"], found["advice"]) == (900.0, str(newest))


def test_one_device_has_one_forecast_for_all_policies(tmp_path: Path) -> None:
    keep_advice(document(), folder=tmp_path)
    found = find_forecast(RUN | {"devices": ("cpu",), "policy": "auto"}, folder=tmp_path)
    assert found is not None
    assert found["samples_per_s"] == 500.0


@pytest.mark.parametrize(
    "other",
    [
        {"policy": "sync"},
        {"devices": ("cpu@0.4", "cpu")},
        {"num_samples": 641},
        {"parameters": 101},
        {"options": RUN["options"] | {"batch_size": 64}},
        {"options": RUN["options"] | {"precision": "bf16"}},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_forecast_of_other_work_is_not_taken(tmp_path: Path, other: dict[str, Any]) -> None:
    keep_advice(document(), folder=tmp_path)
    assert find_forecast(RUN | other, folder=tmp_path) is None


def test_a_damaged_forecast_does_not_keep_a_run_from_training(tmp_path: Path) -> None:
    keep_advice(document(), folder=tmp_path)
    (tmp_path / "99999999.json").write_text('{"forecasts": [')
    (tmp_path / "99999998.json").write_text("[]")
    assert find_forecast(RUN, folder=tmp_path) is not None


def test_the_receipt_has_forecast_beside_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keep_advice(document(900.0))
    folder = RunFolder(tmp_path / "run")
    folder.create()
    open_receipt(folder, RUN)
    told = receipt(folder, {"samples_per_s": 1000.0})
    assert told is not None
    assert (told["samples_per_s"], told["measured_samples_per_s"]) == (900.0, 1000.0)
    assert told["error"] == pytest.approx(-0.1)


def test_the_forecast_of_an_earlier_run_in_the_folder_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.write_json("forecast.json", {"samples_per_s": 1.0, "advice": "old"})
    open_receipt(folder, RUN)
    assert receipt(folder, {"samples_per_s": 1000.0}) is None


def test_the_line_at_the_end_has_the_error(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    forecast = {"samples_per_s": 900.0, "measured_samples_per_s": 1000.0, "error": -0.1, "advice": "a.json"}
    totals = {"samples_per_s": 1000.0, "wait_fraction": 0.0, "train_s": 1.0, "exposed_average_fraction": 0.0}
    folder.write_json(
        "record.json", {"devices": ["cpu"], "epochs": [{"samples": 1000}], "totals": totals, "forecast": forecast}
    )
    line = end_line(tmp_path)
    assert line is not None
    assert "1,000 samples/s; forecast 900 samples/s, measured 1,000 (-10%); " in line
