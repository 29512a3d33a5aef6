"""Runs playbooks."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.adapters.ansible.environment import build_environment, search_path
from kvdeploy.adapters.ansible.events import Heard
from kvdeploy.adapters.ansible.failures import explain, timed_out
from kvdeploy.adapters.ansible.inventory import (
    as_data,
    check_inventory,
    chosen,
    render_inventory,
)
from kvdeploy.adapters.ansible.mask import Mask
from kvdeploy.adapters.ansible.private import clear_abandoned, private_folder
from kvdeploy.adapters.ansible.ssh import CONNECT_S, bastion_argv, check_tools
from kvdeploy.adapters.ansible.unreachable import hint_of, words_of
from kvdeploy.adapters.shipped import playbooks_source
from kvdeploy.errors import CheckError, ToolError, UnreachableError
from kvdeploy.proc import Command, LocalRunner
from kvdeploy.progress import Listener, Mute

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvdeploy.adapters.ansible.private import Private
    from kvdeploy.adapters.ansible.report import PlayReport
    from kvdeploy.model.inventory import Inventory
    from kvdeploy.proc import Runner

WORKER: Final = "kvdeploy.adapters.ansible.worker"
PROGRAM: Final = "ansible-playbook"
FORKS_MAX: Final = 64
"""Hosts that are worked on at once; each takes a process here."""
GRACE_S: Final = 20.0
"""How long the worker may take to end what it started."""
ALL_OF_IT: Final = ("",)
"""As a prefix of variables: every one."""


@dataclass(frozen=True, kw_only=True)
class Play:
    """One run of a playbook."""

    playbook: str
    """Its name in the folder of playbooks, e.g. nodes.yml."""
    inventory: Inventory
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Go before all others of the same name."""
    secrets: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """As variables; their values are nowhere but in a private file. Tasks that use them need
    `no_log: true`."""
    tags: tuple[str, ...] = ()
    limit: tuple[str, ...] = ()
    """Hosts and groups; empty: all."""
    timeout_s: float = 3600.0


class Ansible:
    """Runs playbooks, one at a time.

    Args:
        log: file that gets a line of JSON for everything that happens.
        playbooks: their folder; None: kvdeploy's own.
        runner: starts what is to be started.
    """

    def __init__(
        self, log: Path, playbooks: Path | None = None, *, runner: Runner | None = None
    ) -> None:
        self.log = log
        self._playbooks = playbooks
        self._runner = runner or LocalRunner()
        self.listener: Listener = Mute()
        """Told what goes on; whoever has a step under way puts its line here."""

    def run(self, play: Play) -> PlayReport:
        """Run a playbook to its end, on every host as far as it gets.

        When it is interrupted, nothing of it goes on here; a command that is under way on a host
        comes to its end there.

        Raises:
            CheckError: the inventory has no hosts, or a key is missing.
            ToolError: a program or the playbook is missing.
            PlaybookError: a task failed on a host, time ran out, or the playbook is broken.
            UnreachableError: nothing failed, but a host was not reached.
        """
        check_inventory(play.inventory, play.limit)
        playbooks = (self._playbooks or playbooks_source()).resolve()
        _check_there(play, playbooks)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.touch(mode=0o600)
        clear_abandoned()
        started = time.monotonic()
        heard = Heard(listener=self.listener, mask=Mask(play.secrets), log=self._write)
        with private_folder() as private:
            is_aws = play.inventory.connection.ssm_region is not None
            environment = build_environment(os.environ, private, playbooks, aws=is_aws)
            _write_job(private, play, playbooks)
            self._write({"event": "start", "playbook": play.playbook, "limit": play.limit})
            self._open_bastion(private, play.inventory, environment)
            argv = (sys.executable, "-P", "-m", WORKER, str(private.path), str(os.getpid()))
            worker = Command(
                argv=argv,
                cwd=private.path,
                env=environment,
                drop_env=ALL_OF_IT,
                timeout_s=play.timeout_s,
                grace_s=GRACE_S,
                output=private.events,
            )
            outcome = self._runner.run(worker, on_line=heard.line)
        seconds = time.monotonic() - started
        self._write({"event": "end", "status": heard.status, "seconds": round(seconds, 3)})
        if outcome.timed_out:
            raise timed_out(play.playbook, heard, play.timeout_s, log=self.log)
        error = explain(play.playbook, heard, play.inventory, log=self.log, root=playbooks)
        if error is not None:
            raise error
        return heard.report(play.playbook, seconds, [host.name for host in play.inventory.hosts])

    def _open_bastion(
        self, private: Private, inventory: Inventory, environment: Mapping[str, str]
    ) -> None:
        """Connect to the bastion, if there is one: every host shares that connection.

        Raises:
            UnreachableError: it cannot be reached.
        """
        connection = inventory.connection
        if connection.bastion is None or connection.ssm_region is not None:
            return
        self.listener.update(f"connecting to the bastion {connection.bastion}")
        command = Command(
            argv=bastion_argv(connection, private.control),
            env=environment,
            drop_env=ALL_OF_IT,
            timeout_s=2 * CONNECT_S,
            output=private.path / "bastion.txt",
        )
        outcome = self._runner.run(command)
        if outcome.code:
            msg = f"the bastion {connection.bastion} is not reachable: {words_of(outcome.stdout)}"
            raise UnreachableError(msg, hint=hint_of(outcome.stdout, connection), log=self.log)

    def _write(self, entry: Mapping[str, Any]) -> None:
        line = json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **entry})
        with self.log.open("a", encoding="utf-8") as f:
            f.write(line + "\n")


def _check_there(play: Play, playbooks: Path) -> None:
    """See that all that the run needs here is here."""
    path, connection = search_path(os.environ), play.inventory.connection
    if shutil.which(PROGRAM, path=path) is None or find_spec("ansible_runner") is None:
        msg = "Ansible is not installed beside kvdeploy"
        raise ToolError(msg, hint=f"{sys.executable} -m pip install ansible-core ansible-runner")
    check_tools(connection, which=lambda name: shutil.which(name, path=path))
    if not (playbooks / play.playbook).is_file():
        good = ", ".join(sorted(found.name for found in playbooks.glob("*.yml")))
        msg = f"{playbooks} has no playbook {play.playbook}"
        raise ToolError(msg, hint=f"There are: {good}.")
    key = connection.private_key
    if key is not None and not Path(key).expanduser().is_file():
        msg = f"there is no SSH key {key}"
        raise CheckError(msg, hint="Name the key that the machines were launched with.")


def _write_job(private: Private, play: Play, playbooks: Path) -> None:
    private.write(private.inventory, render_inventory(play.inventory, private.control))
    private.write(private.variables, as_data(dict(play.variables)))
    private.write(private.secrets, as_data(dict(play.secrets)))
    job = {
        "project": str(playbooks),
        "playbook": play.playbook,
        "limit": ":".join(play.limit),
        "tags": ",".join(play.tags),
        "forks": min(len(chosen(play.inventory, play.limit)), FORKS_MAX),
    }
    private.write(private.job, job)
