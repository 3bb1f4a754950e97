"""What `outrider replay` asks of the script that it runs: a replay in place of training.

Decides how the wish travels. Light, because `train()` and `Session` ask for it at every start; `replaying` fulfils it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from outrider.errors import ConfigError

_VARIABLE = "OUTRIDER_REPLAY"
LOOP_HINT = "write its step as a function and call outrider.replay(run, model, optimizer, step, dataset, ...)"
"""The way out for a loop of the user, which runs in one process per rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayWish:
    """What the command asks of the `train()` of a script."""

    run: str
    losses: str | None = None
    as_json: bool = False

    def variables(self) -> dict[str, str]:
        return {_VARIABLE: json.dumps(asdict(self))}


def wanted_replay() -> ReplayWish | None:
    """What the command asks of this process."""
    told = os.environ.get(_VARIABLE)
    return None if told is None else ReplayWish(**json.loads(told))


def refuse_replay() -> None:
    """Raise if a session is opened where the command wants a replay."""
    if wanted_replay() is not None:
        raise ConfigError(
            "outrider replay found a Session in the script: a loop of your own runs in one process per rank",
            hint=LOOP_HINT,
        )
