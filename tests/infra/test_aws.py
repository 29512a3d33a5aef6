"""The AWS adapter against the double: real boto3, real HTTP."""

from __future__ import annotations

import io
import json
import os
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from kvdeploy.adapters.aws import leftovers, statebucket
from kvdeploy.adapters.aws.children import children
from kvdeploy.adapters.aws.facts import look
from kvdeploy.adapters.aws.nodes import observe
from kvdeploy.adapters.aws.prices import prices_of
from kvdeploy.adapters.aws.session import Aws
from kvdeploy.adapters.aws.sweep import sweep
from kvdeploy.errors import AwsError
from kvdeploy.model.awsfacts import AwsFacts, Refusal, StateLock
from kvdeploy.model.catalog import IMAGE_PARAMETERS
from kvdeploy.model.infra import Leftover
from kvdeploy.model.prices import spot_key
from kvdeploy.model.spec import ClusterSpec
from kvdeploy.planning.aws_checks import check_aws
from kvdeploy.planning.nodes import nodes_of
from tests.double.client import Double

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.real_process
ZONE = "us-west-2a"
OURS = {"kvdeploy:cluster": "demo", "kvdeploy:id": "beef", "kvdeploy:managed": "terraform"}


@pytest.fixture(scope="module")
def server() -> Iterator[Double]:
    with Double() as double:
        yield double


@pytest.fixture
def double(server: Double, monkeypatch: pytest.MonkeyPatch) -> Double:
    server.reset()
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture(scope="module")
def clients() -> Aws:
    """Made once: boto3 takes a third of a second to make a client of EC2."""
    return Aws("us-west-2", attempts=2)


@pytest.fixture
def aws(double: Double, clients: Aws) -> Aws:
    return clients


@cache
def client(double: Double, service: str, region: str = "us-west-2") -> Any:
    """What the tests themselves make things with."""
    return double.client(service, region=region)


