"""Resources that AWS has and Terraform's state does not know: which can be adopted, which must
go. A run that was killed leaves them, because Terraform saves an instance only once it runs.
Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from kvdeploy.model.infra import Leftover

INSTANCE: Final = "instance"
BY_NAME: Final = frozenset({"key_pair", "placement_group", "iam_role", "iam_instance_profile"})
"""Kinds that Terraform imports by name, not by id."""

_NETWORK, _ACCESS = "module.network", "module.access"
CHILDREN: Final = {
    (f"{_NETWORK}.aws_route_table.fabric/0", "route"): f"{_NETWORK}.aws_route.fabric_nat[0]",
    (f"{_NETWORK}.aws_route_table.nat/0", "route"): f"{_NETWORK}.aws_route.nat_internet[0]",
    (f"{_NETWORK}.aws_route_table.fabric/0", "route_table_association"): (
        f"{_NETWORK}.aws_route_table_association.fabric[0]"
    ),
    (f"{_NETWORK}.aws_route_table.nat/0", "route_table_association"): (
        f"{_NETWORK}.aws_route_table_association.nat[0]"
    ),
    (f"{_ACCESS}.aws_iam_role.this", "iam_role_policy_attachment"): (
        f"{_ACCESS}.aws_iam_role_policy_attachment.ssm[0]"
    ),
    (f"{_ACCESS}.aws_iam_role.this", "iam_role_policy"): f"{_ACCESS}.aws_iam_role_policy.models[0]",
}
"""(Tag kvdeploy:address of the parent, kind of the child) -> address of the child, which cannot
carry tags. A test holds it to infra/."""


@dataclass(frozen=True, kw_only=True)
class Orphans:
    """What to do about resources that the state does not know."""

    adopt: Mapping[str, Leftover]
    """By Terraform address: what the plan would make, and is there already."""
    remove: tuple[Leftover, ...] = ()
    """Machines that nothing in the configuration stands for: a second one of a node that the state
    knows, or one of a node that is not wanted any more."""
    rest: tuple[Leftover, ...] = ()
    """Anything else of that sort. It stays until `down`: only machines are worth the risk."""

    @property
    def imports(self) -> tuple[tuple[str, str], ...]:
        """(Terraform address, id for import)."""
        return tuple((address, import_id(found)) for address, found in self.adopt.items())


def sort_orphans(
    found: Iterable[Leftover], *, creates: Collection[str], known_ids: Collection[str]
) -> Orphans:
    """Compare what carries the cluster's id with a plan.

    Args:
        found: what AWS has, children of it included.
        creates: addresses that the plan would make.
        known_ids: ids of what the state knows.
    """
    found = tuple(found)
    parents = {resource.id: resource.address for resource in found}
    adopt: dict[str, Leftover] = {}
    remove, rest = [], []
    for resource in found:
        child = CHILDREN.get((parents.get(resource.name, ""), resource.kind))
        address = child or decode_address(resource.address)
        if not address or _is_known(resource, known_ids):
            continue
        if address in creates and address not in adopt:
            adopt[address] = resource
        elif resource.kind == INSTANCE:
            remove.append(resource)
        elif child is None:
            rest.append(resource)
    return Orphans(adopt=adopt, remove=tuple(remove), rest=tuple(rest))


def strays(found: Iterable[Leftover], known_ids: Collection[str]) -> tuple[Leftover, ...]:
    """What Terraform made, and would not destroy because its state does not know it."""
    return tuple(
        resource for resource in found if resource.address and not _is_known(resource, known_ids)
    )


def _is_known(resource: Leftover, known_ids: Collection[str]) -> bool:
    return resource.id in known_ids or import_id(resource) in known_ids


def decode_address(tag: str) -> str:
    """Of a kvdeploy:address tag: a key or index after a slash becomes one in brackets.

    module.nodes.aws_instance.this/decode-0 -> module.nodes.aws_instance.this["decode-0"]
    """
    address, slash, key = tag.partition("/")
    if not slash:
        return address
    return f"{address}[{key}]" if re.fullmatch(r"\d+", key) else f'{address}["{key}"]'


def import_id(resource: Leftover) -> str:
    """What Terraform imports it by."""
    return resource.name if resource.kind in BY_NAME and resource.name else resource.id
