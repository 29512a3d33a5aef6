"""AMIs: by id, or the newest that an SSM parameter names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvdeploy.adapters.aws.network import found, is_missing
from kvdeploy.adapters.aws.refusals import code_of
from kvdeploy.errors import AwsError
from kvdeploy.model.awsfacts import Image

if TYPE_CHECKING:
    from kvdeploy.adapters.aws.session import Aws


def image(aws: Aws, name: str) -> Image | None:
    """An image by ami-... or by the name of an SSM parameter; None when there is none.

    Raises AwsError.
    """
    ami = name if name.startswith("ami-") else _named(aws, name)
    described = found(aws, "ec2:DescribeImages", "Images", ImageIds=[ami]) if ami else []
    if not described:
        return None
    one = described[0]
    title = str(one.get("Name") or "")
    return Image(
        id=one["ImageId"],
        name=title,
        os=os_of(title) or os_of(str(one.get("Description") or "")),
        architecture=str(one.get("Architecture") or ""),
        state=str(one.get("State") or ""),
        root_device=str(one.get("RootDeviceName") or ""),
    )


def os_of(text: str) -> str:
    """The system that an image's name speaks of, e.g. 'Ubuntu 22.04'; '' when it speaks of none."""
    ubuntu = re.search(r"ubuntu[^0-9]{0,40}(\d\d\.\d\d)", text, re.IGNORECASE)
    if ubuntu:
        return f"Ubuntu {ubuntu[1]}"
    amazon = re.search(r"amazon linux ?(\d+)|\bal(2023)\b", text, re.IGNORECASE)
    return f"Amazon Linux {amazon[1] or amazon[2]}" if amazon else ""


def _named(aws: Aws, parameter: str) -> str | None:
    try:
        return str(aws.call("ssm:GetParameter", Name=parameter)["Parameter"]["Value"])
    except AwsError as e:
        if is_missing(e) or code_of(e) == "ParameterNotFound":
            return None
        raise
