"""rsv_mlx: layers against the numpy reference, whole models loaded, refused and grafted."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rsv_format
from rsv_format import AttachmentData, LayerData, RsvError, TensorData, quantize_matrix
from rsv_format.dtypes import NUMPY_DTYPE

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
nn = pytest.importorskip("mlx.nn")

import rsv_mlx  # noqa: E402
from rsv_mlx.adopt import LoadReport, _Read, parts_of, slice_part, window  # noqa: E402
from rsv_mlx.codebook import Codebook  # noqa: E402
from rsv_mlx.transform import Transform  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what transformers says while it is imported is not ours
    mlx_lm = pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

RNG = np.random.default_rng(5)
CONFIG = {
    "model_type": "llama", "hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 80,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 32,
    "tie_word_embeddings": True, "torch_dtype": "float32", "eos_token_id": 0,
}  # fmt: skip
TRANSFORMS = {
    "none": {"rotation": "none"},
    "hartley": {"rotation": "hartley"},
    "hartley, scaled": {"rotation": "hartley", "importance": True},
    "channels only": {"rotation": "none", "importance": True},
    "haar": {"rotation": "haar"},
    "matrix": {"rotation": "haar", "persist_rotation": True, "importance": True},
}


def options(kind: str, in_features: int) -> dict[str, Any]:
    chosen = dict(TRANSFORMS[kind])
    if chosen.pop("importance", False):
        chosen["importance"] = np.linspace(0.1, 3, in_features)
    return chosen


def matrix(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32) / np.sqrt(np.float32(shape[-1]))


def written(path: Path, layers: list[LayerData], **kwargs: Any) -> Path:
    rsv_format.write(path, layers=layers, **kwargs)
    return path


def close(actual: Any, wanted: np.ndarray, tolerance: float = 2e-5) -> None:
    actual = np.array(actual.astype(mx.float32)) if isinstance(actual, mx.array) else actual
    assert actual.shape == wanted.shape
    np.testing.assert_allclose(actual, wanted, atol=tolerance * max(1e-9, float(np.abs(wanted).max())))


def same_bytes(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and np.array(a).tobytes() == np.array(b).tobytes()


class Box(nn.Module):
    """Modules by name."""

    def __init__(self, **modules: Any) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


# layers


@pytest.mark.parametrize("codebook", ["lloyd-max", "uniform"])
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("in_features", [1, 31, 96, 160])
def test_product_of_every_width(bits: int, codebook: str, in_features: int, tmp_path: Path) -> None:
    data = quantize_matrix(matrix(7, in_features), bits=bits, codebook=codebook, name="a")
    layer = rsv_mlx.QuantizedLinear.from_data(data)
    with rsv_format.open(written(tmp_path / "a.rsv", [data])) as file:
        for x in (matrix(2, 3, in_features), matrix(40, in_features)):  # few and many rows
            close(layer(mx.array(x)), file.layers["a"].matmul(x))
        close(layer.dequantize(), file.layers["a"].dequantize())


@pytest.mark.parametrize("codebook", ["lloyd-max", "uniform"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_products_that_are_made_piece_by_piece(bits: int, codebook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = quantize_matrix(matrix(150, 96), bits=bits, codebook=codebook)
    layer = rsv_mlx.QuantizedLinear.from_data(data)
    inputs = [mx.array(matrix(rows, 96)) for rows in (1, 3, 40)]
    whole = [np.array(layer(x)) for x in inputs]
    monkeypatch.setattr("rsv_mlx.codebook._CPU_CHUNK", 2**11)
    monkeypatch.setattr("rsv_mlx.codebook._GPU_CHUNK", 2**11)
    fresh = rsv_mlx.QuantizedLinear.from_data(data)
    fresh.codebook = Codebook(data.codebook, bits)
    slopes = np.array(layer.dequantize().sum(axis=0))
    for x, wanted in zip(inputs, whole, strict=True):
        close(fresh(x), wanted)
        gradient = mx.grad(lambda x: fresh(x).sum())
        for slope in (gradient(x), mx.compile(gradient)(x)):
            close(slope, np.broadcast_to(slopes, x.shape), 1e-4)
        if not fresh.codebook.native:  # MLX has no vmap of quantized_matmul
            close(mx.vmap(fresh)(x[None]), wanted[None], 1e-4)


@pytest.mark.parametrize("kind", TRANSFORMS)
@pytest.mark.parametrize("in_features", [1, 48, 64, 97])
def test_product_of_every_transform(kind: str, in_features: int, tmp_path: Path) -> None:
    bias = matrix(5, 4)[:, 0]
    data = quantize_matrix(matrix(5, in_features), name="a", bias=bias, bias_dtype="f32", **options(kind, in_features))
    layer = rsv_mlx.QuantizedLinear.from_data(data)
    x = matrix(4, in_features)
    with rsv_format.open(written(tmp_path / "a.rsv", [data])) as file:
        close(layer(mx.array(x)), file.layers["a"].matmul(x))
        close(layer.dequantize(), file.layers["a"].dequantize())
        close(layer.to_linear()(mx.array(x)), file.layers["a"].matmul(x))


@pytest.mark.parametrize(
    ("dim", "hadamard", "factor"),
    [(2**14, 2**14, None), (514, 2, "hartley"), (1031, 1, "hartley"), (12, 4, None), (40, 8, "hartley")],
    ids=["beyond Metal's kernel", "by FFT", "prime, by FFT", "identity factor", "Kronecker"],
)
def test_transform_and_inverse(dim: int, hadamard: int, factor: str | None) -> None:
    values = RNG.uniform(0.5, 2, dim).astype(np.float32)
    reference = rsv_format.Transform(dim, hadamard, None, values, factor)
    transform = Transform(reference)
    x = matrix(3, dim)
    close(transform(mx.array(x)), reference.apply(x))
    close(transform.inverse(mx.array(x)), reference.apply_inverse(x))


@pytest.mark.parametrize("codebook", ["lloyd-max", "uniform"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_dtypes_and_shapes_like_linear(dtype: Any, codebook: str) -> None:
    mx.random.seed(0)
    linear = nn.Linear(96, 10)
    layer = rsv_mlx.QuantizedLinear.from_linear(linear, bits=8, codebook=codebook)
    x = mx.random.normal((2, 3, 96))
    close(layer(x.astype(dtype)), np.array(linear(x)), 0.03)
    assert layer(x.astype(dtype)).dtype == dtype
    for shape in ((96,), (1, 96), (0, 96), (2, 0, 96)):
        assert layer(mx.zeros(shape, dtype)).shape == linear(mx.zeros(shape, dtype)).shape
    with pytest.raises(ValueError, match="input_dims"):
        layer(mx.zeros((2, 95)))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("rotation", ["hartley", "none"])
def test_large_inputs_do_not_overflow(dtype: Any, rotation: str) -> None:
    large = 6e4 if dtype == mx.float16 else 1e5
    weight = np.full((3, 1024), 1 / 4096, np.float32)
    linear = nn.Linear(1024, 3, bias=False)
    linear.weight = mx.array(weight)
    layer = rsv_mlx.QuantizedLinear.from_linear(linear, bits=8, rotation=rotation)
    close(layer(mx.full((2, 1024), large, dtype)), np.full((2, 3), large / 4), 0.02)


def test_from_linear_is_what_the_format_says() -> None:
    linear = nn.Linear(96, 10)
    layer = rsv_mlx.QuantizedLinear.from_linear(linear, bits=3, seed=7)
    data = quantize_matrix(np.array(linear.weight), bits=3, seed=7)
    assert np.array_equal(np.array(layer.codes), data.codes)
    assert np.array_equal(np.array(layer.scales), data.scales)
    assert same_bytes(layer.bias, linear.bias)
    assert "input_dims=96, output_dims=10, bias=True, bits=3" in repr(layer)


def test_from_affine_quantized_linear() -> None:
    affine = nn.QuantizedLinear(64, 8, bias=False, group_size=32, bits=8)
    x = mx.random.normal((2, 64))
    close(rsv_mlx.QuantizedLinear.from_linear(affine, bits=8)(x), np.array(affine(x)), 0.05)


def test_parameters_are_frozen_and_gradients_pass() -> None:
    layer = rsv_mlx.QuantizedLinear.from_linear(nn.Linear(48, 6), bits=4)
    assert [name[:6] for name in sorted(layer.parameters())] == ["bias", "codes_", "scales"]
    layer.unfreeze()
    assert not layer.trainable_parameters()
    for codebook in ("lloyd-max", "uniform"):
        layer = rsv_mlx.QuantizedLinear.from_linear(nn.Linear(48, 6), bits=4, codebook=codebook)
        gradient = mx.grad(lambda x, layer=layer: layer(x)[0].sum())(mx.ones((1, 48)))
        close(gradient, np.array(layer.dequantize().sum(axis=0, keepdims=True)), 1e-4)


@pytest.mark.parametrize("codebook", ["lloyd-max", "uniform"])
def test_products_under_vmap_and_compiled_gradients(codebook: str) -> None:
    layer = rsv_mlx.QuantizedLinear.from_linear(nn.Linear(48, 6), bits=4, codebook=codebook)
    x = mx.random.normal((3, 2, 48))
    if codebook == "lloyd-max":  # MLX has no vmap of quantized_matmul
        close(mx.vmap(layer)(x), np.array(layer(x)), 1e-4)
    gradient = mx.compile(mx.grad(lambda x: layer(x)[0].sum()))(x[0])
    close(gradient[0], np.array(layer.dequantize().sum(axis=0)), 1e-4)
    assert not gradient[1].any()


def test_haar_factor_that_does_not_match_its_witness() -> None:
    good = quantize_matrix(matrix(4, 8), rotation="haar").transform
    assert good is not None and good.stored is not None
    bad = rsv_format.Transform(8, 1, None, None, "haar", 0, good.stored + np.float32(1))
    with pytest.raises(RsvError) as e:
        Transform(bad)
    assert e.value.code == "haar_witness_mismatch"


def test_codebooks_are_shared_while_they_live() -> None:
    a = quantize_matrix(matrix(2, 8), bits=4).codebook
    assert Codebook.of(a, 4) is Codebook.of(a.copy(), 4)
    assert Codebook(np.array([-1.5, -0.5, 0.5, 1.5], np.float32), 2).native
    assert not Codebook(np.array([-1.5, -0.5, 0.5, 1.6], np.float32), 2).native
    assert not Codebook(np.array([0, 1], np.float32), 1).native


# siblings


def test_siblings_under_compile_and_grad(tmp_path: Path) -> None:
    model, _ = tiny_model(tmp_path / "m.rsv")
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.transform is attention.k_proj.transform is attention.v_proj.transform

    def both(x: Any) -> Any:
        return attention.q_proj(x).sum() + attention.k_proj(x).sum()

    x = mx.random.normal((3, 48))
    wanted = attention.q_proj.to_linear()(x).sum() + attention.k_proj.to_linear()(x).sum()
    for _ in range(2):
        close(mx.compile(both)(x), np.array(wanted), 1e-3)
        close(both(x), np.array(wanted), 1e-3)
        assert mx.grad(both)(x).shape == x.shape


def test_an_input_that_changes_in_place_between_siblings(tmp_path: Path) -> None:
    model, _ = tiny_model(tmp_path / "m.rsv")
    attention, x = model.model.layers[0].self_attn, mx.ones((2, 48))
    attention.q_proj(x)
    x += 1
    close(attention.k_proj(x), 2 * np.array(attention.k_proj(mx.ones((2, 48)))))


# whole models


def tokenizer_attachments() -> dict[str, AttachmentData]:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<s>": 0, **{f"w{i}": i for i in range(1, 32)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<s>", "unk_token": "w1"}
    return {
        "tokenizer.json": AttachmentData("application/json", tokenizer.to_str().encode()),
        "tokenizer_config.json": AttachmentData("application/json", json.dumps(own).encode()),
    }


def skeleton(**changes: Any) -> Any:
    from mlx_lm.models import llama

    return llama.Model(llama.ModelArgs.from_dict(CONFIG | changes))


def tiny_content(model: Any, *, kind: str = "hartley", dtype: Any = None, **quantizer: Any) -> dict[str, Any]:
    """What a converter would write: linear layers quantized, siblings with one transform, the rest kept."""
    from mlx.utils import tree_flatten

    layers, transforms = [], {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            weight = np.array(module.weight)
            group = name if "self_attn.o" in name or "down" in name else name.rpartition(".")[0]
            data = quantize_matrix(
                weight, name=name, transform=transforms.get(group),
                bias=np.array(module.bias) if "bias" in module else None,
                bias_dtype="f32" if "bias" in module else None, seed=zlib.crc32(group.encode()),
                **quantizer, **options(kind, weight.shape[1]),
            )  # fmt: skip
            layers.append(data)
            if data.transform is not None:
                transforms[group] = data.transform
    taken = {f"{layer.name}.{part}" for layer in layers for part in ("weight", "bias")}
    tensors = {
        name: TensorData("f32", np.array(array))
        for name, array in tree_flatten(model.parameters())
        if name not in taken
    }
    return {"layers": layers, "tensors": tensors}


def tiny_model(path: Path, *, load: dict[str, Any] | None = None, **content: Any) -> tuple[Any, dict[str, Any]]:
    made = tiny_content(skeleton(), **content)
    attachments = {"config.json": AttachmentData("application/json", json.dumps(CONFIG).encode())}
    rsv_format.write(path, **made, attachments=attachments)
    return rsv_mlx.load_model(path, **(load or {})), made


def fresh(made: dict[str, Any], model: Any) -> Any:
    """The model with layers straight from the quantizer."""
    from mlx.utils import tree_unflatten

    layers = [(data.name, rsv_mlx.QuantizedLinear.from_data(data)) for data in made["layers"]]
    model.update_modules(tree_unflatten(layers))
    model.update(tree_unflatten([(name, mx.array(t.array)) for name, t in made["tensors"].items()]))
    return model


TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6]]


@pytest.mark.parametrize("codebook", ["lloyd-max", "uniform"])
@pytest.mark.parametrize("kind", TRANSFORMS)
def test_loaded_logits_are_those_of_the_fresh_model(kind: str, codebook: str, tmp_path: Path) -> None:
    for bits in (4,) if kind != "hartley" else range(1, 9):
        loaded, made = tiny_model(tmp_path / "m.rsv", kind=kind, bits=bits, codebook=codebook)
        tokens = mx.array(TOKENS)
        assert same_bytes(loaded(tokens), fresh(made, skeleton())(tokens))


@pytest.mark.parametrize("how", [{"lazy": True}, {"zero_copy": "never"}, {"dtype": "keep"}, {"materialize": "dense"}])
def test_ways_to_load_agree(how: dict[str, Any], tmp_path: Path) -> None:
    plain, _ = tiny_model(tmp_path / "m.rsv")
    other = rsv_mlx.load_model(tmp_path / "m.rsv", **how)
    tokens = mx.array(TOKENS)
    if how.get("materialize") == "dense":
        assert isinstance(other.model.layers[0].mlp.up_proj, nn.Linear)
        close(other(tokens), np.array(plain(tokens)), 1e-4)
    else:
        assert same_bytes(other(tokens), plain(tokens))


def test_report(tmp_path: Path) -> None:
    _, made = tiny_model(tmp_path / "m.rsv", bits=4)
    size = (tmp_path / "m.rsv").stat().st_size
    _, report = rsv_mlx.load_model(tmp_path / "m.rsv", zero_copy="never", return_report=True)
    assert (report.nbytes, report.layers, report.tensors) == (size, 14, 6)
    packed = sum(x.codes.nbytes + x.scales.nbytes for x in made["layers"])
    kept = sum(x.array.nbytes for x in made["tensors"].values())
    assert report.copied_nbytes == packed + kept
    assert (report.adopted_nbytes, report.deferred_nbytes, report.dense_nbytes) == (0, 0, 0)
    assert report.obstacle and report.seconds.keys() >= {"open", "model", "tensors", "layers"}
    _, report = rsv_mlx.load_model(tmp_path / "m.rsv", zero_copy="never", lazy=True, return_report=True)
    assert (report.deferred_nbytes, report.copied_nbytes) == (packed, kept)
    _, report = rsv_mlx.load_model(tmp_path / "m.rsv", materialize="dense", return_report=True)
    assert report.dense_nbytes == sum(4 * x.scales.size * x.in_features for x in made["layers"])


def test_lazy_layers_are_read_when_they_are_used(tmp_path: Path) -> None:
    tiny_model(tmp_path / "m.rsv")
    model, report = rsv_mlx.load_model(tmp_path / "m.rsv", zero_copy="never", lazy=True, return_report=True)
    mlp, before = model.model.layers[0].mlp, report.copied_nbytes
    model.eval()
    assert report.copied_nbytes == before and isinstance(mlp.up_proj, rsv_mlx.QuantizedLinear)
    assert "input_dims=48, output_dims=80, bias=False" in repr(mlp.up_proj)
    mlp.up_proj(mx.ones((1, 48)))
    assert mlp.down_proj.scales.shape == (48,)
    assert [name[:6] for name in mlp.up_proj.parameters()] == ["codes_", "scales"]
    assert not mlp.up_proj.trainable_parameters()
    used = [array for layer in (mlp.up_proj, mlp.down_proj) for array in dict(layer).values()]
    assert report.copied_nbytes - before == sum(array.nbytes for array in used)
    with pytest.raises(AttributeError):
        _ = mlp.up_proj.bias
    rsv_mlx.load(tmp_path / "m.rsv", model=model)  # over layers of which most were never read


def test_file_is_unchanged_and_may_go_after_loading(tmp_path: Path) -> None:
    path = tmp_path / "m.rsv"
    for how in ({}, {"lazy": True}):
        model, _ = tiny_model(path, load=how)
        before = path.read_bytes()
        wanted = np.array(model(mx.array(TOKENS)))
        assert path.read_bytes() == before
        path.unlink()
        assert np.array_equal(np.array(model(mx.array(TOKENS))), wanted)


def test_generation_with_tokenizer_and_cache(tmp_path: Path) -> None:
    from mlx_lm.models.cache import make_prompt_cache

    attachments = {"config.json": AttachmentData("application/json", json.dumps(CONFIG).encode())}
    rsv_format.write(tmp_path / "m.rsv", **tiny_content(skeleton()), attachments=attachments | tokenizer_attachments())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        model, tokenizer = rsv_mlx.load(tmp_path / "m.rsv")
    assert tokenizer.encode("w3 w4") == [3, 4]
    text = mlx_lm.generate(model, tokenizer, "w3 w4 w5", max_tokens=6)
    pieces = [r.text for r in mlx_lm.stream_generate(model, tokenizer, "w3 w4 w5", max_tokens=6)]
    assert "".join(pieces) == text
    cache = make_prompt_cache(model)
    whole = model(mx.array(TOKENS))
    parts = [model(mx.array([TOKENS[0][:5]]), cache=cache), model(mx.array([TOKENS[0][5:]]), cache=cache)]
    close(mx.concatenate(parts, axis=1), np.array(whole), 1e-4)


def test_kept_dtypes(tmp_path: Path) -> None:
    made = tiny_content(skeleton())
    name = "model.embed_tokens.weight"
    halves = made["tensors"][name].array.astype(np.float16)
    upper = (made["tensors"]["model.norm.weight"].array.view(np.uint32) >> 16).astype(np.uint16)
    made["tensors"] |= {name: TensorData("f16", halves), "model.norm.weight": TensorData("bf16", upper)}
    rsv_format.write(tmp_path / "m.rsv", **made)
    for how in ({}, {"lazy": True}):
        kept = rsv_mlx.load(tmp_path / "m.rsv", model=skeleton(), dtype="keep", **how)
        assert kept.model.embed_tokens.weight.dtype == mx.float16
        assert kept.model.norm.weight.dtype == mx.bfloat16
        assert np.array_equal(np.array(kept.model.norm.weight.astype(mx.float32)), np.ones(48, np.float32))
        cast = rsv_mlx.load(tmp_path / "m.rsv", model=skeleton(), dtype=mx.float16, **how)
        assert cast.model.norm.weight.dtype == mx.float16
        assert cast(mx.array(TOKENS)).dtype == mx.float16
    with pytest.raises(RsvError, match="bad_argument"):
        rsv_mlx.load(tmp_path / "m.rsv", model=skeleton(), dtype="f16")


# grafting and refusing


def test_graft_onto_any_module(tmp_path: Path) -> None:
    def make() -> Any:
        inner = Box(a=nn.Linear(20, 6), b=nn.Linear(20, 4, bias=False))
        return Box(inner=inner, norm=nn.LayerNorm(6), rest=[nn.Linear(6, 2)])

    box, other = make(), make()
    rsv_format.write(tmp_path / "m.rsv", **tiny_content(box))
    assert rsv_mlx.load(tmp_path / "m.rsv", model=other) is other
    for name, module in other.named_modules():
        if name in {"inner.a", "inner.b", "rest.0"}:
            assert isinstance(module, rsv_mlx.QuantizedLinear)
    assert same_bytes(other.norm.weight, box.norm.weight)
    _, report = rsv_mlx.load(tmp_path / "m.rsv", model=other, return_report=True)  # over itself
    assert report.layers == 3


def test_layer_of_a_module_that_has_no_packed_form(tmp_path: Path) -> None:
    rsv_format.write(tmp_path / "m.rsv", layers=[quantize_matrix(matrix(3, 8, 12), name="mix", bits=8)])
    box = Box(mix=nn.Bilinear(12, 8, 3, bias=False))
    _, report = rsv_mlx.load(tmp_path / "m.rsv", model=box, return_report=True)
    with rsv_format.open(tmp_path / "m.rsv") as file:
        close(box.mix.weight, file.layers["mix"].dequantize())
    assert report.dense_nbytes == box.mix.weight.nbytes


def test_what_a_layer_brings_along_and_the_module_lacks(tmp_path: Path) -> None:
    """Without `strict`, a bias that is not in the model stays out; what a packed layer has is never set beside it."""
    mix = quantize_matrix(matrix(3, 8, 12), name="mix", bits=8, bias=matrix(3, 8).reshape(-1), bias_dtype="f32")
    path = written(tmp_path / "mix.rsv", [mix])
    box = Box(mix=nn.Bilinear(12, 8, 3, bias=False))
    with pytest.raises(RsvError) as e:
        rsv_mlx.graft(box, path)
    assert e.value.code == "unexpected_layer"
    rsv_mlx.graft(box, path, strict=False)
    assert set(box.mix.parameters()) == {"weight"}

    data = quantize_matrix(matrix(6, 64), name="a")
    extra = {f"a.{name}": TensorData("f32", np.ones((6, 2), np.float32)) for name in ("scales", "biases")}
    path = written(tmp_path / "a.rsv", [data], tensors=extra)
    box = Box(a=nn.QuantizedLinear(64, 6, bias=False, group_size=32))
    with pytest.raises(RsvError) as e:
        rsv_mlx.graft(box, path)
    assert e.value.code == "unexpected_layer" and "a.scales" in e.value.detail
    rsv_mlx.graft(box, path, strict=False)
    assert box.a.scales.shape == (6,) and "biases" not in box.a and box.a(mx.ones((1, 64))).shape == (1, 6)


class Renaming(nn.Module):
    """Its checkpoint calls layers otherwise, has one too many, and one that is stored transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(12, 8)
        self.t = nn.Linear(8, 12, bias=False)

    def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
        return {
            "a.weight": weights["old.a.weight"],
            "a.bias": weights["old.a.bias"],
            "t.weight": weights["old.t.weight"].T,
        }