class Clock:
    """No wait: time goes by when somebody sleeps."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


def spec(**aws: Any) -> ClusterSpec:
    more = {key: aws.pop(key) for key in ("model", "state") if key in aws}
    top = {"name": "demo", "target": "aws", "model": {"id": "hub/model"}} | more
    return ClusterSpec.model_validate(top | {"aws": {"region": "us-west-2", "zone": ZONE} | aws})


def seen(aws: Aws, cluster: ClusterSpec, **over: Any) -> AwsFacts:
    return look(aws, cluster, nodes_of(cluster), **over)


def messages(aws: Aws, cluster: ClusterSpec) -> list[str]:
    return [f.message for f in check_aws(cluster, seen(aws, cluster))]


def tagged(kind: str, address: str = "", **tags: str) -> list[dict[str, Any]]:
    every = OURS | tags | ({"kvdeploy:address": address} if address else {})
    return [{"ResourceType": kind, "Tags": [{"Key": k, "Value": v} for k, v in every.items()]}]


def run(double: Double, network: Any, count: int, itype: str, **tags: str) -> list[str]:
    answer = client(double, "ec2").run_instances(
        ImageId=image_of(double),
        InstanceType=itype,
        MinCount=count,
        MaxCount=count,
        SubnetId=network.subnet_id,
        SecurityGroupIds=[network.security_group_id],
        TagSpecifications=[
            {"ResourceType": "instance", "Tags": [{"Key": k, "Value": v} for k, v in tags.items()]}
        ],
    )
    return [one["InstanceId"] for one in answer["Instances"]]


def image_of(double: Double) -> str:
    found = client(double, "ssm").get_parameter(Name=IMAGE_PARAMETERS["node"])
    return str(found["Parameter"]["Value"])


def test_an_account_with_everything_gives_no_finding(double: Double, aws: Aws) -> None:
    cluster = spec()
    facts = seen(aws, cluster)
    assert check_aws(cluster, facts) == []
    assert facts.identity.account == "123456789012"
    assert facts.identity.user == "tests"
    assert facts.image is not None
    assert facts.image.os == "Ubuntu 24.04"
    assert facts.vcpus == {"p5en.48xlarge": 192, "c7i.2xlarge": 8}
    assert (facts.versions.vllm, facts.refused) == ("0.33.0", ())
    assert double.refused() == []


def test_everything_about_capacity_that_is_wrong_is_said_at_once(double: Double, aws: Aws) -> None:
    double.quota("L-417A185B", 192)
    double.quota("L-1216C47A", 4)
    cluster = spec(zone="us-west-2b", ami="ami-0123456789abcdef0")
    assert messages(aws, cluster) == [
        "ami-0123456789abcdef0 is not in us-west-2, or not shared with this account",
        "2 p5en.48xlarge need 384 vCPUs of the quota 'Running On-Demand P instances' "
        "(L-417A185B), which is 192 with 0 in use",
        "1 c7i.2xlarge need 8 vCPUs of the quota 'Running On-Demand Standard (A, C, D, H, I, M, "
        "R, T, Z) instances' (L-1216C47A), which is 4 with 0 in use",
        "us-west-2b does not offer p5en.48xlarge",
    ]


def test_a_quota_counts_what_runs_and_what_is_reserved_but_not_our_own(
    double: Double, aws: Aws
) -> None:
    network = double.existing_network(ZONE)
    run(double, network, 1, "p5.48xlarge", owner="somebody")
    run(double, network, 2, "p5en.48xlarge", **OURS)
    double.reservation("p5en.48xlarge", ZONE, 3)
    double.reservation("p5en.48xlarge", ZONE, 8, kind="capacity-block")
    double.reservation("p5en.48xlarge", ZONE, 9, state="cancelled")
    cluster = spec()
    quota = seen(aws, cluster).quotas["L-417A185B"]
    assert (quota.used, quota.held) == (192 * 6, 0)
    facts = seen(aws, cluster, held=frozenset({"beef"}))
    quota = facts.quotas["L-417A185B"]
    assert (quota.used, quota.held) == (192 * 4, 192 * 2)
    assert facts.held_nodes == 2


def test_reservations_are_found_by_id_and_by_tags(double: Double, aws: Aws) -> None:
    now = datetime.now(UTC)
    block = double.reservation(
        "p5en.48xlarge",
        ZONE,
        2,
        kind="capacity-block",
        start=now - timedelta(hours=1),
        end=now + timedelta(hours=2),
    )
    capacity = {"kind": "capacity-block", "reservation_id": block}
    (finding,) = check_aws(spec(capacity=capacity), seen(aws, spec(capacity=capacity)))
    assert finding.message.endswith(": in 1.5 hours")
    double.reservation("p5en.48xlarge", "us-west-2c", 2, tags={"team": "kv", "use": "test"})
    double.reservation("p5en.48xlarge", ZONE, 2, tags={"team": "kv"}, state="expired")
    by_tags = spec(capacity={"kind": "odcr", "reservation_tags": {"team": "kv", "use": "test"}})
    (found,) = messages(aws, by_tags)
    assert found.startswith("us-west-2a, and cr-")
    none = spec(capacity={"kind": "odcr", "reservation_id": "cr-0123456789abcdef0"})
    assert messages(aws, none) == ["cr-0123456789abcdef0 is not in us-west-2"]


def test_an_existing_network_is_looked_through(double: Double, aws: Aws) -> None:
    good = double.existing_network(ZONE)
    network = {
        "vpc_id": good.vpc_id,
        "subnet_id": good.subnet_id,
        "security_group_id": good.security_group_id,
    }
    facts = seen(aws, spec(network=network))
    assert facts.vpc is not None
    assert facts.subnet is not None
    assert facts.subnet.zone == ZONE
    assert facts.subnet.free_addresses > 1000
    assert facts.security_group is not None
    double.free_addresses(good.subnet_id, 2)
    ec2 = client(double, "ec2")
    lone = ec2.create_security_group(GroupName="lone", Description="x", VpcId=good.vpc_id)
    found = messages(
        aws,
        spec(
            network=network | {"security_group_id": lone["GroupId"]},
            access={
                "method": "ssh",
                "key_name": "nobody",
                "ssh_cidrs": ["10.0.0.0/8"],
            },
        ),
    )
    assert "nobody is no key pair in us-west-2" in found
    assert f"{good.subnet_id} has 2 free addresses, and the cluster needs 3, one a node" in found
    assert len([m for m in found if m.startswith(f"{lone['GroupId']} does not allow")]) == 2
    itself = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": lone["GroupId"]}]}]
    ec2.authorize_security_group_ingress(GroupId=lone["GroupId"], IpPermissions=itself)
    ec2.authorize_security_group_egress(GroupId=lone["GroupId"], IpPermissions=itself)
    again = seen(aws, spec(network=network | {"security_group_id": lone["GroupId"]}))
    assert again.security_group is not None
    assert again.security_group.all_from_itself
    assert again.security_group.all_to_itself


def test_what_is_not_there_is_a_finding_not_an_error(double: Double, aws: Aws) -> None:
    network = {
        "vpc_id": "vpc-0123456789abcdef0",
        "subnet_id": "subnet-0123456789abcdef0",
        "security_group_id": "sg-0123456789abcdef0",
    }
    assert sorted(messages(aws, spec(network=network))) == [
        "sg-0123456789abcdef0 is not in us-west-2",
        "subnet-0123456789abcdef0 is not in us-west-2",
        "vpc-0123456789abcdef0 is not in us-west-2",
    ]


def test_a_model_in_s3_is_read_and_weighed(double: Double, aws: Aws) -> None:
    s3 = client(double, "s3")
    where = {"CreateBucketConfiguration": {"LocationConstraint": "us-west-2"}}
    s3.create_bucket(Bucket="models", **where)
    config = {"num_attention_heads": 64, "torch_dtype": "bfloat16"}
    s3.put_object(Bucket="models", Key="llama/config.json", Body=json.dumps(config))
    for name, size in (("a.safetensors", 500), ("b.safetensors", 700), ("old.bin", 999)):
        s3.put_object(Bucket="models", Key=f"llama/{name}", Body=b"x" * size)
    model = seen(aws, spec(model={"id": "s3://models/llama"})).model
    assert model is not None
    assert (model.readable, model.region, model.weights_bytes) == (True, "us-west-2", 1200)
    assert model.config == config
    assert messages(aws, spec(model={"id": "s3://models/other"})) == [
        "s3://models/other has no config.json that can be read"
    ]
    assert messages(aws, spec(model={"id": "s3://no-such-bucket/llama"})) == [
        "s3://no-such-bucket/llama has no config.json that can be read"
    ]


def test_a_refused_question_stays_open_and_names_the_permission(double: Double, aws: Aws) -> None:
    double.deny("DescribePlacementGroups")
    double.deny("GetServiceQuota")
    cluster = spec()
    facts = seen(aws, cluster)
    assert {r.action for r in facts.refused} == {
        "ec2:DescribePlacementGroups",
        "servicequotas:GetServiceQuota",
    }
    assert Refusal(action="servicequotas:GetServiceQuota", question="the vCPU quotas") in (
        facts.refused
    )
    assert facts.placement_groups is None
    found = check_aws(cluster, facts)
    assert {f.check for f in found} == {"permission-missing"}


def test_wrong_credentials_end_the_look_at_once(double: Double, aws: Aws) -> None:
    double.expire_credentials()
    with pytest.raises(AwsError) as e:
        seen(aws, spec())
    assert e.value.message.startswith("the AWS credentials have expired (")
    assert "aws sso login" in e.value.hint
    assert "testing" not in str(e.value.message + e.value.hint)


def test_no_credentials_and_a_region_that_is_none_are_said_clearly(
    double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(AwsError, match=r"^no usable AWS credentials: Unable to locate"):
        Aws("us-west-2").identity()
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(AwsError, match=r"^no usable AWS credentials: .*nobody"):
        Aws("us-west-2").identity()


def test_an_endpoint_that_does_not_answer_is_named(
    double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(AwsError) as e:
        Aws("us-west-2", attempts=1).identity()
    assert e.value.message.startswith("sts:GetCallerIdentity: no answer from AWS in us-west-2: ")
    with pytest.raises(AwsError) as e:
        Aws("us-wist-2", attempts=1).identity()
    assert e.value.message == "no AWS region is known by the name 'us-wist-2'"


def test_throttling_is_tried_again_and_then_said(double: Double, aws: Aws) -> None:
    double.throttle("DescribeVpcs", times=1)
    assert aws.all("ec2:DescribeVpcs", "Vpcs")
    double.throttle("DescribeVpcs", times=9)
    with pytest.raises(AwsError) as e:
        aws.all("ec2:DescribeVpcs", "Vpcs")
    assert e.value.message == "ec2:DescribeVpcs: AWS asks to slow down (RequestLimitExceeded)"


def test_nodes_are_observed_with_what_ended(double: Double, aws: Aws) -> None:
    network = double.existing_network(ZONE)
    tags = OURS | {"kvdeploy:role": "decode"}
    run(double, network, 1, "p5en.48xlarge", **tags | {"kvdeploy:node": "decode-1"})
    (first,) = run(double, network, 1, "p5en.48xlarge", **tags | {"kvdeploy:node": "decode-0"})
    run(double, network, 1, "p5en.48xlarge", owner="somebody")
    double.terminate_instance(first)
    found = observe(aws, "beef")
    assert [(n.node, n.role, n.state, n.lifecycle) for n in found] == [
        ("decode-0", "decode", "terminated", "on-demand"),
        ("decode-1", "decode", "running", "on-demand"),
    ]
    assert found[1].zone == ZONE
    assert found[1].private_ip
    assert abs(datetime.now(UTC) - found[1].launched_at) < timedelta(minutes=5)
    assert observe(aws, "other") == ()


def test_prices_are_todays_where_aws_answers_and_listed_else(double: Double, aws: Aws) -> None:
    double.price("p5en.48xlarge", 61.5)
    double.spot_price("p5en.48xlarge", ZONE, 26.25)
    found = prices_of(
        aws, ["p5en.48xlarge", "p9.metal"], spot_zone=ZONE, spot_types=["p5en.48xlarge"]
    )
    assert found["p5en.48xlarge"].usd_hour == 61.5
    assert found["p5en.48xlarge"].source.startswith("AWS price list, ")
    assert found[spot_key("p5en.48xlarge")].usd_hour == 26.25
    assert "p9.metal" not in found
    double.deny("GetProducts")
    listed = prices_of(aws, ["p5en.48xlarge"])["p5en.48xlarge"]
    assert listed.usd_hour == 63.296
    assert listed.source.startswith("EC2 on-demand list price")


# --- leftovers and sweep ---------------------------------------------------------------------
def build(double: Double) -> dict[str, str]:
    """A cluster as infra/ makes it; ids by kind."""
    ec2, iam = client(double, "ec2"), client(double, "iam")
    made: dict[str, str] = {}
    vpc = ec2.create_vpc(
        CidrBlock="10.42.0.0/16",
        TagSpecifications=tagged("vpc", "module.network.aws_vpc.this/0"),
    )["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(
        VpcId=vpc,
        CidrBlock="10.42.0.0/20",
        AvailabilityZone=ZONE,
        TagSpecifications=tagged("subnet", "module.network.aws_subnet.fabric/0"),
    )["Subnet"]["SubnetId"]
    gateway = ec2.create_internet_gateway(TagSpecifications=tagged("internet-gateway"))
    igw = gateway["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(InternetGatewayId=igw, VpcId=vpc)
    eip = ec2.allocate_address(Domain="vpc", TagSpecifications=tagged("elastic-ip"))
    nat = ec2.create_nat_gateway(
        SubnetId=subnet, AllocationId=eip["AllocationId"], TagSpecifications=tagged("natgateway")
    )["NatGateway"]["NatGatewayId"]
    table = ec2.create_route_table(VpcId=vpc, TagSpecifications=tagged("route-table"))
    rtb = table["RouteTable"]["RouteTableId"]
    ec2.create_route(RouteTableId=rtb, DestinationCidrBlock="0.0.0.0/0", GatewayId=igw)
    ec2.associate_route_table(RouteTableId=rtb, SubnetId=subnet)
    groups = [
        ec2.create_security_group(
            GroupName=f"kvdeploy-demo-{name}",
            Description="x",
            VpcId=vpc,
            TagSpecifications=tagged("security-group"),
        )["GroupId"]
        for name in ("fabric", "router")
    ]
    for group, other in (groups, groups[::-1]):
        ec2.authorize_security_group_ingress(
            GroupId=group,
            IpPermissions=[{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": other}]}],
        )
    ec2.create_vpc_endpoint(
        VpcId=vpc,
        ServiceName="com.amazonaws.us-west-2.ssm",
        VpcEndpointType="Interface",
        SubnetIds=[subnet],
        SecurityGroupIds=groups[:1],
        TagSpecifications=tagged("vpc-endpoint"),
    )
    ec2.create_placement_group(
        GroupName="kvdeploy-demo",
        Strategy="cluster",
        TagSpecifications=tagged("placement-group"),
    )
    ec2.create_launch_template(
        LaunchTemplateName="kvdeploy-demo-decode",
        LaunchTemplateData={"InstanceType": "p5en.48xlarge"},
        TagSpecifications=tagged("launch-template"),
    )
    ec2.create_key_pair(KeyName="kvdeploy-demo", TagSpecifications=tagged("key-pair"))
    name = "kvdeploy-demo-us-west-2"
    tags = [{"Key": k, "Value": v} for k, v in OURS.items()]
    iam.create_role(RoleName=name, AssumeRolePolicyDocument=json.dumps(TRUST), Tags=tags)
    iam.attach_role_policy(RoleName=name, PolicyArn=SSM_POLICY)
    iam.put_role_policy(RoleName=name, PolicyName="model", PolicyDocument=json.dumps(READ))
    iam.create_instance_profile(InstanceProfileName=name, Tags=tags)
    iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)
    ids = ec2.run_instances(
        ImageId=image_of(double),
        InstanceType="c7i.2xlarge",
        MinCount=2,
        MaxCount=2,
        SubnetId=subnet,
        SecurityGroupIds=groups,
        TagSpecifications=tagged("instance", "module.nodes.aws_instance.this/decode-0")
        + tagged("volume"),
    )["Instances"]
    leaked = double.leak_interface(subnet, tags={}, group_ids=(groups[0],))
    made |= {"vpc": vpc, "subnet": subnet, "rtb": rtb, "nat": nat, "group": groups[0]}
    return made | {"instance": ids[0]["InstanceId"], "leaked": leaked}


TRUST = {
    "Version": "2012-10-17",
    "Statement": [
        {
            "Effect": "Allow",
            "Principal": {"Service": "ec2.amazonaws.com"},
            "Action": "sts:AssumeRole",
        }
    ],
}
READ = {
    "Version": "2012-10-17",
    "Statement": [
        {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::models/*"}
    ],
}
SSM_POLICY = "arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore"
KINDS = {
    *("ebs_volume", "eip", "iam_instance_profile", "iam_role", "instance", "internet_gateway"),
    *("key_pair", "launch_template", "nat_gateway", "network_interface", "placement_group"),
    *("route_table", "security_group", "subnet", "vpc", "vpc_endpoint"),
}


def test_everything_of_a_cluster_is_found_deleted_and_not_found_again(
    double: Double, aws: Aws
) -> None:
    made = build(double)
    others = double.existing_network(ZONE)
    run(double, others, 1, "c7i.2xlarge", owner="somebody")
    theirs = (others.vpc_id, others.subnet_id, others.security_group_id)
    found = leftovers.find(aws, "demo")
    assert {one.kind for one in found} == KINDS
    assert found == leftovers.find(aws, "demo", "beef")
    assert leftovers.find(aws, "demo", "0ther") == leftovers.find(aws, "dem") == ()
    assert {one.cluster_id for one in found} == {"beef"}
    assert {one.kind for one in found if one.bills} == {
        *("ebs_volume", "eip", "instance", "nat_gateway", "vpc_endpoint")
    }
    assert found[0].bills
    by_id = {one.id: one for one in found}
    assert by_id[made["vpc"]].address == "module.network.aws_vpc.this/0"
    assert by_id[made["leaked"]].kind == "network_interface"
    said: list[str] = []
    assert sweep(aws, found, clock=Clock(), on_detail=said.append) == ()
    assert leftovers.find(aws, "demo") == leftovers.named(aws, "demo") == ()
    assert f"deleting instance {made['instance']}" in said
    assert said[0].startswith("deleting instance")
    assert "waiting for 2 instance to be gone" in said
    # What others have is as it was.
    assert [m.state for m in double.instances(owner="somebody")] == ["running"]
    after = double.resources()
    gone_later = {"instance", "natgateway", "vpc-endpoint"}  # seen for an hour more
    ours_left = {
        (kind, name)
        for kind, things in after.items()
        for name, tags in things.items()
        if tags.get("kvdeploy:id") == "beef" and kind not in gone_later
    }
    assert ours_left == set()
    assert set(theirs) <= {name for things in after.values() for name in things}
    # Twice is harmless.
    assert sweep(aws, found, clock=Clock(), on_detail=said.append) == ()
    assert double.refused() == []


def test_untagged_children_have_terraforms_import_ids(double: Double, aws: Aws) -> None:
    made = build(double)
    found = children(aws, leftovers.find(aws, "demo"))
    role = "kvdeploy-demo-us-west-2"
    assert {(one.kind, one.id, one.name) for one in found} == {
        ("route", f"{made['rtb']}_0.0.0.0/0", made["rtb"]),
        ("route_table_association", f"{made['subnet']}/{made['rtb']}", made["rtb"]),
        ("iam_role_policy_attachment", f"{role}/{SSM_POLICY}", role),
        ("iam_role_policy", f"{role}:model", role),
    }
    assert {one.address for one in found} == {""}
    # They go with what they belong to.
    assert sweep(aws, found, clock=Clock(), on_detail=lambda _: None) == ()


def test_what_carries_no_id_of_a_cluster_is_never_touched(double: Double, aws: Aws) -> None:
    network = double.existing_network(ZONE)
    ec2 = client(double, "ec2")
    ec2.create_key_pair(KeyName="kvdeploy-demo")
    found = leftovers.named(aws, "demo")
    assert [(one.kind, one.id, one.cluster_id) for one in found] == [
        ("key_pair", "kvdeploy-demo", "")
    ]
    theirs = Leftover(kind="vpc", id=network.vpc_id)
    left = sweep(aws, (*found, theirs), clock=Clock(), on_detail=lambda _: None)
    assert left == (*found, theirs)
    assert len(ec2.describe_key_pairs()["KeyPairs"]) == 1
    assert messages(aws, spec()) == [
        "names that demo needs are taken by what kvdeploy did not make: key_pair kvdeploy-demo"
    ]


def test_our_rule_in_somebody_elses_group_goes_and_the_group_stays(
    double: Double, aws: Aws
) -> None:
    network = double.existing_network(ZONE)
    group = network.security_group_id
    ec2 = client(double, "ec2")

    def rules() -> set[str]:
        named = [{"Name": "group-id", "Values": [group]}]
        found = ec2.describe_security_group_rules(Filters=named)["SecurityGroupRules"]
        return {one["SecurityGroupRuleId"] for one in found}

    before = rules()
    web = {"IpProtocol": "tcp", "FromPort": 8000, "ToPort": 8000}
    ec2.authorize_security_group_ingress(
        GroupId=group,
        IpPermissions=[web | {"IpRanges": [{"CidrIp": "10.0.0.0/8"}]}],
        TagSpecifications=tagged("security-group-rule"),
    )
    (found,) = leftovers.find(aws, "demo")
    assert found.kind == "vpc_security_group_ingress_rule"
    assert sweep(aws, (found,), clock=Clock(), on_detail=lambda _: None) == ()
    assert rules() == before


def test_a_name_of_a_group_is_taken_in_its_own_vpc_alone(double: Double, aws: Aws) -> None:
    network = double.existing_network(ZONE)
    client(double, "ec2").create_security_group(
        GroupName="kvdeploy-demo-fabric", Description="x", VpcId=network.vpc_id
    )
    assert leftovers.named(aws, "demo") == ()
    (found,) = leftovers.named(aws, "demo", vpc_id=network.vpc_id)
    assert (found.kind, found.name) == ("security_group", "kvdeploy-demo-fabric")


def test_what_aws_keeps_is_what_is_left(double: Double, aws: Aws) -> None:
    """A stranger's interface in our group keeps the group, the subnet and the VPC."""
    made = build(double)
    double.leak_interface(made["subnet"], tags={}, status="in-use", group_ids=(made["group"],))
    left = sweep(aws, leftovers.find(aws, "demo"), clock=Clock(), on_detail=lambda _: None)
    assert {one.kind for one in left} == {"network_interface", "security_group", "subnet", "vpc"}
    assert {one.kind for one in leftovers.find(aws, "demo")} == {one.kind for one in left}


