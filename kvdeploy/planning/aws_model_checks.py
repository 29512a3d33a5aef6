"""Checks of the model and its engines against the GPUs of the nodes. Pure.

What fits is told from config.json and the sizes of the weights' files; what vLLM takes beside
them is not known here, so only what cannot work is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvdeploy.model.catalog import INSTANCES, NIXL_MIN, VLLM_MIN, VLLM_PREFERRED
from kvdeploy.planning.aws_spec_checks import pipeline_stages
from kvdeploy.planning.findings import error, fleets, warning
from kvdeploy.planning.owned import arg_name
from kvdeploy.planning.sizing import bytes_per_token, parse_geometry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvdeploy.model.reports import Finding
    from kvdeploy.model.spec import FleetSpec
    from kvdeploy.planning.aws_case import AwsCheck, Judged

UTILIZATION: Final = 0.9
"""Part of a GPU's memory that vLLM uses unless it is told another."""
GIB: Final = 2**30
S3: Final = "s3://"


def model_not_readable(case: Judged) -> Iterator[Finding]:
    """Nodes would fetch it in the last step, after they were paid for."""
    model, name = case.facts.model, case.spec.model.id
    if model is None:
        return
    if not model.readable:
        yield error(
            "model.id",
            f"{name} has no config.json that can be read",
            f"See 'aws s3 ls {name.rstrip('/')}/'."
            if name.startswith(S3)
            else "Give the path of a model folder.",
        )
    elif model.config is None:
        yield error("model.id", f"the config.json of {name} is no JSON object", "Copy it anew.")
    elif not model.weights_bytes and case.spec.model.load_format == "auto":
        yield error(
            "model.id",
            f"{name} has no files of weights beside its config.json",
            "Copy them there, or set model.load_format to dummy for timing alone.",
        )


def model_far_away(case: Judged) -> Iterator[Finding]:
    """Every node fetches all the weights."""
    model = case.facts.model
    if model and model.region and model.region != case.aws.region:
        yield warning(
            "model.id",
            f"the bucket is in {model.region}, and the cluster in {case.aws.region}: fetching is "
            "slow, and AWS charges for traffic between regions",
            f"Copy the model into a bucket in {case.aws.region}.",
        )


def heads_not_divisible(case: Judged) -> Iterator[Finding]:
    """Every rank takes a whole number of attention heads."""
    heads = _text(case).get("num_attention_heads")
    if not isinstance(heads, int):
        return
    for path, fleet in fleets(case.spec):
        if heads % fleet.tensor_parallel:
            good = ", ".join(str(n) for n in (1, 2, 4, 8, 16) if heads % n == 0)
            yield error(
                f"{path}.tensor_parallel",
                f"{fleet.tensor_parallel} does not divide the model's {heads} attention heads",
                f"Use one of {good}.",
            )


def model_too_large(case: Judged) -> Iterator[Finding]:
    """The engine would end while it loads, or refuse its longest request."""
    profile, weights = INSTANCES.get(case.aws.instance_type), weights_bytes(case)
    if profile is None or not weights:
        return
    for path, fleet in fleets(case.spec):
        ranks = fleet.tensor_parallel * pipeline_stages(fleet)
        memory = ranks * profile.gpu_memory_gib
        usable = memory * utilization(fleet) - weights / GIB
        gpus = "one GPU has" if ranks == 1 else f"{ranks} GPUs have"
        if usable <= 0:
            yield error(
                f"{path}.tensor_parallel",
                f"the weights take {weights / GIB:.0f} GiB, and {gpus} {memory} GiB, of which "
                f"vLLM uses {memory * utilization(fleet):.0f}",
                "Raise tensor_parallel, or choose a type with more memory.",
            )
            continue
        needed = _kv_bytes(case, fleet) / GIB
        if fleet.kv_cache_gib is not None:
            given = fleet.kv_cache_gib / fleet.data_parallel
            if given + weights / GIB > memory:
                yield error(
                    f"{path}.kv_cache_gib",
                    f"{fleet.kv_cache_gib:g} GiB do not fit beside {weights / GIB:.0f} GiB of "
                    f"weights: {gpus} {memory} GiB",
                    "Leave it out, and vLLM measures what fits beside the weights.",
                )
            usable = min(usable, given)
        if needed > usable:
            yield error(
                "model.max_length",
                f"one prompt of {case.spec.model.max_length} tokens takes {needed:.1f} GiB of KV "
                f"cache, and an engine of {path} has at most {usable:.1f}",
                "Lower it, or raise tensor_parallel.",
            )


