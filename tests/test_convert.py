"""A whole model: which layers are quantized, what they share, what is kept, and the same bytes each time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strategies import make_layer, make_transform, small_file

import rsv_format
from rsv_format import RsvError, Source, SourceTensor, quantize, quantize_layers
from rsv_format.codebook import codebook
from rsv_format.dtypes import to_bfloat16, to_float32
from rsv_format.sources.base import dense_tensor

BLOCK = "model.layers.0"
Q, K, V, OUT = (f"{BLOCK}.self_attn.{part}_proj" for part in "qkvo")
UP, GATE, DOWN = (f"{BLOCK}.mlp.{part}_proj" for part in ("up", "gate", "down"))
EXPERTS = f"{BLOCK}.mlp.switch_mlp.up_proj"
LINEAR = [Q, K, V, OUT, UP, GATE, DOWN, EXPERTS]


def tensor(name: str, array: np.ndarray, dtype: str = "f32") -> SourceTensor:
    return dense_tensor(name, dtype, array.shape, lambda: array)


def model(*, order: int = 1, config: dict[str, Any] | None = None, **changes: np.ndarray | None) -> Source:
    """A block of a made-up architecture, its tensors in this order or the opposite."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    arrays: dict[str, np.ndarray | None] = {
        f"{Q}.weight": normal(8, 24), f"{K}.weight": normal(4, 24), f"{V}.weight": normal(4, 24),
        f"{OUT}.weight": normal(24, 8),
        f"{UP}.weight": normal(40, 24), f"{GATE}.weight": normal(40, 24), f"{DOWN}.weight": normal(24, 40),
        f"{EXPERTS}.weight": normal(3, 5, 24), f"{Q}.bias": normal(8), f"{EXPERTS}.bias": normal(3, 5),
        "model.embed_tokens.weight": normal(11, 24), "lm_head.weight": normal(11, 24), "model.norm.weight": normal(24),
        f"{BLOCK}.input_layernorm.weight": np.exp(normal(24)),
        f"{BLOCK}.post_attention_layernorm.weight": normal(24) * 0 + 1,
    }  # fmt: skip
    arrays |= {name.replace("/", "."): array for name, array in changes.items()}
    tensors = {name: tensor(name, array) for name, array in list(arrays.items())[::order] if array is not None}
    half = normal(5).astype(np.float16)
    tensors["model.half"] = tensor("model.half", half, "f16")
    tensors["model.brain"] = tensor("model.brain", to_bfloat16(normal(4)), "bf16")
    return Source("test", "/somewhere/model.x", tensors, config, {"config.json": ("application/json", b"{}\n")})


def quantized(path: Path, source: Source | None = None, **arguments: Any) -> rsv_format.File:
    arguments = {"importance": "none", "embedding_bits": "keep"} | arguments  # tables: tests/test_budget.py
    report = quantize(source or model(), path, **arguments)
    assert report.path == str(path) and report.summary.nbytes == path.stat().st_size and report.seconds > 0
    assert rsv_format.verify(path) == []
    file = rsv_format.open(path)
    assert report.layers == len(file.layers)
    return file


def weight(source: Source, name: str) -> np.ndarray:
    return source.tensors[f"{name}.weight"].float32()


