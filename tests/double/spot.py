"""Spot: its prices and its requests."""

from __future__ import annotations

from typing import Any

from moto.core.responses import ActionResult

from tests.double.describe import Describing
from tests.double.errors import refuse
from tests.double.world import WORLD


class Spotting(Describing):
    def describe_spot_price_history(self) -> ActionResult:
        """The prices told, one entry a type and zone; moto would invent them."""
        types = self._get_param("InstanceTypes", [])
        zone = self._get_param("AvailabilityZone")
        found = []
        for name, usd in WORLD.spot_prices.items():
            instance_type, where = name.split("/")
            if where.startswith(self.region) and (not types or instance_type in types):
                found.append(
                    {
                        "AvailabilityZone": where,
                        "InstanceType": instance_type,
                        "ProductDescription": "Linux/UNIX",
                        "SpotPrice": f"{usd:.6f}",
                        "Timestamp": WORLD.started,
                    }
                )
        found = [entry for entry in found if not zone or entry["AvailabilityZone"] == zone]
        return ActionResult({"SpotPriceHistory": found})

    def describe_spot_instance_requests(self) -> ActionResult:
        """One request for each instance that was launched as spot."""
        ids = self._get_param("SpotInstanceRequestIds", [])
        return ActionResult({"SpotInstanceRequests": [show_request(i) for i in self._spots(ids)]})

    def cancel_spot_instance_requests(self) -> ActionResult:
        """The instances go on."""
        self.error_on_dryrun()
        cancelled = self._spots(self._get_param("SpotInstanceRequestIds", []))
        for instance in cancelled:
            instance.spot_cancelled = True
        answer = [
            {"SpotInstanceRequestId": i.spot_instance_request_id, "State": "cancelled"}
            for i in cancelled
        ]
        return ActionResult({"CancelledSpotInstanceRequests": answer})

    def _spots(self, ids: list[str]) -> list[Any]:
        """The instances of these requests, of all where there are no ids."""
        spots = {
            instance.spot_instance_request_id: instance
            for instance in self.ec2_backend.all_instances()
            if instance.lifecycle == "spot"
        }
        for wanted in ids:
            if wanted not in spots:
                refuse(
                    "InvalidSpotInstanceRequestID.NotFound",
                    f"The spot instance request ID '{wanted}' does not exist",
                )
        return [spots[wanted] for wanted in ids or spots]


def show_request(instance: Any) -> dict[str, Any]:
    options, cancelled = instance.spot_options, instance.spot_cancelled
    ended = instance.state == "terminated"
    code = "request-canceled-and-instance-running" if cancelled else "fulfilled"
    return {
        "SpotInstanceRequestId": instance.spot_instance_request_id,
        "InstanceId": instance.id,
        "State": "cancelled" if cancelled else "closed" if ended else "active",
        "Status": {
            "Code": "instance-terminated-by-user" if ended else code,
            "Message": "Your Spot request is fulfilled.",
            "UpdateTime": instance.launch_time,
        },
        "Type": options.get("SpotInstanceType") or "one-time",
        "InstanceInterruptionBehavior": (
            options.get("InstanceInterruptionBehavior") or "terminate"
        ),
        "SpotPrice": options.get("MaxPrice"),
        "ProductDescription": "Linux/UNIX",
        "LaunchedAvailabilityZone": instance.availability_zone,
        "LaunchSpecification": {
            "ImageId": instance.image_id,
            "InstanceType": instance.instance_type,
        },
        "CreateTime": instance.launch_time,
    }
