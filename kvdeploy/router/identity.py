"""Who listens in an engine's place, by the names that it lists. Pure.

An engine of ours serves its model under its own id as well (planning/launch.py): decode's answers
tell no id, and this is the one thing that every vLLM server can be asked for it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdeploy.model.routing import Engine


def find_stranger(engine: Engine, served_model: str, page: str | None) -> str:
    """What is wrong with a /v1/models that is not the engine's own; nothing when it does not tell.

    Every id that the table expects nothing of is right.
    """
    names = _parse_names(page)
    if not names or any(name.startswith(engine.id_prefix) for name in names):
        return ""
    others = ", ".join(name for name in names if name != served_model)
    return explain(engine, others or "an engine without an id")


def find_own_id(engine: Engine, page: str | None) -> str:
    """The engine's id as it lists it, which is another at every start; nothing when it does not."""
    prefix = engine.id_prefix
    return next((name for name in _parse_names(page) if prefix and name.startswith(prefix)), "")


def explain(engine: Engine, found: str) -> str:
    return (
        f"{engine.name} says that it is {found}; its id should begin with "
        f"{engine.id_prefix}: another engine listens at {engine.url}"
    )


def _parse_names(page: str | None) -> list[str]:
    try:
        return [str(model["id"]) for model in json.loads(page or "")["data"]]
    except (ValueError, KeyError, TypeError):
        return []
