"""Decides which optimizer state is averaged, and moves it into one flat tensor per dtype.

Does not average; step counts and other scalars stay local. Called by the averages of a rank and by the lab, after the
first step, when the state exists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outrider.average.tensor_layout import LayoutPlanner, real_dtype
from outrider.errors import ConfigError

# Averages of squares and maxima of magnitudes, under torch's own names.
NONNEGATIVE = frozenset({"acc_delta", "exp_avg_sq", "exp_inf", "max_exp_avg_sq", "square_avg", "sum"})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slot:
    parameter: Tensor
    key: str
    like: Tensor
    """The state tensor, or the parameter if there is no state."""

    @property
    def is_signed(self) -> bool:
        return self.key not in NONNEGATIVE


class OptimizerArena:
    """Float state with the shape of its parameter (moments, momentum) in one flat tensor per dtype.

    In each flat tensor, non-negative state comes first. A parameter without state, for example one without a gradient
    on this rank, keeps an empty place, so that all ranks have the same layout.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, parameters: Collection[nn.Parameter] | None = None) -> None:
        """If `parameters` are given, only their state is included, so that frozen parameters take no space."""
        known = None if parameters is None else {id(parameter) for parameter in parameters}
        found = (slot for slot in _slots(optimizer) if known is None or id(slot.parameter) in known)
        slots = sorted(found, key=lambda slot: slot.is_signed)
        if not slots:
            raise ConfigError(
                f"{type(optimizer).__name__} holds no state to average",
                hint="leave average_optimizer out, or use an optimizer with momentum and average after its first step",
            )
        self._optimizer = optimizer
        planner = LayoutPlanner()
        places = [planner.place(slot.like) for slot in slots if not slot.is_signed]
        self.num_nonnegative = {dtype: planner.ends.get(dtype, 0) for dtype in _dtypes(slots)}
        places += [planner.place(slot.like) for slot in slots if slot.is_signed]
        device = slots[0].like.device
        self.flats = {dtype: torch.zeros(n, dtype=dtype, device=device) for dtype, n in planner.ends.items()}
        self._views = [(slot, place.view(self.flats[place.dtype])) for slot, place in zip(slots, places, strict=True)]
        self.reclaim()

    def reclaim(self) -> None:
        """Move state into the flat tensors: all of it at first, later only state that `load_state_dict` replaced."""
        for slot, view in self._views:
            tensor = self._optimizer.state.get(slot.parameter, {}).get(slot.key)
            if tensor is not None and tensor.data_ptr() != view.data_ptr():
                view.copy_(tensor)
                tensor.data = view

    def dissolve(self) -> None:
        """Give the state its own memory again; this object cannot be used afterwards."""
        for slot, view in self._views:
            tensor = self._optimizer.state.get(slot.parameter, {}).get(slot.key)
            if tensor is not None and tensor.data_ptr() == view.data_ptr():
                tensor.data = view.clone()


def _slots(optimizer: torch.optim.Optimizer) -> Iterator[_Slot]:
    """Yield every parameter with each state key that any parameter of its group has."""
    for group in optimizer.param_groups:
        keys = sorted({key for parameter in group["params"] for key in _keys(optimizer, parameter)})
        for key in keys:
            for parameter in group["params"]:
                like = optimizer.state.get(parameter, {}).get(key, parameter)
                yield _Slot(parameter=parameter, key=key, like=like)


def _keys(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Iterator[str]:
    for key, value in optimizer.state.get(parameter, {}).items():
        if key != "step" and isinstance(value, Tensor) and _is_averaged(value) and value.shape == parameter.shape:
            yield key


def _is_averaged(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _dtypes(slots: list[_Slot]) -> set[torch.dtype]:
    return {real_dtype(slot.like.dtype) for slot in slots}
