"""The shape of a model's KV cache: what one token of context costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KvGeometry:
    """What every layer keeps of one token. planning/sizing.py reads it from a config.json."""

    layers: int
    kv_heads: int
    """Of the whole model, not of one tensor parallel rank. 1 for a latent cache (MLA)."""
    head_dim: int
    """Numbers in one head's key. For a latent cache the same as `latent_width`."""
    dtype_bytes: int
    latent_width: int | None = None
    """MLA keeps one vector of this many numbers instead of a key and a value; else None."""
    uniform: bool = True
    """False: not every layer keeps every token, so bytes a token times tokens is not what is
    kept, and byte counts of transfers cannot be foretold."""
    reason: str = ""
    """Why it is not uniform, as the end of a sentence."""
