"""What is done to engines, router and network while clients ask.

Owns the moments at which engines are hurt, and what it saw of them at that moment: a row whose
moment did not come says so.
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.faults.fleet import DECODES, LEASE_S, fetch, wait
from benchmarks.faults.load import insist, storm
from kvdeploy.adapters.metrics import fetch_counters
from kvdeploy.planning.launch import engine_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.faults.fleet import Fleet

P0, P1, D0 = "prefill-0", "prefill-1", "decode-0"
SHORT = tuple(f"The {n} lights went out along the harbour wall, and " * 6 for n in range(7))


class Seen(NamedTuple):
    """What shows that the moment of a fault came."""

    what: str
    value: Any

    @property
    def came(self) -> bool:
        return bool(self.value)


def nothing(_: Fleet) -> Seen:
    return Seen("no fault", value=True)


def kill_busy_prefill(fleet: Fleet) -> Seen:
    found = _catch(fleet, P0)
    fleet.kill(P0)
    return Seen("prompts on prefill-0 when it was killed", found)


def kill_prefill_before_write(fleet: Fleet) -> Seen:
    """Frozen decodes take nothing, so that prefill answers and its WRITEs stay undone."""
    for name in DECODES:
        fleet.processes.pause(name)
    try:
        time.sleep(1)
        wait(lambda: not _in_flight(fleet, P0), 3, 0.2)
        answered = sum(_in_flight(fleet, n) for n in DECODES) - _in_flight(fleet, P1)
        answered -= _in_flight(fleet, P0)
        fleet.kill(P0)
    finally:
        for name in DECODES:
            fleet.processes.resume(name)
    return Seen("prompts that prefills had answered and decodes not taken at the kill", answered)


def kill_waiting_decode(fleet: Fleet) -> Seen:
    """Frozen prefills, so that all that decode has waits for its KV."""
    for name in (P0, P1):
        fleet.processes.pause(name)
    try:
        found = _until(lambda: fetch_counters(fleet.url(D0), timeout_s=5).deferred)
        fleet.kill(D0)
    finally:
        for name in (P0, P1):
            fleet.processes.resume(name)
    return Seen("requests that waited for KV on decode-0 when it was killed", found)


def kill_streaming_decode(fleet: Fleet) -> Seen:
    found = _until(lambda: fetch_counters(fleet.url(D0), timeout_s=5).running)
    fleet.kill(D0)
    return Seen("requests that decode-0 was generating when it was killed", found)


def freeze(name: str, seconds: float) -> Callable[[Fleet], Seen]:
    def do(fleet: Fleet) -> Seen:
        found = _catch(fleet, name)
        try:
            time.sleep(seconds)
        finally:
            fleet.processes.resume(name)
        return Seen(f"requests on {name} when it was frozen", found)

    return do


def freeze_past_lease(fleet: Fleet) -> Seen:
    """Who waits for a prompt's KV renews its lease; a frozen decode does not. Clients that insist
    on it come beside those that are counted.
    """

    def expired() -> int:
        engines = (P0, P1)
        return sum(fetch_counters(fleet.url(n), timeout_s=5).kv_expired for n in engines)

    before = expired()
    ends = time.monotonic() + LEASE_S + 8
    fleet.processes.pause(D0)
    try:
        asyncio.run(insist(fleet.url("router"), SHORT, f"{P0}/{D0}", LEASE_S + 5))
        time.sleep(max(0.0, ends - time.monotonic()))
    finally:
        fleet.processes.resume(D0)
    wait(lambda: expired() > before, 10)
    return Seen("leases that ran out", expired() - before)


def restart(name: str) -> Callable[[Fleet], Seen]:
    def do(fleet: Fleet) -> Seen:
        before = fleet.generation(name)
        fleet.restart(name)
        wait(lambda: fleet.generation(name) != before and fleet.is_running(), 120)
        return Seen("its generation became another", fleet.generation(name) != before)

    return do


def cut(one: str, *others: str, seconds: float = 20) -> Callable[[Fleet], Seen]:
    def do(fleet: Fleet) -> Seen:
        for other in others:
            fleet.net.cut(one, other)
        time.sleep(seconds)
        cuts = sum("blackhole" in rule for rule in fleet.net.rules())
        for other in others:
            fleet.net.heal(one, other)
        return Seen("rules that dropped packets", cuts)

    return do


def slow_prefill(fleet: Fleet) -> Seen:
    """A fifth of its time it computes."""
    ends, turns = time.monotonic() + 15, 0
    while time.monotonic() < ends:
        fleet.freeze(P0, 0.4)
        time.sleep(0.1)
        turns += 1
    return Seen("times it was stopped for 0.4 s of every 0.5 s", turns)


def leave(number: int) -> Callable[[Fleet], Seen]:
    def do(fleet: Fleet) -> Seen:
        asyncio.run(storm(fleet.url("router"), SHORT, number))
        return Seen("clients that came and left", number)

    return do


def watch_full(fleet: Fleet) -> Seen:
    """The load is the fault: it asks for more blocks than decode has."""
    fullest, ends = 0.0, time.monotonic() + 15
    while time.monotonic() < ends:
        fullest = max(fullest, *(fleet.look(name).used_share for name in DECODES))
        time.sleep(0.1)
    return Seen("fullest that a decode's KV was", round(fullest, 2) if fullest > 0.85 else 0)


def replace_by_foreigner(name: str) -> Callable[[Fleet], Seen]:
    """An engine of another cluster at its address, and after a while the right one again."""

    def do(fleet: Fleet) -> Seen:
        own = fleet.processes.spec(name)
        assert own is not None
        ours, theirs = engine_id("faults", name), engine_id("other", name)
        argv = tuple(word.replace(ours, theirs) for word in own.argv)
        fleet.processes.start(own.model_copy(update={"argv": argv}))
        state = f'kvdeploy_router_engine_state{{engine="{name}",state="refused"}} 1.0'
        refused = wait(lambda: state in fetch(f"{fleet.url('router')}/metrics"), 150)
        fleet.processes.start(own)
        return Seen(f"{name} was refused while it was another's", refused is not None)

    return do


def end_router(number: signal.Signals) -> Callable[[Fleet], Seen]:
    def do(fleet: Fleet) -> Seen:
        found = _until(lambda: sum(fleet.look(name).busy for name in DECODES))
        before = fleet.pid("router")
        (fleet.kill if number is signal.SIGKILL else fleet.restart)("router")
        wait(lambda: fleet.is_running() and fleet.pid("router") != before, 60)
        return Seen("requests on decodes when the router was ended", found)

    return do


def _catch(fleet: Fleet, name: str) -> int:
    """Freeze an engine when it has requests: a short prompt is seen no other way. How many."""
    found = 0

    def look() -> bool:
        nonlocal found
        fleet.processes.pause(name)
        found = _in_flight(fleet, name)
        if not found:
            fleet.processes.resume(name)
        return bool(found)

    if wait(look, 8, 0.05) is None:
        fleet.processes.pause(name)
    return found


def _in_flight(fleet: Fleet, name: str) -> int:
    """Legs that the router has sent to an engine and that have not ended."""
    page = fetch(f"{fleet.url('router')}/metrics")
    pattern = rf'^kvdeploy_router_in_flight{{engine="{name}"}} (\S+)$'
    shown = re.search(pattern, page, re.MULTILINE)
    assert shown is not None, f"the router does not count {name}"
    return int(float(shown[1]))


def _until(number: Callable[[], int]) -> int:
    """The number, once it is not 0; 0 after a while."""
    found = 0

    def look() -> bool:
        nonlocal found
        found = number()
        return bool(found)

    wait(look, 8, 0.05)
    return found
