"""The Metal kernels' text, compiled as C++ against a shim of what it uses of Metal, and compared with numpy."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

import rsv_mlx  # noqa: E402
from rsv_format.packing import pack, row_words  # noqa: E402
from rsv_mlx import kernels  # noqa: E402
from rsv_mlx.codebook import Codebook  # noqa: E402

SHIM = Path(__file__).with_name("shim") / "metal.hpp"
SOME = [(bits, bits) for bits in range(1, 9)] + [(bits, 8) for bits in (1, 2, 3, 5, 7)]
SOME += [(1, 16), (2, 12), (3, 12), (4, 12), (3, 16), (5, 13), (7, 11), (8, 16), (4, 5)]
PAIRS = [(bits, window) for bits in range(1, 9) for window in range(bits, 17)] if os.environ.get("RSV_FUZZ") else SOME
FEW = (1, 3)
IN_FEATURES = (8, 70, 1056)  # shorter than a window, not whole groups, more groups than lanes

Run = Callable[[kernels.Launch], Any]


def function_of(launch: kernels.Launch, name: str) -> str:
    """A kernel as a C++ function of its grid, group, inputs and output."""
    kinds = {"x": "const float*", "centroids": "const float*"}
    arguments = ", ".join(f"{kinds.get(array, 'const uint*')} {array}" for array, _ in launch.inputs)
    constants = " ".join(f"constexpr int {constant} = {value};" for constant, value in launch.constants)
    return f"""
namespace {name}_parts {{ {launch.header} }}
extern "C" void {name}(const uint* grid, const uint* group, {arguments}, float* out) {{
  using namespace {name}_parts;
  {constants}
  launch(grid, group, [&](uint3 thread_position_in_grid, uint thread_index_in_threadgroup) {{ {launch.source} }});
}}
"""


def named(launch: kernels.Launch) -> str:
    return "_".join([launch.name, *(str(value) for _, value in launch.constants)])


def centroids_of(bits: int, window: int) -> np.ndarray:
    return np.random.default_rng(bits * 17 + window).standard_normal(2**window).astype(np.float32)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a launch in C++; all kernels are compiled at once."""
    functions: dict[str, str] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_ROWS_TOGETHER", 2)  # fewer threads at a time
        one, codes = mx.zeros((1,), mx.uint32), mx.zeros((1, 2, 8), mx.uint32)
        for bits, window in PAIRS:
            table = mx.zeros((2**window,))
            launches = [kernels.product_of(mx.zeros((1, few, 8)), codes, one, table, bits, window) for few in FEW]
            launches.append(kernels.weights_of(codes[0], table, bits, window, 8))
            functions |= {named(launch): function_of(launch, named(launch)) for launch in launches}
        folder = tmp_path_factory.mktemp("kernels")
        (folder / "k.cpp").write_text(f'#include "{SHIM}"\n' + "".join(functions.values()))
        command = [
            "g++",
            "-std=c++20",
            "-O0",
            "-Wno-unknown-pragmas",
            "-fPIC",
            "-shared",
            "-pthread",
            "k.cpp",
            "-o",
            "k.so",
        ]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:3000]
        library = ctypes.CDLL(str(folder / "k.so"))

        def execute(launch: kernels.Launch) -> Any:
            held = [np.ascontiguousarray(np.array(array)) for _, array in launch.inputs]
            out = np.full(launch.shape, np.nan, np.float32)
            threes = [np.array(three, np.uint32) for three in (launch.grid, launch.threadgroup)]
            assert all(g % t == 0 for g, t in zip(launch.grid, launch.threadgroup, strict=True))
            getattr(library, named(launch))(*(a.ctypes.data_as(ctypes.c_void_p) for a in (*threes, *held, out)))
            return mx.array(out)

        yield execute


