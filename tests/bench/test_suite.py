"""Cases and their keys, options by name, records completed and read back, and a run that is really made."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.api.option_table import COMMAND_LINE_OPTIONS
from outrider.bench.suite.groups import group_runs
from outrider.bench.suite.run_case import measured
from outrider.bench.suite.runs import Case, as_block, case_from_json, read_run, read_runs, subject_from_json
from outrider.bench.suite.setting_options import parse_settings
from outrider.errors import ConfigError, DataError

TellRun = Callable[..., Path]

EVENTS = [
    {"t": 0.1, "rank": 0, "kind": "plan", "anchor": 20, "reason": "first"},
    {"t": 0.2, "rank": 0, "kind": "average end", "window": 0, "ms": 12.0},
    {"t": 0.2, "rank": 1, "kind": "average end", "window": 0, "ms": 4.0},
    {"t": 0.3, "rank": 0, "kind": "plan", "anchor": 20, "reason": "same"},
    {"t": 0.4, "rank": 0, "kind": "plan", "anchor": 31, "reason": "grown"},
    {"t": 0.5, "rank": 0, "kind": "epoch end", "waits_ms": {"average": 250.0, "data": 10.0}},
    {"t": 0.5, "rank": 1, "kind": "epoch end", "waits_ms": {"average": 50.0, "data": 20.0}},
    {"t": 0.9, "rank": 0, "kind": "epoch end", "waits_ms": {"average": 250.0, "data": 10.0}},
]
PEER_EPOCHS = [
    {
        "wait_fraction": 0.5,
        "seconds": 2.0,
        "averages": 10,
        "exposed_average_fraction": 0.1,
        "share_by_rank": [0.5, 0.5],
    },
    {
        "wait_fraction": 0.25,
        "seconds": 4.0,
        "averages": 10,
        "exposed_average_fraction": 0.1,
        "share_by_rank": [0.5, 0.5],
    },
]


# Cases


def test_the_key_is_the_same_for_the_same_content(a_case: Case) -> None:
    assert replace(a_case).key == a_case.key
    assert case_from_json(json.loads(json.dumps(as_json(a_case)))).key == a_case.key


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"mode": "ddp"}, {"epochs": 4}, {"data_name": "MNIST"}, {"settings": {"anchor": 4}}, {"depth": 32}],
    ids=str,
)
def test_any_other_content_has_another_key(a_case: Case, change: dict[str, object]) -> None:
    assert replace(a_case, **change).key != a_case.key


def test_the_key_of_a_timed_case_is_what_it_was_before_there_were_others(a_case: Case) -> None:
    assert a_case.key == "1462889211"


def test_a_case_that_is_not_timed_has_a_key_of_its_own(a_case: Case) -> None:
    assert replace(a_case, is_timed=False).key != a_case.key


def test_a_configuration_that_says_nothing_of_timing_is_of_a_timed_run(tell_run: TellRun) -> None:
    block = json.loads((tell_run() / "config.json").read_text())["benchmark"]
    assert "is_timed" not in block["case"]
    assert case_from_json(block["case"]).is_timed


def test_a_run_that_was_not_timed_is_read_back_as_such(tell_run: TellRun) -> None:
    run = read_run(tell_run(is_timed=False))
    assert run is not None
    assert not run.case.is_timed


def test_a_case_lies_under_its_model_and_mode(a_case: Case) -> None:
    assert a_case.folder == Path("lenet") / "solo-0" / f"seed-0-{a_case.key}"


def test_a_deeper_resnet_has_a_name_of_its_own(a_case: Case) -> None:
    assert replace(a_case, model="resnet20-graph", depth=32).title == "resnet32-graph"


def as_json(case: Case) -> dict[str, object]:
    from dataclasses import asdict

    return asdict(case)


# Options


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("overhead_target=0.05", {"overhead_target": 0.05}),
        ("anchor=12", {"anchor": 12}),
        ("anchor=none", {"anchor": None}),
        ("guard=off", {"guard": False}),
        ("lr_scale=auto", {"lr_scale": "auto"}),
        ("lr_scale=1.4", {"lr_scale": 1.4}),
        ("outer=nesterov", {"outer": "nesterov"}),
        ("shares=0.7,0.3", {"shares": [0.7, 0.3]}),
        ("micro_batch=8,auto", {"micro_batch": [8, "auto"]}),
        ("micro_batch=8", {"micro_batch": 8}),
        ("precision=bf16", {"precision": "bf16"}),
    ],
)
def test_an_option_gets_a_value_of_its_type(text: str, expected: dict[str, object]) -> None:
    assert parse_settings([text], num_devices=2) == expected


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("overhead", "--set takes name=value, got 'overhead'", "for example --set overhead_target=0.05"),
        ("overhed_target=0.05", "unknown option 'overhed_target'", "did you mean 'overhead_target'?"),
        ("epochs=3", "--set cannot change 'epochs': the benchmark decides it", "use --epochs"),
        ("anchor=many", "option 'anchor' takes a whole number or none, got 'many'", "write --set anchor=VALUE"),
        ("guard=perhaps", "option 'guard' takes true or false, got 'perhaps'", "write --set guard=VALUE"),
        (
            "precision=fp8",
            "option 'precision' takes fp32, bf16, fp16, auto or one per rank with commas, got 'fp8'",
            "write --set precision=VALUE",
        ),
        (
            "precision=fp16",
            "benchmarks measure fp32 and bf16, got precision=fp16",
            "peers such as torch DDP run here without loss scaling; train() takes the other precisions",
        ),
        (
            "lr_scale=-1",
            "lr_scale must be a number > 0, got -1.0",
            "leave lr_scale out for its default",
        ),
    ],
)
def test_a_wrong_option_is_told_before_anything_runs(text: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings([text], num_devices=2)
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_what_the_benchmark_decides_cannot_be_set() -> None:
    assert {"epochs", "seed", "policy", "run_dir", "dataset", "evaluate", "resume"}.isdisjoint(COMMAND_LINE_OPTIONS)


# Records


def test_a_record_gets_idle_time_by_rank_and_cause() -> None:
    found = measured({"events": EVENTS}, [])["idle_s_by_rank"]
    assert found[0]["average"] == pytest.approx(0.5)
    assert found[1]["data"] == pytest.approx(0.02)


def test_an_average_lasts_as_long_as_for_the_rank_that_waited_for_nobody() -> None:
    assert measured({"events": EVENTS}, [])["average_ms"] == 4.0


def test_the_anchors_are_those_it_was_changed_to() -> None:
    assert measured({"events": EVENTS}, [])["anchors"] == [20, 31]


def test_of_a_peer_without_timeline_the_epochs_tell() -> None:
    found = measured({}, PEER_EPOCHS)
    assert found["idle_s_by_rank"] == [{"average": 2.0}, {"average": 2.0}]
    assert found["average_ms"] == pytest.approx(0.6 * 1e3 / 20)


def test_what_a_peer_on_a_gpu_cannot_tell_stays_unknown() -> None:
    unknown = [epoch | {"wait_fraction": None, "exposed_average_fraction": None} for epoch in PEER_EPOCHS]
    found = measured({}, unknown)
    assert (found["idle_s_by_rank"], found["average_ms"]) == ([], None)


def test_a_run_is_read_back_as_it_was_told(tell_run: TellRun, a_case: Case) -> None:
    run = read_run(tell_run("cpu-async"))
    assert run is not None
    assert run.case == replace(a_case, mode="cpu-async")
    assert (run.is_finished, len(run.epochs), run.epochs[-1].eval) == (True, 3, 0.98)


def test_a_folder_of_another_kind_is_no_run_of_the_suite(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert read_run(tmp_path) is None


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_runs(tmp_path / "runs")
    assert caught.value.message == f"there is no folder {tmp_path / 'runs'}"
    assert caught.value.hint == "run `outrider bench sweep` first, or pass the folder of its --output"


def test_a_truncated_record_is_named_with_the_place(tell_run: TellRun, tmp_path: Path) -> None:
    path = tell_run() / "record.json"
    path.write_text('{"status": "finis')
    with pytest.raises(DataError) as caught:
        read_runs(tmp_path / "runs")
    assert caught.value.message == f"{path} is damaged: unterminated string starting at at line 1, column 12"
    assert caught.value.hint == "remove its folder and run the sweep again; what is finished is skipped"


def test_a_record_without_a_field_is_named_with_the_field(tell_run: TellRun, tmp_path: Path) -> None:
    path = tell_run(record_fields={"epochs": [{"epoch": 0}]}) / "record.json"
    with pytest.raises(DataError) as caught:
        read_runs(tmp_path / "runs")
    assert caught.value.message == f"{path} is damaged: 'samples' is missing"


def test_a_record_that_is_no_object_is_named(tell_run: TellRun, tmp_path: Path) -> None:
    path = tell_run() / "record.json"
    path.write_text("[1, 2]")
    with pytest.raises(DataError) as caught:
        read_runs(tmp_path / "runs")
    assert caught.value.message == f"{path} is damaged: no JSON object but list"


def test_the_subject_survives_the_file(tell_run: TellRun) -> None:
    config = json.loads((tell_run() / "config.json").read_text())
    block = config["benchmark"]
    assert as_block(case_from_json(block["case"]), subject_from_json(block["subject"])) == as_block(
        case_from_json(block["case"]), subject_from_json(block["subject"])
    )
    assert block["key"] == case_from_json(block["case"]).key


# Groups


def test_modes_are_shown_from_solo_to_the_boldest_and_peers_last(tell_run: TellRun, tmp_path: Path) -> None:
    for mode in ("cpu-async", "ddp", "cpu-sync", "independent", "solo-1", "solo-0", "cpu-cadence"):
        tell_run(mode)
    [group] = group_runs(read_runs(tmp_path / "runs"))
    assert list(group.by_mode) == ["solo-0", "solo-1", "independent", "cpu-sync", "cpu-cadence", "cpu-async", "ddp"]


def test_a_run_that_was_reproduced_counts_once(tell_run: TellRun, tmp_path: Path) -> None:
    folder = tell_run()
    (folder.parent / "again").mkdir()
    for name in ("config.json", "record.json"):
        (folder.parent / "again" / name).write_text((folder / name).read_text())
    [group] = group_runs(read_runs(tmp_path / "runs"))
    assert [run.folder for run in group.by_mode["solo-0"]] == [folder]


def test_other_conditions_make_another_group_that_says_what_differs(tell_run: TellRun, tmp_path: Path) -> None:
    tell_run()
    tell_run(epochs=9, settings={"anchor": 4})
    names = [group.name for group in group_runs(read_runs(tmp_path / "runs"))]
    assert names == ["lenet (3 epochs, with {})", 'lenet (9 epochs, with {"anchor": 4})']


def test_timed_runs_join_the_longest_untimed_ones(tell_run: TellRun, tmp_path: Path) -> None:
    timed, untimed = tell_run(epochs=3), tell_run(epochs=200, is_timed=False)
    tell_run(epochs=9, is_timed=False)
    groups = {group.name: group for group in group_runs(read_runs(tmp_path / "runs"))}
    assert list(groups) == ["lenet (200 epochs, timed apart)", "lenet (9 epochs, not timed)"]
    both = groups["lenet (200 epochs, timed apart)"]
    assert ([run.folder for run in both.timed("solo-0")], [run.folder for run in both.judged("solo-0")]) == (
        [timed],
        [untimed],
    )


def test_of_several_lengths_the_one_joins_at_which_most_modes_were_timed(tell_run: TellRun, tmp_path: Path) -> None:
    tell_run("solo-0", epochs=200, is_timed=False)
    tell_run("solo-0", epochs=200)
    tell_run("solo-0", epochs=3)
    tell_run("cpu-async", epochs=3)
    names = [(group.name, group.timed_epochs) for group in group_runs(read_runs(tmp_path / "runs"))]
    assert names == [("lenet (timed apart)", 3), ("lenet (timed)", 200)]


def test_timed_runs_that_are_longer_stay_apart(tell_run: TellRun, tmp_path: Path) -> None:
    tell_run(epochs=9)
    tell_run(epochs=3, is_timed=False)
    names = [group.name for group in group_runs(read_runs(tmp_path / "runs"))]
    assert names == ["lenet (3 epochs, not timed)", "lenet (9 epochs, timed)"]


def test_untimed_runs_under_other_conditions_stay_apart(tell_run: TellRun, tmp_path: Path) -> None:
    tell_run(batch_size=64)
    tell_run(batch_size=32, is_timed=False)
    names = [group.name for group in group_runs(read_runs(tmp_path / "runs"))]
    assert names == ["lenet (batch 32, not timed)", "lenet (batch 64, timed)"]


def test_untimed_runs_that_are_not_finished_take_nothing_in(tell_run: TellRun, tmp_path: Path) -> None:
    tell_run(epochs=3)
    tell_run(epochs=200, is_timed=False, status="closed")
    groups = group_runs(read_runs(tmp_path / "runs"))
    assert [(group.name, list(group.by_mode)) for group in groups] == [
        ("lenet (200 epochs, not timed)", []),
        ("lenet (3 epochs, timed)", ["solo-0"]),
    ]
