"""`Session`: the user keeps the training loop, and every device takes part in it.

Decides where the ranks come from, and what may be called when; the same script runs alone, with `outrider run`, under
torchrun and in a notebook.
"""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Unpack

import torch
from torch import nn

from outrider.api.joining import find_link
from outrider.api.loaders import as_source
from outrider.api.options import SessionOptions, make_session_order
from outrider.api.preparing import sort_out
from outrider.data.augmented_feed import AugmentFunction
from outrider.data.drawer import Collate
from outrider.errors import ConfigError
from outrider.runtime.evaluation import EvaluateAll
from outrider.runtime.feeds import Source
from outrider.runtime.folder import RunFolder, new_folder, save_model
from outrider.runtime.messages import Link, as_ours
from outrider.runtime.metrics import EpochMetrics
from outrider.runtime.record import close_record
from outrider.runtime.script import cast
from outrider.runtime.session import SessionRun, new_run_dir
from outrider.runtime.world import Choice, World, choose_backend

EVALUATION_BATCH_SIZE = 256

_open: list[Session] = []
"""The session of this process that is open; a process is one rank, so there is at most one."""


class Session:
    """A training session in the user's own loop: `with outrider.Session(policy="cadence") as s:`."""

    def __init__(self, **options: Unpack[SessionOptions]) -> None:
        self._order = make_session_order(options)
        self._run: SessionRun | None = None
        self._has_ended = False
        self._epoch: int | None = None
        self._num_passes = 0
        self._pass: object = None
        self.metrics: EpochMetrics | None = None
        """Of the last epoch that ended, over all ranks."""
        self.backend: Choice | None = None
        """How averages travel, and why."""

    # Who takes part

    @property
    def rank(self) -> int:
        return self._joined().world.rank

    @property
    def world_size(self) -> int:
        return self._joined().world.size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one to print and to save."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """Where this rank computes; batches and prepared models are there already."""
        return self._joined().world.device

    @property
    def world(self) -> World:
        """All ranks, for what has no word here."""
        return self._joined().world

    @property
    def devices(self) -> tuple[str, ...]:
        """Of all ranks, as they were written."""
        return self._joined().devices

    @property
    def run_dir(self) -> Path:
        """Where rank 0 keeps the record."""
        return self._joined().folder.path

    # Opening and closing

    def __enter__(self) -> Session:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._fail(error)

    def open(self) -> Session:
        """Join the other ranks, or start them; `with` does this."""
        if self._run is not None:
            return self
        if self._has_ended:
            raise ConfigError("this session has ended", hint="make a new outrider.Session")
        if _open:
            raise ConfigError(
                "a session is open in this process already", hint="close it first: use `with outrider.Session() as s:`"
            )
        self._join(find_link(self._order))
        _open.append(self)
        return self

    def close(self) -> None:
        """End the session: all ranks meet a last time and the record is written."""
        run = self._run
        if run is None:
            return
        try:
            self._settle()
            self._end_epoch()
            run.finish()
        except BaseException as error:
            self._fail(error)
            raise
        self._let_go(None)

    def _join(self, link: Link) -> None:
        order = self._order
        join = World.join if link.environment.world_size > 1 else World.alone
        world = join(link, timeout_s=order.config.timeout_s)
        try:
            self.backend = choose_backend(order.config.backend, world.specs, hosts=world.hosts)
            folder = RunFolder(self._folder_path(world))
            self._run = SessionRun(link, world, order.recipe, order.config, backend=self.backend.backend, folder=folder)
        except BaseException as error:
            world.__exit__(type(error), error, error.__traceback__)
            raise

    def _folder_path(self, world: World) -> Path:
        here = cast()
        given = self._order.config.run_dir or (here.run_dir if here is not None and not _ended_before else None)
        wanted = given or (_unused(new_run_dir(self._order.recipe.policy)) if world.rank == 0 else "")
        return Path(world.exchange_json(str(wanted), name="run folders")[0])

    def _fail(self, error: BaseException) -> None:
        """End without meeting the others again: they may be anywhere."""
        run = self._run
        if run is None:
            return
        if run.replica is not None:
            run.link.step = run.replica.steps
            error.add_note(f"outrider: on rank {self.rank} ({run.world.spec}), step {run.replica.steps}")
        if run.is_recorded and self.is_main:
            close_record(run.folder, status="failed", error=as_ours(error, run.link))
        self._let_go(error)

    def _let_go(self, error: BaseException | None) -> None:
        run = self._joined()
        self._run, self._has_ended = None, True
        _open.clear()
        _ended_before.append(True)
        run.close()
        run.world.__exit__(None if error is None else type(error), error, None)

    # Models

    def prepare(self, *things: Any) -> Any:
        """Hand over models, optimizers and schedules, all in one call; they come back in the same order.

        Models move to this rank's device and start from rank 0's parameters. A schedule that is handed over moves with
        the samples of all ranks, one tick per batch_size samples.
        """
        run = self._joined()
        if run.replica is not None:
            raise ConfigError("prepare() was called before", hint="hand all models and optimizers to one call")
        sorted_out = sort_out(things)
        run.prepare(sorted_out.models, sorted_out.optimizers, sorted_out.schedulers)
        self._num_passes = run.first_epoch
        return things

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The prepared optimizer, where there is only one."""
        return self._only_optimizer("optimizer")

    def save(self, path: str | PathLike[str], model: nn.Module | None = None) -> None:
        """Rank 0 writes a model's parameters and buffers as safetensors; on the other ranks nothing happens."""
        self._replica_needed("save")
        replica = self._joined().replica
        assert replica is not None
        if self.is_main:
            save_model(Path(path), (model or replica.model).state_dict())

    # The loop

    def epochs(self, count: int) -> Iterator[int]:
        """Count epochs, from the checkpoint on with `resume`; metrics of all ranks are gathered at the end of each."""
        if self._order.config.resume is not None:
            self._replica_needed("epochs")
        for epoch in range(self._joined().begin_count(count), count):
            self._settle()
            self._end_epoch()
            self._epoch = epoch
            yield epoch
        self._settle()
        self._end_epoch()

    def batches(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        shuffle: bool | None = None,
        workers: int | None = None,
        collate: Collate | None = None,
        resident: bool | Literal["auto"] = "auto",
        augment: AugmentFunction | None = None,
    ) -> Iterator[Any]:
        """This rank's batches of one pass over a data set, on its device; every sample goes to one rank.

        `batch_size` is per rank, for `balanced` that of all ranks together. A DataLoader may be given in place of the
        data set: its batch size, order, collation and workers are taken over.
        """
        self._replica_needed("batches")
        source = as_source(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            workers=workers,
            collate=collate,
            resident=resident,
            augment=augment,
        )
        return self._iterate(source)

    def _iterate(self, source: Source) -> Iterator[Any]:
        run = self._joined()
        self._settle()
        if self._epoch is None:
            self._end_epoch()
        run.begin_pass(source, self._num_passes if self._epoch is None else self._epoch)
        self._num_passes += 1
        token = self._pass = object()
        while True:
            if self._pass is not token:
                raise ConfigError(
                    "this loop over batches() was ended by another call inside it",
                    hint="inside the loop call evaluate(), not evaluate_together(), batches() or epochs()",
                )
            data = run.next_batch()
            if data is None:
                break
            yield data
        self._pass = None

    def _settle(self) -> None:
        """Where the user left a loop by `break`, end the pass on all ranks before anything else."""
        self._pass = None
        self._joined().leave_pass()

    def _end_epoch(self) -> None:
        run = self._joined()
        epoch = len(run.history) if self._epoch is None else self._epoch
        concluded = run.conclude_epoch(epoch)
        if concluded is not None:
            self.metrics = concluded
        self._epoch = None

    # Steps

    def step(self, loss: torch.Tensor, *, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Backward, clip, optimizer, zero_grad; average when due."""
        self._inside("step")
        chosen = self._chosen(optimizer, "step")
        self.backward(loss)
        self.optimizer_step(chosen)

    def backward(self, loss: torch.Tensor) -> None:
        """The backward pass of a batch; may be called several times before a step, to accumulate gradients."""
        run = self._inside("backward")
        assert run.replica is not None
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ConfigError(
                f"the loss must be a scalar tensor with a gradient, got {_describe(loss)}",
                hint="pass the mean loss of the batch, computed from the model's output",
            )
        loss.backward()
        run.replica.tally.add(loss, run.loop.samples, run.replica.steps)
        if self.device.type == "cpu":
            run.replica.check_loss()

    def optimizer_step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Clip, step and zero_grad; gradients are averaged before where the policy shares them."""
        self._inside("optimizer_step")
        chosen = self._chosen(optimizer, "optimizer_step")
        chosen.step()
        chosen.zero_grad(set_to_none=True)

    def log(self, name: str, value: torch.Tensor | float) -> None:
        """Log a scalar; its mean over all ranks' batches, weighted by samples, is in the epoch's metrics."""
        run = self._inside("log")
        assert run.replica is not None
        run.replica.logbook.add(name, value, run.loop.samples)

    # Evaluation

    def evaluate(self, function: EvaluateAll, dataset: Any, *, batch_size: int = EVALUATION_BATCH_SIZE) -> float:
        """The mean of `function(model, batch)` over a data set, by this rank alone; nobody else need call it."""
        self._replica_needed("evaluate")
        source = as_source(dataset, batch_size=batch_size, shuffle=False)
        return self._joined().evaluate(function, source)

    def evaluate_together(
        self, function: EvaluateAll, dataset: Any, *, batch_size: int = EVALUATION_BATCH_SIZE
    ) -> float:
        """The same, shared by all ranks: sooner done, but every rank must call it, outside of batches()."""
        self._replica_needed("evaluate_together")
        self._settle()
        source = as_source(dataset, batch_size=batch_size, shuffle=False)
        return self._joined().evaluate_together(function, source)

    # What may be called when

    def _joined(self) -> SessionRun:
        if self._run is None:
            state = "has ended" if self._has_ended else "is not open"
            raise ConfigError(f"the session {state}", hint="use it inside `with outrider.Session() as s:`")
        return self._run

    def _replica_needed(self, what: str) -> None:
        if self._joined().replica is None:
            raise ConfigError(
                f"{what}() was called before prepare()",
                hint="call model, optimizer = s.prepare(model, optimizer) first",
            )

    def _inside(self, what: str) -> SessionRun:
        run = self._joined()
        if run.replica is None or self._pass is None or not run.loop.is_inside:
            raise ConfigError(
                f"{what}() was called outside of the batches() loop",
                hint="call it inside `for batch in s.batches(dataset, batch_size=64):`",
            )
        return run

    def _chosen(self, optimizer: torch.optim.Optimizer | None, what: str) -> torch.optim.Optimizer:
        replica = self._joined().replica
        assert replica is not None
        if optimizer is None:
            return self._only_optimizer(f"{what}()")
        if all(optimizer is not prepared for prepared in replica.optimizers):
            raise ConfigError(
                f"{what}() was given an optimizer that was not given to prepare(): {type(optimizer).__name__}",
                hint="hand all models and their optimizers to one call of prepare()",
            )
        return optimizer

    def _only_optimizer(self, what: str) -> torch.optim.Optimizer:
        self._replica_needed(what)
        replica = self._joined().replica
        assert replica is not None
        if len(replica.optimizers) > 1:
            raise ConfigError(
                f"{len(replica.optimizers)} optimizers were prepared, and {what} needs one",
                hint="name it: s.step(loss, optimizer=generator_optimizer)",
            )
        return replica.optimizers[0]


_ended_before: list[bool] = []
"""One entry per session that has ended in this process: the folder that its starter made was for the first."""


def open_session() -> Session | None:
    """The session of this process, where one is open."""
    return _open[0] if _open else None


def _unused(path: Path) -> Path:
    """A folder of this name, or a numbered one, that nobody else has taken; it is made, as only that is safe."""
    return new_folder(path.parent, path.name)


def _describe(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"a tensor of shape {tuple(value.shape)}" + ("" if value.requires_grad else " without a gradient")
