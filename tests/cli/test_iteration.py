"""`outrider bench iteration` on real ranks: started by us, and by torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.bench.iteration.iteration_record import IterationFile, read_iterations
from outrider.cli.main import app

pytestmark = pytest.mark.slow

TINY = ["--model", "logistic", "--batch-size", "4", "--iterations", "3", "--warmup", "1", "--rounds", "1"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, IterationFile]:
    path = tmp_path_factory.mktemp("iteration") / "now.json"
    arguments = ["bench", "iteration", *TINY, "--devices", "cpu,cpu", "--policy", "sync,async", "--json", str(path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout, read_iterations(path)


def test_every_world_of_every_runtime_is_measured(measured: tuple[str, IterationFile]) -> None:
    labels = {one.model: [timing.label for timing in one.timings] for one in measured[1].models}
    worlds = ["no DDP", "1 rank", "2 ranks"]
    assert labels == {
        "logistic": worlds,
        "logistic (outrider sync)": worlds,
        "logistic (outrider async)": worlds,
    }


def test_every_rank_keeps_its_raw_samples(measured: tuple[str, IterationFile]) -> None:
    ddp, sync, _ = measured[1].models
    assert [timing.rounds for timing in ddp.timings] == [((3,),), ((3,),), ((3, 3),)]
    assert [len(timing.measurements) for timing in sync.timings] == [3, 3, 6]


def test_the_machine_and_the_tables_are_printed(measured: tuple[str, IterationFile]) -> None:
    lines = measured[0].splitlines()
    assert lines[0].startswith("torch: ")
    assert "backend:   gloo" in lines
    assert "logistic (outrider sync), batch size 4" in lines
    assert [line for line in lines if line.startswith("logistic, 2 ranks: sync is ")]


def test_ranks_that_torchrun_started_measure_the_same(tmp_path: Path) -> None:
    path = tmp_path / "now.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "outrider", "bench", "iteration", *TINY, "--json", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("logistic, batch size 4") == 1
    assert [len(one["ranks"]) for one in json.loads(path.read_text())["benchmark_results"][0]["result"]] == [1, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "resnet51"], "did you mean 'resnet50'?"),
        (["--devices", ""], "devices is empty"),
        (["--backend", "nccl", "--devices", "cpu"], "backend nccl cannot be used"),
        (["--devices", "cpu", "--json", "none/a.json"], "none/a.json cannot be written: there is no folder none"),
    ],
)
def test_what_cannot_work_is_refused_before_any_rank_starts(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "iteration", *arguments])
    assert result.exit_code == 1
    assert message in str(result.exception)
