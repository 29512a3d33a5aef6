"""What an image is made of, and what its builder is told. Pure.

One recipe for image and live node: the builder runs nodes.yml with the variables of a GPU node, so
that a node from the image has nothing left to do.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Final

from kvdeploy import __version__
from kvdeploy.errors import CheckError
from kvdeploy.model import catalog, layout
from kvdeploy.model.image import BASE_TAG, BUILDER, MANAGED_TAG, RECIPE_TAG, Recipe
from kvdeploy.model.infra import CLUSTER_TAG, ID_TAG, NODE_TAG, OWNER_TAG, ROLE_TAG, TAG
from kvdeploy.model.inventory import Host, Inventory
from kvdeploy.model.wording import did_you_mean
from kvdeploy.planning import configuration

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from kvdeploy.model.awsfacts import Image
    from kvdeploy.model.catalog import InstanceProfile
    from kvdeploy.model.image import Builder
    from kvdeploy.model.infra import ClusterIdentity
    from kvdeploy.model.inventory import Connection
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.planning.configuration import Site

ROLES: Final = ("base", "nvidia", "efa", "vllm", "nixl")
"""What of nodes.yml an image holds. Models go to the instance store, which no image has."""
END_AFTER_S: Final = 4 * 3600
"""A builder that nobody ends has ended itself this long after its last boot."""


def find_profile(instance_type: str) -> InstanceProfile:
    """Raises CheckError: it is none of the types that GPU nodes may have."""
    if (profile := catalog.INSTANCES.get(instance_type)) is None:
        hint = did_you_mean(instance_type, catalog.INSTANCES)
        msg = f"an image cannot be made on {instance_type!r}: nodes.yml proves GPUs and EFA"
        good = ", ".join(catalog.INSTANCES)
        raise CheckError(msg, hint=f"Types with both: {good}.{hint}")
    return profile


def build_variables(
    spec: ClusterSpec, profile: InstanceProfile, site: Site
) -> dict[str, dict[str, Any]]:
    """Variables of nodes.yml by group, for a machine that will serve no model of its own."""
    return {
        "all": configuration.base_variables() | {"monitoring_enabled": False},
        "gpu": {
            **configuration.node_variables(profile, data_gib=0),
            **configuration.nvidia_variables(profile),
            **configuration.efa_variables(profile),
            **configuration.vllm_variables(spec, site),
            **configuration.nixl_variables(spec, site.device),
            **configuration.model_variables(spec, site),
            "model_source": "none",
            "model_id": "",
        },
    }


def build_recipe(
    variables: Mapping[str, Mapping[str, Any]],
    files: Mapping[str, str],
    versions: Mapping[str, str],
    site: Site,
) -> Recipe:
    """Name everything that an image follows from.

    Args:
        variables: of build_variables.
        files: digests of playbooks, roles, locks and programs by name.
        versions: vllm, nixl.
        site: names of files on this machine, which say nothing: what is in them is in `files`.
    """
    told = site.files
    places = (told.runtime_lock, told.runtime_probe, told.s3_lock, told.router_lock)
    meant = {
        f"{group}.{name}": value
        for group, known in variables.items()
        for name, value in known.items()
        if not name.startswith("model_") and value not in places
    }
    text = json.dumps({"variables": meant, "files": dict(files)}, sort_keys=True)
    return Recipe(
        digest=hashlib.sha256(text.encode()).hexdigest()[:16],
        versions={**versions, "efa": catalog.EFA_INSTALLER, "kvdeploy": __version__},
    )


def build_inventory(
    builder: Builder, variables: Mapping[str, Mapping[str, Any]], connection: Connection
) -> Inventory:
    """The builder as a node among nodes.yml's."""
    host = Host(
        name=BUILDER,
        role="decode",
        address=builder.address,
        instance_id=builder.id,
        vars={"monitoring_address": builder.address},
    )
    return Inventory(
        hosts=(host,),
        connection=connection,
        group_vars={"all": dict(variables["all"]), "gpu": dict(variables["gpu"])},
    )


def build_cloud_config(*, login_key: str, host_key: str, host_public: str) -> str:
    """User data of the builder. Its host key is given to it, so that nobody has to believe the
    first one that answers; and it ends itself when we never come back.
    """
    end = ["systemd-run", f"--on-active={END_AFTER_S}", "systemctl", "poweroff"]
    document = {
        "ssh_authorized_keys": [login_key],
        "ssh_deletekeys": True,
        "ssh_keys": {"ed25519_private": host_key, "ed25519_public": host_public},
        "package_update": False,
        "package_upgrade": False,
        "bootcmd": [end],  # at every boot: roles may reboot the machine
    }
    return f"#cloud-config\n{json.dumps(document, indent=1)}\n"  # JSON is YAML


def build_interfaces(profile: InstanceProfile, *, subnet: str, group: str) -> list[dict[str, Any]]:
    """Network interfaces as infra/modules/nodes/interfaces.tf has them: an EFA device a card, an
    address on the first one alone.
    """
    found: list[dict[str, Any]] = [
        {
            "NetworkCardIndex": card,
            "DeviceIndex": 0 if card == 0 else 1,
            "InterfaceType": "efa" if card == 0 else "efa-only",
            "SubnetId": subnet,
            "Groups": [group],
            "DeleteOnTermination": True,
        }
        for card in range(profile.efa_devices)
    ]
    if len(found) == 1:  # EC2 refuses to hear of public addresses when there are several
        found[0]["AssociatePublicIpAddress"] = False
    return found


def builder_tags(spec: ClusterSpec, identity: ClusterIdentity) -> dict[str, str]:
    """As everything of a cluster carries them: `down` and `status` see the builder."""
    own = dict(spec.aws.tags) if spec.aws else {}
    return own | {
        "Name": f"{spec.name}-{BUILDER}",
        CLUSTER_TAG: spec.name,
        ID_TAG: identity.id,
        OWNER_TAG: identity.owner,
        MANAGED_TAG: "true",
        NODE_TAG: BUILDER,
        ROLE_TAG: "image",
    }


def image_tags(spec: ClusterSpec, recipe: Recipe, base: Image) -> dict[str, str]:
    """Of the image and its snapshots. Not the cluster's id: an image outlives clusters."""
    own = dict(spec.aws.tags) if spec.aws else {}
    versions = {f"{TAG}{name}": version for name, version in recipe.versions.items() if version}
    marks = {RECIPE_TAG: recipe.digest, BASE_TAG: base.id, MANAGED_TAG: "true"}
    return own | versions | marks | {"Name": f"kvdeploy {recipe.digest}"}


def image_name(recipe: Recipe, base: Image, now: datetime) -> str:
    """Names of an account's images are unique. The system is in it: checks read it there."""
    what = " ".join(f"{n} {v}" for n, v in recipe.versions.items() if n == "vllm" and v)
    return f"kvdeploy ({base.os}) {what} {recipe.digest} {base.id} {now:%Y%m%d%H%M%S%f}"


def image_document(recipe: Recipe, base: Image, now: datetime) -> dict[str, Any]:
    """What the image says of itself, in layout.IMAGE."""
    return {
        "path": layout.IMAGE,
        "content": {
            "recipe": recipe.digest,
            "versions": recipe.versions,
            "base": base.id,
            "base_name": base.name,
            "made_at": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        },
    }
