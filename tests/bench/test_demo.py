"""What the demo and the overhead benchmark say of their runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from outrider.bench import overhead
from outrider.bench.demo_tasks import (
    Demo,
    conditions,
    crowding,
    default_output,
    demo_modes,
    document,
    finished_modes,
    rank_words,
    render,
    run_demo,
)
from outrider.bench.modes import ModeResult
from outrider.bench.overhead import OverheadSample, make_plan
from outrider.bench.tables import number, text_table
from outrider.bench.tasks import Task, demo_task
from outrider.errors import ConfigError
from outrider.machine.devices import parse_devices
from outrider.record.epoch_metrics import EpochMetrics
from outrider.world.messages import Message

DEVICES = parse_devices("cpu,cpu@0.4")
EPOCH = EpochMetrics(
    epoch=0,
    loss=0.5,
    eval=0.985,
    samples=3_000,
    seconds=2.0,
    samples_per_s=1_500.0,
    share_by_rank=(0.75, 0.25),
    learning_rate=1e-3,
    averages=5,
    anchor=None,
    drift=None,
    exposed_average_fraction=0.012345678,
    wait_fraction=0.25,
    eval_s=0.1,
    train_s=2.0,
    wall_s=2.1,
    is_complete=True,
)
SLOWER = replace(EPOCH, samples_per_s=500.0, seconds=6.0, train_s=6.0)
UNTARGETED = replace(EPOCH, eval=0.5, exposed_average_fraction=float("nan"))
KEYS = ("samples_per_s", "efficiency", "speedup", "eval", "time_to_target_s", "averages", "exposed_average_fraction")


class Silent:
    """A watcher that only counts."""

    def __init__(self) -> None:
        self.begun: list[str] = []

    def begin(self, mode: str, *, devices: Sequence[str], position: int, num_modes: int) -> None:
        self.begun.append(mode)

    def saw(self, message: Message) -> None: ...

    def end(self, result: ModeResult) -> None: ...


@pytest.fixture(scope="module")
def task() -> Task:
    return demo_task(epochs=1, num_train=20, num_test=10)


def demo_of(task: Task) -> Demo:
    epochs = {"solo-1": SLOWER, "ddp": UNTARGETED}
    results = {
        mode: ModeResult(mode=mode, epochs=(epochs.get(mode, EPOCH),), run_dir=Path("runs/demo") / mode)
        for mode in demo_modes(2)
    }
    return Demo(task=task, devices=DEVICES, output=Path("runs/demo"), results=results)


def test_modes_are_the_solos_then_ddp_then_the_policies() -> None:
    policies = ("cpu-auto", "cpu-sync", "cpu-balanced", "cpu-cadence", "cpu-async")
    assert demo_modes(2) == ("solo-0", "solo-1", "ddp", *policies)


def test_the_document_has_the_modes_and_keys_that_programs_read(task: Task) -> None:
    told = document(demo_of(task))
    assert list(told) == ["schema_version", "devices", "ideal_samples_per_s", "modes"]
    policies = ["cpu-auto", "cpu-sync", "cpu-balanced", "cpu-cadence", "cpu-async"]
    assert list(told["modes"]) == ["solo-0", "ddp", *policies]
    assert {tuple(mode) for mode in told["modes"].values()} == {KEYS}


def test_the_document_compares_with_the_solos_and_knows_what_it_does_not_know(task: Task) -> None:
    told = document(demo_of(task))
    assert (told["schema_version"], told["devices"], told["ideal_samples_per_s"]) == (1, ["cpu", "cpu@0.4"], 2000.0)
    assert told["modes"]["cpu-async"] == dict(zip(KEYS, (1500.0, 0.75, 1.0, 0.985, 2.0, 5, 0.012346), strict=True))
    assert told["modes"]["ddp"] == dict(zip(KEYS, (1500.0, 0.75, 1.0, 0.5, None, 5, None), strict=True))


@pytest.mark.parametrize("epochs", [1, 8])
def test_the_result_fits_80_columns_and_names_the_stand_in(task: Task, epochs: int) -> None:
    lines = render(demo_of(replace(task, epochs=epochs))).splitlines()
    assert max(map(len, lines)) <= 80
    assert "glyphs (stand-in)" in render(demo_of(task))


def test_the_table_has_a_line_per_mode(task: Task) -> None:
    lines = render(demo_of(task)).splitlines()
    assert lines[0] == "mode          samples/s  efficiency  speed-up  accuracy  to 98%  waiting"
    assert lines[3] == "solo-1              500           -     0.33x     98.5%   6.0 s      25%"
    assert lines[4] == "ddp               1,500        0.75     1.00x     50.0%       -      25%"
    assert lines[-1] == "runs: runs/demo/<mode>"


@pytest.mark.parametrize("mode", ["cpu-auto", "cpu-balanced"])
def test_a_device_that_rested_is_named(task: Task, mode: str) -> None:
    demo = demo_of(task)
    assert "rested" not in render(demo)
    epochs = (replace(EPOCH, share_by_rank=(0.9, 0.1)), replace(EPOCH, share_by_rank=(0.99, 0.01)))
    demo.results[mode] = replace(demo.results[mode], epochs=epochs)
    (line,) = [line for line in render(demo).splitlines() if "rested" in line]
    assert line == f"{mode}: cpu@0.4 rested, since sharing such short steps with it is slower"
    assert len(line) <= 80


def test_the_conditions_fit_80_columns(task: Task) -> None:
    assert conditions(task).splitlines() == [
        "wide lenet on glyphs (stand-in): 1 epoch of 20 samples,",
        "batch 128 per rank (in auto and balanced: of all ranks),",
        "the same seed and order in every mode; auto is the default policy",
    ]


def test_a_rank_is_described_with_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.bench.demo_tasks.num_cores", lambda: 4)
    assert rank_words(DEVICES) == "each device is a CPU rank with 2 threads"
    assert rank_words(parse_devices("cuda:0,cpu")) == "each device is a rank, a CPU rank has 3 threads"


def test_ranks_that_share_a_core_are_told() -> None:
    assert crowding(DEVICES, 1) == "2 CPU ranks share 1 core: expect less than the ideal"
    assert crowding(DEVICES, 2) is None


def test_a_folder_with_runs_is_not_written_over(task: Task, tmp_path: Path) -> None:
    (tmp_path / "ddp").mkdir()
    watcher = Silent()
    with pytest.raises(ConfigError) as caught:
        run_demo(task, devices=DEVICES, output=tmp_path, watcher=watcher)
    assert caught.value.message == f"{tmp_path / 'ddp'} is there already"
    assert caught.value.hint == "pass --output with a folder of its own"
    assert watcher.begun == []


def test_runs_with_a_model_are_finished(tmp_path: Path) -> None:
    (tmp_path / "solo-0").mkdir()
    (tmp_path / "ddp").mkdir()
    (tmp_path / "solo-0" / "model.safetensors").touch()
    assert finished_modes(tmp_path, 2) == ["solo-0"]


def test_the_folder_carries_the_time() -> None:
    assert default_output(datetime(2026, 3, 4, 5, 6, 7)) == Path("runs/demo-20260304-050607")


def test_a_table_aligns_names_left_and_numbers_right() -> None:
    assert text_table(("model", "mode", "n"), [("mlp", "sync", "12"), ("lenet", "ddp", "3")], num_names=2) == (
        "model  mode   n\n-----  ----  --\nmlp    sync  12\nlenet  ddp    3"
    )


def test_an_unknown_number_is_a_dash() -> None:
    assert (number(None, ".1f"), number(1.25, ".1f")) == ("-", "1.2")


MEASURED = OverheadSample(
    model="mlp",
    speeds={"independent": [100.0, 200.0, 50.0], "async": [96.0, 180.0, 49.0], "ddp": [50.0, 120.0, 20.0]},
)


def test_ratios_are_taken_within_a_round() -> None:
    assert MEASURED.ratios("async") == [0.96, 0.9, 0.98]


def test_the_overhead_table_shows_median_range_and_target() -> None:
    assert overhead.render([MEASURED]).splitlines() == [
        "model  mode         samples/s  ratio           range       target",
        "-----  -----------  ---------  -----  --------------  -----------",
        "mlp    independent        100  1.000  1.000 to 1.000            -",
        "mlp    async               96  0.960  0.900 to 0.980  >= 0.95 met",
        "mlp    ddp                 50  0.500  0.400 to 0.600            -",
    ]


def test_the_overhead_document_keeps_raw_values(tmp_path: Path) -> None:
    plan = make_plan(
        devices="cpu,cpu@0.4", models="mlp", modes="independent,async", rounds=3, epochs=2, output=tmp_path
    )
    told = overhead.document(plan, [MEASURED])["models"]["mlp"]["async"]
    assert told == {
        "samples_per_s": [96.0, 180.0, 49.0],
        "ratios": [0.96, 0.9, 0.98],
        "ratio": 0.96,
        "target": 0.95,
    }


@pytest.mark.parametrize(
    ("changed", "message", "hint"),
    [
        (
            {"modes": "async,ddp"},
            "modes must have 'independent' among them, got async, ddp",
            "the others are measured against it",
        ),
        ({"epochs": 1}, "epochs must be >= 2, got 1", "the first is warm-up and not counted"),
        ({"rounds": 0}, "rounds must be >= 1, got 0", "3 rounds show the spread"),
        ({"models": "lenett"}, "no model is called 'lenett', known are: mlp, lenet", "did you mean 'lenet'?"),
    ],
)
def test_a_plan_that_cannot_be_measured_is_refused(changed: dict[str, str | int], message: str, hint: str) -> None:
    options = {"devices": "cpu", "models": "mlp", "modes": "independent", "rounds": 1, "epochs": 2, "output": None}
    with pytest.raises(ConfigError) as caught:
        make_plan(**{**options, **changed})  # type: ignore[arg-type]
    assert (caught.value.message, caught.value.hint) == (message, hint)
