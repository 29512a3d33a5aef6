"""What a changed cluster file does to the cluster that runs. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvdeploy.model.base import Change
from kvdeploy.model.schema import all_keys

if TYPE_CHECKING:
    from kvdeploy.model.spec import ClusterSpec


@dataclass(frozen=True, kw_only=True)
class FieldChange:
    """One field of the cluster file that is not what it was."""

    path: str
    was: str
    wanted: str
    does: Change


def compare(was: ClusterSpec, wanted: ClusterSpec) -> tuple[FieldChange, ...]:
    """Every field that differs, in the order of the file. Values of `env` are not shown."""
    found = []
    for key in all_keys():
        if key.section is not None:
            continue
        before, after = _value(was, key.path), _value(wanted, key.path)
        if before != after:
            hidden = key.path[-1] == "env"
            found.append(
                FieldChange(
                    path=key.dotted,
                    was="..." if hidden else _shown(before),
                    wanted="..." if hidden else _shown(after),
                    does=key.change or Change.NOTHING,
                )
            )
    return tuple(found)


def _value(spec: ClusterSpec, path: tuple[str, ...]) -> Any:  # noqa: ANN401  # any field's
    value: Any = spec
    for part in path:
        value = getattr(value, part) if value is not None else None
    return value


def _shown(value: object) -> str:
    return "(not set)" if value is None else str(value)
