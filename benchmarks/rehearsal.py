"""What a rehearsal takes, stage by stage, and what it survives: `make bench-rehearsal`.

    python -m benchmarks.rehearsal times      up, up again, smoke, down
    python -m benchmarks.rehearsal crashes    kill -9 in the last stages of up, and in down
    python -m benchmarks.rehearsal changes    what plan announces and up does, for one change each
    python -m benchmarks.rehearsal early      the same in the first stages

A crash kills kvdeploy, or Terraform, or Ansible's worker, or takes the power from a host, in the
middle of a stage; the next `up` must converge, and `down` must leave nothing. Prints tables.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from kvdeploy.polling import wait_for
from tests.rehearsal.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.hostlab.guest import Host

ENDED: Final = re.compile(r"ok (.+) \(([\d.]+) s\)$")
UP: Final = ("up", "--yes")
DOWN: Final = ("down", "--yes")
AT_MOST_S: Final = 400
SIGNALS: Final = {"kvdeploy": signal.SIGKILL, "Ctrl-C": signal.SIGINT}
TERRAFORM: Final = "terraform"
WORKER: Final = "kvdeploy.adapters.ansible.worker"


@dataclass(frozen=True, kw_only=True)
class Crash:
    verb: Sequence[str]
    after: str
    """What the run says before it is struck,"""
    s: float
    """and how long before."""
    victim: str
    """kvdeploy, terraform, worker, or a node; Ctrl-C is no victim, but typed."""


EARLY: Final = (
    Crash(verb=UP, after="+ launch_template", s=4, victim="kvdeploy"),
    Crash(verb=UP, after="-> make 3 nodes", s=2, victim="terraform"),
    Crash(verb=UP, after=": efa (", s=8, victim="kvdeploy"),
    Crash(verb=UP, after=": efa (", s=8, victim="worker"),
    Crash(verb=UP, after=": efa (", s=3, victim="prefill-0"),
    Crash(verb=UP, after=": efa (", s=1, victim="Ctrl-C"),
)
"""Into the build of the engines' environment, which is the longest part of nodes.yml."""
LATE: Final = (
    Crash(verb=UP, after="-> start the fleet", s=10, victim="kvdeploy"),
    Crash(verb=UP, after="-> start the fleet", s=10, victim="worker"),
    Crash(verb=UP, after="-> start the fleet", s=5, victim="decode-0"),
    Crash(verb=UP, after="-> prove one push", s=0.5, victim="kvdeploy"),
    Crash(verb=DOWN, after="-> destroy", s=3, victim="kvdeploy"),
    Crash(verb=DOWN, after="-> destroy", s=3, victim="terraform"),
)


SMALL: Final = {"aws": {"instance_type": "p5.4xlarge"}}
"""A node an engine."""
REPLACED: Final = "`up --replace decode-0`"
TWO: Final = "fleet.decode.count=2"
CHANGES: Final = (
    ("from nothing", ()),
    ("nothing", ()),
    ("decode 1 -> 2", (TWO,)),
    ("decode 2 -> 1", ()),
    ("block size", ("connector.block_size=32",)),
    ("router's queue", ("connector.block_size=32", "router.queue_size=7")),
    ("another model", ("model.seed=1",)),
    (REPLACED, ("model.seed=1",)),
    ("another zone", ("model.seed=1", "aws.zone=us-west-2b")),
)


def main() -> int:
    what = sys.argv[1] if len(sys.argv) > 1 else "times"
    with (
        tempfile.TemporaryDirectory(prefix="kvdeploy-rehearsal-") as folder,
        World(Path(folder), SMALL if what == "changes" else None) as world,
    ):
        if what == "times":
            _times(world)
        elif what == "changes":
            _changes(world)
        else:
            _crashes(world, EARLY if what == "early" else LATE)
    return 0


# --- times -----------------------------------------------------------------------------------
def _times(world: World) -> None:
    print(f"| {len(os.sched_getaffinity(0))} cores | s |\n|---|---|")
    for title, verb in (
        ("`up`", UP),
        ("`up` again, nothing to do", UP),
        ("`status`", ("status",)),
        ("`smoke`", ("smoke",)),
        ("`down`", DOWN),
    ):
        began = time.monotonic()
        done = world.kvdeploy(*verb, timeout_s=AT_MOST_S)
        if done.returncode:
            raise SystemExit(done.stderr)
        print(f"| {title} | {time.monotonic() - began:.1f} |")
        for line in done.stderr.splitlines():
            if (found := ENDED.search(line)) and title == "`up`":
                print(f"| . {found[1]} | {found[2]} |", flush=True)