def test_sanitize_renames_drops_and_converts(tmp_path: Path) -> None:
    bias = matrix(8, 2)[:, 0]
    layers = [
        quantize_matrix(matrix(8, 12), name="old.a", bias=bias, bias_dtype="f32"),
        quantize_matrix(matrix(8, 12), name="old.t"),
        quantize_matrix(matrix(8, 12), name="old.extra"),
    ]
    rsv_format.write(tmp_path / "m.rsv", layers=layers)
    model = rsv_mlx.load(tmp_path / "m.rsv", model=Renaming())
    assert isinstance(model.a, rsv_mlx.QuantizedLinear)
    with rsv_format.open(tmp_path / "m.rsv") as file:
        close(model.a.dequantize(), file.layers["old.a"].dequantize())
        close(model.a.bias, bias)
        close(model.t.weight, file.layers["old.t"].dequantize().T)


def test_tied_head_is_dropped(tmp_path: Path) -> None:
    made = tiny_content(skeleton())
    made["layers"].append(quantize_matrix(matrix(32, 48), name="lm_head"))
    made["tensors"]["model.layers.0.self_attn.rotary_emb.inv_freq"] = TensorData("f32", matrix(1, 6))
    rsv_format.write(tmp_path / "m.rsv", **made)
    model, report = rsv_mlx.load(tmp_path / "m.rsv", model=skeleton(), return_report=True)
    assert report.layers == 14
    assert model(mx.array(TOKENS)).shape == (1, 8, 32)


