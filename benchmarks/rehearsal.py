"""What a rehearsal takes, what it survives, and whether plan tells the truth.

    python -m benchmarks.rehearsal times [P D]   up, again, smoke, down; P prefill, D decode nodes
    python -m benchmarks.rehearsal image         what `kvdeploy image` saves an `up` from nothing
    python -m benchmarks.rehearsal changes       what plan announces and up does, change by change
    python -m benchmarks.rehearsal early         kill -9, power loss, Ctrl-C in up's first stages
    python -m benchmarks.rehearsal late          the same in its last stages, and in down

Several of them go on in one world. All of it: `make bench-rehearsal`. Prints tables;
exit code 1 where a row is not as it should be.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import rehearsal_changes, rehearsal_crashes
from benchmarks.rehearsal_crashes import DOWN, EARLY, LATE, UP
from tests.rehearsal.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ENDED: Final = re.compile(r"^ok (.+) \(([\d.]+) s\)$")
AT_MOST_S: Final = 1200
SMALL: Final[dict[str, Any]] = {"aws": {"instance_type": "p5.4xlarge"}}
"""A node an engine."""


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nothing is left of its world
    # In the background of a shell it is ignored, and would be by all that is started here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    words = sys.argv[1:] or ["times"]
    numbers = [int(word) for word in words if word.isdigit()]
    document: dict[str, Any] = SMALL if "changes" in words or numbers else {}
    if numbers:
        counts = zip(("prefill", "decode"), numbers, strict=True)
        document = document | {"fleet": {role: {"count": n} for role, n in counts}}
    parts: dict[str, Callable[[World], int]] = {
        "times": lambda world: _times(world, document),
        "image": _image,
        "changes": rehearsal_changes.run,
        "early": lambda world: rehearsal_crashes.run(world, EARLY),
        "late": lambda world: rehearsal_crashes.run(world, LATE),
    }
    with (
        tempfile.TemporaryDirectory(prefix="kvdeploy-rehearsal-") as folder,
        World(Path(folder), document) as world,
    ):
        bad = [part for part in words if part in parts and parts[part](world)]
        if world.double.instances():
            _row(world, "`down`", *DOWN)
    return 1 if bad else 0


def _times(world: World, document: Mapping[str, Any]) -> int:
    fleet = document.get("fleet", {})
    nodes = sum(fleet.get(role, {"count": 1})["count"] for role in ("prefill", "decode")) + 1
    print(f"| {nodes} hosts on {len(os.sched_getaffinity(0))} cores | s |\n|---|---|")
    _row(world, "`up`", *UP, stages=True)
    _row(world, "`up` again, nothing to do", *UP)
    for verb in (("plan",), ("status",), ("smoke",), DOWN):
        _row(world, f"`{verb[0]}`", *verb)
    return 0


def _image(world: World) -> int:
    print("| | s |\n|---|---|")
    _row(world, "`up` from the base image", *UP, stages=True)
    made = _row(world, "`image`", "image", "--yes", "--json", stages=True)
    _row(world, "`down`", *DOWN)
    ami = ("--set", f"aws.ami={json.loads(made)['id']}")
    _row(world, "`up` from an image of kvdeploy's", *UP, *ami, stages=True)
    _row(world, "`smoke`", "smoke")
    _row(world, "`down`", *DOWN)
    return 0


def _row(world: World, title: str, *verb: str, stages: bool = False) -> str:
    """Its standard output."""
    began = time.monotonic()
    done = world.kvdeploy(*verb, timeout_s=AT_MOST_S)
    if done.returncode:
        raise SystemExit(done.stderr + str(world.trouble))
    print(f"| {title} | {time.monotonic() - began:.1f} |", flush=True)
    for line in done.stderr.splitlines() if stages else ():
        if found := ENDED.search(line):
            print(f"| . {found[1]} | {found[2]} |", flush=True)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
