"""`kvdeploy image` on AWS: an image from which nodes start ready."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click

from kvdeploy.adapters.ansible.client import Ansible
from kvdeploy.adapters.ansible.ssh import check_tools, known_as
from kvdeploy.adapters.aws import builders, imaging
from kvdeploy.adapters.aws.facts import locked_versions
from kvdeploy.adapters.aws.prices import prices_of
from kvdeploy.adapters.recipe import digests
from kvdeploy.adapters.shipped import images_source, playbooks_source
from kvdeploy.adapters.sshkeys import forget_key, make_key
from kvdeploy.adapters.store import write_text
from kvdeploy.cli.aws.site import ask, identity_if_readable
from kvdeploy.cli.common import recorded
from kvdeploy.cli.tables import show
from kvdeploy.planning import imaging as planning
from kvdeploy.planning.access import build_connection
from kvdeploy.planning.configuration import Site
from kvdeploy.polling import SystemClock
from kvdeploy.stages import image as building
from kvdeploy.stages.aws_preflight import aws_section, new_identity, session_of
from kvdeploy.stages.image_preflight import find_base, find_ground, find_ready
from kvdeploy.stages.nodes import NO_PACKAGE, control_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvdeploy.adapters.aws.session import Aws
    from kvdeploy.adapters.store import RunLog, Store
    from kvdeploy.cli.app import App
    from kvdeploy.cli.common import Loaded
    from kvdeploy.model.awsfacts import Image
    from kvdeploy.model.catalog import InstanceProfile
    from kvdeploy.model.image import Builder, NodeImage, Recipe
    from kvdeploy.model.infra import ClusterIdentity
    from kvdeploy.model.inventory import Inventory
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.polling import Clock
    from kvdeploy.proc import Runner
    from kvdeploy.stages.image_preflight import Ground, Wishes
    from kvdeploy.stages.nodes import Plays

LOGIN: Final = "builder-login"
HOST: Final = "builder-host"
"""Names of the builder's keys in the run's folder."""


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What is decided before AWS is asked for anything."""

    spec: ClusterSpec
    profile: InstanceProfile
    variables: dict[str, dict[str, Any]]
    recipe: Recipe


def image(
    app: App,
    loaded: Loaded,
    store: Store,
    wishes: Wishes,
    *,
    keep: bool,
    yes: bool,
    as_json: bool,
    aws: Aws | None = None,
    plays: Callable[[RunLog], Plays] | None = None,
    clock: Clock | None = None,
) -> None:
    """The last three: whom to ask, what runs playbooks, and what waits."""
    spec, clock = loaded.spec, clock or SystemClock()
    section = aws_section(spec)
    aws = aws or session_of(spec)
    work = _work(spec, wishes.instance_type or section.instance_type)
    with recorded(app, store, "image") as (run, runner):
        with app.ui.step("ask AWS what there is"):
            base = find_base(aws, spec, wishes)
            known = identity_if_readable(spec, store.read(target="aws"), store, aws)
            left = builders.find(aws, spec.name)
        if left:
            _end_earlier(app, aws, left, yes=yes, clock=clock)
        with app.ui.step(f"look for the image of recipe {work.recipe.digest}") as step:
            found = find_ready(aws, work.recipe, base, step, clock=clock)
        if found is not None:
            _show(found, work.recipe, made=False, as_json=as_json)
            return
        with app.ui.step("look for a place for the builder"):
            ground = find_ground(aws, spec, known, wishes, instance_type=work.profile.name)
            identity = known or new_identity(aws.identity().user)
            check_tools(build_connection(section, private_key="", known_hosts=""))
        app.ui.say(_price(aws, work.profile.name))
        runs = plays(run) if plays else Ansible(run.path / "ansible.jsonl", runner=runner)
        try:
            plan = _plan(work, aws, ground, base, identity, run, runner, keep=keep)
            found = building.build(plan, runs, progress=app.ui, clock=clock)
        except BaseException:
            if not keep:
                _forget(run.path)
            raise
        _forget(run.path)
    _show(found, work.recipe, made=True, as_json=as_json)


