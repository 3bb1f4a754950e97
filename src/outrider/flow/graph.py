"""The module of a built flow: runs its generated code, and has methods to draw, profile, freeze, save and load it.

Decides nothing about wiring; each method calls the module of its subject. Created by `Flow.build`, used by users.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from outrider.flow import freezing
from outrider.flow import graph_files as files
from outrider.flow.diagram import diagram_of
from outrider.flow.emit import Wired, forward_of
from outrider.flow.graph_drawing import draw_to, to_dot, to_mermaid
from outrider.flow.graph_files import LoadReport, structure_hash
from outrider.flow.graph_summary import summary
from outrider.flow.profile import Profile, profile
from outrider.flow.shape_inference import learn_shapes
from outrider.flow.wiring import Wiring


class Graph(Wired):
    """A built flow: an ordinary nn.Module whose forward is code written for it."""

    _first_check: RemovableHandle

    @staticmethod
    def of(plan: Wiring, modules: Mapping[str, nn.Module]) -> Graph:
        """A graph of a plan; `Flow.build` has checked that they fit."""
        graph = _class_of(plan)(plan, modules)
        graph._first_check = graph.register_forward_pre_hook(_check_first_forward, with_kwargs=True)
        return graph

    def __reduce__(self) -> tuple[Any, ...]:
        # The class is made for the plan, so it is made again where the graph is unpickled.
        return _blank, (self.plan,), self.__dict__

    def summary(self, example: Any = None, *, depth: int = 3) -> str:
        """A tree of nodes with output shapes and parameter counts, 80 columns wide."""
        self._learn(example)
        return summary(self, depth=depth)

    def draw(self, path: str | Path, example: Any = None, *, profile: Profile | None = None) -> Path:
        """Write a picture: .svg, or text for .mmd (Mermaid) and .dot; with a profile, time shows as heat."""
        self._learn(example)
        return draw_to(Path(path), self, profile)

    def mermaid(self) -> str:
        """The graph as Mermaid text."""
        return to_mermaid(diagram_of(self))

    def dot(self) -> str:
        """The graph as DOT text."""
        return to_dot(diagram_of(self))

    def profile(self, *inputs: Any, repeats: int = 10) -> Profile:
        """The time of each node, forward and backward, measured on a copy."""
        return profile(self, inputs, repeats=repeats)

    def freeze(self, *paths: str) -> Graph:
        """Stop training the parameters under these paths; all of them without a path."""
        freezing.freeze(self, paths)
        return self

    def thaw(self, *paths: str) -> Graph:
        """Train the parameters under these paths again; all of them without a path."""
        freezing.thaw(self, paths)
        return self

    @property
    def structure_hash(self) -> str:
        """The same for graphs of equal wiring, layer types and tensor shapes."""
        return structure_hash(self)

    def save(self, path: str | Path) -> Path:
        """Write parameters, buffers and the structure to a safetensors file."""
        return files.save(self, Path(path))

    def load(self, path: str | Path) -> Graph:
        """Read a file that `save` wrote; one of another structure is refused, with the difference."""
        files.load(self, Path(path))
        return self

    def load_part(self, path: str | Path, *, into: str = "", source: str | None = None) -> LoadReport:
        """Read what fits from a file's `source` path into the sub-graph `into`; the paths are the same if not given."""
        return files.load_part(self, Path(path), into=into, source=into if source is None else source)

    def _learn(self, example: Any) -> None:
        if example is not None:
            learn_shapes(self, example if isinstance(example, tuple) else (example,))


@functools.lru_cache(maxsize=256)
def _class_of(plan: Wiring) -> type[Graph]:
    return type("Graph", (Graph,), {"forward": forward_of(plan), "__module__": Graph.__module__})


def _blank(plan: Wiring) -> Graph:
    made = _class_of(plan)
    return made.__new__(made)


def _check_first_forward(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Check shapes with the first real inputs, then step aside: later forwards cost nothing extra."""
    assert isinstance(module, Graph)
    if torch.compiler.is_compiling() or any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves([inputs, named])):
        return
    if not module.shapes:
        learn_shapes(module, inputs, named)
    module._first_check.remove()
