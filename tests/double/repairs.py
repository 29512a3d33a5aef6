"""moto's own models, put right where they differ from AWS. Written against moto 5.2.

Everything that replaces a part of moto is in this module, each with what is wrong there.
"""

from __future__ import annotations

import ipaddress
import json
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from moto.core.resource_tagging import TaggedResource
from moto.ec2 import utils as ec2_utils
from moto.ec2.models import EC2Backend
from moto.ec2.models.availability_zones_and_regions import Zone
from moto.ec2.models.elastic_network_interfaces import (
    Attachment,
    NetworkInterface,
    NetworkInterfaceBackend,
)
from moto.ec2.models.instances import Instance
from moto.ec2.models.launch_templates import LaunchTemplate, LaunchTemplateBackend
from moto.ec2.models.security_groups import SecurityGroupRule
from moto.ec2.models.subnets import Subnet
from moto.iam.aws_managed_policies import aws_managed_policies_data
from moto.iam.models import AWSManagedPolicy, IAMBackend
from moto.s3.models import FakeBucket
from moto.sts.models import STSBackend

from tests.double.describe import existing
from tests.double.errors import refuse
from tests.double.launch import encoded
from tests.double.network import release
from tests.double.world import ACCOUNT, WORLD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MANAGED_POLICIES: Final = (
    "AmazonSSMManagedInstanceCore",
    "CloudWatchAgentServerPolicy",
    "AmazonS3ReadOnlyAccess",
)
"""AWS's own policies that there are."""

RESERVED_ADDRESSES: Final = 4
"""The first addresses of a subnet that AWS keeps; the last one is not a host's anyway."""


def replace(owner: type, name: str, make: Callable[[Any], Any]) -> None:
    """Put `make(what was there)` in the place of `owner.name`; fail if moto has it no more."""
    setattr(owner, name, make(owner.__dict__[name]))


def repair() -> None:
    """Once a process, before the first request."""
    ec2_utils.EC2_RESOURCE_TO_PREFIX.update({"placement-group": "pg", "capacity-reservation": "cr"})
    ec2_utils.EC2_PREFIX_TO_RESOURCE.update(
        {
            "pg": "placement-group",
            "cr": "capacity-reservation",
            "eipalloc": "elastic-ip",
            "nat": "natgateway",
        }
    )
    setattr(Zone, "opt_in_status", "opt-in-not-required")  # noqa: B010 - not in moto's class
    replace(SecurityGroupRule, "description", _describe_rule)
    replace(NetworkInterface, "group_set", _own_groups)
    replace(NetworkInterfaceBackend, "create_network_interface", _distinct_addresses)
    replace(Subnet, "get_available_subnet_ip", lambda _: _address_of_instance)
    replace(Attachment, "__init__", _whole_attachment)
    for name in ("private_ip", "private_ip_address"):
        replace(Instance, name, _of_primary("private_ip_address"))
    for name in ("public_ip", "public_ip_address"):
        replace(Instance, name, _of_primary("public_ip"))
    replace(Instance, "private_dns_name", _private_dns_name)
    replace(Instance, "detach_eni", lambda _: lambda self, eni: release(eni))
    replace(LaunchTemplateBackend, "create_launch_template", _untangle_tags)
    replace(LaunchTemplate, "create_version", _whole_version)
    replace(FakeBucket, "get_permission", _skip_conditional_denials)
    replace(STSBackend, "get_caller_identity", lambda _: _identity)
    replace(IAMBackend, "_init_aws_policies", lambda _: _few_policies)
    replace(EC2Backend, "iter_tagged_resources", lambda _: _all_tagged)


def _of_primary(name: str) -> Callable[[Any], property]:
    """A terminated instance has no interface any more; moto keeps it for ever."""
    return lambda _: property(lambda self: getattr(self.nics[0], name) if 0 in self.nics else None)


def _private_dns_name(_: Any) -> property:
    def name(self: Any) -> str:
        if self.private_ip is None:
            return ""
        return f"ip-{self.private_ip.replace('.', '-')}.{self.region_name}.compute.internal"

    return property(name)


def _describe_rule(_: Any) -> property:
    """moto loses the description of a rule that names a group: a diff for ever in Terraform."""

    def description(self: Any) -> Any:
        return self.ip_range.get("Description") or self.source_group.get("Description")

    return property(description)


def _own_groups(_: Any) -> property:
    """moto adds the instance's groups to those of each of its interfaces."""
    return property(lambda self: self._group_set)


