"""One process to run, as a value: the local supervisor starts it, systemd units are rendered
from it. Whatever starts it must put a fresh generation in the place of GENERATION.
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from kvdeploy.model.base import Stored

GENERATION: Final = "@generation@"
"""Stands in argv and env for a word that no earlier start of any engine has used. Peers cache an
engine's coordinates by its id alone, so a restart under an old id would hang every request."""

Role = Literal["prefill", "decode", "router"]


class Readiness(Stored):
    """When the process may be called ready: the URL answers 200 within the time."""

    url: str
    timeout_s: float
    trust: str | None = None
    """File with the certificate that an https URL must show."""


class RestartPolicy(Stored):
    """How often a process that was ready once is started again after it died."""

    max_restarts: int = 5
    window_s: float = 600.0
    backoff_s: float = 1.0
    """Doubled after each restart within the window."""


class LaunchSpec(Stored):
    """Everything needed to start one process, watch it and stop it."""

    name: str
    role: Role
    argv: tuple[str, ...]
    env: dict[str, str] = Field(default_factory=dict)
    """The process's own variables; of the caller's it sees only a few harmless ones."""
    ports: tuple[int, ...] = ()
    """Ports it binds on loopback or `host`; they must be free before it is started."""
    host: str = "127.0.0.1"
    cpus: tuple[int, ...] = ()
    """Cores that all its threads are kept on until it is ready; empty: wherever it likes."""
    ready: Readiness
    restart: RestartPolicy = RestartPolicy()
    stop_grace_s: float = 20.0

    def resolved(self, generation: str) -> LaunchSpec:
        """Put `generation` in."""
        return self.model_copy(
            update={
                "argv": tuple(word.replace(GENERATION, generation) for word in self.argv),
                "env": {k: v.replace(GENERATION, generation) for k, v in self.env.items()},
            }
        )


class ProcessState(Stored):
    """What the supervisor of one process says of it. Written by the supervisor alone."""

    name: str
    phase: Literal["starting", "ready", "backoff", "stopping", "stopped", "failed"]
    digest: str
    """Of the LaunchSpec that it runs."""
    supervisor_pid: int
    pid: int | None = None
    """Leader of the process's own session; every process of the engine is in that session."""
    started_at: float | None = None
    """Unix time, seconds."""
    ready_at: float | None = None
    generation: str = ""
    scratch: str = ""
    """Its temporary folder, gone with it: vLLM leaves its sockets behind."""
    restarts: int = 0
    reason: str = ""
    """Why it failed, stopped or waits, for people."""
