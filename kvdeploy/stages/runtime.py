"""Stage `runtime`: a Python for the engines, built from the lock or named by the user."""

from __future__ import annotations

import os
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

    def __init__(self, spec: ClusterSpec, runner: Runner, device: Device) -> None:
        self._spec, self._runner, self._device = spec, runner, device

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
            return runtime.is_whole(runtime.built_python(self._device))
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
        path = os.path.expanduser(self._spec.runtime.python or "")  # noqa: PTH111
        # Not resolved: a virtual environment's python is a link, and must be called by its name.
        return os.path.abspath(path) if os.sep in path else path  # noqa: PTH100
