"""The end of everything in AWS: Terraform destroys what it knows, AWS is asked for the rest by
tag and name, per kind of resource, and the rest is removed too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdeploy.adapters.aws import leftovers
from kvdeploy.adapters.aws.sweep import sweep
from kvdeploy.errors import AwsError, KvdeployError
from kvdeploy.polling import SystemClock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdeploy.adapters.aws.session import Aws
    from kvdeploy.model.infra import Leftover
    from kvdeploy.stages.base import Step
    from kvdeploy.stages.provision import Site


def destroy(site: Site, step: Step, *, break_lock: str | None = None) -> None:
    """Have Terraform destroy all that its state knows. Safe to repeat."""
    site.prepare(step, break_lock=break_lock)
    step.update("comparing with AWS")
    # What the state does not know would keep subnets and groups from going.
    if strays := site.strays():
        step.note(f"   {len(strays)} made by a run that was killed: removing them first")
        sweep(site.aws, strays, clock=SystemClock(), on_detail=step.update)
    step.update("terraform plan -destroy")
    if site.terraform.plan(destroy=True).has_changes:
        site.terraform.apply()


def remove_leftovers(
    aws: Aws, cluster: str, cluster_id: str | None, step: Step
) -> tuple[Leftover, ...]:
    """Ask AWS what still carries the cluster's tags and names, remove it, and ask again.

    Returns:
        What was removed.

    Raises:
        AwsError: something is still there; it is listed, what bills first.
    """
    step.update("asking AWS what is left")
    found = leftovers.find(aws, cluster, cluster_id)
    if not found:
        return ()
    for resource in found:
        step.note(f"   {describe(resource)}: left over; removing it")
    sweep(aws, found, clock=SystemClock(), on_detail=step.update)
    step.update("asking AWS again")
    if left := leftovers.find(aws, cluster, cluster_id):
        raise still_there(left)
    return found


def still_there(left: Sequence[Leftover]) -> KvdeployError:
    by_cost = sorted(left, key=lambda r: (not r.bills, r.kind))
    listing = "\n  ".join(describe(r) for r in by_cost)
    msg = f"{len(left)} things are still in AWS:\n  {listing}"
    return AwsError(msg, hint="Run 'kvdeploy down' again; what bills is listed first.")


def describe(resource: Leftover) -> str:
    name = f" ({resource.name})" if resource.name and resource.name != resource.id else ""
    bills = ", bills by the hour" if resource.bills else ""
    state = f", {resource.state}" if resource.state else ""
    return f"{resource.kind} {resource.id}{name}{state}{bills}"
