"""Throw-away signing keys, in the way vendors sign."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.hostlab.shell import run

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self


class Key:
    """A new key; gone, with its agent, when the context ends."""

    def __init__(self, owner: str) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="kvlab-gpg-"))  # short: it holds sockets
        self._home.chmod(0o700)
        self._gpg(
            "--quick-gen-key", f"{owner} <vendor@example.invalid>", "ed25519", "sign", "never"
        )
        listing = self._gpg("--with-colons", "--fingerprint")
        lines = (line.split(":") for line in listing.splitlines())
        self.fingerprint = next(words[9] for words in lines if words[0] == "fpr")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        run("gpgconf", "--homedir", self._home, "--kill", "all", check=False)
        shutil.rmtree(self._home, ignore_errors=True)

    def _gpg(self, *argv: str | Path) -> str:
        return run(
            "gpg", "--homedir", self._home, "--batch", "--yes", "--passphrase", "", *argv
        ).stdout

    def export(self, target: Path) -> None:
        """The public half, armored."""
        self._gpg("--armor", "--output", target, "--export", self.fingerprint)

    def sign(self, source: Path, target: Path) -> None:
        """A detached signature."""
        self._gpg("--local-user", self.fingerprint, "--output", target, "--detach-sign", source)

    def clearsign(self, source: Path, target: Path) -> None:
        self._gpg("--local-user", self.fingerprint, "--output", target, "--clear-sign", source)
