"""EC2's filters: any value of one filter, every filter of a request, `*` and `?` as wildcards.

moto filters each kind in its own way and at times not at all. The double takes the unfiltered
answer and applies these instead; a filter that is not in the table is refused, never ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tests.double.errors import refuse, refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Callable

    Filters = Mapping[str, list[str]]
    Read = Callable[[Any], object]


@dataclass(frozen=True)
class Kind:
    """How one Describe action is filtered."""

    key: str
    """The list in the answer."""
    identify: Read
    """From an element to the id that its tags are kept under."""
    reads: Mapping[str, Read]
    """Filter name -> what is compared: a text, number, truth, None, or several of them."""


def attribute(path: str) -> Read:
    """Reads `a.b.c` from objects, mappings and lists of them; what is not there is None."""
    names = path.split(".")

    def read(item: Any) -> object:
        found = item
        for name in names:
            found = _step(found, name)
        return found

    return read


def _step(found: Any, name: str) -> Any:
    if found is None:
        return None
    if isinstance(found, (list, tuple, set)):
        return [_step(one, name) for one in found]
    if isinstance(found, Mapping):
        return found.get(name)
    return getattr(found, name, None)


def texts(value: object) -> list[str]:
    """What EC2 compares a filter's values with."""
    if value is None:
        return []
    if isinstance(value, bool):
        return ["true" if value else "false"]
    if isinstance(value, (str, int, float)):
        return [str(value)]
    if isinstance(value, Iterable):
        return [text for one in value for text in texts(one)]
    return [str(value)]


def glob(pattern: str) -> re.Pattern[str]:
    """`*` any text, `?` any character, a backslash before one of them the character itself."""
    parts = re.split(r"(\\[*?\\]|[*?])", pattern)
    rules = {"*": ".*", "?": "."}
    return re.compile(
        "".join(
            rules.get(part) or re.escape(part[1:] if part[:1] == "\\" and part[1:] else part)
            for part in parts
        ),
        re.DOTALL,
    )


def select(items: list[Any], filters: Filters, kind: Kind, tags: Mapping[str, Any]) -> list[Any]:
    """The items that pass every filter. `tags`: id -> its tags. RefusalError: an unknown filter."""
    for name, values in filters.items():
        if not (name in kind.reads or name in {"tag-key", "tag-value"} or name[:4] == "tag:"):
            refuse_unknown(f"the filter '{name}' for {kind.key}")
        if not values:
            refuse("InvalidParameterValue", f"The filter '{name}' has no value.")
    return [item for item in items if _passes(item, filters, kind, tags)]


def _passes(item: Any, filters: Filters, kind: Kind, tags: Mapping[str, Any]) -> bool:
    own: Mapping[str, str] = tags.get(str(kind.identify(item))) or {}
    for name, values in filters.items():
        if name == "tag-key":
            found = list(own)
        elif name == "tag-value":
            found = list(own.values())
        elif name[:4] == "tag:":
            found = [own[name[4:]]] if name[4:] in own else []
        else:
            found = texts(kind.reads[name](item))
        wanted = [glob(value) for value in values]
        if not any(pattern.fullmatch(text) for pattern in wanted for text in found):
            return False
    return True


def _reads(**paths: str) -> dict[str, Read]:
    """Filter names with `_` for `-` and `__` for `.`."""
    return {
        name.replace("__", ".").replace("_", "-"): attribute(path) for name, path in paths.items()
    }


def _in_groups(item: Any) -> object:
    return [group.id for group in item.group_set]


INSTANCE: Final = Kind(
    "Instances",
    attribute("id"),
    {
        **_reads(
            instance_id="id",
            instance_state_name="state",
            instance_state_code="state_code",
            instance_type="instance_type",
            instance_lifecycle="lifecycle",
            availability_zone="placement.zone",
            placement_group_name="placement.group_name",
            capacity_reservation_id="capacity_reservation_id",
            client_token="client_token",
            image_id="image_id",
            key_name="key_name",
            owner_id="owner_id",
            private_ip_address="private_ip",
            ip_address="public_ip",
            subnet_id="subnet_id",
            vpc_id="vpc_id",
            architecture="architecture",
            root_device_name="root_device_name",
            iam_instance_profile__arn="iam_instance_profile.Arn",
            network_interface__network_interface_id="network_interfaces.id",
            network_interface__subnet_id="network_interfaces.subnet_id",
            network_interface__vpc_id="network_interfaces.vpc_id",
            spot_instance_request_id="spot_instance_request_id",
        ),
        "instance.group-id": attribute("security_groups.id"),
        "instance.group-name": attribute("security_groups.name"),
        "group-id": attribute("security_groups.id"),
    },
)

