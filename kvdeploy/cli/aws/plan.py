"""`kvdeploy plan` on AWS: what Terraform would do, and what it would cost. Changes nothing."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvdeploy.adapters.terraform.events import node_of
from kvdeploy.cli.aws.costs import cost_document, cost_lines, price
from kvdeploy.cli.aws.crew import crew_of, public_key_of
from kvdeploy.cli.aws.site import (
    identity_if_readable,
    refuse_moves,
    replacing,
    site_of,
)
from kvdeploy.cli.check import describe, refuse
from kvdeploy.cli.tables import show, show_estimates
from kvdeploy.errors import KvdeployError
from kvdeploy.forecast import foresee
from kvdeploy.model.infra import Action
from kvdeploy.model.reports import Severity
from kvdeploy.pipeline import digest_of
from kvdeploy.planning.changes import compare
from kvdeploy.planning.expectation import build_estimates
from kvdeploy.proc import LocalRunner
from kvdeploy.stages.aws_preflight import aws_section, look, new_identity, session_of
from kvdeploy.stages.expecting import find_aws_basis
from kvdeploy.stages.provision import INSTANCE, ProvisionStage, generations_of, preview

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvdeploy.adapters.store import Store
    from kvdeploy.cli.app import App
    from kvdeploy.cli.common import Loaded
    from kvdeploy.model.record import Record
    from kvdeploy.planning.forecast import Forecast
    from kvdeploy.stages.provision import Site

COLOURS = {"create": "green", "update": "yellow", "replace": "red", "destroy": "red"}


def plan(
    app: App,
    loaded: Loaded,
    store: Store,
    *,
    allow: frozenset[str],
    replace: tuple[str, ...],
    as_json: bool,
) -> None:
    spec = loaded.spec
    aws, runner = session_of(spec), LocalRunner()
    record = store.read(target="aws")
    refuse_moves(record, spec)
    with app.ui.step("check the account"):
        known = identity_if_readable(spec, record, store, aws)
        seen = look(spec, aws, known, runner, loaded.root, allow=allow)
    refuse(seen.findings, source=loaded.source)
    generations = generations_of(aws, known, record.generations)
    wanted = replacing(record.model_copy(update={"generations": generations}), seen.nodes, replace)
    fields = compare(record.spec, spec) if record.spec and known else ()
    cost = price(spec, seen.nodes, seen.facts)
    with (
        tempfile.TemporaryDirectory(prefix="kvdeploy-plan-") as scratch,
        app.ui.step("ask Terraform what it would do") as step,
    ):
        site = site_of(
            spec,
            known or new_identity(seen.user),
            aws=aws,
            runner=runner,
            store=store,
            work=Path(scratch),
            log=Path(scratch) / "terraform.log",
            generations=wanted.generations,
            reservation_id=seen.reservation_id,
            public_key=public_key_of(spec, store, runner, aws=aws, make_in=Path(scratch)),
        )
        try:
            planned, orphans = preview(site, step)
        except KvdeployError as e:
            e.log = None  # it goes with the folder
            raise
        step.update("asking the nodes")
        crew = crew_of(spec, store, Path(scratch), runner)
        ahead = foresee(
            record,
            dataclasses.replace(crew, packages=Path(scratch) / "packages"),
            {node_of(c.address): c.action for c in planned.changes if c.kind == INSTANCE},
            provision=_is_due(site, record),
        )
    changes = planned.changes
    basis = find_aws_basis(spec, aws_section(spec), seen.facts, seen.nodes)
    estimates = build_estimates(spec, basis)
    document: dict[str, Any] = {
        "cluster": spec.name,
        "target": spec.target,
        "fields": [asdict(c) for c in fields],
        "changes": [c.model_dump(mode="json") for c in changes],
        "drift": [d.model_dump(mode="json") for d in planned.drift],
        "adopt": [address for address, _ in orphans.imports],
        "remove": [f.model_dump() for f in orphans.remove],
        "up": asdict(ahead),
        "cost": cost_document(cost),
        "expected": [asdict(e) for e in estimates],
    }
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    click.echo(f"{spec.name} on {spec.target}, from {loaded.source}")
    for warning in (f for f in seen.findings if f.severity is Severity.WARNING):
        click.echo(describe(warning))
    if fields:
        show(
            ("field", "now", "wanted", "at most"),
            [(c.path, c.was, c.wanted, c.does) for c in fields],
        )
    if changes:
        show(("does", "resource"), [(c.action.value, c.address) for c in changes], colours=COLOURS)
    for drift in planned.drift:
        click.echo(f"drift: {drift.address} is {drift.now}, and was {drift.was}")
    counted = Counter(c.action for c in changes)
    totals = ", ".join(f"{counted[a]} to {a.value}" for a in Action if counted[a])
    click.echo(f"terraform: {totals or 'nothing to do'}")
    for line in _words(ahead, is_drift=bool(changes) and "provision" not in ahead.stages):
        click.echo(line)
    for line in cost_lines(cost):
        click.echo(line)
    show_estimates(estimates)


def _is_due(site: Site, record: Record) -> bool:
    """Whether `up` would ask Terraform for anything."""
    stage, known = ProvisionStage(site, consent=lambda *_: None), record.stages.get("provision")
    if known is None or known.digest != digest_of(stage.inputs({})):
        return True
    return not stage.holds(known.result)


def _words(ahead: Forecast, *, is_drift: bool) -> Iterable[str]:
    """What `up` would do behind Terraform, a line a kind."""
    if is_drift:
        yield "  'kvdeploy up' leaves that as it is: 'kvdeploy up --from provision' does it"
    for what, names in (
        ("make ready (nodes.yml)", ahead.configure),
        ("start", ahead.start),
        ("restart", ahead.restart),
        ("stop", ahead.stop),
        ("reload, without a restart", ahead.reload),
    ):
        if names:
            yield f"{what}: {', '.join(names)}"
    if ahead.silent:
        yield f"not known, for they do not answer: {', '.join(ahead.silent)}"
    yield f"up: {', '.join(ahead.stages) or 'nothing to do'}"
