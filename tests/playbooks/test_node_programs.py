"""The programs that the roles base, nvidia and efa run on nodes, by themselves: what they say of
states that no test host can be brought into, disks (loop devices), and a download that is cut off.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.hostlab.gpg import Key
from tests.playbooks.conftest import NO_SKIP

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

ROLES: Final = Path(__file__).parents[2] / "playbooks/roles"
DISK: Final = ROLES / "base/files/data_disk.py"
FETCH: Final = ROLES / "efa/files/fetch.py"
MODEL: Final = "Amazon EC2 NVMe Instance Storage"


def program(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), ROLES / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- sentences ------------------------------------------------------------------------------------
GPUS: Final[dict[str, Any]] = {
    "answers": True,
    "said": "",
    "driver": "580.159.03",
    "count": 8,
    "persistent": True,
    "broken": [],
    "outside": [],
    "inside": 8,
}
MANAGER: Final[dict[str, Any]] = {
    "version": "580.159.03",
    "active": True,
    "enabled": True,
    "log": "",
}
ASKED: Final[dict[str, Any]] = {
    "gpus": 8,
    "least": "580",
    "fabric": True,
    "install": True,
    "wait_s": 9,
}


@pytest.mark.parametrize(
    ("seen", "manager", "said"),
    [
        ({}, {}, ""),
        (
            {"answers": False, "said": "NVIDIA-SMI has failed."},
            {},
            "has an NVIDIA driver that does not answer: NVIDIA-SMI has failed.",
        ),
        (
            {"driver": "570.1"},
            {"version": "570.1"},
            "has NVIDIA driver 570.1, older than 580: run again to replace it.",
        ),
        (
            {"count": 7, "inside": 7},
            {},
            "has 8 GPUs on its PCI bus, and the driver brought 7 up: see 'journalctl -k --grep Xid'"
            " there; stop and start it to move it to other hardware.",
        ),
        (
            {},
            {"version": ""},
            "has NVIDIA driver 580.159.03 and no fabric manager: both must be the same to the"
            " digit. Run again to give it the right one, or use another image.",
        ),
        (
            {},
            {"active": False, "log": "NV_WARN_NOTHING_TO_DO"},
            "has a fabric manager that does not run: NV_WARN_NOTHING_TO_DO",
        ),
        (
            {"inside": 7, "outside": ["3: In Progress (N/A)"]},
            {},
            "has GPUs that did not join the NVLink fabric in 9 s: 3: In Progress (N/A). See"
            " 'journalctl -u nvidia-fabricmanager' there, and reboot it.",
        ),
        (
            {"persistent": False},
            {},
            "has GPUs that do not stay initialised: see 'journalctl -u kvdeploy-persistence'"
            " there.",
        ),
        (
            {"broken": [2, 5]},
            {},
            "has uncorrected memory errors on GPU 2, 5: reboot it to have the rows remapped; if"
            " they come back, replace the node.",
        ),
    ],
)
def test_what_is_wrong_with_gpus_is_told_in_one_sentence(
    seen: dict[str, Any], manager: dict[str, Any], said: str
) -> None:
    assert program("nvidia/files/look.py").wrong(ASKED, GPUS | seen, MANAGER | manager) == said


@pytest.mark.parametrize(
    ("there", "asked", "seen", "packaged", "said"),
    [
        (8, {}, {}, False, ""),
        (8, {}, {"answers": False, "driver": ""}, False, ""),
        (8, {}, {"driver": "570.1"}, True, ""),
        (
            7,
            {},
            {},
            True,
            "shows 7 NVIDIA GPUs on its PCI bus, and 8 were expected: it is another instance type,"
            " or hardware is broken (stop and start it to move it).",
        ),
        (
            8,
            {"install": False},
            {"answers": False, "driver": "", "said": "nvidia-smi is not installed"},
            False,
            "has no NVIDIA driver that answers (nvidia-smi is not installed), and installing one is"
            " switched off (nvidia_install): use an image that has the driver, or switch it on.",
        ),
        (
            8,
            {},
            {"driver": "570.1"},
            False,
            "has NVIDIA driver 570.1, older than 580, and it did not come from packages, so that"
            " none can replace it: use a newer image.",
        ),
        (
            8,
            {"install": False},
            {"driver": "570.1"},
            True,
            "has NVIDIA driver 570.1, older than 580, and installing one is switched off"
            " (nvidia_install): use a newer image.",
        ),
    ],
)
def test_a_machine_whose_gpus_cannot_be_helped_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    there: int,
    asked: dict[str, Any],
    seen: dict[str, Any],
    packaged: bool,  # noqa: FBT001
    said: str,
) -> None:
    look = program("nvidia/files/look.py")
    monkeypatch.setattr(look, "on_the_bus", lambda: there)
    assert look.refused(ASKED | asked, GPUS | seen, packaged=packaged) == said


@pytest.mark.parametrize(
    ("version", "found", "usable", "there", "said"),
    [
        ("1", ["rdmap1s0", "rdmap2s0"], ["rdmap1s0", "rdmap2s0"], 2, ""),
        ("", [], [], 2, "has no EFA 9.9 that was installed to its end: run again to install it."),
        (
            "1",
            ["rdmap1s0"],
            ["rdmap1s0"],
            1,
            "has 1 of 2 EFA devices after waiting 9 s: its PCI bus has 1, and network interfaces"
            " can only be given to a machine when it is launched. Make the node again.",
        ),
        (
            "1",
            ["efa_0", "rdmap2s0"],
            ["rdmap2s0"],
            2,
            "has EFA devices that were not given their lasting names: efa_0. The udev rules of"
            " rdma-core are missing or did not run: run 'udevadm trigger' there, or reboot it.",
        ),
        (
            "1",
            ["rdmap1s0", "rdmap2s0"],
            ["rdmap2s0"],
            2,
            "has 2 EFA devices, and libfabric can use 1: rdmap1s0 cannot be used. See"
            " '/opt/amazon/efa/bin/fi_info -p efa' and 'journalctl -k --grep efa' there, and reboot"
            " it.",
        ),
        (
            "1",
            ["rdmap1s0", "rdmap2s0"],
            [],
            2,
            "has 2 EFA devices, and libfabric can use 0: fi_getinfo: -61. See"
            " '/opt/amazon/efa/bin/fi_info -p efa' and 'journalctl -k --grep efa' there, and reboot"
            " it.",
        ),
    ],
)
def test_what_is_wrong_with_efa_is_told_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    found: list[str],
    usable: list[str],
    there: int,
    said: str,
) -> None:
    look = program("efa/files/look.py")
    monkeypatch.setattr(look, "on_the_bus", lambda: there)
    asked = {"devices": 2, "version": "9.9", "wait_s": 9}
    devices = dict.fromkeys(found, "NVIDIA")
    assert look.wrong(asked, version, devices, usable, "fi_getinfo: -61") == said


# --- disks ----------------------------------------------------------------------------------------
MDADM: Final = """#!/bin/sh
# Stand-in: this machine's kernel has no MD. An array is its first disk; what was asked is kept.
echo "$*" >>{log}
case $1 in --create | --assemble) ln -sfn {first} {array} ;; esac
"""


PARTITIONED: Final = r"""
entry='\000\000\000\000\203\000\000\000\000\010\000\000\000\020\000\000'
printf "$entry" | dd of="$0" bs=1 seek=446 conv=notrunc
printf '\125\252' | dd of="$0" bs=1 seek=510 conv=notrunc
"""
"""A partition table with one partition."""


class Disks:
    """A machine's instance store: loop devices, shown to the program through its own names."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.place = folder, folder / "data"
        self.log, self.array = folder / "mdadm.log", folder / "md"
        self.blocks = folder / "block"
        self.devices: dict[str, str] = {}
        for number in range(1, count + 1):
            image = folder / f"{number}.img"
            with image.open("wb") as file:
                file.truncate(64 * 2**20)
            attach = ("losetup", "--find", "--show", str(image))
            device = subprocess.run(attach, check=True, capture_output=True, text=True).stdout
            name = f"nvme{number}n1"
            self.devices[name] = device.strip()
            (self.blocks / name / "device").mkdir(parents=True)
            (self.blocks / name / "holders").mkdir()
            (self.blocks / name / "device/model").write_text(f"{MODEL}   \n")
        (self.blocks / "nvme0n1/device").mkdir(parents=True)
        (self.blocks / "nvme0n1/device/model").write_text("Amazon Elastic Block Store\n")
        program = folder / "bin/mdadm"
        program.parent.mkdir()
        first = next(iter(self.devices.values()))
        program.write_text(MDADM.format(log=self.log, first=first, array=self.array))
        program.chmod(0o755)

    def __call__(self, action: str, *more: str) -> dict[str, Any]:
        """What the program says; it finds this machine's disks where it looks for a node's."""
        text = DISK.read_text().replace('"/sys/block"', repr(str(self.blocks)))
        text = text.replace('f"/dev/{block.name}"', f"{self.devices!r}[block.name]")
        text = text.replace('"/dev/md/kvdeploy"', repr(str(self.array)))
        text = text.replace('"/opt/dlami/nvme"', repr(str(self.folder / "ami")))
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        done = subprocess.run(
            [sys.executable, "-c", text, action, str(self.place), *more],
            check=False,
            capture_output=True,
            text=True,
            env={"PATH": path},
        )
        if done.returncode:
            return {"state": "failed", "reason": done.stderr.strip()}
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    def umount(self) -> None:
        subprocess.run(["umount", str(self.place)], check=False, capture_output=True)

    def blank(self, name: str) -> None:
        """As a disk comes back when its instance was stopped."""
        disk = os.open(self.devices[name], os.O_WRONLY | os.O_EXCL)
        os.write(disk, bytes(2**20))
        os.close(disk)

    def detach(self) -> None:
        self.umount()
        for device in self.devices.values():
            subprocess.run(["losetup", "--detach", device], check=False)


