"""What the cluster file may hold, read off the models of spec.py: keys, kinds, good values.

Shared by the reader of the file and by the template that `kvdeploy init` writes, so that neither
repeats what the models say.
"""

from __future__ import annotations

import re
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from kvdeploy.model.base import Change
from kvdeploy.model.spec import ClusterSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic.fields import FieldInfo

Loc = tuple[str | int, ...]
"""A place in the file's data: keys and list positions."""

MISNOMERS = {
    "tp": "tensor_parallel",
    "tensor_parallel_size": "tensor_parallel",
    "dp": "data_parallel",
    "data_parallel_size": "data_parallel",
    "replicas": "count",
    "max_model_len": "max_length",
    "model_name": "served_name",
    "served_model_name": "served_name",
    "kv_lease_duration": "lease_s",
    "availability_zone": "zone",
}
"""Words that people know from elsewhere, and ours."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of the file."""

    path: tuple[str, ...]
    info: FieldInfo

    @property
    def dotted(self) -> str:
        return ".".join(self.path)

    @property
    def doc(self) -> str:
        return self.info.description or ""

    @property
    def change(self) -> Change | None:
        extra = self.info.json_schema_extra
        return Change(str(extra["change"])) if isinstance(extra, dict) else None

    @property
    def annotation(self) -> Any:  # noqa: ANN401 - whatever the model declares
        """The declared type without `| None`, and without words that may stand in its place."""
        kept = [a for a in self._members if get_origin(a) is not Literal] or self._members
        first = kept[0] if len(kept) == 1 else self.info.annotation
        return get_args(first)[0] if get_origin(first) is Annotated else first

    @property
    def _members(self) -> list[Any]:
        """Of a union, all but None; else the one declared type."""
        declared = self.info.annotation
        if get_origin(declared) not in {Union, types.UnionType}:
            return [declared]
        return [a for a in get_args(declared) if a is not types.NoneType]

    @property
    def words(self) -> tuple[str, ...]:
        """What may be given instead of a value of the declared type."""
        if len(self._members) == 1:
            return ()
        return tuple(w for a in self._members if get_origin(a) is Literal for w in get_args(a))

    @property
    def section(self) -> type[BaseModel] | None:
        """The model of a key that holds further keys; None for a plain value."""
        declared = self.annotation
        is_model = isinstance(declared, type) and issubclass(declared, BaseModel)
        return declared if is_model else None

    @property
    def is_map(self) -> bool:
        """Whether it holds keys of the user's own choice."""
        return get_origin(self.annotation) is dict

    @property
    def is_container(self) -> bool:
        """Whether it holds further values: a section, a map or a list."""
        return self.section is not None or get_origin(self.annotation) in {dict, list, tuple}

    @property
    def choices(self) -> tuple[str | int, ...]:
        return get_args(self.annotation) if get_origin(self.annotation) is Literal else ()

    def limit(self, name: str) -> Any:  # noqa: ANN401 - a number or a pattern
        """A limit such as 'ge' or 'pattern'; None when there is none."""
        inner = [i for a in self._members if get_origin(a) is Annotated for i in get_args(a)[1:]]
        infos = [m for i in inner for m in getattr(i, "metadata", [i])]
        found = (getattr(m, name, None) for m in [*self.info.metadata, *infos])
        return next((v for v in found if v is not None), None)

    @property
    def example(self) -> str | None:
        return str(self.info.examples[0]) if self.info.examples else None

    def fits_pattern(self, text: str) -> bool:
        pattern = self.limit("pattern")
        return pattern is None or re.search(pattern, text) is not None


def keys_of(model: type[BaseModel], *, under: tuple[str, ...] = ()) -> Iterator[Key]:
    """The keys of one level, in the order of the model."""
    for name, info in model.model_fields.items():
        yield Key(path=(*under, name), info=info)


def all_keys(model: type[BaseModel] = ClusterSpec, *, under: tuple[str, ...] = ()) -> Iterator[Key]:
    """Every key at every depth, a section before its own keys."""
    for key in keys_of(model, under=under):
        yield key
        if key.section:
            yield from all_keys(key.section, under=key.path)


def key_at(loc: Loc) -> Key | None:
    """The deepest key of the schema on the way to `loc`; None when even the first is unknown."""
    model: type[BaseModel] | None = ClusterSpec
    found: Key | None = None
    for depth, part in enumerate(loc):
        if model is None or part not in model.model_fields:
            break
        found = Key(path=tuple(map(str, loc[: depth + 1])), info=model.model_fields[str(part)])
        model = found.section
    return found


def dotted(loc: Loc) -> str:
    """`loc` as people write it: aws.network.allowed_cidrs[0]."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return text.removeprefix(".")
