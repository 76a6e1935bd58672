"""Models of mlx-lm whose code does more with a layer than call it, and mlx-lm's own tools on packed models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")
pytest.importorskip("mlx_lm")

from mlx_lm.utils import compute_bits_per_weight, dequantize_model, load_model, save_model  # noqa: E402

import rsv_format  # noqa: E402
import rsv_mlx  # noqa: E402
from benchmarks.tiny_models import ARCHITECTURES, write_checkpoint  # noqa: E402
from rsv_mlx.packed import Packed  # noqa: E402

TOKENS = [[3, 14, 15, 92, 65, 35, 89, 79, 32, 38]]
QUIET = {"importance": "none"}


def logits(model: Any) -> np.ndarray:
    found = model(mx.array(TOKENS))
    return np.array(getattr(found, "logits", found).astype(mx.float32))


def difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def quantized(name: str, folder: Path, bits: int = 8) -> Path:
    if not (folder / "source").exists():
        write_checkpoint(name, folder / "source")
    rsv_format.quantize(folder / "source", folder / "m.rsv", bits=bits, **QUIET)
    return folder / "m.rsv"


@pytest.mark.parametrize("name", ["llama4_text", "seed_oss", "kimi_k3", "afm7", "gemma3n", "baichuan_m1"])
def test_models_that_use_weights_themselves(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in ("llama4_text", "seed_oss"):
        monkeypatch.setitem(ARCHITECTURES, name, ARCHITECTURES[name] | {"tie_word_embeddings": True})
    near = 0.6 if name == "afm7" else 0.1  # it rounds activations to 8 bits: a small change makes a large one
    path = quantized(name, tmp_path)
    wanted = logits(load_model(tmp_path / "source")[0])
    model = rsv_mlx.load_model(path)
    found = logits(model)
    assert difference(found, wanted) < near and np.array_equal(logits(model), found)
    assert difference(logits(rsv_mlx.load_model(path, materialize="dense")), found) < 1e-3
    assert np.array_equal(logits(rsv_mlx.load_model(path, lazy=True)), found)

    dense, config = load_model(tmp_path / "source")
    before = logits(dense)
    rsv_mlx.quantize_model(dense, bits=8, importance=None)
    assert difference(logits(dense), before) < near and any(isinstance(x, Packed) for x in dense.modules())
    rsv_mlx.save(dense, tmp_path / "saved.rsv", config=config)
    assert difference(logits(rsv_mlx.load_model(tmp_path / "saved.rsv")), logits(dense)) < 1e-5


def test_weights_that_a_model_sets_are_dense_before_it_does(tmp_path: Path) -> None:
    model = rsv_mlx.load_model(quantized("gemma3n", tmp_path))
    layers = {path: module for path, module in model.named_modules() if path.endswith("_coefs")}
    assert layers and all(type(module) is nn.Linear for module in layers.values())


def test_gemma_3_with_its_vision_tower(tmp_path: Path) -> None:
    """`sanitize` drops the tower, and a head, which a second run of it would not find."""
    write_checkpoint("gemma3", tmp_path / "source")
    wanted = logits(load_model(tmp_path / "source")[0])
    file = tmp_path / "source" / "model.safetensors"
    weights = {name: array for name, array in mx.load(str(file)).items() if "lm_head" not in name}
    mx.eval(weights)
    tower = {f"vision_tower.layers.0.mlp.fc{i}.weight": mx.random.normal((64, 64)) for i in (1, 2)}
    mx.save_safetensors(str(file), weights | tower, metadata={"format": "mlx"})
    wanted = logits(load_model(tmp_path / "source")[0])
    model, report = rsv_mlx.load_model(quantized("gemma3", tmp_path), return_report=True)
    assert difference(logits(model), wanted) < 0.1 and report.dense_nbytes == 0


def test_a_model_whose_code_ends_the_program_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of OLMo does where ai2-olmo is missing."""

    def end(config: Any) -> Any:
        sys.exit(1)

    path = quantized("llama", tmp_path)
    monkeypatch.setattr("mlx_lm.utils._get_classes", end)
    with pytest.raises(rsv_format.RsvError, match="missing_dependency"):
        rsv_mlx.load_model(path)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_tools_of_mlx_lm_work_or_refuse(name: str, tmp_path: Path) -> None:
    model = rsv_mlx.load_model(quantized(name, tmp_path, bits=4))
    wanted = logits(model)
    for tool in (lambda: save_model(tmp_path / "saved", model, donate_model=True), lambda: dequantize_model(model),
                 lambda: compute_bits_per_weight(model)):  # fmt: skip
        with pytest.raises((rsv_format.RsvError, AttributeError), match=r"rsv_mlx.save writes it.*materialize='dense'"):
            tool()
        assert np.array_equal(logits(model), wanted)
    assert not list((tmp_path / "saved").iterdir())
    nn.quantize(model, group_size=32, bits=8)  # what is not packed
    assert difference(logits(model), wanted) < 0.1
    assert all(not isinstance(module, nn.Linear | nn.Embedding) for module in model.modules())

    dense = rsv_mlx.load_model(tmp_path / "m.rsv", materialize="dense")
    save_model(tmp_path / "saved", dense)
    (tmp_path / "saved" / "config.json").write_bytes((tmp_path / "source" / "config.json").read_bytes())
    assert difference(logits(load_model(tmp_path / "saved")[0]), wanted) < 1e-3
