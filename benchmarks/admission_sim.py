"""How many prompts a prefill engine should be given at once: a simulation, not a measurement.

    python -m benchmarks.admission_sim [--workload NAME] [--seconds S]

One prefill and one decode engine, clients that ask again when they are answered, and the router's
own rule (`kvdeploy.router.pacing`) beside fixed limits. What the engines cost is chosen so that
limits and loads that were measured on two H200s come out about as they did (`MEASURED`). It shows
which rule does better, not how good one is on GPUs: benchmarks/admission.py is for that.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import statistics
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

from kvdeploy.router.pacing import Backlog, Pacer, weigh

if TYPE_CHECKING:
    from collections.abc import Callable

Limit = int | Literal["auto"] | None
LIMITS: tuple[Limit, ...] = (1, 2, 3, 4, 6, 8, 12, 16, None, "auto")
CLIENTS = (1, 4, 16, 48, 128)
WARM_SHARE = 0.2
"""Of the time, at its beginning, that is not counted."""
MEASURED: dict[tuple[int, Limit], int] = {
    (4, 1): 84, (4, None): 160, (16, 2): 170, (16, 4): 189, (16, None): 391,
    (48, 1): 2003, (48, 4): 822, (48, None): 697,
}  # fmt: skip
"""TTFT p50 in ms by clients and limit: two H200s, 8B model, 8192 tokens in, 90 % of them shared, 64
out, block 128, warm pairs, both legs at once, by a client that played the router.
"""


@dataclass(frozen=True)
class Costs:
    """Seconds."""

    before_s: float = 0.008
    """HTTP and queues on the way to the engine's scheduler."""
    step_s: float = 0.009
    prompt_s: float = 0.0025
    token_s: float = 22e-6
    attention_s: float = 0.75e-9
    """For each computed token and token before it."""
    after_s: float = 0.008
    """From the step's end to the answer."""
    write_s: float = 0.014
    """From the step's end to the KV being in decode, when the engine is idle."""
    step_tokens: int = 16384
    decode_s: float = 0.0049
    """One token of one request alone."""
    decode_each_s: float = 0.00025
    """More for each request beside it."""
    noise: float = 0.1
    beside: float = 1.0
    """How much longer a step takes while the other engine computes, on the same GPU."""


@dataclass(frozen=True)
class Workload:
    """`draw` is the length of a prompt, and how many of its tokens have to be computed."""

    draw: Callable[[random.Random], tuple[int, int]]
    output: int = 64


def draw_mixed(rng: random.Random) -> tuple[int, int]:
    """From 100 to 30000 tokens, half of them under 1100, nothing shared."""
    tokens = int(min(30_000, max(100, rng.lognormvariate(7, 1.2))))
    return tokens, tokens


WORKLOADS = {
    "shared": Workload(lambda _: (8192, 820)),
    "unshared": Workload(lambda _: (8192, 8192)),
    "short": Workload(lambda _: (300, 300)),
    "long-answers": Workload(lambda _: (8192, 820), output=256),
    "mixed": Workload(draw_mixed),
}


@dataclass(eq=False)
class Request:
    asked_at: float
    tokens: int
    left: int
    """Tokens that are still to be computed."""
    ttft: float = 0.0
    generated: int = 0


@dataclass
class Result:
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def per_s(self) -> float:
        return len(self.ttft) / self.seconds

    def percentile(self, percent: int) -> float:
        """Of the TTFT, in milliseconds."""
        return sorted(self.ttft)[max(0, math.ceil(len(self.ttft) * percent / 100) - 1)] * 1e3