def refused(path: Path, code: str, name: str, **how: Any) -> None:
    with pytest.raises(RsvError) as e:
        rsv_mlx.load(path, **how)
    assert e.value.code == code, str(e.value)
    assert name in str(e.value)


def test_refusals_name_what_is_wrong(tmp_path: Path) -> None:
    made, path = tiny_content(skeleton()), tmp_path / "m.rsv"
    up = "model.layers.1.mlp.up_proj"
    rest = [x for x in made["layers"] if x.name != up]
    rsv_format.write(path, layers=rest, tensors=made["tensors"])
    refused(path, "missing_layer", up, model=skeleton())
    assert isinstance(rsv_mlx.load(path, model=skeleton(), strict=False).model.layers[1].mlp.up_proj, nn.Linear)
    rsv_format.write(path, layers=made["layers"])
    refused(path, "missing_layer", "model.norm.weight", model=skeleton())
    rsv_format.write(path, layers=[*made["layers"], quantize_matrix(matrix(2, 4), name="odd")], tensors=made["tensors"])
    refused(path, "unexpected_layer", "odd", model=skeleton())
    rsv_mlx.load(path, model=skeleton(), strict=False)
    rsv_format.write(path, layers=made["layers"], tensors=made["tensors"] | {"odd": TensorData("f32", matrix(2, 2))})
    refused(path, "unexpected_layer", "odd", model=skeleton())
    rsv_format.write(path, layers=[*rest, quantize_matrix(matrix(80, 47), name=up)], tensors=made["tensors"])
    refused(path, "shape_mismatch", up, model=skeleton())
    refused(path, "shape_mismatch", up, model=skeleton(), strict=False)
    wrong = made["tensors"] | {"model.norm.weight": TensorData("f32", np.ones(47, np.float32))}
    rsv_format.write(path, layers=made["layers"], tensors=wrong)
    refused(path, "shape_mismatch", "model.norm.weight", model=skeleton())


