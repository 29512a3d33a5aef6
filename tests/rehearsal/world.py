"""The world that a rehearsal happens in.

A double of AWS makes instances, and for each of them a host of the host lab is switched on, with
the private address that the double gave it: whoever applies infra/ there can go on as on AWS. The
folder of a world holds the cluster file that leads into it; all the rest is kvdeploy's own doing.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import threading
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import yaml

from kvdeploy.adapters.recipe import lock_file
from kvdeploy.model.image import BUILD_TAG
from tests.double.client import Double
from tests.hostlab import base
from tests.hostlab.lab import HostLab
from tests.hostlab.vendor import Vendor
from tests.mirror import terraform_environment
from tests.rehearsal.ground import MARK, lab_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from tests.double.client import Machine
    from tests.hostlab.guest import Host

ZONE: Final = "us-west-2a"
GPU_TYPE: Final = "p5en.48xlarge"
WHEELS_AT: Final = "/opt/wheels"
"""Where hosts see the engines' packages."""
LOCK: Final = "engines.txt"
"""Beside the cluster file."""
HARDWARE: Final = {GPU_TYPE: "p5en", "p5.4xlarge": "p5-small"}
"""Mocked; instances of other types have none."""
TCP: Final = {"UCX_TLS": "tcp,cuda_copy"}
"""NIXL sees the mocked GPUs, and refuses a UCX that could not reach their memory."""
LOOK_S: Final = 0.3
IMAGE_S: Final = 2.0
"""Longer than a look: the disk of an image's builder is kept before the builder is gone."""
ON: Final = frozenset({"pending", "running"})


