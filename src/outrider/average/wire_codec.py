"""Decides how displacements are encoded: unchanged, in bfloat16, or in 8 bits with error feedback.

Only float32 displacements of parameters are rounded; buffers, optimizer state and facts are sent unchanged. Knows no
ranks and no transport. Called by Exchange, and by the transports that sum packets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WIRES = ("fp32", "bf16", "int8")
BLOCK = 256
"""Elements that share one scale in the 8-bit encoding."""
_LARGEST = 127


@dataclass(frozen=True, kw_only=True, slots=True)
class PacketForm:
    """The encoding of one piece: its rounded parameters, followed by all other values in float32."""

    wire: str
    numel: int
    """Elements of the piece."""
    num_parameters: int

    @property
    def num_bytes(self) -> int:
        return self._rest_start + 4 * (self.numel - self.num_parameters)

    @property
    def has_feedback(self) -> bool:
        return self.wire == "int8"

    @property
    def _num_blocks(self) -> int:
        return -(-self.num_parameters // BLOCK)

    @property
    def _rest_start(self) -> int:
        if self.wire == "bf16":
            return 4 * ((self.num_parameters + 1) // 2)
        return self._num_blocks * (4 + BLOCK)

    def encode(self, values: Tensor, packet: Tensor) -> None:
        """Encode the piece into the packet."""
        own = values[: self.num_parameters]
        if self.wire == "bf16":
            packet[: 2 * self.num_parameters].view(torch.bfloat16).copy_(own)
        else:
            self._encode_blocks(own, packet)
        packet[self._rest_start :].view(torch.float32).copy_(values[self.num_parameters : self.numel])

    def decode(self, packet: Tensor, out: Tensor, *, start: int = 0) -> None:
        """Decode values into `out`, from `start` on, which is a multiple of `BLOCK` or lies after the parameters."""
        stop = start + out.numel()
        middle = min(max(self.num_parameters, start), stop)
        if start < middle:
            self._decode_parameters(packet, out[: middle - start], start, middle)
        if middle < stop:
            rest = packet[self._rest_start :].view(torch.float32)
            out[middle - start :].copy_(rest[middle - self.num_parameters : stop - self.num_parameters])

    def _encode_blocks(self, own: Tensor, packet: Tensor) -> None:
        scales, codes = self._blocks(packet)
        padded = own.new_zeros(codes.shape)
        padded.view(-1)[: own.numel()].copy_(own)
        torch.amax(padded.abs(), dim=1, out=scales)
        scales.div_(_LARGEST)
        # A block of zeros decodes to zeros; a block with a value that is not finite does not decode to finite values.
        inverse = scales.reciprocal().masked_fill_(scales == 0, 0.0)
        codes.copy_(padded.mul_(inverse.unsqueeze(1)).round_().nan_to_num_(0.0).clamp_(-_LARGEST, _LARGEST))

    def _decode_parameters(self, packet: Tensor, out: Tensor, start: int, stop: int) -> None:
        if self.wire == "bf16":
            out.copy_(packet[2 * start : 2 * stop].view(torch.bfloat16))
            return
        assert start % BLOCK == 0, f"a range of 8-bit values begins at {start}"
        scales, codes = self._blocks(packet)
        out.copy_(codes.view(-1)[start:stop])
        whole = out.numel() // BLOCK * BLOCK
        first = start // BLOCK
        out[:whole].view(-1, BLOCK).mul_(scales[first : first + whole // BLOCK].unsqueeze(1))
        if whole < out.numel():
            out[whole:].mul_(scales[first + whole // BLOCK])

    def _blocks(self, packet: Tensor) -> tuple[Tensor, Tensor]:
        num_scales = 4 * self._num_blocks
        codes = packet[num_scales : num_scales + self._num_blocks * BLOCK].view(torch.int8)
        return packet[:num_scales].view(torch.float32), codes.view(self._num_blocks, BLOCK)


def add_feedback(form: PacketForm, values: Tensor, error: Tensor, *, samples: int) -> None:
    """Add the rounding errors of earlier packets, in units of displacements, to values multiplied by samples."""
    values[: form.num_parameters].add_(error, alpha=samples)


def keep_feedback(form: PacketForm, values: Tensor, packet: Tensor, error: Tensor, *, samples: int) -> None:
    """Keep the rounding error of this packet for the next one; unchanged without samples, when nothing was sent."""
    if not samples:
        return
    form.decode(packet, error)
    torch.sub(values[: form.num_parameters], error, out=error)
    error.div_(samples)
