"""What ``/_double`` can do: a POST of {"do": NAME, "with": {...}}, or a GET for the whole world."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from moto.ec2.models import ec2_backends
from moto.iam.models import iam_backends
from moto.moto_api._internal.models import moto_api_backend
from moto.s3.models import s3_backends

from tests.double import images
from tests.double.describe import existing
from tests.double.errors import DEFECT, NOT_IMPLEMENTED, Answer
from tests.double.imaging import fail
from tests.double.lifecycle import terminate as end_instance
from tests.double.network import release
from tests.double.placement import find_group, group_arn
from tests.double.reservations import available_in, block_end, state_of
from tests.double.world import ACCOUNT, WORLD, BlockOffering, Fault, Reservation

if TYPE_CHECKING:
    from collections.abc import Callable

PLAIN_KNOBS = frozenset(
    {
        "boot_s",
        "shutdown_s",
        "nat_s",
        "image_s",
        "credentials_expired",
        "identity",
        "placement_group_limit",
        "capacity",
        "latency",
        "prices",
        "spot_prices",
    }
)


class Control:
    """Every method is a command; its arguments are the command's."""

    def __init__(self, region: str) -> None:
        self._region = region

    @property
    def _ec2(self) -> Any:
        return ec2_backends[ACCOUNT][self._region]

    def world(self) -> dict[str, Any]:
        WORLD.settle()
        return {
            "calls": [dataclasses.asdict(call) for call in WORLD.calls],
            "counts": WORLD.counts(),
            "refused": WORLD.refused(NOT_IMPLEMENTED),
            "defects": WORLD.refused(DEFECT),
            "instances": [self._show_instance(i) for i in self._ec2.all_instances()],
            "resources": self._resources(),
            "reservations": [
                {
                    "id": r.id,
                    "state": state_of(r),
                    "count": r.count,
                    "available": available_in(self._ec2, r),
                }
                for r in WORLD.reservations_in(self._region)
            ],
            "faults": [dataclasses.asdict(fault) for fault in WORLD.faults],
            "knobs": {name: getattr(WORLD, name) for name in sorted(PLAIN_KNOBS)},
        }

    def reset(self) -> None:
        WORLD.reset()
        moto_api_backend.reset()
        images.seed(self._region)

    def forget_calls(self) -> None:
        WORLD.calls.clear()

    def tell(self, **knobs: Any) -> None:
        unknown = set(knobs) - PLAIN_KNOBS
        if unknown:
            msg = f"no such knob: {', '.join(sorted(unknown))}; there are {sorted(PLAIN_KNOBS)}"
            raise ValueError(msg)
        for name, value in knobs.items():
            there = getattr(WORLD, name)
            if isinstance(there, dict):
                there.update(value)
            else:
                setattr(WORLD, name, value)

    def unlimited(self, name: str) -> None:
        WORLD.capacity.pop(name, None)

    def fault(self, **fields: Any) -> None:
        WORLD.faults.append(Fault(**fields))

    def clear_faults(self) -> None:
        WORLD.faults.clear()

    def quota(self, code: str, value: float | None, service: str) -> None:
        if value is None:
            WORLD.quotas.pop((service, code), None)
        else:
            WORLD.quotas[service, code] = value

    def reservation(
        self,
        *,
        instance_type: str,
        zone: str,
        count: int,
        kind: str,
        state: str,
        start: str | None,
        end: str | None,
        tags: dict[str, str],
        placement_group: str | None,
        match: str,
    ) -> str:
        if kind not in {"odcr", "capacity-block"}:
            msg = f"no such kind of reservation: {kind}"
            raise ValueError(msg)
        block, now = kind == "capacity-block", datetime.now(UTC)
        begins = _moment(start) or (now + timedelta(hours=1) if state == "scheduled" else now)
        made = Reservation(
            id=WORLD.new_id("cr"),
            region=self._region,
            instance_type=instance_type,
            zone=zone,
            count=count,
            block=block,
            state=state,
            created=now,
            start=begins,
            end=_moment(end) or (block_end(begins, 24) if block else None),
            match=match,
            group_arn=(
                group_arn(find_group(self._region, placement_group)) if placement_group else None
            ),
            block_id=WORLD.new_id("cb") if block else None,
        )
        WORLD.reservations[made.id] = made
        self._ec2.tags[made.id].update(tags)
        return made.id

    def set_reservation(
        self, reservation_id: str, state: str | None, count: int | None, end: str | None
    ) -> None:
        found = WORLD.reservations[reservation_id]
        found.state = state or found.state
        found.count = found.count if count is None else count
        found.end = _moment(end) or found.end

    def block_offering(
        self,
        *,
        instance_type: str,
        zone: str,
        count: int,
        hours: int,
        upfront_usd: float,
        start: str | None,
    ) -> str:
        begins = _moment(start) or datetime.now(UTC)
        made = BlockOffering(
            WORLD.new_id("cbo"),
            instance_type,
            zone,
            count,
            hours,
            begins,
            block_end(begins, hours),
            upfront_usd,
        )
        WORLD.offerings[made.id] = made
        return made.id

    def add_parameter(self, name: str, ami_name: str, owner_id: str) -> str:
        alias = "amazon" if owner_id == images.AMAZON else None
        return images.add_image(self._region, images.Image(name, ami_name, owner_id, alias))

    def fail_image(self, image_id: str, message: str) -> None:
        fail(self._ec2.amis[image_id], message)

    def remove_image(self, image_id: str) -> None:
        del self._ec2.amis[image_id]

    def existing_network(
        self, *, zone: str, cidr: str, free_addresses: int | None, internet: bool
    ) -> dict[str, str]:
        backend = self._ec2
        vpc = backend.create_vpc(cidr)
        vpc.enable_dns_support = vpc.enable_dns_hostnames = True
        subnet = backend.create_subnet(vpc.id, cidr, availability_zone=zone)
        subnet.map_public_ip_on_launch = subnet.default_for_az = False
        group = backend.create_security_group("existing", "An existing group", vpc.id)
        if internet:
            gateway = backend.create_internet_gateway()
            backend.attach_internet_gateway(gateway.id, vpc.id)
            table = next(t for t in backend.route_tables.values() if t.vpc_id == vpc.id)
            backend.create_route(table.id, "0.0.0.0/0", gateway_id=gateway.id)
        if free_addresses is not None:
            self.free_addresses(subnet.id, free_addresses)
        return {"vpc_id": vpc.id, "subnet_id": subnet.id, "security_group_id": group.id}

    def free_addresses(self, subnet_id: str, count: int) -> None:
        """So many are left; they become fewer as interfaces are made."""
        subnet = self._ec2.get_subnet(subnet_id)
        subnet._available_ip_addresses += count - subnet.available_ip_address_count

    def leak_interface(
        self,
        *,
        subnet_id: str,
        tags: dict[str, str],
        status: str,
        group_ids: list[str],
        instance_id: str | None,
    ) -> str:
        """An interface that somebody else left behind."""
        backend = self._ec2
        eni = backend.create_network_interface(
            subnet_id, None, group_ids=group_ids or None, description="left behind", tags=tags
        )
        if instance_id is not None:
            instance = backend.get_instance(instance_id)
            used = {nic.device_index for nic in instance.nics.values()}
            instance.attach_eni(eni, next(i for i in range(1, 100) if i not in used))
        elif status == "in-use":
            eni.status = "in-use"
            eni.attachment_id, eni.attach_time = WORLD.new_id("eni-attach"), WORLD.started
        elif status != "available":
            msg = f"no such status: {status}"
            raise ValueError(msg)
        return str(eni.id)

    def detach_interface(self, interface_id: str) -> None:
        release(self._ec2.get_network_interface(interface_id))

    def stop_instance(self, instance_id: str, code: str, message: str) -> None:
        instance = self._ec2.get_instance(instance_id)
        instance.stop()
        self._blame(instance, code, message)

    def terminate_instance(self, instance_id: str, code: str, message: str) -> None:
        instance = self._ec2.get_instance(instance_id)
        self._blame(instance, code, message)
        end_instance(instance, 0.0)
        WORLD.settle()

    def unmanaged(self, instance_id: str, unmanaged: bool) -> None:  # noqa: FBT001 - from JSON
        (WORLD.unmanaged.add if unmanaged else WORLD.unmanaged.discard)(instance_id)

    def _blame(self, instance: Any, code: str, message: str) -> None:
        instance.state_reason.code = code
        instance.state_reason.message = f"{code}: {message}"

    def _show_instance(self, instance: Any) -> dict[str, Any]:
        return {
            "id": instance.id,
            "type": instance.instance_type,
            "zone": instance.availability_zone,
            "state": instance.state,
            "private_ip": instance.private_ip,
            "public_ip": instance.public_ip,
            "lifecycle": instance.lifecycle,
            "reservation": getattr(instance, "capacity_reservation_id", None),
            "placement_group": instance.placement.group_name or None,
            "interfaces": [eni.interface_type for eni in instance.network_interfaces],
            "tags": dict(self._ec2.tags.get(instance.id, {})),
        }

    def _resources(self) -> dict[str, dict[str, dict[str, str]]]:
        """kind -> id -> tags, of all that an account pays for or could trip over."""
        found: dict[str, dict[str, dict[str, str]]] = {}
        for kind, thing_id in existing(self._ec2):
            found.setdefault(kind, {})[thing_id] = dict(self._ec2.tags.get(thing_id, {}))
        iam = iam_backends[ACCOUNT]["aws"]
        found["iam-role"] = {role.name: _by_key(role.tags) for role in iam.roles.values()}
        found["iam-instance-profile"] = {
            p.name: _by_key(p.tags) for p in iam.instance_profiles.values()
        }
        found["bucket"] = {name: {} for name in s3_backends[ACCOUNT]["aws"].buckets}
        return {kind: things for kind, things in found.items() if things}


def control(region: str, body: bytes) -> Answer:
    """One command. A wrong one is answered with 400 and the reason."""
    order: dict[str, Any] = json.loads(body) if body else {"do": "world"}
    command: Callable[..., Any] | None = None
    if not str(order["do"]).startswith("_"):
        command = getattr(Control(region), order["do"], None)
    try:
        if command is None:
            msg = f"no such command: {order['do']}"
            raise ValueError(msg)
        with WORLD.lock:
            done = {"done": command(**order.get("with", {}))}
        status = 200
    except Exception as e:  # noqa: BLE001 - whatever it is, the test must read it
        done, status = {"error": f"{type(e).__name__}: {e}"}, 400
    return Answer(status, "application/json", json.dumps(done, default=str).encode())


def _by_key(tags: Any) -> dict[str, str]:
    """IAM's tags, a list or a mapping as moto keeps them."""
    if isinstance(tags, dict):
        return {str(k): str(v["Value"] if isinstance(v, dict) else v) for k, v in tags.items()}
    return {tag["Key"]: tag["Value"] for tag in tags or []}


def _moment(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
