"""The hosts that playbooks are tested on, themselves tested."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvdeploy.model.catalog import EFA_INSTALLER, INSTANCES
from kvdeploy.polling import wait_for
from tests.hostlab import nvidia, wheels
from tests.hostlab.faults import FAULTS
from tests.hostlab.lab import HostLab, LabError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.hostlab.guest import Host
    from tests.hostlab.vendor import Vendor
    from tests.playbooks.conftest import Labs, Served

P5EN = INSTANCES["p5en.48xlarge"]
TREE = Path(__file__).parents[2]
SMI = "nvidia-smi --query-gpu=index,driver_version,fabric.state --format=csv,noheader"
FI_INFO = "/opt/amazon/efa/bin/fi_info -p efa -t FI_EP_RDM"


def sh(host: Host, script: str, **options: float) -> subprocess.CompletedProcess[str]:
    return host.run("sh", "-c", script, timeout_s=options.get("timeout_s", 120))


def domains(host: Host) -> int:
    """EFA devices by libfabric's word, each counted once."""
    lines = sh(host, FI_INFO).stdout.splitlines()
    return len({line for line in lines if "domain:" in line})


def traces(word: str) -> list[str]:
    """What of this machine still speaks of a lab."""
    found = [str(p) for p in Path("/sys/fs/cgroup").rglob("*/") if word in p.name]
    for command in ("ip -o link", "losetup --list --noheadings", "ip netns list"):
        lines = subprocess.run(command.split(), capture_output=True, text=True, check=True).stdout
        found += [line for line in lines.splitlines() if word in line]
    for process in Path("/proc").glob("[0-9]*"):
        for what in ("mountinfo", "cmdline"):
            try:
                text = (process / what).read_bytes().decode(errors="replace")
            except OSError:
                continue  # it has ended
            if int(process.name) != os.getpid() and word in text:
                found.append(f"{process}/{what}")
    return found


@pytest.fixture(scope="module")
def served(labs: Labs) -> Served:
    return labs("prefill-0", "router-0", hardware={"prefill-0": "p5en", "router-0": "none"})


@pytest.fixture(scope="module")
def gpu(served: Served) -> Host:
    """A host with driver, fabric manager and EFA installed, as the Deep Learning AMI has them."""
    host = served["prefill-0"]
    source = served.variables["nvidia_source"]
    done = sh(
        host,
        f"""set -e
        echo '{source}' >/etc/apt/sources.list.d/nvidia.list
        apt-get -qq update
        apt-get -qq install {nvidia.DRIVER} {nvidia.MANAGER} libhwloc15
        systemctl enable --now nvidia-fabricmanager
        cd /root
        curl -sSf {served.url}/efa/aws-efa-installer-{EFA_INSTALLER}.tar.gz | tar -xz
        cd aws-efa-installer
        ./efa_installer.sh -y --skip-mpi
        """,
    )
    assert done.returncode == 0, done.stderr
    return host


@pytest.fixture
def healed(gpu: Host) -> Iterator[Host]:
    yield gpu
    gpu.heal()


# --- the lab
def test_two_labs_at_once_share_nothing_and_leave_nothing(
    served: Served, vendor: Vendor, tmp_path: Path
) -> None:
    with HostLab(tmp_path) as other:
        (twin,) = other.up(("prefill-0",))
        assert twin.address != served["prefill-0"].address
        assert other.host_keys != served.lab.host_keys
        assert (tmp_path / "id").read_text() != (served.lab.root / "id").read_text()
        (twin.root / "etc/marker").touch()
        assert served["prefill-0"].run("test", "-e", "/etc/marker").returncode == 1
        # A service of the same name ends in one of them alone.
        twin.must("systemctl", "stop", "ssh")
        assert served["prefill-0"].must("systemctl", "is-active", "ssh") == "active\n"
        words = (other.place.bridge, str(tmp_path))
        assert all(traces(word) for word in words)
    assert [found for word in words for found in traces(word)] == []
    assert list(tmp_path.iterdir()) == []
    assert served["prefill-0"].must("systemctl", "is-active", "ssh") == "active\n"


