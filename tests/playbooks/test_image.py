"""One recipe for image and live node: a host is made a node as the builder of an image is, and
sealed; another host starts from its disk. There nodes.yml must find nothing to do.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import pytest

from kvdeploy.adapters.ansible.client import Ansible, Play
from kvdeploy.adapters.recipe import REACH
from kvdeploy.adapters.shipped import images_source
from kvdeploy.errors import PlaybookError
from kvdeploy.model import catalog, layout
from kvdeploy.model.awsfacts import Image
from kvdeploy.model.image import Builder, Recipe
from kvdeploy.model.spec import ClusterSpec
from kvdeploy.planning import imaging
from kvdeploy.planning.configuration import Site
from kvdeploy.stages.image import nodes_play, seal_play

if TYPE_CHECKING:
    from pathlib import Path

    from kvdeploy.adapters.ansible.report import PlayReport
    from kvdeploy.model.inventory import Inventory
    from tests.hostlab.guest import Host
    from tests.playbooks.conftest import Labs, Served

P5EN: Final = catalog.INSTANCES["p5en.48xlarge"]
SPEC: Final = ClusterSpec.model_validate(
    {"name": "demo", "target": "aws", "aws": {"region": "us-west-2", "zone": "us-west-2a"}}
)
BASE: Final = Image(
    id="ami-0abc",
    name="some image",
    os="Ubuntu 24.04",
    architecture="x86_64",
    state="available",
    root_device="/dev/sda1",
)
RECIPE: Final = Recipe(digest="0123456789abcdef", versions={"vllm": "9.9"})
SMALL: Final[dict[str, Any]] = {
    "vllm_compiler": False,
    "vllm_disk_gib": 1,
    "efa_device_wait_s": 20,
}
"""Of a host on this machine: stand-ins need no compiler, and little room."""
SECRET: Final = "never-to-be-seen-in-an-image"
TRACES: Final = f"""
set -e
mkdir -p /etc/kvdeploy/engines /home/ubuntu/.aws /var/lib/cloud/instances/i-1 /root/.cache/pip
ln -sfn /var/lib/cloud/instances/i-1 /var/lib/cloud/instance
for place in /etc/kvdeploy/engines/decode-0.env /home/ubuntu/.aws/credentials /root/.bash_history \
    /var/lib/cloud/instances/i-1/user-data.txt /root/.cache/pip/x /root/.netrc /tmp/said \
    /var/log/cloud-init-output.log /home/ubuntu/.ssh/id_ed25519; do
  echo {SECRET} >$place
