"""A run as HTML: small, without scripts, and with nothing in it that a name could break."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from outrider.api.run_html import run_html


def folder_of(tmp_path: Path, losses: list[float | None], *, devices: list[str], status: str = "finished") -> Path:
    share = [1 / len(devices)] * len(devices)
    epochs = [
        {
            "epoch": number,
            "loss": loss,
            "eval": 0.5,
            "samples": 100,
            "samples_per_s": 50.0,
            "share_by_rank": share,
        }
        for number, loss in enumerate(losses)
    ]
    totals: dict[str, Any] = {"samples_per_s": 50.0, "train_s": 2.0, "wait_fraction": 0.0}
    totals["exposed_average_fraction"] = 0.0
    record = {"schema_version": 1, "status": status, "devices": devices, "epochs": epochs, "totals": totals}
    (tmp_path / "record.json").write_text(json.dumps(record))
    return tmp_path


def points(html: str) -> list[list[str]]:
    lines = ElementTree.fromstring(html.replace("&#9632;", "")).iter("polyline")
    return [line.get("points", "").split() for line in lines]


def test_the_curve_has_a_point_per_epoch_and_falls_with_the_loss(tmp_path: Path) -> None:
    html = run_html(folder_of(tmp_path, [3.0, 2.0, 1.0], devices=["cpu", "cpu@0.4"]))
    ((first, second, third),) = points(html)
    assert [float(point.split(",")[1]) for point in (first, second, third)] == [10.0, 50.0, 90.0]
    assert "loss 1 to 3, epochs 1 to 3" in html
    assert "rank 1 (cpu@0.4) 50%" in html
    assert "The run is finished: 3 epochs" in html


def test_a_value_that_is_not_finite_is_a_gap(tmp_path: Path) -> None:
    html = run_html(folder_of(tmp_path, [3.0, 2.5, None, 2.0, 1.0, None], devices=["cpu"]))
    assert [len(line) for line in points(html)] == [2, 2]
    assert "loss not finite" in html


@pytest.mark.parametrize("num_epochs", [1, 7, 399, 10_000])
def test_it_stays_small_and_loads_nothing(tmp_path: Path, num_epochs: int) -> None:
    html = run_html(folder_of(tmp_path, [1 / (n + 1) for n in range(num_epochs)], devices=["cpu"] * 40))
    assert len(html) < 12_000
    assert "and 24 more" in html
    assert not any(word in html for word in ("<script", "http", "src=", "url("))
    ElementTree.fromstring(html.replace("&#9632;", ""))


def test_one_epoch_is_no_curve(tmp_path: Path) -> None:
    html = run_html(folder_of(tmp_path, [1.0], devices=["cpu"]))
    assert "loss of each epoch" not in html
    assert "epoch 1, loss 1, evaluation 0.5" in html


def test_names_are_escaped(tmp_path: Path) -> None:
    html = run_html(folder_of(tmp_path, [1.0], devices=["<script>alert(1)</script>"]))
    assert "<script" not in html


def test_a_run_without_an_epoch_has_no_curve(tmp_path: Path) -> None:
    html = run_html(folder_of(tmp_path, [], devices=["cpu"], status="failed"))
    assert "The run failed" in html
    assert "no finished epoch yet" in html
    assert "<svg" not in html


def test_an_empty_folder_is_no_error(tmp_path: Path) -> None:
    assert "no finished epoch yet" in run_html(tmp_path)
