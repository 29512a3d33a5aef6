"""The diagnostic bundle: what is in it, what must never be, and hosts that do not answer."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from kvdeploy.errors import UnreachableError
from kvdeploy.model import layout
from tests.playbooks.fleets import AT, STANDIN_PATH, STANDINS, Fleet, prepare

if TYPE_CHECKING:
    from tests.playbooks.conftest import Labs

ROLES: Final[dict[str, Any]] = {"prefill-0": "prefill", "decode-0": "decode", "router-0": "router"}
TOKEN: Final = "never-to-be-seen"
KEY: Final = "key-of-ann"
LOOSE: Final = "hf_abcdefghijklmnopqrstuvwxyz"
FORMS: Final = (LOOSE, "AKIAABCDEFGHIJKLMNOP", "s3cret:", "bear3r-token")


@pytest.fixture(scope="module")
def fleet(labs: Labs, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    hardware = {"prefill-0": "p5en", "decode-0": "none", "router-0": "none"}
    lab = labs(*ROLES, hardware=hardware, binds={STANDINS: Path(AT)}).lab
    for host in lab.hosts:
        prepare(host)
    return Fleet(
        lab=lab,
        folder=tmp_path_factory.mktemp("collect"),
        roles=ROLES,
        spec={"fleet": {"prefill": {"env": {"HF_TOKEN": TOKEN, "PLAIN": "plain-to-see"}}}},
        env={"PYTHONPATH": STANDIN_PATH},
    )


def texts(bundle: Path) -> dict[str, str]:
    with tarfile.open(bundle) as archive:
        files = {m.name: archive.extractfile(m) for m in archive.getmembers() if m.isfile()}
        return {name: f.read().decode() for name, f in files.items() if f is not None}


def test_a_bundle_tells_how_a_node_is_and_keeps_its_secrets(fleet: Fleet, tmp_path: Path) -> None:
    prefill, decode, router = fleet.lab.hosts
    fleet.run("fleet.yml", "prefill-0")
    # Secrets on the loose: in a log, in a file of keys, in a URL.
    said = (
        f"token {LOOSE} {TOKEN} {KEY} AKIAABCDEFGHIJKLMNOP Bearer bear3r-token http://me:s3cret:@x/"
    )
    unit = ("systemd-run", "--quiet", "--unit=kvdeploy-loose", "--remain-after-exit")
    prefill.must(*unit, "/bin/echo", said)
    prefill.must("bash", "-c", f"umask 077; echo {KEY} >{layout.API_KEYS}")
    router.must("systemctl", "stop", "ssh")

    with pytest.raises(UnreachableError, match="router-0"):
        fleet.run("collect.yml", collect_dest=str(tmp_path))

    assert sorted(p.name for p in tmp_path.iterdir()) == ["decode-0.tar.gz", "prefill-0.tar.gz"]
    found = texts(tmp_path / "prefill-0.tar.gz")
    assert (
        "INFO Started server process"
        in found["prefill-0/logs/kvdeploy-engine@prefill-0.service.txt"]
    )
    assert "vllm:num_requests_running" in found["prefill-0/metrics/prefill-0.txt"]
    assert found["prefill-0/efa/counters.txt"].count("rdma_write_bytes") == 16
    assert "kvdeploy-engine@prefill-0.service" in found["prefill-0/kvdeploy/units.txt"]
    assert "LimitMEMLOCK=infinity" in found["prefill-0/kvdeploy/unit-files.txt"]
    assert "demo.prefill-0." in found["prefill-0/files/etc/kvdeploy/engines/prefill-0.json"]
    assert found["prefill-0/files/run/kvdeploy/prefill-0.generation"].strip()
    assert "NAME=" in found["prefill-0/files/etc/os-release"]

    loose = found["prefill-0/logs/kvdeploy-loose.service.txt"]
    assert loose.splitlines()[-1].count("(secret)") == 6
    everything = "\n".join((*found, *found.values()))
    assert [s for s in (TOKEN, KEY, *FORMS) if s in everything] == []
    assert [n for n in found if n.endswith(".env") or "api-keys" in n] == []
    assert "plain-to-see" not in everything  # of a file that is left out whole

    # A node with nothing on it is told of as far as it goes.
    bare = texts(tmp_path / "decode-0.tar.gz")
    assert bare["decode-0/gpu/nvidia-smi.txt"] == "(nvidia-smi is not on this node)\n"
    assert bare["decode-0/efa/counters.txt"] == "no EFA counters on this node"
    for host in (prefill, decode):
        assert host.must("find", "/tmp", "-name", "kvdeploy-collect*").strip() == ""
