from __future__ import annotations

import io
import stat
from typing import TYPE_CHECKING

import pytest

from kvdeploy.adapters import specfile
from kvdeploy.cli.app import App, main
from kvdeploy.planning.template import render_cluster
from kvdeploy.ui import Ui

if TYPE_CHECKING:
    from pathlib import Path


def run(root: Path, *argv: str) -> tuple[int, str]:
    err = io.StringIO()
    code = main(("init", *argv), app=App(ui=Ui(err=err), root=root))
    return code, err.getvalue()


def test_the_file_is_written_where_other_commands_look_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.yaml"
    assert run(tmp_path) == (0, "")
    assert capsys.readouterr().out == (
        f"wrote {path}; 'kvdeploy check' looks at it, 'kvdeploy up' brings it up\n"
    )
    assert path.read_text() == render_cluster("local", "demo")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


@pytest.mark.parametrize("target", ["local", "aws"])
def test_what_is_written_can_be_read(tmp_path: Path, target: str) -> None:
    assert run(tmp_path, "--target", target, "--name", "mine", "-f", "m.yaml")[0] == 0
    spec = specfile.load(tmp_path / "m.yaml").spec
    assert (spec.name, spec.target) == ("mine", target)


def test_a_file_that_is_there_is_not_replaced_unasked(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("mine")
    assert run(tmp_path) == (
        3,
        f"error: {path} is already there\n"
        "  try: Take another name with -f, or replace it with --force.\n",
    )
    assert path.read_text() == "mine"
    assert run(tmp_path, "--force")[0] == 0
    assert path.read_text() != "mine"


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    code, said = run(tmp_path, "-f", "no/such/c.yaml")
    assert (code, said) == (
        3,
        f"error: {tmp_path / 'no/such'}: no such folder\n  try: Make it first.\n",
    )
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("name", ["Demo", "my cluster", "x", "1st", "a: b", "a" * 40])
def test_a_name_that_no_cluster_may_have_is_refused_at_once(tmp_path: Path, name: str) -> None:
    assert run(tmp_path, "--name", name) == (
        3,
        f"error: --name: must be lower case letters, digits and dashes, 2-31 long, not {name!r}\n",
    )
    assert list(tmp_path.iterdir()) == []


def test_another_target_is_wrong_usage(tmp_path: Path) -> None:
    assert run(tmp_path, "--target", "gcp")[0] == 2
    assert list(tmp_path.iterdir()) == []


def test_a_zone_makes_it_a_cluster_on_aws_in_its_region(tmp_path: Path) -> None:
    assert run(tmp_path, "--zone", "us-east-2b")[0] == 0
    spec = specfile.load(tmp_path / "cluster.yaml").spec
    assert spec.aws is not None
    assert (spec.target, spec.aws.region, spec.aws.zone) == ("aws", "us-east-2", "us-east-2b")


def test_options_of_aws_are_refused_for_another_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--target", "local", "--state", "bucket")[0] == 2
    assert "--zone and --state are for --target aws" in capsys.readouterr().err
    assert not (tmp_path / "cluster.yaml").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ("--zone", "us-east-2"),
            "--zone: must be one availability zone: EFA does not cross zones",
        ),
        (("--state", "No_Bucket"), "--state: must be the name of an S3 bucket"),
    ],
)
def test_a_wrong_zone_or_bucket_is_told(tmp_path: Path, argv: tuple[str, ...], said: str) -> None:
    code, told = run(tmp_path, *argv)
    assert code == 3
    assert told.startswith(f"error: {said}")
    assert not (tmp_path / "cluster.yaml").exists()


def test_a_bucket_is_not_made_for_a_file_that_names_another(tmp_path: Path) -> None:
    assert run(tmp_path, "--target", "aws")[0] == 0
    code, told = run(tmp_path, "--state", "mine")
    assert code == 3
    assert told == (
        f"error: {tmp_path / 'cluster.yaml'} is already there, and its state.bucket is not mine\n"
        "  try: Write 'state: {bucket: mine}' into it and repeat this command.\n"
    )
