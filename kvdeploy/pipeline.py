"""Run stages in order, skip what still holds, and remember after each one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvdeploy.model.record import Record, StageRecord

if TYPE_CHECKING:
    from collections.abc import Sequence
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
    given: Results | None = None,
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
        digest = _digest(stage.inputs(results))
        known = record.stages.get(stage.name)
        if again or known is None or known.digest != digest or not stage.holds(known.result):
            with progress.step(stage.title) as step:
                known = StageRecord(digest=digest, result=dict(stage.apply(results, step)))
            record = record.with_stage(stage.name, known)
            store.write(record)
            done.append(stage.name)
        results[stage.name] = known.result
        if stage.name == until:
            break
    return Ran(record=record, done=tuple(done))


def _digest(inputs: object) -> str:
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]
