"""A process of its own that has ansible-runner run one playbook. Run as a module; its arguments are
the private folder, in which job.json says what to do, and the pid of who starts it.

It prints every event as a line of JSON, and at the end how it went. It ends Ansible when it is
told to end, or when who started it is gone; then it also removes the folder.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.adapters.ansible.private import Private, clear, end_processes

if TYPE_CHECKING:
    from collections.abc import Mapping

LOOK_S: Final = 0.3
"""How often it is looked whether to end."""
END: Final = "kvdeploy_end"

UNWANTED: Final = ("ansible_facts", "invocation", "diff")
"""Large parts of a task's result that nobody reads."""
TOLD_AS_TEXT: Final = ("error", "verbose", "warning", "system_warning")
"""Events that are nothing but the text that Ansible would show."""


class Told:
    """Whether somebody told this process to end."""

    def __init__(self, parent: int) -> None:
        self._signal = threading.Event()
        self._parent = parent
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: self._signal.set())

    @property
    def is_orphan(self) -> bool:
        return os.getppid() != self._parent

    def __bool__(self) -> bool:
        return self._signal.is_set() or self.is_orphan


def main(folder: Path, parent: int) -> int:
    told, private = Told(parent), Private(folder)
    try:
        job = json.loads(private.job.read_text(encoding="utf-8"))
        status, code = run(private, job, told)
        say({"event": END, "status": status, "rc": code})
    finally:
        end_processes(folder)
        if told.is_orphan:
            clear(folder)
    return 0


def run(private: Private, job: Mapping[str, Any], told: Told) -> tuple[str, int]:
    import ansible_runner  # noqa: PLC0415  # after the signals are ours: it takes a while

    def is_canceled() -> bool:
        if told:
            # Ansible's workers are in sessions of their own, where the runner does not look, and
            # it waits for the terminal that they keep open.
            end_processes(private.path)
        return bool(told)

    runner = ansible_runner.run(
        private_data_dir=str(private.runner),
        ident="run",
        project_dir=job["project"],
        playbook=job["playbook"],
        inventory=str(private.inventory),
        cmdline=shlex.join(("-e", f"@{private.variables}", "-e", f"@{private.secrets}")),
        limit=job["limit"] or None,
        tags=job["tags"] or None,
        forks=job["forks"],
        fact_cache_type="memory",
        quiet=True,
        event_handler=forward,
        cancel_callback=is_canceled,
        settings={
            "suppress_ansible_output": True,
            "suppress_output_file": True,
            "pexpect_timeout": LOOK_S,
        },
    )
    return runner.status, runner.rc


def forward(event: dict[str, Any]) -> bool:
    """Say an event; never keep it on disk."""
    data = event.get("event_data", {})
    result = data.get("res")
    if isinstance(result, dict):
        data["res"] = {key: value for key, value in result.items() if key not in UNWANTED}
    kept = {"event": event["event"], "data": data}
    if event["event"] in TOLD_AS_TEXT:
        kept["text"] = event.get("stdout", "")
    say(kept)
    return False


def say(event: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
