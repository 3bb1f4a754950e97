"""A byte-level GPT whose parameters, gradients and AdamW state are flat tensors, for studies on one device.

Decides how a step runs: bf16, compiled blocks and CUDA graphs on a GPU, plain fp32 on a CPU. Knows no policy and no
average. Called by local_steps_gpt.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.bench.models.text_models import Gpt2, next_symbol_loss
from outrider.replica.capture import CaptureStream, Uncapturable

NUM_BYTES = 256
WARM_UP = 0.05
"""Of all steps; a cosine to zero follows."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The model and its batches; the default has 10.9 million parameters."""

    width: int = 384
    num_heads: int = 6
    num_blocks: int = 6
    context: int = 256
    batch_size: int = 32

    def model(self) -> Gpt2:
        return Gpt2(num_tokens=NUM_BYTES, width=self.width, num_heads=self.num_heads, num_blocks=self.num_blocks)


WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
MAX_GRAD_NORM = 1.0


def part_of_rate(tick: int, *, ticks: int) -> float:
    """Up over a twentieth of the run, then down along a cosine."""
    return min(1.0, (tick + 1) / (WARM_UP * ticks)) * 0.5 * (1 + math.cos(math.pi * min(1.0, tick / ticks)))


def initial_values(shape: Shape, seed: int) -> Tensor:
    """The parameters of a new model, flat, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.cat([p.detach().flatten() for p in shape.model().parameters()])


class FlatGpt:
    """One replica; `gradient`, `update` and `mean_loss` are queued on the current stream."""

    def __init__(self, shape: Shape, text: Tensor, *, is_compiled: bool) -> None:
        """`text` holds bytes on the device of the replica."""
        self.shape, self.text, self.device = shape, text, text.device
        self.model = shape.model().to(self.device)
        self._params = list(self.model.parameters())
        self.values = torch.cat([p.detach().flatten() for p in self._params]).requires_grad_()
        self._point_into_values()
        if is_compiled:
            for block in self.model.blocks:
                block.compile(dynamic=False)
        self.slope = torch.zeros_like(self.values)
        """The gradient, flat."""
        self.values.grad = self.slope
        self.rate = torch.zeros((), device=self.device)
        is_cuda = self.device.type == "cuda"
        self._optimizer = torch.optim.AdamW(
            [self.values], lr=self.rate, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True, capturable=is_cuda
        )
        self._optimizer.step()  # Creates the state, at a rate and a gradient of zero.
        self._starts = torch.zeros(shape.batch_size, dtype=torch.long, device=self.device)
        self._places = torch.arange(shape.context + 1, device=self.device)
        self.loss = torch.zeros((), device=self.device)
        """Of the last batch."""
        self._run: dict[str, Callable[[], None]] = {
            "gradient": self._find_gradient,
            "update": self._apply_gradient,
            "loss": self._find_loss,
        }

    def _point_into_values(self) -> None:
        sizes = [p.numel() for p in self._params]
        for param, part in zip(self._params, self.values.detach().split(sizes), strict=True):
            param.data = part.view_as(param)

    @property
    def state(self) -> dict[str, Tensor]:
        """The state of AdamW: exp_avg, exp_avg_sq and step."""
        return self._optimizer.state[self.values]

    @torch.no_grad()
    def start(self, values: Tensor) -> None:
        """Begin a new run at these parameters."""
        self.values.copy_(values)
        for tensor in self.state.values():
            tensor.zero_()

    def gradient(self, starts: Tensor) -> None:
        """Find the gradient at windows that begin at these places of the text."""
        self._starts.copy_(starts)
        self._run["gradient"]()

    def update(self, rate: float) -> None:
        """Clip the gradient and take a step of AdamW."""
        self.rate.fill_(rate)
        self._run["update"]()

    @torch.no_grad()
    def mean_loss(self, starts: Tensor) -> float:
        """Over batches of windows, one per row; waits for the device."""
        total = torch.zeros((), device=self.device)
        for row in starts:
            self._starts.copy_(row)
            self._run["loss"]()
            total += self.loss
        return float(total / len(starts))

    def capture(self, stream: CaptureStream) -> None:
        """Turn all work into CUDA graphs; the replicas of one stream must not run at the same time."""
        for name, work in tuple(self._run.items()):
            for _ in range(3):
                stream.run(work)
            self._run[name] = stream.capture(work).replay

    def _forward(self) -> Tensor:
        windows = self.text[self._starts[:, None] + self._places]
        is_cuda = self.device.type == "cuda"
        with (
            torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if is_cuda else contextlib.nullcontext(),
            torch.enable_grad(),  # Evaluation too, so that compiled blocks are compiled once.
        ):
            return next_symbol_loss(self.model, (windows,))

    def _find_gradient(self) -> None:
        loss = self._forward()
        grads = torch.autograd.grad(loss, self._params)
        self._keep(loss)
        torch.cat([grad.flatten() for grad in grads], out=self.slope)

    def _find_loss(self) -> None:
        self._keep(self._forward())

    def _keep(self, loss: Tensor) -> None:
        self.loss.copy_(loss.detach())

    @torch.no_grad()
    def _apply_gradient(self) -> None:
        norm = torch.linalg.vector_norm(self.slope)
        self.slope.mul_((MAX_GRAD_NORM / (norm + 1e-6)).clamp(max=1.0))
        self._optimizer.step()


def compiled_blocks_agree(shape: Shape, text: Tensor, *, tolerance: float = 0.05) -> bool:
    """Whether compiled blocks work here and give the gradient of plain ones; the compilation is kept for later."""
    apart = (len(text) - shape.context - 2) // shape.batch_size
    starts = torch.arange(shape.batch_size, device=text.device) * apart
    values = initial_values(shape, 0).to(text.device)
    slopes = []
    for is_compiled in (False, True):
        replica = FlatGpt(shape, text, is_compiled=is_compiled)
        replica.start(values)
        try:
            replica.gradient(starts)
        except Exception as error:
            print(f"blocks cannot be compiled here, they run as they are: {type(error).__name__}: {error}"[:300])
            return False
        slopes.append(replica.slope.clone())
    difference = float((slopes[1] - slopes[0]).norm() / slopes[0].norm())
    print(f"gradients of compiled blocks differ by {difference:.1e} from those of plain ones", flush=True)
    return difference < tolerance


def batches_of(text_length: int, shape: Shape, count: int, *, seed: int) -> Tensor:
    """Places of windows that the seed draws, a row per batch; a longer run begins like a shorter one."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, text_length - shape.context - 1, (count, shape.batch_size), generator=draw)


def build(shape: Shape, text: Tensor, *, count: int, is_compiled: bool) -> Sequence[FlatGpt]:
    """Replicas that take turns on one stream, captured if they are on a GPU."""
    replicas = [FlatGpt(shape, text, is_compiled=is_compiled) for _ in range(count)]
    if text.device.type == "cuda":
        stream = CaptureStream(text.device)
        try:
            for replica in replicas:
                replica.capture(stream)
        except Uncapturable as refusal:
            print(f"steps cannot be captured, they run eagerly: {refusal}", flush=True)
    return replicas
