from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
import yaml

from kvdeploy.adapters import specfile
from kvdeploy.model.schema import all_keys
from kvdeploy.model.spec import ClusterSpec
from kvdeploy.planning.checks import check_spec
from kvdeploy.planning.template import AWS_ONLY, AWS_VALUES, WIDTH, render_cluster

if TYPE_CHECKING:
    from collections.abc import Mapping

EXAMPLES = Path(__file__).parents[2] / "examples"
Target = Literal["local", "aws"]


def load(text: str, tmp_path: Path) -> ClusterSpec:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return specfile.load(path).spec


def nested(values: Mapping[str, object]) -> dict[str, object]:
    top: dict[str, object] = {}
    for path, value in values.items():
        *parents, last = path.split(".")
        level = top
        for part in parents:
            below = level.setdefault(part, {})
            assert isinstance(below, dict)
            level = below
        level[last] = value
    return top


def test_a_local_file_is_the_defaults(tmp_path: Path) -> None:
    assert load(render_cluster("local", "demo"), tmp_path) == ClusterSpec(name="demo")


def test_an_aws_file_is_the_defaults_but_for_the_values_of_aws(tmp_path: Path) -> None:
    wanted = ClusterSpec.model_validate(nested({"name": "demo", "target": "aws", **AWS_VALUES}))
    assert load(render_cluster("aws", "demo"), tmp_path) == wanted


@pytest.mark.parametrize("target", ["local", "aws"])
def test_a_written_file_passes_every_check(target: Target, tmp_path: Path) -> None:
    assert check_spec(load(render_cluster(target, "demo"), tmp_path)) == []


@pytest.mark.parametrize("name", ["no", "on", "yes", "null", "true", "off"])
def test_a_name_that_yaml_would_misread_is_quoted(name: str, tmp_path: Path) -> None:
    assert load(render_cluster("local", name), tmp_path).name == name


@pytest.mark.parametrize("target", ["local", "aws"])
def test_every_key_that_means_something_is_in_the_file(target: Target) -> None:
    uncommented = "\n".join(
        line.replace("# ", "", 1) if line.lstrip().startswith("# ") else line
        for line in render_cluster(target, "demo").splitlines()
    )
    for key in all_keys():
        skipped = target == "local" and any(
            key.dotted == only or key.dotted.startswith(f"{only}.") for only in AWS_ONLY
        )
        is_there = any(
            line.strip().startswith(f"{key.path[-1]}:") and line.index(key.path[-1]) == indent
            for line in uncommented.splitlines()
            for indent in [2 * (len(key.path) - 1)]
        )
        assert is_there or skipped, key.dotted


def test_a_local_file_leaves_out_what_only_aws_knows() -> None:
    text = render_cluster("local", "demo")
    assert not [
        only for only in AWS_ONLY if f"{only.split('.')[-1]}:" in text.replace("aws: EC2", "")
    ]


def test_every_commented_out_key_can_be_put_in_as_it_is(tmp_path: Path) -> None:
    text = render_cluster("aws", "demo")
    keys = {key.path[-1] for key in all_keys()}
    lines = [
        re.sub(r"^( *)# (\w+)(?=:)", lambda m: m[1] + m[2] if m[2] in keys else m[0], line)
        for line in text.splitlines()
    ]
    assert sum(line.lstrip().startswith("#") for line in lines) < len(lines) / 3
    assert load("\n".join(lines), tmp_path) == load(text, tmp_path)


@pytest.mark.parametrize("target", ["local", "aws"])
def test_lines_are_short_enough_to_read(target: Target) -> None:
    lines = render_cluster(target, "demo").splitlines()
    assert [line for line in lines if len(line) > WIDTH or line != line.rstrip()] == []


@pytest.mark.parametrize(
    ("file", "target", "name"),
    [("local.yaml", "local", "demo"), ("p5en-70b.yaml", "aws", "llama-70b")],
)
def test_the_examples_are_what_init_writes(file: str, target: Target, name: str) -> None:
    text = (EXAMPLES / file).read_text(encoding="utf-8")
    assert text == render_cluster(target, name)
    assert specfile.load(EXAMPLES / file).spec.name == name
    assert yaml.safe_load(text)["target"] == target
