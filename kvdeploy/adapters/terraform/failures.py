"""What Terraform's and the provider's errors mean, and what to do next."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from kvdeploy.adapters.terraform.events import Diagnostic, Heard, node_of, short
from kvdeploy.errors import (
    AwsError,
    KvdeployError,
    LockedError,
    StateError,
    TerraformError,
    ToolError,
)

if TYPE_CHECKING:
    from pathlib import Path

SHOWN_MAX: Final = 5
"""Errors of one run that are shown; all of them are in its log."""

AGAIN: Final = "'kvdeploy up' goes on from here; 'kvdeploy down' takes down what was made."

_PERMISSION = re.compile(
    r"UnauthorizedOperation|AccessDenied|not authorized to perform:?\s*([\w-]+:\w+)?"
)
_EXPIRED = re.compile(
    r"ExpiredToken|RequestExpired|InvalidClientTokenId|AuthFailure|SignatureDoesNotMatch"
    r"|No valid credential sources|failed to refresh cached credentials|security token .* expired"
)
_NO_PROVIDER = re.compile(
    r"Failed to query available provider packages|Failed to install provider"
    r"|could not connect to registry|checksums previously recorded"
)
_ACTION = re.compile(r"not authorized to perform:?\s*([\w-]+:\w+)|operation error (\w+): (\w+)")
_ZONES = re.compile(r"choosing ([a-z0-9, -]+?)\.")
_LOCK = re.compile(r"^\s*(ID|Who|Created|Operation):\s+(.+?)\s*$", re.MULTILINE)
_QUOTA = re.compile(r"VcpuLimitExceeded|MaxSpotInstanceCountExceeded")


def explain(verb: str, heard: Heard, code: int, log: Path) -> KvdeployError:
    """The error that a failed command ends with: the known causes first, else its own words."""
    said = "\n".join([d.text for d in heard.errors] + heard.plain)
    if "Error acquiring the state lock" in said:
        return _locked(said, log)
    if _EXPIRED.search(said):
        return AwsError(
            f"terraform {verb}: AWS does not accept the credentials any more: {_first(heard)}",
            hint=f"Log in again (e.g. 'aws sso login') and repeat the command. {AGAIN}",
            log=log,
        )
    if "InsufficientInstanceCapacity" in said or "ReservationCapacityExceeded" in said:
        return _no_capacity(heard, said, log)
    if _QUOTA.search(said):
        return AwsError(
            f"the account's vCPU quota is used up: {_first(heard)}",
            hint="'kvdeploy check' shows the quota, and how to have it raised.",
            log=log,
        )
    if _NO_PROVIDER.search(said):
        return ToolError(
            f"terraform {verb} cannot get the AWS provider: {_first(heard)}",
            hint="It comes from Terraform's registry, or from a mirror that your Terraform "
            "CLI configuration (TF_CLI_CONFIG_FILE) names.",
            log=log,
        )
    if _PERMISSION.search(said):
        return AwsError(
            f"AWS refused: {_refused(said) or _first(heard)}",
            hint=f"docs/aws-permissions.md lists what the operator needs. {AGAIN}",
            log=log,
        )
    if "Failed to persist state" in said or "Error saving state" in said:
        return StateError(
            f"terraform {verb} could not save its state: {_first(heard)}",
            hint=f"What was made is found again by its tags. {AGAIN}",
            log=log,
        )
    return TerraformError(
        f"terraform {verb} failed (exit {code}): {_listing(heard)}", hint=AGAIN, log=log
    )


def _no_capacity(heard: Heard, said: str, log: Path) -> TerraformError:
    """EC2 has no instances of the type now, and may have named zones that have some."""
    zones = _ZONES.search(said)
    words = next(
        (d.text for d in heard.errors if "Capacity" in d.text), "InsufficientInstanceCapacity"
    )
    kind = re.search(r"sufficient ([\w.-]+) capacity", words)
    zone = re.search(r"you requested \(([\w-]+)\)", words)
    what = f" {kind[1]}" if kind else ""
    where = f" in {zone[1]}" if zone else ""
    if "ReservationCapacityExceeded" in words:
        what, where = "", " in the reservation"
    nodes = ", ".join(sorted(node_of(a) for a in heard.failed))
    there = f"AWS names {zones[1]} as having some." if zones else "AWS names no other zone."
    return TerraformError(
        f"there is no capacity{what}{where} now: could not launch {nodes or 'all nodes'}. {there}",
        hint="Try again later, set aws.zone to another zone (in a new cluster), or reserve "
        "capacity: aws.capacity.kind odcr or capacity-block.",
        log=log,
    )


def _locked(said: str, log: Path) -> LockedError:
    lock = dict(_LOCK.findall(said))
    held = f" by {lock['Who']} since {lock['Created']}" if {"Who", "Created"} <= lock.keys() else ""
    found = lock.get("ID", "")
    hint = "Wait for that run to end."
    if found:
        hint += f" If it was killed, break its lock: add --break-lock {found}"
    return LockedError(f"Terraform's state is locked{held}", hint=hint, log=log)


def _refused(said: str) -> str:
    """The IAM action that is missing, e.g. ec2:RunInstances; '' when it is not said."""
    found = _ACTION.search(said)
    if found is None:
        return ""
    return found[1] or f"{found[2].lower()}:{found[3]}"


def _listing(heard: Heard) -> str:
    told = [_one(d) for d in heard.errors] or heard.plain
    more = f"\n  and {len(told) - SHOWN_MAX} more" if len(told) > SHOWN_MAX else ""
    return ("\n  " if len(told) > 1 else "") + "\n  ".join(told[:SHOWN_MAX]) + more


def _first(heard: Heard) -> str:
    told = [_one(d) for d in heard.errors] or heard.plain or ["it did not say why"]
    return told[0]


def _one(found: Diagnostic) -> str:
    where = f"{short(found.address)}: " if found.address else ""
    detail = " ".join(found.detail.split())
    return f"{where}{' '.join(found.summary.split())}{f': {detail}' if detail else ''}"
