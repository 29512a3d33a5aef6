"""What clients see when engines die, freeze, lose their network or their clients: real engines.

    python -m benchmarks.router_faults [--only ROW]... [--seconds S] [--json FILE]

Starts two prefill and two decode engines of the built-in model and a router, each in a network
namespace of its own, which wants root and iproute2. For each row clients ask for S seconds, every
other one streamed, and the fault happens after a fifth of that. Ends with 11 when a row has a
wrong token, a request past its deadline, an answer that no client could read, KV blocks held that
the router does not know of, or a fault that did not happen. Takes a minute or two a row.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.faults.fleet import (
    DECODES,
    ENGINES,
    LEASE_S,
    MEMBERS,
    PREFILLS,
    TOTAL_S,
    Fleet,
    fetch,
    wait,
)
from benchmarks.faults.load import BAD, Clients, learn
from benchmarks.faults.net import Net
from benchmarks.faults.rows import ROWS, Row

WHOLE_AGAIN_S = 180.0
SETTLE_S = LEASE_S + 20
"""For blocks to come back: a lease, and the time in which a dead peer is noticed."""
MISSED = 11
COUNTED = {
    "tries": "sent_total",
    "retries": "retries_total",
    "recovered": 'retried_requests_total{outcome="served"}',
    "lost_writes": "lost_writes_total",
    "ejections": "ejections_total",
    "refusals": "refusals_total",
}


def count(fleet: Fleet) -> dict[str, float]:
    text = fetch(f"{fleet.url('router')}/metrics")
    found = {}
    for name, metric in COUNTED.items():
        pattern = rf"^kvdeploy_router_{re.escape(metric)}(?:{{[^\n]*}})? (\S+)$"
        found[name] = sum(map(float, re.findall(pattern, text, re.MULTILINE)))
    return found


def pairs(fleet: Fleet) -> dict[str, str]:
    try:
        with_pairs = json.loads(fetch(f"{fleet.url('router')}/ready"))
    except OSError:
        return {}
    found: dict[str, str] = with_pairs["pairs"]
    return found


def whole_again(fleet: Fleet, gone: dict[str, str], renewed: list[str]) -> float | None:
    """Seconds until every process runs, none of those generations is left and every pair is ready.
    A decode that the router drains is restarted once it is idle, as the router asks for.
    """

    def look() -> bool:
        if any(fleet.generation(name) == old for name, old in gone.items()):
            return False
        found = pairs(fleet)
        for name in DECODES:
            drains = all(found.get(f"{p}/{name}") == "draining" for p in PREFILLS)
            if drains and name not in gone and not fleet.look(name).busy:
                gone[name] = fleet.generation(name)
                renewed.append(name)
                fleet.restart(name)
        return len(found) == 4 and set(found.values()) == {"ready"} and fleet.is_running()

    return wait(look, WHOLE_AGAIN_S, 0.5)


def look_for_blocks(fleet: Fleet) -> dict[str, Any]:
    """What engines hold although nobody asks them, and what the router knows of it."""
    held: dict[str, int] = {}
    known: dict[str, int] = {}

    def is_explained() -> bool:
        try:
            gauges = {name: fleet.look(name) for name in ENGINES}
            told = json.loads(fetch(f"{fleet.url('router')}/health"))["engines"]
        except OSError:
            return False
        held.update({n: round(g.used_share * g.blocks) for n, g in gauges.items()})
        known.update({name: told[name]["lost_blocks"] for name in DECODES})
        idle = not any(g.busy for g in gauges.values())
        return idle and all(count <= known.get(name, 0) for name, count in held.items())

    took = wait(is_explained, SETTLE_S, 1)
    unknown = {n: count for n, count in held.items() if count > known.get(n, 0)}
    return {
        "blocks_explained_s": took,
        "looked": bool(held),
        "held_blocks": {name: count for name, count in held.items() if count},
        "known_lost_blocks": {name: count for name, count in known.items() if count},
        "unknown_blocks": unknown,
    }


def renew(fleet: Fleet, held: dict[str, int]) -> None:
    """The next row begins with a fleet that holds nothing."""
    gone = {name: fleet.generation(name) for name in held}
    for name in gone:
        fleet.restart(name)
    whole_again(fleet, gone, [])


async def play(fleet: Fleet, row: Row, expected: dict[str, str], seconds: float) -> dict[str, Any]:
    before = count(fleet)
    clients = Clients(
        fleet.url("router"),
        expected,
        max_tokens=row.max_tokens,
        number=row.clients,
        total_s=TOTAL_S,
    )
    began = time.monotonic()
    asking = asyncio.create_task(clients.run())
    await asyncio.sleep(seconds / 5)
    gone = {name: fleet.generation(name) for name in row.ends}
    moment = await asyncio.to_thread(row.fault, fleet)
    renewed: list[str] = []
    again = asyncio.create_task(asyncio.to_thread(whole_again, fleet, gone, renewed))
    await asyncio.sleep(max(3.0, seconds - (time.monotonic() - began)))
    clients.end()
    await asking
    found: dict[str, Any] = {"moment": {moment.what: moment.value}, "came": moment.came}
    found |= clients.told.describe() | {"drained_and_restarted": renewed}
    found["whole_again_s"] = await again
    after = count(fleet)
    reset = any(after[name] < before[name] for name in after)
    found |= {name: int(after[name] - (0 if reset else before[name])) for name in after}
    found |= await asyncio.to_thread(look_for_blocks, fleet)
    for text in clients.told.wrong[:3]:
        print(f"wrong: {text}", file=sys.stderr)
    return found


def find_faults(row: Row, found: dict[str, Any]) -> list[str]:
    """Why the row is not as it must be."""
    bad = [f"{found[name]} {name}" for name in BAD if found[name]]
    if found["no_router"] and "router" not in row.ends:
        bad.append(f"{found['no_router']} lost their connection")
    if not found["looked"]:
        bad.append("engines could not be asked for their blocks")
    if found["unknown_blocks"]:
        bad.append(f"blocks the router does not know of: {found['unknown_blocks']}")
    if found["whole_again_s"] is None:
        bad.append(f"not whole again within {WHOLE_AGAIN_S:.0f} s")
    if not found["right"]:
        bad.append("no right answer")
    if not found["came"]:
        bad.append("the fault did not happen")
    return bad


def render(rows: dict[str, dict[str, Any]]) -> str:
    """As docs/benchmarks/router-faults.md has it."""
    columns = ("requests", "right", "recovered", "failed", "broken_streams", "no_router", "wrong")
    more = ("late", "slowest_s", "whole_again_s")
    head = [*(c.replace("_", " ") for c in columns), "past deadline", "slowest s", "whole again s"]
    lines = [f"| fault | {' | '.join(head)} | blocks held, known |", "|---" * (len(head) + 2) + "|"]
    for row in ROWS:
        if found := rows.get(row.name):
            values = [str(found[name]) for name in (*columns, *more)]
            held = sum(found["held_blocks"].values())
            known = held - sum(found["unknown_blocks"].values())
            lines.append(f"| {row.title} | {' | '.join(values)} | {held}, {known} |")
    return "\n".join(lines) + "\n"


def bench(chosen: argparse.Namespace, net: Net) -> int:
    """Every row that was asked for, written as it is found."""
    known: dict[str, dict[str, Any]] = {}
    if chosen.json and chosen.json.exists():
        known = json.loads(chosen.json.read_text())
    by_name = {row.name: row for row in ROWS}
    asked = [by_name[name] for name in chosen.only or by_name]
    missed = 0
    answers: dict[tuple[tuple[str, ...], int], dict[str, str]] = {}
    fleet = Fleet(chosen.folder, net)
    try:
        fleet.up()
        for row in asked:
            right = (row.prompts, row.max_tokens)
            if right not in answers:
                answers[right] = asyncio.run(learn(fleet.url(PREFILLS[-1]), *right))
            found = asyncio.run(play(fleet, row, answers[right], chosen.seconds))
            found["missed"] = find_faults(row, found)
            missed += bool(found["missed"])
            known[row.name] = found
            print(f"{row.name}: {json.dumps(found)}", flush=True)
            if chosen.json:
                chosen.json.write_text(json.dumps(known, indent=2) + "\n")
            if row is not asked[-1]:
                renew(fleet, found["held_blocks"])
    finally:
        fleet.down()
    print(render(known))
    return MISSED if missed else 0


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--only", action="append", choices=[row.name for row in ROWS])
    options.add_argument("--seconds", type=float, default=20)
    options.add_argument("--json", type=Path, help="rows are added to those that it has")
    options.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--inside", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.inside:
        return bench(chosen, Net(chosen.inside, MEMBERS))
    if os.geteuid() != 0:
        sys.exit("network namespaces want root: run it as root, on a machine with iproute2")
    with tempfile.TemporaryDirectory() as scratch:
        net = Net(f"kvf{os.getpid()}", MEMBERS)
        again = (sys.executable, "-m", "benchmarks.router_faults", *sys.argv[1:])
        words = (*net.enter("hub"), *again, "--inside", net.prefix, "--folder", scratch)
        with net.made():
            try:
                return subprocess.run(words).returncode
            finally:
                Fleet(Path(scratch), net).down()  # whatever has become of it


if __name__ == "__main__":
    sys.exit(main())
