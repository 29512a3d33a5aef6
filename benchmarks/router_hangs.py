"""What clients see of a fault, behind kvdeploy's router and behind vllm-router.

    python -m benchmarks.router_hangs --vllm-router PROGRAM [--json FILE]

Two prefill and two decode engines, scripted (benchmarks.scripted_engine), for each fault and router
anew. Clients ask all the time; the fault happens after three seconds; who has no whole answer after
the deadline counts as hung. Takes about five minutes, most of it waiting for the hung.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from benchmarks.scripted_engine import text_of
from benchmarks.stand import Cores, Processes, build_job, start_engine, start_scripted, starters
from kvdeploy.adapters.load import Answer, Connection, build_request, find_fault, run_clients

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.stand import Arm, Site

    Fault = Callable[[Processes, argparse.Namespace, Site], None]

TOKENS = 32
SPREAD_S = 0.5


def kill_prefill(processes: Processes, _: argparse.Namespace, site: Site) -> None:
    processes.kill(site.scripted[0].pid)


def restart_prefill(processes: Processes, options: argparse.Namespace, site: Site) -> None:
    processes.kill(site.scripted[0].pid)
    start_engine(processes, options, Cores(), site.scripted[0])


def kill_decode(processes: Processes, _: argparse.Namespace, site: Site) -> None:
    processes.kill(site.scripted[-1].pid)


FAULTS: dict[str, Fault] = {
    "kill -9 a prefill engine": kill_prefill,
    "a prefill engine starts again under a new id": restart_prefill,
    "kill -9 a decode engine": kill_decode,
}


async def ask_through(
    arm: Arm, site: Site, options: argparse.Namespace, fault: Callable[[], None]
) -> tuple[list[Answer], float]:
    """Every answer, and when the fault happened."""
    clients = [Connection(arm.url) for _ in range(options.clients)]

    async def ask(number: int, turn: int) -> Answer:
        job = build_job(site, f"{number} {turn} harbour", TOKENS)
        request = build_request(arm.url, job.raw, {})
        return await clients[number].ask(request, limit_s=options.deadline)

    load = asyncio.ensure_future(run_clients(ask, options.clients, options.seconds, SPREAD_S))
    await asyncio.sleep(3)
    at = time.perf_counter()
    fault()
    answers, _ = await load
    for client in clients:
        client.close()
    return answers, at


def try_fault(
    start: Callable[..., Arm], fault: Fault, options: argparse.Namespace, folder: Path
) -> tuple[str, dict[str, Any]]:
    processes = Processes(folder)
    try:
        site = start_scripted(processes, options, Cores(), each=2)
        arm = start(processes, options, site, Cores())
        happen = lambda: fault(processes, options, site)  # noqa: E731
        answers, at = uvloop.run(ask_through(arm, site, options, happen))
    finally:
        processes.stop()
    told = [(answer, find_fault(answer, TOKENS, text_of(TOKENS))) for answer in answers]
    after = [answer.done - answer.sent for answer, _ in told if answer.done > at]
    kinds = Counter(why for _, why in told if why)
    hung = kinds.pop("hung", 0)
    return arm.name, {
        "asked": len(told),
        "right": len(told) - hung - kinds.total(),
        "failed": kinds.total(),
        "failed_by": dict(kinds),
        "hung": hung,
        "longest_s": round(max(after), 1),
    }


def render(found: dict[str, dict[str, Any]], deadline_s: float) -> str:
    lines = [
        "| fault | router | asked | right | failed | no answer in "
        f"{deadline_s:.0f} s | longest, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for fault, arms in found.items():
        for name, seen in arms.items():
            keys = ("asked", "right", "failed", "hung", "longest_s")
            lines.append("| " + " | ".join([fault, name, *(str(seen[k]) for k in keys)]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-router", metavar="PROGRAM", help="left out when not given")
    parser.add_argument("--vllm-router-arg", action="append", default=[], metavar="--OPTION=VALUE")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--deadline", type=float, default=60)
    parser.add_argument("--prefill-ms", type=float, default=30)
    parser.add_argument("--token-ms", type=float, default=20)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, fault in FAULTS.items():
            for start in starters(options):
                router, seen = try_fault(start, fault, options, Path(scratch))
                found.setdefault(name, {})[router] = seen
    print(render(found, options.deadline))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
