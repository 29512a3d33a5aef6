"""Runtimes and hub models: looked at with real interpreters, built with a scripted venv and pip."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvdeploy.adapters.local import hub, runtime
from kvdeploy.errors import CheckError, ToolError
from kvdeploy.model.outputs import RuntimeOutputs
from kvdeploy.proc import Command, LocalRunner, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvdeploy.model.outputs import Device

pytestmark = pytest.mark.real_process

GOOD: dict[str, Any] = {
    "python": "3.11.9",
    "vllm": "0.32.0+cpu",
    "nixl": "1.5.1",
    "torch": "2.13.0",
    "cuda": False,
    "connectors": ["NixlConnector", "NixlPushConnector"],
}
HINT = (
    "Set runtime.python to an interpreter that has vllm and nixl (runtime.env can give it "
    "PYTHONPATH), or leave it out: then kvdeploy builds one."
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVDEPLOY_CACHE", str(folder))
    return folder


def script(path: Path, text: str) -> str:
    """An interpreter that does what `text` says, whatever it is asked to run."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def saying(path: Path, document: object, *, before: str = "") -> str:
    lines = f"{before}\n{json.dumps(document)}"
    return script(path, f"cat <<'END'\n{lines}\nEND")


def look(python: str, device: Device = "cpu", **env: str) -> RuntimeOutputs:
    return runtime.inspect(python, device, env, LocalRunner())


def refused(python: str, device: Device = "cpu", **env: str) -> CheckError:
    with pytest.raises(CheckError) as caught:
        look(python, device, **env)
    return caught.value


# --- looking at a runtime --------------------------------------------------------------------
def test_a_fit_runtime_is_described_by_what_it_imports(tmp_path: Path) -> None:
    python = saying(tmp_path / "python", GOOD, before="WARNING: something to ignore")
    assert look(python, PYTHONPATH="/opt/site") == RuntimeOutputs(
        python=python,
        device="cpu",
        built=False,
        versions={"python": "3.11.9", "vllm": "0.32.0+cpu", "nixl": "1.5.1", "torch": "2.13.0"},
        env={"PYTHONPATH": "/opt/site"},
    )


@pytest.mark.parametrize(
    ("over", "device", "problems"),
    [
        (
            {"vllm": "0.23.9"},
            "cpu",
            "vllm 0.23.9 is too old: 0.24 brought push",
        ),
        (
            {"vllm": "dev"},
            "cpu",
            "vllm dev is too old: 0.24 brought push",
        ),
        (
            {"nixl": "1.3.1"},
            "cpu",
            "nixl 1.3.1 is too old: 1.3.2 or newer is needed",
        ),
        (
            {"connectors": ["NixlConnector"]},
            "cpu",
            "its vllm 0.32.0+cpu does not know NixlPushConnector",
        ),
        (
            {},
            "cuda",
            "its torch finds no usable NVIDIA GPU, but runtime.device is cuda",
        ),
        (
            {"vllm": "0.9.0", "nixl": "0.1.0", "connectors": None},
            "cuda",
            "vllm 0.9.0 is too old: 0.24 brought push; "
            "nixl 0.1.0 is too old: 1.3.2 or newer is needed; "
            "its vllm 0.9.0 does not know NixlPushConnector; "
            "its torch finds no usable NVIDIA GPU, but runtime.device is cuda",
        ),
    ],
    ids=["old vllm", "vllm without a number", "old nixl", "no push", "no CUDA", "all at once"],
)
def test_an_unfit_runtime_is_told_everything_that_is_wrong(
    tmp_path: Path, over: dict[str, Any], device: Device, problems: str
) -> None:
    python = saying(tmp_path / "python", GOOD | over)
    error = refused(python, device)
    assert (error.message, error.hint) == (f"the runtime {python} is not fit: {problems}", HINT)


@pytest.mark.parametrize("vllm", ["0.24.0", "0.24.0rc1", "1.0", "0.100.1+cu130"])
def test_a_vllm_with_push_is_new_enough(tmp_path: Path, vllm: str) -> None:
    assert look(saying(tmp_path / "python", GOOD | {"vllm": vllm})).versions["vllm"] == vllm


def test_cuda_is_fit_where_torch_finds_it(tmp_path: Path) -> None:
    assert look(saying(tmp_path / "python", GOOD | {"cuda": True}), "cuda").device == "cuda"


def test_an_interpreter_without_vllm_shows_what_it_said() -> None:
    error = refused(sys.executable)
    first, *said = error.message.splitlines()
    assert first == f"the runtime {sys.executable} cannot import vllm and nixl:"
    assert said[-1] == "ModuleNotFoundError: No module named 'vllm'"
    assert error.hint == f"Try it by hand: {sys.executable} -c 'import vllm, nixl'"


