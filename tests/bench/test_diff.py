"""What a diff of two iteration benchmarks compares, says and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.bench.diff.compare import Comparison, compare, parse_percent
from outrider.bench.diff.diff_report import document, render, render_markdown, write_diff_page
from outrider.bench.iteration.iteration_record import IterationFile, percentile, read_iterations
from outrider.errors import ConfigError, DataError

HINT = "pass a file written by `outrider bench iteration --json`, or by PyTorch's benchmarks/distributed/ddp"
QUICK = [0.100, 0.101, 0.102, 0.103, 0.104, 0.105, 0.106, 0.107, 0.108, 0.109]
SLOW = [1.1 * time_s for time_s in QUICK]


def torch_file(measurements: list[float], *, model: str = "resnet50", batch_size: int = 32) -> dict[str, Any]:
    """As PyTorch's own benchmark writes it: nothing but its keys, the run without DDP first."""
    return {
        "pytorch_version": "2.11.0",
        "cuda_version": "13.0",
        "distributed_backend": "nccl",
        "bucket_size": 25,
        "benchmark_results": [
            {
                "model": model,
                "batch_size": batch_size,
                "result": [
                    {"ranks": [0], "measurements": QUICK},
                    {"ranks": [0, 1], "measurements": measurements * 2},
                ],
            }
        ],
    }


def write(path: Path, content: dict[str, Any]) -> IterationFile:
    path.write_text(json.dumps(content))
    return read_iterations(path)


@pytest.fixture
def slower(tmp_path: Path) -> Comparison:
    return compare(write(tmp_path / "a.json", torch_file(QUICK)), write(tmp_path / "b.json", torch_file(SLOW)))


def test_a_row_has_the_percentiles_of_all_measurements_and_torchs_sign(slower: Comparison) -> None:
    plain, two_ranks = slower.rows
    assert (plain.label, two_ranks.label) == ("no DDP", "2 ranks")
    assert two_ranks.change(75).test_s == pytest.approx(1.1 * percentile(QUICK * 2, 75))
    assert two_ranks.change(75).faster_percent == pytest.approx(-10.0)


def test_percentiles_lie_between_the_two_nearest_values() -> None:
    assert percentile([4.0, 1.0, 2.0, 3.0], 75) == 3.25
    assert percentile([5.0], 95) == 5.0


def test_a_slowed_build_is_called_slower_with_its_significance(slower: Comparison) -> None:
    row = slower.rows[1]
    assert (row.verdict, row.test_of_ranks.method) == ("slower", "exact")
    assert row.p_value == pytest.approx(4 / 184_756)
    assert "slower (p < 0.001, in 100 % of pairs, large effect)" in render(slower)


def test_equal_measurements_are_no_difference(slower: Comparison) -> None:
    assert slower.rows[0].verdict == "no difference detected"
    assert "no difference detected (p = 1.000)" in render(slower)


