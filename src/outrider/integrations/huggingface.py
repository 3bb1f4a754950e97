"""Hugging Face's `Trainer` in a session: the Trainer's loop, data, callbacks and files, on devices of unequal speed.

`OutriderMixin` comes before any Trainer class: `class Mine(OutriderMixin, SFTTrainer)`. It replaces the loop over an
epoch; all other methods of the Trainer keep their meaning, on every rank. See docs/huggingface.md. Over 400 lines,
because what replaces methods of one class is one class.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers.optimization import GreedyLR
from transformers.trainer_callback import DefaultFlowCallback, TrainerControl
from transformers.trainer_utils import EvalLoopOutput

from outrider.api.session import Session
from outrider.api.session_hooks import SessionHooks
from outrider.errors import ConfigError
from outrider.integrations import hf_evaluation
from outrider.integrations.hf_arguments import join, refuse_arguments, refuse_device, settle_in, tell_of_gathers
from outrider.integrations.hf_batches import StepLoader
from outrider.integrations.hf_place import check_place, place_after, read_place, write_place
from outrider.integrations.hf_steps import (
    FLAGS,
    SinceMeeting,
    StepCount,
    goal_samples,
    items_to_divide_by,
    world_mean,
)
from outrider.integrations.rank_arrays import RankArrays


class OutriderMixin:
    """Trains through a session; put it before the class of the Trainer."""

    # Of the Trainer that this is mixed into
    args: Any
    state: Any
    control: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    callback_handler: Any
    current_flos: float

    def __init__(self, *args: Any, session_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """`session_options` are those of `outrider.Session`, which the Trainer opens; not if one is open already."""
        self._session_options = dict(session_options or {})
        self._session: Session | None = None
        self._in_meeting = False
        self._in_forward = False
        self._num_evaluations = 0
        self._arrays: RankArrays | None = None
        super().__init__(*args, **kwargs)

    # The session

    @property
    def session(self) -> Session:
        """The session in which this Trainer trains."""
        assert self._session is not None, "the Trainer's constructor opens it"
        return self._session

    def create_accelerator_and_postprocess(self) -> None:
        refuse_arguments(self.args)
        self._join()
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if self.session.world_size > 1 and self.session.is_main:
            tell_of_gathers(self.accelerator, name=type(self).__name__, is_in_forward=lambda: self._in_forward)

    def _join(self) -> None:
        self._session, self._owns_session = join(self.args, self._session_options)
        self._hooks, self._arrays = SessionHooks(self._session), None
        self._hooks.share_always()
        if self._hooks.keeps_checkpoints:
            raise ConfigError(
                "checkpoint_every and resume of the session would keep a second set of checkpoints",
                hint="use save_strategy of TrainingArguments, and trainer.train(resume_from_checkpoint=...)",
            )
        refuse_device(self.args, self._session)
        settle_in(self.args, self._session)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        if trial is not None:
            raise ConfigError(
                "a hyperparameter search trains many models in one process, and a session trains one",
                hint="start the script once per trial",
            )
        self._enter()
        try:
            return super().train(  # type: ignore[misc]
                resume_from_checkpoint=resume_from_checkpoint, ignore_keys_for_eval=ignore_keys_for_eval
            )
        except BaseException as error:
            if self._owns_session:
                self.session.__exit__(type(error), error, error.__traceback__)
            raise

    def _enter(self) -> None:
        """The session of a call of train(): a session trains once, so a second call opens another."""
        if self._owns_session and self._has_trained():
            # Joining resets accelerate's state, on which the accelerator of the last session relies.
            self.create_accelerator_and_postprocess()
        elif self._has_trained():
            raise ConfigError(
                "train() was called twice in one session", hint="let the Trainer open its sessions, or make a new one"
            )

    def _has_trained(self) -> bool:
        return self._hooks.has_ended or self._hooks.is_prepared

    # Data and length

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples of an optimizer step of all ranks: with `balanced` and `auto` they share one batch."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * self._num_parts)  # type: ignore[attr-defined]

    @property
    def _num_parts(self) -> int:
        """Batches that a step of all ranks has; policies of local steps count the steps of one device."""
        policy = self._hooks.policy
        return self.session.world_size if policy.shares_steps and not policy.batch_is_global else 1

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        self._loader = StepLoader(
            dataloader,
            accumulation=args.gradient_accumulation_steps,
            num_parts=self._num_parts,
            pins_memory=self.session.device.type == "cuda",
        )
        return super().set_initial_training_values(args, self._loader)  # type: ignore[misc]

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, resume: Any, trial: Any
    ) -> tuple[int, int]:
        epochs, batches = super()._init_training_state(  # type: ignore[misc]
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume, trial
        )
        place = read_place(resume)
        self._count = StepCount(step_samples=self._loader.step_samples, steps_per_epoch=self._loader.num_steps)
        if place is not None:
            check_place(place, self._count)
            epochs = place["epoch"]
            self._remaining = None if self.args.ignore_data_skip else place["remaining"]
        else:
            done = batches * self._loader.step_samples // self.args.gradient_accumulation_steps
            self._remaining = [[done, self._loader.num_samples - done]] if done else None
        self._first_epoch = epochs
        return epochs, batches

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume: Any) -> tuple[nn.Module, Any]:
        model, _ = super()._prepare_for_training(max_steps, train_dataloader, resume)  # type: ignore[misc]
        self._raw_optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        scaler = getattr(self.accelerator, "scaler", None)
        self.session.prepare(self.model, self._raw_optimizer, *([] if scaler is None else [scaler]))
        self._hooks.on_meeting(self._meet_at_average)
        samples = self._loader.num_samples
        self._hooks.go_on_from(self._first_epoch, samples_before=self._first_epoch * samples, remaining=self._remaining)
        goal = goal_samples(
            max_steps,
            num_samples=samples,
            step_samples=self._loader.step_samples,
            steps_per_epoch=self._loader.num_steps,
        )
        self._epochs: Iterator[int] = self.session.epochs(samples=goal)
        self._ticks, self._num_skipped = self.state.global_step, 0
        self._since = self._nothing_yet()
        # accelerate's own would count a scaled loss, and that of each micro-batch as if it were a batch.
        self.accelerator.backward = self._backward
        return model, train_dataloader

    def _nothing_yet(self) -> SinceMeeting:
        return SinceMeeting(
            loss=torch.zeros((), device=self.args.device), tokens_before=self.state.num_input_tokens_seen
        )

    def _backward(self, loss: torch.Tensor, **others: Any) -> None:
        if others:
            raise ConfigError(
                f"accelerator.backward() was given {', '.join(others)}", hint="pass the loss alone: backward(loss)"
            )
        self._hooks.backward(loss)

    # The loop

    def _run_epoch(
        self, *, model: nn.Module, epoch: int, resume_from_checkpoint: Any, epochs_trained: int, **others: Any
    ) -> None:
        """One pass over the data, as the Trainer makes it, on all ranks."""
        self._model_in_loop, self._others = model, others
        self._grad_norm, self._rate = None, None
        is_resumed = epoch == epochs_trained and resume_from_checkpoint is not None
        next(self._epochs, None)
        self._count.open(epoch, step=self.state.global_step, samples=self.session.samples_seen)
        if is_resumed:
            self._count.go_back(self._remaining, num_samples=self._loader.num_samples)
            self._load_rng_state(resume_from_checkpoint)  # type: ignore[attr-defined]
        for micro_batches in self.session.batches(self._loader.loader):
            if self._is_left():
                break
            self._step(model, micro_batches)
            if self._is_left():
                break
        self._hooks.settle()
        is_left = self._is_left()
        if not is_left:
            self._advance_to(min(self._count.first + self._count.steps_per_epoch, self.state.max_steps))
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        self._since.saw(self.control)
        self._meet(done=self.session.samples_seen - self._count.seen_before if is_left else None)

    def _is_left(self) -> bool:
        """Whether the loop is left early; after the last step it ends by itself."""
        stops = self.control.should_epoch_stop or self.control.should_training_stop
        return bool(stops) and self.state.global_step < self.state.max_steps

    def _step(self, model: nn.Module, micro_batches: list[dict[str, Any]]) -> None:
        self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
        loss = self._gradients_of(model, micro_batches)
        self._hooks.add_loss(loss)
        self._since.add(loss, self.session.batch_samples / self._samples_of_step())
        self._hooks.share_gradients(self._raw_optimizer)
        self._grad_norm = self._clip_grad_norm(model) if self.args.max_grad_norm > 0 else None  # type: ignore[attr-defined]
        self._grad_norm = self._get_grad_norm(model, grad_norm=self._grad_norm)  # type: ignore[attr-defined]
        self.control = self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)
        self.optimizer.step()
        self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)
        self._rate = self._get_learning_rate()  # type: ignore[attr-defined]
        self._num_skipped += self.accelerator.optimizer_step_was_skipped
        model.zero_grad()
        self._end_step()

    def _samples_of_step(self) -> int:
        """Samples of all ranks in this step; the last of an epoch may have fewer."""
        count = self._count
        if not self._hooks.is_shared and self.session.world_size > 1:
            return count.step_samples
        return min(count.step_samples, self._loader.num_samples - self.session.samples_seen + count.seen_before)

    def _gradients_of(self, model: nn.Module, micro_batches: list[dict[str, Any]]) -> torch.Tensor:
        """Run forward and backward of all micro-batches; returns the mean loss of this rank's samples."""
        num_items = self._num_items([batch["inputs"] for batch in micro_batches])
        samples = sum(batch["count"] for batch in micro_batches)
        total = torch.zeros((), device=self.args.device)
        for number, batch in enumerate(micro_batches, start=1):
            inputs, is_last = batch["inputs"], number == len(micro_batches)
            # The Trainer divides a mean loss by this; micro-batches may be of unequal size.
            self.current_gradient_accumulation_steps = samples / batch["count"]
            self.accelerator.gradient_state._set_sync_gradients(is_last)
            self._in_forward = True
            total += self.training_step(model, inputs, num_items)  # type: ignore[attr-defined]
            self._in_forward = False
            # A rank without samples in a shared step computes for nothing.
            if self.session.batch_samples:
                self.current_flos += float(self.floating_point_ops(inputs))  # type: ignore[attr-defined]
                self._track_num_input_tokens(inputs)  # type: ignore[attr-defined]
            if not is_last:
                self.control = self.callback_handler.on_substep_end(self.args, self.state, self.control)
        return total

    def _num_items(self, inputs: list[Any]) -> Any:
        """The number of tokens that a rank divides its losses by: in a shared step, those of the whole batch."""
        own = self._get_num_items_in_batch(inputs, self.args.device)  # type: ignore[attr-defined]
        if own is None or not self.args.average_tokens_across_devices or not self._hooks.is_shared:
            return own
        samples = self.session.batch_samples
        rows = self._hooks.counts([samples, int(own) if samples else 0])
        items = items_to_divide_by(rows, rank=self.session.rank)
        return own if items is None else torch.tensor(items, device=self.args.device)

    # Steps of the world

    def _end_step(self) -> None:
        seen, count = self.session.samples_seen, self._count
        is_due = self._advance_to(count.after_batch(seen))
        if (is_due and self._hooks.is_shared) or (self._since.flags and self.session.world_size == 1):
            started_s = time.perf_counter()
            self._meet(done=count.samples_after_batch(seen, num_samples=self._loader.num_samples))
            self._hooks.leave_out(time.perf_counter() - started_s)
        elif self._since.flags:
            self._hooks.ask_to_meet()

    def _advance_to(self, step: int) -> bool:
        """Tell callbacks of every global step up to this one; whether something is due that all ranks know of."""
        is_due = False
        for number in range(self.state.global_step + 1, step + 1):
            self.state.global_step = number
            self.state.epoch = self._count.epoch + self._loader.part_of_epoch(number - self._count.first)
            self._follow_schedule()
            self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
            self._since.saw(self.control)
            # A rank that left alone would keep the others waiting: all leave at the meeting.
            self.control.should_epoch_stop = self.control.should_training_stop = False
            expected = DefaultFlowCallback().on_step_end(self.args, self.state, TrainerControl())
            is_due |= any(getattr(expected, name) for name in FLAGS)
        return is_due

    def _follow_schedule(self) -> None:
        # These follow an evaluation, as the Trainer lets them.
        if isinstance(self.lr_scheduler, ReduceLROnPlateau | GreedyLR):
            return
        while self._ticks < self.state.global_step - self._num_skipped:
            self.lr_scheduler.step()
            self._ticks += 1

    # Meetings: what the Trainer does at a step, all ranks do at one place.

    def _meet_at_average(self) -> None:
        """In the middle of a pass, or at its end if a signal came: the session calls this on all ranks."""
        if self._hooks.is_stopping:
            self._since.flags.add("should_save")
        self._meet(done=self._hooks.done_at_meeting)

    def _meet(self, *, done: int | None) -> None:
        """Log, evaluate and save what is due; all ranks call this. `done` are samples of the pass under way."""
        since, world_size = self._since, self.session.world_size
        mine = {
            "step": self.state.global_step,
            "flags": sorted(since.flags),
            "loss": float(since.loss),
            "steps": since.steps,
            "tokens": self.state.num_input_tokens_seen - since.tokens_before,
            "flos": self.current_flos,
        }
        told = [mine] if world_size == 1 else self._hooks.exchange(mine, what="the Trainer's steps")
        self._advance_to(max(one["step"] for one in told))
        flags = {name for one in told for name in one["flags"]} | since.flags
        for name in FLAGS:
            setattr(self.control, name, name in flags)
        self.state.num_input_tokens_seen = since.tokens_before + sum(one["tokens"] for one in told)
        self.current_flos = sum(one["flos"] for one in told)
        mean = world_mean(told)
        if "should_log" in flags and mean is not None:
            # The Trainer divides by the steps since it last logged.
            self._tr_loss.fill_(mean * (self.state.global_step - self._globalstep_last_logged))  # type: ignore[attr-defined]
        self._since = self._nothing_yet()
        if "should_log" not in flags:
            self._since.loss, self._since.steps = since.loss, since.steps
        self._place = place_after(
            done, count=self._count, num_samples=self._loader.num_samples, remaining=self._hooks.remaining
        )
        self._do_what_is_due()

    def _do_what_is_due(self) -> None:
        others, self._in_meeting = self._others, True
        try:
            self._maybe_log_save_evaluate(  # type: ignore[attr-defined]
                self._tr_loss,  # type: ignore[attr-defined]
                self._grad_norm,
                self._model_in_loop,
                others["trial"],
                self._count.epoch,
                others["ignore_keys_for_eval"],
                others["start_time"],
                learning_rate=self._rate,
            )
        finally:
            self._in_meeting = False

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        """End the session before the Trainer may load its best model, which no average may change."""
        told = [float(self._since.loss), self._since.steps]
        rows = [told] if self.session.world_size == 1 else self._hooks.exchange(told, what="the last losses")
        weight = sum(row[1] for row in rows)
        steps = self.state.global_step - self._globalstep_last_logged  # type: ignore[attr-defined]
        self._tr_loss.fill_(sum(row[0] for row in rows) / weight * steps if weight else 0.0)  # type: ignore[attr-defined]
        next(self._epochs, None)
        del self.accelerator.backward
        if self._owns_session:
            self.session.close()
        return super()._finalize_training(trial, num_train_samples, start_time)  # type: ignore[misc]

    # Evaluation and files

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        def run(loader: Any) -> EvalLoopOutput:
            output: EvalLoopOutput = super(OutriderMixin, self).evaluation_loop(  # type: ignore[misc]
                loader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
            return output

        if not self._in_meeting or not hf_evaluation.can_share(self, dataloader):
            return run(dataloader)
        self._num_evaluations += 1
        if self._arrays is None:
            self._arrays = RankArrays(self.session.world)
        return hf_evaluation.evaluate_together(
            self,
            dataloader,
            self._hooks,
            run,
            arrays=self._arrays,
            name=str(self._num_evaluations),
            prefix=metric_key_prefix,
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call=_internal_call)  # type: ignore[misc]
        if self._in_meeting and self.session.world_size > 1:
            # The others look for the file of the best model.
            self._hooks.exchange(None, what="a saved model")

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        if self.args.should_save:
            write_place(self._place, output_dir)


class Trainer(OutriderMixin, transformers.Trainer):
    """The Trainer of transformers, in a session."""


__all__ = ["OutriderMixin", "Trainer"]
