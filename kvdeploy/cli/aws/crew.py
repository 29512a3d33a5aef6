"""Who works on the nodes of a cluster on AWS, and with which key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvdeploy.adapters.ansible.client import Ansible
from kvdeploy.adapters.remote import Remote
from kvdeploy.adapters.sshkeys import make_key
from kvdeploy.planning.access import build_connection, named_key, needs_own_key
from kvdeploy.proc import LocalRunner
from kvdeploy.stages.aws_preflight import aws_section, read_public_key
from kvdeploy.stages.nodes import Crew

if TYPE_CHECKING:
    from kvdeploy.adapters.store import Store
    from kvdeploy.model.inventory import Connection
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.proc import Runner


def crew_of(spec: ClusterSpec, store: Store, folder: Path, runner: Runner) -> Crew:
    """Whoever works on the nodes; what is said meanwhile goes to `folder`."""
    # Nodes that boot are asked every few seconds: that is not written down as what was run.
    remote = Remote(LocalRunner(), connection_of(spec, store), log=folder / "ssh.log")
    return Crew(
        spec=spec,
        root=store.root,
        packages=store.dir / "packages",
        plays=Ansible(folder / "ansible.jsonl", runner=runner),
        remote=remote,
        environment=os.environ,
    )


def connection_of(spec: ClusterSpec, store: Store) -> Connection:
    section = aws_section(spec)
    key = str(store.login_key) if needs_own_key(section.access) else None
    if (named := named_key(section.access)) is not None:
        path = store.root / Path(named).expanduser()
        # Beside a public key there may be none: then an agent, or ssh's configuration, has it.
        key = str(path) if section.access.private_key_file or path.exists() else None
    return build_connection(
        section, private_key=key, known_hosts=str(store.known_hosts), learn=True
    )


def public_key_of(spec: ClusterSpec, store: Store, runner: Runner, *, make_in: Path) -> str | None:
    """The public key that EC2 is told; None where it knows one already, or none is wanted.

    Args:
        spec: of the cluster.
        store: where the cluster's own key lies, if nobody named one.
        runner: makes it.
        make_in: the folder for one that is not there yet.
    """
    if not needs_own_key(aws_section(spec).access):
        return read_public_key(spec, store.root)
    public = store.login_key.with_name(f"{store.login_key.name}.pub")
    if public.exists():
        return public.read_text(encoding="ascii").strip()
    make_in.mkdir(parents=True, exist_ok=True)
    path = make_in / store.login_key.name
    return make_key(runner, path, comment=f"kvdeploy-{spec.name}").public
