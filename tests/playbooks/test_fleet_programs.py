"""The programs that run engines and router on a node, without a node."""

from __future__ import annotations

import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from kvdeploy.model.launch import GENERATION

if TYPE_CHECKING:
    from collections.abc import Iterator

PLAYBOOKS: Final = Path(__file__).parents[2] / "playbooks"
LAUNCHER: Final = PLAYBOOKS / "files/launcher.py"
UNITS: Final = PLAYBOOKS / "files/units.py"
TELL: Final = "import json,os,sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"


class Node:
    """A folder in the place of /run/kvdeploy, and one process described in it."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.spec: dict[str, Any] = {
            "name": "decode-0",
            "argv": [sys.executable, "-c", TELL, f"id.{GENERATION}.x", "plain"],
            "needs": [],
            "ports": [],
            "host": "127.0.0.1",
            "cpus": [],
            "ready": {"url": "http://127.0.0.1:1/health", "timeout_s": 2},
            "digest": "d1",
        }

    def launch(self, command: str, **env: str) -> subprocess.CompletedProcess[str]:
        file = self.run / "decode-0.json"
        file.write_text(json.dumps(self.spec))
        return subprocess.run(
            [sys.executable, "-I", str(LAUNCHER), command, str(file)],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            env={"PATH": os.environ["PATH"], "RUNTIME_DIRECTORY": str(self.run), **env},
        )

    def known(self, what: str) -> str:
        path = self.run / f"decode-0.{what}"
        return path.read_text().strip() if path.exists() else ""


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@contextmanager
def listening(status: int = 200) -> Iterator[int]:
    """A port that is taken, by a server that answers so."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


# --- the start -------------------------------------------------------------------------------
def test_the_mark_is_replaced_in_arguments_and_environment_and_nothing_else(node: Node) -> None:
    ran = node.launch("exec", ID=f"<{GENERATION}>", OTHER="@ $x")
    argv, env = json.loads(ran.stdout.splitlines()[-1])
    generation = node.known("generation")
    assert re.fullmatch(r"[0-9a-f]{15}", generation)
    assert argv == [f"id.{generation}.x", "plain"]
    assert (env["ID"], env["OTHER"]) == (f"<{generation}>", "@ $x")
    assert ran.stdout.startswith(f"decode-0: starting, generation {generation}\n")
    assert (node.run / "decode-0.generation").stat().st_mode & 0o777 == 0o644
    assert (node.run / "decode-0.digest").stat().st_mode & 0o777 == 0o600


def test_no_two_starts_have_one_generation(node: Node) -> None:
    seen = []
    for _ in range(3):
        node.launch("exec")
        seen.append(node.known("generation"))
    assert len(set(seen)) == 3


def test_what_runs_is_known_by_its_file_and_the_environment_behind_the_link(node: Node) -> None:
    for name in ("one", "two"):
        (node.run / name / "bin").mkdir(parents=True)
        (node.run / name / "bin/python").symlink_to(sys.executable)
    link = node.run / "runtime"
    node.spec["argv"][0] = str(link / "bin/python")
    for name in ("one", "two"):
        link.unlink(missing_ok=True)
        link.symlink_to(name)
        node.launch("exec")
        assert node.known("digest") == f"d1 {node.run.resolve()}/{name}"


def test_an_interpreter_that_is_missing_is_named(node: Node) -> None:
    node.spec["argv"][0] = "/nowhere/bin/python"
    ran = node.launch("exec")
    assert ran.returncode == 1
    assert node.known("reason") == "cannot start: /nowhere/bin/python: No such file or directory"


# --- before ----------------------------------------------------------------------------------
def test_a_taken_port_is_told_with_who_has_it(node: Node) -> None:
    with listening() as port:
        node.spec["ports"] = [port]
        ran = node.launch("check")
    name = Path(f"/proc/{os.getpid()}/comm").read_text().strip()
    reason = f"cannot start: port {port} is taken by {name} (pid {os.getpid()})"
    assert (ran.returncode, node.known("reason")) == (1, reason)
    assert ran.stdout == f"decode-0 {reason}\n"


