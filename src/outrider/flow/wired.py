"""A module that holds the parts of a flow, its plan and its recurrent states.

Decides how a graph is copied and pickled; what users do with one is in `graph`, which is the only class made of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx, nn

from outrider.flow.emit import emit, source_of
from outrider.flow.plan import Plan
from outrider.flow.state import Size, State


class Wired(nn.Module):
    """The parts of a flow, registered under the names of its nodes."""

    def __init__(self, plan: Plan, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.plan = plan
        self.shapes: dict[str, Any] = {}
        """What each value and each inner module gave in the last shape check; empty before."""
        for name, module in modules.items():
            self.add_module(name, module)
        if plan.states:
            sizes = {wire.tag: None if wire.size is None else Size(wire.size) for wire in plan.states}
            self.states = nn.ModuleDict({tag: State(tag, size) for tag, size in sizes.items()})

    @property
    def code(self) -> str:
        """The Python text of forward, as it runs."""
        return source_of(self.plan)

    @property
    def treats_samples_alone(self) -> bool:
        """No state, and nothing merged along the batch; the parts answer for themselves."""
        return not self.plan.states and all(node.dim != 0 for node in self.plan.nodes)

    def to_fx(self) -> fx.GraphModule:
        """The same modules under a torch.fx graph, for passes that want one."""
        return fx.GraphModule(self, emit(self.plan), class_name="Flow")

    def reset_state(self) -> None:
        """Let every recurrent state, also in nested flows, begin at zeros again."""
        for state in states_in(self):
            state.reset()

    def detach_state(self) -> None:
        """Keep every state but forget how it came about: the end of backpropagation through time."""
        for state in states_in(self):
            state.detach()


def state_of(graph: Wired, tag: str) -> State:
    """The state that holds a tag."""
    state = graph.states[tag]
    assert isinstance(state, State)
    return state


def states_in(module: nn.Module) -> Iterator[State]:
    """Every recurrent state of a module and its parts."""
    return (part for part in module.modules() if isinstance(part, State))
