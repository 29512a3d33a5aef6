"""What a plan expects, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from kvdeploy.model.catalog import INSTANCES
from kvdeploy.model.spec import ClusterSpec
from kvdeploy.planning.expectation import Basis, build_estimates

LLAMA_70B: dict[str, Any] = {
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
P5EN = INSTANCES["p5en.48xlarge"]


def spec(tensor_parallel: int = 8, decodes: int = 1, **decode: Any) -> ClusterSpec:
    role = {"tensor_parallel": tensor_parallel}
    return ClusterSpec.model_validate(
        {
            "name": "demo",
            "model": {"id": "org/m", "max_length": 8192},
            "fleet": {"prefill": role, "decode": {**role, "count": decodes, **decode}},
        }
    )


def told(of: ClusterSpec, **known: Any) -> dict[str, tuple[str, str]]:
    fields = {"config": LLAMA_70B, "device": "cuda", "dtype": "auto"} | known
    return {e.name: (e.value, e.formula) for e in build_estimates(of, Basis(**fields))}


def test_llama_70b_between_two_p5en() -> None:
    """8192 tokens of 320 KiB are 2.7 GB: at 400 GB/s 6.7 ms. 141 GiB x 8 x 0.9 less 131 GiB."""
    weights = 131 * 2**30
    found = told(spec(), profile=P5EN, gpu_memory_gib=141.0, weights_bytes=weights)
    assert found["KV of a token"] == (
        "320 KiB",
        "80 layers x 2 x 8 KV heads x 128 numbers x 2 bytes",
    )
    assert found["KV of the longest prompt"][0] == "2560.0 MiB"
    assert found["transfer of the longest prompt"] == (
        "6.7 ms",
        "2560.0 MiB / (3200 Gbit/s of p5en.48xlarge x 1, its GPUs' part): at best, with nothing "
        "else on the fabric",
    )
    assert found["longest requests at once"] == (
        "353",
        "(1128 GiB x 0.9 - 131.0 GiB of weights; activations take some more) / 320 KiB = 2897346 "
        "tokens, / model.max_length 8192, x 1 decode",
    )


def test_an_engine_of_half_a_node_has_half_its_fabric() -> None:
    value, formula = told(spec(4), profile=P5EN)["transfer of the longest prompt"]
    assert value == "13.4 ms"
    assert "3200 Gbit/s of p5en.48xlarge x 0.5" in formula


def test_a_bandwidth_that_nobody_tells_is_not_guessed() -> None:
    small = INSTANCES["g6.8xlarge"]
    assert told(spec(1), profile=small)["transfer of the longest prompt"] == (
        "not known",
        "the bandwidth of g6.8xlarge is not in the catalog",
    )


def test_a_given_kv_cache_is_for_each_gpu() -> None:
    found = told(spec(2, decodes=3, kv_cache_gib=10))["longest requests at once"]
    assert found == (
        "24",
        "10 GiB x 2 GPUs / 320 KiB = 65536 tokens, / model.max_length 8192, x 3 decode",
    )


def test_ranks_beyond_the_kv_heads_hold_copies() -> None:
    assert told(spec(16))["KV of a token"] == (
        "640 KiB",
        "80 layers x 2 x 16 KV heads x 128 numbers x 2 bytes",
    )


def test_a_latent_cache_is_whole_on_every_rank() -> None:
    config = {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "num_hidden_layers": 61,
        "torch_dtype": "bfloat16",
    }
    value, formula = told(spec(2), config=config)["KV of a token"]
    assert formula == "61 layers x 576 numbers x 2 ranks x 2 bytes"
    assert value == f"{61 * 576 * 2 * 2 / 1024:g} KiB"


def test_weights_that_do_not_fit_leave_room_for_nothing() -> None:
    found = told(spec(1), gpu_memory_gib=80.0, weights_bytes=140 * 2**30)
    assert found["longest requests at once"][0] == "0"


@pytest.mark.parametrize(
    ("known", "missing"),
    [
        ({"gpu_memory_gib": 80.0}, "the size of the weights is not known here"),
        ({"weights_bytes": 1}, "GPU memory is not known here"),
    ],
)
def test_what_is_missing_is_said(known: dict[str, Any], missing: str) -> None:
    assert told(spec(), **known)["longest requests at once"] == ("not known", missing)


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        (None, "the config.json of org/m is not on this machine before 'up'"),
        ({}, "config.json has neither 'dtype' nor 'torch_dtype'"),
        (LLAMA_70B | {"sliding_window": 4096}, "layers forget what is more than 4096 tokens back"),
    ],
)
def test_a_model_that_cannot_be_computed_is_said_once(
    config: dict[str, Any] | None, missing: str
) -> None:
    ((value, formula),) = told(spec(), config=config).values()
    assert value == "not known"
    assert formula.startswith(missing)