def test_a_program_that_is_no_interpreter_shows_what_it_said() -> None:
    error = refused("/bin/ls")
    first, *said = error.message.splitlines()
    assert first == "the runtime /bin/ls cannot import vllm and nixl:"
    assert "invalid option -- 'P'" in said[0]


def test_a_program_that_says_something_else_is_no_interpreter() -> None:
    error = refused("/bin/echo")
    assert (error.message, error.hint) == (
        "runtime.python: /bin/echo does not behave like a Python interpreter",
        "Name a Python interpreter, with its whole path.",
    )


@pytest.mark.parametrize("kind", ["missing", "not a program"])
def test_what_cannot_be_run_is_no_interpreter(tmp_path: Path, kind: str) -> None:
    python = tmp_path / "python"
    if kind == "not a program":
        python.write_bytes(b"\x00\x01\x02")
        python.chmod(0o755)
    error = refused(str(python))
    assert (error.message, error.hint) == (
        f"runtime.python: {python} is not a program that can be run",
        "Name a Python interpreter, with its whole path.",
    )


def test_a_runtime_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "PROBE_TIMEOUT_S", 0.2)
    python = script(tmp_path / "python", "sleep 60")
    assert refused(python).message == f"the runtime {python} did not import vllm within 0.2 s"


def test_what_is_in_the_users_shell_does_not_reach_the_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "VLLM_TARGET_DEVICE", "UCX_TLS", "NIXL_X"):
        monkeypatch.setenv(name, "from-the-shell")
    seen = tmp_path / "seen"
    python = script(tmp_path / "python", f"env > {seen}\necho '{json.dumps(GOOD)}'")
    look(python, MARK="ours")
    environ = seen.read_text()
    assert "from-the-shell" not in environ
    assert "MARK=ours" in environ.splitlines()


def test_quick_versions_read_metadata_of_a_real_interpreter() -> None:
    found = runtime.quick_versions(sys.executable, {}, LocalRunner())
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "vllm" not in found


# --- building one ----------------------------------------------------------------------------
@dataclass
class Builder:
    """Answers venv, pip and the probe as the real ones do; refuses every other program."""

    home: Path
    pip_code: int = 0
    pip_stderr: str = ""
    pip_says: tuple[str, ...] = ()
    pip_times_out: bool = False
    venv_code: int = 0
    answer: dict[str, Any] = field(default_factory=lambda: dict(GOOD))
    commands: list[Command] = field(default_factory=list)
    pip_gate: threading.Event | None = None
    in_pip: threading.Event = field(default_factory=threading.Event)

    @property
    def marker(self) -> Path:
        return self.home / "complete.json"

    @property
    def kinds(self) -> list[str]:
        return [kind_of(c) for c in self.commands]

    def run(self, command: Command, *, on_line: Callable[[str], None] | None = None) -> Outcome:
        self.commands.append(command)
        assert not self.marker.exists(), "a runtime is marked as whole before it was looked at"
        code, stdout, stderr, late = 0, "", "", False
        match kind_of(command):
            case "venv":
                code, stderr = self.venv_code, "ensurepip is not available"
                if code == 0:
                    for name in ("python", "pip"):
                        (self.home / "bin").mkdir(parents=True, exist_ok=True)
                        (self.home / "bin" / name).touch()
            case "pip":
                assert on_line is not None
                for line in self.pip_says:
                    on_line(line)
                self.in_pip.set()
                if self.pip_gate is not None:
                    assert self.pip_gate.wait(10)
                code, stderr, late = self.pip_code, self.pip_stderr, self.pip_times_out
            case _:
                stdout = json.dumps(self.answer)
        return Outcome(
            command=command, code=code, stdout=stdout, stderr=stderr, seconds=0, timed_out=late
        )


def kind_of(command: Command) -> str:
    if command.argv[1:3] == ("-m", "venv"):
        return "venv"
    if command.argv[1:4] == ("-m", "pip", "install"):
        return "pip"
    if command.argv[1] == "-P" and command.argv[3] == "full":
        return "probe"
    pytest.fail(f"unexpected command: {command}")


@pytest.fixture
def builder() -> Builder:
    return Builder(runtime.built_python("cpu").parent.parent)


def build(builder: Builder, said: list[str] | None = None) -> RuntimeOutputs:
    said = [] if said is None else said
    return runtime.build("cpu", builder, said.append)


