"""The step source of a session: hands the batches of a policy's steps to the user's loop, and answers the policy.

Decides what a batch, a break and a shared gradient mean in a user's loop. The policy decides the order of effects, the
driver averages. Used by `SessionRun`, one pass over a data set after another.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from outrider import faults
from outrider.average.rank_facts import Settled
from outrider.errors import ConfigError
from outrider.policy.effects import AverageReport, Batch, Lease, SharedStep, Step
from outrider.policy.position_ranges import union
from outrider.rank.averaged_gradients import AveragedGradients
from outrider.rank.driver import Driver, Segment, StepEffects
from outrider.rank.window import later_facts, ordinals
from outrider.replica.loop_replica import LoopReplica, refuse_step

BORROWED = 2
"""Samples that a rank without samples of its own computes on and discards, to run the same user code."""
_MOST_FRAMES = 12


class UserLoop:
    """One rank's part of the user's loop; call `next_batch` until it returns None, or `leave` at any time."""

    def __init__(
        self,
        driver: Driver,
        replica: LoopReplica,
        *,
        num_ranks: int,
        warn: Callable[[str], None],
    ) -> None:
        """`warn` receives warnings for the user about the loop."""
        self._driver = driver
        self._num_ranks = num_ranks
        self._warn = warn
        self._has_told_apart = self._has_told_idle = self._has_told_lossless = False
        """Whether the user was warned: something is not averaged, nothing is trained, no loss is known."""
        self._num_batches = self._num_steps = self._num_own_steps = 0
        """Counts of this pass: batches handed out, batches with a step, batches with a step and samples."""
        self._meter = driver.meter
        self._replica = replica
        self.is_leaving = False
        self.is_inside = False
        """Whether the user's loop currently holds a batch."""
        self.samples = 0
        """Samples of the current batch; 0 for a borrowed one."""
        self.unit = 1
        """Samples of all ranks in a shared step."""
        self._least = 1
        self._done: list[Lease] = []
        """Positions of the segment that this rank has used; of shared steps only its own part."""
        self._steps: StepEffects | None = None
        self._effect: Step | SharedStep | None = None
        self._started_s = 0.0
        self._paused_s = 0.0
        self._shared: Settled | None = None
        self._num_shared = 0
        """Averages of gradients with the current batch."""
        self._gradients = AveragedGradients()
        self._keeps_gradients = False
        """Whether the user asked that backward keep gradients local for now."""
        self._has_stepped = self._is_following = False
        self._did: list[torch.optim.Optimizer | None] = []
        self._habit: list[torch.optim.Optimizer | None] = []
        """What the user did with the last batch, in order: averaged gradients (None) or stepped an optimizer."""
        self.has_followed = False
        """Whether this rank left a shared step to the others, and updated without running the user's code."""
        self._settled: list[torch.optim.Optimizer] = []
        """Optimizers of a GradScaler whose gradients are already averaged."""
        replica.before_step = self._before_step
        if replica.scaler is not None:
            replica.scaler.average = self._average_unscaled
            replica.scaler.on_skipped = self._stepped_none

    @property
    def is_open(self) -> bool:
        return self._steps is not None

    def open(self, segment: Segment) -> None:
        """Begin a segment; all ranks call this."""
        assert self._steps is None, "one segment at a time"
        self.is_leaving = self.has_followed = self._replica.has_left = False
        self._done, self._least = [], min(2, segment.batch_size)
        self._replica.counts.open_pass(segment.batch_size, since=segment.seen)
        self._steps = self._driver.steps(segment)

    def next_batch(self) -> Any | None:
        """Close the accounting of the last batch and fetch the next one; None at the end of the pass."""
        effect = self._advance(self._finish() if self._effect is not None else None)
        return None if effect is None else self._hand_out(effect)

    def leave(self) -> None:
        """End the pass early: this rank stops computing, and the others end at their next average."""
        if self._steps is None:
            return
        self.is_leaving = self._replica.has_left = True
        report = self._abandon() if self._effect is not None else None
        while (effect := self._advance(report)) is not None:
            report = self._answer_empty(effect) if isinstance(effect, SharedStep) else None

    def pause(self, seconds: float) -> None:
        """Exclude time that the current batch spent on something other than training."""
        self._paused_s += seconds
        self._meter.paused(seconds)

    def positions_used(self) -> tuple[Lease, ...]:
        """The positions of the segment that this rank has used, with the current batch; a shared one counts in full."""
        return union(self._done if self._effect is None else [*self._done, self._in_hand(self._effect)])

    def _in_hand(self, effect: Step | SharedStep) -> Lease:
        if isinstance(effect, Step):
            return Lease(effect.batch.start, effect.batch.count)
        rest = Lease(effect.at, self._driver.span.stop - effect.at)
        whole = next(rest.batches(self.unit, least=self._least))
        return Lease(whole.start, whole.count)

    def _count_done(self, batch: Batch) -> None:
        used = Lease(batch.start, batch.count)
        if self._done and self._done[-1].stop == used.start:
            used = Lease(self._done[-1].start, self._done.pop().count + used.count)
        self._done.append(used)

    @property
    def is_shared(self) -> bool:
        """Whether the current batch is part of a step that all ranks take together."""
        return isinstance(self._effect, SharedStep)

    def share_early(self, optimizer: torch.optim.Optimizer) -> None:
        """Average the gradients of a shared step before the optimizer steps: the caller clips or reads their mean."""
        if self.is_inside and self.is_shared and not self._gradients.has(optimizer):
            self._share_whole()

    # From effect to effect

    def _advance(self, report: AverageReport | None) -> Step | SharedStep | None:
        assert self._steps is not None
        try:
            return self._steps.send(report)
        except StopIteration:
            self._steps = None
            return None

    def end_pass(self) -> None:
        """Close the counts of a pass, whose segments may have been cut in the middle of an accumulated step."""
        self._tell_idle_pass()
        self._tell_lossless_pass()
        self._replica.losses.end_pass()
        self._num_batches = self._num_steps = self._num_own_steps = 0

    def _tell_lossless_pass(self) -> None:
        if self._num_own_steps and not self._replica.loss_sums.has_losses and not self._has_told_lossless:
            self._has_told_lossless = True
            self._warn(
                "nobody told the loss of any step, so metrics and pages show none: call s.backward(loss) in place of "
                "loss.backward()"
            )

    def _tell_idle_pass(self) -> None:
        was_cut = self.is_leaving or self._driver.ends_early
        if self._num_batches and not self._num_steps and not was_cut and not self._has_told_idle:
            self._has_told_idle = True
            batches = f"{self._num_batches} batch{'' if self._num_batches == 1 else 'es'}"
            self._warn(
                f"no optimizer stepped in a pass of {batches}: call s.step(loss) for each, or s.optimizer_step() after "
                "s.backward(loss)"
            )

    def _hand_out(self, effect: Step | SharedStep) -> Any:
        self._take_up(effect, samples=effect.batch.count)
        self._replica.counts.saw_batch()
        self._replica.losses.saw_batch()
        data = self._driver.fetch(effect.batch if self.samples else self._borrowed(effect))
        faults.reach("compute")
        self.is_inside = True
        return data

    def _take_up(self, effect: Step | SharedStep, *, samples: int) -> None:
        self._effect = effect
        self.samples = samples
        self._replica.at = self._driver.seen + effect.at
        self._shared, self._num_shared, self._did, self._settled = None, 0, [], []
        self._has_stepped = False
        self._replica.other_optimizers.forget()
        self._gradients.forget()
        self._started_s, self._paused_s = time.perf_counter(), 0.0
        self._meter.start_compute()

    def _borrowed(self, effect: Step | SharedStep) -> Batch:
        start = min(effect.at, self._driver.num_samples - BORROWED)
        return Batch(max(0, start), min(BORROWED, self._driver.num_samples))

    def _finish(self) -> AverageReport | None:
        """Finish the current batch, because the user asked for the next one."""
        effect = self._effect
        assert effect is not None
        self._look_at_other_optimizers()
        self._num_batches += 1
        self._num_steps += self._has_stepped
        self._num_own_steps += self._has_stepped and self.samples > 0
        self._habit = self._did
        self._count_done(effect.batch)
        if isinstance(effect, Step):
            self._meter.stop_compute()
            self._driver.ended_step(self.samples, self._lap_s())
            self._put_down()
            return None
        if self._shared is None:
            # The user continues to accumulate these gradients. Their mean over ranks is as good a base as local ones,
            # and stays exact if the ranks' shares of the next batch differ.
            self._share_accumulated()
        return self._conclude_shared()

    def _look_at_other_optimizers(self) -> None:
        """Raise or warn once about optimizers whose parameters would never be averaged."""
        others = self._replica.other_optimizers
        if others.in_prepared is not None and not self._has_stepped:
            kind = type(others.in_prepared).__name__
            raise ConfigError(
                f"{kind}.step() changed a prepared model, but this {kind} was not given to prepare(): every rank would "
                "step by its own gradients",
                hint="prepare the optimizer that steps: model, optimizer = s.prepare(model, optimizer)",
            )
        if others.apart is not None and not self._has_told_apart and self._num_ranks > 1:
            self._has_told_apart = True
            kind, count = type(others.apart).__name__, sum(len(group["params"]) for group in others.apart.param_groups)
            self._warn(
                f"{kind} trains {count} parameters that were not given to prepare(): each rank has its own, and they "
                "are not averaged"
            )

    def _abandon(self) -> AverageReport | None:
        """Handle a user who left in the middle of a batch."""
        if self._effect is not None and (self._has_stepped or self._shared is not None):
            self._count_done(self._effect.batch)
        if isinstance(self._effect, Step):
            self._meter.stop_compute()
            self._driver.ended_step(self.samples if self._has_stepped else 0, self._lap_s())
            self._put_down()
            return None
        missing = self._habit[len(self._did) :] if self._did or self._shared is None else []
        taken = self.samples if self._shared is not None else 0
        self.samples = 0
        self._step_empty(missing)
        self.samples = taken
        return self._conclude_shared()

    def _answer_empty(self, effect: SharedStep) -> AverageReport:
        """Take part in a shared step without samples, with as many averages as the other ranks."""
        self._take_up(effect, samples=0)
        self.is_inside = True
        self._step_empty(self._habit)
        return self._conclude_shared()

    def _step_empty(self, missing: list[torch.optim.Optimizer | None]) -> None:
        """Take the remaining averages and steps of the other ranks, without samples."""
        self._is_following = True
        for optimizer in missing:
            if optimizer is None:
                self._replica.zero_gradients()
                self._share(0)
            else:
                self._replica.step(optimizer)
                self.has_followed = True
        self._is_following = False
        self._replica.zero_gradients()
        if self._shared is None:
            self._share(0)

    def _conclude_shared(self) -> AverageReport:
        assert self._shared is not None
        self._meter.stop_compute()
        self._meter.took_update(self._lap_s())
        self._put_down()
        return self._driver.ended_shared_step(self.samples, self._shared)

    def _put_down(self) -> None:
        self._effect, self.is_inside = None, False

    # Hooks of the user's backward and optimizer.step()

    @contextlib.contextmanager
    def keeping_gradients(self) -> Iterator[None]:
        """Context in which backward keeps gradients local; the next backward outside, or the step, averages them."""
        before, self._keeps_gradients = self._keeps_gradients, True
        try:
            yield
        finally:
            self._keeps_gradients = before

    def backward(self, loss: torch.Tensor) -> None:
        """Run a backward pass; in a shared step it leaves the mean gradient of all ranks, as DDP does."""
        replica, averages = self._replica, self._driver.averages
        # Scaled gradients are averaged when they are unscaled: ranks may have different scales.
        is_shared = isinstance(self._effect, SharedStep) and not (self._keeps_gradients or replica.scales_gradients)
        with averages.overlapped(self.samples) if is_shared else contextlib.nullcontext():
            replica.backward(loss)
        replica.saw_loss(loss, self.samples)
        self._gradients.forget()
        if is_shared:
            self._share_whole()

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.is_inside:
            refuse_step(optimizer)
        _refuse_unprepared_scaler(self._replica)
        if optimizer in self._settled:
            self._settled.remove(optimizer)
        elif isinstance(self._effect, SharedStep) and not self._is_following and not self._gradients.has(optimizer):
            self._share_whole()
        self._driver.averages.saw_gradients()
        # In a shared step this clips the gradient of the whole batch, as on one device.
        self._replica.clip(optimizer)
        self._gradients.saw_step(self._replica.optimizers)
        self._did.append(optimizer)
        self._has_stepped = True

    def _share_whole(self) -> None:
        """Average the gradients with which an optimizer will step."""
        settled = self._share(self.samples)
        self._did.append(None)
        self._gradients.saw_average()
        self._driver.averages.refuse_not_finite(settled, step=self._replica.steps)

    def _average_unscaled(self, optimizer: torch.optim.Optimizer) -> bool | None:
        """Tell a prepared GradScaler whether any gradient overflowed; None if it decides for itself."""
        if not (self.is_inside and isinstance(self._effect, SharedStep)):
            return None
        settled = self._share(self.samples)
        self._settled.append(optimizer)
        return bool(settled.not_finite) if len(settled.facts) > 1 else None

    def _stepped_none(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that a GradScaler skipped the step, on all ranks if the step is shared."""
        self._did.append(optimizer)
        self._has_stepped = True
        self._replica.saw_step(optimizer)
        if optimizer in self._settled:
            self._settled.remove(optimizer)

    def _share_accumulated(self) -> None:
        scaler = self._replica.scaler
        if scaler is None or not scaler.is_enabled:
            settled = self._share(self.samples)
            # Raise now, while the rank at fault is known; after the next batch all ranks would have the bad gradient.
            self._driver.averages.refuse_not_finite(settled, step=self._replica.steps)
            return
        with scaler.unscaled(self._replica.arena.parameters):
            self._share(self.samples)

    def _share(self, samples: int) -> Settled:
        """Average the gradients of all ranks; only the first average of a batch carries facts for the policy."""
        driver, meter = self._driver, self._meter
        driver.averages.wait_for_device()
        meter.stop_compute()
        computed_s = self._lap_s()
        is_first = self._shared is None
        if is_first:
            meter.took_gradient(samples, computed_s)
            driver.join_shared_average()
        else:
            driver.activity.enter("average")
        driver.averages.average_gradients(samples, driver.facts() if is_first else later_facts(self._num_shared))
        settled = driver.averages.gradient_facts()
        _refuse_other_numbers(ordinals(settled.facts))
        self._num_shared += 1
        exposed_s = self._lap_s()
        driver.activity.enter("compute")
        if is_first:
            self._shared = settled
            meter.set_exposed(exposed_s)
        else:
            meter.took_update(computed_s)
            meter.add_exposed(exposed_s)
        meter.start_compute()
        return settled

    def _lap_s(self) -> float:
        """Seconds since the last lap, without pauses."""
        now_s = time.perf_counter()
        lap_s = now_s - self._started_s - self._paused_s
        self._started_s, self._paused_s = now_s, 0.0
        return lap_s


def _refuse_other_numbers(before: list[int]) -> None:
    """Raise on all ranks if some average gradients again for one batch while others are at the next."""
    if len(set(before)) > 1:
        more, fewer = before.index(max(before)), before.index(min(before))
        raise ConfigError(
            f"rank {more} has averaged the gradients of its batch {before[more]} times before, rank {fewer} "
            f"{before[fewer]} times: every backward() of a shared step averages, so ranks must call it equally often",
            hint="cut a batch into pieces inside `with s.no_sync():`, and call s.optimizer_step() after that",
        )


def _refuse_unprepared_scaler(replica: LoopReplica) -> None:
    """Raise if a GradScaler that the session does not know calls the optimizer."""
    if replica.scaler is None and _is_in_grad_scaler():
        raise ConfigError(
            "a GradScaler stepped a prepared optimizer, but was not given to prepare(): it would decide about a step "
            "before gradients are averaged",
            hint="call model, optimizer, scaler = s.prepare(model, optimizer, scaler)",
        )


def _is_in_grad_scaler() -> bool:
    """Whether torch's GradScaler called the optimizer; if so, it is within a few frames."""
    frame: FrameType | None = sys._getframe()
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            return True
        frame = frame.f_back
    return False
