"""What users get wrong in a loop of their own: each a clear error with a hint, word for word."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

import outrider

OUTSIDE_HINT = "hint: call it inside `for batch in s.batches(dataset, batch_size=64):`"


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_DEVICES", raising=False)


@pytest.fixture
def model() -> nn.Linear:
    return nn.Linear(2, 1)


@pytest.fixture
def optimizer(model: nn.Linear) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


@pytest.fixture
def s(tmp_path: Path) -> Iterator[outrider.Session]:
    """Open, with nothing prepared."""
    session = outrider.Session(devices="cpu", run_dir=tmp_path).open()
    yield session
    session.close()


@pytest.fixture
def prepared(s: outrider.Session, model: nn.Linear, optimizer: torch.optim.Optimizer) -> outrider.Session:
    s.prepare(model, optimizer)
    return s


@pytest.fixture
def inside(prepared: outrider.Session) -> Iterator[outrider.Session]:
    """With a batch in hand."""
    loop = prepared.batches(data(), batch_size=4)
    next(loop)
    yield prepared
    loop.close()


def data() -> Tensor:
    return torch.ones(12, 2)


def words_of(call: Callable[[], object]) -> str:
    with pytest.raises(outrider.OutriderError) as caught:
        call()
    return str(caught.value)


# Outside of the loop


@pytest.mark.parametrize("name", ["step", "backward"])
def test_a_loss_outside_of_the_loop(prepared: outrider.Session, model: nn.Linear, name: str) -> None:
    words = words_of(lambda: getattr(prepared, name)(model(data()).mean()))
    assert words == f"{name}() was called outside of the batches() loop\n{OUTSIDE_HINT}"


def test_an_optimizer_step_outside_of_the_loop(prepared: outrider.Session) -> None:
    assert words_of(prepared.optimizer_step) == (
        f"optimizer_step() was called outside of the batches() loop\n{OUTSIDE_HINT}"
    )


def test_a_log_outside_of_the_loop(prepared: outrider.Session) -> None:
    assert words_of(lambda: prepared.log("size", 1.0)) == (
        f"log() was called outside of the batches() loop\n{OUTSIDE_HINT}"
    )


def test_a_step_before_prepare(s: outrider.Session) -> None:
    assert words_of(lambda: s.step(torch.zeros(()))) == (
        f"step() was called outside of the batches() loop\n{OUTSIDE_HINT}"
    )


def test_a_step_after_the_loop(prepared: outrider.Session, model: nn.Linear) -> None:
    for batch in prepared.batches(data(), batch_size=4):
        prepared.step(model(batch).mean())
    assert words_of(lambda: prepared.step(model(data()).mean())) == (
        f"step() was called outside of the batches() loop\n{OUTSIDE_HINT}"
    )


OWN_STEP_OUTSIDE = f"SGD.step() was called outside of the batches() loop, where nothing is averaged\n{OUTSIDE_HINT}"


def test_the_optimizers_own_step_before_the_first_loop(
    prepared: outrider.Session, optimizer: torch.optim.Optimizer
) -> None:
    assert words_of(optimizer.step) == OWN_STEP_OUTSIDE


def test_the_optimizers_own_step_after_a_loop(prepared: outrider.Session, optimizer: torch.optim.Optimizer) -> None:
    for _ in prepared.batches(data(), batch_size=4):
        optimizer.step()
    assert words_of(optimizer.step) == OWN_STEP_OUTSIDE


def test_an_optimizer_that_computes_gradients_by_itself(s: outrider.Session, model: nn.Linear) -> None:
    assert words_of(lambda: s.prepare(model, torch.optim.LBFGS(model.parameters()))) == (
        "LBFGS computes several gradients in each of its steps, and ranks average one\n"
        "hint: use an optimizer of one gradient per step, such as SGD, Adam or AdamW"
    )


def test_a_closure(inside: outrider.Session, optimizer: torch.optim.Optimizer) -> None:
    assert words_of(lambda: optimizer.step(lambda: 0.0)) == (
        "SGD.step() was given a closure, whose gradients nobody would average\n"
        "hint: call s.backward(loss), then optimizer.step()"
    )


def test_a_tensor_is_gathered(prepared: outrider.Session) -> None:
    assert words_of(lambda: prepared.gather(torch.ones(1))).endswith(
        "hint: pass tensor.tolist(); torch.distributed.all_gather_object sends other objects"
    )
    assert prepared.gather({"loss": 0.5}) == [{"loss": 0.5}]


def test_no_closure_is_none(inside: outrider.Session, model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    inside.backward(model(data()).mean())
    before = model.weight.detach().clone()
    optimizer.step(None)
    assert not torch.equal(model.weight, before)
    optimizer.step(closure=None)


def test_a_shared_evaluation_inside_the_loop_ends_it(prepared: outrider.Session) -> None:
    loop = prepared.batches(data(), batch_size=4)
    next(loop)
    prepared.evaluate_together(lambda model, batch: 0.0, data())
    assert words_of(lambda: next(loop)) == (
        "this loop over batches() was ended by another call inside it\n"
        "hint: inside the loop call evaluate(), not evaluate_together(), batches() or epochs()"
    )


# prepare()


def test_batches_before_prepare(s: outrider.Session) -> None:
    assert words_of(lambda: list(s.batches(data(), batch_size=4))) == (
        "batches() was called before prepare()\nhint: call model, optimizer = s.prepare(model, optimizer) first"
    )


def test_prepare_twice(prepared: outrider.Session, model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    assert words_of(lambda: prepared.prepare(model, optimizer)) == (
        "prepare() was called before\nhint: hand all models and optimizers to one call"
    )


def test_prepare_without_a_model(s: outrider.Session, optimizer: torch.optim.Optimizer) -> None:
    assert words_of(lambda: s.prepare(optimizer)) == (
        "prepare() needs a model\nhint: call model, optimizer = s.prepare(model, optimizer)"
    )


def test_prepare_without_an_optimizer(s: outrider.Session, model: nn.Linear) -> None:
    assert words_of(lambda: s.prepare(model)) == (
        "prepare() needs an optimizer\nhint: call model, optimizer = s.prepare(model, optimizer)"
    )


def test_prepare_with_a_data_loader(s: outrider.Session, model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    loader = DataLoader(data(), batch_size=4)  # type: ignore[arg-type]
    assert words_of(lambda: s.prepare(model, optimizer, loader)) == (
        "prepare() takes models, optimizers, schedules and a GradScaler, got DataLoader\n"
        "hint: data sets and data loaders go to batches()"
    )


def test_an_optimizer_of_another_model(s: outrider.Session, optimizer: torch.optim.Optimizer) -> None:
    assert words_of(lambda: s.prepare(nn.Linear(2, 1), optimizer)) == (
        "SGD trains 2 parameters of no model given to prepare(), the first of shape (1, 2)\n"
        "hint: hand all models and their optimizers to one call of prepare()"
    )


def test_a_prepared_schedule_is_stepped(
    s: outrider.Session, model: nn.Linear, optimizer: torch.optim.Optimizer
) -> None:
    scheduler = StepLR(optimizer, 3)
    s.prepare(model, optimizer, scheduler)
    assert words_of(scheduler.step) == (
        "StepLR.step() was called, but this schedule was given to prepare(), which moves it with the samples of all "
        'ranks\nhint: delete the call; prepare(..., per="epoch") moves it once per epoch'
    )


def test_the_state_of_a_prepared_schedule_can_be_saved(
    s: outrider.Session, model: nn.Linear, optimizer: torch.optim.Optimizer
) -> None:
    scheduler = StepLR(optimizer, 3)
    before = scheduler.state_dict()
    s.prepare(model, optimizer, scheduler)
    assert isinstance(scheduler, StepLR)
    assert pickle.loads(pickle.dumps(scheduler.state_dict())) == before
    s.close()
    assert type(scheduler) is StepLR


def test_only_a_model_can_be_saved(s: outrider.Session, model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    s.prepare(model, optimizer)
    assert words_of(lambda: s.save("only.pt", optimizer)) == (
        "save() takes a model as its second argument, got SGD\n"
        'hint: checkpoints hold optimizers too: Session(checkpoint_every=1), resume="auto"'
    )


def test_a_schedule_that_follows_a_measurement(
    s: outrider.Session, model: nn.Linear, optimizer: torch.optim.Optimizer
) -> None:
    assert words_of(lambda: s.prepare(model, optimizer, ReduceLROnPlateau(optimizer))) == (
        "ReduceLROnPlateau follows a measured value, and a schedule given to prepare() moves with the samples\n"
        "hint: leave it out of prepare(), and on every rank call scheduler.step(s.evaluate_together(...))"
    )


# Several optimizers


def test_which_of_two_optimizers(s: outrider.Session, model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    s.prepare(model, optimizer, torch.optim.Adam(model.parameters()))
    loop = s.batches(data(), batch_size=12)
    loss = model(next(loop)).mean()
    assert words_of(lambda: s.step(loss)) == (
        "2 optimizers were prepared, and step() needs one\nhint: name it: s.step(loss, optimizer=generator_optimizer)"
    )
    assert words_of(s.optimizer_step) == (
        "2 optimizers were prepared, and optimizer_step() needs one\n"
        "hint: name it: s.step(loss, optimizer=generator_optimizer)"
    )


def test_an_optimizer_that_was_never_prepared(inside: outrider.Session, model: nn.Linear) -> None:
    stranger = torch.optim.Adam(model.parameters())
    assert words_of(lambda: inside.optimizer_step(stranger)) == (
        "optimizer_step() was given an optimizer that was not given to prepare(): Adam\n"
        "hint: hand all models and their optimizers to one call of prepare()"
    )


# Losses


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (0.5, "float"),
        (torch.zeros(()), "a tensor of shape () without a gradient"),
        (torch.zeros(4, requires_grad=True), "a tensor of shape (4,)"),
    ],
)
def test_a_loss_that_cannot_be_used(inside: outrider.Session, loss: Any, what: str) -> None:
    assert words_of(lambda: inside.step(loss)) == (
        f"the loss must be a scalar tensor with a gradient, got {what}\n"
        "hint: pass the mean loss of the batch, computed from the model's output"
    )


def test_a_loss_that_is_not_finite_ends_the_session(
    tmp_path: Path, model: nn.Linear, optimizer: torch.optim.Optimizer
) -> None:
    def train() -> None:
        with outrider.Session(devices="cpu", run_dir=tmp_path) as s:
            s.prepare(model, optimizer)
            for batch in s.batches(data(), batch_size=4):
                s.step(model(batch).mean() * float("inf"))

    assert words_of(train) == (
        "rank 0 (cpu), step 0: the loss is not finite\nhint: lower the learning rate, or set max_grad_norm"
    )


# Options and the life of a session


def test_an_unknown_option() -> None:
    assert words_of(lambda: outrider.Session(polcy="sync")) == (  # type: ignore[call-arg]
        "unknown option 'polcy'\nhint: did you mean 'policy'?"
    )


def test_an_option_of_train_that_is_the_loops_business() -> None:
    assert words_of(lambda: outrider.Session(epochs=3)) == (  # type: ignore[call-arg]
        "unknown option 'epochs'\nhint: see the options of outrider.Session"
    )


@pytest.mark.parametrize("name", ["rank", "world_size", "is_main", "device", "devices", "run_dir"])
def test_a_session_that_is_not_open(name: str) -> None:
    assert words_of(lambda: getattr(outrider.Session(devices="cpu"), name)) == (
        "the session is not open\nhint: use it inside `with outrider.Session() as s:`"
    )


def test_a_session_that_has_ended(tmp_path: Path) -> None:
    with outrider.Session(devices="cpu", run_dir=tmp_path) as s:
        pass
    assert words_of(lambda: s.batches(data(), batch_size=4)) == (
        "the session has ended\nhint: use it inside `with outrider.Session() as s:`"
    )
    assert words_of(s.open) == "this session has ended\nhint: make a new outrider.Session"


def test_two_sessions_at_once(s: outrider.Session) -> None:
    assert words_of(outrider.Session(devices="cpu").open) == (
        "a session is open in this process already\nhint: close it first: use `with outrider.Session() as s:`"
    )


# Data


def test_no_batch_size(prepared: outrider.Session) -> None:
    assert words_of(lambda: prepared.batches(data())) == (
        "batch_size is missing\nhint: call s.batches(dataset, batch_size=64)"
    )


def test_a_batch_size_of_nothing(prepared: outrider.Session) -> None:
    assert words_of(lambda: prepared.batches(data(), batch_size=0)) == (
        "batch_size must be a whole number >= 1, got 0\nhint: pass batch_size=1 or more"
    )


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"batch_size": None}, "batch_size=None"),
    ],
)
def test_a_data_loader_with_an_order_of_its_own(
    prepared: outrider.Session, settings: dict[str, Any], what: str
) -> None:
    loader: DataLoader[Any] = DataLoader(data(), **settings)  # type: ignore[arg-type]
    assert words_of(lambda: prepared.batches(loader)) == (
        f"a DataLoader with {what} decides itself which samples come when\n"
        "hint: pass the data set and batch_size=; every sample then goes to one of the ranks"
    )


def test_an_empty_data_set_leaves_the_session_as_it_was(prepared: outrider.Session, model: nn.Linear) -> None:
    loop = prepared.batches(torch.ones(0, 2), batch_size=4)
    assert words_of(lambda: next(loop)).startswith("the data set is empty\n")
    assert words_of(lambda: prepared.step(model(data()).mean())).startswith("step() was called outside")
    assert len(list(prepared.batches(data(), batch_size=4))) == 3


# setup() and wrap()


def test_setup_with_a_flow_that_is_not_built() -> None:
    assert words_of(lambda: outrider.setup(outrider.Flow(nn.ReLU()), optimizer=torch.optim.SGD)) == (  # type: ignore[arg-type]
        "setup() needs a torch.nn.Module, got Flow\nhint: call build() on a flow first"
    )


def test_setup_with_an_optimizer_that_is_made_already(
    model: nn.Linear, optimizer: torch.optim.Optimizer, tmp_path: Path
) -> None:
    words = words_of(lambda: outrider.setup(model, optimizer=optimizer, devices="cpu", run_dir=tmp_path))  # type: ignore[arg-type]
    assert words == (
        "optimizer must be a function from parameters to an optimizer, got SGD\n"
        "hint: pass optimizer=lambda p: torch.optim.SGD(p, 0.1)"
    )
    outrider.Session(devices="cpu", run_dir=tmp_path).open().close()


def test_wrap_with_options_inside_a_session(s: outrider.Session, model: nn.Linear) -> None:
    assert words_of(lambda: outrider.wrap(model, seed=1, policy="sync")) == (
        "wrap() got policy, seed, but a session is open and has its own\nhint: pass the options to outrider.Session"
    )


def test_wrap_of_something_else(s: outrider.Session) -> None:
    assert words_of(lambda: outrider.wrap(3)) == (  # type: ignore[arg-type]
        "wrap() needs a torch.nn.Module, got int\nhint: pass the model itself"
    )


def test_a_model_that_cannot_be_wrapped_leaves_no_session_open(tmp_path: Path) -> None:
    words_of(lambda: outrider.wrap(nn.ReLU(), devices="cpu", run_dir=tmp_path))
    outrider.Session(devices="cpu", run_dir=tmp_path).open().close()


@pytest.mark.parametrize("name", ["average_gradients", "average_parameters", "average_buffers"])
def test_negative_samples(s: outrider.Session, model: nn.Linear, name: str) -> None:
    wrapped = outrider.wrap(model)
    assert words_of(lambda: getattr(wrapped, name)(samples=-1)) == (
        "samples must be 0 or more, got -1\nhint: pass the samples that this rank took"
    )


def test_a_broadcast_from_a_rank_that_is_not_there(s: outrider.Session, model: nn.Linear) -> None:
    assert words_of(lambda: outrider.wrap(model).broadcast(source=1)) == (
        "source must be a rank, 0 to 0, got 1\nhint: 0 is the main rank"
    )


def test_micro_batches_are_for_the_forward_pass_of_train() -> None:
    with pytest.raises(outrider.ConfigError) as caught:
        outrider.Session(micro_batch=4)  # type: ignore[call-arg]
    assert str(caught.value) == (
        "a loop of your own does not take micro_batch: the forward pass is in the loop, not in outrider\n"
        "hint: cut the batch and call s.backward(loss * len(piece) / len(batch)) for each piece inside "
        "`with s.no_sync():`, then s.optimizer_step(); see docs/cards.md"
    )
