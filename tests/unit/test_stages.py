from __future__ import annotations

import http.server
import json
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from kvdeploy.adapters.local import runtime
from kvdeploy.adapters.local.processes import Observed
from kvdeploy.adapters.local.supervisor import digest_of
from kvdeploy.adapters.store import write_text
from kvdeploy.errors import CheckError, FleetError
from kvdeploy.model.launch import LaunchSpec, ProcessState, Readiness
from kvdeploy.model.outputs import FleetOutputs, ModelOutputs, RuntimeOutputs
from kvdeploy.model.spec import ClusterSpec
from kvdeploy.router import reading
from kvdeploy.router.tls import read_tls
from kvdeploy.stages.asking import Asker
from kvdeploy.stages.fleet import LocalFleetStage, tail
from kvdeploy.stages.model import ModelStage, default_name, dtype_of, local_path
from kvdeploy.stages.preflight import look_at_tls
from kvdeploy.stages.runtime import RuntimeStage, named_python
from tests.certificates import write_certificate
from tests.conftest import FakeRunner
from tests.line import Line

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator, Mapping

    from kvdeploy.adapters.local.processes import Processes
    from kvdeploy.stages.base import Results


def cluster(**top: Any) -> ClusterSpec:
    return ClusterSpec.model_validate({"name": "demo", **top})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVDEPLOY_CACHE", str(folder))
    return folder


# --- runtime ---------------------------------------------------------------------------------
FULL = {
    "python": "3.11.9",
    "vllm": "0.32.0",
    "nixl": "1.5.1",
    "torch": "2.13.0",
    "cuda": False,
    "connectors": ["NixlConnector", "NixlPushConnector"],
}
QUICK = {"python": "3.11.9", "vllm": "0.32.0", "nixl": "1.5.1", "torch": "2.13.0"}
NAMED = {"python": "venv/bin/python", "env": {"PYTHONPATH": "/opt/site"}}


def probing(how: str, answer: Mapping[str, object]) -> FakeRunner:
    return FakeRunner((("-P", how), (0, f"a warning\n\n{json.dumps(answer)}\n")))


def known(**over: Any) -> dict[str, Any]:
    versions = {"python": "3.11.9", "vllm": "0.32.0", "nixl": "1.5.1", "torch": "2.13.0"}
    outputs = RuntimeOutputs(python="/r/python", device="cpu", built=False, versions=versions)
    return outputs.model_copy(update=over).model_dump()


def test_a_named_runtime_depends_on_its_name_its_environment_and_the_device(
    tmp_path: Path,
) -> None:
    stage = RuntimeStage(cluster(runtime=NAMED), FakeRunner(), "cpu", tmp_path)
    assert stage.inputs({}) == {
        "device": "cpu",
        "python": str(tmp_path / "venv/bin/python"),
        "env": {"PYTHONPATH": "/opt/site"},
        "lock": None,
    }
    assert stage.title == "check the runtime venv/bin/python"


def test_a_built_runtime_depends_on_its_lock(tmp_path: Path) -> None:
    cpu, cuda = (
        RuntimeStage(cluster(), FakeRunner(), device, tmp_path) for device in ("cpu", "cuda")
    )
    assert cpu.inputs({}) == {
        "device": "cpu",
        "python": None,
        "env": {},
        "lock": runtime.lock_digest("cpu"),
    }
    assert cpu.inputs({})["lock"] != cuda.inputs({})["lock"]
    assert (cpu.title, cuda.title) == ("build the cpu runtime", "build the cuda runtime")


def test_a_named_runtime_is_looked_at_and_kept_as_it_was_called(tmp_path: Path) -> None:
    runner, line = probing("full", FULL), Line()
    stage = RuntimeStage(cluster(runtime=NAMED), runner, "cpu", tmp_path)
    assert stage.apply({}, line) == {
        "python": str(tmp_path / "venv/bin/python"),
        "device": "cpu",
        "built": False,
        "versions": QUICK,
        "env": {"PYTHONPATH": "/opt/site"},
    }
    assert line.said == ["importing vllm and nixl"]
    (command,) = runner.commands
    assert command.env["PYTHONPATH"] == "/opt/site"
    assert "PYTHON" in command.drop_env


