"""The cluster file, as types. Shape and ranges only: what a value *means* is in
planning/checks.py, so that this module needs neither AWS nor a catalog.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from kvdeploy.model.awsspec import AwsSpec
from kvdeploy.model.base import Change, EngineArg, Frozen, knob
from kvdeploy.model.routerspec import RouterSpec

EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
TARGETS = ("local", "aws")


class ModelSpec(Frozen):
    """What is served."""

    id: str = knob(
        "builtin:tiny",
        doc="builtin:tiny (made on the spot, no network), a local path, a hub id, or s3://BUCKET/KEY",
        change=Change.RESTART,
        min_length=1,
    )
    served_name: str | None = knob(
        None, doc="the name clients ask for; default: the last part of id", change=Change.RESTART
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = knob(
        "auto", doc="weights and KV: auto, bfloat16, float16, float32", change=Change.RESTART
    )
    max_length: int = knob(
        2048, doc="longest prompt + answer, in tokens", change=Change.RESTART, ge=64, le=10_000_000
    )
    load_format: Literal["auto", "dummy"] = knob(
        "auto",
        doc="auto, or dummy: random weights of the model's shape, for timing only",
        change=Change.RESTART,
    )
    seed: int = knob(
        0, doc="of builtin:tiny's weights and of dummy weights", change=Change.RESTART, ge=0
    )
    revision: str | None = knob(
        None, doc="hub revision (branch, tag or commit)", change=Change.RESTART
    )


class FleetSpec(Frozen):
    """The engines of one role."""

    count: int = knob(1, doc="engines of this role", change=Change.RESTART, ge=1, le=64)
    tensor_parallel: int = knob(1, doc="GPUs an engine spans", change=Change.RESTART, ge=1, le=16)
    data_parallel: int = knob(
        1, doc="replicas of the model inside one engine", change=Change.RESTART, ge=1, le=16
    )
    nodes_per_instance: int = knob(
        1, doc="nodes one engine spans (aws)", change=Change.REPLACE, ge=1, le=16
    )
    kv_cache_gib: float | None = knob(
        None,
        doc="KV cache of an engine in GiB; default: 0.25 on CPU, what vLLM measures on GPUs",
        change=Change.RESTART,
        gt=0,
        le=2048,
    )
    engine_args: dict[str, EngineArg] = knob(
        {}, doc="more vLLM flags, e.g. {max-num-seqs: 64}", change=Change.RESTART
    )
    env: dict[EnvName, str] = knob(
        {}, doc="more environment for the engines", change=Change.RESTART
    )


class FleetsSpec(Frozen):
    """Prefill computes prompts and pushes their KV; decode generates."""

    prefill: FleetSpec = knob(
        FleetSpec(), doc="engines that compute prompts", change=Change.RESTART
    )
    decode: FleetSpec = knob(FleetSpec(), doc="engines that generate tokens", change=Change.RESTART)


class ConnectorSpec(Frozen):
    """How KV blocks travel. Both sides must agree, so there is one for the fleet."""

    mode: Literal["push", "pull"] = knob(
        "push",
        doc="push: prefill writes into decode; pull: decode reads from prefill",
        change=Change.RESTART,
    )
    backend: Literal["auto", "UCX", "LIBFABRIC"] = knob(
        "auto", doc="NIXL backend; auto: LIBFABRIC on aws, UCX on local", change=Change.RESTART
    )
    block_size: Literal[16, 32, 64, 128, 256] = knob(
        128, doc="tokens a KV block; 16 32 64 128 256", change=Change.RESTART
    )
    threads: int | None = knob(
        None,
        doc="threads that NIXL posts transfers with on UCX; default: vLLM's own number, 4",
        change=Change.RESTART,
        ge=1,
        le=64,
    )
    lease_s: float = knob(
        120.0,
        doc="seconds prefill keeps finished blocks for decode",
        change=Change.RESTART,
        ge=5,
        le=3600,
    )


class RuntimeSpec(Frozen):
    """The Python environment of the engines; never the one kvdeploy itself runs in."""

    python: str | None = knob(
        None,
        doc="an existing interpreter that can import vllm and nixl; default: kvdeploy builds one",
        change=Change.RESTART,
    )
    device: Literal["auto", "cpu", "cuda"] = knob(
        "auto", doc="auto: cuda where NVIDIA GPUs are found, else cpu", change=Change.RESTART
    )
    env: dict[EnvName, str] = knob(
        {},
        doc="environment of that interpreter, e.g. {PYTHONPATH: /opt/site}",
        change=Change.RESTART,
    )
    start_timeout_s: float = knob(
        600.0, doc="for an engine to become healthy", change=Change.RELOAD, ge=10, le=86400
    )


class MonitoringSpec(Frozen):
    """Prometheus and Grafana on the router's node (aws)."""

    enabled: bool = knob(default=False, doc="install Prometheus and Grafana", change=Change.RELOAD)


class StateSpec(Frozen):
    """Where Terraform's state is kept (aws)."""

    bucket: str | None = knob(
        None,
        doc="the name of an S3 bucket, with native locking; default: local files",
        change=Change.REFUSE,
        pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$",
        examples=["kvdeploy-state"],
    )


class ClusterSpec(Frozen):
    """One cluster: what is served, by how many engines, where."""

    name: str = knob(
        doc="lower case letters, digits and dashes, 2-31 long",
        change=Change.REFUSE,
        pattern=r"^[a-z][a-z0-9-]{1,30}$",
    )
    target: Literal["local", "aws"] = knob(
        "local", doc="local: this machine; aws: EC2 with EFA", change=Change.REFUSE
    )
    model: ModelSpec = knob(ModelSpec(), doc="what is served", change=Change.RESTART)
    fleet: FleetsSpec = knob(FleetsSpec(), doc="the engines", change=Change.RESTART)
    connector: ConnectorSpec = knob(
        ConnectorSpec(), doc="how KV blocks travel", change=Change.RESTART
    )
    router: RouterSpec = knob(
        RouterSpec(), doc="the one address that clients use", change=Change.ROUTER
    )
    runtime: RuntimeSpec = knob(
        RuntimeSpec(), doc="the Python environment of the engines", change=Change.RESTART
    )
    aws: AwsSpec | None = Field(
        None,
        description="what target aws needs",
        json_schema_extra={"change": Change.REFUSE.value},
    )
    monitoring: MonitoringSpec = knob(
        MonitoringSpec(), doc="Prometheus and Grafana (aws)", change=Change.RELOAD
    )
    state: StateSpec = knob(
        StateSpec(), doc="where Terraform's state is kept (aws)", change=Change.REFUSE
    )

    @property
    def kind(self) -> str:
        """The target, as people and reports call it: a rehearsal never passes for aws."""
        return (
            "rehearsal" if self.target == "aws" and self.aws and self.aws.endpoint else self.target
        )
