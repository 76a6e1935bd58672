"""Importance without data: the numpy decoder and what it records."""

from __future__ import annotations

import numpy as np
import pytest

from rsv_format.decoder import Decoder, Fetch
from rsv_format.quantizer.synthetic import random_tokens, synthetic_importance
from rsv_format.sources.base import Source, dense_tensor

CONFIG = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 40, "vocab_size": 60, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")


def weights(family: str, head: int = 6) -> dict[str, np.ndarray]:
    """Random weights of a tiny model."""
    rng = np.random.default_rng(1)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    result = {"model.embed_tokens.weight": matrix(60, 24), "model.norm.weight": np.ones(24, np.float32)}
    for i in range(2):
        block = f"model.layers.{i}"
        for name, rows, columns in (
            ("self_attn.q_proj", 24, 24), ("self_attn.k_proj", 12, 24), ("self_attn.v_proj", 12, 24),
            ("self_attn.o_proj", 24, 24), ("mlp.gate_proj", 40, 24), ("mlp.up_proj", 40, 24), ("mlp.down_proj", 24, 40),
        ):  # fmt: skip
            result[f"{block}.{name}.weight"] = matrix(rows, columns)
            if family == "qwen2" and "self_attn" in name and "o_proj" not in name:
                result[f"{block}.{name}.bias"] = rng.standard_normal(rows).astype(np.float32)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if family in ("gemma2", "gemma3_text"):
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for norm in norms:
            result[f"{block}.{norm}.weight"] = (0.5 + rng.random(24)).astype(np.float32)
        if family in ("qwen3", "gemma3_text"):
            result |= {f"{block}.self_attn.{x}_norm.weight": np.ones(head, np.float32) for x in "qk"}
    return result


def fetched(tensors: dict[str, np.ndarray]) -> Fetch:
    return lambda name: [tensors[name]] if name in tensors else None


def source(family: str, tensors: dict[str, np.ndarray]) -> Source:
    kept = {name: dense_tensor(name, "f32", x.shape, lambda x=x: x) for name, x in tensors.items()}
    return Source("test", "test", kept, {"model_type": family, **CONFIG})


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_is_that_of_mlx_lm(family: str) -> None:
    pytest.importorskip("mlx_lm", reason="the oracle is mlx-lm")
    import mlx.core as mx
    from mlx.utils import tree_unflatten
    from mlx_lm.utils import _get_classes

    config = {"model_type": family, **CONFIG, "head_dim": 6, "tie_word_embeddings": True, "attention_bias": False}
    config |= {"query_pre_attn_scalar": 6, "attn_logit_softcapping": 1e6, "final_logit_softcapping": 1e6}
    config |= {"sliding_window": 512, "sliding_window_pattern": 2, "rope_local_base_freq": 10000.0}
    config |= {"max_position_embeddings": 512, "rope_global_base_freq": 10000.0}
    tensors = weights(family)
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    model.update(tree_unflatten([(name, mx.array(x)) for name, x in tensors.items()]))
    tokens = np.arange(3, 23)
    hidden = model.model(mx.array(tokens[None]))[0]
    mine = Decoder({"model_type": family, **CONFIG}, fetched(tensors)).run(tensors["model.embed_tokens.weight"][tokens])
    # mlx-lm rounds the embedding scale of gemma3 to bfloat16
    tolerance = 2e-2 if family == "gemma3_text" else 2e-3
    np.testing.assert_allclose(mine, np.array(hidden), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_is_seen(family: str) -> None:
    opened = source(family, weights(family))
    found = synthetic_importance(opened)
    assert found is not None
    linear = {name[: -len(".weight")] for name in opened.tensors if opened.is_linear(name)}
    assert found.keys() == linear | {"model.embed_tokens"}
    for name, h in found.items():
        assert h.shape == opened.tensors[f"{name}.weight"].shape[-1:]
        assert np.isfinite(h).all() and (h >= 0).all() and h.any()
    assert np.array_equal(found["model.layers.0.self_attn.q_proj"], found["model.layers.0.self_attn.v_proj"])


def test_a_head_of_its_own_is_seen_in_the_table_s_place() -> None:
    tensors = weights("llama")
    tied = synthetic_importance(source("llama", tensors))
    untied = synthetic_importance(
        source("llama", tensors | {"lm_head.weight": np.ones_like(tensors["model.embed_tokens.weight"])})
    )
    assert tied is not None and untied is not None and "model.embed_tokens" not in untied
    assert np.array_equal(untied["lm_head"], tied["model.embed_tokens"])


def test_it_is_the_mean_square() -> None:
    tensors = weights("llama")
    opened = source("llama", tensors)
    seen = {}
    tokens = random_tokens(60)
    assert tokens.shape == (128,) and 3 <= tokens.min() < tokens.max() < 60
    decoder = Decoder(opened.config or {}, fetched(tensors), lambda name, x: seen.setdefault(name, x))
    decoder.run(tensors["model.embed_tokens.weight"][tokens])
    x = tensors["model.embed_tokens.weight"][tokens].astype(np.float64)
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * tensors["model.layers.0.input_layernorm.weight"]
    np.testing.assert_allclose(seen["model.layers.0.self_attn.k_proj"], normed, rtol=1e-4, atol=1e-5)


def test_seed_decides() -> None:
    opened = source("llama", weights("llama"))
    one, same, other = (synthetic_importance(opened, seed) for seed in (1, 1, 2))
    assert one is not None and same is not None and other is not None
    key = "model.layers.1.mlp.down_proj"
    assert np.array_equal(one[key], same[key]) and not np.array_equal(one[key], other[key])


@pytest.mark.parametrize("fault", ["unknown family", "no tensor", "no config", "overflow", "odd heads"])
def test_what_is_no_such_model_gives_none(fault: str) -> None:
    opened = source("mamba" if fault == "unknown family" else "llama", weights("llama"))
    assert opened.config is not None
    if fault == "no tensor":
        del opened.tensors["model.layers.1.mlp.up_proj.weight"]
    elif fault == "no config":
        opened.config = None
    elif fault == "overflow":
        tensors = weights("llama")
        tensors["model.layers.0.mlp.up_proj.weight"] *= np.float32(1e38)
        tensors["model.layers.0.mlp.gate_proj.weight"] *= np.float32(1e38)
        opened = source("llama", tensors)
    elif fault == "odd heads":
        opened.config["num_attention_heads"] = 7
    assert synthetic_importance(opened) is None
