"""What is found before a world begins, and what is made of one that was killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import boto3
import psutil
import pytest
import yaml

from kvdeploy.polling import wait_for
from tests.hostlab import base, net
from tests.hostlab.shell import LabError, run
from tests.rehearsal import ground
from tests.rehearsal.conftest import ready_or_skip

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.real_process

GIB: Final = 2**30
ANYBODYS: Final = {"aws_access_key_id": "x", "aws_secret_access_key": "x"}


def rehearsal(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "tests.rehearsal", *map(str, argv)]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)


# --- this machine ----------------------------------------------------------------------------
def test_without_root_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert ground.missing() == "test hosts need root (network namespaces and systemd-nspawn)"


def test_a_program_that_is_not_here_is_told_with_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for name in base.PROGRAMS:
        if name != "systemd-nspawn":
            (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ground.missing() == f"test hosts need systemd-nspawn: {base.INSTALL}"


def test_too_little_memory_is_told_for_the_engines_of_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Little:
        available = 7.5 * GIB

    monkeypatch.setattr(psutil, "virtual_memory", Little)
    five = {"fleet": {"prefill": {"count": 2}, "decode": {"count": 3}}}
    assert ground.missing(five) == (
        "5 engines, Terraform and hosts need 12 GiB of memory, and 7.5 are free: end what else "
        "runs here, or ask for fewer engines"
    )
    assert "memory" not in (ground.missing() or "")


def test_a_port_that_somebody_has_on_all_addresses_is_told() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        assert ground.port_taken(one.getsockname()[1]) is None
    with socket.socket() as all_of_them:
        all_of_them.bind(("", 0))
        all_of_them.listen()
        port = all_of_them.getsockname()[1]
        said = ground.port_taken(port)
    me = f"{psutil.Process().name()} (pid {os.getpid()})"
    assert said == (
        f"port {port} is taken by {me}, and hosts fetch what they install from it: end that "
        "program, or have it listen on one address alone"
    )


@contextmanager
def link(name: str, address: str | None = None) -> Iterator[None]:
    run("ip", "link", "add", name, "type", "bridge")
    try:
        if address:
            run("ip", "address", "add", address, "dev", name)
            run("ip", "link", "set", name, "up")
        yield
    finally:
        run("ip", "link", "delete", name)


def test_a_bridge_or_subnet_of_somebody_else_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ready_or_skip()
    monkeypatch.setattr(net, "NUMBERS", range(253, 255))
    taken = (
        "all subnets of labs (10.77.253.0/24 to 10.77.254.0/24) are taken by kvlab254, somebodys: "
        "end one of those"
    )
    with link("kvlab254"):
        assert net.missing() is None
        place = net.take(tmp_path, owned=True)
        net.give_back(place)
        assert place.number == 253
        with link("somebodys", "10.77.253.7/28"):
            assert net.missing() == taken
            with pytest.raises(LabError) as caught:
                net.take(tmp_path, owned=True)
            assert str(caught.value) == taken


# --- the folder ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("holds", "what"),
    [
        ("cluster.yaml", "a cluster file"),
        (".kvdeploy/demo/record.json", "a cluster's records"),
        ("thesis.tex", "files"),
    ],
)
def test_a_folder_that_somebody_may_need_is_no_worlds(
    tmp_path: Path, holds: str, what: str
) -> None:
    file = tmp_path / holds
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine")
    for action in ("up", "run", "down"):
        done = rehearsal(action, "--root", tmp_path)
        assert (done.returncode, done.stderr) == (
            4,
            f"{tmp_path} holds {what} and is no rehearsal's, which would write over them: name a "
            "folder that is empty, or not there yet (--root); -f FILE rehearses a cluster file of "
            "yours\n",
        )
    assert file.read_text() == "mine"


def test_a_root_that_is_a_file_is_told(tmp_path: Path) -> None:
    file = tmp_path / "root"
    file.touch()
    assert ground.not_ours(file) == f"{file} is no folder: name another one (--root)"
    assert ground.not_ours(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "{} cannot be read: No such file or directory\n"),
        ("a: [", "{0} is no YAML: 'kvdeploy check -f {0}' says where\n"),
        ("- a", "{} is no cluster file: 'kvdeploy init' writes one\n"),
    ],
)
def test_a_cluster_file_that_cannot_be_read_is_told(
    tmp_path: Path, text: str | None, said: str
) -> None:
    file = tmp_path / "mine.yaml"
    if text is not None:
        file.write_text(text)
    done = rehearsal("run", "--root", tmp_path / "root", "-f", file)
    assert (done.returncode, done.stderr) == (3, said.format(file))


# --- a world that was killed -----------------------------------------------------------------
def in_the_world(root: Path) -> Any:
    """EC2 of the world in a folder."""
    aws = yaml.safe_load((root / "cluster.yaml").read_text())["aws"]
    return boto3.client("ec2", endpoint_url=aws["endpoint"], region_name=aws["region"], **ANYBODYS)


def launch(ec2: Any, cidr: str) -> None:
    """An instance, for which the world switches a host on."""
    vpc = ec2.create_vpc(CidrBlock=cidr)["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock=cidr)["Subnet"]["SubnetId"]
    image = ec2.describe_images()["Images"][0]["ImageId"]
    tags = [{"Key": "kvdeploy:node", "Value": "router-0"}]
    ec2.run_instances(
        ImageId=image,
        InstanceType="c7i.2xlarge",
        MinCount=1,
        MaxCount=1,
        SubnetId=subnet,
        TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
    )


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A folder for a world; whatever happens, nothing is left of it."""
    ready_or_skip()
    yield tmp_path / "root"
    assert rehearsal("down", "--root", tmp_path / "root").returncode == 0


