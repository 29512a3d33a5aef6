"""Gathers what tells how a node is, into NAME.tar.gz in a directory of its own; prints its path.

Runs on the node as root, by its own Python (3.9 or newer), with the standard library alone. Changes
nothing. A program that is not there, fails or hangs is noted in its file. Environment files and API
keys are left out, and their secrets are struck out of everything that is taken.
"""

from __future__ import annotations

import fnmatch
import io
import json
import re
import subprocess  # noqa: TID251  # stands alone on the node
import sys
import tarfile
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

STRUCK = "(secret)"
SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL", re.IGNORECASE)
SHORTEST = 6
"""Letters of a value that is struck out wherever it stands; a shorter one would strike words."""
SECRET_FORMS = (
    re.compile(r"\bhf_[A-Za-z0-9]{16,}"),
    re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    re.compile(r"(?i)(?<=\bbearer )[A-Za-z0-9._~+/=-]{6,}"),
    re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),
)
UNITS = "kvdeploy-*"
FILES_MIB = 8
"""Most that is taken of one file."""
HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def commands(asked: dict[str, Any]) -> dict[str, list[str]]:
    """By the file that the output goes into."""
    lines, root = str(asked["lines"]), asked["root"]
    python = f"{root}/runtime/bin/python"
    return {
        "system/uname.txt": ["uname", "-a"],
        "system/uptime.txt": ["uptime"],
        "system/time.txt": ["timedatectl"],
        "system/memory.txt": ["free", "-m"],
        "system/disks.txt": ["df", "-h"],
        "system/block.txt": ["lsblk", "-o", "NAME,SIZE,TYPE,FSTYPE,MOUNTPOINT,MODEL"],
        "system/packages.txt": ["dpkg-query", "-W", "-f", "${Package} ${Version} ${Status}\n"],
        "system/processes.txt": ["ps", "-eo", "pid,ppid,user,rss,pcpu,psr,etime,comm"],
        "system/kernel.txt": ["dmesg", "--ctime"],
        "system/addresses.txt": ["ip", "-brief", "address"],
        "system/links.txt": ["ip", "-statistics", "link"],
        "system/listeners.txt": ["ss", "-ltnp"],
        "system/pci.txt": ["lspci", "-nn"],
        "system/units.txt": ["systemctl", "list-units", "--all", "--no-pager", "--full"],
        "system/journal.txt": ["journalctl", "-b", "-p", "warning", "-n", lines, "--no-pager"],
        "gpu/nvidia-smi.txt": ["nvidia-smi"],
        "gpu/nvidia-smi-q.txt": ["nvidia-smi", "-q"],
        "gpu/topology.txt": ["nvidia-smi", "topo", "-m"],
        "gpu/fabric-manager.txt": [
            *("journalctl", "-u", "nvidia-fabricmanager", "-n", lines, "--no-pager")
        ],
        "efa/fi_info.txt": ["/opt/amazon/efa/bin/fi_info", "-p", "efa", "-t", "FI_EP_RDM"],
        "efa/version.txt": ["/opt/amazon/efa/bin/fi_info", "--version"],
        "kvdeploy/units.txt": ["systemctl", "status", UNITS, "--no-pager", "--full", "--lines=0"],
        "kvdeploy/unit-files.txt": ["systemctl", "cat", UNITS, "--no-pager"],
        "kvdeploy/runtime.txt": [python, "-m", "pip", "list", "--disable-pip-version-check"],
        "kvdeploy/router-packages.txt": [
            *(f"{root}/router/bin/python", "-m", "pip", "list", "--disable-pip-version-check")
        ],
        "kvdeploy/root.txt": ["ls", "-la", "--time-style=full-iso", root],
    }


FILES = (
    "/etc/os-release",
    "/proc/meminfo",
    "/proc/cmdline",
    "/opt/amazon/efa_installed_packages",
    "/sys/module/efa/version",
    "/proc/driver/nvidia/version",
    "/run/kvdeploy/*.generation",
    "/run/kvdeploy/*.reason",
)
COUNTERS = "/sys/class/infiniband/*/ports/*/hw_counters/*"


