"""What `outrider replay` asks of the script that it runs: a replay in place of training.

Decides how the wish travels. Light, because `train()` and `Session` ask for it at every start; `replaying` fulfils it.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from outrider.errors import ConfigError, OutriderError

_VARIABLE = "OUTRIDER_REPLAY"
DEPARTED = 3
"""The exit code of `outrider replay` where the replay departs from the recording; errors have 1."""
LOOP_HINT = "write its step as a function and call outrider.replay(run, model, optimizer, step, dataset, ...)"
"""The way out for a loop of the user, which runs in one process per rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayWish:
    """What the command asks of the `train()` of a script."""

    run: str
    answer: str
    """The file for the exit code of the replay; without it, the command knows that nothing was replayed."""
    losses: str | None = None
    as_json: bool = False

    def variables(self) -> dict[str, str]:
        return {_VARIABLE: json.dumps(asdict(self))}

    def end(self, code: int) -> NoReturn:
        """Answer the command and end the program; the answer counts also if the script goes on after SystemExit."""
        Path(self.answer).write_text(str(code))
        sys.exit(code)

    def fail(self, error: OutriderError) -> NoReturn:
        """Print the error, and end the program."""
        print(f"error: {error}", file=sys.stderr, flush=True)
        self.end(1)


def wanted_replay() -> ReplayWish | None:
    """What the command asks of this process."""
    told = os.environ.get(_VARIABLE)
    return None if told is None else ReplayWish(**json.loads(told))


def refuse_replay() -> None:
    """End the program if a session is opened where the command wants a replay."""
    if (wish := wanted_replay()) is not None:
        wish.fail(
            ConfigError(
                "outrider replay found a Session in the script: a loop of your own runs in one process per rank",
                hint=LOOP_HINT,
            )
        )
