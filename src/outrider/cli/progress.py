"""Shows the progress of training on stderr: a live display on a terminal, plain lines elsewhere.

Decides how the ranks' messages are shown. Starts no run and prints no result. Used by the demo.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from outrider.bench.demo_tasks import Watcher
from outrider.bench.measures import samples_per_s
from outrider.bench.modes import ModeResult
from outrider.world.messages import Message

_REFRESH_PER_S = 4
# Weight of the newest speed in the shown one; ranks report progress four times a second.
_GAIN = 0.4


@dataclass(slots=True)
class RankView:
    """One rank as its last messages show it."""

    device: str
    samples: int = 0
    samples_per_s: float | None = None
    loss: float | None = None
    heard_s: float | None = None

    def moved(self, samples: int, now_s: float) -> None:
        """It has done `samples` of this epoch by now."""
        if self.heard_s is not None and now_s > self.heard_s and samples >= self.samples:
            newest = (samples - self.samples) / (now_s - self.heard_s)
            before = newest if self.samples_per_s is None else self.samples_per_s
            self.samples_per_s = before + _GAIN * (newest - before)
        self.samples = samples
        self.heard_s = now_s

    def rest(self) -> None:
        """An epoch ended: time until the next message is not training time."""
        self.samples = 0
        self.heard_s = None


class ModeView:
    """A running mode, from its ranks' messages."""

    def __init__(
        self,
        mode: str,
        *,
        devices: Sequence[str],
        position: int,
        num_modes: int,
        epochs: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.mode = mode
        self.place = f"{position + 1} of {num_modes}"
        self.epochs = epochs
        self.epochs_done = 0
        self.num_samples: int | None = None
        self.anchor: int | None = None
        self.last_epoch: dict[str, Any] | None = None
        self.ranks = [RankView(device) for device in devices]
        self._clock = clock

    def saw(self, message: Message) -> None:
        if message.kind == "progress":
            self._saw_progress(self.ranks[message.rank], message.fields)
        elif message.kind == "epoch":
            self._saw_epoch(message.fields)

    def _saw_progress(self, rank: RankView, fields: dict[str, Any]) -> None:
        # Messages of the previous epoch may arrive after its end.
        if fields["epoch"] < self.epochs_done:
            return
        self.num_samples = fields["num_samples"]
        self.anchor = fields["anchor"]
        rank.loss = fields["loss"]
        rank.moved(fields["samples"], self._clock())

    def _saw_epoch(self, fields: dict[str, Any]) -> None:
        self.epochs_done = fields["epoch"] + 1
        self.num_samples = self.num_samples or fields["samples"]
        self.anchor = fields["anchor"]
        self.last_epoch = fields
        for rank in self.ranks:
            rank.rest()

    # What follows from it

    @property
    def samples(self) -> int:
        """Of this epoch, by all ranks."""
        return sum(rank.samples for rank in self.ranks)

    @property
    def shares(self) -> list[float] | None:
        """Each rank's share of this epoch, or of the last if this one has just begun."""
        if self.samples:
            return [rank.samples / self.samples for rank in self.ranks]
        return list(self.last_epoch["share_by_rank"]) if self.last_epoch else None

    @property
    def loss(self) -> float | None:
        known = [(rank.loss, rank.samples) for rank in self.ranks if rank.loss is not None and rank.samples]
        total = sum(samples for _, samples in known)
        if total:
            return sum(loss * samples for loss, samples in known) / total
        return self.last_epoch["loss"] if self.last_epoch else None

    @property
    def eta_s(self) -> float | None:
        """Remaining training time of this mode at the ranks' speed; None if nothing is left or it is not known yet."""
        speeds = [rank.samples_per_s for rank in self.ranks if rank.samples_per_s is not None]
        # A rank that rests has no speed; after an epoch it is known that no other one is still starting.
        is_known = len(speeds) == len(self.ranks) or self.epochs_done > 0
        if self.num_samples is None or not is_known or sum(speeds) <= 0:
            return None
        left = (self.epochs - self.epochs_done) * self.num_samples - self.samples
        return left / sum(speeds) if left > 0 else None


def live_lines(view: ModeView) -> list[str]:
    """The live display of a running mode, for 80 columns."""
    epoch = min(view.epochs_done + 1, view.epochs)
    done = view.num_samples if view.epochs_done >= view.epochs else view.samples
    part = f"  {min(1.0, (done or 0) / view.num_samples):.0%}" if view.num_samples else ""
    head = f"{view.place}  {view.mode}  epoch {epoch}/{view.epochs}{part}"
    shares = view.shares
    ranks = [
        _rank_line(number, rank, shares[number] if shares else None, width=_device_width(view))
        for number, rank in enumerate(view.ranks)
    ]
    return [head + _facts(loss=view.loss, anchor=view.anchor, eta_s=view.eta_s), *ranks]


def _device_width(view: ModeView) -> int:
    return max(len(rank.device) for rank in view.ranks)


def _rank_line(number: int, rank: RankView, share: float | None, *, width: int) -> str:
    speed = "starting" if rank.samples_per_s is None else f"{rank.samples_per_s:,.0f} samples/s"
    return f"  rank {number}  {rank.device:<{width}}  {speed:>18}" + ("" if share is None else f"  share {share:.0%}")


def epoch_line(view: ModeView) -> str:
    """An epoch that ended, in one line of 80 columns."""
    fields = view.last_epoch
    assert fields is not None, "called when an epoch ended"
    evaluated = "" if fields["eval"] is None else f"  eval {fields['eval']:.1%}"
    shares = "/".join(f"{100 * share:.0f}" for share in fields["share_by_rank"])
    head = f"  {view.epochs_done}/{view.epochs}  loss {fields['loss']:.3f}{evaluated}"
    speed = f"  {fields['samples_per_s']:,.0f}/s  share {shares}%"
    return head + speed + _facts(loss=None, anchor=fields["anchor"], eta_s=view.eta_s)


def _facts(*, loss: float | None, anchor: int | None, eta_s: float | None) -> str:
    known = {
        "loss": None if loss is None else f"{loss:.3f}",
        "anchor": None if anchor is None else str(anchor),
        "ETA": None if eta_s is None else f"{eta_s:.0f} s",
    }
    return "".join(f"  {name} {value}" for name, value in known.items() if value is not None)


def result_line(result: ModeResult) -> str:
    """A mode that ended, in one line of 80 columns."""
    last = result.epochs[-1]
    evaluated = "" if last.eval is None else f"  eval {last.eval:.1%}"
    return f"{result.mode:<14}{samples_per_s(result.epochs):>8,.0f} samples/s{evaluated}  {last.train_s:.1f} s"


@contextmanager
def open_watcher(epochs: int, console: Console | None = None) -> Iterator[Watcher]:
    """A live display if stderr is a terminal, plain lines otherwise."""
    console = console or Console(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield PlainWatcher(epochs, console)
        return
    watcher = LiveWatcher(epochs, console)
    with live(watcher.picture, console):
        yield watcher


def live(picture: Callable[[], RenderableType], console: Console) -> Live:
    """Redraws the display while it is open; never writes to stdout, which carries the result."""
    return Live(
        get_renderable=picture,
        console=console,
        refresh_per_second=_REFRESH_PER_S,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


class LiveWatcher:
    """Updates the display of the running mode; finished modes stay above it as lines."""

    def __init__(self, epochs: int, console: Console) -> None:
        self._epochs = epochs
        self._console = console
        self._view: ModeView | None = None

    def begin(self, mode: str, *, devices: Sequence[str], position: int, num_modes: int) -> None:
        self._view = ModeView(mode, devices=devices, position=position, num_modes=num_modes, epochs=self._epochs)

    def saw(self, message: Message) -> None:
        assert self._view is not None
        self._view.saw(message)

    def end(self, result: ModeResult) -> None:
        self._view = None
        self._console.print(Text(result_line(result)))

    def picture(self) -> Text:
        view = self._view
        return Text("\n".join(live_lines(view)) if view else "", no_wrap=True, overflow="crop")


class PlainWatcher:
    """One line per epoch."""

    def __init__(self, epochs: int, console: Console) -> None:
        self._epochs = epochs
        self._console = console
        self._view: ModeView | None = None

    def begin(self, mode: str, *, devices: Sequence[str], position: int, num_modes: int) -> None:
        self._view = ModeView(mode, devices=devices, position=position, num_modes=num_modes, epochs=self._epochs)
        self._print(f"{self._view.place}: {mode} on {' + '.join(devices)} (/s: samples per second of all ranks)")

    def saw(self, message: Message) -> None:
        assert self._view is not None
        self._view.saw(message)
        if message.kind == "epoch":
            self._print(epoch_line(self._view))

    def end(self, result: ModeResult) -> None:
        self._print(result_line(result))

    def _print(self, line: str) -> None:
        self._console.print(Text(line))
