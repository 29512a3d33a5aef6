"""A rehearsal by hand: the whole path of `target: aws` on this machine, to look at and to break.

    python -m tests.rehearsal up --root DIR [-f FILE]   a world; then, in DIR: . ./env; kvdeploy up
    python -m tests.rehearsal down --root DIR           nothing is left of it
    python -m tests.rehearsal run --root DIR [-f FILE]  world, up, status, smoke, down, no world

`up` leaves a process behind that is AWS and every machine in it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from kvdeploy.polling import wait_for
from tests.hostlab import net
from tests.hostlab.shell import LabError
from tests.rehearsal.world import World, missing, read

START_S = 300
END_S = 120


def main() -> int:
    options = _parse()
    if options.action in {"up", "run"} and (reason := missing()):
        sys.stderr.write(f"no rehearsal on this machine: {reason}\n")
        return 4
    root: Path = options.root.resolve()
    try:
        if options.action == "up":
            _up(root, options.file)
        elif options.action == "down":
            _down(root)
        elif options.action == "serve":
            _serve(root, options.file)
        else:
            return _run(root, options.file)
    except (LabError, RuntimeError) as e:
        sys.stderr.write(f"{e}\n")
        return 1
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.rehearsal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True)
    for name in ("up", "down", "run", "serve"):
        action = actions.add_parser(name)
        action.add_argument("--root", type=Path, required=True, help="a folder of the world's own")
        if name != "down":
            action.add_argument("-f", "--file", type=Path, help="a cluster file to rehearse")
    return parser.parse_args()


def _up(root: Path, file: Path | None) -> None:
    _down(root)
    root.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "tests.rehearsal", "serve", "--root", str(root)]
    argv += ["--file", str(file.resolve())] if file else []
    with (root / "world.log").open("wb") as log:
        server = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )

    def answers() -> bool | None:
        if server.poll() is not None:
            msg = f"the world ended: {(root / 'world.log').read_text()}"
            raise RuntimeError(msg)
        return (root / "world.json").exists() or None

    if not wait_for(answers, timeout_s=START_S, interval_s=0.1):
        msg = f"no world after {START_S} s; see {root / 'world.log'}"
        raise RuntimeError(msg)
    sys.stdout.write(f"a world is in {root}:\n  cd {root} && . ./env && kvdeploy up\n")


def _serve(root: Path, file: Path | None) -> None:
    """Be the world until SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), World(root, read(file) if file else None):
        part = root / "world.part"
        part.write_text(json.dumps({"pid": os.getpid(), "started": net.started(os.getpid())}))
        part.rename(root / "world.json")
        signal.pause()


def _down(root: Path) -> None:
    record = root / "world.json"
    if not record.exists():
        return
    told = json.loads(record.read_text())
    # Only that very process: its id may be somebody else's by now.
    if net.started(told["pid"]) == told["started"]:
        with suppress(ProcessLookupError):
            os.kill(told["pid"], signal.SIGTERM)
        if not wait_for(
            lambda: net.started(told["pid"]) != told["started"] or None, timeout_s=END_S
        ):
            msg = f"the world of {root} (pid {told['pid']}) does not end"
            raise RuntimeError(msg)
    record.unlink(missing_ok=True)


def _run(root: Path, file: Path | None) -> int:
    """All of it, once; whatever happens, nothing is left."""
    with World(root, read(file) if file else None) as world:
        codes = []
        for verb in (("up", "--yes"), ("status",), ("smoke",), ("down", "--yes")):
            began = time.monotonic()
            sys.stdout.write(f"$ kvdeploy {' '.join(verb)}\n")
            sys.stdout.flush()
            done = subprocess.run(
                [sys.executable, "-m", "kvdeploy", *verb],
                cwd=world.root,
                env=world.environment,
                check=False,
            )
            codes.append(done.returncode)
            sys.stdout.write(f"-> {done.returncode}, {time.monotonic() - began:.0f} s\n\n")
        left = world.double.instances()
        sys.stdout.write(f"left in the double: {len(left)} instances\n")
    return max(codes) or len(left)


if __name__ == "__main__":
    sys.exit(main())
