"""What an iteration benchmark measures, how it is put together, and who else can read it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import outrider
from outrider.bench.iteration.iteration_measure import IterationMeasurement, adopted_seat, collect
from outrider.bench.iteration.iteration_plan import IterationPlan, first_at, runtimes, world_sizes
from outrider.bench.iteration.iteration_record import ModelTimings, Timing, document, read_iterations
from outrider.bench.iteration.iteration_text import overhead, overheads, render
from outrider.bench.iteration.loops import DeviceStopwatch
from outrider.bench.iteration.machine_state import ProcessorTime, check_same, others_part, read_topology
from outrider.bench.iteration.models import NAMES, workload_named
from outrider.errors import ConfigError, DeviceError
from outrider.machine.devices import parse_devices
from outrider.world.environment import Environment

PLAN = IterationPlan(models=("lenet",), devices=parse_devices("cpu,cpu"), iterations=2, rounds=2)
MEASURED = [
    IterationMeasurement(
        model="lenet", world_size=1, times={"no DDP": [[1.0, 1.1]], "ddp": [[1.2, 1.3]], "sync": [[1.2, 1.4]]}
    ),
    IterationMeasurement(
        model="lenet", world_size=2, times={"ddp": [[2.0, 2.1], [2.2, 2.3]], "sync": [[2.1, 2.1], [2.2, 2.3]]}
    ),
]


@pytest.fixture
def models() -> list[ModelTimings]:
    return collect(PLAN, MEASURED * 2)


def as_torch_reads(before: dict[str, Any], after: dict[str, Any]) -> Iterator[tuple[str, int, int, float, float]]:
    """Model, number of ranks, percentile, seconds and difference, as PyTorch's own diff takes them from two files."""
    assert {"pytorch_version", "cuda_version", "distributed_backend", "bucket_size"} <= before.keys() & after.keys()
    for mine, theirs in zip(before["benchmark_results"], after["benchmark_results"], strict=True):
        assert (mine["model"], mine["batch_size"]) == (theirs["model"], theirs["batch_size"])
        for old, new in list(zip(mine["result"], theirs["result"], strict=True))[1:]:
            assert len(old["ranks"]) == len(new["ranks"])
            for percent in (75, 95):
                was, now = np.percentile(old["measurements"], percent), np.percentile(new["measurements"], percent)
                yield mine["model"], len(new["ranks"]), percent, float(now), float(100 * (was - now) / was)


def written(models: list[ModelTimings]) -> dict[str, Any]:
    content = document(
        pytorch_version="2.13.0",
        cuda_version=None,
        distributed_backend="gloo",
        bucket_size=25,
        models=models,
        own={"environment": {"cpu": "Neoverse"}},
    )
    return dict(json.loads(json.dumps(content)))


def test_worlds_double_up_to_all_devices() -> None:
    assert [world_sizes(count) for count in (1, 2, 4, 6)] == [(1,), (1, 2), (1, 2, 4), (1, 2, 4, 6)]


def test_no_ranks_cannot_be_measured() -> None:
    with pytest.raises(ConfigError) as refusal:
        world_sizes(0)
    assert refusal.value.message == "an iteration needs at least 1 rank, got 0"
    assert refusal.value.hint == "pass --devices cpu"


def test_only_one_rank_also_runs_without_ddp() -> None:
    assert runtimes(PLAN, 1) == ("no DDP", "ddp", "sync")
    assert runtimes(PLAN, 2) == ("ddp", "sync")


def test_every_block_begins_with_another_runtime() -> None:
    assert [first_at(block, ["a", "b"]) for block in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]


def test_policies_with_windows_run_several_of_them() -> None:
    assert [PLAN.iterations_of(name) for name in ("ddp", "sync", "cadence")] == [2, 2, 60]


@pytest.mark.parametrize(
    ("setting", "message", "hint"),
    [
        ({"models": ()}, "no model was named", "pass --model resnet50"),
        ({"iterations": 0}, "iterations must be a whole number >= 1, got 0", "pass --iterations 1"),
        ({"batch_size": 0}, "batch_size must be a whole number >= 1, got 0", "pass --batch-size 1"),
        ({"warmup": -1}, "warmup must be a whole number >= 0, got -1", "pass --warmup 0"),
        ({"policies": ("sinc",)}, "unknown policy 'sinc'", "did you mean 'sync'?"),
        ({"backend": "mpi"}, "unknown backend 'mpi'", "choose one of auto, cpu, gloo, nccl"),
        ({"precision": "fp16"}, "unknown precision 'fp16'", "did you mean 'bf16'?"),
    ],
)
def test_settings_that_cannot_work_are_refused(setting: dict[str, Any], message: str, hint: str) -> None:
    settings = {"models": ("lenet",), "devices": parse_devices("cpu")} | setting
    with pytest.raises(ConfigError) as refusal:
        IterationPlan(**settings)
    assert (refusal.value.message, refusal.value.hint) == (message, hint)