done
mkdir -p /var/log/private/deeper
echo {SECRET} >/var/log/private/deeper/log
"""
"""What a machine that was worked with has on it."""


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Playbooks on one host of a lab, as the builder of an image is worked on."""

    served: Served
    name: str
    folder: Path

    @property
    def host(self) -> Host:
        return self.served[self.name]

    def inventory(self) -> Inventory:
        """As EC2's: the host's key is known under its instance's id."""
        builder = Builder(
            id=f"i-{self.name}",
            state="running",
            address=self.host.address,
            instance_type=P5EN.name,
            launched_at=datetime.now(UTC),
        )
        known = self.folder / f"known-{self.name}"
        known.write_text(self.host.host_key.replace(self.host.address, builder.id, 1))
        connection = self.served.lab.connection().model_copy(update={"known_hosts": str(known)})
        told = imaging.build_variables(SPEC, P5EN, Site(device="cuda", files=files()))
        more = self.served.variables | SMALL
        return imaging.build_inventory(builder, {k: v | more for k, v in told.items()}, connection)

    def run(self, play: Play) -> PlayReport:
        return Ansible(self.folder / "ansible.jsonl").run(play)

    def changed(self) -> list[str]:
        """Tasks of the last run that changed something."""
        lines = (self.folder / "ansible.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        last = max(i for i, event in enumerate(events) if event["event"] == "start")
        done = (e for e in events[last:] if e["event"] == "runner_on_ok" and e.get("changed"))
        return [event["task"] for event in done]


def files() -> Any:
    from kvdeploy.stages.nodes import NO_PACKAGE, control_files

    return control_files("cuda", NO_PACKAGE)


@dataclass(frozen=True, kw_only=True)
class Taken:
    """An image, and what was seen while it was made."""

    image: Path
    first: PlayReport
    again: PlayReport
    refused: str
    """What the seal said of a machine that it could not clean."""
    left: list[str]
    """Files with the secret on the machine that was sealed, before it was switched off."""
    machine_id: str
    host_key: str


@pytest.fixture(scope="module")
def taken(labs: Labs, tmp_path_factory: pytest.TempPathFactory) -> Taken:
    folder = tmp_path_factory.mktemp("image")
    runs = Runs(served=labs("builder"), name="builder", folder=folder)
    inventory, host = runs.inventory(), runs.host
    runs.run(
        Play(
            playbook=str(images_source() / REACH),
            inventory=inventory,
            variables={"image_boot_s": 5},
        )
    )
    first = runs.run(nodes_play(inventory))
    again = runs.run(nodes_play(inventory))
    machine_id, key = host.must("cat", "/etc/machine-id"), host.host_key.split()[-1]
    host.must("sh", "-c", TRACES)
    seal = seal_play(
        images_source(), inventory, imaging.image_document(RECIPE, BASE, datetime.now(UTC))
    )
    host.must("mount", "-t", "tmpfs", "none", layout.ETC)
    with pytest.raises(PlaybookError) as refused:
        runs.run(seal)
    host.must("umount", layout.ETC)
    runs.run(seal)
    places = ("/etc", "/home", "/root", "/var", "/tmp", "/opt")
    found = host.run("grep", "--recursive", "--files-with-matches", SECRET, *places)
    host.kill()
    return Taken(
        image=host.capture(folder / "disk"),
        first=first,
        again=again,
        refused=refused.value.message,
        left=found.stdout.split(),
        machine_id=machine_id,
        host_key=key,
    )


@pytest.fixture(scope="module")
def started(taken: Taken, labs: Labs, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A host that starts from the image."""
    served = labs("decode-0", image=taken.image)
    return Runs(served=served, name="decode-0", folder=tmp_path_factory.mktemp("started"))


def test_a_sealed_machine_has_nothing_of_itself_on_its_disk(taken: Taken) -> None:
    assert taken.left == []
    disk = taken.image
    assert list((disk / "etc/ssh").glob("ssh_host_*")) == []
    for home in ("root", "home/ubuntu"):
        assert [p for p in (disk / home / ".ssh").iterdir() if not is_gone(p)] == []
    assert is_gone(disk / layout.ETC.lstrip("/"))
    assert (disk / "etc/machine-id").read_text() == ""
    assert [p for p in (disk / "var/log").rglob("*") if p.is_file()] == []
    document = json.loads((disk / layout.IMAGE.lstrip("/")).read_text())
    assert document["recipe"] == RECIPE.digest
    assert document["base"] == BASE.id


def is_gone(path: Path) -> bool:
    """Not there, or marked as removed from the layer below."""
    return not os.path.lexists(path) or (path.is_char_device() and path.stat().st_rdev == 0)


def test_a_machine_that_cannot_be_cleaned_is_refused_and_can_be_sealed_afterwards(
    taken: Taken,
) -> None:
    said = f"cannot become an image: OSError: [Errno 16] Device or resource busy: '{layout.ETC}'."
    assert f"image-builder: {said}" in taken.refused


def test_a_machine_from_the_image_is_another_one(taken: Taken, started: Runs) -> None:
    host = started.host
    assert host.must("cat", "/etc/machine-id").strip()
    assert host.must("cat", "/etc/machine-id") != taken.machine_id
    assert host.host_key.split()[-1] != taken.host_key
    # Its instance store is its own, and was set up at the first boot.
    assert host.must("findmnt", "--noheadings", "--output", "FSTYPE", layout.DATA).strip() == "ext4"


def test_on_a_machine_from_the_image_nodes_yml_finds_nothing_to_do(
    taken: Taken, started: Runs, record_property: Any
) -> None:
    assert taken.first.changed > 10
    assert taken.again.changed == 0
    report = started.run(nodes_play(started.inventory()))
    assert started.changed() == []
    assert report.changed == 0
    for name, one in (("fresh", taken.first), ("again", taken.again), ("from the image", report)):
        record_property(f"nodes.yml, {name}, s", round(one.seconds, 1))
        print(f"nodes.yml on a host, {name}: {one.seconds:.1f} s")  # noqa: T201
