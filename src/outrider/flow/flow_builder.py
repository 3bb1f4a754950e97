"""The fluent builder: `Flow(m).through(n).also(o).build()` yields an ordinary nn.Module.

Records the calls and never raises for a mistake in a flow: `build` reports all of them at once. Called by users.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import nn

from outrider.flow import blocks
from outrider.flow.draft import Draft, FlowDraft, FlowError, Make, Mistake
from outrider.flow.graph import Graph
from outrider.flow.name_resolution import resolve
from outrider.flow.shape_inference import learn_shapes

Part = Any
"""An nn.Module, another Flow, or a function of tensors; anything else is a mistake that `build` reports."""

MERGES = ("add", "mean", "cat")


class Flow:
    """A network written as a flow; each method adds a node, or says more about the node added last."""

    def __init__(self, module: Part | None = None, *, input: str = "x") -> None:
        self._script = FlowDraft(inputs=[input])
        if module is not None:
            self.through(module)

    # Nodes on the stream.

    def through(self, module: Part) -> Flow:
        """The next module."""
        return self._add(Draft(kind="through", takes=self._script.streams, parts=_parts({"": module})))

    def also(self, module: Part, *, skip: Part | None = None) -> Flow:
        """A residual: `x + module(x)`, or `skip(x) + module(x)`."""
        parts = _parts({"body": module} if skip is None else {"body": module, "skip": skip})
        return self._add(Draft(kind="also", takes=self._script.streams, parts=parts))

    def fork(self, module: Part) -> Flow:
        """A side branch: the stream continues unchanged, and the result is available by its tag."""
        streams = self._script.streams
        self._add(Draft(kind="fork", takes=streams, parts=_parts({"": module})))
        self._script.streams = streams
        return self

    def split(self, *modules: Part) -> Flow:
        """Split: the stream passes every module; `merge` combines the results."""
        draft = Draft(kind="split", takes=self._script.streams, num_outputs=max(1, len(modules)))
        draft.parts = _parts({str(index): module for index, module in enumerate(modules)})
        draft.note = f"{len(modules)} branches"
        if len(modules) < 2:
            draft.fault(f"a split needs at least 2 branches, got {len(modules)}", hint="use through() for one module")
        return self._add(draft)

    def merge(self, operation: str | Callable[..., Any], *, dim: int = 1) -> Flow:
        """Fan in the open streams, and tags given with `using`: "add", "mean", "cat" along `dim`, or a function."""
        draft = Draft(kind="merge", takes=self._script.streams, dim=dim)
        if not isinstance(operation, str):
            draft.operation, draft.parts = "call", _parts({"": operation})
        else:
            draft.operation = draft.note = operation
            if operation not in MERGES:
                draft.fault(f"unknown merge {operation!r}", hint=f"use one of {', '.join(MERGES)}, or a function")
        return self._add_fan_in(draft)

    def loop(self, module: Part) -> Loop:
        """Repeat a module: follow with `.times(n)`, `.until(...)` or `.while_(...)`."""
        draft = Draft(kind="loop", takes=self._script.streams, parts=_parts({"body": module}))
        draft.unfinished = Mistake("the loop has no end", "follow it with .times(n), .until(...) or .while_(...)")
        return Loop(self._add(draft), draft)

    def gate(self, router: Part, experts: Sequence[Part]) -> Flow:
        """A soft mixture: experts weighed by the softmax of the router's scores; `using` feeds the router."""
        draft = self._routed("gate", router, experts, "experts")
        draft.make = lambda parts: blocks.Gate(parts["router"], _numbered(parts, "experts"))
        return self._add(draft)

    def switch(self, router: Part, branches: Sequence[Part]) -> Flow:
        """Hard routing per sample, by highest score or by integer index; `using` feeds the router."""
        draft = self._routed("switch", router, branches, "branches")
        draft.make = lambda parts: blocks.Switch(parts["router"], _numbered(parts, "branches"))
        return self._add(draft)

    def map(self, module: Part) -> Map:
        """Apply a module many times: follow with `.each()`, `.over("tag")` or `.slices(n)`."""
        draft = Draft(kind="map", takes=self._script.streams, parts=_parts({"body": module}))
        draft.unfinished = Mistake("the map has no range", 'follow it with .each(), .over("tag") or .slices(n)')
        return Map(self._add_fan_in(draft), draft, self._script)

    # More about the node added last.

    def tag(self, name: str, *, size: Sequence[int] | None = None) -> Flow:
        """Name this point; `size` is its shape without the batch, for a state whose size cannot be found."""
        last = self._script.last
        (self._script.input_tags if last is None else last.tags).append(name)
        if size is not None:
            self._script.sizes[name] = tuple(size)
        if last is not None and last.num_outputs > 1:
            last.fault(f"tag {name!r} would name {last.num_outputs} streams", hint="merge them, then tag")
        return self

    def using(self, *tags: str) -> Flow:
        """Feed tags or further inputs to the node added last; a tag that comes later is recurrent state."""
        if self._script.last is None:
            self._script.faults.append(Mistake("using() comes before any module", "add a module first"))
        else:
            self._script.last.uses.extend(tags)
        return self

    def label(self, name: str) -> Flow:
        """Name the node added last, and with it its parameters; a label wins over a tag."""
        if self._script.last is None:
            self._script.faults.append(Mistake(f"label {name!r} comes before any module", "add a module first"))
        else:
            self._script.last.label = name
        return self

    # The flow as a whole.

    def input(self, *names: str) -> Flow:
        """Further inputs of the graph, reached with `using`."""
        self._script.inputs.extend(names)
        return self

    def output(self, *tags: str) -> Flow:
        """Further outputs of the graph: forward then returns a tuple, the stream first."""
        self._script.outputs.extend(tags)
        return self

    def build(self, *, example: Any = None, name: str = "flow") -> Graph:
        """Check everything and make the module; `example` (a tensor, or a tuple of them) has the shapes checked too.

        Without an example the shapes are checked at the first forward.
        """
        built = resolve(self._script, name)
        if built.graph is None:
            raise FlowError(name, built.mistakes)
        if example is not None:
            learn_shapes(built.graph, example if isinstance(example, tuple) else (example,))
        return built.graph

    def _add(self, draft: Draft) -> Flow:
        if len(draft.takes) > 1:
            draft.fault(f"{len(draft.takes)} streams are open, {draft.kind} takes one", hint="merge them first")
        return self._add_fan_in(draft)

    def _add_fan_in(self, draft: Draft) -> Flow:
        self._script.add(draft)
        return self

    def _routed(self, kind: Literal["gate", "switch"], router: Part, choices: Sequence[Part], noun: str) -> Draft:
        draft = Draft(kind=kind, takes=self._script.streams, note=f"{len(choices)} {noun}")
        draft.parts = _parts({"router": router} | {f"{noun}.{index}": choice for index, choice in enumerate(choices)})
        if not choices:
            draft.fault(f"a {kind} needs {noun}, got none", hint=f"give a list of {noun}")
        return draft


