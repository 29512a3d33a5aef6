"""Models in S3: many objects, and many ranges of each, at once.

Runs on nodes, in the environment of boto3, with the node's own credentials. Files are fetched by
processes of their own: one interpreter alone does not fill a 100 Gbit/s interface.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model_folder import BLOCK, is_wanted
from model_sources import AGAIN, PART, Entry, Refusal, flush

if TYPE_CHECKING:
    from model_sources import Fetched

THREADS = 8
"""Ranges of one object under way at once: one connection to S3 carries 5 Gbit/s at most."""
RANGE = 32 * 2**20


class S3Source:
    """Objects below a prefix; the node's own credentials."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.id, self.weights, self.workers = str(job["id"]), bool(job["weights"]), job["workers"]
        self.bucket, _, key = self.id.removeprefix("s3://").partition("/")
        self.prefix = f"{key.rstrip('/')}/" if key.rstrip("/") else ""
        self.origin = ""

    def entries(self) -> list[Entry]:
        found = []
        try:
            pages = s3_client().get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self.bucket, Prefix=self.prefix):
                for item in page.get("Contents", ()):
                    path = item["Key"].removeprefix(self.prefix)
                    if is_wanted(path, weights=self.weights):
                        found.append(Entry(path, item["Size"], item["ETag"].strip('"')))
        except Exception as e:
            raise Refusal(self._refusal(e)) from e
        return found

    def fetch(self, entries: list[Entry], target: Path) -> Fetched:
        if not entries:
            return
        workers = max(1, min(self.workers, len(entries), os.cpu_count() or 1))
        pool: Executor = ProcessPoolExecutor(workers) if workers > 1 else ThreadPoolExecutor(1)
        with pool:
            # Large ones first: one that comes last would be fetched alone.
            asked = {
                pool.submit(fetch_object, self.bucket, self.prefix, entry, str(target))
                for entry in sorted(entries, key=lambda entry: entry.size, reverse=True)
            }
            try:
                while asked:
                    done, asked = wait(asked, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield future.result()
            except (Refusal, OSError):
                pool.shutdown(cancel_futures=True)
                raise
            except Exception as e:
                pool.shutdown(cancel_futures=True)
                raise Refusal(self._refusal(e)) from e

    def _refusal(self, e: Exception) -> str:
        code = getattr(e, "response", {}).get("Error", {}).get("Code", "") or type(e).__name__
        what = {
            "NoSuchBucket": f"there is no bucket {self.bucket}",
            "AccessDenied": "the node's role may not read it (s3:ListBucket, s3:GetObject)",
            "NoCredentialsError": "the node has no AWS credentials: give it an instance profile",
            "403": "the node's role may not read it (s3:ListBucket, s3:GetObject)",
            "404": "an object went away while it was fetched",
            "PreconditionFailed": "an object changed while it was fetched",
        }.get(str(code), str(e).strip().rstrip("."))
        return (
            f"cannot fetch {self.id}: {what} ({code}). Check it with 'aws s3 ls {self.id}' on the "
            "node; then run this again: files that are whole are not fetched twice."
        )


def s3_client() -> Any:  # noqa: ANN401  # boto3 makes its clients' classes as it runs
    """One a process: connections must not be shared across a fork."""
    return _client_of(os.getpid())


@cache
def _client_of(_: int) -> Any:  # noqa: ANN401
    config = importlib.import_module("botocore.config").Config(
        max_pool_connections=THREADS, retries={"mode": "standard", "max_attempts": 5}
    )
    # boto3 itself asks for AWS_DEFAULT_REGION alone. Without a region it asks the global endpoint,
    # which a private subnet may not reach.
    region = os.environ.get("AWS_REGION") or None
    return importlib.import_module("boto3").client("s3", region_name=region, config=config)


def fetch_object(bucket: str, prefix: str, entry: Entry, target: str) -> tuple[Entry, str]:
    """Fetch one object in a process of its own, and hold it to its length and ETag."""
    client, key, final = s3_client(), prefix + entry.path, Path(target) / entry.path
    part = final.with_name(final.name + PART)
    transfer = importlib.import_module("boto3.s3.transfer").TransferConfig(
        multipart_threshold=RANGE, multipart_chunksize=RANGE, max_concurrency=THREADS
    )
    client.download_file(bucket, key, str(part), Config=transfer)  # all of it of one ETag
    head = client.head_object(Bucket=bucket, Key=key)
    if head["ETag"].strip('"') != entry.tag:
        msg = f"{key} of {bucket} changed while it was fetched. Run this again."
        raise Refusal(msg)
    step = 0
    if "-" in entry.tag:
        step = client.head_object(Bucket=bucket, Key=key, PartNumber=1)["ContentLength"]
    size = part.stat().st_size
    sha256, etag = hash_object(part, step)
    # With a key of KMS an ETag is no hash, and parts of unequal lengths cannot be told from it.
    plain = head.get("ServerSideEncryption") in (None, "AES256")
    known = plain and (not step or entry.tag.endswith(f"-{-(-size // step)}"))
    if size != entry.size or (known and etag != entry.tag):
        part.unlink()
        msg = f"{key} of {bucket} arrived with other content than S3 tells: {AGAIN}"
        raise Refusal(msg)
    flush(part)
    part.replace(final)
    return entry, sha256


def hash_object(path: Path, part_size: int) -> tuple[str, str]:
    """SHA-256 and ETag of a file; `part_size` is that of its upload, 0 for one in one piece."""
    sha256, parts = hashlib.sha256(), []
    left, md5 = part_size, hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(min(BLOCK, left) if part_size else BLOCK):
            sha256.update(block)
            md5.update(block)
            left -= len(block)
            if part_size and left == 0:
                parts.append(md5.digest())
                left, md5 = part_size, hashlib.md5(usedforsecurity=False)
    if not part_size:
        return sha256.hexdigest(), md5.hexdigest()
    if left != part_size:
        parts.append(md5.digest())
    whole = hashlib.md5(b"".join(parts), usedforsecurity=False).hexdigest()
    return sha256.hexdigest(), f"{whole}-{len(parts)}"
