"""The AWS double itself: what it adds to moto, seen through boto3 as kvdeploy sees it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

from tests.double.client import REPOSITORY, Double, DoubleError, Network

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.real_process

ZONE = "us-west-2a"
P5EN = "p5en.48xlarge"
DLAMI = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
ID = {"kvdeploy:id": "0123abcd"}
PUBLIC_KEY = (
    b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0n7q0p1mY2eIuKZ2J4q2v4y1Yp7mO3hXwJ7s8s9d0a test"
)


@pytest.fixture(scope="module")
def process() -> Iterator[Double]:
    with Double() as double:
        yield double


@pytest.fixture
def aws(process: Double) -> Iterator[Double]:
    process.reset()
    yield process
    assert process.world()["defects"] == [], process.log()


@pytest.fixture
def ec2(aws: Double) -> Any:
    return aws.client("ec2")


@pytest.fixture
def network(aws: Double) -> Network:
    return aws.existing_network(ZONE)


def tag_list(tags: dict[str, str] = ID) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def tagged(kind: str, tags: dict[str, str] = ID) -> list[dict[str, Any]]:
    return [{"ResourceType": kind, "Tags": tag_list(tags)}]


def by_tag(value: str = ID["kvdeploy:id"]) -> list[dict[str, Any]]:
    return [{"Name": "tag:kvdeploy:id", "Values": [value]}]


def refused(call: Callable[..., Any], /, **arguments: Any) -> tuple[str, str, int]:
    """Code, message and HTTP status of the error that this call ends in."""
    with pytest.raises(ClientError) as e:
        call(**arguments)
    answer: Any = e.value.response
    error = answer["Error"]
    return error["Code"], error["Message"], answer["ResponseMetadata"]["HTTPStatusCode"]


def image_of(aws: Double, parameter: str = DLAMI) -> str:
    return str(aws.client("ssm").get_parameter(Name=parameter)["Parameter"]["Value"])


def launch(
    aws: Double, network: Network, *, kind: str = "m7i.large", count: int = 1, **more: Any
) -> list[dict[str, Any]]:
    arguments: dict[str, Any] = {
        "ImageId": image_of(aws),
        "InstanceType": kind,
        "MinCount": count,
        "MaxCount": count,
        **more,
    }
    if "NetworkInterfaces" not in more:
        arguments.setdefault("SubnetId", network.subnet_id)
    return list(aws.client("ec2").run_instances(**arguments)["Instances"])


def efa_interfaces(network: Network, cards: int = 16) -> list[dict[str, Any]]:
    return [
        {
            "NetworkCardIndex": card,
            "DeviceIndex": 1 if card else 0,
            "InterfaceType": "efa-only" if card else "efa",
            "SubnetId": network.subnet_id,
            "Groups": [network.security_group_id],
            "DeleteOnTermination": True,
        }
        for card in range(cards)
    ]


def describe(aws: Double, instance_id: str) -> dict[str, Any]:
    found = aws.client("ec2").describe_instances(InstanceIds=[instance_id])
    return dict(found["Reservations"][0]["Instances"][0])


def target(reservation_id: str) -> dict[str, Any]:
    return {"CapacityReservationTarget": {"CapacityReservationId": reservation_id}}


# -- the process -------------------------------------------------------------------------------


def start_raw(*more: str, program: str | None = None) -> subprocess.Popen[str]:
    argv = ["-c", program] if program else ["-m", "tests.double", *more]
    return subprocess.Popen(
        [sys.executable, *argv],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_it_says_where_it_is_and_ends_with_its_standard_input(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    with start_raw("--ready-file", str(ready)) as double:
        assert double.stdout is not None
        assert double.stdin is not None
        said = double.stdout.readline()
        assert json.loads(said)["url"].startswith("http://127.0.0.1:")
        assert json.loads(said)["pid"] == double.pid
        assert ready.read_text(encoding="utf-8") == said
        double.stdin.close()
        assert double.wait(10) == 0


def test_it_ends_on_sigterm() -> None:
    with start_raw() as double:
        assert double.stdout is not None
        double.stdout.readline()
        double.send_signal(signal.SIGTERM)
        assert double.wait(10) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_it_ends_when_its_parent_is_killed() -> None:
    program = (
        "import os, subprocess, sys\n"
        "argv = [sys.executable, '-m', 'tests.double']\n"
        "double = subprocess.Popen(argv, stdout=subprocess.PIPE)\n"
        "print(double.stdout.readline().decode(), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    with start_raw(program=program) as parent:  # whose standard input the double has too
        assert parent.stdout is not None
        pid = json.loads(parent.stdout.readline())["pid"]
        parent.wait(10)
        wait_for_end(pid)


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(pid)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False


def test_a_double_that_cannot_start_says_why(process: Double) -> None:
    taken = int(process.url.rsplit(":", 1)[1])
    with pytest.raises(DoubleError, match=r"the AWS double ended at once:\n.*in use"):
        Double(port=taken).start()


def test_an_unknown_command_or_knob_is_an_error(aws: Double) -> None:
    with pytest.raises(DoubleError, match="no such command: wish"):
        aws.do("wish")
    with pytest.raises(DoubleError, match="no such knob: boots; there are "):
        aws.tell(boots=1)


def test_reset_makes_a_new_account(aws: Double, ec2: Any, network: Network) -> None:
    launch(aws, network)
    aws.fault("DescribeVpcs", "Broken", times=None)
    aws.capacity(P5EN, ZONE, 0)
    aws.reset()
    assert aws.world()["knobs"]["capacity"] == {}
    assert len(ec2.describe_vpcs()["Vpcs"]) == 1
    assert aws.counts() == {"DescribeVpcs": 1}
    assert aws.resources() == {}


# -- refusals, faults, records -----------------------------------------------------------------


def test_what_nobody_told_is_refused_once_and_recorded(aws: Double) -> None:
    patient = aws.client("ec2", attempts=5)
    code, message, status = refused(patient.describe_verified_access_groups)
    assert (code, status) == ("DoubleNotImplemented", 400)
    assert message.startswith(
        "The AWS test double does not implement ec2:DescribeVerifiedAccessGroups"
    )
    assert aws.refused() == ["ec2:DescribeVerifiedAccessGroups"]
    assert aws.counts()["DescribeVerifiedAccessGroups"] == 1


def test_services_that_moto_only_pretends_are_refused(aws: Double) -> None:
    send = aws.client("ssm").send_command
    arguments = {"InstanceIds": ["i-0123456789abcdef0"], "DocumentName": "AWS-RunShellScript"}
    assert refused(send, **arguments)[0] == "DoubleNotImplemented"


def test_calls_are_recorded_with_action_time_and_error(aws: Double) -> None:
    before = time.time()
    aws.client("sts").get_caller_identity()
    aws.client("s3").list_buckets()
    refused(aws.client("ec2").describe_instances, InstanceIds=["i-0123456789abcdef0"])
    calls = aws.calls()
    assert [(c["service"], c["action"], c["code"]) for c in calls] == [
        ("sts", "GetCallerIdentity", None),
        ("s3", "ListBuckets", None),
        ("ec2", "DescribeInstances", "InvalidInstanceID.NotFound"),
    ]
    assert all(before <= call["at"] <= time.time() for call in calls)
    assert calls[2]["request"]["InstanceId.1"] == "i-0123456789abcdef0"
    assert aws.counts() == {"GetCallerIdentity": 1, "ListBuckets": 1, "DescribeInstances": 1}


def test_a_fault_strikes_as_often_as_told(aws: Double, ec2: Any) -> None:
    aws.fault("DescribeVpcs", "InternalError", "An internal error", status=500, times=2)
    for _ in range(2):
        assert refused(ec2.describe_vpcs) == ("InternalError", "An internal error", 500)
    assert ec2.describe_vpcs()["Vpcs"]


def test_throttling_is_what_sdks_try_again(aws: Double) -> None:
    aws.throttle("ec2:DescribeVpcs", times=1)
    assert refused(aws.client("ec2").describe_vpcs)[::2] == ("RequestLimitExceeded", 503)
    aws.throttle("DescribeVpcs", times=1)
    assert aws.client("ec2", attempts=3).describe_vpcs()["Vpcs"]


CALLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ec2": ("describe_vpcs", "DescribeVpcs", {}),
    "iam": ("list_roles", "ListRoles", {}),
    "sts": ("get_caller_identity", "GetCallerIdentity", {}),
    "ssm": ("get_parameter", "GetParameter", {"Name": DLAMI}),
    "s3": ("list_objects_v2", "ListObjectsV2", {"Bucket": "b"}),
    "pricing": ("get_products", "GetProducts", {"ServiceCode": "AmazonEC2"}),
    "service-quotas": (
        "get_service_quota",
        "GetServiceQuota",
        {"ServiceCode": "ec2", "QuotaCode": "L-417A185B"},
    ),
    "resourcegroupstaggingapi": ("get_resources", "GetResources", {}),
}


@pytest.mark.parametrize(
    ("service", "code", "status"),
    [
        ("ec2", "UnauthorizedOperation", 403),
        ("iam", "AccessDenied", 403),
        ("sts", "AccessDenied", 403),
        ("s3", "AccessDenied", 403),
        ("ssm", "AccessDeniedException", 400),
        ("pricing", "AccessDeniedException", 400),
        ("service-quotas", "AccessDeniedException", 400),
        ("resourcegroupstaggingapi", "AccessDeniedException", 400),
    ],
)
def test_no_permission_is_said_in_the_services_own_words(
    aws: Double, service: str, code: str, status: int
) -> None:
    method, action, arguments = CALLS[service]
    aws.deny(action)
    found = refused(getattr(aws.client(service), method), **arguments)
    assert found[::2] == (code, status)
    assert f":{action}" in found[1]


@pytest.mark.parametrize(
    ("service", "code"),
    [
        ("ec2", "RequestExpired"),
        ("iam", "ExpiredToken"),
        ("sts", "ExpiredToken"),
        ("s3", "ExpiredToken"),
        ("ssm", "ExpiredTokenException"),
        ("pricing", "ExpiredTokenException"),
        ("service-quotas", "ExpiredTokenException"),
        ("resourcegroupstaggingapi", "ExpiredTokenException"),
    ],
)
def test_expired_credentials_are_said_by_every_service(
    aws: Double, service: str, code: str
) -> None:
    method, _, arguments = CALLS[service]
    aws.expire_credentials()
    assert refused(getattr(aws.client(service), method), **arguments)[0] == code
    aws.expire_credentials(expired=False)
    if service != "s3":
        getattr(aws.client(service), method)(**arguments)


def test_latency_is_nothing_until_asked_for(aws: Double, ec2: Any) -> None:
    aws.latency("DescribeVpcs", 2.0)
    began = time.monotonic()
    ec2.describe_subnets()
    assert time.monotonic() - began < 2.0
    ec2.describe_vpcs()
    assert time.monotonic() - began > 2.0


def test_who_one_is(aws: Double) -> None:
    found = aws.client("sts").get_caller_identity()
    assert found["Account"] == "123456789012"
    assert found["Arn"] == "arn:aws:sts::123456789012:assumed-role/kvdeploy-operator/tests"
    aws.tell(identity="arn:aws:sts::123456789012:assumed-role/other/me")
    assert aws.client("sts").get_caller_identity()["Arn"].endswith("/other/me")


# -- images, quotas, prices --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameter", "owner", "name"),
    [
        (DLAMI, "amazon", "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) "),
        (
            DLAMI.replace("24.04", "22.04"),
            "amazon",
            "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 22.04) ",
        ),
        (
            "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id",
            "099720109477",
            "ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-amd64-server-",
        ),
    ],
)
def test_parameters_name_images(
    aws: Double, ec2: Any, parameter: str, owner: str, name: str
) -> None:
    found = ec2.describe_images(ImageIds=[image_of(aws, parameter)], Owners=[owner])["Images"][0]
    assert found["Name"].startswith(name)
    assert (found["State"], found["RootDeviceName"]) == ("available", "/dev/sda1")
    assert (found["Architecture"], found["VirtualizationType"]) == ("x86_64", "hvm")


def test_a_newer_image_comes_under_the_same_parameter(aws: Double, ec2: Any) -> None:
    old = image_of(aws)
    new = aws.add_parameter(DLAMI, "Deep Learning Base of tomorrow")
    assert image_of(aws) == new != old
    assert len(ec2.describe_images(ImageIds=[old, new])["Images"]) == 2
    aws.remove_image(old)
    assert refused(ec2.describe_images, ImageIds=[old])[0] == "InvalidAMIID.NotFound"


def test_quotas_are_those_told(aws: Double) -> None:
    quotas = aws.client("service-quotas")
    p5 = {"ServiceCode": "ec2", "QuotaCode": "L-417A185B"}
    aws.quota("L-417A185B", 384)
    assert quotas.get_service_quota(**p5)["Quota"]["Value"] == 384
    assert quotas.get_aws_default_service_quota(**p5)["Quota"]["Value"] == 0
    listed = quotas.list_service_quotas(ServiceCode="ec2")["Quotas"]
    assert {"L-417A185B", "L-7212CCBC", "L-DB2E81BA", "L-3819A6DF", "L-1216C47A"} <= {
        quota["QuotaCode"] for quota in listed
    }
    aws.quota("L-417A185B", None)
    assert refused(quotas.get_service_quota, **p5)[0] == "NoSuchResourceException"


def test_prices_are_those_told(aws: Double) -> None:
    pricing = aws.client("pricing", region="us-east-1")
    aws.price(P5EN, 63.296)
    aws.price(P5EN, 70, region="eu-north-1")

    def ask(**fields: str) -> list[str]:
        filters = [{"Type": "TERM_MATCH", "Field": k, "Value": v} for k, v in fields.items()]
        return list(pricing.get_products(ServiceCode="AmazonEC2", Filters=filters)["PriceList"])

    usual = {
        "instanceType": P5EN,
        "regionCode": "us-west-2",
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
    }
    (product,) = [json.loads(found) for found in ask(**usual)]
    (term,) = product["terms"]["OnDemand"].values()
    (dimension,) = term["priceDimensions"].values()
    assert float(dimension["pricePerUnit"]["USD"]) == 63.296
    assert dimension["unit"] == "Hrs"
    for field, other in [
        ("instanceType", "g6.xlarge"),
        ("regionCode", "us-east-1"),
        ("operatingSystem", "Windows"),
        ("tenancy", "Dedicated"),
        ("preInstalledSw", "SQL Std"),
        ("capacitystatus", "UnusedCapacityReservation"),
    ]:
        assert ask(**{**usual, field: other}) == []


def test_spot_prices_are_those_told(aws: Double, ec2: Any) -> None:
    aws.spot_price(P5EN, ZONE, 27.5)
    aws.spot_price("g6.xlarge", ZONE, 0.3)
    found = ec2.describe_spot_price_history(
        InstanceTypes=[P5EN], ProductDescriptions=["Linux/UNIX"]
    )["SpotPriceHistory"]
    assert [(p["AvailabilityZone"], float(p["SpotPrice"])) for p in found] == [(ZONE, 27.5)]


# -- placement groups --------------------------------------------------------------------------


def test_placement_groups_live_and_are_found(ec2: Any) -> None:
    ec2.create_placement_group(
        GroupName="a", Strategy="cluster", TagSpecifications=tagged("placement-group")
    )
    ec2.create_placement_group(GroupName="b", Strategy="spread")
    made = ec2.describe_placement_groups(GroupNames=["a"])["PlacementGroups"][0]
    assert made["GroupId"].startswith("pg-")
    assert made["GroupArn"].endswith(":placement-group/a")
    assert (made["State"], made["Strategy"], made["Tags"]) == ("available", "cluster", tag_list())
    ec2.create_tags(Resources=[made["GroupId"]], Tags=[{"Key": "more", "Value": "1"}])
    for filters in (
        by_tag(),
        [{"Name": "tag:more", "Values": ["1"]}],
        [{"Name": "group-name", "Values": ["a"]}],
        [{"Name": "strategy", "Values": ["cluster"]}],
    ):
        found = ec2.describe_placement_groups(Filters=filters)["PlacementGroups"]
        assert [group["GroupName"] for group in found] == ["a"]
    assert refused(ec2.create_placement_group, GroupName="a", Strategy="cluster")[0] == (
        "InvalidPlacementGroup.Duplicate"
    )
    ec2.delete_placement_group(GroupName="a")
    for call, arguments in (
        (ec2.describe_placement_groups, {"GroupNames": ["a"]}),
        (ec2.delete_placement_group, {"GroupName": "a"}),
    ):
        assert refused(call, **arguments)[0] == "InvalidPlacementGroup.Unknown"


def test_a_placement_group_with_instances_stays(aws: Double, ec2: Any, network: Network) -> None:
    ec2.create_placement_group(GroupName="a", Strategy="cluster")
    (made,) = launch(aws, network, kind=P5EN, Placement={"GroupName": "a"})
    assert describe(aws, made["InstanceId"])["Placement"]["GroupName"] == "a"
    assert refused(ec2.delete_placement_group, GroupName="a")[0] == "InvalidPlacementGroup.InUse"
    ec2.terminate_instances(InstanceIds=[made["InstanceId"]])
    ec2.delete_placement_group(GroupName="a")


def test_placement_groups_have_a_limit(aws: Double, ec2: Any) -> None:
    aws.tell(placement_group_limit=1)
    ec2.create_placement_group(GroupName="a", Strategy="cluster")
    code, message, _ = refused(ec2.create_placement_group, GroupName="b", Strategy="cluster")
    assert code == "PlacementGroupLimitExceeded"
    assert "(1)" in message


# -- reservations ------------------------------------------------------------------------------


def reservations(ec2: Any, **filters: str) -> list[dict[str, Any]]:
    wanted = [
        {"Name": name.replace("_", "-"), "Values": [value]} for name, value in filters.items()
    ]
    found = ec2.describe_capacity_reservations(Filters=wanted)
    return list(found["CapacityReservations"])


def test_reservations_are_found_by_every_filter(aws: Double, ec2: Any) -> None:
    ec2.create_placement_group(GroupName="pg", Strategy="cluster")
    wanted = aws.reservation(P5EN, ZONE, 4, tags=ID, placement_group="pg")
    aws.reservation("p5.48xlarge", "us-west-2c", 2, state="expired")
    (found,) = ec2.describe_capacity_reservations(CapacityReservationIds=[wanted])[
        "CapacityReservations"
    ]
    assert found["TotalInstanceCount"] == found["AvailableInstanceCount"] == 4
    assert (found["State"], found["ReservationType"]) == ("active", "default")
    assert (found["EndDateType"], found["InstanceMatchCriteria"]) == ("unlimited", "targeted")
    assert found["PlacementGroupArn"].endswith(":placement-group/pg")
    assert found["Tags"] == tag_list()
    assert "EndDate" not in found
    for filters in (
        {"instance_type": P5EN},
        {"state": "active"},
        {"availability_zone": ZONE},
        {"tag:kvdeploy:id": ID["kvdeploy:id"]},
    ):
        (one,) = reservations(ec2, **filters)
        assert one["CapacityReservationId"] == wanted
    assert refused(ec2.describe_capacity_reservations, CapacityReservationIds=["cr-1"])[0] == (
        "InvalidCapacityReservationId.NotFound"
    )


@pytest.mark.parametrize("state", ["expired", "cancelled", "pending", "scheduled"])
def test_only_an_active_reservation_takes_instances(
    aws: Double, ec2: Any, network: Network, state: Any
) -> None:
    reservation = aws.reservation(P5EN, ZONE, 4, state=state)
    assert reservations(ec2, state=state)[0]["AvailableInstanceCount"] == 0
    code, message, status = refused(
        launch,
        aws=aws,
        network=network,
        kind=P5EN,
        CapacityReservationSpecification=target(reservation),
    )
    assert (code, status) == ("InvalidCapacityReservationState", 400)
    assert f"'{state}'" in message


def test_a_reservation_empties_and_is_then_exceeded(
    aws: Double, ec2: Any, network: Network
) -> None:
    aws.capacity(P5EN, ZONE, 0)  # what is reserved does not need more
    reservation = aws.reservation(P5EN, ZONE, 2)
    spec: Any = {"CapacityReservationSpecification": target(reservation)}
    (made,) = launch(aws, network, kind=P5EN, **spec)
    shown = describe(aws, made["InstanceId"])
    assert shown["CapacityReservationId"] == reservation
    assert shown["CapacityReservationSpecification"] == target(reservation)
    assert reservations(ec2)[0]["AvailableInstanceCount"] == 1
    full = refused(launch, aws=aws, network=network, kind=P5EN, count=2, **spec)
    assert full == (
        "ReservationCapacityExceeded",
        "The requested reservation does not have sufficient compatible and available capacity "
        "for this request.",
        400,
    )
    ec2.terminate_instances(InstanceIds=[made["InstanceId"]])
    assert reservations(ec2)[0]["AvailableInstanceCount"] == 2
    launch(aws, network, kind=P5EN, count=2, **spec)


def test_another_type_zone_or_group_does_not_fit_a_reservation(
    aws: Double, ec2: Any, network: Network
) -> None:
    ec2.create_placement_group(GroupName="pg", Strategy="cluster")
    other_type = aws.reservation("p5.48xlarge", ZONE, 2)
    other_zone = aws.reservation(P5EN, "us-west-2c", 2)
    in_group = aws.reservation(P5EN, ZONE, 2, placement_group="pg")
    for reservation in (other_type, other_zone, in_group):
        spec = {"CapacityReservationSpecification": target(reservation)}
        found = refused(launch, aws=aws, network=network, kind=P5EN, **spec)
        assert found[0] == "ReservationCapacityExceeded"
    launch(
        aws,
        network,
        kind=P5EN,
        Placement={"GroupName": "pg"},
        CapacityReservationSpecification=target(in_group),
    )
    unknown = refused(
        launch,
        aws=aws,
        network=network,
        kind=P5EN,
        CapacityReservationSpecification=target("cr-0123"),
    )
    assert unknown[0] == "InvalidCapacityReservationId.NotFound"


def test_a_capacity_block_needs_its_market_and_ends(
    aws: Double, ec2: Any, network: Network
) -> None:
    end = datetime.now(UTC) + timedelta(hours=6)
    block = aws.reservation(P5EN, ZONE, 2, kind="capacity-block", end=end)
    odcr = aws.reservation(P5EN, ZONE, 2)
    (shown,) = ec2.describe_capacity_reservations(CapacityReservationIds=[block])[
        "CapacityReservations"
    ]
    assert (shown["ReservationType"], shown["EndDateType"]) == ("capacity-block", "limited")
    assert abs(shown["EndDate"] - end) < timedelta(seconds=2)
    assert shown["StartDate"] <= datetime.now(UTC)
    (listed,) = ec2.describe_capacity_blocks()["CapacityBlocks"]
    assert listed["CapacityReservationIds"] == [block]
    market = {"MarketType": "capacity-block"}
    spot = {"MarketType": "spot"}
    for reservation, options in ((block, {}), (odcr, market), (odcr, spot), (None, market)):
        more = {"CapacityReservationSpecification": target(reservation)} if reservation else {}
        found = refused(
            launch,
            aws=aws,
            network=network,
            kind=P5EN,
            **more,
            **({"InstanceMarketOptions": options} if options else {}),
        )
        assert found[0] == "InvalidParameterCombination"
    (made,) = launch(
        aws,
        network,
        kind=P5EN,
        CapacityReservationSpecification=target(block),
        InstanceMarketOptions=market,
    )
    assert describe(aws, made["InstanceId"])["InstanceLifecycle"] == "capacity-block"
    aws.set_reservation(block, end=datetime.now(UTC) - timedelta(minutes=1))
    assert reservations(ec2, reservation_type="capacity-block")[0]["State"] == "expired"


def test_offerings_are_those_told_and_can_be_bought(aws: Double, ec2: Any) -> None:
    ask = {"InstanceType": P5EN, "InstanceCount": 2, "CapacityDurationHours": 24}
    assert ec2.describe_capacity_block_offerings(**ask)["CapacityBlockOfferings"] == []
    offered = aws.block_offering(P5EN, ZONE, 2, 24, 1997.28)
    (found,) = ec2.describe_capacity_block_offerings(**ask)["CapacityBlockOfferings"]
    assert (found["CapacityBlockOfferingId"], found["UpfrontFee"]) == (offered, "1997.28")
    bought = ec2.purchase_capacity_block(
        CapacityBlockOfferingId=offered,
        InstancePlatform="Linux/UNIX",
        TagSpecifications=tagged("capacity-reservation"),
    )["CapacityReservation"]
    assert (bought["ReservationType"], bought["State"]) == ("capacity-block", "active")
    assert reservations(ec2, **{"tag:kvdeploy:id": ID["kvdeploy:id"]})


def test_an_open_reservation_takes_a_fitting_instance_by_itself(
    aws: Double, ec2: Any, network: Network
) -> None:
    made = ec2.create_capacity_reservation(
        InstanceType=P5EN, InstancePlatform="Linux/UNIX", AvailabilityZone=ZONE, InstanceCount=1
    )["CapacityReservation"]
    (instance,) = launch(aws, network, kind=P5EN)
    assert (
        describe(aws, instance["InstanceId"])["CapacityReservationId"]
        == (made["CapacityReservationId"])
    )
    ec2.cancel_capacity_reservation(CapacityReservationId=made["CapacityReservationId"])
    assert reservations(ec2)[0]["State"] == "cancelled"


# -- launches ----------------------------------------------------------------------------------


def make_profile(aws: Double) -> str:
    iam = aws.client("iam")
    trust = {"Version": "2012-10-17", "Statement": []}
    iam.create_role(RoleName="r", AssumeRolePolicyDocument=json.dumps(trust), Tags=tag_list())
    iam.attach_role_policy(
        RoleName="r", PolicyArn="arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore"
    )
    profile = iam.create_instance_profile(InstanceProfileName="p")["InstanceProfile"]
    iam.add_role_to_instance_profile(InstanceProfileName="p", RoleName="r")
    return str(profile["Arn"])


def make_template(aws: Double, network: Network, **more: Any) -> dict[str, Any]:
    ec2 = aws.client("ec2")
    ec2.import_key_pair(KeyName="k", PublicKeyMaterial=PUBLIC_KEY)
    ec2.create_placement_group(GroupName="pg", Strategy="cluster")
    data: dict[str, Any] = {
        "ImageId": image_of(aws),
        "InstanceType": P5EN,
        "KeyName": "k",
        "EbsOptimized": True,
        "Monitoring": {"Enabled": True},
        "UserData": "IyEvYmluL3No",
        "IamInstanceProfile": {"Arn": make_profile(aws)},
        "MetadataOptions": {
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 2,
            "HttpEndpoint": "enabled",
        },
        "BlockDeviceMappings": [
            {
                "DeviceName": "/dev/sda1",
                "Ebs": {
                    "VolumeSize": 500,
                    "VolumeType": "gp3",
                    "Iops": 16000,
                    "Throughput": 1000,
                    "Encrypted": True,
                    "DeleteOnTermination": True,
                },
            }
        ],
        "NetworkInterfaces": efa_interfaces(network),
        "Placement": {"GroupName": "pg", "AvailabilityZone": ZONE},
        "TagSpecifications": [
            {"ResourceType": kind, "Tags": tag_list({**ID, "from": "template"})}
            for kind in ("instance", "volume", "network-interface")
        ],
        **more,
    }
    made = ec2.create_launch_template(
        LaunchTemplateName="lt",
        LaunchTemplateData=data,
        TagSpecifications=tagged("launch-template"),
    )
    return {"LaunchTemplateId": made["LaunchTemplate"]["LaunchTemplateId"], "Version": "$Latest"}


def test_a_launch_template_counts_in_every_part(aws: Double, ec2: Any, network: Network) -> None:
    made = ec2.run_instances(
        LaunchTemplate=make_template(aws, network),
        MinCount=1,
        MaxCount=1,
        TagSpecifications=tagged("instance", {"from": "request", "kvdeploy:role": "prefill"}),
    )["Instances"][0]
    assert made["State"]["Name"] == "pending"
    shown = describe(aws, made["InstanceId"])
    assert shown["State"]["Name"] == "running"
    nics = sorted(shown["NetworkInterfaces"], key=lambda n: n["Attachment"]["NetworkCardIndex"])
    assert [n["InterfaceType"] for n in nics] == ["efa"] + ["efa-only"] * 15
    assert [n["Attachment"]["NetworkCardIndex"] for n in nics] == list(range(16))
    assert [n["Attachment"]["DeviceIndex"] for n in nics] == [0] + [1] * 15
    assert {g["GroupId"] for n in nics for g in n["Groups"]} == {network.security_group_id}
    assert {n["SubnetId"] for n in nics} == {shown["SubnetId"]} == {network.subnet_id}
    assert ["PrivateIpAddress" in n for n in nics] == [True] + [False] * 15
    assert "Association" not in nics[0]
    assert [g["GroupId"] for g in shown["SecurityGroups"]] == [network.security_group_id]
    assert shown["IamInstanceProfile"]["Arn"].endswith(":instance-profile/p")
    assert shown["MetadataOptions"]["HttpTokens"] == "required"
    assert shown["MetadataOptions"]["HttpPutResponseHopLimit"] == 2
    assert (shown["Monitoring"]["State"], shown["EbsOptimized"]) == ("enabled", True)
    assert (shown["KeyName"], shown["Placement"]["GroupName"]) == ("k", "pg")
    tags = {tag["Key"]: tag["Value"] for tag in shown["Tags"]}
    assert tags.pop("aws:ec2launchtemplate:id").startswith("lt-")
    assert tags.pop("aws:ec2launchtemplate:version") == "1"
    assert tags == {**ID, "from": "request", "kvdeploy:role": "prefill"}
    (volume,) = ec2.describe_volumes(Filters=by_tag())["Volumes"]
    assert (volume["Size"], volume["VolumeType"], volume["Encrypted"]) == (500, "gp3", True)
    assert (volume["Iops"], volume["Throughput"]) == (16000, 1000)
    assert len(ec2.describe_network_interfaces(Filters=by_tag())["NetworkInterfaces"]) == 16
    data = ec2.describe_instance_attribute(InstanceId=made["InstanceId"], Attribute="userData")
    assert data["UserData"]["Value"] == "IyEvYmluL3No"
    ec2.terminate_instances(InstanceIds=[made["InstanceId"]])
    assert ec2.describe_volumes(Filters=by_tag())["Volumes"] == []
    assert ec2.describe_network_interfaces(Filters=by_tag())["NetworkInterfaces"] == []


def test_a_templates_own_tags_stay_out_of_its_data(aws: Double, ec2: Any, network: Network) -> None:
    make_template(aws, network)
    (template,) = ec2.describe_launch_templates(Filters=by_tag())["LaunchTemplates"]
    assert template["Tags"] == tag_list()
    template_id = template["LaunchTemplateId"]
    (version,) = ec2.describe_launch_template_versions(LaunchTemplateId=template_id)[
        "LaunchTemplateVersions"
    ]
    kinds = [s["ResourceType"] for s in version["LaunchTemplateData"]["TagSpecifications"]]
    assert kinds == ["instance", "volume", "network-interface"]
    ec2.create_launch_template_version(
        LaunchTemplateId=template_id, LaunchTemplateData={"ImageId": image_of(aws)}
    )
    (again,) = ec2.describe_launch_templates(LaunchTemplateIds=[template_id])["LaunchTemplates"]
    assert (again["LatestVersionNumber"], again["DefaultVersionNumber"]) == (2, 1)


def test_a_spot_launch_is_spot(aws: Double, ec2: Any, network: Network) -> None:
    market = {"MarketType": "spot", "SpotOptions": {"MaxPrice": "30.5"}}
    (made,) = launch(aws, network, kind=P5EN, InstanceMarketOptions=market)
    shown = describe(aws, made["InstanceId"])
    assert shown["InstanceLifecycle"] == "spot"
    (request,) = ec2.describe_spot_instance_requests(
        SpotInstanceRequestIds=[shown["SpotInstanceRequestId"]]
    )["SpotInstanceRequests"]
    assert (request["InstanceId"], request["State"]) == (made["InstanceId"], "active")
    assert (request["SpotPrice"], request["Status"]["Code"]) == ("30.5", "fulfilled")
    ids = [shown["SpotInstanceRequestId"]]
    ec2.cancel_spot_instance_requests(SpotInstanceRequestIds=ids)
    (request,) = ec2.describe_spot_instance_requests(
        Filters=[{"Name": "state", "Values": ["cancelled"]}]
    )["SpotInstanceRequests"]
    assert request["InstanceId"] == made["InstanceId"]
    assert describe(aws, made["InstanceId"])["State"]["Name"] == "running"


def test_a_launch_without_capacity_is_ec2s_500(aws: Double, network: Network) -> None:
    aws.capacity(P5EN, ZONE, 1)
    launch(aws, network, kind=P5EN)
    alone = refused(launch, aws=aws, network=network, kind=P5EN)
    assert alone == (
        "InsufficientInstanceCapacity",
        "We currently do not have sufficient p5en.48xlarge capacity in the Availability Zone you "
        "requested (us-west-2a). Our system will be working on provisioning additional capacity.",
        500,
    )
    aws.capacity(P5EN, "us-west-2c", 4)
    aws.capacity(P5EN, "us-west-2d", 1)
    assert refused(launch, aws=aws, network=network, kind=P5EN)[1] == alone[1] + (
        " You can currently get p5en.48xlarge capacity by not specifying an Availability Zone in "
        "your request or choosing us-west-2c, us-west-2d."
    )
    aws.capacity(P5EN, ZONE, None)
    launch(aws, network, kind=P5EN)


def test_as_many_start_as_there_are(aws: Double, network: Network) -> None:
    aws.capacity(P5EN, ZONE, 3)
    assert len(launch(aws, network, kind=P5EN, MinCount=2, MaxCount=5)) == 3


@pytest.mark.parametrize(
    ("kind", "code", "vcpus"),
    [(P5EN, "L-417A185B", 192), ("g6.xlarge", "L-DB2E81BA", 4), ("m7i.large", "L-1216C47A", 2)],
)
def test_vcpu_quotas_are_limits(
    aws: Double, network: Network, kind: str, code: str, vcpus: int
) -> None:
    aws.quota(code, 2 * vcpus)
    launch(aws, network, kind=kind, count=2)
    found, message, status = refused(launch, aws=aws, network=network, kind=kind)
    assert (found, status) == ("VcpuLimitExceeded", 400)
    assert f"your current vCPU limit of {2 * vcpus} allows" in message
    launch(aws, network, kind=kind, InstanceMarketOptions={"MarketType": "spot"})


def test_spot_has_a_quota_of_its_own(aws: Double, network: Network) -> None:
    aws.quota("L-7212CCBC", 191)
    spot: Any = {"InstanceMarketOptions": {"MarketType": "spot"}}
    found = refused(launch, aws=aws, network=network, kind=P5EN, **spot)
    assert found[0] == "MaxSpotInstanceCountExceeded"
    launch(aws, network, kind=P5EN)


def test_reserved_instances_count_against_the_quota_once(aws: Double, network: Network) -> None:
    aws.quota("L-417A185B", 384)
    reservation = aws.reservation(P5EN, ZONE, 2)
    launch(aws, network, kind=P5EN, count=2, CapacityReservationSpecification=target(reservation))
    assert refused(launch, aws=aws, network=network, kind=P5EN)[0] == "VcpuLimitExceeded"


def wrong_interfaces(network: Network) -> dict[str, tuple[str, list[dict[str, Any]], str, str]]:
    base = efa_interfaces(network)
    public = [{**base[0], "AssociatePublicIpAddress": True}, *base[1:]]
    only = [{**base[0], "InterfaceType": "efa-only"}]
    beyond = [base[0], {**base[1], "NetworkCardIndex": 16}]
    same = [base[0], {**base[1], "NetworkCardIndex": 0, "DeviceIndex": 0}]
    plain = [{**base[0], "DeviceIndex": index, "InterfaceType": "interface"} for index in range(4)]
    return {
        "a public address with several": (
            P5EN,
            public,
            "InvalidParameterCombination",
            "The associatePublicIPAddress parameter cannot be specified when launching with "
            "multiple network interfaces.",
        ),
        "no EFA on the type": (
            "m7i.large",
            base[:1],
            "InvalidParameterCombination",
            "Elastic Fabric Adapter interfaces are not supported on m7i.large.",
        ),
        "more cards than there are": (
            P5EN,
            beyond,
            "InvalidParameterValue",
            "Network card index 16 exceeds the limit for p5en.48xlarge, which has 16 network "
            "card(s).",
        ),
        "efa-only as the primary one": (
            P5EN,
            only,
            "InvalidParameterCombination",
            "The primary network interface cannot be of type efa-only.",
        ),
        "no primary one": (
            P5EN,
            base[1:],
            "InvalidParameterCombination",
            "The request must contain a network interface with device index 0 on network card 0.",
        ),
        "two in one place": (
            P5EN,
            same,
            "InvalidParameterValue",
            "Each network interface requires a device index of its own on its network card.",
        ),
        "more than the type has": (
            "m7i.large",
            plain,
            "AttachmentLimitExceeded",
            "Interface count 4 exceeds the limit for m7i.large.",
        ),
        "more EFA than the type has": (
            "g6.48xlarge",
            [base[0], {**base[1], "NetworkCardIndex": 0}],
            "AttachmentLimitExceeded",
            "EFA interface count 2 exceeds the limit for g6.48xlarge.",
        ),
    }


@pytest.mark.parametrize("wrong", list(wrong_interfaces(Network("", "", ""))))
def test_interfaces_that_a_type_cannot_have_are_refused(
    aws: Double, network: Network, wrong: str
) -> None:
    kind, nics, code, message = wrong_interfaces(network)[wrong]
    found = refused(launch, aws=aws, network=network, kind=kind, NetworkInterfaces=nics)
    assert found == (code, message, 400)


def test_a_launch_of_things_that_are_not_there_is_refused(
    aws: Double, ec2: Any, network: Network
) -> None:
    elsewhere = aws.existing_network("us-west-2b", "10.61.0.0/16")
    cases: list[tuple[str, dict[str, Any]]] = [
        ("InvalidAMIID.NotFound", {"ImageId": "ami-0123456789abcdef0"}),
        ("InvalidKeyPair.NotFound", {"KeyName": "none"}),
        ("InvalidGroup.NotFound", {"SecurityGroupIds": ["sg-0123456789abcdef0"]}),
        ("InvalidParameter", {"SecurityGroupIds": [elsewhere.security_group_id]}),
        ("InvalidSubnetID.NotFound", {"SubnetId": "subnet-0123456789abcdef0"}),
        ("InvalidPlacementGroup.Unknown", {"Placement": {"GroupName": "none"}}),
        ("InvalidParameterValue", {"IamInstanceProfile": {"Name": "none"}}),
        ("InvalidParameterValue", {"InstanceType": "p9.huge"}),
        ("InvalidParameterCombination", {"Placement": {"AvailabilityZone": "us-west-2c"}}),
        ("InvalidLaunchTemplateId.NotFound", {"LaunchTemplate": {"LaunchTemplateId": "lt-01"}}),
        ("DoubleNotImplemented", {"EnclaveOptions": {"Enabled": True}}),
        ("DryRunOperation", {"DryRun": True}),
    ]
    for code, more in cases:
        assert refused(launch, aws=aws, network=network, **more)[0] == code
    found, message, _ = refused(launch, aws=aws, network=elsewhere, kind=P5EN)
    assert found == "Unsupported"
    assert message.endswith("choosing us-west-2a, us-west-2c, us-west-2d.")
    assert aws.instances() == []


def test_the_same_token_launches_once(aws: Double, network: Network) -> None:
    first = launch(aws, network, ClientToken="t")
    again = launch(aws, network, ClientToken="t")
    assert [i["InstanceId"] for i in first] == [i["InstanceId"] for i in again]
    assert len(aws.instances()) == 1


def test_addresses_are_of_the_subnet_and_distinct(aws: Double, ec2: Any, network: Network) -> None:
    made = launch(aws, network, kind="m7i.large", count=5)
    addresses = [i["PrivateIpAddress"] for i in made]
    assert len(set(addresses)) == 5
    assert all(address.startswith("10.60.") for address in addresses)
    assert "10.60.0.1" not in addresses


def test_who_takes_anothers_place_has_another_address(aws: Double, network: Network) -> None:
    (first,) = launch(aws, network)
    aws.terminate_instance(first["InstanceId"])
    (second,) = launch(aws, network)
    assert first["PrivateIpAddress"] != second["PrivateIpAddress"]


def test_a_subnet_can_be_full(aws: Double, ec2: Any) -> None:
    network = aws.existing_network(ZONE, free_addresses=2)

    def free() -> int:
        found = ec2.describe_subnets(SubnetIds=[network.subnet_id])["Subnets"][0]
        return int(found["AvailableIpAddressCount"])

    assert free() == 2
    launch(aws, network, kind=P5EN, NetworkInterfaces=efa_interfaces(network))
    assert free() == 1
    code, message, _ = refused(launch, aws=aws, network=network, count=2)
    assert code == "InsufficientFreeAddressesInSubnet"
    assert network.subnet_id in message


def test_an_instance_boots_and_ends_in_ec2s_steps(aws: Double, ec2: Any, network: Network) -> None:
    aws.slow_boot(0.15)
    aws.slow_shutdown(0.15)
    (made,) = launch(aws, network)
    seen = follow(aws, made["InstanceId"], "running")
    ec2.terminate_instances(InstanceIds=[made["InstanceId"]])
    seen += follow(aws, made["InstanceId"], "terminated")
    assert seen == ["pending", "running", "shutting-down", "terminated"]
    ended = describe(aws, made["InstanceId"])
    assert ended["NetworkInterfaces"] == []
    assert not {"PrivateIpAddress", "SubnetId", "VpcId"} & set(ended)
    assert aws.instances() == []


def follow(aws: Double, instance_id: str, last: str) -> list[str]:
    seen: list[str] = []
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and last not in seen:
        state = describe(aws, instance_id)["State"]["Name"]
        if state not in seen:
            seen.append(state)
    return seen


def test_ec2_may_stop_or_end_an_instance_by_itself(aws: Double, network: Network) -> None:
    one, two = (i["InstanceId"] for i in launch(aws, network, count=2))
    aws.stop_instance(one)
    aws.terminate_instance(two, code="Server.SpotInstanceTermination", message="out-bid")
    stopped, ended = describe(aws, one), describe(aws, two)
    assert (stopped["State"]["Name"], stopped["StateReason"]["Code"]) == (
        "stopped",
        "Server.ScheduledStop",
    )
    assert (ended["State"]["Name"], ended["StateReason"]["Code"]) == (
        "terminated",
        "Server.SpotInstanceTermination",
    )


def test_agents_report_unless_told_otherwise(aws: Double, ec2: Any, network: Network) -> None:
    ssm = aws.client("ssm")
    arn = make_profile(aws)
    one, two = launch(aws, network, count=2, IamInstanceProfile={"Arn": arn})
    launch(aws, network)
    aws.unmanaged(two["InstanceId"])
    filters = [{"Key": "InstanceIds", "Values": [one["InstanceId"], two["InstanceId"]]}]
    found = ssm.describe_instance_information(Filters=filters)["InstanceInformationList"]
    assert [(a["InstanceId"], a["PingStatus"]) for a in found] == [(one["InstanceId"], "Online")]


# -- tags and filters --------------------------------------------------------------------------

LISTS: dict[str, tuple[str, str, str]] = {
    "instance": ("describe_instances", "Reservations", "InstanceId"),
    "volume": ("describe_volumes", "Volumes", "VolumeId"),
    "network-interface": (
        "describe_network_interfaces",
        "NetworkInterfaces",
        "NetworkInterfaceId",
    ),
    "security-group": ("describe_security_groups", "SecurityGroups", "GroupId"),
    "security-group-rule": (
        "describe_security_group_rules",
        "SecurityGroupRules",
        "SecurityGroupRuleId",
    ),
    "vpc": ("describe_vpcs", "Vpcs", "VpcId"),
    "subnet": ("describe_subnets", "Subnets", "SubnetId"),
    "route-table": ("describe_route_tables", "RouteTables", "RouteTableId"),
    "internet-gateway": ("describe_internet_gateways", "InternetGateways", "InternetGatewayId"),
    "natgateway": ("describe_nat_gateways", "NatGateways", "NatGatewayId"),
    "vpc-endpoint": ("describe_vpc_endpoints", "VpcEndpoints", "VpcEndpointId"),
    "elastic-ip": ("describe_addresses", "Addresses", "AllocationId"),
    "placement-group": ("describe_placement_groups", "PlacementGroups", "GroupId"),
    "launch-template": ("describe_launch_templates", "LaunchTemplates", "LaunchTemplateId"),
    "key-pair": ("describe_key_pairs", "KeyPairs", "KeyPairId"),
    "capacity-reservation": (
        "describe_capacity_reservations",
        "CapacityReservations",
        "CapacityReservationId",
    ),
}


def make_everything(aws: Double, cluster: str, cidr: str) -> dict[str, str]:
    """One of each kind, tagged as it is made; kind -> id."""
    ec2, tags = aws.client("ec2"), {"kvdeploy:id": cluster}

    def tagging(kind: str) -> dict[str, Any]:
        return {"TagSpecifications": tagged(kind, tags)}

    vpc = ec2.create_vpc(CidrBlock=cidr, **tagging("vpc"))["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(
        VpcId=vpc, CidrBlock=cidr, AvailabilityZone=ZONE, **tagging("subnet")
    )["Subnet"]["SubnetId"]
    group = ec2.create_security_group(
        GroupName=f"g-{cluster}", Description="d", VpcId=vpc, **tagging("security-group")
    )["GroupId"]
    pair = {"GroupId": group, "Description": "all of our own"}
    rule = ec2.authorize_security_group_ingress(
        GroupId=group,
        IpPermissions=[{"IpProtocol": "-1", "UserIdGroupPairs": [pair]}],
        **tagging("security-group-rule"),
    )["SecurityGroupRules"][0]
    assert rule["Description"] == "all of our own"
    table = ec2.create_route_table(VpcId=vpc, **tagging("route-table"))["RouteTable"]
    gateway = ec2.create_internet_gateway(**tagging("internet-gateway"))["InternetGateway"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway["InternetGatewayId"], VpcId=vpc)
    address = ec2.allocate_address(Domain="vpc", **tagging("elastic-ip"))["AllocationId"]
    nat = ec2.create_nat_gateway(SubnetId=subnet, AllocationId=address, **tagging("natgateway"))
    endpoint = ec2.create_vpc_endpoint(
        VpcId=vpc,
        ServiceName="com.amazonaws.us-west-2.ssm",
        VpcEndpointType="Interface",
        SubnetIds=[subnet],
        SecurityGroupIds=[group],
        **tagging("vpc-endpoint"),
    )["VpcEndpoint"]
    placement = ec2.create_placement_group(
        GroupName=f"p-{cluster}", Strategy="cluster", **tagging("placement-group")
    )["PlacementGroup"]
    key = ec2.import_key_pair(
        KeyName=f"k-{cluster}", PublicKeyMaterial=PUBLIC_KEY, **tagging("key-pair")
    )
    template = ec2.create_launch_template(
        LaunchTemplateName=f"t-{cluster}",
        LaunchTemplateData={"InstanceType": "m7i.large"},
        **tagging("launch-template"),
    )["LaunchTemplate"]
    (instance,) = launch(
        aws,
        Network(vpc, subnet, group),
        SecurityGroupIds=[group],
        TagSpecifications=[
            *tagged("instance", tags),
            *tagged("volume", tags),
            *tagged("network-interface", tags),
        ],
    )
    shown = describe(aws, instance["InstanceId"])
    return {
        "instance": instance["InstanceId"],
        "volume": shown["BlockDeviceMappings"][0]["Ebs"]["VolumeId"],
        "network-interface": shown["NetworkInterfaces"][0]["NetworkInterfaceId"],
        "security-group": group,
        "security-group-rule": rule["SecurityGroupRuleId"],
        "vpc": vpc,
        "subnet": subnet,
        "route-table": table["RouteTableId"],
        "internet-gateway": gateway["InternetGatewayId"],
        "natgateway": nat["NatGateway"]["NatGatewayId"],
        "vpc-endpoint": endpoint["VpcEndpointId"],
        "elastic-ip": address,
        "placement-group": placement["GroupId"],
        "launch-template": template["LaunchTemplateId"],
        "key-pair": key["KeyPairId"],
        "capacity-reservation": aws.reservation(P5EN, ZONE, 1, tags=tags),
    }


def list_ids(ec2: Any, kind: str, filters: list[dict[str, Any]]) -> list[str]:
    method, key, name = LISTS[kind]
    argument = "Filter" if kind == "natgateway" else "Filters"
    found = getattr(ec2, method)(**{argument: filters})[key]
    if kind == "instance":
        found = [instance for reservation in found for instance in reservation["Instances"]]
    return [item[name] for item in found]


def test_every_kind_is_found_by_its_tag_and_only_by_it(aws: Double, ec2: Any) -> None:
    ours = make_everything(aws, "aaaa0001", "10.70.0.0/16")
    make_everything(aws, "bbbb0002", "10.71.0.0/16")
    assert set(ours) == set(LISTS)
    for kind, thing_id in ours.items():
        assert list_ids(ec2, kind, by_tag("aaaa0001")) == [thing_id], kind
        assert list_ids(ec2, kind, by_tag("aaaa*")) == [thing_id], kind
        assert list_ids(ec2, kind, by_tag("none")) == [], kind
        assert len(list_ids(ec2, kind, by_tag("????000?"))) == 2, kind
        assert len(list_ids(ec2, kind, [{"Name": "tag-key", "Values": ["kvdeploy:id"]}])) == 2
        both = [*by_tag("aaaa0001"), {"Name": "tag:kvdeploy:name", "Values": ["x"]}]
        assert list_ids(ec2, kind, both) == [], kind
        unknown = [{"Name": "no-such-filter", "Values": ["x"]}]
        assert refused(list_ids, ec2=ec2, kind=kind, filters=unknown)[0] == "DoubleNotImplemented"
    tags = aws.resources()
    assert {kind for kind, things in tags.items() if ours.get(kind) in things} == set(ours)
    listed = aws.client("resourcegroupstaggingapi").get_resources(
        TagFilters=[{"Key": "kvdeploy:id", "Values": ["aaaa0001"]}]
    )["ResourceTagMappingList"]
    assert {arn["ResourceARN"].rsplit("/", 1)[1] for arn in listed} == set(ours.values())


def test_tags_of_what_is_gone_are_gone(aws: Double, ec2: Any, network: Network) -> None:
    group = ec2.create_security_group(
        GroupName="g",
        Description="d",
        VpcId=network.vpc_id,
        TagSpecifications=tagged("security-group"),
    )["GroupId"]
    wanted = [{"Name": "key", "Values": ["kvdeploy:id"]}]
    (found,) = ec2.describe_tags(Filters=wanted)["Tags"]
    assert (found["ResourceId"], found["ResourceType"]) == (group, "security-group")
    ec2.delete_security_group(GroupId=group)
    assert ec2.describe_tags(Filters=wanted)["Tags"] == []


def test_filters_other_than_tags_are_honoured_too(aws: Double, ec2: Any, network: Network) -> None:
    ours = make_everything(aws, "aaaa0001", "10.70.0.0/16")
    others = make_everything(aws, "bbbb0002", "10.71.0.0/16")
    cases: list[tuple[str, str, str, str]] = [
        ("instance", "vpc-id", ours["vpc"], "instance"),
        ("instance", "instance-state-name", "stopped", ""),
        ("volume", "attachment.instance-id", ours["instance"], "volume"),
        ("security-group", "group-name", "g-aaaa0001", "security-group"),
        ("vpc", "cidr", "10.70.0.0/16", "vpc"),
        ("subnet", "vpc-id", ours["vpc"], "subnet"),
        ("internet-gateway", "attachment.vpc-id", ours["vpc"], "internet-gateway"),
        ("natgateway", "subnet-id", ours["subnet"], "natgateway"),
        ("vpc-endpoint", "vpc-id", ours["vpc"], "vpc-endpoint"),
        ("elastic-ip", "allocation-id", ours["elastic-ip"], "elastic-ip"),
        ("key-pair", "key-name", "k-aaaa0001", "key-pair"),
        ("launch-template", "launch-template-name", "t-aaaa*", "launch-template"),
        ("network-interface", "attachment.instance-id", ours["instance"], "network-interface"),
    ]
    for kind, name, value, found in cases:
        filters = [{"Name": name, "Values": [value]}]
        assert list_ids(ec2, kind, filters) == ([ours[found]] if found else []), (kind, name)
    several = [{"Name": "group-id", "Values": [ours["security-group"], "sg-01"]}]
    assert len(list_ids(ec2, "network-interface", several)) == 2  # the instance's, the endpoint's
    assert list_ids(ec2, "route-table", [{"Name": "vpc-id", "Values": [others["vpc"]]}])
    zones = ec2.describe_availability_zones(
        Filters=[{"Name": "opt-in-status", "Values": ["opt-in-not-required"]}]
    )["AvailabilityZones"]
    assert ZONE in {zone["ZoneName"] for zone in zones}


# -- networks ----------------------------------------------------------------------------------


def test_what_is_used_cannot_be_deleted(aws: Double, ec2: Any) -> None:
    made = make_everything(aws, "aaaa0001", "10.70.0.0/16")

    def blocked() -> list[str]:
        return [
            refused(ec2.delete_vpc, VpcId=made["vpc"])[0],
            refused(ec2.delete_subnet, SubnetId=made["subnet"])[0],
            refused(
                ec2.detach_internet_gateway,
                InternetGatewayId=made["internet-gateway"],
                VpcId=made["vpc"],
            )[0],
        ]

    assert blocked() == ["DependencyViolation"] * 3
    assert refused(ec2.delete_security_group, GroupId=made["security-group"])[:2] == (
        "DependencyViolation",
        f"resource {made['security-group']} has a dependent object",
    )
    assert refused(ec2.release_address, AllocationId=made["elastic-ip"])[0] == (
        "InvalidIPAddress.InUse"
    )
    ec2.terminate_instances(InstanceIds=[made["instance"]])
    assert blocked() == ["DependencyViolation"] * 3
    ec2.delete_nat_gateway(NatGatewayId=made["natgateway"])
    found = ec2.describe_nat_gateways(NatGatewayIds=[made["natgateway"]])["NatGateways"][0]
    assert found["State"] == "deleted"
    ec2.delete_vpc_endpoints(VpcEndpointIds=[made["vpc-endpoint"]])
    ec2.release_address(AllocationId=made["elastic-ip"])
    ec2.detach_internet_gateway(InternetGatewayId=made["internet-gateway"], VpcId=made["vpc"])
    ec2.delete_internet_gateway(InternetGatewayId=made["internet-gateway"])
    ec2.delete_subnet(SubnetId=made["subnet"])
    assert refused(ec2.delete_vpc, VpcId=made["vpc"])[0] == "DependencyViolation"
    ec2.delete_security_group(GroupId=made["security-group"])
    ec2.delete_route_table(RouteTableId=made["route-table"])
    ec2.delete_vpc(VpcId=made["vpc"])
    assert made["vpc"] not in aws.resources().get("vpc", {})


def test_a_group_that_another_names_stays(ec2: Any, network: Network) -> None:
    other = ec2.create_security_group(GroupName="o", Description="d", VpcId=network.vpc_id)[
        "GroupId"
    ]
    pair = {"GroupId": network.security_group_id}
    ec2.authorize_security_group_ingress(
        GroupId=other, IpPermissions=[{"IpProtocol": "-1", "UserIdGroupPairs": [pair]}]
    )
    delete = ec2.delete_security_group
    assert refused(delete, GroupId=network.security_group_id)[0] == "DependencyViolation"
    ec2.delete_security_group(GroupId=other)
    ec2.delete_security_group(GroupId=network.security_group_id)


def test_a_nat_gateway_takes_its_time_if_told(aws: Double, ec2: Any) -> None:
    made = make_everything(aws, "aaaa0001", "10.70.0.0/16")
    aws.tell(nat_s=30)
    ec2.delete_nat_gateway(NatGatewayId=made["natgateway"])
    (found,) = ec2.describe_nat_gateways(Filter=[{"Name": "state", "Values": ["deleting"]}])[
        "NatGateways"
    ]
    assert found["NatGatewayId"] == made["natgateway"]


def test_a_leaked_interface_blocks_and_can_be_removed(
    aws: Double, ec2: Any, network: Network
) -> None:
    loose = aws.leak_interface(network.subnet_id, tags=ID)
    held = aws.leak_interface(
        network.subnet_id, tags=ID, status="in-use", group_ids=(network.security_group_id,)
    )
    found = ec2.describe_network_interfaces(Filters=by_tag())["NetworkInterfaces"]
    states = {eni["NetworkInterfaceId"]: eni["Status"] for eni in found}
    assert states == {loose: "available", held: "in-use"}
    assert refused(ec2.delete_subnet, SubnetId=network.subnet_id)[0] == "DependencyViolation"
    assert refused(ec2.delete_network_interface, NetworkInterfaceId=held)[:2] == (
        "InvalidParameterValue",
        f"Network interface '{held}' is currently in use.",
    )
    attachment = next(e for e in found if e["NetworkInterfaceId"] == held)["Attachment"]
    ec2.detach_network_interface(AttachmentId=attachment["AttachmentId"])
    for interface in (loose, held):
        ec2.delete_network_interface(NetworkInterfaceId=interface)
    ec2.delete_subnet(SubnetId=network.subnet_id)


def test_interfaces_of_an_instance_come_off_but_the_first(
    aws: Double, ec2: Any, network: Network
) -> None:
    (made,) = launch(aws, network)
    second = aws.leak_interface(network.subnet_id, tags=ID, instance_id=made["InstanceId"])
    nics = {
        nic["NetworkInterfaceId"]: nic["Attachment"]["AttachmentId"]
        for nic in describe(aws, made["InstanceId"])["NetworkInterfaces"]
    }
    attachment = nics.pop(second)
    (first,) = nics.values()
    detach = ec2.detach_network_interface
    assert refused(detach, AttachmentId=first)[0] == "OperationNotPermitted"
    detach(AttachmentId=attachment)
    ec2.delete_network_interface(NetworkInterfaceId=second)


def test_limits_of_addresses_and_networks(aws: Double, ec2: Any) -> None:
    aws.quota("L-0263D0A3", 0)
    aws.quota("L-F678F1CE", 1, service="vpc")
    assert refused(ec2.allocate_address, Domain="vpc")[0] == "AddressLimitExceeded"
    assert refused(ec2.create_vpc, CidrBlock="10.9.0.0/16")[0] == "VpcLimitExceeded"


def test_a_bucket_that_denies_all_but_tls_can_be_used(aws: Double) -> None:
    s3 = aws.client("s3")
    s3.create_bucket(Bucket="state", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    deny = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:*",
        "Resource": "arn:aws:s3:::state/*",
        "Condition": {"Bool": {"aws:SecureTransport": "false"}},
    }
    s3.put_bucket_policy(
        Bucket="state", Policy=json.dumps({"Version": "2012-10-17", "Statement": [deny]})
    )
    s3.put_object(Bucket="state", Key="k", Body=b"1", IfNoneMatch="*")
    again = refused(s3.put_object, Bucket="state", Key="k", Body=b"2", IfNoneMatch="*")
    assert again[::2] == ("PreconditionFailed", 412)
    assert aws.resources()["bucket"] == {"state": {}}
