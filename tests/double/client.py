"""Starting the double and telling it what the account is like.

    with Double() as aws:
        aws.capacity("p5en.48xlarge", "us-west-2a", 2)
        subprocess.run(["terraform", "apply"], env={**os.environ, **aws.env})
        assert aws.counts()["RunInstances"] == 1

One process serves many tests: `reset()` makes everything new in a few milliseconds.
"""

from __future__ import annotations

import json
import os
import select
import subprocess  # noqa: TID251 - a program of the tests' own, not of kvdeploy
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Literal, Self

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from types import TracebackType

REPOSITORY: Final = Path(__file__).resolve().parents[2]
START_TIMEOUT_S: Final = 120.0
ANSWER_TIMEOUT_S: Final = 60.0
CANONICAL: Final = "099720109477"
AMAZON: Final = "898082745236"

ReservationState = Literal["active", "expired", "cancelled", "pending", "scheduled", "failed"]


class DoubleError(Exception):
    """The double did not start, or did not take what it was told."""


@dataclass(frozen=True)
class Network:
    vpc_id: str
    subnet_id: str
    security_group_id: str


@dataclass(frozen=True)
class Machine:
    """One instance, as the double holds it."""

    id: str
    type: str
    zone: str
    state: str
    private_ip: str | None
    public_ip: str | None
    lifecycle: str | None
    reservation: str | None
    placement_group: str | None
    interfaces: tuple[str, ...]
    tags: Mapping[str, str]


