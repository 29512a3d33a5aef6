"""Reserved capacity: on-demand capacity reservations and Capacity Blocks."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from moto.core.responses import ActionResult

from tests.double import catalog
from tests.double.describe import Describing, alive
from tests.double.errors import refuse
from tests.double.world import ACCOUNT, WORLD, Reservation

if TYPE_CHECKING:
    from collections.abc import Mapping


class Reserving(Describing):
    def create_capacity_reservation(self) -> ActionResult:
        read = self._get_param
        self.error_on_dryrun()
        instance_type, zone = read("InstanceType"), read("AvailabilityZone")
        if zone not in catalog.zones_offering(instance_type, self.region):
            refuse(
                "Unsupported",
                f"Your requested instance type ({instance_type}) is not supported in your "
                f"requested Availability Zone ({zone}).",
            )
        made = Reservation(
            id=WORLD.new_id("cr"),
            region=self.region,
            instance_type=instance_type,
            zone=zone,
            count=int(read("InstanceCount")),
            block=False,
            state="active",
            created=datetime.now(UTC),
            start=datetime.now(UTC),
            end=read("EndDate"),
            match=read("InstanceMatchCriteria") or "open",
            ebs_optimized=bool(read("EbsOptimized")),
            group_arn=read("PlacementGroupArn"),
        )
        self._keep(made)
        return ActionResult({"CapacityReservation": self._show(made)})

    def describe_capacity_reservations(self) -> ActionResult:
        ids = self._get_param("CapacityReservationIds", [])
        for wanted in ids:
            find_reservation(self.region, wanted)
        found = [
            self._show(reservation)
            for reservation in WORLD.reservations_in(self.region)
            if not ids or reservation.id in ids
        ]
        return ActionResult({"CapacityReservations": found})

    def cancel_capacity_reservation(self) -> ActionResult:
        self.error_on_dryrun()
        reservation = find_reservation(self.region, self._get_param("CapacityReservationId"))
        if reservation.block:
            refuse("OperationNotPermitted", "A Capacity Block cannot be cancelled.")
        reservation.state = "cancelled"
        return ActionResult({"Return": True})

    def describe_capacity_block_offerings(self) -> ActionResult:
        """Those told that fit; never an invented one."""
        read = self._get_param
        found = [
            {
                "CapacityBlockOfferingId": offering.id,
                "InstanceType": offering.instance_type,
                "AvailabilityZone": offering.zone,
                "InstanceCount": offering.count,
                "CapacityBlockDurationHours": offering.hours,
                "StartDate": offering.start,
                "EndDate": offering.end,
                "UpfrontFee": f"{offering.upfront_usd:.2f}",
                "CurrencyCode": "USD",
                "Tenancy": "default",
            }
            for offering in WORLD.offerings.values()
            if offering.zone.startswith(self.region)
            and offering.instance_type == read("InstanceType")
            and offering.count == int(read("InstanceCount") or 1)
            and offering.hours == int(read("CapacityDurationHours"))
        ]
        return ActionResult(self._page("CapacityBlockOfferings", found))

    def purchase_capacity_block(self) -> ActionResult:
        self.error_on_dryrun()
        offering = WORLD.offerings.pop(self._get_param("CapacityBlockOfferingId"), None)
        if offering is None:
            refuse(
                "InvalidCapacityBlockOfferingId.NotFound",
                "The Capacity Block offering does not exist or is no longer available.",
            )
        now = datetime.now(UTC)
        bought = Reservation(
            id=WORLD.new_id("cr"),
            region=self.region,
            instance_type=offering.instance_type,
            zone=offering.zone,
            count=offering.count,
            block=True,
            state="active" if offering.start <= now else "scheduled",
            created=now,
            start=offering.start,
            end=offering.end,
            block_id=WORLD.new_id("cb"),
        )
        self._keep(bought)
        return ActionResult({"CapacityReservation": self._show(bought), "CapacityBlocks": []})

    def describe_capacity_blocks(self) -> ActionResult:
        ids = self._get_param("CapacityBlockIds", [])
        found = [
            {
                "CapacityBlockId": block.block_id,
                "AvailabilityZone": block.zone,
                "CapacityReservationIds": [block.id],
                "StartDate": block.start,
                "EndDate": block.end,
                "CreateDate": block.created,
                "State": state_of(block),
                "Tags": self._tags_of(block),
            }
            for block in WORLD.reservations_in(self.region)
            if block.block and (not ids or block.block_id in ids)
        ]
        return ActionResult({"CapacityBlocks": found})

    def _keep(self, reservation: Reservation) -> None:
        WORLD.reservations[reservation.id] = reservation
        tags = self._parse_tag_specification().get("capacity-reservation", {})
        self.ec2_backend.tags[reservation.id].update(tags)

    def _tags_of(self, reservation: Reservation) -> list[dict[str, str]]:
        tags: Mapping[str, str] = self.ec2_backend.tags.get(reservation.id, {})
        return [{"Key": key, "Value": value} for key, value in tags.items()]

    def _show(self, reservation: Reservation) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "CapacityReservationId": reservation.id,
            "CapacityReservationArn": (
                f"arn:aws:ec2:{reservation.region}:{ACCOUNT}:capacity-reservation/{reservation.id}"
            ),
            "OwnerId": ACCOUNT,
            "InstanceType": reservation.instance_type,
            "InstancePlatform": "Linux/UNIX",
            "AvailabilityZone": reservation.zone,
            "Tenancy": "default",
            "TotalInstanceCount": reservation.count,
            "AvailableInstanceCount": available_in(self.ec2_backend, reservation),
            "EbsOptimized": reservation.ebs_optimized,
            "EphemeralStorage": False,
            "State": state_of(reservation),
            "StartDate": reservation.start,
            "EndDate": reservation.end,
            "EndDateType": "limited" if reservation.end else "unlimited",
            "InstanceMatchCriteria": reservation.match,
            "CreateDate": reservation.created,
            "PlacementGroupArn": reservation.group_arn,
            "ReservationType": "capacity-block" if reservation.block else "default",
            "CapacityBlockId": reservation.block_id,
            "Tags": self._tags_of(reservation),
        }
        return {key: value for key, value in shown.items() if value is not None}


def state_of(reservation: Reservation) -> str:
    """What was told, but an end that has passed is the end."""
    over = reservation.end is not None and reservation.end <= datetime.now(UTC)
    return "expired" if over and reservation.state == "active" else reservation.state


def used_in(backend: Any, reservation: Reservation) -> int:
    return sum(
        1 for i in alive(backend) if getattr(i, "capacity_reservation_id", None) == reservation.id
    )


def available_in(backend: Any, reservation: Reservation) -> int:
    """An inactive reservation has none to give."""
    if state_of(reservation) != "active":
        return 0
    return reservation.count - used_in(backend, reservation)


def find_reservation(region: str, reservation_id: str) -> Reservation:
    found = WORLD.reservations.get(reservation_id)
    if found is None or found.region != region:
        refuse(
            "InvalidCapacityReservationId.NotFound",
            f"The capacity reservation ID '{reservation_id}' does not exist",
        )
    return found


def block_end(start: datetime, hours: int) -> datetime:
    return start + timedelta(hours=hours)
