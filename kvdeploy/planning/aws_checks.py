"""Checks of a cluster against the AWS account that it is to be made in. Pure: facts are given.

Images, names and permissions are here; capacity, the network and the model have their own
modules beside this one.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from kvdeploy.model.catalog import IMAGE_PARAMETERS, SUPPORTED_OS
from kvdeploy.planning.aws_capacity_checks import CAPACITY_CHECKS
from kvdeploy.planning.aws_case import AwsCheck, Judged, listing
from kvdeploy.planning.aws_model_checks import MODEL_CHECKS
from kvdeploy.planning.aws_network_checks import NETWORK_CHECKS
from kvdeploy.planning.cost import HOURS_A_DAY, cost_of
from kvdeploy.planning.findings import collect, error, warning
from kvdeploy.planning.nodes import nodes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdeploy.model.awsfacts import AwsFacts, Image
    from kvdeploy.model.infra import Leftover
    from kvdeploy.model.reports import Finding
    from kvdeploy.model.spec import ClusterSpec

NAMES_SHOWN: Final = 5


def check_aws(
    spec: ClusterSpec, facts: AwsFacts, *, allow: frozenset[str] = frozenset()
) -> list[Finding]:
    """Run every check but those whose id is in `allow`; worst first. Other targets find nothing."""
    if spec.target != "aws" or spec.aws is None:
        return []
    case = Judged(spec=spec, aws=spec.aws, facts=facts, nodes=nodes_of(spec))
    return collect(AWS_CHECKS, case, allow=allow)


# --- what may be asked -----------------------------------------------------------------------
def permission_missing(case: Judged) -> Iterator[Finding]:
    """What cannot be seen cannot be checked, and shows in the middle of a run."""
    open_questions: dict[str, list[str]] = defaultdict(list)
    for refusal in case.facts.refused:
        open_questions[refusal.action].append(refusal.question)
    for action, questions in open_questions.items():
        yield warning(
            "aws",
            f"{action} is not allowed to {case.facts.identity.user}, so nothing is known about "
            f"{listing(questions)}",
            "Allow it in the IAM policy of this identity: docs/aws-permissions.md has all of it.",
        )


def question_unanswered(case: Judged) -> Iterator[Finding]:
    """AWS may be busy, or the endpoint not know the call: then that much is not checked."""
    for question, said in case.facts.unanswered.items():
        yield warning(
            "aws",
            f"AWS gave no answer about {question}: {said}",
            "Run it again; what stays unknown shows when nodes are made.",
        )


# --- images ----------------------------------------------------------------------------------
def image_unusable(case: Judged) -> Iterator[Finding]:
    """Nodes are set up on a few systems only."""
    facts = case.facts
    for path, role, name, image, missing in (
        ("aws.ami", "node", case.aws.ami, facts.image, facts.image_missing),
        (
            "aws.router_ami",
            "router",
            case.aws.router_ami,
            facts.router_image,
            facts.router_image_missing,
        ),
    ):
        if missing:
            said = name or f"the image that {IMAGE_PARAMETERS[role]} names"
            yield error(
                path,
                f"{said} is not in {case.aws.region}, or not shared with this account",
                f"Images differ from region to region: name one of this region in {path}.",
            )
        elif image is not None:
            yield from _image_findings(path, image)


def _image_findings(path: str, image: Image) -> Iterator[Finding]:
    good = f"Use an x86-64 image of {' or '.join(SUPPORTED_OS)}, e.g. the Deep Learning Base AMI."
    if image.state != "available":
        yield error(path, f"{image.id} is {image.state}, not available", good)
    if image.architecture != "x86_64":
        yield error(path, f"{image.id} is for {image.architecture}, not x86_64", good)
    if not image.os:
        yield warning(
            path, f"the name of {image.id}, {image.name!r}, does not say which system it is", good
        )
    elif image.os not in SUPPORTED_OS:
        yield error(path, f"{image.id} is {image.os}, which kvdeploy cannot set up", good)


# --- names, money ----------------------------------------------------------------------------
def name_taken(case: Judged) -> Iterator[Finding]:
    """Two clusters of one name would take each other's resources."""
    strangers = [one for one in case.facts.same_name if one.cluster_id not in case.facts.held_ids]
    owned = [one for one in strangers if one.cluster_id]
    if owned:
        ids = listing(sorted({one.cluster_id for one in owned}))
        yield error(
            "name",
            f"{case.spec.name} is another cluster in {case.aws.region} already (kvdeploy:id "
            f"{ids}): {_shown(owned)}",
            "Choose another name; or, if that one is yours and what was known of it here is lost, "
            "end it with 'kvdeploy down', or take it over with "
            f"'kvdeploy up --adopt {owned[0].cluster_id}'.",
        )
    unowned = [one for one in strangers if not one.cluster_id]
    if unowned:
        yield error(
            "name",
            f"names that {case.spec.name} needs are taken by what kvdeploy did not make: "
            f"{_shown(unowned)}",
            "Choose another name, or delete them.",
        )


def budget_too_small(case: Judged) -> Iterator[Finding]:
    """Who means a week and can pay for hours wants to know it before."""
    budget, ttl = case.aws.budget_usd, case.aws.ttl_hours
    if budget is None:
        return
    hourly = cost_of(case.nodes, case.spec, case.facts.prices).usd_hour
    hours = min(ttl or HOURS_A_DAY, HOURS_A_DAY)
    if hourly * hours > budget:
        lasts = f"spent after {budget / hourly:.1f} hours"
        yield warning(
            "aws.budget_usd",
            f"${budget:g} are {lasts} at ${hourly:.2f} an hour",
            f"A day is ${hourly * HOURS_A_DAY:.0f}. Nothing ends by itself when it is spent.",
        )


def _shown(found: list[Leftover]) -> str:
    names = [f"{one.kind} {one.id}" for one in found[:NAMES_SHOWN]]
    more = len(found) - len(names)
    return listing([*names, f"{more} more"] if more else names)


AWS_CHECKS: Final[tuple[AwsCheck, ...]] = (
    permission_missing,
    question_unanswered,
    *CAPACITY_CHECKS,
    image_unusable,
    name_taken,
    budget_too_small,
    *NETWORK_CHECKS,
    *MODEL_CHECKS,
)
