"""Where the playbooks lie."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import kvdeploy
from kvdeploy.errors import ToolError

CONFIG: Final = "ansible.cfg"


def playbooks_source() -> Path:
    """The folder playbooks/: within an installed package, else beside it in a checkout.

    Raises:
        ToolError: neither is there.
    """
    package = Path(kvdeploy.__file__).parent
    for place in (package / "playbooks", package.parent / "playbooks"):
        if (place / CONFIG).exists():
            return place
    msg = f"this installation of kvdeploy has no playbooks/ beside {package}"
    raise ToolError(msg, hint="Install it again: pip install --force-reinstall kvdeploy")