def test_a_deletion_that_is_refused_leaves_its_thing_and_the_rest_goes(
    double: Double, aws: Aws
) -> None:
    build(double)
    double.deny("DeleteKeyPair")
    left = sweep(aws, leftovers.find(aws, "demo"), clock=Clock(), on_detail=lambda _: None)
    assert [one.kind for one in left] == ["key_pair"]


def test_another_cluster_of_the_same_name_is_found_unless_it_is_this_one(
    double: Double, aws: Aws
) -> None:
    build(double)
    cluster = spec()
    (finding,) = [f for f in check_aws(cluster, seen(aws, cluster)) if f.check == "name-taken"]
    assert finding.message.startswith(
        "demo is another cluster in us-west-2 already (kvdeploy:id beef): "
    )
    assert check_aws(cluster, seen(aws, cluster, held=frozenset({"beef"}))) == []


# --- the state's bucket ----------------------------------------------------------------------
def test_the_states_bucket_is_made_safe_once(double: Double, aws: Aws) -> None:
    s3 = client(double, "s3")
    assert statebucket.ensure(aws, "kv-states") is True
    assert s3.get_bucket_versioning(Bucket="kv-states")["Status"] == "Enabled"
    blocks = s3.get_public_access_block(Bucket="kv-states")["PublicAccessBlockConfiguration"]
    assert all(blocks.values())
    rules = s3.get_bucket_encryption(Bucket="kv-states")["ServerSideEncryptionConfiguration"]
    assert rules["Rules"][0]["ApplyServerSideEncryptionByDefault"] == {"SSEAlgorithm": "AES256"}
    policy = json.loads(s3.get_bucket_policy(Bucket="kv-states")["Policy"])
    assert [s["Sid"] for s in policy["Statement"]] == ["KvdeployTlsOnly"]
    double.forget_calls()
    assert statebucket.ensure(aws, "kv-states") is False
    assert [c for c in double.counts() if c.startswith(("Put", "Create"))] == []
    bucket = seen(aws, spec(state={"bucket": "kv-states"})).state_bucket
    assert bucket is not None
    assert (bucket.exists, bucket.ours, bucket.region) == (True, True, "us-west-2")
    assert bucket.versioned
    assert bucket.blocks_public


