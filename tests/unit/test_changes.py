from __future__ import annotations

from typing import Any

import pytest

from kvdeploy.model.base import Change
from kvdeploy.model.schema import all_keys
from kvdeploy.model.spec import ClusterSpec
from kvdeploy.planning.changes import FieldChange, compare

AWS = {"region": "us-west-2", "zone": "us-west-2a"}


def cluster(**top: Any) -> ClusterSpec:
    return ClusterSpec.model_validate({"name": "demo", **top})


def test_the_same_file_changes_nothing() -> None:
    assert compare(cluster(), cluster()) == ()
    assert compare(cluster(target="aws", aws=AWS), cluster(target="aws", aws=AWS)) == ()


@pytest.mark.parametrize(
    ("wanted", "change"),
    [
        (
            {"fleet": {"decode": {"count": 3}}},
            FieldChange(path="fleet.decode.count", was="1", wanted="3", does=Change.RESTART),
        ),
        (
            {"router": {"deadlines": {"total_s": 30}}},
            FieldChange(
                path="router.deadlines.total_s", was="600.0", wanted="30.0", does=Change.RELOAD
            ),
        ),
        (
            {"model": {"served_name": "m"}},
            FieldChange(path="model.served_name", was="(not set)", wanted="m", does=Change.RESTART),
        ),
        (
            {"runtime": {"start_timeout_s": 60}},
            FieldChange(
                path="runtime.start_timeout_s", was="600.0", wanted="60.0", does=Change.RELOAD
            ),
        ),
        (
            {"name": "other"},
            FieldChange(path="name", was="demo", wanted="other", does=Change.REFUSE),
        ),
    ],
)
def test_a_changed_field_says_what_it_was_and_what_changing_it_does(
    wanted: dict[str, Any], change: FieldChange
) -> None:
    assert compare(cluster(), cluster(**wanted)) == (change,)


def test_changes_come_in_the_order_of_the_file() -> None:
    wanted = cluster(
        router={"port": 9}, model={"seed": 1, "id": "/m"}, fleet={"decode": {"count": 2}}
    )
    found = [c.path for c in compare(cluster(), wanted)]
    assert found == ["model.id", "model.seed", "fleet.decode.count", "router.port"]
    order = [key.dotted for key in all_keys()]
    assert sorted(found, key=order.index) == found


def test_values_of_the_environment_are_never_shown() -> None:
    was = cluster(fleet={"decode": {"env": {"HF_TOKEN": "hf_old"}}})
    wanted = cluster(
        fleet={"decode": {"env": {"HF_TOKEN": "hf_new"}}}, runtime={"env": {"KEY": "hf_more"}}
    )
    found = compare(was, wanted)
    assert [(c.path, c.was, c.wanted) for c in found] == [
        ("fleet.decode.env", "...", "..."),
        ("runtime.env", "...", "..."),
    ]
    assert "hf_" not in repr(found)


def test_a_whole_new_section_is_said_field_by_field() -> None:
    found = {c.path: c for c in compare(cluster(), cluster(target="aws", aws=AWS))}
    assert (found["target"].was, found["target"].wanted) == ("local", "aws")
    assert found["aws.region"] == FieldChange(
        path="aws.region", was="(not set)", wanted="us-west-2", does=Change.REFUSE
    )
    assert found["aws.capacity.kind"].wanted == "on-demand"
    gone = {c.path: c for c in compare(cluster(target="aws", aws=AWS), cluster())}
    assert (gone["aws.region"].was, gone["aws.region"].wanted) == ("us-west-2", "(not set)")
