"""Stage `runtime`: a Python for the engines, built from the lock or named by the user."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdeploy.adapters.local import runtime
from kvdeploy.model.outputs import RuntimeOutputs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvdeploy.model.outputs import Device
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.proc import Runner
    from kvdeploy.stages.base import Results, Step


class RuntimeStage:
    name = "runtime"

    def __init__(self, spec: ClusterSpec, runner: Runner, device: Device, root: Path) -> None:
        self._spec, self._runner, self._device, self._root = spec, runner, device, root

    @property
    def title(self) -> str:
        if self._spec.runtime.python:
            return f"check the runtime {self._spec.runtime.python}"
        return f"build the {self._device} runtime"

    def inputs(self, _results: Results) -> Mapping[str, Any]:
        named = self._spec.runtime.python
        return {
            "device": self._device,
            "python": self._named() if named else None,
            "env": self._spec.runtime.env,
            "lock": None if named else runtime.lock_digest(self._device),
        }

    def holds(self, result: Mapping[str, Any]) -> bool:
        known = RuntimeOutputs.model_validate(result)
        if known.built:
            python = runtime.built_python(self._device)  # the cache may have moved since
            return known.python == str(python) and runtime.is_whole(python)
        found = runtime.quick_versions(known.python, known.env, self._runner)
        return all(
            found.get(k) == v for k, v in known.versions.items() if k in ("python", "nixl")
        ) and ("vllm" in found or bool(known.env))

    def apply(self, _results: Results, step: Step) -> Mapping[str, Any]:
        if self._spec.runtime.python:
            step.update("importing vllm and nixl")
            outputs = runtime.inspect(
                self._named(), self._device, self._spec.runtime.env, self._runner
            )
        else:
            outputs = runtime.build(self._device, self._runner, step.update)
        return outputs.model_dump()

    def _named(self) -> str:
        return named_python(self._spec.runtime.python or "", self._root)


def named_python(python: str, root: Path) -> str:
    """The interpreter that the user named; one with a slash in it is relative to the file.

    Not resolved: a virtual environment's python is a link and must be called by its own name.
    """
    return str(root / Path(python).expanduser()) if os.sep in python else python
