"""The EFA installer's stand-in: a signed archive of packages and the script that installs them."""

from __future__ import annotations

import shutil
import tarfile
from typing import TYPE_CHECKING, Final

from kvdeploy.model.catalog import EFA_INSTALLER
from tests.hostlab import debs, elf
from tests.hostlab.hardware import FILES, HOME

if TYPE_CHECKING:
    from pathlib import Path

    from tests.hostlab.gpg import Key

OLDER: Final = "1.50.0"
"""What the Deep Learning Base AMI brings: no FABRIC_1.10."""
CONTENTS: Final = {
    EFA_INSTALLER: ("FABRIC_1.10", "2.7.0amzn2.0", "3.3.1"),
    OLDER: ("FABRIC_1.9", "2.6.0amzn1.0", "3.3.0"),
}
"""Installer -> newest symbol version of its libfabric, libfabric itself, kernel module."""
ROOT: Final = "/opt/amazon/efa"


def build(folder: Path, key: Key) -> None:
    """The archives of all versions, their signatures and the key, as the vendor has them."""
    folder.mkdir(parents=True)
    key.export(folder / "aws-efa-installer.key")
    for version in CONTENTS:
        archive = folder / f"aws-efa-installer-{version}.tar.gz"
        tree = folder / "aws-efa-installer"
        _fill(tree, version)
        with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
            tar.add(tree, arcname=tree.name)
        shutil.rmtree(tree)
        key.sign(archive, archive.with_name(f"{archive.name}.sig"))


def _fill(tree: Path, version: str) -> None:
    symbols, libfabric, module = CONTENTS[version]
    packages = tree / "DEBS"
    packages.mkdir(parents=True)
    script = (FILES / "efa/efa_installer.sh").read_text().replace("@VERSION@", version)
    (tree / "efa_installer.sh").write_text(script)
    (tree / "efa_installer.sh").chmod(0o755)
    (tree / "common.sh").write_text("# the installer looks for this file\n")
    library = tree / "libfabric.so"
    elf.libfabric(library, symbols)
    fi_info = (FILES / "efa/fi_info").read_text().replace("@LIBFABRIC@", libfabric)
    architecture = debs.architecture()
    for package in (
        debs.Package(
            name="efa",
            version=f"{module}-1.amzn1",
            architecture=architecture,
            files={f"/usr/src/efa-{module}/README": "the module's source\n"},
            after_install=f"mkdir -p {HOME}/installed\necho {module} >{HOME}/installed/efa\n",
        ),
        debs.Package(
            name="efa-config",
            version="1.18",
            architecture="all",
            files={"/etc/security/limits.d/efa.conf": "* - memlock unlimited\n"},
        ),
        debs.Package(
            name="efa-profile",
            version="1.7",
            architecture="all",
            files={
                "/etc/profile.d/zippy_efa.sh": f'PATH="{ROOT}/bin/:$PATH"\n',
                "/etc/ld.so.conf.d/000_efa.conf": f"{ROOT}/lib\n",
            },
            after_install="ldconfig\n",
        ),
        debs.Package(
            name="libfabric1-aws",
            version=libfabric,
            architecture=architecture,
            files={
                f"{ROOT}/bin/fi_info": fi_info,
                f"{ROOT}/bin/fi_pingpong": (FILES / "efa/fi_pingpong").read_text(),
                f"{ROOT}/lib/libfabric.so.1.0.0": library.read_bytes(),
            },
            programs=frozenset({f"{ROOT}/bin/fi_info", f"{ROOT}/bin/fi_pingpong"}),
            links={
                f"{ROOT}/lib/libfabric.so.1": "libfabric.so.1.0.0",
                f"{ROOT}/lib/libfabric.so": "libfabric.so.1",
            },
            after_install="ldconfig\n",
        ),
    ):
        debs.build(package, packages)
    library.unlink()
