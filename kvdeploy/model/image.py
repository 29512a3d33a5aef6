"""Images of GPU nodes: what makes one the same as another, and which there are."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from pydantic import Field

from kvdeploy.model.base import Stored
from kvdeploy.model.infra import TAG

RECIPE_TAG: Final = f"{TAG}recipe"
"""On an image and its snapshots: the recipe's digest."""
BASE_TAG: Final = f"{TAG}base"
"""On an image: the image that it was made from."""
BUILD_TAG: Final = f"{TAG}build"
"""On the builder, the image and its snapshots: by it one run finds again what is its own."""
MANAGED_TAG: Final = f"{TAG}managed"
BUILDER: Final = "image-builder"
"""The builder's kvdeploy:node."""


class Recipe(Stored):
    """All that an image follows from but the image that it is made from."""

    digest: str
    """16 hexadecimal digits; another for other pins, roles or kinds of machine."""
    versions: dict[str, str]
    """Of what people ask for first: vllm, nixl, efa, kvdeploy."""


class NodeImage(Stored):
    """An image that kvdeploy made."""

    id: str
    name: str
    state: str
    """EC2's: pending, available, failed..."""
    recipe: str
    base: str
    created: datetime | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    reason: str = ""
    """Why it failed, in EC2's words."""


class Builder(Stored):
    """The machine that an image is taken from, as EC2 describes it."""

    id: str
    state: str
    address: str
    """Private; '' before it has one."""
    instance_type: str
    launched_at: datetime
