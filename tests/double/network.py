"""Networks: what may not be deleted while it is used, and who owns an interface."""

from __future__ import annotations

from typing import Any, NoReturn

from moto.core.responses import ActionResult, EmptyResult

from tests.double.describe import Describing
from tests.double.errors import refuse
from tests.double.world import WORLD


class Networking(Describing):
    def create_vpc(self) -> ActionResult:
        limit = WORLD.quota("L-F678F1CE", "vpc")
        if limit is not None and len(self.ec2_backend.vpcs) >= limit:
            refuse("VpcLimitExceeded", "The maximum number of VPCs has been reached.")
        return super().create_vpc()

    def delete_vpc(self) -> ActionResult:
        vpc_id, backend = self._get_param("VpcId"), self.ec2_backend
        backend.get_vpc(vpc_id)
        groups = backend.groups.get(vpc_id, {}).values()
        if (
            any(eni.vpc_id == vpc_id for eni in backend.enis.values())
            or any(not group.is_default for group in groups)
            or any(igw.vpc and igw.vpc.id == vpc_id for igw in backend.internet_gateways.values())
            or any(
                endpoint.vpc_id == vpc_id and endpoint.state != "deleted"
                for endpoint in backend.vpc_end_points.values()
            )
        ):
            refuse_in_use("vpc", vpc_id)
        return super().delete_vpc()

    def delete_subnet(self) -> ActionResult:
        subnet_id = self._get_param("SubnetId")
        if any(eni.subnet.id == subnet_id for eni in self.ec2_backend.enis.values()):
            refuse_in_use("subnet", subnet_id)
        return super().delete_subnet()

    def delete_security_group(self) -> ActionResult:
        backend = self.ec2_backend
        wanted = self._get_param("GroupId") or self._get_param("GroupName")
        group = backend.get_security_group_by_name_or_id(wanted)
        if group is not None:
            if group.is_default:
                refuse(
                    "CannotDelete",
                    f'the specified group: "{group.id}" name: "default" cannot be '
                    "deleted by a user",
                )
            held = any(group in eni.group_set for eni in backend.enis.values())
            named = any(
                rule.source_group.get("GroupId") == group.id
                for by_id in backend.groups.values()
                for other in by_id.values()
                if other.id != group.id
                for rule in other.ingress_rules + other.egress_rules
            )
            if held or named:
                refuse("DependencyViolation", f"resource {group.id} has a dependent object")
        return super().delete_security_group()

    def detach_internet_gateway(self) -> ActionResult:
        vpc_id = self._get_param("VpcId")
        mapped = any(a.eni and a.eni.vpc_id == vpc_id for a in self.ec2_backend.addresses)
        if mapped:
            refuse(
                "DependencyViolation",
                f"Network {vpc_id} has some mapped public address(es). Please unmap those public "
                "address(es) before detaching the gateway.",
            )
        return super().detach_internet_gateway()

    def allocate_address(self) -> ActionResult:
        limit = WORLD.quota("L-0263D0A3")
        if limit is not None and len(self.ec2_backend.addresses) >= limit:
            refuse("AddressLimitExceeded", "The maximum number of addresses has been reached.")
        return super().allocate_address()

    def release_address(self) -> ActionResult:
        allocation = self._get_param("AllocationId")
        if any(a.allocation_id == allocation and a.association_id for a in self._addresses()):
            refuse("InvalidIPAddress.InUse", f"Address {allocation} is in use.")
        return super().release_address()

    def _addresses(self) -> list[Any]:
        return list(self.ec2_backend.addresses)

    def create_network_interface(self) -> ActionResult:
        result = super().create_network_interface()
        answer: Any = result.result
        answer["NetworkInterface"].interface_type = self._get_param("InterfaceType") or "interface"
        return result

    def delete_network_interface(self) -> ActionResult:
        eni = self.ec2_backend.get_network_interface(self._get_param("NetworkInterfaceId"))
        if eni.status == "in-use":
            refuse("InvalidParameterValue", f"Network interface '{eni.id}' is currently in use.")
        eni.delete()
        return EmptyResult()

    def detach_network_interface(self) -> ActionResult:
        wanted = self._get_param("AttachmentId")
        self.error_on_dryrun()
        for eni in self.ec2_backend.enis.values():
            if eni.attachment_id != wanted:
                continue
            if eni.instance is None and eni.requester_managed:
                refuse(
                    "AuthFailure", "You do not have permission to access the specified resource."
                )
            if eni.instance is not None and eni.device_index == 0 and _card(eni) == 0:
                refuse(
                    "OperationNotPermitted",
                    "The network interface at device index 0 and networkCard index 0 cannot be "
                    "detached.",
                )
            release(eni)
            return EmptyResult()
        return refuse(
            "InvalidAttachmentID.NotFound", f"The attachment ID '{wanted}' does not exist"
        )

    def create_nat_gateway(self) -> ActionResult:
        result = super().create_nat_gateway()
        answer: Any = result.result
        nat = answer["NatGateway"]
        hold(nat._eni, "nat_gateway", f"Interface for NAT Gateway {nat.id}")
        nat.private_ip = nat._eni.private_ip_address
        return result

    def delete_nat_gateway(self) -> ActionResult:
        nat_id, backend = self._get_param("NatGatewayId"), self.ec2_backend
        nat = backend.nat_gateways.get(nat_id)
        if nat is None:
            refuse("NatGatewayNotFound", f"The Nat Gateway {nat_id} was not found")

        def end() -> None:
            nat.state = "deleted"
            unmap(backend, nat._eni)
            backend.enis.pop(nat._eni.id, None)

        if nat.state not in {"deleting", "deleted"}:
            nat.state = "deleting"
            WORLD.later(WORLD.nat_s, end)
        return ActionResult({"NatGatewayId": nat_id})

    def create_vpc_endpoint(self) -> ActionResult:
        result = super().create_vpc_endpoint()
        answer: Any = result.result
        endpoint, backend = answer["VpcEndpoint"], self.ec2_backend
        for eni_id in endpoint.network_interface_ids:
            eni = backend.enis[eni_id]
            hold(eni, "vpc_endpoint", f"VPC Endpoint Interface {endpoint.id}")
            if endpoint.security_group_ids:
                found = map(backend.get_security_group_from_id, endpoint.security_group_ids)
                eni._group_set = [group for group in found if group is not None]
        return result

    def delete_vpc_endpoints(self) -> ActionResult:
        """Gone at once; moto would show them as deleted for ever."""
        result = super().delete_vpc_endpoints()
        for endpoint_id in self._get_param("VpcEndpointIds", []):
            self.ec2_backend.vpc_end_points.pop(endpoint_id, None)
        return result


def refuse_in_use(kind: str, thing_id: str) -> NoReturn:
    refuse(
        "DependencyViolation",
        f"The {kind} '{thing_id}' has dependencies and cannot be deleted.",
    )


def hold(eni: Any, interface_type: str, description: str) -> None:
    """An interface of AWS's own: in use, and not ours to detach."""
    eni.status = "in-use"
    eni.interface_type = interface_type
    eni.description = description
    eni.requester_managed = True
    eni.attachment_id = WORLD.new_id("eni-attach")
    eni.attach_time = WORLD.started


def release(eni: Any) -> None:
    """Detach, also where the instance's own record of the interface is gone."""
    instance = eni.instance
    if instance is not None:
        instance.nics = {key: nic for key, nic in instance.nics.items() if nic is not eni}
    eni.instance = eni.attachment_id = eni.attach_time = eni.device_index = None
    eni.status = "available"


def unmap(backend: Any, eni: Any) -> None:
    """Elastic IPs of the interface are its no more."""
    for address in backend.addresses:
        if address.eni is eni:
            address.eni = address.instance = address.association_id = None
    eni.public_ip = None


def _card(eni: Any) -> int:
    return int(getattr(eni, "network_card_index", 0))