def test_a_bucket_elsewhere_is_refused_by_check_and_by_ensure(double: Double, aws: Aws) -> None:
    where = {"CreateBucketConfiguration": {"LocationConstraint": "eu-west-1"}}
    client(double, "s3", "eu-west-1").create_bucket(Bucket="far", **where)
    with pytest.raises(AwsError) as e:
        statebucket.ensure(aws, "far")
    assert e.value.message == "the bucket far is in eu-west-1, and the cluster in us-west-2"
    assert messages(aws, spec(state={"bucket": "far"})) == [
        "far is in eu-west-1, and the cluster in us-west-2"
    ]
    missing = seen(aws, spec(state={"bucket": "nowhere"})).state_bucket
    assert missing is not None
    assert not missing.exists


def test_a_bucket_that_is_not_ours_is_refused_by_check_and_by_ensure(
    double: Double, aws: Aws
) -> None:
    double.fault("HeadBucket", "403", "Forbidden", status=403, times=None)
    with pytest.raises(AwsError) as e:
        statebucket.ensure(aws, "theirs")
    assert (
        e.value.message
        == "the bucket theirs is another account's, or s3:ListBucket on it is refused"
    )
    assert messages(aws, spec(state={"bucket": "theirs"})) == [
        "theirs is another account's, or this identity may not see it"
    ]


