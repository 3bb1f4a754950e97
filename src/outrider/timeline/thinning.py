"""Makes long timelines small enough to draw: spans that share a pixel become one, samples their mean.

Decides what a drawing may leave out; the files keep everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from outrider.timeline.spans import Span


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One or more spans of the same name, drawn as one: the paler, the less of it they took."""

    start_s: float
    end_s: float
    seconds: float
    """What the spans took; the rest of the bar is between them."""
    name: str
    spans: tuple[Span, ...]


def as_bars(spans: Sequence[Span], *, limit: int) -> list[Bar]:
    """At most about `limit` bars per name; every second of a span is in exactly one of them."""
    if len(spans) <= limit:
        return [_bar((span,)) for span in spans]
    start_s = min(span.start_s for span in spans)
    slot_s = (max(span.end_s for span in spans) - start_s) / limit or 1.0
    slots = groupby(sorted(spans, key=lambda span: span.start_s), key=lambda s: int((s.start_s - start_s) / slot_s))
    return [bar for _, together in slots for bar in _bars_of(list(together))]


def _bars_of(together: list[Span]) -> Iterator[Bar]:
    for name in dict.fromkeys(span.name for span in together):
        yield _bar(tuple(span for span in together if span.name == name))


def _bar(together: tuple[Span, ...]) -> Bar:
    seconds = sum(span.seconds for span in together)
    first, last = together[0], together[-1]
    return Bar(start_s=first.start_s, end_s=last.end_s, seconds=seconds, name=first.name, spans=together)


def thin_series(
    times_s: Sequence[float], values: Sequence[float | None], *, limit: int
) -> tuple[list[float], list[float | None]]:
    """At most `limit` points: the mean of the known values of each run of samples, at the last one's time."""
    size = -(-len(times_s) // limit) if times_s else 1
    starts = range(0, len(times_s), size)
    return [times_s[min(i + size, len(times_s)) - 1] for i in starts], [_mean(values[i : i + size]) for i in starts]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 1) if known else None
