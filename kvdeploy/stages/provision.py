"""Nodes on AWS: Terraform makes them, EC2 is asked whether they are there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvdeploy.adapters.aws import leftovers
from kvdeploy.adapters.aws.nodes import observe, start
from kvdeploy.adapters.aws.sweep import sweep
from kvdeploy.adapters.terraform.events import node_of, short
from kvdeploy.errors import TerraformError
from kvdeploy.model.infra import Action, ProvisionOutputs
from kvdeploy.planning.adoption import Orphans, sort_orphans, strays
from kvdeploy.planning.infrastructure import BEFORE_NODES
from kvdeploy.polling import SystemClock

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvdeploy.adapters.aws.session import Aws
    from kvdeploy.adapters.terraform.client import Terraform
    from kvdeploy.adapters.terraform.shown import Planned
    from kvdeploy.model.infra import ClusterIdentity, Leftover
    from kvdeploy.stages.base import Results, Step

RUNNING: Final = "running"
STARTING: Final = frozenset({"pending", "running"})
STOPPED: Final = frozenset({"stopping", "stopped"})
GONE: Final = frozenset({"terminated", "shutting-down"})
INSTANCE: Final = "aws_instance"


@dataclass(frozen=True, kw_only=True)
class Site:
    """One cluster's place in AWS: whom to ask, what runs Terraform, and what it is told."""

    cluster: str
    cluster_id: str
    aws: Aws
    terraform: Terraform
    backend: Mapping[str, Any]
    variables: Mapping[str, Any]

    def prepare(self, step: Step, *, break_lock: str | None = None) -> None:
        """Have a folder in which Terraform can plan.

        Raises:
            ToolError: Terraform or its provider is not there, or too old.
            TerraformError: `break_lock` is not the lock's id.
        """
        self.terraform.listener = step
        step.update("terraform init")
        self.terraform.work.prepare(self.backend, self.variables)
        self.terraform.init()
        if break_lock is not None:
            self.terraform.force_unlock(break_lock)
            step.note(f"   broke the state's lock {break_lock}")

    def found(self) -> tuple[Leftover, ...]:
        """Everything that AWS has under this cluster's id."""
        found = leftovers.find(self.aws, self.cluster, self.cluster_id)
        return (*found, *leftovers.children(self.aws, found))

    def strays(self) -> tuple[Leftover, ...]:
        """What AWS has under this cluster's id and the state does not know."""
        found = self.found()
        known = self.terraform.managed() if found else ()
        return strays(found, {resource.id for resource in known})


class Consent(Protocol):
    def __call__(self, planned: Planned, strays: Sequence[Leftover]) -> None:
        """Ask before machines end.

        Raises:
            CheckError: the answer is no.
        """


class ProvisionStage:
    name = "provision"

    def __init__(self, site: Site, *, consent: Consent, break_lock: str | None = None) -> None:
        self._site, self._consent, self._break_lock = site, consent, break_lock
        self.made: tuple[str, ...] = ()
        """Addresses of the instances that this run asked for."""

    def alive(self) -> tuple[str, ...]:
        """Names of those nodes that this run asked for and EC2 has: after a failure, a part."""
        asked = {node_of(address) for address in self.made}
        seen = observe(self._site.aws, self._site.cluster_id) if asked else ()
        return tuple(sorted({n.node for n in seen if n.state not in GONE} & asked))

    @property
    def title(self) -> str:
        return f"make {len(self._site.variables['nodes'])} nodes in {self._site.variables['zone']}"

    def inputs(self, _results: Results) -> Mapping[str, Any]:
        return {"variables": dict(self._site.variables), "backend": dict(self._site.backend)}

    def holds(self, result: Mapping[str, Any]) -> bool:
        """Whether EC2 says that every node runs, and no other does."""
        known = ProvisionOutputs.model_validate(result)
        seen = [n for n in observe(self._site.aws, self._site.cluster_id) if n.state not in GONE]
        wanted = {node.id for node in known.nodes.values()}
        return {n.id for n in seen} == wanted and all(n.state == RUNNING for n in seen)

    def apply(self, _results: Results, step: Step) -> Mapping[str, Any]:
        site, terraform = self._site, self._site.terraform
        site.prepare(step, break_lock=self._break_lock)
        for address in _unfinished(site):
            terraform.untaint(address)
            step.note(f"   = {short(address)}: an earlier run did not wait for it; it is kept")
        planned, orphans = _compared(site, step)
        for address, found in orphans.imports:
            step.note(f"   = {short(address)} {found}: made by a run that was killed; adopted")
        for resource in orphans.rest:
            step.note(f"   ? {resource.kind} {resource.id} is there twice; 'down' removes it")
        self._consent(planned, orphans.remove)
        if orphans.remove:
            step.update("removing what the state does not know")
            sweep(site.aws, orphans.remove, clock=SystemClock(), on_detail=step.update)
        makes = planned.of(INSTANCE, Action.CREATE, Action.REPLACE)
        if makes and len(planned.changes) > len(makes):
            self._network_first(planned, step)
        outputs: Mapping[str, Any] = {}
        if planned.has_changes:
            self.made = makes
            outputs = terraform.apply().outputs
        terraform.work.write_imports(())
        _start_stopped(site, step)
        return _outputs(outputs or terraform.outputs()).model_dump(mode="json")

    def _network_first(self, shown: Planned, step: Step) -> None:
        """Apply and save all but the nodes, and plan what is left.

        Raises:
            TerraformError: the second plan would do more than was shown.
        """
        terraform = self._site.terraform
        step.update("terraform plan: all but the nodes")
        if terraform.plan_again(targets=BEFORE_NODES):
            terraform.apply()
        step.update("terraform plan: the nodes")
        left = terraform.plan_again(replace=shown.outdated)
        known = {c.address: c for c in shown.changes}
        if new := [c for c in left if c.address not in known or c.ends > known[c.address].ends]:
            listing = ", ".join(f"{c.action} {c.address}" for c in new)
            msg = f"AWS changed meanwhile: the plan now also holds {listing}"
            raise TerraformError(msg, hint="Run 'kvdeploy up' again.", log=terraform.log)

    def undo(self, step: Step) -> None:
        """After a failure: end the nodes that this run made."""
        site = self._site
        site.terraform.listener = step
        step.update("terraform destroy")
        if site.terraform.plan(destroy=True, targets=self.made).has_changes:
            site.terraform.apply()
        left = [f for f in site.strays() if f.kind == "instance"]
        sweep(site.aws, left, clock=SystemClock(), on_detail=step.update)


