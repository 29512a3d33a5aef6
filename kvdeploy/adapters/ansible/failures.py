"""The error that a playbook ends with: which hosts, why, where, and what to do next."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from kvdeploy.adapters.ansible.unreachable import hint_of, words_of
from kvdeploy.errors import KvdeployError, PlaybookError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from kvdeploy.adapters.ansible.events import Failure, Heard
    from kvdeploy.model.inventory import Inventory

AGAIN: Final = "Then run it again: it picks up where it was."
SUCCESSFUL, CANCELED = "successful", "canceled"

_ERROR: Final = re.compile(r"^\[?ERROR\]?[:!]\s*")
_ORIGIN: Final = re.compile(r"^Origin: (.+?:\d+)(?::\d+)?$")
_ORIGIN_SHOWN: Final = re.compile(r"^(\d+ |\s+\^ )")


def explain(
    playbook: str, heard: Heard, inventory: Inventory, *, log: Path, root: Path
) -> KvdeployError | None:
    """None: the playbook did all that it should, on at least one host.

    Args:
        playbook: its name.
        heard: all it said.
        inventory: what it ran on.
        log: the run's log.
        root: the folder of the playbooks, which paths are told from.
    """
    failures = _of_bad_hosts(heard)
    failed = [f for f in failures if not f.unreachable]
    gone = [f for f in failures if f.unreachable]
    addresses = {host.name: host.address for host in inventory.hosts}
    hints = _unique(hint_of(f.message, inventory.connection) for f in gone)
    told = [*_failed(failed, root), *_gone(gone, addresses)]
    if failed:
        many = len({f.host for f in failures})
        on = f" on {many} of {len(heard.work)} hosts:\n  " if len(told) > 1 else ": "
        hint = " ".join((*hints, f"Put that right. {AGAIN}"))
        return PlaybookError(f"{playbook} failed{on}" + "\n  ".join(told), hint=hint, log=log)
    if gone:
        lines = "\n  ".join(["", *told]) if len(told) > 1 else f" {told[0]}"
        return UnreachableError(f"{playbook}:{lines}", hint=" ".join((*hints, AGAIN)), log=log)
    if heard.status == CANCELED or (heard.work and not heard.status):
        busy = heard.under_way()
        doing = f" in the middle of: {busy}" if busy else ""
        return PlaybookError(f"{playbook} was stopped from outside{doing}", hint=AGAIN, log=log)
    if heard.status != SUCCESSFUL:
        msg = f"{playbook} could not be run: {_complaint(heard.text, root)}"
        return PlaybookError(msg, log=log)
    if not heard.work:
        msg = f"{playbook} did nothing: none of its plays and tasks is for the hosts there are"
        return PlaybookError(msg, log=log)
    return None


def timed_out(playbook: str, heard: Heard, timeout_s: float, *, log: Path) -> PlaybookError:
    busy = heard.under_way()
    doing = f" in the middle of: {busy}" if busy else ""
    msg = f"{playbook} took over {timeout_s:.0f} s and was stopped{doing}"
    hint = f"A command under way on a host runs on to its end. {AGAIN}"
    return PlaybookError(msg, hint=hint, log=log)


def _of_bad_hosts(heard: Heard) -> list[Failure]:
    """The failures that hosts ended with, without those that they were rescued from."""
    found = []
    for host in heard.work:
        mine = [f for f in heard.failures if f.host == host]
        if heard.stats:
            keep = heard.count("failures", host) + heard.count("dark", host)
            mine = mine[len(mine) - keep :] if keep else []
        found += mine
    return found


def _failed(failures: Iterable[Failure], root: Path) -> list[str]:
    """One line for all hosts that failed alike. The roles' sentences begin with the host's name."""
    hosts: dict[tuple[str, str], list[str]] = {}
    for f in failures:
        task = ": ".join(filter(None, (f.role, f.task)))
        where = ", ".join(filter(None, (task, short(f.path, root))))
        why = re.sub(rf"^{re.escape(f.host)}(:? )", "", f.message)
        hosts.setdefault((why, where), []).append(f.host)
    return [f"{', '.join(names)}: {why} ({where})" for (why, where), names in hosts.items()]


def _gone(failures: Iterable[Failure], addresses: dict[str, str]) -> list[str]:
    hosts: dict[str, list[str]] = {}
    for f in failures:
        name = f"{f.host} ({addresses.get(f.host, '?')})"
        hosts.setdefault(words_of(f.message), []).append(name)
    return [
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not reachable: {why}"
        for why, names in hosts.items()
    ]


def _complaint(text: list[str], root: Path) -> str:
    """What Ansible said of a playbook that it cannot run: its error, and the place."""
    lines = [line.rstrip() for block in text for line in block.splitlines() if line.strip()]
    start = next((n for n, line in enumerate(lines) if _ERROR.match(line)), None)
    if start is None:
        return lines[-1] if lines else "Ansible ended without a word"
    words, where = [_ERROR.sub("", lines[start])], ""
    for line in lines[start + 1 :]:
        if origin := _ORIGIN.match(line):
            where = f" ({short(origin[1], root)})"
            break
        words.append(line.strip())
    return " ".join(words) + where


def short(path: str, root: Path) -> str:
    """A file of the playbooks as it is called there: roles/efa/tasks/install.yml:12."""
    return path.removeprefix(f"{root}/")


def _unique(hints: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(hints))
