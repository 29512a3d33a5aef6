"""What must be so before a world begins, and what an earlier one left behind. Each problem is one
sentence that says what to do; nothing is changed but by `clean`.
"""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil
import yaml

from kvdeploy.errors import StateError
from tests.hostlab import base, net
from tests.hostlab.lab import demolish
from tests.mirror import terraform_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.hostlab.net import Place

MARK: Final = ".rehearsal"
"""In the folder of a world: all of it is ours to write."""
ENGINE_GIB: Final = 2
"""Of vLLM with builtin:tiny; 1.9 were seen."""
OTHERS_GIB: Final = 2
"""For Terraform, the double and hosts."""
UNUSED: Final = "127.77.77.77"
"""An address of this machine that nothing listens on alone."""


def missing(document: Mapping[str, Any] | None = None) -> str | None:
    """Why there can be no rehearsal of a cluster file on this machine; None: there can."""
    if sys.version_info[:2] != (3, 11):
        return "the engines' lock for CPUs is for Python 3.11, as the hosts' own is: use that one"
    needed = OTHERS_GIB + ENGINE_GIB * engines(document or {})
    free = psutil.virtual_memory().available / 2**30
    if free < needed:
        return (
            f"{engines(document or {})} engines, Terraform and hosts need {needed} GiB of memory, "
            f"and {free:.1f} are free: end what else runs here, or ask for fewer engines"
        )
    if reason := base.missing() or net.missing() or port_taken(base.PORT):
        return reason
    with tempfile.TemporaryDirectory(prefix="kvdeploy-terraform-") as scratch:
        found = terraform_environment(Path(scratch))
    return found if isinstance(found, str) else None


def engines(document: Mapping[str, Any]) -> int:
    fleet = document.get("fleet") or {}
    return sum(int((fleet.get(role) or {}).get("count", 1)) for role in ("prefill", "decode"))


def port_taken(port: int) -> str | None:
    """Labs listen on addresses of their own: only who listens on all is in the way."""
    with socket.socket() as probe:
        try:
            probe.bind((UNUSED, port))
        except OSError:
            return (
                f"port {port} is taken{_listener(port)}, and hosts fetch what they install from "
                "it: end that program, or have it listen on one address alone"
            )
    return None


def _listener(port: int) -> str:
    for one in psutil.net_connections("inet"):
        if one.status == psutil.CONN_LISTEN and one.laddr[1:] == (port,) and one.pid:
            with suppress(psutil.NoSuchProcess):
                return f" by {psutil.Process(one.pid).name()} (pid {one.pid})"
    return ""


def not_ours(root: Path) -> str | None:
    """Why a folder cannot be a world's: it may hold what somebody needs."""
    if root.exists() and not root.is_dir():
        return f"{root} is no folder: name another one (--root)"
    if not root.exists() or (root / MARK).exists() or not any(root.iterdir()):
        return None
    what = "files"
    if (root / ".kvdeploy").exists():
        what = "a cluster's records"
    elif (root / "cluster.yaml").exists():
        what = "a cluster file"
    return (
        f"{root} holds {what} and is no rehearsal's, which would write over them: name a folder "
        "that is empty, or not there yet (--root); -f FILE rehearses a cluster file of yours"
    )


def read(path: Path) -> dict[str, Any]:
    """A cluster file, unchecked: kvdeploy checks what a rehearsal makes of it.

    Raises:
        StateError: it cannot be read.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as e:
        msg = f"{path} cannot be read: {e.strerror}"
        raise StateError(msg) from e
    except yaml.YAMLError as e:
        msg = f"{path} is no YAML: 'kvdeploy check -f {path}' says where"
        raise StateError(msg) from e
    if not isinstance(found, dict):
        msg = f"{path} is no cluster file: 'kvdeploy init' writes one"
        raise StateError(msg)
    return found


# --- what is left ----------------------------------------------------------------------------
def lab_of(root: Path) -> Path:
    return root / "lab"


def alive(root: Path) -> int | None:
    """The process that is a world in this folder."""
    for place in net.places():
        if place.root == lab_of(root) and not place.abandoned:
            return place.owner
    return None


def left() -> list[str]:
    """What worlds, and other labs of this machine, left that were killed; in words."""
    return [_words(place) for place in _abandoned()]


def clean(root: Path, *, all_labs: bool) -> None:
    """End what `left` names, and forget the cluster of a world that was here; without `all_labs`
    only what is of this folder."""
    with net.locked():
        for place in _abandoned():
            if all_labs or place.root == lab_of(root):
                demolish(place)
    if (root / MARK).exists():
        shutil.rmtree(root / ".kvdeploy", ignore_errors=True)
        (root / "world.json").unlink(missing_ok=True)


def _abandoned() -> list[Place]:
    return [place for place in net.places() if place.abandoned]


def _words(place: Place) -> str:
    folders = place.root / "hosts"
    hosts = sorted(p.name for p in folders.iterdir()) if folders.is_dir() else []
    what = f"hosts {', '.join(hosts)}, " if hosts else ""
    return (
        f"{what}bridge {place.bridge} of a run that was killed (pid {place.owner}), in {place.root}"
    )
