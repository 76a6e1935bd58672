"""Whole GGUF models to test with: random tensors of each family, named and arranged as llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

HEADS, KV_HEADS, WIDTH, HEAD_DIM, INNER, ROWS, EXPERTS = 4, 2, 64, 16, 96, 40, 3

_TYPES = {
    bool: gguf.GGUFValueType.BOOL,
    int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32,
    str: gguf.GGUFValueType.STRING,
    bytes: gguf.GGUFValueType.STRING,
}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of llama models."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def model_tensors(arch: str = "llama", blocks: int = 1, experts: bool = False) -> dict[str, np.ndarray]:
    """Random tensors by their GGUF names, without an output of their own."""
    g = np.random.default_rng(5)
    rows = {"attn_q": HEADS * HEAD_DIM, "attn_k": KV_HEADS * HEAD_DIM, "attn_v": KV_HEADS * HEAD_DIM}
    block: dict[str, tuple[int, ...]] = {f"{name}.weight": (n, WIDTH) for name, n in rows.items()}
    block |= {"attn_output.weight": (WIDTH, HEADS * HEAD_DIM)}
    block |= {"attn_norm.weight": (WIDTH,), "ffn_norm.weight": (WIDTH,)}
    if arch in ("qwen2", "qwen2moe"):
        block |= {f"{name}.bias": (n,) for name, n in rows.items()}
    if arch in ("qwen3", "qwen3moe", "gemma3"):
        block |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
    if arch in ("gemma2", "gemma3"):
        block |= {"post_attention_norm.weight": (WIDTH,), "post_ffw_norm.weight": (WIDTH,)}
    sides = {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
    if experts or arch.endswith("moe"):
        block |= {f"ffn_{name}_exps.weight": (EXPERTS, *shape) for name, shape in sides.items()}
        block |= {"ffn_gate_inp.weight": (EXPERTS, WIDTH)}
        if arch == "qwen2moe":
            block |= {f"ffn_{name}_shexp.weight": shape for name, shape in sides.items()}
            block |= {"ffn_gate_inp_shexp.weight": (WIDTH,)}
    else:
        block |= {f"ffn_{name}.weight": shape for name, shape in sides.items()}
    shapes = {"token_embd.weight": (ROWS, WIDTH), "output_norm.weight": (WIDTH,)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(blocks) for name, shape in block.items()}
    return {name: g.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def model_keys(arch: str = "llama", blocks: int = 1, experts: bool = False) -> dict[str, Any]:
    """The metadata that goes with `model_tensors`."""
    keys: dict[str, Any] = {
        "block_count": blocks,
        "context_length": 128,
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    if experts or arch.endswith("moe"):
        keys |= {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": INNER}
    return {f"{arch}.{name}": value for name, value in keys.items()}


def write_model(
    path: Path,
    arch: str = "llama",
    *,
    blocks: int = 1,
    experts: bool = False,
    tensors: dict[str, np.ndarray | None] | None = None,
    types: dict[str, Any] | None = None,
    keys: dict[str, Any] | None = None,
) -> Path:
    """A model in a file; `tensors` and `keys` change it, None takes away, `types` quantizes."""
    values = {**model_keys(arch, blocks, experts), **(keys or {})}
    arrays = {**model_tensors(arch, blocks, experts), **(tensors or {})}
    return write_file(path, arch, values, arrays, types)


def write_file(
    path: Path,
    arch: str,
    keys: dict[str, Any],
    tensors: dict[str, np.ndarray | None],
    types: dict[str, Any] | None = None,
) -> Path:
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, _TYPES[type(value[0])])
        elif value is not None:
            writer.add_key_value(key, value, _TYPES[type(value)])
    for name, array in tensors.items():
        kind = (types or {}).get(name)
        if array is not None and kind is None:
            writer.add_tensor(name, array)
        elif array is not None:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_tokens(*more: str, control: tuple[str, ...] = ("<|im_end|>",)) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary: a few letters, what they merge to with one more each, control tokens."""
    merged = more or ("th", "the")
    tokens = [*"abcdeht", "\u0120", *merged, *control]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - len(control)) + [3] * len(control),
        "tokenizer.ggml.merges": [f"{token[:-1]} {token[-1]}" for token in merged],
    }


def piece_tokens(*more: tuple[str, int, float]) -> dict[str, Any]:
    """Metadata of a SentencePiece vocabulary of (text, kind, score)."""
    pieces = [("<unk>", 2, 0.0), ("<s>", 3, 0.0), ("</s>", 3, 0.0), ("<0x0A>", 6, 0.0)]
    pieces += [("\u2581", 1, -1.0), ("a", 1, -2.0), ("b", 1, -3.0), ("ab", 1, -5.0), ("\u2581ab", 1, -6.0)]
    pieces += [("ba", 1, -4.0), *more]
    texts, kinds, scores = zip(*pieces, strict=True)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(texts),
        "tokenizer.ggml.token_type": list(kinds),
        "tokenizer.ggml.scores": list(scores),
    }
