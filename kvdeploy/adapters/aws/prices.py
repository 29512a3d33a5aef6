"""Prices as AWS gives them today; else the list of model/prices.py."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from kvdeploy.errors import AwsError
from kvdeploy.model.prices import Price, listed, spot_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvdeploy.adapters.aws.session import Aws


def prices_of(
    aws: Aws, types: Iterable[str], *, spot_zone: str | None = None, spot_types: Iterable[str] = ()
) -> dict[str, Price]:
    """Prices of instance types, and of all else that model/prices.py lists for the region.

    Where the price list or the spot history does not answer, what is listed counts; a price
    that is found nowhere is left out.

    Args:
        aws: the region.
        types: instance types, on demand.
        spot_zone: zone of spot prices.
        spot_types: types whose spot price is wanted, under the key of spot_key().
    """
    known = listed(aws.region)
    for name in sorted(set(types)):
        known |= _priced(name, partial(_on_demand, aws, name))
    for name in sorted(set(spot_types)):
        if spot_zone:
            known |= _priced(spot_key(name), partial(_spot, aws, name, spot_zone))
    return known


def _priced(key: str, ask: Callable[[], Price | None]) -> dict[str, Price]:
    try:
        price = ask()
    except AwsError:  # not allowed, or no price list in this partition
        return {}
    return {key: price} if price else {}


def _on_demand(aws: Aws, instance_type: str) -> Price | None:
    wanted = {
        "instanceType": instance_type,
        "regionCode": aws.region,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
    }
    answer = aws.call(
        "pricing:GetProducts",
        ServiceCode="AmazonEC2",
        Filters=[{"Type": "TERM_MATCH", "Field": k, "Value": v} for k, v in wanted.items()],
        MaxResults=10,
    )
    found = {usd for text in answer["PriceList"] for usd in _usd(json.loads(text)) if usd > 0}
    if len(found) != 1:  # none, or several products that this cannot tell apart
        return None
    return Price(usd_hour=found.pop(), source=f"AWS price list, {_today()}")


def _usd(product: dict[str, Any]) -> list[float]:
    terms = product.get("terms", {}).get("OnDemand", {}).values()
    return [
        float(dimension["pricePerUnit"]["USD"])
        for term in terms
        for dimension in term["priceDimensions"].values()
        if dimension.get("unit") == "Hrs" and "USD" in dimension["pricePerUnit"]
    ]


def _spot(aws: Aws, instance_type: str, zone: str) -> Price | None:
    found = aws.call(
        "ec2:DescribeSpotPriceHistory",
        InstanceTypes=[instance_type],
        AvailabilityZone=zone,
        ProductDescriptions=["Linux/UNIX"],
        StartTime=datetime.now(UTC),
        MaxResults=10,
    )["SpotPriceHistory"]
    if not found:
        return None
    newest = max(found, key=lambda one: one["Timestamp"])
    return Price(usd_hour=float(newest["SpotPrice"]), source=f"spot price in {zone}, {_today()}")


def _today() -> str:
    return datetime.now(UTC).date().isoformat()