@pytest.mark.parametrize(
    ("now", "holds"),
    [
        (QUICK, True),
        (QUICK | {"torch": "9"}, True),
        (QUICK | {"nixl": "1.6.0"}, False),
        (QUICK | {"python": "3.12.0"}, False),
        ({"python": "3.11.9", "nixl": "1.5.1"}, False),
    ],
    ids=["the same", "another torch", "another nixl", "another python", "vllm is gone"],
)
def test_a_named_runtime_holds_while_its_packages_are_the_same(
    tmp_path: Path,
    now: Mapping[str, str],
    holds: bool,  # noqa: FBT001
) -> None:
    stage = RuntimeStage(cluster(runtime=NAMED), probing("quick", now), "cpu", tmp_path)
    assert stage.holds(known()) is holds


def test_a_vllm_that_comes_by_pythonpath_need_not_be_installed(tmp_path: Path) -> None:
    now = {"python": "3.11.9", "nixl": "1.5.1"}
    stage = RuntimeStage(cluster(runtime=NAMED), probing("quick", now), "cpu", tmp_path)
    assert stage.holds(known(env={"PYTHONPATH": "/opt/site"}))


def test_a_built_runtime_holds_while_it_is_whole_and_nothing_is_run(tmp_path: Path) -> None:
    stage = RuntimeStage(cluster(), FakeRunner(), "cpu", tmp_path)
    python = runtime.built_python("cpu")
    result = known(built=True, python=str(python))
    assert not stage.holds(result)
    write_text(python, "")
    assert not stage.holds(result)
    write_text(python.parent.parent / "complete.json", "{}")
    assert stage.holds(result)
    assert not stage.holds(known(built=True, python="/old/cache/bin/python")), "another cache"
    python.unlink()
    assert not stage.holds(result)


