"""Overlaps the sum of gradients with the backward pass, bucket by bucket.

Decides when a bucket is complete: this is learned in one pass and checked in every later pass. Buckets not started by
the end of a pass are summed with the rest, so ranks may overlap different buckets. Called by the averages of a rank.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from outrider.average.gradients import GradientExchange
from outrider.average.transport.collective import Started
from outrider.errors import StepError


class StartsSums(Protocol):
    """The part of GroupCollective that Overlap needs."""

    def start_sum_(self, tensor: Tensor) -> Started: ...


class Overlap:
    """Starts the sum of a bucket from a hook of the parameter whose gradient completes it.

    All ranks start buckets in the same order: a late bucket delays the following ones, at worst until backward ends.
    """

    def __init__(self, exchange: GradientExchange, collective: StartsSums) -> None:
        self.exchange = exchange
        self._collective = collective
        self._last_members: list[int] | None = None
        """For each bucket but the last, the parameter whose gradient arrives last; None until a pass was observed."""
        self._is_possible = len(exchange.buckets) > 1 and not exchange.is_bridged
        self._started: list[Started] = []
        self._complete: set[int] = set()
        self._packed: list[tuple[int, Tensor, int]] = []
        """Parameters whose gradients are being summed, each with its gradient and the version that was copied."""

    @property
    def is_possible(self) -> bool:
        """Whether sums can start before a pass ends; needs several buckets and exactly one gradient per parameter."""
        return self._is_possible

    @contextlib.contextmanager
    def backward(self, samples: int) -> Iterator[None]:
        """Context of the pass that completes a step's gradients: the only one, or that of the last micro-batch."""
        if not self._is_possible:
            yield
            return
        if self._last_members is None:
            order: list[int] = []
            with self._hooks(range(len(self.exchange.parameters)), order.append):
                yield
            self._learn(order)
            return
        is_only_pass = all(one.grad is None for one in self.exchange.parameters)
        with self._after_last_members(samples) if is_only_pass else self._after_all_members(samples):
            try:
                yield
            except BaseException:
                # A pass that ran out of memory is repeated. Sums already started hold complete gradients, which stay
                # valid; the other buckets are summed during or after the second pass.
                self._packed, self._complete = [], set(range(len(self._started)))
                raise

    def take_started(self) -> list[Started]:
        """Return the sums started in this step; raises if a gradient has changed since its sum was started."""
        for member, gradient, version in self._packed:
            current = self.exchange.parameters[member].grad
            if current is not gradient or current._version != version:
                raise StepError(
                    f"the gradient of parameter {member} changed after it was complete in the first step",
                    hint="activation checkpointing must not re-enter backward: pass use_reentrant=False",
                    rank=self.exchange.rank,
                )
        started, self._started = self._started, []
        self._packed, self._complete = [], set()
        return started

    def _after_last_members(self, samples: int) -> AbstractContextManager[None]:
        """Few hooks: a bucket is complete after the member that came last before, if all its gradients are there."""
        assert self._last_members is not None
        numbers = {member: number for number, member in enumerate(self._last_members)}
        return self._hooks(self._last_members, lambda member: self._completed(numbers[member], samples))

    def _after_all_members(self, samples: int) -> AbstractContextManager[None]:
        """Hooks on all members: gradients of earlier micro-batches are there, so only hooks tell which are complete."""
        missing = [set(bucket.members) for bucket in self.exchange.buckets[:-1]]
        numbers = {member: number for number, members in enumerate(missing) for member in members}

        def came(member: int) -> None:
            missing[numbers[member]].discard(member)
            if not missing[numbers[member]]:
                self._completed(numbers[member], samples)

        return self._hooks(list(numbers), came)

    @contextlib.contextmanager
    def _hooks(self, members: Sequence[int], call: Callable[[int], None]) -> Iterator[None]:
        handles: list[RemovableHandle] = []
        for member in members:
            parameter = self.exchange.parameters[member]
            handles.append(parameter.register_post_accumulate_grad_hook(lambda _, member=member: call(member)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _learn(self, order: Sequence[int]) -> None:
        """Learn from the order of gradients; disables overlap if a parameter got no gradient or several."""
        counts = Counter(order)
        if any(counts[member] != 1 for member in range(len(self.exchange.parameters))):
            self._is_possible = False
            return
        came = {member: place for place, member in enumerate(order)}
        self._last_members = [max(bucket.members, key=came.__getitem__) for bucket in self.exchange.buckets[:-1]]

    def _completed(self, number: int, samples: int) -> None:
        self._complete.add(number)
        while len(self._started) in self._complete and self._is_filled(len(self._started)):
            self._keep_versions(len(self._started))
            self._started.append(self._collective.start_sum_(self.exchange.pack_next(samples)))

    def _is_filled(self, number: int) -> bool:
        """Whether the bucket is complete; another path through the model may produce gradients in another order."""
        return all(self.exchange.parameters[one].grad is not None for one in self.exchange.buckets[number].members)

    def _keep_versions(self, number: int) -> None:
        for member in self.exchange.buckets[number].members:
            gradient = self.exchange.parameters[member].grad
            assert gradient is not None
            self._packed.append((member, gradient, gradient._version))
