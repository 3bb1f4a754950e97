"""`outrider bench scaling` from the command line, and the notebook, which runs it on real ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.bench.scaling.scaling_plan import ScalingPlan
from outrider.bench.scaling.scaling_record import ScalingRecord, ScalingRow
from outrider.cli.main import app

NOTEBOOK = Path(__file__).parents[2] / "examples" / "scaling.ipynb"
TINY = """
devices = "cpu,cpu"
models = ["resnet20"]
ways = ["dp", "fsdp", "sync"]
batch_size, epochs, samples = 8, 2, 32
may_download = False
"""
RECORD = ScalingRecord(
    rows=(ScalingRow(model="resnet18", way="single", devices=("cpu",), epoch_s=(2.0,), samples_per_s=50.0),),
    data_name="CIFAR-10",
    batch_size=512,
    epochs=3,
    rounds=1,
    num_samples=100,
    environment={},
)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[ScalingPlan]:
    """Plans that were to be run; the answer is always the same."""
    plans: list[ScalingPlan] = []

    def compare_ways(plan: ScalingPlan, *, keep: Callable[[ScalingRecord], None], **_: Any) -> ScalingRecord:
        plans.append(plan)
        keep(RECORD)
        return RECORD

    monkeypatch.setattr("outrider.bench.scaling.scaling_measure.compare_ways", compare_ways)
    return plans


def test_options_become_the_plan(told: list[ScalingPlan], tmp_path: Path) -> None:
    arguments = ["--model", "resnet34", "--devices", "cpu,cpu@0.4", "--ways", "ddp,async", "--samples", "100"]
    result = CliRunner().invoke(app, ["bench", "scaling", *arguments, "--output", str(tmp_path)])
    assert result.exit_code == 0
    (plan,) = told
    assert (plan.models, plan.ways, plan.samples, plan.output) == (("resnet34",), ("ddp", "async"), 100, tmp_path)


def test_the_defaults_are_two_resnets_at_batch_512_in_every_way(told: list[ScalingPlan]) -> None:
    CliRunner().invoke(app, ["bench", "scaling", "--devices", "cpu"])
    assert (told[0].models, told[0].batch_size, told[0].epochs) == (("resnet18", "resnet34"), 512, 3)
    assert told[0].ways == ("single", "dp", "ddp", "fsdp", "sync", "balanced", "cadence", "async")


def test_the_record_is_written_where_asked(told: list[ScalingPlan], tmp_path: Path) -> None:
    CliRunner().invoke(app, ["bench", "scaling", "--devices", "cpu", "--json", str(tmp_path / "scaling.json")])
    assert json.loads((tmp_path / "scaling.json").read_text())["rows"][0]["samples_per_s"] == 50.0


def test_an_unknown_model_is_refused_before_anything_runs(told: list[ScalingPlan]) -> None:
    result = CliRunner().invoke(app, ["bench", "scaling", "--devices", "cpu", "--model", "resnet19"])
    assert (result.exit_code, told) == (1, [])


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names that the notebook leaves behind, run cell by cell with tiny settings and without the network."""
    folder = tmp_path_factory.mktemp("notebook")
    names: dict[str, Any] = {"__name__": "__main__"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("OUTRIDER_DATA", raising=False)
        patch.setenv("XDG_CACHE_HOME", str(folder))
        for cell in json.loads(NOTEBOOK.read_text())["cells"]:
            is_settings = "parameters" in cell["metadata"].get("tags", [])
            source = TINY if is_settings else "".join(cell["source"])
            if cell["cell_type"] == "code":
                exec(compile(source, NOTEBOOK.name, "exec"), names)
    return names


@pytest.mark.slow
def test_the_notebook_runs_every_way_that_can_run_here(notebook: dict[str, Any]) -> None:
    rows = {row.way: row for row in notebook["record"].rows}
    assert [way for way, row in rows.items() if row.samples_per_s is not None] == ["single", "fsdp", "sync"]
    assert rows["dp"].obstacle == "torch DataParallel needs two whole CUDA devices or more, got cpu, cpu"


@pytest.mark.slow
def test_the_notebook_knows_memory_and_epoch_times_of_every_rank(notebook: dict[str, Any]) -> None:
    fsdp = next(row for row in notebook["record"].rows if row.way == "fsdp")
    assert (len(fsdp.epoch_s), len(fsdp.peak_memory_bytes)) == (1, 2)


@pytest.mark.slow
def test_the_notebook_draws_and_ends_with_a_finding(notebook: dict[str, Any]) -> None:
    assert [figure["data"][0]["type"] for figure in notebook["figures"]] == ["bar", "bar"]
    assert notebook["sentences"][0].startswith("resnet20: ")


def test_the_notebook_has_no_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs")] == []