def test_a_port_that_becomes_free_in_time_is_waited_for(node: Node) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        node.spec["ports"] = [s.getsockname()[1]]
        threading.Timer(1, s.close).start()
        assert node.launch("check").returncode == 0


def test_an_address_of_another_machine_is_told(node: Node) -> None:
    node.spec |= {"host": "192.0.2.1", "ports": [18100]}
    node.launch("check")
    assert node.known("reason") == "cannot start: this machine does not have the address 192.0.2.1"


def test_weights_that_are_gone_are_told(node: Node) -> None:
    node.spec["needs"] = ["/nowhere/config.json"]
    node.launch("check")
    assert node.known("reason") == (
        "cannot start: /nowhere/config.json is missing; run nodes.yml to have it again"
    )


def test_a_good_check_forgets_why_the_last_start_failed(node: Node) -> None:
    (node.run / "decode-0.reason").write_text("old")
    assert node.launch("check").returncode == 0
    assert not (node.run / "decode-0.reason").exists()


# --- after -----------------------------------------------------------------------------------
def test_ready_is_when_the_url_answers_200_whatever_proxy_is_set(node: Node) -> None:
    with listening() as port:
        node.spec["ready"]["url"] = f"http://127.0.0.1:{port}/health"
        ran = node.launch("wait", MAINPID=str(os.getpid()), http_proxy="http://127.0.0.1:1")
    assert (ran.returncode, ran.stdout) == (0, "decode-0: ready\n")


@pytest.mark.parametrize("status", [204, 404, 503])
def test_another_answer_is_not_ready_and_the_wait_ends(node: Node, status: int) -> None:
    with listening(status) as port:
        node.spec["ready"]["url"] = f"http://127.0.0.1:{port}/health"
        ran = node.launch("wait", MAINPID=str(os.getpid()))
    assert (ran.returncode, node.known("reason")) == (1, "was not ready within 2 s")


def test_a_process_that_ends_is_not_waited_for(node: Node) -> None:
    node.spec["ready"]["timeout_s"] = 60
    gone = subprocess.Popen(["true"])  # a zombie: nobody has asked how it ended
    try:
        ran = node.launch("wait", MAINPID=str(gone.pid))
    finally:
        gone.wait()
    assert (ran.returncode, node.known("reason")) == (1, "ended before it was ready")


