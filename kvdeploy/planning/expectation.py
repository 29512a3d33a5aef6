"""What to expect of a cluster before it runs: bytes, transfers, what fits. Pure arithmetic.

Every figure comes with its formula, and one that cannot be computed says what is missing. Ratios of
engines come from a bench of this cluster alone: nothing else knows how fast its engines are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.planning.bench.figures import TooFewError, find_groups
from kvdeploy.planning.launch import cpu_kv_cache_gib
from kvdeploy.planning.sizing import bytes_per_token, parse_geometry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvdeploy.model.bench import BenchReport
    from kvdeploy.model.catalog import InstanceProfile
    from kvdeploy.model.geometry import KvGeometry
    from kvdeploy.model.spec import ClusterSpec, FleetSpec
    from kvdeploy.planning.bench.figures import Group

MIB: Final = 2**20
GIB: Final = 2**30
UNKNOWN: Final = "not known"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One figure, and where it comes from."""

    name: str
    value: str
    formula: str
    """With its numbers; or what is missing."""


@dataclass(frozen=True, kw_only=True)
class Basis:
    """What is known when a cluster is planned."""

    config: Mapping[str, Any] | None
    """The model's config.json; None when it is not on this machine yet."""
    device: str
    """'cpu' or 'cuda'."""
    dtype: str
    gpu_memory_gib: float = 0.0
    utilization: float = 0.9
    """Part of a GPU's memory that vLLM uses."""
    weights_bytes: int = 0
    """0 when not known."""
    profile: InstanceProfile | None = None
    """Of the nodes, on AWS."""
    report: BenchReport | None = None
    """The last bench of this cluster."""


def build_estimates(spec: ClusterSpec, basis: Basis) -> tuple[Estimate, ...]:
    """In the order in which one follows from another."""
    if basis.config is None:
        missing = f"the config.json of {spec.model.id} is not on this machine before 'up'"
        return (Estimate(name="KV of a token", value=UNKNOWN, formula=missing),)
    try:
        geometry = parse_geometry(basis.config, dtype=basis.dtype)
    except ValueError as e:
        return (Estimate(name="KV of a token", value=UNKNOWN, formula=str(e)),)
    if not geometry.uniform:
        return (Estimate(name="KV of a token", value=UNKNOWN, formula=geometry.reason),)
    each = bytes_per_token(geometry, tensor_parallel=spec.fleet.decode.tensor_parallel)
    longest = spec.model.max_length
    return (
        _token(geometry, each, spec.fleet.decode),
        Estimate(
            name="KV of the longest prompt",
            value=f"{each * longest / MIB:.1f} MiB",
            formula=f"model.max_length {longest} x {_size(each)}",
        ),
        _transfer(spec, basis, each * longest),
        _fitting(spec, basis, each),
        _ratio(basis),
    )


def _token(geometry: KvGeometry, each: int, decode: FleetSpec) -> Estimate:
    ranks = decode.tensor_parallel
    if geometry.latent_width is not None:
        made = f"{geometry.layers} layers x {geometry.latent_width} numbers x {ranks} ranks"
    else:
        heads = max(geometry.kv_heads, ranks)
        made = f"{geometry.layers} layers x 2 x {heads} KV heads x {geometry.head_dim} numbers"
    formula = f"{made} x {geometry.dtype_bytes} bytes"
    return Estimate(name="KV of a token", value=_size(each), formula=formula)


def _transfer(spec: ClusterSpec, basis: Basis, total: int) -> Estimate:
    name = "transfer of the longest prompt"
    if basis.profile is not None:
        most = basis.profile.efa_gbps
        if not most:
            what = f"the bandwidth of {basis.profile.name} is not in the catalog"
            return Estimate(name=name, value=UNKNOWN, formula=what)
        gpus = min(f.tensor_parallel for f in (spec.fleet.prefill, spec.fleet.decode))
        share = min(1.0, gpus / basis.profile.gpus)
        seconds = total * 8 / (most * 1e9 * share)
        formula = (
            f"{total / MIB:.1f} MiB / ({most} Gbit/s of {basis.profile.name} x {share:g}, its "
            "GPUs' part): at best, with nothing else on the fabric"
        )
        return Estimate(name=name, value=f"{seconds * 1e3:.1f} ms", formula=formula)
    runs = basis.report.runs if basis.report else ()
    moved = [r.moved for r in runs if r.moved is not None]
    transfer_s, moved_bytes = sum(m.transfer_s for m in moved), sum(m.kv_bytes for m in moved)
    if not (basis.report and transfer_s and moved_bytes):
        what = "'kvdeploy bench' measures what this machine's fabric does"
        return Estimate(name=name, value=UNKNOWN, formula=what)
    rate = moved_bytes / transfer_s
    formula = (
        f"{total / MIB:.1f} MiB / {rate / MIB:.0f} MiB/s, bytes over transfer time in the bench of "
        f"{basis.report.started_at}, where each also waited for its engine's next step"
    )
    return Estimate(name=name, value=f"{total / rate * 1e3:.0f} ms", formula=formula)


