"""A `GradScaler` in a user's loop: all ranks of a shared step skip it together, and losses are reported unscaled.

Decides when scaled gradients are averaged: after unscaling and before the scaler checks for infinities, so that ranks
may have different scales. The user's loop decides what is shared. `prepare()` creates it for the user's own scaler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState

_UNSCALED = "_outrider_unscaled"


class LoopScaler:
    """The prepared scaler of a user's loop; `release` restores the original scaler."""

    def __init__(self, scaler: GradScaler, *, device: torch.device) -> None:
        self._scaler = scaler
        self._device = device
        self.average: Callable[[torch.optim.Optimizer], bool | None] = lambda optimizer: None
        """Averages unscaled gradients if the step is shared; returns whether those of any rank were not finite."""
        self.on_skipped: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None
        self._kind = type(scaler)
        methods = {"scale": self._scale, "unscale_": self._unscale, "step": self._step}
        overrides = {name: _as_method(method) for name, method in methods.items()}
        scaler.__class__ = type(self._kind.__name__, (self._kind,), {**overrides, "__module__": self._kind.__module__})

    @property
    def is_enabled(self) -> bool:
        return self._scaler.is_enabled()

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss for the backward pass; a loss that the user already scaled is returned unchanged."""
        return loss if hasattr(loss, _UNSCALED) else self._scaler.scale(loss)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step and update, like a user's loop."""
        self._scaler.step(optimizer)
        self._scaler.update()

    @contextmanager
    def unscaled(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Remove this rank's scale from gradients within the context, to average them during accumulation."""
        scale = self._scaler.get_scale()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        # Scales are powers of two, so no precision is lost.
        torch._foreach_mul_(gradients, 1 / scale)
        yield
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, scale)

    def state(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def restore(self, state: dict[str, Any]) -> None:
        self._scaler.load_state_dict(state)

    def release(self) -> None:
        self._scaler.__class__ = self._kind

    # Methods of the user's scaler while it is prepared.

    def _scale(self, outputs: Any) -> Any:
        scaled = self._kind.scale(self._scaler, outputs)
        if isinstance(outputs, Tensor) and scaled is not outputs:
            setattr(scaled, _UNSCALED, outputs.detach())
        return scaled

    def _unscale(self, optimizer: torch.optim.Optimizer) -> None:
        scaler = self._scaler
        if not scaler.is_enabled():
            return
        if scaler._scale is None:
            # A rank that steps without its own batch has scaled nothing.
            scaler._lazy_init_scale_growth_tracker(self._device)
        self._kind.unscale_(scaler, optimizer)
        has_overflow = self.average(optimizer)
        if has_overflow is not None:
            found = torch.full((), float(has_overflow), dtype=torch.float32, device=self._device)
            scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {self._device: found}

    def _step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        scaler = self._scaler
        if not scaler.is_enabled():
            return self._kind.step(scaler, optimizer, *args, **kwargs)
        # Optimizers that unscale themselves would do so after the average.
        if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            scaler.unscale_(optimizer)
        num_steps = _Count()
        with _counted(optimizer, num_steps):
            result = self._kind.step(scaler, optimizer, *args, **kwargs)
        if not num_steps.value:
            self.on_skipped(optimizer)
        return result


class _Count:
    value = 0


@contextmanager
def _counted(optimizer: torch.optim.Optimizer, count: _Count) -> Iterator[None]:
    def saw(*_: Any) -> None:
        count.value += 1

    hook = optimizer.register_step_post_hook(saw)
    try:
        yield
    finally:
        hook.remove()


def unscaled_loss(loss: Tensor) -> Tensor:
    """The loss as it was before a prepared scaler scaled it."""
    plain: Tensor = getattr(loss, _UNSCALED, loss)
    return plain


def _as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the scaler's class that ignores `self`, because each prepared scaler has its own class."""
    return lambda scaler, *args, **kwargs: function(*args, **kwargs)
