"""The folders that come with kvdeploy are found in a checkout and in an installed package."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import kvdeploy
from kvdeploy.adapters.shipped import images_source, infra_source, playbooks_source
from kvdeploy.errors import ToolError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize(
    ("source", "name", "holding"),
    [
        (infra_source, "infra", "main.tf"),
        (playbooks_source, "playbooks", "ansible.cfg"),
        (images_source, "images", "seal.yml"),
    ],
)
def test_a_folder_is_found_within_the_package_else_beside_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: Callable[[], Path],
    name: str,
    holding: str,
) -> None:
    assert (source() / holding).is_file()
    package = tmp_path / "site" / "kvdeploy"
    package.mkdir(parents=True)
    monkeypatch.setattr(kvdeploy, "__file__", str(package / "__init__.py"))
    with pytest.raises(ToolError, match=f"has no {name}/ beside"):
        source()
    for place in (package.parent / name, package / name):
        place.mkdir()
        (place / holding).touch()
        assert source() == place
