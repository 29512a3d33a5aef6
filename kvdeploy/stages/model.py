"""Stage `model`: the weights on this machine, at one path for all engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.adapters.local import hub, runtime
from kvdeploy.adapters.tinymodel import ensure_tiny_model
from kvdeploy.errors import CheckError
from kvdeploy.model.outputs import ModelOutputs, RuntimeOutputs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.proc import Runner
    from kvdeploy.stages.base import Results, Step

BUILTIN: Final = "builtin:"


class ModelStage:
    name = "model"
    title = "prepare the model"

    def __init__(self, spec: ClusterSpec, runner: Runner, root: Path) -> None:
        self._spec, self._runner, self._root = spec, runner, root

    def inputs(self, results: Results) -> Mapping[str, Any]:
        model = self._spec.model
        return {
            "id": model.id,
            "seed": model.seed,
            "revision": model.revision,
            "served_name": model.served_name,
            "dummy": model.load_format == "dummy",
            "python": results["runtime"]["python"],
            "dtype": dtype_of(self._spec, results["runtime"]["device"]),
        }

    def holds(self, result: Mapping[str, Any]) -> bool:
        known = ModelOutputs.model_validate(result)
        try:
            return read_config(Path(known.path)) == known.config
        except CheckError:
            return False

    def apply(self, results: Results, step: Step) -> Mapping[str, Any]:
        model = self._spec.model
        if model.id.startswith(BUILTIN):
            step.update("making a small model with random weights")
        if (folder := model_folder(self._spec, self._root)) is not None:
            path = Path(folder)
        else:
            path = hub.ensure_model(
                model.id,
                revision=model.revision,
                weights=model.load_format != "dummy",
                python=RuntimeOutputs.model_validate(results["runtime"]),
                cache=runtime.cache_dir() / "hub",
                runner=self._runner,
                say=step.update,
            )
        return ModelOutputs(
            path=str(path),
            served_name=model.served_name or default_name(model.id),
            config=read_config(path),
            dtype=dtype_of(self._spec, results["runtime"]["device"]),
        ).model_dump()


def dtype_of(spec: ClusterSpec, device: str) -> str:
    """What vLLM's --dtype is told: a built-in model is there to be compared token by token, and on
    CPUs float32 makes ties of its logits as good as impossible.
    """
    model = spec.model
    exact = model.dtype == "auto" and model.id.startswith(BUILTIN) and device == "cpu"
    return "float32" if exact else model.dtype


def model_folder(spec: ClusterSpec, root: Path) -> str | None:
    """The folder of a model that lies on this machine, or is made here now; None for others."""
    model = spec.model
    if model.id.startswith(BUILTIN):
        return str(ensure_tiny_model(runtime.cache_dir() / "models", seed=model.seed))
    path = local_path(model.id, root)
    return None if path is None else str(path)


def local_path(model_id: str, root: Path) -> Path | None:
    """The folder that `model_id` names; None when it has the form of a hub id."""
    path = Path(model_id).expanduser()
    if path.is_absolute() or model_id.startswith(("./", "../", "~")):
        return path if path.is_absolute() else (root / path).resolve()
    return None


def default_name(model_id: str) -> str:
    """What clients call the model: the last part of its id."""
    return model_id.removeprefix(BUILTIN).rstrip("/").rsplit("/", 1)[-1]


def read_config(path: Path) -> dict[str, Any]:
    """The config.json of the model in a folder. Raises CheckError."""
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        msg = f"model.id: {path} holds no config.json that can be read"
        raise CheckError(msg, hint="Name the folder of a model in Hugging Face form.") from e
    except ValueError as e:
        msg = f"model.id: {file} is not valid JSON: {e}"
        raise CheckError(msg, hint="Fetch the model again; the file may be cut short.") from e
    if not isinstance(config, dict):
        msg = f"model.id: {file} is not a model's configuration"
        raise CheckError(msg, hint="Name the folder of a model in Hugging Face form.")
    return config