def test_a_lock_says_who_holds_it(double: Double, aws: Aws) -> None:
    statebucket.ensure(aws, "kv-states")
    assert statebucket.lock_of(aws, "kv-states", "demo.tfstate") is None
    assert statebucket.read_state(aws, "kv-states", "demo.tfstate") is None
    s3 = client(double, "s3")
    lock = {"ID": "1-2-3", "Who": "ana@desk", "Created": "2026-11-30T12:00:00Z"}
    s3.put_object(
        Bucket="kv-states", Key="demo.tfstate.tflock", Body=io.BytesIO(json.dumps(lock).encode())
    )
    s3.put_object(Bucket="kv-states", Key="demo.tfstate", Body=b"{}")
    assert statebucket.lock_of(aws, "kv-states", "demo.tfstate") == StateLock(
        id="1-2-3", who="ana@desk", created="2026-11-30T12:00:00Z"
    )
    assert statebucket.read_state(aws, "kv-states", "demo.tfstate") == "{}"
    s3.put_object(Bucket="kv-states", Key="demo.tfstate.tflock", Body=b"[]")
    with pytest.raises(AwsError) as e:
        statebucket.lock_of(aws, "kv-states", "demo.tfstate")
    assert e.value.message == "s3://kv-states/demo.tfstate.tflock is no lock that Terraform wrote"