def generations_of(
    aws: Aws, identity: ClusterIdentity | None, remembered: Mapping[str, int]
) -> dict[str, int]:
    """Generation of each node: as remembered here, or higher where its machine says so, which was
    replaced from another checkout or by a run of which nothing is remembered.
    """
    found = dict(remembered)
    for node in observe(aws, identity.id) if identity else ():
        if node.state not in GONE:
            found[node.node] = max(node.generation, found.get(node.node, 1))
    return found


def preview(site: Site, step: Step) -> tuple[Planned, Orphans]:
    """What `up` would do. Takes no lock and changes nothing but the site's folder."""
    site.prepare(step)
    kept = _unfinished(site)
    planned, orphans = _compared(site, step, lock=False)
    changes = tuple(c for c in planned.changes if c.address not in kept)
    return replace(planned, changes=changes), orphans


def _unfinished(site: Site) -> tuple[str, ...]:
    """Addresses of machines that a run was interrupted while it waited for, and that are well.
    Terraform would end them and ask for new ones, at $63 an hour and with luck.
    """
    alive = {n.id for n in observe(site.aws, site.cluster_id) if n.state in STARTING}
    known = site.terraform.managed() if alive else ()
    return tuple(r.address for r in known if r.tainted and r.id in alive)


def _compared(site: Site, step: Step, *, lock: bool = True) -> tuple[Planned, Orphans]:
    """A plan that adopts what AWS has of this cluster and the state does not know."""
    work = site.terraform.work
    work.write_imports(())
    planned = _planned(site, step, lock=lock)
    step.update("comparing with AWS")
    creates = {c.address for c in planned.changes if c.action is Action.CREATE}
    orphans = sort_orphans(site.found(), creates=creates, known_ids=planned.ids)
    if orphans.adopt:
        work.write_imports(orphans.imports)
        planned = _planned(site, step, lock=lock)
    return planned, orphans


def _planned(site: Site, step: Step, *, lock: bool = True) -> Planned:
    step.update("terraform plan")
    planned = site.terraform.plan(lock=lock)
    if outdated := planned.outdated:
        planned = replace(site.terraform.plan(lock=lock, replace=outdated), outdated=outdated)
    return planned


def _start_stopped(site: Site, step: Step) -> None:
    """Nodes that stopped by themselves: a plan says nothing about them, and they do no work."""
    seen, nodes = observe(site.aws, site.cluster_id), site.variables["nodes"]
    stopped = [n for n in seen if n.state in STOPPED and n.node in nodes]
    if stopped:
        step.update(f"starting {', '.join(n.node for n in stopped)}")
        start(site.aws, stopped, clock=SystemClock())
        for node in stopped:
            step.note(f"   > {node.node} {node.id} was {node.state}; started")


def _outputs(told: Mapping[str, Any]) -> ProvisionOutputs:
    return ProvisionOutputs(
        cluster_id=told["cluster"]["id"],
        nodes=told["inventory"],
        vpc_id=told["network"]["vpc_id"],
        subnet_id=told["network"]["subnet_id"],
        security_group_id=told["network"]["security_group_id"],
        images={kind: image["name"] for kind, image in told["images"].items() if image},
    )
