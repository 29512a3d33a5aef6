"""How many bytes of KV cache a prompt is, and how many of them prefill must push.

Pure arithmetic on a model's config.json. Sums hold for a uniform geometry only: ask
`KvGeometry.uniform` before comparing them with what an engine counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvdeploy.model.geometry import KvGeometry

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPE_BYTES: Final = {
    "float32": 4,
    "float": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
"""Bytes of one number, by the words that vLLM's --dtype and --kv-cache-dtype take."""

TEXT_CONFIGS: Final = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where multi-modal models keep the part that has a KV cache."""

LEAST_VOCABULARY: Final = 16
"""Tokens, below which there are no ordinary ones in the middle."""

RECURRENT_KEYS: Final = (
    "mamba_d_state",
    "mamba_num_heads",
    "ssm_state_size",
    "state_size",
    "hybrid_override_pattern",
    "layers_block_type",
    "full_attention_interval",
    "linear_num_value_heads",
)
"""Keys of models in which some layers keep a state of fixed size instead of a KV cache."""


def parse_geometry(
    config: Mapping[str, Any], *, dtype: str, kv_cache_dtype: str = "auto"
) -> KvGeometry:
    """Read the KV cache's shape from a Hugging Face config.json.

    `dtype` and `kv_cache_dtype` are the engine's settings; "auto" asks the next in the line
    kv_cache_dtype, the checkpoint's quantization, dtype, the config's own type.
    Raises ValueError naming the key that is missing or the type that is unknown.
    Source: ModelArchConfigConvertorBase in vllm/transformers_utils/model_arch_config_convertor.py.
    """
    text = _text_config(config)
    dtype_bytes = _dtype_bytes(config, text, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    layers = _count(text, "num_hidden_layers")
    reason = _why_not_uniform(text)
    if text.get("kv_lora_rank"):
        width = _count(text, "kv_lora_rank") + _count(text, "qk_rope_head_dim")
        return KvGeometry(
            layers=layers,
            kv_heads=1,
            head_dim=width,
            dtype_bytes=dtype_bytes,
            latent_width=width,
            uniform=not reason,
            reason=reason,
        )
    heads = text.get("num_key_value_heads")
    head_dim = text.get("head_dim")
    return KvGeometry(
        layers=layers,
        kv_heads=int(heads) if heads else _count(text, "num_attention_heads"),
        head_dim=int(head_dim)
        if head_dim
        else _count(text, "hidden_size") // _count(text, "num_attention_heads"),
        dtype_bytes=dtype_bytes,
        uniform=not reason,
        reason=reason,
    )


def bytes_per_token(geometry: KvGeometry, *, tensor_parallel: int = 1) -> int:
    """Bytes that one token takes, summed over all layers and all tensor parallel ranks.

    Ranks share the KV heads out, so the sum does not change while there are at least as many
    heads as ranks; beyond that each rank holds a copy of one head. A latent cache (MLA) is
    whole on every rank.
    """
    if geometry.latent_width is not None:
        vectors, width = tensor_parallel, geometry.latent_width
    else:
        vectors, width = 2 * max(geometry.kv_heads, tensor_parallel), geometry.head_dim
    return geometry.layers * vectors * width * geometry.dtype_bytes


def bytes_per_block(geometry: KvGeometry, block_size: int, *, tensor_parallel: int = 1) -> int:
    """Bytes of one block of `block_size` tokens, over all layers and ranks."""
    return block_size * bytes_per_token(geometry, tensor_parallel=tensor_parallel)


def pushed_blocks(prompt_tokens: int, block_size: int, cached_tokens: int = 0) -> int:
    """Blocks that prefill writes into decode for one prompt.

    Whole blocks, the last one however little is in it, less the whole blocks of the prefix
    that decode holds already.
    """
    return max(0, -(-prompt_tokens // block_size) - cached_tokens // block_size)


def pushed_bytes(
    geometry: KvGeometry,
    prompt_tokens: int,
    block_size: int,
    cached_tokens: int = 0,
    *,
    tensor_parallel: int = 1,
) -> int:
    """Bytes of `pushed_blocks`, over all layers and decode's `tensor_parallel` ranks."""
    blocks = pushed_blocks(prompt_tokens, block_size, cached_tokens)
    return blocks * bytes_per_block(geometry, block_size, tensor_parallel=tensor_parallel)


