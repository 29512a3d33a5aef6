"""RunInstances as EC2 does it: the template and the request made one, checked, then launched.

moto takes a few fields of a launch template and no limit. Here the whole template counts, and the
limits that a fleet meets are real: EFA and network cards, quotas, capacity, reservations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from moto.core.responses import ActionResult
from moto.core.types import Base64EncodedString
from moto.ec2.utils import convert_tag_spec, parse_user_data
from moto.iam.models import iam_backends

from tests.double import catalog
from tests.double.allowance import Allowance, fits
from tests.double.describe import Describing
from tests.double.errors import refuse, refuse_unknown
from tests.double.interfaces import Nic, check_nics, shape
from tests.double.lifecycle import boot, terminate
from tests.double.placement import find_group
from tests.double.reservations import available_in, find_reservation, state_of
from tests.double.world import ACCOUNT, WORLD, Reservation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.double.catalog import TypeFacts

HONOURED: Final = frozenset(
    {
        "BlockDeviceMappings",
        "CapacityReservationSpecification",
        "ClientToken",
        "DisableApiStop",
        "DisableApiTermination",
        "DryRun",
        "EbsOptimized",
        "IamInstanceProfile",
        "ImageId",
        "InstanceInitiatedShutdownBehavior",
        "InstanceMarketOptions",
        "InstanceType",
        "KeyName",
        "LaunchTemplate",
        "MaxCount",
        "MetadataOptions",
        "MinCount",
        "Monitoring",
        "NetworkInterfaces",
        "Placement",
        "PrivateIpAddress",
        "SecurityGroupIds",
        "SubnetId",
        "TagSpecifications",
        "UserData",
    }
)
HARMLESS: Final = frozenset(
    {"CpuOptions", "CreditSpecification", "MaintenanceOptions", "PrivateDnsNameOptions"}
)
"""Taken and not acted on: nothing that kvdeploy sees depends on them."""


@dataclass(frozen=True)
class Order:
    """A launch whose every field is settled."""

    facts: TypeFacts
    image: Any
    zone: str
    nics: tuple[Nic, ...]
    market: str | None
    reservation: Reservation | None
    group_name: str | None
    profile: Any
    spec: Mapping[str, Any]
    tags: Mapping[str, dict[str, str]] = field(default_factory=dict)


class Launching(Describing):
    def run_instances(self) -> ActionResult:
        token = self._get_param("ClientToken")
        if token and (self.region, token) in WORLD.launches:
            return ActionResult(WORLD.launches[self.region, token])
        order = self._read_order()
        self.error_on_dryrun()
        least, most = int(order.spec["MinCount"]), int(order.spec["MaxCount"])
        count = Allowance(self.ec2_backend, self.region, order).settle(least, most)
        made = self._launch(order, count)
        if token:
            WORLD.launches[self.region, token] = made
        return ActionResult(made)

    def start_instances(self) -> ActionResult:
        result = super().start_instances()
        for instance in self.ec2_backend.get_multi_instances_by_id(self._get_param("InstanceIds")):
            boot(instance)
        return result

    def terminate_instances(self) -> ActionResult:
        ids, backend = self._get_param("InstanceIds", []), self.ec2_backend
        self.error_on_dryrun()
        ending = []
        for instance in backend.get_multi_instances_by_id(ids):
            if instance.disable_api_termination:
                refuse(
                    "OperationNotPermitted",
                    f"The instance '{instance.id}' may not be terminated. Modify its "
                    "'disableApiTermination' instance attribute and try again.",
                )
            ending.append(
                {
                    "InstanceId": instance.id,
                    "PreviousState": {"Code": instance.state_code, "Name": instance.state},
                    "CurrentState": {"Code": 32, "Name": "shutting-down"},
                }
            )
            terminate(instance, WORLD.shutdown_s)
        return ActionResult({"TerminatingInstances": ending})

    # -- what is ordered -----------------------------------------------------------------------

    def _read_order(self) -> Order:
        spec, tags = self._merged()
        unknown = {k for k, v in spec.items() if asks(v)} - HONOURED - HARMLESS
        if unknown:
            refuse_unknown(f"RunInstances with {', '.join(sorted(unknown))}")
        facts = catalog.find_type(spec.get("InstanceType") or "m1.small")
        if facts is None:
            refuse(
                "InvalidParameterValue",
                f"Invalid value '{spec.get('InstanceType')}' for InstanceType.",
            )
        image = self._find_image(spec.get("ImageId"), facts)
        key = spec.get("KeyName")
        if key and key not in self.ec2_backend.key_pairs:
            refuse("InvalidKeyPair.NotFound", f"The key pair '{key}' does not exist")
        nics = self._read_nics(spec)
        check_nics(nics, facts)
        zone = self._check_zone(spec, nics, facts)
        group = (spec.get("Placement") or {}).get("GroupName")
        if group:
            find_group(self.region, group)
        market = (spec.get("InstanceMarketOptions") or {}).get("MarketType")
        return Order(
            facts=facts,
            image=image,
            zone=zone,
            nics=tuple(nics),
            market=market,
            reservation=self._find_target(spec, market),
            group_name=group,
            profile=find_profile(spec.get("IamInstanceProfile") or {}),
            spec=spec,
            tags=tags,
        )

    def _merged(self) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
        """The request over its template; tags of both."""
        request = {k: v for k, v in dict(self._get_params()).items() if v is not None}
        template: dict[str, Any] = {}
        tags: dict[str, dict[str, str]] = {}
        wanted = request.get("LaunchTemplate")
        if wanted:
            version = self._find_version(wanted)
            template = {k: v for k, v in version.data.items() if v is not None}
            tags = {k: dict(v) for k, v in convert_tag_spec(template["TagSpecifications"]).items()}
            tags.setdefault("instance", {}).update(
                {
                    "aws:ec2launchtemplate:id": version.template.id,
                    "aws:ec2launchtemplate:version": str(version.number),
                }
            )
        for kind, own in self._parse_tag_specification().items():
            tags.setdefault(kind, {}).update(own)
        if request.get("SubnetId") and (
            request.get("NetworkInterfaces") or template.get("NetworkInterfaces")
        ):
            refuse(
                "InvalidParameterCombination",
                "Network interfaces and an instance-level subnet ID may not be specified on the "
                "same request",
            )
        spec = {"MinCount": 1, "MaxCount": 1, **template, **request}
        if template.get("Placement") and request.get("Placement"):
            spec["Placement"] = {**template["Placement"], **request["Placement"]}
        return spec, tags

    def _find_version(self, wanted: Mapping[str, Any]) -> Any:
        backend, name = self.ec2_backend, wanted.get("LaunchTemplateName")
        template = (
            backend.get_launch_template_by_name(name)
            if name
            else backend.get_launch_template(wanted.get("LaunchTemplateId"))
        )
        return template.get_version(wanted.get("Version") or "$Default")

    def _find_image(self, image_id: str | None, facts: TypeFacts) -> Any:
        if not image_id:
            refuse("MissingParameter", "The request must contain the parameter ImageId")
        image = self.ec2_backend.amis.get(image_id)
        if image is None:
            refuse("InvalidAMIID.NotFound", f"The image id '[{image_id}]' does not exist")
        if image.architecture not in facts.architectures:
            refuse(
                "InvalidParameterValue",
                f"The architecture '{','.join(facts.architectures)}' of the specified instance "
                f"type does not match the architecture '{image.architecture}' of the specified AMI."
                " Specify an instance type and an AMI that have matching architectures, and try "
                "again.",
            )
        return image

    def _read_nics(self, spec: Mapping[str, Any]) -> list[Nic]:
        given = spec.get("NetworkInterfaces") or []
        if given and spec.get("SecurityGroupIds"):
            refuse(
                "InvalidParameterCombination",
                "Network interfaces and an instance-level security groups may not be specified on "
                "the same request",
            )
        if any(nic.get("NetworkInterfaceId") for nic in given):
            refuse_unknown("RunInstances with network interfaces that exist already")
        if not given:
            given = [
                {
                    "DeviceIndex": 0,
                    "SubnetId": spec.get("SubnetId"),
                    "Groups": spec.get("SecurityGroupIds"),
                    "PrivateIpAddress": spec.get("PrivateIpAddress"),
                }
            ]
        return [self._read_nic(nic, spec) for nic in given]

    def _read_nic(self, nic: Mapping[str, Any], spec: Mapping[str, Any]) -> Nic:
        backend = self.ec2_backend
        subnet_id = nic.get("SubnetId") or self._default_subnet(spec)
        subnet = backend.get_subnet(subnet_id)
        groups = tuple(nic.get("Groups") or ())
        for group_id in groups:
            group = backend.get_security_group_from_id(group_id)
            if group is None:
                refuse("InvalidGroup.NotFound", f"The security group '{group_id}' does not exist")
            if group.vpc_id != subnet.vpc_id:
                refuse(
                    "InvalidParameter",
                    f"Security group {group_id} and subnet {subnet_id} belong to different "
                    "networks.",
                )
        card, device = int(nic.get("NetworkCardIndex") or 0), int(nic.get("DeviceIndex") or 0)
        first = (card, device) == (0, 0)
        return Nic(
            card=card,
            device=device,
            kind=nic.get("InterfaceType") or "interface",
            subnet_id=subnet_id,
            groups=groups or (backend.get_default_security_group(subnet.vpc_id).id,),
            delete_on_termination=bool(nic.get("DeleteOnTermination", first)),
            description=nic.get("Description"),
            private_ip=nic.get("PrivateIpAddress"),
            public=nic.get("AssociatePublicIpAddress"),
        )

    def _default_subnet(self, spec: Mapping[str, Any]) -> str:
        by_zone = self.ec2_backend.get_default_subnets()
        zone = (spec.get("Placement") or {}).get("AvailabilityZone")
        if zone is None and by_zone:
            zone = min(by_zone)
        if zone not in by_zone:
            refuse("MissingInput", "No subnets found for the default VPC.")
        return str(by_zone[zone].id)

    def _check_zone(self, spec: Mapping[str, Any], nics: list[Nic], facts: TypeFacts) -> str:
        zones = {str(self.ec2_backend.get_subnet(n.subnet_id).availability_zone) for n in nics}
        asked = (spec.get("Placement") or {}).get("AvailabilityZone")
        if len(zones | ({asked} if asked else set())) > 1:
            refuse(
                "InvalidParameterCombination",
                "The availability zone of the subnet does not match that of the placement.",
            )
        zone = zones.pop()
        offered = catalog.zones_offering(facts.name, self.region)
        if zone not in offered:
            refuse(
                "Unsupported",
                f"Your requested instance type ({facts.name}) is not supported in your requested "
                f"Availability Zone ({zone}). Please retry your request by not specifying an "
                f"Availability Zone or choosing {', '.join(offered)}.",
            )
        return zone

    def _find_target(self, spec: Mapping[str, Any], market: str | None) -> Reservation | None:
        asked = spec.get("CapacityReservationSpecification") or {}
        target = asked.get("CapacityReservationTarget") or {}
        if target.get("CapacityReservationResourceGroupArn"):
            refuse_unknown("capacity reservation groups")
        wanted = target.get("CapacityReservationId")
        if not wanted:
            if market == "capacity-block":
                refuse(
                    "InvalidParameterCombination",
                    "The market type 'capacity-block' requires a targeted Capacity Block "
                    "reservation.",
                )
            return None
        reservation = find_reservation(self.region, wanted)
        if market != ("capacity-block" if reservation.block else None):
            needed = "capacity-block" if reservation.block else "on-demand"
            refuse(
                "InvalidParameterCombination",
                f"The market type does not match the capacity reservation '{wanted}', which is "
                f"of type '{needed}'.",
            )
        if state_of(reservation) != "active":
            refuse(
                "InvalidCapacityReservationState",
                f"The capacity reservation '{wanted}' is in the state '{state_of(reservation)}' "
                "and must be in the state 'active'.",
            )
        return reservation

    # -- the launch ----------------------------------------------------------------------------

    def _launch(self, order: Order, count: int) -> Any:
        spec, backend = order.spec, self.ec2_backend
        first = next(nic for nic in order.nics if nic.primary)
        primary: dict[str, Any] = {
            "DeviceIndex": 0,
            "SubnetId": first.subnet_id,
            "DeleteOnTermination": first.delete_on_termination,
            "Description": first.description,
        }
        if first.public is not None:
            primary["AssociatePublicIpAddress"] = first.public
        if first.private_ip:
            primary["PrivateIpAddress"] = first.private_ip
        made = backend.run_instances(
            order.image.id,
            count,
            encoded(spec.get("UserData")),
            [],
            instance_type=order.facts.name,
            is_instance_type_default=False,
            region_name=self.region,
            nics=[primary],
            associate_public_ip=None if len(order.nics) == 1 else False,
            security_group_ids=list(first.groups),
            key_name=spec.get("KeyName"),
            ebs_optimized=bool(spec.get("EbsOptimized")),
            disable_api_stop=bool(spec.get("DisableApiStop")),
            disable_api_termination=bool(spec.get("DisableApiTermination")),
            instance_initiated_shutdown_behavior=spec.get("InstanceInitiatedShutdownBehavior"),
            monitoring_state=(
                "enabled" if (spec.get("Monitoring") or {}).get("Enabled") else "disabled"
            ),
            metadata_options=spec.get("MetadataOptions") or {},
            client_token=spec.get("ClientToken") or "",
            block_device_mappings=block_devices(spec, order.image),
        )
        for instance in made.instances:
            self._finish(instance, order, first)
            boot(instance)
        return made

    def _finish(self, instance: Any, order: Order, first: Nic) -> None:
        """Everything about an instance that moto's own launch leaves out."""
        backend, spec = self.ec2_backend, order.spec
        instance.add_tags(order.tags.get("instance", {}))
        shape(instance.nics[0], first)
        for nic in order.nics:
            if nic is not first:
                eni = backend.create_network_interface(
                    backend.get_subnet(nic.subnet_id),
                    nic.private_ip,
                    group_ids=list(nic.groups),
                    delete_on_termination=nic.delete_on_termination,
                    description=nic.description,
                )
                instance.attach_eni(eni, nic.card * 1000 + nic.device)
                shape(eni, nic)
        for eni in instance.nics.values():
            eni.add_tags(order.tags.get("network-interface", {}))
        asked = {block["DeviceName"]: block["Ebs"] for block in block_devices(spec, order.image)}
        for device, block in instance.get_block_device_mapping:
            volume = backend.get_volume(block.volume_id)
            volume.add_tags(order.tags.get("volume", {}))
            volume.iops = asked[device].get("Iops") or volume.iops
            volume.throughput = asked[device].get("Throughput") or volume.throughput
        instance.placement.group_name = order.group_name or ""
        instance.lifecycle = order.market
        if order.market == "spot":
            instance.spot_instance_request_id = WORLD.new_id("sir")
            instance.spot_cancelled = False
            instance.spot_options = spec["InstanceMarketOptions"].get("SpotOptions") or {}
        target = order.reservation or self._open_reservation(order)
        instance.capacity_reservation_id = target.id if target else None
        instance.capacity_reservation_specification = (
            {"CapacityReservationTarget": {"CapacityReservationId": order.reservation.id}}
            if order.reservation
            else {"CapacityReservationPreference": preference(spec)}
        )
        if order.profile is not None:
            backend.associate_iam_instance_profile(
                instance_id=instance.id, iam_instance_profile_arn=order.profile.arn
            )

    def _open_reservation(self, order: Order) -> Reservation | None:
        """An open reservation takes a fitting on-demand instance by itself."""
        if order.market is not None or preference(order.spec) == "none":
            return None
        return next(
            (
                r
                for r in WORLD.reservations_in(self.region)
                if r.match == "open" and fits(r, order) and available_in(self.ec2_backend, r) > 0
            ),
            None,
        )


