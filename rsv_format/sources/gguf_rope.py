"""The rope of a GGUF model: its base and how positions are scaled, with llama.cpp's defaults (llama-model.cpp)."""

from __future__ import annotations

from typing import Any

import numpy as np

from rsv_format.errors import RsvError
from rsv_format.sources.base import Floats
from rsv_format.sources.gguf_reader import Metadata

ROPE_FACTORS = "rope_freqs.weight"

# Llama 3's rope scaling, of which llama.cpp keeps only the resulting divisors.
_LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR, _ORIGINAL_CONTEXT = 1.0, 4.0, 8192

# Keys of yarn: their names in a config, where mlx-lm has them, and the values that change nothing.
_BETAS = {"yarn_beta_fast": ("beta_fast", 32.0), "yarn_beta_slow": ("beta_slow", 1.0)}
_NEUTRAL = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}


def decimal(value: float) -> float:
    """The shortest decimal of a float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def rope_base(metadata: Metadata, prefix: str) -> float:
    return decimal(_positive(metadata, f"{prefix}.rope.freq_base") or 10000.0)


def rope_scaling(metadata: Metadata, prefix: str, head_dim: int, factors: Floats | None) -> dict[str, Any] | None:
    """The config's rope_scaling: linear unless a type is given, by the older key too; None where none is left."""
    kind = metadata.get(f"{prefix}.rope.scaling.type", str) or "linear"
    factor = _positive(metadata, f"{prefix}.rope.scaling.factor")
    if factor is None:
        factor = _positive(metadata, f"{prefix}.rope.scale_linear")
    if kind not in ("none", "linear", "yarn"):
        raise RsvError("source_unsupported", metadata.where, f"rope scaling of type {kind!r} cannot be read")
    scaled = kind != "none" and factor not in (None, 1.0)
    if factors is not None and not np.all(factors == 1):
        if scaled:
            place = f"{metadata.where}: {prefix}.rope.scaling.factor"
            raise RsvError("source_unsupported", place, f"scales what {ROPE_FACTORS} scales already")
        return _llama3(metadata, prefix, head_dim, factors)
    if factor is None or not scaled:
        return None
    scaling: dict[str, Any] = {"type": kind, "rope_type": kind, "factor": decimal(factor)}
    if kind == "linear":
        return scaling
    original = metadata.get(f"{prefix}.rope.scaling.original_context_length", int)
    scaling["original_max_position_embeddings"] = original or metadata.positive(f"{prefix}.context_length")
    for key, (name, usual) in _BETAS.items():
        beta = metadata.get(f"{prefix}.rope.scaling.{key}", float)
        if beta is not None and beta != usual:
            scaling[name] = decimal(beta)
    for key, neutral in _NEUTRAL.items():
        if metadata.get(f"{prefix}.rope.scaling.{key}", float) not in (None, neutral):
            place = f"{metadata.where}: {prefix}.rope.scaling.{key}"
            raise RsvError("source_unsupported", place, f"can only be {neutral} here")
    return scaling


def _positive(metadata: Metadata, key: str) -> float | None:
    """A number for which 0 stands for none."""
    value = metadata.get(key, float)
    if value is not None and value < 0:
        raise RsvError("source_invalid", f"{metadata.where}: {key}", f"{value} is negative")
    return value or None


def _llama3(metadata: Metadata, prefix: str, head_dim: int, factors: Floats) -> dict[str, Any]:
    """Find the Llama 3 scaling that gives these divisors, or refuse them."""
    factor = max(decimal(float(factors.max())), 1.0)
    turns = _ORIGINAL_CONTEXT * rope_base(metadata, prefix) ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)
    smooth = np.clip((turns - _LOW_FREQ_FACTOR) / (_HIGH_FREQ_FACTOR - _LOW_FREQ_FACTOR), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        place = f"{metadata.where}: {ROPE_FACTORS}"
        raise RsvError("source_unsupported", place, "is not the rope scaling of Llama 3")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW_FREQ_FACTOR,
        "high_freq_factor": _HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": _ORIGINAL_CONTEXT,
    }
