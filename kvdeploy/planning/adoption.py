"""Resources that AWS has and Terraform's state does not know: which can be adopted, which must
go. A run that was killed leaves them, because Terraform saves an instance only once it runs.
Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvdeploy.model.infra import Leftover, ManagedResource

INSTANCE: Final = "module.nodes.aws_instance.this"
BY_NAME: Final = frozenset({"key_pair", "placement_group", "iam_role", "iam_instance_profile"})
"""Kinds that Terraform imports by name, not by id."""


@dataclass(frozen=True, kw_only=True)
class Orphans:
    """What to do about resources that the state does not know."""

    adopt: Mapping[str, Leftover]
    """By Terraform address."""
    remove: tuple[Leftover, ...]
    """Those that nothing in the configuration stands for: a second instance of a node that the
    state knows, or a node that is not wanted any more."""

    @property
    def imports(self) -> tuple[tuple[str, str], ...]:
        """(Terraform address, id for import)."""
        return tuple((address, import_id(found)) for address, found in self.adopt.items())

    @property
    def all(self) -> tuple[Leftover, ...]:
        return (*self.adopt.values(), *self.remove)


def sort_orphans(
    found: Iterable[Leftover], known: Iterable[ManagedResource], *, wanted_nodes: Iterable[str]
) -> Orphans:
    """Compare what carries the cluster's id with what the state knows."""
    known = tuple(known)
    ids, taken = {r.id for r in known}, {r.address for r in known}
    nodes = {f'{INSTANCE}["{name}"]' for name in wanted_nodes}
    adopt: dict[str, Leftover] = {}
    remove = []
    for resource in found:
        if not resource.address or import_id(resource) in ids or resource.id in ids:
            continue
        address = decode_address(resource.address)
        is_wanted = address in nodes or not address.startswith(INSTANCE)
        if address in taken or address in adopt or not is_wanted:
            remove.append(resource)
        else:
            adopt[address] = resource
    return Orphans(adopt=adopt, remove=tuple(remove))


def decode_address(tag: str) -> str:
    """Of a kvdeploy:address tag: a key or index after a slash becomes one in brackets.

    module.nodes.aws_instance.this/decode-0 -> module.nodes.aws_instance.this["decode-0"]
    """
    address, slash, key = tag.partition("/")
    if not slash:
        return address
    return f"{address}[{key}]" if re.fullmatch(r"\d+", key) else f'{address}["{key}"]'


def import_id(resource: Leftover) -> str:
    return resource.name if resource.kind in BY_NAME and resource.name else resource.id
