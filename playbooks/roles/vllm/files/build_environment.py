"""Build a Python environment on a node from a lock file, whole or not at all.

Runs on nodes, under the interpreter that the environment is for, with the standard library alone.
argv: survey, build or verify. stdin: the job, one JSON object. The last line of stdout is one JSON
object; {"error": SENTENCE} and exit code 1 where it cannot be done.

An environment is a folder named by the digest of its lock and Python. Its marker complete.json is
written last, when every file has its recorded size and the probe is content: a build that was
killed is taken up, and never taken for a whole one.
"""

from __future__ import annotations

import csv
import ctypes
import fcntl
import hashlib
import json
import os
import pwd
import re
import shutil
import subprocess  # noqa: TID251  # a program of its own: nothing of kvdeploy is on a node
import sys
import sysconfig
from pathlib import Path
from typing import Any

MARKER = "complete.json"
FOREIGN = ("PYTHON", "VIRTUAL_ENV", "VLLM_", "NIXL_", "UCX_")
"""Beginnings of variables that must reach neither pip nor the probe."""
PROBE_TIMEOUT_S = 300
GIB = 2**30
AGAIN = "Run this again when the cause is gone: it goes on from here."
DAMAGED = r"(?m)^.*(?:is invalid\.|BadZipFile|not a zip|IncompleteRead|DO NOT MATCH THE HASHES).*$"
CAUSES = {
    "No space left on device": "there is no space left below {where}: {free:.1f} GiB are free. "
    "Free some, or give the node a larger disk; then run this again.",
    DAMAGED: "a package arrived damaged ({line}). What pip had kept was thrown away: run this "
    "again, and look at the index when it happens twice.",
    r"name resolution|NewConnectionError|Retrying \(Retry": "pip cannot reach its package index"
    "{wanted}. Check the node's way out and pip's configuration (/etc/pip.conf). {again}",
    r"No matching distribution found": "pip's index has nothing for this Python{wanted}. Check "
    "pip's configuration (/etc/pip.conf): PyTorch's CPU wheels have an index of their own. {again}",
}
"""What pip prints when it fails, most telling first, and what to say of it."""


class Refusal(Exception):  # noqa: N818  # not an error of this program
    """Why it cannot be done, and what to do: one sentence or two."""


def digest(lock: str, python: str, *files: str) -> str:
    """Name a lock's content together with the Python it is for, e.g. '3.12', and added files."""
    lines = (line.strip() for line in lock.splitlines())
    pins = (line for line in lines if line and not line.startswith("#"))
    return hashlib.sha256("\n".join((python, *pins, *files)).encode()).hexdigest()[:12]


def version(text: str) -> tuple[int, ...]:
    """The numbers that a version begins with: '2.13.0+cpu' -> (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(n) for n in found[0].split(".")) if found else ()


def explain(output: str, where: Path, free: float) -> str:
    """Say why pip failed, from what it printed."""
    named = re.search(r"No matching distribution found for (\S+)", output)
    wanted = f" ({named[1]})" if named else ""
    for pattern, sentence in CAUSES.items():
        if found := re.search(pattern, output):
            line = found[0].strip().rstrip(".")
            return sentence.format(where=where, free=free, line=line, wanted=wanted, again=AGAIN)
    return f"pip failed: {_tail(output)}. {AGAIN}"


def judge(found: dict[str, Any], least: dict[str, str], connector: str, *, gpu: bool) -> list[str]:
    """What the probe's answer lacks; `least` holds the lowest good version of each package."""
    problems = [
        f"{name} {found.get(name) or '(missing)'} will not do, {lowest} or newer is needed"
        for name, lowest in least.items()
        if version(str(found.get(name, ""))) < version(lowest)
    ]
    if connector and connector not in found.get("connectors", []):
        problems.append(f"vllm {found.get('vllm', '')} does not know {connector}")
    if gpu and not found.get("gpus"):
        reason = str(found.get("cuda_error") or "it names no reason").rstrip(".")
        problems.append(f"torch finds no usable NVIDIA GPU ({reason})")
    return problems


