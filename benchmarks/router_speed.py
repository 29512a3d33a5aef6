"""What a router costs: direct dispatch, kvdeploy's router and vllm-router before the same engines.

    python -m benchmarks.router_speed [--vllm-router PROGRAM] [--json FILE] [--pin]
        [--prefill-url URL --decode-url URL --model NAME]

Without addresses it starts scripted engines (benchmarks.scripted_engine), which take a fixed time
for a prompt and give every request a token a step. *Direct* is a client that plays the router: both
legs at once, with coordinates that it knows. The three take turns, A B C A B C, at each level, each
after a warm-up; a client asks again as soon as it has its answer. Every answer is checked to its
last token. Takes about five minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from benchmarks import choice_cost
from benchmarks.direct import Client, learn_coordinates
from benchmarks.scripted_engine import MODEL, text_of
from benchmarks.stand import (
    Arm,
    Cores,
    Processes,
    Site,
    build_job,
    start_scripted,
    starters,
    wait_engines,
)
from kvdeploy.adapters.load import Answer, Connection, build_request, find_fault, run_clients

if TYPE_CHECKING:
    from collections.abc import Sequence

LEVELS = {1: 8, 16: 32, 64: 64, 256: 128}
"""Clients at once, and how many tokens each asks for: few of them ask often."""


@dataclass
class Seen:
    """Of one arm at one level, all rounds together."""

    ttft_ms: list[float] = field(default_factory=list)
    total_ms: list[float] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    asked: int = 0
    in_window: int = 0
    window_s: float = 0.0
    cpu_s: float = 0.0
    tokens: int = 0

    def report(self) -> dict[str, Any]:
        answered = self.asked - self.faults.total()
        found: dict[str, Any] = {
            "asked": self.asked,
            "right": answered,
            "faults": dict(self.faults),
            "requests_per_s": round(self.in_window / self.window_s, 2),
            "ttft_ms": quantiles(self.ttft_ms),
            "total_ms": quantiles(self.total_ms),
            "samples": len(self.ttft_ms),
        }
        if self.cpu_s:
            found["router_cpu_ms_per_request"] = round(self.cpu_s * 1000 / max(1, answered), 3)
            found["router_cpu_us_per_token"] = round(self.cpu_s * 1e6 / max(1, self.tokens), 1)
            found["requests_per_router_core_s"] = round(answered / self.cpu_s, 1)
            found["tokens_per_router_core_s"] = round(self.tokens / self.cpu_s)
        return found


def quantiles(values: Sequence[float]) -> dict[str, float]:
    if len(values) < 2:
        return dict.fromkeys(("p50", "p90", "p99"), round(sum(values), 2))
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"p{q}": round(cuts[q - 1], 2) for q in (50, 90, 99)}


class Bench:
    def __init__(self, options: argparse.Namespace, site: Site, arms: list[Arm]) -> None:
        self._options, self._site, self._arms = options, site, arms
        self._prompt = " ".join(["harbour"] * options.prompt_tokens)
        self._coordinates = [asyncio.run(learn_coordinates(site, url)) for url in site.prefill_urls]

    def run_level(self, clients: int, tokens: int) -> dict[str, Any]:
        seen = {arm.name: Seen() for arm in self._arms}
        for _ in range(self._options.rounds):
            for arm in self._arms:
                self._run_round(arm, clients, tokens, seen[arm.name])
        return {name: one.report() | {"tokens_each": tokens} for name, one in seen.items()}

    def _run_round(self, arm: Arm, clients: int, tokens: int, seen: Seen) -> None:
        answers, began, spent_s, spread_s = uvloop.run(self._load(arm, clients, tokens))
        text = text_of(tokens) if self._site.scripted else None
        opens, closes = began + spread_s, began + spread_s + self._options.seconds
        seen.cpu_s += spent_s
        seen.window_s += self._options.seconds
        seen.asked += len(answers)
        for answer in answers:
            fault = find_fault(answer, tokens, text)
            if fault:
                seen.faults[fault] += 1
                continue
            seen.tokens += tokens
            seen.in_window += opens <= answer.done < closes
            if answer.sent >= opens:
                seen.ttft_ms.append(answer.ttft_s * 1000)
                seen.total_ms.append((answer.done - answer.sent) * 1000)

    async def _load(
        self, arm: Arm, clients: int, tokens: int
    ) -> tuple[list[Answer], float, float, float]:
        """Answers, when it began, the router's CPU seconds, and how far the start was spread."""
        asking = [Client(arm, self._site, self._coordinates, n) for n in range(clients)]

        async def ask(number: int, turn: int) -> Answer:
            prompt = f"{number} {turn} {random.random()} {self._prompt}"
            return await asking[number].ask(prompt, tokens)

        alone = await ask(0, 0)
        spread_s = max(0.05, alone.done - alone.sent)
        await run_clients(ask, clients, self._options.warm_s, spread_s)
        cpu_before, began = arm.cpu_s(), time.perf_counter()
        answers, _ = await run_clients(ask, clients, self._options.seconds, spread_s)
        spent_s = arm.cpu_s() - cpu_before
        for client in asking:
            client.close()
        return answers, began, spent_s, spread_s


