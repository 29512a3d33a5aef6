"""What an image is made from and where its builder is to stand: asked of AWS before anything is
made. Changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvdeploy.adapters.aws import capacity, images, imaging, leftovers, network
from kvdeploy.errors import CheckError
from kvdeploy.model.catalog import IMAGE_PARAMETERS, SUPPORTED_OS
from kvdeploy.planning.aws_spec_checks import RESERVED
from kvdeploy.stages.aws_preflight import aws_section

if TYPE_CHECKING:
    from kvdeploy.adapters.aws.session import Aws
    from kvdeploy.model.awsfacts import Image
    from kvdeploy.model.awsspec import AwsSpec
    from kvdeploy.model.image import NodeImage, Recipe
    from kvdeploy.model.infra import ClusterIdentity, Leftover
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.polling import Clock
    from kvdeploy.stages.base import Step

SUBNET: Final = "module.network.aws_subnet.fabric"
GROUP: Final = "module.network.aws_security_group.fabric"
"""Addresses in infra/ of what the nodes are in."""


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the command line says beside the cluster file."""

    instance_type: str | None = None
    base: str | None = None
    subnet: str | None = None
    security_group: str | None = None
    instance_profile: str | None = None


@dataclass(frozen=True, kw_only=True)
class Ground:
    """Where a builder can stand."""

    subnet: str
    security_group: str
    profile: str | None
    reservation: str | None = None
    market: str | None = None


def find_base(aws: Aws, spec: ClusterSpec, wishes: Wishes) -> Image:
    """The image to begin with. An image of ours in aws.ami is not built upon: what it was made
    from is.

    Raises:
        CheckError: there is none, or it will not do.
    """
    section = aws_section(spec)
    name = wishes.base or section.ami or IMAGE_PARAMETERS["node"]
    what = "--base" if wishes.base else "aws.ami" if section.ami else "SSM parameter"
    told = f"{what} {name}"
    if not wishes.base and section.ami and (ours := imaging.made_from(aws, name)) is not None:
        told = f"{told} was made by kvdeploy from {ours.base}, and that one"
        name = ours.base
    hint = "Name an image to begin with: --base ami-..."
    if (found := images.image(aws, name)) is None:
        msg = f"{told} does not exist in {aws.region}"
        raise CheckError(msg, hint=hint)
    wrong = (
        f"is {found.state}"
        if found.state != "available"
        else f"is for {found.architecture}"
        if found.architecture != "x86_64"
        else f"is of {found.os or 'a system that its name does not tell'}"
        if found.os not in SUPPORTED_OS
        else ""
    )
    if wrong:
        msg = f"{told} {wrong} ({found.name})"
        raise CheckError(msg, hint=f"{hint}, of {' or '.join(SUPPORTED_OS)} for x86_64.")
    return found


def find_ready(
    aws: Aws, recipe: Recipe, base: Image, step: Step, *, clock: Clock
) -> NodeImage | None:
    """The image of this recipe and base when there is one; one that a killed run asked for is
    waited for. Raises AwsError.
    """
    for image in imaging.find(aws, recipe=recipe.digest, base=base.id):
        if image.state == "available":
            return image
        if image.state == "pending":
            step.note(f"   = {image.id}: an earlier run asked for it")
            return imaging.wait_available(aws, image.id, clock=clock, on_detail=step.update)
    return None


def find_ground(
    aws: Aws,
    spec: ClusterSpec,
    identity: ClusterIdentity | None,
    wishes: Wishes,
    *,
    instance_type: str,
) -> Ground:
    """Network, role and reservation: of the options, the cluster file, or the cluster that is up.

    Raises:
        CheckError: something is missing; everything that is, at once.
    """
    section = aws_section(spec)
    up = leftovers.find(aws, spec.name, identity.id) if identity else ()
    subnet = wishes.subnet or section.network.subnet_id or _at(up, SUBNET)
    group = wishes.security_group or section.network.security_group_id or _at(up, GROUP)
    by_kind = {one.kind: one.id for one in up}
    profile = wishes.instance_profile or by_kind.get("iam_instance_profile")
    missing = list(_network_problems(aws, subnet, group))
    if profile is None and section.access.method == "ssm":
        missing.append(
            "no instance profile for the builder, and Session Manager needs one "
            "(--instance-profile)"
        )
    reservation, problem = _reservation(aws, section, instance_type)
    missing += [problem] if problem else []
    if missing or subnet is None or group is None:
        raise CheckError(
            "\n".join(missing),
            hint="Bring the cluster up first (it lends its network), or name what is missing.",
        )
    block = reservation is not None and section.capacity.kind == "capacity-block"
    return Ground(
        subnet=subnet,
        security_group=group,
        profile=profile,
        reservation=reservation,
        market="capacity-block" if block else None,
    )


def _network_problems(aws: Aws, subnet: str | None, group: str | None) -> list[str]:
    wrong = []
    if subnet is None:
        wrong.append("no subnet for the builder (--subnet, or aws.network.subnet_id)")
    if group is None:
        wrong.append(
            "no security group for the builder (--security-group, or aws.network.security_group_id)"
        )
    place = network.subnet(aws, subnet) if subnet else None
    ring = network.security_group(aws, group) if group else None
    if subnet and place is None:
        wrong.append(f"the subnet {subnet} does not exist in {aws.region}")
    if group and ring is None:
        wrong.append(f"the security group {group} does not exist in {aws.region}")
    if place and ring and place.vpc_id != ring.vpc_id:
        wrong.append(f"{subnet} is in {place.vpc_id}, and {group} in {ring.vpc_id}")
    return wrong


def _reservation(aws: Aws, section: AwsSpec, instance_type: str) -> tuple[str | None, str]:
    """Its id, and what is wrong. A builder of another type has nothing to do with it."""
    wanted = section.capacity
    if wanted.kind not in RESERVED or instance_type != section.instance_type:
        return None, ""
    found = capacity.reservations_of(
        aws,
        reservation_id=wanted.reservation_id,
        tags=wanted.reservation_tags,
        held=frozenset(),
    )
    if len(found) != 1:
        return None, f"aws.capacity means {len(found) or 'no'} reservations, and must mean one"
    if found[0].available < 1:
        return None, f"the reservation {found[0].id} has no room for a builder beside the nodes"
    return found[0].id, ""


def _at(up: tuple[Leftover, ...], address: str) -> str | None:
    return next((one.id for one in up if one.address.partition("/")[0] == address), None)