@contextmanager
def disks(folder: Path, count: int) -> Iterator[Disks]:
    if os.geteuid() != 0 or not Path("/dev/loop-control").exists():
        why = "disks need root and loop devices"
        if os.environ.get(NO_SKIP):
            pytest.fail(f"{why}, and {NO_SKIP} is set")
        pytest.skip(why)
    made = Disks(folder, count)
    try:
        yield made
    finally:
        made.detach()


def test_a_disk_is_formatted_once_and_again_when_it_comes_back_blank(tmp_path: Path) -> None:
    with disks(tmp_path, 1) as one:
        assert one("look")["state"] == "new"
        told = one("mount", "root")
        assert told == {"state": "mounted", "source": one.devices["nvme1n1"]}
        assert one("mount", "root") == told
        (one.place / "weights").write_text("w")
        one.umount()
        assert one("look")["state"] == "kept"
        one("mount", "root")
        assert (one.place / "weights").read_text() == "w"
        one.umount()
        one.blank("nvme1n1")
        one("mount", "root")
        assert not (one.place / "weights").exists()


@pytest.mark.parametrize(
    ("make", "holds"),
    [
        (("mkfs.ext4", "-q", "-F", "-L", "mine"), "ext4 'mine'"),
        (("mkswap", "--quiet"), "swap"),
        (("sh", "-c", PARTITIONED), "dos"),
    ],
)
def test_a_disk_that_holds_anything_else_is_never_written_to(
    tmp_path: Path, make: tuple[str, ...], holds: str
) -> None:
    with disks(tmp_path, 2) as two:
        second = two.devices["nvme2n1"]
        subprocess.run([*make, second], check=True, capture_output=True)
        before = Path(second).read_bytes()
        for action in (("look",), ("mount", "root")):
            told = two(*action)
            assert told["reason"].startswith(f"{second} holds {holds}: kvdeploy formats blank"), (
                told
            )
        assert Path(second).read_bytes() == before
        assert two("look")["state"] == "refused"


