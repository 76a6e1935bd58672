"""Error feedback: what it gains by the measure that it has, what the layers see, and files calibrated on a text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from test_synthetic import fetched

import rsv_format
from rsv_format import RsvError, quantize_matrix
from rsv_format.decoder import Decoder
from rsv_format.packing import window_indices
from rsv_format.quantizer.calibration import DecoderCalibration, add_squares, block_of, mean_of
from rsv_format.quantizer.codebooks import centroids
from rsv_format.quantizer.feedback import encoder, spread_errors
from rsv_format.quantizer.matrix import make_transform
from rsv_format.quantizer.scalar import nearest

tokenizers = pytest.importorskip("tokenizers")

CONFIG = {
    "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 11, "intermediate_size": 160,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
WORDS = [f"w{i}" for i in range(64)]
TEXT = " ".join(WORDS[i] for i in np.random.default_rng(3).integers(1, 64, 150))


def gauss(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def inputs(seed: int, tokens: int, width: int) -> np.ndarray:
    """Correlated, as what layers see is."""
    return gauss(seed, tokens, 24) @ gauss(99, 24, width) + 0.3 * gauss(seed + 1, tokens, width)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with more than ten blocks, and a tokenizer of one token a word."""
    path = tmp_path_factory.mktemp("feedback") / "model"
    path.mkdir()

    def normal(seed: int, *shape: int) -> np.ndarray:
        return gauss(seed, *shape) / np.float32(np.sqrt(shape[-1]))

    tensors = {"model.embed_tokens.weight": normal(0, 64, 128), "model.norm.weight": 1 + normal(1, 128)}
    for i in range(CONFIG["num_hidden_layers"]):  # type: ignore[call-overload]
        block = f"model.layers.{i}"
        for seed, (name, rows, columns) in enumerate((
            ("self_attn.q_proj", 128, 128), ("self_attn.k_proj", 64, 128), ("self_attn.v_proj", 64, 128),
            ("self_attn.o_proj", 128, 128), ("mlp.gate_proj", 160, 128), ("mlp.up_proj", 160, 128),
            ("mlp.down_proj", 128, 160),
        )):  # fmt: skip
            tensors[f"{block}.{name}.weight"] = normal(100 * i + seed, rows, columns)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{block}.{norm}.weight"] = np.ones(128, np.float32)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, "w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize("codebook, options", [("lloyd-max", {}), ("trellis", {}), ("trellis", {"window": 12})])
@pytest.mark.parametrize("width, rows, gain", [(192, 70, 0.9), (130, 65, 1.0), (320, 64, 0.8)])
def test_outputs_come_nearer_on_tokens_that_it_has_not_seen(
    codebook: str, options: dict[str, int], width: int, rows: int, gain: float
) -> None:
    x, new, w = inputs(1, 2000, width), inputs(5, 500, width), gauss(0, rows, width)
    transform = make_transform(width, seed=7)
    known = spread_errors(x.T @ x / len(x), len(x), transform)
    assert known is not None and [start for start, _, _ in known] == [*range(0, known[-1][0] + 1, 64)]
    errors = []
    for own in (None, known):
        data = quantize_matrix(w, bits=3, codebook=codebook, transform=transform, spread=own, **options)  # type: ignore[arg-type]
        codes = rsv_format.unpack(data.codes, 3, width)
        said = data.codebook[window_indices(codes, 3, data.window)] * data.scales[:, None]
        assert transform is not None
        errors.append(np.square(new @ (transform.apply_inverse(said) - w).T).sum())
    assert errors[1] < gain * errors[0]


@pytest.mark.parametrize("width", [130, 700, 1184])
def test_what_is_spread_is_the_formula(width: int) -> None:
    """In the place of the moment, panel by panel: as of the inverse, in binary64."""
    x, transform = inputs(1, 700, width), make_transform(width, seed=7)
    moment = (x.T @ x / len(x)).astype(np.float32)
    before = moment.copy()
    known = spread_errors(moment, len(x), transform)
    assert known is not None and np.array_equal(moment, before)
    again = spread_errors(moment, len(x), transform, overwrite=True)
    assert again is not None and np.shares_memory(again[0][2], moment)
    assert transform is not None
    h = transform.apply(transform.apply(before.astype(np.float64)).T)
    h = h / np.trace(h) * width + 2048 / 700 * np.eye(width)
    upper = np.linalg.cholesky(np.linalg.inv(h)).T
    for (start, stop, matrix), (_, _, same) in zip(known, again, strict=True):
        right = np.linalg.solve(upper[start:stop, start:stop], upper[start:stop, stop:])
        assert np.abs(matrix - right).max(initial=0) < 1e-5 and np.array_equal(matrix, same)


def test_sums_of_squares_are_those_of_the_product() -> None:
    x = inputs(1, 900, 1100)
    moment = np.zeros((1100, 1100), np.float32)
    for start in range(0, 900, 250):
        add_squares(moment, x[start : start + 250])
    whole = mean_of(moment, 900)
    assert whole is moment and np.allclose(whole, x.T @ x / 900, atol=1e-5) and np.array_equal(whole, whole.T)


