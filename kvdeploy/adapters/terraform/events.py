"""What `terraform ... -json` says line by line, and what of it goes to the screen.

Source: Terraform's "Machine-Readable UI" page, format version 1.2.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.model.infra import Action, ResourceChange, ResourceDone

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvdeploy.progress import Listener

SIGNS: Final = {"create": "+", "update": "~", "delete": "-", "import": "=", "read": "?"}
PLANNED: Final = {
    "create": Action.CREATE,
    "update": Action.UPDATE,
    "replace": Action.REPLACE,
    "delete": Action.DESTROY,
    "import": Action.IMPORT,
}
QUIET: Final = frozenset({"read"})
"""Actions that change nothing, so that nobody needs to see each."""
INWARD: Final = frozenset({"terraform_data"})
"""Types that are nothing outside Terraform's state."""


@dataclass(frozen=True, kw_only=True)
class Diagnostic:
    """One error or warning of Terraform or its provider."""

    severity: str
    summary: str
    detail: str = ""
    address: str = ""

    @property
    def text(self) -> str:
        return f"{self.summary}\n{self.detail}"


@dataclass(kw_only=True)
class Heard:
    """Everything that one command said."""

    listener: Listener
    diagnostics: list[Diagnostic] = field(default_factory=list)
    planned: list[ResourceChange] = field(default_factory=list)
    done: list[ResourceDone] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Addresses of resources that ended in an error."""
    outputs: dict[str, Any] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)
    """Lines that were no JSON: what a crash or a broken configuration says."""
    working: dict[str, str] = field(default_factory=dict)
    """Address -> action of what is being worked on."""

    @property
    def errors(self) -> list[Diagnostic]:
        return [d for d in self.diagnostics if d.severity == "error"]

    def line(self, text: str) -> None:
        """Take one line of output."""
        try:
            event = json.loads(text)
        except ValueError:
            if text.strip():
                self.plain.append(text)
            return
        if isinstance(event, dict):
            self._event(event)

    def _event(self, event: Mapping[str, Any]) -> None:
        kind = event.get("type", "")
        if kind == "diagnostic":
            self.diagnostics.append(_diagnostic(event["diagnostic"]))
        elif kind == "planned_change":
            self._planned(event["change"])
        elif kind == "outputs":
            self.outputs = {k: v.get("value") for k, v in event["outputs"].items()}
        elif kind in _HOOKS:
            self._hook(kind, event["hook"])

    def _planned(self, change: Mapping[str, Any]) -> None:
        action = PLANNED.get(change["action"])
        if action is not None:
            resource = change["resource"]
            self.planned.append(
                ResourceChange(
                    address=resource["addr"], kind=resource["resource_type"], action=action
                )
            )

    def _hook(self, kind: str, hook: Mapping[str, Any]) -> None:
        address, action = hook["resource"]["addr"], hook.get("action", "read")
        if kind == "refresh_start":
            self.listener.update(f"reading {short(address)}")
            return
        if kind == "apply_start":
            self.working[address] = action
        elif kind == "apply_complete":
            self.working.pop(address, None)
            seconds, found = float(hook.get("elapsed_seconds", 0)), str(hook.get("id_value", ""))
            self.done.append(
                ResourceDone(address=address, action=action, id=found, seconds=seconds)
            )
            if action not in QUIET and hook["resource"].get("resource_type") not in INWARD:
                known = f" {found}" if found else ""
                sign = SIGNS.get(action, action)
                self.listener.note(f"   {sign} {short(address)}{known} ({seconds:.0f} s)")
        elif kind == "apply_errored":
            self.working.pop(address, None)
            self.failed.append(address)
            self.listener.note(f"   ! {short(address)}: failed")
        self.listener.update(self._waiting())

    def _waiting(self) -> str:
        """E.g. 'making aws_instance decode-0 and 3 more'."""
        if not self.working:
            return ""
        address, action = next(reversed(self.working.items()))
        verb = {"create": "making", "delete": "removing", "update": "changing"}.get(action, action)
        more = f" and {len(self.working) - 1} more" if len(self.working) > 1 else ""
        return f"{len(self.done)} done; {verb} {short(address)}{more}"


_HOOKS: Final = frozenset(
    {"apply_start", "apply_progress", "apply_complete", "apply_errored", "refresh_start"}
)


def _diagnostic(found: Mapping[str, Any]) -> Diagnostic:
    return Diagnostic(
        severity=found["severity"],
        summary=found["summary"],
        detail=found.get("detail", ""),
        address=found.get("address", ""),
    )


def node_of(address: str) -> str:
    """The node of an instance: module.nodes.aws_instance.this["decode-0"] -> decode-0."""
    return short(address).removeprefix("instance ")


def short(address: str) -> str:
    """module.nodes.aws_instance.this["decode-0"] -> instance decode-0."""
    last = re.sub(r"^(module\.[\w-]+(\[[^\]]*\])?\.)+", "", address)
    found = re.fullmatch(
        r"(?:data\.)?(?:aws_|terraform_)?(\w+)\.(\w+)(?:\[\"?([^\]\"]*)\"?\])?", last
    )
    if found is None:
        return last
    kind, name, key = found.groups()
    words = [kind, *([name] if name != "this" else []), *([key] if key not in {None, "0"} else [])]
    return " ".join(words)
