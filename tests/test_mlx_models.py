"""rsv_mlx on whole models: embeddings and experts packed, quantized in place, saved, loaded and grafted."""

from __future__ import annotations

import json
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rsv_format
from rsv_format import RsvError, TensorData, quantize_matrix
from rsv_format.quantizer.synthetic import synthetic_importance

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
nn = pytest.importorskip("mlx.nn")

import rsv_mlx  # noqa: E402
from rsv_mlx.calibrate import random_importance  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what transformers says while it is imported is not ours
    mlx_lm = pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear  # noqa: E402

RNG = np.random.default_rng(11)
KINDS = {
    "none": {"rotation": "none"},
    "hartley": {"rotation": "hartley"},
    "scaled": {"rotation": "hartley", "importance": True},
    "haar": {"rotation": "haar"},
    "trellis": {"codebook": "trellis"},
}


def matrix(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32) / np.sqrt(np.float32(shape[-1]))


def quantized(weight: np.ndarray, kind: str = "hartley", **options: Any) -> rsv_format.LayerData:
    options = KINDS[kind] | options
    if options.pop("importance", False):
        options["importance"] = np.linspace(0.1, 3, weight.shape[-1])
    return quantize_matrix(weight, **options)


def reference(path: Path, data: rsv_format.LayerData) -> np.ndarray:
    """The dense weight, by rsv_format."""
    rsv_format.write(path, layers=[data])
    with rsv_format.open(path) as file:
        return file.layers[data.name].dequantize()


def close(actual: Any, wanted: Any, tolerance: float = 2e-5) -> None:
    actual, wanted = (np.array(x.astype(mx.float32)) if isinstance(x, mx.array) else x for x in (actual, wanted))
    assert actual.shape == wanted.shape
    np.testing.assert_allclose(actual, wanted, atol=tolerance * max(1e-9, float(np.abs(wanted).max())))


def same_bytes(a: Any, b: Any) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and bytes(memoryview(a.view(mx.uint8))) == bytes(memoryview(b.view(mx.uint8)))
    )


class Box(nn.Module):
    """Modules by name."""

    def __init__(self, **modules: Any) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


# embeddings