def test_what_a_killed_maker_left_is_gone_before_the_next_lab_is_up(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from tests.hostlab.lab import HostLab;"
        "lab = HostLab(Path(sys.argv[1])); lab.up(('decode-0',));"
        "print(lab.place.bridge, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "first")]
    with subprocess.Popen(command, cwd=TREE, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        bridge = maker.stdout.readline().strip()
        maker.send_signal(signal.SIGKILL)
    assert traces(bridge)  # hosts live on without it
    with HostLab(tmp_path / "second") as lab:
        lab.up(("decode-0",), hardware="none")
        if lab.place.bridge != bridge:
            assert traces(bridge) == []
        assert traces(str(tmp_path / "first")) == []


def test_the_command_line_makes_a_lab_that_outlives_it(tmp_path: Path) -> None:
    lab = [sys.executable, "-m", "tests.hostlab"]
    inventory = tmp_path / "inventory/hosts.json"
    up = ("up", "--root", tmp_path, "--hosts", "router-0=none", "--inventory", inventory)
    subprocess.run((*lab, *up), cwd=TREE, check=True, capture_output=True)
    try:
        told = json.loads(inventory.read_text())["all"]
        assert told["children"]["router"]["hosts"] == {"router-0": {}}
        url = told["vars"]["efa_url"]
        key = told["vars"]["ansible_ssh_private_key_file"]
        login = f"ubuntu@{told['hosts']['router-0']['ansible_host']}"
        options = told["vars"]["ansible_ssh_common_args"].split()
        fetch = f"sudo curl -sSfo /dev/null {url}/aws-efa-installer.key && hostname"
        ssh = ("ssh", "-i", key, *options, login, fetch)
        said = subprocess.run(ssh, capture_output=True, text=True, check=False)
        assert (said.stdout, said.returncode) == ("router-0\n", 0), said.stderr
    finally:
        subprocess.run(
            (*lab, "down", "--root", tmp_path), cwd=TREE, check=True, capture_output=True
        )
    assert traces(str(tmp_path)) == []


def test_a_host_reboots_and_loses_power_and_keeps_its_disk(served: Served) -> None:
    host = served["router-0"]
    first = host.boot_id
    (host.root / "etc/kept").write_text("yes")
    host.reboot()
    second = host.boot_id
    host.fault("kill")
    assert not host.running
    with pytest.raises(LabError, match="router-0 is off"):
        host.run("true")
    host.heal("kill")
    assert len({first, second, host.boot_id}) == 3
    assert host.read("/etc/kept") == "yes"


def test_folders_of_this_machine_are_seen_and_cannot_be_written(labs: Labs, tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("w")
    inside = Path("/mnt/models")
    host = labs("decode-0", hardware="none", binds={tmp_path: inside})["decode-0"]
    assert host.read("/mnt/models/weights") == "w"
    assert "Read-only" in host.run("touch", "/mnt/models/new").stderr


def test_a_unit_may_lock_memory_without_limit(served: Served) -> None:
    host = served["router-0"]
    unit = host.root / "etc/systemd/system/locked.service"
    unit.write_text("[Service]\nLimitMEMLOCK=infinity\nExecStart=sleep 600\n")
    host.must("systemctl", "daemon-reload")
    host.must("systemctl", "start", "locked")
    limit = host.must("systemctl", "show", "locked", "-p", "LimitMEMLOCK", "-p", "ActiveState")
    assert limit == "LimitMEMLOCK=infinity\nActiveState=active\n"


# --- hardware
def test_a_cpu_host_has_no_gpu_no_efa_and_no_instance_store(served: Served) -> None:
    host = served["router-0"]
    assert host.must("lspci") == ""
    assert host.must("ls", "/sys/class/infiniband", "/sys/module") == (
        "/sys/class/infiniband:\n\n/sys/module:\n"
    )
    assert host.must("ls", "/sys/block") == "nvme0n1\n"


def test_a_gpu_host_has_what_a_p5en_has(gpu: Host) -> None:
    listing = gpu.must("lspci", "-n")
    assert listing.count("10de:2335") == P5EN.gpus
    assert listing.count("1d0f:efa3") == P5EN.efa_devices
    assert len(gpu.must("ls", "/dev/infiniband").split()) == P5EN.efa_devices
    assert domains(gpu) == P5EN.efa_devices
    rows = gpu.must(*SMI.split()).splitlines()
    assert rows == [f"{i}, {nvidia.NEWEST}, Completed" for i in range(P5EN.gpus)]
    assert gpu.read("/sys/class/dmi/id/sys_vendor") == "Amazon EC2\n"


def test_huge_pages_of_a_host_are_its_own(gpu: Host, served: Served) -> None:
    gpu.must("sysctl", "-w", "vm.nr_hugepages=5128")
    assert gpu.read("/proc/sys/vm/nr_hugepages").strip() == "5128"
    assert served["router-0"].read("/proc/sys/vm/nr_hugepages").strip() == "0"
    assert Path("/proc/sys/vm/nr_hugepages").read_text().strip() != "5128"


def test_the_instance_store_holds_a_file_system_over_a_reboot(healed: Host) -> None:
    host = healed
    mount = "mkdir -p /data && mount /dev/nvme1n1 /data"
    host.must("sh", "-c", f"mkfs.ext4 -q -F -m 0 -L ours /dev/nvme1n1 && {mount}")
    host.must("sh", "-c", "echo weights >/data/file")
    assert "ours" in host.must("blkid", "/dev/nvme1n1")
    host.fault("nvme-full")
    assert "No space left" in sh(host, "dd if=/dev/zero of=/data/big bs=1M count=8").stderr
    host.heal("nvme-full")
    assert sh(host, "dd if=/dev/zero of=/data/big bs=1M count=8").returncode == 0
    host.kill()
    host.boot()
    assert host.must("sh", "-c", f"{mount} && cat /data/file && umount /data") == "weights\n"
    host.fault("nvme-foreign")
    assert "somebody" in host.must("blkid", "/dev/nvme1n1")
    host.fault("no-nvme")
    assert host.must("ls", "/sys/block") == "nvme0n1\n"


def test_several_disks_are_one_array_that_a_boot_puts_together_and_a_stop_takes_away(
    labs: Labs,
) -> None:
    host = labs("prefill-1", hardware="p5en-raid")["prefill-1"]
    disks = sh(host, "echo /dev/nvme[1-9]n1").stdout.strip()
    assert len(disks.split()) == 8
    host.must("sh", "-c", "apt-get -qq update && apt-get -qq install mdadm")
    create = f"mdadm --create /dev/md/ours --run --level=0 --name=ours --raid-devices=8 {disks}"
    host.must("sh", "-c", f"{create} && mkfs.ext4 -q -F -L ours /dev/md/ours")
    member = host.must("blkid", "-p", "/dev/nvme8n1")
    assert 'TYPE="linux_raid_member"' in member
    assert 'LABEL="ours"' in member
    host.fault("kill")
    host.heal("kill")
    mount = "mount /dev/md/ours /mnt && df --output=size -BG /mnt | tail -1"
    assert int(host.must("sh", "-c", mount).strip(" G\n")) in range(30, 33)
    host.fault("stopped")
    host.heal("stopped")
    assert host.run("ls", "/dev/md127").returncode == 2
    assert host.run("blkid", "-p", "/dev/nvme8n1").returncode == 2
    host.must("sh", "-c", create)
    assert host.run("blkid", "-p", "/dev/md/ours").returncode == 2


# --- faults, each seen by what a playbook looks at
def test_every_fault_is_in_the_table() -> None:
    table = (TREE / "tests/hostlab/README.md").read_text()
    assert [name for name in FAULTS if f"| `{name}" not in table] == []


@pytest.mark.parametrize("fault", ["efa-device-down", "efa-device-missing"])
def test_an_efa_device_is_not_there(healed: Host, fault: str) -> None:
    healed.fault(fault)
    assert domains(healed) == P5EN.efa_devices - 1
    healed.heal(fault)
    assert domains(healed) == P5EN.efa_devices


def test_an_efa_device_comes_late_at_once_and_at_boot(healed: Host) -> None:
    healed.fault("efa-device-late=1")
    assert domains(healed) == P5EN.efa_devices - 1
    assert wait_for(lambda: domains(healed) == P5EN.efa_devices or None, timeout_s=5)
    healed.fault("efa-device-late=600")
    healed.kill()
    healed.boot()
    assert domains(healed) == P5EN.efa_devices - 1


def test_gpus_are_missing(healed: Host) -> None:
    healed.fault("gpu-missing")
    assert len(healed.must(*SMI.split()).splitlines()) == P5EN.gpus - 1
    healed.fault("no-gpu")
    assert "couldn't communicate with the NVIDIA driver" in sh(healed, SMI).stdout
    assert "10de" not in healed.must("lspci", "-n")


def test_driver_and_fabric_manager_differ(healed: Host) -> None:
    healed.fault("driver-mismatch")
    assert nvidia.OLDER in healed.must("nv-fabricmanager", "--version")
    assert healed.run("systemctl", "restart", "nvidia-fabricmanager").returncode == 0
    assert wait_for(
        lambda: (
            healed.run("systemctl", "is-failed", "nvidia-fabricmanager").returncode == 0 or None
        ),
        timeout_s=5,
    )
    healed.heal("driver-mismatch")
    healed.must("systemctl", "restart", "nvidia-fabricmanager")
    assert wait_for(lambda: "Completed" in sh(healed, SMI).stdout or None, timeout_s=5)
    healed.fault("driver-stale")
    assert "Driver/library version mismatch" in sh(healed, SMI).stdout


def test_the_fabric_does_not_come_up(healed: Host) -> None:
    healed.fault("fabric-stuck")
    assert "Completed" not in healed.must(*SMI.split())


def test_ssh_is_down(healed: Host, served: Served) -> None:
    healed.fault("ssh-down")
    with pytest.raises(LabError, match="prefill-0 has no SSH"):
        healed.wait(within_s=1)
    healed.heal("ssh-down")
    healed.wait()


def test_peer_access_is_missing(healed: Host) -> None:
    healed.fault("efa-no-p2p")
    seen = healed.must("sh", "-c", "cat /sys/class/infiniband/rdmap*/device/p2p | sort | uniq -c")
    assert seen.split() == ["15", "NVIDIA", "1", "none"]


def test_an_unknown_fault_is_refused(gpu: Host) -> None:
    with pytest.raises(LabError, match="no fault is called 'efa-gone'; there are kill, stopped"):
        gpu.fault("efa-gone")


# --- stand-ins of vendors' software
def test_the_installer_takes_the_real_options_and_no_other(gpu: Host) -> None:
    installer = "cd /root/aws-efa-installer && ./efa_installer.sh"
    wrong = sh(gpu, f"{installer} -y --skip-everything")
    assert (wrong.returncode, "usage: efa_installer.sh" in wrong.stdout) == (1, True)
    assert sh(gpu, "/root/aws-efa-installer/efa_installer.sh -y").returncode == 1
    assert "Do you wish to continue" in sh(gpu, installer).stdout


def test_the_installer_fails_half_way(healed: Host) -> None:
    installer = "cd /root/aws-efa-installer && ./efa_installer.sh -y"
    healed.must("rm", "/opt/amazon/efa_installed_packages")
    healed.fault("efa-installer-fails")
    failed = sh(healed, installer)
    assert (failed.returncode, "failed to install EFA packages" in failed.stderr) == (1, True)
    assert healed.run("test", "-e", "/opt/amazon/efa_installed_packages").returncode == 1
    healed.heal("efa-installer-fails")
    healed.fault("efa-needs-reboot")
    assert "Please reboot to complete" in healed.must("sh", "-c", installer)
    installed = healed.read("/opt/amazon/efa_installed_packages")
    assert installed.startswith(f"# EFA installer version: {EFA_INSTALLER}\n")


def test_the_plugin_finds_its_symbols_in_the_new_libfabric_alone(
    healed: Host, served: Served
) -> None:
    index = served.variables["vllm_pip_args"][1]
    for pin in Path(served.variables["vllm_lock"]).read_text().split():
        folder = f"{index}{pin.partition('==')[0]}/"
        wheel = f"{pin.replace('-', '_').replace('==', '-')}-py3-none-any.whl"
        unpack = f"cd /root && curl -sSfO {folder}{wheel} && python3 -m zipfile -e {wheel} runtime"
        healed.must("sh", "-c", unpack)
    python = ("env", "PYTHONPATH=/root/runtime", "NIXL_LOG_LEVEL=DEBUG", "python3")
    probe = (TREE / "kvdeploy/probes/runtime.py").read_text()
    (healed.root / "root/probe.py").write_text(probe)
    told = json.loads(healed.must(*python, "/root/probe.py", "full"))
    assert {n: told[n] for n in ("vllm", "nixl", "torch")} == {
        n: wheels.versions()[n] for n in ("vllm", "nixl", "torch")
    }
    assert told["cuda"] is True
    assert "NixlPushConnector" in told["connectors"]
    create = "from nixl._api import nixl_agent; nixl_agent('a').create_backend('LIBFABRIC')"
    assert "Backend LIBFABRIC was instantiated" in healed.run(*python, "-c", create).stderr
    healed.fault("old-libfabric")
    assert "FABRIC_1.10' not found" in healed.run(*python, "-c", create).stderr


def test_what_a_vendor_serves_wrong_is_wrong(vendor: Vendor, served: Served) -> None:
    def verifies() -> bool:
        files = served.vendor.folder / "efa"
        archive = files / f"aws-efa-installer-{EFA_INSTALLER}.tar.gz"
        ring = files.parent.parent / "ring.gpg"
        key = files / "aws-efa-installer.key"
        subprocess.run(("gpg", "--batch", "--yes", "--dearmor", "-o", ring, key), check=True)
        argv = ("gpgv", "--status-fd=1", "--keyring", ring, f"{archive}.sig", archive)
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        return f"VALIDSIG {vendor.efa_fingerprint}" in done.stdout

    assert verifies()
    for fault in ("tampered-installer", "truncated-installer", "wrong-key", "no-signature"):
        with vendor.fault(fault):
            assert not verifies(), fault
        assert verifies(), fault
    wheel = next((vendor.folder / "simple/vllm").glob("*.whl"))
    whole = wheel.read_bytes()
    with vendor.fault("truncated-wheel"):
        assert len(wheel.read_bytes()) < len(whole)
    assert wheel.read_bytes() == whole


def test_distribution_packages_are_real_and_their_services_run(served: Served) -> None:
    host = served["router-0"]
    install = "apt-get -qq update && apt-get -qq install prometheus-node-exporter"
    host.must("sh", "-c", f"DEBIAN_FRONTEND=noninteractive; {install}")
    assert wait_for(
        lambda: "node_uname_info" in sh(host, "curl -s localhost:9100/metrics").stdout or None,
        timeout_s=10,
    )
