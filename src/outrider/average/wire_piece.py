"""Decides which piece is sent and summed at a time, how it is encoded, and how many pieces a GPU computes at a time.

Does no arithmetic. Called by Exchange, and by the averagers that move pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from outrider.average.wire import Wire
from outrider.average.wire_codec import PacketForm
from outrider.average.wire_plan import WireSpan


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A span of a wire that is summed at a time; the facts of the ranks follow the first piece."""

    wire: Wire
    span: WireSpan
    num_slots: int
    form: PacketForm | None = None
    """The encoding of the piece; None if it is sent unchanged."""

    @property
    def numel(self) -> int:
        """Elements that are sent."""
        return self.sum_numel if self.form is None else self.form.num_bytes

    @property
    def dtype(self) -> torch.dtype:
        return self.sum_dtype if self.form is None else torch.uint8

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def sum_numel(self) -> int:
        """Elements of the sum over ranks."""
        return self.span.numel + self.span.num_extra + self.num_slots

    @property
    def sum_dtype(self) -> torch.dtype:
        return self.wire.plan.dtype

    @property
    def sum_bytes(self) -> int:
        return self.sum_numel * self.sum_dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Consecutive pieces that a GPU computes at once, because each kernel has to wait for kernels of training steps."""

    whole: Piece
    """A piece that spans all of them, for the arithmetic."""
    pieces: tuple[Piece, ...]

    def places(self) -> Iterator[tuple[Piece, int]]:
        """Yield each piece with its start in the chunk."""
        for piece in self.pieces:
            yield piece, piece.span.start - self.whole.span.start


def chunked(pieces: Sequence[Piece], numel: int) -> list[Chunk]:
    """Join pieces up to `numel` elements; pieces with facts, running variances or their own form stay alone."""
    chunks: list[Chunk] = []
    for piece in pieces:
        last = chunks[-1].whole if chunks else None
        if last is None or not (_can_join(last, piece) and piece.span.stop - last.span.start <= numel):
            chunks.append(Chunk(whole=piece, pieces=(piece,)))
            continue
        whole = replace(last, span=replace(last.span, stop=piece.span.stop))
        chunks[-1] = Chunk(whole=whole, pieces=(*chunks[-1].pieces, piece))
    return chunks


def _can_join(last: Piece, piece: Piece) -> bool:
    is_plain = all(one.form is None and not one.num_slots and not one.span.norms for one in (last, piece))
    return is_plain and last.wire is piece.wire


def written(piece: Piece, wire: str) -> Piece:
    """The piece with the encoding of the wire; only float32 displacements of parameters are rounded."""
    num_parameters = min(piece.span.stop, piece.wire.plan.num_parameters) - piece.span.start
    if wire == "fp32" or piece.sum_dtype != torch.float32 or num_parameters <= 0:
        return piece
    return replace(piece, form=PacketForm(wire=wire, numel=piece.sum_numel, num_parameters=num_parameters))