class World:
    """A context manager. `root` is a folder of its own."""

    def __init__(self, root: Path, document: Mapping[str, Any] | None = None) -> None:
        """`document` is a cluster file that is to be rehearsed, as far as a rehearsal can."""
        self.root, self._document = root.resolve(), dict(document or {})
        self.double = Double()
        self.lab = HostLab(lab_of(self.root))
        self.hosts: dict[str, Host] = {}
        """By instance, of all that are switched on."""
        self._stopped: set[str] = set()
        self._broken: set[str] = set()
        self.env: dict[str, str] = {}
        self.wheels = self.root
        """Packages that hosts find beside those of the engines' lock."""
        self._stack = ExitStack()
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._cores = os.sched_getaffinity(0)
        self.trouble: list[BaseException] = []

    def __enter__(self) -> Self:
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / MARK).touch()
        found = terraform_environment(self.root)
        if isinstance(found, str):
            raise RuntimeError(found)  # noqa: TRY004
        self.env, self._wheels = found, engine_wheels()
        try:
            self._stack.enter_context(self.double)
            self.double.slow_image(IMAGE_S)
            self._stack.enter_context(self.lab).open()
            vendor = Vendor.build(self.root / "vendor")
            self.wheels = vendor.folder / "wheels"
            self.wheels.mkdir(exist_ok=True)
            url = self._stack.enter_context(vendor.serve(self.lab.gateway))
            self._write_cluster(vendor.variables(url), url)
            self._watcher.start()
            self._stack.callback(self._stop_watching)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is left but the folder."""
        self._stack.close()

    def _stop_watching(self) -> None:
        self._ended.set()
        self._watcher.join()

    def kvdeploy(self, *argv: str, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
        """The command line, as a person in this folder would type it."""
        return subprocess.run(
            [sys.executable, "-m", "kvdeploy", *argv],
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    @property
    def environment(self) -> dict[str, str]:
        """Of programs that run in this world: nobody's AWS account is in it."""
        mine = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "TF_"))}
        return mine | self.env

    # --- the cluster file
    @property
    def lock(self) -> Path:
        """Of the engines, as the cluster file names it."""
        return self.root / LOCK

    def _write_cluster(self, vendor: Mapping[str, Any], url: str) -> None:
        subnet = f"{self.lab.gateway.rpartition('.')[0]}.0/24"
        shutil.copy(lock_file("cpu.txt"), self.lock)
        places = ["--find-links", WHEELS_AT, "--find-links", f"{url}/wheels/"]
        trusted = ["--trusted-host", self.lab.gateway]
        variables = {
            **vendor,
            "vllm_lock": LOCK,
            "vllm_pip_args": ["--no-index", *places, *trusted, "--no-compile"],
        }
        wanted = self._document.get("aws", {}).get("instance_type")
        ours: dict[str, Any] = {
            "target": "aws",
            "model": {"id": "builtin:tiny", "max_length": 2048},
            "router": {"host": "0.0.0.0", "api_key_file": "api-keys"},
            "runtime": {"device": "cpu", "env": TCP},
            "aws": {
                "region": ZONE[:-1],
                "zone": ZONE,
                "instance_type": wanted if wanted in HARDWARE else GPU_TYPE,
                "network": {"cidr": subnet, "allowed_cidrs": [subnet]},
                "access": {"method": "ssh", "ssh_cidrs": [subnet]},
                "node_variables": variables,
                "endpoint": self.double.url,
            },
        }
        whole = merged({"name": "rehearsal"} | self._document, ours)
        (self.root / "cluster.yaml").write_text(yaml.safe_dump(whole, sort_keys=False))
        keys = self.root / "api-keys"
        if not keys.exists():
            keys.touch(mode=0o600)
            keys.write_text(f"{secrets.token_hex(16)}\n")
        lines = "".join(f"export {name}={value}\n" for name, value in self.env.items())
        (self.root / "env").write_text(lines)

    # --- hosts in the place of instances
    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            try:
                self._look()
            except Exception as e:  # noqa: BLE001 - told by whoever waits for a host
                self.trouble.append(e)

    def _look(self) -> None:
        seen = {m.id: m for m in self.double.instances()}
        for id in [i for i in self.hosts if i not in seen]:
            self.lab.remove(self.hosts.pop(id))
        known = self.hosts.keys() | self._broken
        new = [m for m in seen.values() if m.state in ON and m.id not in known and m.private_ip]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(self._switch_on, new))
        for id, host in self.hosts.items():
            if seen[id].state == "stopped" and id not in self._stopped:
                host.fault("stopped")
                self._stopped.add(id)
                self._keep_disk(seen[id], host)
            elif seen[id].state in ON and id in self._stopped:
                host.heal("stopped")
                self._stopped.remove(id)

    def _keep_disk(self, machine: Machine, host: Host) -> None:
        """Of the builder of an image: images are known by the build that they are of."""
        if build := machine.tags.get(BUILD_TAG):
            (self.root / "images").mkdir(exist_ok=True)
            host.capture(self.root / "images" / build)

    def _switch_on(self, machine: Machine) -> None:
        try:
            self.hosts[machine.id] = self._make(machine)
        except Exception as e:  # noqa: BLE001 - tried once; whoever waits for the host is told
            self._broken.add(machine.id)
            self.trouble.append(e)

    def _make(self, machine: Machine) -> Host:
        node = machine.tags.get("kvdeploy:node", "host")
        host = self.lab.add(
            f"{node}-{machine.id[-4:]}",
            HARDWARE.get(machine.type, "none"),
            address=str(machine.private_ip),
            binds={self._wheels: Path(WHEELS_AT)},
            cores=self._core_of(node),
            **self._from_ec2(machine),
        )
        host.wait()
        return host

    def _core_of(self, node: str) -> tuple[int, ...]:
        """Engines that share a core wait for each other: prefill and decode do not."""
        cores, (role, _, number) = sorted(self._cores), node.rpartition("-")
        at = 2 * int(number) + (role == "decode") if number.isdigit() else 0
        return (cores[at % len(cores)],)

    def _from_ec2(self, machine: Machine) -> dict[str, Any]:
        """What the host has of its instance: keys, and the disk of its image."""
        ec2 = self.double.client("ec2")
        told = ec2.describe_instances(InstanceIds=[machine.id])["Reservations"][0]["Instances"][0]
        found: dict[str, Any] = {}
        if name := told.get("KeyName"):
            keys = ec2.describe_key_pairs(KeyNames=[name], IncludePublicKey=True)["KeyPairs"]
            found["login_key"] = f"{keys[0]['PublicKey'].strip()}\n"
        (image,) = ec2.describe_images(ImageIds=[told["ImageId"]])["Images"]
        builds = [tag["Value"] for tag in image.get("Tags", ()) if tag["Key"] == BUILD_TAG]
        if builds:
            found["image"] = self.root / "images" / builds[0]
        return found | self._first_boot(ec2, machine)

    def _first_boot(self, ec2: Any, machine: Machine) -> dict[str, Any]:
        """What cloud-init would make of the user data: the keys in it."""
        asked = {"InstanceId": machine.id, "Attribute": "userData"}
        told = ec2.describe_instance_attribute(**asked).get("UserData", {}).get("Value", "")
        text = b64decode(told).decode(errors="replace")
        if not text.startswith("#cloud-config"):
            return {}
        config = yaml.safe_load(text)
        keys = config.get("ssh_keys", {})
        found: dict[str, Any] = {}
        if "ed25519_private" in keys:
            found["host_key"] = (keys["ed25519_private"], keys["ed25519_public"])
        if logins := config.get("ssh_authorized_keys"):
            found["login_key"] = "".join(f"{key.strip()}\n" for key in logins)
        return found


def merged(document: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`document` with all that `over` has."""
    found = dict(document)
    for key, value in over.items():
        inner = found.get(key)
        found[key] = merged(inner, value) if isinstance(inner, dict) else value
    return found


def engine_wheels() -> Path:
    """The engines' packages for CPUs, fetched once a machine with pip's own configuration."""
    lock = lock_file("cpu.txt")
    digest = sha256(lock.read_bytes()).hexdigest()[:10]
    folder = base.CACHE / f"runtime-wheels-{digest}"
    if not folder.exists():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
        only = ("--only-binary", ":all:", "--python-version", "3.11")
        subprocess.run([*pip, *only, "--dest", part, "-r", lock], check=True, timeout=900)
        part.rename(folder)
    return folder