def test_an_unknown_model_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError) as refusal:
        workload_named("resnet51")
    assert refusal.value.message == f"no model is called 'resnet51', known are: {', '.join(NAMES)}"
    assert refusal.value.hint == "did you mean 'resnet50'?"


def test_a_model_of_the_users_is_imported_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_of_users.py").write_text("from torch import nn\ndef make(): return nn.Flatten()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    assert isinstance(workload_named("mine_of_users:make").model(), nn.Flatten)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no.such:make", "model 'no.such:make' cannot be imported: No module named 'no'"),
        ("json:make", "model 'json:make': json has no 'make'"),
        ("json:__name__", "model 'json:__name__' is no function, it is a str"),
    ],
)
def test_a_model_that_cannot_be_imported_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        workload_named(name)
    assert refusal.value.message == message


@pytest.mark.parametrize("name", ["lenet", "conv-ae", "char-rnn", "resnet20", "resnet18"])
def test_every_kind_of_model_gets_data_that_it_takes(name: str) -> None:
    workload = workload_named(name)
    loss = workload.step(workload.model(), workload.batch(2, 32, torch.device("cpu")))
    assert loss.isfinite()


def test_what_comes_after_the_last_iteration_belongs_to_it() -> None:
    stopwatch = DeviceStopwatch(torch.device("cpu"))
    stopwatch.start()
    stopwatch.lap()
    stopwatch.lap()
    first, last = stopwatch.times_s
    stopwatch.extend_last()
    assert stopwatch.times_s[0] == first
    assert stopwatch.times_s[1] > last


def test_a_rank_whose_samples_others_took_has_no_iterations() -> None:
    stopwatch = DeviceStopwatch(torch.device("cpu"))
    stopwatch.start()
    stopwatch.extend_last()
    assert stopwatch.times_s == []


def test_all_rounds_of_a_runtime_are_one_list_with_the_run_without_ddp_first(models: list[ModelTimings]) -> None:
    ddp, ours = models
    assert (ddp.model, ours.model) == ("lenet", "lenet (outrider sync)")
    assert [timing.label for timing in ours.timings] == ["no DDP", "1 rank", "2 ranks"]
    assert ddp.timings[2].measurements == (2.0, 2.1, 2.2, 2.3) * 2
    assert ddp.timings[2].rounds == ((2, 2), (2, 2))


def test_iterations_are_the_mean_of_ranks_that_step_together(models: list[ModelTimings]) -> None:
    assert models[0].timings[2].iterations() == [pytest.approx([2.1, 2.2])] * 2


def test_ranks_that_took_different_numbers_of_steps_keep_their_own() -> None:
    timing = Timing(num_ranks=2, is_plain=False, measurements=(1.0, 2.0, 9.0), rounds=((2, 1),))
    assert timing.iterations() == [[1.0, 2.0, 9.0]]


def test_a_rank_that_took_no_step_does_not_hide_the_others() -> None:
    timing = Timing(num_ranks=2, is_plain=False, measurements=(1.0, 1.2), rounds=((2, 0),))
    assert timing.iterations() == [[1.0, 1.2]]


def test_the_file_is_what_pytorchs_own_diff_reads(models: list[ModelTimings]) -> None:
    read = list(as_torch_reads(written(models), written(models)))
    assert [row[:3] for row in read if row[0] == "lenet"] == [
        ("lenet", 1, 75),
        ("lenet", 1, 95),
        ("lenet", 2, 75),
        ("lenet", 2, 95),
    ]
    assert read[2][3:] == (pytest.approx(2.225), 0.0)


def pytorch_file(names: Sequence[str]) -> dict[str, Any]:
    """As PyTorch's benchmark.py writes it: the models in its order, each without DDP first."""
    result = [{"ranks": list(range(size)), "measurements": [1.0, 1.2]} for size in (1, 1, 2)]
    entries = [{"model": name, "batch_size": 32, "result": result} for name in names]
    top = {"pytorch_version": "2.13.0", "cuda_version": None, "distributed_backend": "gloo", "bucket_size": 25}
    return {**top, "benchmark_results": entries}


