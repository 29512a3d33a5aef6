"""What nodes are made of beside the playbooks: kvdeploy's own files, and what the operator put in
their place in aws.node_variables.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.adapters.recipe import lock_file, probe_file, tiles_file
from kvdeploy.errors import CheckError
from kvdeploy.model.package import RouterPackage
from kvdeploy.planning.configuration import ControlFiles

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvdeploy.model.outputs import Device
    from kvdeploy.model.spec import ClusterSpec

NO_PACKAGE: Final = RouterPackage(path="", digest="")
"""For machines without a router."""
FILES: Final = ("vllm_lock", "vllm_probe", "vllm_site_files", "model_lock", "router_lock")
"""Variables of roles that name files of this machine."""


def device_of(spec: ClusterSpec) -> Device:
    """Of the nodes' engines; CPUs are for rehearsals alone."""
    return "cpu" if spec.runtime.device == "cpu" else "cuda"


def control_files(device: Device, package: RouterPackage) -> ControlFiles:
    """What roles take from this machine."""
    return ControlFiles(
        runtime_lock=str(lock_file(f"{device}.txt")),
        runtime_probe=str(probe_file()),
        runtime_site_files=(str(tiles_file()),) if device == "cpu" else (),
        s3_lock=str(lock_file("node.txt")),
        router_lock=str(lock_file("router.txt")),
        router_package=package,
    )


def operators_variables(spec: ClusterSpec, root: Path) -> dict[str, Any]:
    """Variables of the operator's own choice. Files are named from `root`, the folder of the
    cluster file.

    Raises:
        CheckError: one of those files is not there.
    """
    told = dict(spec.aws.node_variables) if spec.aws else {}
    return {n: _found(root, n, v) if n in FILES else v for n, v in told.items()}


def _found(root: Path, name: str, named: object) -> object:
    if isinstance(named, list):
        return [_found(root, name, one) for one in named]
    path = root / Path(str(named)).expanduser()
    if not path.is_file():
        msg = f"aws.node_variables.{name}: there is no file {path}"
        raise CheckError(msg, hint="It is looked for from the folder of the cluster file.")
    return str(path)


def shaping_files(device: Device, variables: Mapping[str, Any]) -> dict[str, str]:
    """Variable -> text of what it names, be it the operator's choice or ours."""
    ours = control_files(device, NO_PACKAGE)
    paths: dict[str, Any] = {
        "vllm_lock": ours.runtime_lock,
        "vllm_probe": ours.runtime_probe,
        "vllm_site_files": list(ours.runtime_site_files),
        "model_lock": ours.s3_lock,
        "router_lock": ours.router_lock,
    } | {n: v for n, v in variables.items() if n in FILES}
    return {name: _text(named) for name, named in paths.items()}


def _text(named: str | list[str]) -> str:
    paths = named if isinstance(named, list) else [named]
    return "\n".join(Path(path).read_text(encoding="utf-8") for path in paths)
