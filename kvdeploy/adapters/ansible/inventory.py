"""Renders the typed Inventory as Ansible's. Values are data: none is ever read as a template."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, Final, get_args

from kvdeploy.adapters.ansible.ssh import ssh_options
from kvdeploy.errors import CheckError
from kvdeploy.model.launch import Role
from kvdeploy.model.wording import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from kvdeploy.model.inventory import Host, Inventory

ROLES: Final[tuple[Role, ...]] = get_args(Role)
GPU_ROLES: Final = ("prefill", "decode")
GROUPS: Final = ("all", "gpu", *ROLES)

_TEMPLATES: Final = ("{{", "{%", "{#")


def check_inventory(inventory: Inventory, limit: Iterable[str] = ()) -> None:
    """Refuse what Ansible would shrug off.

    Raises:
        CheckError: there are no hosts, two have one name, or `limit` names something else than
            hosts and groups that have hosts.
    """
    names = [host.name for host in inventory.hosts]
    if not names:
        msg = "the inventory has no hosts, so no playbook can be run on it"
        raise CheckError(msg, hint="'kvdeploy status' shows which nodes there are.")
    twice = sorted({name for name in names if names.count(name) > 1 or name in GROUPS})
    if twice:
        msg = f"the inventory uses a name for more than one thing: {', '.join(twice)}"
        raise CheckError(msg)
    groups = [g for g in GROUPS if any(_is_in(g, host) for host in inventory.hosts)]
    good = (*names, *groups)
    for word in limit:
        if word not in good:
            msg = f"no host or group is called {word!r}.{did_you_mean(word, good)}"
            raise CheckError(msg, hint=f"There are: {', '.join(good)}.")


def chosen(inventory: Inventory, limit: Iterable[str] = ()) -> tuple[Host, ...]:
    """The hosts that `limit` leaves."""
    words = tuple(limit) or ("all",)
    return tuple(
        host
        for host in inventory.hosts
        if any(word == host.name or _is_in(word, host) for word in words)
    )


def render_inventory(inventory: Inventory, control: Path) -> dict[str, Any]:
    """A document for Ansible's own YAML and JSON inventory.

    Args:
        inventory: what to render; `check_inventory` it first.
        control: the folder for ssh's sockets.
    """
    group_vars = {**inventory.group_vars}
    connection = inventory.connection
    everywhere: dict[str, Any] = {
        "ansible_user": connection.user,
        "ansible_port": connection.port,
        "ansible_pipelining": True,
    }

    def group(name: Role) -> dict[str, Any]:
        members = (h for h in inventory.hosts if h.role == name)
        return {
            "hosts": {h.name: _host_vars(h, inventory, control) for h in members},
            "vars": as_data(group_vars.get(name, {})),
        }

    gpu = {"children": {role: group(role) for role in ROLES if role in GPU_ROLES}}
    others = {role: group(role) for role in ROLES if role not in GPU_ROLES}
    return {
        "all": {
            "vars": as_data({**everywhere, **group_vars.get("all", {})}),
            "children": {"gpu": {**gpu, "vars": as_data(group_vars.get("gpu", {}))}, **others},
        }
    }


def as_data(value: Any) -> Any:  # noqa: ANN401
    """A value in the form in which Ansible does not expand templates in it.

    Engines' arguments may hold chat templates, which look like Ansible's own.
    """
    match value:
        case str() if any(mark in value for mark in _TEMPLATES):
            return {"__ansible_unsafe": value}
        case dict():
            return {key: as_data(inner) for key, inner in value.items()}
        case list() | tuple():
            return [as_data(inner) for inner in value]
        case _:
            return value


def _host_vars(host: Host, inventory: Inventory, control: Path) -> Mapping[str, Any]:
    options = ssh_options(host, inventory.connection, control=control)
    how = {"ansible_host": host.address, "ansible_ssh_args": shlex.join(options)}
    rendered = as_data({**how, **host.vars})
    assert isinstance(rendered, dict)  # noqa: S101  # for the type checker
    return rendered


def _is_in(group: str, host: Host) -> bool:
    return group in {"all", host.role} or (group == "gpu" and host.role in GPU_ROLES)