class Loop:
    """A loop whose number of repetitions is still missing; every method returns to the flow."""

    def __init__(self, flow: Flow, draft: Draft) -> None:
        self._flow = flow
        self._draft = draft

    def times(self, count: int) -> Flow:
        """A fixed number of times."""
        return self._end(f"×{count}", count, lambda parts: blocks.Repeat(parts["body"], times=count))

    def until(self, condition: Callable[[Any], Any], *, at_most: int) -> Flow:
        """Until the condition of the result holds: one answer for the batch, or one for each sample."""
        make: Make = lambda parts: blocks.RepeatUntil(parts["body"], condition, at_most=at_most)  # noqa: E731
        return self._end(f"until, ≤ {at_most}", at_most, make)

    def while_(self, condition: Callable[[Any], Any], *, at_most: int) -> Flow:
        """While the condition of the stream holds, asked before each turn."""
        make: Make = lambda parts: blocks.RepeatWhile(parts["body"], condition, at_most=at_most)  # noqa: E731
        return self._end(f"while, ≤ {at_most}", at_most, make)

    def _end(self, note: str, count: int, make: Make) -> Flow:
        self._draft.unfinished = None
        self._draft.note, self._draft.make = note, make
        if count < 1:
            self._draft.fault(f"a loop runs at least once, got {count}", hint="give 1 or more")
        return self._flow


class Map:
    """A map whose range is still missing; every method returns to the flow."""

    def __init__(self, flow: Flow, draft: Draft, script: FlowDraft) -> None:
        self._flow = flow
        self._draft = draft
        self._script = script

    def each(self) -> Flow:
        """Over the elements (dimension 1) of every sample, or over the streams of an open split."""
        self._draft.unfinished = None
        if len(self._draft.takes) == 1:
            return self._end("each element", lambda parts: blocks.MapElements(parts["body"]))
        self._draft.is_shared, self._draft.num_outputs = True, len(self._draft.takes)
        self._draft.note, self._draft.make = "each stream", lambda parts: parts["body"]
        self._script.leave_open(self._draft)
        return self._flow

    def over(self, tag: str) -> Flow:
        """Over the elements (dimension 1) of a tagged tensor; the result becomes the stream."""
        self._draft.over = tag
        return self._end(f"over {tag}", lambda parts: blocks.MapElements(parts["body"]))

    def slices(self, count: int, *, dim: int = 1) -> Flow:
        """Over equal slices of a dimension, put together again."""
        if count < 1:
            self._draft.fault(f"a map needs at least 1 slice, got {count}", hint="give 1 or more")
        return self._end(f"{count} slices", lambda parts: blocks.MapSlices(parts["body"], count=count, dim=dim))

    def _end(self, note: str, make: Make) -> Flow:
        self._draft.unfinished = None
        self._draft.note, self._draft.make = note, make
        if len(self._draft.takes) > 1:
            self._draft.fault(f"{len(self._draft.takes)} streams are open, this map takes one", hint="merge them first")
        return self._flow


def _parts(parts: Mapping[str, Part]) -> dict[str, Any]:
    """Parts by name, the only one under the empty name; nested flows as their scripts."""
    return {name: part._script if isinstance(part, Flow) else part for name, part in parts.items()}


def _numbered(parts: Mapping[str, nn.Module], noun: str) -> list[nn.Module]:
    return [part for name, part in parts.items() if name.startswith(f"{noun}.")]
