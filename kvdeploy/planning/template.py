"""The commented cluster file that `kvdeploy init` writes. Every word about a key comes from its
model, so that no text is written twice; only what a target changes is said here.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final, Literal

from kvdeploy.model.awsspec import AwsSpec
from kvdeploy.model.schema import Key, keys_of
from kvdeploy.model.spec import ClusterSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic import BaseModel

    from kvdeploy.model.base import Change

WIDTH: Final = 100
COMMENT_COLUMN: Final = 34

AWS_ONLY: Final = frozenset(
    {
        "aws",
        "monitoring",
        "state",
        "fleet.prefill.nodes_per_instance",
        "fleet.decode.nodes_per_instance",
    }
)
"""Keys that say nothing on other targets."""

AWS_VALUES: Final[Mapping[str, object]] = {
    "model.id": "meta-llama/Llama-3.3-70B-Instruct",
    "model.max_length": 16384,
    "fleet.prefill.tensor_parallel": 8,
    "fleet.decode.tensor_parallel": 8,
    **{f"aws.{k.path[-1]}": k.example for k in keys_of(AwsSpec) if k.info.is_required()},
}
"""Where a first cluster on aws differs from the defaults."""

_HEADER: Final = """\
# A cluster file: what is served, by how many engines, where. Every key but name has a default;
# one that is commented out shows it. 'kvdeploy check' reports every mistake at once.
# [...] is what a change does to a running cluster; it holds for all keys below until they say
# otherwise. 'kvdeploy plan' shows it before it happens.
"""


def render_cluster(
    target: Literal["local", "aws"], name: str, chosen: Mapping[str, object] | None = None
) -> str:
    """The whole file, ready to be used as it is; `chosen` are values by dotted key."""
    values: dict[str, object] = {"name": name, "target": target}
    if target == "aws":
        values |= AWS_VALUES
    values |= chosen or {}
    skipped = AWS_ONLY if target != "aws" else frozenset[str]()
    return _HEADER + "\n" + "\n".join(_level(ClusterSpec, (), values, skipped, None)) + "\n"


def _level(
    model: type[BaseModel],
    under: tuple[str, ...],
    values: Mapping[str, object],
    skipped: frozenset[str],
    change: Change | None,
) -> Iterator[str]:
    """The lines of one section; `change` is what its heading already said."""
    for key in keys_of(model, under=under):
        if key.dotted in skipped:
            continue
        comment = f"# {key.doc}{f' [{key.change}]' if key.change != change else ''}"
        if key.section is None:
            yield from _entry(key, values, comment)
            continue
        if not under:
            yield ""
        below = list(_level(key.section, key.path, values, skipped, key.change))
        is_idle = all(line.lstrip().startswith("#") for line in below)
        heading = f"{_indent(key)}{'# ' if is_idle else ''}{key.path[-1]}:"
        yield from _with_comment(heading, comment, key)
        yield from below


def _entry(key: Key, values: Mapping[str, object], comment: str) -> Iterator[str]:
    value = values.get(key.dotted, key.info.default)
    is_idle = value is None or value in ((), {})
    text = f"{_indent(key)}{'# ' if is_idle else ''}{key.path[-1]}: {_scalar(value)}"
    yield from _with_comment(text, comment, key)


def _with_comment(text: str, comment: str, key: Key) -> Iterator[str]:
    line = f"{text:<{COMMENT_COLUMN}} {comment}"
    if len(line) <= WIDTH:
        yield line
    else:
        yield f"{_indent(key)}{comment}"
        yield text


def _indent(key: Key) -> str:
    return "  " * (len(key.path) - 1)


def _scalar(value: object) -> str:
    """One value as YAML; text is quoted where YAML might take it for something else."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        is_plain = re.fullmatch(r"[A-Za-z][\w./:@-]*[\w/]|\d+(\.\d+){3}", value, re.ASCII)
        is_word = value.lower() in {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
        return value if is_plain and not is_word else json.dumps(value)
    return json.dumps(value if not isinstance(value, tuple) else list(value))