def test_a_runtime_is_a_venv_then_pip_then_an_import(builder: Builder, cache: Path) -> None:
    said: list[str] = []
    outputs = build(builder, said)
    python = str(builder.home / "bin" / "python")
    assert builder.home == cache / "runtimes" / f"cpu-{runtime.lock_digest('cpu')}"
    venv, pip, probe = builder.commands
    assert venv.argv == (sys.executable, "-m", "venv", "--clear", str(builder.home))
    assert pip.argv == (
        *(python, "-m", "pip", "install", "--no-deps", "--no-input", "--progress-bar", "off"),
        *("--disable-pip-version-check", "-r", str(builder.home / "lock.txt")),
    )
    assert probe.argv[0] == python
    assert {"PYTHON", "VIRTUAL_ENV"} <= set(pip.drop_env)
    assert (builder.home / "lock.txt").read_text() == runtime.lock_text("cpu")
    assert (outputs.python, outputs.built, outputs.device) == (python, True, "cpu")
    assert said == ["making the virtual environment", "importing vllm and nixl"]
    assert runtime.is_whole(Path(python))


def test_a_cpu_runtime_asks_for_the_matrix_tiles_at_its_start(builder: Builder) -> None:
    build(builder)
    (hook,) = builder.home.glob("lib/python3.*/site-packages/*.pth")
    program = (
        f"exec({hook.read_text()!r}); import ctypes; leave = ctypes.c_uint64();"
        "ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(leave)); print(leave.value)"
    )
    outcome = LocalRunner().run(Command(argv=(sys.executable, "-c", program)))
    assert outcome.code == 0, outcome.stderr
    if "amx_tile" in Path("/proc/cpuinfo").read_text():
        assert int(outcome.stdout) & 1 << 18


def test_a_whole_runtime_is_taken_as_it_is(builder: Builder) -> None:
    first = build(builder)
    builder.commands.clear()
    assert build(builder) == first
    assert builder.commands == []


def test_a_half_made_environment_is_made_again(builder: Builder) -> None:
    """venv was killed while it installed pip: what is there may look whole."""
    (builder.home / "bin").mkdir(parents=True)
    (builder.home / "bin" / "pip").touch()
    build(builder)
    assert builder.kinds == ["venv", "pip", "probe"]


def test_a_build_is_locked_until_the_last_of_its_programs_has_ended(
    builder: Builder, tmp_path: Path
) -> None:
    """Whoever comes after a killed kvdeploy must not meet a pip that still installs."""
    build(builder)
    venv, pip, probe = builder.commands
    assert len(venv.keep_fds) == len(pip.keep_fds) == 1
    assert probe.keep_fds == ()
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    heard = threading.Event()
    program = "import time; print(1, flush=True); time.sleep(1)"
    command = Command(argv=(sys.executable, "-c", program), keep_fds=(lock,))
    thread = threading.Thread(
        target=lambda: LocalRunner().run(command, on_line=lambda _: heard.set())
    )
    thread.start()
    assert heard.wait(5)
    os.close(lock)  # as if we had been killed
    with (tmp_path / "lock").open() as again:
        with pytest.raises(BlockingIOError):
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
        thread.join()
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_pips_progress_is_told_package_by_package(builder: Builder) -> None:
    total = sum(
        1
        for line in runtime.lock_text("cpu").splitlines()
        if line.strip() and not line.startswith("#")
    )
    builder.pip_says = (
        "Looking in indexes: a, b",
        "Collecting aiohttp==3.14.5",
        "  Downloading aiohttp-3.14.5-cp311.whl (1.7 MB)",
        "Requirement already satisfied: attrs==26.1.0 in ./lib",
        "Installing collected packages: aiohttp, attrs",
    )
    said: list[str] = []
    build(builder, said)
    assert said[1:-1] == [
        f"package 1 of {total}: aiohttp==3.14.5",
        f"package 1 of {total}: downloading aiohttp-3.14.5-cp311.whl, 1.7 MB",
        f"package 2 of {total}: attrs==26.1.0",
        f"installing {total} packages",
    ]


def test_a_pip_that_fails_shows_its_end_and_the_next_build_begins_anew(builder: Builder) -> None:
    builder.pip_code = 1
    builder.pip_stderr = "\n".join(f"line {i}" for i in range(9))
    with pytest.raises(ToolError) as caught:
        build(builder)
    assert caught.value.message == (
        "pip failed (exit 1) while it built the cpu runtime:\n"
        "line 3\nline 4\nline 5\nline 6\nline 7\nline 8"
    )
    assert caught.value.hint == (
        "Run 'kvdeploy up' again when the cause is gone: pip has kept what it downloaded."
    )
    assert not builder.marker.exists()

    builder.commands.clear()
    builder.pip_code = 0
    build(builder)
    # What is there may be half a package that pip would take for a whole one.
    assert builder.kinds == ["venv", "pip", "probe"]
    assert builder.marker.exists()


