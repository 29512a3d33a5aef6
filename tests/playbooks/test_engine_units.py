"""Engines and router as systemd units on real hosts, a stand-in in the place of vLLM: what they
are started from, what is restarted and what is not, what fails and how it is told, and that nothing
is left. One story in the order of the file; each test leaves the fleet whole for the next.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from kvdeploy.adapters.http import get
from kvdeploy.errors import PlaybookError, UnreachableError
from kvdeploy.model import layout
from kvdeploy.polling import wait_for
from tests.certificates import write_certificate
from tests.playbooks.fleets import (
    AT,
    STANDIN_PATH,
    STANDINS,
    WHEELS_AT,
    Fleet,
    prepare,
    shown,
    state,
    wheelhouse,
)

if TYPE_CHECKING:
    from tests.hostlab.guest import Host
    from tests.playbooks.conftest import Labs

ROLES: Final[dict[str, Any]] = {
    "prefill-0": "prefill",
    "decode-0": "decode",
    "router-0": "router",
}
SECRET: Final = "hf_never-to-be-seen"
ODD: Final = """back\\slash "quoted" 'too' $HOME `id` {{ 7 * 6 }} %i #x ;y"""
"""Everything that some layer between the cluster file and the process would like to change."""
ENGINES: Final = {"prefill": {"count": 2, "env": {"HF_TOKEN": SECRET, "ODD": ODD}}, "decode": {}}
UNIT: Final = "kvdeploy-engine@{}.service"
ROUTER: Final = "kvdeploy-router.service"
TOLD_S: Final = 150
"""A minute of silence, and what it takes to begin; an engine may take ten to start."""


