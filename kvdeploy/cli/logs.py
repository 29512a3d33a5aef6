"""`kvdeploy logs`."""

from __future__ import annotations

import click

from kvdeploy.adapters.local.processes import Processes
from kvdeploy.cli.app import COMMANDS, App
from kvdeploy.cli.common import find, name_option, spec_of
from kvdeploy.cli.tail import Tail
from kvdeploy.polling import SystemClock


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
    path = app.root / file if file else None
    store = find(app, path, cluster)
    spec = spec_of(app, path, store) if not store.processes.exists() else None
    if spec is not None and spec.target == "aws":
        from kvdeploy.cli.aws.fleet import logs as logs_on_aws

        if supervisor:
            msg = "--supervisor: on aws systemd is the supervisor, and its words are in the log"
            raise click.UsageError(msg)
        logs_on_aws(store, process, follow=follow, lines=lines)
        return
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
