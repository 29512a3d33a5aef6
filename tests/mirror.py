"""Where this machine's AWS provider is, for tests that run the real Terraform offline."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

PROVIDER: Final = "terraform-provider-aws*"
PLACES: Final = (
    "~/.terraform.d/plugins",
    "~/.local/share/terraform/plugins",
    "/usr/local/share/terraform/plugins",
    "/usr/share/terraform/plugins",
)
"""Where Terraform itself looks for a mirror."""
LESS_COLLECTING: Final = {"GOGC": "400"}
"""Every start of the provider builds the schemas of all of AWS: it gets room for the garbage."""


def terraform_environment(folder: Path) -> dict[str, str] | str:
    """Variables with which terraform finds the AWS provider; or what is missing.

    Args:
        folder: for Terraform's CLI configuration, where the caller has none.
    """
    if shutil.which("terraform") is None:
        return "terraform is not installed"
    named = os.environ.get("TF_CLI_CONFIG_FILE")
    if named and Path(named).exists():
        return {"TF_CLI_CONFIG_FILE": named, **LESS_COLLECTING}
    mirror = _mirror()
    if mirror is None:
        return "the AWS provider is in no mirror on this machine"
    config = folder / "cli.tfrc"
    config.write_text(
        f"disable_checkpoint = true\nprovider_installation {{\n  filesystem_mirror {{\n"
        f'    path = "{mirror}"\n  }}\n}}\n'
    )
    return {"TF_CLI_CONFIG_FILE": str(config), **LESS_COLLECTING}


def _mirror() -> Path | None:
    """A filesystem mirror that holds the AWS provider: HOST/NAMESPACE/TYPE/VERSION/OS_ARCH/file."""
    for place in PLACES:
        if found := next(Path(place).expanduser().glob(f"*/*/aws/*/*/{PROVIDER}"), None):
            return found.parents[5]
    looked = subprocess.run(
        ["find", "/", "-xdev", "-name", PROVIDER, "-type", "f", "-not", "-path", "*/.terraform/*"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return next((Path(line).parents[5] for line in looked.stdout.splitlines()), None)
