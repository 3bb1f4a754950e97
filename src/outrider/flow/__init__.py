"""FlowBuilder: builds networks that are written as a flow into ordinary modules."""

from outrider.flow.draft import FlowError, Mistake
from outrider.flow.flow_builder import Flow
from outrider.flow.graph import Graph
from outrider.flow.graph_files import LoadReport
from outrider.flow.profile import NodeTime, Profile

__all__ = ["Flow", "FlowError", "Graph", "LoadReport", "Mistake", "NodeTime", "Profile"]
