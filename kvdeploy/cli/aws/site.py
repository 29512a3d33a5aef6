"""Where a cluster on AWS is: whose it is, its Terraform, and the questions before machines end."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import click

from kvdeploy.adapters.aws import statebucket
from kvdeploy.adapters.aws.session import environment
from kvdeploy.adapters.terraform.client import Terraform
from kvdeploy.adapters.terraform.events import node_of
from kvdeploy.adapters.terraform.workdir import WorkDir, local_backend, s3_backend, state_key
from kvdeploy.errors import AwsError, CheckError
from kvdeploy.model.base import Change
from kvdeploy.model.infra import Action, ClusterIdentity
from kvdeploy.planning.changes import compare
from kvdeploy.planning.infrastructure import build_variables
from kvdeploy.stages.aws_preflight import aws_section
from kvdeploy.stages.provision import INSTANCE, Site
from kvdeploy.stages.teardown import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from kvdeploy.adapters.aws.session import Aws
    from kvdeploy.adapters.store import Store
    from kvdeploy.adapters.terraform.shown import Planned
    from kvdeploy.model.infra import Leftover, Node
    from kvdeploy.model.record import Record
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.proc import Runner
    from kvdeploy.ui import Ui

BESIDE_NODES: Final = 10
"""Terraform's usual number of operations at once; nodes come on top: they start together."""


def known_identity(
    spec: ClusterSpec, record: Record, store: Store, aws: Aws
) -> ClusterIdentity | None:
    """Of the record; else of the state, when another machine made the cluster or the record is
    lost. None for a cluster that was never made.

    Raises:
        AwsError: the state's bucket cannot be read.
    """
    if record.identity is not None:
        return record.identity
    if spec.state.bucket is not None:
        text = statebucket.read_state(aws, spec.state.bucket, state_key(spec.name))
    else:
        path = store.terraform_state
        text = path.read_text(encoding="utf-8") if path.exists() else None
    return _identity_in(text) if text else None


def identity_if_readable(
    spec: ClusterSpec, record: Record, store: Store, aws: Aws
) -> ClusterIdentity | None:
    """The cluster's identity for commands that only look; None also when it cannot be read,
    which the checks then say.
    """
    with suppress(AwsError):
        return known_identity(spec, record, store, aws)
    return None


def _identity_in(state: str) -> ClusterIdentity | None:
    """From the outputs in a state file (format version 4)."""
    try:
        told = json.loads(state)["outputs"]["cluster"]["value"]
        return ClusterIdentity.model_validate(told)
    except (ValueError, KeyError, TypeError):
        return None


def site_of(
    spec: ClusterSpec,
    identity: ClusterIdentity,
    *,
    aws: Aws,
    runner: Runner,
    store: Store,
    work: Path,
    log: Path,
    generations: Mapping[str, int],
    reservation_id: str | None = None,
    public_key: str | None = None,
) -> Site:
    variables = build_variables(
        spec,
        identity,
        generations=generations,
        reservation_id=reservation_id,
        public_key=public_key,
    )
    parallelism = BESIDE_NODES + len(variables["nodes"])
    return Site(
        cluster=spec.name,
        cluster_id=identity.id,
        aws=aws,
        terraform=Terraform(
            runner,
            WorkDir(work),
            log=log,
            parallelism=parallelism,
            aws=environment(aws.endpoint),
        ),
        backend=_backend(spec, store),
        variables=variables,
    )


def _backend(spec: ClusterSpec, store: Store) -> dict[str, Any]:
    if spec.state.bucket is not None:
        return s3_backend(spec.state.bucket, spec.name, aws_section(spec).region)
    return local_backend(store.terraform_state)


def refuse_moves(record: Record, spec: ClusterSpec) -> None:
    """A cluster that was made stays what and where it is.

    Raises:
        CheckError: a field is changed that cannot be.
    """
    if record.identity is None or record.spec is None:
        return
    moved = [c for c in compare(record.spec, spec) if c.does is Change.REFUSE]
    if moved:
        listing = "\n".join(f"{c.path} was {c.was}, and is to be {c.wanted}" for c in moved)
        msg = f"{listing}\nof a cluster that is made already this cannot be changed"
        raise CheckError(
            msg, hint="Put it back, give the new one another name, or run 'kvdeploy down' first."
        )


def replacing(record: Record, nodes: tuple[Node, ...], names: tuple[str, ...]) -> Record:
    """With a new generation for every node that is to be replaced.

    Raises:
        CheckError: there is no such node.
    """
    known = [node.name for node in nodes]
    for name in names:
        if name not in known:
            msg = f"there is no node {name!r} to replace"
            raise CheckError(msg, hint=f"Nodes of this cluster: {', '.join(known)}.")
    raised = {name: record.generations.get(name, 1) + 1 for name in names}
    return record.model_copy(update={"generations": {**record.generations, **raised}})


# --- questions -------------------------------------------------------------------------------
def may_ask() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask(question: str, *, yes: bool) -> None:
    """Go on only with a yes.

    Raises:
        UsageError: nobody is there to say it.
        CheckError: the answer is no.
    """
    if yes:
        return
    if not may_ask():
        msg = f"{question} Nobody is here to ask: say yes beforehand with --yes."
        raise click.UsageError(msg)
    if not click.confirm(question, err=True):
        msg = "not confirmed: nothing was changed"
        raise CheckError(msg)


class EndingMachines:
    """Consent of `up` before it ends machines that run."""

    def __init__(self, ui: Ui, *, yes: bool, then: Callable[[], None]) -> None:
        """`then` is done once nothing stands in the way any more."""
        self._ui, self._yes, self._then = ui, yes, then

    def __call__(self, planned: Planned, strays: Sequence[Leftover]) -> None:
        named = {
            f"{verb} {node_of(address)}"
            for action, verb in ((Action.DESTROY, "end"), (Action.REPLACE, "replace"))
            for address in planned.of(INSTANCE, action)
        }
        named |= {f"end {describe(s)}" for s in strays if s.kind == "instance"}
        if named:
            with self._ui.pause():
                ask(f"This will {', '.join(sorted(named))}, and what runs there.", yes=self._yes)
        self._then()
