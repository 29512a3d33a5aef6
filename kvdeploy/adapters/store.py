"""What kvdeploy keeps on disk for one cluster: `.kvdeploy/<cluster>/`.

Writes are atomic: a reader sees the old file or the new one, and a crash leaves no half.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import tempfile
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from kvdeploy import __version__
from kvdeploy.errors import LockedError, StateError
from kvdeploy.model.record import SCHEMA, Record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdeploy.proc import Outcome


def write_text(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Put `text` in the place of `path` in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


class Store:
    """The files of one cluster. Making one touches nothing."""

    def __init__(self, root: Path, cluster: str) -> None:
        self.cluster, self.root = cluster, root
        self.dir = root / ".kvdeploy" / cluster
        self.processes = self.dir / "processes"
        self.router_config = self.dir / "router.json"
        self.runs = self.dir / "runs"
        self.terraform = self.dir / "terraform"
        """Where Terraform runs; a folder."""
        self.terraform_state = self.dir / "terraform.tfstate"
        self.login_key = self.dir / "id"
        """The cluster's own key to its nodes, where nobody named one."""
        self.known_hosts = self.dir / "known_hosts"
        self._record = self.dir / "record.json"

    def exists(self) -> bool:
        """Whether anything of the cluster may still run."""
        return self.processes.exists() or self.terraform.exists()

    def read(self, *, target: str = "local") -> Record:
        """Read the record; a fresh one when there is none.

        Raises:
            StateError: the file is damaged, or a newer kvdeploy wrote it.
        """
        try:
            text = self._record.read_text(encoding="utf-8")
        except FileNotFoundError:
            return Record(cluster=self.cluster, target=target, kvdeploy_version=__version__)
        hint = (
            f"'kvdeploy down' stops what runs and works without it; then delete {self._record} "
            "and run 'kvdeploy up'."
        )
        try:
            record = Record.model_validate_json(text)
        except ValidationError as e:
            msg = f"{self._record}: the record is damaged"
            raise StateError(msg, hint=hint) from e
        if record.schema_version > SCHEMA:
            msg = (
                f"{self._record}: written by kvdeploy {record.kvdeploy_version}, "
                f"which is newer than this one ({__version__})"
            )
            raise StateError(msg, hint="Use that version, or a newer one.")
        return record

    def write(self, record: Record) -> None:
        write_text(self._record, record.model_dump_json(indent=2) + "\n")

    def forget_fleet(self, run: RunLog) -> None:
        """Drop what was known of processes; their logs move to `run`.

        What was built (runtime, model) stays known.
        """
        with suppress(StateError):
            self.write(self.read().without_stages("fleet", "proof"))
        for log in self.processes.glob("*/*log"):
            kept = run.path / "logs" / f"{log.parent.name}.{log.name}"
            kept.parent.mkdir(exist_ok=True)
            log.replace(kept)
        shutil.rmtree(self.processes, ignore_errors=True)

    def forget_nodes(self) -> None:
        """Drop what was known of machines in AWS, once none is left."""
        shutil.rmtree(self.terraform, ignore_errors=True)
        for pattern in (self.terraform_state.name, self.login_key.name, self.known_hosts.name):
            for gone_with_them in self.dir.glob(f"{pattern}*"):
                gone_with_them.unlink()
        with suppress(StateError):
            gone = self.read().without_stages("provision", "configure", "model", "fleet", "proof")
            self.write(gone.model_copy(update={"identity": None, "generations": {}}))

    @contextmanager
    def locked(self, verb: str) -> Iterator[None]:
        """Hold the cluster against other kvdeploy runs. The kernel lets go when we die.

        Raises:
            LockedError: another run holds it.
        """
        self.dir.mkdir(parents=True, exist_ok=True)
        path = self.dir / "lock"
        with path.open("a+", encoding="utf-8") as f:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                f.seek(0)
                holder = f.read().strip() or "another kvdeploy"
                msg = f"cluster {self.cluster!r} is held by {holder}"
                raise LockedError(
                    msg, hint="Wait for it to end, or stop it; then run this again."
                ) from None
            f.truncate(0)
            since = datetime.now(UTC).strftime("%H:%M:%S UTC")
            f.write(f"'kvdeploy {verb}' (pid {os.getpid()}, since {since})")
            f.flush()
            try:
                yield
            finally:
                f.truncate(0)

    def new_run(self, verb: str) -> RunLog:
        """A folder that no other run has: the second of a second is `<utc>.2-<verb>`."""
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        path = self.runs / f"{stamp}-{verb}"
        for nth in itertools.count(2):
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                path = self.runs / f"{stamp}.{nth}-{verb}"
            else:
                break
        return RunLog(path)


class RunLog:
    """`runs/<utc>-<verb>/`: what one run said and ran. Never holds a value of the environment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "run.log"

    def line(self, text: str) -> None:
        stamp = datetime.now(UTC).strftime("%H:%M:%S")
        with self.log.open("a", encoding="utf-8") as f:
            f.write(f"{stamp} {text}\n")

    def command(self, outcome: Outcome) -> None:
        entry = {
            "command": str(outcome.command),
            "env": sorted(outcome.command.env),
            "code": outcome.code,
            "seconds": round(outcome.seconds, 2),
        }
        with (self.path / "commands.jsonl").open("a", encoding="utf-8") as f:
            f.write(json.dumps(entry) + "\n")

    def report(self, name: str, document: dict[str, Any]) -> Path:
        path = self.path / "reports" / f"{name}.json"
        write_text(path, json.dumps(document, indent=2) + "\n")
        return path


def clusters(root: Path) -> list[str]:
    """Names of the clusters that `root` holds something of."""
    base = root / ".kvdeploy"
    if not base.is_dir():
        return []
    return sorted(p.name for p in base.iterdir() if Store(root, p.name).exists())
