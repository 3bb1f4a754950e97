"""Decides what is sent and summed at a time, and how it is written on the wire.

Does no arithmetic. Called by Exchange, and by the averagers that move pieces.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from outrider.average.wire import Wire
from outrider.average.wire_codec import PacketForm
from outrider.average.wire_plan import WireSpan


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What is summed at a time: a span of a wire; the first one is followed by the facts of the ranks."""

    wire: Wire
    span: WireSpan
    num_slots: int
    form: PacketForm | None = None
    """How it is written where it does not travel as it is."""

    @property
    def numel(self) -> int:
        """Of what is sent."""
        return self.sum_numel if self.form is None else self.form.num_bytes

    @property
    def dtype(self) -> torch.dtype:
        return self.sum_dtype if self.form is None else torch.uint8

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def sum_numel(self) -> int:
        """Of the sum over ranks."""
        return self.span.numel + self.span.num_extra + self.num_slots

    @property
    def sum_dtype(self) -> torch.dtype:
        return self.wire.plan.dtype

    @property
    def sum_bytes(self) -> int:
        return self.sum_numel * self.sum_dtype.itemsize


def written(piece: Piece, wire: str) -> Piece:
    """The piece as the wire writes it: only float32 displacements of parameters are rounded."""
    num_parameters = min(piece.span.stop, piece.wire.plan.num_parameters) - piece.span.start
    if wire == "fp32" or piece.sum_dtype != torch.float32 or num_parameters <= 0:
        return piece
    return replace(piece, form=PacketForm(wire=wire, numel=piece.sum_numel, num_parameters=num_parameters))
