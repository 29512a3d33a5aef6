"""Talks to AWS: clients made when first needed, few tries, bounded waits.

Every call goes through `Aws.call` or `Aws.all`, each named by its IAM service and API operation,
so that what kvdeploy asks of AWS can be listed (docs/aws-permissions.md).
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, Final

import boto3
from botocore import xform_name
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from kvdeploy.adapters.aws.refusals import translate, translated
from kvdeploy.model.awsfacts import Identity

if TYPE_CHECKING:
    from collections.abc import Iterator

CLIENTS: Final = {"servicequotas": "service-quotas"}
"""IAM's names of services, where boto3 has another."""
PRICING_REGION: Final = "us-east-1"
"""The price list is served from few regions; this is one."""
NOBODY: Final = {"aws_access_key_id": "rehearsal", "aws_secret_access_key": "rehearsal"}
"""Credentials for a double of AWS."""


class Aws:
    """One region of one account. May be used by several threads.

    Args:
        region: e.g. 'us-west-2'.
        endpoint: of a double that is asked instead of AWS; nobody's credentials reach it.
        attempts: tries of one call, the first included.
        timeout_s: for a connection to open, and for every wait on an answer.
    """

    def __init__(
        self,
        region: str,
        *,
        endpoint: str | None = None,
        attempts: int = 4,
        timeout_s: float = 20.0,
    ) -> None:
        self.region, self.endpoint = region, endpoint
        self._config = Config(
            retries={"mode": "standard", "total_max_attempts": attempts},
            connect_timeout=min(timeout_s, 10.0),
            read_timeout=timeout_s,
            max_pool_connections=16,
            **({"proxies": {}} if endpoint else {}),
        )
        self._lock = threading.Lock()
        self._session: Any = None
        self._clients: dict[str, Any] = {}

    def client(self, service: str) -> Any:  # noqa: ANN401
        """The boto3 client of a service, by IAM's name of it. Raises AwsError."""
        with self._lock:  # boto3 sessions are not made for threads; clients are
            if service not in self._clients:
                try:
                    if self._session is None:
                        self._session = boto3.session.Session(**(NOBODY if self.endpoint else {}))
                    self._clients[service] = self._session.client(
                        CLIENTS.get(service, service),
                        region_name=PRICING_REGION if service == "pricing" else self.region,
                        endpoint_url=self.endpoint,
                        config=self._config,
                    )
                except (BotoCoreError, ValueError) as e:
                    raise translate(service, e, region=self.region) from e
            return self._clients[service]

    def call(self, operation: str, **parameters: Any) -> dict[str, Any]:  # noqa: ANN401
        """Call once, e.g. 'ec2:DescribeVpcs' with VpcIds=[...]. Raises AwsError."""
        service, name = operation.split(":")
        client = self.client(service)
        with translated(operation, region=self.region):
            answer: dict[str, Any] = getattr(client, xform_name(name))(**parameters)
            return answer

    def read(self, operation: str, *, at_most: int, **parameters: Any) -> bytes:  # noqa: ANN401
        """The first bytes of what a call answers as its Body. Raises AwsError."""
        body = self.call(operation, **parameters)["Body"]
        with translated(operation, region=self.region), body:
            return bytes(body.read(at_most))

    def all(self, operation: str, key: str, **parameters: Any) -> list[dict[str, Any]]:  # noqa: ANN401
        """The whole list that a call answers under `key`, all pages of it. Raises AwsError."""
        return list(self._pages(operation, key, parameters))

    def identity(self) -> Identity:
        """Who we are: worth asking before anything else. Raises AwsError."""
        answer = self.call("sts:GetCallerIdentity")
        arn = str(answer["Arn"])
        return Identity(account=str(answer["Account"]), arn=arn, user=arn.rpartition("/")[2])

    def _pages(
        self, operation: str, key: str, parameters: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        service, name = operation.split(":")
        client, method = self.client(service), xform_name(name)
        if not client.can_paginate(method):
            yield from self.call(operation, **parameters).get(key, [])
            return
        with translated(operation, region=self.region):
            for page in client.get_paginator(method).paginate(**parameters):
                yield from page.get(key, [])


def environment(endpoint: str | None) -> dict[str, str]:
    """What other programs must be told to ask a double; {} when there is none."""
    if endpoint is None:
        return {}
    return {
        "AWS_ENDPOINT_URL": endpoint,
        **{name.upper(): word for name, word in NOBODY.items()},
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1",
    }


def filters(**named: str | list[str]) -> list[dict[str, Any]]:
    """EC2's filters by name, e.g. vpc_id='vpc-1' for vpc-id."""
    return [
        {"Name": name.replace("_", "-"), "Values": [value] if isinstance(value, str) else value}
        for name, value in named.items()
    ]


def tags_of(described: dict[str, Any]) -> dict[str, str]:
    """Tags as a mapping, of anything that has a list of Key and Value."""
    found = described.get("Tags") or described.get("TagSet") or []
    return {str(tag["Key"]): str(tag["Value"]) for tag in found}


def by_tag(name: str, *values: str) -> list[dict[str, Any]]:
    """EC2's filter for a tag that has one of the values."""
    return [{"Name": f"tag:{name}", "Values": list(values)}]