def versions_too_old(case: Judged) -> Iterator[Finding]:
    """Older ones hang, or answer wrongly without a word."""
    vllm, nixl = _numbers(case.facts.versions.vllm), _numbers(case.facts.versions.nixl)
    update = "Use a runtime with newer packages."
    if vllm and vllm < VLLM_MIN and case.spec.connector.mode == "push":
        yield error(
            "connector.mode",
            f"push needs vLLM {_dotted(VLLM_MIN)}, and nodes would get {case.facts.versions.vllm}",
            update,
        )
    elif vllm and vllm < VLLM_PREFERRED and case.spec.connector.mode == "push":
        yield warning(
            "connector.mode",
            f"vLLM {case.facts.versions.vllm} pushes wrong blocks when decode holds a part of "
            f"the prompt; {_dotted(VLLM_PREFERRED)} does not",
            update,
        )
    if nixl and nixl < NIXL_MIN:
        yield error(
            "connector.backend",
            f"NIXL {case.facts.versions.nixl} hangs on EFA; {_dotted(NIXL_MIN)} does not",
            update,
        )


def weights_bytes(case: Judged) -> int:
    """Bytes of the weights: of their files, else counted from config.json; 0 when not known.

    Counted for plain dense decoders alone: experts, latent attention and quantized weights have
    shapes of their own.
    """
    model, config = case.facts.model, _text(case)
    if model is None:
        return 0
    if model.weights_bytes:
        return model.weights_bytes
    if model.config is None or _UNUSUAL & (config.keys() | model.config.keys()):
        return 0
    try:
        geometry = parse_geometry(model.config, dtype=case.spec.model.dtype)
        hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
        heads, vocabulary = int(config["num_attention_heads"]), int(config["vocab_size"])
    except (ValueError, KeyError, TypeError):
        return 0
    attention = 2 * hidden * geometry.head_dim * (heads + geometry.kv_heads)
    layer = attention + 3 * hidden * inner
    tables = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return (geometry.layers * layer + tables) * geometry.dtype_bytes


_UNUSUAL: Final = frozenset(
    {"kv_lora_rank", "n_routed_experts", "num_experts", "num_local_experts"}
    | {"quantization_config"}
)


def _text(case: Judged) -> Mapping[str, Any]:
    """The part of config.json that is about text; {} when there is none."""
    config = case.facts.model.config if case.facts.model else None
    inner = (config or {}).get("text_config")
    return inner if isinstance(inner, dict) else (config or {})


def _kv_bytes(case: Judged, fleet: FleetSpec) -> int:
    """Of the longest prompt and answer; 0 when config.json does not say."""
    model = case.facts.model
    kind = str(_argument(fleet, "kv-cache-dtype") or "auto")
    try:
        geometry = parse_geometry(
            (model.config if model else None) or {},
            dtype=case.spec.model.dtype,
            kv_cache_dtype=kind,
        )
    except ValueError:
        return 0
    if not geometry.uniform:
        return 0
    length = case.spec.model.max_length
    return length * bytes_per_token(geometry, tensor_parallel=fleet.tensor_parallel)


def utilization(fleet: FleetSpec) -> float:
    """Part of a GPU's memory that the engines use."""
    named = _argument(fleet, "gpu-memory-utilization")
    return float(named) if isinstance(named, int | float) else UTILIZATION


def _argument(fleet: FleetSpec, name: str) -> object:
    return next((v for arg, v in fleet.engine_args.items() if arg_name(arg) == name), None)


def _numbers(version: str) -> tuple[int, ...]:
    """'1.2.3+cu13' -> (1, 2, 3); () when it does not begin with a number."""
    parts: list[int] = []
    for part in version.split("+", maxsplit=1)[0].split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


MODEL_CHECKS: Final[tuple[AwsCheck, ...]] = (
    model_not_readable,
    model_far_away,
    heads_not_divisible,
    model_too_large,
    versions_too_old,
)
