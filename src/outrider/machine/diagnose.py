"""Puts facts, verdicts and forecast together, and decides the exit code.

Detects and measures nothing itself. Called by the command line with live or recorded facts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.machine import codec
from outrider.machine.facts import Facts
from outrider.machine.forecast import Forecast, forecast
from outrider.machine.verdicts import Level, Verdict, judge
from outrider.machine.wheels import Table

EXIT_FINE = 0
EXIT_FINDING = 1
EXIT_CANNOT_LOOK = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What is known of a machine and what to think of it."""

    facts: Facts
    verdicts: tuple[Verdict, ...]
    forecast: Forecast | None

    @property
    def exit_code(self) -> int:
        """0 without a failure, 1 with one, 3 where something could not be looked at and so not be judged."""
        if self.facts.troubles:
            return EXIT_CANNOT_LOOK
        return EXIT_FINDING if self.count("failure") else EXIT_FINE

    def count(self, level: Level) -> int:
        return sum(verdict.level == level for verdict in self.verdicts)


def diagnose(facts: Facts, table: Table) -> Diagnosis:
    """Judge these facts."""
    return Diagnosis(facts=facts, verdicts=judge(facts, table), forecast=forecast(facts))


def diagnosis_to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """One document: the facts, which `--facts` reads back, the verdicts and the forecast."""
    return {
        "schema_version": 1,
        "exit_code": diagnosis.exit_code,
        "facts": codec.encode(diagnosis.facts),
        "verdicts": [codec.encode(verdict) for verdict in diagnosis.verdicts],
        "forecast": codec.encode(diagnosis.forecast) if diagnosis.forecast else None,
    }
