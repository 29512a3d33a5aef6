"""Taking images of instances: moto makes them at once and tags no snapshot."""

from __future__ import annotations

from typing import Any, Final

from moto.core.responses import ActionResult

from tests.double.describe import Describing, owner_of
from tests.double.errors import refuse, refuse_unknown
from tests.double.world import ACCOUNT, WORLD

HONOURED: Final = frozenset(
    {"InstanceId", "Name", "Description", "TagSpecifications", "NoReboot", "DryRun"}
)


class Imaging(Describing):
    def create_image(self) -> ActionResult:
        """pending, and available once the time for it has passed; so its snapshot."""
        backend = self.ec2_backend
        asked = {k: v for k, v in dict(self._get_params()).items() if v is not None}
        if unknown := asked.keys() - HONOURED:
            refuse_unknown(f"CreateImage with {', '.join(sorted(unknown))}")
        self.error_on_dryrun()
        name, instance = asked["Name"], backend.get_instance(asked["InstanceId"])
        for other in backend.amis.values():
            if other.name == name and other.owner_id == ACCOUNT:
                refuse(
                    "InvalidAMIName.Duplicate",
                    f"AMI name {name} is already in use by AMI {other.id}",
                )
        if instance.state not in {"running", "stopped"}:
            refuse(
                "IncorrectState",
                f"The instance '{instance.id}' is in the state '{instance.state}', and must be "
                "'running' or 'stopped'.",
            )
        tags = self._parse_tag_specification()
        if unknown := tags.keys() - {"image", "snapshot"}:
            refuse(
                "InvalidParameterValue",
                f"'{unknown.pop()}' is not a valid taggable resource type for this operation.",
            )
        made = backend.create_image(asked["InstanceId"], name, asked.get("Description", ""), [])
        source = backend.amis[instance.image_id]
        for field in ("root_device_name", "root_device_type", "hypervisor", "architecture"):
            setattr(made, field, getattr(source, field))
        made.add_tags(tags.get("image", {}))
        made.ebs_snapshot.add_tags(tags.get("snapshot", {}))
        made.state, made.ebs_snapshot.status = "pending", "pending"
        WORLD.later(WORLD.image_s, lambda: _complete(made))
        return ActionResult({"ImageId": made.id})

    def describe_snapshots(self) -> ActionResult:
        """Only of those who were asked for, and how far each is."""
        owners = [ACCOUNT if o == "self" else o for o in self._get_param("OwnerIds", [])]
        ids = self._get_param("SnapshotIds", [])
        found = self.ec2_backend.describe_snapshots(snapshot_ids=ids)
        return ActionResult(
            {"Snapshots": [s for s in found if not owners or owner_of(s) in owners]}
        )


def _complete(image: Any) -> None:
    if image.state == "pending":
        image.state, image.ebs_snapshot.status = "available", "completed"


def fail(image: Any, message: str) -> None:
    """EC2 gives it up."""
    image.state = "failed"
    image.state_reason = {"Code": "Server.InternalError", "Message": message}
