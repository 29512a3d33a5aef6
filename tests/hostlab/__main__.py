"""The lab from a command line: for Molecule's create and destroy, and to try playbooks by hand.

    python -m tests.hostlab bootstrap
    python -m tests.hostlab up --root DIR --hosts prefill-0=p5en,router-0=none --inventory FILE
    python -m tests.hostlab down --root DIR

`up` leaves a process behind that serves the vendors' files; `down` ends it with the hosts.
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

from kvdeploy.polling import wait_for
from tests.hostlab import archive, net, wheelhouse
from tests.hostlab.lab import HostLab
from tests.hostlab.shell import LabError
from tests.hostlab.vendor import Vendor

if TYPE_CHECKING:
    from kvdeploy.model.launch import Role

ROLES: dict[str, Role] = {"prefill": "prefill", "decode": "decode", "router": "router"}


def main() -> int:
    options = _parse()
    try:
        if options.action == "bootstrap":
            archive.ensure(options.distro)
            wheelhouse.ensure(options.distro)
        elif options.action == "up":
            _up(options)
        elif options.action == "serve":
            _serve(options)
        else:
            _down(options.root)
    except LabError as e:
        sys.stderr.write(f"{e}\n")
        return 1
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.hostlab", description=__doc__)
    parser.add_argument("--distro", default=os.environ.get("KVDEPLOY_HOSTLAB_DISTRO", "bookworm"))
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("bootstrap", help="make the base and download packages, if need be")
    up = actions.add_parser("up", help="new hosts")
    up.add_argument("--root", type=Path, required=True, help="a folder of the lab's own")
    up.add_argument("--hosts", required=True, help="NAME=HARDWARE,... such as prefill-0=p5en")
    up.add_argument("--inventory", type=Path, help="where to write Ansible's inventory (JSON)")
    up.add_argument("--fault", action="append", default=[], metavar="HOST:NAME[=VALUE]")
    down = actions.add_parser("down", help="nothing is left")
    down.add_argument("--root", type=Path, required=True)
    serve = actions.add_parser("serve")
    serve.add_argument("--root", type=Path, required=True)
    serve.add_argument("--address", required=True)
    return parser.parse_args()


def _up(options: argparse.Namespace) -> None:
    root = options.root.resolve()
    kinds = dict(entry.split("=", 1) for entry in options.hosts.split(","))
    _down(root)
    began = time.monotonic()
    lab = HostLab(root, options.distro, owned=False)
    lab.up(kinds, hardware=kinds)
    vendor = Vendor.build(root / "vendor", options.distro)
    url = _start_server(root, options.distro, lab.gateway)
    for told in options.fault:
        host, _, fault = told.partition(":")
        lab[host].fault(fault)
    roles = {name: ROLES[name.rpartition("-")[0]] for name in kinds}
    if options.inventory:
        variables: dict[str, Any] = vendor.variables(url)
        options.inventory.parent.mkdir(parents=True, exist_ok=True)
        options.inventory.write_text(lab.ansible_inventory(roles, variables))
    told = " ".join(f"{host.name}={host.address}" for host in lab.hosts)
    sys.stdout.write(f"{told} in {time.monotonic() - began:.1f} s; vendors' files at {url}\n")


def _start_server(root: Path, distro: str, address: str) -> str:
    with (root / "vendor.log").open("wb") as log:
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.hostlab", "--distro", distro),
                *("serve", "--root", root, "--address", address),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    record = {"pid": server.pid, "started": net.started(server.pid)}
    (root / "vendor.pid").write_text(json.dumps(record))

    def answers() -> bool | None:
        if server.poll() is not None:
            msg = f"the vendors' server ended: {(root / 'vendor.log').read_text()}"
            raise LabError(msg)
        return (root / "vendor.url").exists() or None

    if not wait_for(answers, timeout_s=20, interval_s=0.05):
        msg = "the vendors' server does not start"
        raise LabError(msg)
    return (root / "vendor.url").read_text()


def _serve(options: argparse.Namespace) -> None:
    vendor = Vendor.load(options.root / "vendor")
    with vendor.serve(options.address) as url:
        part = options.root / "vendor.part"
        part.write_text(url)
        part.rename(options.root / "vendor.url")
        signal.pause()


def _down(root: Path) -> None:
    root = root.resolve()
    record = root / "vendor.pid"
    if record.exists():
        told = json.loads(record.read_text())
        # Only that very process: its id may be somebody else's by now.
        if net.started(told["pid"]) == told["started"]:
            with suppress(ProcessLookupError):
                os.kill(told["pid"], signal.SIGTERM)
    HostLab(root).down()
    for name in ("vendor.pid", "vendor.url", "vendor.log"):
        (root / name).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
