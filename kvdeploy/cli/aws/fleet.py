"""What the commands about a running fleet do on AWS: smoke, logs, shell, and a part of status."""

from __future__ import annotations

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from kvdeploy.adapters import http
from kvdeploy.adapters.ansible.ssh import check_tools, ssh_argv
from kvdeploy.adapters.aws.nodes import observe
from kvdeploy.cli.aws.crew import crew_of
from kvdeploy.cli.restarting import Restarting, finish
from kvdeploy.cli.tail import Tail
from kvdeploy.errors import FleetError, UnreachableError
from kvdeploy.polling import SystemClock
from kvdeploy.proc import LocalRunner
from kvdeploy.stages.asking import pairs_ready
from kvdeploy.stages.aws_preflight import session_of
from kvdeploy.stages.doctor import examine_node
from kvdeploy.stages.efa import NodeEfa
from kvdeploy.stages.hardware import NodeGround
from kvdeploy.stages.nodefleet import NodeFleetStage
from kvdeploy.stages.proof import ProofStage
from kvdeploy.stages.provision import RUNNING
from kvdeploy.stages.smoke import Smoke
from kvdeploy.stages.units import Units, unit_of, units_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdeploy.adapters.store import RunLog, Store
    from kvdeploy.cli.app import App
    from kvdeploy.model.awsfacts import Identity
    from kvdeploy.model.outputs import FleetOutputs
    from kvdeploy.model.record import Record
    from kvdeploy.model.reports import SmokeReport
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.proc import Runner
    from kvdeploy.stages.base import Stage
    from kvdeploy.stages.doctor import Symptom


def find_units(store: Store, folder: Path, runner: Runner | None = None) -> Units | None:
    """The fleet as it was last brought up; None before there was one."""
    record = store.read(target="aws")
    if record.spec is None:
        return None
    return units_of(record, crew_of(record.spec, store, folder, runner or LocalRunner()))


def observed(store: Store) -> dict[str, Any]:
    """Processes and pairs, asked of nodes and router; empty before there are any."""
    with tempfile.TemporaryDirectory(prefix="kvdeploy-status-") as scratch:
        units = find_units(store, Path(scratch))
        if units is None:
            return {}
        processes = list(units.observe())
        pairs: dict[str, str] = {}
        try:
            with units.reach() as here:
                ready = http.get(f"{here.url}/ready", timeout_s=5, trust=here.trust)
            pairs = ready.body.get("pairs", {}) if isinstance(ready.body, dict) else {}
        except UnreachableError:
            pass  # its own line says so
    return {
        "url": units.fleet.url,
        "processes": processes,
        "pairs": pairs,
        "whole": all(p["state"] == "active" for p in processes)
        and bool(pairs)
        and all(state == "ready" for state in pairs.values()),
    }


def climb(
    app: App,
    store: Store,
    record: Record,
    run: RunLog,
    runner: Runner,
    *,
    restart: bool,
    now: ClusterSpec | None,
    source: str,
) -> SmokeReport:
    """The smoke ladder, from here. `now` is the cluster file `source` as it is.

    Raises:
        FleetError: there is no fleet, or it is not whole.
    """
    spec, units = record.spec, find_units(store, run.path, runner)
    if units is None or spec is None:
        msg = f"cluster {store.cluster!r} is not up: there is nothing to prove"
        raise FleetError(msg, hint="Run 'kvdeploy up' first.")
    with units.reach() as here:
        if not pairs_ready(here):
            msg = f"cluster {store.cluster!r} is not whole: 'kvdeploy status' shows what is missing"
            raise FleetError(msg, hint="'kvdeploy up' repairs it.")
        with app.ui.step("climb the smoke ladder") as step:
            ground = NodeGround(units, partial(_account, record, spec), now=now, source=source)
            smoke = Smoke(spec, units.model, here, units, step, ground=ground)
            smoke.climb()

        def stages(wanted: ClusterSpec) -> Sequence[Stage]:
            fleet = NodeFleetStage(crew_of(wanted, store, run.path, runner))
            return (fleet, ProofStage(wanted, fleet.reach))

        def reached(fleet: FleetOutputs) -> FleetOutputs:
            ways = {engine.name: engine.url for engine in here.router_config.engines}
            return fleet.asked_over(here.url, ways)

        restarting = Restarting(
            app, store, record, spec, stages=stages, start=units.start, reached=reached
        )
        return finish(app.ui, smoke, run, restarting if restart else None, efa=NodeEfa(units))


