"""One call: makes the runs that are still wanted, in their order, as far as its time goes."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.h200x2.fleets import UpError
from benchmarks.h200x2.ledger import Job
from kvdeploy.errors import KvdeployError
from kvdeploy.planning.bench.matrix import Planned
from kvdeploy.stages.bench import Bench, Pace
from kvdeploy.stages.bench_counters import STILL_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.h200x2.arms import Act, Arm, Shape
    from benchmarks.h200x2.fleets import Cluster, Host
    from benchmarks.h200x2.ledger import Ledger
    from kvdeploy.model.bench import Run
    from kvdeploy.model.routing import Mode

END_S = 25.0
"""For taking everything down at the end."""


class Said:
    """A step's line of progress, on stderr; only what is new."""

    def __init__(self) -> None:
        self._last = ""

    def update(self, detail: str) -> None:
        if detail != self._last:
            self._last = detail

    def note(self, text: str) -> None:
        say(text)


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()


@dataclass
class Block:
    """Jobs that the same engines are up for."""

    arms: tuple[Arm, ...]
    jobs: list[Job]


def build_blocks(
    acts: Sequence[Act], default: Arm, shape: Shape, at_once: int, ledger: Ledger
) -> Iterator[Block]:
    """What is left, `default` beside so many others as fit; rounds go there and back."""
    for act in acts:
        same = all(arm.engines == default.engines for arm in act.arms)
        size = len(act.arms) if same else at_once - 1
        for at in range(0, len(act.arms), max(1, size)):
            arms = (default, *act.arms[at : at + size])
            beside = "+".join(arm.name for arm in arms)
            jobs = [
                Job(act=act.name, beside=beside, arm=arm, mode=mode, cell=cell, round=number)
                for cell in act.cells
                for number in range(1, _rounds(act, shape) + 1)
                for arm in (arms if number % 2 else reversed(arms))
                for mode in _modes(act, arm, shape, default, first=not at)
            ]
            if left := [job for job in jobs if not ledger.has(job)]:
                yield Block(arms, left)


def _modes(act: Act, arm: Arm, shape: Shape, default: Arm, *, first: bool) -> Sequence[Mode]:
    """What default can do else is asked for once."""
    if act.name != "compare" or not first:
        return arm.modes[:1]
    return [mode for mode in arm.modes if arm is not default or mode in shape.modes]


def _rounds(act: Act, shape: Shape) -> int:
    """Of cold pairs each start of decode is one."""
    return shape.cold_starts if act.name == "cold" else shape.rounds


def estimate_s(blocks: Sequence[Block], shape: Shape) -> float:
    """Seconds that all of it takes, in one call."""
    total, up = END_S, set[str]()
    for block in blocks:
        wanted = {arm.engines for arm in block.arms}
        total += shape.start_s if wanted - up else 0
        up = wanted
        total += sum(_job_s(job, block, shape) for job in block.jobs)
    return total


def _job_s(job: Job, block: Block, shape: Shape) -> float:
    if job.cell.scenario == "cold":  # decodes of all arms start side by side
        return shape.start_s / len(block.arms) + shape.warm_s
    return shape.seconds + shape.warm_s


