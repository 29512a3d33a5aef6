"""Measure a running fleet: ask, time, and read what its engines counted meanwhile.

Judges nothing; what it has measured it keeps, whatever happens later.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvdeploy.adapters import http, load
from kvdeploy.errors import FleetError, KvdeployError
from kvdeploy.model.bench import Moved, Run
from kvdeploy.planning.bench import prompts
from kvdeploy.polling import wait_for
from kvdeploy.stages.asking import Asker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvdeploy.model.bench import Sample
    from kvdeploy.model.counters import EngineCounters
    from kvdeploy.model.outputs import FleetOutputs
    from kvdeploy.model.routing import Mode
    from kvdeploy.planning.bench.matrix import Planned
    from kvdeploy.planning.bench.prompts import Script
    from kvdeploy.stages.base import Step

PATH: Final = "/v1/completions"
REQUEST_LIMIT_S: Final = 120.0
STILL_S: Final = 0.6
SETTLE_S: Final = 5.0
"""Engines count a transfer at a later step: wait until nothing changes, but no longer."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long a run lasts: until `requests` were asked or `seconds` are over."""

    requests: int
    seconds: float


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
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`headers` go with every request, beside those that the router wants."""
        self._vocabulary, self._seed, self._mark = vocabulary, seed, mark
        self._pace, self._total, self._still_s = pace, runs, still_s
        self._own_headers = dict(headers or {})
        self._began = time.monotonic()
        self.runs: list[Run] = []
        self.failed: dict[str, str] = {}

    def measure(self, fleet: FleetOutputs, planned: Sequence[Planned], step: Step) -> None:
        """Make every run that is planned for the fleet as it is; a mode that fails is given up."""
        asker = Asker(fleet)
        asker.wait_quiet()
        for wanted in planned:
            if wanted.mode in self.failed:
                continue
            step.update(f"{self._progress()}: {wanted.mode}, {wanted.cell}")
            try:
                run = self._run(asker, wanted)
            except KvdeployError as e:
                self.fail(wanted.mode, e.message)
                continue
            self.runs.append(run)
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

    def _run(self, asker: Asker, wanted: Planned) -> Run:
        scripts = prompts.build_scripts(
            wanted.cell,
            seed=self._seed,
            mark=f"{self._mark} {wanted.mode} {wanted.cell} {wanted.round}",
            vocabulary=self._vocabulary,
        )
        clients = Clients(asker, wanted, self._own_headers)
        return asyncio.run(self._timed(asker, wanted, clients, scripts))

    async def _timed(
        self, asker: Asker, wanted: Planned, clients: Clients, scripts: Sequence[Script]
    ) -> Run:
        try:
            await clients.warm_up(scripts)
            before = _settled(asker, self._still_s)
            began = time.perf_counter()
            samples = await clients.ask(scripts, self._pace)
            seconds = time.perf_counter() - began
        finally:
            clients.close()
        moved = None
        with suppress(FleetError):  # then what clients saw stays all the same
            moved = _moved(before, _settled(asker, self._still_s))
        return Run(
            mode=wanted.mode,
            cell=wanted.cell,
            round=wanted.round,
            seconds=seconds,
            samples=tuple(samples),
            moved=moved,
        )


class Clients:
    """As many connections as a cell has clients, each of which asks again when it is answered."""

    def __init__(self, asker: Asker, wanted: Planned, headers: Mapping[str, str]) -> None:
        self._wanted, self._model = wanted, asker.config.served_model
        self._url = f"{asker.fleet.url}{PATH}"
        self._headers = {**asker.headers, **headers}
        if wanted.mode != asker.config.usual_mode:
            self._headers["X-Kvdeploy-Mode"] = wanted.mode
        trust = http.trusting(asker.fleet.trust) if asker.fleet.trust else None
        self._connections = [
            load.Connection(asker.fleet.url, trust) for _ in range(wanted.cell.concurrency)
        ]

    async def warm_up(self, scripts: Sequence[Script]) -> None:
        """The first client alone, so that what all share is there before it is asked for at once.

        Raises:
            FleetError: it is not answered.
        """
        first, *others = zip(self._connections, scripts, strict=True)
        await self._warm(*first)
        await asyncio.gather(*(self._warm(*other) for other in others))

    async def _warm(self, connection: load.Connection, script: Script) -> None:
        for prompt in script.warm_up():
            sample, _ = await self._ask(connection, prompt)
            if sample.error:
                msg = f"a warm-up request was not answered: {sample.error}"
                raise FleetError(msg, hint="'kvdeploy status' shows how the fleet is.")

    async def ask(self, scripts: Sequence[Script], pace: Pace) -> list[Sample]:
        samples: list[Sample] = []
        numbers = itertools.count()
        ends = time.perf_counter() + pace.seconds

        async def client(connection: load.Connection, script: Script) -> None:
            answer: list[int] = []
            while time.perf_counter() < ends and next(numbers) < pace.requests:
                sample, answer = await self._ask(connection, script.next(answer))
                samples.append(sample)
                if sample.error:
                    await asyncio.sleep(0.1)

        await asyncio.gather(
            *(client(*one) for one in zip(self._connections, scripts, strict=True))
        )
        return samples

    async def _ask(
        self, connection: load.Connection, prompt: Sequence[int]
    ) -> tuple[Sample, list[int]]:
        tokens = self._wanted.cell.output_tokens
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        request = load.build_request(self._url, json.dumps(body).encode(), self._headers)
        return load.read_sample(await connection.ask(request, limit_s=REQUEST_LIMIT_S), tokens)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


def _settled(asker: Asker, still_s: float) -> dict[str, EngineCounters]:
    """Counters once they stand still."""
    seen, since = asker.counters(), time.monotonic()

    def look() -> bool | None:
        nonlocal seen, since
        now = asker.counters()
        if now != seen:
            seen, since = now, time.monotonic()
        return True if time.monotonic() - since >= still_s else None

    wait_for(look, timeout_s=SETTLE_S, interval_s=0.2)
    return seen


def _moved(before: Mapping[str, EngineCounters], after: Mapping[str, EngineCounters]) -> Moved:
    """Whoever writes counts: prefill in push, decode in pull; the other's counters stay."""
    deltas = {name: after[name] - before[name] for name in after}
    return Moved(
        kv_bytes=sum(d.pushed_bytes for d in deltas.values()),
        transfers=sum(d.transfers for d in deltas.values()),
        descriptors=sum(d.descriptors for d in deltas.values()),
        transfer_s=sum(d.transfer_s for d in deltas.values()),
        post_s=sum(d.post_s for d in deltas.values()),
        failed=sum(
            d.failed_transfers + d.failed_notifications + d.kv_expired for d in deltas.values()
        ),
        prompt_tokens={name: dict(d.prompt_tokens_by_source) for name, d in deltas.items()},
    )


def _worst(run: Run) -> str:
    """What most of the requests that failed have met."""
    errors = [s.error for s in run.samples if s.error]
    if not errors:
        return "no request ended in its time"
    most = max(set(errors), key=errors.count)
    return f"{len(errors)} of {len(run.samples)} requests failed, most with: {most}"
