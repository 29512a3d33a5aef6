"""The roles base, nvidia and efa on real hosts, through the product's own adapter: fresh hosts,
hosts with something wrong, a host that dies; then the same hosts again.

Faults are on hosts of their own in one run: that the others are done is the proof that a host which
fails stops alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from kvdeploy.adapters.ansible.client import Ansible, Play
from kvdeploy.errors import PlaybookError, UnreachableError
from kvdeploy.model import catalog, layout
from kvdeploy.model.inventory import Host as Node
from kvdeploy.model.inventory import Inventory
from kvdeploy.polling import wait_for
from tests.hostlab import nvidia

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.hostlab.guest import Host
    from tests.playbooks.conftest import Labs, Served

PLAYBOOKS: Final = Path(__file__).parents[2] / "playbooks"
P5EN: Final = catalog.INSTANCES["p5en.48xlarge"]
DRIVER_MIN: Final = ".".join(map(str, catalog.NVIDIA_DRIVER_MIN))
EFA_MIN: Final = ".".join(map(str, catalog.EFA_INSTALLER_MIN))
VARIABLES: Final[dict[str, Any]] = {
    "base_user": layout.USER,
    "base_root": layout.ROOT,
    "base_data": layout.DATA,
    "base_data_gib": 2,
    "base_nvme": True,
    "base_huge_pages": catalog.HUGE_PAGES,
    "nvidia_gpus": P5EN.gpus,
    "nvidia_branch": catalog.NVIDIA_BRANCH,
    "nvidia_min_driver": DRIVER_MIN,
    "nvidia_fabric": True,
    "efa_devices": P5EN.efa_devices,
    "efa_version": catalog.EFA_INSTALLER,
    "efa_min_version": EFA_MIN,
    "efa_device_wait_s": 20,
}
INSTALLER_LOG: Final = "/var/log/hostlab-efa-installer.log"
MARKER: Final = "/var/lib/kvdeploy/efa-installation"
DATA: Final = layout.DATA
HALF_A_PACKAGE: Final = """
set -e
mkdir -p /tmp/half/DEBIAN
printf 'Package: half\\nVersion: 1\\nArchitecture: all\\nMaintainer: x <x@example.invalid>\\n' \
  >/tmp/half/DEBIAN/control
printf 'Description: x\\n' >>/tmp/half/DEBIAN/control
dpkg-deb --build /tmp/half /tmp/half.deb
dpkg --unpack /tmp/half.deb
: >/var/lib/dpkg/updates/0000
"""
"""What dpkg leaves when the power goes in the middle of an installation."""
LEARNING_AMI: Final = """
set -e
mkdir -p /opt/dlami/nvme
cat >/usr/local/sbin/nvme-drives <<'EOF'
#!/bin/sh
sleep 3
blkid --label dlami || mkfs.ext4 -q -F -L dlami /dev/nvme1n1
mount -L dlami /opt/dlami/nvme || mount /dev/nvme1n1 /opt/dlami/nvme
EOF
chmod +x /usr/local/sbin/nvme-drives
cat >/etc/systemd/system/dlami-nvme.service <<'EOF'
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/local/sbin/nvme-drives
[Install]
WantedBy=multi-user.target
EOF
systemctl daemon-reload
systemctl enable --quiet dlami-nvme
systemctl start --no-block dlami-nvme
"""
"""The unit by which the Deep Learning AMI mounts the instance store, late in a boot."""
A_MACHINE: Final = """
set -e
printf '#!/bin/sh\\necho none\\nexit 1\\n' >/usr/local/bin/systemd-detect-virt
printf '#!/bin/sh\\nchronyc -n sources | grep -q 169.254.169.123 && echo yes || echo no\\n' \
  >/usr/local/bin/timedatectl
chmod +x /usr/local/bin/systemd-detect-virt /usr/local/bin/timedatectl
mkdir -p /etc/systemd/system/chrony.service.d
cat >/etc/systemd/system/chrony.service.d/lab.conf <<'EOF'
[Unit]
ConditionCapability=
[Service]
ExecStart=
ExecStart=!/usr/sbin/chronyd -x -F 0
EOF
mkdir -p /etc/needrestart/conf.d
"""
"""Not a container, so that its clock is its own: chrony runs, without touching the clock here.
It is in time as soon as chrony asks Amazon's source."""


