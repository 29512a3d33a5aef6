"""The S3 bucket of Terraform's state: made, made safe, and who holds a lock in it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.adapters.aws.buckets import PUBLIC_BLOCKS, blocks_public, bucket_region
from kvdeploy.adapters.aws.network import is_missing
from kvdeploy.adapters.aws.refusals import code_of, is_refusal
from kvdeploy.errors import AwsError
from kvdeploy.model.awsfacts import StateLock
from kvdeploy.model.infra import TAG

if TYPE_CHECKING:
    from kvdeploy.adapters.aws.session import Aws

TLS_ONLY: Final = "KvdeployTlsOnly"
"""Sid of our statement in the bucket's policy."""
LOCK_MAX_BYTES: Final = 64 * 2**10
STATE_MAX_BYTES: Final = 64 * 2**20


def ensure(aws: Aws, bucket: str) -> bool:
    """Make the bucket if it is not there, and make it fit for a state; whether it was made.

    Fit is: this account's, in the region, versioned, encrypted, closed to the public, and
    spoken to over TLS only. Raises AwsError.
    """
    account = aws.identity().account
    made = not _exists(aws, bucket, account)
    if made:
        _create(aws, bucket)
    where = bucket_region(aws, bucket)
    if where != aws.region:
        msg = f"the bucket {bucket} is in {where}, and the cluster in {aws.region}"
        raise AwsError(
            msg,
            hint="Name a bucket of the cluster's region in state.bucket; kvdeploy makes it.",
        )
    own: dict[str, Any] = {"Bucket": bucket, "ExpectedBucketOwner": account}
    if aws.call("s3:GetBucketVersioning", **own).get("Status") != "Enabled":
        aws.call("s3:PutBucketVersioning", **own, VersioningConfiguration={"Status": "Enabled"})
    if not blocks_public(aws, bucket):
        aws.call("s3:PutPublicAccessBlock", **own, PublicAccessBlockConfiguration=PUBLIC_BLOCKS)
    if not _encrypted(aws, own):
        rule = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}
        aws.call(
            "s3:PutBucketEncryption", **own, ServerSideEncryptionConfiguration={"Rules": [rule]}
        )
    _demand_tls(aws, own)
    return made


def read_state(aws: Aws, bucket: str, key: str) -> str | None:
    """Terraform's state as it is stored; None when there is none. Raises AwsError."""
    try:
        raw = aws.read("s3:GetObject", at_most=STATE_MAX_BYTES, Bucket=bucket, Key=key)
    except AwsError as e:
        if is_missing(e):
            return None
        raise
    return raw.decode("utf-8")


def lock_of(aws: Aws, bucket: str, key: str) -> StateLock | None:
    """Who holds the state at `key`; None when nobody does. Raises AwsError."""
    try:
        raw = aws.read("s3:GetObject", at_most=LOCK_MAX_BYTES, Bucket=bucket, Key=f"{key}.tflock")
    except AwsError as e:
        if is_missing(e):
            return None
        raise
    try:
        held = json.loads(raw)
        return StateLock(
            id=str(held["ID"]), who=str(held.get("Who", "")), created=str(held.get("Created", ""))
        )
    except (ValueError, KeyError, TypeError) as e:
        msg = f"s3://{bucket}/{key}.tflock is no lock that Terraform wrote"
        raise AwsError(
            msg,
            hint="Look at it, and delete it if no other kvdeploy or terraform run holds it.",
        ) from e


def _exists(aws: Aws, bucket: str, account: str) -> bool:
    try:
        aws.call("s3:HeadBucket", Bucket=bucket, ExpectedBucketOwner=account)
    except AwsError as e:
        if is_missing(e):
            return False
        if is_refusal(e):
            raise _foreign(bucket) from e
        raise
    return True


def _create(aws: Aws, bucket: str) -> None:
    where: dict[str, Any] = (
        {}
        if aws.region == "us-east-1"
        else {"CreateBucketConfiguration": {"LocationConstraint": aws.region}}
    )
    try:
        aws.call("s3:CreateBucket", Bucket=bucket, **where)
    except AwsError as e:
        if code_of(e) == "BucketAlreadyExists":
            raise _foreign(bucket) from e
        if code_of(e) != "BucketAlreadyOwnedByYou":
            raise
    tags = {"TagSet": [{"Key": f"{TAG}managed", "Value": "true"}]}
    aws.call("s3:PutBucketTagging", Bucket=bucket, Tagging=tags)


def _foreign(bucket: str) -> AwsError:
    return AwsError(
        f"the bucket {bucket} is another account's, or s3:ListBucket on it is refused",
        hint="Choose another name for state.bucket: bucket names are shared by all accounts.",
    )


def _encrypted(aws: Aws, own: dict[str, Any]) -> bool:
    try:
        found = aws.call("s3:GetBucketEncryption", **own)
    except AwsError as e:
        if "ServerSideEncryptionConfigurationNotFound" in code_of(e):
            return False
        raise
    return bool(found["ServerSideEncryptionConfiguration"]["Rules"])


def _demand_tls(aws: Aws, own: dict[str, Any]) -> None:
    """Add our statement to the bucket's policy; others stay."""
    try:
        policy = json.loads(aws.call("s3:GetBucketPolicy", **own)["Policy"])
    except AwsError as e:
        if code_of(e) != "NoSuchBucketPolicy":
            raise
        policy = {"Version": "2012-10-17", "Statement": []}
    if any(statement.get("Sid") == TLS_ONLY for statement in policy["Statement"]):
        return
    partition = "aws-cn" if aws.region.startswith("cn-") else "aws"
    arn = f"arn:{partition}:s3:::{own['Bucket']}"
    policy["Statement"].append(
        {
            "Sid": TLS_ONLY,
            "Effect": "Deny",
            "Principal": "*",
            "Action": "s3:*",
            "Resource": [arn, f"{arn}/*"],
            "Condition": {"Bool": {"aws:SecureTransport": "false"}},
        }
    )
    aws.call("s3:PutBucketPolicy", **own, Policy=json.dumps(policy))
