"""What hosts install, served to them over HTTP on their lab's bridge.

    vendor = Vendor.build(folder)
    with vendor.serve(lab.gateway) as url:
        variables = vendor.variables(url)
        with vendor.fault("tampered-installer"):
            ...

`variables` are the roles' variables that say where vendors' files come from, and nothing else:

    efa_url, efa_key_fingerprint            the EFA installer, two versions
    nvidia_source                           driver and fabric manager, two versions
    vllm_lock                               of the stand-ins
    {vllm,model,router}_pip_args            the index of their wheels, and of the real ones that
                                            the project's locks for nodes and router name
    monitoring_grafana_source, monitoring_grafana_fingerprint
    base_supported_systems                  with the hosts' own system

The distribution's packages need no variable: the hosts' own sources.list names them.
"""

from __future__ import annotations

import json
import shutil
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.model.catalog import EFA_INSTALLER, SUPPORTED_OS
from tests.hostlab import archive, base, debs, efa, grafana, nvidia, wheelhouse, wheels
from tests.hostlab.gpg import Key
from tests.hostlab.hardware import FILES
from tests.hostlab.shell import LabError, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MDADM: Final = debs.Package(
    name="mdadm",
    version="4.2-5",
    architecture="all",
    files={"/sbin/mdadm": (FILES / "md/mdadm").read_text()},
    programs=frozenset({"/sbin/mdadm"}),
)
"""Few kernels that tests run on have MD."""
SYSTEMS: Final = {"bookworm": "Debian 12", "trixie": "Debian 13"}


class _Files(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@dataclass(frozen=True, kw_only=True)
class Vendor:
    """A folder that is served."""

    folder: Path
    distro: str
    efa_fingerprint: str
    grafana_fingerprint: str

    @classmethod
    def build(cls, folder: Path, distro: str = "bookworm") -> Vendor:
        """Make everything anew in `folder`; keys are thrown away, all but their fingerprints."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _archive(folder / "archive", archive.ensure(distro))
        nvidia.build(folder / "nvidia")
        wheels.build(folder / "simple", folder / "runtime.txt")
        wheelhouse.link(wheelhouse.ensure(distro), folder / "simple")
        with Key("Stand-in of the EFA installer") as key:
            efa.build(folder / "efa", key)
            efa_fingerprint = key.fingerprint
        with Key("Stand-in of Grafana") as key:
            grafana.build(folder / "grafana", key)
            grafana_fingerprint = key.fingerprint
        told = {
            "distro": distro,
            "efa_fingerprint": efa_fingerprint,
            "grafana_fingerprint": grafana_fingerprint,
        }
        (folder / "vendor.json").write_text(json.dumps(told))
        return cls.load(folder)

    @classmethod
    def load(cls, folder: Path) -> Vendor:
        """One that was built before, perhaps by another process."""
        return cls(folder=folder, **json.loads((folder / "vendor.json").read_text()))

    @contextmanager
    def serve(self, address: str) -> Iterator[str]:
        """Serve on an address of this machine until the context ends; the URL of the folder."""
        handler = partial(_Files, directory=str(self.folder))
        with ThreadingHTTPServer((address, base.PORT), handler) as server:
            server.daemon_threads = True
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            try:
                yield f"http://{address}:{base.PORT}"
            finally:
                server.shutdown()
                thread.join()

    def variables(self, url: str) -> dict[str, Any]:
        host = url.removeprefix("http://").partition(":")[0]
        index = ["--index-url", f"{url}/simple/", "--trusted-host", host]
        return {
            "base_supported_systems": [*SUPPORTED_OS, SYSTEMS[self.distro]],
            "efa_url": f"{url}/efa",
            "efa_key_fingerprint": self.efa_fingerprint,
            "nvidia_source": f"deb [trusted=yes] {url}/nvidia ./",
            "vllm_lock": str(self.folder / "runtime.txt"),
            "vllm_pip_args": index,
            "model_pip_args": index,
            "router_pip_args": index,
            "monitoring_grafana_source": f"{url}/grafana",
            "monitoring_grafana_fingerprint": self.grafana_fingerprint,
        }

    @property
    def faults(self) -> dict[str, Callable[[], None]]:
        return {
            "tampered-installer": lambda: _flip(self._installer),
            "truncated-installer": lambda: _truncate(self._installer),
            "wrong-key": self._sign_with_another_key,
            "no-signature": self._signature.unlink,
            "truncated-wheel": lambda: _truncate(next((self.folder / "simple/vllm").glob("*.whl"))),
        }

    @contextmanager
    def fault(self, name: str) -> Iterator[None]:
        """Serve something wrong until the context ends. Raises LabError for an unknown name."""
        if name not in self.faults:
            msg = f"no fault is called {name!r}; there are {', '.join(self.faults)}"
            raise LabError(msg)
        kept = self.folder.with_name(f"{self.folder.name}.kept")
        run("cp", "--archive", self.folder, kept)
        try:
            self.faults[name]()
            yield
        finally:
            # Files come back in their places one by one: the folder itself is being served.
            run("cp", "--archive", "--remove-destination", f"{kept}/.", self.folder)
            shutil.rmtree(kept)

    @property
    def _installer(self) -> Path:
        return self.folder / f"efa/aws-efa-installer-{EFA_INSTALLER}.tar.gz"

    @property
    def _signature(self) -> Path:
        return self._installer.with_name(f"{self._installer.name}.sig")

    def _sign_with_another_key(self) -> None:
        """All fits together, only it is not the vendor's: the fingerprint alone can tell."""
        with Key("Somebody else") as key:
            key.export(self.folder / "efa/aws-efa-installer.key")
            key.sign(self._installer, self._signature)


def _archive(folder: Path, real: Path) -> None:
    """The distribution's packages, and in their midst the one that is not real."""
    folder.mkdir()
    debs.build(MDADM, folder)
    debs.index(folder)
    entries = (real / "Packages").read_text() + "\n" + (folder / "Packages").read_text()
    for package in real.glob("*.deb"):
        (folder / package.name).symlink_to(package)
    debs.publish(folder, entries.encode())


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