def preference(spec: Mapping[str, Any]) -> str:
    asked = spec.get("CapacityReservationSpecification") or {}
    return str(asked.get("CapacityReservationPreference") or "open")


def find_profile(asked: Mapping[str, Any]) -> Any:
    """IAM's instance profile by name or ARN, None where none is asked for."""
    for part, wanted in asked.items():
        field_name = "arn" if part == "Arn" else "name"
        for profile in iam_backends[ACCOUNT]["aws"].instance_profiles.values():
            if wanted == getattr(profile, field_name):
                return profile
        said = "ARN" if part == "Arn" else "name"
        refuse(
            "InvalidParameterValue",
            f"Value ({wanted}) for parameter iamInstanceProfile.{field_name} is invalid. Invalid "
            f"IAM Instance Profile {said}",
        )
    return None


def block_devices(spec: Mapping[str, Any], image: Any) -> list[dict[str, Any]]:
    """The EBS volumes to make; there is always a root volume."""
    asked = [block for block in spec.get("BlockDeviceMappings") or [] if block.get("Ebs")]
    if all(block["DeviceName"] != image.root_device_name for block in asked):
        asked = [{"DeviceName": image.root_device_name, "Ebs": {}}, *asked]
    made = []
    for block in asked:
        root = block["DeviceName"] == image.root_device_name
        base = {"VolumeSize": 8, "VolumeType": "gp3", "DeleteOnTermination": root}
        given = {key: value for key, value in block["Ebs"].items() if value is not None}
        made.append({"DeviceName": block["DeviceName"], "Ebs": {**base, **given}})
    return made


def asks(value: Any) -> bool:
    """False for a part of a request that is empty or only says no."""
    if isinstance(value, dict):
        return any(map(asks, value.values()))
    return bool(value)


def encoded(user_data: Any) -> Any:
    """User data as moto keeps it, however it came."""
    if user_data is None or isinstance(user_data, Base64EncodedString):
        return user_data
    return parse_user_data(user_data)
