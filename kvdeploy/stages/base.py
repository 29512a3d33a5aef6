"""What a stage is. A stage owns one step of `up` and can be run again safely."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from kvdeploy.progress import Listener

if TYPE_CHECKING:
    from collections.abc import Mapping

Step = Listener
Results = dict[str, "Mapping[str, Any]"]
"""What earlier stages returned, by stage name."""


class Stage(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str:
        """What the user sees it called."""

    def inputs(self, results: Results) -> Mapping[str, Any]:
        """Everything this stage's outcome depends on, as plain data."""

    def holds(self, result: Mapping[str, Any]) -> bool:
        """Whether the world is still as `apply` left it. Cheap, and changes nothing."""

    def apply(self, results: Results, step: Step) -> Mapping[str, Any]:
        """Do the work and return what later stages need. Safe to repeat."""
