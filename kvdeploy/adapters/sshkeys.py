"""SSH keys that live as long as one machine does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdeploy.errors import ToolError
from kvdeploy.proc import Command

if TYPE_CHECKING:
    from pathlib import Path

    from kvdeploy.proc import Runner


@dataclass(frozen=True, kw_only=True)
class KeyPair:
    """A key without a passphrase, in a file that its owner alone can read."""

    path: Path
    private: str
    public: str
    """One line: kind, key, comment."""


def make_key(runner: Runner, path: Path, *, comment: str) -> KeyPair:
    """Make a key pair at `path` and `path`.pub.

    Raises:
        ToolError: ssh-keygen is missing, or fails.
    """
    argv = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path))
    outcome = runner.run(Command(argv=argv, timeout_s=60))
    if outcome.code:
        msg = f"ssh-keygen could not make a key: {outcome.tail(1)}"
        raise ToolError(msg)
    public = path.with_name(f"{path.name}.pub").read_text(encoding="ascii").strip()
    return KeyPair(path=path, private=path.read_text(encoding="ascii"), public=public)


def forget_key(path: Path) -> None:
    """Remove both files; nothing, when they are gone."""
    path.unlink(missing_ok=True)
    path.with_name(f"{path.name}.pub").unlink(missing_ok=True)
