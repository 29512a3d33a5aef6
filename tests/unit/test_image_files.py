"""The container files: what can be told of them without building one."""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from images import pins
from kvdeploy.adapters.package import PARTS
from kvdeploy.model import catalog
from kvdeploy.planning.environment import EFA
from kvdeploy.proc import Command, LocalRunner, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "images"
FILES = ("engine", "router")
KNOWN = {"ARG", "FROM", "RUN", "COPY", "ENV", "USER", "WORKDIR", "ENTRYPOINT"}


def text_of(name: str) -> str:
    return (IMAGES / f"Containerfile.{name}").read_text(encoding="utf-8")


def instructions(name: str) -> Iterator[tuple[str, str]]:
    """Each instruction and its words; continued lines are one, comments are gone."""
    lines = [line for line in text_of(name).splitlines() if not line.startswith("#")]
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        if line.strip():
            word, _, rest = line.partition(" ")
            assert word in KNOWN, line
            yield word, rest.strip()


def copied(name: str) -> list[str]:
    """What of the repository goes into it."""
    return [p for word, rest in instructions(name) if word == "COPY" for p in rest.split()[:-1]]


# --- pins ------------------------------------------------------------------------------------
def test_the_pins_are_those_of_catalog_and_layout(capsys: pytest.CaptureFixture[str]) -> None:
    assert pins.main(["--check"]) == 0, capsys.readouterr().err


def test_pins_that_are_out_of_date_are_told_and_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pins, "FILE", tmp_path / "pins.env")
    assert pins.main(["--check"]) == 1
    assert "python -m images.pins" in capsys.readouterr().err
    assert pins.main([]) == 0
    assert pins.main(["--check"]) == 0
    monkeypatch.setattr(catalog, "EFA_INSTALLER", "9.9.9")
    assert pins.main(["--check"]) == 1


def test_a_pin_is_one_line_that_every_container_tool_reads() -> None:
    for name, value in pins.pins().items():
        assert re.fullmatch(r"[A-Z_]+", name)
        assert re.fullmatch(r"\S+", value), name


def test_every_pin_is_used_and_every_argument_is_pinned_and_used() -> None:
    used: set[str] = set()
    for file in FILES:
        declared: set[str] = set()
        after_from = False
        for word, rest in instructions(file):
            if word == "ARG":
                assert "=" not in rest, f"{file}: {rest} has a value beside pins.env"
                declared.add(rest)
                continue
            asked = set(re.findall(r"\$\{([A-Z_]+)\}", rest))
            assert asked <= declared, f"{file}: {word} uses {asked - declared}, declared nowhere"
            used |= asked
            if word == "FROM":
                assert not after_from
                declared, after_from = set(), True  # ARGs before FROM are not seen after it
        assert declared - used == set()
    assert used == pins.pins().keys()


# --- no second truth -------------------------------------------------------------------------
@pytest.mark.parametrize("file", FILES)
def test_no_version_and_no_place_of_a_node_is_written_into_a_container_file(file: str) -> None:
    text = "\n".join(f"{w} {r}" for w, r in instructions(file))
    assert re.findall(r"(?<![\w.])\d+\.\d+(?:\.\d+)*", text) == []
    for name, value in pins.pins().items():
        if value.startswith("/"):
            hits = re.findall(rf"{re.escape(value)}(?![\w-])", text)
            assert hits == [], f"{file} says {value}, which is {name}"


@pytest.mark.parametrize("file", FILES)
def test_what_is_copied_exists_and_the_build_may_see_it(file: str) -> None:
    ignore = (IMAGES / f"Containerfile.{file}.dockerignore").read_text().splitlines()
    assert "*" in ignore
    allowed = [line[1:] for line in ignore if line.startswith("!")]
    assert copied(file)
    for path in copied(file):
        assert (ROOT / path).exists(), path
        assert any(path == one or path.startswith(f"{one}/") for one in allowed), path
    for one in allowed:
        assert any(path == one or path.startswith(f"{one}/") for path in copied(file)), one


def test_the_routers_code_is_what_a_node_gets() -> None:
    code = {p.removeprefix("kvdeploy/") for p in copied("router") if "/locks/" not in p}
    assert {p for p in code if not p.startswith(("playbooks", "images"))} == set(PARTS)