class Simulation:
    def __init__(
        self, workload: Workload, limit: Limit, *, seconds: float, seed: int, costs: Costs
    ) -> None:
        self.now = 0.0
        self.result = Result(seconds=seconds * (1 - WARM_SHARE))
        self._workload, self._limit, self._costs = workload, limit, costs
        self._rng = random.Random(seed)
        self._ends = seconds
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        # router
        self._queue: deque[Request] = deque()
        self._queued = self._held = self._held_tokens = 0
        self._backlog = Backlog()
        self._pacer = Pacer(self._backlog)
        # prefill
        self._waiting: list[Request] = []
        self._written: list[Request] = []
        self._computing = False
        # decode
        self._arrived: list[Request] = []
        self._generating: list[Request] = []
        self._stepping = False
        # clients
        self._clients = self._wanted = 0

    def set_clients(self, at: float, count: int) -> None:
        self._at(at, partial(self._set_clients, count))

    @property
    def limit(self) -> int:
        """As the rule has it now."""
        return self._pacer.limit

    def run(self, until: float = math.inf) -> Result:
        while self._events and self._events[0][0] <= min(until, self._ends):
            self.now, _, happens = heapq.heappop(self._events)
            happens()
        return self.result

    def _at(self, when: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), happens))

    def _after(self, seconds: float, happens: Callable[[], None]) -> None:
        noise = self._rng.uniform(1 - self._costs.noise, 1 + self._costs.noise)
        self._at(self.now + seconds * noise, happens)

    # --- clients ---
    def _set_clients(self, count: int) -> None:
        self._wanted = count
        for _ in range(count - self._clients):
            self._at(self.now + self._rng.uniform(0, 0.01), self._ask)
        self._clients = max(self._clients, count)

    def _ask(self) -> None:
        tokens, left = self._workload.draw(self._rng)
        self._queue.append(Request(self.now, tokens, left))
        self._tell_queue(tokens)
        self._admit()

    # --- router ---
    def _admit(self) -> None:
        while self._queue and self._has_room():
            request = self._queue.popleft()
            self._tell_queue(-request.tokens)
            self._tell_held(1, request.tokens)
            self._after(self._costs.before_s, partial(self._reach_prefill, request))
            self.result.limits.append(self._pacer.limit)

    def _has_room(self) -> bool:
        if self._limit == "auto":
            return self._pacer.has_room(self.now)
        return self._limit is None or self._held < self._limit

    def _tell_queue(self, tokens: int) -> None:
        self._queued += tokens
        self._backlog.tell(self.now, weigh(len(self._queue), self._queued))

    def _tell_held(self, prompts: int, tokens: int) -> None:
        self._held += prompts
        self._held_tokens += tokens
        work = weigh(self._held, self._held_tokens)
        self._pacer.tell(self.now, held=self._held, work=work)

    def _end_prefill(self, request: Request) -> None:
        self._tell_held(-1, -request.tokens)
        self._admit()

    # --- prefill: one step after the other, each with all prompts that there is room for ---
    def _reach_prefill(self, request: Request) -> None:
        self._waiting.append(request)
        self._compute()

    def _compute(self) -> None:
        if self._computing or not self._waiting:
            return
        costs, room, takes_s = self._costs, self._costs.step_tokens, self._costs.step_s
        step: list[tuple[Request, int]] = []
        for request in self._waiting:
            tokens = min(room, request.left)
            if not tokens:
                break
            room -= tokens
            before = request.tokens - request.left + tokens / 2
            takes_s += costs.prompt_s + tokens * (costs.token_s + before * costs.attention_s)
            step.append((request, tokens))
        self._computing = True
        takes_s *= costs.beside if self._stepping else 1.0
        self._after(takes_s, partial(self._end_step, step))

    def _end_step(self, step: list[tuple[Request, int]]) -> None:
        self._computing = False
        # A WRITE that has ended is told of between two steps (domain facts: transfer time includes
        # the wait for prefill's next step): this is what makes prompts fall into step.
        for request in self._written:
            self._reach_decode(request)
        self._written.clear()
        for request, tokens in step:
            request.left -= tokens
            if not request.left:
                self._waiting.remove(request)
                self._after(self._costs.after_s, partial(self._end_prefill, request))
                self._after(self._costs.write_s, partial(self._write, request))
        self._compute()

    def _write(self, request: Request) -> None:
        if self._computing:
            self._written.append(request)
        else:
            self._reach_decode(request)

    # --- decode: a token for each at every step ---
    def _reach_decode(self, request: Request) -> None:
        self._arrived.append(request)
        self._step()

    def _step(self) -> None:
        if self._stepping:
            return
        self._generating += self._arrived
        self._arrived = []
        if self._generating:
            self._stepping = True
            beside = len(self._generating)
            takes_s = self._costs.decode_s + self._costs.decode_each_s * beside
            takes_s *= self._costs.beside if self._computing else 1.0
            self._after(takes_s, self._end_token)

    def _end_token(self) -> None:
        self._stepping = False
        for request in self._generating:
            request.generated += 1
            if request.generated == 1:
                request.ttft = self.now - request.asked_at
        done = [r for r in self._generating if r.generated >= self._workload.output]
        self._generating = [r for r in self._generating if r.generated < self._workload.output]
        for request in done:
            self._answer(request)
        self._step()

    def _answer(self, request: Request) -> None:
        if self.now > WARM_SHARE * self._ends:
            self.result.ttft.append(request.ttft)
            took_s = self.now - request.asked_at - request.ttft
            self.result.tpot.append(took_s / (self._workload.output - 1))
        if self._clients > self._wanted:
            self._clients -= 1
        else:
            self._at(self.now + 0.001, self._ask)


def simulate(
    workload: str,
    clients: int,
    limit: Limit,
    *,
    seconds: float = 40.0,
    seed: int = 1,
    costs: Costs | None = None,
) -> Result:
    simulation = Simulation(
        WORKLOADS[workload], limit, seconds=seconds, seed=seed, costs=costs or Costs()
    )
    simulation.set_clients(0.0, clients)
    return simulation.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workload", choices=tuple(WORKLOADS), action="append")
    parser.add_argument("--seconds", type=float, default=40.0, help="of simulated time")
    options = parser.parse_args()
    for workload in options.workload or WORKLOADS:
        print(f"\n{workload}\nclients limit  TTFT p50   p90   p99   TPOT p90  req/s  measured p50")
        for clients in CLIENTS:
            for limit in LIMITS:
                if isinstance(limit, int) and limit > clients:
                    continue
                seen = simulate(workload, clients, limit, seconds=options.seconds)
                tpot = sorted(seen.tpot)[int(len(seen.tpot) * 0.9)] * 1e3
                told = MEASURED.get((clients, limit), "") if workload == "shared" else ""
                mean = f"(mean limit {statistics.mean(seen.limits):.1f})" if limit == "auto" else ""
                print(
                    f"{clients:7} {limit or 'none':>5}  {seen.percentile(50):8.0f} "
                    f"{seen.percentile(90):5.0f} {seen.percentile(99):5.0f}   {tpot:8.1f} "
                    f"{seen.per_s:6.1f}  {told} {mean}"
                )


if __name__ == "__main__":
    main()
