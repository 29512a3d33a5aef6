"""Thresholds of a bench: `ttft.p50.push <= ttft.p50.pull / 2`. Parsed and judged here, never run.

    threshold := sum ("<" | "<=" | ">" | ">=" | "==") sum
    sum       := product (("+" | "-") product)*
    product   := value (("*" | "/") value)*
    value     := NUMBER | NAME | "-" value | "(" sum ")"
    NAME      := METRIC "." STATISTIC "." MODE | METRIC "." MODE, and "." SCENARIO if one is meant

It has to hold on every cell of the bench; a name with a scenario means that scenario's cell of the
same lengths and concurrency. A minus is told from a mode's hyphen by the space before it.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final, NoReturn

from kvdeploy.model.bench import MODES, SCENARIOS
from kvdeploy.planning.bench.figures import STATISTICS, SUMS, TIMES, Group, TooFewError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvdeploy.model.bench import Cell
    from kvdeploy.model.routing import Mode

COMPARE: Final[dict[str, Callable[[float, float], bool]]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_TOKEN: Final = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?(?:e-?\d+)?)|(?P<name>[a-z][a-z0-9]*(?:\.[a-z0-9-]*[a-z0-9])+)"
    r"|(?P<sign><=|>=|==|[-+*/()<>]))"
)
_DEEPEST: Final = 32
_LONGEST: Final = 500


class ExpressionError(ValueError):
    """The expression is none, or names what a bench does not measure."""


@dataclass(frozen=True, kw_only=True)
class Name:
    metric: str
    statistic: str
    mode: Mode
    scenario: str

    def __str__(self) -> str:
        return ".".join(p for p in (self.metric, self.statistic, self.mode, self.scenario) if p)


Value = float | Name | tuple[str, "Value", "Value"]


@dataclass(frozen=True, kw_only=True)
class Threshold:
    text: str
    left: Value
    sign: str
    right: Value

    @property
    def names(self) -> tuple[Name, ...]:
        return tuple(dict.fromkeys((*_names(self.left), *_names(self.right))))


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What came of a threshold on one cell."""

    cell: Cell | None
    """None when there is none that it could be judged on."""
    held: bool
    message: str
    """A sentence with both numbers, or why there are none."""


def parse_threshold(
    text: str, *, modes: Sequence[str] = MODES, scenarios: Sequence[str] = tuple(SCENARIOS)
) -> Threshold:
    """Raises ExpressionError, with the names that are good."""
    if len(text) > _LONGEST:
        msg = f"--assert: {len(text)} letters; {_LONGEST} are the most"
        raise ExpressionError(msg)
    return _Parser(text, modes, scenarios).parse()


class _Parser:
    def __init__(self, text: str, modes: Sequence[str], scenarios: Sequence[str]) -> None:
        self._text, self._modes, self._scenarios = text, modes, scenarios
        self._at, self._depth = 0, 0
        self._word, self._kind = "", ""
        self._next()

    def parse(self) -> Threshold:
        left = self._sum()
        sign = self._word
        if sign not in COMPARE:
            self._fail(f"a comparison ({' '.join(COMPARE)})")
        self._next()
        right = self._sum()
        if self._kind:
            self._fail("the end")
        threshold = Threshold(text=self._text.strip(), left=left, sign=sign, right=right)
        if not threshold.names:
            msg = f"--assert {self._text!r}: it names nothing that a bench measures"
            raise ExpressionError(msg)
        return threshold

    def _sum(self) -> Value:
        value = self._product()
        while self._word in ("+", "-"):
            sign = self._take()
            value = (sign, value, self._product())
        return value

    def _product(self) -> Value:
        value = self._value()
        while self._word in ("*", "/"):
            sign = self._take()
            value = (sign, value, self._value())
        return value

    def _value(self) -> Value:
        self._depth += 1
        if self._depth > _DEEPEST:
            msg = f"--assert: over {_DEEPEST} brackets or signs within each other"
            raise ExpressionError(msg)
        try:
            return self._single()
        finally:
            self._depth -= 1

    def _single(self) -> Value:
        if self._kind == "number":
            return float(self._take())
        if self._kind == "name":
            return self._name(self._take())
        if self._word == "-":
            self._next()
            return ("-", 0.0, self._value())
        if self._word != "(":
            self._fail("a number, a name or '('")
        self._next()
        value = self._sum()
        if self._word != ")":
            self._fail("')'")
        self._next()
        return value

    def _name(self, word: str) -> Name:
        metric, *rest = word.split(".")
        self._know(word, "metric", metric, (*TIMES, *SUMS))
        statistic = ""
        if metric in TIMES:
            statistic = rest.pop(0) if rest else ""
            self._know(word, "statistic", statistic, STATISTICS)
        mode = rest.pop(0) if rest else ""
        self._know(word, "mode", mode, self._modes)
        scenario = rest.pop(0) if rest else ""
        if scenario:
            self._know(word, "scenario", scenario, self._scenarios)
        if rest:
            msg = f"--assert: {word!r} has a part too many: {'.'.join(rest)!r}"
            raise ExpressionError(msg)
        named = next(m for m in MODES if m == mode)
        return Name(metric=metric, statistic=statistic, mode=named, scenario=scenario)

    @staticmethod
    def _know(word: str, what: str, part: str, good: Sequence[str]) -> None:
        if part in good:
            return
        close = get_close_matches(part, good, n=1)
        did_you_mean = f" Did you mean {close[0]!r}?" if close else ""
        found = f"{part!r} is no {what}" if part else f"it lacks a {what}"
        msg = f"--assert: {word!r}: {found} here. Good are: {', '.join(good)}.{did_you_mean}"
        raise ExpressionError(msg)

    def _take(self) -> str:
        token = self._word
        self._next()
        return token

    def _next(self) -> None:
        rest = self._text[self._at :]
        if not rest.strip():
            self._word = self._kind = ""
            return
        found = _TOKEN.match(rest)
        if found is None:
            self._word = rest.split()[0]
            self._fail("a number, a name or a sign")
        self._at += found.end()
        self._kind = str(found.lastgroup)
        self._word = found[self._kind]

    def _fail(self, wanted: str) -> NoReturn:
        found = f"{self._word!r} stands" if self._word else "it ends"
        example = "ttft.p50.push <= ttft.p50.aggregated * 1.2"
        msg = f"--assert {self._text!r}: {found} where {wanted} should be. Example: {example}"
        raise ExpressionError(msg)