def test_biases_must_match(tmp_path: Path) -> None:
    path, bias = tmp_path / "m.rsv", np.ones(6, np.float32)
    rsv_format.write(path, layers=[quantize_matrix(matrix(6, 20), name="a")])
    refused(path, "missing_layer", "a.bias", model=Box(a=nn.Linear(20, 6)))
    rsv_format.write(path, layers=[quantize_matrix(matrix(6, 20), name="a", bias=bias, bias_dtype="f32")])
    refused(path, "unexpected_layer", "a.bias", model=Box(a=nn.Linear(20, 6, bias=False)))


def test_refused_attachments_and_arguments(tmp_path: Path) -> None:
    made, path = tiny_content(skeleton()), tmp_path / "m.rsv"
    rsv_format.write(path, **made)
    refused(path, "missing_attachment", "config.json")

    def attached(config: str, **more: Any) -> None:
        files = {"config.json": AttachmentData("application/json", config.encode()), **more}
        rsv_format.write(path, **made, attachments=files)

    attached(json.dumps(CONFIG))
    refused(path, "missing_attachment", "tokenizer.json")
    with_tokenizer = {"tokenizer.json": AttachmentData("application/json", b"{}")}
    for config in ("{", "[]", "{}", '{"model_type": "no such"}', '{"model_type": "llama"}'):
        attached(config, **with_tokenizer)
        refused(path, "unsupported_model", "config.json")
    attached(json.dumps(CONFIG | {"model_file": "evil.py"}), **with_tokenizer)
    refused(path, "unsupported_model", "code")
    refused(path, "bad_argument", "zero_copy", model=skeleton(), zero_copy="maybe")
    refused(path, "bad_argument", "materialize", model=skeleton(), materialize="both")


