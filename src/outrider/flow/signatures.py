"""Can a module take the number of inputs that a flow feeds it?

Decides by the signature of `forward`, without a call; functions without a signature pass. Called by `resolve`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from outrider.flow.blocks import Call, function_name
from outrider.flow.draft import Draft, Fault

_ONLY_STREAM = ("skip", "experts", "branches")
"""Parts that see the stream but not the tags given with `using`."""


@dataclass(frozen=True, slots=True)
class Arity:
    """How many inputs a module takes; no limit where most is None."""

    least: int
    most: int | None

    def accepts(self, count: int) -> bool:
        return self.least <= count and (self.most is None or count <= self.most)

    def __str__(self) -> str:
        if self.most is None:
            return f"at least {self.least} input{'' if self.least == 1 else 's'}"
        if self.least == self.most:
            return f"{self.least} input{'' if self.least == 1 else 's'}"
        return f"{self.least} to {self.most} inputs"


def fault_of_calls(draft: Draft, parts: Mapping[str, nn.Module], num_takes: int) -> Iterator[Fault]:
    """A fault for every part that is fed a wrong number of inputs."""
    for part, module in parts.items():
        count = num_takes if part.startswith(_ONLY_STREAM) else num_takes + len(draft.uses)
        arity = arity_of(module)
        if arity is not None and not arity.accepts(count):
            yield _fault(module, arity, count, draft)


def arity_of(module: nn.Module) -> Arity | None:
    """The positional inputs of a module's forward; None where Python cannot tell."""
    call = module.function if isinstance(module, Call) else module.forward
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    has_rest = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return Arity(sum(p.default is p.empty for p in positional), None if has_rest else len(positional))


def _fault(module: nn.Module, arity: Arity, count: int, draft: Draft) -> Fault:
    name = function_name(module.function) if isinstance(module, Call) else type(module).__name__
    fed = ", ".join(["the stream", *(repr(tag) for tag in draft.uses)])
    way_out = "feed the rest with using(...)" if count < arity.least else "leave some out of using(...)"
    if draft.kind == "merge":
        fed, way_out = f"{len(draft.takes)} streams, {len(draft.uses)} tags", "give a function of as many inputs"
    return Fault(f"{name} takes {arity}, the flow feeds it {count} ({fed})", way_out)
