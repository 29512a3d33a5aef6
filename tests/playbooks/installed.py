"""What roles leave of a node, made without them: for tests of the roles that come after."""

from __future__ import annotations

from typing import Final

from kvdeploy.model import layout
from tests.hostlab import base, nvidia

A_NODE: Final = f"""
set -e
useradd --system --home-dir {layout.DATA} --shell /usr/sbin/nologin {layout.USER}
mkdir -p {layout.ROOT}/libexec {layout.DATA}
chown {layout.USER}: {layout.DATA}
"""
"""What the role base makes."""
DRIVER: Final = f"""
set -e
echo 'deb [trusted=yes] http://labhost:{base.PORT}/nvidia ./' >/etc/apt/sources.list.d/image.list
apt-get -qq update
apt-get -qq install {nvidia.DRIVER}={nvidia.package_version(nvidia.NEWEST)} >/dev/null
"""
EFA: Final = f"""
set -e
cd "$(mktemp -d)"
apt-get -qq update
curl -sSf http://labhost:{base.PORT}/efa/aws-efa-installer-{{0}}.tar.gz | tar -xz
cd aws-efa-installer
./efa_installer.sh -y >/dev/null
"""
"""With the installer's version in the place of {0}."""