def _account(record: Record, spec: ClusterSpec) -> tuple[Identity, tuple[str, ...]]:
    """Who we are on AWS, and which instances of the cluster run there. Raises AwsError."""
    aws = session_of(spec)
    seen = observe(aws, record.identity.id) if record.identity else ()
    return aws.identity(), tuple(node.id for node in seen if node.state == RUNNING)


def logs(store: Store, process: str | None, *, follow: bool, lines: int) -> None:
    """What the units of one process, or of all, have said."""
    with tempfile.TemporaryDirectory(prefix="kvdeploy-logs-") as scratch:
        folder = Path(scratch)
        units = find_units(store, folder)
        if units is None:
            click.echo(
                f"{store.cluster}: no fleet is up; earlier runs are in {store.runs}", err=True
            )
            return
        names = [process] if process else list(units.hosts)
        if process is not None and process not in units.hosts:
            msg = f"no process {process!r} in cluster {store.cluster!r}: there are "
            raise click.UsageError(msg + ", ".join(units.hosts))
        if follow:
            _follow(units, names, lines, folder)
        else:
            _print_last(units, names, lines)


def _print_last(units: Units, names: list[str], lines: int) -> None:
    remote, hosts = units.crew.remote, units.hosts
    with ThreadPoolExecutor(8) as pool:
        said = pool.map(lambda n: remote.run(hosts[n], *_journal(n, lines)), names)
        for name, outcome in zip(names, said, strict=True):
            prefix = f"{name} | " if len(names) > 1 else ""
            for line in (outcome.stdout if outcome.code == 0 else outcome.stderr).splitlines():
                click.echo(f"{prefix}{line}")


def _follow(units: Units, names: list[str], lines: int, folder: Path) -> None:
    """Until Ctrl-C; what follows a journal here ends with us."""
    tails = [Tail(name, folder / name) for name in names]
    for name in names:
        argv = _journal(name, lines, "--follow")
        units.crew.remote.follow(units.hosts[name], *argv, log=folder / name)
    clock = SystemClock()
    while True:
        for tail in tails:
            for line in tail.new():
                click.echo(f"{tail.name} | {line}" if len(names) > 1 else line)
        clock.sleep(0.2)


def _journal(name: str, lines: int, *more: str) -> tuple[str, ...]:
    unit = ("--unit", unit_of(name), "--lines", str(lines), "--output", "cat", "--no-pager")
    return ("sudo", "-n", "journalctl", *unit, *more)


def examined(store: Store, name: str) -> list[Symptom]:
    """What one node shows."""
    with tempfile.TemporaryDirectory(prefix="kvdeploy-doctor-") as scratch:
        return examine_node(_needed(store, Path(scratch)), name)


def shell(store: Store, node: str, command: tuple[str, ...]) -> NoReturn:
    """Become ssh on a node."""
    with tempfile.TemporaryDirectory(prefix="kvdeploy-shell-") as scratch:
        units = _needed(store, Path(scratch))
    host, connection = units.host(node), units.crew.remote.connection
    check_tools(connection)
    argv = ssh_argv(host, connection, *command)
    sys.stdout.flush()
    os.execvp(argv[0], argv)  # noqa: S606


def _needed(store: Store, folder: Path) -> Units:
    """Raises FleetError: no node is configured."""
    units = find_units(store, folder)
    if units is None:
        msg = f"cluster {store.cluster!r} has no nodes that are configured"
        raise FleetError(msg, hint="Run 'kvdeploy up' first.")
    return units
