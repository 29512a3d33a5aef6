"""The faults, one a row: who is hurt how, and what clients ask for meanwhile."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.faults import harm
from benchmarks.faults.fleet import DECODES
from benchmarks.faults.harm import D0, P0, SHORT

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.faults.fleet import Fleet
    from benchmarks.faults.harm import Seen

STORY = "The harbour lights went out one by one, and nobody on the pier said a word. " * 30
LONG = tuple(f"Night {n}. {STORY}"[:1900] for n in range(7))
"""Sixty blocks each."""
CUTS = random.Random(5)
SHARED = tuple(f"{STORY[: CUTS.randrange(0, 1500)]}{n} bells rang." for n in range(40))
"""One beginning, cut at forty places, most of them inside a block."""


@dataclass(frozen=True)
class Row:
    name: str
    title: str
    fault: Callable[[Fleet], Seen]
    prompts: tuple[str, ...] = SHORT
    max_tokens: int = 24
    clients: int = 8
    ends: tuple[str, ...] = ()
    """Who comes back with a new generation. Clients of a router that is gone are told nothing."""


ROWS = (
    Row("none", "no fault", harm.nothing),
    Row("kill-prefill", "kill -9 prefill in mid-prefill", harm.kill_busy_prefill, LONG, ends=(P0,)),
    Row(
        "kill-prefill-before-write",
        "kill -9 prefill between its answer and its WRITE",
        harm.kill_prefill_before_write,
        ends=(P0,),
    ),
    Row(
        "kill-decode-waiting",
        "kill -9 decode that waits for KV",
        harm.kill_waiting_decode,
        ends=(D0,),
    ),
    Row(
        "kill-decode-streaming",
        "kill -9 decode in mid-stream",
        harm.kill_streaming_decode,
        SHORT,
        80,
        ends=(D0,),
    ),
    Row("freeze-prefill", "SIGSTOP prefill for 20 s", harm.freeze(P0, 20)),
    Row("freeze-decode", "SIGSTOP decode for 6 s", harm.freeze(D0, 6)),
    Row("lease", "SIGSTOP decode past prefill's lease", harm.freeze_past_lease),
    Row("restart-prefill", "restart prefill", harm.restart(P0), ends=(P0,)),
    Row("restart-decode", "restart decode", harm.restart(D0), ends=(D0,)),
    Row("slow-prefill", "prefill at a fifth of its speed", harm.slow_prefill),
    Row(
        "drop-pair",
        "drop packets between one prefill and both decodes, 20 s",
        harm.cut(P0, *DECODES),
    ),
    Row(
        "drop-router-prefill",
        "drop packets between router and prefill, 20 s",
        harm.cut("router", P0),
    ),
    Row(
        "drop-router-decode",
        "drop packets between router and decode, 20 s",
        harm.cut("router", D0),
    ),
    Row("storm", "200 clients that leave", harm.leave(200)),
    Row("prefixes", "forty beginnings of one prompt", harm.nothing, SHARED),
    Row("full", "more prompts than decode has KV for", harm.watch_full, LONG, 64, 24),
    Row(
        "foreign-prefill",
        "another cluster's prefill at its address",
        harm.replace_by_foreigner(P0),
        ends=(P0,),
    ),
    Row(
        "foreign-decode",
        "another cluster's decode at its address",
        harm.replace_by_foreigner(D0),
        ends=(D0,),
    ),
    Row("kill-router", "kill -9 the router", harm.end_router(signal.SIGKILL), ends=("router",)),
    Row("drain-router", "SIGTERM the router", harm.end_router(signal.SIGTERM), ends=("router",)),
)
