"""What a model's `sanitize` does to weights: renamed layers stay packed, changed ones become dense and are right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")

import rsv_format  # noqa: E402
import rsv_mlx  # noqa: E402
from rsv_format import TensorData, quantize_matrix  # noqa: E402
from rsv_mlx.tracing import alias, make_stub, trace  # noqa: E402

RNG = np.random.default_rng(7)
W, V = (RNG.standard_normal((16, 16)).astype(np.float32) for _ in range(2))
BIAS = RNG.standard_normal(16).astype(np.float32)
GAIN = RNG.standard_normal(16).astype(np.float32)
Weights = dict[str, Any]


class Sanitizing(nn.Module):
    """Two square layers, of which one has a bias, and a gain; `sanitize` is given."""

    def __init__(self, sanitize: Callable[[Any, Weights], Weights]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.norm = nn.RMSNorm(16)
        self.head = nn.Linear(16, 16, bias=False)
        self._sanitize = sanitize

    def sanitize(self, weights: Weights) -> Weights:
        self.pop("head")  # as Gemma does; there is none the second time
        return self._sanitize(self, weights)


def loaded(tmp_path: Path, sanitize: Callable[[Any, Weights], Weights]) -> tuple[Any, Any, Any]:
    """The model, and what a and b are in the file, dense."""
    path = tmp_path / "m.rsv"
    layers = [quantize_matrix(W, name="a", bias=BIAS, bias_dtype="f32"), quantize_matrix(V, name="b")]
    rsv_format.write(path, layers=layers, tensors={"norm.weight": TensorData("f32", GAIN)})
    model = rsv_mlx.load(path, model=Sanitizing(sanitize))
    with rsv_format.open(path) as file:
        return model, file.layers["a"].dequantize(), file.layers["b"].dequantize()


def is_packed(layer: Any) -> bool:
    return isinstance(layer, rsv_mlx.QuantizedLinear)


def close(actual: Any, wanted: Any) -> None:
    np.testing.assert_allclose(np.array(actual), wanted, rtol=1e-5, atol=1e-5)


def check(model: Any, a: Any, b: Any, bias: Any = BIAS, gain: Any = GAIN) -> None:
    close(model.a(mx.eye(16)), a.T + bias)
    close(model.b(mx.eye(16)), b.T)
    close(model.norm.weight, gain)


def scaled_in_place(model: Any, weights: Weights) -> Weights:
    for name in ("a.weight", "norm.weight"):
        weights[name] *= 3
    return weights


def row_in_place(model: Any, weights: Weights) -> Weights:
    weights["a.weight"][3] = 0
    return weights


def test_weights_that_are_changed_in_place_are_changed_once(tmp_path: Path) -> None:
    model, a, b = loaded(tmp_path, scaled_in_place)
    check(model, 3 * a, b, gain=3 * GAIN)
    assert not is_packed(model.a) and is_packed(model.b)

    model, a, b = loaded(tmp_path, row_in_place)
    a[3] = 0
    check(model, a, b)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.T,
        lambda w: w[::-1],
        lambda w: mx.concatenate(mx.split(w, 2)[::-1]),
        lambda w: mx.where(mx.arange(16)[:, None] == 5, w, -w),
    ],
)
def test_changed_layers_of_the_same_shape(change: Callable[[Any], Any], tmp_path: Path) -> None:
    model, a, b = loaded(tmp_path, lambda _, w: w | {"b.weight": change(w["b.weight"])})
    check(model, a, np.array(change(mx.array(b))))
    assert is_packed(model.a) and not is_packed(model.b)


def test_a_bias_that_is_changed(tmp_path: Path) -> None:
    model, a, b = loaded(tmp_path, lambda _, w: w | {"a.bias": w["a.bias"] + 1})
    check(model, a, b, bias=BIAS + 1)


def test_layers_that_change_places(tmp_path: Path) -> None:
    model, a, b = loaded(tmp_path, lambda _, w: w | {"b.weight": w["a.weight"], "a.weight": w["b.weight"]})
    check(model, b, a)


def test_what_one_layer_does_to_another(tmp_path: Path) -> None:
    """A value that was looked at is not that of a stub."""
    model, a, b = loaded(tmp_path, lambda _, w: w | {"norm.weight": mx.array(np.array(w["a.weight"])[0])})
    check(model, a, b, gain=a[0])
    model, a, b = loaded(tmp_path, lambda _, w: w | {"b.weight": w["b.weight"] * w["a.weight"].max()})
    check(model, a, b * a.max())


def test_what_depends_on_a_real_weight_is_real_too(tmp_path: Path) -> None:
    def sanitize(model: Any, weights: Weights) -> Weights:
        if weights["a.weight"].max() > 0:  # which zeros are not
            weights["b.weight"] *= 2
        return weights

    model, a, b = loaded(tmp_path, sanitize)
    check(model, a, 2 * b)


def test_renamed_layers_cost_nothing(tmp_path: Path) -> None:
    model, a, b = loaded(tmp_path, lambda _, w: {name: w[name].astype(mx.float32) for name in sorted(w)})
    check(model, a, b)
    assert is_packed(model.a) and is_packed(model.b)


def test_trace_of_arrays() -> None:
    stubs = {name: make_stub((4, 4)) for name in "abcdefg"}
    given = {name: alias(array) for name, array in stubs.items()}
    given["b"] *= 1
    mx.eval(given["c"])
    results = {
        "a": given["a"],
        "b": given["b"],
        "c": given["c"],
        "x.y": given["d"].reshape(4, 4),
        "again": given["d"],
        "both": mx.stack([given["e"], given["f"]]),
    }
    found = trace(stubs, results)
    assert found.origins == {"a": "a", "c": "c", "x.y": "d", "again": "d"}
    assert found.touched == {"b", "c", "e", "f"}
