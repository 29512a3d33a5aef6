"""The report of a bench as one HTML page that needs nothing else: no network, no script. Pure."""

from __future__ import annotations

import json
from html import escape
from typing import TYPE_CHECKING, Final

from kvdeploy.model.bench import SCENARIOS
from kvdeploy.planning.bench import svg, table
from kvdeploy.planning.bench.figures import SUMS, TIMES, UNITS, TooFewError, find_groups

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvdeploy.model.bench import BenchReport, Cell
    from kvdeploy.planning.bench.figures import Group

COLOURS: Final = {
    "push": "#1a7f5a",
    "push-sequential": "#c2701c",
    "pull": "#3b62c4",
    "aggregated": "#8a8f98",
}
TITLES: Final = {
    "ttft": "Time to the first token",
    "tpot": "Time a token after the first",
    "itl": "Between one token and the next",
    "rate": "Throughput",
    "bytes": "KV moved",
    "transfer": "Time of a transfer",
    "post": "Time to post a transfer",
    "descriptors": "Descriptors",
}
SCALES: Final = {"bytes": (2**-20, "MiB a request")}
"""Figures that are drawn in another unit than they are kept in."""
STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 92rem; padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.5rem; }
.note { border-left: 4px solid #c2701c; padding: .2rem .8rem; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-start; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #8884; }
td { white-space: nowrap; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
svg { border: 1px solid #8884; border-radius: 6px; max-width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: currentColor; }
svg text.title { font-size: 13px; font-weight: 600; }
svg line { stroke: currentColor; stroke-opacity: .15; }
svg polyline { fill: none; stroke-width: 2; }
.key { display: inline-block; width: 1.6em; height: .6em; margin-right: .4em; }
.legend span { margin-right: 1.5em; white-space: nowrap; }
pre { overflow-x: auto; padding: .8rem; border: 1px solid #8884; border-radius: 6px; }
"""


def render(report: BenchReport) -> str:
    groups = find_groups(report)
    cells = list(dict.fromkeys(g.cell for g in groups))
    title = f"kvdeploy bench: {report.cluster}"
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}{_colours()}</style></head>"
    )
    parts = [
        f"<h1>{escape(title)}</h1><p>{escape(report.started_at)}, {report.seconds:.0f} s</p>",
        *(_note(note) for note in report.notes),
        *(_note(f"{mode} did not come to its end: {why}") for mode, why in report.failed.items()),
        _note(table.too_few(report)),
        _legend(report.modes),
        _table(table.COLUMNS, table.build_rows(report)),
        *(_cell(cell, [g for g in groups if g.cell == cell]) for cell in cells),
        "<h2>Measured on</h2>",
        _dump({"environment": report.environment, "options": report.options}),
    ]
    return f"{head}<body>{''.join(parts)}</body></html>\n"


def _cell(cell: Cell, groups: Sequence[Group]) -> str:
    heading = (
        f"{cell.scenario}: {cell.input_tokens} tokens in, {cell.output_tokens} out, "
        f"{cell.concurrency} at once"
    )
    shares = (
        svg.draw_shares(TITLES[metric], UNITS[metric], {g.mode: g.values(metric) for g in groups})
        for metric in TIMES
        if metric in TITLES
    )
    bars = (_bars(metric, groups) for metric in SUMS if metric in TITLES)
    plots = "".join((*shares, *bars))
    told = SCENARIOS.get(cell.scenario, "")
    return f'<h2>{escape(heading)}</h2><p>{escape(told)}</p><div class="plots">{plots}</div>'


def _bars(metric: str, groups: Sequence[Group]) -> str:
    scale, unit = SCALES.get(metric, (1, UNITS[metric]))
    values = {mode: value * scale for mode, value in _known(groups, metric)}
    return svg.draw_bars(TITLES[metric], unit, values)


def _known(groups: Sequence[Group], metric: str) -> Iterator[tuple[str, float]]:
    for group in groups:
        try:
            yield group.mode, group.find(metric)
        except TooFewError:
            continue


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(c)}</th>" for c in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _legend(modes: Sequence[str]) -> str:
    keys = "".join(
        f'<span><i class="key" style="background:{COLOURS[m]}"></i>{escape(m)}</span>'
        for m in modes
    )
    return f'<p class="legend">{keys}</p>'


def _colours() -> str:
    return "".join(
        f"svg polyline.{mode} {{ stroke: {c}; }} svg rect.{mode} {{ fill: {c}; }}\n"
        for mode, c in COLOURS.items()
    )


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>' if text else ""


def _dump(document: object) -> str:
    return f"<pre>{escape(json.dumps(document, indent=2))}</pre>"
