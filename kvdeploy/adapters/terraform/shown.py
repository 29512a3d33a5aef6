"""What `terraform show -json` says of a plan file and of the state.

Source: Terraform's "JSON Output Format" page, format version 1.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.model.infra import (
    GENERATION_TAG,
    Action,
    Drift,
    ManagedResource,
    ResourceChange,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan file, and what it would do."""

    changes: tuple[ResourceChange, ...]
    drift: tuple[Drift, ...] = ()
    outdated: tuple[str, ...] = ()
    """Instances of an older generation than is wanted, which nothing in the plan replaces: the run
    that was to replace them was killed in the middle."""
    ids: frozenset[str] = frozenset()
    """Of everything that the state knows."""
    has_changes: bool = True
    """Terraform's own word; outputs alone may change."""

    def of(self, kind: str, *actions: Action) -> tuple[str, ...]:
        """Addresses of one kind of resource that see one of the actions."""
        return tuple(c.address for c in self.changes if c.kind == kind and c.action in actions)


_ACTIONS: Final[Mapping[tuple[str, ...], Action]] = {
    ("create",): Action.CREATE,
    ("update",): Action.UPDATE,
    ("delete",): Action.DESTROY,
    ("delete", "create"): Action.REPLACE,
    ("create", "delete"): Action.REPLACE,
}


def _changes(shown: Mapping[str, Any]) -> Iterator[ResourceChange]:
    for found in shown.get("resource_changes", ()):
        change = found["change"]
        action = _ACTIONS.get(tuple(change["actions"]))
        if change.get("importing") and action in {None, Action.UPDATE}:
            action = Action.IMPORT
        if action is not None:
            yield ResourceChange(address=found["address"], kind=found["type"], action=action)


def _drift(shown: Mapping[str, Any]) -> Iterator[Drift]:
    """Instances whose state is not that of the last apply: a stopped node changes no plan."""
    for found in shown.get("resource_drift", ()):
        was, now = found["change"].get("before") or {}, found["change"].get("after") or {}
        if found["type"] == "aws_instance":
            before, after = was.get("instance_state"), now.get("instance_state", "gone")
            if before and before != after:
                yield Drift(
                    address=found["address"], field="instance_state", was=before, now=str(after)
                )


def _ids(shown: Mapping[str, Any]) -> Iterator[str]:
    for found in shown.get("resource_changes", ()):
        was = found["change"].get("before") or {}
        if found.get("mode") == "managed" and was.get("id"):
            yield str(was["id"])


def _outdated(shown: Mapping[str, Any]) -> Iterator[str]:
    outputs = shown.get("planned_values", {}).get("outputs", {})
    wanted = outputs.get("generations", {}).get("value", {})
    for found in shown.get("resource_changes", ()):
        change = found["change"]
        if found["type"] != "aws_instance" or change["actions"] not in (["no-op"], ["update"]):
            continue
        is_now = ((change["before"] or {}).get("tags") or {}).get(GENERATION_TAG)
        if is_now and is_now != wanted.get(found.get("index"), is_now):
            yield found["address"]


def read_plan(shown: Mapping[str, Any]) -> Planned:
    """Of `terraform show -json PLANFILE`."""
    return Planned(
        changes=tuple(_changes(shown)),
        drift=tuple(_drift(shown)),
        outdated=tuple(_outdated(shown)),
        ids=frozenset(_ids(shown)),
        has_changes=bool(shown.get("applyable", True)),
    )


def read_state(shown: Mapping[str, Any]) -> tuple[ManagedResource, ...]:
    """Of `terraform show -json`: every resource of every module, without data sources."""
    return tuple(_managed(shown.get("values", {}).get("root_module", {})))


def _managed(module: Mapping[str, Any]) -> Iterator[ManagedResource]:
    for found in module.get("resources", ()):
        if found["mode"] == "managed":
            yield ManagedResource(
                address=found["address"],
                kind=found["type"],
                id=str(found["values"].get("id", "")),
                tainted=bool(found.get("tainted")),
            )
    for child in module.get("child_modules", ()):
        yield from _managed(child)
