"""The stand-ins of vLLM, NIXL and torch: wheels with the real names, versions and places of what a
playbook looks at, in an index as pip reads it, and the lock file that names them.
"""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import zipfile
from importlib import resources
from typing import TYPE_CHECKING, Final

from tests.hostlab import elf
from tests.hostlab.hardware import FILES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NAMES: Final = ("nixl", "nixl-cu13", "torch", "vllm")
NEEDS: Final = {
    "fi_getinfo": "FABRIC_1.10",
    "fi_freeinfo": "FABRIC_1.10",
    "fi_dupinfo": "FABRIC_1.10",
    "fi_fabric": "FABRIC_1.1",
    "fi_strerror": "FABRIC_1.0",
}
"""What the LIBFABRIC plugin of NIXL 1.5.1 takes from libfabric."""
BESIDE: Final = ("libcuda.so.1", "libhwloc.so.15")
"""What else it is linked to: the driver and the distribution bring them."""
PLUGIN: Final = "libplugin_LIBFABRIC.so"


def versions() -> dict[str, str]:
    """As the real lock for GPUs pins them."""
    text = (resources.files("kvdeploy.locks") / "cuda.txt").read_text(encoding="utf-8")
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))
    return {name: pins[name] for name in NAMES}


def build(simple: Path, lock: Path) -> None:
    """An index below `simple`, and the lock of all its wheels."""
    pins = versions()
    for name, version in pins.items():
        files: dict[str, bytes] = {}
        source = FILES / "wheels" / name
        for path in sorted(p for p in source.rglob("*") if p.is_file()):
            text = path.read_text().replace("@VERSION@", version)
            files[path.relative_to(source).as_posix()] = text.encode()
        if name == "nixl-cu13":
            plugin = _plugin(simple)
            for folder in ("nixl_cu13.libs/nixl", ".nixl_cu13.mesonpy.libs/plugins"):
                files[f"{folder}/{PLUGIN}"] = plugin
        _wheel(simple / name, name, version, files)
    lock.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))


def _plugin(scratch: Path) -> bytes:
    folder = scratch / "plugin"
    libraries = [folder / "libfabric.so", *(folder / name for name in BESIDE)]
    elf.libfabric(libraries[0], "FABRIC_1.10")
    for library in libraries[1:]:
        elf.plain(library, library.name)
    elf.user_of(folder / PLUGIN, PLUGIN, NEEDS, libraries)
    content = (folder / PLUGIN).read_bytes()
    shutil.rmtree(folder)
    return content


def _wheel(folder: Path, name: str, version: str, files: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True)
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    everything = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if name == "vllm":
        entry = b"[console_scripts]\nvllm = vllm.entrypoints.openai.api_server:main\n"
        everything[f"{info}/entry_points.txt"] = entry
    record = []
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, content in everything.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            record.append(f"{path},sha256={digest.decode()},{len(content)}\n")
            wheel.writestr(path, content)
        wheel.writestr(f"{info}/RECORD", "".join((*record, f"{info}/RECORD,,\n")))
