"""What AWS charges, as far as it is known here, and which quota counts what.

List prices change: they are used where the price list cannot be asked, and shown with their
date. A price that is not in the table is unknown, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PRICES_DATE: Final = "2026-11-30"
"""When the table below was written down. P5en, P5 and C7i were then compared with public copies of
the price list; the others are the list prices that AWS publishes, not compared again."""

NAT_GATEWAY: Final = "NAT gateway"
INTERFACE_ENDPOINT: Final = "interface endpoint"
PUBLIC_ADDRESS: Final = "public IPv4 address"
GP3_GIB: Final = "gp3 GiB"
GP3_IOPS: Final = "gp3 IOPS above 3000"
GP3_MBPS: Final = "gp3 MB/s above 125"
HOURS_A_MONTH: Final = 730
"""As AWS turns a GiB-month into hours."""


@dataclass(frozen=True, kw_only=True)
class Price:
    usd_hour: float
    source: str
    """Where the figure is from, with its date."""


_EC2: Final = f"EC2 on-demand list price, Linux, {PRICES_DATE}"
_VPC: Final = f"VPC list price, {PRICES_DATE}"
_EBS: Final = f"EBS list price, {PRICES_DATE}"

_USD_HOUR: Final = {
    # One price in all three regions. Sources: aws.amazon.com/ec2/pricing/on-demand, and
    # aws.amazon.com/{vpc,ebs}/pricing for the rest. p5e has no public on-demand price.
    "p5en.48xlarge": (63.296, _EC2),
    "p5.48xlarge": (55.04, _EC2),
    "p5.4xlarge": (6.88, _EC2),
    "g6.8xlarge": (2.0144, _EC2),
    "c7i.2xlarge": (0.357, _EC2),
    NAT_GATEWAY: (0.045, _VPC),
    INTERFACE_ENDPOINT: (0.01, _VPC),
    PUBLIC_ADDRESS: (0.005, _VPC),
    GP3_GIB: (0.08 / HOURS_A_MONTH, _EBS),
    GP3_IOPS: (0.005 / HOURS_A_MONTH, _EBS),
    GP3_MBPS: (0.04 / HOURS_A_MONTH, _EBS),
}
PRICED_REGIONS: Final = ("us-east-1", "us-east-2", "us-west-2")


def listed(region: str) -> dict[str, Price]:
    """Prices of a region by instance type or by one of the names above; {} where none is known."""
    if region not in PRICED_REGIONS:
        return {}
    return {what: Price(usd_hour=usd, source=source) for what, (usd, source) in _USD_HOUR.items()}


@dataclass(frozen=True, kw_only=True)
class QuotaClass:
    """Quotas, in vCPUs, that the instance types of some families share."""

    name: str
    on_demand: str
    spot: str


_CLASSES: Final = {
    "P": QuotaClass(name="P", on_demand="L-417A185B", spot="L-7212CCBC"),
    "G": QuotaClass(name="G and VT", on_demand="L-DB2E81BA", spot="L-3819A6DF"),
    "standard": QuotaClass(
        name="Standard (A, C, D, H, I, M, R, T, Z)", on_demand="L-1216C47A", spot="L-34B43A08"
    ),
}
_BY_FAMILY: Final = (
    {"p": "P"}
    | dict.fromkeys(("g", "gr", "vt"), "G")
    | dict.fromkeys((*"acdhimrtz", "im", "is"), "standard")
)

PLACEMENT_GROUPS_MAX: Final = 500
"""Of a region, unless AWS was asked for more."""


def quota_class(instance_type: str) -> QuotaClass | None:
    """The class of a type, by the letters it begins with; None for families not known here."""
    family = instance_type.split(".", maxsplit=1)[0]
    letters = family[: next((i for i, c in enumerate(family) if not c.isalpha()), len(family))]
    known = _BY_FAMILY.get(letters)
    return _CLASSES[known] if known else None


def spot_key(instance_type: str) -> str:
    """Under which a type's spot price stands among prices."""
    return f"spot {instance_type}"
