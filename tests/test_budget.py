"""Bits for each layer: what a budget buys, and tables with bits of their own."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rsv_format
from rsv_format import EMBEDDING_BITS, RsvError, Source, quantize, quantize_layers, quantize_matrix, table_bits
from rsv_format.codebook import codebook, distortion
from rsv_format.quantizer.budget import LEVELS, Demand, spend, weighted_error
from rsv_format.quantizer.codebooks import WINDOWS
from rsv_format.quantizer.codebooks import distortion as distortion_of
from rsv_format.quantizer.matrix import channel_scales, column_squares
from rsv_format.sources.base import dense_tensor

BLOCKS = 3
PARTS = {
    "self_attn.q_proj": (192, 256), "self_attn.k_proj": (128, 256),
    "mlp.up_proj": (384, 256), "mlp.down_proj": (256, 384),
}  # fmt: skip


def model(**more: np.ndarray) -> Source:
    """Layers whose weights are of one size, with two tables."""
    rng = np.random.default_rng(0)
    arrays = {
        f"model.layers.{i}.{part}.weight": rng.standard_normal(shape)
        for i in range(BLOCKS)
        for part, shape in PARTS.items()
    }
    arrays |= {
        "model.embed_tokens.weight": rng.standard_normal((70, 256)),
        "lm_head.weight": rng.standard_normal((70, 256)),
    }
    arrays |= {"model.norm.weight": np.ones(256), **more}

    def tensor(name: str, array: np.ndarray) -> Any:
        return dense_tensor(name, "f32", array.shape, lambda: array.astype(np.float32))

    return Source("test", "model.x", {name: tensor(name, array) for name, array in arrays.items()})


def importance(spread: float = 1000.0) -> dict[str, np.ndarray]:
    """Very different from layer to layer, less so from channel to channel."""
    rng = np.random.default_rng(1)
    return {
        f"model.layers.{i}.{part}": spread ** rng.uniform(-1, 1) * np.exp(rng.standard_normal(shape[1]))
        for i in range(BLOCKS)
        for part, shape in PARTS.items()
        if part != "self_attn.k_proj"  # it shares q_proj's
    }


def error(path: Path, source: Source, h: Mapping[str, np.ndarray]) -> float:
    """sum_j h_j |dW_j|^2 over all layers."""
    total = 0.0
    with rsv_format.open(path) as file:
        for name, layer in file.layers.items():
            own = h.get(name.replace("k_proj", "q_proj"))
            difference = layer.dequantize() - source.tensors[f"{name}.weight"].float32()
            total += float(np.sum((1.0 if own is None else own) * np.square(difference, dtype=np.float64)))
    return total


def bits_of(path: Path) -> dict[str, int]:
    with rsv_format.open(path) as file:
        return {name: layer.bits for name, layer in file.layers.items()}


# the allocation


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 6])
def test_the_expected_error_is_the_error(bits: int, weighted: bool) -> None:
    rng = np.random.default_rng(4)
    w = (rng.standard_normal((300, 128)) * np.exp(rng.standard_normal((300, 1)))).astype(np.float32)
    w *= np.exp(rng.standard_normal(128) / 2).astype(np.float32)
    h = np.exp(2 * rng.standard_normal(128)) if weighted else np.ones(128)
    squares = column_squares([w])
    c = channel_scales(h, squares, "a") if weighted else np.ones(128)
    layer = quantize_matrix(w, bits=bits, importance=h if weighted else None)
    assert layer.transform is not None
    rotated = layer.scales[:, None] * layer.codebook[rsv_format.unpack(layer.codes, bits, 128)]
    difference = layer.transform.apply_inverse(rotated.astype(np.float64)) - w
    expected = distortion(codebook("lloyd-max", bits).astype(np.float64)) * weighted_error(h, c, squares)
    assert np.sum(h * difference**2) == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize(
    "kind, window", [("lloyd-max", None), ("uniform", None), *(("trellis", window) for window in WINDOWS)]
)
def test_distortion_is_convex_over_the_levels(kind: str, window: int | None) -> None:
    """Or taking the best step first would not be best."""
    levels = LEVELS[kind]
    d = [distortion_of(kind, bits, window) for bits in levels]
    gains = [(d[i] - d[i + 1]) / (levels[i + 1] - levels[i]) for i in range(len(levels) - 1)]
    assert all(a > b > 0 for a, b in itertools.pairwise(gains))


def test_the_allocation_is_the_best_there_is() -> None:
    errors = [1.0, 7.0, 60.0, 0.0]
    demands = [Demand(str(i), 32, 10, e) for i, e in enumerate(errors)]
    d = {bits: distortion(codebook("lloyd-max", bits).astype(np.float64)) for bits in range(2, 9)}

    def size(bits: Mapping[str, int]) -> int:
        return 40 * sum(bits.values()) + 77

    for total in range(8, 24):
        for reach in (1, 6):
            bits = spend(demands, kind="lloyd-max", limit=40 * total + 77, size=size, reach=reach)
            choices = itertools.product(range(total // 4, min(9, total // 4 + reach + 1)), repeat=4)
            best = min(sum(e * d[b] for e, b in zip(errors, x, strict=True)) for x in choices if sum(x) <= total)
            assert sum(bits.values()) <= total and bits["3"] == total // 4
            assert sum(e * d[bits[str(i)]] for i, e in enumerate(errors)) == pytest.approx(best)


def test_what_is_left_goes_to_layers_that_it_suffices_for() -> None:
    demands = [Demand("large", 32, 1000, 1e6), Demand("small", 32, 1, 1e-6)]

    def size(bits: Mapping[str, int]) -> int:
        return 4000 * bits["large"] + 4 * bits["small"]

    assert spend(demands, kind="uniform", limit=8100, size=size) == {"large": 2, "small": 3}
    assert spend(demands, kind="uniform", limit=8100, size=size, reach=6) == {"large": 2, "small": 8}
    assert spend(demands, kind="uniform", limit=12011, size=size) == {"large": 3, "small": 2}


def test_padding_that_grows_is_allowed_for() -> None:
    demands = [Demand(str(i), 32, 10, 1.0 + i) for i in range(4)]

    def size(bits: Mapping[str, int]) -> int:
        return 40 * sum(bits.values()) + 100 * len(set(bits.values()))

    for limit in range(420, 1400, 35):
        assert size(spend(demands, kind="lloyd-max", limit=limit, size=size)) <= limit
    with pytest.raises(RsvError) as info:
        spend(demands, kind="lloyd-max", limit=419, size=size)
    assert info.value.code == "bad_argument" and "420" in info.value.detail


# files


@pytest.mark.parametrize("kind", ["lloyd-max", "uniform"])
@pytest.mark.parametrize("wanted", [3.9, 4.5, 6.0])
def test_a_budget_is_met_and_used(tmp_path: Path, kind: str, wanted: float) -> None:
    source, path = model(), tmp_path / "a.rsv"
    report = quantize(
        source, path, bits_per_weight=wanted, codebook=kind, importance=importance(), embedding_bits="keep"
    )
    assert rsv_format.verify(path) == []
    largest, page = 384 * 256, 8 * 16384
    slack = (largest + page) / report.summary.weights
    assert wanted - slack < report.summary.bits_per_weight <= wanted
    bits = bits_of(path)
    assert len(set(bits.values())) == 2 and set(bits.values()) <= set(LEVELS[kind])
    with rsv_format.open(path) as file:
        assert file.metadata["quantizer.bits_per_weight"] == f"{wanted:g}"
        assert sorted(c.bits for c in file.header.codebooks) == sorted(set(bits.values()))
        for i in range(BLOCKS):
            q, k = (file.layers[f"model.layers.{i}.self_attn.{part}_proj"] for part in "qk")
            assert q.transform_id == k.transform_id
        rsv_format.save(file, tmp_path / "b.rsv")
    assert (tmp_path / "b.rsv").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("bits", [3, 4, 5])
def test_a_budget_beats_the_same_bits_for_all(tmp_path: Path, bits: int) -> None:
    """Of two files with the same bits for all, one a bit larger: halfway, an arbitrary choice has the mean error."""
    source, h = model(), importance()
    rates, errors = [], []
    for path, even in ((tmp_path / "low.rsv", bits), (tmp_path / "high.rsv", bits + 1)):
        rates.append(quantize(source, path, bits=even, importance=h).summary.bits_per_weight)
        errors.append(error(path, source, h))
    spent = quantize(source, tmp_path / "a.rsv", bits_per_weight=sum(rates) / 2, importance=h).summary
    assert rates[0] < spent.bits_per_weight <= sum(rates) / 2
    assert error(tmp_path / "a.rsv", source, h) < 0.6 * sum(errors) / 2
    quantize(source, tmp_path / "a.rsv", bits_per_weight=rates[0] + 1e-9, importance=h)
    assert error(tmp_path / "a.rsv", source, h) <= errors[0]


def test_without_importance_the_weights_decide(tmp_path: Path) -> None:
    heavy = "model.layers.1.mlp.down_proj"
    rng = np.random.default_rng(5)
    source = model(**{f"{heavy}.weight": 30 * rng.standard_normal((256, 384))})
    quantize(source, tmp_path / "a.rsv", bits_per_weight=4.8, importance="none")
    bits = bits_of(tmp_path / "a.rsv")
    assert bits[heavy] > min(bits.values())


def test_a_layer_of_unknown_importance_counts_like_the_mean(tmp_path: Path) -> None:
    known = {name: h * 1e6 for name, h in importance(1.0).items() if "up_proj" not in name}
    rate = quantize(model(), tmp_path / "a.rsv", bits=5, importance=known).summary.bits_per_weight
    quantize(model(), tmp_path / "a.rsv", bits_per_weight=rate - 0.4, importance=known)
    bits = bits_of(tmp_path / "a.rsv")
    assert set(bits.values()) == {4, 5} and {4} != {own for name, own in bits.items() if "up_proj" in name}


def test_a_budget_gives_the_same_file_each_time(tmp_path: Path) -> None:
    source, arguments = model(), {"bits_per_weight": 4.4, "importance": importance()}
    quantize(source, tmp_path / "a", threads=1, **arguments)
    source.tensors = dict(reversed(source.tensors.items()))
    told: list[tuple[int, int, str]] = []
    quantize(source, tmp_path / "b", threads=3, progress=lambda *news: told.append(news), **arguments)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert all(0 <= done <= total for done, total, _ in told)
    assert {x.name: x.bits for x in quantize_layers(source, **arguments)} == bits_of(tmp_path / "a")


@pytest.mark.parametrize("rotation", ["haar", "none"])
def test_a_budget_pays_for_transforms(tmp_path: Path, rotation: str) -> None:
    """Matrices of 256^2 and 384^2 floats, several times what the weights take."""
    persist = rotation == "haar"
    report = quantize(model(), tmp_path / "a", bits_per_weight=38 if persist else 4.5, rotation=rotation,
                      persist_rotation=persist, importance=importance())  # fmt: skip
    assert report.summary.bits_per_weight <= (38 if persist else 4.5)
    if persist:
        assert report.summary.by_kind["factors"] > 2 * report.summary.by_kind["codes"]


@pytest.mark.parametrize("wanted", [0.0, -1.0, float("nan"), float("inf"), 1.5])
def test_budgets_that_cannot_be(tmp_path: Path, wanted: float) -> None:
    with pytest.raises(RsvError) as info:
        quantize(model(), tmp_path / "a", bits_per_weight=wanted, importance="none")
    assert (info.value.code, info.value.where) == ("bad_argument", "bits_per_weight")
    assert list(tmp_path.iterdir()) == []


def test_a_budget_and_bits_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(RsvError) as info:
        quantize(model(), tmp_path / "a", bits=4, bits_per_weight=4.5)
    assert (info.value.code, info.value.where) == ("bad_argument", "bits_per_weight")


def test_more_than_enough(tmp_path: Path) -> None:
    quantize(model(), tmp_path / "a", bits_per_weight=40, importance="none", embedding_bits="keep")
    assert set(bits_of(tmp_path / "a").values()) == {8}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_named_by_its_place(tmp_path: Path, value: float) -> None:
    name = "model.layers.1.mlp.down_proj"
    bad = np.ones((256, 384))
    bad[5, 7] = value
    for h in ("none", importance()):
        with pytest.raises(RsvError) as info:
            quantize(model(**{f"{name}.weight": bad}), tmp_path / "a", bits_per_weight=5, importance=h)
        assert (info.value.code, info.value.where) == ("nonfinite_weight", name)


# tables


def test_tables_get_their_own_bits(tmp_path: Path) -> None:
    source = model()
    quantize(source, tmp_path / "a", bits=3, embedding_bits=6, importance=importance())
    assert rsv_format.verify(tmp_path / "a") == []
    bits = bits_of(tmp_path / "a")
    assert {name for name in bits if bits[name] == 6} == {"model.embed_tokens", "lm_head"}
    assert {name for name in bits if bits[name] == 3} == {name[:-7] for name in source.tensors if ".layers." in name}
    with rsv_format.open(tmp_path / "a") as file:
        assert set(file.tensors) == {"model.norm.weight"} and len(file.header.codebooks) == 2
        table = file.layers["model.embed_tokens"]
        assert (table.out_features, table.in_features) == (70, 256)
        ids = [layer.transform_id for layer in file.layers.values()]
        assert (
            ids.count(table.transform_id) == 1 and table.transform is not None and table.transform.diagonal == "signs"
        )
        want = source.tensors["model.embed_tokens.weight"].float32()
        assert np.mean((table.dequantize() - want) ** 2) < 0.002


@pytest.mark.parametrize(("options", "wanted"), [({}, EMBEDDING_BITS), ({"bits": 3}, EMBEDDING_BITS), ({"bits": 7}, 7)])
def test_tables_have_their_own_bits(options: dict[str, int], wanted: int, tmp_path: Path) -> None:
    quantize(model(), tmp_path / "a", importance="none", **options)  # type: ignore[arg-type]
    bits = bits_of(tmp_path / "a")
    assert bits.pop("model.embed_tokens") == bits.pop("lm_head") == wanted
    assert set(bits.values()) == {options.get("bits", 4)}


@pytest.mark.parametrize(("given", "bits", "wanted"), [(None, 4, 5), (None, 6, 6), ("keep", 4, None), (3, 8, 3)])
def test_bits_of_tables(given: int | str | None, bits: int, wanted: int | None) -> None:
    assert table_bits(given, bits) == wanted


@pytest.mark.parametrize("given", ["5", "none", 4.5])
def test_bits_of_tables_are_a_number_or_keep(given: object) -> None:
    with pytest.raises(RsvError, match="bad_argument at embedding_bits"):
        table_bits(given, 4)  # type: ignore[arg-type]


def test_tables_are_kept_if_asked_for(tmp_path: Path) -> None:
    quantize(model(), tmp_path / "a", importance="none", embedding_bits="keep")
    assert not {"model.embed_tokens", "lm_head"} & set(bits_of(tmp_path / "a"))
    with pytest.raises(RsvError, match="bad_argument at embedding_bits"):
        quantize(model(), tmp_path / "a", embedding_bits="5")


def test_the_same_bits_share_a_codebook(tmp_path: Path) -> None:
    quantize(model(), tmp_path / "a", bits=5, embedding_bits=5, importance="none")
    with rsv_format.open(tmp_path / "a") as file:
        assert len(file.header.codebooks) == 1


def test_patterns_choose_tables_too(tmp_path: Path) -> None:
    quantize(model(), tmp_path / "a", embedding_bits=8, exclude=["lm_head"], importance="none")
    assert "lm_head" not in bits_of(tmp_path / "a") and bits_of(tmp_path / "a")["model.embed_tokens"] == 8
    quantize(model(), tmp_path / "a", embedding_bits=8, include=["*embed_tokens"], importance="none")
    assert bits_of(tmp_path / "a") == {"model.embed_tokens": 8}


def test_a_table_s_importance_is_used_where_it_is_given(tmp_path: Path) -> None:
    h = {"model.embed_tokens": np.linspace(1, 100, 256)}
    report = quantize(model(), tmp_path / "a", embedding_bits=4, importance=h)
    assert report.weighted_layers == 1
    with rsv_format.open(tmp_path / "a") as file:
        transform = file.layers["model.embed_tokens"].transform
        assert transform is not None and transform.diagonal == "values"


def test_a_budget_leaves_tables_their_bits(tmp_path: Path) -> None:
    h = importance()
    report = quantize(model(), tmp_path / "a", bits_per_weight=5, embedding_bits=3, importance=h)
    bits = bits_of(tmp_path / "a")
    assert bits["model.embed_tokens"] == bits["lm_head"] == 3 and len(set(bits.values())) == 3
    assert report.summary.bits_per_weight <= 5


def test_tables_that_are_not_there(tmp_path: Path) -> None:
    source = model()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        del source.tensors[name]
    for bits, where in ((4, "embedding_bits"), (0, "bits"), (9, "bits")):
        with pytest.raises(RsvError) as info:
            quantize(source, tmp_path / "a", embedding_bits=bits)
        assert (info.value.code, info.value.where) == ("bad_argument", where)
