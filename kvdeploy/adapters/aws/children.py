"""What cannot carry tags: routes, associations and policies, found by what they belong to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdeploy.adapters.aws.network import found
from kvdeploy.model.infra import Leftover

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvdeploy.adapters.aws.session import Aws


def children(aws: Aws, leftovers: Iterable[Leftover]) -> tuple[Leftover, ...]:
    """Children of the leftovers, each with Terraform's import id as its id and no address.

    route                       rtb-1_0.0.0.0/0
    route_table_association     subnet-1/rtb-1
    iam_role_policy_attachment  ROLE/ARN
    iam_role_policy             ROLE:NAME
    Their `name` is the id of the parent. Raises AwsError.
    """
    made: list[Leftover] = []
    for one in leftovers:
        if one.kind == "route_table":
            made += _of_table(aws, one)
        elif one.kind == "iam_role":
            made += _of_role(aws, one)
    return tuple(made)


def _of_table(aws: Aws, table: Leftover) -> list[Leftover]:
    tables = found(aws, "ec2:DescribeRouteTables", "RouteTables", RouteTableIds=[table.id])
    routes = [
        _child(table, "route", f"{table.id}_{route['DestinationCidrBlock']}", route.get("State"))
        for one in tables
        for route in one["Routes"]
        if route.get("DestinationCidrBlock") and route.get("GatewayId") != "local"
    ]
    links = [
        _child(table, "route_table_association", f"{link['SubnetId']}/{table.id}")
        for one in tables
        for link in one["Associations"]
        if link.get("SubnetId")
    ]
    return routes + links


def _of_role(aws: Aws, role: Leftover) -> list[Leftover]:
    attached = found(aws, "iam:ListAttachedRolePolicies", "AttachedPolicies", RoleName=role.id)
    inline = aws.call("iam:ListRolePolicies", RoleName=role.id)["PolicyNames"]
    return [
        *(
            _child(role, "iam_role_policy_attachment", f"{role.id}/{policy['PolicyArn']}")
            for policy in attached
        ),
        *(_child(role, "iam_role_policy", f"{role.id}:{name}") for name in inline),
    ]


def _child(parent: Leftover, kind: str, import_id: str, state: str | None = None) -> Leftover:
    return Leftover(
        kind=kind, id=import_id, name=parent.id, cluster_id=parent.cluster_id, state=state or ""
    )
