"""kvdeploy's own code, packed to run where kvdeploy is not installed."""

from __future__ import annotations

from kvdeploy.model.base import Stored
from kvdeploy.model.layout import PACKAGES


class RouterPackage(Stored):
    """The router's code: a zip file that Python imports from."""

    path: str
    """On the control machine."""
    digest: str
    """Of its content; part of its name on a node, so that other code is another file."""

    @property
    def node_path(self) -> str:
        return f"{PACKAGES}/kvdeploy-{self.digest}.zip"
