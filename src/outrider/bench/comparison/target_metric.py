"""The target of a comparison: a metric of an epoch and the value that it is to reach.

Decides how a target is written and when an epoch reaches it. Reads epochs as records have them. Knows no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.errors import ConfigError

_TARGET = re.compile(r"\s*(?P<metric>[\w./-]+?)\s*(?P<sign>>=|<=)\s*(?P<value>[-+.\w]+)\s*")
_HINT = 'write "eval>=0.97", "eval<=0.5", "loss<=0.2", or the name of a logged scalar: "accuracy>=0.9"'


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetMetric:
    """`metric` is `eval`, `loss`, or the name of a logged scalar."""

    metric: str
    is_above: bool
    value: float

    @classmethod
    def parse(cls, text: str) -> TargetMetric:
        match = _TARGET.fullmatch(text)
        try:
            value = float(match["value"]) if match else math.nan
        except ValueError:
            value = math.nan
        if match is None or not math.isfinite(value):
            raise ConfigError(f"no target in {text!r}", hint=_HINT)
        return cls(metric=match["metric"], is_above=match["sign"] == ">=", value=value)

    def __str__(self) -> str:
        return f"{self.metric}{'>=' if self.is_above else '<='}{self.value:g}"

    def value_of(self, epoch: Mapping[str, Any]) -> float | None:
        """The metric of an epoch; None where it has none."""
        value = epoch.get(self.metric) if self.metric in ("eval", "loss") else epoch.get("logged", {}).get(self.metric)
        return None if value is None else float(value)

    def is_reached(self, epoch: Mapping[str, Any]) -> bool:
        value = self.value_of(epoch)
        return value is not None and (value >= self.value if self.is_above else value <= self.value)

    def best_of(self, epochs: Sequence[Mapping[str, Any]]) -> float | None:
        """The best value of all epochs."""
        values = [value for epoch in epochs if (value := self.value_of(epoch)) is not None]
        return (max if self.is_above else min)(values, default=None)
