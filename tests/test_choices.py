"""What is quantized, and with how many bits: the same of a checkpoint and of a model in memory, as mlx-lm wants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rsv_format
from rsv_format.quantizer.predicates import least_bits

MODELS = (
    "bailing_moe", "dbrx", "gemma3n", "gemma4_text", "gpt_neox", "granite", "granitemoe", "hunyuan", "internlm2",
    "iquestloopcoder", "jamba", "kimi_k3", "longcat_flash_ngram", "mamba", "phixtral", "plamo2", "rwkv7",
    "spark2_5",
)  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_choices_do_not_depend_on_where_the_model_is(name: str, tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm")
    import rsv_mlx
    from benchmarks.tiny_models import tiny_model, write_checkpoint
    from rsv_mlx.packed import Packed

    write_checkpoint(name, tmp_path / "m")
    rsv_format.quantize(tmp_path / "m", tmp_path / "m.rsv", bits=3, importance="none")
    model, _ = tiny_model(name)
    rsv_mlx.quantize_model(model, bits=3, importance=None)
    packed = {path: module.codebook.bits for path, module in model.named_modules() if isinstance(module, Packed)}
    with rsv_format.open(tmp_path / "m.rsv") as file:
        assert {layer.name: layer.bits for layer in file.layers.values()} == packed


BAILING = {"model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"], "layer_group_size": 2,
           "num_hidden_layers": 5}  # fmt: skip
MUSE = {"model_type": "muse_spark", "text_config": {"num_hidden_layers": 4}}


@pytest.mark.parametrize(
    "config, name, bits",
    [
        (None, "lm_head", 1),
        ({"model_type": "llama"}, "model.layers.0.self_attn.o_proj", 1),
        ({"model_type": "granite"}, "model.layers.0.self_attn.o_proj", 8),
        ({"model_type": "granite"}, "model.layers.0.self_attn.q_proj", 1),
        ({"model_type": "granitemoe"}, "model.layers.0.block_sparse_moe.switch_mlp.down_proj", 8),
        ({"model_type": "rwkv7"}, "model.layers.0.attn.w_lora.lora.2", 8),
        ({"model_type": "rwkv7"}, "model.layers.0.attn.w_lora.lora.0", 1),
        ({"model_type": "spark2_5"}, "model.layers.0.self_attn.g_proj", None),
        (BAILING, "model.word_embeddings", None),
        (BAILING, "model.layers.1.attention.kv_a_proj_with_mqa", None),
        (BAILING, "model.layers.1.attention.g_proj", None),
        (BAILING, "model.layers.0.attention.g_proj", 1),
        (BAILING, "model.layers.4.attention.q_proj", None),
        (BAILING | {"layer_group_size": None}, "model.layers.0.attention.q_proj", None),
        (BAILING | {"architectures": None}, "model.word_embeddings", 1),
        (MUSE, "model.language_model.layers.1.mlp.experts.up_proj", 1),
        (MUSE, "model.language_model.layers.3.mlp.experts.up_proj", None),
        (MUSE, "model.language_model.layers.1.self_attn.o_proj", None),
    ],
)
def test_what_models_say_of_their_layers(config: dict[str, Any] | None, name: str, bits: int | None) -> None:
    assert least_bits(config, name) == bits


def test_a_budget_decides_itself(tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm")
    from benchmarks.tiny_models import write_checkpoint

    write_checkpoint("granite", tmp_path / "m")
    report = rsv_format.quantize(tmp_path / "m", tmp_path / "m.rsv", bits_per_weight=5.5, importance="none")
    assert report.summary.bits_per_weight <= 5.5
