"""What is known of a cluster that is planned: its model, its GPUs, its last bench. Only looks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvdeploy.adapters.local import machine
from kvdeploy.adapters.tinymodel import tiny_config
from kvdeploy.errors import CheckError
from kvdeploy.model.bench import SCHEMA, BenchReport
from kvdeploy.model.catalog import INSTANCES
from kvdeploy.model.outputs import ModelOutputs
from kvdeploy.planning.aws_case import Judged
from kvdeploy.planning.aws_model_checks import utilization, weights_bytes
from kvdeploy.planning.expectation import Basis
from kvdeploy.stages.model import BUILTIN, dtype_of, local_path, read_config
from kvdeploy.stages.preflight import device_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kvdeploy.adapters.store import Store
    from kvdeploy.model.awsfacts import AwsFacts
    from kvdeploy.model.awsspec import AwsSpec
    from kvdeploy.model.infra import Node
    from kvdeploy.model.spec import ClusterSpec
    from kvdeploy.proc import Runner


def find_local_basis(spec: ClusterSpec, store: Store, runner: Runner) -> Basis:
    """Of a cluster on this machine."""
    gpus = machine.gpus(runner)
    device = device_of(spec, len(gpus))
    folder = None if spec.model.id.startswith(BUILTIN) else local_path(spec.model.id, store.root)
    return Basis(
        config=_find_config(spec, store, folder),
        device=device,
        dtype=dtype_of(spec, device),
        gpu_memory_gib=min(gpus, default=0.0),
        utilization=utilization(spec.fleet.decode),
        weights_bytes=_weigh(folder) if folder else 0,
        report=find_last_bench(store, spec.model.id),
    )


def find_aws_basis(
    spec: ClusterSpec, aws: AwsSpec, facts: AwsFacts | None, nodes: tuple[Node, ...]
) -> Basis:
    """Of a cluster on AWS; what its checks have seen of the model is in the `facts`."""
    profile = INSTANCES.get(aws.instance_type)
    model = facts.model if facts else None
    case = Judged(spec=spec, aws=aws, facts=facts, nodes=nodes) if facts else None
    return Basis(
        config=model.config if model else None,
        device="cuda",
        dtype=spec.model.dtype,
        gpu_memory_gib=profile.gpu_memory_gib if profile else 0.0,
        utilization=utilization(spec.fleet.decode),
        weights_bytes=weights_bytes(case) if case else 0,
        profile=profile,
    )


def find_last_bench(store: Store, model: str) -> BenchReport | None:
    """The newest report that can be read, of the cluster with this model."""
    for path in sorted(store.runs.glob("*-bench/reports/bench.json"), reverse=True):
        try:
            report = BenchReport.model_validate_json(path.read_bytes())
        except (OSError, ValueError):
            continue
        measured = report.environment.get("model") or {}
        if report.schema_version <= SCHEMA and report.runs and measured.get("id") == model:
            return report
    return None


def _find_config(spec: ClusterSpec, store: Store, folder: Path | None) -> Mapping[str, Any] | None:
    """None when it is not on this machine. A hub model's is known once `up` has fetched it."""
    if spec.model.id.startswith(BUILTIN):
        return tiny_config()
    if folder is not None:
        try:
            return read_config(folder)
        except CheckError:
            return None
    record = store.read()
    known = record.spec.model if record.spec else None
    if known is None or "model" not in record.stages:
        return None
    if (known.id, known.revision) != (spec.model.id, spec.model.revision):
        return None
    return ModelOutputs.model_validate(record.stages["model"].result).config


def _weigh(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
