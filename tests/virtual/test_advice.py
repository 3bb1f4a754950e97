"""The forecast of `outrider advise`: what made-up short runs must lead to."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from outrider.virtual.advice import TRIAL_POLICIES, Advice, TrainingWork, advise, as_document
from outrider.virtual.advice_text import as_text
from outrider.virtual.trial_reports import RankWindow, TrialReport, TrialReports

BATCH = 32
WORK = TrainingWork(num_samples=6_400, batch_size=BATCH, total_samples=64_000, may_rest=True, options={})


def trial(policy: str, devices: tuple[str, ...], *reports: TrialReport) -> TrialReports:
    return TrialReports(
        policy=policy,
        devices=devices,
        reports=reports * 40,
        peak_memory_bytes=tuple(range(100, 100 + len(devices))),
        model_bytes=4_000,
        parameters=1_000,
    )


def solo(device: str, step_ms: float) -> TrialReports:
    own = RankWindow(samples=BATCH, batches=1, compute_ms=step_ms)
    return trial("sync", (device,), TrialReport(kind="confer", wall_ms=step_ms, ranks=(own,)))


def joint(policy: str, devices: dict[str, float], *, average_ms: float) -> TrialReports:
    """Steps of a whole batch, or of a part by speed; the last rank to join waits for nobody."""
    names, steps_ms = tuple(devices), list(devices.values())
    if policy == "balanced":
        total = sum(1 / step_ms for step_ms in steps_ms)
        parts = [round(BATCH / step_ms / total) for step_ms in steps_ms]
        steps_ms = [ms * part / BATCH for ms, part in zip(steps_ms, parts, strict=True)]
    else:
        parts = [BATCH] * len(names)
    if policy == "async":
        background = tuple(
            RankWindow(samples=BATCH, batches=1, compute_ms=ms, exposed_ms=0.1, average_ms=average_ms)
            for ms in steps_ms
        )
        return trial(policy, names, TrialReport(kind="background", wall_ms=steps_ms[0] + 0.1, ranks=background))
    last_ms = max(steps_ms)
    ranks = tuple(
        RankWindow(samples=part, batches=1, compute_ms=ms, exposed_ms=last_ms - ms + average_ms)
        for part, ms in zip(parts, steps_ms, strict=True)
    )
    kind = "average" if policy == "cadence" else "shared"
    return trial(policy, names, TrialReport(kind=kind, wall_ms=last_ms + average_ms, ranks=ranks))


def advised(devices: dict[str, float], *, average_ms: float = 0.5, work: TrainingWork = WORK) -> Advice:
    solos = [solo(device, step_ms) for device, step_ms in devices.items()]
    trials = [joint(policy, devices, average_ms=average_ms) for policy in TRIAL_POLICIES] if len(devices) > 1 else []
    return advise(solos, trials, work)


def test_one_device_alone_is_forecast_as_measured() -> None:
    advice = advised({"cpu": 8.0})
    # 32 samples in 8 ms.
    [cell] = advice.cells
    assert (cell.policy, cell.samples_per_s, cell.epoch_s) == ("solo", pytest.approx(4_000), pytest.approx(1.6))
    assert advice.best is cell
    assert advice.options == {"devices": ["cpu"]}


def test_sync_takes_the_step_of_the_slower_device_and_the_average() -> None:
    cell = advised({"cpu": 8.0, "cpu@0.4": 20.0}).cell("sync", ["cpu", "cpu@0.4"])
    assert cell is not None
    # 64 samples in 20.5 ms, and the faster one waits for 12 of them.
    assert cell.samples_per_s == pytest.approx(64 / 0.0205, rel=0.01)
    assert cell.wait_by_rank == pytest.approx((12 / 20.5, 0.0), abs=0.01)


def test_balanced_splits_the_batch_of_the_script() -> None:
    cell = advised({"cpu": 8.0, "cpu@0.4": 20.0}).cell("balanced", ["cpu", "cpu@0.4"])
    assert cell is not None
    # 23 and 9 samples in 5.75 ms, and an average of 0.5 ms; up to what the first steps explore.
    assert cell.samples_per_s == pytest.approx(32 / 0.00625, rel=0.04)


def test_the_fastest_policy_is_advised_and_the_slower_device_is_worth_it() -> None:
    advice = advised({"cpu": 8.0, "cpu@0.4": 20.0})
    assert (advice.best.policy, advice.best.devices, advice.left_out) == ("async", ("cpu", "cpu@0.4"), ())
    assert advice.gain == pytest.approx(1.4, rel=0.04)
    assert advice.options == {"devices": ["cpu", "cpu@0.4"], "policy": "async"}


def test_a_device_that_adds_two_percent_is_left_out() -> None:
    advice = advised({"cpu": 8.0, "cpu@0.02": 400.0})
    assert (advice.best.policy, advice.best.devices, advice.left_out) == ("solo", ("cpu",), ("cpu@0.02",))


def test_a_machine_that_changes_its_speed_is_told_and_not_taken_for_a_slow_device() -> None:
    devices = {"cpu": 8.0, "cpu@0.4": 20.0}
    trials = [joint(policy, devices, average_ms=0.5) for policy in TRIAL_POLICIES]
    first, again = ([solo("cpu", ms), solo("cpu@0.4", 20.0)] for ms in (12.0, 8.0))
    unsure, sure = advise(first, trials, WORK, again=again), advise(again, trials, WORK, again=again)
    # 64 samples in 20 ms, not the mean of 2,667 and 4,000 samples per second.
    assert unsure.cells[0].samples_per_s == pytest.approx(3_200)
    assert (unsure.spread, sure.spread) == (pytest.approx(0.5), 0.0)
    assert "unsure: the same device differed by 50% between two short runs" in str(unsure)
    assert max(map(len, str(unsure).splitlines())) <= 80
    assert "unsure" not in str(sure)
    assert as_document(unsure)["spread"] == 0.5


def test_a_short_run_of_few_slow_steps_is_told() -> None:
    many = advised({"cpu": 8.0, "cpu@0.4": 20.0})
    trials = [joint(policy, {"cpu": 8.0, "cpu@0.4": 20.0}, average_ms=0.5) for policy in TRIAL_POLICIES]
    solos = [solo("cpu", 8.0), solo("cpu@0.4", 20.0)]
    trials[0] = replace(trials[0], reports=trials[0].reports[:7])
    few = advise(solos, trials, WORK)
    assert (few.fewest, as_document(few)["fewest"]) == (7, 7)
    assert "unsure: steps are slow here, and one short run saw only 7 steps or averages;" in str(few)
    assert max(map(len, str(few).splitlines())) <= 80
    assert "unsure" not in str(many)


def with_epochs_of_one_report(told: TrialReports, end_ms: float) -> TrialReports:
    """The same, and each report is an epoch of its own that ends in `end_ms`."""
    reports = tuple(replace(one, wall_ms=(one.wall_ms or 0.0) + end_ms, is_first=True) for one in told.reports)
    return replace(told, reports=reports)


def test_short_epochs_are_forecast_with_their_ends() -> None:
    devices = {"cpu": 8.0, "cpu@0.4": 20.0}
    work = replace(WORK, num_samples=64)
    solos = [solo(device, step_ms) for device, step_ms in devices.items()]
    trials = [joint(policy, devices, average_ms=0.5) for policy in TRIAL_POLICIES]
    short = [with_epochs_of_one_report(one, 5.0) if one.policy in ("sync", "cadence") else one for one in trials]
    before, after = advise(solos, trials, work), advise(solos, short, work)
    for policy, more_s in (("sync", 0.005), ("cadence", 0.005), ("balanced", 0.0), ("async", 0.0)):
        long, ended = before.cell(policy, list(devices)), after.cell(policy, list(devices))
        assert long is not None
        assert ended is not None
        assert ended.epoch_s - long.epoch_s == pytest.approx(more_s, abs=2e-4)
        assert ended.samples_per_s == pytest.approx(64 / ended.epoch_s)


def test_every_choice_of_three_devices_is_forecast() -> None:
    advice = advised({"cuda:0": 8.0, "cuda:1": 10.0, "cpu": 4_000.0})
    choices = {cell.devices for cell in advice.cells}
    assert len(choices) == 7
    assert (advice.best.devices, advice.left_out) == (("cuda:0", "cuda:1"), ("cpu",))


@pytest.mark.slow
def test_of_many_devices_the_fastest_ones_are_forecast_together() -> None:
    devices = {f"cuda:{number}": 8.0 + number for number in range(6)}
    choices = {cell.devices for cell in advised(devices).cells if len(cell.devices) > 1}
    assert sorted(map(len, choices)) == [2, 3, 4, 5, 6]


def test_memory_is_that_of_the_short_run() -> None:
    cell = advised({"cpu": 8.0, "cpu@0.4": 20.0}).cell("async", ["cpu", "cpu@0.4"])
    assert cell is not None
    assert cell.memory_bytes == (100, 101)


def test_a_loop_of_the_user_never_leaves_all_work_to_one_device() -> None:
    slow = {"cpu": 8.0, "cpu@0.1": 80.0}
    loop = replace(WORK, may_rest=False)
    rests = advised(slow, average_ms=20.0).cell("balanced", list(slow))
    shares = advised(slow, average_ms=20.0, work=loop).cell("balanced", list(slow))
    assert rests is not None
    assert shares is not None
    # An average of 20 ms beside a step of 8: in train() the fast device soon goes on alone.
    assert rests.samples_per_s > 2 * shares.samples_per_s


def test_in_a_loop_of_the_user_auto_leaves_all_work_to_the_first_device_only() -> None:
    loop = replace(WORK, may_rest=False)
    rates = []
    for slow in ({"cpu": 8.0, "cpu@0.1": 80.0}, {"cpu@0.1": 80.0, "cpu": 8.0}):
        cell = advised(slow, average_ms=20.0, work=loop).cell("auto", list(slow))
        assert cell is not None
        rates.append(cell.samples_per_s)
    assert rates[0] > 2 * rates[1]


def test_where_a_framework_runs_the_loop_auto_leaves_no_batch_to_one_device() -> None:
    slow = {"cpu": 8.0, "cpu@0.1": 80.0}
    work = replace(WORK, may_rest=False, shares_always=True)
    cell, rests = (advised(slow, average_ms=20.0, work=one).cell("auto", list(slow)) for one in (work, WORK))
    assert cell is not None
    assert rests is not None
    assert cell.samples_per_s < rests.samples_per_s / 2


def test_a_rank_that_gains_the_cores_of_others_is_forecast_alone() -> None:
    """Alone each CPU rank has both cores and takes 8 ms, beside the other 14 ms: sharing takes 7.5 ms and more."""
    devices = ["cpu", "cpu@0.9"]
    solos = [solo("cpu", 8.0), solo("cpu@0.9", 9.0)]
    trials = [joint(policy, {"cpu": 14.0, "cpu@0.9": 16.0}, average_ms=1.0) for policy in TRIAL_POLICIES]
    loop = replace(WORK, may_rest=False)
    rates = []
    for work in (loop, replace(loop, options={"threads_per_rank": 1})):
        cell = advise(solos, trials, work).cell("auto", devices)
        assert cell is not None
        rates.append((cell.samples_per_s, cell.share_by_rank[0]))
    assert rates[0][0] > rates[1][0]
    assert rates[0][1] > 0.9 > rates[1][1]


def test_the_users_options_of_windows_are_those_of_the_forecast() -> None:
    work = replace(WORK, options={"anchor": 1})
    costly = {"cpu": 8.0, "cpu@0.5": 16.0}
    fixed = advised(costly, average_ms=16.0, work=work).cell("cadence", list(costly))
    tuned = advised(costly, average_ms=16.0).cell("cadence", list(costly))
    assert fixed is not None
    assert tuned is not None
    assert tuned.samples_per_s > 1.5 * fixed.samples_per_s


def test_the_text_fits_a_terminal_and_names_what_to_set() -> None:
    text = str(advised({"cpu": 8.0, "cpu@0.4": 20.0}))
    assert max(map(len, text.splitlines())) <= 80
    assert 'set:    devices="cpu,cpu@0.4", policy="async"' in text
    assert "the slowest device, cpu@0.4, is worth it" in text
    assert sum(line.startswith("*") for line in text.splitlines()) == 1


@pytest.mark.slow
def test_the_text_of_many_devices_has_a_row_per_choice() -> None:
    text = str(advised({f"cuda:{number}%50": 1_000.0 + number for number in range(12)}))
    assert max(map(len, text.splitlines())) <= 80
    assert "of each choice of devices the fastest" in text


def test_the_text_says_what_a_device_that_is_left_out_would_bring() -> None:
    assert "not worth it: cpu@0.02, with it 0.98 times as fast at best" in str(advised({"cpu": 8.0, "cpu@0.02": 400.0}))


def test_the_document_survives_json() -> None:
    document = as_document(advised({"cpu": 8.0, "cpu@0.4": 20.0}))
    again = json.loads(json.dumps(document))
    assert again["schema_version"] == 1
    assert [one["policy"] for one in again["forecasts"]] == [
        "solo",
        "solo",
        "auto",
        "sync",
        "balanced",
        "cadence",
        "async",
    ]
    assert as_text(again) == as_text(document)


def test_the_work_of_a_batch_sampler_is_told_in_batches() -> None:
    sampler = {"name": "Buckets", "batches": 200, "samples": 700}
    work = replace(WORK, num_samples=200, batch_size=1, options={"batch_sampler": sampler})
    text = as_text(as_document(advised({"cpu": 8.0}, work=work)))
    assert text.startswith("1,000 parameters, 200 batches of Buckets per epoch; each counts as one sample\n")
