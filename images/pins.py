"""Writes images/pins.env: the arguments of the container files, from the catalog and the layout.

python -m images.pins            write it
python -m images.pins --check    say whether it is as it should be; changes nothing
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import yaml

from kvdeploy.model import catalog, layout

ROOT: Final = Path(__file__).parents[1]
FILE: Final = ROOT / "images/pins.env"
EFA_DEFAULTS: Final = ROOT / "playbooks/roles/efa/defaults/main.yml"
USER_ID: Final = 10001
"""A number that no user of a host has: a container's user is the host's of the same number."""


def pins() -> dict[str, str]:
    """Argument -> value."""
    efa = yaml.safe_load(EFA_DEFAULTS.read_text(encoding="utf-8"))
    return {
        "ENGINE_BASE": catalog.CONTAINER_BASES["engine"],
        "ROUTER_BASE": catalog.CONTAINER_BASES["router"],
        "EFA_URL": efa["efa_url"],
        "EFA_VERSION": catalog.EFA_INSTALLER,
        "EFA_KEY_FINGERPRINT": catalog.EFA_KEY_FINGERPRINT,
        "ETC": layout.ETC,
        "DATA": layout.DATA,
        "MODELS": layout.MODELS,
        "CACHE": layout.CACHE,
        "RUN_DIR": layout.RUN,
        "RUNTIME": layout.RUNTIME,
        "RUNTIME_PYTHON": layout.RUNTIME_PYTHON,
        "ROUTER": layout.ROUTER,
        "ROUTER_PYTHON": layout.ROUTER_PYTHON,
        "LIBFABRIC": layout.LIBFABRIC,
        "USER_NAME": layout.USER,
        "USER_ID": str(USER_ID),
    }


def render() -> str:
    """The whole file: lines NAME=VALUE, as container tools read them."""
    return "".join(f"{name}={value}\n" for name, value in pins().items())


def main(argv: list[str]) -> int:
    text = render()
    if argv == ["--check"]:
        if FILE.exists() and FILE.read_text(encoding="utf-8") == text:
            return 0
        sys.stderr.write("images/pins.env is out of date: run 'python -m images.pins'\n")
        return 1
    FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
