"""Service Quotas, the Price List and the part of Systems Manager that moto does not have."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from moto.ec2.models import ec2_backends

from tests.double import catalog
from tests.double.errors import refuse, refuse_unknown
from tests.double.world import ACCOUNT, WORLD

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LOCATIONS: Final = {
    "us-east-1": "US East (N. Virginia)",
    "us-east-2": "US East (Ohio)",
    "us-west-1": "US West (N. California)",
    "us-west-2": "US West (Oregon)",
}


def answer_quotas(action: str, region: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """ServiceQuotas. Only the quotas told exist."""
    service = str(request.get("ServiceCode"))
    if action in {"ListServiceQuotas", "ListAWSDefaultServiceQuotas"}:
        default = action == "ListAWSDefaultServiceQuotas"
        codes = [code for there, code in WORLD.quotas if there == service]
        return {"Quotas": [_quota(service, code, region, default=default) for code in codes]}
    if action in {"GetServiceQuota", "GetAWSDefaultServiceQuota"}:
        code = str(request.get("QuotaCode"))
        if (service, code) not in WORLD.quotas:
            refuse(
                "NoSuchResourceException",
                "The request failed because the specified service quota does not exist.",
            )
        default = action == "GetAWSDefaultServiceQuota"
        return {"Quota": _quota(service, code, region, default=default)}
    return refuse_unknown(f"servicequotas:{action}")


def _quota(service: str, code: str, region: str, *, default: bool) -> dict[str, Any]:
    name, aws_default = catalog.QUOTA_NAMES.get((service, code), (code, 0.0))
    return {
        "ServiceCode": service,
        "ServiceName": "Amazon Elastic Compute Cloud (Amazon EC2)" if service == "ec2" else service,
        "QuotaArn": f"arn:aws:servicequotas:{region}:{ACCOUNT}:{service}/{code}",
        "QuotaCode": code,
        "QuotaName": name,
        "Value": aws_default if default else WORLD.quotas[service, code],
        "Unit": "None",
        "Adjustable": True,
        "GlobalQuota": False,
    }


def answer_prices(action: str, region: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """The Price List: the on-demand prices told, nothing for any other type."""
    if action != "GetProducts":
        refuse_unknown(f"pricing:{action}")
    if request.get("ServiceCode") != "AmazonEC2":
        refuse_unknown(f"prices of {request.get('ServiceCode')}")
    products = [_product(name, usd) for name, usd in sorted(WORLD.prices.items())]
    for wanted in request.get("Filters") or []:
        if wanted["Type"] != "TERM_MATCH":
            refuse_unknown(f"the price filter {wanted['Type']}")
        products = [
            product
            for product in products
            if str(product["product"]["attributes"].get(wanted["Field"], "")).lower()
            == str(wanted["Value"]).lower()
        ]
    listed = [json.dumps(product) for product in products]
    return {"FormatVersion": "aws_v1", "PriceList": listed}


def _product(name: str, usd: float) -> dict[str, Any]:
    instance_type, region = name.split("/")
    facts = catalog.find_type(instance_type)
    sku = f"SKU{abs(hash((instance_type, region))) % 10**13:013d}"
    term, rate = f"{sku}.JRTCKXETXF", f"{sku}.JRTCKXETXF.6YS6EN2CT7"
    return {
        "product": {
            "productFamily": "Compute Instance",
            "sku": sku,
            "attributes": {
                "servicecode": "AmazonEC2",
                "instanceType": instance_type,
                "regionCode": region,
                "location": LOCATIONS.get(region, region),
                "locationType": "AWS Region",
                "operatingSystem": "Linux",
                "tenancy": "Shared",
                "preInstalledSw": "NA",
                "capacitystatus": "Used",
                "licenseModel": "No License required",
                "marketoption": "OnDemand",
                "operation": "RunInstances",
                "vcpu": str(facts.vcpus) if facts else "",
            },
        },
        "serviceCode": "AmazonEC2",
        "terms": {
            "OnDemand": {
                term: {
                    "sku": sku,
                    "offerTermCode": "JRTCKXETXF",
                    "effectiveDate": "2026-11-01T00:00:00Z",
                    "priceDimensions": {
                        rate: {
                            "rateCode": rate,
                            "unit": "Hrs",
                            "beginRange": "0",
                            "endRange": "Inf",
                            "description": f"${usd} per On Demand Linux {instance_type}",
                            "pricePerUnit": {"USD": f"{usd:.10f}"},
                        }
                    },
                    "termAttributes": {},
                }
            }
        },
        "version": "20261101000000",
        "publicationDate": "2026-11-01T00:00:00Z",
    }


def answer_agents(action: str, region: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """DescribeInstanceInformation: running instances with a profile, unless told otherwise."""
    wanted: set[str] = set()
    for given in request.get("Filters") or []:
        if given["Key"] != "InstanceIds":
            refuse_unknown(f"the filter '{given['Key']}' for {action}")
        wanted.update(given["Values"])
    agents = [
        {
            "InstanceId": instance.id,
            "PingStatus": "Online",
            "PlatformType": "Linux",
            "PlatformName": "Ubuntu",
            "ResourceType": "EC2Instance",
            "IPAddress": instance.private_ip,
        }
        for instance in ec2_backends[ACCOUNT][region].all_instances()
        if instance.state == "running"
        and instance.iam_instance_profile
        and instance.id not in WORLD.unmanaged
        and (not wanted or instance.id in wanted)
    ]
    return {"InstanceInformationList": agents}


def find_answer(
    target: str, action: str
) -> Callable[[str, str, Mapping[str, Any]], dict[str, Any]] | None:
    """Who answers a JSON request in moto's place."""
    if target.startswith("ServiceQuotas"):
        return answer_quotas
    if target.startswith("AWSPriceListService"):
        return answer_prices
    if target == "AmazonSSM.DescribeInstanceInformation":
        return answer_agents
    return None
