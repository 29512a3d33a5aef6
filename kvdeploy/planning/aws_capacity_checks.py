"""Checks of what EC2 has and lends: types, quotas, reservations, placement groups. Pure."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from kvdeploy.model.awsfacts import BLOCK_ENDS_EARLY
from kvdeploy.model.prices import PLACEMENT_GROUPS_MAX, quota_class, spot_key
from kvdeploy.planning.aws_case import clock, counted, listing
from kvdeploy.planning.aws_spec_checks import RESERVED
from kvdeploy.planning.findings import error, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdeploy.model.awsfacts import Reservation
    from kvdeploy.model.reports import Finding
    from kvdeploy.planning.aws_case import AwsCheck, Judged

ENDS_SOON: Final = timedelta(hours=24)
"""A Capacity Block that ends within this time is worth a word."""
OWN_GROUP: Final = "kvdeploy-"
"""Beginning of the names of placement groups that kvdeploy makes."""


def type_not_in_zone(case: Judged) -> Iterator[Finding]:
    """Not every zone has every type, and no error of EC2 says which ones do."""
    for name, path in (
        (case.aws.instance_type, "aws.instance_type"),
        (case.aws.router_instance_type, "aws.router_instance_type"),
    ):
        offered = (case.facts.zones or {}).get(name)
        if offered is None or case.aws.zone in offered:
            continue
        if offered:
            hint = f"Zones that offer it: {listing(sorted(offered))}."
            yield error("aws.zone", f"{case.aws.zone} does not offer {name}", hint)
        else:
            yield error(
                path,
                f"no zone of {case.aws.region} offers {name}",
                "Choose another type or another region.",
            )


def quota_too_small(case: Judged) -> Iterator[Finding]:
    """EC2 refuses the instance that goes over the quota, after it has started the others."""
    for code, needed in case.quota_needs().items():
        quota = case.facts.quotas.get(code)
        if quota is None or quota.used + needed <= quota.limit:
            continue
        nodes = [n for n in case.nodes if _counts(code, n.instance_type)]
        only_router = all(node.role == "router" for node in nodes)
        yield error(
            "aws.router_instance_type" if only_router else "aws.capacity",
            f"{counted(nodes)} need {needed} vCPUs of the quota '{quota.name}' ({code}), which is "
            f"{quota.limit:g} with {quota.used} in use",
            "Ask for more, which takes hours to days: aws service-quotas "
            f"request-service-quota-increase --service-code ec2 --quota-code {code} "
            f"--desired-value {quota.used + needed} --region {case.aws.region}",
        )


def spot_price_too_low(case: Judged) -> Iterator[Finding]:
    """EC2 starts no spot instance below the price of the day."""
    most, now = (
        case.aws.capacity.spot_max_usd,
        case.facts.prices.get(spot_key(case.aws.instance_type)),
    )
    if most is not None and now is not None and most < now.usd_hour:
        yield error(
            "aws.capacity.spot_max_usd",
            f"${most:g} an hour is less than the {now.source}, ${now.usd_hour:g}",
            f"Set it to {now.usd_hour:g} or more, or leave it out: then the on-demand price is "
            "the most.",
        )


def reservation_not_found(case: Judged) -> Iterator[Finding]:
    """Without the one reservation that is meant nothing can start."""
    found, wanted = case.facts.reservations, case.aws.capacity
    if found is None or wanted.kind not in RESERVED or len(found) == 1:
        return
    see = "See 'aws ec2 describe-capacity-reservations'."
    if wanted.reservation_id:
        yield error(
            "aws.capacity.reservation_id",
            f"{wanted.reservation_id} is not in {case.aws.region}",
            see,
        )
    elif not found:
        yield error(
            "aws.capacity.reservation_tags",
            f"no active reservation in {case.aws.region} has these tags",
            see,
        )
    else:
        ids = listing(sorted(r.id for r in found))
        yield error(
            "aws.capacity.reservation_tags",
            f"{len(found)} active reservations have these tags: {ids}",
            "Name one in reservation_id instead, or add a tag that only one has.",
        )


def reservation_does_not_fit(case: Judged) -> Iterator[Finding]:
    """A reservation is for one type in one zone, and for so many instances."""
    found = case.reservation
    if found is None:
        return
    path, kind = "aws.capacity.reservation_id", case.aws.capacity.kind
    if found.kind != kind:
        yield error(
            "aws.capacity.kind",
            f"{kind}, and {found.id} is of kind {found.kind}",
            f"Set it to {found.kind}.",
        )
    if found.instance_type != case.aws.instance_type:
        yield error(
            "aws.instance_type",
            f"{case.aws.instance_type}, and {found.id} is for {found.instance_type}",
            f"Set it to {found.instance_type}, or name another reservation.",
        )
    if found.zone != case.aws.zone:
        yield error(
            "aws.zone",
            f"{case.aws.zone}, and {found.id} is in {found.zone}",
            f"Set it to {found.zone}, or name another reservation.",
        )
    needed, free = len(case.engines), found.available + found.held
    if _is_open(found) and free < needed:
        yield error(
            path,
            f"{found.id} has room for {free} of its {found.total} instances, and the cluster "
            f"needs {needed}",
            f"Ask for at most {free} nodes, end what runs in it, or name another reservation.",
        )


def reservation_not_active(case: Judged) -> Iterator[Finding]:
    """Only an active reservation lets instances in; a Capacity Block ends with all of them."""
    found, path, now = case.reservation, "aws.capacity.reservation_id", case.facts.now
    if found is None:
        return
    if found.start and found.start > now:
        yield error(
            path,
            f"{found.id} begins at {clock(found.start)}",
            "Run this again then.",
        )
    elif not _is_open(found):
        yield error(path, f"{found.id} is {found.state}", "Name one that is active.")
    elif found.kind == "capacity-block" and found.end:
        stops = found.end - BLOCK_ENDS_EARLY
        told = f"{found.id} ends at {clock(found.end)}, and EC2 begins to end its instances at "
        if stops <= now:
            yield error(path, f"{told}{clock(stops)}: that is now", "Name another Capacity Block.")
        elif stops - now < ENDS_SOON:
            hours = (stops - now) / timedelta(hours=1)
            yield warning(
                path,
                f"{told}{clock(stops)}: in {hours:.1f} hours",
                "Take the cluster down before, or extend the Capacity Block.",
            )


def reservation_in_group(case: Judged) -> Iterator[Finding]:
    """A reservation made in a placement group serves that group alone, and no other serves one."""
    found, group = case.reservation, case.aws.capacity.placement_group
    if found is None or found.kind != "odcr":
        return
    path, own = "aws.capacity.placement_group", found.placement_group
    if own and group != own:
        yield error(
            path,
            f"{found.id} was made in the placement group {own}",
            f"Set it to {own}.",
        )
    elif not own and group not in {None, "none"}:
        yield error(
            path,
            f"{found.id} was not made in a placement group, and {group} would not get its capacity",
            "Leave it out, or make the reservation in the group.",
        )


def placement_group_unusable(case: Judged) -> Iterator[Finding]:
    """Nodes far from each other have another fabric between them."""
    groups, name = case.facts.placement_groups, case.aws.capacity.placement_group
    if groups is None or name in {None, "none", "create"}:
        return
    path, group = "aws.capacity.placement_group", groups.get(str(name))
    if group is None:
        yield error(
            path,
            f"{name} is not in {case.aws.region}",
            "Leave it out, and kvdeploy makes one.",
        )
    elif group.strategy != "cluster" or group.state != "available":
        yield error(
            path,
            f"{name} is of strategy {group.strategy} and {group.state}; it must be of strategy "
            "cluster and available",
            "Leave it out, and kvdeploy makes one.",
        )


def placement_groups_used_up(case: Judged) -> Iterator[Finding]:
    """A region has a limit of them."""
    groups, wanted = case.facts.placement_groups, case.aws.capacity
    makes_one = wanted.placement_group == "create" or (
        wanted.placement_group is None and wanted.kind not in RESERVED
    )
    if groups is None or not makes_one or f"{OWN_GROUP}{case.spec.name}" in groups:
        return
    if len(groups) >= PLACEMENT_GROUPS_MAX:
        yield error(
            "aws.capacity.placement_group",
            f"{case.aws.region} has {len(groups)} placement groups, and {PLACEMENT_GROUPS_MAX} "
            "are allowed",
            "Delete some, or name an existing cluster group here.",
        )


def _is_open(found: Reservation) -> bool:
    return found.state == "active"


def _counts(code: str, instance_type: str) -> bool:
    known = quota_class(instance_type)
    return known is not None and code in {known.on_demand, known.spot}


CAPACITY_CHECKS: Final[tuple[AwsCheck, ...]] = (
    type_not_in_zone,
    quota_too_small,
    spot_price_too_low,
    reservation_not_found,
    reservation_does_not_fit,
    reservation_not_active,
    reservation_in_group,
    placement_group_unusable,
    placement_groups_used_up,
)
