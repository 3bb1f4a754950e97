"""Policy `auto`: the steps of one device at first, local steps once they are expected to learn more per second.

Opens `balanced` or `async` for a segment, as the chooser says, and asks the chooser after every report. When the
chooser changes its mind, the segment ends on all ranks and the other policy trains the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

from outrider.policy.effects import AverageReport, Decision, Effect, EndSegment, HandOver, Note, Policy
from outrider.policy.policies.asynchronous import asynchronous
from outrider.policy.policies.balanced import balanced
from outrider.policy.policy_chooser import PolicyChooser
from outrider.policy.policy_spec import SegmentContext

Learn = Callable[[AverageReport, int], list[Decision]]
"""Receives a report and the number of samples of the segment up to it."""


def auto(segment: SegmentContext) -> Policy:
    """One segment of an epoch; `seat.batch_size` is the batch of one device, in either policy."""
    chooser, span = segment.chooser, segment.span
    was_exact = chooser.is_exact
    if was_exact:
        done = yield from _watched(chooser, balanced(segment), lambda report, done: _judge_exact(segment, report, done))
    else:
        done = yield from _watched(
            chooser, asynchronous(segment), lambda report, _: chooser.learn_local(report, segment.planner)
        )
        done -= segment.window.unaccounted if segment.window is not None else 0
    if chooser.is_exact == was_exact:
        return
    if not was_exact:
        # The optimizers of the ranks differ by now: exact steps need the same state on all.
        lone = segment.splitter.stay_alone()
        source, at = chooser.fastest if lone is None else lone, span.start + max(0, done - 1)
        yield HandOver(source=source, samples=0, at=at, with_loop=lone is not None)
    yield EndSegment()


def _judge_exact(segment: SegmentContext, report: AverageReport, done: int) -> list[Decision]:
    return segment.chooser.learn_exact(report, segment.splitter, segment.run_left(segment.span.start + done))


def _watched(chooser: PolicyChooser, policy: Policy, learn: Learn) -> Generator[Effect, Any, int]:
    """Run a policy until a report makes the chooser change its mind; returns the samples of all reports."""
    was_exact, done = chooser.is_exact, 0
    result: Any = None
    while True:
        try:
            effect = policy.send(result)
        except StopIteration:
            return done
        result = yield effect
        if not isinstance(result, AverageReport):
            continue
        done += result.samples
        for decision in learn(result, done):
            yield Note(decision)
        if chooser.is_exact != was_exact and result.window >= chooser.changed_at:
            result = replace(result, is_last=True)