# --- what a process that runs reads again -----------------------------------------------------
class Reader:
    """A router that reads its files when it is told to, unless it cannot."""

    def __init__(self, folder: Path, *files: Path) -> None:
        self.folder, self.files, self.read = folder, files, ""
        reader = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if (folder / "asked").exists():
                    reader.look()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps({"configuration": reader.read}).encode())

            def log_message(self, format: str, *args: Any) -> None:
                """Says nothing."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.look()

    def look(self) -> None:
        from kvdeploy.router import reading

        self.read = reading.read(self.files[0]).digest

    def reload(self) -> dict[str, Any]:
        fake = self.folder / "bin/systemctl"
        fake.parent.mkdir(exist_ok=True)
        fake.write_text(f'#!/bin/sh\necho "$@" >>{self.folder}/asked\n')
        fake.chmod(0o755)
        file = self.folder / "router.launch.json"
        url = f"http://127.0.0.1:{self.server.server_address[1]}/health"
        spec = {"name": "router", "unit": "r.service", "ready": {"url": url}}
        file.write_text(json.dumps(spec | {"reads": [str(f) for f in self.files]}))
        ran = subprocess.run(
            [sys.executable, "-I", str(UNITS), "reload"],
            check=True,
            capture_output=True,
            text=True,
            input=json.dumps({"files": [str(file)]}),
            env={"PATH": f"{fake.parent}:{os.environ['PATH']}"},
        )
        answer: dict[str, Any] = json.loads(ran.stdout)
        return answer


def test_a_router_is_told_to_read_again_only_what_it_has_not_read(tmp_path: Path) -> None:
    engines = [
        {"name": role, "role": role, "url": "http://127.0.0.1:1"} for role in ("prefill", "decode")
    ]
    keys, config = tmp_path / "keys", tmp_path / "router.json"
    keys.write_text("one\n")
    told = {"host": "127.0.0.1", "port": 1, "served_model": "m", "api_key_file": str(keys)}
    config.write_text(json.dumps(told | {"engines": engines}))
    reader = Reader(tmp_path, config, keys)
    try:
        assert reader.reload() == {"reloaded": [], "failed": {}}
        assert not (tmp_path / "asked").exists()
        keys.write_text("two\n")
        assert reader.reload() == {"reloaded": ["router"], "failed": {}}
        assert (tmp_path / "asked").read_text() == "reload r.service\n"
    finally:
        reader.server.shutdown()
        reader.server.server_close()


# --- files of units ----------------------------------------------------------------------------
def apply(tmp_path: Path, *, check: bool = False, **asked: Any) -> dict[str, Any]:
    """units.py apply, with a systemctl that only remembers."""
    fake = tmp_path / "bin/systemctl"
    if not fake.exists():
        fake.parent.mkdir()
        fake.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\n')
        fake.chmod(0o755)
    whole: dict[str, Any] = {"folders": [], "files": [], "stop": [], "absent": [], "enable": []}
    whole |= {"starts": [], "check": check}
    ran = subprocess.run(
        [sys.executable, "-I", str(UNITS), "apply"],
        check=True,
        capture_output=True,
        text=True,
        input=json.dumps(whole | asked),
        env={"PATH": f"{fake.parent}:{os.environ['PATH']}"},
    )
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


def entry(path: Path, **more: str) -> dict[str, str]:
    return {"path": str(path), "owner": "root", "group": "root", "mode": "0640", **more}


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to root")


@needs_root
def test_files_are_written_once_and_again_only_when_they_differ(tmp_path: Path) -> None:
    folder, file = tmp_path / "etc", tmp_path / "etc/x.env"
    asked: dict[str, Any] = {
        "folders": [entry(folder, mode="0750")],
        "files": [entry(file, text="a=é\n")],
    }
    assert apply(tmp_path, check=True, **asked) == {
        "changed": [str(folder), str(file)],
        "stale": [],
    }
    assert not folder.exists()
    assert apply(tmp_path, **asked) == {"changed": [str(folder), str(file)], "stale": []}
    assert file.read_text() == "a=é\n"
    assert file.stat().st_mode & 0o7777 == 0o640
    assert apply(tmp_path, **asked) == {"changed": [], "stale": []}
    for spoil in (lambda: file.write_text("b"), lambda: file.chmod(0o644), file.unlink):
        spoil()
        assert apply(tmp_path, **asked) == {"changed": [str(file)], "stale": []}
        assert (file.read_text(), file.stat().st_mode & 0o7777) == ("a=é\n", 0o640)
    assert [p.name for p in folder.iterdir()] == ["x.env"]


@needs_root
def test_what_is_no_longer_asked_for_is_stopped_before_it_is_removed(tmp_path: Path) -> None:
    (tmp_path / "x.d").mkdir()
    (tmp_path / "x.d/a").touch()
    absent = [str(tmp_path / "x.d"), str(tmp_path / "never-there")]
    told = apply(tmp_path, stop=["x.service"], absent=absent)
    assert told["changed"] == ["x.service stopped", f"{tmp_path / 'x.d'} removed"]
    assert (tmp_path / "asked").read_text().splitlines() == [
        "disable --now x.service",
        "daemon-reload",
    ]
    assert not (tmp_path / "x.d").exists()


@needs_root
def test_what_cannot_be_written_is_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told = apply(tmp_path, files=[entry(tmp_path / "file/below", text="")])
    assert list(told) == ["error"]
    assert "Not a directory" in told["error"] or "File exists" in told["error"]