def _fitting(spec: ClusterSpec, basis: Basis, each: int) -> Estimate:
    name, decode = "longest requests at once", spec.fleet.decode
    if basis.device == "cpu":
        room, made = cpu_kv_cache_gib(decode) * GIB, f"{cpu_kv_cache_gib(decode):g} GiB"
    elif decode.kv_cache_gib is not None:
        # vLLM takes this for each GPU.
        room = decode.kv_cache_gib * GIB * decode.tensor_parallel
        made = f"{decode.kv_cache_gib:g} GiB x {decode.tensor_parallel} GPUs"
    elif basis.gpu_memory_gib and basis.weights_bytes:
        memory = basis.gpu_memory_gib * decode.tensor_parallel
        room = memory * GIB * basis.utilization - basis.weights_bytes
        made = (
            f"({memory:g} GiB x {basis.utilization:g} - {basis.weights_bytes / GIB:.1f} GiB of "
            "weights; activations take some more)"
        )
    else:
        what = "GPU memory" if basis.weights_bytes else "the size of the weights"
        return Estimate(name=name, value=UNKNOWN, formula=f"{what} is not known here")
    engines = decode.count * decode.data_parallel
    tokens = max(0, int(room // each))
    value = tokens // spec.model.max_length * engines
    formula = (
        f"{made} / {_size(each)} = {tokens} tokens, / model.max_length {spec.model.max_length}, "
        f"x {engines} decode"
    )
    return Estimate(name=name, value=str(value), formula=formula)


def _ratio(basis: Basis) -> Estimate:
    """Prefill is busy for a TTFT when nobody else asks; decode for its tokens' time, shared by all
    that it serves at once.
    """
    name = "prefill engines to decode engines"
    if basis.report is None:
        what = "'kvdeploy bench' measures how long each is busy with a request"
        return Estimate(name=name, value=UNKNOWN, formula=what)
    groups = [g for g in find_groups(basis.report) if g.cell.scenario == "unique"]
    pushed = [g for g in groups if g.mode in ("push", "pull")]
    alone = next((g for g in pushed if g.cell.concurrency == 1), None)
    if alone is None:
        what = "the last bench has no cell 'unique' with --concurrency 1"
        return Estimate(name=name, value=UNKNOWN, formula=what)
    busiest = max((g for g in pushed if _same(g, alone)), key=lambda g: g.cell.concurrency)
    try:
        prefill_ms = alone.find("ttft", "p50")
        token_ms = busiest.find("tpot", "p50")
    except TooFewError as e:
        return Estimate(name=name, value=UNKNOWN, formula=f"the last bench: {e}")
    cell = busiest.cell
    decode_ms = token_ms * (cell.output_tokens - 1) / cell.concurrency
    if not decode_ms:
        what = "the last bench asked for answers of one token"
        return Estimate(name=name, value=UNKNOWN, formula=what)
    ratio = prefill_ms / decode_ms
    value = f"{ratio:.1f} : 1" if ratio >= 1 else f"1 : {1 / ratio:.1f}"
    formula = (
        f"TTFT alone {prefill_ms:.1f} ms / (TPOT {token_ms:.1f} ms x {cell.output_tokens - 1} "
        f"tokens / {cell.concurrency} at once), of {cell.input_tokens} tokens in and "
        f"{cell.output_tokens} out, in the bench of {basis.report.started_at}"
    )
    if basis.device == "cpu":
        formula += "; of CPUs, and nothing about GPUs"
    return Estimate(name=name, value=value, formula=formula)


def _same(one: Group, other: Group) -> bool:
    mine, theirs = (g.cell.model_copy(update={"concurrency": 0}) for g in (one, other))
    return one.mode == other.mode and mine == theirs


def _size(count: int) -> str:
    return f"{count / 1024:g} KiB"