class Double:
    """A running double; a context manager. Start it in a thread that outlives it."""

    def __init__(self, *, region: str = "us-west-2", port: int = 0) -> None:
        self.region = region
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._url = ""
        self._clients: dict[tuple[str, str, int], Any] = {}
        self._session: Any = None
        # A proxy in the caller's environment has no business here.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    # -- the process ---------------------------------------------------------------------------

    def start(self) -> Self:
        """Return once it answers. DoubleError: it ended or was too slow, with its last words."""
        argv = [sys.executable, "-m", "tests.double", "--region", self.region]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in stop
        self._process = subprocess.Popen(
            [*argv, "--port", str(self._port)],
            cwd=REPOSITORY,
            env={k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "MOTO_"))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        try:
            self._url = str(json.loads(self._first_line())["url"])
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Close its standard input, which ends it, and wait."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        process, self._process = self._process, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._log is not None:
            self._log.close()
            self._log = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return self._url

    @property
    def pid(self) -> int:
        if self._process is None:
            msg = "the double is not running"
            raise DoubleError(msg)
        return self._process.pid

    @property
    def env(self) -> dict[str, str]:
        """What a program needs to meet the double, and nothing of the caller's own account."""
        return {
            "AWS_ENDPOINT_URL": self._url,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_DEFAULT_REGION": self.region,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "NO_PROXY": "127.0.0.1",
        }

    def client(self, service: str, *, region: str | None = None, attempts: int = 1) -> Any:
        """A boto3 client that meets the double, made once; no retries by default."""
        import boto3
        from botocore.config import Config

        key = (service, region or self.region, attempts)
        if self._session is None:
            self._session = boto3.session.Session(
                aws_access_key_id="testing", aws_secret_access_key="testing"
            )
        if key not in self._clients:
            retries = {"total_max_attempts": attempts, "mode": "standard"}
            self._clients[key] = self._session.client(
                service,
                region_name=key[1],
                endpoint_url=self._url,
                config=Config(retries=retries, proxies={}),
            )
        return self._clients[key]

    def log(self) -> str:
        """What it wrote to stderr: the traceback of a defect, if there was one."""
        if self._log is None:
            return ""
        self._log.flush()
        return os.pread(self._log.fileno(), 1_000_000, 0).decode(errors="replace")

    def _first_line(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        deadline, line, out = time.monotonic() + START_TIMEOUT_S, b"", self._process.stdout.fileno()
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            ready, _, _ = select.select([out], [], [], max(left, 0.0))
            more = os.read(out, 4096) if ready else b""
            if not more:
                why = "ended at once" if ready else f"said nothing in {START_TIMEOUT_S:.0f} s"
                msg = f"the AWS double {why}:\n{self.log()[-4000:]}"
                raise DoubleError(msg)
            line += more
        return line

    # -- what it is told -----------------------------------------------------------------------

    def do(self, command: str, **arguments: Any) -> Any:
        """One command of the control endpoint; the typed methods below are easier."""
        body = json.dumps({"do": command, "with": arguments}).encode()
        request = urllib.request.Request(f"{self._url}/_double", data=body, method="POST")
        request.add_header("Content-Type", "application/json")
        try:
            with self._opener.open(request, timeout=ANSWER_TIMEOUT_S) as answer:
                return json.load(answer)["done"]
        except urllib.error.HTTPError as e:
            with e:
                msg = str(json.load(e)["error"])
            raise DoubleError(msg) from None

    def tell(self, **knobs: Any) -> None:
        """Set knobs by name: boot_s, shutdown_s, nat_s, image_s, credentials_expired, identity,
        placement_group_limit, capacity, latency, prices, spot_prices."""
        self.do("tell", **knobs)

    def reset(self) -> None:
        """A new account: nothing told, nothing made, no call seen."""
        self.do("reset")

    def world(self) -> dict[str, Any]:
        """calls, counts, refused, defects, instances, resources, reservations, faults, knobs."""
        found: dict[str, Any] = self.do("world")
        return found

    def capacity(self, instance_type: str, zone: str, count: int | None) -> None:
        """There are `count` on demand or spot in that zone, running ones included; None: no end."""
        if count is None:
            self.do("unlimited", name=f"{instance_type}/{zone}")
        else:
            self.tell(capacity={f"{instance_type}/{zone}": count})

    def fault(
        self,
        action: str,
        code: str,
        message: str = "injected by the test",
        *,
        status: int = 400,
        times: int | None = 1,
    ) -> None:
        """The next `times` (None: all) calls of "Action", "service:Action" or "*" fail so."""
        fields = {"action": action, "code": code, "message": message}
        self.do("fault", **fields, status=status, times=times)

    def deny(self, action: str, *, times: int | None = None) -> None:
        """No permission for this, in the words of the service that is asked."""
        self.do("fault", action=action, code="", message="", times=times, denied=True)

    def throttle(self, action: str, *, times: int = 1) -> None:
        """EC2's RequestLimitExceeded, which every SDK tries again."""
        self.fault(
            action, "RequestLimitExceeded", "Request limit exceeded.", status=503, times=times
        )

    def clear_faults(self) -> None:
        self.do("clear_faults")

    def latency(self, action: str, seconds: float) -> None:
        self.tell(latency={action: seconds})

    def quota(self, code: str, value: float | None, *, service: str = "ec2") -> None:
        """None: there is no such quota, and no limit."""
        self.do("quota", code=code, value=value, service=service)

    def price(self, instance_type: str, usd_per_hour: float, *, region: str | None = None) -> None:
        self.tell(prices={f"{instance_type}/{region or self.region}": usd_per_hour})

    def spot_price(self, instance_type: str, zone: str, usd_per_hour: float) -> None:
        self.tell(spot_prices={f"{instance_type}/{zone}": usd_per_hour})

    def reservation(
        self,
        instance_type: str,
        zone: str,
        count: int,
        *,
        kind: Literal["odcr", "capacity-block"] = "odcr",
        state: ReservationState = "active",
        start: datetime | None = None,
        end: datetime | None = None,
        tags: Mapping[str, str] | None = None,
        placement_group: str | None = None,
        match: Literal["targeted", "open"] = "targeted",
    ) -> str:
        """Its id. A Capacity Block without an end ends 24 hours after its start."""
        return str(
            self.do(
                "reservation",
                instance_type=instance_type,
                zone=zone,
                count=count,
                kind=kind,
                state=state,
                start=_text(start),
                end=_text(end),
                tags=dict(tags or {}),
                placement_group=placement_group,
                match=match,
            )
        )

    def set_reservation(
        self,
        reservation_id: str,
        *,
        state: ReservationState | None = None,
        count: int | None = None,
        end: datetime | None = None,
    ) -> None:
        self.do(
            "set_reservation",
            reservation_id=reservation_id,
            state=state,
            count=count,
            end=_text(end),
        )

    def block_offering(
        self,
        instance_type: str,
        zone: str,
        count: int,
        hours: int,
        upfront_usd: float,
        *,
        start: datetime | None = None,
    ) -> str:
        """A Capacity Block for sale; its id."""
        return str(
            self.do(
                "block_offering",
                instance_type=instance_type,
                zone=zone,
                count=count,
                hours=hours,
                upfront_usd=upfront_usd,
                start=_text(start),
            )
        )

    def expire_credentials(self, *, expired: bool = True) -> None:
        self.tell(credentials_expired=expired)

    def slow_boot(self, seconds: float) -> None:
        """From RunInstances until "running"."""
        self.tell(boot_s=seconds)

    def slow_shutdown(self, seconds: float) -> None:
        """From TerminateInstances until "terminated"."""
        self.tell(shutdown_s=seconds)

    def stop_instance(
        self,
        instance_id: str,
        *,
        code: str = "Server.ScheduledStop",
        message: str = "Stopped due to a scheduled retirement",
    ) -> None:
        """As EC2 does it, without being asked."""
        self.do("stop_instance", instance_id=instance_id, code=code, message=message)

    def terminate_instance(
        self,
        instance_id: str,
        *,
        code: str = "Server.InternalError",
        message: str = "Internal error",
    ) -> None:
        """As EC2 does it, without being asked."""
        self.do("terminate_instance", instance_id=instance_id, code=code, message=message)

    def unmanaged(self, instance_id: str, *, unmanaged: bool = True) -> None:
        """Its SSM agent does not report."""
        self.do("unmanaged", instance_id=instance_id, unmanaged=unmanaged)

    def leak_interface(
        self,
        subnet_id: str,
        *,
        tags: Mapping[str, str],
        status: Literal["available", "in-use"] = "available",
        group_ids: tuple[str, ...] = (),
        instance_id: str | None = None,
    ) -> str:
        """An interface left behind, attached to `instance_id` or, "in-use", to something of
        another account; its id."""
        return str(
            self.do(
                "leak_interface",
                subnet_id=subnet_id,
                tags=dict(tags),
                status=status,
                group_ids=list(group_ids),
                instance_id=instance_id,
            )
        )

    def detach_interface(self, interface_id: str) -> None:
        """Whatever held it lets it go."""
        self.do("detach_interface", interface_id=interface_id)

    def add_parameter(self, name: str, ami_name: str, *, owner_id: str = AMAZON) -> str:
        """An image under that SSM parameter, newer than what it names now; the image's id."""
        return str(self.do("add_parameter", name=name, ami_name=ami_name, owner_id=owner_id))

    def slow_image(self, seconds: float) -> None:
        """From CreateImage until "available"."""
        self.tell(image_s=seconds)

    def fail_image(self, image_id: str, message: str) -> None:
        """EC2 gives it up."""
        self.do("fail_image", image_id=image_id, message=message)

    def remove_image(self, image_id: str) -> None:
        self.do("remove_image", image_id=image_id)

    def existing_network(
        self,
        zone: str,
        cidr: str = "10.60.0.0/16",
        *,
        free_addresses: int | None = None,
        internet: bool = True,
    ) -> Network:
        """A VPC of somebody else: one subnet that fills it, one group, a way out if `internet`."""
        fields = {"zone": zone, "cidr": cidr, "free_addresses": free_addresses}
        return Network(**self.do("existing_network", **fields, internet=internet))

    def free_addresses(self, subnet_id: str, count: int) -> None:
        self.do("free_addresses", subnet_id=subnet_id, count=count)

    # -- what it has seen ----------------------------------------------------------------------

    def calls(self) -> list[dict[str, Any]]:
        """service, action, region, at, status, code (of an error), seconds, request (forms)."""
        return list(self.world()["calls"])

    def counts(self) -> dict[str, int]:
        """Action -> how often."""
        return dict(self.world()["counts"])

    def forget_calls(self) -> None:
        self.do("forget_calls")

    def refused(self) -> list[str]:
        """ "service:Action" of every call that the double does not implement."""
        return list(self.world()["refused"])

    def instances(self, *, terminated: bool = False, **tags: str) -> list[Machine]:
        """Instances with these tags; terminated ones only if asked for."""
        found = [
            Machine(**{**raw, "interfaces": tuple(raw["interfaces"])})
            for raw in self.world()["instances"]
        ]
        return [
            machine
            for machine in found
            if (terminated or machine.state != "terminated")
            and all(machine.tags.get(key) == value for key, value in tags.items())
        ]

    def resources(self) -> dict[str, dict[str, dict[str, str]]]:
        """kind -> id -> tags of everything there is, apart from the default VPC."""
        return dict(self.world()["resources"])


def _text(moment: datetime | None) -> str | None:
    return moment.isoformat() if moment is not None else None
