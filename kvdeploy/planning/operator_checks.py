"""Checks of the machine from which a cluster on AWS is operated. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvdeploy.model.catalog import TERRAFORM_MIN
from kvdeploy.planning.findings import collect, error, keys_unreadable, tls_ending, tls_unfit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvdeploy.model.facts import OperatorFacts
    from kvdeploy.model.reports import Finding
    from kvdeploy.model.spec import ClusterSpec


AWS_CREDENTIALS: Final = "aws-credentials"
"""Id of the finding that AWS cannot be asked. With it allowed, AWS is not asked at all."""


PASSWORD: Final = "KVDEPLOY_GRAFANA_PASSWORD"  # noqa: S105  # the name of a variable


@dataclass(frozen=True, kw_only=True)
class Operated:
    """What is judged."""

    spec: ClusterSpec
    facts: OperatorFacts


def check_operator(
    spec: ClusterSpec, facts: OperatorFacts, *, allow: frozenset[str] = frozenset()
) -> list[Finding]:
    """Run every check but those whose id is in `allow`; worst first."""
    return collect(OPERATOR_CHECKS, Operated(spec=spec, facts=facts), allow=allow)


def terraform_missing(case: Operated) -> Iterator[Finding]:
    """Everything in AWS is made and destroyed by Terraform."""
    if not case.facts.terraform:
        wanted = ".".join(map(str, TERRAFORM_MIN))
        yield error("target", "terraform is not on PATH", f"Install Terraform {wanted} or newer.")


def terraform_too_old(case: Operated) -> Iterator[Finding]:
    """Older ones cannot lock a state in S3."""
    found = case.facts.terraform
    if found and found < TERRAFORM_MIN:
        said, wanted = (".".join(map(str, v)) for v in (found, TERRAFORM_MIN))
        yield error("target", f"terraform {said} is too old", f"Install {wanted} or newer.")


def terraform_env_set(case: Operated) -> Iterator[Finding]:
    """Variables of the shell would change what is made, unseen; Terraform never gets them."""
    for name in case.facts.terraform_env:
        yield error(
            "target",
            f"{name} is set in the environment, and kvdeploy does not hand it to Terraform",
            f"Unset it: unset {name}. What is made follows from the cluster file alone.",
        )


def public_key_file_missing(case: Operated) -> Iterator[Finding]:
    """Without the key nobody could log in."""
    if case.facts.public_key_ok is False and case.spec.aws is not None:
        yield error(
            "aws.access.public_key_file",
            f"{case.spec.aws.access.public_key_file} holds no public key that can be read",
            "Name one, e.g. ~/.ssh/id_ed25519.pub, or make one with ssh-keygen.",
        )


def private_key_file_missing(case: Operated) -> Iterator[Finding]:
    """Nodes would be paid for that nobody can log in to."""
    if case.facts.private_key_exists is False and case.spec.aws is not None:
        yield error(
            "aws.access.private_key_file",
            f"{case.spec.aws.access.private_key_file} is not there",
            "Name the key that belongs to the nodes' key pair, or leave it out.",
        )


def access_tool_missing(case: Operated) -> Iterator[Finding]:
    """A program is missing that is wanted as soon as nodes run, and bill."""
    if case.facts.no_way:
        yield error(
            "aws.access.method",
            case.facts.no_way,
            "Install it; with method ssh no AWS program is needed.",
        )


def grafana_password_missing(case: Operated) -> Iterator[Finding]:
    """Roles would stop in the middle, with nodes that bill."""
    if case.spec.monitoring.enabled and not case.facts.grafana_password:
        yield error(
            "monitoring.enabled",
            f"Grafana's admin needs a password, and {PASSWORD} is not set",
            f"Set it for this command: {PASSWORD}=... kvdeploy up.",
        )


def api_key_file_missing(case: Operated) -> Iterator[Finding]:
    """A router without its keys would refuse everybody, or nobody."""
    yield from keys_unreadable(case.spec, exists=case.facts.api_key_file_exists)


def tls_unusable(case: Operated) -> Iterator[Finding]:
    """A router without its certificate does not start, and with a wrong one nobody talks to it."""
    yield from tls_unfit(case.facts.tls_problem)


def tls_ends_soon(case: Operated) -> Iterator[Finding]:
    """Clients refuse a router whose certificate has ended."""
    yield from tls_ending(case.spec, days_left=case.facts.tls_days_left)


OPERATOR_CHECKS: Final[tuple[Callable[[Operated], Iterator[Finding]], ...]] = (
    terraform_missing,
    terraform_too_old,
    terraform_env_set,
    public_key_file_missing,
    private_key_file_missing,
    access_tool_missing,
    grafana_password_missing,
    api_key_file_missing,
    tls_unusable,
    tls_ends_soon,
)
