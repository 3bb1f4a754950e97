"""What a user's own loop can be: accumulation, schedules, clipping, bf16, compiled models, several passes."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import outrider

pytestmark = pytest.mark.usefixtures("one_thread")

SEED, SIZE = 5, 40
OpenSession = Callable[..., outrider.Session]


@pytest.fixture(autouse=True)
def _no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_DEVICES", raising=False)


@pytest.fixture
def session(tmp_path: Path) -> OpenSession:
    return lambda **options: outrider.Session(devices="cpu", run_dir=tmp_path, seed=SEED, **options)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Linear(3, 1).double()


def data(size: int = SIZE) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def sgd(model: nn.Module, rate: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), rate)


def squared_error(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


# Steps


def test_accumulated_gradients_are_those_of_one_large_batch(session: OpenSession, model: nn.Module) -> None:
    whole = copy.deepcopy(model)
    with session() as s:
        s.prepare(model, sgd(model))
        for number, batch in enumerate(s.batches(data(), batch_size=5, shuffle=False), start=1):
            s.backward(squared_error(model, batch) / 4)
            if number % 4 == 0:
                s.optimizer_step()
    with session() as s:
        s.prepare(whole, sgd(whole))
        for batch in s.batches(data(), batch_size=20, shuffle=False):
            s.step(squared_error(whole, batch))
    for mine, its in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)


def test_code_between_the_phases_sees_and_changes_the_gradients(session: OpenSession, model: nn.Module) -> None:
    before = copy.deepcopy(model.state_dict())
    with session() as s:
        s.prepare(model, sgd(model))
        for batch in s.batches(data(), batch_size=8):
            s.backward(squared_error(model, batch))
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.zero_()
            s.optimizer_step()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_gradient_is_clipped_before_the_step(session: OpenSession, model: nn.Module) -> None:
    before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    with session(max_grad_norm=0.5) as s:
        s.prepare(model, sgd(model, rate=1.0))
        for batch in s.batches(data(), batch_size=SIZE):
            s.step(1_000 * squared_error(model, batch))
    after = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert (after - before).norm().item() == pytest.approx(0.5, rel=1e-4)


def test_bf16_autocast_learns(session: OpenSession) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    with session() as s:
        s.prepare(model, sgd(model))
        losses = []
        for inputs, targets in (batch for _ in s.epochs(5) for batch in s.batches(data(), batch_size=4)):
            with torch.autocast(s.device.type, dtype=torch.bfloat16):
                outputs = model(inputs.float())
                loss = nn.functional.mse_loss(outputs.float(), targets.float())
            assert outputs.dtype == torch.bfloat16
            s.step(loss)
            losses.append(loss.item())
    assert losses[-1] < 0.01 < losses[0]


def test_a_compiled_model_trains_as_the_plain_one(session: OpenSession, model: nn.Module) -> None:
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="eager")
    for one in (compiled, plain):
        with session() as s:
            s.prepare(one, sgd(one))
            for batch in s.batches(data(), batch_size=8):
                s.step(squared_error(one, batch))
    assert torch.equal(model.weight, plain.weight)


def test_optimizer_state_that_was_loaded_is_kept(session: OpenSession, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    squared_error(model, data().tensors).backward()
    optimizer.step()
    before = {
        name: state["momentum_buffer"].clone() for name, state in zip("wb", optimizer.state.values(), strict=True)
    }
    with session() as s:
        s.prepare(model, optimizer)
        after = {name: state["momentum_buffer"] for name, state in zip("wb", optimizer.state.values(), strict=True)}
    assert all(torch.equal(before[name], after[name]) for name in "wb")


# Schedules


def rates_of(s: outrider.Session, model: nn.Module, loop: Iterator[Any]) -> list[float]:
    """The learning rate that each batch was stepped with."""
    rates: list[float] = []
    handle = s.optimizer.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    for batch in loop:
        s.step(squared_error(model, batch))
    handle.remove()
    return rates


def counting_schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda tick: 1.0 + tick)


def test_a_prepared_schedule_ticks_with_every_batch(session: OpenSession, model: nn.Module) -> None:
    optimizer = sgd(model, rate=1e-3)
    with session() as s:
        s.prepare(model, optimizer, counting_schedule(optimizer))
        rates = rates_of(s, model, (batch for _ in s.epochs(2) for batch in s.batches(data(16), batch_size=8)))
    assert rates == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3])


def test_a_schedule_counts_only_what_was_taken_before_a_break(session: OpenSession, model: nn.Module) -> None:
    optimizer = sgd(model, rate=1e-3)
    with session(policy="cadence") as s:
        s.prepare(model, optimizer, counting_schedule(optimizer))
        for number, batch in enumerate(s.batches(data(), batch_size=4)):
            s.step(squared_error(model, batch))
            if number == 2:
                break
        rates = rates_of(s, model, s.batches(data(8), batch_size=4))
    assert rates == pytest.approx([4e-3, 5e-3])


def test_a_schedule_goes_on_where_the_batch_size_changes(session: OpenSession, model: nn.Module) -> None:
    optimizer = sgd(model, rate=1e-3)
    with session() as s:
        s.prepare(model, optimizer, counting_schedule(optimizer))
        rates = rates_of(s, model, s.batches(data(16), batch_size=8))
        rates += rates_of(s, model, s.batches(data(12), batch_size=4))
    assert rates == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3, 5e-3])


def test_a_scaled_learning_rate_stays_scaled_under_a_schedule(session: OpenSession, model: nn.Module) -> None:
    optimizer = sgd(model, rate=1e-3)
    with session(lr_scale=2.0) as s:
        s.prepare(model, optimizer, counting_schedule(optimizer))
        rates = rates_of(s, model, s.batches(data(16), batch_size=8))
    assert rates == pytest.approx([2e-3, 4e-3])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(2e-3)


def test_a_schedule_that_was_not_prepared_is_the_users(session: OpenSession, model: nn.Module) -> None:
    optimizer = sgd(model, rate=1e-3)
    scheduler = counting_schedule(optimizer)
    rates = []
    with session() as s:
        s.prepare(model, optimizer)
        for _ in s.epochs(2):
            rates += rates_of(s, model, s.batches(data(8), batch_size=4))
            scheduler.step()
    assert rates == pytest.approx([1e-3, 1e-3, 2e-3, 2e-3])


# Logs, metrics and evaluation


def test_logged_values_are_weighted_by_samples(session: OpenSession, model: nn.Module) -> None:
    with session() as s:
        s.prepare(model, sgd(model))
        for batch in s.batches(data(10), batch_size=8):
            s.step(squared_error(model, batch))
            s.log("size", len(batch[0]))
            s.log("size squared", torch.tensor(float(len(batch[0]) ** 2)))
    assert s.metrics is not None
    assert s.metrics.logged == {"size": pytest.approx(6.8), "size squared": pytest.approx(52.0)}


def test_metrics_are_those_of_the_epoch_that_ended(session: OpenSession, model: nn.Module) -> None:
    seen = []
    with session() as s:
        s.prepare(model, sgd(model))
        for _ in s.epochs(2):
            seen.append(s.metrics and s.metrics.epoch)
            for batch in s.batches(data(), batch_size=8):
                s.step(squared_error(model, batch))
            s.evaluate(squared_error, data())
    last = s.metrics
    assert last is not None
    assert seen == [None, 0]
    assert (last.epoch, last.samples, last.share_by_rank, last.is_complete) == (1, SIZE, (1.0,), True)
    assert last.eval == pytest.approx(squared_error(model, data().tensors).item())
    assert last.loss > last.eval


@pytest.mark.parametrize("policy", ["sync", "balanced", "cadence", "async"])
def test_an_epoch_that_was_left_early_says_so(session: OpenSession, model: nn.Module, policy: str) -> None:
    with session(policy=policy) as s:
        s.prepare(model, sgd(model))
        for batch in s.batches(data(), batch_size=8):
            s.step(squared_error(model, batch))
            break
    assert s.metrics is not None
    assert (s.metrics.samples, s.metrics.is_complete) == (8, False)


def test_losses_that_the_session_never_saw_are_not_made_up(session: OpenSession, model: nn.Module) -> None:
    optimizer = sgd(model)
    with session() as s:
        s.prepare(model, optimizer)
        for batch in s.batches(data(), batch_size=8):
            squared_error(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert s.metrics is not None
    assert math.isnan(s.metrics.loss)
    assert s.metrics.samples == SIZE


def test_an_evaluation_is_weighted_by_samples_and_without_gradient(session: OpenSession, model: nn.Module) -> None:
    grad_modes = set()

    def size(model: nn.Module, batch: tuple[Tensor, ...]) -> float:
        grad_modes.add(torch.is_grad_enabled())
        return float(len(batch[0]))

    with session() as s:
        s.prepare(model, sgd(model))
        assert s.evaluate(size, data(10), batch_size=8) == pytest.approx(6.8)
        assert s.evaluate_together(size, data(10), batch_size=8) == pytest.approx(6.8)
    assert grad_modes == {False}


def test_an_evaluation_leaves_every_layer_in_the_mode_it_was(session: OpenSession) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 1)).double()
    model[1].eval()
    modes = []
    with session() as s:
        s.prepare(model, sgd(model))
        for batch in s.batches(data(), batch_size=20):
            s.step(squared_error(model, batch))
            s.evaluate(lambda model, batch: modes.append([m.training for m in model]) or 0.0, data(4))
    assert modes == [[False] * 4] * 2
    assert [module.training for module in model] == [True, False, True, True]


def test_an_evaluation_of_several_models_gets_them_all(session: OpenSession, model: nn.Module) -> None:
    other = nn.Linear(1, 1).double()
    with session() as s:
        s.prepare(model, other, sgd(model), sgd(other))
        value = s.evaluate(lambda models, batch: models[1](models[0](batch[0])).mean(), data())
    assert value == pytest.approx(other(model(data().tensors[0])).mean().item())


# After the end


def test_models_optimizers_and_schedules_are_the_users_again(session: OpenSession, model: nn.Module) -> None:
    optimizer = sgd(model)
    scheduler = counting_schedule(optimizer)
    with session() as s:
        s.prepare(model, optimizer, scheduler)
        for batch in s.batches(data(), batch_size=8):
            s.step(squared_error(model, batch))
    before = squared_error(model, data().tensors)
    before.backward()
    optimizer.step()
    scheduler.step()
    assert squared_error(copy.deepcopy(model), data().tensors) < before


def test_the_record_says_what_the_session_did(session: OpenSession, model: nn.Module, tmp_path: Path) -> None:
    with session(policy="async") as s:
        s.prepare(model, sgd(model))
        for _ in s.epochs(3):
            for batch in s.batches(data(), batch_size=8):
                s.step(squared_error(model, batch))
        assert s.run_dir == tmp_path
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["status"], record["policy"], record["devices"]) == ("finished", "async", ["cpu"])
    assert [epoch["samples"] for epoch in record["epochs"]] == [SIZE] * 3


def test_a_session_leaves_its_events_and_the_same_files_as_a_run(
    session: OpenSession, model: nn.Module, tmp_path: Path
) -> None:
    with session(policy="cadence", record_schedule=True) as s:
        s.prepare(model, sgd(model))
        for batch in s.batches(data(), batch_size=8):
            s.step(squared_error(model, batch))
        assert (tmp_path / "events" / "rank0.jsonl").is_file()
    names = {path.name for path in tmp_path.iterdir()}
    assert {"timeline.json", "timeline.csv", "timeline.html", "trace.json", "schedule.json"} <= names
    kinds = [event["kind"] for event in json.loads((tmp_path / "timeline.json").read_text())["events"]]
    assert {"ready", "epoch start", "window"} <= set(kinds)


def test_who_took_part_is_known_after_the_end(session: OpenSession, model: nn.Module, tmp_path: Path) -> None:
    with session() as s:
        s.prepare(model, sgd(model))
        for _ in s.epochs(2):
            for batch in s.batches(data(), batch_size=8):
                s.step(squared_error(model, batch))
    assert (s.rank, s.is_main, s.world_size, s.devices) == (0, True, 1, ("cpu",))
    assert (s.device, s.run_dir) == (torch.device("cpu"), tmp_path)
    assert s.metrics is not None
    assert s.metrics.epoch == 1


def test_a_session_is_sampled_as_a_run_is(session: OpenSession, model: nn.Module, tmp_path: Path) -> None:
    with session() as s:
        s.prepare(model, sgd(model))
        for batch in s.batches(data(), batch_size=8):
            time.sleep(0.05)
            s.step(squared_error(model, batch))
    utilization = json.loads((tmp_path / "timeline.json").read_text())["utilization"]
    [device] = utilization["devices"]
    assert (device["rank"], device["device"], device["source"]) == (0, "cpu", "psutil")
    assert len(device["percent"]) == len(utilization["t"]) > 0
    assert json.loads((tmp_path / "record.json").read_text())["idle"]["gaps_s"] != [None]


def test_sampling_of_a_session_can_be_switched_off(session: OpenSession, model: nn.Module, tmp_path: Path) -> None:
    with session(sample_utilization=False) as s:
        s.prepare(model, sgd(model))
        for batch in s.batches(data(), batch_size=8):
            s.step(squared_error(model, batch))
    assert json.loads((tmp_path / "timeline.json").read_text())["utilization"] is None


def test_setup_opens_prepares_and_says_where_it_runs(
    model: nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"devices": "cpu", "run_dir": tmp_path}
    with outrider.setup(
        model, optimizer=lambda p: torch.optim.SGD(p, 1e-3), scheduler=counting_schedule, **options
    ) as s:
        rates = rates_of(s, model, s.batches(data(16), batch_size=8))
    assert rates == pytest.approx([1e-3, 2e-3])
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", f"outrider: 1 rank on cpu, {torch.get_num_threads()} threads\n")


def test_a_model_wrapped_on_one_device_is_left_alone(model: nn.Module, tmp_path: Path) -> None:
    before = copy.deepcopy(model.state_dict())
    with outrider.wrap(model, devices="cpu", run_dir=tmp_path) as wrapped:
        wrapped(data().tensors[0]).mean().backward()
        gradient = model.weight.grad.clone()
        wrapped.average_gradients(samples=3)
        wrapped.average_parameters(samples=3)
        wrapped.average_buffers(samples=3)
        wrapped.broadcast()
        assert torch.equal(model.weight.grad, gradient)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
