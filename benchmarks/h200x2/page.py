"""Every cell's distributions, as one page that needs nothing else. Pure."""

from __future__ import annotations

import json
import re
from html import escape
from typing import TYPE_CHECKING, Any

from benchmarks.h200x2.summary import find_sides
from kvdeploy.planning.bench import svg
from kvdeploy.planning.bench.figures import SUMS, TIMES, UNITS
from kvdeploy.planning.bench.page import SCALES, STYLE, TITLES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.h200x2.ledger import Entry
    from benchmarks.h200x2.summary import Side

COLOURS = (
    *("#1a7f5a", "#c2701c", "#3b62c4", "#8a8f98", "#a3327f", "#7a5c00", "#008a9a", "#c0392b"),
    *("#5b3fb0", "#4d7c0f", "#9a6a55"),
)
KEPT = {
    "push": 0,
    "default": 0,
    "push-sequential": 1,
    "pull": 2,
    "aggregated": 3,
    "stock": 4,
}


def render(entries: Sequence[Entry], document: dict[str, Any]) -> str:
    title = "kvdeploy: push against pull and a stock set-up"
    sides = find_sides(entries)
    labels = list(dict.fromkeys(side.label for side in sides))
    colours = {
        label: COLOURS[KEPT.get(label, (5 + i) % len(COLOURS))] for i, label in enumerate(labels)
    }
    css = "".join(
        f"svg polyline.{_class(n)} {{ stroke: {c}; }} svg rect.{_class(n)} {{ fill: {c}; }}\n"
        for n, c in colours.items()
    )
    shown = {k: v for k, v in document.items() if k not in {"runs", "sides", "calls"}}
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(document['when'])}; GPUs: {escape(document['gpus'])}</p>",
        *(f'<p class="note">{escape(note)}</p>' for note in document["notes"]),
        f"<pre>{escape(json.dumps(shown, indent=1))}</pre>",
        *_cells(sides, colours),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{STYLE}{css}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _cells(sides: Sequence[Side], colours: dict[str, str]) -> Iterator[str]:
    for place in dict.fromkeys((s.act, s.beside, s.group.cell) for s in sides):
        here = [s for s in sides if (s.act, s.beside, s.group.cell) == place]
        act, beside, cell = place
        legend = "".join(
            f'<span><i class="key" style="background:{colours[s.label]}"></i>'
            f"{escape(s.label)}</span>"
            for s in here
        )
        shares = (
            svg.draw_shares(TITLES[m], UNITS[m], {_class(s.label): s.group.values(m) for s in here})
            for m in TIMES
            if m in TITLES
        )
        bars = (_bars(m, here) for m in SUMS if m in TITLES)
        yield (
            f"<h2>{escape(act)}: {escape(str(cell))}</h2><p>{escape(beside)}</p>"
            f'<p class="legend">{legend}</p><div class="plots">{"".join((*shares, *bars))}</div>'
        )


def _bars(metric: str, sides: Sequence[Side]) -> str:
    scale, unit = SCALES.get(metric, (1, UNITS[metric]))
    values = {_class(s.label): v * scale for s in sides if (v := s.find(metric)) is not None}
    return svg.draw_bars(TITLES[metric], unit, values)


def _class(label: str) -> str:
    return re.sub(r"[^a-z0-9-]+", "-", label)
