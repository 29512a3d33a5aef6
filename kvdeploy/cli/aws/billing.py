"""What an interrupted command leaves, and what that costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdeploy.adapters.aws import leftovers
from kvdeploy.adapters.aws.nodes import observe
from kvdeploy.cli.aws.costs import price
from kvdeploy.errors import AwsError
from kvdeploy.model.infra import Node
from kvdeploy.stages.provision import GONE

if TYPE_CHECKING:
    from kvdeploy.adapters.aws.session import Aws
    from kvdeploy.cli.app import App
    from kvdeploy.model.infra import ClusterIdentity
    from kvdeploy.model.spec import ClusterSpec


def say_what_bills(
    app: App, spec: ClusterSpec, aws: Aws, identity: ClusterIdentity | None, then: str
) -> None:
    """Asked of AWS: a machine, but a NAT gateway or an address as well.

    Args:
        app: says it.
        spec: for the prices.
        aws: is asked.
        identity: of the cluster; all that carries its name where it is not known.
        then: what the user can do, e.g. "'kvdeploy down' goes on".
    """
    try:
        found = leftovers.find(aws, spec.name, identity.id if identity else None)
        seen = observe(aws, identity.id) if identity else ()
    except AwsError as e:
        app.ui.say(f"warning: what is there cannot be told: {e.message}")
        return
    bills = [f"{f.kind} {f.id}" + (f" ({f.name})" if f.name else "") for f in found if f.bills]
    nodes = [
        Node(name=n.node, role=n.role, instance_type=n.instance_type)
        for n in seen
        if n.state not in GONE
    ]
    if bills:
        cost = price(spec, nodes, None)
        app.ui.say(
            f"interrupted: {', '.join(bills)} are there, and bill: at most ${cost.usd_hour:.2f} an "
            f"hour; {then}"
        )
    elif found:
        app.ui.say(
            f"interrupted: {len(found)} things are there, and none bills by the hour; {then}"
        )
