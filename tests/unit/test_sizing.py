from __future__ import annotations

from typing import Any

import pytest

from kvdeploy.model.geometry import KvGeometry
from kvdeploy.planning.sizing import (
    bytes_per_block,
    bytes_per_token,
    find_vocabulary,
    parse_geometry,
    pushed_blocks,
    pushed_bytes,
)

LLAMA_70B: dict[str, Any] = {
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3: dict[str, Any] = {
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "torch_dtype": "bfloat16",
}
TINY = KvGeometry(layers=4, kv_heads=2, head_dim=64, dtype_bytes=2)


def geometry(config: dict[str, Any], /, dtype: str = "auto", **over: Any) -> KvGeometry:
    return parse_geometry({**config, **over}, dtype=dtype)


def test_llama_70b_takes_320_kib_a_token() -> None:
    assert bytes_per_token(geometry(LLAMA_70B)) == 320 * 1024


def test_the_tiny_model_takes_2_kib_a_token() -> None:
    assert bytes_per_token(TINY) == 2048


def test_a_prompt_is_pushed_in_whole_blocks() -> None:
    assert pushed_blocks(270, 32) == 9
    assert pushed_bytes(TINY, 270, 32) == 589_824 == 9 * bytes_per_block(TINY, 32)


@pytest.mark.parametrize(
    ("prompt", "cached", "blocks"),
    [(256, 0, 8), (257, 0, 9), (1, 0, 1), (0, 0, 0), (270, 31, 9), (270, 64, 7), (270, 288, 0)],
)
def test_whole_blocks_that_decode_holds_are_not_pushed(
    prompt: int, cached: int, blocks: int
) -> None:
    assert pushed_blocks(prompt, 32, cached) == blocks


def test_a_latent_cache_has_one_vector_a_layer_instead_of_keys_and_values() -> None:
    mla = geometry(DEEPSEEK_V3)
    assert mla.latent_width == 576
    assert bytes_per_token(mla) == 61 * 576 * 2


@pytest.mark.parametrize(("ranks", "factor"), [(1, 1), (4, 1), (8, 1), (16, 2)])
def test_heads_are_shared_out_among_ranks_until_there_are_more_ranks_than_heads(
    ranks: int, factor: int
) -> None:
    assert bytes_per_token(geometry(LLAMA_70B), tensor_parallel=ranks) == factor * 320 * 1024


def test_a_latent_cache_is_whole_on_every_rank() -> None:
    mla = geometry(DEEPSEEK_V3)
    assert bytes_per_token(mla, tensor_parallel=8) == 8 * bytes_per_token(mla)


def test_without_key_value_heads_every_attention_head_has_its_own() -> None:
    assert geometry(LLAMA_70B, num_key_value_heads=None).kv_heads == 64


def test_a_head_is_as_wide_as_it_says_or_else_its_share_of_the_hidden_size() -> None:
    assert geometry(LLAMA_70B).head_dim == 128
    assert geometry(LLAMA_70B, head_dim=96).head_dim == 96


def test_a_multi_modal_config_is_read_where_its_text_part_is() -> None:
    nested = {"thinker_config": {"text_config": LLAMA_70B}, "vision_config": {"hidden_size": 1}}
    assert geometry(nested) == geometry(LLAMA_70B)


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "own", "expected"),
    [
        ("auto", "auto", {"torch_dtype": "bfloat16"}, 2),
        ("auto", "auto", {"torch_dtype": None, "dtype": "torch.float16"}, 2),
        ("auto", "auto", {"torch_dtype": "float32"}, 2),  # vLLM's auto halves it
        ("float32", "auto", {"torch_dtype": "bfloat16"}, 4),
        ("bfloat16", "fp8_e4m3", {}, 1),
        ("bfloat16", "auto", {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, 1),
        ("bfloat16", "auto", {"quantization_config": {"kv_cache_quant_algo": "FP8"}}, 1),
        ("bfloat16", "auto", {"quantization_config": {"quant_method": "fp8"}}, 2),
    ],
)
def test_the_cache_type_is_the_engine_s_then_the_checkpoint_s_then_the_weights(
    dtype: str, kv_cache_dtype: str, own: dict[str, Any], expected: int
) -> None:
    parsed = parse_geometry({**LLAMA_70B, **own}, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    assert parsed.dtype_bytes == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_hidden_layers": None},
            "config.json has no 'num_hidden_layers', so the size of its KV cache cannot be "
            "computed",
        ),
        (
            {"num_hidden_layers": "many"},
            "config.json says 'num_hidden_layers' is 'many'; it must be a whole number above 0",
        ),
        (
            {"torch_dtype": None},
            "config.json has neither 'dtype' nor 'torch_dtype', so 'auto' says nothing about "
            "the size of a number",
        ),
        (
            {"torch_dtype": "int3"},
            "the bytes of a number of type 'int3' are not known; known are bfloat16, float, "
            "float16, float32, fp8, fp8_e4m3, fp8_e5m2, half",
        ),
        (
            {"kv_lora_rank": 512},
            "config.json has no 'qk_rope_head_dim', so the size of its KV cache cannot be computed",
        ),
    ],
)
def test_a_config_that_does_not_say_enough_is_refused_by_name(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as e:  # noqa: PT011 - the whole text is compared
        geometry(LLAMA_70B, **change)
    assert str(e.value) == message


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "some layers are of another kind than full attention: sliding_attention",
        ),
        ({"sliding_window": 4096}, "layers forget what is more than 4096 tokens back"),
        (
            {"mamba_d_state": 128},
            "some layers keep a state instead of a KV cache ('mamba_d_state' in config.json)",
        ),
        (
            {"attention_chunk_size": 8192},
            "layers look back within chunks of 8192 tokens only",
        ),
        (
            {"index_topk": 2048},
            "an indexer keeps a cache of its own beside the latent one ('index_topk')",
        ),
    ],
)
def test_a_cache_that_is_not_the_same_in_every_layer_says_so(
    change: dict[str, Any], reason: str
) -> None:
    parsed = geometry(LLAMA_70B, **change)
    assert (parsed.uniform, parsed.reason) == (False, reason)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"layer_types": ["full_attention"] * 80, "sliding_window": None},
        {"sliding_window": 32768, "use_sliding_window": False},
    ],
)
def test_a_window_that_is_switched_off_changes_nothing(change: dict[str, Any]) -> None:
    assert geometry(LLAMA_70B, **change).uniform


def test_the_vocabulary_is_that_of_the_language_model() -> None:
    assert find_vocabulary({"vocab_size": 32000}) == 32000
    assert find_vocabulary({"text_config": {"vocab_size": 151936}}) == 151936


@pytest.mark.parametrize("config", [{}, {"vocab_size": "many"}, {"vocab_size": 3}])
def test_a_vocabulary_that_is_not_told_is_an_error(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"config.json says 'vocab_size' is .*, so no prompts"):
        find_vocabulary(config)
