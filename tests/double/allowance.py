"""How many of the ordered instances may start: addresses, reservations, quotas, capacity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.double import catalog
from tests.double.describe import alive
from tests.double.errors import refuse
from tests.double.placement import group_arn
from tests.double.reservations import available_in, state_of
from tests.double.world import WORLD, Reservation

if TYPE_CHECKING:
    from tests.double.launch import Order


class Allowance:
    """How many of the ordered instances may start."""

    def __init__(self, backend: Any, region: str, order: Order) -> None:
        self._backend = backend
        self._region = region
        self._order = order

    def settle(self, least: int, most: int) -> int:
        """Between `least` and `most`; RefusalError where not even `least` may."""
        count = min(most, self._by_addresses(least))
        if self._order.reservation is not None:
            return min(count, self._by_reservation(self._order.reservation, least))
        count = min(count, self._by_quota(least, count))
        return min(count, self._by_capacity(least, count))

    def _by_addresses(self, least: int) -> int:
        allowed = 1_000_000
        for subnet_id in {nic.subnet_id for nic in self._order.nics}:
            each = sum(
                1 for n in self._order.nics if n.subnet_id == subnet_id and n.kind != "efa-only"
            )
            free = self._backend.get_subnet(subnet_id).available_ip_address_count
            if each * least > free:
                refuse(
                    "InsufficientFreeAddressesInSubnet",
                    f"There are not enough free addresses in subnet '{subnet_id}' to satisfy the "
                    "requested number of instances.",
                )
            if each:
                allowed = min(allowed, free // each)
        return allowed

    def _by_reservation(self, reservation: Reservation, least: int) -> int:
        available = available_in(self._backend, reservation)
        if not fits(reservation, self._order) or available < least:
            refuse(
                "ReservationCapacityExceeded",
                "The requested reservation does not have sufficient compatible and available "
                "capacity for this request.",
            )
        return available

    def _by_quota(self, least: int, most: int) -> int:
        facts, spot = self._order.facts, self._order.market == "spot"
        codes = catalog.SPOT_CODES if spot else catalog.ON_DEMAND_CODES
        limit = WORLD.quota(codes[facts.bucket]) if facts.bucket else None
        if limit is None:
            return most
        allowed = int((limit - self._vcpus_in_use(facts.bucket, spot=spot)) // facts.vcpus)
        if allowed < least and spot:
            refuse("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
        if allowed < least:
            refuse(
                "VcpuLimitExceeded",
                "You have requested more vCPU capacity than your current vCPU limit of "
                f"{limit:.0f} allows for the instance bucket that the specified instance type "
                "belongs to. Please visit http://aws.amazon.com/contact-us/ec2-request to request "
                "an adjustment to this limit.",
            )
        return allowed

    def _vcpus_in_use(self, bucket: str | None, *, spot: bool) -> int:
        """Instances of the bucket, and on-demand reservations whether used or not."""
        names = [
            i.instance_type
            for i in alive(self._backend)
            if i.capacity_reservation_id is None and i.lifecycle == ("spot" if spot else None)
        ]
        if not spot:
            for r in WORLD.reservations_in(self._region):
                if not r.block and state_of(r) == "active":
                    names += [r.instance_type] * r.count
        found = [facts for facts in map(catalog.find_type, names) if facts is not None]
        return sum(facts.vcpus for facts in found if facts.bucket == bucket)

    def _by_capacity(self, least: int, most: int) -> int:
        free = self._free_in(self._order.zone)
        if free is None:
            return most
        if free < least:
            name, zone = self._order.facts.name, self._order.zone
            others = [
                other
                for other in catalog.zones_offering(name, self._region)
                if other != zone and (self._free_in(other) or 0) > 0
            ]
            refuse("InsufficientInstanceCapacity", no_capacity(name, zone, others), status=500)
        return free

    def _free_in(self, zone: str) -> int | None:
        """None: nothing was told of this zone, and there is no end."""
        name = self._order.facts.name
        limit = WORLD.capacity.get(f"{name}/{zone}")
        if limit is None:
            return None
        return limit - sum(
            1
            for i in alive(self._backend)
            if (i.instance_type, i.placement.zone) == (name, zone)
            and i.capacity_reservation_id is None
        )


def no_capacity(instance_type: str, zone: str, others: list[str]) -> str:
    """EC2's words; it names other zones only where it knows some."""
    text = (
        f"We currently do not have sufficient {instance_type} capacity in the Availability Zone "
        f"you requested ({zone}). Our system will be working on provisioning additional capacity."
    )
    if others:
        text += (
            f" You can currently get {instance_type} capacity by not specifying an Availability "
            f"Zone in your request or choosing {', '.join(others)}."
        )
    return text


def fits(reservation: Reservation, order: Order) -> bool:
    """Same type and zone, and the same placement group where the reservation has one."""
    in_group = True
    if reservation.group_arn is not None:
        group = WORLD.groups.get((reservation.region, order.group_name or ""))
        in_group = group is not None and group_arn(group) == reservation.group_arn
    return (
        reservation.instance_type == order.facts.name
        and reservation.zone == order.zone
        and in_group
    )
