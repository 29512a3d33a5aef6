"""What a run survives: it is struck in the middle of a stage, and the next one must converge."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import psutil

from kvdeploy.polling import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.hostlab.guest import Host
    from tests.rehearsal.world import World

UP: Final = ("up", "--yes")
DOWN: Final = ("down", "--yes")
AT_MOST_S: Final = 1200
LEFT_S: Final = 150
SIGNALS: Final = {"kvdeploy": signal.SIGKILL, "Ctrl-C": signal.SIGINT}
PROGRAMS: Final = {"terraform": "terraform", "worker": "kvdeploy.adapters.ansible.worker"}


@dataclass(frozen=True, kw_only=True)
class Crash:
    verb: Sequence[str]
    after: str
    """What the run says before it is struck,"""
    s: float
    """and how long before."""
    victim: str
    """kvdeploy, terraform, worker, or a node; Ctrl-C is no victim, but typed."""
    block_size: int = 128
    """Another one than in the row before: all engines have to start again."""


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
    Crash(verb=UP, after="-> start the fleet", s=10, victim="worker", block_size=32),
    Crash(verb=UP, after="-> start the fleet", s=12, victim="decode-0", block_size=64),
    Crash(verb=UP, after="-> start the fleet", s=12, victim="Ctrl-C", block_size=256),
    Crash(verb=UP, after="-> prove one push", s=0.5, victim="kvdeploy"),
    Crash(verb=DOWN, after="-> destroy", s=3, victim="kvdeploy"),
    Crash(verb=DOWN, after="-> destroy", s=3, victim="terraform"),
    Crash(verb=DOWN, after="-> destroy", s=5, victim="Ctrl-C"),
    Crash(verb=DOWN, after="-> destroy", s=5, victim="decode-0"),
)
"""The last is no crash of down: the host was to go anyway."""


@dataclass(frozen=True, kw_only=True)
class Struck:
    """How a run ended that was struck."""

    code: int
    left: str
    """Processes that it had started and that did not end."""
    told_s: float
    """From the blow to its end."""
    said: str
    """Its last words."""


def run(world: World, crashes: Sequence[Crash]) -> int:
    """Prints the table; 1 where something is left, or the last runs do not converge."""
    print("| struck | in, after | exit code | after, s | left here |\n|---|---|---|---|---|")
    bad = 0
    for crash in crashes:
        if world.double.instances() == [] and crash.verb == DOWN:
            bad += _converge(world, UP)
        struck = _strike_a_run(world, crash)
        bad += struck.left != "nothing"
        when = f"`{crash.verb[0]}`, {crash.s:g} s after '{crash.after.strip('-> ')}'"
        print(f"| {crash.victim} | {when} | {struck.code} | {struck.told_s:.0f} | {struck.left} |")
        print(f"  {struck.said}", file=sys.stderr, flush=True)
    if crashes[-1].verb == UP:
        bad += _converge(world, UP)
    bad += _converge(world, DOWN)
    kvdeploys = {i for kind in world.double.resources().values() for i, t in kind.items() if t}
    print(f"left in the double: {kvdeploys or 'nothing'}")
    return 1 if bad or kvdeploys else 0


def _converge(world: World, verb: Sequence[str]) -> int:
    began = time.monotonic()
    done = world.kvdeploy(*verb, timeout_s=AT_MOST_S)
    last = (done.stdout or done.stderr).strip().splitlines()[-1:]
    print(f"`{verb[0]}`: {done.returncode}, {time.monotonic() - began:.0f} s: {last}", flush=True)
    return int(done.returncode != 0)


def _strike_a_run(world: World, crash: Crash) -> Struck:
    log = world.root / "run.log"
    changed = ("--set", f"connector.block_size={crash.block_size}") if crash.verb == UP else ()
    with log.open("wb") as sink:
        run = subprocess.Popen(
            [sys.executable, "-m", "kvdeploy", *crash.verb, *changed],
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
        struck = time.monotonic()
        host = _strike(world, crash.victim, run, children)
        run.wait(AT_MOST_S)
        told_s = time.monotonic() - struck
    finally:
        run.kill()
    gone = wait_for(lambda: not _alive(children) or None, timeout_s=LEFT_S, interval_s=0.5)
    if host is not None and host in world.hosts.values():
        host.boot()
    words = [line for line in log.read_text().splitlines() if not line.startswith("   ")]
    return Struck(
        code=run.returncode,
        left="nothing" if gone else ", ".join(p.name() for p in _alive(children)),
        told_s=told_s,
        said="\n  ".join(line[:300] for line in words[-4:]),
    )


def _strike(
    world: World, victim: str, run: subprocess.Popen[bytes], children: list[psutil.Process]
) -> Host | None:
    if victim in SIGNALS:
        run.send_signal(SIGNALS[victim])
    elif victim in PROGRAMS:
        word = PROGRAMS[victim]
        next(p for p in children if word in " ".join(p.cmdline()[:6])).kill()
    else:
        host = next(h for h in world.hosts.values() if h.name.startswith(victim))
        host.kill()
        return host
    return None


def _alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def _wait(until: Callable[[], bool]) -> None:
    if not wait_for(lambda: until() or None, timeout_s=AT_MOST_S, interval_s=0.1):
        msg = "it never came to that"
        raise SystemExit(msg)