# adoption


def test_windows_and_slices(tmp_path: Path) -> None:
    """What adoption needs, on any machine: whole pages inside the file, parts at their places in them."""
    layers = [
        quantize_matrix(matrix(33, 97), name=f"l{i}", bias=np.arange(33, dtype=np.uint16), bias_dtype="bf16")
        for i in range(5)
    ] + [quantize_matrix(matrix(256, 512), name="large")]
    tensors = {"odd": TensorData("u8", np.arange(5, dtype=np.uint8)), "empty": TensorData("f32", np.zeros((0, 2), "f"))}
    rsv_format.write(tmp_path / "m.rsv", layers=layers, tensors=tensors)
    with rsv_format.open(tmp_path / "m.rsv") as file:
        assert np.frombuffer(file.buffer, np.uint8).ctypes.data % mmap.PAGESIZE == 0
        for item in (*file.layers.values(), *file.tensors.values()):
            parts = parts_of(item)
            start, end = window(parts)
            assert start % 16384 == end % 16384 == 0 <= start < end <= file.nbytes
            base = mx.array(np.frombuffer(file.buffer, np.uint32, (end - start) // 4, start))
            for part in parts:
                wanted = file.view(*part)
                got = slice_part(base, start, part)
                bits = {2: mx.uint16, 4: mx.uint32}.get(got.dtype.size)
                raw = got if bits is None else got.view(bits)
                assert got.shape == wanted.shape and np.array(raw).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("together", [0, 300, 2**24])
@pytest.mark.parametrize("source", ["path", "bytes", "unmapped"])
def test_what_is_read_is_what_the_file_holds(source: str, together: int, tmp_path: Path) -> None:
    """Every dtype and odd size, alone and with neighbours, by descriptor and from memory."""
    layers = [quantize_matrix(matrix(rows, 70), name=f"l{rows}") for rows in (1, 3, 16, 257)]
    tensors = {
        f"{dtype}{size}": TensorData(dtype, np.ones((size, 3), NUMPY_DTYPE[dtype]))
        for dtype in NUMPY_DTYPE
        for size in (0, 1, 21)
    }
    rsv_format.write(tmp_path / "m.rsv", layers=layers, tensors=tensors)
    opened: Any = (tmp_path / "m.rsv").read_bytes() if source == "bytes" else tmp_path / "m.rsv"
    with rsv_format.open(opened, mmap=source != "unmapped") as file:
        loader = _Read(file, LoadReport(), together)
        for item in (*file.tensors.values(), *file.layers.values(), file.layers["l3"]):
            for part, got in zip(parts_of(item), loader.load(parts_of(item)).arrays, strict=True):
                wanted = file.view(*part)
                assert got.shape == wanted.shape
                if part[1] == "f64":
                    assert np.array_equal(np.array(got), wanted)  # MLX has it as float32
                else:
                    assert got.nbytes == wanted.nbytes and bytes(memoryview(got.view(mx.uint8))) == wanted.tobytes()


def test_a_file_is_read_ahead_once_unless_it_is_loaded_lazily(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model(tmp_path / "m.rsv")
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(rsv_mlx.stream, "_AHEAD_STEP", 4096)
    monkeypatch.setattr(rsv_format.File, "read_ahead", lambda _, *what: asked.append(what))
    rsv_mlx.load_model(tmp_path / "m.rsv", lazy=True)
    assert not asked
    rsv_mlx.load_model(tmp_path / "m.rsv")
    for _ in range(100):  # by a thread
        if len(asked) * 4096 >= (tmp_path / "m.rsv").stat().st_size:
            break
        time.sleep(0.05)
    assert asked == [(i, 4096) for i in range(0, (tmp_path / "m.rsv").stat().st_size, 4096)]


def test_file_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.rsv"
    rsv_format.write(path, layers=[quantize_matrix(matrix(64, 512), name="l")])
    with rsv_format.open(path) as file:
        os.truncate(path, 16384)
        with pytest.raises(RsvError) as e:
            _Read(file, LoadReport()).load(parts_of(file.layers["l"]))
        assert e.value.code == "io_error"


@pytest.mark.skipif(rsv_mlx.adoption_obstacle() is None, reason="adoption works here")
def test_required_adoption_is_refused_where_it_cannot_work(tmp_path: Path) -> None:
    rsv_format.write(tmp_path / "m.rsv", **tiny_content(skeleton()))
    refused(tmp_path / "m.rsv", "bad_argument", "zero_copy", model=skeleton(), zero_copy="require")


@pytest.mark.skipif(not mx.metal.is_available(), reason="adoption of mapped memory needs Metal")
def test_adopted_weights_run_and_leave_the_file_alone(tmp_path: Path) -> None:
    plain, _ = tiny_model(tmp_path / "m.rsv", load={"zero_copy": "never"})
    before = (tmp_path / "m.rsv").read_bytes()
    model, report = rsv_mlx.load_model(tmp_path / "m.rsv", zero_copy="require", return_report=True)
    assert report.copied_nbytes == 0 and report.adopted_nbytes > 0
    for _ in range(3):
        assert same_bytes(model(mx.array(TOKENS)), plain(mx.array(TOKENS)))
    assert (tmp_path / "m.rsv").read_bytes() == before


def test_front_door() -> None:
    assert len(rsv_mlx.__all__) == len(set(rsv_mlx.__all__))
    assert set(rsv_mlx.__all__) == {
        "__version__", "LoadReport", "ModelCalibration", "QuantizedEmbedding", "QuantizedLinear",
        "QuantizedSwitchLinear", "adoption_obstacle", "evaluate", "graft", "load", "load_model", "load_tokenizer",
        "quantize_model", "save", "shard", "text_calibration",
    }  # fmt: skip


def test_imports() -> None:
    """mlx-lm, which takes seconds, comes with the first model; without MLX there is a plain message."""
    lean = "import sys, rsv_mlx; assert not {'mlx_lm', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", lean], check=True)
    bare = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['mlx'] = None; import rsv_mlx"], capture_output=True, text=True
    )
    assert "rsv_mlx needs MLX: pip install" in bare.stderr