@pytest.mark.parametrize("codebook", ["lloyd-max", "uniform"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", [40, 64])
def test_embedding_looks_up_and_projects(kind: str, codebook: str, dims: int, tmp_path: Path) -> None:
    data = quantized(matrix(11, dims), kind, codebook=codebook, bits=5)
    table, weight = rsv_mlx.QuantizedEmbedding.from_data(data), reference(tmp_path / "a.rsv", data)
    for tokens in (np.array([[3, 0, 10], [10, 10, 1]]), np.array(4), np.array([-1], np.int16)):
        close(table(mx.array(tokens)), weight[tokens])
    for x in (matrix(2, 3, dims), matrix(40, dims)):
        close(table.as_linear(mx.array(x)), x @ weight.T)
    close(table.dequantize(), weight)
    close(table.to_dense().weight, weight)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_embedding_has_the_dtypes_and_shapes_of_mlx(dtype: Any) -> None:
    plain = nn.Embedding(11, 40)
    plain.set_dtype(dtype)
    table = rsv_mlx.QuantizedEmbedding.from_data(quantized(matrix(11, 40)))
    table.dtype = dtype
    for shape in ((), (1,), (0,), (2, 0), (2, 3)):
        tokens = mx.zeros(shape, mx.uint32)
        assert (table(tokens).shape, table(tokens).dtype) == (plain(tokens).shape, dtype)
        x = mx.zeros((*shape, 40), dtype)
        assert (table.as_linear(x).shape, table.as_linear(x).dtype) == (plain.as_linear(x).shape, dtype)
    with pytest.raises(ValueError, match=r"\[QuantizedEmbedding\]"):
        table.as_linear(mx.zeros((2, 39)))
    assert "input_dims=40, output_dims=11" in repr(table)
    assert not table.unfreeze().trainable_parameters()


def test_embedding_and_experts_from_those_of_mlx() -> None:
    plain, experts = nn.Embedding(24, 64), SwitchLinear(64, 6, 5)
    plain.set_dtype(mx.float16)
    experts.bias = mx.array(matrix(5, 6))
    tokens, x, chosen = mx.array([3, 23]), mx.array(matrix(2, 1, 1, 64)), mx.array([[0, 4], [1, 1]])
    for quantize in (False, True):
        table = rsv_mlx.QuantizedEmbedding.from_embedding(plain.to_quantized(32, 8) if quantize else plain, bits=8)
        assert table(tokens).dtype == mx.float16
        close(table(tokens), plain(tokens), 0.02)
        switch = experts.to_quantized(32, 8) if quantize else experts
        close(rsv_mlx.QuantizedSwitchLinear.from_switch_linear(switch, bits=8)(x, chosen), experts(x, chosen), 0.03)


def test_embedding_from_the_other_modes_of_mlx() -> None:
    affine = nn.Embedding(24, 64).to_quantized(mode="mxfp4")
    table = rsv_mlx.QuantizedEmbedding.from_embedding(affine, bits=8)
    assert table.dtype == affine(mx.array([1])).dtype
    close(table(mx.array([3])), affine(mx.array([3])), 0.05)


def test_embedding_in_a_file_takes_the_place_of_one_in_a_model(tmp_path: Path) -> None:
    data = quantized(matrix(96, 64), name="table")
    norm = np.ones(64, np.float16)
    weight = reference(tmp_path / "w.rsv", data)
    affine = nn.Embedding(96, 64).to_quantized(group_size=32, bits=4)
    for table in (nn.Embedding(96, 64), affine):
        rsv_format.write(tmp_path / "a.rsv", layers=[data], tensors={"norm.weight": TensorData("f16", norm)})
        for lazy in (False, True):
            box = Box(table=table, norm=nn.RMSNorm(64))
            _, report = rsv_mlx.load(tmp_path / "a.rsv", model=box, dtype="keep", lazy=lazy, return_report=True)
            assert isinstance(box.table, rsv_mlx.QuantizedEmbedding) and report.dense_nbytes == 0
            assert box.table(mx.array([5])).dtype == mx.float16  # the norm's: nothing else tells
            close(box.table(mx.array([5, 7])), weight[[5, 7]], 1e-3)
            assert bool(report.deferred_nbytes) == lazy
            rsv_mlx.load(tmp_path / "a.rsv", model=box)  # over itself
    half = nn.Embedding(96, 64)
    half.set_dtype(mx.bfloat16)
    rsv_mlx.load(tmp_path / "w.rsv", model=(box := Box(table=half)))
    assert box.table(mx.array([5])).dtype == mx.bfloat16  # the replaced module's
    rsv_mlx.load(tmp_path / "a.rsv", model=(box := Box(table=affine, norm=nn.RMSNorm(64))), materialize="dense")
    assert type(box.table) is nn.Embedding
    close(box.table.weight, weight)


def test_embedding_has_no_bias(tmp_path: Path) -> None:
    biased = quantized(matrix(6, 20), name="table", bias=np.ones(6, np.float32), bias_dtype="f32")
    with pytest.raises(RsvError, match="no bias"):
        rsv_mlx.QuantizedEmbedding.from_data(biased)
    rsv_format.write(tmp_path / "a.rsv", layers=[biased])
    with pytest.raises(RsvError, match="unexpected_layer.*table.bias"):
        rsv_mlx.load(tmp_path / "a.rsv", model=Box(table=nn.Embedding(6, 20)))
    box = rsv_mlx.load(tmp_path / "a.rsv", model=Box(table=nn.Embedding(6, 20)), strict=False)
    assert "bias" not in box.table.parameters()
    with pytest.raises(RsvError, match="bad_argument"):
        rsv_mlx.QuantizedEmbedding.from_data(quantized(matrix(2, 6, 20)))


# experts


def switches(experts: int, rows: int, columns: int, *, bias: bool = True, **options: Any) -> tuple[Any, Any]:
    """A packed switch layer and mlx-lm's dense one with the same weights."""
    own: dict[str, Any] = {}
    if bias:
        own = {"bias": matrix(experts * rows, 2)[:, 0], "bias_dtype": "f32"}
    data = quantized(matrix(experts, rows, columns), **own, **options)
    layer = rsv_mlx.QuantizedSwitchLinear.from_data(data)
    dense = layer.to_dense()
    assert dense.weight.shape == (experts, rows, columns) and isinstance(dense, SwitchLinear)
    return layer, dense


@pytest.mark.parametrize("codebook", ["lloyd-max", "uniform"])
@pytest.mark.parametrize("bits", [1, 3, 4, 7])
@pytest.mark.parametrize("columns", [40, 64])
def test_switch_like_mlx_lm(bits: int, columns: int, codebook: str) -> None:
    layer, dense = switches(6, 10, columns, bits=bits, codebook=codebook)
    for tokens, chosen in ((1, 2), (2, 2), (9, 2), (60, 1)):  # few pairs, fewer and more than experts
        x = mx.array(matrix(tokens, 1, 1, columns))
        indices = mx.array(RNG.integers(0, 6, (tokens, chosen)))
        close(layer(x, indices), dense(x, indices), 1e-4)
    rows, order = mx.array(matrix(70, 1, columns)), mx.array(np.sort(RNG.integers(0, 6, 70)))
    close(layer(rows, order, sorted_indices=True), dense(rows, order, sorted_indices=True), 1e-4)
    close(layer(rows[:3], order[:3], sorted_indices=True), dense(rows[:3], order[:3]), 1e-4)


def test_switch_of_more_experts_than_pairs() -> None:
    layer, dense = switches(64, 5, 32)
    x, indices = mx.array(matrix(10, 1, 1, 32)), mx.array(RNG.integers(0, 64, (10, 2)))
    close(layer(x, indices), dense(x, indices), 1e-4)
    close(mx.compile(layer)(x, indices), dense(x, indices), 1e-4)  # no look at the numbers on the way
    gradient = mx.grad(lambda x: layer(x, indices).sum())(x)
    close(gradient, mx.grad(lambda x: dense(x, indices).sum())(x), 1e-4)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_switch_dtypes_and_shapes(dtype: Any) -> None:
    for bias in (True, False):
        layer, dense = switches(4, 6, 40, bias=bias)
        dense.set_dtype(dtype)
        for shape in ((3, 1, 1, 40), (0, 1, 1, 40)):
            x, indices = mx.ones(shape, dtype), mx.zeros((shape[0], 2), mx.uint32)
            assert (layer(x, indices).shape, layer(x, indices).dtype) == (dense(x, indices).shape, dtype)
    with pytest.raises(ValueError, match=r"\[QuantizedSwitchLinear\]"):
        layer(mx.ones((3, 1, 1, 41)), mx.zeros((3, 2), mx.uint32))
    assert "num_experts=4, input_dims=40, output_dims=6" in repr(layer)
    assert not layer.unfreeze().trainable_parameters()


def test_stack_in_a_file_takes_the_place_of_experts_in_a_model(tmp_path: Path) -> None:
    gate = quantized(matrix(4, 48, 32), name="glu.gate_proj")
    up = quantized(matrix(4, 48, 32), name="glu.up_proj", transform=gate.transform, rotation="none")
    down = quantized(matrix(4, 32, 48), name="glu.down_proj")
    rsv_format.write(tmp_path / "a.rsv", layers=[gate, up, down])
    x, indices = mx.array(matrix(20, 32)), mx.array(RNG.integers(0, 4, (20, 4)))
    dense = rsv_mlx.load(tmp_path / "a.rsv", model=Box(glu=SwitchGLU(32, 48, 4)), materialize="dense")
    assert type(dense.glu.up_proj) is SwitchLinear
    affine = Box(glu=SwitchGLU(32, 64, 4))
    nn.quantize(affine, group_size=32, bits=4)
    with pytest.raises(RsvError, match="shape_mismatch"):
        rsv_mlx.load(tmp_path / "a.rsv", model=affine)
    for lazy in (False, True):
        box = Box(glu=SwitchGLU(32, 48, 4))
        _, report = rsv_mlx.load(tmp_path / "a.rsv", model=box, lazy=lazy, return_report=True)
        assert isinstance(box.glu.up_proj, rsv_mlx.QuantizedSwitchLinear) and report.dense_nbytes == 0
        assert box.glu.up_proj.transform is box.glu.gate_proj.transform is not None
        for n in (20, 3):
            close(box.glu(x[:n], indices[:n]), dense.glu(x[:n], indices[:n]), 1e-4)
        rsv_mlx.load(tmp_path / "a.rsv", model=box)  # over itself


def test_one_expert(tmp_path: Path) -> None:
    rsv_format.write(tmp_path / "a.rsv", layers=[quantized(matrix(1, 6, 20), name="experts")])
    box = rsv_mlx.load(tmp_path / "a.rsv", model=Box(experts=SwitchLinear(20, 6, 1, bias=False)))
    assert box.experts(mx.ones((2, 1, 1, 20)), mx.zeros((2, 1), mx.uint32)).shape == (2, 1, 1, 6)


# whole models

SHAPE = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "vocab_size": 40, "rope_theta": 1e4,
    "max_position_embeddings": 128, "tie_word_embeddings": True, "eos_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
           "decoder_sparse_step": 1, "mlp_only_layers": []}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    "qwen3_moe": EXPERTS,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
LATENT = ROUTED | {
    "n_routed_experts": 4, "n_shared_experts": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}  # fmt: skip
FULL = {"layer_types": ["full_attention"] * 2, "sliding_window": 8,
        "rope_parameters": {"full_attention": {"rope_theta": 1e4, "rope_type": "default"}}}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {  # families whose checkpoints keep experts apart, besides two above
    "bailing_moe": LATENT | {"num_shared_experts": 1},
    "deepseek": LATENT,
    "deepseek_v2": LATENT | {"rope_scaling": {"type": "yarn", "factor": 2.0}},
    "deepseek_v3": LATENT,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "use_bias": False},
    "exaone_moe": ROUTED | FULL | {"num_shared_experts": 1, "is_moe_layer": [False, True]},
    "glm4_moe": LATENT | {"routed_scaling_factor": 1.0, "rope_scaling": None, "use_qk_norm": True,
                          "attention_bias": False, "partial_rotary_factor": 0.5},
    "glm4_moe_lite": LATENT,
    "hunyuan": ROUTED | {"moe_topk": 2, "num_shared_expert": 1, "use_mixed_mlp_moe": True, "use_qk_norm": True,
                         "use_cla": False, "cla_share_factor": 2, "attention_bias": False,
                         "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}},
    "jamba": ROUTED | {"attn_layer_offset": 0, "attn_layer_period": 2, "expert_layer_offset": 1,
                       "expert_layer_period": 2, "mamba_d_conv": 4, "mamba_d_state": 4, "mamba_expand": 2},
    "laguna": ROUTED | FULL | {"shared_expert_intermediate_size": 32},
    "lfm2_moe": ROUTED | {"use_expert_bias": True, "num_dense_layers": 1, "norm_eps": 1e-5, "conv_bias": False,
                          "conv_L_cache": 3, "layer_types": ["conv", "full_attention"]},
    "mellum": ROUTED | FULL,
    "minimax": {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32, "rotary_dim": 8},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "original_max_position_embeddings": 64,
               "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8,
                                "short_mscale": 1.0, "long_mscale": 1.0}},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 48},
    "qwen3_next": EXPERTS | {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
                             "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
                             "partial_rotary_factor": 0.5, "shared_expert_intermediate_size": 32},
}  # fmt: skip
TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]]


