#!/usr/bin/env python3
"""What a node's EFA devices and NVIDIA GPUs say, in the text format that node_exporter reads.

Owns the metrics kvdeploy_efa_* and kvdeploy_gpu_*. Runs on a node that has Python 3.10 and
nothing else of ours. Hardware that is missing or silent is a metric, never a failure.
"""

from __future__ import annotations

import argparse
import re
import subprocess  # noqa: TID251 (on its own on a node)
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

SYS: Final = Path("/sys")
AMAZON: Final = "0x1d0f"
"""PCI vendor: other RDMA devices are not EFA."""
NOT_COUNTERS: Final = {"lifespan"}
"""Files beside the counters: how long the kernel caches them, in milliseconds."""

WANTED: Final = ("index", "uuid", "name", "driver_version")
NUMBERS: Final = {
    "utilization.gpu": ("kvdeploy_gpu_utilization_ratio", 0.01, "Time in which a kernel ran"),
    "memory.used": ("kvdeploy_gpu_memory_used_bytes", 2**20, "Memory in use"),
    "memory.total": ("kvdeploy_gpu_memory_bytes", 2**20, "Memory"),
    "temperature.gpu": ("kvdeploy_gpu_temperature_celsius", 1, "Temperature"),
    "power.draw": ("kvdeploy_gpu_power_watts", 1, "Power drawn"),
    "ecc.errors.uncorrected.volatile.total": (
        "kvdeploy_gpu_uncorrected_errors_total",
        1,
        "Uncorrected memory errors since the driver was loaded",
    ),
}
"""What nvidia-smi is asked for: metric, factor, help."""
WORDS: Final = {
    "fabric.state": ("kvdeploy_gpu_fabric_ready", "Completed", "1: joined the NVSwitch fabric"),
    "remapped_rows.failure": ("kvdeploy_gpu_remap_failed", "Yes", "1: a bad row was not replaced"),
    "gpu_recovery_action": ("kvdeploy_gpu_healthy", "None", "0: the driver asks for a recovery"),
}
"""The same for words: metric, the word that is 1, help."""
NOT_SAID: Final = "N/A"
SMI_TIMEOUT_S: Final = 10.0


