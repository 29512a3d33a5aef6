"""`kvdeploy logs`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from kvdeploy.adapters.local.processes import Processes
from kvdeploy.cli.app import COMMANDS, App
from kvdeploy.cli.common import find, name_option
from kvdeploy.polling import SystemClock

if TYPE_CHECKING:
    from pathlib import Path


@click.command(help=COMMANDS["logs"])
@click.argument("process", required=False, metavar="[NAME]")
@click.option("-f", "--follow", is_flag=True, help="Go on as more is said, until Ctrl-C.")
@click.option("-n", "--lines", default=40, show_default=True, help="Lines from the end.")
@click.option("--supervisor", is_flag=True, help="What the supervisor says instead.")
@click.option("--file", "file", metavar="FILE", help="Cluster file (here -f is --follow).")
@name_option
@click.pass_obj
def logs(
    app: App,
    process: str | None,
    follow: bool,
    lines: int,
    supervisor: bool,
    file: str | None,
    cluster: str | None,
) -> None:
    store = find(app, app.root / file if file else None, cluster)
    names = Processes(store.processes).names()
    if not names:
        click.echo(f"{store.cluster}: nothing runs; earlier logs are in {store.runs}", err=True)
        return
    if process is not None and process not in names:
        msg = f"no process {process!r} in cluster {store.cluster!r}: there are {', '.join(names)}"
        raise click.UsageError(msg)
    chosen = [process] if process else names
    which = "supervisor.log" if supervisor else "log"
    tails = [Tail(name, store.processes / name / which) for name in chosen]
    prefix = len(chosen) > 1
    for tail in tails:
        for line in tail.last(lines):
            _echo(tail.name, line, prefix=prefix)
    clock = SystemClock()
    while follow:
        for tail in tails:
            for line in tail.new():
                _echo(tail.name, line, prefix=prefix)
        clock.sleep(0.2)


def _echo(name: str, line: str, *, prefix: bool) -> None:
    click.echo(f"{name} | {line}" if prefix else line)


class Tail:
    """A growing file, read line by line; a file that replaces it is read from its start."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self._path = name, path
        self._at, self._inode, self._rest = 0, 0, b""

    def last(self, count: int) -> list[str]:
        """The last `count` lines; what follows comes from `new`."""
        lines = self.new()
        return lines[-count:] if count > 0 else []

    def new(self) -> list[str]:
        """Whole lines since the last call."""
        try:
            with self._path.open("rb") as f:
                found = os.fstat(f.fileno())
                if found.st_ino != self._inode or found.st_size < self._at:
                    self._at, self._inode, self._rest = 0, found.st_ino, b""
                f.seek(self._at)
                data = self._rest + f.read()
                self._at = f.tell()
        except FileNotFoundError:
            return []
        *whole, self._rest = data.split(b"\n")
        return [line.decode("utf-8", "replace") for line in whole]