@dataclass
class Call:
    """`ends` is of `time.monotonic`: no run begins that would go beyond it."""

    host: Host
    ledger: Ledger
    shape: Shape
    ends: float
    failures: list[str] = field(default_factory=list)
    smoke: dict[str, Any] = field(default_factory=dict)
    set_ups: dict[str, Any] = field(default_factory=dict)
    still_s: float = STILL_S
    """Of engines' counters, before they are believed."""
    _took_s: dict[tuple[str, ...], float] = field(default_factory=dict)
    """The longest run of each kind: what is under way when its time is over is waited for."""

    def make(self, blocks: Sequence[Block], describe: Any) -> bool:  # noqa: ANN401
        """Whether everything was done that could be."""
        for block in blocks:
            up = set(self.host.clusters)
            start_s = max([*self.host.start_s, self.shape.start_s])
            needs = start_s if {a.engines for a in block.arms} - up else 0.0
            first = _job_s(block.jobs[0], block, self.shape)
            if not self._has_time(needs + first):
                return False
            try:
                self.host.bring(block.arms)
            except UpError as e:
                self._fail(f"{block.jobs[0].act}: {e}")
            for name, cluster in self.host.clusters.items():
                self.set_ups.setdefault(name, describe(cluster))
            self._prove()
            if block.jobs[0].act == "cold":
                if not self._make_cold(block):
                    return False
            elif not self._make_block(block):
                return False
        return True

    def _has_time(self, needed_s: float) -> bool:
        left = self.ends - END_S - time.monotonic()
        if needed_s > left:
            say(f"{left:.0f} s are left, and the next takes {needed_s:.0f} s: call again to go on")
            return False
        return True

    def _prove(self) -> None:
        """Smoke, of the default set-up, until a call was proven by it; every `up` has its proof."""
        cluster = self.host.clusters.get("default")
        proven = any(call["smoke"].get("code") == 0 for call in self.ledger.calls)
        if cluster is None or self.smoke or proven:
            return
        say("smoke of default")
        done = cluster.run("smoke")
        self.smoke = {"code": done.returncode, "said": done.stdout.splitlines()[-40:]}
        if done.returncode:
            self._fail(f"smoke of default ended with {done.returncode}: {done.stderr[-300:]}")

    def _make_block(self, block: Block) -> bool:
        for job in block.jobs:
            cluster = self.host.clusters.get(job.arm.engines)
            if cluster is None:
                continue
            kind, began = job.key[:-1], time.monotonic()
            if not self._has_time(max(_job_s(job, block, self.shape), self._took_s.get(kind, 0))):
                return False
            try:
                cluster.tell(job.arm.router)
                run = self._run(cluster, job)
                self._took_s[kind] = max(self._took_s.get(kind, 0), time.monotonic() - began)
            except (UpError, KvdeployError) as e:
                self._fail(f"{job.arm.name} {job.mode} {job.cell}: {e}")
                continue
            if run is not None:
                self.ledger.add(job, run)
        return True

    def _run(
        self, cluster: Cluster, job: Job, renew: Callable[[], None] | None = None
    ) -> Run | None:
        say(f"{job.act}: {job.arm.name}, {job.mode}, {job.cell}, round {job.round}")
        bench = self._bench(cluster, job)
        planned = Planned(mode=job.mode, cell=job.cell, round=job.round, starts=1)
        bench.measure(cluster.outputs(), [planned], Said(), renew)
        for why in bench.failed.values():
            self._fail(f"{job.arm.name}: {why}")
        return bench.runs[-1] if bench.runs else None

    def _bench(self, cluster: Cluster, job: Job) -> Bench:
        return Bench(
            vocabulary=cluster.vocabulary(),
            seed=0,
            mark=f"{job.arm.name} {time.time_ns()}",
            pace=Pace(requests=self.shape.requests, seconds=self.shape.seconds),
            runs=1,
            still_s=self.still_s,
        )

    def _make_cold(self, block: Block) -> bool:
        """All decodes are started anew at once, and then each pair meets by itself."""
        jobs = [job for job in block.jobs if job.arm.engines in self.host.clusters]
        arms = {job.arm.engines: job.arm for job in jobs}
        try:
            for name, arm in arms.items():
                self.host.clusters[name].tell({**arm.router, "warm_pairs": False})
            for number in sorted({job.round for job in jobs}):
                now = [job for job in jobs if job.round == number]
                if not self._has_time(sum(_job_s(job, block, self.shape) for job in now)):
                    return False
                self._meet(now)
        except (UpError, KvdeployError) as e:
            self._fail(f"cold: {e}")
        for name, arm in arms.items():
            self.host.clusters[name].tell(arm.router)
        return True

    def _meet(self, jobs: Sequence[Job]) -> None:
        """Once over the pair of each. Raises KvdeployError: a decode does not come back."""
        say(f"cold: start {jobs[0].round} of {self.shape.cold_starts}")
        clusters = [self.host.clusters[job.arm.engines] for job in jobs]
        with ThreadPoolExecutor(len(jobs)) as pool:
            list(pool.map(lambda cluster: self.host.renew(cluster, Said()), clusters))
        for job, cluster in zip(jobs, clusters, strict=True):
            run = self._run(cluster, job, lambda: None)
            if run is not None:
                self.ledger.add(job, run)

    def _fail(self, what: str) -> None:
        say(f"FAILED: {what}")
        self.failures.append(what)
