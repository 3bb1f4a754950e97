"""The table of policies: one row for each, and one file with its generator.

Everything else that depends on the policy reads its row: averages, compensation, planner, checkpoints, benchmarks,
help. `open_policy` opens the generator of one segment; the three drivers call it.
"""

from __future__ import annotations

from typing import Literal

from outrider.errors import ConfigError, nearest
from outrider.policy.batch_splitter import Splitter
from outrider.policy.effects import Lease, OpenWindow, Policy, Seat
from outrider.policy.policies.asynchronous import asynchronous
from outrider.policy.policies.auto import auto
from outrider.policy.policies.balanced import balanced
from outrider.policy.policies.cadence import cadence
from outrider.policy.policies.independent import independent
from outrider.policy.policies.one_rank import one_rank
from outrider.policy.policies.sync import sync
from outrider.policy.policy_chooser import PolicyChooser
from outrider.policy.policy_spec import PolicySpec, SegmentContext, checked
from outrider.policy.window_planner import WindowPlanner

PolicyName = Literal["auto", "sync", "balanced", "cadence", "async", "independent"]
"""For editors and type checkers, which cannot read the table."""

_TABLE = (
    PolicySpec(
        name="auto",
        open=auto,
        summary="the steps of one device, shared or taken by the fastest device alone, whichever is quicker; "
        "changes to `async` where that is expected to learn more per second",
        choose_when="always, unless you have a reason to choose another",
        shares_steps=True,
        batch_is_global=True,
        switches=True,
    ),
    PolicySpec(
        name="sync",
        open=sync,
        summary="equal batches, gradients are averaged at every step, as in torch DDP",
        choose_when="devices are equal",
        shares_steps=True,
    ),
    PolicySpec(
        name="balanced",
        open=balanced,
        summary="one batch is split by speed, gradients are averaged at every step: "
        "the same gradients as one device with the whole batch",
        choose_when="you want the learning curve of one device, and averaging is fast",
        shares_steps=True,
        batch_is_global=True,
    ),
    PolicySpec(
        name="cadence",
        open=cadence,
        summary="each rank takes its planned number of steps, then all ranks average parameters",
        choose_when="averaging at every step is too slow",
        blocks_at_averages=True,
        # With these momenta ResNet-20 learns as well as on one device: docs/log.md.
        outer_momentum="bold",
    ),
    PolicySpec(
        name="async",
        open=asynchronous,
        summary="like `cadence`, but the average runs in the background during the next window",
        choose_when="as `cadence`; highest throughput",
        outer_momentum="auto",
    ),
    PolicySpec(
        name="independent",
        open=independent,
        summary="all devices, no averaging: the ceiling",
        choose_when="you measure a machine; it is not a way to train",
        averages=False,
    ),
)

POLICY_TABLE = {spec.name: spec for spec in _TABLE}
POLICIES = tuple(POLICY_TABLE)
TRAINING_POLICIES = tuple(spec.name for spec in _TABLE if spec.averages)
"""Policies that end with one model, from the simplest to the fastest."""
FIXED_POLICIES = tuple(spec.name for spec in _TABLE if spec.averages and not spec.switches)
"""Training policies that take the same kind of step throughout."""
SHARED_STEP_POLICIES = tuple(spec.name for spec in _TABLE if spec.shares_steps and not spec.switches)
LOCAL_STEP_POLICIES = tuple(spec.name for spec in _TABLE if spec.averages and not spec.shares_steps)
WHOLE_BATCH_POLICIES = tuple(spec.name for spec in _TABLE if spec.averages and not spec.batch_is_global)
"""Training policies that do not divide a batch among ranks."""
OUTER_STEP_POLICIES = tuple(spec.name for spec in _TABLE if spec.outer_momentum is not None)
DEFAULT_POLICY: PolicyName = "auto"


def policy_spec(policy: str | PolicySpec) -> PolicySpec:
    """The row of a policy of this package, or the user's own policy; raises a ConfigError for anything else."""
    if isinstance(policy, PolicySpec):
        if policy != POLICY_TABLE.get(policy.name, policy):
            raise ConfigError(
                f"a policy of your own cannot be called {policy.name!r}: that is a policy of outrider",
                hint="records and checkpoints know policies by their names: choose another",
            )
        return policy
    if isinstance(policy, str) and policy in POLICY_TABLE:
        return POLICY_TABLE[policy]
    close = nearest(str(policy).lower(), POLICIES)
    hint = f"did you mean {close!r}?" if close else f"choose one of {', '.join(POLICIES)}"
    raise ConfigError(f"unknown policy {policy!r}", hint=hint)


def open_policy(
    policy: str | PolicySpec,
    seat: Seat,
    span: Lease,
    *,
    planner: WindowPlanner,
    splitter: Splitter,
    max_overshoot: int,
    samples_after: int | None = None,
    chooser: PolicyChooser | None = None,
    window: OpenWindow | None = None,
    may_stay_open: bool = False,
) -> Policy:
    """The generator of one segment of an epoch for one rank; `samples_after` samples of the run follow the segment.

    `window` is the one that the previous segment left open; with `may_stay_open` this segment may leave one open too.
    """
    spec = policy_spec(policy)
    is_ours = spec.name in POLICY_TABLE
    make = one_rank if is_ours and spec.shares_steps and seat.world_size == 1 else spec.open
    opened = make(
        SegmentContext(
            seat=seat,
            span=span,
            planner=planner,
            splitter=splitter,
            max_overshoot=max_overshoot,
            samples_after=samples_after,
            chooser=chooser or PolicyChooser(world_size=seat.world_size),
            window=window,
            may_stay_open=may_stay_open,
        )
    )
    return opened if is_ours else checked(spec, opened, span, may_stay_open=may_stay_open)


__all__ = [
    "DEFAULT_POLICY",
    "FIXED_POLICIES",
    "OUTER_STEP_POLICIES",
    "POLICIES",
    "POLICY_TABLE",
    "SHARED_STEP_POLICIES",
    "TRAINING_POLICIES",
    "PolicyName",
    "PolicySpec",
    "SegmentContext",
    "open_policy",
    "policy_spec",
]
