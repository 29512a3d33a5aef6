"""Machine images, and the public parameters that name the latest ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from moto.core.utils import utcnow
from moto.ec2.models import ec2_backends
from moto.ssm import models as ssm_models

from tests.double.world import ACCOUNT

CANONICAL: Final = "099720109477"
AMAZON: Final = "898082745236"


@dataclass(frozen=True)
class Image:
    parameter: str
    name: str
    owner_id: str
    owner_alias: str | None = None


DEEP_LEARNING: Final = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu"
IMAGES: Final = (
    Image(
        f"{DEEP_LEARNING}-24.04/latest/ami-id",
        "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20260918",
        AMAZON,
        "amazon",
    ),
    Image(
        f"{DEEP_LEARNING}-22.04/latest/ami-id",
        "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 22.04) 20260918",
        AMAZON,
        "amazon",
    ),
    Image(
        "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id",
        "ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-amd64-server-20260915",
        CANONICAL,
        "amazon",
    ),
    Image(
        "/aws/service/canonical/ubuntu/server/22.04/stable/current/amd64/hvm/ebs-gp2/ami-id",
        "ubuntu/images/hvm-ssd/ubuntu-jammy-22.04-amd64-server-20260915",
        CANONICAL,
        "amazon",
    ),
)


def add_image(region: str, image: Image) -> str:
    """Register the image and let the parameter name it as the latest; the image's id."""
    backend = ec2_backends[ACCOUNT][region]
    made = backend.register_image(image.name, None)
    made.owner_id, made.owner_alias = image.owner_id, image.owner_alias
    made.root_device_name, made.root_device_type = "/dev/sda1", "ebs"
    made.virtualization_type, made.architecture, made.hypervisor = "hvm", "x86_64", "xen"
    made.launch_permissions = [{"Group": "all"}]
    parameter: Any = ssm_models.Parameter  # abstract by its annotations only
    versions = ssm_models.ssm_backends[ACCOUNT][region]._parameters[image.parameter]
    versions.append(
        parameter(
            account_id=ACCOUNT,
            name=image.parameter,
            value=made.id,
            parameter_type="String",
            description=None,
            allowed_pattern=None,
            keyid=None,
            last_modified_date=utcnow(),
            version=len(versions) + 1,
            data_type="aws:ec2:image",
        )
    )
    return str(made.id)


def seed(region: str) -> None:
    for image in IMAGES:
        add_image(region, image)
