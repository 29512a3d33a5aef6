"""Everything the double was told and everything it has seen. Knows no HTTP and no moto."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable


ACCOUNT: Final = "123456789012"
IDENTITY: Final = f"arn:aws:sts::{ACCOUNT}:assumed-role/kvdeploy-operator/tests"

QUOTAS: Final = {
    ("ec2", "L-417A185B"): 1536.0,
    ("ec2", "L-7212CCBC"): 1536.0,
    ("ec2", "L-DB2E81BA"): 768.0,
    ("ec2", "L-3819A6DF"): 768.0,
    ("ec2", "L-1216C47A"): 1152.0,
    ("ec2", "L-34B43A08"): 1152.0,
    ("ec2", "L-0263D0A3"): 50.0,
    ("vpc", "L-F678F1CE"): 50.0,
}
"""What the account may use until a test says otherwise: enough for eight P5en nodes."""


@dataclass
class Fault:
    """The next `times` calls of `action` end in this error; None means all of them."""

    action: str
    """"RunInstances", "ec2:RunInstances", "ec2:*" or "*"."""
    code: str
    message: str
    status: int = 400
    times: int | None = 1
    denied: bool = False
    """Answer with the service's own words for a missing permission, whatever `code` is."""


@dataclass
class Reservation:
    """An on-demand capacity reservation or a Capacity Block."""

    id: str
    region: str
    instance_type: str
    zone: str
    count: int
    block: bool
    state: str
    created: datetime
    start: datetime
    end: datetime | None = None
    match: str = "targeted"
    ebs_optimized: bool = False
    group_arn: str | None = None
    block_id: str | None = None


@dataclass
class PlacementGroup:
    id: str
    name: str
    region: str
    strategy: str = "cluster"


@dataclass
class BlockOffering:
    """A Capacity Block for sale."""

    id: str
    instance_type: str
    zone: str
    count: int
    hours: int
    start: datetime
    end: datetime
    upfront_usd: float


@dataclass
class CallRecord:
    """One call as it was answered. `code` is the error's, None after a success."""

    service: str
    action: str
    region: str
    at: float
    status: int = 0
    code: str | None = None
    seconds: float = 0.0
    request: dict[str, str] = field(default_factory=dict)
    """The plain parameters of a form request; secrets are not among what is sent so."""


@dataclass
class World:
    """One account. `reset` makes it new; the lock is held while a request is answered."""

    boot_s: float = 0.0
    """From RunInstances until "running"."""
    shutdown_s: float = 0.0
    """From TerminateInstances until "terminated"."""
    nat_s: float = 0.0
    """From DeleteNatGateway until "deleted"."""
    image_s: float = 0.0
    """From CreateImage until "available"."""
    credentials_expired: bool = False
    identity: str = IDENTITY
    placement_group_limit: int = 500
    capacity: dict[str, int] = field(default_factory=dict)
    """"TYPE/ZONE" -> instances there are on demand or spot in all; without an entry endless."""
    latency: dict[str, float] = field(default_factory=dict)
    """Action (or "*") -> seconds before it is answered."""
    quotas: dict[tuple[str, str], float] = field(default_factory=lambda: dict(QUOTAS))
    prices: dict[str, float] = field(default_factory=dict)
    """"TYPE/REGION" -> USD an hour on demand."""
    spot_prices: dict[str, float] = field(default_factory=dict)
    """"TYPE/ZONE" -> USD an hour."""
    unmanaged: set[str] = field(default_factory=set)
    """Instances whose SSM agent has not reported."""

    faults: list[Fault] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)
    reservations: dict[str, Reservation] = field(default_factory=dict)
    groups: dict[tuple[str, str], PlacementGroup] = field(default_factory=dict)
    offerings: dict[str, BlockOffering] = field(default_factory=dict)
    launches: dict[tuple[str, str], Any] = field(default_factory=dict)
    """(region, client token) -> moto's reservation: the same token launches once."""

    started: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self._ids = itertools.count(1)
        self._later: list[tuple[float, int, Callable[[], None]]] = []

    def reset(self) -> None:
        """Forget everything told and seen; moto's own state is not ours to forget."""
        fresh = World()
        fresh.lock = self.lock
        self.__dict__.update(fresh.__dict__)

    def new_id(self, prefix: str) -> str:
        return f"{prefix}-{next(self._ids):017x}"

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        """Do it when `seconds` have passed, at the first request after that."""
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._ids), do))

    def settle(self) -> None:
        """Let everything happen whose time has come."""
        while self._later and self._later[0][0] <= time.monotonic():
            heapq.heappop(self._later)[2]()

    def take_fault(self, service: str, action: str) -> Fault | None:
        """The fault that this call meets, which is then one time nearer its end."""
        names = {action, f"{service}:{action}", f"{service}:*", "*"}
        for fault in self.faults:
            if fault.action in names and (fault.times is None or fault.times > 0):
                if fault.times is not None:
                    fault.times -= 1
                return fault
        return None

    def wait_s(self, service: str, action: str) -> float:
        for name in (f"{service}:{action}", action, f"{service}:*", "*"):
            if name in self.latency:
                return self.latency[name]
        return 0.0

    def quota(self, code: str, service: str = "ec2") -> float | None:
        return self.quotas.get((service, code))

    def counts(self) -> dict[str, int]:
        return dict(Counter(call.action for call in self.calls))

    def refused(self, code: str) -> list[str]:
        """The calls answered with this error code, as "service:Action"."""
        return [f"{c.service}:{c.action}" for c in self.calls if c.code == code]

    def groups_in(self, region: str) -> list[PlacementGroup]:
        return [group for group in self.groups.values() if group.region == region]

    def reservations_in(self, region: str) -> list[Reservation]:
        return [r for r in self.reservations.values() if r.region == region]


WORLD: Final = World()
