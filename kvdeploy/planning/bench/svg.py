"""Two plots as SVG: shares of requests by time, and bars. Pure; colours are the page's own."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

WIDTH: Final = 430
HEIGHT: Final = 250
LEFT, RIGHT, TOP, BOTTOM = 50, 18, 42, 40
BARS_TOP: Final = 30
MARKS: Final = (0, 0.5, 0.9, 0.99, 0.999, 0.9999)
MOST_POINTS: Final = 400
SLOWEST: Final = 100
BAR: Final = 26
NAMES: Final = 118
STEPS: Final = (1, 2, 2.5, 5, 10)


def draw_shares(title: str, unit: str, series: Mapping[str, Sequence[float]]) -> str:
    """For each name: what share of its values is no larger than so much.

    Upwards each tenth of what is left has the same room, so that the slowest hundredth is seen as
    well as the quicker half; to the right up to the largest value of all.
    """
    known = {name: sorted(values) for name, values in series.items() if values}
    if not known:
        return _nothing(title)
    most = max(values[-1] for values in known.values())
    step = find_step(most)
    top = step * max(1, -(-most // step))
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(value: float) -> float:
        return LEFT + across * value / top

    tenths = max(1, math.ceil(math.log10(max(map(len, known.values())))))

    def y(share: float) -> float:
        left = max(1 - share, 10**-tenths)
        return TOP + down * (1 + math.log10(left) / tenths)

    parts = [_title(title), _text(4, 32, "share of values that are no larger", "start")]
    for share in MARKS[: tenths + 2]:
        parts.append(_line(LEFT, y(share), WIDTH - RIGHT, y(share)))
        parts.append(_text(LEFT - 6, y(share) + 4, f"{share * 100:g}%", "end"))
    for i in range(round(top / step) + 1):
        parts.append(_line(x(i * step), TOP, x(i * step), TOP + down))
        parts.append(_text(x(i * step), TOP + down + 16, f"{i * step:g}", "middle"))
    parts.append(_text(WIDTH - RIGHT, HEIGHT - 6, unit, "end"))
    for name, values in known.items():
        points = " ".join(f"{x(v):.1f},{y(s):.1f}" for v, s in _stairs(values))
        parts.append(
            f'<polyline class="{escape(name)}" fill="none" points="{points}">'
            f"<title>{escape(name)}, {len(values)} values</title></polyline>"
        )
    return _frame(WIDTH, HEIGHT, parts)


def draw_bars(title: str, unit: str, values: Mapping[str, float]) -> str:
    """One bar a name, with its number."""
    if not values:
        return _nothing(title)
    most = max(values.values()) or 1.0
    room = WIDTH - NAMES - 84
    parts = [_title(f"{title}, {unit}" if unit else title)]
    for i, (name, value) in enumerate(values.items()):
        top = BARS_TOP + i * BAR
        width = room * value / most
        parts.append(_text(NAMES - 8, top + 14, name, "end"))
        parts.append(
            f'<rect class="{escape(name)}" x="{NAMES}" y="{top}" width="{width:.1f}" height="18"/>'
        )
        parts.append(_text(NAMES + width + 6, top + 14, _figure(value), "start"))
    return _frame(WIDTH, BARS_TOP + len(values) * BAR + 8, parts)


def find_step(most: float) -> float:
    """Between the marks of an axis that reaches `most`: about six of them, at round numbers."""
    rough = most / 6 or 1.0
    power = 1.0
    while power > rough:
        power /= 10
    while power * 10 <= rough:
        power *= 10
    return power * next(s for s in STEPS if power * s >= rough)


def _stairs(values: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Of sorted values: each, and the share that is reached there. Of very many not every one, but
    all of the slowest.
    """
    count = len(values)
    yield values[0], 0.0
    every = max(1, count // MOST_POINTS)
    kept = sorted({*range(0, count, every), *range(max(0, count - SLOWEST), count)})
    before = 0.0
    for i in kept:
        yield values[i], before
        before = (i + 1) / count
        yield values[i], before


def _frame(width: float, height: float, parts: Sequence[str]) -> str:
    inside = "".join(parts)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>{inside}</svg>'


def _nothing(title: str) -> str:
    return _frame(WIDTH, 60, [_title(title), _text(LEFT, 48, "nothing was measured", "start")])


def _title(text: str) -> str:
    return f'<text class="title" x="4" y="16">{escape(text)}</text>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _figure(value: float) -> str:
    """Four digits, and never 1.8e+04."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
