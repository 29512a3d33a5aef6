from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from botocore import exceptions as boto
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError

from kvdeploy.adapters.aws.images import os_of
from kvdeploy.adapters.aws.refusals import (
    LOGIN,
    clean,
    code_of,
    iam_action,
    is_login,
    is_refusal,
    refused_action,
    translate,
    translated,
)
from kvdeploy.errors import AwsError

ROOT = Path(__file__).parents[2]
PERMISSIONS = (ROOT / "docs" / "aws-permissions.md").read_text(encoding="utf-8")
POLICY_HINT = "Allow it in the identity's IAM policy: docs/aws-permissions.md has the whole of it."
ROLE = "arn:aws:sts::123456789012:assumed-role/ops/ana"


def answered(code: str, message: str = "", operation: str = "DescribeVpcs") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, operation)


def told(error: Exception, operation: str = "ec2:DescribeVpcs") -> tuple[str, str]:
    made = translate(operation, error, region="us-west-2")
    return made.message, made.hint


CASES: list[tuple[Exception, str, str]] = [
    (
        answered(
            "UnauthorizedOperation",
            f"You are not authorized to perform this operation. User: {ROLE} is not authorized to "
            "perform: ec2:RunInstances on resource: arn:aws:ec2:us-west-2:123456789012:subnet/"
            "subnet-1 because no identity-based policy allows the ec2:RunInstances action. "
            "Encoded authorization failure message: 3kWzLq-secret",
        ),
        "ec2:RunInstances on arn:aws:ec2:us-west-2:123456789012:subnet/subnet-1 is not allowed to "
        "this identity",
        POLICY_HINT,
    ),
    (
        answered("UnauthorizedOperation", "You are not authorized to perform this operation."),
        "ec2:DescribeVpcs is not allowed to this identity",
        POLICY_HINT,
    ),
    (
        answered(
            "AccessDeniedException",
            f"User: {ROLE} is not authorized to perform: servicequotas:GetServiceQuota with an "
            "explicit deny in a service control policy",
        ),
        "servicequotas:GetServiceQuota is not allowed: an explicit deny in a service control "
        "policy",
        "Only whoever keeps that policy can lift it.",
    ),
    (
        answered("AuthFailure", "Not authorized for images: [ami-1]"),
        "ec2:DescribeVpcs is not allowed to this identity",
        POLICY_HINT,
    ),
    (
        answered("ExpiredToken", "The security token included in the request is expired"),
        "the AWS credentials have expired (ExpiredToken)",
        LOGIN,
    ),
    (
        answered("RequestExpired", "Request has expired."),
        "AWS finds the request too old (RequestExpired): the credentials expired, or this "
        "machine's clock is wrong",
        f"Set the clock. {LOGIN}",
    ),
    (
        answered("AuthFailure", "AWS was not able to validate the provided access credentials"),
        "AWS does not accept the credentials (AuthFailure)",
        LOGIN,
    ),
    (
        answered("SignatureDoesNotMatch", "The request signature AKIAIOSFODNN7EXAMPLE ..."),
        "AWS does not accept the credentials (SignatureDoesNotMatch)",
        LOGIN,
    ),
    (
        boto.NoCredentialsError(),
        "no usable AWS credentials: Unable to locate credentials",
        LOGIN,
    ),
    (
        boto.ProfileNotFound(profile="dev"),
        "no usable AWS credentials: The config profile (dev) could not be found",
        LOGIN,
    ),
    (
        boto.UnauthorizedSSOTokenError(),
        "no usable AWS credentials: The SSO session associated with this profile has expired or "
        "is otherwise invalid. To refresh this SSO session run aws sso login with the "
        "corresponding profile.",
        LOGIN,
    ),
    (
        answered("OptInRequired", "You are not subscribed to this service."),
        "ec2:DescribeVpcs: this account may not use us-west-2: You are not subscribed to this "
        "service.",
        "Enable the region for the account, or choose another aws.region.",
    ),
    (
        answered("RequestLimitExceeded", "Request limit exceeded."),
        "ec2:DescribeVpcs: AWS asks to slow down (RequestLimitExceeded)",
        "Run it again in a minute; other tools in this account may be asking a lot.",
    ),
    (
        boto.EndpointConnectionError(endpoint_url="https://ec2.us-west-2.amazonaws.com/"),
        "ec2:DescribeVpcs: no answer from AWS in us-west-2: Could not connect to the endpoint URL: "
        '"https://ec2.us-west-2.amazonaws.com/"',
        "Check aws.region, the network, and HTTPS_PROXY and AWS_ENDPOINT_URL if set.",
    ),
    (
        boto.InvalidRegionError(region_name="us west"),
        "'us-west-2' is not an AWS region",
        "Set aws.region.",
    ),
    (
        answered("InvalidVpcID.NotFound", "The vpc ID 'vpc-1' does not exist"),
        "ec2:DescribeVpcs: InvalidVpcID.NotFound: The vpc ID 'vpc-1' does not exist",
        "",
    ),
    (answered("InternalError"), "ec2:DescribeVpcs: InternalError", ""),
    (
        boto.ParamValidationError(report="Missing VpcId"),
        "ec2:DescribeVpcs: Parameter validation failed: Missing VpcId",
        "",
    ),
]


@pytest.mark.parametrize(("error", "message", "hint"), CASES, ids=lambda v: str(v)[:40])
def test_what_aws_says_becomes_what_is_wrong_and_what_to_do(
    error: Exception, message: str, hint: str
) -> None:
    assert told(error) == (message, hint)