def test_ranks_of_one_iteration_count_once(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", torch_file(QUICK))
    (iterations,) = file.models[0].timings[1].iterations()
    assert iterations == pytest.approx(QUICK)


def test_only_a_difference_beyond_chance_and_beyond_the_limit_fails(slower: Comparison) -> None:
    assert [row.name for row in slower.slower_than(3)] == ["resnet50, 2 ranks"]
    assert slower.slower_than(20) == []


def test_models_are_matched_by_name_and_not_by_position(tmp_path: Path) -> None:
    mine = torch_file(QUICK)
    theirs = torch_file(QUICK, model="resnet101")
    theirs["benchmark_results"] += mine["benchmark_results"]
    comparison = compare(write(tmp_path / "a.json", mine), write(tmp_path / "b.json", theirs))
    assert {row.model for row in comparison.rows} == {"resnet50"}
    assert f"resnet101 is in {tmp_path / 'b.json'} only" in comparison.warnings


def test_a_run_without_ddp_that_several_runtimes_share_is_compared_once(tmp_path: Path) -> None:
    mine = torch_file(QUICK)
    mine["benchmark_results"] += torch_file(SLOW, model="resnet50 (outrider sync)")["benchmark_results"]
    comparison = compare(write(tmp_path / "a.json", mine), write(tmp_path / "b.json", mine))
    assert [row.name for row in comparison.rows] == [
        "resnet50, no DDP",
        "resnet50, 2 ranks",
        "resnet50 (outrider sync), 2 ranks",
    ]


def test_other_batch_sizes_are_warned_of_and_left_out(tmp_path: Path) -> None:
    mine, theirs = torch_file(QUICK), torch_file(QUICK, batch_size=64)
    theirs["benchmark_results"] += torch_file(QUICK, model="lenet")["benchmark_results"]
    mine["benchmark_results"] += torch_file(QUICK, model="lenet")["benchmark_results"]
    comparison = compare(write(tmp_path / "a.json", mine), write(tmp_path / "b.json", theirs))
    assert {row.model for row in comparison.rows} == {"lenet"}
    assert "resnet50 has batch size 32 against 64: not compared" in comparison.warnings


def test_other_iteration_counts_are_warned_of(tmp_path: Path) -> None:
    comparison = compare(
        write(tmp_path / "a.json", torch_file(QUICK)), write(tmp_path / "b.json", torch_file(QUICK[:5]))
    )
    expected = "resnet50, 2 ranks: 20 measurements against 10; the test allows for it, high percentiles do not"
    assert expected in comparison.warnings


def test_other_machines_are_warned_of(tmp_path: Path) -> None:
    mine, theirs = torch_file(QUICK), torch_file(QUICK)
    mine["outrider"] = {"environment": {"cpu": "Neoverse", "gpus": []}}
    theirs["outrider"] = {"environment": {"cpu": "Neoverse", "gpus": ["V100"]}}
    comparison = compare(write(tmp_path / "a.json", mine), write(tmp_path / "b.json", theirs))
    assert "machines differ: gpus none against V100" in comparison.warnings


def busy(content: dict[str, Any], others_part: float, device: str) -> dict[str, Any]:
    own = {"settings": {"devices": [device]}, "environment": {"cpu": "Neoverse", "others_part": others_part}}
    return content | {"outrider": own}


def test_no_difference_is_called_where_cpu_ranks_shared_their_cores(tmp_path: Path) -> None:
    comparison = compare(
        write(tmp_path / "a.json", busy(torch_file(QUICK), 0.02, "cpu")),
        write(tmp_path / "b.json", busy(torch_file(SLOW), 0.37, "cpu")),
    )
    assert [row.verdict for row in comparison.rows] == ["no difference detected", "not comparable"]
    assert comparison.slower_than(3) == []
    share = f"other programs used 37% of the processor while {tmp_path / 'b.json'} was made"
    assert f"{share}: no difference is called" in comparison.warnings
    assert comparison.different_settings == ()


def test_gpus_are_compared_whatever_else_the_host_does(tmp_path: Path) -> None:
    comparison = compare(
        write(tmp_path / "a.json", busy(torch_file(QUICK), 0.02, "cuda:0")),
        write(tmp_path / "b.json", busy(torch_file(SLOW), 0.37, "cuda:0")),
    )
    assert comparison.rows[1].verdict == "slower"


def test_a_machine_that_is_not_told_is_warned_of(slower: Comparison) -> None:
    expected = f"the machine of {slower.baseline} and of {slower.test} is not known"
    assert slower.warnings[0] == f"{expected}: the difference may be the machine's"


def test_a_world_on_one_side_only_is_warned_of(tmp_path: Path) -> None:
    theirs = torch_file(QUICK)
    theirs["benchmark_results"][0]["result"].append({"ranks": [0, 1, 2, 3], "measurements": QUICK * 4})
    comparison = compare(write(tmp_path / "a.json", torch_file(QUICK)), write(tmp_path / "b.json", theirs))
    assert f"resnet50, 4 ranks is in {tmp_path / 'b.json'} only" in comparison.warnings


def test_settings_that_differ_are_in_the_header(tmp_path: Path) -> None:
    theirs = torch_file(QUICK) | {"bucket_size": 1}
    comparison = compare(write(tmp_path / "a.json", torch_file(QUICK)), write(tmp_path / "b.json", theirs))
    assert [(one.name, one.baseline, one.test) for one in comparison.different_settings] == [("bucket_size", 25, 1)]
    assert "3 other settings are equal" in render(comparison)


def test_markdown_has_a_table_per_model(slower: Comparison) -> None:
    text = render_markdown(slower)
    assert "### resnet50, batch size 32" in text
    assert "| 2 ranks | 0.1177 | 272 | -10.0% | 0.1199 | 267 | -10.0% | slower" in text


def test_the_document_has_every_row(slower: Comparison) -> None:
    row = document(slower)["rows"][1]
    assert (row["model"], row["ranks"], row["verdict"], row["effect"]) == ("resnet50", 2, "slower", "large")
    assert row["p75"]["faster_percent"] == pytest.approx(-10.0)


def test_the_page_draws_both_distributions(slower: Comparison, tmp_path: Path) -> None:
    page = write_diff_page(slower, tmp_path / "pages" / "diff.html").read_text()
    assert page.count('"type":"box"') == 4
    assert "resnet50, 2 ranks" in page


@pytest.mark.parametrize(("text", "percent"), [("3%", 3.0), (" 2.5 % ", 2.5), ("0", 0.0)])
def test_a_limit_is_a_percentage(text: str, percent: float) -> None:
    assert parse_percent(text) == percent


@pytest.mark.parametrize("text", ["three", "-1%", "inf", ""])
def test_other_limits_are_refused(text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_percent(text)
    assert refusal.value.message == f"fail-above must be a percentage of 0 or more, got {text!r}"
    assert refusal.value.hint == "pass --fail-above 3%"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError) as refusal:
        read_iterations(tmp_path / "a.json")
    assert refusal.value.message == f"cannot read {tmp_path / 'a.json'}: no such file or directory"
    assert refusal.value.hint == HINT


@pytest.mark.parametrize(
    ("content", "trouble"),
    [
        ("{", "is no JSON: line 1: expecting property name enclosed in double quotes"),
        ("[]", "is no iteration benchmark: it is a JSON list"),
        ("{}", "is no iteration benchmark: it has no benchmark_results"),
        ('{"benchmark_results": []}', "is no iteration benchmark: it has no benchmark_results"),
        ('{"benchmark_results": [{}]}', "is damaged: benchmark_results[0]: 'model' is missing"),
        (
            '{"benchmark_results": [{"model": "a", "batch_size": 1, "result": [{"ranks": [], "measurements": [1]}]}]}',
            "is damaged: benchmark_results[0]: result 0 has no ranks",
        ),
        (
            '{"benchmark_results": [{"model": "a", "batch_size": 1, "result": [{"ranks": [0], "measurements": []}]}]}',
            "is damaged: benchmark_results[0]: result 0 needs measurements above 0",
        ),
    ],
)
def test_a_file_that_is_no_benchmark_is_refused(tmp_path: Path, content: str, trouble: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError) as refusal:
        read_iterations(tmp_path / "a.json")
    assert refusal.value.message == f"{tmp_path / 'a.json'} {trouble}"


def test_files_without_a_common_model_are_refused(tmp_path: Path) -> None:
    mine = write(tmp_path / "a.json", torch_file(QUICK))
    theirs = write(tmp_path / "b.json", torch_file(QUICK, model="lenet"))
    with pytest.raises(DataError) as refusal:
        compare(mine, theirs)
    assert refusal.value.message == (
        f"nothing to compare: {mine.name} has resnet50 (batch 32: no DDP, 2 ranks); "
        f"{theirs.name} has lenet (batch 32: no DDP, 2 ranks)"
    )
    assert refusal.value.hint == "run both with the same --model, --batch-size and number of ranks"