def measure_first(
    processes: Processes, options: argparse.Namespace, cores: Cores, real: Site | None
) -> dict[str, list[Any]]:
    """The first request through a router that has just started; scripted engines have as well,
    so that theirs is the first of the pair.
    """
    found: dict[str, list[Any]] = {}
    for start in starters(options):
        for _ in range(options.firsts):
            one = Processes(processes.folder)
            try:
                site = real or start_scripted(one, options, cores)
                arm = start(one, options, site, cores)
                answer = asyncio.run(ask_once(arm, site))
            finally:
                one.stop()
            fault = find_fault(answer, 4, None if real else text_of(4))
            found.setdefault(arm.name, []).append(fault or round(answer.ttft_s * 1000, 1))
    return found


async def ask_once(arm: Arm, site: Site) -> Answer:
    connection = Connection(arm.url)
    answer = await connection.ask(build_request(arm.url, build_job(site, "first", 4).raw, {}))
    connection.close()
    return answer


def render(found: dict[str, Any]) -> str:
    lines = [
        "| clients | way | TTFT p50 / p90 / p99, ms | added | requests/s "
        "| router: CPU ms a request | CPU us a token | requests a core | right / asked |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for clients, arms in found["levels"].items():
        direct = arms["direct"]["ttft_ms"]
        for name, one in arms.items():
            ttft = " / ".join(f"{one['ttft_ms'][q]:.1f}" for q in ("p50", "p90", "p99"))
            added = [f"{one['ttft_ms'][q] - direct[q]:+.2f}" for q in ("p50", "p90", "p99")]
            costs = [
                one.get(f"router_cpu_{key}", "-") for key in ("ms_per_request", "us_per_token")
            ]
            cells = [clients, name, ttft, "-" if name == "direct" else " / ".join(added)]
            cells += [one["requests_per_s"], *costs, one.get("requests_per_router_core_s", "-")]
            lines.append(
                "| " + " | ".join(map(str, [*cells, f"{one['right']} / {one['asked']}"])) + " |"
            )
            if one["faults"]:
                lines.append(f"faults: {one['faults']}")
    for name, times in found.get("first_request_ttft_ms", {}).items():
        lines.append(f"first request, {name}: TTFT {times} ms")
    lines.append(f"a choice of a pair, CPU us: {found['choice_us']}")
    return "\n".join(lines)


def describe(options: argparse.Namespace, cores: Cores) -> dict[str, Any]:
    return {
        "when": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "router_cores": sorted(cores.router) if cores.router else "any",
        "other_cores": sorted(cores.rest) if cores.rest else "any",
        "options": {k: str(v) for k, v in vars(options).items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-router", metavar="PROGRAM", help="left out when not given")
    parser.add_argument("--vllm-router-arg", action="append", default=[], metavar="--OPTION=VALUE")
    parser.add_argument("--prefill-url", action="append", help="of a real engine; again for more")
    parser.add_argument("--decode-url", action="append")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--levels", default=",".join(map(str, LEVELS)))
    parser.add_argument("--tokens", type=int, help="each answer's, instead of the level's own")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--prefill-ms", type=float, default=30)
    parser.add_argument("--token-ms", type=float, default=20)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--warm-s", type=float, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--firsts", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--arms", default="direct,kvdeploy,vllm-router")
    parser.add_argument("--pin", action="store_true", help="the router on the last core, alone")
    parser.add_argument("--keep", type=Path, help="a folder for the logs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cores = Cores()
    if options.pin:
        every = sorted(os.sched_getaffinity(0))
        cores = Cores({every[-1]}, set(every[:-1]))
        os.sched_setaffinity(0, set(every[:-1]))
    with tempfile.TemporaryDirectory() as scratch:
        logs = options.keep or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        processes = Processes(logs)
        try:
            found = run(options, processes, cores)
        finally:
            processes.stop()
    print(render(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


def run(options: argparse.Namespace, processes: Processes, cores: Cores) -> dict[str, Any]:
    found: dict[str, Any] = {"about": describe(options, cores), "levels": {}}
    found["choice_us"] = choice_cost.measure()
    real = None
    if options.prefill_url:
        real = Site(options.prefill_url, options.decode_url, options.model)
        wait_engines(real)
    if options.firsts:
        found["first_request_ttft_ms"] = measure_first(processes, options, cores, real)
    site = real or start_scripted(processes, options, cores)
    arms = [Arm("direct"), *(start(processes, options, site, cores) for start in starters(options))]
    bench = Bench(options, site, [a for a in arms if a.name in options.arms.split(",")])
    for clients in map(int, options.levels.split(",")):
        tokens = options.tokens or LEVELS[clients]
        found["levels"][clients] = bench.run_level(clients, tokens)
        print(json.dumps({clients: found["levels"][clients]}), file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    main()
