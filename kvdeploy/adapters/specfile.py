"""Read a cluster file and the `--set` overlays on it. All problems are reported at once, each with
its place: the line of the file, or the overlay. Reads that one file and nothing else.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import yaml
from pydantic import BaseModel, ValidationError

from kvdeploy.adapters.yamltext import Parsed, node_at, parse_yaml
from kvdeploy.errors import SpecError
from kvdeploy.model.schema import Loc, dotted, key_at, keys_of
from kvdeploy.model.spec import ClusterSpec
from kvdeploy.model.wording import aws_missing, explain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pydantic_core import ErrorDetails

FILE_MAX_BYTES: Final = 1024 * 1024
DEFAULT_NAME: Final = "local"
BUILT_IN: Final = "the built-in cluster"
HINT: Final = "'kvdeploy init' writes a file in which every key is explained."


@dataclass(frozen=True, kw_only=True)
class LoadedSpec:
    """A cluster file that was read and found good."""

    spec: ClusterSpec
    source: str
    """What to call it in messages."""
    text: str
    """As read, without overlays."""


@dataclass(frozen=True, kw_only=True)
class Overlay:
    """One `--set PATH=VALUE`."""

    path: tuple[str, ...]
    value: Any
    node: yaml.Node | None
    """The value as it was typed."""
    shown: str


@dataclass(frozen=True, kw_only=True)
class _Problem:
    order: tuple[int, int]
    """The file's lines come first, then the overlays as they were given."""
    text: str


def default_text() -> str:
    """The cluster that is used when no file is given."""
    return f"name: {DEFAULT_NAME}\n"


def load(path: Path | None, *, overlays: Sequence[str] = ()) -> LoadedSpec:
    """Read the file, put the overlays on it and validate the result.

    Args:
        path: the cluster file; None means the built-in cluster.
        overlays: words of the form PATH=VALUE; a later one wins.

    Raises:
        SpecError: it cannot be read, is not YAML, or is not a cluster; lists every problem.
    """
    source = BUILT_IN if path is None else str(path)
    text = default_text() if path is None else _read(path)
    file = parse_yaml(text)
    at = _Places(source=source, numbered=path is not None, root=file.root)
    problems = [at.in_file(p.line, p.loc, p.text) for p in file.problems]
    parsed: list[Overlay] = []
    for order, word in enumerate(overlays):
        try:
            parsed.append(parse_overlay(word))
        except SpecError as e:
            problems.append(_Problem(order=(1, order), text=e.message))
    if file.usable and not isinstance(file.data, dict):
        problems.append(at.in_file(1, (), _not_a_map(file)))
    elif file.usable:
        data = _merge(file.data, parsed)
        spec, details = _validate(data)
        problems += [at.of_detail(loc, detail, parsed) for loc, detail in _real(details, data)]
        if data.get("target") == "aws" and data.get("aws") is None:
            problems.append(at.of_text(("target",), aws_missing(), parsed))
        if spec is not None and not problems:
            return LoadedSpec(spec=spec, source=source, text=text)
    listing = "\n".join(p.text for p in sorted(problems, key=lambda p: p.order))
    plural = "" if len(problems) == 1 else "s"
    msg = f"{listing}\n{len(problems)} problem{plural} in {source}"
    raise SpecError(msg, hint=HINT)


def name_in(path: Path) -> str:
    """The cluster's name, of a file that may otherwise be broken.

    Raises:
        SpecError: the file cannot be read, or no good name is in it.
    """
    named, key = word_in(path, "name"), key_at(("name",))
    if not isinstance(named, str) or key is None or not key.fits_pattern(named):
        msg = f"{path}: names no cluster"
        raise SpecError(msg, hint="Give its name with --name.")
    return named


def word_in(path: Path, key: str) -> str | None:
    """A word at the top level of a file that may otherwise be broken; None when it is not there.

    Raises:
        SpecError: the file cannot be read.
    """
    text = _read(path)
    data = parse_yaml(text).data
    if data is None:
        line = re.search(rf"^{key}:[ \t]*([\w-]+)[ \t]*(#|$)", text, re.MULTILINE)
        return line[1] if line else None
    found = data.get(key) if isinstance(data, dict) else None
    return found if isinstance(found, str) else None


def parse_overlay(word: str) -> Overlay:
    """Read PATH=VALUE; the value is YAML, and null puts the default back.

    Raises:
        SpecError: there is no '=', no path, or the value is not YAML.
    """
    dots, equals, typed = word.partition("=")
    path = tuple(part.strip() for part in dots.split("."))
    shown = f"--set {dots}=..." if "env" in path else f"--set {word}"
    if not equals:
        msg = f"--set {dots}: has no '='; write PATH=VALUE, e.g. fleet.prefill.count=2"
        raise SpecError(msg)
    if not all(path):
        msg = f"{shown}: has an empty word in its path; write PATH=VALUE, e.g. router.port=8080"
        raise SpecError(msg)
    value = parse_yaml(typed)
    if value.problems:
        told = "; ".join(p.text for p in value.problems)
        msg = f"{shown}: {dotted(path)}: {told}"
        raise SpecError(msg)
    return Overlay(path=path, value=value.data, node=value.root, shown=shown)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_MAX_BYTES + 1)
    except FileNotFoundError:
        msg = f"{path}: no such file"
        raise SpecError(msg, hint="Write one with 'kvdeploy init'.") from None
    except IsADirectoryError:
        msg = f"{path}: is a directory"
        raise SpecError(msg, hint="Name the cluster file in it.") from None
    except (OSError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) else "not a file's name"
        msg = f"{path}: cannot be read: {why}"
        raise SpecError(msg) from e
    if len(content) > FILE_MAX_BYTES:
        msg = f"{path}: is larger than 1 MiB, so it is no cluster file"
        raise SpecError(msg)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = content.count(b"\n", 0, e.start) + 1
        msg = f"{path}:{line}: is not UTF-8 text: byte 0x{content[e.start]:02x}"
        raise SpecError(msg, hint="Save it as UTF-8.") from e


