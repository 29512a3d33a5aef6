"""What the role has to know of a node, and to write on it, each in one round trip.

  node.py look ASKED   JSON: which files, packages and units are not as they should be; reads only
  node.py write        the files that are told on stdin; prints their paths

A file is checked before it takes the place of the one that works. Ends with 1 and a sentence on
stderr where one cannot be written or does not pass.
"""

from __future__ import annotations

import grp
import hashlib
import json
import os
import shlex
import shutil
import stat
import subprocess  # noqa: TID251 (on its own on a node)
import sys
import tempfile
import urllib.request
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

UTC = timezone.utc  # noqa: UP017 (Python 3.10 has no datetime.UTC)
FORMAT = "%a %Y-%m-%d %H:%M:%S.%f %Z"


def run(*argv: str) -> str:
    """What a program printed; what it printed before it failed, too."""
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False).stdout


def differs(path: str, mode: str, group: str, sha256: str) -> bool:
    """Whether a file is not there as it should be, in content, mode or owner."""
    try:
        state = os.lstat(path)
        content = Path(path).read_bytes()
        owners = (state.st_uid, grp.getgrgid(state.st_gid).gr_name)
    except (OSError, KeyError):
        return True
    right = stat.S_ISREG(state.st_mode) and stat.S_IMODE(state.st_mode) == int(mode, 8)
    same = hashlib.sha256(content).hexdigest() == sha256
    return not (right and same and owners == (0, group))


def missing(packages: list[str]) -> list[str]:
    """Those that dpkg does not call installed, half-configured ones among them."""
    told = run(
        "dpkg-query", "--show", "--showformat", "${Package} ${db:Status-Status}\n", *packages
    )
    installed = {line.split()[0] for line in told.splitlines() if line.endswith(" installed")}
    return [name for name in packages if name not in installed]


def written(path: str) -> float:
    """When a file was last written, Unix seconds; 0 when there is none."""
    try:
        return Path(path).stat().st_mtime
    except OSError:
        return 0.0


def stale(unit: str, reads: list[str]) -> bool:
    """Whether a unit does not run, is not enabled, or runs since before something that it reads."""
    shown = ("ActiveState", "UnitFileState", "ActiveEnterTimestamp", "NeedDaemonReload")
    told = run("systemctl", "show", "--timestamp=us+utc", f"--property={','.join(shown)}", unit)
    state = dict(line.split("=", 1) for line in told.splitlines() if "=" in line)
    if (state.get("ActiveState"), state.get("UnitFileState")) != ("active", "enabled"):
        return True
    since = datetime.strptime(state["ActiveEnterTimestamp"], FORMAT).replace(tzinfo=UTC)
    newest = max(written(path) for path in reads)
    return state["NeedDaemonReload"] == "yes" or newest > since.timestamp()


def unread(server: dict[str, Any]) -> bool:
    """Whether Prometheus runs and has not read its configuration since that was last written."""
    if not server:
        return False
    try:
        url = f"{server['url']}/api/v1/status/runtimeinfo"
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310
            told = json.load(answer)["data"]
    except (OSError, ValueError, KeyError):
        return False
    # Nanoseconds, which datetime does not know.
    at, _, fraction = told["lastConfigTime"].rstrip("Z").partition(".")
    read = datetime.fromisoformat(at).replace(tzinfo=UTC).timestamp()
    read += float(f"0.{fraction or 0}")
    newest = max(written(path) for path in server["reads"])
    return newest > read or not told["reloadConfigSuccess"]


def look(asked: dict[str, Any]) -> dict[str, Any]:
    return {
        "files": [path for path, *rest in asked["files"] if differs(path, *rest)],
        "packages": missing(asked["packages"]),
        "units": [unit for unit, reads in asked["units"].items() if stale(unit, reads)],
        "reload": unread(asked["server"]),
    }


def write(file: dict[str, str]) -> None:
    """Raises OSError, and RuntimeError when the file's own check says no."""
    path = Path(file["path"])
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    descriptor, part = tempfile.mkstemp(prefix=".kvdeploy-", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as out:  # noqa: PTH123 (it is open already)
            out.write(file["text"])
        shutil.chown(part, 0, file["group"])
        Path(part).chmod(int(file["mode"], 8))
        if check := file.get("check"):
            words = [part if word == "%s" else word for word in shlex.split(check)]
            done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
            if done.returncode:
                said = (done.stdout + done.stderr).replace(part, str(path))
                msg = f"'{check}' does not accept {path}: {' '.join(said.split())}"
                raise RuntimeError(msg)
        Path(part).replace(path)
    finally:
        Path(part).unlink(missing_ok=True)


def main() -> int:
    if sys.argv[1] == "look":
        sys.stdout.write(json.dumps(look(json.loads(sys.argv[2]))))
        return 0
    for file in json.load(sys.stdin):
        try:
            write(file)
        except (OSError, LookupError, RuntimeError) as e:
            sys.stderr.write(f"{e}")
            return 1
        sys.stdout.write(f"{file['path']}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
