"""What is wrong with a flow: all of it at once, each mistake naming its node.

Holds the words of a mistake, not the rules; `resolve` and `shapes` find mistakes, `Flow.build` raises them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """One thing that is wrong, the node it is wrong at, and the way out."""

    node: str
    """Empty where the flow as a whole is meant."""
    message: str
    hint: str

    def __str__(self) -> str:
        return f"{self.node or 'the flow'}: {self.message} ({self.hint})"

    def inside(self, outer: str) -> Mistake:
        """The same mistake, seen from the flow that holds this one."""
        return Mistake(node=f"{outer}.{self.node}" if self.node else outer, message=self.message, hint=self.hint)


class FlowError(ConfigError):
    """A flow that cannot be built or run; `mistakes` holds each of its faults."""

    def __init__(self, flow: str, mistakes: Sequence[Mistake]) -> None:
        count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        super().__init__("\n".join([f"flow {flow!r} has {count}", *(f"  {mistake}" for mistake in mistakes)]))
        self.flow = flow
        self.mistakes = tuple(mistakes)

    def __reduce__(self) -> tuple[type[FlowError], tuple[str, tuple[Mistake, ...]]]:
        return FlowError, (self.flow, self.mistakes)
