"""A rehearsal by hand: the whole path of `target: aws` on this machine, to look at and to break.

    python -m tests.rehearsal up --root DIR [-f FILE]   a world; then, in DIR: . ./env; kvdeploy up
    python -m tests.rehearsal down --root DIR           nothing is left of it
    python -m tests.rehearsal run --root DIR [-f FILE]  world, up, status, smoke, down, no world

`up` leaves a process behind that is AWS and every machine in it. Where something is left of a run
that was killed, `up` and `run` say what, and remove it only with --yes.

Exit codes: 0 done, 1 the world failed, 3 the cluster file is wrong, 4 something to put right first,
130 interrupted; `run`: the worst of kvdeploy's.
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
from typing import TYPE_CHECKING, Any

from kvdeploy.errors import StateError
from kvdeploy.polling import wait_for
from tests.hostlab import net
from tests.hostlab.shell import LabError
from tests.rehearsal import ground
from tests.rehearsal.world import World

if TYPE_CHECKING:
    from collections.abc import Mapping

START_S = 300
END_S = 120
HELP = {
    "up": "a world that stays until `down`",
    "down": "end it, or what is left of it when it was killed",
    "run": "a world, kvdeploy's up, status, smoke and down in it, and no world any more",
    "serve": "be the world: what `up` starts",
}


def main() -> int:
    options = _parse()
    root: Path = options.root.resolve()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        if options.action == "down":
            return _refuse(ground.not_ours(root), _no_root()) or _down(root)
        document = ground.read(options.file) if options.file else None
        if options.action == "serve":
            return _serve(root, document)
        if code := _refuse(ground.not_ours(root), ground.missing(document)):
            return code
        if code := _cleaned(root, yes=options.yes):
            return code
        return _up(root, options.file) if options.action == "up" else _run(root, document)
    except StateError as e:
        sys.stderr.write(f"{e.message}\n")
        return 3
    except (LabError, RuntimeError) as e:
        sys.stderr.write(f"{e}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: the world is gone, and all that was in it\n")
        return 130


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.rehearsal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True)
    for name, said in HELP.items():
        action = actions.add_parser(name, help=said)
        action.add_argument("--root", type=Path, required=True, help="a folder of the world's own")
        if name != "down":
            action.add_argument("-f", "--file", type=Path, help="a cluster file to rehearse")
            action.add_argument(
                "--yes", action="store_true", help="first remove what earlier runs left"
            )
    return parser.parse_args()


# --- before anything starts ------------------------------------------------------------------
def _refuse(*reasons: str | None) -> int:
    """The first of them is enough."""
    if reason := next(filter(None, reasons), None):
        sys.stderr.write(f"{reason}\n")
        return 4
    return 0


def _no_root() -> str | None:
    return None if os.geteuid() == 0 else "a world is root's, and so is its end: run this as root"


def _cleaned(root: Path, *, yes: bool) -> int:
    """With consent nothing is left of earlier runs; without, it is named."""
    down = f"'{sys.executable} -m tests.rehearsal down --root {root}'"
    if pid := ground.alive(root):
        sys.stderr.write(f"a world is in {root} already (pid {pid}): {down} ends it\n")
        return 4
    found = ground.left()
    if found and not yes:
        sys.stderr.write("something is left of earlier runs:\n")
        sys.stderr.writelines(f"  {line}\n" for line in found)
        sys.stderr.write("say --yes to have it removed first\n")
        return 4
    ground.clean(root, all_labs=True)
    sys.stdout.writelines(f"removed: {line}\n" for line in found)
    return 0


# --- what is asked for -----------------------------------------------------------------------
def _up(root: Path, file: Path | None) -> int:
    root.mkdir(parents=True, exist_ok=True)
    (root / ground.MARK).touch()
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

    try:
        if not wait_for(answers, timeout_s=START_S, interval_s=0.1):
            msg = f"no world after {START_S} s; see {root / 'world.log'}"
            raise RuntimeError(msg)
    except BaseException:
        server.terminate()
        server.wait(END_S)
        raise
    sys.stdout.write(f"a world is in {root}:\n  cd {root} && . ./env && kvdeploy up\n")
    return 0


def _serve(root: Path, document: Mapping[str, Any] | None) -> int:
    """Be the world until SIGTERM."""
    with suppress(KeyboardInterrupt), World(root, document):
        part = root / "world.part"
        part.write_text(json.dumps({"pid": os.getpid(), "started": net.started(os.getpid())}))
        part.rename(root / "world.json")
        signal.pause()
    return 0


def _down(root: Path) -> int:
    if pid := ground.alive(root):
        # Only that very process: its id may be somebody else's by the time it is looked at again.
        started = net.started(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        if not wait_for(lambda: net.started(pid) != started or None, timeout_s=END_S):
            msg = f"the world of {root} (pid {pid}) does not end: see {root / 'world.log'}"
            raise RuntimeError(msg)
    ground.clean(root, all_labs=False)
    return 0


def _run(root: Path, document: Mapping[str, Any] | None) -> int:
    """All of it, once; whatever happens, nothing is left."""
    with World(root, document) as world:
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