class Bundle:
    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked = asked
        self.secrets = find_secrets(Path(asked["etc"]))
        self.texts: dict[str, str] = {}

    def gather(self) -> None:
        for name, argv in commands(self.asked).items():
            self.take(name, self.run(argv))
        for pattern in (*FILES, f"{self.asked['etc']}/*.json", f"{self.asked['etc']}/*/*.json"):
            for path in found(pattern):
                self.take(f"files{path}", read(path))
        counters = [f"{p} {read(p).strip()}" for p in found(COUNTERS)]
        self.take("efa/counters.txt", "\n".join(counters) or "no EFA counters on this node")
        for unit in self.units():
            argv = ["journalctl", "-u", unit, "-n", str(self.asked["lines"]), "--no-pager"]
            self.take(f"logs/{unit}.txt", self.run([*argv, "-o", "short-iso"]))
        for name, url in self.metrics().items():
            self.take(f"metrics/{name}.txt", fetch(url))

    def units(self) -> list[str]:
        out = self.run(["systemctl", "list-units", "--all", "--plain", "--no-legend", UNITS])
        words = [line.split()[0] for line in out.splitlines() if line.strip()]
        return [word for word in words if fnmatch.fnmatch(word, f"{UNITS}.service")]

    def metrics(self) -> dict[str, str]:
        """/metrics of each process, beside the URL that says whether it is ready."""
        urls = {}
        etc = self.asked["etc"]
        for path in (*found(f"{etc}/*.launch.json"), *found(f"{etc}/engines/*.json")):
            try:
                spec = json.loads(read(path))
                urls[spec["name"]] = spec["ready"]["url"].replace("/health", "/metrics")
            except (ValueError, KeyError, TypeError):
                continue
        return urls

    def run(self, argv: list[str]) -> str:
        try:
            done = subprocess.run(
                argv,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=self.asked["timeout_s"],
            )
        except FileNotFoundError:
            return f"({argv[0]} is not on this node)\n"
        except (OSError, subprocess.TimeoutExpired) as e:
            return f"({' '.join(argv)}: {e})\n"
        ended = f"\n(exit {done.returncode})\n" if done.returncode else ""
        return f"{done.stdout}{done.stderr}{ended}"

    def take(self, name: str, text: str) -> None:
        for secret in self.secrets:
            text = text.replace(secret, STRUCK)
        for form in SECRET_FORMS:
            text = form.sub(STRUCK, text)
        self.texts[name] = text

    def write(self) -> Path:
        """Only root may read it: logs hold what users asked, if vLLM was told to log that."""
        path = Path(tempfile.mkdtemp(prefix="kvdeploy-collect-")) / f"{self.asked['name']}.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name, text in sorted(self.texts.items()):
                content = text.encode()
                entry = tarfile.TarInfo(f"{self.asked['name']}/{name.lstrip('/')}")
                entry.size, entry.mtime = len(content), int(time.time())
                archive.addfile(entry, io.BytesIO(content))
        return path


def find_secrets(etc: Path) -> list[str]:
    """Keys of the router's clients, and values of variables that are named like secrets."""
    known = read(etc / "api-keys").split()
    for path in (*etc.glob("*.env"), *etc.glob("*/*.env")):
        for line in read(path).splitlines():
            name, _, value = line.partition("=")
            if SECRET_NAME.search(name):
                known.append(re.sub(r"\\(.)", r"\1", value.strip().strip('"')))
    return sorted({s for s in known if len(s) >= SHORTEST}, key=len, reverse=True)


def found(pattern: str) -> list[Path]:
    return sorted(Path("/").glob(pattern.lstrip("/")))


def read(path: Path) -> str:
    try:
        with path.open("rb") as f:
            return f.read(FILES_MIB * 2**20).decode("utf-8", "replace")
    except OSError as e:
        return f"({e})\n" if path.suffix != ".env" and path.name != "api-keys" else ""


def fetch(url: str) -> str:
    try:
        with HTTP.open(url, timeout=10) as response:
            return str(response.read(), "utf-8", "replace")
    except (OSError, ValueError) as e:
        return f"({url}: {e})\n"


if __name__ == "__main__":
    bundle = Bundle(json.load(sys.stdin))
    bundle.gather()
    sys.stdout.write(f"{bundle.write()}\n")
