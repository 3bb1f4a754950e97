"""Averages of parameters, buffers and gradients: flat arenas, host and device backends, checks."""

from outrider.average.arena import Arena
from outrider.average.checks import Verifier
from outrider.average.collective import Collective, GroupCollective, meet
from outrider.average.device import DeviceAverager
from outrider.average.exchange import Exchange
from outrider.average.facts import Settled
from outrider.average.gradients import GradientExchange
from outrider.average.host import HostAverager
from outrider.average.optimizer_state import OptimizerArena
from outrider.average.outer import Outer

__all__ = [
    "Arena",
    "Collective",
    "DeviceAverager",
    "Exchange",
    "GradientExchange",
    "GroupCollective",
    "HostAverager",
    "OptimizerArena",
    "Outer",
    "Settled",
    "Verifier",
    "meet",
]