def test_a_process_that_ended_is_not_there_although_nobody_has_asked_for_its_code() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert net.started(child.pid) is not None
        child.kill()
        assert wait_for(lambda: net.started(child.pid) is None or None, timeout_s=10)
        assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE


def test_what_a_killed_world_left_is_named_and_removed_with_consent(root: Path) -> None:
    assert rehearsal("up", "--root", root).returncode == 0
    (place,) = (p for p in net.places() if p.root == ground.lab_of(root))
    ec2 = in_the_world(root)
    launch(ec2, f"{place.gateway.rpartition('.')[0]}.0/24")
    folders = place.root / "hosts"
    assert wait_for(lambda: list(folders.glob("*")) or None, timeout_s=30)
    (host,) = (p.name for p in folders.iterdir())

    again = rehearsal("up", "--root", root, "--yes")
    assert again.returncode == 4
    assert again.stderr.startswith(f"a world is in {root} already (pid {place.owner}): ")

    children = psutil.Process(place.owner).children(recursive=True)
    double = next(p for p in children if "tests.double" in p.cmdline())
    os.kill(place.owner, signal.SIGKILL)
    assert wait_for(lambda: not alive(place.owner) or None, timeout_s=10)
    assert wait_for(lambda: not alive(double.pid) or None, timeout_s=10)

    left = (
        f"hosts {host}, bridge {place.bridge} of a run that was killed (pid {place.owner}), in "
        f"{place.root}"
    )
    refused = rehearsal("up", "--root", root)
    assert (refused.returncode, refused.stderr) == (
        4,
        f"something is left of earlier runs:\n  {left}\nsay --yes to have it removed first\n",
    )
    assert place.bridge in {p.bridge for p in net.places()}
    agreed = rehearsal("up", "--root", root, "--yes")
    assert (agreed.returncode, agreed.stdout.splitlines()[0]) == (0, f"removed: {left}")

    # `down` ends a world that runs, and one that was killed.
    (place,) = (p for p in net.places() if p.root == ground.lab_of(root))
    os.kill(place.owner, signal.SIGKILL)
    assert rehearsal("down", "--root", root).returncode == 0
    assert not [p for p in net.places() if p.root == ground.lab_of(root)]
    assert place.bridge not in run("ip", "link").stdout