def paired(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """The models that PyTorch's diff.py compares: entries at the same place, with the same name and batch size."""
    pairs = zip(theirs["benchmark_results"], ours["benchmark_results"], strict=False)
    return [a["model"] for a, b in pairs if (a["model"], a["batch_size"]) == (b["model"], b["batch_size"])]


def test_pytorchs_own_diff_pairs_all_models_of_its_file_with_ours() -> None:
    names = ("resnet50", "resnet101", "resnext50_32x4d", "resnext101_32x8d")
    plan = replace(PLAN, models=("lenet", *reversed(names)), policies=("sync",))
    measured = [replace(one, model=name) for name in plan.models for one in MEASURED]
    ours = written(collect(plan, measured))
    assert paired(pytorch_file(names), ours) == list(names)
    assert [entry["model"] for entry in ours["benchmark_results"]][4:6] == ["lenet", "lenet (outrider sync)"]


def test_what_pytorchs_own_diff_prints_of_our_key_is_short(models: list[ModelTimings]) -> None:
    assert written(models)["outrider"] == outrider.__version__


def test_a_file_with_our_keys_at_the_top_is_read_too(models: list[ModelTimings], tmp_path: Path) -> None:
    content = written(models)
    content["outrider"] = content["benchmark_results"][0].pop("outrider")
    (tmp_path / "a.json").write_text(json.dumps(content))
    file = read_iterations(tmp_path / "a.json")
    assert (file.models, file.machine) == (tuple(models), {"cpu": "Neoverse"})


def test_our_percentiles_are_the_ones_that_pytorchs_diff_computes(models: list[ModelTimings]) -> None:
    ours = [timing.percentile(percent) for timing in models[0].timings[1:] for percent in (75, 95)]
    assert ours == pytest.approx([row[3] for row in as_torch_reads(written(models), written(models))][:4])


def test_what_is_written_is_read_again(models: list[ModelTimings], tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(written(models)))
    file = read_iterations(tmp_path / "a.json")
    assert file.models == tuple(models)
    assert file.machine == {"cpu": "Neoverse"}


def test_a_table_has_four_percentiles_of_every_world(models: list[ModelTimings]) -> None:
    lines = render(models[:1]).splitlines()
    assert lines[0] == "lenet, batch size 32"
    assert lines[-1].split() == ["2", "ranks", "2.1500", "15", "2.2250", "14", "2.3000", "14", "2.3000", "14", "15"]


def test_overhead_is_the_median_over_pairs_of_blocks(models: list[ModelTimings]) -> None:
    found = overhead(models[1].timings[2], models[0].timings[2])
    assert found.part == pytest.approx(2.175 / 2.15 - 1)
    assert found.against("torch DDP") == (
        "1.2 % slower per iteration than torch DDP (2 pairs of interleaved blocks, 95 % interval +1.2 % to +1.2 %)"
    )


def test_overhead_is_told_for_every_world_with_ddp(models: list[ModelTimings]) -> None:
    first, second = overheads(PLAN, models)
    assert first.startswith("lenet, 1 rank: sync is 4.0 % slower per iteration than torch DDP")
    assert second.startswith("lenet, 2 ranks: sync is 1.2 % slower per iteration than torch DDP")


def test_others_are_what_was_busy_and_not_ours() -> None:
    before = ProcessorTime(busy_s=100.0, all_s=400.0, own_s=10.0)
    after = ProcessorTime(busy_s=107.0, all_s=420.0, own_s=15.0)
    assert others_part(before, after) == pytest.approx(0.1)


def test_where_no_time_passed_nothing_is_known_of_others() -> None:
    now = ProcessorTime.now()
    assert others_part(now, now) is None


def test_machines_that_are_wired_differently_are_not_mixed() -> None:
    with pytest.raises(DeviceError) as refusal:
        check_same(["NV4", "NV4", "PHB"], ["a", "a", "b"])
    assert refusal.value.message == "the GPUs of b are wired differently from those of a"
    assert refusal.value.hint == "compare `nvidia-smi topo -m` on both; measure machines of one kind at a time"


def test_machines_that_are_wired_alike_may_be_mixed() -> None:
    check_same(["NV4", "NV4"], ["a", "b"])
    check_same([None, None], ["a", "b"])


def test_a_rank_that_torchrun_started_sits_in_every_world_of_the_first_ranks() -> None:
    third = Environment(
        rank=2, local_rank=0, world_size=4, local_world_size=2, master_addr="a", master_port=1, attempt=1
    )
    seat = adopted_seat(PLAN, third, range(3), number=7).environment
    assert (seat.rank, seat.world_size, seat.local_world_size) == (2, 3, 1)
    assert (seat.has_store, seat.attempt) == (True, 1_000_014)


def test_a_rank_that_is_not_measured_sits_in_a_world_of_the_others() -> None:
    last = Environment(rank=3, local_rank=1, world_size=4, local_world_size=2, master_addr="a", master_port=1)
    seat = adopted_seat(PLAN, last, range(1, 4), number=7).environment
    assert (seat.rank, seat.world_size, seat.local_world_size, seat.attempt) == (2, 3, 2, 15)


def test_the_topology_is_kept_without_the_marks_of_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '\\033[4mGPU0\\tCPU Affinity\\033[0m\\nGPU0\\t X \\t0-15\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert read_topology() == "GPU0\tCPU Affinity\nGPU0\t X \t0-15"
