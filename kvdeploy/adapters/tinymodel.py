"""A tiny random-weight Llama on disk, made offline, whose answers depend on its KV cache.

It proves transfers on machines without a real checkpoint. It owns the recipe and the folder;
it never loads the model, and it needs no library of the engines'.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import struct
import tempfile
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Final

from kvdeploy.errors import CheckError
from kvdeploy.model.catalog import TINY_MAX_LENGTH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

FORMAT: Final = 1
"""Part of the folder's name: raise it with every change that the digest below cannot see."""

LAYERS: Final = 4
HIDDEN: Final = 256
INTERMEDIATE: Final = 512
HEADS: Final = 4
KV_HEADS: Final = 2
HEAD_DIM: Final = 64
BOS: Final = 256
EOS: Final = 257
PAD: Final = 258
VOCAB: Final = 259
"""One token a byte, its id the byte's value, then the three above. No id is without a token."""

SPREADS: Final = {
    "embed_tokens": 1.0,
    "q_proj": 0.13,
    "k_proj": 0.13,
    "v_proj": 0.0625,
    "o_proj": 0.15,
    "gate_proj": 0.0625,
    "up_proj": 0.0625,
    "down_proj": 0.07,
    "lm_head": 0.35,
}
"""Standard deviations. q and k are the trade: sharper attention makes answers vary more but
also blows up bfloat16's rounding. Here, of 20 prompts of 270 and 1000 tokens, every one is
answered otherwise when its first word or one block of 32 tokens of its cache is changed; the
best logit leads by 1.4 (median), by less than 0.1 at 4 % of the tokens."""
EOS_SPREAD: Final = 0.6
"""Of the end token's row, as a part of the head's: the lower, the rarer the token."""

CHAT_TEMPLATE: Final = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def ensure_tiny_model(
    cache: Path, *, seed: int, on_progress: Callable[[str], None] | None = None
) -> Path:
    """Make the model of this seed below `cache`, unless it lies there, and return its folder.

    The folder is complete or absent: it is made beside its place and renamed, so that a
    stopped maker leaves nothing that could be taken and two makers do each other no harm.
    The same seed gives the same bytes everywhere. About 5 MB.

    Raises CheckError when the folder cannot be written.
    """
    folder = cache / f"tiny-llama-seed{seed}-{_digest(seed)}"
    if folder.is_dir():
        return folder
    if on_progress is not None:
        on_progress(f"making a tiny model in {folder}")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _make(folder, seed)
    except OSError as e:
        msg = f"cannot write the tiny model to {folder}: {e.strerror or e}"
        raise CheckError(msg, hint="free some disk space, or choose another cache folder") from e
    return folder


def _make(folder: Path, seed: int) -> None:
    workshop = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        for name, document in _documents().items():
            _write(workshop / name, (_pretty(document),))
        _write(workshop / "model.safetensors", _safetensors(_tensors(seed)))
        workshop.chmod(0o755)  # mkdtemp gives 0700, and engines may run as another user
        try:
            workshop.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another maker was first: its model is the same
                raise
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def _write(path: Path, chunks: Iterable[bytes]) -> None:
    """Write and flush to the disk, or a power cut could leave a renamed folder of empty files."""
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def _pretty(document: object) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def _digest(seed: int) -> str:
    recipe = [FORMAT, seed, SPREADS, EOS_SPREAD, list(_shapes()), _documents()]
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]


# --- weights ---------------------------------------------------------------------------------


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor's name and shape, in the order of the file."""
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (HIDDEN,)
        yield f"{at}.self_attn.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN)
        yield f"{at}.self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{at}.self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{at}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
        yield f"{at}.post_attention_layernorm.weight", (HIDDEN,)
        yield f"{at}.mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{at}.mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{at}.mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)


def _tensors(seed: int) -> Iterator[tuple[str, tuple[int, ...], bytes]]:
    rng = random.Random(seed)  # noqa: S311 - weights, not secrets
    for name, shape in _shapes():
        kind = name.split(".")[-2]
        if kind == "lm_head":
            data = _head(rng)
        elif kind in SPREADS:
            data = _normals(rng, shape[0] * shape[1], SPREADS[kind])
        else:
            data = _bf16(1.0) * shape[0]
        yield name, shape, data


def _head(rng: random.Random) -> bytes:
    """Rows of the output head: only printable ASCII can win, and rarely the end of the text.

    All other rows are zero, and the best of 95 random logits is never below zero. So the
    answer's text is exactly its tokens, and no stream waits for the rest of a character.
    """
    rows = [
        _normals(rng, HIDDEN, SPREADS["lm_head"]) if chr(i).isprintable() else bytes(2 * HIDDEN)
        for i in range(128)
    ]
    rows += [bytes(2 * HIDDEN)] * (VOCAB - 128)
    rows[EOS] = _normals(rng, HIDDEN, SPREADS["lm_head"] * EOS_SPREAD)
    return b"".join(rows)


def _normals(rng: random.Random, count: int, spread: float) -> bytes:
    """`count` bfloat16 numbers, normal around 0: one random byte chooses one of 256 quantiles.

    Looked up by bytes.translate, as 2.5 million calls of random.gauss take seconds.
    """
    normal = NormalDist(0.0, spread)
    table = [_bf16(normal.inv_cdf((i + 0.5) / 256)) for i in range(256)]
    choice = rng.randbytes(count)
    data = bytearray(2 * count)
    data[0::2] = choice.translate(bytes(pair[0] for pair in table))
    data[1::2] = choice.translate(bytes(pair[1] for pair in table))
    return bytes(data)


def _bf16(value: float) -> bytes:
    """Little-endian bfloat16, rounded to nearest even: the upper half of a float32."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


def _safetensors(tensors: Iterable[tuple[str, tuple[int, ...], bytes]]) -> Iterator[bytes]:
    """The file format: header length (u64, little endian), JSON header, data.

    Source: https://github.com/huggingface/safetensors#format
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs: list[bytes] = []
    end = 0
    for name, shape, data in tensors:
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
        blobs.append(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text))
    yield text
    yield from blobs


# --- configuration and tokenizer -------------------------------------------------------------
def tiny_config() -> dict[str, Any]:
    """config.json of the model, which need not be made for that."""
    return _documents()["config.json"]


def _documents() -> dict[str, dict[str, Any]]:
    """Every JSON file of the folder."""
    specials = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    return {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "max_position_embeddings": TINY_MAX_LENGTH,
            "num_attention_heads": HEADS,
            "num_hidden_layers": LAYERS,
            "num_key_value_heads": KV_HEADS,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": VOCAB,
            **ids,
        },
        "generation_config.json": ids,
        "special_tokens_map.json": specials,
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,  # it would drop spaces before full stops
            "model_max_length": TINY_MAX_LENGTH,
            "chat_template": CHAT_TEMPLATE,
            **specials,
        },
    }


def _tokenizer() -> dict[str, Any]:
    """A byte-level BPE without merges, in the format of the tokenizers library."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    specials = {"<s>": BOS, "</s>": EOS, "<pad>": PAD}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": word, **flags, "special": True} for word, i in specials.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {c: i for i, c in enumerate(_byte_characters())} | specials,
            "merges": [],
        },
    }


def _byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 stands for itself, every other byte for the next character from U+0100.
    Source: `bytes_to_unicode`, https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(b if b in kept else next(others)) for b in range(256)]
