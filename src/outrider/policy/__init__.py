"""Decides which rank trains on which samples and when ranks average: effects, policies, plans, splits, leases.

Knows no torch, no clock and no I/O. Drivers in `rank` (real devices) and `virtual` (simulated time) run the policies.
The names below are for users who write their own policy: docs/policies.md.
"""

from outrider.policy.batch_splitter import Splitter
from outrider.policy.effects import (
    Average,
    AverageReport,
    AwaitOthers,
    Batch,
    Begin,
    Border,
    Collect,
    Confer,
    Decision,
    Effect,
    EndSegment,
    Expect,
    GiveBack,
    HandOver,
    Lease,
    LeaveOpen,
    Merge,
    Note,
    OpenWindow,
    Policy,
    Poll,
    RankFacts,
    Rest,
    Seat,
    SharedStep,
    Step,
    Take,
)
from outrider.policy.policies import POLICY_TABLE
from outrider.policy.policy_chooser import PolicyChooser
from outrider.policy.policy_spec import PolicySpec, SegmentContext
from outrider.policy.window_planner import WindowPlan, WindowPlanner

__all__ = [
    "POLICY_TABLE",
    "Average",
    "AverageReport",
    "AwaitOthers",
    "Batch",
    "Begin",
    "Border",
    "Collect",
    "Confer",
    "Decision",
    "Effect",
    "EndSegment",
    "Expect",
    "GiveBack",
    "HandOver",
    "Lease",
    "LeaveOpen",
    "Merge",
    "Note",
    "OpenWindow",
    "Policy",
    "PolicyChooser",
    "PolicySpec",
    "Poll",
    "RankFacts",
    "Rest",
    "Seat",
    "SegmentContext",
    "SharedStep",
    "Splitter",
    "Step",
    "Take",
    "WindowPlan",
    "WindowPlanner",
]
