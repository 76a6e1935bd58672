"""The config of a GGUF model: llama.cpp's metadata with its meaning and its defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rsv_format.errors import RsvError
from rsv_format.sources import open_source

gguf = pytest.importorskip("gguf")
from gguf_models import HEAD_DIM, HEADS, INNER, KV_HEADS, ROWS, WIDTH, byte_tokens, piece_tokens, write_model  # noqa: E402

FACTOR, OLD_FACTOR, TYPE = "llama.rope.scaling.factor", "llama.rope.scale_linear", "llama.rope.scaling.type"
ORIGINAL = "llama.rope.scaling.original_context_length"


def config_of(path: Path, arch: str = "llama", **arguments: Any) -> dict[str, Any]:
    with open_source(write_model(path / "m.gguf", arch, **arguments)) as source:
        assert source.config is not None
        return source.config


def refused(path: Path, code: str, *parts: str, arch: str = "llama", **arguments: Any) -> None:
    write_model(path / "m.gguf", arch, **arguments)
    with pytest.raises(RsvError) as caught:
        open_source(path / "m.gguf")
    assert caught.value.code == code, str(caught.value)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_whole_config(tmp_path: Path) -> None:
    assert config_of(tmp_path, blocks=2) == {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32", "hidden_size": WIDTH,
        "num_hidden_layers": 2, "intermediate_size": INNER, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "rms_norm_eps": 1e-5, "vocab_size": ROWS,
        "max_position_embeddings": 128, "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": True,
        "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    output = {"output.weight": np.zeros((ROWS, WIDTH), np.float32)}
    assert config_of(tmp_path, tensors=output)["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    "key",
    ["block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
     "attention.layer_norm_rms_epsilon"],
)  # fmt: skip
def test_metadata_that_has_no_default(tmp_path: Path, key: str) -> None:
    refused(tmp_path, "source_invalid", f"llama.{key}: is missing", keys={f"llama.{key}": None})


def test_defaults(tmp_path: Path) -> None:
    square = {"blk.0.attn_k.weight": np.zeros((WIDTH, WIDTH), np.float32)}
    square["blk.0.attn_v.weight"] = square["blk.0.attn_k.weight"]
    none = {"llama.attention.head_count_kv": None, "llama.attention.key_length": None, "llama.rope.freq_base": 0.0}
    config = config_of(tmp_path, keys=none, tensors=square)
    assert (config["num_key_value_heads"], config["head_dim"], config["rope_theta"]) == (HEADS, HEAD_DIM, 10000.0)


def test_numbers_for_each_block(tmp_path: Path) -> None:
    equal = {"llama.attention.head_count_kv": [KV_HEADS] * 2, "llama.feed_forward_length": [INNER] * 2}
    config = config_of(tmp_path, blocks=2, keys=equal)
    assert (config["num_key_value_heads"], config["intermediate_size"]) == (KV_HEADS, INNER)
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        keys = {f"llama.{key}": [2, 4]}
        refused(tmp_path, "source_unsupported", key, "varies from block to block", blocks=2, keys=keys)
    refused(tmp_path, "source_invalid", "head_count_kv", keys={"llama.attention.head_count_kv": 3})


@pytest.mark.parametrize(
    "key, value",
    [("rope.dimension_count", HEAD_DIM // 2), ("attention.value_length", HEAD_DIM // 2), ("attention.causal", False),
     ("logit_scale", 0.25), ("embedding_scale", 12.0), ("residual_scale", 0.5), ("expert_weights_scale", 2.5),
     ("attention.clamp_kqv", 8.0), ("expert_gating_func", 2)],
)  # fmt: skip
def test_metadata_that_changes_the_numbers(tmp_path: Path, key: str, value: Any) -> None:
    refused(tmp_path, "source_unsupported", key, keys={f"llama.{key}": value})


@pytest.mark.parametrize("arch", ["qwen2", "qwen2moe"])
def test_heads_that_do_not_fill_the_width(tmp_path: Path, arch: str) -> None:
    refused(tmp_path, "source_unsupported", "key_length", arch=arch, keys={f"{arch}.attention.key_length": 8})


# Rope


@pytest.mark.parametrize(
    "keys, scaling",
    [
        ({}, None),
        ({FACTOR: 1.0}, None),
        ({FACTOR: 0.0}, None),
        ({FACTOR: 4.0}, {"type": "linear", "rope_type": "linear", "factor": 4.0}),
        ({OLD_FACTOR: 4.0}, {"type": "linear", "rope_type": "linear", "factor": 4.0}),
        ({FACTOR: 2.0, OLD_FACTOR: 4.0}, {"type": "linear", "rope_type": "linear", "factor": 2.0}),
        ({TYPE: "linear", FACTOR: 2.5}, {"type": "linear", "rope_type": "linear", "factor": 2.5}),
        ({TYPE: "linear", OLD_FACTOR: 8.0}, {"type": "linear", "rope_type": "linear", "factor": 8.0}),
        ({TYPE: "linear"}, None),
        ({TYPE: "none", FACTOR: 4.0}, None),
        ({TYPE: "yarn"}, None),
        ({TYPE: "yarn", FACTOR: 4.0, ORIGINAL: 32},
         {"type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}),
        ({TYPE: "yarn", FACTOR: 4.0},
         {"type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}),
        ({TYPE: "yarn", FACTOR: 4.0, "llama.rope.scaling.yarn_beta_fast": 16.0, "llama.rope.scaling.attn_factor": 1.0},
         {"type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
          "beta_fast": 16.0}),
    ],
)  # fmt: skip
def test_rope_scaling(tmp_path: Path, keys: dict[str, Any], scaling: dict[str, Any] | None) -> None:
    assert config_of(tmp_path, keys=keys)["rope_scaling"] == scaling


@pytest.mark.parametrize(
    "code, keys, part",
    [
        ("source_unsupported", {TYPE: "longrope", FACTOR: 4.0}, "longrope"),
        ("source_unsupported", {TYPE: "longrope"}, "longrope"),
        ("source_unsupported", {TYPE: "yarn", FACTOR: 4.0, "llama.rope.scaling.attn_factor": 1.5}, "attn_factor"),
        ("source_invalid", {FACTOR: -4.0}, FACTOR),
        ("source_invalid", {FACTOR: float("nan")}, FACTOR),
        ("source_invalid", {TYPE: 3}, TYPE),
    ],
)
def test_rope_scaling_that_is_refused(tmp_path: Path, code: str, keys: dict[str, Any], part: str) -> None:
    refused(tmp_path, code, part, keys=keys)


@pytest.mark.parametrize("arch", ["qwen2moe", "qwen3moe", "gemma", "gemma2"])
def test_rope_scaling_that_the_model_would_not_do(tmp_path: Path, arch: str) -> None:
    assert config_of(tmp_path, arch, keys={f"{arch}.rope.scaling.factor": 1.0})["rope_scaling"] is None
    refused(tmp_path, "source_unsupported", "do not scale rope", arch=arch, keys={f"{arch}.rope.scaling.factor": 4.0})


def llama3_factors(factor: float) -> np.ndarray:
    """As in llama.cpp's converter, for freq_base 500000."""
    freqs = 1 / 500000 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    divisors = []
    for wavelength in 2 * np.pi / freqs:
        smooth = (8192 / wavelength - 1) / 3
        blend = 1 / ((1 - smooth) / factor + smooth)
        divisors.append(1.0 if wavelength < 8192 / 4 else factor if wavelength > 8192 else blend)
    return np.array(divisors, np.float32)


