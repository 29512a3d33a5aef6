"""Everything that can be known to be wrong about a cluster on AWS before anything is made.
Changes nothing.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kvdeploy.adapters.ansible.ssh import check_tools
from kvdeploy.adapters.aws import facts as aws_facts
from kvdeploy.adapters.aws.session import Aws
from kvdeploy.adapters.terraform.client import find_version, foreign_env
from kvdeploy.errors import AwsError, SpecError, ToolError
from kvdeploy.model.facts import OperatorFacts
from kvdeploy.model.infra import ClusterIdentity
from kvdeploy.planning.access import build_connection
from kvdeploy.planning.aws_checks import check_aws
from kvdeploy.planning.checks import check_spec
from kvdeploy.planning.findings import error
from kvdeploy.planning.nodes import nodes_of
from kvdeploy.planning.operator_checks import AWS_CREDENTIALS, PASSWORD, check_operator
from kvdeploy.stages.preflight import has_keys, look_at_tls

if TYPE_CHECKING:
    from kvdeploy.model.awsfacts import AwsFacts
    from kvdeploy.model.awsspec import AwsSpec
    from kvdeploy.model.infra import Node
    from kvdeploy.model.reports import Finding
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.proc import Runner

KEY_KINDS = ("ssh-", "ecdsa-", "sk-")


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What was found."""

    findings: tuple[Finding, ...]
    nodes: tuple[Node, ...]
    facts: AwsFacts | None
    """None when AWS could not be asked, or was not to be."""

    @property
    def user(self) -> str:
        """Who asks.

        Raises:
            AwsError: AWS was not asked.
        """
        if self.facts is None:
            msg = f"AWS was not asked (--allow {AWS_CREDENTIALS}), and nothing goes on without"
            raise AwsError(msg, hint=f"Leave out --allow {AWS_CREDENTIALS}.")
        return self.facts.identity.user

    @property
    def reservation_id(self) -> str | None:
        """Of the one reservation that aws.capacity means."""
        found = self.facts.reservation if self.facts else None
        return found.id if found else None


def look(
    spec: ClusterSpec,
    aws: Aws,
    known: ClusterIdentity | None,
    runner: Runner,
    root: Path,
    *,
    allow: frozenset[str] = frozenset(),
) -> Preflight:
    """Every finding about the cluster file, this machine, and the account.

    `known` is the cluster's identity when it was brought up before: what carries it is its own.
    With `aws-credentials` allowed AWS is not asked at all.
    """
    found = check_spec(spec, allow=allow)
    found += check_operator(spec, _operator(spec, runner, root), allow=allow)
    nodes = nodes_of(spec)
    held = frozenset({known.id}) if known else frozenset[str]()
    facts = None
    if AWS_CREDENTIALS not in allow:
        try:
            facts = aws_facts.look(aws, spec, nodes, held=held, root=root)
        except AwsError as e:
            found.append(replace(error("aws", e.message, e.hint), check=AWS_CREDENTIALS))
        else:
            found += check_aws(spec, facts, allow=allow)
    worst_first = sorted(found, key=lambda f: (-f.severity, f.path, f.check))
    return Preflight(findings=tuple(worst_first), nodes=nodes, facts=facts)


def aws_section(spec: ClusterSpec) -> AwsSpec:
    """Raises: SpecError: there is none."""
    if spec.aws is None:
        msg = "target aws needs a section aws"
        raise SpecError(msg)
    return spec.aws


def session_of(spec: ClusterSpec) -> Aws:
    """Whom to ask: AWS, or the double of a rehearsal."""
    section = aws_section(spec)
    return Aws(section.region, endpoint=section.endpoint)


def new_identity(owner: str, *, id: str | None = None) -> ClusterIdentity:
    """Of a cluster that is about to be made, or taken over, for the first time."""
    now = datetime.now(UTC).replace(microsecond=0)
    return ClusterIdentity(id=id or secrets.token_hex(8), owner=owner, created_at=now)


def read_public_key(spec: ClusterSpec, root: Path) -> str | None:
    """Text of aws.access.public_key_file; None when it is not set, '' when it holds no key."""
    named = aws_section(spec).access.public_key_file
    if named is None:
        return None
    try:
        text = (root / Path(named).expanduser()).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return text if text.startswith(KEY_KINDS) and "\n" not in text else ""


def _operator(spec: ClusterSpec, runner: Runner, root: Path) -> OperatorFacts:
    key, private = read_public_key(spec, root), aws_section(spec).access.private_key_file
    problem, days_left = look_at_tls(spec, root)
    return OperatorFacts(
        terraform=find_version(runner),
        terraform_env=foreign_env(os.environ),
        public_key_ok=None if key is None else bool(key),
        private_key_exists=None
        if private is None
        else (root / Path(private).expanduser()).is_file(),
        grafana_password=bool(os.environ.get(PASSWORD)),
        no_way=_no_way(spec),
        api_key_file_exists=has_keys(spec, root),
        tls_problem=problem,
        tls_days_left=days_left,
    )


def _no_way(spec: ClusterSpec) -> str:
    connection = build_connection(aws_section(spec), private_key=None, known_hosts="")
    try:
        check_tools(connection)
    except ToolError as e:
        return e.message
    return ""