@pytest.mark.parametrize("rotation", ["hartley", "haar", "none"])
@pytest.mark.parametrize("kind", ["lloyd-max", "uniform"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_all_of_a_model(tmp_path: Path, rotation: str, kind: str, bits: int) -> None:
    source = model()
    file = quantized(tmp_path / "a.rsv", source, bits=bits, codebook=kind, rotation=rotation)
    assert sorted(file.layers) == sorted(LINEAR)
    for name, layer in file.layers.items():
        w = weight(source, name)
        assert layer.bits == bits and np.array_equal(layer.codebook, codebook(kind, bits))
        assert layer.dequantize().shape == w.shape
        error = np.mean((layer.dequantize() - w) ** 2) / np.mean(w**2)
        assert error < {2: 0.2, 4: 0.025, 8: 0.001}[bits]
    assert file.layers[Q].bias_dtype == "f32" and file.layers[K].bias_dtype is None
    assert np.array_equal(np.asarray(file.layers[Q].bias), source.tensors[f"{Q}.bias"].read())
    assert np.array_equal(np.asarray(file.layers[EXPERTS].bias).reshape(3, 5), source.tensors[f"{EXPERTS}.bias"].read())
    taken = {f"{name}.{part}" for name in LINEAR for part in ("weight", "bias")}
    assert set(file.tensors) == set(source.tensors) - taken
    for name, kept in file.tensors.items():
        assert (
            kept.dtype == source.tensors[name].dtype and kept.array.tobytes() == source.tensors[name].read().tobytes()
        )
    assert file.attachments["config.json"].text() == "{}\n"
    assert file.metadata["quantizer.codebook"] == kind and file.metadata["quantizer.rotation"] == rotation
    assert file.metadata["source"] == "model.x" and file.metadata["source.kind"] == "test"
    assert len(file.header.codebooks) == 1


def test_layers_with_one_input_share_a_transform(tmp_path: Path) -> None:
    file = quantized(tmp_path / "a.rsv")
    ids = {name: file.layers[name].transform_id for name in LINEAR}
    assert ids[Q] == ids[K] == ids[V] and ids[UP] == ids[GATE]
    assert len({ids[name] for name in (Q, OUT, UP, DOWN, EXPERTS)}) == 5
    x = np.random.default_rng(1).standard_normal(24).astype(np.float32)
    first, second = file.layers[Q].transform, file.layers[UP].transform
    assert first is not None and second is not None and not np.allclose(first.apply(x), second.apply(x))  # other signs


def test_layers_of_other_widths_do_not_share(tmp_path: Path) -> None:
    file = quantized(tmp_path / "a.rsv", model(**{f"{K}.weight": np.ones((4, 16), np.float32)}))
    ids = [file.layers[name].transform_id for name in (Q, K, V)]
    assert ids[0] == ids[2] != ids[1] and file.layers[K].in_features == 16


@pytest.mark.parametrize("rotation", ["hartley", "haar", "none"])
@pytest.mark.parametrize("persist", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_it_is_canonical(tmp_path: Path, rotation: str, persist: bool, weighted: bool) -> None:
    """RSV-812 to RSV-816: independent of order and threads, and what `save` writes."""
    h: str | Mapping[str, np.ndarray] = {Q: np.arange(1.0, 25), DOWN: np.arange(40.0)} if weighted else "none"
    arguments: dict[str, Any] = {"rotation": rotation, "persist_rotation": persist, "importance": h}
    quantized(tmp_path / "a", threads=1, **arguments).close()
    quantized(tmp_path / "b", model(order=-1), threads=3, **arguments).close()
    first = (tmp_path / "a").read_bytes()
    assert (tmp_path / "b").read_bytes() == first
    with rsv_format.open(first) as file:
        rsv_format.save(file, tmp_path / "c")
        kinds = {t.factor and t.factor.kind for t in file.header.transforms}
        assert rotation != "haar" or kinds == {"matrix" if persist else "haar"}
    assert (tmp_path / "c").read_bytes() == first
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]


def test_tied_layers_share_tables(tmp_path: Path) -> None:
    """RSV-814: two layers of equal weights, each a group of its own, have equal transforms without signs."""
    same = np.random.default_rng(1).standard_normal((24, 8)).astype(np.float32)
    other = "model.layers.1.self_attn.o_proj"
    source = model(**{f"{OUT}.weight": same, f"{other}.weight": same})
    h = np.arange(1.0, 9)
    file = quantized(tmp_path / "a", source, rotation="none", importance={OUT: h, other: h})
    assert file.layers[OUT].transform_id == file.layers[other].transform_id is not None
    assert len(file.header.transforms) == 1


def test_seeds(tmp_path: Path) -> None:
    for rotation in ("hartley", "haar"):
        files = []
        for i, seed in enumerate((1, 1, 2, 2**53 - 1)):
            quantized(tmp_path / str(i), rotation=rotation, seed=seed).close()
            files.append((tmp_path / str(i)).read_bytes())
        assert files[0] == files[1] and len(set(files)) == 3


def test_layers_without_a_file_are_those_of_the_file(tmp_path: Path) -> None:
    h = {name: np.arange(1.0, 25) for name in (Q, UP)}
    file = quantized(tmp_path / "a", importance=h, bits=3)
    layers = list(quantize_layers(model(), importance=h, bits=3, embedding_bits="keep"))
    assert sorted(layer.name for layer in layers) == sorted(LINEAR)
    for data in layers:
        layer = file.layers[data.name]
        assert np.array_equal(layer.codes, data.codes) and np.array_equal(layer.scales, data.scales)
    by_name = {layer.name: layer for layer in layers}
    assert by_name[Q].transform is by_name[K].transform is not None


# --- choice ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "include, exclude, chosen",
    [
        ([], [], LINEAR),
        (["*q_proj"], [], [Q]),
        (["*.mlp.*"], ["*switch_mlp*"], [UP, GATE, DOWN]),
        ([], ["*proj"], None),
        (["nothing"], [], None),
        ([Q, "*o_proj"], [Q], [OUT]),
        (["*Q_PROJ"], [], None),
        ([], ["*.self_attn.[!q]_proj", "*mlp*"], [Q]),
    ],
)
def test_include_and_exclude(tmp_path: Path, include: list[str], exclude: list[str], chosen: list[str] | None) -> None:
    if chosen is None:
        with pytest.raises(RsvError) as e:
            quantized(tmp_path / "a", include=include, exclude=exclude)
        assert e.value.code == "bad_argument" and os.listdir(tmp_path) == []
        return
    file = quantized(tmp_path / "a", include=include, exclude=exclude)
    assert sorted(file.layers) == sorted(chosen)
    left = set(LINEAR) - set(chosen)
    assert {f"{name}.weight" for name in left} <= set(file.tensors)
    assert (f"{Q}.bias" in file.tensors) == (Q in left)
    source = model()
    for name in left:
        assert np.array_equal(file.tensors[f"{name}.weight"].array, weight(source, name))


def test_a_model_without_linear_layers(tmp_path: Path) -> None:
    source = Source("test", "x", {"norm.weight": tensor("norm.weight", np.ones(3, np.float32))})
    with pytest.raises(RsvError) as e:
        quantize(source, tmp_path / "a")
    assert e.value.code == "bad_argument" and os.listdir(tmp_path) == []


# --- importance -----------------------------------------------------------------------------------------------------


def weighted_error(file: rsv_format.File, source: Source, name: str, h: np.ndarray) -> float:
    return float((h * (file.layers[name].dequantize() - weight(source, name)) ** 2).sum())


def test_a_mapping_of_importances(tmp_path: Path) -> None:
    h = np.exp(np.random.default_rng(0).normal(0, 2, 24))
    source = model()
    plain = quantized(tmp_path / "a")
    better = quantized(tmp_path / "b", importance={Q: h, "not.there": np.ones(3)})
    for name in (Q, K, V):  # the whole group, as its input is one
        assert weighted_error(better, source, name, h) < weighted_error(plain, source, name, h)
        t = better.layers[name].transform
        assert t is not None and t.diagonal == "values"
    down = better.layers[DOWN].transform
    assert down is not None and down.diagonal == "signs"
    assert np.array_equal(better.layers[DOWN].dequantize(), plain.layers[DOWN].dequantize())
    assert quantize(source, tmp_path / "c", importance={Q: h}).weighted_layers == 3


def test_norm_gains_are_an_importance(tmp_path: Path) -> None:
    source = model(config={"model_type": "llama"})
    gain = source.tensors[f"{BLOCK}.input_layernorm.weight"].float32()
    gains = quantized(tmp_path / "a", source, importance="gains")
    given = quantized(tmp_path / "b", source, importance={Q: gain**2, UP: np.ones(24)})
    for name in (Q, K, V, UP, GATE):
        t, u = gains.layers[name].transform, given.layers[name].transform
        assert (
            t is not None and t.d is not None and u is not None and u.d is not None and np.allclose(t.d, u.d, rtol=1e-5)
        )
    unknown = quantized(tmp_path / "c", model(config={"model_type": "other"}), importance="auto")
    assert all(t.diagonal is not None and t.diagonal.kind == "signs" for t in unknown.header.transforms)


@pytest.mark.parametrize(
    "importance",
    [
        {Q: np.ones(23)},
        {Q: np.full(24, np.nan)},
        {Q: -np.ones(24)},
        {"x": np.ones(24)},
        {},
        {EXPERTS: np.ones((3, 25))},
    ],
)
def test_importances_that_do_not_fit(tmp_path: Path, importance: dict[str, np.ndarray]) -> None:
    with pytest.raises(RsvError) as e:
        quantize(model(), tmp_path / "a", importance=importance)
    assert e.value.code == "importance_mismatch" and os.listdir(tmp_path) == []


def test_experts_may_have_their_own(tmp_path: Path) -> None:
    h = np.random.default_rng(0).uniform(1, 9, (3, 24))
    a = quantized(tmp_path / "a", importance={EXPERTS: h}).layers[EXPERTS]
    b = quantized(tmp_path / "b", importance={EXPERTS: h.mean(axis=0)}).layers[EXPERTS]
    assert np.array_equal(a.dequantize(), b.dequantize())


# --- experts that a checkpoint keeps apart ---------------------------------------------------------------------------

MIXTURE = f"{BLOCK}.block_sparse_moe"
STACKS = {f"{MIXTURE}.switch_mlp.{part}": kept for part, kept in (("gate_proj", "w1"), ("up_proj", "w3"))}
STACKS[f"{MIXTURE}.switch_mlp.down_proj"] = "w2"
STACK_GATE, STACK_UP, STACK_DOWN = STACKS


def mixture(**changes: np.ndarray | None) -> Source:
    """The block again, with twelve experts of a Mixtral."""
    normal = np.random.default_rng(3).standard_normal
    experts: dict[str, np.ndarray | None] = {
        f"{MIXTURE}.experts.{i}.{part}.weight": normal((24, 32) if part == "w2" else (32, 24)).astype(np.float32)
        for i in range(12)
        for part in ("w1", "w2", "w3")
    }
    return model(config={"model_type": "mixtral"}, **experts | changes)


def test_experts_are_one_layer(tmp_path: Path) -> None:
    source = mixture()
    file = quantized(tmp_path / "a.rsv", source)
    assert sorted(file.layers) == sorted([*LINEAR, *STACKS])
    assert file.layers[STACK_UP].transform_id == file.layers[STACK_GATE].transform_id
    for name, part in STACKS.items():
        layer = file.layers[name]
        assert layer.stack == 12
        for i, found in enumerate(layer.dequantize()):
            alone = rsv_format.quantize_matrix(
                weight(source, f"{MIXTURE}.experts.{i}.{part}"), transform=layer.transform
            )
            rows = slice(i * layer.out_features, (i + 1) * layer.out_features)
            assert np.array_equal(layer.codes[rows], alone.codes)
            assert np.array_equal(layer.scales[rows], alone.scales)
            assert np.mean((found - weight(source, f"{MIXTURE}.experts.{i}.{part}")) ** 2) < 0.02


def test_experts_that_cannot_be_stacked_are_layers(tmp_path: Path) -> None:
    missing = f"{MIXTURE}.experts.5.w2"
    file = quantized(tmp_path / "a.rsv", mixture(**{f"{missing}.weight": None}))
    apart = {f"{MIXTURE}.experts.{i}.{part}" for i in range(12) for part in ("w1", "w2", "w3")} - {missing}
    assert set(file.layers) == {*LINEAR, *apart}


@pytest.mark.parametrize(
    "include, exclude, chosen",
    [
        (["*.experts.*"], [], list(STACKS)),
        (["*switch_mlp.*"], ["*.mlp.*"], list(STACKS)),
        (["*.w3"], [], [STACK_UP]),
        (["*.experts.7.w1", "*switch_mlp.down_proj"], [], [STACK_GATE, STACK_DOWN]),
        (["*block_sparse_moe*"], ["*.experts.0.w[12]"], [STACK_UP]),
        ([], ["*.experts.*"], LINEAR),
    ],
)
def test_a_stack_goes_by_the_names_of_its_experts_too(
    tmp_path: Path, include: list[str], exclude: list[str], chosen: list[str]
) -> None:
    file = quantized(tmp_path / "a", mixture(), include=include, exclude=exclude)
    assert sorted(file.layers) == sorted(chosen)
    for name in set(STACKS) - set(chosen):
        assert file.tensors[f"{name}.weight"].shape[0] == 12
    assert not any(".experts." in name for name in file.tensors)


def test_importance_of_a_stack(tmp_path: Path) -> None:
    """By the norm, by its own name, or as the mean of what is known of its experts."""
    h = np.random.default_rng(0).uniform(1, 9, (12, 24))
    known = {f"{MIXTURE}.experts.{i}.w1": h[i] for i in range(12) if i != 4}
    given = {STACK_GATE: np.delete(h, 4, axis=0).mean(axis=0)}
    source = mixture(**{f"{BLOCK}.post_attention_layernorm.weight": np.sqrt(h[0]).astype(np.float32)})
    files = [
        quantized(tmp_path / f"{i}", source, importance=importance)
        for i, importance in enumerate((known, given, {STACK_GATE: h}, known | given, {STACK_UP: h[0]}, "auto"))
    ]
    d = [np.asarray(file.layers[STACK_UP].transform.d) for file in files]  # type: ignore[union-attr]
    assert np.allclose(d[0], d[1], rtol=1e-6) and np.array_equal(d[1], d[3]) and not np.allclose(d[1], d[2])
    assert np.allclose(d[4], d[5], rtol=1e-5)
    for wrong in (np.ones(23), -np.ones(24)):
        with pytest.raises(RsvError, match="experts.11.w1") as e:
            quantize(source, tmp_path / "a", importance=known | {f"{MIXTURE}.experts.11.w1": wrong})
        assert e.value.code == "importance_mismatch"


def test_a_budget_for_stacks(tmp_path: Path) -> None:
    file = quantized(tmp_path / "a", mixture(), bits_per_weight=8.5, importance="gains")
    assert rsv_format.summarize(tmp_path / "a").bits_per_weight <= 8.5
    assert len({file.layers[name].bits for name in [*LINEAR, *STACKS]}) == 2


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [{"bits": 0}, {"bits": 9}, {"codebook": "x"}, {"rotation": "x"}, {"seed": -1}, {"seed": 2**53}]
)
def test_arguments_are_checked_before_any_work(tmp_path: Path, arguments: dict[str, Any]) -> None:
    def never() -> np.ndarray:
        raise AssertionError

    source = model()
    source.tensors = {
        name: SourceTensor(name, x.dtype, x.shape, never, never) for name, x in source.tensors.items()
    }  # fmt: skip
    with pytest.raises(RsvError) as e:
        quantize(source, tmp_path / "a", **arguments)
    assert e.value.code == "bad_argument" and os.listdir(tmp_path) == []