def test_several_disks_become_one_striped_array(tmp_path: Path) -> None:
    with disks(tmp_path, 3) as three:
        assert three("mount", "root")["state"] == "mounted"
        assert three.log.read_text().splitlines() == [
            f"--create {three.array} --run --level=0 --name=kvdeploy-data --homehost=any"
            f" --raid-devices=3 {' '.join(three.devices.values())}"
        ]


def test_without_an_instance_store_it_says_what_to_do(tmp_path: Path) -> None:
    with disks(tmp_path, 1) as none:
        shutil.rmtree(none.blocks / "nvme1n1")
        assert none("look")["reason"] == (
            f"this machine has no instance store (no NVMe disk of the model {MODEL!r}): use an"
            " instance type that has one, or let weights and caches lie on the root disk"
        )


# --- downloads ------------------------------------------------------------------------------------
class Cut(BaseHTTPRequestHandler):
    """Ends each connection after so many bytes of a large file."""

    def __init__(self, *args: Any, folder: Path, asked: list[str]) -> None:
        self._folder, self._asked = folder, asked
        super().__init__(*args)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        file = self._folder / self.path.rpartition("/")[2]
        if not file.exists():
            self.send_error(404)
            return
        content, span = file.read_bytes(), self.headers.get("Range", "")
        self._asked.append(f"{file.name} {span}".strip())
        start = int(span.removeprefix("bytes=").rstrip("-") or 0)
        self.send_response(206 if span else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start : start + 40000])


@contextmanager
def serve(folder: Path) -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []
    handler = partial(Cut, folder=folder, asked=asked)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()
        thread.join()


def test_a_download_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    served, cache = tmp_path / "served", tmp_path / "cache"
    (served / "aws-efa-installer").mkdir(parents=True)
    (served / "aws-efa-installer/efa_installer.sh").write_text("#!/bin/sh\n")
    (served / "aws-efa-installer/large").write_bytes(os.urandom(100000))
    archive = served / "aws-efa-installer-9.tar.gz"
    subprocess.run(["tar", "-C", served, "-czf", archive, "aws-efa-installer"], check=True)
    with Key("Its makers") as key, serve(served) as (url, asked):
        key.export(served / "aws-efa-installer.key")
        key.sign(archive, archive.with_name(f"{archive.name}.sig"))
        argv = [sys.executable, str(FETCH), url, "9", key.fingerprint.lower(), str(cache)]
        done = subprocess.run(argv, check=False, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        absent = subprocess.run(
            [sys.executable, FETCH, f"{url}/", "10", key.fingerprint, tmp_path / "other"],
            check=False,
            capture_output=True,
            text=True,
        )
    assert (cache / "aws-efa-installer/efa_installer.sh").is_file()
    assert [a for a in asked if ".sig" not in a and ".key" not in a] == [
        archive.name,
        f"{archive.name} bytes=40000-",
        f"{archive.name} bytes=80000-",
    ]
    assert absent.stderr == (
        f"could not fetch {url}/aws-efa-installer-10.tar.gz.sig (HTTP 404): give the node a way to"
        " it (a NAT or a proxy), or set efa_url to a mirror that has the installer, its .sig and"
        " its key\n"
    )
