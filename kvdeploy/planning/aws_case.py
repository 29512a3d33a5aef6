"""What the checks of an AWS account judge, and words that they share. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdeploy.model.catalog import INSTANCES
from kvdeploy.model.prices import quota_class
from kvdeploy.model.reports import Finding
from kvdeploy.planning.aws_spec_checks import RESERVED

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from kvdeploy.model.awsfacts import AwsFacts, Reservation
    from kvdeploy.model.awsspec import AwsSpec
    from kvdeploy.model.infra import Node
    from kvdeploy.model.spec import ClusterSpec


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A cluster and the account that it is to be made in."""

    spec: ClusterSpec
    aws: AwsSpec
    facts: AwsFacts
    nodes: tuple[Node, ...]
    """What the cluster wants."""

    @property
    def engines(self) -> tuple[Node, ...]:
        """The nodes with GPUs."""
        return tuple(node for node in self.nodes if node.role != "router")

    @property
    def reservation(self) -> Reservation | None:
        """The reservation that is meant; None when none is, or when it is not clear which."""
        return self.facts.reservation if self.aws.capacity.kind in RESERVED else None

    def vcpus(self, instance_type: str) -> int:
        """Of a type as AWS says, else as the catalog does; 0 when neither knows it."""
        profile = INSTANCES.get(instance_type)
        known = profile.vcpus if profile else 0
        return self.facts.vcpus.get(instance_type, known)

    def quota_needs(self) -> dict[str, int]:
        """How many vCPUs the whole cluster takes of each quota, by its code.

        The router is always on demand. A reservation is counted by itself, used or not, and a
        Capacity Block by no quota (EC2 User Guide, Capacity Reservations and Capacity Blocks).
        """
        needs: Counter[str] = Counter()
        for node in self.nodes:
            kind = "on-demand" if node.role == "router" else self.aws.capacity.kind
            known = quota_class(node.instance_type)
            if known and kind not in RESERVED:
                code = known.spot if kind == "spot" else known.on_demand
                needs[code] += self.vcpus(node.instance_type)
        return dict(needs)


AwsCheck = Callable[[Judged], Iterator[Finding]]


def counted(nodes: Iterable[Node]) -> str:
    """'2 p5en.48xlarge and 1 c7i.2xlarge'."""
    return listing(
        f"{count} {name}" for name, count in Counter(n.instance_type for n in nodes).items()
    )


def listing(words: Iterable[str]) -> str:
    """'a, b and c'; '' for none."""
    *most, last = list(words) or [""]
    return f"{', '.join(most)} and {last}" if most else last


def clock(when: datetime) -> str:
    """A time as findings show it; times are UTC."""
    return f"{when:%Y-%m-%d %H:%M} UTC"
