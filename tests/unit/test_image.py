"""What an image is made of, what its builder is told, and what makes it another image."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kvdeploy import __version__
from kvdeploy.adapters.aws.images import os_of
from kvdeploy.adapters.package import PARTS
from kvdeploy.adapters.recipe import OWN, digests, lock_file, probe_file
from kvdeploy.adapters.shipped import images_source
from kvdeploy.errors import CheckError
from kvdeploy.model import catalog, layout
from kvdeploy.model.awsfacts import Image
from kvdeploy.model.image import Builder, Recipe
from kvdeploy.model.infra import ClusterIdentity
from kvdeploy.model.package import RouterPackage
from kvdeploy.model.spec import ClusterSpec
from kvdeploy.planning import imaging
from kvdeploy.planning.access import build_connection
from kvdeploy.planning.configuration import ControlFiles, Site

ROOT = Path(__file__).parents[2]
PLAYBOOKS = ROOT / "playbooks"
NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
BASE = Image(
    id="ami-0abc",
    name="Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20260918",
    os="Ubuntu 24.04",
    architecture="x86_64",
    state="available",
    root_device="/dev/sda1",
)
P5EN = catalog.INSTANCES["p5en.48xlarge"]
RECIPE = Recipe(digest="0123456789abcdef", versions={"vllm": "9.9", "efa": "1.51.0"})


def spec(**aws: Any) -> ClusterSpec:
    section = {"region": "us-west-2", "zone": "us-west-2a"} | aws
    return ClusterSpec.model_validate({"name": "demo", "target": "aws", "aws": section})


def site(folder: str = "/somewhere") -> Site:
    files = ControlFiles(
        runtime_lock=f"{folder}/cuda.txt",
        runtime_probe=f"{folder}/runtime.py",
        s3_lock=f"{folder}/node.txt",
        router_lock=f"{folder}/router.txt",
        router_package=RouterPackage(path="", digest=""),
    )
    return Site(device="cuda", files=files)


def recipe(
    *,
    cluster: ClusterSpec | None = None,
    profile: catalog.InstanceProfile = P5EN,
    where: str = "/somewhere",
    files: dict[str, str] | None = None,
) -> Recipe:
    variables = imaging.build_variables(cluster or spec(), profile, site(where))
    return imaging.build_recipe(variables, files or {"a": "1"}, {"vllm": "9.9"}, site(where))


# --- the recipe ------------------------------------------------------------------------------
def test_a_recipe_says_nothing_of_this_machine_the_model_or_the_clusters_name() -> None:
    known = recipe()
    assert re.fullmatch(r"[0-9a-f]{16}", known.digest)
    assert recipe(where="/elsewhere").digest == known.digest
    other = ClusterSpec.model_validate(
        {
            "name": "other",
            "target": "aws",
            "model": {"id": "org/other"},
            "aws": {"region": "eu-west-1", "zone": "eu-west-1a", "ami": "ami-1"},
        }
    )
    assert recipe(cluster=other).digest == known.digest
    assert known.versions == {
        "vllm": "9.9",
        "efa": catalog.EFA_INSTALLER,
        "kvdeploy": __version__,
    }


def test_another_file_pin_or_kind_of_machine_is_another_recipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = recipe().digest
    assert recipe(files={"a": "2"}).digest != known
    assert recipe(files={"b": "1"}).digest != known
    assert recipe(profile=catalog.INSTANCES["g6.8xlarge"]).digest != known
    monkeypatch.setattr(catalog, "EFA_INSTALLER", "9.9.9")
    assert recipe().digest != known


def test_every_file_that_shapes_a_node_is_in_the_recipe_and_no_cache_is(tmp_path: Path) -> None:
    playbooks, images = tmp_path / "playbooks", tmp_path / "images"
    for name in ("tasks/main.yml", "files/look.py", "README.md", "files/.cache/x", "__pycache__/y"):
        path = playbooks / "roles/base" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    (playbooks / "nodes.yml").write_text("1")
    images.mkdir()
    for name in OWN:
        (images / name).write_text("1")
    known = digests(playbooks, images, ("base",))
    assert set(known) == {
        "images/reach.yml",
        "images/seal.yml",
        "images/seal.py",
        "nodes.yml",
        "roles/base/tasks/main.yml",
        "roles/base/files/look.py",
        "cuda.txt",
        "probe",
    }
    (playbooks / "roles/base/files/look.py").write_text("2")
    changed = digests(playbooks, images, ("base",))
    assert {n for n in known if known[n] != changed[n]} == {"roles/base/files/look.py"}


def test_what_the_recipe_reads_is_there() -> None:
    known = digests(PLAYBOOKS, images_source(), imaging.ROLES)
    for role in imaging.ROLES:
        assert f"roles/{role}/tasks/main.yml" in known
    assert lock_file("cuda.txt").exists()
    assert probe_file().exists()


# --- what nodes.yml is told ------------------------------------------------------------------
def test_the_builder_is_told_what_a_node_of_its_type_is_told_but_for_models() -> None:
    told = imaging.build_variables(spec(), P5EN, site())
    assert told["all"]["base_root"] == layout.ROOT
    gpu = told["gpu"]
    assert (gpu["nvidia_gpus"], gpu["efa_devices"], gpu["base_nvme"]) == (8, 16, True)
    assert gpu["base_huge_pages"] == catalog.HUGE_PAGES
    assert gpu["nixl_backend"] == "LIBFABRIC"
    assert (gpu["model_source"], gpu["model_id"]) == ("none", "")
    # No disk is asked for that only weights need.
    assert gpu["base_data_gib"] == 0


def test_the_builder_is_a_gpu_node_of_the_inventory() -> None:
    builder = Builder(
        id="i-1",
        state="running",
        address="10.0.0.9",
        instance_type="p5en.48xlarge",
        launched_at=NOW,
    )
    connection = build_connection(spec().aws, private_key="/k", known_hosts="/h")  # type: ignore[arg-type]
    made = imaging.build_inventory(
        builder, imaging.build_variables(spec(), P5EN, site()), connection
    )
    (host,) = made.hosts
    assert (host.name, host.role, host.address) == ("image-builder", "decode", "10.0.0.9")
    assert host.instance_id == "i-1"
    assert made.group_vars["gpu"]["efa_devices"] == 16


@pytest.mark.parametrize(
    ("access", "bastion", "region"),
    [
        ({"method": "ssm", "bastion": "ops@b"}, None, "us-west-2"),
        ({"method": "ssh", "key_name": "ops", "bastion": "ops@b"}, "ops@b", None),
        ({"method": "ssh", "key_name": "ops"}, None, None),
    ],
)
def test_the_builder_is_reached_as_nodes_are_with_a_key_of_its_own(
    access: dict[str, str], bastion: str | None, region: str | None
) -> None:
    aws = spec(access=access).aws
    assert aws is not None
    made = build_connection(aws, private_key="/run/key", known_hosts="/run/known")
    assert (made.user, made.bastion, made.ssm_region) == ("ubuntu", bastion, region)
    assert (made.private_key, made.known_hosts) == ("/run/key", "/run/known")
    assert not made.learn_host_keys


def test_a_type_without_gpus_and_efa_is_refused_with_those_that_have_both() -> None:
    with pytest.raises(CheckError) as refused:
        imaging.find_profile("p5en.24xlarge")
    assert refused.value.message == (
        "an image cannot be made on 'p5en.24xlarge': nodes.yml proves GPUs and EFA"
    )
    assert refused.value.hint == (
        f"Types with both: {', '.join(catalog.INSTANCES)}. Did you mean p5en.48xlarge?"
    )
    assert imaging.find_profile("g6.8xlarge").efa_devices == 1


# --- what EC2 is told ------------------------------------------------------------------------
def test_interfaces_are_those_of_the_nodes() -> None:
    hcl = (ROOT / "infra/modules/nodes/interfaces.tf").read_text(encoding="utf-8")
    counts = {
        name: int(n) for name, n in re.findall(r'^\s+"([\w.]+)"\s+= (\d+)$', hcl, re.MULTILINE)
    }
    assert counts.keys() == catalog.INSTANCES.keys()
    for name, count in counts.items():
        made = imaging.build_interfaces(catalog.INSTANCES[name], subnet="subnet-1", group="sg-1")
        cards = [(i["NetworkCardIndex"], i["DeviceIndex"], i["InterfaceType"]) for i in made]
        assert cards == [(0, 0, "efa"), *((n, 1, "efa-only") for n in range(1, count))]
        assert {(i["SubnetId"], *i["Groups"]) for i in made} == {("subnet-1", "sg-1")}
        assert all(i["DeleteOnTermination"] for i in made)
        # EC2 refuses to hear of public addresses when there are several interfaces.
        public = [i.get("AssociatePublicIpAddress") for i in made]
        assert public == ([False] if count == 1 else [None] * count)


def test_tags_of_the_builder_are_a_nodes_and_no_users_tag_replaces_one() -> None:
    identity = ClusterIdentity(id="0123456789abcdef", owner="ann", created_at=NOW)
    tags = imaging.builder_tags(spec(tags={"team": "kv", "kvdeploy:id": "mine"}), identity)
    assert tags == {
        "team": "kv",
        "Name": "demo-image-builder",
        "kvdeploy:cluster": "demo",
        "kvdeploy:id": "0123456789abcdef",
        "kvdeploy:owner": "ann",
        "kvdeploy:managed": "true",
        "kvdeploy:node": "image-builder",
        "kvdeploy:role": "image",
    }


def test_an_image_carries_its_recipe_and_not_the_cluster() -> None:
    assert imaging.image_tags(spec(tags={"team": "kv"}), RECIPE, BASE) == {
        "team": "kv",
        "kvdeploy:vllm": "9.9",
        "kvdeploy:efa": "1.51.0",
        "kvdeploy:recipe": "0123456789abcdef",
        "kvdeploy:base": "ami-0abc",
        "kvdeploy:managed": "true",
        "Name": "kvdeploy 0123456789abcdef",
    }


def test_an_images_name_is_one_that_ec2_takes_and_says_the_system() -> None:
    name = imaging.image_name(RECIPE, BASE, NOW)
    assert name == "kvdeploy (Ubuntu 24.04) vllm 9.9 0123456789abcdef ami-0abc 20261130120000000000"
    assert re.fullmatch(r"[A-Za-z0-9()\[\] ./'@_-]{3,128}", name)
    assert os_of(name) == "Ubuntu 24.04"


def test_the_cloud_config_is_yaml_that_lets_one_key_in_and_ends_the_machine() -> None:
    text = imaging.build_cloud_config(login_key="ssh-ed25519 A", host_key="B\n", host_public="C")
    first, _, rest = text.partition("\n")
    assert first == "#cloud-config"
    assert json.loads(rest) == {
        "ssh_authorized_keys": ["ssh-ed25519 A"],
        "ssh_deletekeys": True,
        "ssh_keys": {"ed25519_private": "B\n", "ed25519_public": "C"},
        "package_update": False,
        "package_upgrade": False,
        "bootcmd": [["systemd-run", "--on-active=14400", "systemctl", "poweroff"]],
    }


def test_the_image_says_of_itself_by_which_recipe_it_was_made() -> None:
    assert imaging.image_document(RECIPE, BASE, NOW) == {
        "path": layout.IMAGE,
        "content": {
            "recipe": "0123456789abcdef",
            "versions": {"vllm": "9.9", "efa": "1.51.0"},
            "base": "ami-0abc",
            "base_name": BASE.name,
            "made_at": "2026-11-30T12:00:00Z",
        },
    }


def test_the_router_needs_no_image_of_its_own() -> None:
    """What images/Containerfile.router copies is held to this."""
    assert PARTS == ("__init__.py", "errors.py", "model", "router")
