"""Placement groups."""

from __future__ import annotations

from typing import Any

from moto.core.responses import ActionResult, EmptyResult

from tests.double.describe import Describing, alive
from tests.double.errors import refuse
from tests.double.world import ACCOUNT, WORLD, PlacementGroup


class Placing(Describing):
    def create_placement_group(self) -> ActionResult:
        name = self._get_param("GroupName")
        self.error_on_dryrun()
        if (self.region, name) in WORLD.groups:
            refuse(
                "InvalidPlacementGroup.Duplicate", f"The Placement Group '{name}' already exists."
            )
        if len(WORLD.groups_in(self.region)) >= WORLD.placement_group_limit:
            refuse(
                "PlacementGroupLimitExceeded",
                "You have reached the maximum number of Placement Groups "
                f"({WORLD.placement_group_limit}) you can have.",
            )
        group = PlacementGroup(
            WORLD.new_id("pg"), name, self.region, self._get_param("Strategy") or "cluster"
        )
        WORLD.groups[self.region, name] = group
        tags = self._parse_tag_specification("placement-group").get("placement-group", {})
        self.ec2_backend.tags[group.id].update(tags)
        return ActionResult({"PlacementGroup": self._show_group(group)})

    def describe_placement_groups(self) -> ActionResult:
        names, ids = self._get_param("GroupNames", []), self._get_param("GroupIds", [])
        there = WORLD.groups_in(self.region)
        for wanted in [*names, *ids]:
            if not any(wanted in {group.name, group.id} for group in there):
                refuse(
                    "InvalidPlacementGroup.Unknown", f"The Placement Group '{wanted}' is unknown."
                )
        found = [
            self._show_group(group)
            for group in there
            if (not names or group.name in names) and (not ids or group.id in ids)
        ]
        return ActionResult({"PlacementGroups": found})

    def delete_placement_group(self) -> ActionResult:
        name = self._get_param("GroupName")
        self.error_on_dryrun()
        group = find_group(self.region, name)
        arn = group_arn(group)
        if any(i.placement.group_name == name for i in alive(self.ec2_backend)) or any(
            r.group_arn == arn and r.state == "active" for r in WORLD.reservations_in(self.region)
        ):
            refuse(
                "InvalidPlacementGroup.InUse",
                f"The placement group '{name}' is in use and may not be deleted.",
            )
        del WORLD.groups[self.region, name]
        return EmptyResult()

    def _show_group(self, group: PlacementGroup) -> dict[str, Any]:
        tags = self.ec2_backend.tags.get(group.id, {})
        return {
            "GroupName": group.name,
            "GroupId": group.id,
            "GroupArn": group_arn(group),
            "State": "available",
            "Strategy": group.strategy,
            "Tags": [{"Key": key, "Value": value} for key, value in tags.items()],
        }


def group_arn(group: PlacementGroup) -> str:
    return f"arn:aws:ec2:{group.region}:{ACCOUNT}:placement-group/{group.name}"


def find_group(region: str, name: str) -> PlacementGroup:
    group = WORLD.groups.get((region, name))
    if group is None:
        refuse("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")
    return group
