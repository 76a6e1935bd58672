"""Make a model folder of a known model's exact shapes, bfloat16 and random, to measure with: no download, no meaning.

    python tools/synthetic_model.py /tmp/qwen3-4b --shape qwen3-4b      # 8 GB
    python -m benchmarks.quantize --profile /tmp/qwen3-4b

Numbers are taken from a table of normal ones, at random places and with random signs, which is as fast as the disk.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rsv_format.dtypes import to_bfloat16

_QWEN3 = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "head_dim": 128,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000, "max_position_embeddings": 40960, "tie_word_embeddings": True,
    "attention_bias": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                            "num_attention_heads": 16, "num_key_value_heads": 8},
    "qwen3-4b": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
                          "num_attention_heads": 32, "num_key_value_heads": 8},
}  # fmt: skip
_TABLE = 2**22


def shards(config: dict[str, Any]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Names and shapes of the tensors, file by file."""
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    block = {
        "input_layernorm": (width,), "post_attention_layernorm": (width,), "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,), "self_attn.q_proj": (queries, width), "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width), "self_attn.o_proj": (width, queries), "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner),
    }  # fmt: skip
    for i in range(config["num_hidden_layers"]):
        yield {f"model.layers.{i}.{name}.weight": shape for name, shape in block.items()}


def write(path: Path, tensors: dict[str, tuple[int, ...]], made: Callable[[tuple[int, ...]], Iterator[bytes]]) -> None:
    """A safetensors file, of which a piece at a time is in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape in tensors.values():
            for piece in made(shape):
                file.write(piece)


def values(rng: np.random.Generator, table: np.ndarray, shape: tuple[int, ...]) -> Iterator[bytes]:
    """bfloat16 bits: of a norm near 1, of a matrix such that it keeps the size of what it multiplies."""
    if len(shape) == 1:
        yield to_bfloat16((1 + 0.1 * rng.standard_normal(shape)).astype(np.float32)).tobytes()
        return
    scaled, size = to_bfloat16(table / np.float32(np.sqrt(shape[-1]))), math.prod(shape)
    for start in range(0, size, _TABLE):
        turned = np.roll(scaled, int(rng.integers(_TABLE))) ^ (rng.integers(0, 2, dtype=np.uint16) << np.uint16(15))
        yield turned[: size - start].tobytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-4b")
    parser.add_argument("--blocks", type=int, help="so many instead of all")
    arguments = parser.parse_args()
    config = dict(SHAPES[arguments.shape])
    config["num_hidden_layers"] = arguments.blocks or config["num_hidden_layers"]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    table = rng.standard_normal(_TABLE, np.float32)
    weight_map: dict[str, str] = {}
    count = config["num_hidden_layers"] + 1
    for i, tensors in enumerate(shards(config), 1):
        name = f"model-{i:05}-of-{count:05}.safetensors"
        write(arguments.folder / name, tensors, lambda shape: values(rng, table, shape))
        weight_map |= dict.fromkeys(tensors, name)
        print(f"\r{i} of {count}", end="", flush=True)
    index = {"metadata": {}, "weight_map": weight_map}
    (arguments.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (arguments.folder / "config.json").write_text(json.dumps(config, indent=2))
    print()


if __name__ == "__main__":
    main()