def half_installed(site: Path) -> list[Path]:
    """Records of packages that a killed pip left, or whose files are not as long as recorded.

    pip takes a package for installed once it has METADATA, which is among the first files written.
    """
    return [
        info
        for info in sorted(site.glob("*.dist-info"))
        if not (info / "INSTALLER").exists() or not _as_recorded(site, info / "RECORD")
    ]


def _as_recorded(site: Path, record: Path) -> bool:
    try:
        with record.open(encoding="utf-8", newline="") as rows:
            sizes = [(row[0], int(row[2])) for row in csv.reader(rows) if row[2:] and row[2]]
        # Bytecode is pip's own, whatever the wheel recorded.
        held = [(site / path, size) for path, size in sizes if not path.endswith(".pyc")]
        return all(path.stat().st_size == size for path, size in held)
    except (OSError, ValueError):
        return False


def survey(job: dict[str, Any]) -> dict[str, Any]:
    """Which interpreter the environment is for, what the system lacks, whether it is whole."""
    own = sysconfig.get_python_version()
    name = next((name for name in job["pythons"] if shutil.which(name)), None)
    if name is None:
        name = job["pythons"][-1]
        return {"python": "", "own": own, "whole": False, "packages": [name, *_lacking(name, job)]}
    program = (
        "import importlib.util as u,json,os,sysconfig as s\n"
        "print(json.dumps({'version':s.get_python_version(),"
        "'venv':bool(u.find_spec('ensurepip') and u.find_spec('venv')),"
        "'headers':os.path.exists(s.get_path('include')+'/Python.h')}))"
    )
    has = json.loads(_run([name, "-I", "-c", program], timeout=60, check=True).stdout)
    home = _home(job, has["version"])
    return {
        "python": str(shutil.which(name)),
        "own": own,
        "home": str(home),
        "whole": _is_whole(home),
        "packages": _lacking(name, job, venv=has["venv"], headers=has["headers"]),
    }


def _lacking(
    python: str, job: dict[str, Any], *, venv: bool = False, headers: bool = False
) -> list[str]:
    """Packages of the distribution that are missing, judged by what they bring."""
    lacking = [] if venv else [f"{python}-venv"]
    for library, package in job["libraries"].items():
        try:
            ctypes.CDLL(library)
        except OSError:
            lacking.append(package)
    if job["compiler"]:  # Triton compiles a stub against Python.h when an engine starts
        lacking += [] if headers else [f"{python}-dev"]
        lacking += [] if shutil.which("gcc") or shutil.which("cc") else ["gcc", "libc6-dev"]
    return lacking


def _home(job: dict[str, Any], python: str) -> Path:
    named = digest(job["lock"], python, *(text for _, text in sorted(job["site_files"].items())))
    return Path(job["root"]) / f"{job['name']}-{named}"


def _is_whole(home: Path) -> bool:
    return (home / MARKER).exists() and os.access(home / "bin/python", os.X_OK)


def build(job: dict[str, Any]) -> dict[str, Any]:
    """Make the environment, or go on with what an earlier build left."""
    home = _home(job, python := sysconfig.get_python_version())
    site = home / "lib" / f"python{python}" / "site-packages"
    cache = home.parent / f".pip-{job['name']}"
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a build whose run was cut off may still be at work
        if _is_whole(home):
            return {"home": str(home), "changed": False}
        if not (home / "made.txt").exists():
            if (free := shutil.disk_usage(home.parent).free / GIB) < job["disk_gib"]:
                msg = (
                    f"the environment needs {job['disk_gib']} GiB below {home.parent}, and "
                    f"{free:.1f} GiB are free. Free some, or give the node a larger disk."
                )
                raise Refusal(msg)
            _run([sys.executable, "-m", "venv", "--clear", str(home)], timeout=600, check=True)
            (home / "made.txt").write_text(f"{sys.executable}\n", encoding="utf-8")
        # Twice at most: what is odd after that is the record itself, as its wheel brought it.
        for _ in range(2):
            for info in half_installed(site):
                shutil.rmtree(info)
            _pip(job, home, cache)
            if not half_installed(site):
                break
        for name, text in job["site_files"].items():
            (site / name).write_text(text, encoding="utf-8")
        found = probe(job, home, gpu=False)
        os.sync()  # a power cut must not leave the marker and lose the files
        part = home / f"{MARKER}.part"
        part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        part.replace(home / MARKER)
    shutil.rmtree(cache, ignore_errors=True)
    return {"home": str(home), "changed": True, "found": found, "removed": _prune(job, home)}


