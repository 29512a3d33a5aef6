"""Load a NIXL plugin as an engine would, and tell which libraries came with it.

Runs on nodes, in the engines' Python, with their LD_LIBRARY_PATH. argv: backend, folder of the
libfabric that it must use. The last line of stdout is one JSON object; its `problem` is '' or one
sentence. NIXL itself says no more than "unsupported backend" when a plugin does not load.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

EFA_PACKAGES = Path("/opt/amazon/efa_installed_packages")
BRINGS = {
    "libcuda.so.1": "the NVIDIA driver brings it",
    "libfabric.so.1": "the EFA installer brings it",
    "libhwloc.so.15": "the package libhwloc15 brings it",
}


def symbols(library: Path) -> list[tuple[int, int]]:
    """FABRIC versions that a library names: what a plugin needs, or what a libfabric has."""
    names = re.findall(rb"\0FABRIC_(\d+)\.(\d+)(?=\0)", library.read_bytes())
    return sorted({(int(major), int(minor)) for major, minor in names})


def mapped(pattern: str) -> list[str]:
    """Files of this process's memory whose name matches."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count("/")}
    return sorted(path for path in paths if re.search(pattern, Path(path).name))


def find_plugin(backend: str) -> Path | None:
    """The file that NIXL takes: beside the library of the package that `nixl` chose."""
    importlib.import_module("nixl._api")
    chosen = next(name for name in sys.modules if re.fullmatch(r"nixl_(cu\d+|rocm)", name))
    site = Path(str(sys.modules[chosen].__file__)).resolve().parents[1]
    plugin = site / f".{chosen}.mesonpy.libs" / "plugins" / f"libplugin_{backend}.so"
    return plugin if plugin.exists() else None


def load(plugin: Path) -> str:
    """Load it with all symbols bound; '' or the loader's own words."""
    try:
        ctypes.CDLL(str(plugin), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as e:
        return str(e)
    return ""


def installed() -> dict[str, str]:
    """Versions of EFA's installer and of its libfabric, as the installer wrote them down."""
    with contextlib.suppress(OSError):
        text = EFA_PACKAGES.read_text(encoding="utf-8")
        efa = re.search(r"installer version: (\S+)", text)
        libfabric = re.search(r"\blibfabric1?-aws_(\d+(?:\.\d+)*)", text)
        return {"efa": efa[1] if efa else "", "release": libfabric[1] if libfabric else ""}
    return {}


def judge(seen: dict[str, Any], folder: str) -> str:
    """What is wrong with what was seen; '' when an engine would get the right libraries."""
    if not seen["plugin"]:
        return f"its NIXL has no plugin for {seen['backend']}"
    name = Path(seen["plugin"]).name
    needs, has = seen.get("needs") or [], seen.get("has") or []
    if seen["backend"] == "LIBFABRIC" and has and needs and max(needs) > max(has):
        efa = f", EFA {seen['efa']}" if seen.get("efa") else ""
        return (
            f"{name} needs FABRIC_{_dotted(max(needs))}, and the node's libfabric "
            f"{seen.get('release') or 'of unknown version'} ({seen['library']}{efa}) has up to "
            f"FABRIC_{_dotted(max(has))}"
        )
    if seen["error"]:
        missing = seen["error"].partition(":")[0]
        why = f" ({BRINGS[missing]})" if missing in BRINGS else ""
        return f"{name} does not load: {seen['error']}{why}"
    if seen["backend"] != "LIBFABRIC":
        return ""
    files = seen["libfabric"]
    strange = [path for path in files if not Path(path).is_relative_to(Path(folder).resolve())]
    if strange or len(files) != 1:
        return (
            f"{name} met {' and '.join(strange or files) or 'no libfabric at all'}, and must meet "
            f"the one below {folder} alone: a distribution's libfabric does not know EFA's RDMA"
        )
    return ""


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def look(backend: str, folder: str) -> dict[str, Any]:
    """Everything that is told about one backend."""
    # An engine has torch, and with it CUDA's runtime library, before it loads a plugin.
    with contextlib.suppress(ImportError):
        importlib.import_module("torch")
    plugin = find_plugin(backend)
    seen: dict[str, Any] = {"backend": backend, "plugin": str(plugin or ""), "error": ""}
    library = Path(folder) / "libfabric.so.1"
    if plugin is not None:
        if backend == "LIBFABRIC":
            seen |= {"needs": symbols(plugin), "has": symbols(library) if library.exists() else []}
            seen |= {"library": str(library), **installed()}
        seen["error"] = load(plugin)
        seen["libfabric"] = mapped(r"^libfabric\b.*\.so")
    return seen | {"problem": judge(seen, folder)}


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(look(sys.argv[1], sys.argv[2])) + "\n")