@pytest.mark.parametrize("before", [None, small_file()], ids=["new", "old"])
def test_a_weight_that_is_not_finite_leaves_the_old_file(tmp_path: Path, before: bytes | None) -> None:
    bad = np.ones((24, 40), np.float32)
    bad[3, 5] = np.inf
    path = tmp_path / "a"
    if before:
        path.write_bytes(before)
    with pytest.raises(RsvError) as e:
        quantize(model(**{f"{DOWN}.weight": bad}), path, importance="none")
    assert (e.value.code, e.value.where) == ("nonfinite_weight", DOWN) and "row 3, column 5 is inf" in e.value.detail
    assert os.listdir(tmp_path) == (["a"] if before else []) and (not before or path.read_bytes() == before)


def test_a_bias_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RsvError) as e:
        quantize(model(**{f"{Q}.bias": np.full(8, np.nan, np.float32)}), tmp_path / "a", importance="none")
    assert e.value.code == "content_invalid" and os.listdir(tmp_path) == []


@pytest.mark.parametrize("bias", [np.zeros(9, np.float32), np.zeros((2, 2), np.float32)])
def test_a_bias_of_another_shape(tmp_path: Path, bias: np.ndarray) -> None:
    with pytest.raises(RsvError) as e:
        quantize(model(**{f"{Q}.bias": bias}), tmp_path / "a", importance="none")
    assert (e.value.code, e.value.where) == ("source_unsupported", f"{Q}.bias") and os.listdir(tmp_path) == []


