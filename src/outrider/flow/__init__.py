"""FlowBuilder: networks written as a flow, built into ordinary modules."""

from outrider.flow.builder import Flow
from outrider.flow.files import LoadReport
from outrider.flow.graph import Graph
from outrider.flow.mistakes import FlowError, Mistake
from outrider.flow.profile import NodeTime, Profile

__all__ = ["Flow", "FlowError", "Graph", "LoadReport", "Mistake", "NodeTime", "Profile"]
