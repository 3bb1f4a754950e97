"""The declaration of a policy: how to open it, and what drivers, replica and help must know about it.

Decides what a valid declaration is. The policies of this package are declared in `policies`; a user hands a
`PolicySpec` to `policy=`. Read by the recipe, the rank, the lab, the simulator and the benchmarks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from outrider.errors import ConfigError
from outrider.policy.batch_splitter import Splitter
from outrider.policy.effects import Effect, Lease, LeaveOpen, OpenWindow, Policy, Seat, SharedStep, Step
from outrider.policy.policy_chooser import PolicyChooser
from outrider.policy.window_planner import WindowPlanner

EFFECTS = get_args(Effect)
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentContext:
    """What a policy gets for one segment of an epoch on one rank."""

    seat: Seat
    span: Lease
    """The positions of the segment; all ranks together step on each of them once."""
    planner: WindowPlanner
    """Plans the batches of each rank in a window, and learns from the report of each average."""
    splitter: Splitter
    """Splits one global batch in proportion to speed, and learns from the report of each shared step."""
    max_overshoot: int
    """The option of this name."""
    chooser: PolicyChooser
    """Chooses between exact and local steps."""
    samples_after: int | None = None
    """Samples of the run after this segment; None if the length of the run is unknown."""
    window: OpenWindow | None = None
    """The window with which the segment begins, if the previous segment left it open."""
    may_stay_open: bool = False
    """Whether the segment may end with `LeaveOpen`: an epoch ends, and nobody reads the model there."""

    def run_left(self, position: int) -> int | None:
        """Samples of the run from a position of the segment on; None if the length of the run is unknown."""
        return None if self.samples_after is None else self.span.stop - position + self.samples_after


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySpec:
    """A policy. Planner, splitter and chooser are the only state that checkpoints keep between segments."""

    name: str
    """Name in records, checkpoints and run folders; a run resumes only with the policy of this name."""
    open: Callable[[SegmentContext], Policy]
    """Returns the generator of one segment for one rank; it yields effects and receives their results."""
    summary: str = ""
    """What happens, in one phrase: for help and docs."""
    choose_when: str = ""
    """When to choose it, in one phrase."""
    shares_steps: bool = False
    """Steps are `SharedStep`: gradients are averaged at every step."""
    batch_is_global: bool = False
    """`batch_size` is the batch of the whole world, which the policy splits; otherwise it is per rank."""
    blocks_at_averages: bool = False
    """All ranks wait for an average; otherwise it runs in the background."""
    outer_momentum: Literal["auto", "bold"] | None = None
    """Compensates for averaging parameters. For optimizers such as SGD: the momentum of the outer step, which follows
    the number of ranks; "bold" uses more of it with few ranks (see `average.outer`). For Adam and its relatives: the
    learning rate follows the number of ranks with `lr_scale="auto"`. None: no compensation."""
    averages: bool = True
    """The ranks end with one model; otherwise each has its own."""
    switches: bool = False
    """It changes between shared and local steps while it runs."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"the name of a policy must be lower-case letters, digits and _, got {self.name!r}",
                hint='it becomes part of folder names: pass name="my_policy"',
            )
        if not callable(self.open):
            raise ConfigError(
                f"open of policy {self.name!r} must be a function, got {type(self.open).__name__}",
                hint="pass open=a_function that takes a SegmentContext and returns a generator",
            )

    @property
    def joins_batches(self) -> bool:
        """Whether a shared step takes one batch of every rank."""
        return self.shares_steps and not self.batch_is_global

    def step_samples(self, batch_size: int, world_size: int) -> int:
        """Samples of a step that all ranks take together; if steps are not shared, the batch of one rank."""
        return batch_size * (world_size if self.joins_batches else 1)

    def batch_size_for(self, samples_per_rank: int, world_size: int) -> int:
        """The `batch_size` with which a step takes this number of samples per rank."""
        return samples_per_rank * (world_size if self.batch_is_global else 1)


def checked(spec: PolicySpec, policy: Policy, span: Lease, *, may_stay_open: bool) -> Policy:
    """A user's policy, with an error at the first effect that no driver could carry out."""
    if not isinstance(policy, Generator):
        raise ConfigError(
            f"open of policy {spec.name!r} returned {type(policy).__name__}, expected a generator",
            hint="yield effects such as outrider.policy.Step and Average, see docs/policies.md",
        )
    return _checked(spec, policy, span, may_stay_open=may_stay_open)


def _checked(spec: PolicySpec, policy: Policy, span: Lease, *, may_stay_open: bool) -> Policy:
    result: Any = None
    while True:
        try:
            effect = policy.send(result)
        except StopIteration:
            return
        _check_effect(spec, effect, span)
        if isinstance(effect, LeaveOpen) and not (may_stay_open and effect.window):
            raise ConfigError(
                f"policy {spec.name!r} yielded LeaveOpen"
                + (" without a window" if may_stay_open else " in a segment that may not stay open"),
                hint="yield LeaveOpen(window=OpenWindow(...)) only where segment.may_stay_open",
            )
        result = yield effect


def _check_effect(spec: PolicySpec, effect: Effect, span: Lease) -> None:
    if not isinstance(effect, EFFECTS):
        raise ConfigError(
            f"policy {spec.name!r} yielded {effect!r}, which is not an effect",
            hint="yield effects such as outrider.policy.Step and Average, see docs/policies.md",
        )
    if isinstance(effect, SharedStep) and not spec.shares_steps:
        raise ConfigError(
            f"policy {spec.name!r} yielded a SharedStep but does not declare shared steps",
            hint="pass shares_steps=True to its PolicySpec",
        )
    if isinstance(effect, Step | SharedStep) and not span.start <= effect.batch.start <= effect.batch.stop <= span.stop:
        raise ConfigError(
            f"policy {spec.name!r} stepped on positions {effect.batch.start} to {effect.batch.stop}, "
            f"its segment has {span.start} to {span.stop}",
            hint="step on positions of segment.span only",
        )