def test_a_source_that_fails_midway(tmp_path: Path) -> None:
    def broken() -> np.ndarray:
        raise RsvError("source_invalid", "model.norm.weight", "cut short")

    source = model()
    kept = source.tensors["model.norm.weight"]
    source.tensors["model.norm.weight"] = SourceTensor(kept.name, kept.dtype, kept.shape, broken, broken)
    with pytest.raises(RsvError) as e:
        quantize(source, tmp_path / "a", importance="none")
    assert e.value.code == "source_invalid" and os.listdir(tmp_path) == []


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RsvError) as e:
        quantize(tmp_path / "none.safetensors", tmp_path / "a")
    assert e.value.code == "io_error" and os.listdir(tmp_path) == []


# --- progress, files ------------------------------------------------------------------------------------------------


def test_progress(tmp_path: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    quantized(tmp_path / "a", progress=lambda *call: calls.append(call)).close()
    total = sum(weight(model(), name).size for name in LINEAR)
    done = [call[0] for call in calls]
    assert (
        done == sorted(done) and calls[0][0] == 0 and calls[-1][0] == total and {call[1] for call in calls} == {total}
    )
    assert set(LINEAR) <= {call[2] for call in calls}


def test_a_progress_that_raises_cancels(tmp_path: Path) -> None:
    def cancel(done: int, total: int, name: str) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(model(), tmp_path / "a", importance="none", progress=cancel)
    assert os.listdir(tmp_path) == []


def test_from_a_safetensors_file(tmp_path: Path) -> None:
    numpy_files = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    source = model()
    numpy_files.save_file({name: x.float32() for name, x in source.tensors.items()}, tmp_path / "m.safetensors")
    file = rsv_format.open(quantize(tmp_path / "m.safetensors", tmp_path / "a", importance="none").path)
    memory = quantized(tmp_path / "b", source)
    assert all(np.array_equal(file.layers[name].codes, memory.layers[name].codes) for name in LINEAR)
    assert file.metadata["source"] == "m.safetensors"


def test_a_given_source_stays_open(tmp_path: Path) -> None:
    source = model()
    quantized(tmp_path / "a", source).close()
    assert source.tensors


def test_save_keeps_everything(tmp_path: Path) -> None:
    layers = [make_layer(1, "a", 3, 2, make_transform(1, 3, 2, "values", "haar"), stack=2, bias="bf16")]
    content: dict[str, Any] = {"metadata": {"k": "v"}, "extensions": {"org.x": [1, {"a": None}]}}
    rsv_format.write(tmp_path / "a", layers=layers, **content)
    with rsv_format.open(tmp_path / "a") as file:
        rsv_format.save(file, tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_bfloat16() -> None:
    """Ties to even, against exact arithmetic on every kind of number."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 20_000, np.uint32)
    edge = (rng.integers(0, 2**16, 5000, np.uint32) << 16) + np.uint32(0x8000)
    values = np.concatenate([bits, edge, edge - np.uint32(1), edge + np.uint32(1)]).view(np.float32)
    back = to_float32(to_bfloat16(values), "bf16")
    nan = np.isnan(values)
    assert np.isnan(back[nan]).all() and not np.isnan(back[~nan]).any() and nan.any()
    finite = ~nan & np.isfinite(back)
    wide, near = values[finite].astype(np.float64), back[finite].view(np.uint32) >> 16
    for step in (-1, 1):  # neighbours among the bf16 numbers are not nearer, and as near only if ours is even
        other = ((near.astype(np.int64) + step) % 2**16).astype(np.uint32) << 16
        neighbour = other.view(np.float32).astype(np.float64)
        ours, theirs = np.abs(back[finite].astype(np.float64) - wide), np.abs(neighbour - wide)
        theirs = np.where(np.isfinite(neighbour), theirs, np.inf)
        assert (ours <= theirs).all() and (near[ours == theirs] % 2 == 0).all()
    assert to_float32(to_bfloat16(np.array([-0.0, np.inf, -np.inf, 3.4e38], np.float32)), "bf16").tolist() == [
        0,
        np.inf,
        -np.inf,
        np.inf,
    ]


@pytest.mark.parametrize("name", ["include", "exclude"])
def test_a_string_of_patterns_is_not_read_letter_by_letter(tmp_path: Path, name: str) -> None:
    with pytest.raises(RsvError, match="want a list of patterns") as caught:
        quantize(model(), tmp_path / "a", **{name: "*.mlp.*"})
    assert (caught.value.code, caught.value.where) == ("bad_argument", name)
    assert not any(tmp_path.iterdir())
