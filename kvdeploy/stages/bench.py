"""Measure a running fleet: ask, time, and read what its engines counted meanwhile.

Judges nothing; what it has measured it keeps, whatever happens later.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from kvdeploy.errors import FleetError, KvdeployError
from kvdeploy.model.bench import Run
from kvdeploy.planning.bench import prompts
from kvdeploy.stages import bench_cold, bench_scatter
from kvdeploy.stages.asking import Asker
from kvdeploy.stages.bench_clients import Clients, Pace
from kvdeploy.stages.bench_counters import STILL_S, find_moved, wait_settled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvdeploy.model.outputs import FleetOutputs
    from kvdeploy.model.routing import Mode
    from kvdeploy.planning.bench.matrix import Planned
    from kvdeploy.planning.bench.prompts import Script
    from kvdeploy.stages.base import Step

__all__ = ["Bench", "Pace"]


class Bench:
    """Runs on one fleet. `mark` tells this bench's prompts from those of every other."""

    def __init__(
        self,
        *,
        vocabulary: int,
        seed: int,
        mark: str,
        pace: Pace,
        runs: int,
        still_s: float = STILL_S,
        on_run: Callable[[], None] = lambda: None,
        pair: str | None = None,
    ) -> None:
        """`on_run` is told after every run; `pair` is asked alone, if one is named."""
        self._vocabulary, self._seed, self._mark = vocabulary, seed, mark
        self._pace, self._total, self._still_s = pace, runs, still_s
        self._on_run, self._pair = on_run, pair
        self._began = time.monotonic()
        self.runs: list[Run] = []
        self.failed: dict[str, str] = {}

    def measure(
        self,
        fleet: FleetOutputs,
        planned: Sequence[Planned],
        step: Step,
        renew: Callable[[], None] | None = None,
    ) -> None:
        """Make every run that is planned for the fleet as it is; a mode that fails is given up.

        `renew` starts every decode engine anew and waits until the router has it again: for runs
        of cold pairs alone.
        """
        asker = Asker(fleet)
        asker.wait_quiet()
        scattered = False
        for wanted in planned:
            if wanted.mode in self.failed:
                continue
            step.update(f"{self._progress()}: {wanted.mode}, {wanted.cell}")
            try:
                if wanted.cell.scenario == "fragmented" and not scattered:
                    scattered = True
                    step.update(f"{self._progress()}: scattering free blocks")
                    self._scatter(asker, wanted)
                run = self._run(asker, wanted, renew)
            except KvdeployError as e:
                self.fail(wanted.mode, e.message)
                continue
            self.runs.append(run)
            self._on_run()
            if 2 * len(run.good) < len(run.samples) or not run.good:
                self.fail(wanted.mode, f"{wanted.cell}, round {wanted.round}: {_worst(run)}")
            elif run.moved is None:
                why = "an engine did not answer when its counters were to be read"
                self.fail(wanted.mode, f"{wanted.cell}, round {wanted.round}: {why}")

    def fail(self, mode: Mode, why: str) -> None:
        self.failed.setdefault(mode, why)

    def _progress(self) -> str:
        done = len(self.runs)
        told = f"run {done + 1} of {self._total}"
        if not done:
            return told
        left = (time.monotonic() - self._began) / done * (self._total - done)
        return f"{told}, about {left:.0f} s left"

    def _run(self, asker: Asker, wanted: Planned, renew: Callable[[], None] | None) -> Run:
        scripts = self._scripts(wanted)
        if wanted.cell.scenario == "cold":
            assert renew is not None  # noqa: S101  # cold pairs are planned with it alone
            starts = min(wanted.starts, self._pace.requests)
            return bench_cold.measure(
                asker, wanted, scripts[0], renew, starts=starts, still_s=self._still_s
            )
        return asyncio.run(self._timed(asker, wanted, Clients(asker, wanted, self._pair), scripts))

    def _scripts(self, wanted: Planned) -> list[Script]:
        return prompts.build_scripts(
            wanted.cell,
            seed=self._seed,
            mark=f"{self._mark} {wanted.mode} {wanted.cell} {wanted.round}",
            vocabulary=self._vocabulary,
        )

    def _scatter(self, asker: Asker, wanted: Planned) -> None:
        wide = bench_scatter.widen(wanted, asker.config.usual_mode)
        asyncio.run(bench_scatter.scatter(asker, wide, self._scripts(wide)))

    async def _timed(
        self, asker: Asker, wanted: Planned, clients: Clients, scripts: Sequence[Script]
    ) -> Run:
        try:
            await clients.warm_up(scripts)
            before = wait_settled(asker, self._still_s)
            began = time.perf_counter()
            samples = await clients.ask(scripts, self._pace)
            seconds = time.perf_counter() - began
        finally:
            clients.close()
        moved = None
        with suppress(FleetError):  # then what clients saw stays all the same
            moved = find_moved(before, wait_settled(asker, self._still_s))
        return Run(
            mode=wanted.mode,
            cell=wanted.cell,
            round=wanted.round,
            seconds=seconds,
            samples=tuple(samples),
            moved=moved,
        )


def _worst(run: Run) -> str:
    """What most of the requests that failed have met."""
    errors = [s.error for s in run.samples if s.error]
    if not errors:
        return "no request ended in its time"
    most = max(set(errors), key=errors.count)
    return f"{len(errors)} of {len(run.samples)} requests failed, most with: {most}"