def test_a_pip_that_finds_no_torch_for_cpus_is_told_where_they_are(builder: Builder) -> None:
    builder.pip_code = 1
    builder.pip_stderr = "ERROR: No matching distribution found for torch==2.13.0+cpu"
    with pytest.raises(ToolError) as caught:
        build(builder)
    assert caught.value.hint == (
        "pip must be able to find PyTorch's CPU wheels: give it their index with "
        "PIP_EXTRA_INDEX_URL or your pip configuration (README, 'PyTorch for CPUs')."
    )


def test_a_pip_that_never_ends_is_given_up(builder: Builder) -> None:
    builder.pip_times_out = True
    with pytest.raises(ToolError) as caught:
        build(builder)
    assert caught.value.message == "pip took over an hour while it built the cpu runtime:\n"


def test_a_python_without_venv_says_how_to_get_it(builder: Builder) -> None:
    builder.venv_code = 1
    with pytest.raises(ToolError) as caught:
        build(builder)
    assert caught.value.message == (
        f"{sys.executable} -m venv --clear {builder.home} failed (exit 1):\n"
        "ensurepip is not available"
    )
    assert caught.value.hint == "On Debian and Ubuntu: apt install python3-venv"


def test_a_runtime_that_does_not_import_is_not_whole(builder: Builder) -> None:
    builder.answer["connectors"] = []
    with pytest.raises(CheckError):
        build(builder)
    assert not builder.marker.exists()
    builder.commands.clear()
    builder.answer["connectors"] = ["NixlPushConnector"]
    build(builder)
    assert builder.kinds == ["venv", "pip", "probe"]


def test_two_builders_build_once(builder: Builder) -> None:
    """The second waits, says so, and finds the first one's work done."""
    builder.pip_gate = threading.Event()
    first = threading.Thread(target=build, args=(builder,))
    first.start()
    assert builder.in_pip.wait(10)
    said: list[str] = []
    waits = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        waits.set()

    found: list[RuntimeOutputs] = []
    second = threading.Thread(target=lambda: found.append(runtime.build("cpu", builder, say)))
    second.start()
    assert waits.wait(10)
    builder.pip_gate.set()
    first.join(10)
    second.join(10)
    assert set(said) == {"another kvdeploy is building this runtime; waiting for it"}
    assert builder.kinds == ["venv", "pip", "probe"]
    assert found[0].built


def test_a_builder_that_waits_too_long_gives_up(
    builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "BUILD_TIMEOUT_S", 0)
    with runtime._building(builder.home, print), pytest.raises(ToolError) as caught:
        build(builder)
    assert caught.value.message == (
        f"another kvdeploy has been building {builder.home} for over an hour"
    )
    assert builder.commands == []


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"KVDEPLOY_CACHE": "/c"}, "/c"),
        ({"KVDEPLOY_CACHE": "", "XDG_CACHE_HOME": "/x"}, "/x/kvdeploy"),
        ({"KVDEPLOY_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/kvdeploy"),
        ({"KVDEPLOY_CACHE": "~/c", "HOME": "/h"}, "/h/c"),
    ],
)
def test_the_cache_is_where_the_user_says(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], folder: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert runtime.cache_dir() == Path(folder)


# --- models from a hub -----------------------------------------------------------------------
def fetch(python: str, said: list[str] | None = None, **how: Any) -> Path:
    outputs = RuntimeOutputs(
        python=python, device="cpu", built=False, versions={}, env={"MARK": "runtime"}
    )
    return hub.ensure_model(
        "org/m",
        revision=how.get("revision"),
        weights=how.get("weights", True),
        python=outputs,
        cache=Path("/c/hub"),
        runner=LocalRunner(),
        say=(said if said is not None else []).append,
    )


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({}, ["org/m", "", "/c/hub", "weights"]),
        ({"revision": "v1", "weights": False}, ["org/m", "v1", "/c/hub", "shape"]),
    ],
)
def test_a_model_is_fetched_by_the_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], words: list[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "mine")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", "/shell")
    seen, asked = tmp_path / "env", tmp_path / "argv"
    python = script(
        tmp_path / "python",
        f'env > {seen}\nfor w in "$@"; do echo "$w"; done > {asked}\n'
        "echo 'Fetching 3 files' >&2\necho\necho '{\"path\": \"/c/hub/snapshot\"}'",
    )
    said: list[str] = []
    assert fetch(python, said, **how) == Path("/c/hub/snapshot")
    assert asked.read_text().splitlines()[2:] == words
    environ = dict(line.partition("=")[::2] for line in seen.read_text().splitlines())
    assert (environ["HF_TOKEN"], environ["MARK"]) == ("mine", "runtime")
    assert not {"HF_HUB_OFFLINE", "PYTHONPATH"} & environ.keys()
    assert said[0] == "fetching org/m unless it is cached"
    assert "fetching org/m: Fetching 3 files" in said


