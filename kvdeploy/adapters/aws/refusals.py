"""Turns what botocore raises into AwsError: what AWS refused, and what to do about it.

Nothing secret gets through: keys, tokens and encoded messages are taken out of every text.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import botocore.session
from botocore import exceptions as boto
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from kvdeploy.errors import AwsError

if TYPE_CHECKING:
    from collections.abc import Iterator

PERMISSIONS: Final = "docs/aws-permissions.md"
MESSAGE_MAX: Final = 300
"""Letters of AWS's own message that are shown."""

IAM_ACTIONS: Final = {
    "s3:GetBucketEncryption": "s3:GetEncryptionConfiguration",
    "s3:GetPublicAccessBlock": "s3:GetBucketPublicAccessBlock",
    "s3:HeadBucket": "s3:ListBucket",
    "s3:HeadObject": "s3:GetObject",
    "s3:ListObjectsV2": "s3:ListBucket",
    "s3:PutBucketEncryption": "s3:PutEncryptionConfiguration",
    "s3:PutPublicAccessBlock": "s3:PutBucketPublicAccessBlock",
}
"""IAM's action of an operation, where it has another name."""

NOT_ALLOWED: Final = frozenset(
    {"403", "AccessDenied", "AccessDeniedException", "Client.UnauthorizedOperation"}
    | {"Forbidden", "NotAuthorized", "UnauthorizedOperation"}
)
EXPIRED: Final = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})
CLOCK: Final = frozenset({"RequestExpired", "RequestTimeTooSkewed"})
INVALID: Final = frozenset(
    {"AuthFailure", "IncompleteSignature", "InvalidAccessKeyId", "InvalidClientTokenId"}
    | {"InvalidToken", "MissingAuthenticationToken", "SignatureDoesNotMatch"}
    | {"UnrecognizedClientException"}
)
THROTTLED: Final = frozenset(
    {"RequestLimitExceeded", "SlowDown", "Throttling", "ThrottlingException"}
    | {"TooManyRequestsException", "503 Slow Down"}
)
LOGIN: Final = (
    "Log in again, e.g. with 'aws sso login', or choose other credentials with AWS_PROFILE; "
    "'aws sts get-caller-identity' shows whether they work."
)
_NO_LOGIN: Final = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.ProfileNotFound,
    boto.ConfigNotFound,
    boto.ConfigParseError,
    boto.InvalidConfigError,
    boto.SSOError,
    boto.TokenRetrievalError,
)
_NO_ANSWER: Final = (
    boto.ConnectionError,
    boto.ReadTimeoutError,
    boto.ConnectionClosedError,
    boto.HTTPClientError,
)


@contextmanager
def translated(operation: str, *, region: str = "") -> Iterator[None]:
    """Raise AwsError for whatever botocore raises inside.

    Args:
        operation: what is asked, e.g. 'ec2:DescribeSubnets'.
        region: where; named when AWS cannot be reached.
    """
    try:
        yield
    except (ClientError, BotoCoreError, ResponseParserError) as e:
        raise translate(operation, e, region=region) from e


def translate(operation: str, error: Exception, *, region: str = "") -> AwsError:
    """The AwsError for what botocore raised."""
    if isinstance(error, ClientError):
        return _answered(operation, error, region)
    if isinstance(error, _NO_LOGIN):
        return AwsError(f"no usable AWS credentials: {clean(str(error))}", hint=LOGIN)
    if isinstance(error, boto.NoRegionError | boto.InvalidRegionError):
        return AwsError(f"{region!r} is not an AWS region", hint="Set aws.region.")
    if isinstance(error, boto.EndpointConnectionError) and not _is_region(region):
        return AwsError(
            f"no AWS region is known by the name {region!r}", hint="Set aws.region, e.g. us-west-2."
        )
    if isinstance(error, _NO_ANSWER):
        return AwsError(
            f"{operation}: no answer from AWS in {region}: {clean(str(error))}",
            hint="Check aws.region, the network, and HTTPS_PROXY and AWS_ENDPOINT_URL if set.",
        )
    if isinstance(error, ResponseParserError):
        return AwsError(
            f"{operation}: what answered did not answer as AWS does",
            hint="Check AWS_ENDPOINT_URL, if set: it may not know this call.",
        )
    return AwsError(f"{operation}: {clean(str(error))}")


