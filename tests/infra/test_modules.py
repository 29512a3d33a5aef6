"""infra/ by itself: its form, its own tests, and what it and the catalog both say."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from kvdeploy.model.catalog import INSTANCES
from kvdeploy.planning.cost import GPU_NODE_IOPS, GPU_NODE_MBPS, ROUTER_VOLUME_GIB

pytestmark = pytest.mark.real_process

INFRA = Path(__file__).parents[2] / "infra"


@pytest.fixture(scope="module")
def environment(
    terraform_config: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """For terraform in infra/, with its data elsewhere."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "TF_VAR_"))}
    data = str(tmp_path_factory.mktemp("data"))
    return {**kept, **terraform_config, "TF_DATA_DIR": data, "CHECKPOINT_DISABLE": "1"}


def terraform(environment: dict[str, str], *argv: str) -> str:
    done = subprocess.run(
        ["terraform", *argv],
        cwd=INFRA,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_files_are_formatted(environment: dict[str, str]) -> None:
    terraform(environment, "fmt", "-check", "-recursive", "-diff")


def test_the_configuration_is_valid_and_its_own_tests_pass(environment: dict[str, str]) -> None:
    """The committed lock is enough, wherever the provider comes from."""
    terraform(environment, "init", "-backend=false", "-lockfile=readonly", "-input=false")
    terraform(environment, "validate", "-no-color")
    said = terraform(environment, "test", "-no-color")
    passed, failed = map(int, re.findall(r"(\d+) passed, (\d+) failed", said)[0])
    assert failed == 0
    assert passed >= 41


def test_the_cost_knows_the_volumes_that_infra_makes() -> None:
    text = (INFRA / "modules" / "nodes" / "main.tf").read_text()
    (iops,) = re.findall(r"iops\s*=.*null : (\d+)", text)
    (mbps,) = re.findall(r"throughput\s*=.*null : (\d+)", text)
    assert (int(iops) - 3000, int(mbps) - 125) == (GPU_NODE_IOPS, GPU_NODE_MBPS)
    root = (INFRA / "variables.tf").read_text()
    (gib,) = re.findall(r"root_volume_gib\s*=\s*optional\(number, (\d+)\)", root)
    assert int(gib) == ROUTER_VOLUME_GIB


def test_no_file_says_where_this_machine_keeps_things() -> None:
    """Providers come from wherever the operator's Terraform takes them."""
    told = [
        path.name
        for path in INFRA.rglob("*")
        if path.is_file()
        and ".terraform" not in path.parts
        and re.search(r"provider_installation|filesystem_mirror|plugin-dir", path.read_text())
    ]
    assert told == []


def test_the_lock_serves_every_platform() -> None:
    lock = (INFRA / ".terraform.lock.hcl").read_text()
    assert lock.count('"zh:') >= 10  # as the registry signs them: one a platform
    assert 'constraints = "~> 5.100"' in lock


def test_the_catalog_and_infra_know_the_same_interfaces() -> None:
    text = (INFRA / "modules" / "nodes" / "interfaces.tf").read_text()
    told = {name: int(count) for name, count in re.findall(r'"([\w.]+)"\s*=\s*(\d+)', text)}
    assert told == {name: profile.efa_devices for name, profile in INSTANCES.items()}
