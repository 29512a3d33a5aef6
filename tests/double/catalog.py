"""Facts of instance types, from moto's copy of DescribeInstanceTypes, and of quotas."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final

from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS, INSTANCE_TYPES

QUOTA_NAMES: Final = {
    ("ec2", "L-417A185B"): ("Running On-Demand P instances", 0.0),
    ("ec2", "L-7212CCBC"): ("All P4, P3 and P2 Spot Instance Requests", 0.0),
    ("ec2", "L-DB2E81BA"): ("Running On-Demand G and VT instances", 0.0),
    ("ec2", "L-3819A6DF"): ("All G and VT Spot Instance Requests", 0.0),
    ("ec2", "L-1216C47A"): (
        "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances",
        5.0,
    ),
    ("ec2", "L-34B43A08"): (
        "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests",
        5.0,
    ),
    ("ec2", "L-0263D0A3"): ("EC2-VPC Elastic IPs", 5.0),
    ("vpc", "L-F678F1CE"): ("VPCs per Region", 5.0),
}
"""(service, code) -> name and AWS's own default."""

ON_DEMAND_CODES: Final = {"p": "L-417A185B", "g": "L-DB2E81BA", "standard": "L-1216C47A"}
SPOT_CODES: Final = {"p": "L-7212CCBC", "g": "L-3819A6DF", "standard": "L-34B43A08"}


@dataclass(frozen=True)
class TypeFacts:
    """What a launch must respect."""

    name: str
    vcpus: int
    cards: int
    efa_interfaces: int
    """0: no EFA."""
    interfaces_by_card: dict[int, int]
    architectures: tuple[str, ...]

    @property
    def bucket(self) -> str | None:
        """The group of types that share a quota; None: one that the double has no quota for."""
        stem = "".join(takewhile(str.isalpha, self.name))
        if stem == "p":
            return "p"
        if stem in {"g", "gr", "vt"}:
            return "g"
        return "standard" if stem[:1] in "acdhimrtz" and stem not in _OTHER_STEMS else None


_OTHER_STEMS: Final = frozenset({"inf", "trn", "dl", "mac", "hpc", "high"})


def find_type(name: str) -> TypeFacts | None:
    found: dict[str, Any] | None = INSTANCE_TYPES.get(name)
    if found is None:
        return None
    network = found["NetworkInfo"]
    cards = network.get("NetworkCards") or []
    return TypeFacts(
        name=name,
        vcpus=int(found["VCpuInfo"]["DefaultVCpus"]),
        cards=int(network.get("MaximumNetworkCards") or 1),
        efa_interfaces=int((network.get("EfaInfo") or {}).get("MaximumEfaInterfaces") or 0),
        interfaces_by_card={
            int(card["NetworkCardIndex"]): int(card["MaximumNetworkInterfaces"]) for card in cards
        },
        architectures=tuple(found["ProcessorInfo"]["SupportedArchitectures"]),
    )


def zones_offering(instance_type: str, region: str) -> list[str]:
    offered = INSTANCE_TYPE_OFFERINGS["availability-zone"].get(region, [])
    return sorted(o["Location"] for o in offered if o["InstanceType"] == instance_type)
