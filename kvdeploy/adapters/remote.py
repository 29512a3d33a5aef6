"""Nodes over SSH, without Ansible: a program's answer, what a node says of itself, and a way
through it to what listens behind it. What nodes are and hold is changed by playbooks alone.
"""

from __future__ import annotations

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import resources
from typing import TYPE_CHECKING, Final

from kvdeploy import probes
from kvdeploy.adapters.ansible.ssh import check_tools, unwatched_argv
from kvdeploy.adapters.ansible.unreachable import hint_of, words_of
from kvdeploy.adapters.dialogue import Dialogue
from kvdeploy.errors import UnreachableError
from kvdeploy.model.outputs import NodeFacts
from kvdeploy.polling import wait_for
from kvdeploy.proc import Command, spawn_session

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from kvdeploy.model.inventory import Connection, Host
    from kvdeploy.proc import Outcome, Runner

AT_ONCE: Final = 8
"""sshd turns connections away at random when more than ten log in (MaxStartups)."""
ASK_S: Final = 60.0
OPEN_S: Final = 30.0
NO_CONNECTION: Final = 255
"""ssh's own exit code; any other is the program's."""


class Remote:
    """Nodes that are reached in one way."""

    def __init__(self, runner: Runner, connection: Connection, *, log: Path) -> None:
        """`log` is a file for what ssh says of the ways that it keeps open."""
        self._runner, self.connection, self._log = runner, connection, log

    def run(self, host: Host, *argv: str, timeout_s: float = ASK_S) -> Outcome:
        """Run a program on a node.

        Raises:
            UnreachableError: the node does not answer, or does not let us in.
            ToolError: a program that this takes is not here.
        """
        check_tools(self.connection)
        command = Command(argv=unwatched_argv(host, self.connection, *argv), timeout_s=timeout_s)
        outcome = self._runner.run(command)
        if outcome.timed_out:
            msg = f"{host.name} did not answer within {timeout_s:.0f} s"
            raise UnreachableError(msg, hint="See 'kvdeploy status'; then run this again.")
        if outcome.code == NO_CONNECTION:
            raise self._unreachable(host, outcome.stderr)
        return outcome

    def ask(self, hosts: Sequence[Host]) -> dict[str, NodeFacts | UnreachableError]:
        """What nodes say of themselves, all asked at once; or why one does not."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return dict(zip([h.name for h in hosts], pool.map(self._facts, hosts), strict=True))

    def _facts(self, host: Host) -> NodeFacts | UnreachableError:
        program = (resources.files(probes) / "node.py").read_text(encoding="utf-8")
        try:
            outcome = self.run(host, "python3", "-I", "-c", program, host.address)
            if outcome.code:
                msg = f"{host.name} does not tell of itself: {outcome.tail(1)}"
                return UnreachableError(msg)
            return NodeFacts.model_validate_json(outcome.stdout.splitlines()[-1])
        except UnreachableError as e:
            return e

    def follow(self, host: Host, *argv: str, log: Path) -> None:
        """Run a program on a node until it or we end; what it says goes to `log`."""
        check_tools(self.connection)
        argv = unwatched_argv(host, self.connection, *argv)
        spawn_session(argv, env=os.environ, log=log)

    def talk(self, host: Host, *argv: str) -> Dialogue:
        """Run a program on a node and speak with it.

        Raises:
            ToolError: ssh is not here.
        """
        check_tools(self.connection)
        return Dialogue(unwatched_argv(host, self.connection, *argv), env=os.environ, log=self._log)

    @contextmanager
    def way(
        self, through: Host, targets: Sequence[tuple[str, int]]
    ) -> Iterator[Mapping[tuple[str, int], int]]:
        """Ports of 127.0.0.1 that lead through a node to addresses and ports that it can reach.

        Raises:
            UnreachableError: the node does not answer, or does not forward.
        """
        check_tools(self.connection)
        ports = dict(zip(targets, _free_ports(len(targets)), strict=True))
        forwards = [f"127.0.0.1:{here}:{a}:{p}" for (a, p), here in ports.items()]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        said_before = self._log.stat().st_size if self._log.exists() else 0
        argv = unwatched_argv(through, self.connection, forwards=forwards)
        process = spawn_session(argv, env=os.environ, log=self._log)
        try:

            def opened() -> bool | None:
                if process.poll() is not None:
                    with self._log.open("rb") as log:
                        log.seek(said_before)
                        raise self._unreachable(through, log.read().decode("utf-8", "replace"))
                return all(_listens(port) for port in ports.values()) or None

            if not wait_for(opened, timeout_s=OPEN_S, interval_s=0.05):
                msg = f"no way through {through.name} was open after {OPEN_S:.0f} s"
                raise UnreachableError(msg, log=self._log)
            yield ports
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()

    def _unreachable(self, host: Host, said: str) -> UnreachableError:
        msg = f"{host.name} ({host.address}) is not reachable: {words_of(said)}"
        return UnreachableError(msg, hint=hint_of(said, self.connection))


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _listens(port: int) -> bool:
    with socket.socket() as one:
        one.settimeout(1)
        return one.connect_ex(("127.0.0.1", port)) == 0