def find_vocabulary(config: Mapping[str, Any]) -> int:
    """How many tokens the model knows. Raises ValueError when config.json does not say."""
    known = _text_config(config).get("vocab_size")
    if isinstance(known, int) and known >= LEAST_VOCABULARY:
        return known
    msg = f"config.json says 'vocab_size' is {known!r}, so no prompts can be made of its tokens"
    raise ValueError(msg)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part: the config itself, or one nested in it, at any depth."""
    for key in TEXT_CONFIGS:
        inner = config.get(key)
        if isinstance(inner, dict) and inner:
            return _text_config(inner)
    return config


def _dtype_bytes(
    config: Mapping[str, Any], text: Mapping[str, Any], *, dtype: str, kv_cache_dtype: str
) -> int:
    asked = (kv_cache_dtype, _declared_cache_dtype(config), dtype)
    named = next((d for d in asked if d != "auto"), None) or _own_dtype(config, text)
    if named not in DTYPE_BYTES:
        known = ", ".join(sorted(DTYPE_BYTES))
        msg = f"the bytes of a number of type {named!r} are not known; known are {known}"
        raise ValueError(msg)
    return DTYPE_BYTES[named]


def _own_dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """Return what vLLM's --dtype auto makes of the config: the type named in it, float32 halved.

    Source: _resolve_auto_dtype in vllm/config/model.py.
    """
    for part in (text, config):
        for key in ("dtype", "torch_dtype"):
            if part.get(key):
                name = str(part[key]).removeprefix("torch.")
                return "bfloat16" if name in {"float32", "float"} else name
    msg = (
        "config.json has neither 'dtype' nor 'torch_dtype', so 'auto' says nothing "
        "about the size of a number"
    )
    raise ValueError(msg)


def _declared_cache_dtype(config: Mapping[str, Any]) -> str:
    """Return the cache type that a quantized checkpoint asks for, "auto" when it asks for none.

    Source: get_kv_cache_quant_algo_string in vllm/utils/torch_utils.py. A scheme in a
    hf_quant_config.json beside the config.json is not seen.
    """
    outer = config.get("quantization_config") or {}
    inner = outer.get("quantization") or {}
    keys = ("kv_cache_scheme", "kv_cache_quant_algo")
    scheme = next((part[key] for key in keys for part in (inner, outer) if part.get(key)), None)
    if scheme is None:
        return "auto"
    if isinstance(scheme, dict):
        return "fp8" if scheme.get("num_bits") == 8 else str(scheme)
    return str(scheme).lower()


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if value is None:
        msg = f"config.json has no {key!r}, so the size of its KV cache cannot be computed"
        raise ValueError(msg)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        msg = f"config.json says {key!r} is {value!r}; it must be a whole number above 0"
        raise ValueError(msg)
    return value


def _why_not_uniform(text: Mapping[str, Any]) -> str:
    kinds = set(text.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        return f"some layers are of another kind than full attention: {', '.join(sorted(kinds))}"
    found = next((key for key in RECURRENT_KEYS if text.get(key)), None)
    if found is not None:
        return f"some layers keep a state instead of a KV cache ({found!r} in config.json)"
    # Qwen 2 configs name a window and switch it off beside it.
    if text.get("sliding_window") and text.get("use_sliding_window", True):
        return f"layers forget what is more than {text['sliding_window']} tokens back"
    if text.get("attention_chunk_size"):
        return f"layers look back within chunks of {text['attention_chunk_size']} tokens only"
    if text.get("index_topk"):
        return "an indexer keeps a cache of its own beside the latent one ('index_topk')"
    return ""
