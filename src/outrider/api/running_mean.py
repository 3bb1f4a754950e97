"""The exponential moving average (EMA) of a model in a user's loop, the same on all ranks.

Decides the weight of an update from the number of steps of all ranks since the last one. The EMA is linear in the
model, so the mean of the ranks' EMAs is the EMA of the averaged model. Created by `Session.ema`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from outrider.api.hand_averages import open_averages
from outrider.average.arena import Arena
from outrider.average.transport.backend_table import BackendChoice
from outrider.errors import ConfigError
from outrider.world.world import World


class RunningMean:
    """A copy of a model, `module`, that follows it; call `update()` after each step of the optimizer."""

    def __init__(
        self,
        model: nn.Module,
        *,
        decay: float | Callable[[int], float],
        count: Callable[[], int],
        world: World,
        backend: BackendChoice,
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        """Call `on_restart` before the first update, if no saved state was loaded."""
        if not callable(decay) and not 0 <= decay <= 1:
            raise ConfigError(f"decay must be between 0 and 1, got {decay}", hint="0.9998 follows about 5,000 steps")
        self._model = model
        self._decay = decay
        self._count = count
        self._counted = count()
        self._world = world
        self._has_begun = False
        self._on_restart = on_restart
        self.module = copy.deepcopy(model).requires_grad_(False).eval()
        """The averaged model: evaluate and save this one."""
        self._averages = open_averages(
            Arena(self.module, takes_all=True), world=world, backend=backend, what="a running mean"
        )

    def update(self) -> None:
        """Follow the model; counts this rank's latest step and the steps of other ranks since the last update."""
        if not self._has_begun:
            self._on_restart()
        self._has_begun = True
        # Count at least one step: the last batch of an epoch may be a fraction of a step.
        self._follow(max(self._counted, self._count()) + 1)

    def average(self, *, source: int | None = None) -> None:
        """Make the average equal on all ranks; the session calls this at the end of a loop over batches().

        It becomes that of rank `source`, if given: the other ranks have not followed all steps.
        """
        if source is not None:
            begun = self._world.exchange_json(self._has_begun, name="running means", what="the running means")
            self._has_begun = begun[source]
        if self._has_begun:
            self._follow(self._count())
            self._counted = self._count()
        if self._averages is not None and source is not None:
            self._averages.broadcast(source)
        elif self._averages is not None:
            self._averages.average_parameters(1)
            self._averages.average_buffers(1)

    @torch.no_grad()
    def _follow(self, step: int) -> None:
        kept = 1.0
        for number in range(self._counted + 1, step + 1):
            kept *= self._decay(number) if callable(self._decay) else self._decay
        self._counted = max(self._counted, step)
        if kept == 1.0:
            return
        latest = self._model.state_dict().values()
        pairs = list(zip(self.module.state_dict().values(), latest, strict=True))
        floats = [(mean, now) for mean, now in pairs if mean.is_floating_point()]
        torch._foreach_lerp_([mean for mean, _ in floats], [now for _, now in floats], 1 - kept)
        for mean, now in pairs:
            if not mean.is_floating_point():
                mean.copy_(now)

    def state_dict(self) -> dict[str, Any]:
        """The averaged model and its step count, for your own checkpoint."""
        return {"module": self.module.state_dict(), "counted": self._counted}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.module.load_state_dict(state_dict["module"])
        self._counted, self._has_begun = self._count(), True
