"""Run stages in order, skip what still holds, and remember after each one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvdeploy.model.record import Record, StageRecord

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from kvdeploy.stages.base import Results, Stage, Step


class Progress(Protocol):
    def step(self, title: str) -> AbstractContextManager[Step]: ...


class Store(Protocol):
    def write(self, record: Record) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How `up` ended: the record, and the names of the stages that had something to do."""

    record: Record
    done: tuple[str, ...]


def up(
    stages: Sequence[Stage],
    record: Record,
    *,
    store: Store,
    progress: Progress,
    again_from: str | None = None,
    until: str | None = None,
    given: Mapping[str, Mapping[str, Any]] | None = None,
) -> Ran:
    """Bring every stage to its wanted state.

    A stage is skipped when its inputs are those of last time and it still holds.
    Results are part of later stages' inputs, so a replaced node redoes what
    depends on it and nothing else. The record is written after every stage:
    a run that fails or is interrupted goes on from there.

    Args:
        stages: in their order.
        record: what earlier runs have done.
        store: keeps it.
        progress: told of every stage that has something to do.
        again_from: this stage and all after it are done although they hold.
        until: the last stage to look at.
        given: results of earlier stages, which are not looked at.
    """
    results: Results = dict(given or {})
    done = []
    again = False
    for stage in stages:
        again = again or stage.name == again_from
        digest = digest_of(stage.inputs(results))
        last = record.stages.get(stage.name)
        if again or last is None or last.digest != digest or not stage.holds(last.result):
            with progress.step(stage.title) as step:
                last = StageRecord(digest=digest, result=dict(stage.apply(results, step)))
            record = record.with_stage(stage.name, last)
            store.write(record)
            done.append(stage.name)
        results[stage.name] = last.result
        if stage.name == until:
            break
    return Ran(record=record, done=tuple(done))


def digest_of(inputs: object) -> str:
    """By which a stage's inputs are compared with those of last time."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]
