"""Converts the state of an average to another layout, after tensors were frozen or thawed.

Decides where each region's values lie in the flat state of an exchange. Does not communicate. Called by the averages of
a rank and by the lab, between two segments and on resume.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outrider.average.arena_layout import ArenaLayout, Kind
from outrider.average.wire_plan import wire_dtype
from outrider.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class _BodyPlace:
    """The place of a region in the common point of a wire; parameters have the same place in the velocity."""

    wire: str
    start: int
    numel: int
    is_parameter: bool

    @property
    def span(self) -> slice:
        return slice(self.start, self.start + self.numel)


def carried_over(
    state: dict[str, Any], *, before: ArenaLayout, after: ArenaLayout, fresh: dict[str, Any]
) -> dict[str, Any]:
    """Convert the state of an exchange to the layout `after`; `fresh` is the initial state in that layout.

    Regions that are new in it keep their fresh values: the current common point, with velocity and errors at zero.
    """
    ref = {name: flat.clone() for name, flat in fresh["ref"].items()}
    # State laid out like the parameters: the velocity, and the rounding errors of earlier averages.
    moving = {kind: {name: flat.clone() for name, flat in fresh[kind].items()} for kind in ("velocity", "errors")}
    old = _places(before)
    for name, place in _places(after).items():
        source = old.get(name)
        if source is None or (source.wire, source.numel) != (place.wire, place.numel):
            continue
        ref[place.wire][place.span] = state["ref"][source.wire][source.span]
        for kind, flats in moving.items():
            saved = state.get(kind, {})
            if place.is_parameter and source.is_parameter and source.wire in saved and place.wire in flats:
                flats[place.wire][place.span] = saved[source.wire][source.span]
    return state | {"ref": ref, "fingerprint": after.fingerprint} | moving


def layout_of_saved(fingerprint: int, model: nn.Module, now: ArenaLayout) -> ArenaLayout:
    """The layout of a saved state: the current one, or that of older versions, which included frozen tensors."""
    if fingerprint == now.fingerprint:
        return now
    whole = ArenaLayout(model, takes_all=True)
    if fingerprint != whole.fingerprint:
        raise DataError(
            f"the saved average belongs to another model: layout {fingerprint:012x}, "
            f"this model has {now.fingerprint:012x}",
            hint="resume with the model that wrote the checkpoint. On other devices: with its memory_format, "
            "channels_last or contiguous; auto is channels_last for convolutions on GPUs",
        )
    return whole


def _places(layout: ArenaLayout) -> dict[str, _BodyPlace]:
    """The places by region name. A wire holds the parameters of all its dtypes, then their buffers."""
    starts: dict[tuple[torch.dtype, bool], int] = {}
    ends: dict[str, int] = {}
    for is_parameter in (True, False):
        for dtype, total in layout.totals.items():
            wire, own = str(wire_dtype(dtype)), layout.parameter_numel[dtype]
            begin = ends.get(wire, 0)
            starts[dtype, is_parameter] = begin if is_parameter else begin - own
            ends[wire] = begin + (own if is_parameter else total - own)
    places = {}
    for region in layout.regions:
        first, is_parameter = region.places[0], region.kind is Kind.PARAMETER
        places[region.name] = _BodyPlace(
            wire=str(wire_dtype(first.dtype)),
            start=starts[first.dtype, is_parameter] + first.offset,
            numel=first.numel,
            is_parameter=is_parameter,
        )
    return places