def show_images(loaded: Loaded, *, as_json: bool) -> None:
    """Every image of the account and region that kvdeploy made."""
    section = aws_section(loaded.spec)
    found = imaging.find(session_of(loaded.spec))
    if as_json:
        click.echo(json.dumps([i.model_dump(mode="json") for i in found], indent=2))
        return
    recipe = _work(loaded.spec, section.instance_type).recipe
    if not found:
        click.echo(f"no image of kvdeploy's is in {section.region}")
        return
    rows = [
        (
            i.id,
            "used" if i.id == section.ami else "current" if i.recipe == recipe.digest else "other",
            i.state,
            i.versions.get("vllm", ""),
            i.base,
            f"{i.created:%F %R}" if i.created else "",
        )
        for i in found
    ]
    show(("image", "recipe", "state", "vllm", "from", "made (UTC)"), rows)


# --- what is decided here --------------------------------------------------------------------
def _work(spec: ClusterSpec, instance_type: str) -> _Work:
    profile = planning.find_profile(instance_type)
    site = Site(device="cuda", files=control_files("cuda", NO_PACKAGE))
    variables = planning.build_variables(spec, profile, site)
    files = digests(playbooks_source(), images_source(), planning.ROLES)
    locked = locked_versions()
    recipe = planning.build_recipe(
        variables, files, {"vllm": locked.vllm, "nixl": locked.nixl}, site
    )
    return _Work(spec=spec, profile=profile, variables=variables, recipe=recipe)


def _plan(
    work: _Work,
    aws: Aws,
    ground: Ground,
    base: Image,
    identity: ClusterIdentity,
    run: RunLog,
    runner: Runner,
    *,
    keep: bool,
) -> building.ImagePlan:
    section, now = aws_section(work.spec), datetime.now(UTC)
    login = make_key(runner, run.path / LOGIN, comment="kvdeploy-image")
    host = make_key(runner, run.path / HOST, comment="kvdeploy-image")
    connection = build_connection(
        section, private_key=str(login.path), known_hosts=str(run.path / "known_hosts")
    )

    def inventory(builder: Builder) -> Inventory:
        made = planning.build_inventory(builder, work.variables, connection)
        kind, key, *_ = host.public.split()
        line = f"{known_as(made.hosts[0], connection)} {kind} {key}\n"
        write_text(run.path / "known_hosts", line)
        return made

    order = builders.Order(
        build=secrets.token_hex(8),
        image=base.id,
        root_device=base.root_device,
        root_gib=section.root_volume_gib,
        instance_type=work.profile.name,
        interfaces=planning.build_interfaces(
            work.profile, subnet=ground.subnet, group=ground.security_group
        ),
        profile=ground.profile,
        user_data=planning.build_cloud_config(
            login_key=login.public, host_key=host.private, host_public=host.public
        ),
        tags=planning.builder_tags(work.spec, identity),
        reservation=ground.reservation,
        market=ground.market,
    )
    return building.ImagePlan(
        aws=aws,
        order=order,
        name=planning.image_name(work.recipe, base, now),
        tags=planning.image_tags(work.spec, work.recipe, base),
        inventory=inventory,
        document=planning.image_document(work.recipe, base, now),
        playbooks=images_source(),
        keep=keep,
    )


def _forget(folder: Path) -> None:
    for name in (LOGIN, HOST):
        forget_key(folder / name)


def _end_earlier(app: App, aws: Aws, left: tuple[Builder, ...], *, yes: bool, clock: Clock) -> None:
    """Builders of runs that were killed, or were kept."""
    names = ", ".join(f"{b.id} ({b.state} since {b.launched_at:%F %R} UTC)" for b in left)
    ask(
        f"A builder of an earlier run is there: {names}. It will be ended; is no other kvdeploy "
        "at work with it?",
        yes=yes,
    )
    with app.ui.step("end the earlier builder"):
        builders.end(aws, [b.id for b in left], clock=clock)


# --- what is shown ---------------------------------------------------------------------------
def _price(aws: Aws, instance_type: str) -> str:
    price = prices_of(aws, [instance_type]).get(instance_type)
    cost = f"${price.usd_hour:.2f} an hour" if price else "at a price that is not known"
    return f"builder: a {instance_type}, {cost}, until its image is taken"


def _show(found: NodeImage, recipe: Recipe, *, made: bool, as_json: bool) -> None:
    if as_json:
        document = {**found.model_dump(mode="json"), "made": made, "recipe": recipe.digest}
        click.echo(json.dumps(document, indent=2))
        return
    word = "made" if made else "there already; nothing to do"
    versions = ", ".join(f"{n} {v}" for n, v in found.versions.items())
    click.echo(f"image: {found.id} ({versions}): {word}")
    click.echo("into the cluster file, whose GPU nodes 'kvdeploy up' then makes anew from it:")
    click.echo(f"aws:\n  ami: {found.id}")