def make(family: str = "llama", dtype: Any = None, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """A random model of mlx-lm and its config."""
    from importlib import import_module

    config = {"model_type": family} | SHAPE | (FAMILIES | MIXTURES)[family] | changes
    module = import_module(f"mlx_lm.models.{family}")
    mx.random.seed(7)
    model = module.Model(module.ModelArgs.from_dict(config))
    if family == "gemma3_text" and config["tie_word_embeddings"]:
        model.sanitize({})  # that is how it is told
    if dtype is not None:
        model.set_dtype(dtype)
    return model.eval(), config


def modules_of(model: Any, kind: Any) -> dict[str, Any]:
    return {path: module for path, module in model.named_modules() if isinstance(module, kind)}


PACKED = (rsv_mlx.QuantizedLinear, rsv_mlx.QuantizedEmbedding, rsv_mlx.QuantizedSwitchLinear)


def affine(model: Any) -> set[str]:
    """Paths of what MLX has quantized."""
    return modules_of(model, (nn.QuantizedLinear, nn.QuantizedEmbedding)).keys() - modules_of(model, PACKED).keys()


def generated(model: Any, count: int = 6) -> list[int]:
    from mlx_lm.generate import generate_step

    return [int(token) for token, _ in generate_step(mx.array(TOKENS[0]), model, max_tokens=count)]


@pytest.mark.parametrize("codebook", ["lloyd-max", "uniform"])
@pytest.mark.parametrize("embedding_bits", ["keep", 6])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_loaded_logits_are_the_same(
    family: str, embedding_bits: int | str, codebook: str, tmp_path: Path
) -> None:
    from mlx_lm.models.cache import make_prompt_cache

    model, config = make(family)
    tokens, wanted = mx.array(TOKENS), make(family)[0](mx.array(TOKENS))
    rsv_mlx.quantize_model(model, bits=8, codebook=codebook, embedding_bits=embedding_bits)
    logits = model(tokens)
    assert float(mx.linalg.norm(logits - wanted) / mx.linalg.norm(wanted)) < 0.15
    assert (model.model.embed_tokens.__class__ is nn.Embedding) == (embedding_bits == "keep")
    assert not {path for path in modules_of(model, nn.Linear) if path.rpartition(".")[2] not in ("gate", "lm_head")}
    assert not modules_of(model, SwitchLinear)
    assert ("lm_head" in modules_of(model, nn.Linear)) == (family == "qwen2" and embedding_bits == "keep")
    rsv_mlx.save(model, tmp_path / "m.rsv", config=config)
    assert rsv_format.verify(tmp_path / "m.rsv") == []
    loaded, report = rsv_mlx.load_model(tmp_path / "m.rsv", return_report=True)
    assert report.dense_nbytes == 0 and modules_of(loaded, PACKED).keys() == modules_of(model, PACKED).keys()
    assert same_bytes(loaded(tokens), logits)
    assert generated(loaded) == generated(model)
    cache = make_prompt_cache(loaded)
    parts = [loaded(tokens[:, :5], cache=cache), loaded(tokens[:, 5:], cache=cache)]
    close(mx.concatenate(parts, axis=1), logits, 1e-4)
    trainable = {path.rpartition(".")[0] for path, _ in tree_flatten(loaded.trainable_parameters())}
    assert trainable and not trainable & modules_of(loaded, PACKED).keys()


@pytest.mark.parametrize("codebook", ["lloyd-max", "uniform"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_rest_of_a_model_can_be_trained(family: str, codebook: str) -> None:
    model, _ = make(family)
    rsv_mlx.quantize_model(model, codebook=codebook, embedding_bits=4)
    tokens = mx.array(TOKENS)
    _, gradients = nn.value_and_grad(model, lambda: model(tokens).square().mean())()
    found = dict(tree_flatten(gradients))
    assert "model.norm.weight" in found and not any("_proj" in path or "embed" in path for path in found)
    assert all(bool(mx.isfinite(array).all()) for array in found.values())


@pytest.mark.parametrize("kind", KINDS)
def test_every_transform_is_saved_as_it_is(kind: str, tmp_path: Path) -> None:
    options = dict(KINDS[kind])
    model, config = make("qwen3", mx.bfloat16)
    names = modules_of(model, nn.Linear)
    if options.pop("importance", False):
        options["importance"] = {
            name: np.linspace(0.1, 3, module.weight.shape[1]) for name, module in names.items() if "k_proj" not in name
        }
    rsv_mlx.quantize_model(model, bits=3, embedding_bits=5, seed=4, **options)
    logits = model(mx.array(TOKENS))
    assert logits.dtype == mx.bfloat16
    factors = set()
    for persist in (False, True, False):
        rsv_mlx.save(model, tmp_path / "m.rsv", config=config, persist_rotation=persist)
        assert rsv_format.verify(tmp_path / "m.rsv") == []
        with rsv_format.open(tmp_path / "m.rsv") as file:
            factors |= {(persist, t.factor and t.factor.kind) for t in file.header.transforms}
        model = rsv_mlx.load_model(tmp_path / "m.rsv")
        assert same_bytes(model(mx.array(TOKENS)), logits)
    if kind == "haar":  # what has come from a matrix stays one
        assert factors == {(False, "haar"), (True, "matrix"), (False, "matrix")}
    attention = model.model.layers[0].self_attn
    if kind != "none":
        assert attention.q_proj.transform is attention.k_proj.transform is attention.v_proj.transform
        assert attention.q_proj.transform is attention.v_proj.transform is not None


def test_both_see_the_same_random_tokens(tmp_path: Path) -> None:
    model, config = make("qwen2", mx.float32)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with rsv_format.open_source(tmp_path) as source:
        wanted = synthetic_importance(source)
    found = random_importance(model)
    assert wanted and set(modules_of(model, nn.Linear)) <= wanted.keys() & found.keys()
    for name in wanted.keys() & found.keys():
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_same_as_the_format_makes_of_the_same_weights(kind: str, tmp_path: Path) -> None:
    model, config = make("qwen2", mx.bfloat16)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (tmp_path / "config.json").write_text(json.dumps(config))
    options, importance = dict(KINDS[kind]), None
    if options.pop("importance", False):
        importance = {
            name: RNG.uniform(0.1, 3, module.weight.shape[1]) for name, module in modules_of(model, nn.Linear).items()
        }
    rsv_format.quantize(tmp_path, tmp_path / "a.rsv", importance=importance or "none", seed=3, **options)
    rsv_mlx.quantize_model(model, importance=importance, seed=3, **options)
    rsv_mlx.save(model, tmp_path / "b.rsv", tokenizer_from=tmp_path)
    with rsv_format.open(tmp_path / "a.rsv") as a, rsv_format.open(tmp_path / "b.rsv") as b:
        assert a.layers.keys() == b.layers.keys() and a.header.transforms == b.header.transforms
        assert [layer.sha256 for layer in a.header.layers] == [layer.sha256 for layer in b.header.layers]
        assert a.header.tensors == b.header.tensors
        assert json.loads(b.attachments["config.json"].data.tobytes()) == config


def test_weights_are_released_one_layer_after_the_other() -> None:
    for dtype in (mx.float32, mx.bfloat16):
        model, _ = make("qwen3_moe", dtype)
        mx.eval(model.parameters())
        alive = {path: weakref.ref(m["weight"]) for path, m in modules_of(model, (nn.Linear, SwitchLinear)).items()}
        alive = {path: ref for path, ref in alive.items() if not path.endswith("gate")}
        seen: list[str] = []

        def progress(done: int, total: int, name: str, alive: Any = alive, seen: Any = seen) -> None:
            released = {path for path, ref in alive.items() if ref() is None}
            assert released == set(seen) - {name} and 0 <= done <= total
            seen += [name] if name and name not in seen else []

        rsv_mlx.quantize_model(model, embedding_bits="keep", progress=progress)
        assert set(seen) == alive.keys() and not any(ref() for ref in alive.values())


def test_layers_that_mlx_has_quantized_are_sources_and_may_stay(tmp_path: Path) -> None:
    for family in ("llama", "qwen3_moe"):
        model, config = make(family)
        nn.quantize(model, group_size=32, bits=8)
        wanted = model(mx.array(TOKENS))
        rsv_mlx.quantize_model(model, bits=8, exclude=["*.o_proj"], importance=None, embedding_bits="keep")
        stay = affine(model)
        assert "model.embed_tokens" in stay and "model.layers.1.self_attn.o_proj" in stay
        logits = model(mx.array(TOKENS))
        close(logits, wanted, 0.1)
        rsv_mlx.save(model, tmp_path / "m.rsv", config=config)
        loaded = rsv_mlx.load_model(tmp_path / "m.rsv")
        assert affine(loaded) == stay
        assert same_bytes(loaded(mx.array(TOKENS)), logits)
        rsv_mlx.quantize_model(loaded, include=["*.o_proj", "*embed_tokens"], embedding_bits=8)
        left = (
            modules_of(loaded, (nn.QuantizedLinear, nn.QuantizedEmbedding)).keys() - modules_of(loaded, PACKED).keys()
        )
        assert not {x for x in left if "gate" not in x}
        rsv_mlx.save(loaded, tmp_path / "m.rsv", config=config | {"quantization": {"group_size": 1}})
        assert same_bytes(rsv_mlx.load_model(tmp_path / "m.rsv")(mx.array(TOKENS)), loaded(mx.array(TOKENS)))
    rsv_format.write(
        tmp_path / "m.rsv",
        attachments={
            "config.json": rsv_format.AttachmentData(
                "application/json", json.dumps(make()[1] | {"quantization": {"bits": 99}}).encode()
            )
        },
        tensors={"model.embed_tokens.scales": TensorData("f32", np.ones((40, 2), np.float32))},
    )
    with pytest.raises(RsvError, match="unsupported_model.*quantization"):
        rsv_mlx.load_model(tmp_path / "m.rsv")


def test_importance_of_random_tokens() -> None:
    """A model with a few strong channels loses less when it has been run first; what takes no tokens has none."""
    errors = {}
    for importance in (None, "auto"):
        mx.random.seed(3)
        model, _ = make("qwen2")
        strong = mx.where(mx.arange(model.args.hidden_size) % 16 == 3, 20.0, 0.2)
        for layer in model.layers:
            layer.input_layernorm.weight = layer.post_attention_layernorm.weight = strong
        wanted = model(mx.array(TOKENS))
        rsv_mlx.quantize_model(model, bits=3, importance=importance)
        errors[importance] = float(mx.square(model(mx.array(TOKENS)) - wanted).mean())
    assert errors["auto"] < 0.7 * errors[None]
    assert random_importance(Box(a=nn.Linear(8, 8))) == random_importance(nn.Embedding(8, 8)) == {}
    with pytest.raises(RsvError, match="bad_argument at importance"):
        rsv_mlx.quantize_model(model, importance="gains")


def test_quantizing_refuses_before_it_changes_anything() -> None:
    model, _ = make()
    up = "model.layers.1.mlp.up_proj"
    for options, code, where in (
        ({"bits": 9}, "bad_argument", "bits"),
        ({"embedding_bits": 0}, "bad_argument", "bits"),
        ({"codebook": "golden"}, "bad_argument", "codebook"),
        ({"rotation": "left"}, "bad_argument", "rotation"),
        ({"include": ["nothing"]}, "bad_argument", "no layer"),
        ({"importance": {up: np.ones(63)}}, "importance_mismatch", up),
        ({"importance": {up: -np.ones(64)}}, "importance_mismatch", up),
        ({"importance": {"other": np.ones(64)}}, "importance_mismatch", "none of the layers"),
    ):
        with pytest.raises(RsvError, match=where) as e:
            rsv_mlx.quantize_model(model, **options)  # type: ignore[arg-type]
        assert e.value.code == code
    assert not modules_of(model, PACKED)
    model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    with pytest.raises(RsvError, match=f"nonfinite_weight at {up}"):
        rsv_mlx.quantize_model(model)
    assert isinstance(model.model.layers[1].mlp.up_proj, nn.Linear)
    assert isinstance(model.model.layers[0].mlp.up_proj, rsv_mlx.QuantizedLinear)


def test_large_weights_are_dense_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = make("qwen3_moe")
    rsv_mlx.quantize_model(whole, embedding_bits=4)
    monkeypatch.setattr("rsv_mlx.quantizing._BLOCK", 64 * 5)
    parts, _ = make("qwen3_moe")
    rsv_mlx.quantize_model(parts, embedding_bits=4)
    assert same_bytes(parts(mx.array(TOKENS)), whole(mx.array(TOKENS)))
    model, _ = make()
    model.model.layers[0].mlp.up_proj.weight[8, 4] = float("inf")
    with pytest.raises(RsvError, match=r"row 3, column 4 is inf \(counted from row 5\)"):
        rsv_mlx.quantize_model(model)


def test_graft_of_some_layers(tmp_path: Path) -> None:
    part, _ = make()
    rsv_mlx.quantize_model(part, include=["*.mlp.*"])
    layers = list(modules_of(part, rsv_mlx.QuantizedLinear))
    rsv_mlx.save(part, tmp_path / "all.rsv")
    with rsv_format.open(tmp_path / "all.rsv") as file:
        data = [rsv_format.LayerData(x.name, x.in_features, x.bits, x.codes, x.scales, x.codebook, x.transform)
                for x in file.layers.values()]  # fmt: skip
        rsv_format.write(tmp_path / "some.rsv", layers=data)
    model, _ = make()
    with pytest.raises(RsvError, match="missing_layer.*embed_tokens"):
        rsv_mlx.graft(model, tmp_path / "some.rsv")
    assert not modules_of(model, PACKED)
    report = rsv_mlx.graft(model, tmp_path / "some.rsv", strict=False)
    assert report.layers == len(layers) == 6 and list(modules_of(model, rsv_mlx.QuantizedLinear)) == layers
    assert same_bytes(model(mx.array(TOKENS)), part(mx.array(TOKENS)))
    other, _ = make(intermediate_size=128)
    with pytest.raises(RsvError, match="shape_mismatch.*up_proj"):
        rsv_mlx.graft(other, tmp_path / "some.rsv", strict=False)
    other, _ = make(num_hidden_layers=1)
    with pytest.raises(RsvError, match="unexpected_layer.*layers.1.mlp"):
        rsv_mlx.graft(other, tmp_path / "all.rsv")
    with pytest.raises(RsvError, match="missing_attachment"):
        rsv_mlx.load_model(tmp_path / "all.rsv")


def test_graft_onto_a_model_whose_head_was_dropped_before(tmp_path: Path) -> None:
    model, config = make("gemma3_text")
    rsv_mlx.quantize_model(model, embedding_bits=4)
    rsv_mlx.save(model, tmp_path / "m.rsv", config=config)
    again, _ = make("gemma3_text")
    rsv_mlx.graft(again, tmp_path / "m.rsv")
    rsv_mlx.graft(again, tmp_path / "m.rsv")
    assert same_bytes(again(mx.array(TOKENS)), model(mx.array(TOKENS)))
    untied, config = make("gemma3_text", tie_word_embeddings=False)
    rsv_mlx.quantize_model(untied)
    rsv_mlx.save(untied, tmp_path / "m.rsv", config=config)
    assert same_bytes(rsv_mlx.load_model(tmp_path / "m.rsv")(mx.array(TOKENS)), untied(mx.array(TOKENS)))


def test_saving_any_module(tmp_path: Path) -> None:
    box = Box(a=nn.Linear(20, 6), rest=[nn.Linear(6, 2, bias=False)])
    box.a.set_dtype(mx.bfloat16)
    box.flags, box.empty, box.deep = mx.array([True, False]), mx.zeros((0, 3)), {"x": mx.array([1], mx.int64)}
    rsv_mlx.quantize_model(box, exclude=["a"])
    rsv_mlx.save(box, tmp_path / "m.rsv", metadata={"note": "n"})
    other = Box(a=nn.Linear(20, 6), rest=[nn.Linear(6, 2, bias=False)])
    other.flags, other.empty, other.deep = mx.array([False, False]), mx.ones((0, 3)), {"x": mx.array([0], mx.int64)}
    rsv_mlx.graft(other, tmp_path / "m.rsv", lazy=True)
    again = tmp_path / "n.rsv"
    rsv_mlx.save(other, again, metadata={"note": "n"})  # reads what was deferred
    assert again.read_bytes() == (tmp_path / "m.rsv").read_bytes()
    assert other.flags.tolist() == [True, False] and other.deep["x"].tolist() == [1] and other.empty.shape == (0, 3)
    with rsv_format.open(again) as file:
        assert file.metadata["note"] == "n" and file.tensors["a.weight"].dtype == "bf16" and not file.attachments
    rsv_mlx.save(other, tmp_path / "m.rsv")  # over the file that it came from
    box.flags = mx.array([1j])
    with pytest.raises(RsvError, match="bad_argument at flags: .*complex64"):
        rsv_mlx.save(box, again)
    with pytest.raises(RsvError, match="io_error"):
        rsv_mlx.save(other, again, tokenizer_from=tmp_path / "nowhere")
    for force in (False, True):  # a file that is read, and one beside it
        with pytest.raises(RsvError, match="bad_argument.*input's"):
            (tmp_path / "config.json").write_text("{}")
            rsv_mlx.save(other, tmp_path / "config.json", tokenizer_from=tmp_path, force=force)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RsvError, match="source_invalid.*config.json"):
        rsv_mlx.save(other, again, tokenizer_from=tmp_path)


def test_generation_with_the_tokenizer_of_a_folder(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<s>": 0, **{f"w{i}": i for i in range(1, 40)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<s>", "unk_token": "w1"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    model, config = make("qwen3_moe")
    rsv_mlx.quantize_model(model, embedding_bits=6)
    rsv_mlx.save(model, tmp_path / "m.rsv", config=config, tokenizer_from=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        loaded, tokenizer = rsv_mlx.load(tmp_path / "m.rsv")
    assert tokenizer.encode("w3 w4") == [3, 4]
    text = mlx_lm.generate(loaded, tokenizer, "w3 w4 w5", max_tokens=5)
    assert text == mlx_lm.generate(model, tokenizer, "w3 w4 w5", max_tokens=5)
    pieces = [r.text for r in mlx_lm.stream_generate(loaded, tokenizer, "w3 w4 w5", max_tokens=5)]
    assert "".join(pieces) == text


# checkpoints that keep experts apart


def apart(path: str, family: str, number: int) -> str:
    """The name of one expert's weight in a checkpoint, from the path of the module that holds all."""
    owner, _, part = path.partition(".switch_mlp.")
    if family in ("mixtral", "phimoe", "minimax", "lfm2_moe"):
        part = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[part]
    return f"{owner}.experts.{number}.{part}.weight"


def write_checkpoint(folder: Path, family: str) -> tuple[Any, dict[str, np.ndarray]]:
    """A random model and the tensors of the Hugging Face folder that is written of it."""
    model, config = make(family)
    tensors = dict(tree_flatten(model.parameters()))
    for path in modules_of(model, SwitchLinear):
        weight = tensors.pop(f"{path}.weight")
        tensors |= {apart(path, family, i): weight[i] for i in range(weight.shape[0])}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    (folder / "config.json").write_text(json.dumps(config))
    return model, {name: np.array(tensor) for name, tensor in tensors.items()}


STACKED = ["mixtral", "qwen3_moe", *MIXTURES]


@pytest.mark.parametrize("family", STACKED)
def test_experts_of_a_checkpoint_stay_packed(family: str, tmp_path: Path) -> None:
    model, tensors = write_checkpoint(tmp_path, family)
    rsv_format.quantize(tmp_path, tmp_path / "a.rsv")
    loaded, report = rsv_mlx.load_model(tmp_path / "a.rsv", return_report=True)
    packed = modules_of(loaded, rsv_mlx.QuantizedSwitchLinear)
    assert packed and packed.keys() == modules_of(model, SwitchLinear).keys() and not modules_of(loaded, SwitchLinear)
    if family not in ("deepseek_v3", "glm4_moe_lite"):  # there mlx-lm takes kv_b_proj apart
        assert report.dense_nbytes == 0
    with rsv_format.open(tmp_path / "a.rsv") as file:
        for path, switch in packed.items():
            layer = file.layers[path]
            close(switch.dequantize(), layer.dequantize())
            for i, matrix in enumerate(layer.dequantize()):  # as if the expert were alone
                weight = tensors[apart(path, family, i)]
                alone = quantize_matrix(weight, transform=layer.transform)
                assert np.array_equal(matrix, reference(tmp_path / "alone.rsv", alone))
            assert apart(path, family, layer.stack) not in tensors


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "deepseek_v2"])
def test_a_checkpoint_of_experts_runs(family: str, tmp_path: Path) -> None:
    model, _ = write_checkpoint(tmp_path, family)
    rsv_format.quantize(tmp_path, tmp_path / "a.rsv", bits=8)
    logits = rsv_mlx.load_model(tmp_path / "a.rsv")(mx.array(TOKENS))
    close(logits, rsv_mlx.load_model(tmp_path / "a.rsv", materialize="dense")(mx.array(TOKENS)), 1e-4)
    close(logits, model(mx.array(TOKENS)), 0.15)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_that_are_left_out_are_kept_in_stacks(family: str, tmp_path: Path) -> None:
    model, _ = write_checkpoint(tmp_path, family)
    pattern = "*.w3" if family == "mixtral" else "*.experts.*.up_proj"
    rsv_format.quantize(tmp_path, tmp_path / "a.rsv", bits=8, exclude=[pattern])
    loaded, report = rsv_mlx.load_model(tmp_path / "a.rsv", return_report=True)
    assert report.dense_nbytes == 0 and len(modules_of(loaded, rsv_mlx.QuantizedSwitchLinear)) == 4
    dense = modules_of(loaded, SwitchLinear)
    assert {path.rpartition(".")[2] for path in dense} == {"up_proj"} and len(dense) == 2
    for path, module in dense.items():
        assert same_bytes(module.weight, modules_of(model, SwitchLinear)[path].weight)


def test_experts_that_differ_are_layers_of_their_own(tmp_path: Path) -> None:
    """One has another shape: mlx-lm, which wants to stack them, cannot load such a checkpoint."""
    _, tensors = write_checkpoint(tmp_path, "olmoe")
    odd = "model.layers.1.mlp.experts.2.up_proj"
    tensors[f"{odd}.weight"] = tensors[f"{odd}.weight"][:-1]
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {k: mx.array(v) for k, v in tensors.items()})
    rsv_format.quantize(tmp_path, tmp_path / "a.rsv")
    with rsv_format.open(tmp_path / "a.rsv") as file:
        assert odd in file.layers and all(layer.stack == 1 for layer in file.layers.values())