@pytest.mark.parametrize(
    ("python", "found"),
    [
        ("python3.11", "python3.11"),
        ("venv/bin/python", "/root-of-file/venv/bin/python"),
        ("./python", "/root-of-file/python"),
        ("/usr/bin/python3", "/usr/bin/python3"),
        ("~/v/bin/python", "/home/me/v/bin/python"),
    ],
)
def test_an_interpreter_with_a_slash_is_relative_to_the_file(
    python: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert named_python(python, Path("/root-of-file")) == found


# --- model -----------------------------------------------------------------------------------
RESULTS: Results = {"runtime": known()}


def model_stage(tmp_path: Path, runner: FakeRunner | None = None, **model: Any) -> ModelStage:
    return ModelStage(cluster(model=model), runner or FakeRunner(), tmp_path)


def folder_with(path: Path, config: str) -> Path:
    write_text(path / "config.json", config)
    return path


def test_a_model_depends_on_what_chooses_its_files(tmp_path: Path) -> None:
    stage = model_stage(tmp_path, id="org/m", seed=3, revision="main", load_format="dummy")
    assert stage.inputs(RESULTS) == {
        "id": "org/m",
        "seed": 3,
        "revision": "main",
        "served_name": None,
        "dummy": True,
        "python": "/r/python",
        "dtype": "auto",
    }


@pytest.mark.parametrize(
    ("id", "dtype", "device", "told"),
    [
        ("builtin:tiny", "auto", "cpu", "float32"),
        ("builtin:tiny", "auto", "cuda", "auto"),
        ("builtin:tiny", "bfloat16", "cpu", "bfloat16"),
        ("org/m", "auto", "cpu", "auto"),
    ],
)
def test_our_own_model_is_exact_on_cpus(id: str, dtype: str, device: str, told: str) -> None:
    spec = ClusterSpec.model_validate({"name": "demo", "model": {"id": id, "dtype": dtype}})
    assert dtype_of(spec, device) == told


def test_the_tiny_model_is_made_in_the_cache(tmp_path: Path, cache: Path) -> None:
    stage = model_stage(tmp_path, id="builtin:tiny", seed=5)
    found = ModelOutputs.model_validate(stage.apply(RESULTS, Line()))
    assert Path(found.path).parent == cache / "models"
    assert found.served_name == "tiny"
    assert found.config == json.loads((Path(found.path) / "config.json").read_text())
    assert stage.holds(found.model_dump())


def test_a_local_model_is_used_where_it_lies(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", '{"a": 1}')
    stage = model_stage(tmp_path, id="./m", served_name="mine")
    assert stage.apply(RESULTS, Line()) == {
        "path": str(folder),
        "served_name": "mine",
        "config": {"a": 1},
        "dtype": "auto",
    }


def test_a_model_holds_while_its_configuration_is_the_same(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", '{"a": 1}')
    stage = model_stage(tmp_path, id="./m")
    result = stage.apply(RESULTS, Line())
    assert stage.holds(result)
    folder_with(folder, '{"a": 2}')
    assert not stage.holds(result)
    (folder / "config.json").unlink()
    assert not stage.holds(result)


@pytest.mark.parametrize(
    ("load_format", "what"), [("auto", "weights"), ("dummy", "shape")], ids=["real", "dummy"]
)
def test_a_hub_model_is_fetched_by_the_runtimes_python(
    tmp_path: Path, cache: Path, load_format: str, what: str
) -> None:
    folder = folder_with(tmp_path / "snapshot", "{}")
    runner = FakeRunner((("/r/python", "org/m"), (0, json.dumps({"path": str(folder)}))))
    stage = model_stage(tmp_path, runner, id="org/m", revision="main", load_format=load_format)
    line = Line()
    found = ModelOutputs.model_validate(stage.apply(RESULTS, line))
    assert (found.path, found.served_name) == (str(folder), "m")
    (command,) = runner.commands
    assert command.argv[-4:] == ("org/m", "main", str(cache / "hub"), what)
    assert line.said == ["fetching org/m unless it is cached"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "model.id: {folder} holds no config.json that can be read"),
        ("[]", "model.id: {folder}/config.json is not a model's configuration"),
        (
            "{",
            "model.id: {folder}/config.json is not valid JSON: Expecting property name enclosed "
            "in double quotes: line 1 column 2 (char 1)",
        ),
    ],
    ids=["none", "not a map", "cut short"],
)
def test_a_folder_that_is_no_model_says_so(
    tmp_path: Path, config: str | None, message: str
) -> None:
    folder = tmp_path / "m"
    if config is not None:
        folder_with(folder, config)
    with pytest.raises(CheckError) as caught:
        model_stage(tmp_path, id=str(folder)).apply(RESULTS, Line())
    assert caught.value.message == message.format(folder=folder)


@pytest.mark.parametrize(
    ("model_id", "path"),
    [
        ("/models/m", "/models/m"),
        ("./m", "/root-of-file/m"),
        ("../m", "/m"),
        ("~/m", "/home/me/m"),
        ("org/m", None),
        ("m", None),
        ("builtin:tiny", None),
    ],
)
def test_a_path_begins_like_one_and_everything_else_is_a_hub_id(
    model_id: str, path: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    found = local_path(model_id, Path("/root-of-file"))
    assert found == (Path(path) if path else None)


@pytest.mark.parametrize(
    ("model_id", "name"),
    [
        ("builtin:tiny", "tiny"),
        ("meta-llama/Llama-3.3-70B-Instruct", "Llama-3.3-70B-Instruct"),
        ("/models/m/", "m"),
        ("m", "m"),
    ],
)
def test_clients_call_a_model_by_the_last_part_of_its_id(model_id: str, name: str) -> None:
    assert default_name(model_id) == name


# --- fleet -----------------------------------------------------------------------------------
@dataclass
class FakeProcesses:
    """Supervised processes that become what `ends` says once they are started.

    What is not in `ends` becomes ready at once.
    """

    dir: Path
    ends: dict[str, str] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    specs: dict[str, LaunchSpec] = field(default_factory=dict)
    phases: dict[str, str] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    frozen: set[str] = field(default_factory=set)
    starts: int = 0
    generations: dict[str, str] = field(default_factory=dict)
    read: dict[str, str] = field(default_factory=dict)
    """The digest of what the router has read of its files."""
    others: set[int] = field(default_factory=set)

    def ports_of_others(self) -> set[int]:
        return self.others

    def names(self) -> list[str]:
        return sorted(self.specs)

    def spec(self, name: str) -> LaunchSpec | None:
        return self.specs.get(name)

    def log(self, name: str) -> Path:
        return self.dir / name / "log"

    def runs(self, spec: LaunchSpec) -> bool:
        alive = self.phases.get(spec.name) in ("starting", "ready", "backoff")
        return alive and self.specs.get(spec.name) == spec

    def observe(self, name: str) -> Observed:
        spec, phase = self.specs.get(name), self.phases.get(name)
        if spec is None or phase is None:
            return Observed(name=name, supervised=False, state=None, pids=())
        alive = phase in ("starting", "ready", "backoff")
        state = ProcessState.model_validate(
            {
                "name": name,
                "phase": phase,
                "digest": digest_of(spec),
                "supervisor_pid": 1,
                "pid": 2 if alive else None,
                "generation": self.generations.get(name, ""),
                "reason": self.reasons.get(name, ""),
            }
        )
        return Observed(
            name=name,
            supervised=alive,
            state=state,
            pids=(2,) if alive else (),
            frozen=name in self.frozen,
        )

    def hang_up(self, name: str) -> None:
        self.done.append(f"hang up {name}")
        self._read_files(self.specs[name])

    def _read_files(self, spec: LaunchSpec) -> None:
        if spec.role == "router":
            self.read["digest"] = reading.read(Path(spec.argv[-1])).digest

    def resume(self, name: str) -> None:
        self.done.append(f"resume {name}")
        self.frozen.discard(name)

    def start(self, spec: LaunchSpec) -> None:
        self.done.append(f"start {spec.name}")
        self.starts += 1
        self.specs[spec.name] = spec
        self.phases[spec.name] = self.ends.get(spec.name, "ready")
        self.generations[spec.name] = f"g{self.starts}"
        self._read_files(spec)
        write_text(self.log(spec.name), self.logs.get(spec.name, ""))

    def stop(self, name: str) -> None:
        self.done.append(f"stop {name}")
        self.phases[name] = "stopped"

    def forget(self, name: str) -> None:
        self.done.append(f"forget {name}")
        del self.specs[name], self.phases[name]


class Router:
    """Answers /ready and /health as a router does, on a port of its own."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.status, self.document = 200, {"pairs": {"prefill-0/decode-0": "ready"}}
        self.read: Mapping[str, str] = {}
        """Digests of what it has read."""
        router = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = self.path == "/ready?complete=1"
                is_health = self.path == "/health"
                self.send_response(router.status if known else 200 if is_health else 404)
                self.end_headers()
                health = {"configuration": router.read.get("digest")}
                self.wfile.write(json.dumps(health if is_health else router.document).encode())

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self.port = int(self.server.server_address[1])
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def router() -> Iterator[Router]:
    router = Router()
    yield router
    router.server.shutdown()
    router.server.server_close()


@pytest.fixture
def processes(tmp_path: Path) -> FakeProcesses:
    return FakeProcesses(tmp_path / "processes")


FLEET_RESULTS: Results = {
    "runtime": known(),
    "model": ModelOutputs(path="/m", served_name="tiny", config={}).model_dump(),
}


@dataclass
class Stand:
    """One cluster file, brought up again and again."""

    processes: FakeProcesses
    router: Router
    root: Path
    line: Line = field(default_factory=Line)

    def __post_init__(self) -> None:
        self.router.read = self.processes.read

    def stage(self, **top: Any) -> LocalFleetStage:
        routing = {"port": self.router.port, **top.pop("router", {})}
        return LocalFleetStage(
            cluster(router=routing, **top),
            cast("Processes", self.processes),
            root=self.root,
            config_path=self.root / "router.json",
        )

    def up(self, **top: Any) -> FleetOutputs:
        self.processes.done.clear()
        return FleetOutputs.model_validate(self.stage(**top).apply(FLEET_RESULTS, self.line))


@pytest.fixture
def stand(processes: FakeProcesses, router: Router, tmp_path: Path) -> Stand:
    return Stand(processes, router, tmp_path)


real = pytest.mark.real_process  # the router's /ready is asked over loopback


@real
def test_engines_are_started_before_the_router_and_told_to_it(stand: Stand) -> None:
    fleet = stand.up()
    assert stand.processes.done == ["start prefill-0", "start decode-0", "start router"]
    assert fleet.generations == {"prefill-0": "g1", "decode-0": "g2"}
    assert fleet.url == f"http://127.0.0.1:{stand.router.port}"
    assert json.loads((stand.root / "router.json").read_text()) == json.loads(
        fleet.router_config.model_dump_json()
    )
    assert fleet.router.argv[0] == sys.executable
    assert stand.line.said[:3] == ["starting prefill-0", "starting decode-0", "starting router"]


@real
def test_what_runs_as_wanted_is_left_alone(stand: Stand) -> None:
    first = stand.up()
    second = stand.up()
    assert stand.processes.done == []
    assert second == first


@real
def test_only_what_does_not_run_is_started(stand: Stand) -> None:
    stand.up(fleet={"decode": {"count": 2}})
    stand.processes.phases["decode-1"] = "failed"
    stand.up(fleet={"decode": {"count": 2}})
    assert stand.processes.done == ["start decode-1"]


@real
def test_what_a_killed_smoke_left_frozen_is_thawed_and_not_started_again(stand: Stand) -> None:
    stand.up()
    stand.processes.frozen.add("prefill-0")
    stand.up()
    assert stand.processes.done == ["resume prefill-0"]


@real
def test_a_change_that_the_router_takes_up_at_its_start_restarts_it_alone(stand: Stand) -> None:
    stand.up()
    stand.up(router={"max_body_mib": 1})
    assert stand.processes.done == ["start router"]


@real
def test_any_other_change_of_the_router_is_read_by_the_one_that_runs(stand: Stand) -> None:
    stand.up()
    changed = stand.up(router={"policy": "round-robin"})
    assert stand.processes.done == ["hang up router"]
    assert stand.stage(router={"policy": "round-robin"}).holds(changed.model_dump())


@real
def test_keys_that_changed_are_read_by_the_router_that_runs(stand: Stand) -> None:
    (stand.root / "keys").write_text("one\n")
    fleet = stand.up(router={"api_key_file": "keys"}).model_dump()
    stage = stand.stage(router={"api_key_file": "keys"})
    assert stage.holds(fleet)
    (stand.root / "keys").write_text("two\n")
    assert not stage.holds(fleet)
    stand.up(router={"api_key_file": "keys"})
    assert stand.processes.done == ["hang up router"]
    (stand.root / "keys").unlink()
    assert not stage.holds(fleet)


@real
def test_the_router_is_told_before_an_engine_goes_that_it_may_still_use(stand: Stand) -> None:
    stand.up(fleet={"decode": {"count": 2}})
    stand.up()
    assert stand.processes.done == ["hang up router", "forget decode-1"]


@real
def test_a_router_that_was_on_its_way_is_told_once_it_is_ready(stand: Stand) -> None:
    stand.up()
    stand.processes.phases["router"] = "starting"
    ready = threading.Timer(0.2, stand.processes.phases.update, [{"router": "ready"}])
    ready.start()
    stand.up(router={"policy": "round-robin"})
    ready.join()
    assert stand.processes.done == ["hang up router"]


@real
def test_a_router_that_does_not_read_its_configuration_is_told_with_its_log(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand.up()
    monkeypatch.setattr("kvdeploy.stages.fleet.RELOAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(stand.processes, "hang_up", lambda _: None)
    log = stand.processes.log("router")
    write_text(log, "not reloaded: of some reason\n")
    with pytest.raises(FleetError) as caught:
        stand.up(router={"policy": "round-robin"})
    assert caught.value.message == (
        "the router did not take its configuration up within 0 s\n"
        f"last lines of {log}:\nnot reloaded: of some reason"
    )
    assert stand.processes.done == [], "it still serves as before"


@real
def test_what_is_no_longer_asked_for_is_stopped_and_forgotten(stand: Stand) -> None:
    stand.up(fleet={"decode": {"count": 2}})
    stand.up()
    assert "forget decode-1" in stand.processes.done
    assert "decode-1" not in stand.processes.names()
    assert "stopping decode-1, which is no longer asked for" in stand.line.said


@real
def test_engines_keep_their_ports_when_others_join(stand: Stand) -> None:
    before = {e.name: e.ports for e in stand.up().engines}
    after = {e.name: e.ports for e in stand.up(fleet={"prefill": {"count": 2}}).engines}
    assert {name: after[name] for name in before} == before
    ports = [p for engine in after.values() for p in engine]
    assert len(ports) == len(set(ports)) == 6


@real
def test_ports_that_another_cluster_was_given_are_left_to_it(stand: Stand) -> None:
    taken = {p for engine in stand.up().engines for p in engine.ports}
    stand.processes.specs.clear()
    stand.processes.others = taken
    assert not taken & {p for engine in stand.up().engines for p in engine.ports}


@real
def test_an_engine_gives_up_a_port_that_the_router_is_to_have(stand: Stand) -> None:
    engine = stand.up().engines[0]
    clash = (stand.router.port, engine.ports[1])
    stand.processes.start(engine.model_copy(update={"ports": clash}))
    assert stand.router.port not in stand.up().engines[0].ports


@real
def test_every_rank_has_a_side_channel_in_a_row(stand: Stand) -> None:
    fleet = stand.up(fleet={"decode": {"data_parallel": 3}})
    _, side, *others = next(e.ports for e in fleet.engines if e.role == "decode")
    assert others == [side + 1, side + 2]


@real
def test_a_failure_stops_what_was_started_and_only_that(stand: Stand) -> None:
    stand.up()
    stand.processes.ends["decode-1"] = "failed"
    stand.processes.reasons["decode-1"] = "ended (1) before it was ready"
    stand.processes.logs["decode-1"] = "loading\n\nValueError: no room\n"
    with pytest.raises(FleetError) as caught:
        stand.up(fleet={"decode": {"count": 2}})
    log = stand.processes.log("decode-1")
    assert caught.value.message == (
        "decode-1 ended (1) before it was ready\n"
        "last lines of its log:\n"
        "loading\n"
        "ValueError: no room"
    )
    assert caught.value.hint == f"The whole log: {log}. Then 'kvdeploy up' can be run again."
    assert caught.value.log == log
    stopped = [d for d in stand.processes.done if d.startswith("stop ")]
    started = [d for d in stand.processes.done if d.startswith("start ")]
    assert {d.split()[1] for d in stopped} == {d.split()[1] for d in started}
    assert "decode-1" in {d.split()[1] for d in stopped}
    assert "hang up router" in stand.processes.done, "it serves on, and does without decode-1"


@real
def test_an_interrupt_stops_what_was_started(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_spec: LaunchSpec) -> bool:
        if "start decode-0" in stand.processes.done:
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(stand.processes, "runs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stand.up()
    assert stand.processes.done[-2:] == ["stop prefill-0", "stop decode-0"]


@real
def test_pairs_that_never_warm_end_with_their_states_and_the_routers_log(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdeploy.stages.asking.PAIRS_TIMEOUT_S", 0.0)
    stand.router.status = 503
    stand.router.document = {"pairs": {"prefill-0/decode-0": "handshake failed"}}
    stand.processes.logs["router"] = "warm-up: 500\n"
    with pytest.raises(FleetError) as caught:
        stand.up()
    log = stand.processes.log("router")
    assert caught.value.message == (
        "the router could not push over every pair within 0 s: "
        f"prefill-0/decode-0 handshake failed\nlast lines of {log}:\nwarm-up: 500"
    )
    assert caught.value.hint == "'kvdeploy logs NAME' shows the engines' side."
    assert stand.processes.done[-3:] == ["stop prefill-0", "stop decode-0", "stop router"]


@real
def test_the_wait_says_for_whom_and_the_last_word_of_the_first(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand.processes.ends["prefill-0"] = "starting"
    stand.processes.logs["prefill-0"] = "loading weights\n"

    def update(detail: str) -> None:
        stand.line.said.append(detail)
        if detail.startswith("waiting"):
            stand.processes.phases["prefill-0"] = "ready"

    monkeypatch.setattr(stand.line, "update", update)
    stand.up()
    assert "waiting for prefill-0: loading weights" in stand.line.said
    assert stand.line.said[-1] == "warming pairs: prefill-0/decode-0 ready"


@real
def test_a_fleet_holds_while_exactly_its_processes_are_ready_and_warm(stand: Stand) -> None:
    result = stand.up().model_dump()
    stage = stand.stage()
    assert stage.holds(result)
    stand.router.status = 503
    assert not stage.holds(result)
    stand.router.status = 200
    stand.processes.phases["decode-0"] = "backoff"
    assert not stage.holds(result)
    stand.processes.phases["decode-0"] = "ready"
    assert stage.holds(result)
    stand.processes.generations["decode-0"] = "g9"  # it was restarted meanwhile
    assert not stage.holds(result)
    assert stage.is_whole(FleetOutputs.model_validate(result))


@real
def test_a_fleet_with_a_stray_does_not_hold(stand: Stand) -> None:
    result = stand.up().model_dump()
    stand.processes.start(
        LaunchSpec(
            name="prefill-9",
            role="prefill",
            argv=("x",),
            ready=Readiness(url="http://127.0.0.1:1/", timeout_s=1),
        )
    )
    assert not stand.stage().holds(result)


@pytest.mark.parametrize(
    ("change", "redone"),
    [
        ({}, False),
        ({"router": {"port": 9001}}, True),
        ({"fleet": {"decode": {"count": 2}}}, True),
        ({"connector": {"block_size": 64}}, True),
        ({"model": {"max_length": 1024}}, True),
        ({"runtime": {"start_timeout_s": 30}}, False),
    ],
    ids=str,
)
def test_a_fleet_depends_on_what_its_processes_are_made_of(
    change: dict[str, Any],
    redone: bool,  # noqa: FBT001
    processes: FakeProcesses,
    tmp_path: Path,
) -> None:
    plain, changed = (
        LocalFleetStage(
            cluster(**top), cast("Processes", processes), root=tmp_path, config_path=tmp_path / "c"
        ).inputs(FLEET_RESULTS)
        for top in ({}, change)
    )
    assert (plain != changed) is redone
    json.dumps(plain)


@real
def test_keys_are_found_beside_the_cluster_file(stand: Stand) -> None:
    (stand.root / "keys").write_text("one\n")
    assert stand.up(router={"api_key_file": "keys"}).router_config.api_key_file == str(
        stand.root / "keys"
    )


@real
def test_a_router_with_a_certificate_is_asked_over_tls(
    processes: FakeProcesses, tmp_path: Path
) -> None:
    cert, key = write_certificate(tmp_path)
    router = Router(read_tls(cert, key))
    try:
        fleet = Stand(processes, router, tmp_path).up(
            router={"tls_cert_file": "router.crt", "tls_key_file": "router.key"}
        )
        asker = Asker(fleet)
        assert (fleet.url, asker.is_ready()) == (f"https://127.0.0.1:{router.port}", True)
        write_certificate(tmp_path)
        assert not asker.is_ready(), "a certificate that nobody has named"
    finally:
        router.server.shutdown()
        router.server.server_close()
    assert (fleet.router.ready.url, fleet.router.ready.trust) == (f"{fleet.url}/health", cert)
    assert (fleet.router_config.tls_cert_file, fleet.router_config.tls_key_file) == (cert, key)


@pytest.mark.parametrize(
    ("key", "days", "problem"),
    [
        ("router.key", 21, None),
        ("other.key", 21, "the TLS key {root}/other.key does not belong to the certificate "
         "{root}/router.crt"),
        ("router.key", 0.5, "the TLS certificate {root}/router.crt is not taken by clients: "
         "certificate has expired"),
    ],
)  # fmt: skip
def test_a_certificate_is_tried_before_anything_is_started(
    key: str, days: float, problem: str | None, tmp_path: Path
) -> None:
    write_certificate(tmp_path, "other")
    write_certificate(tmp_path, days=days)
    spec = cluster(router={"tls_cert_file": "router.crt", "tls_key_file": key})
    found, left = look_at_tls(spec, tmp_path)
    assert found == (problem and problem.format(root=tmp_path))
    assert left == (None if problem else pytest.approx(20, abs=0.1))
    assert look_at_tls(cluster(), tmp_path) == (None, None)


# --- the end of a log ------------------------------------------------------------------------
def test_the_tail_is_the_last_lines_that_say_something(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"one\n\ntwo\n  \nthree \xff\n")
    assert tail(log, 2) == "two\nthree �"
    assert tail(tmp_path / "none") == ""


def test_of_a_large_log_only_the_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("x" * 100_000 + "\nlast\n")
    assert tail(log, 1) == "last"
    assert len(tail(log, 5)) < 66_000
