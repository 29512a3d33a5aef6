"""What each stage of `up` hands to the next, as typed values kept in the record."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from kvdeploy.model.base import Stored
from kvdeploy.model.launch import LaunchSpec
from kvdeploy.model.routing import RouterConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

Device = Literal["cpu", "cuda"]


class RuntimeOutputs(Stored):
    """The engines' Python, and what it was seen to hold."""

    python: str
    device: Device
    built: bool
    """Whether kvdeploy built it; a named one is never changed."""
    versions: dict[str, str]
    """vllm, nixl, torch, python."""
    env: dict[str, str] = Field(default_factory=dict)

    @property
    def vllm_version(self) -> tuple[int, ...]:
        """Leading numbers of vLLM's version; empty when it is not known."""
        return leading_numbers(self.versions.get("vllm", ""))


def leading_numbers(version: str) -> tuple[int, ...]:
    """'1.2.0+cpu' -> (1, 2, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(n) for n in found[0].split(".")) if found else ()


class ModelOutputs(Stored):
    """Where the weights lie and what their configuration says."""

    path: str
    """Given to prefill and decode alike: the literal string is part of their handshake."""
    served_name: str
    config: dict[str, Any]
    """The model's config.json."""
    dtype: str = "auto"
    """What engines are told of it: the cluster file's word, but float32 for a model of ours on
    CPUs when that word is auto (docs/decisions/0004)."""


class NodeFacts(Stored):
    """What a node says of itself."""

    boot_id: str
    """Another one after every start: what lay on its instance store may be gone."""
    interface: str = ""
    """Network interface of its private address."""
    cores: tuple[int, ...] = ()
    generations: dict[str, str] = Field(default_factory=dict)
    """Of every process that runs, by name."""
    units: dict[str, dict[str, str]] = Field(default_factory=dict)
    """systemd's words on every unit of ours, by process."""
    memlock: dict[str, str] = Field(default_factory=dict)
    """By process: bytes of memory that it may lock, or 'unlimited'; '' when it does not run."""
    huge_pages: int = 0
    """Of 2 MiB, reserved."""
    gpus: int = 0
    driver: str = ""
    """NVIDIA's, e.g. '580.95.05'; '' without one that answers."""
    fabric_manager: str = ""
    """Its version, written as the driver's."""
    efa_devices: int = 0
    efa_bytes: int = 0
    """Written and read by RDMA at this node's wish, by all devices together, since they came."""


class ConfiguredNode(Stored):
    """One node as nodes.yml left it."""

    digest: str
    """Of all that it was told."""
    facts: NodeFacts


class ConfigureOutputs(Stored):
    """Nodes that are ready for engines."""

    nodes: dict[str, ConfiguredNode]

    @property
    def facts(self) -> dict[str, NodeFacts]:
        return {name: node.facts for name, node in self.nodes.items()}


class FleetOutputs(Stored):
    """The processes that serve, and where."""

    url: str
    """Of the router."""
    engines: tuple[LaunchSpec, ...]
    router: LaunchSpec
    router_config: RouterConfig
    generations: dict[str, str]
    """Of each engine, when the fleet was last seen whole."""
    made_of: dict[str, str] = Field(default_factory=dict)
    """On nodes: digests of what 'engine' and 'router' were started from beside their LaunchSpecs,
    and of the 'playbooks'."""

    @property
    def trust(self) -> str | None:
        """File with the certificate that the router shows; None when it serves plain HTTP."""
        return self.router_config.tls_cert_file

    def asked_over(self, url: str, engines: Mapping[str, str]) -> FleetOutputs:
        """The same processes, as somebody reaches them elsewhere.

        Args:
            url: of the router, there.
            engines: of each engine, by its name.
        """
        config = self.router_config
        moved = tuple(e.model_copy(update={"url": engines[e.name]}) for e in config.engines)
        config = config.model_copy(update={"engines": moved})
        return self.model_copy(update={"url": url, "router_config": config})