OTHER_MANAGER: Final = f"""
set -e
echo 'deb [trusted=yes] {{url}}/nvidia ./' >/etc/apt/sources.list.d/image.list
apt-get -qq update
apt-get -qq install {nvidia.MANAGER}={nvidia.package_version(nvidia.NEWEST)}
"""
"""A fabric manager that does not fit the older driver."""


@dataclass(kw_only=True)
class Outcome:
    """How a run ended, host by host."""

    error: str = ""
    failed: dict[str, str] = field(default_factory=dict)
    """Host -> what its last task said."""
    gone: set[str] = field(default_factory=set)
    stats: dict[str, dict[str, int]] = field(default_factory=dict)
    tasks: list[tuple[str, str]] = field(default_factory=list)
    """(host, task) of every one that changed something."""

    def changed(self, host: str) -> int:
        return self.stats["changed"].get(host, 0)


class Bench:
    """A lab, and the three roles on any of its hosts."""

    def __init__(self, served: Served, playbooks: Path, folder: Path) -> None:
        self.served, self._playbooks, self._folder = served, playbooks, folder

    def __getitem__(self, name: str) -> Host:
        return self.served[name]

    def run(self, hosts: Mapping[str, Mapping[str, Any]], **variables: Any) -> Outcome:
        """`hosts`: name -> variables of its own."""
        log = self._folder / f"{len(list(self._folder.iterdir()))}.jsonl"
        nodes = tuple(
            Node(name=name, role="decode", address=self[name].address, vars=dict(own))
            for name, own in hosts.items()
        )
        inventory = Inventory(
            hosts=nodes,
            connection=self.served.lab.connection(),
            group_vars={"all": VARIABLES | self.served.variables},
        )
        play = Play(playbook="nodes.yml", inventory=inventory, variables=variables, timeout_s=900)
        outcome = Outcome()
        try:
            Ansible(log, self._playbooks).run(play)
        except (PlaybookError, UnreachableError) as e:
            outcome.error = e.message
        for entry in map(json.loads, log.read_text().splitlines()):
            match entry["event"]:
                case "runner_on_failed":
                    outcome.failed[entry["host"]] = entry["message"]
                case "runner_on_unreachable":
                    outcome.gone.add(entry["host"])
                case "runner_on_ok" if entry["changed"]:
                    outcome.tasks.append((entry["host"], entry["task"]))
                case "playbook_on_stats":
                    outcome.stats = {k: v for k, v in entry.items() if isinstance(v, dict)}
                case _:
                    pass
        return outcome


HARDWARE: Final = {
    "fresh": "p5en",
    "late": "p5en",
    "image": "p5en",
    "short": "p5en",
    "dies": "p5en",
    "foreign": "p5en",
    "plain": "none",
}
CPU: Final = {"base_nvme": False, "nvidia_gpus": 0, "efa_devices": 0}