@pytest.mark.parametrize(
    ("does", "why"),
    [
        (
            'echo \'{"error": "401 Client Error", "kind": "GatedRepoError"}\'',
            "401 Client Error (GatedRepoError)",
        ),
        ("echo 'no module' >&2; exit 1", "no module (?)"),
        ("exit 3", "exit 3 (?)"),
    ],
    ids=["no access", "no library", "nothing said"],
)
def test_a_model_that_cannot_be_fetched_says_why(tmp_path: Path, does: str, why: str) -> None:
    with pytest.raises(CheckError) as caught:
        fetch(script(tmp_path / "python", does))
    assert caught.value.message == f"model.id: cannot fetch 'org/m': {why}"
    assert caught.value.hint == (
        "Check the id, HF_TOKEN and the network; or name a local folder (starting with '/' or "
        "'./') or builtin:tiny."
    )


HUB = """
import os, pathlib
def snapshot_download(**asked):
    with open(os.environ["ASKED"], "a") as f:
        f.write(repr(sorted(asked.items())) + chr(10))
    if asked.get("local_files_only") and not pathlib.Path(os.environ["SNAPSHOT"]).exists():
        raise FileNotFoundError("not cached")
    if not asked.get("local_files_only") and os.environ.get("FAILS"):
        raise PermissionError("gated" + chr(10) + "more")
    return os.environ["SNAPSHOT"]
"""
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))})


def fetch_with_library(tmp_path: Path, *, weights: bool, fails: bool = False) -> list[str]:
    """Run the real probe with a scripted library; return what that was asked, call by call."""
    (tmp_path / "huggingface_hub.py").write_text(HUB)
    asked = tmp_path / "asked"
    env = {
        "PYTHONPATH": str(tmp_path),
        "ASKED": str(asked),
        "SNAPSHOT": str(tmp_path / "snapshot"),
        "FAILS": "1" if fails else "",
    }
    outputs = RuntimeOutputs(python=sys.executable, device="cpu", built=False, versions={}, env=env)
    found = hub.ensure_model(
        "org/m",
        revision=None,
        weights=weights,
        python=outputs,
        cache=Path("/c/hub"),
        runner=LocalRunner(),
        say=lambda _: None,
    )
    assert found == tmp_path / "snapshot"
    return asked.read_text().splitlines()


@pytest.mark.parametrize(
    ("files", "weights", "asks_the_network"),
    [
        (None, True, True),
        (("config.json",), True, True),
        (("config.json",), False, False),
        ((), False, True),
        (("config.json", "model.safetensors"), True, False),
        (("config.json", "model.safetensors.index.json", *SHARDS), True, False),
        (("config.json", "model.safetensors.index.json", SHARDS[0]), True, True),
        (("config.json", SHARDS[0]), True, True),
    ],
    ids=[
        "nothing is cached",
        "the shape is, and weights are wanted",
        "the shape is, and is wanted",
        "an empty folder is",
        "all of one file",
        "all of two shards",
        "one of two shards",
        "one of two shards, and no index yet",
    ],
)
def test_the_network_is_asked_only_for_what_is_not_cached_whole(
    tmp_path: Path, files: tuple[str, ...] | None, *, weights: bool, asks_the_network: bool
) -> None:
    for name in files or ():
        (tmp_path / "snapshot").mkdir(exist_ok=True)
        (tmp_path / "snapshot" / name).write_text(INDEX if name.endswith("index.json") else "{}")
    if files == ():
        (tmp_path / "snapshot").mkdir()
    calls = fetch_with_library(tmp_path, weights=weights)
    assert ["('local_files_only', True)" in call for call in calls] == (
        [True, False] if asks_the_network else [True]
    )
    assert all(("'*.safetensors'" in call) is weights for call in calls)


def test_a_refusing_hub_is_quoted_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckError) as caught:
        fetch_with_library(tmp_path, weights=True, fails=True)
    assert caught.value.message == "model.id: cannot fetch 'org/m': gated (PermissionError)"