def _distinct_addresses(create: Callable[..., Any]) -> Callable[..., Any]:
    """moto draws addresses at random, so that two may be the same, and some outside the subnet."""

    def create_network_interface(
        self: Any, subnet: Any, private_ip_address: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(subnet, str):
            subnet = self.get_subnet(subnet)
        given = (
            private_ip_address[0] if isinstance(private_ip_address, list) else (private_ip_address)
        )
        several = (args[0] if args else kwargs.get("private_ip_addresses")) or []
        if not several and (not given or not _inside(subnet, given) or given in _taken(self)):
            private_ip_address = _free_address(self, subnet)
        eni = create(self, subnet, private_ip_address, *args, **kwargs)
        eni.network_card_index = 0
        return eni

    return create_network_interface


def _inside(subnet: Any, address: str) -> bool:
    return ipaddress.ip_address(address) in subnet.cidr


def _taken(backend: Any) -> set[str]:
    return {eni.private_ip_address for eni in backend.enis.values()}


def _free_address(backend: Any, subnet: Any) -> str:
    """One that was never given, as long as there are such: whoever takes another's place has
    another address, as on EC2.
    """
    taken = {eni.private_ip_address for eni in backend.enis.values() if eni.subnet is subnet}
    given = vars(subnet).setdefault("addresses_given", set())
    for avoided in (taken | given, taken):
        for number, host in enumerate(subnet.cidr.hosts(), 1):
            if number >= RESERVED_ADDRESSES and str(host) not in avoided:
                given.add(str(host))
                return str(host)
    return refuse(
        "InsufficientFreeAddressesInSubnet",
        f"The specified subnet '{subnet.id}' does not have enough free addresses.",
    )


def _address_of_instance(self: Any, instance: Any) -> str:
    """moto gives what was just returned to whoever asks next."""
    address = _free_address(self.ec2_backend, self)
    self._subnet_ips[address] = instance
    return address


def _whole_attachment(_: Any) -> Callable[..., None]:
    """moto knows only card 0 and only interfaces of instances."""

    def __init__(self: Any, eni: Any) -> None:  # noqa: N807 - it becomes Attachment's
        self.attach_time = eni.attach_time
        self.attachment_id = eni.attachment_id
        self.delete_on_termination = eni.delete_on_termination
        self.device_index = eni.device_index
        self.network_card_index = eni.network_card_index
        self.instance_id = eni.instance.id if eni.instance else None
        self.instance_owner_id = ACCOUNT if eni.instance else "amazon-aws"
        self.status = "attached"

    return __init__


def _untangle_tags(create: Callable[..., Any]) -> Callable[..., Any]:
    """moto files a template's own tags inside its data, a diff for ever, and never updates them."""

    def create_launch_template(
        self: Any, name: str, description: str, template_data: dict[str, Any], tag_spec: Any
    ) -> Any:
        template_data["TagSpecifications"] = [
            spec
            for spec in template_data.get("TagSpecifications") or []
            if spec["ResourceType"] != "launch-template"
        ]
        return create(self, name, description, template_data, tag_spec)

    return create_launch_template


def _whole_version(create: Callable[..., Any]) -> Callable[..., Any]:
    """A later version's user data must be what moto's own serializer expects."""

    def create_version(self: Any, data: dict[str, Any], description: str) -> Any:
        data.setdefault("TagSpecifications", [])
        data["UserData"] = encoded(data.get("UserData"))
        return create(self, data, description)

    return create_version


def _skip_conditional_denials(decide: Callable[..., Any]) -> Callable[..., Any]:
    """moto ignores conditions, so a bucket that denies all but TLS would deny everything."""

    def get_permission(self: Any, action: str, resource: str) -> Any:
        whole = self.policy
        if whole:
            document = json.loads(whole)
            kept = [
                s
                for s in document["Statement"]
                if not (s.get("Effect") == "Deny" and s.get("Condition"))
            ]
            self.policy = json.dumps({**document, "Statement": kept}).encode() if kept else None
        try:
            return decide(self, action, resource)
        finally:
            self.policy = whole

    return get_permission


def _identity(_self: Any, _access_key: str, _region: str) -> tuple[str, str, str]:
    """moto's default is a user that nobody is."""
    session = WORLD.identity.rsplit("/", 1)[-1]
    return f"AROAEXAMPLEEXAMPLE000:{session}", WORLD.identity, ACCOUNT


@cache
def _policy_data() -> dict[str, Any]:
    found = json.loads(aws_managed_policies_data)
    return {name: found[name] for name in MANAGED_POLICIES}


def _few_policies(self: Any) -> list[AWSManagedPolicy]:
    """moto knows none or makes all 1,582 of them, a quarter of a second at every reset."""
    return [
        AWSManagedPolicy.from_data(name, self.account_id, self.region_name, data)
        for name, data in _policy_data().items()
    ]


def _all_tagged(self: Any) -> Iterator[TaggedResource]:
    """moto's tagging API leaves out half of the kinds."""
    for kind, thing_id in existing(self):
        yield TaggedResource(
            arn=f"arn:aws:ec2:{self.region_name}:{self.account_id}:{kind}/{thing_id}",
            tags=dict(self.tags.get(thing_id, {})),
            resource_type=f"ec2:{kind}",
        )