class Text:
    """Metrics in the order in which they come, each family's header once."""

    def __init__(self) -> None:
        self._families: dict[str, list[str]] = {}

    def add(self, name: str, value: float, help_text: str, /, **labels: str) -> None:
        kind = "counter" if name.endswith("_total") else "gauge"
        family = self._families.setdefault(
            name, [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
        )
        inside = ",".join(f'{k}="{_escape(v)}"' for k, v in labels.items())
        family.append(f"{name}{{{inside}}} {value:.17g}" if inside else f"{name} {value:.17g}")

    def render(self) -> str:
        return "".join(f"{line}\n" for family in self._families.values() for line in family)


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def add_efa(text: Text, sys_root: Path, expected: int) -> None:
    """Every counter of every EFA device, and how many devices there are."""
    devices = [d for d in sorted(sys_root.glob("class/infiniband/*")) if _is_efa(d)]
    text.add("kvdeploy_efa_devices", len(devices), "EFA devices that the kernel shows")
    text.add("kvdeploy_efa_devices_expected", expected, "EFA devices that the node should have")
    if version := _read(sys_root / "module/efa/version"):
        text.add("kvdeploy_efa_driver_info", 1, "The EFA kernel module", version=version)
    for device in devices:
        for port in sorted(device.glob("ports/*")):
            labels = {"device": device.name, "port": port.name}
            active = (_read(port / "state") or "").endswith("ACTIVE")
            text.add("kvdeploy_efa_port_active", int(active), "1: the port is active", **labels)
            _add_counters(text, port / "hw_counters", labels)
        _add_counters(text, device / "hw_counters", {"device": device.name})


def _is_efa(device: Path) -> bool:
    return _read(device / "device/vendor") == AMAZON


def _add_counters(text: Text, folder: Path, labels: Mapping[str, str]) -> None:
    for path in sorted(folder.glob("*")):
        value = _number(_read(path))
        if value is None or path.name in NOT_COUNTERS:
            continue
        if path.name.endswith("_bytes"):
            kind, name = path.name.removesuffix("_bytes"), "kvdeploy_efa_bytes_total"
            text.add(name, value, "Bytes by what the device did with them", **labels, kind=kind)
        else:
            name = "kvdeploy_efa_events_total"
            text.add(name, value, "The device's other counters", **labels, kind=path.name)


def add_gpus(text: Text, expected: int) -> None:
    """What nvidia-smi says of every GPU."""
    rows = read_gpus(quiet=expected == 0)
    if not rows and expected == 0:
        return
    text.add("kvdeploy_gpus", len(rows), "GPUs that nvidia-smi shows")
    text.add("kvdeploy_gpus_expected", expected, "GPUs that the node should have")
    for row in rows:
        gpu = {"gpu": row["index"]}
        about = {"uuid": row["uuid"], "name": row["name"], "driver": row["driver_version"]}
        text.add("kvdeploy_gpu_info", 1, "The GPU and its driver", **gpu, **about)
        for field, (name, factor, help_text) in NUMBERS.items():
            value = _number(row.get(field))
            if value is not None:
                text.add(name, value * factor, help_text, **gpu)
        for field, (name, word, help_text) in WORDS.items():
            said = row.get(field, NOT_SAID)
            if said.strip("[]") != NOT_SAID:
                text.add(name, int(said == word), help_text, **gpu)


def read_gpus(*, quiet: bool) -> list[dict[str, str]]:
    """One row a GPU, fields by name; none, and a line on stderr, when nvidia-smi does not say."""
    fields = [*WANTED, *NUMBERS, *WORDS]
    while True:
        asked = f"--query-gpu={','.join(fields)}"
        try:
            smi = subprocess.run(
                ["nvidia-smi", asked, "--format=csv,noheader,nounits"],  # noqa: S607
                capture_output=True,
                text=True,
                timeout=SMI_TIMEOUT_S,
                check=False,
            )
        except (FileNotFoundError, subprocess.TimeoutExpired) as e:
            if not quiet:
                sys.stderr.write(f"nvidia-smi: {e}\n")
            return []
        said = smi.stdout + smi.stderr
        unknown = re.search(r'Field "([^"]+)" is not a valid field', said)
        if unknown and unknown[1] in fields[len(WANTED) :]:  # the driver is older than the field
            fields.remove(unknown[1])
            continue
        if smi.returncode:
            sys.stderr.write(f"nvidia-smi: {said.strip()}\n")
            return []
        rows = (line.split(", ") for line in smi.stdout.splitlines())
        return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def _read(path: Path) -> str | None:
    """A file's one line; None where there is none, or the device does not answer."""
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _number(word: str | None) -> float | None:
    """None for what is not said: N/A, [N/A], [Unknown Error]."""
    try:
        return float(word) if word is not None else None
    except ValueError:
        return None


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    ask.add_argument("--output", type=Path, required=True, help="the .prom file to write")
    ask.add_argument("--efa-devices", type=int, default=0, help="how many there should be")
    ask.add_argument("--gpus", type=int, default=0, help="how many there should be")
    ask.add_argument("--sys", type=Path, default=SYS, help="where the kernel shows its devices")
    options = ask.parse_args()
    text, started = Text(), time.monotonic()
    add_efa(text, options.sys, options.efa_devices)
    add_gpus(text, options.gpus)
    took = time.monotonic() - started
    text.add("kvdeploy_hardware_seconds", took, "How long it took to ask the hardware")
    # The exporter may read at any moment: it must never see half of it.
    part = options.output.with_suffix(".part")
    part.write_text(text.render())
    part.chmod(0o644)
    part.replace(options.output)


if __name__ == "__main__":
    main()
