"""Lightning's launcher for ranks that Outrider starts or finds.

Decides when the session is open: while the Trainer works, or from `fabric.launch()` to the end of the program.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from lightning.fabric.strategies.launchers.launcher import _Launcher

from outrider.integrations.lightning_ranks import LightningRanks
from outrider.launch.script_launcher import at_script_end


class RankLauncher(_Launcher):
    """Runs a function in the session of this rank; the ranks were started when the Trainer was made."""

    def __init__(self, ranks: LightningRanks) -> None:
        self._ranks = ranks

    @property
    def is_interactive_compatible(self) -> bool:
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Open the session, call the function, close the session."""
        if trainer is not None:
            # The strategy hands out batches; Lightning would give each rank an equal part.
            trainer._accelerator_connector.use_distributed_sampler = False
        self._ranks.open()
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            self._ranks.close(error)
            raise
        self._ranks.close()
        return result


class FabricLauncher(RankLauncher):
    """Opens the session for the rest of the program: a Fabric script has no call that ends it."""

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Open the session, unless it is open, and call the function."""
        if self._ranks.session is None:
            self._ranks.open()
            at_script_end(self._end)
        return function(*args, **kwargs)

    def _end(self) -> None:
        # An error that ended the program leaves the other ranks in an unknown place.
        self._ranks.close(getattr(sys, "last_value", None))
