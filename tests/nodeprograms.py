"""The programs that playbooks bring to nodes, as modules: they belong to no package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any, Final

ROLES: Final = Path(__file__).parents[1] / "playbooks/roles"


def program(role: str, name: str) -> Path:
    """The file of a role's program."""
    return ROLES / role / "files" / f"{name}.py"


def load(role: str, name: str) -> Any:
    """A role's program as a module, with what it imports of its neighbours."""
    folder, kept = str(ROLES / role / "files"), sys.dont_write_bytecode
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True  # playbooks/ is data: nothing of ours belongs there
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)
        sys.dont_write_bytecode = kept
