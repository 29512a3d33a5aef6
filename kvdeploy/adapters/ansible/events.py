"""What the worker says line by line: what of it goes to the screen, into the log, and into the
report or the error at the end.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.adapters.ansible.report import HostReport, PlayReport
from kvdeploy.adapters.ansible.results import message_of
from kvdeploy.adapters.ansible.unreachable import words_of
from kvdeploy.adapters.ansible.worker import END, TOLD_AS_TEXT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvdeploy.adapters.ansible.mask import Mask
    from kvdeploy.progress import Listener

CHANGED, SAME, BAD = "~", "=", "!"
COUNTS: Final = ("ok", "changed", "skipped", "failures", "dark", "rescued", "ignored")
"""Ansible's own words in its count at the end; dark: not reachable."""

_COLOR: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One task that ended badly on one host."""

    host: str
    role: str
    task: str
    path: str
    """file:line of the task."""
    message: str
    """Of an unreachable host: all that ssh said."""
    unreachable: bool = False


@dataclass(kw_only=True)
class Work:
    """What goes on on one host."""

    role: str = ""
    task: str = ""
    """Empty: between two tasks."""
    since: float = 0.0
    role_tasks: int = 0
    role_changes: int = 0
    role_s: float = 0.0
    """These three are of the role it is in, since it came into it."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Role -> how long all of its tasks took."""