def test_a_region_that_is_none_is_told_from_one_that_does_not_answer() -> None:
    error = boto.EndpointConnectionError(endpoint_url="https://ec2.us-wist-2.amazonaws.com/")
    made = translate("ec2:DescribeVpcs", error, region="us-wist-2")
    assert made.message == "no AWS region is known by the name 'us-wist-2'"
    assert made.hint == "Set aws.region, e.g. us-west-2."


def test_the_cause_is_kept_and_refusals_are_told_from_the_rest() -> None:
    denied = answered("AccessDenied", "Access Denied", "ListObjectsV2")
    with pytest.raises(AwsError) as refused, translated("s3:ListObjectsV2"):
        raise denied
    assert refused.value.exit_code == 14
    assert is_refusal(refused.value)
    assert code_of(refused.value) == "AccessDenied"
    assert refused_action(refused.value) == "s3:ListBucket"
    old = answered("ExpiredToken")
    with pytest.raises(AwsError) as expired, translated("ec2:DescribeVpcs"):
        raise old
    assert not is_refusal(expired.value)
    assert code_of(AwsError("no answer")) == ""


def test_an_endpoint_that_does_not_speak_as_aws_does_is_told() -> None:
    with pytest.raises(AwsError, match="what answered did not answer as AWS does"):  # noqa: SIM117
        with translated("ec2:DescribeVpcs"):
            raise ResponseParserError


def test_credentials_are_told_from_all_else() -> None:
    def raised(error: Exception) -> AwsError:
        with pytest.raises(AwsError) as caught, translated("ec2:DescribeVpcs"):
            raise error
        return caught.value

    assert is_login(raised(answered("ExpiredToken")))
    assert is_login(raised(boto.NoCredentialsError()))
    assert not is_login(raised(answered("UnauthorizedOperation")))
    assert not is_login(raised(answered("InternalError")))


def test_anything_else_is_not_ours_to_translate() -> None:
    with pytest.raises(KeyError), translated("ec2:DescribeVpcs"):
        raise KeyError


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("key AKIAIOSFODNN7EXAMPLE is unknown", "key AKIA... is unknown"),
        ("token " + "aB3/" * 20, "token ..."),
        ("secret wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "secret ..."),
        ("proxy http://ana:hunter2@proxy:3128", "proxy http://...@proxy:3128"),
        ("two\n  lines", "two lines"),
        ("No. Encoded authorization failure message: abc def\nghi", "No."),
        ("word " * 100, ("word " * 60)[:300] + "..."),
    ],
)
def test_nothing_secret_and_nothing_endless_gets_through(said: str, shown: str) -> None:
    assert clean(said) == shown


@pytest.mark.parametrize(
    ("name", "system"),
    [
        ("Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20260918", "Ubuntu 24.04"),
        ("ubuntu/images/hvm-ssd/ubuntu-jammy-22.04-amd64-server-20260101", "Ubuntu 22.04"),
        ("Deep Learning Base GPU AMI (Amazon Linux 2023) 20260918", "Amazon Linux 2023"),
        ("al2023-ami-2023.5.0-kernel-6.1-x86_64", "Amazon Linux 2023"),
        ("amzn2-ami-hvm-x86_64", ""),
        ("golden-2404", ""),
    ],
)
def test_an_images_name_says_which_system_it_is(name: str, system: str) -> None:
    assert os_of(name) == system


# --- the permissions that docs/aws-permissions.md asks for -----------------------------------
def policy() -> list[dict[str, Any]]:
    (text,) = re.findall(r"^```json\n(.*?)^```", PERMISSIONS, flags=re.MULTILINE | re.DOTALL)
    statements: list[dict[str, Any]] = json.loads(text)["Statement"]
    return statements


def operations() -> set[str]:
    """Every operation that the adapter can call, and so can name in an error."""
    texts = (p.read_text(encoding="utf-8") for p in (ROOT / "kvdeploy/adapters/aws").glob("*.py"))
    services = "ec2|iam|pricing|s3|servicequotas|ssm|sts"
    return {o for text in texts for o in re.findall(rf'"((?:{services}):[A-Z]\w+)"', text)}


def test_every_action_that_an_error_can_name_is_in_the_policy() -> None:
    allowed = {action for statement in policy() for action in statement["Action"]}
    asked = {iam_action(operation) for operation in operations()}
    assert len(asked) > 60
    assert asked - allowed == set()


def test_the_table_says_why_for_every_action_of_the_policy() -> None:
    rows = re.findall(r"^\| (\w+) \| (.*?) \| (.+) \|$", PERMISSIONS, flags=re.MULTILINE)
    told = {(sid, a) for sid, cell, _ in rows for a in re.findall(r"`([a-z0-9]+:\w+)`", cell)}
    held = {(s["Sid"], action) for s in policy() for action in s["Action"]}
    assert told == held


def test_the_policy_is_no_wider_than_it_has_to_be() -> None:
    assert not [a for s in policy() for a in s["Action"] if "*" in a]
    for statement in policy():
        actions = set(statement["Action"])
        if any(action.startswith("iam:") for action in actions):
            resources = statement["Resource"]
            each = [resources] if isinstance(resources, str) else resources
            assert all("kvdeploy-" in r or "aws-service-role" in r for r in each)
        if "iam:PassRole" in actions:
            assert statement["Condition"] == {
                "StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}
            }
        if "ec2:TerminateInstances" in actions:
            condition = statement["Condition"]["StringEquals"]
            assert condition["aws:ResourceTag/kvdeploy:managed"] == "true"


def test_the_policy_fits_into_one_managed_policy() -> None:
    assert len("".join(json.dumps({"Statement": policy()}).split())) < 6144
