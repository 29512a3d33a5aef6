"""Checks of who may get into a cluster on AWS, and of its tags. Pure; they need the file alone."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Final

from kvdeploy.planning.findings import error, warning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvdeploy.model.awsspec import AwsSpec
    from kvdeploy.model.reports import Finding
    from kvdeploy.model.spec import ClusterSpec

PREFIX_MIN: Final = 8
"""A shorter prefix is no private network: 0.0.0.0/1 and 128.0.0.0/1 are the whole Internet too."""
TAGS_MAX: Final = 40
"""AWS allows 50 on a resource, and kvdeploy needs some of them."""
TAG_KEY_MAX: Final = 128
TAG_VALUE_MAX: Final = 256
TAKEN_TAGS: Final = ("kvdeploy:", "aws:")


def open_to_everyone(spec: ClusterSpec) -> Iterator[Finding]:
    """The whole Internet may knock."""
    aws = aws_of(spec)
    for i, text in enumerate(aws.network.allowed_cidrs if aws else ()):
        if not is_wide(text):
            continue
        path, said = (
            f"aws.network.allowed_cidrs[{i}]",
            f"{text} lets the whole Internet reach the router",
        )
        if aws and aws.network.open_to_internet:
            yield warning(path, said, "Name a range.")
        else:
            yield error(path, said, "Name a range, or set aws.network.open_to_internet to true.")


# --- access ----------------------------------------------------------------------------------
def key_named_twice(spec: ClusterSpec) -> Iterator[Finding]:
    """A node has one key pair."""
    aws = aws_of(spec)
    if aws and aws.access.key_name and aws.access.public_key_file:
        yield error(
            "aws.access.public_key_file",
            "both key_name and public_key_file name a key",
            "Keep one of them.",
        )


def ssh_from_nowhere(spec: ClusterSpec) -> Iterator[Finding]:
    """The new security group would let nobody in."""
    aws = aws_of(spec)
    if aws is None or aws.access.method != "ssh":
        return
    if not aws.access.ssh_cidrs and aws.network.security_group_id is None:
        yield error(
            "aws.access.ssh_cidrs",
            "is empty, and nobody could reach port 22",
            "Name the range that you, or your bastion, come from.",
        )


def ssh_without_bastion(spec: ClusterSpec) -> Iterator[Finding]:
    """Nodes have no public addresses, for EC2 gives none to an instance with many interfaces."""
    aws = aws_of(spec)
    if aws and aws.access.method == "ssh" and aws.access.bastion is None:
        yield warning(
            "aws.access.bastion",
            "is not set, and the nodes have private addresses only: SSH works from inside their "
            "network alone",
            "Set it to user@host, or use method ssm.",
        )


def ssh_open_to_everyone(spec: ClusterSpec) -> Iterator[Finding]:
    """Port 22 is never for the Internet."""
    aws = aws_of(spec)
    for i, text in enumerate(aws.access.ssh_cidrs if aws else ()):
        if is_wide(text):
            yield error(
                f"aws.access.ssh_cidrs[{i}]",
                f"{text} lets the whole Internet reach port 22",
                "Name your own range, or use method ssm, which needs no open port.",
            )


def ssh_settings_with_ssm(spec: ClusterSpec) -> Iterator[Finding]:
    """They would have no effect, or open a port for nothing."""
    aws = aws_of(spec)
    if aws is None or aws.access.method != "ssm":
        return
    for key in ("ssh_cidrs", "bastion"):
        if getattr(aws.access, key):
            yield error(
                f"aws.access.{key}",
                "is for method ssh, and method is ssm",
                "Leave it out, or set aws.access.method to ssh.",
            )


def ssh_rules_of_existing_group(spec: ClusterSpec) -> Iterator[Finding]:
    """A group that is not kvdeploy's is left as it is."""
    aws = aws_of(spec)
    if aws and aws.network.security_group_id and aws.access.ssh_cidrs:
        yield error(
            "aws.access.ssh_cidrs",
            f"who may reach port 22 is for the rules of {aws.network.security_group_id}, which "
            "kvdeploy does not change",
            "Leave it out, and let the group's own rules allow it.",
        )


# --- tags ------------------------------------------------------------------------------------
def tag_refused(spec: ClusterSpec) -> Iterator[Finding]:
    """AWS refuses a wrong tag in the middle of an apply; some keys are taken."""
    aws = aws_of(spec)
    if aws is None:
        return
    if len(aws.tags) > TAGS_MAX:
        yield error(
            "aws.tags",
            f"{len(aws.tags)} tags, and at most {TAGS_MAX} can be put beside kvdeploy's own",
            "Leave some out.",
        )
    for key, value in aws.tags.items():
        path = f"aws.tags.{key[:TAG_KEY_MAX]}"
        taken = next((t for t in TAKEN_TAGS if key.lower().startswith(t)), None)
        if taken:
            yield error(path, f"keys that begin with {taken} are taken", "Choose another key.")
        for what, text, most in (("key", key, TAG_KEY_MAX), ("value", value, TAG_VALUE_MAX)):
            if len(text) > most:
                yield error(
                    path,
                    f"its {what} has {len(text)} letters, and AWS takes {most}",
                    "Shorten it.",
                )
            elif re.search(r"[^\w .:/=+@-]", text):
                yield error(
                    path,
                    f"its {what} has letters that AWS does not take in a tag",
                    "Use letters, digits, spaces and _ . : / = + - @.",
                )


def is_wide(cidr: str) -> bool:
    """Whether a range is the Internet, or so large a part of it that it may as well be."""
    try:
        return ipaddress.ip_network(cidr, strict=False).prefixlen < PREFIX_MIN
    except ValueError:  # a check of its own
        return False


def aws_of(spec: ClusterSpec) -> AwsSpec | None:
    """What the file says about AWS; None when that is not the target."""
    return spec.aws if spec.target == "aws" else None


ACCESS_CHECKS: Final[tuple[Callable[[ClusterSpec], Iterator[Finding]], ...]] = (
    open_to_everyone,
    key_named_twice,
    ssh_from_nowhere,
    ssh_without_bastion,
    ssh_open_to_everyone,
    ssh_settings_with_ssm,
    ssh_rules_of_existing_group,
    tag_refused,
)
