"""Network namespaces: one for each member of a fleet, and between them a hub that can drop packets.

Owns what it makes and removes it whatever happens. Wants root and iproute2. The hub forwards
between its members; a rule there swallows what one sends another, silently, as a broken network
does. Who lives in the hub reaches every member.
"""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

INTERFACE = "eth0"
"""Of every member."""


def run(*words: str) -> None:
    subprocess.run(words, check=True)


class Net:
    """The members of `names`, in the namespaces `PREFIX-NAME` around `PREFIX-hub`."""

    def __init__(self, prefix: str, names: Sequence[str]) -> None:
        self.prefix, self.names = prefix, tuple(names)

    def space(self, name: str) -> str:
        return f"{self.prefix}-{name}"

    def address(self, name: str) -> str:
        return f"10.213.{self.names.index(name) + 1}.2"

    def enter(self, name: str) -> tuple[str, ...]:
        """Words that run a program where `name` lives; `hub` is one as well."""
        return ("ip", "netns", "exec", self.space(name))

    @contextmanager
    def made(self) -> Iterator[None]:
        try:
            self._add(self.space("hub"))
            run(*self.enter("hub"), "sysctl", "-qw", "net.ipv4.ip_forward=1")
            for number, name in enumerate(self.names, 1):
                self._connect(number, name)
            yield
        finally:
            there = subprocess.run(("ip", "netns", "list"), capture_output=True, text=True).stdout
            for line in there.splitlines():
                if line.startswith(f"{self.prefix}-"):
                    run("ip", "netns", "del", line.split()[0])

    def cut(self, one: str, other: str) -> None:
        """Drop every packet between the two, both ways. Called in the hub."""
        self._rules("add", one, other)

    def heal(self, one: str, other: str) -> None:
        self._rules("del", one, other)

    def rules(self) -> list[str]:
        found = subprocess.run(("ip", "rule"), capture_output=True, text=True, check=True)
        return found.stdout.splitlines()

    def _rules(self, verb: str, one: str, other: str) -> None:
        for a, b in ((one, other), (other, one)):
            pair = ("from", self.address(a), "to", self.address(b))
            run("ip", "rule", verb, *pair, "priority", "100", "blackhole")

    def _add(self, space: str) -> None:
        run("ip", "netns", "add", space)
        run("ip", "-n", space, "link", "set", "lo", "up")

    def _connect(self, number: int, name: str) -> None:
        space, ours = self.space(name), f"to{number}"
        self._add(space)
        peer = ("peer", "name", INTERFACE, "netns", space)
        run("ip", "-n", self.space("hub"), "link", "add", ours, "type", "veth", *peer)
        for at, link, last in ((self.space("hub"), ours, 1), (space, INTERFACE, 2)):
            run("ip", "-n", at, "addr", "add", f"10.213.{number}.{last}/24", "dev", link)
            run("ip", "-n", at, "link", "set", link, "up")
        run("ip", "-n", space, "route", "add", "default", "via", f"10.213.{number}.1")