@pytest.fixture(scope="module")
def fleet(labs: Labs, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    binds = {STANDINS: Path(AT), wheelhouse(): Path(WHEELS_AT)}
    lab = labs(*ROLES, hardware="none", binds=binds).lab
    for host in lab.hosts:
        prepare(host)
    return Fleet(
        lab=lab,
        folder=tmp_path_factory.mktemp("fleet"),
        roles=ROLES,
        spec={"fleet": ENGINES, "router": {"host": "0.0.0.0", "api_key_file": "keys"}},
        env={"PYTHONPATH": STANDIN_PATH},
        api_keys=("key-of-ann", "key-of-bob"),
    )


def told(fleet: Fleet, name: str) -> dict[str, Any]:
    """What an engine says that it was started with."""
    url = fleet.engine(name).ready.url.replace("/health", "/standin")
    found: dict[str, Any] = get(url, timeout_s=5).body
    return found


def generation(host: Host, name: str) -> str:
    return host.run("cat", f"/run/kvdeploy/{name}.generation").stdout.strip()


def mode(host: Host, path: str) -> str:
    return host.must("stat", "-c", "%a %U:%G", path).strip()


# --- a fresh node ----------------------------------------------------------------------------
def test_started_means_ready_and_every_start_has_an_identity(fleet: Fleet) -> None:
    report = fleet.run("fleet.yml")
    assert {h.name for h in report.hosts if h.changed} == set(ROLES)
    seen = set()
    for name, node in (("prefill-0", 0), ("prefill-1", 0), ("decode-0", 1)):
        host = fleet.lab.hosts[node]
        assert state(host, UNIT.format(name)) == "active"
        answer = told(fleet, name)
        found = generation(host, name)
        assert answer["transfer"]["engine_id"] == f"demo.{name}.{found}"
        seen.add(found)
    assert len(seen) == 3
    assert get(f"{fleet.plan.url}/health", timeout_s=5).status == 200


def test_an_engine_gets_its_environment_to_the_letter_and_no_secret_is_in_its_arguments(
    fleet: Fleet,
) -> None:
    host, answer = fleet.lab["prefill-0"], told(fleet, "prefill-1")
    wanted = fleet.engine("prefill-1").env
    assert {k: v for k, v in answer["env"].items() if k in wanted} == wanted
    assert answer["env"]["ODD"] == ODD
    assert answer["argv"] == list(fleet.engine("prefill-1").argv[3:]) or "@" not in str(answer)
    assert SECRET not in host.must("ps", "-eww", "-o", "args")
    assert mode(host, f"{layout.ETC}/engines/prefill-1.env") == "600 root:root"
    assert mode(host, f"{layout.ETC}/engines/prefill-1.json") == f"640 root:{layout.USER}"
    assert mode(host, f"{layout.RUN}/prefill-1.generation").startswith("644 ")
    assert SECRET not in (fleet.folder / "ansible.log").read_text()


def test_units_may_lock_memory_and_are_bounded_as_the_plan_says(fleet: Fleet) -> None:
    host, unit, wanted = fleet.lab["decode-0"], UNIT.format("decode-0"), fleet.engine("decode-0")
    assert {
        name: shown(host, unit, name)
        for name in ("LimitMEMLOCK", "LimitNOFILE", "User", "NoNewPrivileges", "KillMode")
    } == {
        "LimitMEMLOCK": "infinity",
        "LimitNOFILE": "1048576",
        "User": layout.USER,
        "NoNewPrivileges": "yes",
        "KillMode": "mixed",
    }
    assert shown(host, unit, "StartLimitBurst") == str(wanted.restart.max_restarts + 1)
    assert shown(host, unit, "TimeoutStopUSec") == f"{wanted.stop_grace_s:.0f}s"
    assert "network-online.target" in shown(host, unit, "After")
    assert layout.DATA in shown(host, unit, "RequiresMountsFor").split()
    assert shown(host, unit, "UnitFileState") == "enabled"
    main = shown(host, unit, "MainPID")
    affinity = host.must("grep", "-h", "Cpus_allowed_list", f"/proc/{main}/status")
    assert affinity.split()[1] == "0"


def test_keys_of_clients_lie_where_only_the_router_reads_them(fleet: Fleet) -> None:
    host = fleet.lab["router-0"]
    assert mode(host, layout.API_KEYS) == f"600 {layout.USER}:{layout.USER}"
    assert mode(host, layout.ROUTER_CONFIG) == f"640 root:{layout.USER}"
    url = f"{fleet.plan.url}/v1/models"
    assert get(url, timeout_s=5).status == 401
    key = {"Authorization": "Bearer key-of-bob"}
    assert get(url, timeout_s=5, headers=key).status == 200


# --- again -----------------------------------------------------------------------------------
def test_a_second_run_changes_nothing_and_restarts_nothing(fleet: Fleet) -> None:
    before = {h.name: h.must("ls", "/run/kvdeploy", "-i") for h in fleet.lab.hosts}
    assert fleet.run("fleet.yml").changed == 0
    assert {h.name: h.must("ls", "/run/kvdeploy", "-i") for h in fleet.lab.hosts} == before


def test_a_killed_engine_comes_back_under_another_generation(fleet: Fleet) -> None:
    host, before = fleet.lab["decode-0"], generation(fleet.lab["decode-0"], "decode-0")
    unit = UNIT.format("decode-0")
    host.must("kill", "-9", shown(host, unit, "MainPID"))

    def back() -> bool | None:
        found = generation(host, "decode-0")
        return (state(host, unit) == "active" and found not in ("", before)) or None

    assert wait_for(back, timeout_s=30, interval_s=0.2)
    found = generation(host, "decode-0")
    assert told(fleet, "decode-0")["transfer"]["engine_id"] == f"demo.decode-0.{found}"
    assert shown(host, unit, "NRestarts") == "1"


def test_after_a_power_loss_all_of_it_comes_back_by_itself(fleet: Fleet) -> None:
    host, before = fleet.lab["prefill-0"], generation(fleet.lab["prefill-0"], "prefill-0")
    host.kill()
    host.boot()
    for name in ("prefill-0", "prefill-1"):
        assert state(host, UNIT.format(name)) == "active"
    assert generation(host, "prefill-0") not in ("", before)


# --- a change, and a failure beside it -----------------------------------------------------------
def test_what_fails_is_told_by_its_last_words_and_keeps_nothing_else_from_its_change(
    fleet: Fleet,
) -> None:
    """decode-0 meets a taken port, prefill-1 ends at once, prefill-0 goes on."""
    prefill, decode, router = fleet.lab.hosts
    kept, kept_router = generation(prefill, "prefill-0"), generation(router, "router")
    taker = "import socket,time; s=socket.socket(); s.bind(('', 18600)); s.listen(); time.sleep(99)"
    decode.must("systemctl", "stop", UNIT.format("decode-0"))
    decode.must("systemd-run", "--unit=taker", "--quiet", "/usr/bin/python3", "-c", taker)
    broken = fleet.but(env_of={"prefill-1": {"STANDIN_EXIT": "no memory left"}})
    with pytest.raises(PlaybookError) as failed:
        broken.run("fleet.yml")
    message = failed.value.message
    assert "decode-0: decode-0 cannot start: port 18600 is taken by python3 (pid " in message
    assert "prefill-0: prefill-1 ended before it was ready (exit 1)." in message
    assert "engine core initialization failed (no memory left)" in message
    assert SECRET not in message
    # What was never ready is not tried again and again; its neighbour was not touched;
    for host, name in ((decode, "decode-0"), (prefill, "prefill-1")):
        assert state(host, UNIT.format(name)) == "inactive"
    assert generation(prefill, "prefill-0") == kept
    # and no router is started over engines of which no node is right.
    assert generation(router, "router") == kept_router


def test_only_what_changed_is_started_anew_and_what_is_not_asked_for_is_removed(
    fleet: Fleet,
) -> None:
    prefill, decode, router = fleet.lab.hosts
    kept, kept_router = generation(prefill, "prefill-0"), generation(router, "router")
    decode.must("systemctl", "stop", "taker")
    engines = {
        "prefill": ENGINES["prefill"] | {"count": 1},
        "decode": {"engine_args": {"max-num-seqs": 4}},
    }
    changed = fleet.but(spec=fleet.spec | {"fleet": engines})
    report = changed.run("fleet.yml")
    assert {h.name for h in report.hosts if h.changed} == set(ROLES)
    assert "--max-num-seqs" in told(changed, "decode-0")["argv"]
    assert generation(prefill, "prefill-0") == kept
    assert prefill.must("find", "/etc", "/run", "-name", "*prefill-1*").split() == []
    # The router is the same, and knows what it is to know.
    assert generation(router, "router") == kept_router
    assert list(get(f"{fleet.plan.url}/ready", timeout_s=5).body["pairs"]) == ["prefill-0/decode-0"]


def test_new_keys_are_read_by_the_router_that_runs(fleet: Fleet) -> None:
    router = fleet.lab["router-0"]
    kept = generation(router, "router")
    engines = {
        "prefill": ENGINES["prefill"] | {"count": 1},
        "decode": {"engine_args": {"max-num-seqs": 4}},
    }
    changed = fleet.but(spec=fleet.spec | {"fleet": engines}, api_keys=("key-of-eve",))
    report = changed.run("fleet.yml")
    assert {h.name for h in report.hosts if h.changed} == {"router-0"}
    url = f"{fleet.plan.url}/v1/models"
    statuses = {
        key: get(url, timeout_s=5, headers={"Authorization": f"Bearer key-of-{key}"}).status
        for key in ("ann", "eve")
    }
    assert statuses == {"ann": 401, "eve": 200}
    assert generation(router, "router") == kept


def test_a_router_serves_https_takes_a_renewed_certificate_up_and_goes_back(
    fleet: Fleet, tmp_path: Path
) -> None:
    host = fleet.lab["router-0"]
    engines = {"prefill": ENGINES["prefill"] | {"count": 1}, "decode": {}}
    files = {"tls_cert_file": "router.crt", "tls_key_file": "router.key"}
    spec = {"fleet": engines, "router": fleet.spec["router"] | files}

    def served(name: str) -> tuple[Fleet, int, int]:
        """Of this certificate; what it answers to who trusts it, and to who trusts another."""
        cert, key = (Path(file) for file in write_certificate(tmp_path, name))
        changed = fleet.but(spec=spec, tls=(cert.read_text(), key.read_text()))
        changed.run("fleet.yml", "router")
        url, other = f"{changed.plan.url}/health", write_certificate(tmp_path, "other")[0]
        ours, theirs = (get(url, timeout_s=5, trust=str(c)).status for c in (cert, other))
        return changed, ours, theirs

    changed, *statuses = served("first")
    assert (changed.plan.url.partition(":")[0], statuses) == ("https", [200, 0])
    assert mode(host, layout.TLS_KEY) == f"600 {layout.USER}:{layout.USER}"
    kept = generation(host, "router")
    assert [*served("renewed")[1:], generation(host, "router")] == [200, 0, kept]
    with pytest.raises(PlaybookError, match="its certificate or key was not given"):
        changed.but(tls=None).run("fleet.yml", "router")
    fleet.but(spec={**spec, "router": fleet.spec["router"]}).run("fleet.yml", "router")
    assert get(f"{fleet.plan.url}/health", timeout_s=5).status == 200
    assert host.must("find", layout.ETC, "-name", "tls-*").split() == []


# --- the end ---------------------------------------------------------------------------------
def test_after_stop_nothing_runs_now_or_at_the_next_boot(fleet: Fleet) -> None:
    stubborn = fleet.lab["decode-0"]
    # One that cannot hear that it should end.
    stubborn.must("kill", "-STOP", shown(stubborn, UNIT.format("decode-0"), "MainPID"))
    assert fleet.run("stop.yml").changed == 3
    for host in fleet.lab.hosts:
        left = host.must("bash", "-c", "grep -l kvdeploy- /proc/[0-9]*/cgroup || true").split()
        assert left == [], host.name
        assert host.must("systemctl", "--failed", "--no-legend", "--plain").strip() == ""
    assert fleet.run("stop.yml").changed == 0
    stubborn.kill()
    stubborn.boot()
    assert state(stubborn, UNIT.format("decode-0")) == "inactive"


def test_a_host_that_dies_while_its_engine_starts_is_not_waited_for(fleet: Fleet) -> None:
    """Last: it leaves the host off."""
    dying = fleet.lab["decode-0"]
    slow = fleet.but(env_of={"decode-0": {"STANDIN_START_S": "500"}})
    began = time.monotonic()
    switch = threading.Timer(15, dying.kill)
    switch.start()
    with pytest.raises(UnreachableError, match="decode-0"):
        slow.run("fleet.yml", "gpu")
    assert time.monotonic() - began < TOLD_S
    switch.join()