def test_an_engine_is_told_the_same_of_efa_as_on_a_node() -> None:
    (env,) = (rest for word, rest in instructions("engine") if word == "ENV")
    told = dict(pair.split("=", 1) for pair in env.split())
    told["LD_LIBRARY_PATH"] = pins.pins()["LIBFABRIC"]
    assert EFA.items() <= told.items()


# --- safe ------------------------------------------------------------------------------------
@pytest.mark.parametrize("file", FILES)
def test_a_container_runs_as_nobody_special_and_holds_no_secret(file: str) -> None:
    told = list(instructions(file))
    assert [rest for word, rest in told if word == "USER"] == ["${USER_ID}"]
    assert int(pins.pins()["USER_ID"]) > 0
    last = [word for word, _ in told]
    assert last.index("USER") < last.index("ENTRYPOINT")
    assert all(word not in {"RUN", "COPY"} for word in last[last.index("USER") :])
    # pip's configuration may hold credentials: lent to one step, never copied.
    pip = [rest for word, rest in told if word == "RUN" and " pip install" in rest]
    assert len(pip) == 1
    assert pip[0].startswith("--mount=type=secret,id=pip,target=/etc/pip.conf ")
    assert "--no-deps" in pip[0]
    text = text_of(file)
    assert not re.search(r"(?i)token|password|api[_-]?key|AWS_", text)


def test_the_installer_is_run_only_after_its_signature_was_checked() -> None:
    (run,) = (
        rest for word, rest in instructions("engine") if "install.sh" in rest and word == "RUN"
    )
    steps = [step.strip() for step in run.split("&&")]
    fetch = next(i for i, step in enumerate(steps) if "fetch.py" in step)
    install = next(i for i, step in enumerate(steps) if "install.sh" in step)
    assert fetch < install
    assert "${EFA_KEY_FINGERPRINT}" in steps[fetch]
    assert steps[install].endswith("--skip-kmod --skip-limit-conf --no-verify")


# --- the entrypoint --------------------------------------------------------------------------
def start(tmp_path: Path, *argv: str) -> Outcome:
    """start.sh as in a container: the launcher lies beside it."""
    folder, run = tmp_path / "libexec", tmp_path / "run"
    folder.mkdir()
    run.mkdir()
    for source in (IMAGES / "start.sh", ROOT / "playbooks/files/launcher.py"):
        (folder / source.name).write_bytes(source.read_bytes())
    (folder / "start.sh").chmod(0o755)
    env = {"RUNTIME_DIRECTORY": str(run)}
    return LocalRunner().run(Command(argv=(str(folder / "start.sh"), *argv), env=env, timeout_s=30))


def described(tmp_path: Path, port: int) -> str:
    """The file that a node's unit would start from."""
    program = "import sys; print('told', sys.argv[1])"
    document = {
        "name": "decode-0",
        "argv": [sys.executable, "-c", program, "demo.@generation@"],
        "needs": [],
        "ports": [port],
        "host": "127.0.0.1",
        "cpus": [],
        "ready": {"url": "", "timeout_s": 1.0},
        "digest": "d",
    }
    path = tmp_path / "decode-0.json"
    path.write_text(json.dumps(document))
    return str(path)


@pytest.mark.real_process
def test_a_container_starts_what_the_unit_would_under_a_fresh_generation(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    outcome = start(tmp_path, described(tmp_path, port))
    assert outcome.code == 0, outcome.stderr
    kept = (tmp_path / "run/decode-0.generation").read_text().strip()
    assert outcome.stdout.splitlines()[-1] == f"told demo.{kept}"


@pytest.mark.real_process
def test_a_container_does_not_start_on_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        outcome = start(tmp_path, described(tmp_path, port))
    assert outcome.code == 1
    assert f"port {port} is taken by" in outcome.stdout
    assert "told" not in outcome.stdout


@pytest.mark.real_process
def test_a_container_without_a_file_says_what_it_wants(tmp_path: Path) -> None:
    outcome = start(tmp_path)
    assert outcome.code == 2
    assert "start.sh takes one file" in outcome.stderr
