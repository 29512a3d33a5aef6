"""How the nodes of a cluster on AWS are reached. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvdeploy.model.inventory import Connection

if TYPE_CHECKING:
    from kvdeploy.model.awsspec import AccessSpec, AwsSpec

LOGIN: Final = "ubuntu"
"""Whom cloud-init gives the key to, on images of Ubuntu."""
PUBLIC: Final = ".pub"


def build_connection(
    aws: AwsSpec, *, private_key: str | None, known_hosts: str, learn: bool = False
) -> Connection:
    """The way to every node.

    Args:
        aws: of the cluster file.
        private_key: the key to log in with; None: ssh's own choice.
        known_hosts: file of host keys.
        learn: whether keys that are seen for the first time go in there.
    """
    through_ssm = aws.access.method == "ssm"
    return Connection(
        user=LOGIN,
        private_key=private_key,
        known_hosts=known_hosts,
        learn_host_keys=learn,
        bastion=None if through_ssm else aws.access.bastion,
        ssm_region=aws.region if through_ssm else None,
    )


def needs_own_key(access: AccessSpec) -> bool:
    """Whether nobody named a key: then the cluster has one of its own."""
    return access.key_name is None and access.public_key_file is None


def named_key(access: AccessSpec) -> str | None:
    """The private key that the cluster file names; None: ssh's own choice, or the cluster's own."""
    if access.private_key_file is not None:
        return access.private_key_file
    public = access.public_key_file or ""
    return public.removesuffix(PUBLIC) if public.endswith(PUBLIC) else None