@pytest.fixture(scope="module")
def bench(labs: Labs, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    playbooks = tmp_path_factory.mktemp("playbooks")
    for name in ("ansible.cfg", "roles"):
        (playbooks / name).symlink_to(PLAYBOOKS / name)
    (playbooks / "nodes.yml").write_text(
        "-"
        " {name: Nodes, hosts: gpu, become: true, gather_facts: false,"
        " roles: [base, nvidia, efa]}\n"
    )
    served = labs(*HARDWARE, hardware=HARDWARE)
    return Bench(served, playbooks, tmp_path_factory.mktemp("logs"))


@pytest.fixture(scope="module")
def first(bench: Bench) -> Outcome:
    """One run on fresh hosts, some with something wrong; one dies while EFA's installer runs."""
    sh(bench["fresh"], HALF_A_PACKAGE)
    bench["late"].fault("efa-device-late=10", "efa-needs-reboot")
    sh(bench["image"], LEARNING_AMI + A_MACHINE)
    bench["image"].fault("old-driver", "old-libfabric")
    sh(bench["image"], OTHER_MANAGER.format(url=bench.served.url))
    bench["short"].fault("efa-device-missing")
    bench["foreign"].fault("nvme-foreign")

    def power_loss() -> None:
        log = bench["dies"].root / INSTALLER_LOG.lstrip("/")
        if wait_for(lambda: log.exists() or None, timeout_s=240, interval_s=0.1):
            bench["dies"].kill()

    watch = threading.Thread(target=power_loss)
    watch.start()
    outcome = bench.run(
        {
            "fresh": {},
            "late": {},
            "image": {"efa_flags": ["--skip-mpi"]},
            "short": {"efa_device_wait_s": 1},
            "dies": {},
            "foreign": {},
            "plain": {"base_nvme": False},
        }
    )
    watch.join()
    return outcome


def sh(host: Host, script: str) -> str:
    return host.must("sh", "-c", script)


def blank(image: Path) -> None:
    """As a disk comes back when its instance was stopped; only once nothing has it mounted."""
    argv = ["losetup", "--associated", str(image), "--output", "NAME", "--noheadings"]
    loop = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()

    def alone() -> int | None:
        try:
            return os.open(loop, os.O_WRONLY | os.O_EXCL)
        except OSError:
            return None

    disk = wait_for(alone, timeout_s=30, interval_s=0.1)
    assert disk is not None
    os.write(disk, bytes(2**20))
    os.close(disk)


def installer_runs(host: Host) -> list[str]:
    """Version and options of every run of EFA's installer."""
    log = host.run("cat", INSTALLER_LOG).stdout
    return [line.split(" ", 1)[1] for line in log.splitlines()]


def package(host: Host, name: str) -> str:
    """Its state and version: 'hold installed 1.2'."""
    form = "${db:Status-Want} ${db:Status-Status} ${Version}"
    return host.must("dpkg-query", "-W", "-f", form, name)


# --- fresh hosts --------------------------------------------------------------------------------
def test_every_failure_is_one_sentence_of_its_host_and_the_others_go_on(first: Outcome) -> None:
    assert first.failed == {
        "short": "short has 15 of 16 EFA devices after waiting 1 s: all are on its PCI bus, and the"
        " driver did not bring them up: see 'journalctl -k --grep efa' there, and reboot it.",
        "foreign": "foreign has no place for weights and caches: /dev/nvme1n1 holds ext4"
        " 'somebody': kvdeploy formats blank disks only. Save what is on it, then wipe it (wipefs"
        " --all /dev/nvme1n1) and run again.",
        "plain": "plain shows no NVIDIA GPUs on its PCI bus, and 8 were expected: it is another"
        " instance type, or hardware is broken (stop and start it to move it).",
    }
    assert first.gone == {"dies"}
    assert all(first.changed(host) for host in ("fresh", "late", "image"))


def test_a_fresh_host_has_everything(bench: Bench, first: Outcome) -> None:
    host = bench["fresh"]
    units = ("kvdeploy-data", "nvidia-fabricmanager", "kvdeploy-persistence")
    assert host.must("systemctl", "is-active", *units).split() == ["active"] * 3
    assert host.must("systemctl", "is-enabled", *units).split() == ["enabled"] * 3
    assert host.read("/proc/sys/vm/nr_hugepages").strip() == str(catalog.HUGE_PAGES)
    assert host.must("getent", "passwd", layout.USER).split(":")[5:] == [
        DATA,
        "/usr/sbin/nologin\n",
    ]
    mount = host.must("findmnt", "--noheadings", "--output", "SOURCE,FSTYPE,OPTIONS", DATA).split()
    assert mount == ["/dev/nvme1n1", "ext4", "rw,noatime"]
    assert host.must("stat", "-c", "%U:%G %a", DATA).strip() == f"{layout.USER}:{layout.USER} 755"
    assert f"{layout.USER} hard memlock unlimited" in host.read(
        "/etc/security/limits.d/90-kvdeploy.conf"
    )
    held = host.must("apt-config", "dump", "Unattended-Upgrade::Package-Blacklist")
    assert 'Blacklist:: "linux\\-image";' in held
    version = nvidia.package_version(nvidia.NEWEST)
    for name in (nvidia.DRIVER, nvidia.MANAGER):
        assert package(host, name) == f"hold installed {version}"
    assert installer_runs(host) == [f"{catalog.EFA_INSTALLER}  --yes --"]
    assert not host.run("ls", MARKER).stdout


def test_an_installation_that_was_interrupted_is_finished(bench: Bench, first: Outcome) -> None:
    assert package(bench["fresh"], "half") == "install installed 1"


def test_a_reboot_that_the_installer_asks_for_happens_once_and_late_devices_are_waited_for(
    bench: Bench, first: Outcome, second: Outcome
) -> None:
    assert first.tasks.count(("late", "Reboot into the driver")) == 1
    assert second.tasks == [t for t in second.tasks if t[0] != "late"]
    assert len(list((bench["late"].hardware / "class/infiniband").iterdir())) == P5EN.efa_devices


def test_what_an_image_brings_is_kept_and_only_what_is_older_is_replaced(
    bench: Bench, first: Outcome
) -> None:
    host = bench["image"]
    version = nvidia.package_version(nvidia.OLDER)
    for name in (nvidia.DRIVER, nvidia.MANAGER):
        assert package(host, name) == f"hold installed {version}"
    assert installer_runs(host)[1:] == [f"{catalog.EFA_INSTALLER}  --yes --skip-mpi --"]
    source = host.must("findmnt", "--noheadings", "--output", "SOURCE", DATA).strip()
    assert source == "/dev/nvme1n1[/kvdeploy]"


def test_a_machine_with_a_clock_of_its_own_asks_amazon_and_never_a_person(
    bench: Bench, first: Outcome
) -> None:
    host = bench["image"]
    assert host.must("chronyc", "-n", "sources").count("169.254.169.123") == 1
    assert "{restart} = 'l'" in host.read("/etc/needrestart/conf.d/90-kvdeploy.conf")


# --- the same hosts again -----------------------------------------------------------------------
@pytest.fixture(scope="module")
def second(bench: Bench, first: Outcome) -> Outcome:
    """Mended ones are done, done ones are left alone; the rest has something else that is wrong."""
    served = bench.served
    blank(bench["dies"].folder / "disks/nvme1n1.img")
    bench["dies"].boot()
    bench["late"].must("touch", f"{DATA}/weights")
    bench["late"].kill()
    bench["late"].boot()
    bench["short"].heal()
    bench["image"].fault(f"driver-mismatch={nvidia.NEWEST}")
    sh(bench["foreign"], "wipefs --all --quiet /dev/nvme1n1")
    sh(bench["plain"], "rm -rf /etc/sysctl.d/90-kvdeploy.conf")
    for name, spoil in (("tampered", "tampered-installer"), ("wrong", "wrong-key")):
        with served.vendor.fault(spoil):
            shutil.copytree(served.vendor.folder / "efa", served.vendor.folder / name)
    return bench.run(
        {
            "fresh": {},
            "late": {},
            "dies": {},
            "short": {},
            "image": {},
            "foreign": {"efa_url": f"{served.url}/tampered"},
            "plain": CPU | {"base_data_gib": 100000},
        }
    )


def test_the_second_run_changes_nothing_on_hosts_that_are_done(
    bench: Bench, second: Outcome
) -> None:
    assert (second.changed("fresh"), second.changed("late")) == (0, 0)
    assert bench["late"].read(f"{DATA}/weights") == ""


def test_a_host_that_died_in_the_middle_is_done_by_the_next_run(
    bench: Bench, second: Outcome
) -> None:
    host = bench["dies"]
    assert "dies" not in second.failed
    assert len(installer_runs(host)) == 2
    assert (
        host.must("findmnt", "--noheadings", "--output", "SOURCE", DATA).strip() == "/dev/nvme1n1"
    )


def test_the_second_run_names_what_is_wrong_now(second: Outcome) -> None:
    said = second.failed
    assert said.pop("plain").endswith(
        f" GiB at {DATA}, and weights and caches need 100000: free some space, give it a larger"
        " disk, or use a type with an instance store."
    )
    archive = f"aws-efa-installer-{catalog.EFA_INSTALLER}.tar.gz"
    assert said == {
        "image": f"image has NVIDIA driver {nvidia.OLDER} and fabric manager {nvidia.NEWEST}: both"
        " must be the same to the digit. Run again to give it the right one, or use another image.",
        "foreign": f"foreign has no EFA installer to run: {archive} is not what its makers signed:"
        " its signature does not fit it: it was altered. It was removed and nothing of it was run."
        " Run again to fetch it anew; when that does not help, do not trust where it comes from"
        " (efa_url).",
    }
    assert second.gone == set()


def test_nothing_of_an_altered_installer_stays(bench: Bench, second: Outcome) -> None:
    host = bench["foreign"]
    assert installer_runs(host) == []
    assert not sh(host, "ls /var/cache/kvdeploy/*/").strip().replace("aws-efa-installer.gpg", "")


# --- and once more ------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def third(bench: Bench, second: Outcome) -> Outcome:
    boot = bench["dies"].boot_id
    sh(bench["dies"], f"echo reboot {boot} >{MARKER}")
    sh(bench["fresh"], f"echo installing >{MARKER}")
    bench["image"].heal("driver-mismatch")
    bench["image"].fault("efa-no-p2p")
    bench["short"].fault("efa-installer-fails")
    sh(bench["short"], "rm /opt/amazon/efa_installed_packages")
    sh(bench["late"], "echo 0 >/run/zero; mount --bind -o ro /run/zero /proc/sys/vm/nr_hugepages")
    return bench.run(
        {
            "fresh": {},
            "late": {},
            "dies": {},
            "short": {},
            "image": {},
            "foreign": {},
            "plain": CPU | {"efa_devices": 1, "efa_url": f"{bench.served.url}/wrong"},
        }
    )


def test_an_installation_that_did_not_end_well_is_not_taken_for_one(
    bench: Bench, third: Outcome
) -> None:
    assert len(installer_runs(bench["fresh"])) == 2
    assert not bench["fresh"].run("ls", MARKER).stdout


def test_a_reboot_that_a_run_did_not_come_to_is_made_up_for(third: Outcome) -> None:
    assert third.tasks.count(("dies", "Reboot into the driver")) == 1
    assert "dies" not in third.failed


def test_an_installer_is_fetched_anew_after_an_altered_one(bench: Bench, third: Outcome) -> None:
    assert installer_runs(bench["foreign"]) == [f"{catalog.EFA_INSTALLER}  --yes --"]


def test_the_third_run_names_what_is_wrong_now(bench: Bench, third: Outcome) -> None:
    said = third.failed
    archive = f"aws-efa-installer-{catalog.EFA_INSTALLER}.tar.gz"
    start, end = said.pop("plain").split(" it is signed by ")
    assert start == f"plain has no EFA installer to run: {archive} is not what its makers signed:"
    assert end[40:] == (
        f", not by {bench.served.vendor.efa_fingerprint}. It was removed and nothing of it was run."
        " Run again to fetch it anew; when that does not help, do not trust where it comes from"
        " (efa_url)."
    )
    assert said == {
        "late": f"late could reserve 0 of the {catalog.HUGE_PAGES} huge pages of 2 MiB that EFA"
        " needs: its memory is in pieces by now. Reboot it, they are reserved early in a boot, and"
        " run again.",
        "image": "image has EFA devices that cannot reach GPU memory (no p2p with NVIDIA):"
        " rdmap86s0. Reboot it, so that the GPUs have their driver before EFA has.",
        "short": f"short could not install EFA {catalog.EFA_INSTALLER}: Error: failed to install"
        " EFA packages, exiting. The whole of it is in"
        f" /var/cache/kvdeploy/efa-{catalog.EFA_INSTALLER}/log there. Nothing half-installed is"
        " used: run again when the reason is gone.",
    }


def test_a_system_that_is_not_known_is_refused_before_anything_changes(
    bench: Bench, third: Outcome
) -> None:
    known = ["Ubuntu 22.04", "Ubuntu 24.04"]
    bench["short"].heal()
    outcome = bench.run({"plain": CPU | {"base_supported_systems": known}, "short": {}})
    assert outcome.failed == {
        "plain": "plain runs Debian 12, and these playbooks know Ubuntu 22.04 and Ubuntu 24.04:"
        " make the node again from an image with one of those."
    }
    assert outcome.changed("plain") == 0
    assert outcome.changed("short") > 0