def _not_a_map(file: Parsed) -> str:
    if file.data is None:
        return "is empty"
    found = "a list" if isinstance(file.data, list) else "a single value"
    return f"must hold keys such as name: and fleet:, not {found}"


def _merge(data: dict[str, Any], overlays: Sequence[Overlay]) -> dict[str, Any]:
    """The file's data with the overlays on it, and sections with nothing in them left out."""
    merged = dict(data)
    for overlay in overlays:
        _put(merged, overlay.path, overlay.value)
    return _without_empty(merged, ClusterSpec)


def _put(data: dict[str, Any], path: tuple[str, ...], value: object) -> None:
    """Set one value in place; maps on the way are copied, because aliases share them."""
    key = key_at(path)
    known = key is not None and (len(key.path) == len(path) or key.is_map)
    resets = value is None and known
    *parents, last = path
    for part in parents:
        below = data.get(part)
        if resets and not isinstance(below, dict):
            return
        data[part] = dict(below) if isinstance(below, dict) else {}
        data = data[part]
    if resets:
        data.pop(last, None)
    else:
        data[last] = value


def _without_empty(data: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Leave out sections, maps and lists that hold nothing: all their keys are commented out."""
    kept = dict(data)
    for key in keys_of(model):
        name, value = key.path[-1], data.get(key.path[-1])
        if value is None and key.is_container:
            kept.pop(name, None)
        elif key.section and isinstance(value, dict):
            kept[name] = _without_empty(value, key.section)
    return kept


def _validate(data: dict[str, Any]) -> tuple[ClusterSpec | None, list[ErrorDetails]]:
    """Validate as JSON: there text is never taken for a number, nor true for 1."""
    try:
        return ClusterSpec.model_validate_json(json.dumps(data), strict=True), []
    except ValidationError as e:
        return None, e.errors()


def _real(details: list[ErrorDetails], data: dict[str, Any]) -> Iterator[tuple[Loc, ErrorDetails]]:
    """Each place once: what may be of several types is reported once for every type."""
    seen: set[tuple[Loc, bool]] = set()
    for detail in details:
        loc: Loc = detail["loc"]
        if detail["type"] != "missing":
            loc = loc[: _depth(loc, data)]
        what = (loc, detail["loc"][-1:] == ("[key]",))
        if what not in seen:
            seen.add(what)
            yield loc, detail


def _depth(loc: Loc, data: Any) -> int:  # noqa: ANN401 - walks down any data
    """How many parts of `loc` the data has."""
    for depth, part in enumerate(loc):
        is_there = part in data if isinstance(data, dict) else isinstance(data, list)
        if not is_there or (isinstance(data, list) and not isinstance(part, int)):
            return depth
        data = data[part]
    return len(loc)


@dataclass(frozen=True, kw_only=True)
class _Places:
    """Knows who said what: the file, with its lines, or an overlay."""

    source: str
    numbered: bool
    root: yaml.Node | None

    def in_file(self, line: int, loc: Loc, text: str) -> _Problem:
        place = f"{self.source}:{line}" if self.numbered else self.source
        told = ": ".join(part for part in (place, dotted(loc), text) if part)
        return _Problem(order=(0, line), text=told)

    def of_detail(self, loc: Loc, detail: ErrorDetails, overlays: Sequence[Overlay]) -> _Problem:
        node, _line = node_at(self.root, loc)
        said_by = self._overlay(loc, overlays, missing=detail["type"] == "missing")
        if said_by is not None:
            overlay = overlays[said_by]
            node, _line = node_at(overlay.node, loc[len(overlay.path) :])
        raw = node.value if isinstance(node, yaml.ScalarNode) else None
        return self._told(loc, explain(detail, loc, raw=raw), overlays, said_by)

    def of_text(self, loc: Loc, text: str, overlays: Sequence[Overlay]) -> _Problem:
        return self._told(loc, text, overlays, self._overlay(loc, overlays, missing=False))

    def _told(
        self, loc: Loc, text: str, overlays: Sequence[Overlay], said_by: int | None
    ) -> _Problem:
        if said_by is None:
            return self.in_file(node_at(self.root, loc)[1], loc, text)
        shown = overlays[said_by].shown
        return _Problem(order=(1, said_by), text=f"{shown}: {dotted(loc)}: {text}")

    def _overlay(self, loc: Loc, overlays: Sequence[Overlay], *, missing: bool) -> int | None:
        """The last overlay that set what is at `loc`; of a missing key, what set its section."""
        if missing and node_at(self.root, loc[:-1])[0] is None:
            loc = loc[:-1]
        for order in reversed(range(len(overlays))):
            path = overlays[order].path
            if all(a == b for a, b in zip(path, loc, strict=False)):
                return order
        return None
