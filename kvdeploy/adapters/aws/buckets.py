"""S3 as the checks look at it: a model's files, the state's bucket."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.adapters.aws.network import is_missing
from kvdeploy.adapters.aws.refusals import is_refusal
from kvdeploy.errors import AwsError
from kvdeploy.model.awsfacts import ModelFiles, StateBucket
from kvdeploy.model.infra import s3_place

if TYPE_CHECKING:
    from pathlib import Path

    from kvdeploy.adapters.aws.session import Aws

WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
CONFIG_MAX_BYTES: Final = 4 * 2**20
"""More of a config.json is not read."""
PUBLIC_BLOCKS: Final = {
    "BlockPublicAcls": True,
    "IgnorePublicAcls": True,
    "BlockPublicPolicy": True,
    "RestrictPublicBuckets": True,
}


def s3_model(aws: Aws, uri: str) -> ModelFiles:
    """A model at s3://BUCKET/KEY: its config.json and the sum of its weights. Raises AwsError."""
    bucket, prefix = s3_place(uri)
    try:
        files = aws.all("s3:ListObjectsV2", "Contents", Bucket=bucket, Prefix=prefix)
        config = _config(aws, bucket, f"{prefix}config.json")
    except AwsError as e:
        if is_missing(e):
            return ModelFiles(readable=False)
        raise
    return ModelFiles(
        readable=True,
        region=bucket_region(aws, bucket),
        config=config,
        weights_bytes=_weights((f["Key"].removeprefix(prefix), f["Size"]) for f in files),
    )


def folder_model(folder: Path) -> ModelFiles:
    """A model in a folder of this machine."""
    try:
        config = _parsed((folder / "config.json").read_bytes()[:CONFIG_MAX_BYTES])
        sizes = [(p.name, p.stat().st_size) for p in folder.iterdir() if p.is_file()]
    except OSError:
        return ModelFiles(readable=False)
    return ModelFiles(readable=True, config=config, weights_bytes=_weights(sizes))


def state_bucket(aws: Aws, bucket: str, *, account: str) -> StateBucket:
    """The state's bucket as it is. Raises AwsError."""
    try:
        aws.call("s3:HeadBucket", Bucket=bucket)
        aws.call("s3:HeadBucket", Bucket=bucket, ExpectedBucketOwner=account)
    except AwsError as e:
        if is_missing(e):
            return StateBucket(exists=False)
        if is_refusal(e):
            return StateBucket(exists=True, ours=False)
        raise
    versioning = aws.call("s3:GetBucketVersioning", Bucket=bucket)
    return StateBucket(
        exists=True,
        region=bucket_region(aws, bucket),
        versioned=versioning.get("Status") == "Enabled",
        blocks_public=blocks_public(aws, bucket),
    )


def bucket_region(aws: Aws, bucket: str) -> str:
    """Where a bucket is. Raises AwsError."""
    found = aws.call("s3:GetBucketLocation", Bucket=bucket).get("LocationConstraint")
    return {None: "us-east-1", "": "us-east-1", "EU": "eu-west-1"}.get(found, str(found))


def blocks_public(aws: Aws, bucket: str) -> bool:
    """Whether the bucket refuses every kind of public access. Raises AwsError."""
    try:
        found = aws.call("s3:GetPublicAccessBlock", Bucket=bucket)
    except AwsError as e:
        if "NoSuchPublicAccessBlock" in e.message:
            return False
        raise
    return all(found["PublicAccessBlockConfiguration"].get(name) for name in PUBLIC_BLOCKS)


def _config(aws: Aws, bucket: str, key: str) -> dict[str, Any] | None:
    return _parsed(aws.read("s3:GetObject", at_most=CONFIG_MAX_BYTES, Bucket=bucket, Key=key))


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        config = json.loads(raw)
    except ValueError:
        return None
    return config if isinstance(config, dict) else None


def _weights(files: Any) -> int:  # noqa: ANN401
    """Bytes of the weights: of .safetensors files where there are any, for many repositories
    hold the same weights twice.
    """
    sizes = [(name, size) for name, size in files if name.endswith(WEIGHTS) and "/" not in name]
    safe = [size for name, size in sizes if name.endswith(".safetensors")]
    return sum(safe or [size for _, size in sizes])
