"""Images of nodes on EC2: taking one of a machine, finding and removing them.

What one run makes carries its tag kvdeploy:build, so that it is found again also when the answer
that named it was never read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvdeploy.adapters.aws.network import found
from kvdeploy.adapters.aws.session import by_tag, filters, tags_of
from kvdeploy.errors import AwsError
from kvdeploy.model.image import BASE_TAG, BUILD_TAG, RECIPE_TAG, NodeImage
from kvdeploy.model.infra import TAG
from kvdeploy.polling import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvdeploy.adapters.aws.session import Aws
    from kvdeploy.polling import Clock

IMAGE_S: Final = 2 * 3600.0
"""How long EC2 may take: the first snapshot of a volume is of all that is on it."""
INTERVAL_S: Final = 15.0
VERSIONS: Final = ("vllm", "nixl", "efa", "kvdeploy")


def create(aws: Aws, instance_id: str, *, name: str, build: str, tags: Mapping[str, str]) -> str:
    """Ask for an image of a machine; its id. Raises AwsError."""
    every = [{"Key": k, "Value": v} for k, v in {**tags, BUILD_TAG: build}.items()]
    answer = aws.call(
        "ec2:CreateImage",
        InstanceId=instance_id,
        Name=name,
        Description=name,
        TagSpecifications=[{"ResourceType": k, "Tags": every} for k in ("image", "snapshot")],
    )
    return str(answer["ImageId"])


def wait_available(
    aws: Aws, image_id: str, *, clock: Clock, on_detail: Callable[[str], None]
) -> NodeImage:
    """Until the image can be used. Raises AwsError: EC2 gave it up, or is too slow."""

    def look() -> NodeImage | None:
        listed = found(aws, "ec2:DescribeImages", "Images", ImageIds=[image_id])
        if not listed:
            return None  # EC2 tells late of what it has just made
        image = _image(listed[0])
        if image.state == "pending":
            on_detail(f"{image_id}, {_progress(aws, image_id)}")
            return None
        if image.state != "available":
            why = f": {image.reason}" if image.reason else ""
            msg = f"EC2 could not make the image {image_id}, it is {image.state}{why}"
            raise AwsError(msg, hint="Run 'kvdeploy image' again.")
        return image

    image = wait_for(look, timeout_s=IMAGE_S, interval_s=INTERVAL_S, clock=clock)
    if image is None:
        msg = f"the image {image_id} is not ready {IMAGE_S / 3600:.0f} hours after it was asked for"
        raise AwsError(msg, hint="Run 'kvdeploy image' again.")
    return image


def find(aws: Aws, *, recipe: str | None = None, base: str | None = None) -> tuple[NodeImage, ...]:
    """Images of this account that kvdeploy made, newest first. Raises AwsError."""
    asked = by_tag(RECIPE_TAG, recipe) if recipe else filters(tag_key=RECIPE_TAG)
    asked += by_tag(BASE_TAG, base) if base else []
    listed = aws.all("ec2:DescribeImages", "Images", Owners=["self"], Filters=asked)
    return tuple(sorted((_image(i) for i in listed), key=lambda i: str(i.created), reverse=True))


def made_from(aws: Aws, image_id: str) -> NodeImage | None:
    """How an image was made, when kvdeploy made it; None for any other. Raises AwsError."""
    listed = found(aws, "ec2:DescribeImages", "Images", ImageIds=[image_id])
    return next((_image(one) for one in listed if RECIPE_TAG in tags_of(one)), None)


def discard(aws: Aws, build: str) -> tuple[str, ...]:
    """Remove images and snapshots of one build; their ids. Raises AwsError."""
    mine = by_tag(BUILD_TAG, build)
    images = aws.all("ec2:DescribeImages", "Images", Owners=["self"], Filters=mine)
    for one in images:
        aws.call("ec2:DeregisterImage", ImageId=one["ImageId"])
    snapshots = aws.all("ec2:DescribeSnapshots", "Snapshots", OwnerIds=["self"], Filters=mine)
    for one in snapshots:
        aws.call("ec2:DeleteSnapshot", SnapshotId=one["SnapshotId"])
    return (*(i["ImageId"] for i in images), *(s["SnapshotId"] for s in snapshots))


def _image(described: dict[str, Any]) -> NodeImage:
    tags = tags_of(described)
    return NodeImage(
        id=described["ImageId"],
        name=str(described.get("Name") or ""),
        state=str(described.get("State") or ""),
        recipe=tags.get(RECIPE_TAG, ""),
        base=tags.get(BASE_TAG, ""),
        created=described.get("CreationDate"),
        versions={name: tags[TAG + name] for name in VERSIONS if TAG + name in tags},
        reason=str((described.get("StateReason") or {}).get("Message") or ""),
    )


def _progress(aws: Aws, image_id: str) -> str:
    """How far the snapshots are, e.g. '43% of its snapshot'."""
    mapped = found(aws, "ec2:DescribeImages", "Images", ImageIds=[image_id])
    ids = [
        block["Ebs"]["SnapshotId"]
        for one in mapped
        for block in one.get("BlockDeviceMappings", [])
        if block.get("Ebs", {}).get("SnapshotId")
    ]
    listed = found(aws, "ec2:DescribeSnapshots", "Snapshots", SnapshotIds=ids) if ids else []
    done = ", ".join(str(one.get("Progress") or "0%") for one in listed)
    return f"snapshots: {done or 'not begun'}"