# --- changes ---------------------------------------------------------------------------------
def _changes(world: World) -> None:
    """One after the other; each is against the one before it."""
    print(
        "| change | plan: fields | plan: Terraform | up | stages | s |\n|---|---|---|---|---|---|"
    )
    for what, options in CHANGES:
        sets = [word for one in options for word in ("--set", one)]
        planned = _json(world.kvdeploy("plan", *sets, "--json", timeout_s=AT_MOST_S))
        replaced = ("--replace", "decode-0") if what == REPLACED else ()
        began = time.monotonic()
        done = world.kvdeploy(*UP, *sets, *replaced, "--json", timeout_s=AT_MOST_S)
        fields = ", ".join(f"{f['path']} ({f['does']})" for f in planned.get("fields", []))
        acts = Counter(c["action"] for c in planned.get("changes", []))
        terraform = ", ".join(f"{n} {act}" for act, n in acts.items())
        stages = ", ".join(_json(done).get("done", []))
        cells = (what, fields, terraform, str(done.returncode), stages)
        seconds = f"{time.monotonic() - began:.0f}"
        print("| " + " | ".join(cell or "-" for cell in (*cells, seconds)) + " |", flush=True)
    done = world.kvdeploy(*DOWN, timeout_s=AT_MOST_S)
    print(f"down: {done.returncode}")


def _json(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Its document; nothing where it refused."""
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


# --- crashes ---------------------------------------------------------------------------------
def _crashes(world: World, crashes: Sequence[Crash]) -> None:
    print("| struck | in, after | exit code | left here |\n|---|---|---|---|")
    for crash in crashes:
        code, left = _struck(world, crash)
        _last(world)
        when = f"{crash.verb[0]}, {crash.s:g} s after '{crash.after.strip('-> ')}'"
        print(f"| {crash.victim} | {when} | {code} | {left} |", flush=True)
    began = time.monotonic()
    if crashes[-1].verb == UP:
        done = world.kvdeploy(*UP, timeout_s=AT_MOST_S)
        print(f"up: {done.returncode}, {time.monotonic() - began:.0f} s\n{done.stdout}", flush=True)
    done = world.kvdeploy(*DOWN, timeout_s=AT_MOST_S)
    kvdeploys = {i for kind in world.double.resources().values() for i, t in kind.items() if t}
    print(f"down: {done.returncode}\n{done.stdout}left in the double: {kvdeploys or 'nothing'}")


def _last(world: World) -> None:
    """The last words of the run, beside the table."""
    *_, line = (world.root / "run.log").read_text().splitlines() or [""]
    print(f"  {line[:200]}", file=sys.stderr, flush=True)


def _struck(world: World, crash: Crash) -> tuple[str, str]:
    """Exit code of the run, and the processes that it left."""
    log = world.root / "run.log"
    with log.open("wb") as sink:
        run = subprocess.Popen(
            [sys.executable, "-m", "kvdeploy", *crash.verb],
            cwd=world.root,
            env=world.environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
        )
    try:
        _wait(lambda: crash.after in log.read_text() or run.poll() is not None)
        time.sleep(crash.s)
        if run.poll() is not None:
            msg = f"it ended before it was struck: {log.read_text()}"
            raise SystemExit(msg)
        children = psutil.Process(run.pid).children(recursive=True)
        host = _strike(world, crash.victim, run, children)
        run.wait(AT_MOST_S)
    finally:
        run.kill()
    gone = wait_for(lambda: not _alive(children) or None, timeout_s=150, interval_s=0.5)
    if host is not None:
        host.boot()
    return str(run.returncode), "nothing" if gone else ", ".join(p.name() for p in _alive(children))


def _strike(
    world: World, victim: str, run: subprocess.Popen[bytes], children: list[psutil.Process]
) -> Host | None:
    if victim in SIGNALS:
        run.send_signal(SIGNALS[victim])
    elif victim in {"terraform", "worker"}:
        word = {"terraform": TERRAFORM, "worker": WORKER}[victim]
        next(p for p in children if word in " ".join(p.cmdline()[:6])).kill()
    else:
        host = next(h for h in world.hosts.values() if h.name.startswith(victim))
        host.kill()
        return host
    return None


def _alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def _wait(until: Callable[[], bool]) -> None:
    if not wait_for(lambda: until() or None, timeout_s=AT_MOST_S, interval_s=0.2):
        msg = "it never came to that"
        raise SystemExit(msg)


if __name__ == "__main__":
    sys.exit(main())
