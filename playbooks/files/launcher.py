#!/usr/bin/python3 -I
"""Starts one process of a fleet under systemd, from the file that describes it.

Runs on the node, by its own Python (3.9 or newer), with nothing but the standard library:

    launcher.py check FILE      before the start, as root: is all there, are its ports free?
    launcher.py exec FILE       the start: a fresh generation is put in, and the process takes over
    launcher.py wait FILE       after the start: returns when it is ready, keeps it on its cores

FILE is JSON: name, argv, needs, ports, host, cpus, ready (url, timeout_s, trust) and digest. What
is known of a process lies in the folder /run/kvdeploy: NAME.generation and NAME.digest (of what it
was started from) while it runs, NAME.reason after a start that failed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import ssl
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

GENERATION = "@generation@"
RUN = Path(os.environ.get("RUNTIME_DIRECTORY") or "/run/kvdeploy")
PORTS_WAIT_S = 5.0
LOOK_EVERY_S = 0.2
PIN_EVERY_S = 1.0
LISTENING = "0A"
"""Never through a proxy: what is asked is on this machine."""


class FailedError(Exception):
    """The start cannot go on; the message says why."""


def load(file: str) -> dict[str, Any]:
    return dict(json.loads(Path(file).read_text(encoding="utf-8")))


def keep(name: str, what: str, text: str, mode: int = 0o644) -> None:
    """Write RUN/NAME.WHAT whole or not at all."""
    path = RUN / f"{name}.{what}"
    part = path.with_suffix(f".{what}-part")
    part.unlink(missing_ok=True)
    part.touch(mode)
    part.write_text(f"{text}\n", encoding="utf-8")
    part.replace(path)


def nap(seconds: float) -> None:
    time.sleep(seconds)  # noqa: TID251


# --- before the start --------------------------------------------------------------------------
def check_there(spec: dict[str, Any]) -> None:
    """What it needs may be on a disk that is blank since the machine was stopped."""
    for path in spec["needs"]:
        if not Path(path).exists():
            text = f"cannot start: {path} is missing; run nodes.yml to have it again"
            raise FailedError(text)


def check_ports(spec: dict[str, Any]) -> None:
    """Every port must be free: a side channel that meets a taken one hangs vLLM for ever.

    One that our last run has just left is given time to clear.
    """
    ends = time.monotonic() + PORTS_WAIT_S
    while True:
        taken = [port for port in spec["ports"] if not is_free(spec["host"], port)]
        if not taken:
            return
        if time.monotonic() > ends:
            text = f"cannot start: port {taken[0]} is taken by {holder(taken[0])}"
            raise FailedError(text)
        nap(LOOK_EVERY_S)


def is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as e:
            if e.errno == errno.EADDRNOTAVAIL:
                text = f"cannot start: this machine does not have the address {host}"
                raise FailedError(text) from e
            return False
    return True


def holder(port: int) -> str:
    """Who listens there, in words."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for fields in (line.split() for line in lines):
            if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{fields[9]}]")
    for pid in all_pids():
        if sockets.intersection(open_files(pid)):
            return f"{command_of(pid)} (pid {pid})"
    return "another process"


def open_files(pid: int) -> list[str]:
    found = []
    try:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since
                found.append(str(fd.readlink()))
    except OSError:
        pass
    return found


def all_pids() -> list[int]:
    return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "a process"


# --- the start ---------------------------------------------------------------------------------
def replace_ourselves(spec: dict[str, Any]) -> None:
    """Become the process, under a generation that no start before this had.

    Peers know an engine by its id alone: under an old one every request would hang. The time
    tells starts apart, the rest those within one tick or after a clock that was set back.
    """
    generation = f"{time.time_ns() // 1_000_000:x}{secrets.token_hex(2)}"
    argv = [word.replace(GENERATION, generation) for word in spec["argv"]]
    env = {name: value.replace(GENERATION, generation) for name, value in os.environ.items()}
    keep(spec["name"], "generation", generation)
    keep(spec["name"], "digest", identity(spec), 0o600)
    say(f"{spec['name']}: starting, generation {generation}")
    try:
        os.execve(argv[0], argv, env)  # noqa: S606
    except OSError as e:
        text = f"cannot start: {argv[0]}: {e.strerror}"
        raise FailedError(text) from e


def identity(spec: dict[str, Any]) -> str:
    """What a process is started from: its file, and the environment that its Python is a link to.

    units.py has the same.
    """
    return f"{spec['digest']} {Path(spec['argv'][0]).parent.parent.resolve()}"


# --- after the start ---------------------------------------------------------------------------
def wait_ready(spec: dict[str, Any], main: int) -> None:
    """Until its URL answers 200. On the way it is brought back to its cores again and again:
    vLLM moves its workers onto the last core of the machine (0.32), all engines onto the same.
    """
    timeout_s = spec["ready"]["timeout_s"]
    ends = time.monotonic() + timeout_s
    pin_at = 0.0
    while True:
        if not is_alive(main):
            text = "ended before it was ready"
            raise FailedError(text)
        ready = answers(spec["ready"])
        if ready or time.monotonic() >= pin_at:
            pin(main, spec["cpus"])
            pin_at = time.monotonic() + PIN_EVERY_S
        if ready:
            say(f"{spec['name']}: ready")
            return
        if time.monotonic() > ends:
            text = f"was not ready within {timeout_s:.0f} s"
            raise FailedError(text)
        nap(LOOK_EVERY_S)


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def answers(ready: dict[str, Any]) -> bool:
    """units.py says how https is trusted."""
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    try:
        if ready.get("trust"):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            context.load_verify_locations(ready["trust"])
            handlers.append(urllib.request.HTTPSHandler(context=context))
        opener = urllib.request.build_opener(*handlers)
        with opener.open(ready["url"], timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, ValueError):
        return False


def pin(main: int, cpus: list[int]) -> None:
    """Every thread of every process in the cgroup of `main`, ours left out."""
    if not cpus:
        return
    ours = cgroup_of(main)
    for pid in all_pids():
        if pid == os.getpid() or not ours or cgroup_of(pid) != ours:
            continue
        try:
            threads = [int(p.name) for p in Path(f"/proc/{pid}/task").iterdir()]
        except OSError:
            continue
        for thread in threads:
            try:
                os.sched_setaffinity(thread, cpus)
            except OSError:
                continue


def cgroup_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(argv: list[str]) -> int:
    command, file = argv
    spec = load(file)
    try:
        if command == "check":
            (RUN / f"{spec['name']}.reason").unlink(missing_ok=True)
            check_there(spec)
            check_ports(spec)
        elif command == "exec":
            replace_ourselves(spec)
        elif command == "wait":
            wait_ready(spec, int(os.environ["MAINPID"]))
        else:
            say(f"no such command: {command}")
            return 2
    except FailedError as e:
        keep(spec["name"], "reason", str(e))
        say(f"{spec['name']} {e}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