def judge(threshold: Threshold, groups: Sequence[Group]) -> list[Judgement]:
    """On every cell that it is about. Nothing measured is nothing held."""
    known = {(g.mode, g.cell): g for g in groups}
    whole = all(name.scenario for name in threshold.names)
    found: dict[tuple[object, ...], Judgement] = {}
    for cell in dict.fromkeys(g.cell for g in groups):
        cells = {n: _cell_of(n, cell, known) for n in threshold.names}
        if whole and None in cells.values():
            continue  # lengths that one of the scenarios was not asked with
        key = tuple(cells.values()) if whole else (cell,)
        found.setdefault(key, _judge_one(threshold, cell, cells, known))
    if found:
        return list(found.values())
    what = "no cell has all that it names" if groups else "nothing was measured"
    message = f"{threshold.text}: cannot be judged: {what}"
    return [Judgement(cell=None, held=False, message=message)]


def _cell_of(name: Name, cell: Cell, known: Mapping[tuple[Mode, Cell], Group]) -> Cell | None:
    wanted = cell.model_copy(update={"scenario": name.scenario}) if name.scenario else cell
    return wanted if (name.mode, wanted) in known else None


def _judge_one(
    threshold: Threshold,
    cell: Cell,
    cells: Mapping[Name, Cell | None],
    known: Mapping[tuple[Mode, Cell], Group],
) -> Judgement:
    def told(*, held: bool, message: str) -> Judgement:
        said = f"{threshold.text}: on {cell}: {message}"
        return Judgement(cell=cell, held=held, message=said)

    figures: dict[Name, float] = {}
    for name, at in cells.items():
        if at is None:
            return told(held=False, message=f"cannot be judged: {name} was not measured")
        try:
            figures[name] = known[name.mode, at].find(name.metric, name.statistic)
        except TooFewError as e:
            return told(held=False, message=f"cannot be judged: {name}: {e}")
    try:
        left, right = (_compute(v, figures) for v in (threshold.left, threshold.right))
    except ZeroDivisionError:
        return told(held=False, message="cannot be judged: it divides by zero")
    held = COMPARE[threshold.sign](left, right)
    is_not = "" if held else "not "
    return told(held=held, message=f"{left:.6g} is {is_not}{threshold.sign} {right:.6g}")


def _compute(value: Value, figures: Mapping[Name, float]) -> float:
    if isinstance(value, float):
        return value
    if isinstance(value, Name):
        return figures[value]
    sign, left, right = value
    done = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}[sign]
    return float(done(_compute(left, figures), _compute(right, figures)))


def _names(value: Value) -> Iterator[Name]:
    if isinstance(value, Name):
        yield value
    elif isinstance(value, tuple):
        yield from _names(value[1])
        yield from _names(value[2])
