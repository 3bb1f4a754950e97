"""The request of `outrider replay` to the script that it runs: replay instead of training.

Decides how the request is passed on. Imports little, because `train()` and `Session` check for it at every start.
`replaying` does the replay.
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
"""The exit code of `outrider replay` if the replay differs from the recording; errors have 1."""
LOOP_HINT = "write its step as a function and call outrider.replay(run, model, optimizer, step, dataset, ...)"
"""The hint for a user's own loop, which runs in one process per rank and cannot be replayed as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayWish:
    """The request of the command to the `train()` of a script."""

    run: str
    answer: str
    """The file for the exit code of the replay; if the file is missing, the command knows that nothing was replayed."""
    losses: str | None = None
    as_json: bool = False

    def variables(self) -> dict[str, str]:
        return {_VARIABLE: json.dumps(asdict(self))}

    def end(self, code: int) -> NoReturn:
        """Write the answer and exit; the answer holds even if the script continues after SystemExit."""
        Path(self.answer).write_text(str(code))
        sys.exit(code)

    def fail(self, error: OutriderError) -> NoReturn:
        """Print the error, and end the program."""
        print(f"error: {error}", file=sys.stderr, flush=True)
        self.end(1)


def wanted_replay() -> ReplayWish | None:
    """The request to this process; None if there is none."""
    told = os.environ.get(_VARIABLE)
    return None if told is None else ReplayWish(**json.loads(told))


def refuse_replay() -> None:
    """End the program if a session is opened although the command requested a replay."""
    if (wish := wanted_replay()) is not None:
        wish.fail(
            ConfigError(
                "outrider replay found a Session in the script: a loop of your own runs in one process per rank",
                hint=LOOP_HINT,
            )
        )
