"""Tables on stdout."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvdeploy.planning.expectation import Estimate


def show(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    colours: Mapping[str, str] | None = None,
) -> None:
    """Print a plain table; cells that are keys of `colours` are shown in that colour."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        cells = [str(cell) for cell in row]
        table.add_row(*(Text(c, style=(colours or {}).get(c, "")) for c in cells))
    # Without a terminal there is no width to fold at: whoever reads it has lines, not a screen.
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200).print(table)


def show_estimates(estimates: Iterable[Estimate]) -> None:
    """What a plan expects, each figure with its formula."""
    show(("expected", "figure", "from"), [(e.name, e.value, e.formula) for e in estimates])
