"""An image of a GPU node: a builder is made a node by nodes.yml, what is of that one machine is
removed, and EC2 keeps its disk.

Whatever happens, the builder ends, and no half-made image stays: both would go on costing money.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from kvdeploy.adapters.ansible.client import Play
from kvdeploy.adapters.ansible.ssh import ssh_argv
from kvdeploy.adapters.aws import builders, imaging
from kvdeploy.adapters.recipe import NODES, REACH, SEAL
from kvdeploy.errors import AwsError, KvdeployError, UnreachableError
from kvdeploy.model import layout
from kvdeploy.planning.imaging import ROLES
from kvdeploy.polling import wait_for
from kvdeploy.stages.configure import FIRST_BOOT_S, NODES_S, REACH_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from kvdeploy.adapters.aws.session import Aws
    from kvdeploy.model.image import Builder, NodeImage
    from kvdeploy.model.inventory import Inventory
    from kvdeploy.polling import Clock
    from kvdeploy.stages.base import Step
    from kvdeploy.stages.nodes import Plays

T = TypeVar("T")

AGAIN_S: Final = 10.0
SEAL_S: Final = 600.0


class Progress(Protocol):
    def step(self, title: str) -> AbstractContextManager[Step]: ...


@dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """One image that is to be made."""

    aws: Aws
    order: builders.Order
    name: str
    tags: Mapping[str, str]
    """Of the image and its snapshots."""
    inventory: Callable[[Builder], Inventory]
    document: Mapping[str, Any]
    """What the image is to say of itself: path and content."""
    playbooks: Path
    """The folder images/."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Of nodes.yml; they go before all others."""
    keep: bool = False
    """Whether a builder on which something failed stays, to be looked at."""


@dataclass(kw_only=True)
class _Made:
    """What there is already, for whoever has to end it."""

    id: str | None = None
    inventory: Inventory | None = None


def build(plan: ImagePlan, plays: Plays, *, progress: Progress, clock: Clock) -> NodeImage:
    """Make the image. Takes long, and costs what the builder costs meanwhile.

    Raises:
        AwsError: EC2 refuses or fails; or the builder could not be ended, and bills.
        PlaybookError: the builder could not be made a node, or not be sealed.
        UnreachableError: it does not answer.
    """
    made = _Made()
    try:
        image = _build(plan, plays, made, progress=progress, clock=clock)
    except BaseException as e:
        _give_up(plan, made, e, progress=progress, clock=clock)
        raise
    with progress.step("end the builder"):
        _insist(lambda: _end(plan, made, None, clock=clock, but=f"the image {image.id} is there"))
    return image


def _build(
    plan: ImagePlan, plays: Plays, made: _Made, *, progress: Progress, clock: Clock
) -> NodeImage:
    aws, order = plan.aws, plan.order
    with progress.step(f"start the builder, a {order.instance_type}") as step:
        made.id = builders.launch(aws, order)
        step.update(f"{made.id} boots")
        builder = builders.wait_running(aws, made.id, clock=clock)
        step.note(f"   + builder {builder.id} {builder.address}")
    made.inventory = inventory = plan.inventory(builder)
    with progress.step("wait until the builder answers") as step:
        _reach(plan, plays, inventory, step, clock=clock)
    with progress.step("make the builder a node") as step:
        plays.listener = step
        plays.run(nodes_play(inventory, plan.variables))
    with progress.step("remove what is of the builder alone") as step:
        plays.listener = step
        plays.run(seal_play(plan.playbooks, inventory, plan.document))
    with progress.step("stop the builder"):
        builders.stop(aws, builder.id, clock=clock)
    with progress.step("take its image") as step:
        step.update("asking EC2")
        image_id = imaging.create(
            aws, builder.id, name=plan.name, build=order.build, tags=plan.tags
        )
        step.note(f"   + image {image_id}")
        return imaging.wait_available(aws, image_id, clock=clock, on_detail=step.update)


def _reach(
    plan: ImagePlan, plays: Plays, inventory: Inventory, step: Step, *, clock: Clock
) -> None:
    """Until the builder lets us in, and its first boot is over.

    Raises:
        UnreachableError: it does not, with the last reason.
    """
    play = Play(
        playbook=str(plan.playbooks / REACH),
        inventory=inventory,
        variables={"image_boot_s": int(FIRST_BOOT_S)},
        timeout_s=FIRST_BOOT_S + REACH_S,
    )
    last: list[UnreachableError] = []

    def look() -> bool | None:
        try:
            plays.run(play)
        except UnreachableError as e:
            last[:] = [e]
            step.update(e.message)
            return None
        return True

    if not wait_for(look, timeout_s=REACH_S, interval_s=AGAIN_S, clock=clock):
        raise last[0]


def nodes_play(inventory: Inventory, variables: Mapping[str, Any] | None = None) -> Play:
    """All of nodes.yml that an image holds."""
    return Play(
        playbook=NODES,
        inventory=inventory,
        variables=variables or {},
        tags=ROLES,
        timeout_s=NODES_S,
    )


def seal_play(images: Path, inventory: Inventory, document: Mapping[str, Any]) -> Play:
    """What makes a node fit to be copied."""
    told = {"image_document": dict(document), "image_etc": layout.ETC, "image_data": layout.DATA}
    path = str(images / SEAL)
    return Play(playbook=path, inventory=inventory, variables=told, timeout_s=SEAL_S)


# --- the end ---------------------------------------------------------------------------------
def _give_up(
    plan: ImagePlan,
    made: _Made,
    error: BaseException,
    *,
    progress: Progress,
    clock: Clock,
) -> None:
    """After a failure or an interrupt: nothing stays that costs, but a builder that is to be kept.

    Raises:
        AwsError: something does, and is named.
    """
    with progress.step("clear away") as step:
        if plan.keep and made.id:
            step.note(f"   kept: builder {made.id}, at its price an hour; run this again to end it")
            if made.inventory:
                (host,) = made.inventory.hosts
                step.note(f"   {shlex.join(ssh_argv(host, made.inventory.connection))}")
        else:
            step.update("ending the builder")
            _insist(lambda: _end(plan, made, error, clock=clock))
        step.update("removing the half-made image")
        try:
            for name in _insist(lambda: imaging.discard(plan.aws, plan.order.build)):
                step.note(f"   - {name}")
        except AwsError as e:
            told = f"{_words(error)}; and what was made of the image may still be stored"
            msg = f"{told} (tag kvdeploy:build={plan.order.build}): {e.message}"
            raise AwsError(msg, hint=e.hint) from error


def _end(
    plan: ImagePlan,
    made: _Made,
    error: BaseException | None,
    *,
    clock: Clock,
    but: str = "",
) -> None:
    try:
        known = (made.id,) if made.id else ()
        builders.end(plan.aws, known, clock=clock, build=plan.order.build)
    except AwsError as e:
        told = but or _words(error)
        name = made.id or f"with the tag kvdeploy:build={plan.order.build}"
        msg = f"{told}; and the builder {name} may still run, and bill: {e.message}"
        region = plan.aws.region
        by_hand = f"aws ec2 terminate-instances --region {region} --instance-ids {name}"
        hint = f"End it: '{by_hand}'. 'kvdeploy down' and 'kvdeploy image' end it, too."
        raise AwsError(msg, hint=hint) from error


def _insist(action: Callable[[], T]) -> T:
    """Do it once more if somebody interrupts it: what it leaves undone costs money."""
    try:
        return action()
    except KeyboardInterrupt:
        return action()


def _words(error: BaseException | None) -> str:
    if isinstance(error, KvdeployError):
        return error.message
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "a bug in kvdeploy"