def code_of(error: AwsError) -> str:
    """AWS's code of an error, e.g. 'InvalidVpcID.NotFound'; '' when AWS did not answer."""
    cause = error.__cause__
    return _code(cause) if isinstance(cause, ClientError) else ""


def is_refusal(error: AwsError) -> bool:
    """Whether this identity may not do that; anything else about credentials is not meant."""
    cause = error.__cause__
    return isinstance(cause, ClientError) and _is_refusal(cause)


def is_login(error: AwsError) -> bool:
    """Whether the credentials are missing, wrong or too old: then no other question is worth it."""
    return code_of(error) in EXPIRED | CLOCK | INVALID or isinstance(error.__cause__, _NO_LOGIN)


def refused_action(error: AwsError) -> str:
    """The IAM action that a refusal is about: its message begins with it."""
    return error.message.split(maxsplit=1)[0]


def iam_action(operation: str) -> str:
    """The IAM action that lets an operation be called."""
    return IAM_ACTIONS.get(operation, operation)


def clean(text: str) -> str:
    """AWS's words on one line, cut, and without anything that should not be seen."""
    text = re.sub(r"\s*Encoded authorization failure message:.*", "", text, flags=re.DOTALL)
    text = re.sub(r"\b(A[A-Z]{3})[A-Z0-9]{12,}", r"\1...", text)  # key ids: AKIA..., ASIA...
    text = re.sub(r"://[^/@\s]+@", "://...@", text)  # a proxy's password
    text = re.sub(r"[A-Za-z0-9+/=_%-]{40,}", "...", " ".join(text.split()))
    return text if len(text) <= MESSAGE_MAX else f"{text[:MESSAGE_MAX]}..."


_NAMED: Final = re.compile(
    r"not authorized to perform: (?P<action>[a-z0-9-]+:\w+)(?: on resource: (?P<resource>\S+))?"
)


def _is_region(name: str) -> bool:
    """Whether botocore's own list has it; a region newer than botocore is not in it."""
    session = botocore.session.Session()
    return any(
        name in session.get_available_regions("ec2", partition)
        for partition in session.get_available_partitions()
    )


def _answered(operation: str, error: ClientError, region: str) -> AwsError:
    code, said = _code(error), clean(str(error.response.get("Error", {}).get("Message", "")))
    if _is_refusal(error):
        return _refusal(operation, str(error))
    if code in EXPIRED:
        return AwsError(f"the AWS credentials have expired ({code})", hint=LOGIN)
    if code in CLOCK:
        return AwsError(
            f"AWS finds the request too old ({code}): the credentials expired, or this machine's "
            "clock is wrong",
            hint=f"Set the clock. {LOGIN}",
        )
    if code in INVALID:
        return AwsError(f"AWS does not accept the credentials ({code})", hint=LOGIN)
    if code == "OptInRequired":
        return AwsError(
            f"{operation}: this account may not use {region}: {said}",
            hint="Enable the region for the account, or choose another aws.region.",
        )
    if code in THROTTLED:
        return AwsError(
            f"{operation}: AWS asks to slow down ({code})",
            hint="Run it again in a minute; other tools in this account may be asking a lot.",
        )
    return AwsError(f"{operation}: {code}: {said}" if said else f"{operation}: {code}")


def _refusal(operation: str, text: str) -> AwsError:
    named = re.search(_NAMED, text)
    action = named["action"] if named else iam_action(operation)
    on = f" on {named['resource'].rstrip('.,')}" if named and named["resource"] else ""
    deny = re.search(r"with an explicit deny in an? ([\w -]+?)(?:[.:]|$)", text)
    if deny:
        return AwsError(
            f"{action}{on} is not allowed: an explicit deny in a {deny[1].strip()}",
            hint="Only whoever keeps that policy can lift it.",
        )
    return AwsError(
        f"{action}{on} is not allowed to this identity",
        hint=f"Allow it in the identity's IAM policy: {PERMISSIONS} has the whole of it.",
    )


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _is_refusal(error: ClientError) -> bool:
    message = str(error.response.get("Error", {}).get("Message", ""))
    foreign = _code(error) == "AuthFailure" and "Not authorized" in message  # another's image
    return _code(error) in NOT_ALLOWED or foreign