def test_rope_factors_of_llama_3(tmp_path: Path) -> None:
    base = {"llama.rope.freq_base": 500000.0}
    config = config_of(tmp_path, tensors={"rope_freqs.weight": llama3_factors(8.0)}, keys=base)
    assert config["rope_scaling"] == {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    ones = {"rope_freqs.weight": np.ones(HEAD_DIM // 2, np.float32)}
    assert config_of(tmp_path, tensors=ones, keys=base)["rope_scaling"] is None
    other = {"rope_freqs.weight": np.linspace(1, 3, HEAD_DIM // 2, dtype=np.float32)}
    refused(tmp_path, "source_unsupported", "rope_freqs", tensors=other)
    both = {"tensors": {"rope_freqs.weight": llama3_factors(8.0)}, "keys": {**base, FACTOR: 2.0}}
    refused(tmp_path, "source_unsupported", FACTOR, **both)


# Families


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({}, {"sliding_window": 128, "sliding_window_pattern": 1}),
        ({"attention.sliding_window": 16},
         {"sliding_window": 16, "sliding_window_pattern": 6, "rope_local_base_freq": 10000.0}),
        ({"attention.sliding_window": 16, "attention.sliding_window_pattern": 4, "rope.freq_base_swa": 5000.0},
         {"sliding_window": 16, "sliding_window_pattern": 4, "rope_local_base_freq": 5000.0}),
        ({"attention.sliding_window": 16, "attention.sliding_window_pattern": [True, False, True]},
         {"sliding_window": 16, "sliding_window_pattern": 2}),
    ],
)  # fmt: skip
def test_gemma3_windows(tmp_path: Path, keys: dict[str, Any], expected: dict[str, Any]) -> None:
    config = config_of(tmp_path, "gemma3", blocks=3, keys={f"gemma3.{key}": value for key, value in keys.items()})
    assert {**config, **expected} == config and config["query_pre_attn_scalar"] == HEAD_DIM


def test_gemma_that_is_refused(tmp_path: Path) -> None:
    window = {"gemma3.attention.sliding_window": 16}
    flags = {**window, "gemma3.attention.sliding_window_pattern": [True, False, False]}
    refused(tmp_path, "source_unsupported", "sliding_window_pattern", arch="gemma3", blocks=3, keys=flags)
    caps = {**window, "gemma3.final_logit_softcapping": 30.0}
    refused(tmp_path, "source_unsupported", "final_logit_softcapping", arch="gemma3", keys=caps)


def test_gemma2(tmp_path: Path) -> None:
    config = config_of(tmp_path, "gemma2")
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (50.0, 30.0)
    assert (config["sliding_window"], config["query_pre_attn_scalar"]) == (4096, HEAD_DIM)


def test_experts(tmp_path: Path) -> None:
    config = config_of(tmp_path, "llama", experts=True)
    assert (config["model_type"], config["num_local_experts"], config["num_experts_per_tok"]) == ("mixtral", 3, 2)
    config = config_of(tmp_path, "qwen3moe", keys={"qwen3moe.feed_forward_length": None})
    assert (config["moe_intermediate_size"], config["intermediate_size"]) == (INNER, INNER)
    older = {"qwen2moe.expert_feed_forward_length": None, "qwen2moe.feed_forward_length": 2 * INNER,
             "qwen2moe.expert_shared_feed_forward_length": INNER}  # fmt: skip
    assert config_of(tmp_path, "qwen2moe", keys=older)["moe_intermediate_size"] == INNER
    refused(tmp_path, "source_invalid", "expert_count", arch="qwen3moe", keys={"qwen3moe.expert_count": None})
    refused(tmp_path, "source_invalid", "5 of 3 experts", arch="qwen3moe", keys={"qwen3moe.expert_used_count": 5})


# Token ids


@pytest.mark.parametrize(
    "control, keys, eos",
    [
        ((), {}, None),
        (("<|endoftext|>",), {}, [10]),
        (("<|other|>",), {"eos_token_id": 10}, 10),
        (("<|endoftext|>", "<|im_end|>"), {"eos_token_id": 10}, [10, 11]),
        (("<|endoftext|>", "<|im_end|>"), {"eos_token_id": 11}, [11, 10]),
        (("</s>", "<end_of_turn>"), {"eos_token_id": 10, "eot_token_id": 3}, [10, 3, 11]),
        (("<|eot_id|>", "<|eom_id|>"), {"eos_token_id": 10}, [10, 11]),
        (("x", "y"), {"eos_token_id": 10, "eom_token_id": 11}, [10, 11]),
        (("<|end|>", "<|return|>", "<|call|>"), {}, [11, 12]),
        (("<|end|>", "<|tool_response>", "</s>"), {}, [10, 11]),
        (("x",), {"eos_token_id": 2**32 - 1}, None),
    ],
)
def test_all_tokens_that_end_a_turn(
    tmp_path: Path, control: tuple[str, ...], keys: dict[str, int], eos: int | list[int] | None
) -> None:
    ids = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    assert config_of(tmp_path, keys=byte_tokens(control=control) | ids).get("eos_token_id") == eos


def test_ids_of_sentence_piece_have_defaults(tmp_path: Path) -> None:
    config = config_of(tmp_path, keys=piece_tokens())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2) and "pad_token_id" not in config


def test_ids_are_those_of_tokens(tmp_path: Path) -> None:
    keys = byte_tokens() | {"tokenizer.ggml.bos_token_id": 77}
    refused(tmp_path, "source_invalid", "bos_token_id: 77", "--no-tokenizer", keys=keys)
    with open_source(tmp_path / "m.gguf", tokenizer=False) as source:
        assert source.config is not None and "bos_token_id" not in source.config
