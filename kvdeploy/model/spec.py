"""The cluster file, as types. Shape and ranges only: what a value *means* is in
planning/checks.py, so that this module needs neither AWS nor a catalog.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from kvdeploy.model.base import Change, Frozen, knob

EngineArg = bool | int | float | str | list[str] | dict[str, Any]
"""A value of `engine_args`: true is a bare flag, a list repeats its words, a map becomes JSON."""

EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
RoleVariable = Annotated[
    str,
    StringConstraints(
        pattern=r"^(base|nvidia|efa|nixl|vllm|model|engine|router|monitoring)_[a-z0-9_]+$"
    ),
]
"""A variable of one of the roles in playbooks/."""

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


class DeadlinesSpec(Frozen):
    """Bounds on every leg of a request, in seconds."""

    body_s: float = knob(
        30.0, doc="for a client's whole request to arrive", change=Change.RELOAD, gt=0, le=86400
    )
    connect_s: float = knob(5.0, doc="to connect to an engine", change=Change.ROUTER, gt=0, le=600)
    prefill_s: float = knob(
        120.0, doc="for the prefill leg to answer", change=Change.RELOAD, gt=0, le=86400
    )
    first_token_s: float = knob(
        120.0, doc="for decode's first byte of a stream", change=Change.RELOAD, gt=0, le=86400
    )
    inter_token_s: float = knob(
        60.0, doc="between two bytes of a stream", change=Change.RELOAD, gt=0, le=86400
    )
    total_s: float = knob(600.0, doc="for the whole request", change=Change.RELOAD, gt=0, le=86400)


class RouterSpec(Frozen):
    """The one address that clients use."""

    host: str = knob("127.0.0.1", doc="address to listen on", change=Change.ROUTER, min_length=1)
    port: int = knob(8000, doc="port to listen on", change=Change.ROUTER, ge=1, le=65535)
    admin_port: int | None = knob(
        None,
        doc="port of /admin, on 127.0.0.1 only; default: none",
        change=Change.ROUTER,
        ge=1,
        le=65535,
    )
    workers: int = knob(
        1,
        doc="processes that serve the port; each has its part of caps and queue",
        change=Change.ROUTER,
        ge=1,
        le=64,
    )
    policy: Literal["least-loaded", "round-robin"] = knob(
        "least-loaded", doc="how pairs are chosen: least-loaded, round-robin", change=Change.RELOAD
    )
    deadlines: DeadlinesSpec = knob(
        DeadlinesSpec(), doc="bounds on every leg, in seconds", change=Change.RELOAD
    )
    mode: Literal["auto", "push", "push-sequential", "pull", "aggregated"] = knob(
        "auto",
        doc="auto (as connector.mode), push, push-sequential, pull, aggregated (for comparison)",
        change=Change.RELOAD,
    )
    mode_header: bool = knob(
        default=False,
        doc="let X-Kvdeploy-Mode choose the mode of a request",
        change=Change.RELOAD,
    )
    aggregate_below_tokens: int = knob(
        0,
        doc="prompts shorter than this go to decode alone; 0: none",
        change=Change.RELOAD,
        ge=0,
        le=10_000_000,
    )
    tries: int = knob(
        3,
        doc="pairs a request may be sent to before its first byte",
        change=Change.RELOAD,
        ge=1,
        le=10,
    )
    eject_after: int = knob(
        3,
        doc="failures in a row, within eject_window_s, that take an engine out of use",
        change=Change.RELOAD,
        ge=1,
        le=1000,
    )
    eject_window_s: float = knob(
        30.0, doc="seconds that a failure counts", change=Change.RELOAD, gt=0, le=3600
    )
    drain_lost_share: float = knob(
        0.25,
        doc="drain a decode that may have lost so much of its KV to requests whose KV never came",
        change=Change.RELOAD,
        gt=0,
        le=1,
    )
    prefill_at_once: Annotated[int, Field(ge=1, le=100_000)] | Literal["auto"] | None = knob(
        None,
        doc="prompts a prefill engine is given, by all workers: N at once, or auto; default: any",
        change=Change.RELOAD,
    )
    decode_at_once: int | None = knob(
        None,
        doc="requests a decode engine is given at once, by all workers; default: any number",
        change=Change.RELOAD,
        ge=1,
        le=100_000,
    )
    queue_size: int = knob(
        1024,
        doc="requests that may wait for an engine to have room, at all workers",
        change=Change.RELOAD,
        ge=0,
        le=1_000_000,
    )
    queue_wait_s: float = knob(
        30.0, doc="longest wait for room, in seconds", change=Change.RELOAD, gt=0, le=86400
    )
    max_body_mib: float = knob(
        32.0, doc="largest request body", change=Change.ROUTER, gt=0, le=1024
    )
    api_key_file: str | None = knob(
        None,
        doc="file with API keys or sha256:HASH, one a line; needed when host is not loopback",
        change=Change.RELOAD,
    )
    allow_anonymous: bool = knob(
        default=False,
        doc="serve without API keys although host is not loopback",
        change=Change.RELOAD,
    )
    tls_cert_file: str | None = knob(
        None,
        doc="serve https with this certificate chain (PEM; local only); default: http",
        change=Change.ROUTER,
    )
    tls_key_file: str | None = knob(
        None, doc="its key (PEM, without a passphrase)", change=Change.ROUTER
    )
    pair_header: bool = knob(
        default=True,
        doc="let X-Kvdeploy-Pair: PREFILL/DECODE choose the pair; smoke needs it",
        change=Change.RELOAD,
    )
    warm_pairs: bool = knob(
        default=True,
        doc="false: a pair's first request is a client's; only to measure what warming saves",
        change=Change.RELOAD,
    )

    @property
    def tls_files(self) -> tuple[str, str] | None:
        """Certificate and key; None when either is not given."""
        if self.tls_cert_file is None or self.tls_key_file is None:
            return None
        return self.tls_cert_file, self.tls_key_file

    @property
    def ports(self) -> set[int]:
        """What it listens on."""
        return {port for port in (self.port, self.admin_port) if port is not None}


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


class CapacitySpec(Frozen):
    """Where the GPU instances come from."""

    kind: Literal["on-demand", "odcr", "capacity-block", "spot"] = knob(
        "on-demand", doc="on-demand, odcr, capacity-block, spot", change=Change.REPLACE
    )
    reservation_id: str | None = knob(
        None,
        doc="cr-...: the reservation of odcr or capacity-block",
        change=Change.REPLACE,
        pattern=r"^cr-[0-9a-f]+$",
        examples=["cr-0123456789abcdef0"],
    )
    reservation_tags: dict[str, str] = knob(
        {},
        doc="instead of reservation_id: tags that one active reservation has",
        change=Change.REPLACE,
    )
    placement_group: str | None = knob(
        None,
        doc="create, none or an existing group; default: create for on-demand and spot",
        change=Change.REPLACE,
        min_length=1,
    )
    spot_max_usd: float | None = knob(
        None,
        doc="most to pay for an hour of spot; default: the on-demand price",
        change=Change.REPLACE,
        gt=0,
    )


class NetworkSpec(Frozen):
    """An existing network, or none: then a new one is made."""

    vpc_id: str | None = knob(
        None,
        doc="vpc-... of an existing VPC; default: a new one",
        change=Change.REFUSE,
        pattern=r"^vpc-[0-9a-f]+$",
    )
    subnet_id: str | None = knob(
        None,
        doc="subnet-... of an existing private subnet in zone; default: a new one",
        change=Change.REFUSE,
        pattern=r"^subnet-[0-9a-f]+$",
    )
    security_group_id: str | None = knob(
        None,
        doc="sg-... of an existing EFA security group; default: a new one",
        change=Change.REPLACE,
        pattern=r"^sg-[0-9a-f]+$",
    )
    cidr: str = knob("10.42.0.0/16", doc="addresses of a new VPC, /16 to /24", change=Change.REFUSE)
    allowed_cidrs: tuple[str, ...] = knob((), doc="who may reach the router", change=Change.RELOAD)
    open_to_internet: bool = knob(
        default=False, doc="let allowed_cidrs hold 0.0.0.0/0", change=Change.RELOAD
    )
    egress: Literal["nat", "none"] = knob("nat", doc="nat or none", change=Change.RELOAD)
    endpoints: bool = knob(
        default=True, doc="SSM interface endpoints in a new VPC", change=Change.RELOAD
    )


class AccessSpec(Frozen):
    """How nodes are reached."""

    method: Literal["ssm", "ssh"] = knob("ssm", doc="ssm or ssh", change=Change.RELOAD)
    key_name: str | None = knob(
        None,
        doc="existing EC2 key pair; default: the cluster has a key of its own",
        change=Change.REPLACE,
    )
    public_key_file: str | None = knob(
        None,
        doc="instead of key_name: a public key file to make a key pair of",
        change=Change.REPLACE,
    )
    private_key_file: str | None = knob(
        None,
        doc="the key to log in with; default: public_key_file without .pub, else ssh's own choice",
        change=Change.RELOAD,
    )
    ssh_cidrs: tuple[str, ...] = knob(
        (), doc="who may reach port 22, for ssh", change=Change.RELOAD
    )
    bastion: str | None = knob(None, doc="user@host to go through, for ssh", change=Change.RELOAD)


class AwsSpec(Frozen):
    """What `target: aws` needs."""

    region: str = knob(
        doc="an AWS region",
        change=Change.REFUSE,
        pattern=r"^[a-z]{2}(-[a-z]+)+-\d$",
        examples=["us-west-2"],
    )
    zone: str = knob(
        doc="one availability zone: EFA does not cross zones",
        change=Change.REFUSE,
        pattern=r"^[a-z]{2}(-[a-z]+)+-\d[a-z]$",
        examples=["us-west-2a"],
    )
    instance_type: str = knob("p5en.48xlarge", doc="a type with EFA", change=Change.REPLACE)
    router_instance_type: str = knob(
        "c7i.2xlarge", doc="of the router's own node", change=Change.REPLACE
    )
    capacity: CapacitySpec = knob(
        CapacitySpec(), doc="where the GPU instances come from", change=Change.REPLACE
    )
    network: NetworkSpec = knob(
        NetworkSpec(), doc="an existing network; default: a new one", change=Change.REFUSE
    )
    access: AccessSpec = knob(AccessSpec(), doc="how nodes are reached", change=Change.RELOAD)
    ami: str | None = knob(
        None,
        doc="ami-... of the GPU nodes; default: the newest Deep Learning Base AMI, then kept",
        change=Change.REPLACE,
        pattern=r"^ami-[0-9a-f]+$",
    )
    router_ami: str | None = knob(
        None,
        doc="ami-... of the router's node; default: the newest Ubuntu 24.04, then kept",
        change=Change.REPLACE,
        pattern=r"^ami-[0-9a-f]+$",
    )
    root_volume_gib: int = knob(
        200,
        doc="root volume of a GPU node; weights go to its NVMe",
        change=Change.REPLACE,
        ge=100,
        le=16384,
    )
    tags: dict[str, str] = knob({}, doc="put on everything that is made", change=Change.RELOAD)
    ttl_hours: float | None = knob(
        None, doc="hours after which the cluster is due to end", change=Change.RELOAD, gt=0
    )
    budget_usd: float | None = knob(
        None, doc="dollars this cluster may cost", change=Change.RELOAD, gt=0
    )
    node_variables: dict[RoleVariable, EngineArg] = knob(
        {},
        doc="more variables of the roles in playbooks/, e.g. {efa_url: a mirror of ours}",
        change=Change.RELOAD,
    )
    endpoint: str | None = knob(
        None,
        doc="http://127.0.0.1:PORT of a double of AWS: the cluster is a rehearsal",
        change=Change.REFUSE,
        pattern=r"^http://127\.0\.0\.1:\d+$",
        examples=["http://127.0.0.1:5000"],
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
