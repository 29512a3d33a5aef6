"""The folder in which Terraform runs for one cluster: a copy of infra/, where the state is, and
the variables. The copy keeps a cluster whole when kvdeploy is upgraded in the middle of a run.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.adapters.shipped import infra_source
from kvdeploy.adapters.store import write_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

BACKEND: Final = "backend.tf.json"
IMPORTS: Final = "imports.tf.json"
VARIABLES: Final = "kvdeploy.tfvars.json"
LOCK: Final = ".terraform.lock.hcl"


class WorkDir:
    """Terraform's folder. Making one touches nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan_file = path / "tfplan"
        self.var_file = path / VARIABLES

    def prepare(self, backend: Mapping[str, Any], variables: Mapping[str, Any]) -> None:
        """Put a fresh copy of infra/ there, with this backend and these variables.

        The plan file and the variables can be read by the owner alone: plans hold variables
        in clear.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self.path.chmod(0o700)
        source = infra_source()
        for old in (*self.path.glob("*.tf"), self.path / IMPORTS, self.plan_file):
            old.unlink(missing_ok=True)
        for file in (*source.glob("*.tf"), source / LOCK):
            shutil.copy(file, self.path / file.name)
        modules = self.path / "modules"
        shutil.rmtree(modules, ignore_errors=True)
        shutil.copytree(source / "modules", modules, ignore=shutil.ignore_patterns(".*", "tests"))
        _write_json(self.path / BACKEND, {"terraform": {"backend": dict(backend)}})
        self.write_variables(variables)

    def write_variables(self, variables: Mapping[str, Any]) -> None:
        _write_json(self.var_file, variables)

    def write_imports(self, imports: Iterable[tuple[str, str]]) -> None:
        """Have the next plan adopt these: (Terraform address, id for import)."""
        blocks = [{"to": address, "id": found} for address, found in imports]
        if blocks:
            _write_json(self.path / IMPORTS, {"import": blocks})
        else:
            (self.path / IMPORTS).unlink(missing_ok=True)


def local_backend(state: Path) -> dict[str, Any]:
    return {"local": {"path": str(state)}}


def s3_backend(bucket: str, cluster: str, region: str) -> dict[str, Any]:
    """State in S3, locked by a file beside it (needs Terraform 1.10)."""
    return {
        "s3": {
            "bucket": bucket,
            "key": state_key(cluster),
            "region": region,
            "encrypt": True,
            "use_lockfile": True,
        }
    }


def state_key(cluster: str) -> str:
    return f"kvdeploy/{cluster}/terraform.tfstate"


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(document, indent=2, sort_keys=True) + "\n")
