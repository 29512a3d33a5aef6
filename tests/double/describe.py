"""Describing: the double's own filters and pages over moto's answers, and what moto gets wrong."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from moto.core.responses import ActionResult
from moto.core.serialize import return_if_not_empty
from moto.ec2.responses import EC2Response

from tests.double.errors import refuse, refuse_unknown
from tests.double.filters import FILTERED_BY_MOTO, INSTANCE, KINDS, select
from tests.double.world import ACCOUNT, WORLD

if TYPE_CHECKING:
    from collections.abc import Callable

    from moto.core.common_types import TYPE_RESPONSE


class Describing(EC2Response):
    """moto's EC2 with one way to filter. The other parts of the double build on it."""

    RESPONSE_KEY_PATH_TO_TRANSFORMER: dict[str, Callable[[Any], Any]] = {  # noqa: RUF012 - as in moto
        **EC2Response.RESPONSE_KEY_PATH_TO_TRANSFORMER,
        "InstanceNetworkInterface.Association": return_if_not_empty,
        "Instance.StateReason": lambda reason: reason if reason and reason.code else None,
    }

    def _filters_from_querystring(self) -> dict[str, Any]:
        """What moto is to filter by: nothing where the double does."""
        action = self._get_action()
        given: dict[str, Any] = dict(super()._filters_from_querystring())
        if action in KINDS:
            return {}
        if given and action not in FILTERED_BY_MOTO:
            refuse_unknown(f"filters for {action}")
        return given

    def serialized(self, action_result: ActionResult) -> TYPE_RESPONSE:
        """Every successful answer passes here, still as objects."""
        kind = KINDS.get(self._get_action())
        answer = action_result.result
        if kind is not None and isinstance(answer, dict) and kind.key in answer:
            given: Any = super()._filters_from_querystring()
            found = select(list(answer[kind.key]), given, kind, self.ec2_backend.tags)
            action_result = ActionResult({**answer, **self._page(kind.key, found)})
        return super().serialized(action_result)

    def _page(self, key: str, found: list[Any]) -> dict[str, Any]:
        most, token = self._get_int_param("MaxResults"), self._get_param("NextToken")
        first = int(token) if token else 0
        last = first + most if most else len(found)
        return {key: found[first:last], "NextToken": str(last) if last < len(found) else None}

    def describe_instances(self) -> ActionResult:
        """By instance, not by reservation, and without moto's bound of 100 before filtering."""
        self.error_on_dryrun()
        ids = self._get_param("InstanceIds", [])
        given: Any = super()._filters_from_querystring()
        if ids:
            self.ec2_backend.get_multi_instances_by_id(ids)
        found = []
        for reservation in self.ec2_backend.all_reservations():
            chosen = [i for i in reservation.instances if not ids or i.id in ids]
            chosen = select(chosen, given, INSTANCE, self.ec2_backend.tags)
            if chosen:
                shown = copy.copy(reservation)
                shown.instances = chosen
                found.append(shown)
        return ActionResult(self._page("Reservations", found))

    def describe_launch_templates(self) -> ActionResult:
        """All of them (moto: the first 15), and an unknown id is an error."""
        self.error_on_dryrun()
        backend = self.ec2_backend
        names = self._get_param("LaunchTemplateNames", [])
        ids = self._get_param("LaunchTemplateIds", [])
        for template_id in ids:
            backend.get_launch_template(template_id)
        for name in names:
            if name not in backend.launch_template_name_to_ids:
                refuse(
                    "InvalidLaunchTemplateName.NotFoundException",
                    "At least one of the launch templates specified in the request does not exist.",
                )
        found = [
            {
                "CreateTime": template.create_time,
                "CreatedBy": WORLD.identity,
                "DefaultVersionNumber": template.default_version_number,
                "LatestVersionNumber": template.latest_version_number,
                "LaunchTemplateId": template.id,
                "LaunchTemplateName": template.name,
                "Tags": template.get_tags(),
            }
            for template in backend.launch_templates.values()
            if (not ids and not names) or template.id in ids or template.name in names
        ]
        return ActionResult({"LaunchTemplates": found})

    def describe_nat_gateways(self) -> ActionResult:
        """An unknown id is an error."""
        for nat_id in self._get_param("NatGatewayIds", []):
            if nat_id not in self.ec2_backend.nat_gateways:
                refuse("NatGatewayNotFound", f"The Nat Gateway {nat_id} was not found")
        return super().describe_nat_gateways()

    def describe_tags(self) -> ActionResult:
        """Only of what still exists: moto keeps the tags of what was deleted."""
        self.error_on_dryrun()
        there = {thing_id for _, thing_id in existing(self.ec2_backend)}
        found = [t for t in self.ec2_backend.describe_tags() if t["resource_id"] in there]
        return ActionResult({"Tags": found})


def alive(backend: Any) -> list[Any]:
    """moto's instances that hold capacity."""
    return [i for i in backend.all_instances() if i.state not in {"terminated", "stopped"}]


def owner_of(snapshot: Any) -> str:
    """Of a snapshot: whose the image is that it was made for."""
    image = snapshot.ec2_backend.amis.get(snapshot.from_ami)
    return str(image.owner_id if image else snapshot.owner_id)


def _is_own(snapshot: Any) -> bool:
    """Not one of somebody else's image, or of one that was removed."""
    asked = snapshot.from_ami is None or "CreateImage" in snapshot.description
    return asked and owner_of(snapshot) == ACCOUNT


def existing(backend: Any) -> list[tuple[str, str]]:
    """(kind, id) of everything that EC2 would still show in one region, without defaults."""
    own_vpcs = [vpc for vpc in backend.vpcs.values() if not vpc.is_default]
    vpc_ids = {vpc.id for vpc in own_vpcs}
    groups = [
        g
        for by_id in backend.groups.values()
        for g in by_id.values()
        if g.vpc_id in vpc_ids or not g.is_default
    ]
    kinds: dict[str, list[str]] = {
        "instance": [i.id for i in backend.all_instances() if i.state != "terminated"],
        "volume": list(backend.volumes),
        "network-interface": list(backend.enis),
        "security-group": [g.id for g in groups],
        "security-group-rule": [r.id for g in groups for r in g.ingress_rules + g.egress_rules],
        "vpc": sorted(vpc_ids),
        "subnet": [
            subnet.id
            for by_id in backend.subnets.values()
            for subnet in by_id.values()
            if subnet.vpc_id in vpc_ids
        ],
        "route-table": [t.id for t in backend.route_tables.values() if t.vpc_id in vpc_ids],
        "internet-gateway": list(backend.internet_gateways),
        "natgateway": [n.id for n in backend.nat_gateways.values() if n.state != "deleted"],
        "vpc-endpoint": [e.id for e in backend.vpc_end_points.values() if e.state != "deleted"],
        "elastic-ip": [a.allocation_id for a in backend.addresses if a.allocation_id],
        "placement-group": [g.id for g in WORLD.groups_in(backend.region_name)],
        "launch-template": list(backend.launch_templates),
        "image": [ami.id for ami in backend.amis.values() if ami.owner_id == ACCOUNT],
        "snapshot": [s.id for s in backend.snapshots.values() if _is_own(s)],
        "key-pair": [key.id for key in backend.key_pairs.values()],
        "capacity-reservation": [r.id for r in WORLD.reservations_in(backend.region_name)],
    }
    return [(kind, thing_id) for kind, ids in kinds.items() for thing_id in ids]
