"""`Accelerator` for scripts of accelerate: the same methods, in a session on devices of unequal speed.

Decides what each method of accelerate's Accelerator means on ranks that take different numbers of batches: it does the
same as with accelerate, or raises with the way out. See docs/huggingface.md. Over 400 lines, because
what replaces methods of one class is one class.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import accelerate
import torch
from torch.utils.data import DataLoader

from outrider.api.session_hooks import SessionHooks
from outrider.data.sample_reader import to_device
from outrider.errors import ConfigError
from outrider.integrations.accelerate_arguments import join_session, refuse_arguments
from outrider.integrations.accelerate_loaders import (
    HandedOut,
    PreparedLoader,
    PreparedSchedule,
    TrainedPasses,
    concatenated,
    evaluated_batches,
    on_host,
    separated,
)
from outrider.integrations.hf_arguments import become_one_process
from outrider.integrations.hf_batches import StepLoader
from outrider.integrations.hf_steps import StepCount
from outrider.integrations.plain_values import as_told, from_told
from outrider.integrations.rank_arrays import RankArrays
from outrider.launch.script_launcher import at_script_end


class Accelerator(accelerate.Accelerator):
    """accelerate's Accelerator in a session; `session_options` are those of `outrider.Session`, which it opens."""

    def __init__(self, *args: Any, session_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        refuse_arguments(args, kwargs)
        self.session, self._opened = join_session(session_options or {})
        self._hooks = SessionHooks(self.session)
        self._hooks.share_always()
        if self._hooks.keeps_checkpoints:
            raise ConfigError(
                "checkpoint_every and resume of the session would keep a second set of checkpoints",
                hint="use accelerator.save_state() and load_state() after a training loop",
            )
        become_one_process(self.session, local_rank=self._hooks.local_rank)
        if kwargs.get("cpu") and self.session.device.type != "cpu":
            raise ConfigError(
                f"Accelerator(cpu=True), but rank {self.session.rank} trains on {self.session.device}",
                hint="leave cpu out: the devices of the session decide",
            )
        self._is_alone = False
        """While accelerate prepares a loader, which must not be divided."""
        self._in_hand: HandedOut | None = None
        self._count: StepCount | None = None
        self._num_handed = 0
        """Steps of the pass under way for which this rank got a batch."""
        self._place, self._prepared = TrainedPasses(), list[Any]()
        self._loss: torch.Tensor | None = None
        self._arrays: RankArrays | None = None
        kwargs["cpu"] = self.session.device.type == "cpu"
        super().__init__(**kwargs)
        self.register_for_checkpointing(self._place)
        if self._opened:
            at_script_end(self._end)

    @property
    def num_processes(self) -> int:
        return 1 if self._is_alone else self.session.world_size

    @property
    def use_distributed(self) -> bool:
        return self.session.world_size > 1

    @property
    def is_last_process(self) -> bool:
        return self.session.rank == self.session.world_size - 1

    # Preparing

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        prepared = super().prepare_model(model, device_placement=device_placement, evaluation_mode=evaluation_mode)
        self._refuse_late("a model")
        self._prepared.append(self.unwrap_model(model))
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        self._refuse_late("an optimizer")
        prepared = super().prepare_optimizer(optimizer, device_placement=device_placement)
        self._prepared.append(prepared.optimizer)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        if isinstance(scheduler, PreparedSchedule):
            return scheduler
        prepared = PreparedSchedule(scheduler, ticks_due=self._ticks_due)
        self._schedulers.append(prepared)
        return prepared

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        if slice_fn_for_dispatch is not None:
            raise ConfigError("slice_fn_for_dispatch: every rank reads its own samples", hint="leave it out")
        if isinstance(data_loader, PreparedLoader):
            return data_loader
        self._is_alone = True
        try:
            # For its seedable sampler; the session divides the data.
            loader = super().prepare_data_loader(data_loader, device_placement=device_placement)
        finally:
            self._is_alone = False
        return PreparedLoader(loader, steps=self._as_steps(loader), open_pass=self._open_pass)

    @property
    def _num_parts(self) -> int:
        """Batches that a step of all ranks has: their number with policy `sync`."""
        policy = self._hooks.policy
        return self.session.world_size if policy.shares_steps and not policy.batch_is_global else 1

    def _as_steps(self, loader: DataLoader[Any]) -> StepLoader:
        return StepLoader(
            loader,
            accumulation=self.gradient_accumulation_steps,
            num_parts=self._num_parts,
            pins_memory=self.session.device.type == "cuda",
        )

    def _refuse_late(self, what: str) -> None:
        if self._hooks.is_prepared:
            raise ConfigError(
                f"{what} was prepared after the training had begun", hint="call prepare() before the first loop"
            )

    def _start(self) -> None:
        """Give everything to the session, at the first loop: a script may prepare in several calls."""
        if not self._hooks.is_prepared and self._optimizers:
            scaler = [] if self.scaler is None else [self.scaler]
            self.session.prepare(*self._prepared, *scaler)

    # Loops

    def _open_pass(self, loader: PreparedLoader) -> Iterator[Any]:
        self._start()
        models = [thing for thing in self._prepared if isinstance(thing, torch.nn.Module)]
        is_training = torch.is_grad_enabled() and bool(self._optimizers) and all(model.training for model in models)
        return self._trained(loader) if is_training else self._evaluated(loader)

    def _trained(self, loader: PreparedLoader) -> Iterator[Any]:
        steps = loader.steps
        self._count = StepCount(step_samples=steps.step_samples, steps_per_epoch=steps.num_steps)
        self._count.open(0, step=0, samples=self.session.samples_seen)
        self._hooks.begin_at_pass(self._place.num_passes)
        self._num_handed = 0
        for schedule in self._schedulers:
            schedule.open_pass()
        try:
            for micro_batches in self.session.batches(steps.loader):
                self._num_handed += 1
                yield from self._micro_batches(micro_batches)
        finally:
            self._in_hand = None
            self._place.num_passes += 1
        self._follow_schedules()

    def _follow_schedules(self) -> None:
        """After a pass all ranks are at the step that the farthest one knows of, and at its end after local steps."""
        told = self._told([[one.in_pass, one.is_estimated] for one in self._schedulers], "the end of a pass")
        for schedule, of_ranks in zip(self._schedulers, zip(*told, strict=True), strict=True):
            due = max(ticks for ticks, _ in of_ranks)
            if self._count is not None and any(is_estimated for _, is_estimated in of_ranks):
                due = max(due, self._count.after_batch(self.session.samples_seen))
            schedule.follow(due)

    def _micro_batches(self, micro_batches: list[dict[str, Any]]) -> Iterator[Any]:
        samples = sum(batch["count"] for batch in micro_batches)
        self._loss = None
        for number, batch in enumerate(micro_batches, start=1):
            is_last = number == len(micro_batches)
            self._in_hand = HandedOut(samples=samples, count=batch["count"], is_last=is_last, is_training=True)
            self.gradient_state._set_sync_gradients(is_last)
            yield batch["inputs"]

    def _evaluated(self, loader: PreparedLoader) -> Iterator[Any]:
        metrics = self.session.metrics
        shares = [1.0] * self.session.world_size if metrics is None else list(metrics.share_by_rank)
        try:
            for batch, count in evaluated_batches(loader.loader, shares, rank=self.session.rank):
                self._in_hand = HandedOut(samples=count, count=count, is_last=True, is_training=False)
                yield to_device(batch, self.session.device)
        finally:
            self._in_hand = None

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        raise ConfigError(
            "skip_first_batches() would begin in the middle of a pass, whose place save_state() does not have",
            hint="call save_state() after a training loop; load_state() then goes on with the next one",
        )

    def _ticks_due(self, schedule: PreparedSchedule) -> int:
        """Ticks of a schedule at this call of its `step()`."""
        hand, count = self._in_hand, self._count
        if hand is None or not hand.is_training or count is None:
            return 1
        if not hand.is_last or any(optimizer.step_was_skipped for optimizer in self._optimizers):
            return 0
        schedule.num_steps += 1
        if self._hooks.is_shared or self.session.world_size == 1:
            return self._num_parts
        if schedule.num_steps < self._num_handed:
            raise ConfigError(
                "a schedule was not stepped after every batch of a pass whose ranks take different numbers of batches",
                hint="pass gradient_accumulation_steps=n and use accelerator.accumulate(model); or pass "
                'session_options={"policy": "balanced"}',
            )
        schedule.is_estimated = True
        return max(0, count.after_batch(self.session.samples_seen) - schedule.in_pass)

    # Steps

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Nothing to do: the loader says after which batch the optimizer steps, and only then ranks average."""
        yield

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Nothing to do: gradients are averaged when the optimizer steps."""
        yield

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Nothing to do: a rank that has no more batches never keeps the others waiting."""
        yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        if kwargs:
            raise ConfigError(f"backward() was given {', '.join(kwargs)}", hint="pass the loss alone")
        hand = self._in_hand
        if hand is None or not hand.is_training:
            raise ConfigError(
                "backward() was called outside of a training loop over a prepared loader",
                hint="call model.train() before `for batch in train_dataloader:`, and prepare the loader",
            )
        part = loss * (hand.count / hand.samples)
        self._hooks.backward(part)
        self._loss = part.detach() if self._loss is None else self._loss + part.detach()
        if hand.is_last:
            self._hooks.add_loss(self._loss)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        self._average_gradients()
        return super().clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        self._average_gradients()
        super().clip_grad_value_(parameters, clip_value)

    def _average_gradients(self) -> None:
        """In a shared step the mean gradient is clipped, as on one device."""
        if self._in_hand is not None and self._in_hand.is_training and self._in_hand.is_last:
            for optimizer in self._optimizers:
                self._hooks.share_gradients(optimizer.optimizer)

    # Between ranks

    def gather(self, tensor: Any) -> Any:
        return self._gathered(tensor, "gather()", keep=None)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        hand = self._in_hand
        keep = 0 if hand is not None and not hand.is_training and hand.count == 0 else None
        if not use_gather_object:
            return self._gathered(input_data, "gather_for_metrics()", keep=keep)
        mine = list(input_data)[:keep] if keep is not None else list(input_data)
        return [item for one in self._all(mine, "gather_for_metrics()") for item in one]

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        def reduced(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: reduced(item) for name, item in value.items()}
            if isinstance(value, tuple | list):
                return type(value)(reduced(item) for item in value)
            total = self._gathered(value[None], "reduce()", keep=None).sum(0) * scale
            return total / self.session.world_size if reduction == "mean" else total

        return tensor if reduction == "none" else reduced(tensor)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        def padded(value: torch.Tensor) -> torch.Tensor:
            longest = max(self._all(value.shape[dim], "pad_across_processes()"))
            rest = list(value.shape)
            rest[dim] = longest - value.shape[dim]
            filler = value.new_full(rest, pad_index)
            return torch.cat([filler, value] if pad_first else [value, filler], dim=dim)

        if isinstance(tensor, dict):
            return {name: self.pad_across_processes(item, dim, pad_index, pad_first) for name, item in tensor.items()}
        if isinstance(tensor, tuple | list):
            return type(tensor)(self.pad_across_processes(item, dim, pad_index, pad_first) for item in tensor)
        return tensor if tensor.ndim <= dim else padded(tensor)

    def wait_for_everyone(self) -> None:
        self._all(None, "wait_for_everyone()")

    def check_trigger(self) -> bool:
        flag: Any = getattr(self, "flag_tensor", None)
        is_told = any(self._all(flag is not None and bool(flag.item()), "check_trigger()"))
        if is_told:
            self.flag_tensor = torch.tensor(0, device=self.device)
        return is_told

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        if not self.is_main_process:
            self.wait_for_everyone()
        yield
        if self.is_main_process:
            self.wait_for_everyone()

    local_main_process_first = main_process_first

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        state, world_size = accelerate.PartialState(), self.session.world_size
        state.num_processes = world_size
        try:
            with state.split_between_processes(inputs, apply_padding=apply_padding) as part:
                state.num_processes = 1
                yield part
        finally:
            state.num_processes = 1

    def trigger_sync_in_backward(self, model: Any) -> Any:
        raise ConfigError(
            "trigger_sync_in_backward(): gradients are averaged when the optimizer steps, not in a backward pass",
            hint="leave it out",
        )

    def _gathered(self, value: Any, what: str, *, keep: int | None) -> Any:
        if self.session.world_size == 1:
            return value
        self._refuse_apart(what)
        if self._arrays is None:
            self._arrays = RankArrays(self.session.world)
        return to_device(concatenated(self._arrays.gather(on_host(value, keep=keep))), self.session.device)

    def _all(self, value: Any, what: str) -> list[Any]:
        """The values of all ranks; all of them call this at one place."""
        self._refuse_apart(what)
        return [from_told(told) for told in self._told(as_told(value), what)]

    def _told(self, value: Any, what: str) -> list[Any]:
        return [value] if self.session.world_size == 1 else self._hooks.exchange(value, what=what)

    def _refuse_apart(self, what: str) -> None:
        """Raise where other ranks are at other batches, or have another number of micro-batches."""
        hand = self._in_hand
        if hand is None or not hand.is_training or self.session.world_size == 1:
            return
        if not self._hooks.is_shared or not hand.is_last:
            raise ConfigError(
                f"{what} in a training loop whose ranks take different numbers of batches would wait for ranks that "
                "never come",
                hint="call it after the loop, or where accelerator.sync_gradients is true with session_options="
                '{"policy": "balanced"}; accelerator.session.log(name, value) takes the mean of all ranks',
            )

    # Files and the end

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        if self._in_hand is not None and self._in_hand.is_training:
            raise ConfigError(
                "save_state() in a training loop: a checkpoint of accelerate does not have the place in the data",
                hint="call it after the loop; accelerator.session.state_dict() has the place in a loop of your own",
            )
        self._told(None, "save_state()")
        path = super().save_state(output_dir, safe_serialization=safe_serialization, **kwargs)
        self._told(None, "save_state()")
        return path

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        return separated(super().get_state_dict(model, unwrap=unwrap))

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        super().save(separated(obj), f, safe_serialization=safe_serialization)

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        if self._hooks.is_prepared:
            raise ConfigError(
                "load_state() was called after the training had begun",
                hint="call it between prepare() and the first loop",
            )
        super().load_state(input_dir, *args, **kwargs)

    def end_training(self) -> None:
        """Finish trackers and end the session: all ranks call this once, at the end of the script."""
        for tracker in self.trackers:
            tracker.finish()
        self._end()

    def _end(self) -> None:
        if self._opened and not self._hooks.has_ended:
            error = getattr(sys, "last_value", None)
            self.session.__exit__(None if error is None else type(error), error, None)


__all__ = ["Accelerator"]