@dataclass(kw_only=True)
class Heard:
    """Everything that one run said."""

    listener: Listener
    mask: Mask
    log: Callable[[Mapping[str, Any]], None] = lambda _: None
    now: Callable[[], float] = time.monotonic
    work: dict[str, Work] = field(default_factory=dict)
    """By host, in the order of their first tasks."""
    failures: list[Failure] = field(default_factory=list)
    """In the order they came, also of hosts that were rescued."""
    stats: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Ansible's count at the end: one of COUNTS -> host -> number."""
    text: list[str] = field(default_factory=list)
    """What was said to people outside of tasks: what a broken playbook says."""
    status: str = ""
    """The worker's last word: successful, failed, canceled; empty when it came to none."""

    def line(self, raw: str) -> None:
        """Take one line of the worker's."""
        try:
            event = self.mask(json.loads(raw))
        except ValueError:
            event = None
        if isinstance(event, dict):
            self._event(event)
        elif raw.strip():
            self.text.append(str(self.mask(raw)))

    def _event(self, event: Mapping[str, Any]) -> None:
        data = event.get("data", {})
        match event.get("event", ""):
            case "runner_on_start":
                self._started(data)
            case "runner_on_ok" | "runner_on_skipped" as kind:
                self._ended(kind, data)
            case "runner_on_failed" | "runner_on_unreachable" as kind:
                self._failed(kind, data)
            case "runner_retry" as kind:
                self._tried(kind, data)
            case "playbook_on_play_start":
                self._end_roles()
            case "playbook_on_stats" as kind:
                self._end_roles()
                self.stats = {what: data.get(what, {}) for what in COUNTS}
                self.log({"event": kind, **self.stats})
            case kind if kind in TOLD_AS_TEXT:
                self._told(kind, event.get("text", ""))
            case kind if kind == END:
                self.status = event["status"]

    # --- tasks --------------------------------------------------------------------------------
    def _started(self, data: Mapping[str, Any]) -> None:
        work = self._enter(data)
        work.task, work.since = data.get("task", ""), self.now()
        self._update(data["host"])

    def _ended(self, kind: str, data: Mapping[str, Any]) -> None:
        work = self._leave(data)
        if kind == "runner_on_ok":
            is_changed = bool(data.get("res", {}).get("changed"))
            work.role_tasks += 1
            work.role_changes += is_changed
            self._log(kind, data, changed=is_changed)
        else:
            self._log(kind, data)
        self._update(data["host"])

    def _failed(self, kind: str, data: Mapping[str, Any]) -> None:
        work, result = self._leave(data), data.get("res", {})
        is_gone = kind == "runner_on_unreachable"
        message = str(result.get("msg", "")) if is_gone else message_of(result)
        self._log(kind, data, message=message)
        if not data.get("ignore_errors"):
            failure = Failure(
                host=data["host"],
                role=data.get("role", ""),
                task=data.get("task", ""),
                path=data.get("task_path", ""),
                message=message,
                unreachable=is_gone,
            )
            self.failures.append(failure)
            told = (
                f"not reachable: {words_of(message)}" if is_gone else f"{failure.task}: {message}"
            )
            self.listener.note(f"   {BAD} {failure.host}: {told}")
            work.role_tasks = 0  # it is not done with the role
        self._update(data["host"])

    def _tried(self, kind: str, data: Mapping[str, Any]) -> None:
        result = data.get("res", {})
        tries = f"try {result.get('attempts', 0) + 1} of {result.get('retries', 0)}"
        self._log(kind, data, message=f"{tries}: {message_of({**result, 'attempts': 1})}")
        self._update(data["host"], tries)

    def _enter(self, data: Mapping[str, Any]) -> Work:
        host, role = data["host"], data.get("role", "")
        work = self.work.setdefault(host, Work())
        if role != work.role:
            self._end_role(host)
            work.role = role
        return work

    def _leave(self, data: Mapping[str, Any]) -> Work:
        work, seconds = self._enter(data), float(data.get("duration", 0))
        work.task = ""
        work.role_s += seconds
        work.seconds[work.role] = work.seconds.get(work.role, 0.0) + seconds
        return work

    def _log(self, kind: str, data: Mapping[str, Any], **more: object) -> None:
        where = {key: data.get(key, "") for key in ("host", "role", "task")}
        took = {"seconds": round(data["duration"], 3)} if "duration" in data else {}
        self.log({"event": kind, **where, **took, **more})

    def _told(self, kind: str, text: str) -> None:
        said = _COLOR.sub("", text).rstrip()
        if said:
            self.log({"event": kind, "message": said})
            if "warning" not in kind:
                self.text.append(said)

    # --- the screen ---------------------------------------------------------------------------
    def _update(self, host: str, more: str = "") -> None:
        busy = [name for name, work in self.work.items() if work.task]
        if not busy:
            return
        shown = host if host in busy else busy[0]
        others = f" and {len(busy) - 1} more" if len(busy) > 1 else ""
        self.listener.update(self._doing(shown) + (f" ({more})" if more else "") + others)

    def _doing(self, host: str) -> str:
        work = self.work[host]
        return ": ".join([host, *([work.role] if work.role else []), work.task])

    def _end_role(self, host: str) -> None:
        """One line that stays, when a host is done with a role that did something there."""
        work = self.work[host]
        if work.role and work.role_tasks:
            changes = f", {work.role_changes} changed" if work.role_changes else ""
            sign = CHANGED if work.role_changes else SAME
            self.listener.note(f"   {sign} {host}: {work.role} ({work.role_s:.1f} s{changes})")
        work.role_tasks, work.role_changes, work.role_s = 0, 0, 0.0

    def _end_roles(self) -> None:
        for host in self.work:
            self._end_role(host)

    # --- the end ------------------------------------------------------------------------------
    def count(self, what: str, host: str) -> int:
        return self.stats.get(what, {}).get(host, 0)

    def under_way(self) -> str:
        """What goes on where, e.g. 'efa: Install the EFA stack (412 s) on decode-0, decode-1'."""
        hosts: dict[str, list[str]] = {}
        for host, work in self.work.items():
            if work.task:
                hosts.setdefault(self._doing(host).removeprefix(f"{host}: "), []).append(host)
        return "; ".join(
            f"{what} ({self.now() - min(self.work[h].since for h in names):.0f} s) "
            f"on {', '.join(names)}"
            for what, names in hosts.items()
        )

    def report(self, playbook: str, seconds: float, order: Sequence[str]) -> PlayReport:
        """Args: order: names of all hosts, in the order in which they are to be told."""
        hosts = tuple(
            HostReport(
                name=host,
                ok=self.count("ok", host),
                changed=self.count("changed", host),
                skipped=self.count("skipped", host),
                failed=self.count("failures", host),
                unreachable=bool(self.count("dark", host)),
                role_seconds={role: round(s, 3) for role, s in work.seconds.items()},
            )
            for host, work in sorted(self.work.items(), key=lambda item: order.index(item[0]))
        )
        return PlayReport(playbook=playbook, seconds=round(seconds, 3), hosts=hosts)