KINDS: Final[Mapping[str, Kind]] = {
    "DescribeInstances": INSTANCE,
    "DescribeInstanceStatus": Kind("InstanceStatuses", INSTANCE.identify, INSTANCE.reads),
    "DescribeVolumes": Kind(
        "Volumes",
        attribute("id"),
        _reads(
            volume_id="id",
            availability_zone="zone.name",
            encrypted="encrypted",
            size="size",
            snapshot_id="snapshot_id",
            status="status",
            volume_type="volume_type",
            attachment__instance_id="attachment.instance.id",
            attachment__device="attachment.device",
            attachment__status="attachment.status",
        ),
    ),
    "DescribeSnapshots": Kind(
        "Snapshots",
        attribute("id"),
        _reads(snapshot_id="id", volume_id="volume_id", status="status", owner_id="owner_id"),
    ),
    "DescribeNetworkInterfaces": Kind(
        "NetworkInterfaces",
        attribute("id"),
        {
            **_reads(
                network_interface_id="id",
                subnet_id="subnet.id",
                vpc_id="vpc_id",
                availability_zone="availability_zone",
                description="description",
                interface_type="interface_type",
                mac_address="mac_address",
                owner_id="owner_id",
                private_ip_address="private_ip_address",
                addresses__private_ip_address="private_ip_addresses.PrivateIpAddress",
                requester_id="requester_id",
                requester_managed="requester_managed",
                source_dest_check="source_dest_check",
                status="status",
                association__public_ip="public_ip",
                attachment__attachment_id="attachment.attachment_id",
                attachment__device_index="attachment.device_index",
                attachment__instance_id="attachment.instance_id",
                attachment__instance_owner_id="attachment.instance_owner_id",
                attachment__status="attachment.status",
                attachment__delete_on_termination="attachment.delete_on_termination",
            ),
            "group-id": _in_groups,
        },
    ),
    "DescribeSecurityGroups": Kind(
        "SecurityGroups",
        attribute("id"),
        _reads(
            group_id="id",
            group_name="name",
            description="description",
            owner_id="owner_id",
            vpc_id="vpc_id",
            ip_permission__cidr="ingress_rules.cidr_ipv4",
            ip_permission__group_id="ingress_rules.source_group.GroupId",
            egress__ip_permission__cidr="egress_rules.cidr_ipv4",
            egress__ip_permission__group_id="egress_rules.source_group.GroupId",
        ),
    ),
    "DescribeSecurityGroupRules": Kind(
        "SecurityGroupRules",
        attribute("id"),
        _reads(security_group_rule_id="id", group_id="group_id"),
    ),
    "DescribeVpcs": Kind(
        "Vpcs",
        attribute("id"),
        _reads(
            vpc_id="id",
            cidr="cidr_block",
            cidr_block="cidr_block",
            state="state",
            is_default="is_default",
            isDefault="is_default",
            owner_id="owner_id",
            dhcp_options_id="dhcp_options_id",
        ),
    ),
    "DescribeSubnets": Kind(
        "Subnets",
        attribute("id"),
        _reads(
            subnet_id="id",
            vpc_id="vpc_id",
            availability_zone="availability_zone",
            availability_zone_id="availability_zone_id",
            available_ip_address_count="available_ip_address_count",
            cidr="cidr_block",
            cidr_block="cidr_block",
            default_for_az="default_for_az",
            map_public_ip_on_launch="map_public_ip_on_launch",
            owner_id="owner_id",
            state="state",
        ),
    ),
    "DescribeRouteTables": Kind(
        "RouteTables",
        attribute("id"),
        _reads(
            route_table_id="id",
            vpc_id="vpc_id",
            owner_id="owner_id",
            association__main="associations.Main",
            association__subnet_id="associations.SubnetId",
            association__gateway_id="associations.GatewayId",
            association__route_table_id="associations.RouteTableId",
            association__route_table_association_id="associations.RouteTableAssociationId",
            route__destination_cidr_block="routes.destination_cidr_block",
            route__gateway_id="routes.gateway.id",
            route__nat_gateway_id="routes.nat_gateway.id",
        ),
    ),
    "DescribeInternetGateways": Kind(
        "InternetGateways",
        attribute("id"),
        _reads(
            internet_gateway_id="id",
            attachment__vpc_id="attachments.VpcId",
            attachment__state="attachments.State",
        ),
    ),
    "DescribeNatGateways": Kind(
        "NatGateways",
        attribute("id"),
        _reads(nat_gateway_id="id", vpc_id="vpc_id", subnet_id="subnet_id", state="state"),
    ),
    "DescribeVpcEndpoints": Kind(
        "VpcEndpoints",
        attribute("id"),
        _reads(
            vpc_endpoint_id="id",
            vpc_id="vpc_id",
            service_name="service_name",
            vpc_endpoint_type="vpc_endpoint_type",
            vpc_endpoint_state="state",
        ),
    ),
    "DescribeAddresses": Kind(
        "Addresses",
        attribute("id"),
        _reads(
            allocation_id="allocation_id",
            association_id="association_id",
            domain="domain",
            instance_id="instance_id",
            network_interface_id="network_interface_id",
            private_ip_address="private_ip_address",
            public_ip="public_ip",
        ),
    ),
    "DescribeNetworkAcls": Kind(
        "NetworkAcls",
        attribute("id"),
        _reads(
            network_acl_id="id",
            vpc_id="vpc_id",
            default="default",
            association__subnet_id="associations.subnet_id",
        ),
    ),
    "DescribePlacementGroups": Kind(
        "PlacementGroups",
        attribute("GroupId"),
        _reads(
            group_name="GroupName",
            group_arn="GroupArn",
            state="State",
            strategy="Strategy",
        ),
    ),
    "DescribeLaunchTemplates": Kind(
        "LaunchTemplates",
        attribute("LaunchTemplateId"),
        _reads(launch_template_name="LaunchTemplateName"),
    ),
    "DescribeKeyPairs": Kind(
        "KeyPairs",
        attribute("id"),
        _reads(key_name="key_name", key_pair_id="id", fingerprint="key_fingerprint"),
    ),
    "DescribeCapacityReservations": Kind(
        "CapacityReservations",
        attribute("CapacityReservationId"),
        _reads(
            instance_type="InstanceType",
            availability_zone="AvailabilityZone",
            state="State",
            owner_id="OwnerId",
            tenancy="Tenancy",
            instance_platform="InstancePlatform",
            instance_match_criteria="InstanceMatchCriteria",
            end_date_type="EndDateType",
            placement_group_arn="PlacementGroupArn",
            reservation_type="ReservationType",
        ),
    ),
    "DescribeCapacityBlocks": Kind(
        "CapacityBlocks",
        attribute("CapacityBlockId"),
        _reads(
            capacity_block_id="CapacityBlockId",
            availability_zone="AvailabilityZone",
            state="State",
        ),
    ),
    "DescribeSpotInstanceRequests": Kind(
        "SpotInstanceRequests",
        attribute("SpotInstanceRequestId"),
        _reads(
            spot_instance_request_id="SpotInstanceRequestId",
            instance_id="InstanceId",
            state="State",
        ),
    ),
    "DescribeSpotPriceHistory": Kind(
        "SpotPriceHistory",
        attribute("AvailabilityZone"),
        _reads(
            availability_zone="AvailabilityZone",
            instance_type="InstanceType",
            product_description="ProductDescription",
        ),
    ),
    "DescribeTags": Kind(
        "Tags",
        attribute("resource_id"),
        _reads(key="key", value="value", resource_id="resource_id", resource_type="resource_type"),
    ),
    "DescribeAvailabilityZones": Kind(
        "AvailabilityZones",
        attribute("zone_id"),
        _reads(
            zone_name="name",
            zone_id="zone_id",
            zone_type="zone_type",
            region_name="region_name",
            state="state",
            opt_in_status="opt_in_status",
            group_name="group_name",
        ),
    ),
    "DescribeManagedPrefixLists": Kind(
        "PrefixLists",
        attribute("id"),
        _reads(prefix_list_id="id", prefix_list_name="prefix_list_name", owner_id="owner_id"),
    ),
    "DescribePrefixLists": Kind(
        "PrefixLists",
        attribute("id"),
        _reads(prefix_list_id="id", prefix_list_name="prefix_list_name"),
    ),
}

FILTERED_BY_MOTO: Final = frozenset(
    {
        "DescribeImages",
        "DescribeInstanceTypes",
        "DescribeInstanceTypeOfferings",
        "DescribeIamInstanceProfileAssociations",
        "DescribeVpcEndpointServices",
    }
)
"""Actions whose filters moto applies, and refuses the ones it does not know."""