def packed(rows: int, in_features: int, bits: int, window: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes, and the indices that they stand for."""
    codes = np.random.default_rng(seed).integers(0, 2**bits, (rows, in_features))
    stream = ((codes[:, :, None] >> np.arange(bits)) & 1).reshape(rows, -1)
    places = (np.arange(in_features)[:, None] * bits + np.arange(window)) % (in_features * bits)
    return pack(codes.astype(np.uint8), bits), (stream[:, places] << np.arange(window)).sum(axis=-1)


@pytest.mark.parametrize("bits, window", PAIRS)
def test_kernels_are_what_numpy_does(bits: int, window: int, run: Run) -> None:
    table, rng = centroids_of(bits, window), np.random.default_rng(3)
    for seed, in_features in enumerate(IN_FEATURES):
        rows, stack = 3, 2
        codes, indices = packed(stack * rows, in_features, bits, window, seed)
        assert codes.shape[1] == row_words(in_features, bits)
        weights = table[indices]
        found = run(kernels.weights_of(mx.array(codes), mx.array(table), bits, window, in_features))
        assert np.array_equal(np.array(found), weights)
        for few, which in ((FEW[0], [1, 0, 1]), (FEW[1], [1])):
            x = rng.standard_normal((len(which), few, in_features)).astype(np.float32)
            launch = kernels.product_of(
                mx.array(x), mx.array(codes.reshape(stack, rows, -1)), mx.array(np.array(which, np.uint32)),
                mx.array(table), bits, window,
            )  # fmt: skip
            wanted = np.einsum("pni,pri->pnr", x, weights.reshape(stack, rows, -1)[which])
            assert np.allclose(np.array(run(launch)), wanted, rtol=1e-4, atol=1e-4)


# where they are used


@pytest.fixture
def on_metal(run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """As if there were a device: the names of kernels that run."""
    ran: list[str] = []

    def execute(launch: kernels.Launch) -> Any:
        ran.append(launch.name)
        return run(launch)

    monkeypatch.setattr(kernels, "usable", lambda: True)
    monkeypatch.setattr(kernels, "run", execute)
    monkeypatch.setattr(kernels, "_trusted", {})
    yield ran


def test_layers_use_them(on_metal: list[str]) -> None:
    import mlx.nn as nn

    layer = rsv_mlx.QuantizedLinear.from_linear(nn.Linear(64, 6), bits=4)
    x = mx.random.normal((2, 1, 64))
    wanted = x @ layer.dequantize().T + layer.bias
    assert np.allclose(np.array(layer(x[:1])), np.array(wanted[:1]), atol=1e-4)
    assert on_metal and set(on_metal) == {"rsv_product_4_4"}
    many = mx.random.normal((20, 64))
    assert np.allclose(np.array(layer(many)), np.array(many @ layer.dequantize().T + layer.bias), atol=1e-4)
    assert "rsv_weights_4_4" in on_metal


def test_gradients_reach_the_input(on_metal: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx.nn as nn

    layer = rsv_mlx.QuantizedLinear.from_linear(nn.Linear(64, 6), bits=4)
    x = mx.random.normal((1, 64))
    layer(x)  # by then the kernel is trusted
    weights = kernels.weights_of(layer.codes, mx.array(layer.codebook.centroids), 4, 4, 64)
    dense = kernels.run(weights)

    def traced(launch: kernels.Launch) -> Any:
        """In MLX's own operations: the shim cannot be differentiated."""
        return launch.inputs[0][1] @ dense.T

    monkeypatch.setattr(kernels, "run", traced)
    found = mx.grad(lambda x: (layer(x) ** 2).sum())(x)
    whole = layer.dequantize()
    assert np.allclose(np.array(found), np.array(2 * layer(x) @ whole), atol=1e-3)


def test_experts_use_them(on_metal: list[str]) -> None:
    pytest.importorskip("mlx_lm")
    from mlx_lm.models.switch_layers import SwitchLinear

    layer = rsv_mlx.QuantizedSwitchLinear.from_switch_linear(SwitchLinear(32, 6, 4), bits=3)
    x, chosen = mx.random.normal((2, 1, 1, 32)), mx.array([[0, 3], [1, 1]])
    assert np.allclose(np.array(layer(x, chosen)), np.array(layer.to_dense()(x, chosen)), atol=1e-4)
    assert set(on_metal) == {"rsv_product_3_3"}


@pytest.mark.parametrize("fault", ["differs", "does not compile"])
def test_one_that_cannot_be_trusted_is_not_used(
    fault: str, on_metal: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(launch: kernels.Launch) -> Any:
        if fault != "differs":
            raise RuntimeError("unknown type name 'threadgroup'\nand more")
        return mx.zeros(launch.shape)

    monkeypatch.setattr(kernels, "run", wrong)
    table = centroids_of(4, 4)
    codebook = Codebook.of(table, 4)
    codes, indices = packed(5, 64, 4, 4, 1)
    x = mx.random.normal((1, 64))
    with pytest.warns(RuntimeWarning, match="4 bits, window 4 is not used: (it differs|unknown type)") as told:
        for _ in range(3):
            found = codebook.matmul(x, mx.array(codes))
    assert len(told) == 1
    assert np.allclose(np.array(found), np.array(x) @ table[indices].T, atol=1e-4)


# rsv doctor --kernels


def test_doctor_compares_them_all(on_metal: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from rsv_cli import kernels as trials

    some = [(bits, window) for bits, window in PAIRS if bits in (1, 4)]
    monkeypatch.setattr(trials, "_CASES", ((1, 1), (1, 3)))
    monkeypatch.setattr(trials, "_WINDOWS", (8, 16))
    found = [one for one in _until_missing(trials.trial(4, 64, 1))]
    assert {(one["bits"], one["window"]) for one in found} >= {(1, 1), (1, 8), (1, 16)} and len(some) > 2
    assert all(trials.is_right(one) and one["generic"] > 0 for one in found)
    assert not trials.is_right({"error": None}) and not trials.is_right({"error": float("nan")})


def _until_missing(found: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """As far as the windows go that were compiled."""
    while True:
        try:
            yield next(found)
        except (AttributeError, StopIteration):
            return


def test_doctor_without_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from rsv_cli.app import app

    monkeypatch.setattr(kernels, "usable", lambda: False)
    result = CliRunner().invoke(app, ["doctor", "--kernels"])
    assert result.exit_code == 1 and "no Metal here" in result.stdout
    assert '"kernels": []' in CliRunner().invoke(app, ["doctor", "--kernels", "--json"]).stdout
    assert '"kernels": null' in CliRunner().invoke(app, ["doctor", "--json"]).stdout
