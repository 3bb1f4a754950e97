"""`Session`: the user keeps the training loop, and every device takes part in it.

Decides how the ranks are found or started, and which method may be called when. The same script runs alone, with
`outrider run`, under torchrun and in a notebook.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Unpack

import torch
from torch import nn
from torch.utils.data import DataLoader

from outrider.api.joining import find_link
from outrider.api.loaders import as_source
from outrider.api.options import SessionOptions, make_session_order, overridden
from outrider.api.preparing import sort_out
from outrider.api.replay_wish import refuse_replay
from outrider.api.run_html import run_html
from outrider.api.run_talk import RunTalk
from outrider.api.running_mean import RunningMean
from outrider.api.session_batches import PassPlace, SessionBatches
from outrider.api.session_gather import gather
from outrider.api.session_interruption import SessionInterruption
from outrider.api.session_sampling import start_sampler
from outrider.average.transport.backend_table import BackendChoice, choose_backend
from outrider.data.augmented_feed import AugmentFunction
from outrider.data.sample_reader import Collate
from outrider.errors import ConfigError
from outrider.launch.interruption import is_interruption
from outrider.launch.script_launcher import script_rank
from outrider.rank.agreement import compare, options_to_compare
from outrider.rank.session_feeds import Source
from outrider.rank.session_run import SessionRun
from outrider.rank.shared_evaluation import EvaluateAll
from outrider.rank.training_length import Goal
from outrider.record.disk_space import save_or_keep
from outrider.record.epoch_metrics import EpochMetrics
from outrider.record.run_folder import RunFolder, check_ending, new_run_dir
from outrider.record.run_record import close_record
from outrider.record.run_timeline import complete_timeline
from outrider.replica.out_of_memory import is_out_of_memory
from outrider.replica.schedule_ticks import TickPer
from outrider.timeline.sampler import Sampler
from outrider.watch.watch_child import WatchChild, open_page, wants_page
from outrider.world.messages import Link
from outrider.world.rank_errors import as_ours
from outrider.world.world import World

EVALUATION_BATCH_SIZE = 256

_open: list[Session] = []
"""The open session of this process; a process is one rank, so there is at most one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Membership:
    """Facts about this process as a rank of its session; set on joining, and kept after the session has ended."""

    rank: int
    devices: tuple[str, ...]
    device: torch.device
    run_dir: Path


