"""Asks AWS everything that the checks of a cluster need, at once. Changes nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from kvdeploy import locks
from kvdeploy.adapters.aws import buckets, capacity, images, leftovers, network
from kvdeploy.adapters.aws.nodes import instances
from kvdeploy.adapters.aws.prices import prices_of
from kvdeploy.adapters.aws.refusals import is_login, is_refusal, refused_action
from kvdeploy.adapters.aws.session import by_tag, filters
from kvdeploy.errors import AwsError
from kvdeploy.model.awsfacts import AwsFacts, Refusal, Versions
from kvdeploy.model.catalog import IMAGE_PARAMETERS
from kvdeploy.model.infra import ID_TAG
from kvdeploy.model.prices import quota_class

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvdeploy.adapters.aws.session import Aws
    from kvdeploy.model.awsspec import AwsSpec
    from kvdeploy.model.infra import Node
    from kvdeploy.model.spec import ClusterSpec

Questions = dict[str, "Callable[[], dict[str, Any]]"]
"""What is asked, in words -> how: its answer is fields of AwsFacts."""
AT_ONCE: Final = 8
"""Questions under way."""


def look(
    aws: Aws,
    spec: ClusterSpec,
    nodes: tuple[Node, ...],
    *,
    held: frozenset[str] = frozenset(),
    root: Path | None = None,
) -> AwsFacts:
    """Everything that planning/aws_checks.py judges.

    A question that is not allowed, or that AWS does not answer, stays open and is named in the
    facts; credentials that are wrong end the look at once.

    Args:
        aws: the cluster's region.
        spec: a cluster with an `aws` section.
        nodes: what it wants, of planning/nodes.py.
        held: values of the tag kvdeploy:id that are this cluster's own.
        root: where a model's relative path begins; without, no folder is looked at.
    Raises AwsError.
    """
    if spec.aws is None:
        msg = "no aws section in the cluster file"
        raise AwsError(msg)
    identity = aws.identity()
    account = identity.account
    asked = {
        **_about_capacity(aws, spec.aws, nodes, held, account),
        **_about_network(aws, spec.aws),
        **_about_images(aws, spec.aws),
        **_about_the_rest(aws, spec, account, root),
    }
    fields: dict[str, Any] = {}
    refused: list[Refusal] = []
    unanswered: dict[str, str] = {}
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        jobs = {question: pool.submit(ask) for question, ask in asked.items()}
        try:
            for question, job in jobs.items():
                try:
                    fields |= job.result()
                except AwsError as e:
                    if is_login(e):
                        raise
                    if is_refusal(e):
                        refused.append(Refusal(action=refused_action(e), question=question))
                    else:
                        unanswered[question] = e.message
        except AwsError:
            pool.shutdown(cancel_futures=True)
            raise
    return AwsFacts(
        now=datetime.now(UTC),
        identity=identity,
        versions=locked_versions(),
        held_ids=held,
        refused=tuple(refused),
        unanswered=unanswered,
        **fields,
    )


def locked_versions() -> Versions:
    """Versions of vLLM and NIXL that nodes with GPUs get."""
    text = (resources.files(locks) / "cuda.txt").read_text(encoding="utf-8")
    pins = dict(line.split("==", 1) for line in text.splitlines() if "==" in line)
    return Versions(vllm=pins.get("vllm", "").strip(), nixl=pins.get("nixl", "").strip())


def _about_capacity(
    aws: Aws, spec: AwsSpec, nodes: tuple[Node, ...], held: frozenset[str], account: str
) -> Questions:
    types = sorted({node.instance_type for node in nodes})
    classes = {c for t in types if (c := quota_class(t))}
    codes = {c.on_demand for c in classes} | {c.spot for c in classes}
    wanted = spec.capacity
    questions: Questions = {
        "which zones offer the instance types": lambda: {"zones": capacity.zones_of(aws, types)},
        "the size of the instance types": lambda: {"vcpus": capacity.vcpus_of(aws, types)},
        "the vCPU quotas": lambda: {
            "quotas": capacity.quotas_of(aws, sorted(codes), account=account, held=held)
        },
        "the placement groups": lambda: {"placement_groups": capacity.placement_groups_of(aws)},
        "nodes that exist already": lambda: {"held_nodes": _held_nodes(aws, held)},
    }
    spot = {n.instance_type for n in nodes if n.role != "router" and wanted.kind == "spot"}
    questions["prices"] = lambda: {
        "prices": prices_of(aws, types, spot_zone=spec.zone, spot_types=spot)
    }
    if wanted.reservation_id or wanted.reservation_tags:
        questions["the reservation"] = lambda: {
            "reservations": capacity.reservations_of(
                aws,
                reservation_id=wanted.reservation_id,
                tags=wanted.reservation_tags,
                held=held,
            )
        }
    return questions


def _about_network(aws: Aws, spec: AwsSpec) -> Questions:
    net, questions = spec.network, Questions()
    if net.vpc_id:
        vpc_id = net.vpc_id
        questions["the VPC"] = lambda: _or_missing("vpc", network.vpc(aws, vpc_id))
    if net.subnet_id:
        subnet_id = net.subnet_id
        questions["the subnet"] = lambda: _or_missing("subnet", network.subnet(aws, subnet_id))
    if net.security_group_id:
        group_id = net.security_group_id
        questions["the security group"] = lambda: _or_missing(
            "security_group", network.security_group(aws, group_id)
        )
    if spec.access.key_name:
        name = spec.access.key_name
        questions["the key pair"] = lambda: {"key_pair_exists": network.key_pair_exists(aws, name)}
    return questions


def _about_images(aws: Aws, spec: AwsSpec) -> Questions:
    node = spec.ami or IMAGE_PARAMETERS["node"]
    router = spec.router_ami or IMAGE_PARAMETERS["router"]
    return {
        "the image of the GPU nodes": lambda: _or_missing("image", images.image(aws, node)),
        "the image of the router": lambda: _or_missing("router_image", images.image(aws, router)),
    }


def _about_the_rest(aws: Aws, spec: ClusterSpec, account: str, root: Path | None) -> Questions:
    model, bucket = spec.model.id, spec.state.bucket
    questions: Questions = {
        "what has the cluster's name already": lambda: {"same_name": _same_name(aws, spec)},
    }
    if model.startswith("s3://"):
        questions["the model in S3"] = lambda: {"model": buckets.s3_model(aws, model)}
    elif root is not None and (root / model).is_dir():
        questions["the model's folder"] = lambda: {"model": buckets.folder_model(root / model)}
    if bucket:
        questions["the state's bucket"] = lambda: {
            "state_bucket": buckets.state_bucket(aws, bucket, account=account)
        }
    return questions


def _or_missing(field: str, answer: object) -> dict[str, Any]:
    return {field: answer, f"{field}_missing": answer is None}


def _same_name(aws: Aws, spec: ClusterSpec) -> tuple[Any, ...]:
    vpc_id = spec.aws.network.vpc_id if spec.aws else None
    every = (
        *leftovers.find(aws, spec.name),
        *leftovers.named(aws, spec.name, vpc_id=vpc_id),
    )
    return tuple({(one.kind, one.id): one for one in every}.values())


def _held_nodes(aws: Aws, held: frozenset[str]) -> int:
    if not held:
        return 0
    asked = filters(instance_state_name=list(capacity.ALIVE))
    return len(instances(aws, Filters=[*asked, *by_tag(ID_TAG, *sorted(held))]))
