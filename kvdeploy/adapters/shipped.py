"""The folders infra/, playbooks/ and images/ of this installation."""

from __future__ import annotations

from pathlib import Path

import kvdeploy
from kvdeploy.errors import ToolError


def infra_source() -> Path:
    """Raises ToolError: it is not there."""
    return _folder("infra", holding="main.tf")


def playbooks_source() -> Path:
    """Raises ToolError: it is not there."""
    return _folder("playbooks", holding="ansible.cfg")


def images_source() -> Path:
    """Raises ToolError: it is not there."""
    return _folder("images", holding="seal.yml")


def _folder(name: str, *, holding: str) -> Path:
    """Within an installed package, else beside it in a checkout."""
    package = Path(kvdeploy.__file__).parent
    for place in (package / name, package.parent / name):
        if (place / holding).exists():
            return place
    msg = f"this installation of kvdeploy has no {name}/ beside {package}"
    raise ToolError(msg, hint="Install it again: pip install --force-reinstall kvdeploy")