class Session:
    """A training session in the user's own loop: `with outrider.Session() as s:`."""

    def __init__(self, **options: Unpack[SessionOptions]) -> None:
        refuse_replay()
        self._order = make_session_order(overridden(options))
        self._run: SessionRun | None = None
        self._membership: _Membership | None = None
        self._sampler: Sampler | None = None
        self._page: WatchChild | None = None
        self._has_ended = False
        self._interruption = SessionInterruption()
        self._epoch: int | None = None
        self._num_passes = 0
        self._pass: object = None
        self._talk = RunTalk()
        self._means: list[RunningMean] = []
        self._metrics: EpochMetrics | None = None
        self.backend: BackendChoice | None = None
        """The backend of averages, and the reason for it."""

    # Rank and world; also available after the end of the session

    @property
    def rank(self) -> int:
        return self._member().rank

    @property
    def world_size(self) -> int:
        return len(self._member().devices)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which should print and save."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """The device of this rank; batches and prepared models are on it."""
        return self._member().device

    @property
    def world(self) -> World:
        """The group of all ranks, for your own communication."""
        return self._joined().world

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of all ranks, as given in the options."""
        return self._member().devices

    @property
    def metrics(self) -> EpochMetrics | None:
        """Metrics of the current epoch over all ranks, available once its loop over batches() has ended.

        During the loop these are the metrics of the previous epoch; None in the first epoch.
        """
        return self._metrics if self._run is None else self._run.metrics

    @property
    def run_dir(self) -> Path:
        """The run folder, in which rank 0 writes the record."""
        return self._member().run_dir

    def _repr_html_(self) -> str | None:
        return None if self._membership is None else run_html(self.run_dir)

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
        has_page = wants_page(self._order.config.watch)
        self._join(find_link(self._order))
        if has_page and self.is_main:
            self._page = open_page(self.run_dir)
        self._interruption.open(self._joined().link)
        _open.append(self)
        return self

    def close(self) -> None:
        """End the session: synchronise all ranks a last time and write the record."""
        run = self._run
        if run is None:
            return
        try:
            if not self._interruption.is_raised:
                self._settle()
                run.leave_loops()
                self._end_epoch()
                run.finish()
        except BaseException as error:
            self._fail(error)
            raise
        self._let_go(None)
        if run.world.rank == 0 and run.is_recorded:
            complete_timeline(run.folder.path, self._sampler)
            if run.link.interrupted_by is None:
                self._talk.end(run.folder.path)
        self._interruption.raise_late(run.link)

    def _join(self, link: Link) -> None:
        order = self._order
        join = World.join if link.environment.world_size > 1 else World.alone
        world = join(link, timeout_s=order.config.timeout_s)
        try:
            compare(world, world.exchange_json(options_to_compare(order.recipe, order.config), name="options"))
            self.backend = choose_backend(
                order.config.backend, world.specs, hosts=world.hosts, has_one_torch=world.has_one_torch
            )
            folder = RunFolder(self._folder_path(world))
            run = SessionRun(link, world, order.recipe, order.config, backend=self.backend.backend, folder=folder)
            self._membership = _Membership(
                rank=world.rank, devices=run.devices, device=world.device, run_dir=folder.path
            )
            self._sampler = start_sampler(
                world,
                origin_s=run.recorder.origin_s,
                is_wanted=order.config.sample_utilization,
                folder=folder.path,
            )
            self._run = run
            self._talk = RunTalk.open(order.config.quiet, is_main=world.rank == 0)
            self._talk.introduce(run.devices, policy=order.policy_words, folder=folder.path)
            run.tell_choices(self._talk.chose)
            run.tell_warnings(self._talk.warn)
        except BaseException as error:
            world.__exit__(type(error), error, error.__traceback__)
            raise

    def _folder_path(self, world: World) -> Path:
        here = script_rank()
        given = self._order.config.run_dir or (here.run_dir if here is not None and not _ended_before else None)
        wanted = given or (new_run_dir(self._order.recipe.policy_spec.name) if world.rank == 0 else "")
        return Path(world.exchange_json(str(wanted), name="run folders")[0])

    def _fail(self, error: BaseException) -> None:
        """End without synchronising with the other ranks, whose state is unknown."""
        run = self._run
        if run is None:
            return
        self._talk.pause()
        if self._interruption.is_raised:
            self.close()
            return
        if run.replica is not None:
            run.link.step = run.replica.steps
            error.add_note(f"outrider: on rank {self.rank} ({run.world.spec}), step {run.replica.steps}")
            if run.world.size > 1 and run.recipe.policy_spec.switches and is_out_of_memory(error):
                error.add_note(
                    'outrider: with policy="auto" a rank may take whole batches; policy="balanced" always divides them'
                )
            if run.has_rested and not self.is_main:
                error.add_note(
                    "outrider: rank 0 trained alone in the last pass, so this rank may have had no batch: sums of your "
                    "own are empty here; s.metrics.loss is the mean of all ranks"
                )
        if run.is_recorded and self.is_main:
            status = "interrupted" if is_interruption(error, run.link) else "failed"
            close_record(run.folder, status=status, error=as_ours(error, run.link))
        self._let_go(error)
        # If a launcher started the ranks, it completes the timeline once all of them have ended.
        if run.is_recorded and self.is_main and not run.link.owns_process:
            complete_timeline(run.folder.path, self._sampler)

    def _let_go(self, error: BaseException | None) -> None:
        run = self._joined()
        self._run, self._has_ended, self._metrics = None, True, run.metrics
        self._interruption.close()
        _open.clear()
        _ended_before.append(True)
        if self._sampler is not None:
            self._sampler.end()
        run.close()
        if self._page is not None:
            self._page.close()
        run.world.__exit__(None if error is None else type(error), error, None)

    # Models

    def prepare(self, *things: Any, per: TickPer = "optimizer-step") -> Any:
        """Prepare all models, optimizers, schedules and a GradScaler in one call; returns them in the same order.

        Models move to this rank's device and start from rank 0's parameters. A prepared schedule advances with the
        samples of all ranks. `per` is the unit of one tick: the optimizer step of one device, "sample-batch" (one
        batch, even if you accumulate gradients) or "epoch".
        """
        run = self._joined()
        if run.replica is not None:
            raise ConfigError("prepare() was called before", hint="hand all models and optimizers to one call")
        sorted_out = sort_out(things)
        run.prepare(sorted_out.models, sorted_out.optimizers, sorted_out.schedulers, sorted_out.scaler, per)
        self._num_passes = run.first_epoch
        return things

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The prepared optimizer, if there is only one."""
        return self._only_optimizer("optimizer")

    def save(self, path: str | PathLike[str], model: nn.Module | None = None) -> None:
        """Write a model's state dict on rank 0; the other ranks do nothing.

        The ending decides the format: `.safetensors`, or `.pt` and `.pth` for `torch.save`.
        """
        self._replica_needed("save")
        check_ending(Path(path))
        if model is not None and not isinstance(model, nn.Module):
            raise ConfigError(
                f"save() takes a model as its second argument, got {type(model).__name__}",
                hint='checkpoints hold optimizers too: Session(checkpoint_every=1), resume="auto"',
            )
        replica = self._joined().replica
        assert replica is not None
        if self.is_main:
            save_or_keep(Path(path), (model or replica.model).state_dict())

    def ema(self, model: nn.Module | None = None, *, decay: float | Callable[[int], float] = 0.9998) -> RunningMean:
        """A copy of a prepared model that follows it as an exponential moving average; every rank must call this.

        Call `ema.update()` after each step and evaluate `ema.module`. `decay` applies to one step of one device; it is
        a number, or a function of the step number. After each loop over batches() the average is equal on all ranks,
        with every policy.
        """
        self._replica_needed("ema")
        run = self._joined()
        assert run.replica is not None
        assert self.backend is not None
        self._settle()
        mean = RunningMean(
            model or run.replica.model,
            decay=decay,
            count=lambda: self.global_step,
            world=run.world,
            backend=self.backend,
            on_restart=run.tell_new_running_mean,
        )
        self._means.append(mean)
        return mean

    # The loop

    def epochs(
        self, count: int | None = None, *, steps: int | None = None, samples: int | None = None
    ) -> Iterator[int]:
        """Iterate over epochs and merge the metrics of all ranks after each; `resume` continues from a checkpoint.

        Instead of a number of epochs you can pass `steps=` or `samples=` of the whole world, counted from the start of
        the run; the last epoch then ends early. A step here is a batch of `batch_size` samples.
        """
        if self._order.config.resume is not None:
            self._replica_needed("epochs")
        run = self._joined()
        epoch = run.begin_count(Goal(epochs=count, steps=steps, samples=samples))
        self._settle()
        self._end_epoch()
        try:
            while not run.has_ended(epoch):
                self._epoch = epoch
                yield epoch
                self._settle()
                if not run.goes_on(f"the end of epoch {epoch}"):
                    return
                self._end_epoch()
                epoch += 1
        finally:
            run.is_counting = False

    @property
    def samples_seen(self) -> int:
        """Samples of the whole world since the start of the run, as learning-rate schedules count them.

        The number is equal on all ranks after an average; between averages each rank has its own estimate.
        """
        return self._joined().samples_seen

    @property
    def global_step(self) -> int:
        """`samples_seen` in optimizer steps of one device; comparable between policies and numbers of ranks.

        A step has `batch_size` samples, times the number of batches over which you accumulate gradients.
        """
        replica = self._joined().replica
        return 0 if replica is None else replica.counts.steps.at(self.samples_seen)

    @property
    def batch_samples(self) -> int:
        """Samples of the current batch that count; 0 if this rank computes it only to keep in step with others."""
        return self._inside("batch_samples").loop.samples

    @property
    def progress(self) -> float:
        """The finished fraction of the loop over `epochs()`; in an epoch with several passes only the first counts."""
        return self._joined().progress(self._epoch)

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
        drop_last: bool | None = None,
        order: Callable[[int], Any] | Iterable[int] | None = None,
        length: int | None = None,
    ) -> SessionBatches:
        """Iterate over this rank's batches of one pass over a data set, on its device; every sample goes to one rank.

        `batch_size` is per rank; with `balanced` it is the batch size of all ranks together. You can pass a DataLoader
        instead of the data set: its settings are used, or refused if that is not possible. `drop_last=True` drops the
        last samples that do not fill a batch. `order` is a function from the epoch to the indices of its samples, or a
        sampler; each position of the sequence goes to one rank. An iterable data set without a length needs `length`,
        its number of samples per epoch; every rank reads it and skips the samples of other ranks. `len()` of the result
        is the number of steps that one device would take, equal on all ranks. It is available before `prepare()`, so
        that you can create a schedule from it.
        """
        run = self._joined()
        source = as_source(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            workers=workers,
            collate=collate,
            resident=resident,
            augment=augment,
            drop_last=drop_last,
            order=order,
            length=length,
        )
        return SessionBatches(
            lambda place: self._iterate(source, place),
            count=lambda: run.num_steps(source),
            check=lambda: self._replica_needed("batches"),
            settle=self._settle,
            next_epoch=lambda: self._num_passes if self._epoch is None else self._epoch,
        )

    def state_dict(self) -> dict[str, Any]:
        """The position in the loop (epochs, samples, ticks), for your own checkpoint of model, optimizer and schedule.

        It includes the position in the current pass: the samples that the model of this rank has learned from.
        """
        self._replica_needed("state_dict")
        return self._joined().state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`, on any number of ranks.

        All ranks call this between prepare() and the loop; the state of rank 0 is used.
        """
        self._replica_needed("load_state_dict")
        run = self._joined()
        if self._order.config.resume is not None or run.is_recorded or run.goal is not None:
            raise ConfigError(
                "load_state_dict() was called in a session that has begun, or resumes from a checkpoint of its own",
                hint="call it after prepare(), before the loop over epochs() or batches(), and leave resume out",
            )
        run.load(state_dict)
        self._num_passes = run.first_epoch

    def _iterate(self, source: Source, place: PassPlace) -> Generator[Any]:
        self._replica_needed("batches")
        run = self._joined()
        self._settle()
        # Where passes are left out, ranks meet nowhere, so rank 0 must not tell of them.
        if run.skips_pass():
            self._num_passes += 1
            return
        if run.is_over(source) or not run.goes_on("a pass over the data"):
            return
        if self._epoch is None:
            self._end_epoch()
        self._talk.begin(run.learning_words)
        epoch = self._num_passes if self._epoch is None else self._epoch
        order_epoch = run.begin_pass(source, epoch, place.begin())
        self._num_passes = order_epoch + 1 if self._epoch is None else self._num_passes + 1
        token = self._pass = object()
        place.now = lambda: run.pass_state()
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
            self._show_progress(run)
        self._pass = None
        place.end(run.pass_state())
        self._average_means()
        self._talk.pause()
        self._interruption.raise_due(self._joined())

    def _average_means(self) -> None:
        """Average the running means over ranks; called when all ranks have ended a pass."""
        source = 0 if self._joined().has_rested else None
        for mean in self._means:
            mean.average(source=source)

    def _show_progress(self, run: SessionRun) -> None:
        bar = self._talk.bar
        if bar is not None and bar.is_due() and not run.link.wants_stop:
            bar.show(*run.how_far(self._epoch), loss=run.mean_loss())

    def _settle(self) -> None:
        """If the user left a loop by `break`, end the pass on all ranks before anything else."""
        was_left, self._pass = self._pass is not None, None
        self._talk.pause()
        self._joined().leave_pass()
        if was_left:
            self._average_means()
        self._interruption.raise_due(self._joined())

    def _end_epoch(self) -> None:
        run = self._joined()
        epoch = len(run.history) if self._epoch is None else self._epoch
        run.conclude_epoch(epoch)
        self._epoch = None
        self._interruption.raise_due(self._joined())

    # Steps

    def step(self, loss: torch.Tensor, *, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Backward, clip, optimizer, zero_grad; average when due."""
        self._inside("step")
        chosen = self._chosen(optimizer, "step")
        self.backward(loss)
        self.optimizer_step(chosen)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of a batch; call it several times before a step to accumulate gradients.

        In shared steps (`sync`, `balanced`, and `auto` until it switches to local steps) gradients are averaged when
        this returns; with a GradScaler they are averaged when they are unscaled.
        """
        run = self._inside("backward")
        assert run.replica is not None
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ConfigError(
                f"the loss must be a scalar tensor with a gradient, got {_describe(loss)}",
                hint="pass the mean loss of the batch, computed from the model's output",
            )
        run.loop.backward(loss)

    def no_sync(self) -> AbstractContextManager[None]:
        """Context in which `backward` does not average gradients, for batches that are computed in several pieces.

        The first `backward` after the context averages them, or else the step.
        """
        return self._inside("no_sync").loop.keeping_gradients()

    def optimizer_step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Clip, step and zero_grad; in a shared step, first average gradients if `backward` has not done so."""
        run = self._inside("optimizer_step")
        assert run.replica is not None
        chosen = self._chosen(optimizer, "optimizer_step")
        run.replica.step_alone(chosen)
        chosen.zero_grad(set_to_none=True)

    def log(self, name: str, value: torch.Tensor | float) -> None:
        """Log a scalar; the epoch's metrics contain its mean over the batches of all ranks, weighted by samples."""
        run = self._inside("log")
        assert run.replica is not None
        run.replica.logged_scalars.add(name, value, run.loop.samples)

    # Evaluation

    def evaluate(
        self, function: EvaluateAll, dataset: Any, *, batch_size: int | None = None, length: int | None = None
    ) -> float:
        """The mean of `function(model, batch)` over a data set, computed by this rank alone."""
        self._replica_needed("evaluate")
        source = self._evaluated(dataset, batch_size, length)
        return self._joined().evaluate(function, source)

    def evaluate_together(
        self, function: EvaluateAll, dataset: Any, *, batch_size: int | None = None, length: int | None = None
    ) -> float:
        """Like `evaluate`, but divided among all ranks; faster, but every rank must call it, outside of batches()."""
        self._replica_needed("evaluate_together")
        self._settle()
        source = self._evaluated(dataset, batch_size, length)
        return self._joined().evaluate_together(function, source)

    def gather(self, value: Any) -> list[Any]:
        """Gather a number, text, list or dict from every rank, in rank order; every rank must call it.

        Call it outside of the loop over batches(), because ranks take different numbers of batches.
        """
        self._settle()
        return gather(self._joined().world, value)

    def _evaluated(self, dataset: Any, batch_size: int | None, length: int | None) -> Source:
        default = None if isinstance(dataset, DataLoader) else EVALUATION_BATCH_SIZE
        return as_source(dataset, batch_size=batch_size or default, shuffle=False, length=length)

    # Checks of the order of calls

    def _member(self) -> _Membership:
        if self._membership is None:
            raise ConfigError("the session is not open", hint="use it inside `with outrider.Session() as s:`")
        return self._membership

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
"""One entry per finished session of this process; the starter's run folder is only for the first session."""


def framework_session(options: Mapping[str, Any], *, policy: str) -> Session:
    """A session for a framework, where `policy` is the default."""
    session = Session(**{"policy": policy, **options})
    order = session._order
    is_given = "policy" in options or order.recipe.policy != policy
    session._order = replace(order, is_policy_given=is_given)
    return session


def open_session() -> Session | None:
    """The open session of this process, if any."""
    return _open[0] if _open else None


def _describe(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"a tensor of shape {tuple(value.shape)}" + ("" if value.requires_grad else " without a gradient")