def test_where_channels_are_alike_there_is_nothing_to_spread() -> None:
    rows, table = gauss(0, 70, 200), centroids("lloyd-max", 4)
    known = spread_errors(np.eye(200, dtype=np.float32), 99, None)
    assert known is not None and all(not matrix.any() for _, _, matrix in known)
    encoded, _ = encoder(table, 4, known)
    assert np.array_equal(encoded(rows), nearest(table)(rows))


@pytest.mark.parametrize("moment", [np.zeros((130, 130)), np.full((130, 130), np.nan), np.eye(64), np.eye(1)])
def test_what_says_nothing_is_not_used(moment: np.ndarray) -> None:
    assert spread_errors(moment.astype(np.float32), 99, None) is None


@pytest.mark.parametrize("codebook", ["lloyd-max", "trellis"])
def test_rows_are_alone_and_indices_are_windows(codebook: str) -> None:
    x, rows, table = inputs(1, 600, 150), gauss(3, 64, 150), centroids(codebook, 4)
    known = spread_errors(x.T @ x, 600, None)
    assert known is not None
    encoded, _ = encoder(table, 4, known)
    whole = encoded(rows)
    codes = (whole & 15).astype(np.uint8)
    assert np.array_equal(window_indices(codes, 4, table.size.bit_length() - 1), whole)
    assert np.mean(encoded(rows[10:12]) == whole[10:12]) > 0.9  # products of fewer rows may be rounded otherwise


def test_moments_are_those_of_the_inputs(folder: Path) -> None:
    seen: dict[str, np.ndarray] = {}
    with rsv_format.open_source(folder) as source:
        tensors = {name: tensor.float32() for name, tensor in source.tensors.items()}
        tokens = np.arange(60) % 64
        decoder = Decoder(CONFIG, fetched(tensors), seen.__setitem__, 512)
        seen["model.embed_tokens"] = decoder.run(tensors["model.embed_tokens.weight"][tokens])  # as the head
        names = [*sorted(seen, key=block_of), "lm_head", "model.layers.11.mlp.up_proj"]
        moments = DecoderCalibration(source, tokens).moments(names)
        for name, found in zip(names, moments, strict=True):
            if name not in seen:
                assert found is None
                continue
            assert found is not None
            np.testing.assert_allclose(found, seen[name].T @ seen[name] / 60, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("codebook", ["lloyd-max", "trellis"])
def test_a_file_calibrated_on_a_text(codebook: str, folder: Path, tmp_path: Path) -> None:
    def made(name: str, **options: Any) -> bytes:
        path = tmp_path / name
        rsv_format.quantize(folder, path, bits=3, codebook=codebook, calibration=TEXT, **options)
        assert rsv_format.verify(path) == []
        return path.read_bytes()

    whole = made("a.rsv")
    assert made("b.rsv") == whole and made("d.rsv", feedback=False) != whole
    with rsv_format.open(tmp_path / "a.rsv") as file:
        assert file.metadata["quantizer.feedback"] == "true"
        assert file.metadata["quantizer.calibration"] == "150 tokens" and len(file.layers) == 78
        rsv_format.save(file, tmp_path / "e.rsv")
    assert (tmp_path / "e.rsv").read_bytes() == whole
    with rsv_format.open(tmp_path / "d.rsv") as file:
        assert "quantizer.feedback" not in file.metadata


def test_without_a_text_there_is_nothing_to_go_by(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RsvError) as e:
        rsv_format.quantize(folder, tmp_path / "a.rsv", feedback=True)
    assert e.value.code == "bad_argument" and not (tmp_path / "a.rsv").exists()


def without(name: str) -> Callable[[rsv_format.Source], None]:
    def change(source: rsv_format.Source) -> None:
        source.tensors = {key: tensor for key, tensor in source.tensors.items() if name not in key}

    return change


@pytest.mark.parametrize(
    "change, text, code",
    [(lambda source: source.attachments.clear(), TEXT, "missing_attachment"),
     (lambda source: source.config.update(model_type="other"), TEXT, "unsupported_model"),
     (lambda source: None, "", "bad_argument"),
     (without("embed_tokens"), TEXT, "source_invalid"),
     (without("layers.3.mlp.up_proj"), TEXT, "source_invalid")],
)  # fmt: skip
def test_what_cannot_be_calibrated(
    change: Callable[[rsv_format.Source], None], text: str, code: str, folder: Path, tmp_path: Path
) -> None:
    with rsv_format.open_source(folder) as source:
        change(source)
        with pytest.raises(RsvError) as e:
            rsv_format.quantize(source, tmp_path / "a.rsv", calibration=text, importance="none")
    assert e.value.code == code and not (tmp_path / "a.rsv").exists()


def test_the_command_line(folder: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from rsv_cli.app import app

    def run(text: Path, output: Path) -> Any:
        return CliRunner().invoke(app, ["quantize", str(folder), "-o", str(output), "--calibrate", str(text)])

    text, wrong = tmp_path / "text.txt", tmp_path / "wrong.txt"
    text.write_text(TEXT)
    wrong.write_bytes(b"\xff\xfe")
    assert run(text, tmp_path / "a.rsv").exit_code == 0 and rsv_format.verify(tmp_path / "a.rsv") == []
    for bad in (wrong, tmp_path / "none.txt"):
        result = run(bad, tmp_path / "b.rsv")
        assert result.exit_code == 1 and "Traceback" not in result.output and not (tmp_path / "b.rsv").exists()
    assert run(text, text).exit_code and text.read_text() == TEXT
