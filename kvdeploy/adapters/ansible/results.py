"""What a task's result says of why it failed, as one sentence."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

ITEMS_MAX: Final = 5
"""Items of a loop that are named."""
LINES_MAX: Final = 3
"""Last lines of a command's output that are shown."""
HIDDEN: Final = "it handles secrets, so what it said is not shown"

_PREFIX: Final = re.compile(
    r"^(?:Task failed:|Action failed:|Module failed:|Unexpected \w+ error:"
    r"|Failed to connect to the host via ssh:|Data could not be sent to remote host \S+"
    r" Make sure this host can be reached over ssh:)\s*"
)
"""What Ansible puts in front of an error's own words."""
_SAYS_NOTHING: Final = re.compile(r"(The command exited with a )?non-zero return code\.?|")
"""The message of every failed command: ansible-core 2.21 has the longer form, 2.19 the shorter."""


def message_of(result: Mapping[str, Any]) -> str:
    """Why a task failed: its own message, a command's last words, or those of a loop's items."""
    if "censored" in result:
        return HIDDEN
    items = [item for item in result.get("results", ()) if _is_bad(item)]
    if items:
        told = "; ".join(f"{_label(item)}: {message_of(item)}" for item in items[:ITEMS_MAX])
        more = f"; and {len(items) - ITEMS_MAX} more" if len(items) > ITEMS_MAX else ""
        return told + more
    tries = result.get("attempts", 1)
    after = f" (tried {tries} times)" if tries > 1 else ""
    return _words(result) + after


def plain(text: str) -> str:
    """An error's own words on one line."""
    text, had = " ".join(text.split()), ""
    while text != had:
        had, text = text, _PREFIX.sub("", text)
    return text


def _words(result: Mapping[str, Any]) -> str:
    said = result.get("msg") or result.get("reason") or ""
    text = plain(" ".join(map(str, said)) if isinstance(said, list) else str(said))
    if "rc" in result and _SAYS_NOTHING.fullmatch(text):
        last = _last_lines(result)
        return f"exit code {result['rc']}{f': {last}' if last else ', and it said nothing'}"
    if text.startswith("MODULE FAILURE"):
        text = _last_lines(result) or text
    wrong = result.get("argument_errors")
    if wrong:
        return "; ".join(map(str, wrong))
    return text or "it did not say why"


def _last_lines(result: Mapping[str, Any]) -> str:
    """The end of what a program said: on stderr, else on stdout."""
    for key in ("stderr", "module_stderr", "stdout", "module_stdout"):
        lines = [line.strip() for line in str(result.get(key) or "").splitlines()]
        lines = [line for line in lines if line]
        if lines:
            return " / ".join(lines[-LINES_MAX:])
    return ""


def _is_bad(item: object) -> bool:
    return isinstance(item, dict) and bool(item.get("failed") or item.get("unreachable"))


def _label(item: Mapping[str, Any]) -> str:
    return str(item.get("_ansible_item_label", item.get("item", "an item")))
