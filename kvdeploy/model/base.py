"""The two habits every model shares: values are frozen, and people's typos are errors."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

EngineArg = bool | int | float | str | list[str] | dict[str, Any]
"""A value of `engine_args`: true is a bare flag, a list repeats its words, a map becomes JSON."""


class Frozen(BaseModel):
    """A value that people write: an unknown key is an error, not a silently ignored one."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Stored(BaseModel):
    """A value that kvdeploy wrote earlier: a newer version may have added keys."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Change(StrEnum):
    """What changing a field of the cluster file does to a running cluster."""

    NOTHING = "nothing"
    RELOAD = "reload"  # taken up by running processes
    ROUTER = "restart router"
    RESTART = "restart engines"
    REPLACE = "replace nodes"
    REFUSE = "refused: make another cluster"


def knob(default: Any = ..., *, doc: str, change: Change, **limits: Any) -> Any:
    """A field of the cluster file: its default, what it is, and what changing it costs.

    `doc` and `change` are shown by `kvdeploy init` and `kvdeploy plan`; tests hold every field
    to having both.
    """
    return Field(default, description=doc, json_schema_extra={"change": change.value}, **limits)
