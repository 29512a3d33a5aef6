"""Grafana's stand-in: one package in a signed repository, laid out as Grafana's own is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.hostlab import debs
from tests.hostlab.hardware import FILES

if TYPE_CHECKING:
    from pathlib import Path

    from tests.hostlab.gpg import Key

VERSION: Final = "12.9.0"
UNIT: Final = """\
[Unit]
Description=Grafana instance
Wants=network-online.target
After=network-online.target

[Service]
User=grafana
Group=grafana
WorkingDirectory=/usr/share/grafana
ExecStart=/usr/sbin/grafana-server --config=/etc/grafana/grafana.ini
Restart=on-failure
NoNewPrivileges=true

[Install]
WantedBy=multi-user.target
"""
SET_UP: Final = """\
if ! getent passwd grafana >/dev/null; then
  adduser --system --group --quiet --home /usr/share/grafana --no-create-home grafana
fi
install -d -o grafana -g grafana -m 0755 /var/lib/grafana /var/log/grafana
install -d -o root -g grafana -m 0755 /etc/grafana/provisioning/datasources
install -d -o root -g grafana -m 0755 /etc/grafana/provisioning/dashboards
chown -R root:grafana /etc/grafana
"""


def build(folder: Path, key: Key) -> None:
    """The repository: `deb [signed-by=...] FOLDER stable main`, its key at FOLDER/gpg.key."""
    server = (FILES / "grafana/grafana-server").read_text().replace("@VERSION@", VERSION)
    pool = folder / "pool/main/g/grafana"
    pool.mkdir(parents=True)
    key.export(folder / "gpg.key")
    package = debs.Package(
        name="grafana",
        version=VERSION,
        architecture=debs.architecture(),
        files={
            "/usr/sbin/grafana-server": server,
            "/etc/grafana/grafana.ini": "[server]\nhttp_port = 3000\n",
            "/lib/systemd/system/grafana-server.service": UNIT,
            "/usr/share/grafana/VERSION": VERSION,
        },
        programs=frozenset({"/usr/sbin/grafana-server"}),
        links={"/usr/sbin/grafana-cli": "grafana-server"},
        depends="adduser, python3-yaml",
        after_install=SET_UP,
    )
    debs.build(package, pool)
    debs.index_suite(folder, suite="stable", key=key)
