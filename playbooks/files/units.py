"""What playbooks do with the units of a fleet, a round trip each. Prints one JSON document.

Runs on the node as root, by its own Python (3.9 or newer), with the standard library alone:

    units.py look    < {user, needs, folder, environments, link}    what there is, what is missing
    units.py apply   < {folders, files, stop, absent, enable, starts, check}    all of it as asked
    units.py start   < {files}     what does not run, or runs from something else than its FILE
    units.py reload  < {files}     what runs, and has not read what its FILE says that it reads
    units.py verify  < {files, also}    what does not run as it should; what one more URL answers
    units.py stop    < {pattern}   every unit of that name, for good; what runs all the same

FILE is what launcher.py reads, and has the unit's name. What goes wrong on the way is `error`.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import pwd
import shutil
import signal
import ssl
import subprocess  # noqa: TID251  # stands alone on the node
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

RUN = Path("/run/kvdeploy")
"""Where launcher.py writes NAME.generation, NAME.digest and NAME.reason."""
WANTED = Path("/etc/systemd/system/multi-user.target.wants")
LOOK_EVERY_S = 0.3
LAST_LINES = 20
COMMAND_S = 900
RELOAD_S = 15.0
WATCHED = (
    *("ActiveState", "SubState", "Result", "NRestarts", "Job", "InvocationID"),
    *("ExecMainCode", "ExecMainStatus", "LimitMEMLOCK"),
)


# --- files ---------------------------------------------------------------------------------------
def look(asked: dict[str, Any]) -> dict[str, Any]:
    missing = [path for path in asked["needs"] if not Path(path).exists()]
    try:
        pwd.getpwnam(asked["user"])
    except KeyError:
        missing.insert(0, f"the user {asked['user']}")
    link = asked.get("link", "")
    complete = Path(asked.get("environments", "/nowhere")).glob("*/complete")
    return {
        "missing": missing,
        "there": sorted(p.stem for p in Path(asked["folder"]).glob("*.json")),
        "python": ".".join(map(str, sys.version_info[:2])),
        "can_make_environments": find_spec("ensurepip") is not None,
        "environments": sorted(str(path.parent) for path in complete),
        "link": str(Path(link).readlink()) if Path(link).is_symlink() else "",
    }


def apply(asked: dict[str, Any]) -> dict[str, Any]:
    """Make folders, files and units so; nothing that is so already is touched.

    A run that was killed half-way is taken up by the next: files are whole or not there, and
    systemd is always told of its units anew. `stale` are the FILEs whose units are not ready, or
    run from something else.
    """
    check, changed = asked["check"], []
    for unit in asked["stop"]:
        changed.append(f"{unit} stopped")
        if not check:
            run("systemctl", "disable", "--now", unit)
    for path in map(Path, asked["absent"]):
        if path.exists():
            changed.append(f"{path} removed")
            if not check:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    for entry in [*asked["folders"], *asked["files"]]:
        if not is_so(entry):
            changed.append(entry["path"])
            if not check:
                make(entry)
    if not check:
        run("systemctl", "daemon-reload")
    for unit in asked["enable"]:
        if not (WANTED / unit).exists():
            changed.append(f"{unit} enabled")
            if not check:
                run("systemctl", "enable", unit)
    return {"changed": changed, "stale": [f for f in asked["starts"] if check or not runs(load(f))]}


def is_so(entry: dict[str, Any]) -> bool:
    path = Path(entry["path"])
    try:
        seen = path.stat()
        text = path.read_text(encoding="utf-8") if "text" in entry else None
    except (OSError, ValueError):
        return False
    owners = (seen.st_uid, seen.st_gid) == owners_of(entry)
    return owners and seen.st_mode & 0o7777 == int(entry["mode"], 8) and text == entry.get("text")


def make(entry: dict[str, Any]) -> None:
    path, mode = Path(entry["path"]), int(entry["mode"], 8)
    if "text" not in entry:
        path.mkdir(parents=True, exist_ok=True)
        os.chown(path, *owners_of(entry))
        path.chmod(mode)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    part.touch(0o600)
    part.write_text(entry["text"], encoding="utf-8")
    os.chown(part, *owners_of(entry))
    part.chmod(mode)
    part.replace(path)


def owners_of(entry: dict[str, Any]) -> tuple[int, int]:
    """User and group by number; a group is named after a user, as all of ours are."""
    return pwd.getpwnam(entry["owner"]).pw_uid, pwd.getpwnam(entry["group"]).pw_gid


# --- start ---------------------------------------------------------------------------------------
def start(asked: dict[str, Any]) -> dict[str, Any]:
    """All at once, and wait until each is ready or has failed.

    Returns:
        `started`: names of those that were started now.
        `failed`: of those, why in a sentence and the last lines of that start. One that was never
        ready is stopped, and not left to systemd to try again and again.
    """
    specs = [load(file) for file in asked["files"]]
    waiting = {spec["unit"]: spec["name"] for spec in specs if not runs(spec)}
    stale = [spec["unit"] for spec in specs if spec["unit"] in waiting and not comes(spec)]
    if stale:
        run("systemctl", "reset-failed", *stale)
        run("systemctl", "restart", "--no-block", *stale)
    failed = {}
    while waiting:
        time.sleep(LOOK_EVERY_S)  # noqa: TID251
        for unit, name in list(waiting.items()):
            seen = show(unit)
            if has_failed(seen):
                failed[name] = {"why": explain(name, seen), "lines": journal(seen)}
                run("systemctl", "stop", unit)
                run("systemctl", "reset-failed", unit)
                del waiting[unit]
            elif seen["ActiveState"] == "active" and not has_job(seen):
                del waiting[unit]
    return {"started": [s["name"] for s in specs if s["unit"] in stale], "failed": failed}


def reload(asked: dict[str, Any]) -> dict[str, Any]:
    """Have each read its files again, if it has not yet, without a restart.

    Returns:
        `reloaded`: names of those that did now.
        `failed`: of those that did not, the last lines of their log.
    """
    reloaded: list[str] = []
    failed: dict[str, str] = {}
    for spec in (load(file) for file in asked["files"]):
        if has_read(spec):
            continue
        run("systemctl", "reload", spec["unit"])
        ends = time.monotonic() + RELOAD_S
        while not (read := has_read(spec)) and time.monotonic() < ends:
            time.sleep(LOOK_EVERY_S)  # noqa: TID251
        if read:
            reloaded.append(spec["name"])
        else:
            failed[spec["name"]] = journal(show(spec["unit"]))
    return {"reloaded": reloaded, "failed": failed}


def has_read(spec: dict[str, Any]) -> bool:
    """Whether it says that it has read its files as they are, by their digest in /health.

    kvdeploy/router/reading.py has the same.
    """
    digest = hashlib.sha256()
    for path in spec.get("reads", []):
        digest.update(hashlib.sha256(Path(path).read_bytes()).digest())
    if not spec.get("reads"):
        return True
    try:
        told = json.loads(ask(spec["ready"])[1])
    except ValueError:
        return False
    return isinstance(told, dict) and told.get("configuration") == digest.hexdigest()[:16]


def load(file: str) -> dict[str, Any]:
    return dict(json.loads(Path(file).read_text(encoding="utf-8")))


def runs(spec: dict[str, Any]) -> bool:
    """Whether it is ready, and of this very file."""
    return show(spec["unit"])["ActiveState"] == "active" and is_current(spec)


def comes(spec: dict[str, Any]) -> bool:
    """Whether systemd is starting it already, from this very file: after a boot, or a lost run."""
    seen = show(spec["unit"])
    return seen["ActiveState"] == "activating" and not has_failed(seen) and is_current(spec)


def is_current(spec: dict[str, Any]) -> bool:
    """launcher.py wrote this when it started the process."""
    home = Path(spec["argv"][0]).parent.parent.resolve()
    return known(spec["name"], "digest") == f"{spec['digest']} {home}"


def known(name: str, what: str) -> str:
    try:
        return (RUN / f"{name}.{what}").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def has_failed(seen: dict[str, str]) -> bool:
    if seen["SubState"] == "auto-restart" or seen.get("NRestarts", "0") != "0":
        return True
    return seen["ActiveState"] in {"failed", "inactive"} and not has_job(seen)


def has_job(seen: dict[str, str]) -> bool:
    """Whether systemd has yet to do something with it."""
    return seen.get("Job", "") not in {"", "0"}


def explain(name: str, seen: dict[str, str]) -> str:
    """What launcher.py said, and how the process ended as far as systemd knows."""
    why = known(name, "reason") or f"was not started: systemd says {seen['Result']}"
    code, status = seen.get("ExecMainCode", ""), seen.get("ExecMainStatus", "0")
    if code in {"2", "3"} and status != "15":  # CLD_KILLED, CLD_DUMPED; 15: systemd's own doing
        return f"{name} {why} (killed by {signal.Signals(int(status)).name})"
    return f"{name} {why} (exit {status})" if code == "1" and status != "0" else f"{name} {why}"


def journal(seen: dict[str, str]) -> str:
    """The last lines of that start."""
    argv = ["journalctl", "--quiet", "--no-pager", "--output=cat", f"--lines={LAST_LINES}"]
    return run(*argv, f"_SYSTEMD_INVOCATION_ID={seen.get('InvocationID', '')}").strip()


# --- verify --------------------------------------------------------------------------------------
def verify(asked: dict[str, Any]) -> dict[str, Any]:
    """What is wrong, in words; and the generation of each."""
    wrong, generations = [], {}
    for spec in (load(file) for file in asked["files"]):
        name, seen = spec["name"], show(spec["unit"])
        generations[name] = known(name, "generation")
        if seen["ActiveState"] != "active":
            wrong.append(f"{name} is {seen['ActiveState']}")
        elif not is_current(spec):
            wrong.append(f"{name} runs from something else than its file")
        elif not has_read(spec):
            wrong.append(f"{name} has not read its configuration as it is now")
        elif (status := ask(spec["ready"])[0]) != 200:
            wrong.append(f"{name} answers {spec['ready']['url']} with {status or 'nothing'}")
        elif spec.get("locks_memory") and seen["LimitMEMLOCK"] != "infinity":
            wrong.append(f"{name} may lock {seen['LimitMEMLOCK']} bytes of memory and not all")
        elif not generations[name]:
            wrong.append(f"{name} has no generation")
    also = ask(asked["also"])[1] if "also" in asked else ""
    return {"wrong": wrong, "generations": generations, "also": also}


def ask(ready: dict[str, Any]) -> tuple[int, str]:
    """Status of its `url`, 0 for no answer at all, and what came with it.

    Https is trusted by the certificate in the file `trust` alone, whatever name that is for: we
    ask by an address of this very machine. launcher.py has the same.
    """
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    try:
        if ready.get("trust"):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            context.load_verify_locations(ready["trust"])
            handlers.append(urllib.request.HTTPSHandler(context=context))
        opener = urllib.request.build_opener(*handlers)
        with opener.open(ready["url"], timeout=10) as response:
            return response.status, response.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode("utf-8", "replace")
    except (OSError, ValueError):
        return 0, ""


# --- stop ----------------------------------------------------------------------------------------
def stop(asked: dict[str, Any]) -> dict[str, Any]:
    """Now, and at the next boot.

    Returns:
        `stopped`: units that ran, were about to, or would have at the next boot.
        `left`: 'NAME (pid N) in UNIT' of every process that is still in a cgroup of theirs.
    """
    pattern = asked["pattern"]
    listed = run("systemctl", "list-units", "--all", "--plain", "--no-legend", "--full", pattern)
    loaded = [line.split()[0] for line in listed.splitlines() if line.strip()]
    enabled = [path.name for path in WANTED.glob(pattern)]
    alive = [unit for unit in loaded if show(unit)["ActiveState"] not in {"inactive", "failed"}]
    if enabled:
        run("systemctl", "disable", *enabled)
    if loaded:
        run("systemctl", "stop", *loaded)
        run("systemctl", "reset-failed", *loaded)
    return {"stopped": sorted({*enabled, *alive}), "left": left(pattern)}


def left(pattern: str) -> list[str]:
    found = []
    for folder in (p for p in Path("/proc").iterdir() if p.name.isdigit()):
        try:
            cgroup = (folder / "cgroup").read_text(encoding="utf-8", errors="replace")
            command = (folder / "comm").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            continue
        units = [part for part in cgroup.strip().split("/") if fnmatch.fnmatch(part, pattern)]
        if units:
            found.append(f"{command} (pid {folder.name}) in {units[-1]}")
    return found


# --- all -----------------------------------------------------------------------------------------
def show(unit: str) -> dict[str, str]:
    out = run("systemctl", "show", f"--property={','.join(WATCHED)}", "--", unit)
    return dict(line.partition("=")[::2] for line in out.splitlines())


def run(*argv: str) -> str:
    done = subprocess.run(
        argv, capture_output=True, text=True, errors="replace", check=False, timeout=COMMAND_S
    )
    return done.stdout


COMMANDS = {f.__name__: f for f in (look, apply, start, reload, verify, stop)}

if __name__ == "__main__":
    try:
        answer = COMMANDS[sys.argv[1]](json.load(sys.stdin))
    except (OSError, KeyError, subprocess.SubprocessError) as e:
        answer = {"error": f"{type(e).__name__}: {e}"}
    sys.stdout.write(f"{json.dumps(answer)}\n")
