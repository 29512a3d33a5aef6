"""Says what is wrong with a value of the cluster file in the words of its reader: what is wrong,
the good values, did you mean. The words of the validating library never reach the user.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any, Final, get_args, get_origin

from kvdeploy.model.awsspec import AwsSpec
from kvdeploy.model.base import EngineArg
from kvdeploy.model.schema import MISNOMERS, Key, Loc, all_keys, dotted, key_at, keys_of
from kvdeploy.model.spec import ClusterSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic import BaseModel
    from pydantic_core import ErrorDetails

SHOWN_MAX: Final = 60
"""Letters of a wrong value that are shown."""


def did_you_mean(word: object, good: Iterable[object]) -> str:
    """' Did you mean X?' for a near miss, else ''."""
    by_form = {_form(g): str(g) for g in good}
    close = difflib.get_close_matches(_form(word), by_form, n=1)
    return f" Did you mean {by_form[close[0]]}?" if close else ""


def aws_missing() -> str:
    """What to say when the target is aws and nothing is said about it."""
    needed = [key for key in keys_of(AwsSpec) if key.info.is_required()]
    names = " and ".join(key.path[-1] for key in needed)
    example = ", ".join(f"{key.path[-1]}: {key.example}" for key in needed)
    return f"aws needs a section aws with at least {names}, e.g. aws: {{{example}}}"


def explain(detail: ErrorDetails, loc: Loc, *, raw: str | None) -> str:
    """One problem.

    Args:
        detail: as the library reports it.
        loc: where it is in the file's data.
        raw: the value as the user typed it, without quotes; None when not a single word.
    """
    kind = detail["type"]
    if kind == "extra_forbidden":
        return _unknown_key(loc)
    if detail["loc"][-1:] == ("[key]",):
        return "not a variable's name: letters, digits and _, and no digit first"
    key = key_at(loc)
    if key is None:  # only the file as a whole has no key
        return "must hold keys such as name: and fleet:"
    if kind == "missing":
        return f"is required: {_doc(key)}"
    return _wrong_value(key, loc, detail["input"], raw)


def _wrong_value(key: Key, loc: Loc, value: Any, raw: str | None) -> str:  # noqa: ANN401
    inside = len(loc) > len(key.path)
    expected, wants_text = _expected_inside(key) if inside else _expected(key)
    if value is None:
        how = "" if key.info.is_required() else "; leave the line out for the default"
        return f"must be {expected}, but nothing is given{how}"
    if wants_text and isinstance(value, bool | int | float):
        if not inside and raw is not None and not key.fits_pattern(raw):
            return f"must be {expected}, not {raw}"
        kind = str(value).lower() if isinstance(value, bool) else "a number"
        if "env" in key.path:  # may be a secret
            return f"must be {expected}, and YAML reads this as {kind}; put it in quotes"
        return f'must be {expected}, and YAML reads {raw} as {kind}; write "{raw}"'
    if inside and isinstance(value, list) and not wants_text:
        return "must be a list of texts only; put its numbers in quotes"
    shown = "" if "env" in key.path else f", not {_shown(value, raw)}"
    takes_bare = key.annotation in _NUMBERS or (key.choices and isinstance(key.choices[0], int))
    if not wants_text and isinstance(value, str) and takes_bare and _is_quoted(value):
        return f"must be {expected}{shown}; leave out the quotes"
    return f"must be {expected}{shown}{_end(key, value)}"


def _end(key: Key, value: object) -> str:
    meant = did_you_mean(value, key.choices or key.words) if isinstance(value, str) else ""
    return f".{meant}" if meant else ""


def _expected(key: Key) -> tuple[str, bool]:
    """What a key takes, and whether that is text."""
    declared = key.annotation
    if key.section:
        return f"a map with keys of {', '.join(key.section.model_fields)}", False
    if key.choices:
        good = " or ".join((", ".join(map(str, key.choices[:-1])), str(key.choices[-1])))
        return f"one of {good}", False
    if key.is_map:
        return "a map of keys and values", False
    if get_origin(declared) is tuple:
        return "a list", False
    if declared is str:
        if key.limit("pattern"):
            return _doc(key).partition(";")[0], True
        return "text that is not empty" if key.limit("min_length") else "text", True
    words = "".join(f"{word} or " for word in key.words)
    return words + _NUMBERS[declared] + _range(key), False


_NUMBERS: Final = {int: "a whole number", float: "a number", bool: "true or false"}


def _expected_inside(key: Key) -> tuple[str, bool]:
    """What a map's or list's members may be."""
    args = get_args(key.annotation)
    if key.is_map and args[1] == EngineArg:
        return "true, a number, text, a list of texts or a map", False
    return "text", True


def _range(key: Key) -> str:
    ge, gt, le = key.limit("ge"), key.limit("gt"), key.limit("le")
    if ge is not None and le is not None:
        return f" from {ge} to {le}"
    above = f" above {gt}" if gt is not None else ""
    above = f" of at least {ge}" if ge is not None else above
    return above + (f" and at most {le}" if le is not None else "")


def _unknown_key(loc: Loc) -> str:
    """An unknown key: where it belongs, what was meant, or what there is."""
    word, parent = str(loc[-1]), loc[:-1]
    owner = key_at(parent)
    model: type[BaseModel] = (owner.section if owner else None) or ClusterSpec
    here = [key.path[-1] for key in keys_of(model)]
    named = MISNOMERS.get(_form(word), _form(word))
    if named in here:
        return f"unknown key. Did you mean {named}?"
    places = [key.path[:-1] for key in all_keys() if key.path[-1] == named]
    if places:
        under = " or ".join(dotted(p) for p in places if p)
        where = f"belongs under {under}" if under else "belongs at the top level"
        return f"unknown key here; {named} {where}"
    meant = did_you_mean(word, here)
    return f"unknown key.{meant}" if meant else f"unknown key. Good here: {', '.join(here)}"


def _doc(key: Key) -> str:
    return f"{key.doc}, e.g. {key.example}" if key.example else key.doc


def _form(word: object) -> str:
    """A word without what people get wrong about it: case, dashes."""
    return str(word).lower().replace("-", "_")


def _is_quoted(text: str) -> bool:
    """Whether it would be a number or a truth value without its quotes."""
    return re.fullmatch(r"[-+]?(0|[1-9]\d*)(\.\d+)?|true|false", text.strip()) is not None


def _shown(value: object, raw: str | None) -> str:
    match value:
        case dict():
            return "a map"
        case list():
            return "a list"
        case str():
            text = value if value.isprintable() else ascii(value)[1:-1]
            cut = f"{text[:SHOWN_MAX]}..." if len(text) > SHOWN_MAX else text
            return f"'{cut}'"
        case _:
            return (raw or str(value))[:SHOWN_MAX]
