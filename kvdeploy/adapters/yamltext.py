"""YAML text to data, with the place of every value kept. Bounded: no text, however odd, makes it
build more than VALUES_MAX values or raise anything; what is wrong comes back as problems.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdeploy.model.schema import Loc

VALUES_MAX: Final = 100_000
"""Values with every alias written out."""
DEPTH_MAX: Final = 32
DIGITS_MAX: Final = 40

_TAG: Final = "tag:yaml.org,2002:"
_PLAIN: Final = frozenset({"null", "bool", "int", "float", "str", "seq", "map", "merge"})


@dataclass(frozen=True, kw_only=True)
class YamlProblem:
    line: int
    loc: Loc
    text: str


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """Data of a text; `data` means nothing unless `usable`."""

    root: yaml.Node | None
    data: Any
    problems: tuple[YamlProblem, ...]
    usable: bool


class _Loader(yaml.SafeLoader):
    """Plain YAML in which dates are text: no key of a cluster file is a date."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag.removeprefix(_TAG) in _PLAIN]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse_yaml(text: str) -> Parsed:
    """Read one document. A key is always text; a key given twice is a problem."""
    survey = _Survey()
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is not None:
            survey.visit(root, ())
        data = None if root is None or survey.fatal else loader.construct_document(root)
    except yaml.YAMLError as e:
        survey.stop(_line_of_error(e, text), (), _words_of(e))
        return survey.result(None, None)
    except RecursionError:
        survey.stop(1, (), f"is nested more than {DEPTH_MAX} deep")
        return survey.result(None, None)
    except (ValueError, LookupError):  # an explicit tag that does not fit its value: !!int x
        survey.stop(1, (), "not YAML: a tag such as !!int does not fit its value")
        return survey.result(None, None)
    return survey.result(root, data)


def node_at(root: yaml.Node | None, loc: Loc) -> tuple[yaml.Node | None, int]:
    """The node at `loc`, None when it is not there, and the line of the deepest part that is."""
    node, line = root, 1
    for part in loc:
        below = None if node is None else next(_below(node, part), None)
        if below is None:
            return None, line
        node, line = below
    return node, line


def _below(node: yaml.Node, part: str | int) -> Iterator[tuple[yaml.Node, int]]:
    if isinstance(
        node, yaml.MappingNode
    ):  # what a merge brought in comes first, so look from behind
        for key, value in reversed(node.value):
            if key.value == part:
                yield value, key.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
        for item in node.value[part : part + 1]:
            yield item, item.start_mark.line + 1


class _Survey:
    """One look at every node, before any value is made of it."""

    def __init__(self) -> None:
        self.fatal = False
        self._problems: list[YamlProblem] = []
        self._sizes: dict[int, int] = {}
        self._open: set[int] = set()

    def result(self, root: yaml.Node | None, data: object) -> Parsed:
        return Parsed(root=root, data=data, problems=tuple(self._problems), usable=not self.fatal)

    def stop(self, line: int, loc: Loc, text: str) -> None:
        """A problem after which the data cannot be used."""
        self.fatal = True
        self._problems.append(YamlProblem(line=line, loc=loc, text=text))

    def visit(self, node: yaml.Node, loc: Loc) -> int:
        """Note what is wrong at and below `node`; the number of its values, aliases written out."""
        known = self._sizes.get(id(node))
        if known is not None:
            return known
        line = node.start_mark.line + 1
        if id(node) in self._open or len(self._open) >= DEPTH_MAX:
            is_loop = id(node) in self._open
            what = "holds itself" if is_loop else f"is nested more than {DEPTH_MAX} deep"
            self.stop(line, loc, what)
            return 1
        if node.tag.removeprefix(_TAG) not in _PLAIN:
            self.stop(line, loc, f"unknown tag {node.tag.replace(_TAG, '!!')}; write a plain value")
            return 1
        self._open.add(id(node))
        size = 1
        if isinstance(node, yaml.MappingNode):
            size += self._visit_map(node, loc)
        elif isinstance(node, yaml.SequenceNode):
            size += sum(self.visit(item, (*loc, i)) for i, item in enumerate(node.value))
        else:
            self._visit_word(node, loc)
        self._open.discard(id(node))
        self._sizes[id(node)] = size
        if size > VALUES_MAX and not self.fatal:
            self.stop(line, loc, f"holds more than {VALUES_MAX:,} values")
        return size

    def _visit_map(self, node: yaml.MappingNode, loc: Loc) -> int:
        first_lines: dict[str, int] = {}
        pairs, size = [], 0
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self.stop(line, loc, "a key must be one word")
                continue
            self._visit_word(key, loc)
            if key.tag == f"{_TAG}merge":
                pairs.append((key, value))
            else:  # so that a key such as 8000 or on is the text it looks like
                text_tag = f"{_TAG}str"
                pairs.append(
                    (yaml.ScalarNode(text_tag, key.value, key.start_mark, key.end_mark), value)
                )
                if key.value in first_lines:
                    self._given_twice((*loc, key.value), first_lines[key.value], line)
                first_lines.setdefault(key.value, line)
            size += 1 + self.visit(value, (*loc, key.value))
        node.value = pairs
        return size

    def _given_twice(self, loc: Loc, first: int, line: int) -> None:
        where = "on the same line" if first == line else f"first on line {first}"
        text = f"is given twice, {where}; keep one"
        self._problems.append(YamlProblem(line=line, loc=loc, text=text))

    def _visit_word(self, node: yaml.Node, loc: Loc) -> None:
        line, kind, text = node.start_mark.line + 1, node.tag.removeprefix(_TAG), node.value
        if kind in {"int", "float"} and len(text) > DIGITS_MAX:
            self.stop(line, loc, f"a number of more than {DIGITS_MAX} digits")
        elif kind == "float" and not _is_finite(text):
            self.stop(line, loc, f"{text} is not a number that a cluster file may hold")
        elif any("\ud800" <= letter <= "\udfff" for letter in text):
            self.stop(line, loc, "holds half of a surrogate pair, which is no letter")


def _is_finite(text: str) -> bool:
    bare = text.replace("_", "").lower()
    if bare.lstrip("+-") in {".inf", ".nan"}:
        return False
    try:
        return math.isfinite(float(bare))
    except ValueError:
        return True  # base 60: 1:30.5


def _line_of_error(e: yaml.YAMLError, text: str) -> int:
    mark = getattr(e, "problem_mark", None) or getattr(e, "context_mark", None)
    if mark is not None:
        return int(mark.line) + 1
    return text.count("\n", 0, getattr(e, "position", 0)) + 1


def _words_of(e: yaml.YAMLError) -> str:
    problem = str(getattr(e, "problem", None) or getattr(e, "reason", None) or "cannot be read")
    if "'\\t'" in problem:
        return "not YAML: a tab where none may be; indent with spaces"
    if "found another document" in problem:
        return "holds more than one document (---); keep one"
    if problem == "mapping values are not allowed here":
        return "not YAML: a ': ' where none may be; check the indentation, or quote the value"
    return f"not YAML: {problem}"