def _pip(job: dict[str, Any], home: Path, cache: Path) -> None:
    """Install the lock. The cache lies beside the environments: a system's disk may be small."""
    (home / "lock.txt").write_text(job["lock"], encoding="utf-8")
    (cache / "tmp").mkdir(parents=True, exist_ok=True)
    argv = [str(home / "bin/python"), "-m", "pip", "install", "--no-deps", "--no-input"]
    argv += ["--progress-bar", "off", "--disable-pip-version-check", *job["pip_args"]]
    done = _run(
        [*argv, "-r", str(home / "lock.txt")],
        env={"PIP_CACHE_DIR": str(cache), "TMPDIR": str(cache / "tmp")},
    )
    if done.returncode != 0:
        output, free = done.stdout + done.stderr, shutil.disk_usage(home.parent).free / GIB
        if re.search(DAMAGED, output):
            shutil.rmtree(cache, ignore_errors=True)
        raise Refusal(explain(output, home.parent, free))


def probe(job: dict[str, Any], home: Path, *, gpu: bool) -> dict[str, Any]:
    """Import what the environment is for, in it, and hold it to the gates."""
    if not job["probe"]:
        return {}
    program = home / "probe.py"
    program.write_text(job["probe"], encoding="utf-8")
    done = _run([str(home / "bin/python"), "-P", str(program), "full"], timeout=PROBE_TIMEOUT_S)
    if done.returncode != 0:
        msg = f"the environment {home} does not import: {_tail(done.stderr, 1)}. {AGAIN}"
        raise Refusal(msg)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if problems := judge(found, job["least"], job["connector"], gpu=gpu):
        msg = f"the environment {home} is not fit: {'; '.join(problems)}."
        raise Refusal(msg)
    return found


def verify(job: dict[str, Any]) -> dict[str, Any]:
    """Look at the environment that is in use."""
    home = Path(job["link"]).resolve()
    if not _is_whole(home):
        msg = f"{job['link']} leads to no whole environment. Run the whole role: it builds one."
        raise Refusal(msg)
    return {"home": str(home), "found": probe(job, home, gpu=job["gpu"])}


def _prune(job: dict[str, Any], home: Path) -> list[str]:
    """Remove all but the new one and the one in use, from which engines may still run."""
    kept = {home, Path(job["link"]).resolve()}
    old = [
        path
        for path in home.parent.glob("*-" + "[0-9a-f]" * 12)
        if path not in kept and path.is_dir() and path.name.rpartition("-")[0] in job["family"]
    ]
    for path in old:
        (path / MARKER).unlink(missing_ok=True)  # first: half of one must not look whole
        shutil.rmtree(path, ignore_errors=True)
        path.with_suffix(".lock").unlink(missing_ok=True)
    return sorted(path.name for path in old)


def _tail(text: str, lines: int = 4) -> str:
    kept = [line.strip() for line in text.splitlines() if line.strip()][-lines:]
    return " | ".join(kept).rstrip(".") or "it said nothing"


def _run(
    argv: list[str],
    *,
    timeout: int | None = None,
    env: dict[str, str] | None = None,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    own = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    own |= {"HOME": pwd.getpwuid(os.getuid()).pw_dir} | (env or {})
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=timeout, check=False, env=own, cwd="/"
        )
    except subprocess.TimeoutExpired:
        msg = f"'{' '.join(argv)}' did not end within {timeout} s. {AGAIN}"
        raise Refusal(msg) from None
    if check and done.returncode != 0:
        msg = f"'{' '.join(argv)}' failed: {_tail(done.stderr or done.stdout)}. {AGAIN}"
        raise Refusal(msg)
    return done


def main() -> int:
    """Do what argv says with the job of stdin."""
    verbs = {"survey": survey, "build": build, "verify": verify}
    code = 0
    try:
        answer = verbs[sys.argv[1]](json.load(sys.stdin))
    except Refusal as e:
        code, answer = 1, {"error": str(e)}
    except OSError as e:
        code, answer = 1, {"error": f"{e.filename or 'the disk'}: {e.strerror}. {AGAIN}"}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
