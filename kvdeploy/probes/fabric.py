"""One end of a ping over every EFA device of a node, under the node's own Python.

Spoken to by JSON lines. The order: program, domains, deadline_s; a server's has port_base, a
client's the address of its peer and the ports there. A server answers with the TCP port of each
domain, where the two ends find each other, once all of its ends wait; both tell how every rail
ended. Ends by itself: when it is sent another line, when its stdin ends, or after deadline_s.
"""

import ctypes
import json
import pathlib
import signal
import socket
import subprocess  # noqa: TID251  # a program of its own: nothing of kvdeploy is on a node
import sys
import threading
import time
from typing import Any

LISTENING = "0A"
LOOK_S = 0.05
LINGER_S = 1.0
"""For an end whose other one is through to be through too."""
ROUNDS, SIZE = "100", "4096"
"""Pings a rail, and bytes of each."""

LIBC, PR_SET_PDEATHSIG = ctypes.CDLL(None), 1


def tell(**document: object) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def argv(order: dict[str, Any], domain: str, port: int) -> list[str]:
    """Both ends must be told the same of everything but ports and domain; -c compares the bytes."""
    same = [order["program"], "-p", "efa", "-e", "rdm", "-I", ROUNDS, "-S", SIZE, "-c"]
    towards = ["-P", str(port), order["peer"]] if "peer" in order else ["-B", str(port)]
    return [*same, "-d", domain, *towards]


def free_ports(base: int, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as one:
            try:
                one.bind(("", base))
                found.append(base)
            except OSError:
                pass
        base += 1
    return found


def end_with_us() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def listening() -> set[int]:
    lines = pathlib.Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    fields = (line.split() for line in lines)
    return {int(f[1].rpartition(":")[2], 16) for f in fields if f[3] == LISTENING}


def wait_listening(runs: list[subprocess.Popen[str]], ports: set[int], ends: float) -> None:
    """Until all wait, or one cannot, or it is too late: what each says tells why."""
    while not ports <= listening():
        if any(run.poll() is not None for run in runs) or time.monotonic() > ends:
            return
        time.sleep(LOOK_S)  # noqa: TID251


def listen(runs: list[subprocess.Popen[str]]) -> None:
    """Another line, or none, means enough: who still waits then waits for nobody."""
    sys.stdin.readline()
    ends = time.monotonic() + LINGER_S
    while time.monotonic() < ends and any(run.poll() is None for run in runs):
        time.sleep(LOOK_S)  # noqa: TID251
    stop(runs)


def stop(runs: list[subprocess.Popen[str]]) -> None:
    for run in runs:
        run.kill()


def main() -> int:
    order: dict[str, Any] = json.loads(sys.stdin.readline())
    ends = time.monotonic() + order["deadline_s"]
    runs: list[subprocess.Popen[str]] = []

    domains = order["domains"]
    ports = order["ports"] if "peer" in order else free_ports(order["port_base"], len(domains))
    try:
        for domain, port in zip(domains, ports):  # noqa: B905  # Python 3.9 knows no strict
            runs.append(
                subprocess.Popen(
                    argv(order, domain, port),
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    preexec_fn=end_with_us,  # noqa: PLW1509  # libc alone
                )
            )
    except OSError as e:
        stop(runs)
        tell(error=f"{order['program']}: {e.strerror}")
        return 1
    threading.Thread(target=listen, args=(runs,), daemon=True).start()
    if "peer" not in order:
        wait_listening(runs, set(ports), ends)
        tell(ports=ports)
    rails = []
    for run, domain in zip(runs, domains):  # noqa: B905
        try:
            said, _ = run.communicate(timeout=max(0.1, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            run.kill()
            said, _ = run.communicate()
            said += "\nno end in time"
        rails.append({"domain": domain, "code": run.returncode, "said": said[-600:]})
    tell(rails=rails)
    return 0


if __name__ == "__main__":
    sys.exit(main())
